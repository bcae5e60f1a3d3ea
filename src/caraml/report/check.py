"""What `caraml check` says: a line, a table, JSON, and JUnit's XML."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from caraml.analysis.check import CheckedMetric, CheckedPoint, SuiteCheck
from caraml.base.format import count, printable, significant
from caraml.metrics.model import METRICS, title_of
from caraml.report.comparison import change
from caraml.report.section import Section

_NAMED = 3
"""Points that the line names."""


def verdict_line(check: SuiteCheck) -> str:
    """``worse: 1 of 6 points: gpt b8 5.2 % slower (± 0.9 %)``."""
    verdict, total = check.verdict, len(check.points)
    deciding = [one for one in check.points if one.verdict == verdict]
    if verdict == "same":
        return f"same: {count(total, 'point')}, none is {100 * check.within:g} % or more worse than {check.baseline.name}"
    named = "; ".join(f"{one.label} {_how(one)}".rstrip() for one in deciding[:_NAMED])
    more = f"; and {len(deciding) - _NAMED} more" if len(deciding) > _NAMED else ""
    return f"{verdict}: {len(deciding)} of {count(total, 'point')}: {named}{more}"


def _how(point: CheckedPoint) -> str:
    """By how much a point differs, by the number that decided."""
    one = point.headline
    if point.failed or one is None or one.ratio is None:
        return f"({point.notes[0]})" if point.notes else ""
    rate = METRICS[one.metric].better == "higher"
    words = {(True, True): "slower", (True, False): "faster", (False, True): "more", (False, False): "less"}[rate, one.loss > 0]
    what = "" if words in ("slower", "faster") else f" {title_of(one.metric).lower()}"
    error = f" (± {significant(100 * math.expm1(one.ratio.reach), 2)} %)" if one.ratio.sd else ""
    return f"{significant(100 * abs(one.ratio.value - 1), 2)} % {words}{what}{error}"


def check_sections(check: SuiteCheck) -> list[Section]:
    """The table of all points and what to know about them; what else changed since the baseline."""
    rows = []
    for point in check.points:
        for index, one in enumerate(point.metrics or (None,)):
            label, verdict = (point.label, point.verdict) if index == 0 else ("", "")
            cells = (title_of(one.metric), change(one.ratio), f"{one.runs[0]}, {one.runs[1]}", str(one.nights)) if one else ("–",) * 4
            rows.append((label, *cells, one.verdict if one and len(point.metrics) > 1 else verdict))
    notes = [f"{point.label}: {note}" for point in check.points for note in point.notes]
    title = f"{check.suite} against baseline {check.baseline.name} of {check.baseline.accepted_at[:10]}"
    columns = ("point", "metric", "now against accepted", "runs: accepted, new", "nights", "verdict")
    sections = [Section(title, columns, rows, [*notes, *check.notes])]
    if check.differences:
        found = [(one.name, one.a, one.b, one.why) for one in check.differences]
        sections.append(Section("What else changed since then", ("what", "then", "now", "what it may do"), found))
    return sections


def check_json(check: SuiteCheck) -> str:
    """Everything, for programs. Losses are shares: 0.05 is 5 % worse."""
    found = {
        "schema_version": 1,
        "verdict": check.verdict,
        "exit_code": int(check.exit_code),
        "line": verdict_line(check),
        "suite": check.suite,
        "baseline": check.baseline.name,
        "accepted_at": check.baseline.accepted_at,
        "within": check.within,
        "points": [
            {
                "label": point.label,
                "verdict": point.verdict,
                "keys": sorted(point.keys),
                "metrics": [_metric(one) for one in point.metrics],
                "notes": list(point.notes),
            }
            for point in check.points
        ],
        "differences": [{"name": one.name, "then": one.a, "now": one.b} for one in check.differences],
        "notes": list(check.notes),
    }
    text = printable(json.dumps(found, ensure_ascii=False, allow_nan=False))  # strict readers take no half of a surrogate pair
    return json.dumps(json.loads(text), indent=1)


def _metric(one: CheckedMetric) -> dict[str, Any]:
    ratio = one.ratio
    return {
        "metric": one.metric,
        "unit": one.unit,
        "verdict": one.verdict,
        "loss": None if ratio is None else one.loss,
        "ratio": None if ratio is None else ratio.value,
        "ratio_low": None if ratio is None else ratio.low,
        "ratio_high": None if ratio is None or ratio.high == math.inf else ratio.high,
        "runs": {"accepted": one.runs[0], "new": one.runs[1]},
        "nights": one.nights,
        "reason": one.reason,
    }


def check_junit(check: SuiteCheck, seconds: float, stamp: str) -> bytes:
    """JUnit's XML: a case for each point. Worse is a failure, undecided is skipped.

    Args:
        check: what was found.
        seconds: how long the check took.
        stamp: when it began, ISO 8601 without an offset.
    """
    verdicts = Counter(one.verdict for one in check.points)
    counts = {"tests": len(check.points), "failures": verdicts["worse"], "errors": 0}
    counts["skipped"] = verdicts["undecided"] + verdicts["not judged"]
    attributes = {name: str(number) for name, number in counts.items()}
    root = Element("testsuites", {"name": "caraml check", **attributes, "time": f"{seconds:.3f}"})
    host = _xml(check.baseline.machine.get("host") or check.baseline.machine.get("system", ""))
    heading = {"name": _xml(check.suite), **attributes, "time": f"{seconds:.3f}", "timestamp": stamp, "hostname": host}
    suite = SubElement(root, "testsuite", heading)
    properties = SubElement(suite, "properties")
    for name, value in (("baseline", check.baseline.name), ("accepted_at", check.baseline.accepted_at), ("verdict", check.verdict)):
        SubElement(properties, "property", {"name": name, "value": _xml(value)})
    for point in check.points:
        case = SubElement(suite, "testcase", {"name": _xml(point.label), "classname": _xml(f"caraml.{check.suite}"), "time": "0"})
        numbers = (f"{title_of(one.metric)}: {change(one.ratio)}: {one.verdict}" for one in point.metrics)
        text = _xml("\n".join([*numbers, *point.notes]))
        message = _xml(f"{point.verdict}: {_how(point)}")
        if point.verdict == "worse":
            SubElement(case, "failure", {"message": message, "type": "worse"}).text = text
        elif point.verdict in ("undecided", "not judged"):
            SubElement(case, "skipped", {"message": message})
        if point.verdict != "worse" and text:
            SubElement(case, "system-out").text = text
    indent(root, " ")
    return b'<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="utf-8") + b"\n"


def _xml(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return printable(text, lines=True).replace("\ufffe", "\ufffd").replace("\uffff", "\ufffd")
