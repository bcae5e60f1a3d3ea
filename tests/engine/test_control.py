"""The stop rule and the end of warm-up, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from caraml.engine.control import look, settled, steps_until_next_look, warm_up_over
from caraml.suite.model import Measure

POLICY = Measure(target=0.02, min_seconds=2, max_seconds=10, min_steps=10, warm_up_steps=3, warm_up_max_seconds=5)


def test_a_window_needs_precision_time_and_steps() -> None:
    steady = [0.5] * 20
    assert look(steady, 20, 10 * 0.5, POLICY).stop
    assert not look(steady, 20, 1.9, POLICY).stop  # too short
    assert not look(steady[:9], 9, 4.5, POLICY).stop  # too few steps
    noisy = list(np.random.default_rng(0).lognormal(0, 1, 20))
    assert not look(noisy, 20, 5.0, POLICY).stop


def test_the_budget_ends_an_imprecise_window() -> None:
    noisy = list(np.random.default_rng(0).lognormal(0, 1, 20))
    verdict = look(noisy, 20, 10.0, POLICY)
    assert verdict.stop and not verdict.precise


def test_max_steps_end_a_window() -> None:
    policy = POLICY.model_copy(update={"max_steps": 12})
    assert look([0.1] * 12, 12, 1.2, policy).stop


def test_too_few_finished_steps_are_no_verdict() -> None:
    verdict = look([0.5] * 3, 40, 1.0, POLICY)
    assert not verdict.stop and verdict.interval is None


def test_remaining_time_is_an_estimate_within_the_budget() -> None:
    assert look([0.5] * 8, 8, 4.0, POLICY).remaining == pytest.approx(1.0)  # two more steps
    rng = np.random.default_rng(0)
    assert look(list(0.5 + 0.2 * rng.standard_normal(10)), 10, 5.0, POLICY).remaining == pytest.approx(5.0)


def test_warm_up_ends_when_steady_or_out_of_time() -> None:
    falling = [2.0 * 0.7**i for i in range(8)]
    assert not settled(falling, POLICY) and not warm_up_over(falling, 4.9, POLICY)
    assert warm_up_over(falling, 5.0, POLICY)
    assert not settled([1.0] * 5, POLICY) and settled([1.0] * 6, POLICY)


def test_looks_are_rare_beside_the_steps() -> None:
    assert steps_until_next_look([], 0) == 1
    assert steps_until_next_look([0.01] * 30, 30) == 50
    assert steps_until_next_look([3.0] * 5, 5) == 1
    assert steps_until_next_look([1e-5] * 30, 30) == 1000
    assert steps_until_next_look([1.0] * 400, 400) == 20
