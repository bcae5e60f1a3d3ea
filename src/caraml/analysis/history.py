"""Every attempt over time: per system and work a series, and the points at which its level changed.

The segmentation with the largest likelihood, less a penalty for each change. All of them are looked at (segment neighbourhood search, Auger
and Lawrence 1989). Three things keep it quiet:

* results resemble their neighbours (a warm week, a busy month), so the noise is a first-order autoregression (as in Chakar et al. 2017).
  How large it is, and how alike neighbours are, is estimated anew with every number of changes: a fall that was taken back is slow noise
  only where that explains the results as well. Where results are few the correlation is drawn towards ``MEMORY``;
* repeats of one round resemble each other more than nights do, so they are one result, their mean;
* single results may be far off for reasons of their own: one farther than ``FAR`` deviations from the median of its neighbours is replaced
  by that. What lasts for fewer results than half of them is therefore no level.

The newest level needs ``FIRM`` results; one of two is said to be provisional, and one alone is no change. The penalty was found by
simulation (``bench/analysis/verdicts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.estimate import UNKNOWN, Estimate, Value, started, values
from caraml.analysis.grouping import Difference, axes_of, compare_facts, facts, grouped, names, run_of, told_apart, valid, without
from caraml.analysis.observations import sessions_of
from caraml.analysis.run_variation import mean_of
from caraml.base.stats import SMALLEST_SD
from caraml.metrics.model import Direction, definition_of, see_known
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED

_MAY_CHANGE = ("software",)
"""Axes in which the attempts of one series may differ: what may have changed over time."""

FIRM, PROVISIONAL = 3, 2
"""Results that a level needs, and with which the newest one is shown as provisional."""
FEWEST = FIRM + PROVISIONAL
"""Results below which no change can be told from noise."""
MEMORY, MEMORY_WEIGHT = 0.3, 20
"""Correlation of neighbouring results before any is seen, and how many results that counts for."""
_MEMORIES = np.array([0.0, 0.2, 0.4, 0.6, 0.75, 0.9])[:, None]
"""Correlations that are tried."""
MOST, MORE = 10, 40
"""Changes that are looked for at most, and after how many results there may be one more."""
TOGETHER = 400
"""Results of a series that are searched together: the time of the search grows with the cube of their number."""
NEIGHBOURS = 2
"""Results on either side whose median tells whether one is far off."""
FAR = 3.0
"""Standard deviations from that median beyond which a result counts no more."""
FAR_NEIGHBOURS, JUMPS = 0.15, 4
"""Share, and number, of the differences of neighbours that may be far beyond the others for another reason than noise. Where more are, they
are the noise: so it is of results with two levels, most of which are nearly the same."""


@dataclass(frozen=True)
class ChangePoint:
    """A change of the level between two attempts."""

    index: int
    """Of the first result with the new level."""
    ratio: float
    """New level over old level."""
    better: bool | None
    """``None`` for a metric of which neither direction is better, or nobody knows which."""
    provisional: bool
    """True where the new level rests on fewer than ``FIRM`` results."""
    changed: tuple[Difference, ...]
    """What changed with it; ``a`` is before, ``b`` after. First choice: facts that held through the stretch before and through the one
    after. If there is none: what differs between the two neighbours."""


@dataclass(frozen=True)
class Series:
    """One metric of the same work on the same system over time."""

    name: str
    metric: str
    unit: str
    better: Direction
    records: tuple[Record, ...]
    """By time."""
    values: tuple[Value, ...]
    """Their numbers and times, with what tells how much runs vary."""
    changes: tuple[ChangePoint, ...]
    note: str | None
    """Why no change can be found, if there are too few results."""
    newest: float | None
    """The newest result, or round of repeats, over the level before it, if it is alone and far off: no change yet, and worth another
    run."""

    def mean(self, begin: int, end: int) -> Estimate | None:
        """The mean of the results from one index to another, with its interval between runs."""
        return mean_of(self.values[begin : end + 1], self.metric)

    def levels(self) -> list[tuple[int, int, float]]:
        """First index, last index and level (median) of each stretch between changes."""
        edges = [0, *(change.index for change in self.changes), len(self.values)]
        return [(begin, end - 1, _level(self.values[begin:end])) for begin, end in pairwise(edges)]


def history(records: Sequence[Record], metric: str = "throughput") -> list[Series]:
    """A series for each work and system among ``records``, which may hold many attempts at a point, and for each unit and boundary of an
    energy. Raises ``InputError`` for an unknown metric. Only results above zero are on a series, as levels are compared by their ratio."""
    see_known(metric, records)
    found = (one for one in valid(records) if values([one], metric) and started(one) != UNKNOWN)
    usable = sorted({run_of(one): one for one in found}.values(), key=started)  # a folder may have copies of what is in another
    of_sensors = definition_of(metric, records).sensor

    def kind(record: Record) -> tuple[str, str]:
        found = record.metrics[metric]
        return found.scope or NOT_STATED if of_sensors else "", found.unit

    groups = grouped(usable, lambda record: (kind(record), without(axes_of(record), _MAY_CHANGE)))
    named = told_apart(names(groups, _MAY_CHANGE), [dict(zip(("boundary", "unit"), kind(group[0]), strict=True)) for group in groups])
    every = values(usable, metric)
    numbers = sessions_of(every, anywhere=True)  # other work may have run for hours between the repeats of one
    session = {id(record): numbers[id(one)] for record, one in zip(usable, every, strict=True)}
    return [_series(name, group, metric, session) for name, group in zip(named, groups, strict=True)]


def not_above_zero(records: Sequence[Record], metric: str) -> int:
    """How many results are on no series because their number is zero, or below."""
    return sum(value is not None and value <= 0 for record in valid(records) for value in [record.value(metric)])


def _series(name: str, records: Sequence[Record], metric: str, session: Mapping[int, int]) -> Series:
    measured = tuple(values(records, metric))
    errors = [one.error for one in measured if one.error is not None]
    floor = max(median(errors) if errors else 0.0, SMALLEST_SD)
    begins = _rounds(records, session)
    logs = np.array([fmean(math.log(one.value) for one in measured[i:j]) for i, j in pairwise([*begins, len(measured)])])
    # Of one time are the rows of a table, whose order is none in time.
    changes, sd = _searched(logs, floor)
    indices = [begins[at] for at in changes if measured[begins[at]].time > measured[begins[at] - 1].time]
    edges = [0, *indices, len(measured)]
    found, direction = [], definition_of(metric, records).better
    for before, index, after in zip(edges, indices, edges[2:], strict=False):
        rounds = sum(index <= one < after for one in begins)
        ratio = _level(measured[index:after]) / _level(measured[before:index])
        better = (ratio > 1) == (direction == "higher") if direction in ("higher", "lower") else None
        found.append(ChangePoint(index, ratio, better, rounds < FIRM, _changed(records[before:index], records[index:after])))
    what = "results" if len(begins) == len(measured) else "rounds of repeats"
    note = None if len(begins) >= FEWEST else f"{len(begins)} of the {FEWEST} {what} that a change needs"
    if len(measured) >= FEWEST and measured[0].time == measured[-1].time:
        note = "all results are of one time"
    newest, last = None, begins.index(edges[-2])
    if note is None and measured[-1].time > measured[begins[-1] - 1].time and len(begins) - last > FIRM:
        off = logs[-1] - float(np.median(logs[last:-1]))
        newest = math.exp(off) if abs(off) > FAR * sd else None
    unit = records[0].metrics[metric].unit
    return Series(name, metric, unit, direction, tuple(records), measured, tuple(found), note, newest)


def _rounds(records: Sequence[Record], session: Mapping[int, int]) -> list[int]:
    """Index of the first result of every round: of repeats of one work in one session, by its number, each once."""
    begins: list[int] = []
    seen: set[int] = set()
    for index, record in enumerate(records):
        if not index or record.point.repeat in seen or session[id(record)] != session[id(records[index - 1])]:
            begins.append(index)
            seen = set()
        seen.add(record.point.repeat)
    return begins


def _level(found: Sequence[Value]) -> float:
    return math.exp(median(math.log(one.value) for one in found))


def _changed(before: Sequence[Record], after: Sequence[Record]) -> tuple[Difference, ...]:
    """Facts that held before and held after, but not the same; failing that, what differs between the neighbours."""
    sides = [[facts(record) for record in side] for side in (before, after)]
    steady = [one for one in compare_facts(*sides) if all(len({found.get(one.name) for found in side}) == 1 for side in sides)]
    return tuple(steady or compare_facts(sides[0][-1:], sides[1][:1]))


def penalty(n: int) -> float:
    """Price of a change in a series of ``n`` results, in twice the logarithm of the likelihood."""
    return 8 + 3.5 * math.log(n) + 100 / n


def change_points(series: Sequence[float] | NDArray[np.float64], floor: float = 0.0) -> list[int]:
    """Indices at which a new level begins; empty below ``FEWEST`` values. ``floor``: least standard deviation of the noise."""
    return _searched(np.asarray(series, dtype=np.float64), floor)[0]


def _searched(x: NDArray[np.float64], floor: float) -> tuple[list[int], float]:
    """The changes, and the standard deviation of one of the newest results about its level."""
    found, begin, sd = [0], 0, math.inf
    while x.size - begin >= FEWEST:
        changes, sd = _fitted(x[begin : begin + TOGETHER], floor, penalty(x.size))
        if x.size - begin <= TOGETHER:
            return [*found[1:], *(begin + change for change in changes)], sd
        # What is near the end is seen better with what follows: each search begins with a level, or with results that were searched before.
        found += [begin + change for change in changes if change <= 3 * TOGETHER // 4]
        begin = max(found[-1], begin + TOGETHER // 2)
    return found[1:], sd


def _fitted(x: NDArray[np.float64], floor: float, price_of_one: float) -> tuple[list[int], float]:
    """The changes, and the standard deviation of one result about its level."""
    x, n, least = _within_reach(x, floor), x.size, max(floor**2, 1e-24)
    new, rest = x[1:] - _MEMORIES * x[:-1], 1 - _MEMORIES**2  # what is new in a result, and its share of the variance
    sums, squares = (np.pad(np.cumsum(part, axis=1), ((0, 0), (2, 0))) for part in (new, new * new))
    most = min((n - PROVISIONAL) // FIRM, MOST + n // MORE)
    best = np.full((len(_MEMORIES), most + 2, n + 1), np.inf)  # by memory, number of levels and results
    begin = np.zeros(best.shape, dtype=int)
    best[:, 0, 0] = 0
    for end in range(FIRM, n + 1):
        starts = end - (PROVISIONAL if end == n else FIRM) + 1
        longer = np.arange(end - 1, end - 1 - starts, -1)
        # A level begins with a result that owes nothing to the one before it. Its mean is eliminated in closed form.
        weighted = rest * x[:starts] + (1 - _MEMORIES) * (sums[:, end : end + 1] - sums[:, 1 : starts + 1])
        deviation = rest * x[:starts] ** 2 + squares[:, end : end + 1] - squares[:, 1 : starts + 1]
        deviation -= weighted**2 / (rest + (1 - _MEMORIES) ** 2 * longer)
        total = best[:, :-1, :starts] + deviation[:, None]
        begin[:, 1:, end], best[:, 1:, end] = total.argmin(axis=2), total.min(axis=2)
    square, number = np.maximum(best[:, 1:, n] / n, least), np.arange(most + 1)
    expected = MEMORY_WEIGHT * np.log(1 - 2 * MEMORY * _MEMORIES + _MEMORIES**2)
    price = n * np.log(square) - (number + 1) * np.log(rest) + expected + price_of_one * number
    memory, changes = np.unravel_index(int(price.argmin()), price.shape)
    found, end = [], n
    for levels in range(int(changes) + 1, 1, -1):
        end = int(begin[memory, levels, end])
        found.append(end)
    return found[::-1], math.sqrt(float(square[memory, changes] / rest[memory, 0]))


def _within_reach(x: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """The results about their mean, those farther than ``FAR`` deviations from the median of their neighbours replaced by that."""
    usual = max(1 - max(FAR_NEIGHBOURS, JUMPS / (x.size - 1)), 0.5)
    reach = FAR * max(math.sqrt(_mean_square(np.diff(x), usual) / 2 / (1 - MEMORY)), floor)
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(np.pad(x, NEIGHBOURS, constant_values=np.nan), 2 * NEIGHBOURS + 1))
    count, row = windows.shape[1] - np.isnan(windows).sum(axis=1), np.arange(x.size)
    # Where the window is even, at the ends, there are two medians, and a result may lie between.
    low, high = windows[row, (count - 1) // 2], windows[row, count // 2]
    near = np.where(x > high + reach, high, np.where(x < low - reach, low, x))
    return np.asarray(near - near.mean())


def _mean_square(differences: NDArray[np.float64], share: float) -> float:
    """Mean square of normal differences, the far ones left out: by their median, or by the quantile at ``share`` if that says more."""
    from scipy.special import ndtri

    size = np.abs(differences)
    near = size[size <= 3 * max(float(np.quantile(size, each)) / float(ndtri((1 + each) / 2)) for each in (0.5, share))]
    return float(np.mean(near**2)) / 0.9733  # share of a normal variance that lies within three deviations
