"""The roofline's three numbers, by hand."""

from __future__ import annotations

import pytest

from caraml.results.limits import LIMIT_METRICS, limits
from caraml.results.record import Bandwidth, Facts, Peak, Window

WINDOW = Window(start=1.0, end=11.0, steps=20, samples=400, items=400, first_step=3)
STREAM = Bandwidth(value=1e9)


def facts(**values: float | None) -> Facts:
    given = {"flops_per_item": 2e8, "traffic_per_item": 1e7, "traffic_per_step": 5e7, **values}
    return Facts(item="image", items_per_sample=1, parameters=1, flops_formula="known", **given)  # type: ignore[arg-type]


def peak(value: float | None, dtype: str = "fp32") -> Peak:
    return Peak(value=value, dtype=dtype, reason=None if value else "not measured")


def test_memory_binds() -> None:
    # Of one device of two: 200 images x 10 MB + 20 steps x 50 MB = 3 GB, 200 x 200 MFLOP = 40 GFLOP, in 10 s.
    found = limits(facts(), WINDOW, 2, peak(1e12), STREAM)
    assert found["memory_traffic"].value == pytest.approx(0.3e9)
    assert found["arithmetic_intensity"].value == pytest.approx(40 / 3)
    assert found["share_of_limit"].value == pytest.approx(0.3) and found["share_of_limit"].scope == "memory"


def test_arithmetic_binds() -> None:
    found = limits(facts(), WINDOW, 2, peak(8e9), STREAM)["share_of_limit"]
    assert found.value == pytest.approx(0.5) and found.scope == "arithmetic"


def test_sixteen_bits_move_half_of_what_grows_with_the_batch() -> None:
    assert limits(facts(), WINDOW, 2, peak(1e12, "bf16"), STREAM)["memory_traffic"].value == pytest.approx(0.2e9)


@pytest.mark.parametrize(
    ("given", "peak_value", "stream", "word"),
    [
        ({"traffic_per_item": None}, 1e12, STREAM, "does not estimate"),
        ({}, None, STREAM, "not measured"),
        ({}, 1e12, None, "bandwidth was not measured"),
        ({}, 1e12, Bandwidth(value=None, reason="no memory"), "no memory"),
        ({}, 1e9, STREAM, "faster than the limit by arithmetic"),
    ],
)
def test_what_is_not_known_is_null_with_the_reason(given: dict[str, None], peak_value: float, stream: Bandwidth | None, word: str) -> None:
    found = limits(facts(**given), WINDOW, 2, peak(peak_value), stream)
    assert set(found) == set(LIMIT_METRICS)
    assert found["share_of_limit"].value is None and word in (found["share_of_limit"].reason or "")
