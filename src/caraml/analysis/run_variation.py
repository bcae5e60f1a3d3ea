"""How much a number varies from one run to the next, and what follows for the mean of a few runs and for the ratio of two means.

The interval in a record says how well its own window is known. It does not contain what changes between runs: other nodes, another layout
in memory, another temperature, another neighbour on the network. That shows only between repeats, so:

* what counts as independent is a **session**: runs on one machine without a pause of ``SESSION_PAUSE``. Runs of one session are one
  observation, their mean, unless all that is set against each other ran in one and the same session, whose state then cancels;
* where some work was repeated, variances are learnt from all repeats together: how large they typically are, how alike those of different
  works are, and how much more the second side varies than the first. Works that vary alike speak for each other, others for themselves;
* where each side has one session only, rates and energies are taken to vary from session to session by ``SESSION_SD`` besides on one
  machine, on several by ``SINGLE_RUN_SD``;
* where nothing was repeated, a number with an interval is taken to vary by ``SINGLE_RUN_SD`` besides, and one without is not judged;
* never less than the records' own intervals say.

``TYPICAL_SD`` and ``SINGLE_RUN_SD`` come from repeats that others published: the time per epoch of the 27 sets of three to six equal runs
in the appendix of MAELSTROM's deliverable D3.7 (tables 6 to 16 and 35 to 38). Fitted by moments of the logarithms (Smyth 2004), their
standard deviations are distributed about 0.56 % with one degree of freedom; 95 % of pairs of equal runs differ by less than 6.4 %, which
is the reach of two normal errors of 2.3 %. ``SESSION_SD`` is an assumption; nothing that is published tells it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from statistics import fmean, variance
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.estimate import Estimate
from caraml.results.record import Record

Array: TypeAlias = NDArray[np.float64]

TYPICAL_SD = 0.0056
SINGLE_RUN_SD = 0.023
SESSION_SD = 0.01
SESSION_PAUSE = timedelta(hours=6)
"""Time between the starts of two runs on one machine from which on they are of different sessions."""
SMALLEST_SD = 5e-4
"""Relative spread below which repeats count as equal: what is left is rounding."""
SENSOR_ACCURACY = 0.05
"""Systematic relative error of a power sensor whose record does not say it."""
Z95 = 1.959964

_ENERGIES = ("energy", "device_energy", "node_energy", "run_energy", "run_node_energy", "items_per_watt_hour", "mean_power")
_RATES = ("throughput", "step_time_mean", "epoch_time_mean", "run_time", "achieved_flops", "mfu", "input_bandwidth", *_ENERGIES)


def is_known_kind(metric: str) -> bool:
    """True for rates, their times and energies: the kinds of number that the published repeats speak of."""
    return metric.startswith(_RATES)


@dataclass(frozen=True)
class Value:
    """One number of one run."""

    value: float
    error: float | None
    """Relative standard error by the record's own interval; ``None`` if it has none."""
    bound: float = 0.0
    """How far the logarithm may be off besides, at most."""
    accuracy: float = 0.0
    """Systematic relative error of its sensor: the same for all runs that ``sensors`` read."""
    sensors: str | None = None
    """What tells the sensors from others; ``None``: not known."""
    host: str = ""
    time: datetime | None = None
    """When the run started; a run of unknown time is a session of its own."""


def values(records: Iterable[Record], metric: str) -> list[Value]:
    """The metric of every record that has it above zero."""
    found = []
    for record in records:
        one = record.metrics.get(metric)
        if one is None or one.value is None or one.value <= 0:
            continue
        error = None
        if one.low is not None and one.high is not None and 0 < one.low <= one.high:
            error = math.log(one.high / one.low) / 2 / Z95
        share = min((one.bound or 0.0) / one.value, 0.99)
        accuracy, sensors = _sensors(record, one.scope) if metric.startswith(_ENERGIES) else (0.0, None)
        host = str(record.system.get("hostname") or record.system.get("host") or "")
        found.append(Value(one.value, error, -math.log1p(-share), accuracy, sensors, host, _started(record)))
    return found


def _sensors(record: Record, scope: str | None) -> tuple[float, str | None]:
    """Accuracy and identity of the sensors that a record's energy was read from."""
    boundary = record.energy.boundaries.get(scope or "") if record.energy is not None else None
    if boundary is None:
        return SENSOR_ACCURACY, None
    host = record.system.get("hostname") or record.system.get("host")
    accuracy = SENSOR_ACCURACY if boundary.accuracy is None else boundary.accuracy
    return accuracy, f"{host}: {', '.join(sorted(boundary.channels))}" if host else None


def _started(record: Record) -> datetime | None:
    if "published" in record.environment:
        return None
    try:
        return datetime.fromisoformat(record.started_at).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class _Cell:
    """The independent observations of one group of repeats: logarithms of runs, or of means of sessions."""

    logs: tuple[float, ...]
    within: float
    """Variance of the mean by the records' own intervals; the least that it can be."""
    known: bool
    """Whether every run has an interval of its own."""
    sessions: float
    """Variance of the mean that is assumed for the state of its only session; 0 where several show it, or where it cancels."""

    @cached_property
    def mean(self) -> float:
        return fmean(self.logs)

    @property
    def dof(self) -> int:
        return len(self.logs) - 1

    @cached_property
    def square(self) -> float:
        """Variance of one observation, at least what rounding makes."""
        return max(variance(self.logs), SMALLEST_SD**2) if self.dof else 0.0


_Pair: TypeAlias = tuple[_Cell | None, _Cell | None]
"""Both sides of a work; the second is ``None`` where there are no sides."""
Means: TypeAlias = tuple[Estimate | None, Estimate | None, Estimate | None]
"""First, second, and second over first."""


def _sessions(found: Iterable[Value]) -> dict[int, int]:
    """A number of the session of every value, by its ``id``."""
    ordered = sorted(found, key=lambda one: (one.time is None, one.host, one.time.timestamp() if one.time else 0.0))
    numbers: dict[int, int] = {}
    last: Value | None = None
    number = 0
    for one in ordered:
        follows = last is not None and last.host == one.host and last.time is not None and one.time is not None
        number += not (follows and one.time - last.time < SESSION_PAUSE)  # type: ignore[operator, union-attr]
        numbers[id(one)], last = number, one
    return numbers


def _cells(groups: Sequence[Sequence[Value]], known: bool) -> list[_Cell | None]:
    """The observations of groups that are set against each other; ``None`` for an empty one.

    ``known``: of a kind that the state of a machine changes. Memory and losses are not.
    """
    number = _sessions(one for group in groups for one in group)
    by_session: list[dict[int, list[Value]]] = []
    for group in groups:
        sessions: dict[int, list[Value]] = {}
        for one in group:
            sessions.setdefault(number[id(one)], []).append(one)
        by_session.append(sessions)
    everywhere = {session for sessions in by_session for session in sessions}
    several = any(len(sessions) > 1 for sessions in by_session)
    hosts = {one.host for group in groups for one in group}
    assumed = (SESSION_SD if len(hosts) == 1 else SINGLE_RUN_SD) ** 2 if known and not several and len(everywhere) > 1 else 0.0
    cells: list[_Cell | None] = []
    for group, sessions in zip(groups, by_session, strict=True):
        if not group:
            cells.append(None)
            continue
        errors = [one.error for one in group if one.error is not None]
        within = fmean(error**2 for error in errors) / len(group) if errors else 0.0
        if several:
            logs = tuple(fmean(math.log(one.value) for one in session) for session in sessions.values())
        else:
            logs = tuple(math.log(one.value) for one in group)
        cells.append(_Cell(logs, within, len(errors) == len(group), assumed))
    return cells


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

    @property
    def typical(self) -> float:
        """Typical standard deviation of one observation; of two sides, the geometric mean."""
        return math.exp(float(self.weights @ self.spread))

    @property
    def ratio(self) -> float:
        """Standard deviation of the second side over that of the first."""
        return math.exp(float(self.weights @ self.noisier) / 2)


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

    def mean(self, pair: _Pair, side: int, group: Sequence[Value]) -> Estimate | None:
        """The mean of one side of a work."""
        cell = pair[side]
        if cell is None:
            return None
        value, bound = (group[0].value if len(group) == 1 else math.exp(cell.mean)), _bound(group)
        share = 1 / len(cell.logs)
        if self.learnt is not None:
            error = self.learnt.error(pair, (share, 0.0) if side == 0 else (0.0, share))
            return Estimate(value, *_widened(error, cell.within, cell.sessions), bound)
        sd = math.sqrt(SINGLE_RUN_SD**2 + cell.within) if self.known and cell.known else None
        return Estimate(value, sd, bound=bound)

    def ratio(self, pair: _Pair, a: Estimate | None, b: Estimate | None) -> Estimate | None:
        """Second over first, without a bound."""
        first, second = pair
        if first is None or second is None or a is None or b is None:
            return None
        if self.learnt is None:
            return b.over(a)
        error = self.learnt.error(pair, (1 / len(first.logs), 1 / len(second.logs)))
        if self.works == 1 and min(first.dof, second.dof) == 1:
            error = max(error, self._lone(first, second), key=lambda one: Estimate(1.0, *one).reach)
        return Estimate(b.value / a.value, *_widened(error, first.within + second.within, first.sessions + second.sessions))

    def _lone(self, first: _Cell, second: _Cell) -> tuple[float, float]:
        """Welch's test with the published spread as half an observation on each side: two runs alone tell little."""
        weight, earned = (TYPICAL_SD**2, _LONE_EARNED) if self.known else (0.0, 0.0)
        squares = [(weight + cell.dof * cell.square) / (earned + cell.dof) / len(cell.logs) for cell in (first, second)]
        dof = sum(squares) ** 2 / (squares[0] ** 2 / first.dof + squares[1] ** 2 / second.dof)
        return math.sqrt(sum(squares)), dof + earned


def _variation(pairs: Sequence[_Pair], metric: str) -> tuple[_Variation, str]:
    """The variation, and where it comes from, as a sentence."""
    known = is_known_kind(metric)
    cells = [cell for pair in pairs for cell in pair if cell is not None]
    dof = sum(cell.dof for cell in cells)
    learnt = _learn(pairs, known) if dof else None
    found = _Variation(learnt, known, len(pairs))
    if learnt is None:
        assumed = f"{SINGLE_RUN_SD:.1%} from run to run is assumed" if known else "so its run-to-run variation is not known"
        return found, f"nothing was repeated{':' if known else ','} {assumed}"
    words = f"from repeats: typically {learnt.typical:.2%} from one to the next, {dof} degree{'s' if dof > 1 else ''} of freedom"
    if not 0.67 < learnt.ratio < 1.5:
        words += f"; B varies {learnt.ratio:.1f} times as much as A"
    assumed_square = max(cell.sessions for cell in cells)
    if assumed_square:
        words += f"; {math.sqrt(assumed_square):.1%} from session to session is assumed, because no side was measured in two"
    return found, words


# -- what callers ask for ---------------------------------------------------------------------------------------------------------------


def ratios(pairs: Sequence[tuple[Sequence[Value], Sequence[Value]]], metric: str) -> tuple[list[Means], str]:
    """For each pair of groups the mean of the first, of the second, and second over first; and where their errors come from, as a sentence.

    The second and the first are not taken to vary equally. ``None`` for an empty group, and for a ratio with one.
    """
    cells = [_cells(pair, is_known_kind(metric)) for pair in pairs]
    variation, sentence = _variation([(first, second) for first, second in cells], metric)
    found: list[Means] = []
    for (one, other), (first, second) in zip(cells, pairs, strict=True):
        a, b = variation.mean((one, other), 0, first), variation.mean((one, other), 1, second)
        ratio = variation.ratio((one, other), a, b)
        if ratio is not None:
            ratio = replace(ratio, bound=_bound(first) + _bound(second) + _apart(first, second))
        found.append((a, b, ratio))
    return found, sentence


def estimates_of(groups: Sequence[Sequence[Value]], metric: str) -> tuple[list[Estimate | None], str]:
    """For each group of repeats its mean; and where the errors come from, as a sentence."""
    cells = _cells(groups, is_known_kind(metric))
    variation, sentence = _variation([(cell, None) for cell in cells], metric)
    return [variation.mean((cell, None), 0, group) for cell, group in zip(cells, groups, strict=True)], sentence


def estimates(groups: Sequence[Sequence[Record]], metric: str) -> tuple[list[Estimate | None], str]:
    """As :func:`estimates_of`, of a metric of records."""
    return estimates_of([values(group, metric) for group in groups], metric)


def _widened(found: tuple[float, float], least: float, besides: float) -> tuple[float, float]:
    """Standard deviation and degrees of freedom of an error that is at least ``least`` and has a known variance ``besides``."""
    square, dof = max(found[0] ** 2, least), found[1]
    return math.sqrt(square + besides), dof * ((square + besides) / square) ** 2


def _bound(group: Sequence[Value]) -> float:
    """What the mean of a group may be off by: bounds of one sensor do not average out."""
    return max((one.bound for one in group), default=0.0)


def _apart(first: Sequence[Value], second: Sequence[Value]) -> float:
    """What different sensors may differ by: the systematic error cancels only where both sides were read from the same ones."""
    sensors = {one.sensors for one in (*first, *second)}
    if len(sensors) == 1 and None not in sensors:
        return 0.0
    return sum(max(one.accuracy for one in side) for side in (first, second))
