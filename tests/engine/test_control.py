"""The stop rule and the end of warm-up, without a device."""

from __future__ import annotations

import numpy as np
import pytest

from caraml.engine.control import judge, look, seen, settled, steps_until_next_look, warm_up_over
from caraml.suite.load import load_suite
from caraml.suite.model import Policy

POLICY = Policy(target=0.02, min_seconds=2, max_seconds=10, min_steps=10, warm_up_steps=3, warm_up_max_seconds=5)


def test_a_window_needs_precision_time_and_steps() -> None:
    steady = [0.1] * 40
    assert look((), steady, 40, 40 * 0.1, POLICY).stop
    assert not look((), steady, 40, 1.9, POLICY).stop  # too short
    assert not look((), steady[:9], 9, 4.5, POLICY).stop  # too few steps
    noisy = list(np.random.default_rng(0).lognormal(0, 1, 40))
    assert not look((), noisy, 40, 5.0, POLICY).stop


def test_few_steps_are_precise_only_if_they_are_alike() -> None:
    """Of ten lucky steps one cannot tell luck from precision, but steps that all lie within the target leave nothing to luck."""
    varied = list(0.5 * (1 + 0.025 * np.random.default_rng(3).choice([-1.0, 1.0], 200)))
    assert not look((), varied[:25], 25, 5.0, POLICY).precise and look((), varied, 200, 5.0, POLICY).precise
    assert look((), [0.5] * 12, 12, 5.0, POLICY).precise


def test_the_budget_ends_an_imprecise_window() -> None:
    noisy = list(np.random.default_rng(0).lognormal(0, 1, 20))
    verdict = look((), noisy, 20, 10.0, POLICY)
    assert verdict.stop and not verdict.precise


def test_max_steps_end_a_window() -> None:
    policy = POLICY.model_copy(update={"max_steps": 12})
    assert look((), [0.1] * 12, 12, 1.2, policy).stop


@pytest.mark.parametrize("n", [12, 100])
def test_a_window_of_few_steps_after_very_many_ends_with_a_verdict(n: int) -> None:
    """What came before was averaged to blocks longer than half the window, whose mean was divided by 0."""
    before, policy = [0.001] * 60_000 + [0.00101] * 3, POLICY.model_copy(update={"max_steps": n})
    window = [0.001, 0.001001] * (n // 2)
    assert look(before, window, n, 0.001 * n, policy).stop and judge(before, window, policy) == []


def test_too_few_finished_steps_are_no_verdict() -> None:
    verdict = look((), [0.5] * 3, 40, 1.0, POLICY)
    assert not verdict.stop and verdict.interval is None
    assert judge((), [0.5] * 3, POLICY) == ["imprecise"]


def test_remaining_time_is_an_estimate_within_the_budget() -> None:
    assert look((), [0.25] * 8, 8, 2.0, POLICY).remaining == pytest.approx(5.5)  # 22 more steps
    rng = np.random.default_rng(0)
    assert look((), list(0.5 + 0.2 * rng.standard_normal(10)), 10, 5.0, POLICY).remaining == pytest.approx(5.0)


def test_warm_up_ends_when_steady_or_out_of_time() -> None:
    falling = [2.0 * 0.7**i for i in range(8)]
    assert not settled(falling, POLICY) and not warm_up_over(falling, 4.9, POLICY)
    assert warm_up_over(falling, 5.0, POLICY)
    assert not settled([1.0] * 5, POLICY) and settled([1.0] * 6, POLICY)


def test_warm_up_has_its_shortest_time() -> None:
    steady = [0.1] * 40
    assert not warm_up_over(steady, 3.9, POLICY, 4.0) and warm_up_over(steady, 4.0, POLICY, 4.0)


def test_a_window_that_drifts_goes_on_and_is_flagged() -> None:
    """A slow settling is no reason to stop, however narrow the interval of what it did so far."""
    noise = 0.003 * np.random.default_rng(2).standard_normal(300)
    falling = 0.05 * (1 + 0.03 * np.exp(-0.05 * np.arange(300) / 60) + noise)
    verdict = look(falling[:200], falling[200:], 100, 5.0, POLICY)
    assert verdict.interval is not None and verdict.interval.relative < POLICY.target and verdict.precise and not verdict.stop
    assert "not_steady" in judge(falling[:200], falling[200:], POLICY)
    level = 0.05 * (1 + noise)
    assert look(level[:200], level[200:], 100, 5.0, POLICY).stop and judge(level[:200], level[200:], POLICY) == []


@pytest.mark.parametrize(("n", "before"), [(20, 2000), (1000, 5000)])
def test_a_short_window_that_drifts_after_a_long_warm_up_is_flagged(n: int, before: int) -> None:
    """By six standard deviations of a step: beside all that came before, that was none."""
    level = 1 + 0.003 * np.random.default_rng(2).standard_normal(before + n)
    falling = level + 0.018 * np.append(np.zeros(before), np.linspace(0, 1, n))
    assert "not_steady" in judge(falling[:before], falling[before:], POLICY)
    assert judge(level[:before], level[before:], POLICY) == []


def test_a_window_that_opened_too_early_is_flagged() -> None:
    noise = 0.002 * np.random.default_rng(2).standard_normal(300)
    series = 1 + noise + np.where(np.arange(300) < 60, 0.3, 0.0)
    assert "not_steady" in judge(series[:20], series[20:], POLICY)
    assert judge(series[:80], series[80:], POLICY) == []


def test_the_window_says_which_changes_it_could_see() -> None:
    assert seen([0.05] * 400) == (pytest.approx(0.05), pytest.approx(1.0))


def test_looks_are_rare_beside_the_steps() -> None:
    assert steps_until_next_look([], 0) == 1
    assert steps_until_next_look([1 / 128] * 30, 0) == steps_until_next_look([1 / 128] * 70, 70) == 64
    assert steps_until_next_look([3.0] * 5, 5) == 1
    assert steps_until_next_look([1e-5] * 2000, 2000) == 1000
    assert steps_until_next_look([1.0] * 400, 400) == 20


@pytest.mark.parametrize("steps", [[0.001] + [0.2] * 999, [0.001, 0.001, 0.001, 2.0] * 250, [0.5] * 20 + [0.001] * 980])
def test_a_look_does_not_wait_long_for_steps_unlike_most(steps: list[float]) -> None:
    """Of some that were short by luck, half a second's worth may take minutes."""
    launched = looks = 0
    while launched < len(steps):
        more, so_far = steps_until_next_look(steps[:launched], launched), sum(steps[:launched])
        assert sum(steps[launched : launched + more]) <= max(1.0, 0.1 * so_far) + max(steps)
        launched, looks = launched + more, looks + 1
    assert looks <= max(sum(steps) / 0.25, 60)


def test_a_first_step_that_waits_for_its_launch_is_no_settling() -> None:
    """On a device that never varies the window's first step alone is longer, by a launch: the rest has no interval to hold the mean in."""
    assert judge([0.05] * 20, [0.0501] + [0.05] * 39, POLICY) == []


@pytest.mark.parametrize(
    ("benchmark", "step", "waves"), [("gpt", 0.2, 0.01), ("gpt", 0.4, 0.01), ("resnet50", 0.7, 0.01), ("resnet50", 1.4, 0.0)]
)
def test_quick_knows_the_rate_of_a_quiet_machine(benchmark: str, step: float, waves: float) -> None:
    """In nine of ten runs: steps with a spread of 3 %, and waves that last seconds. Of steps of 1.4 s too few fit into its time to tell
    such waves apart: 89 % of those windows are precise."""
    rng, share = np.random.default_rng(0), []
    policy = next(one.measure for one in load_suite("quick").suite.benchmark if one.name == benchmark)
    assert policy is not None and policy.target == 0.02
    for _ in range(100):
        wave, rest = np.exp(-step / 3.0), rng.standard_normal(1000)
        for index in range(1, len(rest)):
            rest[index] = wave * rest[index - 1] + np.sqrt(1 - wave**2) * rest[index]
        seconds = (step * np.exp(waves * rest + 0.03 * rng.standard_normal(1000))).tolist()
        begin = next(n for n in range(2, 1000) if warm_up_over(seconds[:n], sum(seconds[:n]), policy))
        warm_up, steps, launched = seconds[:begin], seconds[begin:], 1
        while not look(warm_up, steps[:launched], launched, sum(steps[:launched]), policy).stop:
            launched += steps_until_next_look(steps[:launched], launched)
        share.append("imprecise" not in judge(warm_up, steps[:launched], policy))
    assert np.mean(share) >= 0.9


def test_the_slowest_of_many_ranks_is_judged_by_its_wider_interval() -> None:
    """Of 64 ranks, each at its own pace, what one knows to 0.7 %, the slowest of them knows to twice that."""
    steps = (1 + 0.08 * np.random.default_rng(3).standard_normal(600)).tolist()
    policy = Policy(target=0.01)
    assert judge((), steps, policy) == [] and judge((), steps, policy, 64) == ["imprecise"]
    alone, many = (look((), steps, 600, 30.0, policy, paces=paces) for paces in (1, 64))
    assert alone.stop and not many.stop and alone.interval is not None and many.interval is not None
    assert many.interval.relative > 1.8 * alone.interval.relative
