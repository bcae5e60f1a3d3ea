"""Is B different from A? First what differs in what was run, then every metric with its change, interval and verdict.

Work is paired by everything that decides it; what is one value in all of A and another in all of B (another machine, driver, precision) is
what is being compared. A change is the ratio of the geometric means of B's and A's runs; its error is the run-to-run variation of
:mod:`caraml.analysis.run_variation`, and what the sensors of both sides may be off by is ruled out besides.

Tests are corrected for their number by Holm's method: a false "worse" *anywhere* shall be rare, because each one stops somebody's work.
(Methods that bound the share of false findings, such as Benjamini and Hochberg's, allow more of them the more true ones there are.)
Holm's holds for dependent tests, and metrics of one run are. Of the 5 % that all false "worse" of a comparison may have together, half
belongs to the headline throughput, a quarter to energy, a quarter to everything else, so that a curious reader's further metrics do not
blunt the one that decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from caraml.analysis.estimate import Estimate, smallest_change, values
from caraml.analysis.grouping import Difference, axes_of, contrasts, counting, differences, grouped, names, run_of, valid, why_not, without
from caraml.analysis.run_variation import Means, ratios
from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.base.stats import holm
from caraml.metrics.model import METRICS, Direction, definition_of, own_names, see_known
from caraml.reference import PublishedNote, Side, notes_of
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED

Verdict = Literal["better", "worse", "same", "indistinguishable", "unknown"]
ALPHA = 0.05
"""Probability of any false "worse" in a whole comparison, and of any false "better", if runs vary as estimated."""
FAMILIES = {"throughput": 0.05, "energy": 0.025, "others": 0.025}
"""Two-sided error of each family of tests; half of their sum is ``ALPHA``."""
MARGIN = 0.01
"""Relative change that counts as none unless the user says otherwise."""

USUAL = ("throughput", "step_time_median", "step_time_p95", "first_step_time", "energy_per_item", "peak_memory", "loss_last")
"""What is compared unless asked otherwise, besides own metrics of a known direction: no two of them are the same number in other units,
which would only cost power."""

UNDIRECTED = {"neither": "neither direction is better", "unknown": "direction unknown: nobody said which is better"}
"""Why there is a difference of two numbers and no verdict, by the direction of their metric."""


def loss_of(ratio: Estimate | None, better: Direction) -> float:
    """How much worse a ratio is than 1: 0.05 for 5 % less of what should be high, or 5 % more of what should be low; 0 of none."""
    if ratio is None:
        return 0.0
    return 1 - ratio.value if better == "higher" else ratio.value - 1


@dataclass(frozen=True)
class Change:
    """One metric of one pair."""

    metric: str
    unit: str
    better: Direction
    a: Estimate | None
    b: Estimate | None
    """``None`` for a side whose runs do not have the metric."""
    ratio: Estimate | None
    """B over A, with its 95 % interval (of this comparison alone), and what sensors may be off by."""
    runs: tuple[int, int]
    """Runs of A and B behind it."""
    p: float | None
    """Two-sided probability of a change at least as large by chance, before the correction for many comparisons."""
    adjusted: float | None
    """The same after it: a verdict needs less than ``ALPHA``."""
    smallest: float | None
    """Smallest relative change that these runs show in 9 of 10 comparisons, after the correction; ``None`` where there is no error."""
    verdict: Verdict
    reason: str | None
    """Why there is no verdict, or what to know about it."""

    @property
    def harm(self) -> float:
        """How much B is worse, as a share of A."""
        return loss_of(self.ratio, self.better)


@dataclass(frozen=True)
class Pair:
    """The runs of A and of B that did the same work."""

    name: str
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    """Keys of the records of A and of B."""
    differences: tuple[Difference, ...]
    """What differs in this pair beyond what differs everywhere."""
    changes: tuple[Change, ...]


_ELSEWHERE = "published, not run"
"""Of work that nobody here has run."""


@dataclass(frozen=True)
class Lost:
    """Work that has a result on one side only."""

    name: str
    side: Literal["A", "B"]
    """The side without a result."""
    reason: str


@dataclass(frozen=True)
class Comparison:
    """Everything about two sides."""

    a: str
    b: str
    """What the user called the sides."""
    differences: tuple[Difference, ...]
    """What differs in every pair."""
    unknown: tuple[str, ...]
    """What nobody stated of either side, and may differ: the system of tables that name none."""
    pairs: tuple[Pair, ...]
    lost: tuple[Lost, ...]
    """Work that was tried on both sides and gave a result on one only."""
    unmatched: tuple[Lost, ...]
    """Work that was not tried on one side."""
    left_out: int
    """Runs that something disturbed, where others of the same work were not."""
    tests: int
    """Number of comparisons that the correction is for."""
    margin: float
    """Relative change below which numbers are called the same."""
    variation: tuple[tuple[str, str], ...]
    """For each metric, where the run-to-run variation comes from, as a sentence."""
    notes: tuple[PublishedNote, ...] = ()
    """What is to be said of published numbers."""
    shared: int = 0
    """Runs with a result that both sides have, which are not compared with themselves."""

    @property
    def changes(self) -> list[tuple[Pair, Change]]:
        """Every change with its pair."""
        return [(pair, change) for pair in self.pairs for change in pair.changes]


@dataclass(frozen=True)
class _Matched:
    name: str
    a: list[Record]
    b: list[Record]
    """The runs that count."""
    left_out: int
    """How many do not, as something disturbed them and not others."""


def compare(a: Side, b: Side, metrics: Sequence[str] = (), margin: float = MARGIN) -> Comparison:
    """Compare two sides; ``metrics`` instead of the usual ones, "the same" within ``margin``.

    Raises ``InputError`` for an unknown metric, or where nothing pairs.
    """
    for metric in metrics:
        see_known(metric, (*a.records, *b.records))
    matched, lost, unmatched, shared = _match(a, b)
    lost_in_b = any(one.side == "B" for one in lost)
    if not matched and shared and not lost_in_b:
        what = f"{a.name!r} and {b.name!r} are the same runs{', where they are of the same work' if unmatched else ''}"
        raise InputError(what, "caraml run SUITE --again measures anew; caraml compare SUITE sets its last two rounds against each other")
    if not matched and not lost_in_b:
        raise InputError(_nothing(a, b, lost, unmatched), "compare campaigns of one suite, or two points")
    found: list[list[Change]] = [[] for _ in matched]
    sentences = []
    for metric in metrics or _usual(matched):
        unfit = [_unfit(pair, metric) for pair in matched]
        sides = [([], []) if why else (values(pair.a, metric), values(pair.b, metric)) for pair, why in zip(matched, unfit, strict=True)]
        if not any(first or second for first, second in sides) and not any(unfit):
            continue
        means, sentence = ratios(sides, metric)
        sentences.append((metric, sentence))
        for index, (pair, (first, second)) in enumerate(zip(matched, sides, strict=True)):
            if first or second or unfit[index]:
                found[index].append(_change(metric, pair, (len(first), len(second)), means[index]))
    everywhere = [differences(pair.a, pair.b) for pair in matched]
    common = [one for one in (everywhere or [[]])[0] if all(one in other for other in everywhere)]
    pairs = [
        Pair(
            pair.name,
            (tuple(record.key for record in pair.a), tuple(record.key for record in pair.b)),
            tuple(one for one in differing if one not in common),
            changes,
        )
        for pair, differing, changes in zip(matched, everywhere, _judged(found, margin), strict=True)
    ]
    tests = sum(change.p is not None for pair in pairs for change in pair.changes)
    ours, theirs = (
        dict.fromkeys(name for records in side for one in records for name in one.unstated)
        for side in ([pair.a for pair in matched], [pair.b for pair in matched])
    )
    unknown = tuple(name for name in ours if name in theirs)
    missing, dropped = (tuple(lost), tuple(unmatched)), sum(pair.left_out for pair in matched)
    told = tuple(sentences), notes_of((one for pair in matched for one in (*pair.a, *pair.b)), dict(sentences))
    return Comparison(a.name, b.name, tuple(common), unknown, tuple(pairs), *missing, dropped, tests, margin, *told, shared)


def _usual(matched: Sequence[_Matched]) -> Sequence[str]:
    """The usual metrics, and those of a program or plug-in of which one direction is better; where one side has no throughput, as in most
    published tables, whatever both have that can be better or worse; of published ones alone also their times, which are of whole runs."""

    def having(metric: str) -> bool:
        return any(values(pair.a, metric) and values(pair.b, metric) for pair in matched)

    records = [record for pair in matched for record in (*pair.a, *pair.b)]
    judged = ("higher", "lower")
    own = [one for one in own_names(records) if having(one) and any(definition_of(one, (*p.a, *p.b)).better in judged for p in matched)]
    if having("throughput"):
        only_nodes = having("node_energy_per_item") and not having("energy_per_item")
        return [*(name if name != "energy_per_item" or not only_nodes else "node_energy_per_item" for name in USUAL), *own]
    whole_runs = all("published" in record.environment for record in records)
    return [*(name for name, one in METRICS.items() if (whole_runs or one.better != "neither") and having(name)), *own] or USUAL


def _match(a: Side, b: Side) -> tuple[list[_Matched], list[Lost], list[Lost], int]:
    """Pairs of equal work with results, work that lost its result, work without a partner, and how many results both sides have."""
    contrasted, optional = contrasts(a.records, b.records)

    def work(record: Record) -> object:
        found = axes_of(record)
        return without(found, contrasted), frozenset(optional & found.keys())

    groups = grouped({id(record): record for record in (*a.records, *b.records)}.values(), work)
    ours, theirs = set(map(id, a.records)), set(map(id, b.records))
    matched: list[_Matched] = []
    lost: list[Lost] = []
    unmatched: list[Lost] = []
    shared = 0
    for name, group in zip(names(groups), groups, strict=True):
        sides = [[record for record in group if id(record) in known] for known in (ours, theirs)]
        results = [valid(side) for side in sides]
        both = set(map(run_of, results[0])) & set(map(run_of, results[1]))
        shared += len(both)
        good = _apart(results, both)
        if both and not all(good):
            continue
        if all(good):
            ours_counting, theirs_counting = map(counting, good)
            dropped = sum(map(len, good)) - len(ours_counting) - len(theirs_counting)
            matched.append(_Matched(name, ours_counting, theirs_counting, dropped))
        for letter, side, own, others in (("A", sides[0], good[0], good[1]), ("B", sides[1], good[1], good[0])):
            if others and not side:
                published = all("published" in record.environment for record in others)
                unmatched.append(Lost(name, letter, _ELSEWHERE if published else "not run"))  # type: ignore[arg-type]
            elif others and not own:
                lost.append(Lost(name, letter, why_not(side[0])))  # type: ignore[arg-type]
    return matched, lost, unmatched, shared


def _apart(sides: list[list[Record]], both: set[object]) -> list[list[Record]]:
    """Two sides of one work of which no run is on both: set against itself it shows nothing. ``both``: runs that would be; they stay on a
    side that has no others while the other has."""
    own = [[record for record in side if run_of(record) not in both] for side in sides]
    return [mine or (side if others else []) for mine, side, others in zip(own, sides, reversed(own), strict=True)]


def _nothing(a: Side, b: Side, lost: Sequence[Lost], unmatched: Sequence[Lost]) -> str:
    if lost:
        return f"no work has a result on both sides: {lost[0].name} of {lost[0].side} is {lost[0].reason}"
    if not unmatched:
        return f"neither {a.name} nor {b.name} has a result to compare"
    only = {side: [one.name for one in unmatched if one.side != side] for side in ("A", "B")}
    listed = "; ".join(f"{side} has {', '.join(found[:3])}" for side, found in only.items() if found)
    return f"{a.name} and {b.name} have no work in common: {listed}"


def _change(metric: str, pair: _Matched, runs: tuple[int, int], means: Means) -> Change:
    """One metric of one pair, before the correction."""
    a, b, ratio = means
    unit = next((found.unit for record in (*pair.a, *pair.b) if (found := record.metrics.get(metric))), "")
    reason = _incomparable(metric, pair, a, b)
    if reason is not None:
        ratio = None
    p = ratio.p_beyond() if ratio is not None and ratio.sd else None
    better = definition_of(metric, (*pair.a, *pair.b)).better
    if ratio is not None:
        one_run = "one run has no error for this number: measure repeats (`repeats = 3` in the suite)"
        reason = UNDIRECTED.get(better) or (one_run if p is None else None)
    return Change(metric, unit, better, a, b, ratio, runs, p, None, None, "unknown", reason)


def _incomparable(metric: str, pair: _Matched, a: Estimate | None, b: Estimate | None) -> str | None:
    """Why the two numbers cannot be set against each other, or ``None`` if they can."""
    if (why := _unfit(pair, metric)) is not None:
        return why
    for letter, side, records in (("A", a, pair.a), ("B", b, pair.b)):
        if side is None:
            found = records[0].metrics.get(metric)
            return f"{letter} has none: {(found.reason if found else None) or 'not measured'}"
    everyone = (*pair.a, *pair.b)
    methods = {"" if "published" in one.environment else str(one.method_version) for one in everyone}  # theirs are left to the reader
    for what, kinds in (("of different energy boundaries", _scopes(everyone, metric)), ("measured by different methods", sorted(methods))):
        if len(kinds) > 1:
            return f"{what}: {', '.join(kinds)}"
    return None


def _scopes(records: Iterable[Record], metric: str) -> list[str]:
    """Energy boundaries of a metric's numbers."""
    return sorted({record.metrics[metric].scope or NOT_STATED for record in records if record.value(metric) is not None})


def _unfit(pair: _Matched, metric: str) -> str | None:
    """Why no means of a metric's numbers are set against each other, or ``None``: these have one unit and are above zero, all of them."""
    a, b = (
        [(one.unit, one.value) for record in side if (one := record.metrics.get(metric)) and one.value is not None]
        for side in (pair.a, pair.b)
    )
    units = sorted({unit for unit, _ in (*a, *b)})
    if len(units) > 1:
        return f"measured in different units: {', '.join(units)}"
    for records in (pair.a, pair.b):  # a mean of several boundaries is of nothing; one of each side is shown, and not judged
        if len(scopes := _scopes(records, metric)) > 1:
            return f"of different energy boundaries: {', '.join(scopes)}"
    for letter, side in (("A", a), ("B", b)):
        if low := sum(value <= 0 for _, value in side):
            return f"{letter} is not above zero in {low} of {count(len(side), 'run')}, so it has no ratio"
    return None


def family(metric: str) -> str:
    """The family of tests that a metric is corrected with."""
    if metric == "throughput":
        return metric
    return "energy" if metric in METRICS and re.search("^J|/Wh$", METRICS[metric].unit) else "others"


def _judged(found: Sequence[Sequence[Change]], margin: float) -> list[tuple[Change, ...]]:
    """The changes with the correction for their number, and verdicts."""
    judged = [list(changes) for changes in found]
    for name, alpha in FAMILIES.items():
        places = [
            (row, column)
            for row, changes in enumerate(judged)
            for column, change in enumerate(changes)
            if change.p is not None and family(change.metric) == name
        ]
        adjusted = holm([judged[row][column].p or 0.0 for row, column in places])
        for (row, column), p in zip(places, adjusted, strict=True):
            adjusted_p = min(p * ALPHA / alpha, 1.0)
            judged[row][column] = _verdict(judged[row][column], adjusted_p, alpha / len(places), len(places), margin)
    return [tuple(changes) for changes in judged]


def _verdict(change: Change, adjusted: float, alpha: float, tests: int, margin: float) -> Change:
    """``alpha``: the error that this test has to itself; ``tests``: how many its family has."""
    assert change.ratio is not None and change.ratio.sd is not None and change.p is not None
    smallest = smallest_change(change.ratio.sd, change.ratio.dof, alpha, change.ratio.bound)
    verdict: Verdict = "indistinguishable"
    reason = change.reason
    if change.better in UNDIRECTED:
        verdict = "unknown"
    elif adjusted < ALPHA:
        verdict = "worse" if change.harm > 0 else "better"
    elif change.ratio.is_within(margin):
        verdict = "same"
    elif change.p < ALPHA:
        reason = f"beyond its own interval, as one of {tests} comparisons may be by chance"
    return replace(change, adjusted=adjusted, smallest=smallest, verdict=verdict, reason=reason)


@dataclass(frozen=True)
class Gate:
    """Fails on every metric that is proven worse by at least ``least``, and on work that lost its result."""

    least: float
    """As a share: 0.05 for 5 %."""

    def failures(self, comparison: Comparison) -> list[tuple[Pair, Change]]:
        """Changes that fail the comparison."""
        return [(pair, change) for pair, change in comparison.changes if change.verdict == "worse" and change.harm >= self.least]

    def lost(self, comparison: Comparison) -> list[str]:
        """Work with a result in A and none in B, which may not have run it: worse than any number."""
        missing = [one for one in (*comparison.lost, *comparison.unmatched) if one.side == "B" and one.reason != _ELSEWHERE]
        return [f"{one.name}: {one.reason}" for one in missing]

    def blind(self, comparison: Comparison) -> list[tuple[Pair, Change]]:
        """Changes without a verdict that could hide what the gate looks for: these runs could not have shown it."""
        open_verdicts = ("indistinguishable", "unknown") if self.least >= comparison.margin else ("indistinguishable", "same", "unknown")
        undecided = [(pair, change) for pair, change in comparison.changes if change.verdict in open_verdicts]
        return [(pair, change) for pair, change in undecided if change.smallest is None or change.smallest > max(self.least, 1e-9)]


def parse_gate(text: str) -> Gate:
    """``worse`` or ``worse:5%``. Raises ``InputError`` for anything else."""
    match = re.fullmatch(r"worse(?::(\d+(?:\.\d+)?)\s*%)?", text.strip())
    if match is None:
        raise InputError(f"--fail-if {text!r}: expected `worse` or `worse:PERCENT%`", "--fail-if worse:5%")
    return Gate(float(match[1] or 0) / 100)
