"""Run-to-run variation: from repeats, or assumed; and that the assumption is what was published."""

from __future__ import annotations

import itertools
import math
from statistics import fmean, variance

import pytest
from run_factory import metric, repeats, run

from caraml.analysis.grouping import same_work
from caraml.analysis.published import published
from caraml.analysis.spread import EARNED, SINGLE_RUN_SD, SMALLEST_SD, TYPICAL_SD, Z95, estimate, estimates, spread, values


def test_a_single_run_varies_by_what_is_assumed_and_by_its_own_interval() -> None:
    (found,), variation = estimates([[run(1000, half=0.02)]], "throughput")
    assert found is not None and found.value == 1000
    assert found.sd == pytest.approx(math.hypot(SINGLE_RUN_SD, math.log(1.02 / 0.98) / 2 / Z95))
    assert "assumed" in variation.sentence


def test_repeats_replace_the_assumption() -> None:
    rates = [1000.0, 1010.0, 990.0, 1005.0]
    (found,), variation = estimates([repeats(rates)], "throughput")
    squares = variance([math.log(rate) for rate in rates])
    assert found is not None
    assert found.sd == pytest.approx(math.sqrt((TYPICAL_SD**2 + 3 * squares) / 4 / 4))
    assert variation.dof == 3 + EARNED and "repeats" in variation.sentence


def test_repeats_of_one_work_speak_for_work_without() -> None:
    (many, single), variation = estimates([repeats([1000, 1010, 990]), [run(500, global_batch=32)]], "throughput")
    assert many is not None and single is not None and many.sd is not None
    assert single.sd == pytest.approx(many.sd * math.sqrt(3)) and variation.own == {}


def test_work_whose_spread_differs_stands_for_itself() -> None:
    quiet, noisy = repeats([1000, 1001, 999, 1000]), repeats([500, 600, 400, 550], global_batch=32)
    groups, variation = estimates([quiet, noisy, [run(100, global_batch=64)]], "throughput")
    sds = [one.sd for one in groups if one is not None and one.sd is not None]
    assert sds[0] < 0.01 < sds[1] and variation.own.keys() == {1}
    assert sds[2] == pytest.approx(2 * sds[0]), "what was not repeated is taken to be as quiet as most"


def test_never_less_than_the_runs_own_intervals_say() -> None:
    (found,), _ = estimates([repeats([1000, 1000, 1000], half=0.05)], "throughput")
    assert found is not None and found.sd is not None and found.sd * math.sqrt(3) > 0.02


def test_what_has_no_interval_and_no_repeats_has_no_error() -> None:
    (found,), variation = estimates([[run(10, half=None)]], "throughput")
    assert found is not None and found.sd is None and found.low is None
    (found,), variation = estimates([[run(10, more={"peak_memory": metric(3e9, "B", None)})]], "peak_memory")
    assert found is not None and found.sd is None and "not known" in variation.sentence


def test_equal_repeats_of_other_numbers_still_vary_by_rounding() -> None:
    records = [run(10, repeat=repeat, more={"peak_memory": metric(3e9, "B", None)}) for repeat in range(3)]
    (found,), _ = estimates([records], "peak_memory")
    assert found is not None and found.sd == pytest.approx(SMALLEST_SD / math.sqrt(3))


def test_missing_and_senseless_values_are_left_out() -> None:
    assert values([run(10), run(10, more={"loss_last": metric(-1.0, "1")})], "loss_last") == []
    assert estimate([], 0.01, 3) is None
    assert spread([[]], "throughput").sd == SINGLE_RUN_SD


def published_repeats() -> list[list[float]]:
    """Logarithms of the time per epoch of MAELSTROM's equal runs: tables 6 to 16 and 35 to 38."""
    sets: list[list[float]] = []
    for table in (*range(6, 17), *range(35, 39)):
        for work in same_work(published(f"reference:maelstrom/{table}")):
            sets.append([math.log(value) for value, _ in values(work, "epoch_time_mean")])
    return [one for one in sets if len(one) > 1]


def polygamma(x: float) -> tuple[float, float]:
    """Digamma and trigamma by their recurrences and asymptotic series (Abramowitz & Stegun 6.3.18 and 6.4.12)."""
    first, second = 0.0, 0.0
    while x < 8:
        first, second, x = first - 1 / x, second + 1 / x**2, x + 1
    f = 1 / x**2
    return first + math.log(x) - 0.5 / x - f * (1 / 12 - f * (1 / 120 - f / 252)), second + 1 / x + f / 2 + f / x * (
        1 / 6 - f * (1 / 30 - f / 42)
    )


def test_the_constants_are_those_of_the_published_repeats() -> None:
    sets = published_repeats()
    assert len(sets) == 27
    spreads = [(variance(one), (len(one) - 1) / 2) for one in sets]
    logs = [math.log(square) - polygamma(half)[0] + math.log(half) for square, half in spreads]
    surplus = variance(logs) - fmean(polygamma(half)[1] for _, half in spreads)
    dof = 2 * min((x / 100 for x in range(5, 500)), key=lambda x: abs(polygamma(x)[1] - surplus))
    typical = math.exp((fmean(logs) + polygamma(dof / 2)[0] - math.log(dof / 2)) / 2)
    assert dof == pytest.approx(1.0, abs=0.1) and typical == pytest.approx(TYPICAL_SD, rel=0.02)
    pairs = sorted((abs(a - b), 1 / math.comb(len(one), 2)) for one in sets for a, b in itertools.combinations(one, 2))
    below = itertools.accumulate(weight for _, weight in pairs)
    reach = next(difference for (difference, _), share in zip(pairs, below, strict=True) if share >= 0.95 * len(sets))
    assert reach == pytest.approx(Z95 * math.sqrt(2) * SINGLE_RUN_SD, rel=0.01)
