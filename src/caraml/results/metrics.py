"""The metrics of one record, each with its formula in one place.

Inputs are what a worker measured over one window; outputs are :class:`~caraml.results.record.Metric` objects whose names, units and
definitions stand in :mod:`caraml.units`. Rates are totals over the window divided by the window's time, never means of rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caraml.power.model import HEADLINES, BoundaryEnergy, WindowEnergy
from caraml.results.limits import limits, over, rate_of
from caraml.results.measured import Measured
from caraml.results.record import Bandwidth, Facts, Metric, Peak, Window
from caraml.stats import Interval, mean_interval, quantile_interval
from caraml.units import ENERGY_METRICS, JOULES_PER_WATT_HOUR, human, unit_of

_QUANTILES = {"step_time_median": 0.5, "step_time_p5": 0.05, "step_time_p95": 0.95}
NOT_TOLD = "the loop does not say how long it waited for its input"


def derive(
    measured: Measured,
    energy: WindowEnergy | None,
    idle: WindowEnergy | None,
    datasheet: Peak,
    probed: Peak,
    *,
    bandwidth: Bandwidth | None = None,
    cache: Bandwidth | None = None,
) -> dict[str, Metric]:
    """All metrics of one measured window."""
    interval = mean_interval(measured.window_steps, before=measured.before)
    facts, window, world = measured.facts, measured.window, measured.point.world
    return {
        **_rates(measured, interval),
        **_step_times(measured, interval),
        **_utilisation(measured, interval, datasheet, probed),
        **limits(facts, window, world, probed=probed, memory=bandwidth, cache=cache, relative=interval.relative),
        **energies(window, facts.item, energy, idle, interval),
        **_losses(measured.losses),
    }


def _rate(amount: float, seconds: float, unit: str, interval: Interval) -> Metric:
    return rate_of(amount, seconds, unit, interval.relative, interval.n)


def scaled(metric: Metric, factor: float, unit: str) -> Metric:
    """The metric times an exactly known factor."""
    if metric.value is None:
        return metric.model_copy(update={"unit": unit})
    ends = {name: None if (end := getattr(metric, name)) is None else end * factor for name in ("low", "high", "bound")}
    return metric.model_copy(update={"value": metric.value * factor, "unit": unit, **ends})


def _rates(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window, facts = measured.window, measured.facts
    throughput = _rate(window.items, window.seconds, unit_of("throughput", facts.item), interval)
    metrics = {
        "throughput": throughput,
        "throughput_per_device": scaled(throughput, 1 / measured.point.world, throughput.unit),
        "data_wait_share": _wait_share(measured),
    }
    if facts.bytes_per_sample is not None:
        metrics["input_bandwidth"] = _rate(window.samples * facts.bytes_per_sample, window.seconds, "B/s", interval)
    return metrics


def _wait_share(measured: Measured) -> Metric:
    if measured.data_wait is None:
        return Metric(value=None, unit="1", reason=NOT_TOLD)
    return Metric(value=measured.data_wait / measured.window.seconds, unit="1")


def _step_times(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window, steps = measured.window, measured.window_steps
    mean, half = window.seconds / window.steps, interval.half_width
    low, high = (mean - half, mean + half) if math.isfinite(half) else (None, None)

    def seconds(value: float) -> Metric:
        return Metric(value=float(value), unit="s", n=interval.n)

    return {
        "window_time": seconds(window.seconds),
        "steps": Metric(value=window.steps, unit="1"),
        "step_time_mean": Metric(value=mean, unit="s", low=low, high=high, n=interval.n),
        **{name: _quantile(np.sort(steps), share, interval) for name, share in _QUANTILES.items()},
        "step_time_min": seconds(min(steps)),
        "step_time_max": seconds(max(steps)),
        "first_step_time": seconds(measured.first_step_time).model_copy(update={"n": 1}),
        "time_to_first_step": seconds(measured.time_to_first_step).model_copy(update={"n": 1}),
    }


def _quantile(ordered: NDArray[np.float64], share: float, interval: Interval) -> Metric:
    """A quantile of the step times. The interval of their mean says how many independent steps the window is worth."""
    if ordered.size * min(share, 1 - share) < 1:
        return Metric(value=None, unit="s", n=interval.n, reason=f"{ordered.size} steps have no {100 * share:.0f}th percentile")
    value = float(np.quantile(ordered, share))
    found = Metric(value=value, unit="s", n=interval.n)
    ends = quantile_interval(ordered, share, interval.effective_n)
    if ends is None:
        return found.model_copy(update={"reason": "too few independent steps for an interval"})
    return found.model_copy(update={"low": min(ends[0], value), "high": max(ends[1], value)})


def _utilisation(measured: Measured, interval: Interval, datasheet: Peak, probed: Peak) -> dict[str, Metric]:
    facts, window = measured.facts, measured.window
    memory = measured.device_memory
    metrics = {"peak_memory": Metric(value=memory, unit="B", reason=None if memory is not None else "the device reports no peak")}
    if facts.flops_per_item is None:
        reason = "no arithmetic is counted in this mode or for this workload"
        names = ("achieved_flops_per_device", "mfu", "mfu_measured", "hfu")
        return metrics | {name: Metric(value=None, unit=unit_of(name), reason=reason) for name in names}
    per_device = facts.flops_per_item * window.items / measured.point.world
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
    return _share_of_peak(scaled(achieved, facts.hardware_flops_per_item / facts.flops_per_item, achieved.unit), datasheet)


def _share_of_peak(achieved: Metric, peak: Peak) -> Metric:
    """Achieved over peak; no number where the peak is not known. One above 1 says that the peak is none: the record is flagged."""
    if peak.value is None:
        return Metric(value=None, unit="1", reason=peak.reason)
    return over(achieved, peak.value, peak)


def joules(energy: WindowEnergy | None, *boundaries: str) -> Metric:
    """Energy [J] at the first of these boundaries that has a sensor, with its bound; where one went silent, why, and what is known."""
    sensed = energy.sensed(*boundaries) if energy is not None else None
    if energy is None or sensed is None:
        reason = (energy.reason if energy is not None else "energy was not measured") or "no sensor of this boundary answered"
        return Metric(value=None, unit="J", reason=reason)
    scope, found = sensed
    if found.energy_j is None:
        known = "" if found.partial_j is None else f"; what is known adds up to {human(found.partial_j, 'J')}"
        return Metric(value=None, unit="J", scope=scope, reason=f"{found.reason or energy.reason or 'no number'}{known}")
    doubt = None if found.valid else f"not valid: {found.reason or ', '.join(energy.flags)}"
    return Metric(value=found.energy_j, unit="J", bound=found.bound_j, scope=scope, reason=doubt)


def energies(
    window: Window, item: str, energy: WindowEnergy | None, idle: WindowEnergy | None, interval: Interval | None = None
) -> dict[str, Metric]:
    """Energy, power and what follows from both, of a window and its items, each with the bound of its sensor.

    The energy of the window is what it was; only what stands for other windows, energy per item, varies by chance. It does so at most as
    the ``interval`` of the step time: steps that take longer do not draw more power.
    """
    total = joules(energy, *HEADLINES)
    if energy is None or total.value is None or total.scope is None:
        unknown = {"scope": total.scope, "reason": total.reason}
        return {name: Metric(value=None, unit=unit_of(name, item), **unknown) for name in ENERGY_METRICS}
    per_item = _noisy(scaled(total, 1 / window.items, unit_of("energy_per_item", item)), interval)
    metrics = {
        "energy": total,
        "energy_per_item": per_item,
        "items_per_watt_hour": _inverse(per_item, JOULES_PER_WATT_HOUR, unit_of("items_per_watt_hour", item)),
        "mean_power": scaled(total, 1 / window.seconds, "W"),
        "energy_time_product": scaled(total, window.seconds, "J s"),
    }
    return {**metrics, **_idle(total, energy.boundaries[total.scope], window, total.scope, idle)}


def _idle(total: Metric, boundary: BoundaryEnergy, window: Window, scope: str, idle: WindowEnergy | None) -> dict[str, Metric]:
    baseline = idle.boundaries.get(scope) if idle is not None else None
    if idle is None or baseline is None or baseline.energy_j is None or boundary.energy_j is None or not baseline.valid:
        unknown = "the idle baseline is not valid" if baseline and baseline.energy_j is not None else "no idle baseline was measured"
        reason = (baseline.reason if baseline is not None else None) or unknown
        return {name: Metric(value=None, unit=unit_of(name), scope=scope, reason=reason) for name in ("idle_power", "energy_net")}
    seconds = idle.end - idle.start
    error = None if baseline.bound_j is None else baseline.bound_j / seconds
    watts = baseline.energy_j / seconds
    net = boundary.energy_j - watts * window.seconds
    bound = None if error is None or boundary.bound_j is None else boundary.bound_j + error * window.seconds
    return {
        "idle_power": Metric(value=watts, unit="W", bound=error, scope=scope),
        "energy_net": Metric(value=net, unit="J", bound=bound, scope=scope, reason=total.reason),
    }


def _noisy(metric: Metric, interval: Interval | None) -> Metric:
    """The metric with the relative interval of the mean step time."""
    if interval is None or metric.value is None or not interval.relative < 1:
        return metric
    ends = {"low": metric.value * (1 - interval.relative), "high": metric.value * (1 + interval.relative)}
    return metric.model_copy(update={**ends, "n": interval.n})


def _inverse(metric: Metric, numerator: float, unit: str) -> Metric:
    """``numerator / metric``; the interval's ends change places, and the bound is that of the end where it is larger."""
    if not metric.value or metric.value <= 0:
        return Metric(value=None, unit=unit, scope=metric.scope, reason="the energy is not above zero")
    low = numerator / metric.high if metric.high else None
    high = numerator / metric.low if metric.low and metric.low > 0 else None
    value = numerator / metric.value
    bound = numerator / (metric.value - metric.bound) - value if metric.bound is not None and metric.bound < metric.value else None
    return metric.model_copy(update={"value": value, "unit": unit, "low": low, "high": high, "bound": bound})


def _losses(losses: Sequence[float]) -> dict[str, Metric]:
    if not losses or not all(math.isfinite(loss) for loss in losses):
        reason = "this mode trains nothing" if not losses else "the loss became NaN or infinite"
        return {name: Metric(value=None, unit="1", reason=reason) for name in ("loss_first", "loss_last")}
    tail = losses[-max(3, len(losses) // 10) :]
    return {"loss_first": Metric(value=losses[0], unit="1"), "loss_last": Metric(value=float(np.mean(tail)), unit="1", n=len(tail))}
