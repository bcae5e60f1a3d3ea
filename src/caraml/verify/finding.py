"""A finding of the proof: what is claimed, what is true, what was measured, and whether the two agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rich.table import Table
from rich.text import Text

from caraml.base.format import human, percent
from caraml.metrics.model import Metric

Verdict = Literal["right", "wrong", "note", "not here"]
"""``note``: nothing is known to be wrong with the ruler, but the machine is not as quiet or as known as one would wish."""
_STYLES = {"right": "green", "wrong": "bold red", "note": "yellow", "not here": "dim"}
WIDE = 0.5
"""Share of the truth by which a number may differ at most to be called right: within more than that lies any."""


@dataclass(frozen=True)
class Finding:
    """One line of the proof. Numbers in the unit named; ``None`` where the truth is not a number."""

    claim: str
    truth: str
    measured: str
    verdict: Verdict
    unit: str | None = None
    truth_value: float | None = None
    value: float | None = None
    allowed: float | None = None
    """How far value and truth may be apart: the stated uncertainty of the number, and of the truth where that has one."""


def number(claim: str, truth: float, metric: Metric | None, slack: float = 0.0, of: float | None = None) -> Finding:
    """A published number within its interval and bound of the truth; ``slack`` is the uncertainty of the truth itself, in the same unit.
    One that is a difference is a small part ``of`` a number, by default of the truth: where it may be off by ``WIDE`` of that, whether it
    is right has not been seen.
    """
    if metric is None or metric.value is None:
        reason = (metric.reason if metric else None) or "not measured"
        return Finding(claim, human(truth, metric.unit if metric else "1"), f"nothing: {reason}", "wrong")
    half = 0.0 if metric.low is None or metric.high is None else (metric.high - metric.low) / 2
    allowed = half + (metric.bound or 0.0) + slack
    rounding = 1e-12 * abs(truth)
    verdict: Verdict = "right" if abs(metric.value - truth) <= allowed + rounding else "wrong"
    unit = metric.unit
    measured = f"{_shown(metric.value, unit)} ± {_shown(allowed, unit)}"
    if verdict == "right" and truth and not allowed < WIDE * abs(of or truth):
        verdict, measured = "note", f"{measured}; not decided: a wrong number would lie within that, too"
    return Finding(claim, _shown(truth, unit), measured, verdict, unit, truth, metric.value, allowed)


def fact(claim: str, truth: str, measured: str, holds: bool) -> Finding:
    """Something that is so or not."""
    return Finding(claim, truth, measured, "right" if holds else "wrong")


def undecided(finding: Finding, others: Metric) -> Finding:
    """A wrong number of a window in which others used the CPU tells nothing of the ruler: what took the time is not known. But others make
    no work faster: a rate that is too high is wrong."""
    if finding.verdict != "wrong" or finding.value is None or finding.truth_value is None or others.value is None:
        return finding
    if finding.unit is not None and finding.unit.endswith("/s") and finding.value > finding.truth_value:
        return finding
    measured = f"{finding.measured}; not decided: others used {percent(others.value)} of the CPU time"
    return replace(finding, verdict="note", measured=measured)


def seen_twice(first: list[Finding], second: list[Finding]) -> list[Finding]:
    """What was wrong at first, by a second measurement of the same: a fault of the ruler comes again, what disturbed it does not."""
    again = {finding.claim: finding for finding in second}

    def judged(finding: Finding) -> Finding:
        other = again.get(finding.claim, finding)
        if finding.verdict != "wrong" or other.verdict == "wrong":
            return finding
        return replace(other, verdict="note", measured=f"{other.measured}; at first {finding.measured}")

    return [judged(finding) for finding in first]


def table(findings: list[Finding]) -> Table:
    """The proof for people."""
    shown = Table("claim", "truth", "measured ± allowed", "verdict", box=None, pad_edge=False)
    for finding in findings:
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        shown.add_row(Text(finding.claim), Text(finding.truth), Text(finding.measured), verdict)
    return shown


def _shown(value: float, unit: str) -> str:
    return percent(value) if unit == "1" else human(value, unit, digits=4)
