"""Step times one by one: their cumulative distribution with its elbow, and which rank is slow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraml.analysis.table import RankSteps, Steps
from caraml.base.stats import mean_interval
from caraml.results.record import Record

CLEAR = 0.4
"""Least height of the curve above its chord for an elbow. Normally distributed times stay below 0.3 (95 % of series of 20 to 1,000 steps);
half of the steps delayed by up to their own length give 0.45, a tenth of them 0.8."""
FEWEST = 20
"""Steps below which no elbow is looked for."""
SLOW = 0.01
"""Share of the step by which a rank must at least be behind to be called slow."""


@dataclass(frozen=True)
class Elbow:
    """Where a distribution bends from its bulk into its tail."""

    seconds: float
    share: float
    """Share of steps at or below it."""
    cost: float
    """Share of the total time that the steps beyond it take more than as many median steps would."""


@dataclass(frozen=True)
class RankTime:
    """How one rank's step compares with the median rank's, step by step."""

    rank: int
    excess: float
    """Mean time above the median rank, relative to the mean step."""
    low: float
    high: float
    """95 % interval, corrected for the number of ranks."""
    slowest: float
    """Share of the steps in which it was the slowest."""
    wait: float
    """Mean wait for input, relative to the mean step."""
    slow: bool
    """Behind by more than ``SLOW``, beyond chance."""


def batches(record: Record, steps: Steps) -> list[float]:
    """Step times of the window [s] without the first and last step of each epoch (EPICURE, section 5.2), where there are epochs."""
    samples = record.facts.samples_per_epoch if record.facts else None
    epoch = max(samples // record.point.global_batch, 1) if samples else 0
    rows = zip(steps.step, steps.phase, steps.seconds, strict=True)
    ends = (0, epoch - 1) if epoch >= 3 else ()  # or nothing would be left
    return [time for step, phase, time in rows if phase == "measure" and time > 0 and not (ends and step % epoch in ends)]


def cumulative(times: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution: each time [s] with the share of steps at or below it."""
    return [(time, (index + 1) / len(times)) for index, time in enumerate(sorted(times))]


def elbow(times: Sequence[float]) -> Elbow | None:
    """The elbow of the cumulative distribution of ``times`` [s], or ``None`` where it has none.

    It is the point of the curve farthest above the chord from its lower left to its upper right (Satopaa et al. 2011, "Kneedle"), both
    axes scaled to 1, if it is at least ``CLEAR`` above.
    """
    x = np.sort(np.asarray(times, dtype=np.float64))
    n = x.size
    if n < FEWEST or x[-1] <= x[0]:
        return None
    height = np.arange(1, n + 1) / n - (x - x[0]) / (x[-1] - x[0])
    index = int(height.argmax())
    if height[index] < CLEAR:
        return None
    cost = float((x[index + 1 :] - np.median(x)).sum() / x.sum())
    return Elbow(float(x[index]), (index + 1) / n, cost)


def median_error(times: Sequence[float]) -> float | None:
    """Relative standard error of the median step, from the order statistics around it; ``None`` for fewer than 20 steps.

    The number of independent steps is that of :func:`caraml.base.stats.mean_interval`.
    """
    if len(times) < FEWEST:
        return None
    reach = 0.5 / math.sqrt(max(mean_interval(times).effective_n, 4.0))
    low, high = np.quantile(times, [max(0.5 - reach, 0.0), min(0.5 + reach, 1.0)])
    return float(math.log(high / low) / 2) if low > 0 else None


def ranks(steps: RankSteps) -> list[RankTime]:
    """Every rank, slowest first; empty for a single one.

    Compared step by step, so that what all ranks share cancels. In synchronous training ranks wait for each other inside the step, which
    hides most of a slow rank's time: what shows is what it does after the exchange, and its wait for input.
    """
    seconds, waits = np.array(steps.seconds), np.array(steps.waits)
    if seconds.ndim != 2 or len(seconds) < 2 or seconds.shape[1] < 4:
        return []
    count, mean = len(seconds), float(seconds.mean())
    behind = (seconds - np.median(seconds, axis=0)) / mean
    behind -= np.median(behind.mean(axis=1))  # of skewed times every rank's mean is above the step's median
    slowest = np.bincount(seconds.argmax(axis=0), minlength=count) / seconds.shape[1]
    found = []
    for rank in range(count):
        interval = mean_interval(behind[rank], 1 - 0.05 / count)
        wait, slow = float(waits[rank].mean()) / mean, interval.low > 0 and interval.mean > SLOW
        found.append(RankTime(rank, interval.mean, interval.low, interval.high, float(slowest[rank]), wait, slow))
    return sorted(found, key=lambda one: -one.excess)
