"""How much a number varies from one run to the next, and what follows for the mean of a few runs.

The interval in a record says how well its own window is known. It does not contain what changes between runs: other nodes, another layout
in memory, another temperature, another neighbour on the network. That shows only between repeats, so:

* where some work was repeated, the variance of its repeats counts, pooled over all work that was; work that varies more than the rest
  beyond chance stands for itself. One prior observation of the typical spread
  ``TYPICAL_SD`` steadies it, and counts as ``EARNED`` of a degree of freedom: as much as keeps false "worse" at 5 % however much more
  than typical the runs may vary;
* where nothing was repeated, a number with an interval is taken to vary by ``SINGLE_RUN_SD`` besides, and one without is not judged;
* never less than the records' own intervals say.

Both constants come from repeats that others published: the time per epoch of the 27 sets of three to six equal runs in the
appendix of MAELSTROM's deliverable D3.7 (tables 6 to 16 and 35 to 38). Fitted by moments of the logarithms (Smyth 2004), their standard
deviations are distributed about 0.56 % with one degree of freedom; 95 % of pairs of equal runs differ by less than 6.4 %, which is the
reach of two normal errors of 2.3 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from caraml.analysis.estimate import Estimate
from caraml.results.record import Record
from caraml.stats import f_tail

TYPICAL_SD = 0.0056
SINGLE_RUN_SD = 0.023
UNLIKE = 0.1
"""Error of the test for unequal variances."""
EARNED = 0.5
"""Degrees of freedom of the prior observation, where repeats have two or more."""
SMALLEST_SD = 5e-4
"""Relative spread below which repeats count as equal: what is left is rounding."""
Z95 = 1.959964

_RATES = (
    *("throughput", "step_time_mean", "epoch_time_mean", "achieved_flops", "mfu", "input_bandwidth"),
    *("energy", "device_energy", "node_energy", "items_per_watt_hour", "mean_power"),
)


def is_known_kind(metric: str) -> bool:
    """True for rates, their times and energies: the kinds of number that the published repeats speak of."""
    return metric.startswith(_RATES)


@dataclass(frozen=True)
class Spread:
    """Run-to-run variation of one metric, as the relative standard deviation of one run."""

    sd: float | None
    """``None``: nothing was repeated, and nothing can be assumed."""
    dof: float
    """Degrees of freedom; infinite where ``sd`` is assumed."""
    own: dict[int, tuple[float, float]]
    """Standard deviation and degrees of freedom of groups that stand for themselves, by their index."""
    sentence: str

    def of(self, group: int) -> tuple[float | None, float]:
        """Standard deviation and degrees of freedom for one group."""
        return self.own.get(group, (self.sd, self.dof))


def values(records: Iterable[Record], metric: str) -> list[tuple[float, float | None]]:
    """Value and relative standard error of every record that has the metric above zero; the error is ``None`` if it has no interval."""
    found = []
    for record in records:
        one = record.metrics.get(metric)
        if one is None or one.value is None or one.value <= 0:
            continue
        error = None
        if one.low is not None and one.high is not None and 0 < one.low <= one.high:
            error = math.log(one.high / one.low) / 2 / Z95
        found.append((one.value, error))
    return found


def spread(groups: Sequence[Sequence[tuple[float, float | None]]], metric: str, works: Sequence[int] | None = None) -> Spread:
    """The run-to-run variation of ``metric`` over groups of repeats, each a list of :func:`values`.

    ``works``: for each group the number of its work, where several groups (the two sides of a comparison) are of the same.
    """
    known = is_known_kind(metric)
    numbers = list(range(len(groups))) if works is None else list(works)
    repeats: dict[int, tuple[float, int]] = {}
    for work, group in zip(numbers, groups, strict=True):
        if len(group) > 1:
            square, count = repeats.get(work, (0.0, 0))
            more = len(group) - 1
            new = variance([math.log(value) for value, _ in group])
            repeats[work] = ((square * count + new * more) / (count + more), count + more)
    dof = sum(count for _, count in repeats.values())
    if not dof:
        if not known:
            return Spread(None, math.inf, {}, "nothing was repeated, so its run-to-run variation is not known")
        return Spread(SINGLE_RUN_SD, math.inf, {}, f"nothing was repeated: {SINGLE_RUN_SD:.1%} from run to run is assumed")
    noisy = _noisier(repeats)
    by_work = {work: (_steadied(*repeats[work], known), _earned(repeats[work][1], known)) for work in noisy}
    own = {index: by_work[work] for index, work in enumerate(numbers) if work in by_work}
    alike = [found for work, found in repeats.items() if work not in noisy]
    dof = sum(count for _, count in alike)
    sd = _steadied(sum(square * count for square, count in alike) / dof, dof, known)
    besides = f"; {len(noisy)} with more have their own, up to {max(found[0] for found in by_work.values()):.1%}" if noisy else ""
    words = f"from repeats: {sd:.2%} from run to run, {dof} degree{'s' if dof > 1 else ''} of freedom{besides}"
    return Spread(sd, _earned(dof, known), own, words)


def estimate(group: Sequence[tuple[float, float | None]], run_sd: float | None, dof: float) -> Estimate | None:
    """The geometric mean of a group of :func:`values` with its error; ``None`` for an empty group."""
    if not group:
        return None
    value = group[0][0] if len(group) == 1 else math.exp(fmean(math.log(value) for value, _ in group))
    errors = [error for _, error in group if error is not None]
    if run_sd is None or (math.isinf(dof) and len(errors) < len(group)):
        return Estimate(value, None)
    within = fmean(error**2 for error in errors) if errors else 0.0
    square = run_sd**2 + within if math.isinf(dof) else max(run_sd**2, within)
    return Estimate(value, math.sqrt(square / len(group)), dof)


def estimates(groups: Sequence[Sequence[Record]], metric: str) -> tuple[list[Estimate | None], Spread]:
    """For each group of repeats the mean of a metric with its error, and the variation that the errors rest on."""
    found = [values(group, metric) for group in groups]
    variation = spread(found, metric)
    return [estimate(group, *variation.of(index)) for index, group in enumerate(found)], variation


def _steadied(square: float, dof: float, known: bool) -> float:
    """Standard deviation from a variance, with one observation of the typical spread added where that is known."""
    weight = 1.0 if known else 0.0
    return max(math.sqrt((weight * TYPICAL_SD**2 + dof * square) / (weight + dof)), SMALLEST_SD)


def _earned(dof: int, known: bool) -> float:
    """Degrees of freedom with those of the prior observation."""
    return dof + EARNED if known and dof >= 2 else float(dof)


def _noisier(repeats: Mapping[int, tuple[float, int]]) -> set[int]:
    """Works whose variance is larger than that of the others together beyond chance (F test at ``UNLIKE``, corrected for their number)."""
    left = {work: (max(square, SMALLEST_SD**2), dof) for work, (square, dof) in repeats.items()}
    found: set[int] = set()
    while len(left) > 1:
        worst = max(left, key=lambda work: left[work][0])
        square, dof = left.pop(worst)
        others = sum(count for _, count in left.values())
        pooled = sum(one * count for one, count in left.values()) / others
        if f_tail(square / pooled, dof, others) * (len(left) + 1) >= UNLIKE:
            break
        found.add(worst)
    return found
