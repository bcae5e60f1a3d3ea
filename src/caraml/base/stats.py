"""Statistics of step-time series: steady state, confidence intervals, drift, the elbow of their distribution, slow ranks; and the tails of
distributions that other rooms need.

Steps of a training loop are neither independent nor normal, there are often few of them, and a machine changes on all scales of time. How
much the mean of a series is off is seen in its slowest changes: the power of cosines of half a period, one, one and a half ... over the
whole series (Mueller 2004; Lazarus, Lewis, Stock and Watson 2018). Of independent steps all cosines have the same power; where the slowest
ones have more than the others there are slow changes, and those slower than the series are expected to be stronger still.
``bench/analysis/rate.py`` tries all of it on the noise of machines.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Series: TypeAlias = Sequence[float] | NDArray[np.float64]

COSINES = 64
"""Most cosines that are looked at: the slower ones of a long series."""
SLOWEST = 12
"""How many of them stand for what is slow."""
DRIFTING = 0.01
"""Error of the test whether the very slowest has more power than the ``SLOWEST`` after it, as of a trend or a jump."""
BLOCKS = 512
"""Steps of a long series are first averaged to about so many blocks: what is slow is not changed by that."""
LONGER = 31
"""How many times the window's steps count of those before it, at most: so a window of 16 steps or more has 16 blocks of its own."""
ALIKE = 1e-6
"""Relative spread below which steps are the same: what is left is the rounding of clocks, which has stretches of no spread at all."""

Z95 = 1.959964
"""Normal quantile of a two-sided interval of 95 %."""

CLEAR = 0.4
"""Least height of the curve above its chord for an elbow. Normally distributed times stay below 0.3 (95 % of series of 20 to 1,000 steps);
half of the steps delayed by up to their own length give 0.45, a tenth of them 0.8."""
FEWEST = 20
"""Steps below which no elbow is looked for."""
SLOW = 0.01
"""Share of the step by which a rank must at least be behind to be called slow."""
SMALLEST_SD = 5e-4
"""Relative spread below which repeats count as equal: what is left is rounding."""


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided confidence interval, in the unit of the series."""

    mean: float
    low: float
    high: float
    n: int
    effective_n: float

    @property
    def half_width(self) -> float:
        """Half the interval's length, in the unit of the series."""
        return (self.high - self.low) / 2

    @property
    def relative(self) -> float:
        """Half-width over mean; infinite for a zero mean."""
        return self.half_width / abs(self.mean) if self.mean else math.inf


@dataclass(frozen=True)
class Blocks:
    """The steps of a window and of what came before it; of many steps the means of equal blocks, which keep all that is slow."""

    means: NDArray[np.float64]
    """Mean of every block, those before the window first. What is left over is dropped at the beginning of either part."""
    inside: NDArray[np.float64]
    """Variance of the steps within each block."""
    size: int
    """Steps in a block."""
    window: int
    """Blocks before the window."""
    n: int
    """Steps in the window."""
    mean: float
    """Of the window's steps."""
    highest: float
    lowest: float

    @cached_property
    def steady(self) -> Blocks:
        """The window with as much of what came before it as looks steady together with it; of few blocks the window alone, since the cut
        would find the quietest stretch of them."""
        cut = min(_cut(self.means), self.window) if self.window else 0
        if self.means.size < 2 * SLOWEST:
            cut = self.window
        return replace(self, means=self.means[cut:], inside=self.inside[cut:], window=self.window - cut)

    @property
    def recent(self) -> Blocks:
        """The window with no more before it than it has itself: beside all that came before it, what moves in a short one is little."""
        return self._part(max(2 * self.window - self.means.size, 0), self.window, self.means.size)

    @property
    def first_half(self) -> Blocks:
        """As it was when the window had half its steps."""
        return self._part(0, self.window, (self.window + self.means.size) // 2)

    @property
    def settled(self) -> Blocks | None:
        """The rest of a window that begins with steps which are better dropped as warm-up; else None."""
        cut = _cut(self.means)
        return self._part(cut, cut, self.means.size) if cut > self.window else None

    def _part(self, begin: int, window: int, end: int) -> Blocks:
        """Some of the blocks, with a window from block ``window`` on."""
        n, mean = (end - window) * self.size, float(self.means[window:end].mean())
        return replace(self, means=self.means[begin:end], inside=self.inside[begin:end], window=window - begin, n=n, mean=mean)

    def interval(self, confidence: float = 0.95) -> Interval:
        """Of the window's mean: see :func:`mean_interval`."""
        if self.n < 4:
            return Interval(self.mean, -math.inf, math.inf, self.n, 0.0)
        known, n, own = self.steady, self.n, self.means[self.window :]
        count = known.means.size * known.size
        alone = float(known.inside.mean() + known.means.var()) * count / (count - 1)
        alike = alone <= (ALIKE * self.mean) ** 2
        variance, quantile = (alone * n, 1.0) if alike else _long_run(known, (1 + confidence) / 2)
        # loads and pauses in time with each other add up to nothing, but for what the window's ends cut: at most how far their sum swings;
        # about the mean of all steps, so that the sum ends at what those before the first block have
        edge = float(np.ptp(np.cumsum(np.append(0.0, own - self.mean)))) * self.size / n
        half = max(quantile * math.sqrt(variance / n), edge)
        effective = n * min(alone / variance, 1.0) if variance and not alike else float(n)
        return Interval(self.mean, self.mean - half, self.mean + half, n, effective)

    @cached_property
    def waves(self) -> NDArray[np.float64]:
        """Amplitudes of the slowest cosines over all of it; the square of each estimates n times the variance of the mean of n steps."""
        from scipy.fft import dct

        return np.asarray(math.sqrt(self.size) * dct(self.means - self.means.mean(), norm="ortho")[1 : COSINES + 1])

    @property
    def drift(self) -> float:
        """By how much the steps move from one end to the other beyond chance, relative to their mean; 0 where they do not.

        A trend, or a jump in the middle two thirds, shows in the slowest cosine, which then has more power than those after it (t test at
        ``DRIFTING``). The difference between the two ends of that cosine is what moved.
        """
        mean = float(self.means.mean())
        if self.means.size <= SLOWEST + 1 or not mean:
            return 0.0
        waves = self.waves[: SLOWEST + 1]
        rest = max(math.sqrt(float(waves[1:] @ waves[1:]) / SLOWEST), ALIKE * abs(mean))
        if t_tail(float(waves[0]) / rest, SLOWEST) > DRIFTING:
            return 0.0
        return float(-2 * math.sqrt(2 / (self.means.size * self.size)) * waves[0]) / mean


def corrected(count: int) -> float:
    """Confidence of each of ``count`` intervals that all hold in 95 % of cases (Bonferroni)."""
    return 1 - 0.05 / count


def blocks(series: Series, before: Series = ()) -> Blocks:
    """Blocks of a series and of the values just before it. Raises ``ValueError`` for an empty series."""
    x = np.asarray(series, dtype=np.float64)
    if not x.size:
        raise ValueError("an interval of the mean needs at least one value")
    earlier = np.asarray(before, dtype=np.float64)[-LONGER * x.size :]
    size = max((x.size + earlier.size) // BLOCKS, 1)
    parts = [part[part.size % size :].reshape(-1, size) for part in (earlier, x)]
    means = np.concatenate([part.sum(axis=1) for part in parts]) / size
    squares = np.concatenate([np.einsum("ij,ij->i", part, part) for part in parts]) / size
    inside = np.maximum(squares - means * means, 0.0)
    return Blocks(means, inside, size, len(parts[0]), x.size, float(x.mean()), float(x.max()), float(x.min()))


def mean_interval(series: Series, confidence: float = 0.95, *, before: Series = ()) -> Interval:
    """Mean of a series with its confidence interval, which allows for memory between steps and for slow changes.

    ``before``: the values just before the series, of which the last ``LONGER`` times as many count. From where both together are steady
    they help to tell how much the machine changes, since slow changes show in a long series only. Fewer than four values carry no usable
    variance: the interval is then infinite, which no stop rule accepts. Raises ``ValueError`` for an empty series.
    """
    return blocks(series, before).interval(confidence)


def _long_run(known: Blocks, probability: float) -> tuple[float, float]:
    """n times the variance of the mean of n values, and Student's quantile that goes with it.

    From all cosines together or from the slowest alone, whichever gives the wider interval. What grows from fast to slow within the series
    is expected to grow on beyond it: the power of the slowest counts as much more as the square root of what it has above the others.
    Of fewer values than tell slow cosines from others, it is what neighbours resemble each other by.
    """
    powers = known.waves**2
    every, quantile = float(powers.mean()), t_critical(probability, powers.size)
    if powers.size < 2 * SLOWEST:
        return every * _memory(known.means), quantile
    slow, rest = float(powers[:SLOWEST].mean()), float(powers[SLOWEST:].mean())
    slow, own = max(slow, slow * math.sqrt(slow / rest) if rest else slow), t_critical(probability, SLOWEST)
    return max((every, quantile), (slow, own), key=lambda one: one[0] * one[1] ** 2)


def _memory(x: NDArray[np.float64]) -> float:
    """By how much more the mean of a few values varies than that of independent ones: as an AR(1) series of their lag-1 autocorrelation,
    from which the bias of short series is taken (Kendall 1954), and which is no longer than they are."""
    centred = x - x.mean()
    square = float(centred @ centred)
    found = float(centred[1:] @ centred[:-1]) / square if square else 0.0
    rho = min(max(found + (1 + 3 * found) / x.size, 0.0), 1 - 1 / x.size)
    return (1 + rho) / (1 - rho)


def warm_up_length(series: Series) -> int:
    """Number of leading values to drop so that the rest looks steady: MSER (White 1997), of a long series to a five-hundredth of it.

    The cut minimises the squared standard error of what remains, searched over the first half: a minimum at the very edge of the search
    means that the series has not settled, so callers treat a cut of ``n // 2`` as "not yet".
    """
    if len(series) < 4:
        return len(series) // 2
    found = blocks(series)
    cut = _cut(found.means)
    return len(series) // 2 if cut == found.means.size // 2 else cut * found.size


def _cut(x: NDArray[np.float64]) -> int:
    """Index in the first half from which the rest of x has the least standard error of its mean."""
    n, mean = x.size, float(x.mean())
    centred, remaining = (x - mean)[::-1], np.arange(1.0, n + 1)
    variance = np.maximum((centred * centred).cumsum() / remaining - (centred.cumsum() / remaining) ** 2, (ALIKE * mean) ** 2)
    return int((variance / remaining)[::-1][: n // 2 + 1].argmin())


def independent_steps(series: Series, value: float, before: Series = ()) -> float:
    """How many independent ones the values are worth that a quantile at ``value`` is estimated from; ``before`` as in
    :func:`mean_interval`.

    As many as for their mean, or as for the share of them below ``value`` (of equal ones half counts), whichever are fewer: a few long
    steps, as of checkpoints, are most of what the mean varies by, and say nothing of how much the others resemble their neighbours.
    """
    x, earlier = np.asarray(series, dtype=np.float64), np.asarray(before, dtype=np.float64)
    below, earlier_below = ((np.sign(value - part) + 1) / 2 for part in (x, earlier))
    return min(mean_interval(x, before=earlier).effective_n, mean_interval(below, before=earlier_below).effective_n)


def quantile_interval(ordered: Series, share: float, independent: float | None = None) -> tuple[float, float] | None:
    """95 % confidence interval of the quantile at ``share``: two order statistics, whatever the distribution (Conover 1999, 3.2).

    ``ordered``: the values in rising order, worth ``independent`` of them (if absent, all). None where they are too few for that: of the
    median fewer than 6, of the 95th percentile fewer than 72.
    """
    from scipy.special import bdtr

    n = len(ordered)
    m = n if independent is None else max(min(int(independent), n), 1)
    below = bdtr(np.arange(m + 1), m, share)  # probability that so many of them, or fewer, lie below the quantile
    first, last = int(np.searchsorted(below, 0.025)), int(np.searchsorted(below, 0.975)) + 1
    if first < 1 or last > m:
        return None
    return float(ordered[(first - 1) * n // m]), float(ordered[-(-last * n // m) - 1])


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


def elbow(times: Series) -> Elbow | None:
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


def median_error(times: Series) -> float | None:
    """Relative standard error of the median step, from the order statistics around it; ``None`` for fewer than 20 steps.

    The number of independent steps is that of :func:`independent_steps`.
    """
    if len(times) < FEWEST:
        return None
    reach = 0.5 / math.sqrt(max(independent_steps(times, float(np.median(times))), 4.0))
    low, high = np.quantile(times, [max(0.5 - reach, 0.0), min(0.5 + reach, 1.0)])
    return float(math.log(high / low) / 2) if low > 0 else None


def ranks(times: Sequence[Series], waiting: Sequence[Series]) -> list[RankTime]:
    """Every rank, slowest first, by its step times and waits for input [s]; empty for a single one.

    Compared step by step, so that what all ranks share cancels. In synchronous training ranks wait for each other inside the step, which
    hides most of a slow rank's time: what shows is what it does after the exchange, and its wait for input.
    """
    seconds, waits = np.array(times), np.array(waiting)
    if seconds.ndim != 2 or len(seconds) < 2 or seconds.shape[1] < 4:
        return []
    count, mean = len(seconds), float(seconds.mean())
    behind = (seconds - np.median(seconds, axis=0)) / mean
    behind -= np.median(behind.mean(axis=1))  # of skewed times every rank's mean is above the step's median
    slowest = np.bincount(seconds.argmax(axis=0), minlength=count) / seconds.shape[1]
    found = []
    for rank in range(count):
        interval = mean_interval(behind[rank], corrected(count))
        wait, slow = float(waits[rank].mean()) / mean, interval.low > 0 and interval.mean > SLOW
        found.append(RankTime(rank, interval.mean, interval.low, interval.high, float(slowest[rank]), wait, slow))
    return sorted(found, key=lambda one: -one.excess)


def t_tail(t: float, dof: float) -> float:
    """Two-sided tail of Student's t: the probability of a value farther from 0 than ``t``. Infinite ``dof`` is the normal distribution."""
    from scipy.special import stdtr

    return float(2 * stdtr(dof, -abs(t)))


def t_critical(probability: float, dof: float) -> float:
    """Student's t quantile at ``probability``, for any ``dof`` > 0."""
    from scipy.special import stdtrit

    return float(stdtrit(dof, probability))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979): below 0.05, any one of them is wrong with a probability of at most 5 %."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = largest
    return adjusted
