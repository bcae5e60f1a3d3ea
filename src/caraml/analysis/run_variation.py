"""How much a number varies from one run to the next, and what follows for the mean of a few runs and for the ratio of two means.

The interval in a record says how well its own window is known. It does not contain what changes between runs: other nodes, another layout
in memory, another temperature, another neighbour on the network. That shows only between repeats, so:

* what counts as independent is a **session**: runs on one machine without a pause of ``SESSION_PAUSE``. Runs of one session are one
  observation, their mean, unless all that is set against each other ran in one and the same session, whose state then cancels if any two
  are less than half a pause apart on the whole, since a session may go on for days;
* where some work was repeated, variances are learnt from all repeats together: how large they typically are, how alike those of different
  works are, and how much more the second side varies than the first. Works that vary alike speak for each other, others for themselves;
* where sides have machines of their own, or the same in other shares, what a machine does is the same on whatever days: if a side has
  several, each is one observation, and what other work varies by on machines that both sides have alike is not taken for it;
* where each side has one session only, rates and energies are taken to vary from session to session by ``SESSION_SD`` besides on one
  machine, on several by ``SINGLE_RUN_SD``;
* work that was not repeated is taken to vary as much as repeats of other works say, and by ``SINGLE_RUN_SD`` at least, with the tails of
  Student's t; a number without an interval is then not judged;
* what a session did to all works is one observation, however many works there are; where works of the same sessions are set against each
  other, as the choices of an advice and the sizes of a curve are, it cancels;
* never less than the records' own intervals say.

The interval that tables, figures and comparisons show of a number is always that of :func:`mean_metric`: of its own runs, whatever else is
shown beside it. Ratios, laws and verdicts are made with what all runs together say.

``TYPICAL_SD`` and ``SINGLE_RUN_SD`` come from repeats that others published: the time per epoch of the 27 sets of three to six equal runs
in the appendix of MAELSTROM's deliverable D3.7 (tables 6 to 16 and 35 to 38). Fitted by moments of the logarithms (Smyth 2004), their
standard deviations are distributed about 0.56 % with one degree of freedom; 95 % of pairs of equal runs differ by less than 6.4 %, which
is the reach of two normal errors of 2.3 %. ``SESSION_SD`` is an assumption; nothing that is published tells it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.estimate import SINGLE_RUN_DOF, SINGLE_RUN_SD, TYPICAL_SD, Estimate, Value, is_known_kind, values
from caraml.analysis.observations import (
    Observations,
    in_common,
    machine_observations,
    most_dof,
    observations,
    sessions_of,
    without_common,
)
from caraml.base.stats import Z95, t_critical
from caraml.metrics.model import Metric
from caraml.results.record import Record

Array: TypeAlias = NDArray[np.float64]

_Pair: TypeAlias = tuple[Observations | None, Observations | None]
"""Both sides of a work; the second is ``None`` where there are no sides."""
Means: TypeAlias = tuple[Estimate | None, Estimate | None, Estimate | None]
"""First, second, and second over first."""

_NEAR_ZERO = frozenset({"data_wait_share", "other_cpu_share", "rank_imbalance"})
"""What may be next to nothing in one run and much in another, so that no ratio tells how it varies."""

# -- what all repeats say together ------------------------------------------------------------------------------------------------------

_SPREADS = np.linspace(-4, 4, 61) + math.log(TYPICAL_SD)
_ALIKE = np.array([0.5, 1, 2, 4, 16, 128])
_NOISIER = np.linspace(-4, 4, 17) * math.log(10)
"""Where the three unknowns are looked for: logarithm of the typical standard deviation; how alike works are, as the degrees of freedom of
the distribution of their variances about the typical one; logarithm of the ratio of the second side's variance to the first's. Many works
know their spread to a few per cent, so the steps must be as fine: with steps of a factor of 1.8 intervals of 50 works held 93 %."""
_PRIOR_WIDTH = 1.5
"""Standard deviation of the logarithm of the typical spread about the published one, before any repeat is seen."""
_OTHER_WIDTH = 4.0
"""The same for numbers of which nothing is published."""
_LONE_EARNED = 0.2
"""Degrees of freedom that the published spread earns beside the only two runs of the only work."""


@dataclass(frozen=True)
class _Learnt:
    """Weights of the three unknowns after the repeats were seen: each a point of the grid."""

    weights: Array
    spread: Array
    alike: Array
    noisier: Array

    def error(self, pair: _Pair, shares: tuple[float, float]) -> tuple[float, float]:
        """Standard deviation and degrees of freedom of a mean, or of a difference of means.

        ``shares``: one over the number of observations of each side, 0 for a side that does not take part.
        """
        from scipy.special import digamma, zeta

        first, second = (cell.dof * cell.square if cell is not None else 0.0 for cell in pair)
        dof, apart = self.alike + sum(cell.dof for cell in pair if cell is not None), np.exp(self.noisier / 2)
        sums = self.alike * np.exp(2 * self.spread) + first * apart + second / apart
        square = sums / dof * (shares[0] / apart + shares[1] * apart)
        # A mixture of scaled inverse chi-squared variances, replaced by the one with equal mean and variance of the logarithm.
        few, which = np.unique(dof / 2, return_inverse=True)
        logs = np.log(square) + (np.log(few) - digamma(few))[which]
        mean = float(self.weights @ logs)
        dofs = _dof_of(float(self.weights @ (zeta(2, few)[which] + (logs - mean) ** 2)))
        return math.exp((mean - math.log(dofs / 2) + float(digamma(dofs / 2))) / 2), dofs


def _dof_of(log_variance: float) -> float:
    """Degrees of freedom of the scaled inverse chi-squared distribution whose logarithm varies by ``log_variance``: inverse trigamma."""
    from scipy.optimize import brentq
    from scipy.special import zeta

    def surplus(log: float) -> float:
        return float(zeta(2, math.exp(log) / 2)) - log_variance  # trigamma

    least, most = math.log(0.05), math.log(1e4)
    if surplus(most) >= 0 or surplus(least) <= 0:
        return math.exp(most if surplus(most) >= 0 else least)
    return math.exp(float(brentq(surplus, least, most, rtol=1e-4)))


def _learn(pairs: Sequence[_Pair], known: bool) -> _Learnt:
    """What the repeats of all works say: the posterior of the hierarchical model behind moderated t (Smyth 2004), over a grid.

    A work's variance is scaled inverse chi-squared about the typical one, and that of its second side is that of the first times a factor
    that is common to all works: 1 with a probability of one half.
    """
    from scipy.special import gammaln

    sided = all(any(pair[side] is not None and pair[side].dof for pair in pairs) for side in (0, 1))  # type: ignore[union-attr]
    noisier = _NOISIER if sided else np.zeros(1)
    spread, alike, ratio = (axis.ravel() for axis in np.meshgrid(_SPREADS, _ALIKE, noisier, indexing="ij"))
    width = _PRIOR_WIDTH if known else _OTHER_WIDTH
    logs = -0.5 * ((spread - math.log(TYPICAL_SD)) / width) ** 2 + np.where(ratio == 0, np.log(max(len(noisier) - 1, 1)), 0.0)
    prior, apart = alike * np.exp(2 * spread), np.exp(ratio / 2)
    for pair in pairs:
        counts = [cell.dof if cell is not None else 0 for cell in pair]
        squares = [cell.square if cell is not None else 0.0 for cell in pair]
        dof = sum(counts)
        if not dof:
            continue
        sums = prior + counts[0] * squares[0] * apart + counts[1] * squares[1] / apart
        logs += gammaln((dof + alike) / 2) - gammaln(alike / 2) + alike / 2 * np.log(prior) + (counts[0] - counts[1]) / 4 * ratio
        logs -= (dof + alike) / 2 * np.log(sums)
    weights = np.exp(logs - logs.max())
    likely = weights > 1e-5
    weights = weights[likely] / weights[likely].sum()
    return _Learnt(weights, spread[likely], alike[likely], ratio[likely])


@dataclass(frozen=True)
class _Variation:
    """What is known, or assumed, about one metric of all works that are looked at together."""

    learnt: _Learnt | None
    """``None``: nothing was repeated."""
    known: bool
    works: int
    most_dof: float
    """Of any error that was learnt."""
    common: tuple[_Learnt, _Pair] | None
    """What sessions did to all works alike, as the observations of one more work, and what these say alone; ``None`` without any."""

    def mean(self, pair: _Pair, side: int, group: Sequence[Value]) -> Estimate | None:
        """The mean of one side of a work."""
        cell = pair[side]
        if cell is None:
            return None
        value, share = (group[0].value if len(group) == 1 else math.exp(cell.mean)), cell.share
        alone = _with_sensors(Estimate(value, *(_single(cell.within) if self.known and cell.known else (None, math.inf))), group)
        if self.learnt is None:
            return alone
        error = self._error(self.learnt, pair, (share, 0.0) if side == 0 else (0.0, share))
        found = _with_sensors(Estimate(value, *_widened(error, cell.within, cell.sessions)), group)
        repeated = any(one is not None and one.dof for one in pair)
        return found if repeated or (alone.sd is not None and found.reach > alone.reach) else alone

    def ratio(self, pair: _Pair, a: Estimate | None, b: Estimate | None) -> Estimate | None:
        """Second over first."""
        first, second = pair
        if first is None or second is None or a is None or b is None:
            return None
        if self.learnt is None or not (first.dof or second.dof):
            return b.over(a)
        error = self._error(self.learnt, pair, (first.share, second.share))
        if self.works == 1 and min(first.dof, second.dof) == 1:
            error = max(error, self._lone(first, second), key=_reach)
        sd, dof = _widened(error, first.within + second.within, first.sessions + second.sessions)
        return replace(b.over(a), sd=sd, dof=dof)

    def _error(self, learnt: _Learnt, pair: _Pair, shares: tuple[float, float]) -> tuple[float, float]:
        """By all works, or by what their sessions have in common, whichever is wider: of few sessions that are alike by luck, many works
        make a certainty."""
        sd, dof = learnt.error(pair, shares)
        errors = [(sd, min(dof, self.most_dof))]
        errors += [self.common[0].error(self.common[1], shares)] if self.common is not None else []
        return max(errors, key=_reach)

    def _lone(self, first: Observations, second: Observations) -> tuple[float, float]:
        """Welch's test with the published spread as half an observation on each side: two runs alone tell little."""
        weight, earned = (TYPICAL_SD**2, _LONE_EARNED) if self.known else (0.0, 0.0)
        squares = [(weight + cell.dof * cell.square) / (earned + cell.dof) * cell.share for cell in (first, second)]
        dof = sum(squares) ** 2 / (squares[0] ** 2 / first.dof + squares[1] ** 2 / second.dof)
        return math.sqrt(sum(squares)), dof + earned


def _reach(error: tuple[float, float]) -> float:
    return Estimate(1.0, *error).reach


def _variation(pairs: Sequence[_Pair], metric: str) -> tuple[_Variation, str]:
    """The variation, and where it comes from, as a sentence."""
    known = is_known_kind(metric)
    cells = [cell for pair in pairs for cell in pair if cell is not None]
    common = min((cell.most for cell in cells), default=math.inf)
    dof = int(min(sum(cell.dof for cell in cells), common))
    learnt = _learn(pairs, known) if dof else None
    together = in_common([[pair[side] for pair in pairs] for side in (0, 1)]) if len(pairs) > 1 else None  # of one work it is that work
    both = None if together is None else (together[0], together[1])
    found = _Variation(learnt, known, len(pairs), most_dof(cells), None if both is None else (_learn([both], known), both))
    if learnt is None:
        if known and any(cell.known for cell in cells):
            return found, f"nothing was repeated: {SINGLE_RUN_SD:.1%} from run to run is assumed"
        return found, "nothing was repeated, so its run-to-run variation is not known"
    typical, noisier = math.exp(float(learnt.weights @ learnt.spread)), math.exp(float(learnt.weights @ learnt.noisier) / 2)
    words = f"from repeats: typically {typical:.2%} from one to the next, {dof} degree{'s' if dof > 1 else ''} of freedom"
    if known and any(any(pair) and not any(cell and cell.dof for cell in pair) for pair in pairs):
        words += f"; {SINGLE_RUN_SD:.1%} from run to run is assumed of work that was run once"
    if not 0.67 < noisier < 1.5:
        words += f"; B varies {noisier:.1f} times as much as A"
    words += "; at least what their printed digits leave open" if any(cell.dof and cell.square == cell.rounding for cell in cells) else ""
    words += "; what a session did to all of them cancels" if math.isfinite(common) else ""
    assumed_square = max(cell.sessions for cell in cells)
    if assumed_square == SINGLE_RUN_SD**2:
        words += f"; {SINGLE_RUN_SD:.1%} from machine to machine is assumed where each side was measured on one of its own"
    elif assumed_square:
        words += f"; {math.sqrt(assumed_square):.1%} from session to session is assumed, because no side was measured in two"
    return found, words


# -- what callers ask for ---------------------------------------------------------------------------------------------------------------


def ratios(pairs: Sequence[tuple[Sequence[Value], Sequence[Value]]], metric: str) -> tuple[list[Means], str]:
    """For each pair of groups the mean of the first, of the second, and second over first; and where its errors come from, as a sentence.

    The second and the first are not taken to vary equally. ``None`` for an empty group, and for a ratio with one.
    """
    nights, known = sessions_of(one for pair in pairs for group in pair for one in group), is_known_kind(metric)
    cells = [observations(pair, known, nights, apart=True) for pair in pairs]
    found: list[Means] = []
    own = [any(cell is not None and cell.machines for cell in pair) for pair in cells]
    kinds = {kind: [(a, b) for (a, b), one in zip(cells, own, strict=True) if one == kind] for kind in sorted(set(own))}
    if True in kinds:  # what was measured without a second side, on several machines, tells how much these vary, too
        lone = [(a, b) for a, b in (machine_observations(pair, nights) for pair in pairs if not all(pair))]
        kinds[True] += [pair for pair in lone if any(cell is not None and cell.dof for cell in pair)]
    variations = {kind: _variation(some, metric) for kind, some in kinds.items()}
    sentence = "; where sides were on other machines, or on the same in other shares, ".join(words for _, words in variations.values())
    for (one, other), kind, (first, second) in zip(cells, own, pairs, strict=True):
        variation, _ = variations[kind]
        ratio = variation.ratio((one, other), variation.mean((one, other), 0, first), variation.mean((one, other), 1, second))
        found.append((mean_of(first, metric), mean_of(second, metric), ratio))
    return found, sentence


def estimates_of(groups: Sequence[Sequence[Value]], metric: str, *, only_ratios: bool = False) -> tuple[list[Estimate | None], str]:
    """For each group of repeats its mean; and where the errors come from, as a sentence.

    ``only_ratios``: the means are set against each other and nothing else, so what a session did to all of them cancels.
    """
    nights = sessions_of(one for group in groups for one in group)
    cells = observations(groups, is_known_kind(metric), nights, apart=only_ratios)
    cells = without_common(cells) if only_ratios else cells
    variation, sentence = _variation([(cell, None) for cell in cells], metric)
    return [variation.mean((cell, None), 0, group) for cell, group in zip(cells, groups, strict=True)], sentence


def estimates(groups: Sequence[Sequence[Record]], metric: str) -> tuple[list[Estimate | None], str]:
    """As :func:`estimates_of`, of a metric of records, to be set against each other."""
    return estimates_of([values(group, metric) for group in groups], metric, only_ratios=True)


def item_energies(groups: Sequence[Sequence[Record]]) -> list[tuple[Estimate | None, str | None]]:
    """For each group of repeats its mean energy per item, to be set against others, and the boundary of that.

    Repeats of which energies have different boundaries have none together.
    """
    means = [mean_metric(group, "energy_per_item") for group in groups]
    alike = [group if mean is not None and mean.value is not None else [] for group, mean in zip(groups, means, strict=True)]
    found, _ = estimates(alike, "energy_per_item")
    return [(energy, mean.scope if mean is not None else None) for energy, mean in zip(found, means, strict=True)]


INTERVAL = (
    f"intervals: 95 %, between runs, the spread of few repeats pooled with that of published ones, {TYPICAL_SD:.2%}; "
    f"of a single run that of its window with {SINGLE_RUN_SD:.1%} from run to run, which is assumed"
)
"""What is said where intervals of :func:`mean_metric` are shown."""


def mean_of(group: Sequence[Value], metric: str) -> Estimate | None:
    """The mean of some repeats with its interval between runs; ``None`` without a run."""
    return estimates_of([group], metric)[0][0]


def mean_metric(records: Sequence[Record], name: str, of: Callable[[Record], Metric | None] | None = None) -> Metric | None:
    """A number of some repeats: the mean (geometric) over those that have it, its interval between runs, and how many runs that are. Of
    several runs the mean of ``_NEAR_ZERO`` is arithmetic, without an interval.

    ``of`` gives it where it is not in the records as it is; ``name`` then says of which kind it is. Without a value it has a run's reason;
    ``None`` if no run has it.
    """
    found = [one for record in records if (one := record.metrics.get(name) if of is None else of(record)) is not None]
    having = [one for one in found if one.value is not None]
    if not having:
        return found[0] if found else None
    first = having[0]
    kinds = sorted({f"{one.unit}{f' ({one.scope})' if one.scope else ''}" for one in having})
    if len(kinds) > 1:
        return Metric(value=None, unit=first.unit, reason=f"the runs measured different things: {', '.join(kinds)}")
    group, n = values(records, name, of), len(having)
    estimate = mean_of(group, name) if len(group) == n and (n == 1 or name not in _NEAR_ZERO) else None
    if estimate is None:  # zero, or below, or next to it: no ratio tells how it varies
        mean = fmean(one.value for one in having if one.value is not None)
        return first.model_copy(update={"value": mean, "low": None, "high": None, "n": n})
    bound = max((one.bound for one in having if one.bound is not None), default=None)
    return first.model_copy(update={"value": estimate.value, "low": estimate.low, "high": estimate.high, "n": n, "bound": bound})


def _single(within: float) -> tuple[float, float]:
    """Standard deviation and degrees of freedom of a single run: the 95 % interval of two normal errors, with the tails of Student's t."""
    sd, dof = _widened((SINGLE_RUN_SD, SINGLE_RUN_DOF), 0.0, within)
    return sd * Z95 / t_critical(0.975, dof), dof


def _widened(found: tuple[float, float], least: float, besides: float) -> tuple[float, float]:
    """Standard deviation and degrees of freedom of an error that is at least ``least`` and has a known variance ``besides``."""
    square, dof = max(found[0] ** 2, least), found[1]
    return math.sqrt(square + besides), dof * ((square + besides) / square) ** 2


def _with_sensors(mean: Estimate, group: Sequence[Value]) -> Estimate:
    """A mean with what it may be off by: bounds of one sensor do not average out."""
    bound, accuracy = max(one.bound for one in group), max(one.accuracy for one in group)
    return replace(mean, bound=bound, accuracy=accuracy, sensors=frozenset(one.sensors for one in group))
