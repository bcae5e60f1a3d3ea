"""Statistics of step-time series: steady state, confidence intervals, drift.

Steps of a training loop are neither independent nor normal, and there are often few of them. The interval therefore takes the wider of
two estimates that fail in different places: batch means (long-range structure, such as a pause every fifty steps) and an AR(1) effective
sample size (short series with neighbouring steps alike). ``tests/test_stats.py`` holds their coverage on simulated series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Series: TypeAlias = Sequence[float] | NDArray[np.float64]

MIN_BATCHES = 8
"""Fewest batch means that a variance is taken from."""
ALIKE = 1e-6
"""Relative spread below which steps are the same: what is left is the rounding of clocks, which has stretches of no spread at all."""
DRIFT_Z = 2.6
"""Standard errors between the two ends of a window beyond which it counts as drifting (about 1 % by chance)."""


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


def t_quantile(probability: float, dof: float) -> float:
    """Student's t quantile, for ``dof`` >= 1.

    Closed forms for 1 and 2 degrees of freedom; otherwise Hill's expansion about the normal quantile (Abramowitz & Stegun 26.7.5),
    good to 0.5 % from 3 degrees on at the 97.5 % point. Fractional ``dof`` between 1 and 3 are rounded down, which widens.
    """
    if dof < 2:
        return math.tan(math.pi * (probability - 0.5))
    if dof < 3:
        centred = 2 * probability - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof**power for power, term in enumerate(terms, start=1))


def lag1(x: NDArray[np.float64]) -> float:
    """Lag-1 autocorrelation of ``x``; 0 for a constant series."""
    centred = x - x.mean()
    total = float(centred @ centred)
    return float(centred[:-1] @ centred[1:]) / total if total > 0 else 0.0


def _half_width_ar1(x: NDArray[np.float64], confidence: float) -> tuple[float, float]:
    """Half-width and effective sample size if the series were AR(1), with the small-sample bias of the estimate removed (Kendall 1954)."""
    n = len(x)
    raw = lag1(x)
    rho = min(max(raw + (1 + 3 * raw) / n, 0.0), 1 - 2 / n)
    inflation = (1 + rho) / (1 - rho)
    effective = n / inflation
    variance = float(x.var(ddof=1)) * (1 + inflation / n) / effective
    return math.sqrt(variance) * t_quantile((1 + confidence) / 2, max(effective - 1, 2)), effective


def _half_width_batch_means(x: NDArray[np.float64], confidence: float) -> float:
    """Half-width from batch means; batches double until neighbouring means no longer look alike, or ``MIN_BATCHES`` are left."""
    size = 1
    while True:
        count = len(x) // size
        means = x[len(x) - count * size :].reshape(count, size).mean(axis=1)
        likeness = (lag1(means) + 1 / count) * math.sqrt(count)
        if likeness < 0.8 or count // 2 < MIN_BATCHES:
            break
        size *= 2
    return float(means.std(ddof=1)) / math.sqrt(count) * t_quantile((1 + confidence) / 2, count - 1)


def mean_interval(series: Series, confidence: float = 0.95) -> Interval:
    """Mean of a stationary series with its confidence interval: the wider of batch means and AR(1).

    Fewer than four values carry no usable variance: the interval is then infinite, which no stop rule accepts.
    Raises ``ValueError`` for an empty series.
    """
    x = np.asarray(series, dtype=np.float64)
    if x.size == 0:
        raise ValueError("mean_interval needs at least one value")
    mean = float(x.mean())
    if x.size < 4:
        return Interval(mean, -math.inf, math.inf, int(x.size), 0.0)
    by_ar1, effective = _half_width_ar1(x, confidence)
    half = max(by_ar1, _half_width_batch_means(x, confidence))
    return Interval(mean, mean - half, mean + half, int(x.size), effective)


def warm_up_length(series: Series) -> int:
    """Number of leading values to drop so that the rest looks steady: MSER (White 1997).

    The cut minimises the squared standard error of what remains, searched over the first half: a minimum at the very edge of the search
    means that the series has not settled, so callers treat a cut of ``n // 2`` as "not yet".
    """
    x = np.asarray(series, dtype=np.float64)
    n = x.size
    if n < 4:
        return n // 2
    mean = float(x.mean())
    centred = x - mean
    remaining = np.arange(n, 0, -1, dtype=np.float64)
    sums = np.cumsum(centred[::-1])[::-1]
    squares = np.cumsum((centred**2)[::-1])[::-1]
    variance = np.maximum(squares / remaining - (sums / remaining) ** 2, (ALIKE * mean) ** 2)
    return int(np.argmin((variance / remaining)[: n // 2 + 1]))


def is_warm(series: Series, at_least: int) -> bool:
    """True when a series of step times has left its warm-up: ``at_least`` values, and MSER's cut lies inside the first half."""
    n = len(series)
    return n >= at_least and warm_up_length(series) < n // 2


def drift(series: Series) -> float:
    """Relative difference between the means of the last and the first third, or sixth, or 0 if it is within its own standard error.

    The standard error is that of :func:`mean_interval`, so that an autocorrelated but stationary series is not called drifting. A jump
    inside the first or last third blinds the comparison of thirds, which then vary much: hence the sixths.
    """
    x = np.asarray(series, dtype=np.float64)
    for size, fewest in ((x.size // 3, 4), (x.size // 6, 16)):
        if size < fewest:
            break
        first, last = mean_interval(x[:size], 0.6827), mean_interval(x[-size:], 0.6827)
        difference = last.mean - first.mean
        error = math.hypot(first.half_width, last.half_width)
        if abs(difference) > DRIFT_Z * error and first.mean:
            return difference / first.mean
    return 0.0


def t_tail(t: float, dof: float) -> float:
    """Two-sided tail of Student's t: the probability of a value farther from 0 than ``t``. Infinite ``dof`` is the normal distribution.

    Regularised incomplete beta function (Abramowitz & Stegun 26.7.1) by Lentz's continued fraction, good to 1e-10.
    """
    if math.isinf(dof):
        return math.erfc(abs(t) / math.sqrt(2))
    x = dof / (dof + t * t)
    return _incomplete_beta(dof / 2, 0.5, x)


@lru_cache(maxsize=4096)
def t_critical(probability: float, dof: float) -> float:
    """Student's t quantile at ``probability`` > 0.5 for any ``dof`` > 0, to six digits: :func:`t_tail` inverted by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, dof) > 2 * (1 - probability):
        low, high = high, high * 2
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, dof) > 2 * (1 - probability) else (low, middle)
    return high


def f_tail(f: float, dof: float, dof_below: float) -> float:
    """Upper tail of the F distribution (Abramowitz & Stegun 26.6.2), for ``dof`` above and ``dof_below`` below the fraction line."""
    return _incomplete_beta(dof_below / 2, dof / 2, dof_below / (dof_below + dof * f)) if f > 0 else 1.0


def chi2_tail(x: float, dof: int) -> float:
    """Upper tail of the chi-squared distribution for whole ``dof`` (Abramowitz & Stegun 26.4.4 and 26.4.5)."""
    if x <= 0:
        return 1.0
    if dof % 2:
        tail, term, first = math.erfc(math.sqrt(x / 2)), math.sqrt(2 * x / math.pi) * math.exp(-x / 2), 1
    else:
        tail, term, first = math.exp(-x / 2), x / 2 * math.exp(-x / 2), 2
    for k in range(first, dof - 1, 2):
        tail += term
        term *= x / (k + 2)
    return min(tail, 1.0)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979): below 0.05, any one of them is wrong with a probability of at most 5 %."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = largest
    return adjusted


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(b, a, 1 - x) / b
    return front * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Continued fraction of the incomplete beta function (Abramowitz & Stegun 26.5.8), evaluated by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    value = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / ((1 + numerator * d) or tiny)
            c = (1 + numerator / c) or tiny
            value *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return value
