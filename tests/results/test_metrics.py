"""Every formula of a record against arithmetic done by hand."""

from __future__ import annotations

import pytest

from caraml.power.model import BoundaryEnergy, WindowEnergy
from caraml.results.metrics import Measured, derive
from caraml.results.record import Facts, Metric, Peak, Window
from caraml.units import METRICS, unit_of

FACTS = Facts(item="token", items_per_sample=100, parameters=7, flops_per_item=1e6, flops_formula="known", bytes_per_sample=200)
WINDOW = Window(start=5.0, end=25.0, steps=40, samples=320, items=32_000, first_step=7)
SHEET, PROBED = Peak(value=4e9, dtype="fp32", source="sheet"), Peak(value=2e9, dtype="fp32", source="probe")


def measured(**changes: object) -> Measured:
    values = {
        "window": WINDOW,
        "step_times": [0.4, 0.6] * 20,
        "data_wait": 3.0,
        "world": 2,
        "facts": FACTS,
        "first_step_time": 1.5,
        "time_to_first_step": 4.0,
        "peak_memory": 1000,
        "losses": [4.0, 3.0, 2.0, 1.0, 0.5],
    }
    return Measured(**{**values, **changes})  # type: ignore[arg-type]


def energy(joules: float, bound: float, seconds: float = 20.0, valid: bool = True) -> WindowEnergy:
    boundary = BoundaryEnergy(energy_j=joules, bound_j=bound, valid=valid, reason=None if valid else "sensor died")
    return WindowEnergy(name="w", start=0.0, end=seconds, boundaries={"device": boundary}, valid=valid)


def values(metrics: dict[str, Metric]) -> dict[str, float | None]:
    return {name: metric.value for name, metric in metrics.items()}


def test_rates_times_and_utilisation() -> None:
    found = values(derive(measured(), None, None, SHEET, PROBED))
    assert found["throughput"] == 32_000 / 20
    assert found["throughput_per_device"] == 800
    assert found["step_time_mean"] == 0.5
    assert found["step_time_median"] == pytest.approx(0.5)
    assert (found["step_time_min"], found["step_time_max"]) == (0.4, 0.6)
    assert found["data_wait_share"] == 3 / 20
    assert found["input_bandwidth"] == 320 * 200 / 20
    assert found["achieved_flops_per_device"] == 32_000 * 1e6 / 20 / 2
    assert found["mfu"] == pytest.approx(8e8 / 4e9)
    assert found["mfu_measured"] == pytest.approx(8e8 / 2e9)
    assert (found["loss_first"], found["loss_last"]) == (4.0, pytest.approx(3.5 / 3))


def test_the_rate_is_a_total_over_time_not_a_mean_of_rates() -> None:
    """Steps of 0.4 and 0.6 s: the mean of their rates would be 4 % too high."""
    found = derive(measured(), None, None, SHEET, PROBED)["throughput"].value
    mean_of_rates = (800 / 0.4 + 800 / 0.6) / 2
    assert found == 1600 and mean_of_rates == pytest.approx(1667, rel=1e-3)


def test_the_interval_of_the_rate_follows_from_the_steps() -> None:
    metrics = derive(measured(step_times=[0.49, 0.5, 0.51, 0.5] * 10), None, None, SHEET, PROBED)
    rate, step = metrics["throughput"], metrics["step_time_mean"]
    assert rate.low is not None and rate.high is not None and step.low is not None and step.high is not None
    assert rate.low == pytest.approx(800 / step.high, rel=1e-6) and rate.high == pytest.approx(800 / step.low, rel=1e-6)
    assert rate.n == 40


def test_the_mean_step_is_of_the_whole_window_and_quantiles_are_of_its_steps() -> None:
    """The window is 20 s long; its 40 steps of 0.45 s leave 2 s at the ends, which belong to the rate and so to the mean step."""
    steps = [0.40, 0.42, *([0.45] * 36), 0.48, 0.50]
    found = values(derive(measured(step_times=steps), None, None, SHEET, PROBED))
    assert found["step_time_mean"] == 0.5
    assert found["step_time_p5"] == pytest.approx(0.4485) and found["step_time_p95"] == pytest.approx(0.4515)


def test_too_few_steps_have_no_interval_and_say_so() -> None:
    rate = derive(measured(step_times=[0.5, 0.5, 0.5]), None, None, SHEET, PROBED)["throughput"]
    assert rate.low is None and rate.high is None and "too few" in (rate.reason or "")


def test_energy_and_its_bound_are_carried_through() -> None:
    metrics = derive(measured(), energy(6000, 60), energy(200, 4, seconds=2.0), SHEET, PROBED)
    found = values(metrics)
    assert found["energy"] == 6000 and (metrics["energy"].low, metrics["energy"].high) == (5940, 6060)
    assert found["energy_per_item"] == pytest.approx(6000 / 32_000)
    assert metrics["energy_per_item"].high == pytest.approx(6060 / 32_000)
    assert metrics["energy_per_item"].unit == "J/token"
    assert found["items_per_watt_hour"] == pytest.approx(32_000 / (6000 / 3600))
    assert metrics["items_per_watt_hour"].low == pytest.approx(32_000 / (6060 / 3600))
    assert found["mean_power"] == 300
    assert found["idle_power"] == 100
    assert found["energy_net"] == 6000 - 100 * 20
    assert metrics["energy_net"].low == pytest.approx(4000 - (60 + 2 * 20))
    assert found["energy_time_product"] == 6000 * 20
    assert metrics["energy"].scope == "device"


def test_an_energy_in_doubt_says_so() -> None:
    metric = derive(measured(), energy(6000, 60, valid=False), None, SHEET, PROBED)["energy_per_item"]
    assert metric.value is not None and "sensor died" in (metric.reason or "")


@pytest.mark.parametrize("window", [None, WindowEnergy(name="w", start=0, end=1, flags=["no_source"], reason="no power sensor: a, b, c")])
def test_no_sensor_is_null_with_a_reason_never_zero(window: WindowEnergy | None) -> None:
    metrics = derive(measured(), window, None, SHEET, PROBED)
    for name in ("energy", "energy_net", "energy_per_item", "items_per_watt_hour", "mean_power", "idle_power", "energy_time_product"):
        assert metrics[name].value is None and metrics[name].reason, name


def test_a_missing_idle_baseline_leaves_gross_energy() -> None:
    metrics = derive(measured(), energy(6000, 60), None, SHEET, PROBED)
    assert metrics["energy"].value == 6000 and metrics["energy_net"].value is None and metrics["energy_net"].reason


def test_unknown_peak_gives_no_utilisation() -> None:
    metrics = derive(measured(), None, None, Peak(value=None, dtype="fp32", reason="no data sheet"), PROBED)
    assert metrics["mfu"].value is None and metrics["mfu"].reason == "no data sheet"
    assert metrics["mfu_measured"].value is not None


def test_more_than_the_peak_is_no_utilisation() -> None:
    metrics = derive(measured(), None, None, SHEET, Peak(value=1e8, dtype="fp32", source="disturbed"))
    assert metrics["mfu_measured"].value is None and "more than this peak" in (metrics["mfu_measured"].reason or "")


def test_every_metric_is_in_the_vocabulary_with_its_unit() -> None:
    for name, metric in derive(measured(), energy(1, 0.1), energy(1, 0.1), SHEET, PROBED).items():
        assert name in METRICS
        assert metric.unit == unit_of(name, "token"), name
