"""Is it still as fast? A verdict for each point against an accepted baseline, and one for all.

What is tested are the ratios of :mod:`caraml.analysis.run_variation`, with their run-to-run variation. Two of each number: the runs of
this check over the accepted ones, and those of the last ``NIGHTS`` nights together, which show a small loss that lasts. A loss of the last
nights counts only while this check shows at least half of it, so that what was mended is not reported for days. All earlier nights also
tell how much runs vary, those before the last ``NIGHTS`` apart from these, so that a loss that begins in between does not count as noise.

"Worse" has to be significant after Holm's correction for all these tests, of which the rates and the energies have half of ``ALPHA``
each, so that fewer than one healthy night in 200 have one; and the loss must not be shown to be smaller than the tolerance (the lower of
two one-sided tests, Schuirmann). "Same" is a loss of the tolerance that is excluded, and what shows neither is undecided. What may be
worse, by the more lenient ``SCREEN``, is measured once more: twice the runs show more, and what passes does not stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from caraml import METHOD_VERSION
from caraml.analysis.baseline import SEVERAL, AcceptedPoint, Baseline, WorkRuns, surroundings
from caraml.analysis.compare import family, loss_of
from caraml.analysis.estimate import Estimate, Value, smallest_change, time_of, values
from caraml.analysis.grouping import Difference, compare_facts, valid, why_not
from caraml.analysis.observations import sessions_of
from caraml.analysis.run_variation import ratios
from caraml.base.errors import ExitCode
from caraml.base.stats import holm
from caraml.metrics.model import METRICS, title_of
from caraml.results.record import Record

CheckVerdict: TypeAlias = Literal["worse", "undecided", "better", "same", "not judged"]
"""The worst first."""
FlagPolicy: TypeAlias = Literal["strict", "warn", "ignore"]

ALPHA = 0.01
"""Probability of any false "worse" or "better" each time that a suite is judged; half of it is false "worse"."""
SCREEN = 0.05
"""The same where what is found is measured again before it counts."""
EXCLUDED = 0.05
"""Probability with which a loss of the tolerance is called excluded of one number."""
WITHIN = 0.02
NIGHTS = 5
_NO_MATTER = {"disturbed_probe", "limit_too_low"}
"""Flags that speak of the device's limits, on which no number that is judged depends."""


@dataclass(frozen=True)
class CheckedMetric:
    """One number of a point against the baseline."""

    metric: str
    unit: str
    ratio: Estimate | None
    """New over accepted: of this check, or of the last nights together where these decided."""
    runs: tuple[int, int]
    """Accepted runs, and new ones behind the ratio."""
    nights: int
    """Nights that the new runs are of."""
    verdict: CheckVerdict
    reason: str | None = None

    now: Estimate | None = None
    """The ratio of this check alone."""

    @property
    def loss(self) -> float:
        """How much worse it is, as a share: of the rate what is missing, of times and energies what they have more."""
        return loss_of(self.ratio, METRICS[self.metric].better)


@dataclass(frozen=True)
class CheckedPoint:
    label: str
    verdict: CheckVerdict
    metrics: tuple[CheckedMetric, ...]
    notes: tuple[str, ...]
    keys: frozenset[str]
    failed: bool = False
    """Whether it has no result."""

    @property
    def headline(self) -> CheckedMetric | None:
        """The number that decided."""
        return next((one for one in self.metrics if one.verdict == self.verdict), next(iter(self.metrics), None))


def _worst(found: Iterable[CheckVerdict]) -> CheckVerdict:
    return min(found, key=get_args(CheckVerdict).index, default="undecided")


@dataclass(frozen=True)
class SuiteCheck:
    """All points of a suite against a baseline."""

    suite: str
    baseline: Baseline
    within: float
    points: tuple[CheckedPoint, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> CheckVerdict:
        """The worst of the points'; undecided where none is judged."""
        found = _worst(one.verdict for one in self.points)
        return found if found != "not judged" else "undecided"

    @property
    def exit_code(self) -> ExitCode:
        return {"worse": ExitCode.WORSE, "undecided": ExitCode.UNDECIDED}.get(self.verdict, ExitCode.OK)


def settle(
    works: Sequence[WorkRuns],
    judge: Callable[[Sequence[WorkRuns], float], Sequence[CheckedPoint]],
    measure: Callable[[frozenset[str]], Sequence[Record]],
    retries: int,
) -> Sequence[CheckedPoint]:
    """Judge, and measure again what is undecided, at most ``retries`` times, and what may be worse, once; without ``retries`` nothing.

    New runs of what was undecided, flagged or without a result join the others. What may be worse, by ``SCREEN``, is so if all its runs
    show it by ``ALPHA`` and the new ones by themselves at least half of the loss; otherwise they are judged alone, because something
    passing disturbed the first. What has no result is tried again once, if anything has one: else the machine is at fault, and every point
    may take all its time to fail.
    """
    if not retries:
        return judge(works, ALPHA)
    found = judge(works, SCREEN)
    confirmed: dict[int, CheckedPoint] = {}
    for left in range(retries, -1, -1):
        asked = ("worse", "undecided") if left else ("worse",)
        doubtful = {i: one for i, one in enumerate(found) if one.verdict in asked and i not in confirmed}
        if not doubtful or all(one.failed for one in found):
            break
        records = measure(frozenset().union(*(works[index].keys for index in doubtful)))
        new = {index: [record for record in records if record.key in works[index].keys] for index in doubtful}
        for index in doubtful:
            works[index].newest = [*works[index].newest, *new[index]]
        together = judge(works, ALPHA)
        for index, one in doubtful.items():
            if one.verdict == "worse" and not one.failed:
                works[index].newest = new[index]
        found = judge(works, SCREEN)
        for index, one in doubtful.items():
            if one.verdict == together[index].verdict == "worse" and _again(one, found[index]):
                confirmed[index] = replace(together[index], notes=(*together[index].notes, "found again when it was measured again"))
    return [confirmed.get(index, one) for index, one in enumerate(judge(works, ALPHA))]


def _again(before: CheckedPoint, after: CheckedPoint) -> bool:
    """Whether new runs show at least half of a loss that was found before, or have no result either."""
    if before.failed:
        return after.failed
    first = before.headline
    second = next((one for one in after.metrics if first is not None and one.metric == first.metric), None)
    return first is not None and second is not None and loss_of(second.now, METRICS[second.metric].better) >= first.loss / 2


def judged(
    works: Sequence[WorkRuns], alpha: float = ALPHA, *, flags: FlagPolicy = "strict", within: float = WITHIN, nights: int = NIGHTS
) -> list[CheckedPoint]:
    """A verdict for every piece of work; ``alpha`` as ``ALPHA``."""
    usable = [_usable(work, flags) for work in works]
    found: list[list[CheckedMetric]] = [[] for _ in works]
    places = [(index, metric) for index, work in enumerate(works) if usable[index] for metric in _judged_metrics(work.accepted)]
    families = [[one for one in places if (family(one[1]) == "energy") == energy] for energy in (False, True)]
    for some in families:
        runs = [_runs_of(usable[index], works[index], metric, flags, nights) for index, metric in some]
        each = alpha / (1 + all(families))
        for (index, _), one in zip(some, judge_numbers([metric for _, metric in some], runs, each, within), strict=True):
            found[index].append(_with_unit(one, works[index], usable[index]))
    return [_point(work, good, numbers, flags) for work, good, numbers in zip(works, usable, found, strict=True)]


Runs: TypeAlias = tuple[Sequence[Value], Sequence[Value], Sequence[Value], Sequence[Value]]
"""Of one number of one point: the accepted ones, those of this check, of the last nights before it, and of all before those."""


def judge_numbers(metrics: Sequence[str], runs: Sequence[Runs], alpha: float, within: float) -> list[CheckedMetric]:
    """Verdicts on one family of numbers, which have ``alpha`` together: of each its metric and its runs."""
    found: list[list[Estimate | None]] = [[None, None] for _ in runs]
    for metric in dict.fromkeys(metrics):
        places = [index for index, one in enumerate(metrics) if one == metric]
        some = [runs[index] for index in places]
        # Runs of other nights tell how much runs vary, whatever their mean: a loss that begins in the last nights adds nothing to that.
        last, before = ([(one[which], ()) for one in some if len(one[which]) > 1] for which in (2, 3))
        alone = ratios([*((accepted, new) for accepted, new, *_ in some), *last, *before], metric)[0]
        history = any(earlier for _, _, earlier, _ in some)
        lately = ratios([*((accepted, (*earlier, *new)) for accepted, new, earlier, _ in some), *before], metric)[0] if history else alone
        for place, index in enumerate(places):
            found[index] = [alone[place][2], lately[place][2] if runs[index][2] else None]
    tests = [(index, which) for index, pair in enumerate(found) for which in (0, 1) if pair[which] is not None]
    estimates = [one for pair in found for one in pair if one is not None]
    adjusted = dict(zip(tests, holm([one.p_beyond() if one.sd else 1.0 for one in estimates]), strict=True))
    shown = {test for test, p in adjusted.items() if p < alpha}
    each = alpha / max(len(tests), 1)
    return [
        _Number(metric, some, now, lately, (index, 0) in shown, (index, 1) in shown, within, each).judged()
        for index, (metric, some, (now, lately)) in enumerate(zip(metrics, runs, found, strict=True))
    ]


@dataclass(frozen=True)
class _Number:
    """One number with what was tested."""

    metric: str
    runs: Runs
    now: Estimate | None
    """By this check alone."""
    lately: Estimate | None
    """By the last nights together; ``None`` without any."""
    now_shown: bool
    lately_shown: bool
    """Whether the change is significant."""
    within: float
    alpha: float
    """The error that this test has to itself."""

    def judged(self) -> CheckedMetric:
        now, lately = self.now, self.lately
        if now is None or now.sd is None:
            return self._said(now, "undecided", "not measured" if now is None else "one run has no error: measure repeats")
        lasts = lately is not None and self.lately_shown and self._harm(now) >= self._harm(lately) / 2 > 0
        for one, shown in ((now, self.now_shown), (lately, lasts)):
            if one is not None and shown and not self._excluded(one):
                return self._said(one, "worse" if self._harm(one) > 0 else "better")
        for one, shown in ((now, self.now_shown), (lately, self.lately_shown)):
            if one is not None and self._excluded(one) and self._harm(now) < self._least:
                return self._said(one, "better" if shown and self._harm(one) < 0 else "same")
        if now.bound >= self._least:
            reason = f"the sensors may be off by ±{math.expm1(now.bound):.1%}, more than the tolerance"
            return self._said(now, "not judged", reason)
        smallest = smallest_change(now.sd, now.dof, self.alpha, now.bound)
        words = f"these runs show changes from {smallest:.1%} on" if smallest < 1 else "these runs vary too much to show anything"
        return self._said(now, "undecided", f"a loss of {self.within:.1%} is not excluded; {words}")

    @property
    def _least(self) -> float:
        """The tolerance as a logarithm."""
        return -math.log1p(-self.within) if METRICS[self.metric].better == "higher" else math.log1p(self.within)

    def _harm(self, one: Estimate) -> float:
        """How much worse it is, as a logarithm."""
        return -math.log(one.value) if METRICS[self.metric].better == "higher" else math.log(one.value)

    def _excluded(self, one: Estimate) -> bool:
        """Whether a loss of the tolerance is shown not to be there."""
        return one.sd is not None and self._harm(one) + one.bound + one.reach_of(2 * EXCLUDED) < self._least

    def _said(self, one: Estimate | None, verdict: CheckVerdict, reason: str | None = None) -> CheckedMetric:
        accepted, new, earlier, _ = self.runs
        new = (*earlier, *new) if one is self.lately and one is not None else new
        nights = len(set(sessions_of(new, anywhere=True).values()))
        return CheckedMetric(self.metric, "", one, (len(accepted), len(new)), nights, verdict, reason, self.now)


def _judged_metrics(accepted: AcceptedPoint) -> list[str]:
    rates = [metric for metric in ("throughput", "step_time_mean") if metric in accepted.metrics]
    return [*rates[:1], *(metric for metric in ("energy_per_item",) if metric in accepted.metrics)]


def _doubtful(record: Record, accepted: AcceptedPoint) -> list[str]:
    """Flags of a run that no accepted run has."""
    return [flag for flag in record.flags if flag not in _NO_MATTER and flag not in accepted.flags]


def _usable(work: WorkRuns, flags: FlagPolicy) -> list[Record]:
    """The runs that count. Where most are flagged, what disturbed them may have reached the others without a flag: then none does."""
    good = valid(work.newest)
    quiet = [record for record in good if not _doubtful(record, work.accepted)]
    if flags != "strict":
        return good
    return quiet if 2 * len(quiet) >= len(good) else []


def _runs_of(newest: Sequence[Record], work: WorkRuns, metric: str, flags: FlagPolicy, nights: int) -> Runs:
    """One number of one point; of runs with another unit or energy boundary none."""
    accepted = work.accepted.metrics[metric]

    def comparable(record: Record) -> bool:
        one = record.metrics.get(metric)
        return one is not None and (one.unit, one.scope, record.method_version) == (accepted.unit, accepted.scope, METHOD_VERSION)

    then = [Value(**{**vars(one), "time": time_of(one.time)}) for one in accepted.runs]
    now = values(filter(comparable, newest), metric)
    counted = [one for one in work.earlier if flags != "strict" or not _doubtful(one, work.accepted)]
    earlier = values(filter(comparable, counted), metric)
    session = sessions_of([*earlier, *now], anywhere=True)  # of a cluster each run may have a node of its own
    last = set(sorted(set(session.values()))[-nights:] if nights > 1 else ())
    return then, now, [one for one in earlier if session[id(one)] in last], [one for one in earlier if session[id(one)] not in last]


def _with_unit(one: CheckedMetric, work: WorkRuns, newest: Sequence[Record]) -> CheckedMetric:
    """The number with its unit, and why it is not there if it is not."""
    accepted, reason = work.accepted.metrics[one.metric], one.reason
    if one.ratio is None:
        found = newest[0].metrics.get(one.metric)
        if found is None or found.value is None:
            reason = f"not measured any more: {(found.reason if found else None) or 'no value'}"
        else:
            now = f"{found.unit}{f' ({found.scope})' if found.scope else ''}"
            reason = f"not comparable: {accepted.unit}{f' ({accepted.scope})' if accepted.scope else ''} then, {now} now"
    return replace(one, unit=accepted.unit, reason=reason)


def _point(work: WorkRuns, usable: Sequence[Record], numbers: Sequence[CheckedMetric], flags: FlagPolicy) -> CheckedPoint:
    """The verdict on a point from those on its numbers."""
    good, lost = valid(work.newest), [record for record in work.newest if record.status != "ok"]
    notes = []
    if work.accepted.reason is not None:
        verdict: CheckVerdict = "better" if good else "not judged"
        notes.append(f"the baseline has no result: {work.accepted.reason}" + ("; now there is one" if good else ""))
        return CheckedPoint(work.label, verdict, (), tuple(notes), work.keys)
    if not work.newest:
        return CheckedPoint(work.label, "undecided", (), ("not measured, or not to its end, since the baseline was accepted",), work.keys)
    unknown = any(record.unreadable for record in lost)  # it has numbers, which may be worse than any
    if not good:
        text = f"no result: {why_not(lost[-1])}"
        return CheckedPoint(work.label, "undecided" if unknown else "worse", (), (text,), work.keys, failed=not unknown)
    if lost:
        notes.append(f"{len(lost)} of {len(work.newest)} runs have no result: {why_not(lost[-1])}")
    flagged = [record for record in good if _doubtful(record, work.accepted)]
    if flagged and flags != "ignore":
        names = ", ".join(sorted({flag for record in flagged for flag in _doubtful(record, work.accepted)}))
        others = ", and the others with them" if len(flagged) < len(good) and not usable else ""
        became = f"left out{others}" if flags == "strict" else "used all the same"
        notes.append(f"{len(flagged)} of {len(good)} runs flagged {names}: {became}")
    verdict = _worst(one.verdict for one in numbers) if usable else "undecided"
    verdict = _worst([verdict, "undecided"]) if unknown else verdict
    notes += [f"{title_of(one.metric)}: {one.reason}" for one in numbers if one.reason]
    return CheckedPoint(work.label, verdict, tuple(numbers), tuple(notes), work.keys)


def changed_since(baseline: Baseline, records: Sequence[Record]) -> tuple[Difference, ...]:
    """What differs between now and then besides the numbers, of what all accepted runs had in common."""
    good = valid(records)
    found = compare_facts([baseline.facts], [surroundings(good)]) if good else []
    new = {one.name for one in found if one.b == SEVERAL and one.name not in baseline.facts}  # which earlier versions left out
    return tuple(one for one in found if one.a != SEVERAL and one.name not in new)
