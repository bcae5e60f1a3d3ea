"""Intervals, steady state and drift on series whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraml.stats import drift, is_warm, lag1, mean_interval, t_quantile, warm_up_length

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def ar1(rho: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        noise = rng.standard_normal(n)
        series = np.empty(n)
        series[0] = noise[0] / math.sqrt(1 - rho**2)
        for i in range(1, n):
            series[i] = rho * series[i - 1] + noise[i]
        return series

    return draw


def bimodal(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return np.where(rng.random(n) < 0.3, 3.5, -1.5) + 0.3 * rng.standard_normal(n)


# Fraction of 95 % intervals that hold the true mean of 0, over 1,000 series. Series shorter than their memory cannot tell: not here.
@pytest.mark.parametrize(
    ("draw", "n"),
    [
        pytest.param(lambda rng, n: rng.standard_normal(n), 30, id="white-30"),
        pytest.param(lambda rng, n: rng.standard_normal(n), 300, id="white-300"),
        pytest.param(ar1(0.5), 100, id="ar0.5-100"),
        pytest.param(ar1(0.9), 400, id="ar0.9-400"),
        pytest.param(lambda rng, n: rng.standard_t(3, n), 100, id="heavy-tails-100"),
        pytest.param(bimodal, 100, id="bimodal-100"),
    ],
)
def test_interval_covers_the_truth_as_often_as_it_says(draw: Draw, n: int) -> None:
    rng = np.random.default_rng(12)
    inside = sum((interval := mean_interval(draw(rng, n))).low <= 0 <= interval.high for _ in range(1000))
    assert 930 <= inside <= 985


def test_ignoring_autocorrelation_would_fail() -> None:
    """The naive interval misses most of the time on AR(1) series, so the coverage test above can fail."""
    rng, draw, inside = np.random.default_rng(12), ar1(0.9), 0
    for _ in range(300):
        x = draw(rng, 400)
        half = 1.96 * x.std(ddof=1) / math.sqrt(len(x))
        inside += abs(x.mean()) <= half
    assert inside < 0.6 * 300


@pytest.mark.parametrize(
    ("dof", "truth"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (5, 2.57058), (10, 2.22814), (30, 2.04227), (1000, 1.96234)]
)
def test_t_quantile(dof: float, truth: float) -> None:
    assert t_quantile(0.975, dof) == pytest.approx(truth, rel=2e-3)


def test_lag1_of_alternating_and_constant_series() -> None:
    assert lag1(np.array([1.0, -1.0] * 50)) == pytest.approx(-0.99)
    assert lag1(np.ones(10)) == 0.0


def test_too_few_values_give_no_interval() -> None:
    interval = mean_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0 and interval.low == -math.inf and interval.relative == math.inf
    with pytest.raises(ValueError, match="at least one"):
        mean_interval([])


def test_constant_series_has_no_width() -> None:
    assert mean_interval([0.5] * 20).relative == 0


def test_warm_up_is_cut_where_the_series_settles() -> None:
    rng = np.random.default_rng(3)
    series = np.concatenate([np.linspace(3, 1, 20), np.ones(80)]) + 0.01 * rng.standard_normal(100)
    assert 15 <= warm_up_length(series) <= 25
    assert is_warm(series, at_least=6)


def test_steps_that_differ_by_the_clock_s_rounding_are_steady() -> None:
    """The second half is exactly constant, the first only to a picosecond: that is no reason to drop it."""
    series = [0.021, *([0.02, 0.02 + 1e-12] * 15), *([0.02] * 31)]
    assert warm_up_length(series) == 1 and is_warm(series, at_least=6)


def test_a_falling_series_is_never_warm() -> None:
    assert not is_warm([2.0 * 0.8**i for i in range(8)], at_least=6)
    assert not is_warm([1.0] * 5, at_least=6)
    assert is_warm([1.0] * 6, at_least=6)


def test_drift_is_measured_and_noise_is_not_drift() -> None:
    rng = np.random.default_rng(5)
    noise = 0.01 * rng.standard_normal(300)
    assert drift(1 + noise) == 0
    assert drift(np.linspace(1, 1.1, 300) + noise) == pytest.approx(0.0667 / 1.0167, rel=0.1)
    false_alarms = sum(drift(1 + 0.05 * ar1(0.7)(rng, 300)) != 0 for _ in range(300))
    assert false_alarms < 15


@pytest.mark.parametrize("jump", [60, 100, 150, 240])
def test_a_jump_is_a_drift_wherever_it_happens(jump: int) -> None:
    noise = 0.002 * np.random.default_rng(4).standard_normal(300)
    series = np.where(np.arange(300) < jump, 0.020, 0.022) * (1 + noise)
    assert drift(series) == pytest.approx(0.1, abs=0.02)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=200))
def test_the_mean_lies_in_its_interval(series: list[float]) -> None:
    interval = mean_interval(series)
    assert interval.low <= interval.mean <= interval.high
    assert 0 <= warm_up_length(series) <= len(series) // 2
