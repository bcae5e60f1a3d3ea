"""What `caraml compare`, `advise` and `check` say: sections; and of a check a line, JSON, and JUnit's XML."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from caraml.analysis.advise import Advice, Best, Choice, by_boundary
from caraml.analysis.check import CheckedMetric, CheckedPoint, SuiteCheck
from caraml.analysis.compare import Change, Comparison, Gate
from caraml.analysis.estimate import Estimate, differs
from caraml.analysis.run_variation import INTERVAL
from caraml.analysis.scaling import OTHER_BOUNDARIES
from caraml.base.format import count, printable, significant, some
from caraml.metrics.model import METRICS, title_of
from caraml.report.section import Section, at_most, written

LARGEST = 1e6
"""Per cent, and devices, beyond which a number says no more than that it is large."""
VERDICTS = ("worse", "better", "same", "unknown", "indistinguishable")


def estimated(estimate: Estimate | None, unit: str) -> str:
    """An estimate with its interval, or ``± ?``; ``–`` if unknown."""
    if estimate is None:
        return "–"
    bound = estimate.value * math.expm1(estimate.bound) or None
    # As a rate is written: it may be anything that varies from run to run.
    metric = estimate.metric(unit)
    return written("throughput", metric) + at_most("throughput", metric.model_copy(update={"bound": bound}))


def change(ratio: Estimate | None) -> str:
    """A ratio as the change that it is: ``+3.2 % (+1.1 to +5.4)``."""
    if ratio is None:
        return "–"
    bound = f", ± at most {significant(100 * math.expm1(ratio.bound), 2)} %" if ratio.bound else ""
    if ratio.low is None or ratio.high is None:
        return f"{signed_percent(ratio.value)} ± ? %{bound}"
    return f"{signed_percent(ratio.value)} % ({signed_percent(ratio.low)} to {signed_percent(ratio.high)}){bound}"


def signed_percent(ratio: float) -> str:
    """A ratio as a change, without the sign for per cent."""
    value = 100 * (ratio - 1)
    return f"{value:+.1f}" if abs(value) < 99.95 else f"{value:+.0f}" if value < LARGEST else f"{value:+.1e}"


# -- compare -----------------------------------------------------------------------------------------------------------


def comparison_sections(comparison: Comparison, every: bool = False) -> list[Section]:
    """What differs, then every change; of many pairs only those with a verdict, unless ``every`` is asked for."""
    title = f"A: {comparison.a}   B: {comparison.b}"
    unknown = (f"stated of neither side, so it may differ: {', '.join(comparison.unknown)}",) if comparison.unknown else ()
    sections = [Section("", notes=(title,))]
    if comparison.pairs:
        shared = tuple((one.name, one.a, one.b, one.why) for one in comparison.differences)
        notes = (title, *unknown) if shared else (title, *unknown, "nothing that is recorded")
        sections = [Section("What differs", ("what", "A", "B", "what it may do"), shared, notes)]
    local = [(pair.name, one) for pair in comparison.pairs for one in pair.differences]
    if local:
        found = tuple((name, one.name, one.a, one.b, one.why) for name, one in local[:_MOST])
        notes = (f"and {len(local) - _MOST} more",) if len(local) > _MOST else ()
        sections.append(Section("What differs in single pairs", ("pair", "what", "A", "B", "what it may do"), found, notes))
    everything = every or len(comparison.changes) <= _MOST
    hidden = 0
    for pair in comparison.pairs:
        shown = [one for one in pair.changes if everything or one.verdict in ("better", "worse")]
        hidden += len(pair.changes) - len(shown)
        rows = tuple(_change_cells(one, comparison.margin) for one in shown)
        if rows:
            runs = f"runs of A: {len(pair.keys[0])}, of B: {len(pair.keys[1])}"
            sections.append(Section(f"{pair.name} ({runs})", ("metric", "A", "B", "B against A", "shown from", "verdict"), rows))
    said = tuple(_change_notes(comparison, hidden)) if comparison.pairs else ("no work has a result of its own on both sides",)
    sections.append(Section("Verdict", notes=said))
    if comparison.lost or comparison.unmatched:
        missing = tuple((one.name, one.side, one.reason) for one in (*comparison.lost, *comparison.unmatched))
        sections.append(Section("No result on one side", ("work", "side", "why"), missing))
    return sections


_NAMED = 3
"""Metrics and runs of a published note that are named, and points that the line of a check names."""
_MOST = 40
"""Rows of a terminal table beyond which only those that matter are shown."""


def _change_cells(one: Change, margin: float) -> tuple[str, ...]:
    smallest = "–" if one.smallest is None else f"±{significant(100 * one.smallest, 2)} %" if one.smallest < 10 else "nothing"
    verdict = f"same within {100 * margin:g} %" if one.verdict == "same" else one.verdict
    numbers = (estimated(one.a, one.unit), estimated(one.b, one.unit), change(one.ratio), smallest)
    return (title_of(one.metric), *numbers, verdict)


def _change_notes(comparison: Comparison, hidden: int) -> Iterable[str]:
    changes = [one for _, one in comparison.changes]
    counts = {verdict: sum(one.verdict == verdict for one in changes) for verdict in VERDICTS}
    yield ", ".join(f"{number} {verdict}" for verdict, number in counts.items() if number)
    if hidden:
        yield f"not listed: {count(hidden, 'number')} without a better or worse; --all lists them"
    for reason in dict.fromkeys(one.reason for one in changes if one.reason):
        yield f"{reason}: {sum(one.reason == reason for one in changes)} of {len(changes)} numbers"
    if comparison.shared:
        yield f"not set against themselves: {count(comparison.shared, 'run')} that A and B have in common"
    if comparison.left_out:
        yield f"left out: {count(comparison.left_out, 'run')} that something disturbed, where others of the same work were not"
    for note in comparison.notes:
        of = [some([title_of(metric) for metric in note.metrics], _NAMED), some(note.places, _NAMED, "; ")]
        yield f"{' of '.join(of)}: {note.note}"
    yield f"A and B: {INTERVAL}"
    for metric, sentence in comparison.variation:
        yield f"{title_of(metric)}, B against A: {sentence}"
    yield (
        f'{comparison.tests} tests, corrected together (Holm): if runs vary as said above, any false "worse" is at most 5 % likely. '
        'Intervals are of 95 %, each for itself. "Shown from": the smallest change that these runs show in 9 of 10 comparisons. '
        f'"Same": shown to differ by less than {100 * comparison.margin:g} % (two one-sided tests, 5 % each for itself)'
    )


def gate_lines(gate: Gate, comparison: Comparison, unread: Sequence[str] = ()) -> tuple[list[str], bool]:
    """What ``--fail-if`` found, a line each, and whether the comparison fails: also where records are ``unread``, whatever they hold."""
    what = f"worse by {100 * gate.least:g} % or more" if gate.least else "worse"
    failures = [f"failed: {pair.name}: {title_of(one.metric)} {change(one.ratio)}" for pair, one in gate.failures(comparison)]
    failures += [f"failed: no result in B: {text}" for text in gate.lost(comparison)]
    failures += [f"failed: {reason}" for reason in unread]
    lines = failures or [f"passed: nothing is shown to be {what}"]
    blind = [one for _, one in gate.blind(comparison)]
    if blind:
        finite = [one.smallest for one in blind if one.smallest is not None]
        shown = f", at best {significant(100 * min(finite), 2)} % and more" if finite and gate.least else ""
        numbers = f"{len(blind)} of {len(comparison.changes)} numbers"
        lines.append(f"note: {numbers} could not have shown this with these runs{shown}; measure more repeats")
    return lines, bool(failures)


# -- advise ------------------------------------------------------------------------------------------------------------


def advice_sections(advice: Sequence[Advice]) -> list[Section]:
    """Choices, and what follows from them, for each work."""
    return [section for one in advice for section in _advice(one)]


def _advice(one: Advice) -> Iterable[Section]:
    ranked = sorted(one.choices, key=lambda choice: choice.time.value)
    parts = by_boundary(one.choices)
    rows = tuple(_choice(choice, choice in one.front, len(parts) > 1) for choice in ranked)
    columns = ("choice", "runs", "rate", "energy", "bound by", "Pareto")
    yield Section(f"{one.name} on {one.device}", columns, rows, (INTERVAL, f"what tells choices apart: {one.variation}"))
    notes = []
    if one.rests_on:
        notes.append(f"rests on flagged runs, and may change when they are measured again: {flagged(one.rests_on)}")
    if one.left_out:
        notes.append(f"left out, because something disturbed every run: {flagged(one.left_out)}; measured again they count")
    notes += [one.unstated] if one.unstated else []
    notes += [_best(best, one) for best in one.best]
    if len(parts) > 1:
        listed = "; ".join(f"{part[0].boundary}: {', '.join(choice.name for choice in part)}" for part in parts)
        notes.append(f"{OTHER_BOUNDARIES} are not compared: {listed}")
    others = any(best.goal == "energy" for best in one.best)
    notes += [one.no_energy if others else f"no advice for energy: {one.no_energy}"] if one.no_energy else []
    for found in one.saturation:
        where = f"batch {found.batch}" if found.low == found.high else f"batch {found.batch} (between {found.low} and {found.high})"
        growing = "; the rate still grew at the largest batch" if found.batch == found.largest else ""
        growing = growing if found.falls is None else f"; with batch {found.falls} it is below that again"
        notes.append(
            f"{found.name}: the rate is within {100 * found.within:g} % of the best (batch {found.best_batch}) from {where} on{growing}"
        )
    for step in one.steps:
        cost = f"{change(step.energy)} energy" if step.energy is not None else f"{change(step.device_time)} device time"
        told = "" if differs(step.time) else "; whether it is faster these runs cannot tell"
        notes.append(f"{step.name}: beyond {count(step.before, 'device')}, {step.after} cost {cost} for {change(step.time)} time{told}")
    notes += [f"{name}: {reason}" for name, reason in one.failed]
    fastest = one.best[0].choice if one.best else one.choices[0]
    notes.append(f"{fastest.name}: {fastest.bottleneck.sentence}")
    yield Section("", (), (), tuple(notes))


def _choice(choice: Choice, on_front: bool, apart: bool) -> tuple[str, ...]:
    """``apart``: energies with their boundary, as it differs."""
    boundary = f" ({choice.boundary})" if apart and choice.boundary else ""
    numbers = written("throughput", choice.rate), written("energy_per_item", choice.joules) + boundary
    return choice.name, str(len(choice.keys)), *numbers, choice.bottleneck.by or "–", "yes" if on_front else ""


def flagged(found: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    """Runs with their flags."""
    return "; ".join(f"{name}: {', '.join(flags)}" for name, flags in found)


def _best(best: Best, advice: Advice) -> str:
    goal = f"{best.goal} ({best.choice.boundary})" if best.goal != "time" and len(by_boundary(advice.choices)) > 1 else best.goal
    if best.ties:
        names = [best.choice.name, *(choice.name for choice in best.ties)]
        ratios = [one.over(best.cost) for choice in best.ties if (one := choice.cost(best.goal)) is not None]
        open_to_chance = any(abs(math.log(ratio.value)) >= ratio.bound for ratio in ratios)
        what = "more repeats may tell them apart" if open_to_chance else "each may be off by as much as they differ, also if repeated"
        return f"best for {goal}: indistinguishable: {some(names, _TIES)}; {what}"
    lead = "" if best.lead is None else f"; the next costs {change(best.lead)}"
    return f"best for {goal}: {best.choice.name}{lead}{_picked(best, advice)}"


def _picked(best: Best, advice: Advice) -> str:
    """The best of many is also the luckiest: what to expect of it, by an interval that holds for all choices at once."""
    if best.goal != "time":
        return ""
    rate, alone = best.choice.time.inverse().for_all_of(len(advice.choices)), best.choice.rate
    picked = f"; picked as the best of {len(advice.choices)}:"
    if alone is not None and alone.low is not None and rate.low is not None and alone.low < rate.low:  # for what sessions do to all
        return f"{picked} {written('throughput', alone)} by its own runs"
    return f"{picked} {estimated(rate, f'{advice.item}/s')} by an interval that holds for all at once"


_TIES = 6


# -- check --------------------------------------------------------------------------------------------------------------


def verdict_line(check: SuiteCheck) -> str:
    """``worse: 1 of 6 points: gpt b8 5.2 % slower (± 0.9 %)``."""
    verdict, total = check.verdict, len(check.points)
    deciding = [one for one in check.points if one.verdict == verdict]
    if verdict == "same":
        return f"same: {count(total, 'point')}, none is {100 * check.within:g} % or more worse than {check.baseline.name}"
    named = some([f"{one.label} {_how(one)}".rstrip() for one in deciding], _NAMED, "; ")
    return f"{verdict}: {len(deciding)} of {count(total, 'point')}: {named}"


def _how(point: CheckedPoint) -> str:
    """By how much a point differs, by the number that decided."""
    one = point.headline
    if point.failed or one is None or one.ratio is None:
        return f"({point.notes[0]})" if point.notes else ""
    rate = METRICS[one.metric].better == "higher"
    words = {(True, True): "slower", (True, False): "faster", (False, True): "more", (False, False): "less"}[rate, one.loss > 0]
    what = "" if words in ("slower", "faster") else f" {title_of(one.metric).lower()}"
    error = f" (± {significant(100 * one.ratio.value * math.sinh(one.ratio.reach), 2)} %)" if one.ratio.sd else ""
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
                "metrics": [_metric_json(one) for one in point.metrics],
                "notes": list(point.notes),
            }
            for point in check.points
        ],
        "differences": [{"name": one.name, "then": one.a, "now": one.b} for one in check.differences],
        "notes": list(check.notes),
    }
    text = printable(json.dumps(found, ensure_ascii=False, allow_nan=False))  # strict readers take no half of a surrogate pair
    return json.dumps(json.loads(text), indent=1)


def _metric_json(one: CheckedMetric) -> dict[str, Any]:
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
