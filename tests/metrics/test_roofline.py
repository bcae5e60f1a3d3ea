"""The roofline's numbers, by hand."""

from __future__ import annotations

import pytest

from caraml.metrics.model import Bandwidth, Facts, Metric, Peak, Window
from caraml.metrics.window import LIMIT_METRICS, bandwidth_of, fed_bandwidth, limit_flags, limits, peak_of
from caraml.system.limits import Look
from tests.system.test_system_limits import limit

WINDOW = Window(start=1.0, end=11.0, steps=20, samples=400, items=400, first_step=3)
STREAM = Bandwidth(value=1e9)


def facts(**values: float | None) -> Facts:
    given = {"flops_per_item": 2e8, "traffic_per_item": 1e7, "traffic_per_step": 5e7, **values}
    return Facts(item="image", items_per_sample=1, parameters=1, flops_formula="known", **given)  # type: ignore[arg-type]


def peak(value: float | None, dtype: str = "fp32") -> Peak:
    return Peak(value=value, dtype=dtype, reason=None if value else "not measured")


def test_memory_binds() -> None:
    # Of one device of two: 200 images x 10 MB + 20 steps x 50 MB = 3 GB, 200 x 200 MFLOP = 40 GFLOP, in 10 s.
    found = limits(facts(), WINDOW, 2, probed=peak(1e12), memory=STREAM)
    assert found["memory_traffic"].value == pytest.approx(0.3e9)
    assert found["arithmetic_intensity"].value == pytest.approx(40 / 3)
    assert found["share_of_limit"].value == pytest.approx(0.3) and found["share_of_limit"].scope == "memory"


def test_arithmetic_binds() -> None:
    found = limits(facts(), WINDOW, 2, probed=peak(8e9), memory=STREAM)["share_of_limit"]
    assert found.value == pytest.approx(0.5) and found.scope == "arithmetic"


@pytest.mark.parametrize(
    ("cached", "bandwidth", "level"),
    [
        (None, 1e9, "memory"),
        (0.0, 1e9, "memory"),
        (0.5, 1 / (0.5e-9 + 0.125e-9), "memory"),
        (0.9, 1 / 3.25e-10, "cache"),
        (1.0, 4e9, "cache"),
    ],
)
def test_what_the_cache_holds_comes_at_its_speed(cached: float | None, bandwidth: float, level: str) -> None:
    found, scope = fed_bandwidth(facts(cached_traffic_share=cached), STREAM, Bandwidth(value=4e9, level="cache"))
    assert found == pytest.approx(bandwidth) and scope == level
    share = limits(facts(cached_traffic_share=cached), WINDOW, 2, probed=peak(1e12), memory=STREAM, cache=Bandwidth(value=4e9))
    assert share["share_of_limit"].value == pytest.approx(0.3 * 1e9 / bandwidth) and share["share_of_limit"].scope == level


def test_a_cache_that_was_measured_slower_than_memory_slows_nothing() -> None:
    assert fed_bandwidth(facts(cached_traffic_share=1.0), STREAM, Bandwidth(value=0.5e9))[0] == pytest.approx(1e9)
    assert fed_bandwidth(facts(cached_traffic_share=1.0), STREAM, Bandwidth(value=None, reason="not known"))[0] == pytest.approx(1e9)


def test_sixteen_bits_move_half_of_what_grows_with_the_batch() -> None:
    assert limits(facts(), WINDOW, 2, probed=peak(1e12, "bf16"), memory=STREAM)["memory_traffic"].value == pytest.approx(0.2e9)


def test_a_rate_above_its_limit_is_shown_and_flagged() -> None:
    found = limits(facts(), WINDOW, 2, probed=peak(1e9), memory=STREAM, relative=0.02)
    assert found["share_of_limit"].value == pytest.approx(4) and found["share_of_limit"].reason is None
    assert limit_flags(found, (peak(1e9), STREAM, None)) == ["limit_too_low"]
    assert limit_flags({"mfu": Metric(value=1.01, unit="1")}, ()) == ["limit_too_low"]
    assert limit_flags({"mfu": Metric(value=None, unit="1", reason="no"), "mfu_measured": Metric(value=1.0, unit="1")}, ()) == []


@pytest.mark.parametrize(
    ("given", "peak_value", "stream", "word"),
    [
        ({"traffic_per_item": None}, 1e12, STREAM, "does not estimate"),
        ({}, None, STREAM, "not measured"),
        ({}, 1e12, None, "bandwidth was not measured"),
        ({}, 1e12, Bandwidth(value=None, reason="no memory"), "no memory"),
    ],
)
def test_what_is_not_known_is_null_with_the_reason(given: dict[str, None], peak_value: float, stream: Bandwidth | None, word: str) -> None:
    found = limits(facts(**given), WINDOW, 2, probed=peak(peak_value), memory=stream)
    assert set(found) == set(LIMIT_METRICS)
    assert found["share_of_limit"].value is None and word in (found["share_of_limit"].reason or "")


def test_a_record_names_the_kernel_its_shape_and_its_date() -> None:
    best = limit(437e9)
    told = peak_of(Look(best, limit(430e9)), "fp32")
    assert (told.value, told.low, told.high, told.dtype) == (437e9, best.low, best.high, "fp32")
    assert (told.kernel, told.shape, told.measured_at) == ("oneDNN linear layer", [2048, 2048, 2048], best.measured_at)
    assert told.by_kernel == {"oneDNN linear layer": 437e9} and told.disturbed is None
    assert told.source is not None and "oneDNN linear layer 2048 x 2048 x 2048" in told.source and best.measured_at[:10] in told.source
    stream = bandwidth_of(Look(limit(15e9, kind="memory", kernel="triad", shape=(2**26,)), limit(8e9)), "memory")
    assert stream.source is not None and stream.source.startswith("triad of 64 MiB arrays in memory") and stream.disturbed is not None
    assert limit_flags({}, (told, stream, None)) == ["disturbed_probe"]
    assert peak_of("no such format", "bf16").reason == "no such format" and bandwidth_of("nobody knows", "cache").level == "cache"
