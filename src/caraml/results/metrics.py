"""The metrics of one record, each with its formula in one place.

Inputs are what a worker measured over one window; outputs are :class:`~caraml.results.record.Metric` objects whose names, units and
definitions stand in :mod:`caraml.units`. Rates are totals over the window divided by the window's time, never means of rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraml.power.model import BoundaryEnergy, WindowEnergy
from caraml.results.limits import limits
from caraml.results.record import Bandwidth, Facts, Metric, Peak, Window
from caraml.stats import Interval, mean_interval
from caraml.units import ENERGY_METRICS, JOULES_PER_WATT_HOUR, unit_of


@dataclass(frozen=True)
class Measured:
    """What the worker knows when its window has closed. Times in seconds."""

    window: Window
    step_times: Sequence[float]
    """Per step of the window, the slowest rank's time."""
    data_wait: float
    """Longest total wait for batches of any rank inside the window."""
    world: int
    facts: Facts
    first_step_time: float
    time_to_first_step: float
    peak_memory: int | None
    losses: Sequence[float]
    """Every step's training loss from the first on, warm-up included; empty if the mode has none."""


def derive(
    measured: Measured,
    energy: WindowEnergy | None,
    idle: WindowEnergy | None,
    datasheet: Peak,
    probed: Peak,
    *,
    bandwidth: Bandwidth | None = None,
) -> dict[str, Metric]:
    """All metrics of one measured window."""
    interval = mean_interval(measured.step_times)
    return {
        **_rates(measured, interval),
        **_step_times(measured, interval),
        **_utilisation(measured, interval, datasheet, probed),
        **limits(measured.facts, measured.window, measured.world, probed, bandwidth),
        **energies(measured.window, measured.facts.item, energy, idle),
        **_losses(measured.losses),
    }


def _rate(amount: float, seconds: float, unit: str, interval: Interval) -> Metric:
    """``amount / seconds``, with the relative interval of the mean step time turned into one of the rate."""
    value, relative = amount / seconds, interval.relative
    if not relative < 1:
        reason = "step times vary too much for an interval" if math.isfinite(relative) else "too few steps for an interval"
        return Metric(value=value, unit=unit, n=interval.n, reason=reason)
    return Metric(value=value, unit=unit, low=value / (1 + relative), high=value / (1 - relative), n=interval.n)


def _scaled(metric: Metric, factor: float, unit: str) -> Metric:
    """The metric times an exactly known factor."""
    if metric.value is None:
        return metric.model_copy(update={"unit": unit})
    low, high = (None if bound is None else bound * factor for bound in (metric.low, metric.high))
    return metric.model_copy(update={"value": metric.value * factor, "unit": unit, "low": low, "high": high})


def _rates(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window, facts = measured.window, measured.facts
    throughput = _rate(window.items, window.seconds, unit_of("throughput", facts.item), interval)
    metrics = {
        "throughput": throughput,
        "throughput_per_device": _scaled(throughput, 1 / measured.world, throughput.unit),
        "data_wait_share": Metric(value=measured.data_wait / window.seconds, unit="1"),
    }
    if facts.bytes_per_sample is not None:
        metrics["input_bandwidth"] = _rate(window.samples * facts.bytes_per_sample, window.seconds, "B/s", interval)
    return metrics


def _step_times(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window = measured.window
    p5, median, p95 = np.quantile(measured.step_times, [0.05, 0.5, 0.95])
    mean, half = window.seconds / window.steps, interval.half_width
    low, high = (mean - half, mean + half) if math.isfinite(half) else (None, None)

    def seconds(value: float) -> Metric:
        return Metric(value=float(value), unit="s", n=interval.n)

    return {
        "window_time": seconds(window.seconds),
        "steps": Metric(value=window.steps, unit="1"),
        "step_time_mean": Metric(value=mean, unit="s", low=low, high=high, n=interval.n),
        "step_time_median": seconds(median),
        "step_time_p5": seconds(p5),
        "step_time_p95": seconds(p95),
        "step_time_min": seconds(min(measured.step_times)),
        "step_time_max": seconds(max(measured.step_times)),
        "first_step_time": seconds(measured.first_step_time).model_copy(update={"n": 1}),
        "time_to_first_step": seconds(measured.time_to_first_step).model_copy(update={"n": 1}),
    }


def _utilisation(measured: Measured, interval: Interval, datasheet: Peak, probed: Peak) -> dict[str, Metric]:
    facts, window = measured.facts, measured.window
    memory = Metric(value=measured.peak_memory, unit="B", reason=None if measured.peak_memory is not None else "the device reports no peak")
    metrics = {"peak_memory": memory}
    if facts.flops_per_item is None:
        reason = "no arithmetic is counted in this mode or for this workload"
        names = ("achieved_flops_per_device", "mfu", "mfu_measured", "hfu")
        return metrics | {name: Metric(value=None, unit=unit_of(name), reason=reason) for name in names}
    per_device = facts.flops_per_item * window.items / measured.world
    achieved = _rate(per_device, window.seconds, "FLOP/s", interval)
    metrics["achieved_flops_per_device"] = achieved
    for name, peak in (("mfu", datasheet), ("mfu_measured", probed)):
        metrics[name] = _share_of_peak(achieved, peak)
    metrics["hfu"] = _hardware_utilisation(facts, achieved, datasheet)
    return metrics


def _hardware_utilisation(facts: Facts, achieved: Metric, datasheet: Peak) -> Metric:
    """Share of the peak that the device was busy with, what it computed again to save memory included."""
    if facts.hardware_flops_per_item is None or not facts.flops_per_item:
        return Metric(value=None, unit="1", reason="the workload does not say what it computes again")
    return _share_of_peak(_scaled(achieved, facts.hardware_flops_per_item / facts.flops_per_item, achieved.unit), datasheet)


def _share_of_peak(achieved: Metric, peak: Peak) -> Metric:
    """Achieved over peak; no number where the peak is not known, or is below what was achieved and so cannot be one."""
    assert achieved.value is not None
    if peak.value is None:
        return Metric(value=None, unit="1", reason=peak.reason)
    if achieved.value > peak.value:
        return Metric(value=None, unit="1", reason=f"training reached more than this peak of {peak.value:.3g} FLOP/s ({peak.source})")
    return _scaled(achieved, 1 / peak.value, "1")


def energies(window: Window, item: str, energy: WindowEnergy | None, idle: WindowEnergy | None) -> dict[str, Metric]:
    """Energy, power and what follows from both, of a window and its items."""
    headline = energy.headline() if energy is not None else None
    if energy is None or headline is None:
        reason = (energy.reason if energy is not None else None) or "energy was not measured"
        return {name: Metric(value=None, unit=unit_of(name, item), reason=reason) for name in ENERGY_METRICS}
    scope, boundary = headline
    joules, bound = boundary.energy_j, boundary.bound_j
    assert joules is not None
    doubt = None if boundary.valid else f"not valid: {boundary.reason or ', '.join(energy.flags)}"
    total = _bounded(joules, bound, "J", scope, doubt)
    metrics = {
        "energy": total,
        "energy_per_item": _scaled(total, 1 / window.items, unit_of("energy_per_item", item)),
        "items_per_watt_hour": _inverse(total, window.items * JOULES_PER_WATT_HOUR, unit_of("items_per_watt_hour", item)),
        "mean_power": _scaled(total, 1 / window.seconds, "W"),
        "energy_time_product": _scaled(total, window.seconds, "J s"),
    }
    return {**metrics, **_idle(total, boundary, window, scope, idle)}


def _idle(total: Metric, boundary: BoundaryEnergy, window: Window, scope: str, idle: WindowEnergy | None) -> dict[str, Metric]:
    baseline = idle.boundaries.get(scope) if idle is not None else None
    if idle is None or baseline is None or baseline.energy_j is None or boundary.energy_j is None:
        reason = "no idle baseline was measured"
        return {name: Metric(value=None, unit=unit_of(name), scope=scope, reason=reason) for name in ("idle_power", "energy_net")}
    seconds = idle.end - idle.start
    error = None if baseline.bound_j is None else baseline.bound_j / seconds
    watts = baseline.energy_j / seconds
    net = boundary.energy_j - watts * window.seconds
    bound = None if error is None or boundary.bound_j is None else boundary.bound_j + error * window.seconds
    return {"idle_power": _bounded(watts, error, "W", scope, None), "energy_net": _bounded(net, bound, "J", scope, total.reason)}


def _bounded(value: float, bound: float | None, unit: str, scope: str, reason: str | None) -> Metric:
    """``value ± bound``."""
    low, high = (None, None) if bound is None else (value - bound, value + bound)
    return Metric(value=value, unit=unit, low=low, high=high, scope=scope, reason=reason)


def _inverse(metric: Metric, numerator: float, unit: str) -> Metric:
    """``numerator / metric``; the interval's ends change places."""
    if not metric.value or metric.value <= 0:
        return Metric(value=None, unit=unit, scope=metric.scope, reason="the energy is not above zero")
    low = numerator / metric.high if metric.high else None
    high = numerator / metric.low if metric.low and metric.low > 0 else None
    return Metric(value=numerator / metric.value, unit=unit, low=low, high=high, scope=metric.scope, reason=metric.reason)


def _losses(losses: Sequence[float]) -> dict[str, Metric]:
    if not losses or not all(math.isfinite(loss) for loss in losses):
        reason = "this mode trains nothing" if not losses else "the loss became NaN or infinite"
        return {name: Metric(value=None, unit="1", reason=reason) for name in ("loss_first", "loss_last")}
    tail = losses[-max(3, len(losses) // 10) :]
    return {"loss_first": Metric(value=losses[0], unit="1"), "loss_last": Metric(value=float(np.mean(tail)), unit="1", n=len(tail))}
