"""A finding: what is claimed, what is true, what was measured, and whether the two agree."""

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


def number(claim: str, truth: float, metric: Metric | None, slack: float = 0.0) -> Finding:
    """A published number within its interval and bound of the truth; ``slack`` is the uncertainty of the truth itself, in the same unit."""
    if metric is None or metric.value is None:
        reason = (metric.reason if metric else None) or "not measured"
        return Finding(claim, human(truth, metric.unit if metric else "1"), f"nothing: {reason}", "wrong")
    half = 0.0 if metric.low is None or metric.high is None else (metric.high - metric.low) / 2
    allowed = half + (metric.bound or 0.0) + slack
    rounding = 1e-12 * abs(truth)
    verdict: Verdict = "right" if abs(metric.value - truth) <= allowed + rounding else "wrong"
    unit = metric.unit
    return Finding(
        claim, _shown(truth, unit), f"{_shown(metric.value, unit)} ± {_shown(allowed, unit)}", verdict, unit, truth, metric.value, allowed
    )


def fact(claim: str, truth: str, measured: str, holds: bool) -> Finding:
    """Something that is so or not."""
    return Finding(claim, truth, measured, "right" if holds else "wrong")


def undecided(finding: Finding, others: Metric) -> Finding:
    """A wrong number of a window in which others used the CPU tells nothing of the ruler: what took the time is not known."""
    if finding.verdict != "wrong" or finding.value is None or others.value is None:
        return finding
    return replace(
        finding, verdict="note", measured=f"{finding.measured}; not decided: others used {percent(others.value)} of the CPU time"
    )


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
