"""How often a 95 % interval holds the truth: on series of one length, and where the stop rule ends a growing one.

docs/measuring.md has these numbers as a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from caraml.engine.control import look, steps_until_next_look
from caraml.stats import drift, mean_interval
from caraml.suite.model import Measure

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def white(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.standard_normal(n)


def ar1(rho: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
        series = rng.standard_normal(n)
        series[0] /= math.sqrt(1 - rho**2)
        for i in range(1, n):
            series[i] += rho * series[i - 1]
        return series * math.sqrt(1 - rho**2)

    return draw


def heavy(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.standard_t(3, n) / math.sqrt(3)


def bimodal(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return (np.where(rng.random(n) < 0.3, 3.5, -1.5) + 0.3 * rng.standard_normal(n)) / 2.31


def pauses(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """A long step every 25, beginning anywhere."""
    late = (np.arange(n) + rng.integers(25)) % 25 == 0
    return (np.where(late, 7.2, -0.3) + 0.3 * rng.standard_normal(n)) / 1.5


def drifting(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return np.linspace(-1.5, 1.5, n) + rng.standard_normal(n)


def covered(draw: Draw, n: int) -> tuple[int, int]:
    """Of 1,000 series with mean 0: how many intervals hold it, and how many series count as drifting (seen above a base of 10)."""
    rng = np.random.default_rng(7)
    inside = flagged = 0
    for _ in range(1000):
        series = draw(rng, n)
        interval = mean_interval(series)
        inside += interval.low <= 0 <= interval.high
        flagged += drift(10 + series) != 0
    return inside, flagged


@pytest.mark.parametrize(
    ("draw", "n"),
    [
        pytest.param(white, 30, id="white-30"),
        pytest.param(white, 300, id="white-300"),
        pytest.param(ar1(0.5), 100, id="ar0.5-100"),
        pytest.param(ar1(0.5), 400, id="ar0.5-400"),
        pytest.param(ar1(0.9), 400, id="ar0.9-400"),
        pytest.param(ar1(0.9), 1000, id="ar0.9-1000"),
        pytest.param(heavy, 100, id="heavy-tails-100"),
        pytest.param(heavy, 300, id="heavy-tails-300"),
        pytest.param(bimodal, 100, id="bimodal-100"),
        pytest.param(bimodal, 300, id="bimodal-300"),
    ],
)
def test_the_interval_holds_the_truth_as_often_as_it_says(draw: Draw, n: int) -> None:
    inside, flagged = covered(draw, n)
    assert 930 <= inside <= 970
    assert flagged <= 50, "noise is rarely called drift"


@pytest.mark.parametrize(("draw", "n"), [(pauses, 100), (pauses, 300), (ar1(-0.5), 100)], ids=["pauses-100", "pauses-300", "ar-0.5-100"])
def test_steps_that_make_up_for_each_other_get_a_wide_interval(draw: Draw, n: int) -> None:
    """Negative correlation is not believed: it would narrow the interval on the word of few steps."""
    inside, flagged = covered(draw, n)
    assert inside >= 970 and flagged <= 10


@pytest.mark.parametrize("n", [100, 300])
def test_a_drift_is_flagged(n: int) -> None:
    assert covered(drifting, n)[1] >= 990


def stopped(draw: Draw, step: float, length: int, runs: int) -> tuple[float, float]:
    """Mean relative error of the rate where the rule stops, and coverage. Steps of ``step`` seconds with 5 % spread, target 1 %."""
    rng, policy = np.random.default_rng(3), Measure(target=0.01, min_seconds=5, max_seconds=1e6)
    errors, inside = [], 0
    for _ in range(runs):
        series = step * np.maximum(1 + 0.05 * draw(rng, length), 0.05)
        elapsed, n, stop = np.cumsum(series), 0, False
        while not stop:
            n += steps_until_next_look(series[max(n - 20, 0) : max(n, 20)].tolist(), n)
            assert n <= length, "the rule must stop in time"
            verdict = look(series[:n].tolist(), n, float(elapsed[n - 1]), policy)
            stop, interval = verdict.stop, verdict.interval
        assert interval is not None
        errors.append(n * step / float(elapsed[n - 1]) - 1)
        inside += interval.low <= step <= interval.high
    return float(np.mean(errors)), inside / runs


@pytest.mark.parametrize(
    ("draw", "step", "length"),
    [
        pytest.param(white, 0.05, 4000, id="white"),
        pytest.param(white, 0.5, 4000, id="white, look at every step"),
        pytest.param(ar1(0.5), 0.5, 5000, id="ar0.5, look at every step"),
        pytest.param(ar1(0.9), 0.5, 12000, id="ar0.9, look at every step"),
        pytest.param(heavy, 0.05, 6000, id="heavy tails"),
        pytest.param(bimodal, 0.05, 4000, id="bimodal"),
    ],
)
def test_stopping_when_precise_does_not_bend_the_rate(draw: Draw, step: float, length: int) -> None:
    """The bias is below a tenth of the target and coverage where it was promised (of 400 series, so 2 % to either side by chance)."""
    bias, coverage = stopped(draw, step, length, runs=400)
    assert abs(bias) < 1e-3
    assert 0.92 <= coverage <= 0.985
