"""Intervals, steady state and drift on series whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraml.base.stats import blocks, mean_interval, warm_up_length

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


@pytest.mark.parametrize(("rho", "n", "fewest"), [(0.0, 10, 375), (0.5, 10, 340), (0.5, 20, 345), (0.8, 20, 300)])
def test_few_values_are_not_taken_for_independent(rho: float, n: int, fewest: int) -> None:
    """Of 400 series; as independent values 381, 309, 305 and 188 intervals held the mean."""
    rng, draw = np.random.default_rng(12), ar1(rho)
    assert sum((interval := mean_interval(draw(rng, n))).low <= 0 <= interval.high for _ in range(400)) >= fewest


def test_ignoring_autocorrelation_would_fail() -> None:
    """The naive interval misses most of the time on AR(1) series, so the coverage test above can fail."""
    rng, draw, inside = np.random.default_rng(12), ar1(0.9), 0
    for _ in range(300):
        x = draw(rng, 400)
        half = 1.96 * x.std(ddof=1) / math.sqrt(len(x))
        inside += abs(x.mean()) <= half
    assert inside < 0.6 * 300


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


def test_steps_that_differ_by_the_clock_s_rounding_are_steady() -> None:
    """The second half is exactly constant, the first only to a picosecond: that is no reason to drop it."""
    series = [0.021, *([0.02, 0.02 + 1e-12] * 15), *([0.02] * 31)]
    assert warm_up_length(series) == 1


def test_a_falling_series_has_no_steady_part() -> None:
    assert warm_up_length([2.0 * 0.8**i for i in range(8)]) == 4
    assert warm_up_length([1.0] * 6) == 0


def test_a_long_series_is_cut_as_a_short_one_is() -> None:
    """Blocks stand for the steps of a long series; the cut is found to within one."""
    noise = 0.01 * np.random.default_rng(3).standard_normal(100_000)
    series = np.concatenate([np.linspace(3, 1, 20_000), np.ones(80_000)]) + noise
    assert 19_000 <= warm_up_length(series) <= 21_000


def test_drift_is_measured_and_noise_is_not_drift() -> None:
    rng = np.random.default_rng(5)
    noise = 0.01 * rng.standard_normal(300)
    assert blocks(1 + noise).drift == 0
    assert blocks(np.linspace(1, 1.1, 300) + noise).drift == pytest.approx(0.1 / 1.05, rel=0.25)
    assert blocks(np.linspace(1.1, 1, 300) + noise).drift == pytest.approx(-0.1 / 1.05, rel=0.25)
    false_alarms = sum(blocks(1 + 0.05 * ar1(0.7)(rng, 300)).drift != 0 for _ in range(300))
    assert false_alarms <= 9


@pytest.mark.parametrize("jump", [60, 100, 150, 240])
def test_a_jump_is_a_drift_wherever_it_happens(jump: int) -> None:
    noise = 0.002 * np.random.default_rng(4).standard_normal(300)
    series = np.where(np.arange(300) < jump, 0.020, 0.022) * (1 + noise)
    assert blocks(series).drift == pytest.approx(0.1, abs=0.035)


def test_steps_before_the_series_show_how_much_the_machine_changes() -> None:
    """Two clocks, and a window that sees one of them: only the steps before it show that there is another."""
    noise = 0.002 * np.random.default_rng(8).standard_normal(400)
    clock = np.where(np.arange(400) // 100 % 2, 1.0, 1.05) + noise
    alone, known = mean_interval(clock[300:]), mean_interval(clock[300:], before=clock[:300])
    assert alone.mean == known.mean and alone.high < 1.01
    assert known.low < 1.025 < known.high


def test_a_warm_up_before_the_series_does_not_widen_it() -> None:
    noise = 0.01 * np.random.default_rng(9).standard_normal(400)
    series = 1 + noise + np.concatenate([np.linspace(1, 0, 100), np.zeros(300)])
    assert mean_interval(series[200:], before=series[:200]).half_width < 1.5 * mean_interval(series[200:]).half_width


def test_a_pause_may_fall_out_of_the_window_or_into_it() -> None:
    """Pauses in time with each other leave no slow change at all, yet one more or less moves the mean."""
    series = np.where(np.arange(6400) % 25 == 12, 11.0, 1.0)
    interval = mean_interval(series)
    assert (11 - interval.mean) / 6400 <= interval.half_width < 0.2 * 1.96 * series.std() / 80


@pytest.mark.parametrize("spread", [0.001, 0.0])
@pytest.mark.parametrize("at", [0, 5, 11, 12, 800, 1499])
def test_a_long_step_counts_wherever_the_window_has_it(at: int, spread: float) -> None:
    """The first 12 of 1,500 steps after 46,500 are in no block: a long one among them moved the mean by 3 %, known to 0.005 %."""
    steps = 1 + spread * np.random.default_rng(1).standard_normal(48_000)
    steps[46_500 + at] += 50
    assert blocks(steps[46_500:], steps[:46_500]).size == 93
    assert mean_interval(steps[46_500:], before=steps[:46_500]).low < 1.003


def test_a_load_that_comes_and_goes_may_be_cut_anywhere() -> None:
    """Every 17.7 steps, for half of the time, by a quarter: of 60 phases the interval held the truth in 46."""
    rng, held = np.random.default_rng(4), 0
    for phase in np.arange(60) / 60:
        ends = np.arange(-500, 501) / 17.7 + phase
        loaded = 17.7 * np.diff(np.floor(ends) / 2 + np.minimum(ends % 1, 0.5))
        series = 1 + 0.25 * loaded + 0.001 * rng.standard_normal(1000)
        interval = mean_interval(series[500:], before=series[:500])
        held += interval.low <= 1.125 <= interval.high
    assert held >= 57


@pytest.mark.parametrize(("n", "before"), [(4, 7500), (20, 7500), (200, 60_000)])
def test_a_short_window_after_a_long_warm_up_has_blocks_of_its_own(n: int, before: int) -> None:
    steps = 1 + 0.001 * np.random.default_rng(2).standard_normal(before + n)
    run = blocks(steps[before:], steps[:before])
    assert run.means.size - run.window >= min(n, 16)
    assert run.first_half.n and math.isfinite(run.first_half.mean) and 0 < run.interval().relative < 0.003


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=4, max_size=200))
def test_the_mean_lies_in_its_interval(series: list[float]) -> None:
    interval = mean_interval(series)
    assert interval.low <= interval.mean <= interval.high
    assert 0 <= warm_up_length(series) <= len(series) // 2
