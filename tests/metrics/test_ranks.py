"""The slowest rank and by how much; utilisation with what is computed again."""

from __future__ import annotations

import pytest

from caraml.metrics.model import Facts, Measured, Peak, Window
from caraml.metrics.run import rank_metrics
from caraml.metrics.window import derive
from tests.conftest import MakePoint


def test_the_slowest_rank_is_named_with_its_distance_from_the_median() -> None:
    found = rank_metrics([1.0, 1.0, 1.25, 0.5])
    assert found["slowest_rank"].value == 2 and found["rank_imbalance"].value == pytest.approx(0.25) and found["rank_imbalance"].n == 4


def test_one_rank_has_no_other_to_compare_with() -> None:
    assert all(metric.value is None and metric.reason for metric in rank_metrics([1.0]).values())


@pytest.mark.parametrize(("hardware", "expected"), [(40.0, 0.4), (30.0, 0.3), (None, None)])
def test_hfu_counts_what_is_computed_again(hardware: float | None, expected: float | None, make_point: MakePoint) -> None:
    """1000 items of 30 FLOPs in 10 s on one device of 10,000 FLOP/s: MFU 0.3."""
    facts = Facts(item="token", items_per_sample=1, parameters=1, flops_per_item=30, flops_formula="-", hardware_flops_per_item=hardware)
    window = Window(start=0, end=10, steps=10, samples=1000, items=1000, first_step=1)
    measured = Measured(make_point(), facts, window, [1.0] * 11, 0.0, 1.0, 1.0)
    metrics = derive(measured, None, None, Peak(value=1e4, dtype="bf16"), Peak(value=None, dtype="bf16", reason="not probed"))
    assert metrics["mfu"].value == pytest.approx(0.3)
    assert metrics["hfu"].value == (None if expected is None else pytest.approx(expected))
    assert metrics["hfu"].value is not None or metrics["hfu"].reason
