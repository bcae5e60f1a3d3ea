"""Energy, power and what follows from both, each with the bound of its sensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caraml.base.format import JOULES_PER_WATT_HOUR, human
from caraml.metrics.model import Metric, Window, scaled, unknown
from caraml.power.model import HEADLINES, BoundaryEnergy, WindowEnergy

if TYPE_CHECKING:
    from caraml.base.stats import Interval

_PER_NODE = "node_energy_per_item"
ENERGY_METRICS = (
    "energy", "energy_net", "energy_per_item", "items_per_watt_hour", "mean_power", "idle_power", "energy_time_product", _PER_NODE
)  # fmt: skip
"""Numbers of the window's headline energy; without a sensor each is null with the same reason."""
NO_ENERGY = "not asked for: `energy = false`"
"""Why a program has no energy whose suite wants none."""
APPARENT_METRICS = ("node_apparent_energy", "node_mean_apparent_power", "node_max_apparent_power", "power_factor")
POWER_METRICS = ("max_device_power", "max_aggregate_power", "aggregate_power", "device_energy", "node_energy", *APPARENT_METRICS)
"""What :func:`powers` gives."""
NODE = ("node_dc", "node_ac")
"""Boundaries of whole nodes, in the order in which they are taken."""


def joules(energy: WindowEnergy | None, *boundaries: str) -> Metric:
    """Energy [J] at the first of these boundaries that has a sensor, with its bound; where one went silent, why, and what is known."""
    sensed = energy.sensed(*boundaries) if energy is not None else None
    if energy is None or sensed is None:
        wider = "device" in boundaries and energy is not None and "module" in energy.boundaries
        absent = "the sensors show the whole module: see energy" if wider else "no sensor of this boundary answered"
        reason = (energy.reason if energy is not None else "energy was not measured") or absent
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

    The energy of the window is what it was; only what stands for other windows, energy per item, varies by chance. It has the ``interval``
    of the step time: steps that take longer do not draw more power, nor less than makes up for their time and as much again. Where clocks
    change and power goes with their cube, that is too narrow: 78 % hold.
    """
    total = joules(energy, *HEADLINES)
    nodes = {_PER_NODE: _noisy(scaled(joules(energy, *NODE), 1 / window.items, f"J/{item}"), interval)}
    if energy is None or total.value is None or total.scope is None:
        return {**unknown(ENERGY_METRICS, total.reason, item=item, scope=total.scope), **nodes}
    per_item = _noisy(scaled(total, 1 / window.items, f"J/{item}"), interval)
    metrics = {
        "energy": total,
        "energy_per_item": per_item,
        "items_per_watt_hour": _inverse(per_item, JOULES_PER_WATT_HOUR, f"{item}/Wh"),
        "mean_power": scaled(total, 1 / window.seconds, "W"),
        "energy_time_product": scaled(total, window.seconds, "J s"),
    }
    return {**metrics, **nodes, **_idle(total, energy.boundaries[total.scope], window, total.scope, idle)}


def _idle(total: Metric, boundary: BoundaryEnergy, window: Window, scope: str, idle: WindowEnergy | None) -> dict[str, Metric]:
    baseline = idle.boundaries.get(scope) if idle is not None else None
    if idle is None or baseline is None or baseline.energy_j is None or boundary.energy_j is None or not baseline.valid:
        why = "the idle baseline is not valid" if baseline and baseline.energy_j is not None else "no idle baseline was measured"
        reason = (baseline.reason if baseline is not None else None) or why
        return unknown(("idle_power", "energy_net"), reason, scope=scope)
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


def nominal_epoch(energy_per_item: Metric, items: int, world: int) -> dict[str, Metric]:
    """Energy of an epoch of ``items`` at the window's energy per item, in all and per device."""
    total = items / JOULES_PER_WATT_HOUR
    return {
        "energy_per_epoch": scaled(energy_per_item, total, "Wh"),
        "energy_per_epoch_per_device": scaled(energy_per_item, total / world, "Wh"),
    }


def powers(energy: WindowEnergy | None) -> dict[str, Metric]:
    """Highest power of one device and of all together, and the energies of devices and node, side by side."""
    devices, node = joules(energy, "device"), joules(energy, *NODE)
    if energy is None or devices.value is None:
        found = unknown(("max_device_power", "max_aggregate_power", "aggregate_power"), devices.reason, scope="device")
    else:
        device = energy.boundaries["device"]
        peaks = [channel.peak_w for channel in energy.channels if channel.boundary == "device" and channel.peak_w is not None]
        found = {
            "max_device_power": _peak(max(peaks, default=None), devices.reason),
            "max_aggregate_power": _peak(device.peak_w, devices.reason),
            "aggregate_power": scaled(devices, 1 / energy.duration_s, "W"),
        }
    return {**found, "device_energy": devices, "node_energy": node, **_apparent(energy, node)}


def _apparent(energy: WindowEnergy | None, node: Metric) -> dict[str, Metric]:
    """Apparent power and energy of whole nodes, in front of their supplies, and the power factor."""
    found = energy.boundaries.get("node_ac") if energy is not None else None
    if energy is None or found is None or found.mean_va is None:
        why = found.va_reason if found is not None else None
        why = why or (node.reason if node.value is None else "the node's sensor gives watts only")
        return unknown(APPARENT_METRICS, why, scope="node_ac")
    doubt = f"not valid: {found.reason}" if found.energy_j is not None and not found.valid else None
    mean = Metric(value=found.mean_va, unit="VA", bound=found.bound_va, scope="node_ac", reason=doubt)
    return {
        "node_apparent_energy": scaled(mean, energy.duration_s / JOULES_PER_WATT_HOUR, "VAh"),
        "node_mean_apparent_power": mean,
        "node_max_apparent_power": Metric(value=found.peak_va, unit="VA", scope="node_ac", reason=doubt),
        "power_factor": _power_factor(found, energy.duration_s, doubt),
    }


def _power_factor(found: BoundaryEnergy, seconds: float, doubt: str | None) -> Metric:
    """Power over apparent power. Its bound takes both at the ends of theirs: their errors may point opposite ways."""
    watts, va, off = found.mean_w, found.mean_va or 0.0, found.bound_va
    if watts is None or not va > 0:
        return Metric(value=None, unit="1", scope="node_ac", reason="no power is known")
    factor, bound = watts / va, None
    if found.bound_j is not None and off is not None and off < va:
        bound = (watts + found.bound_j / seconds) / (va - off) - factor
    if factor - (bound or 0.0) > 1:
        doubt = "above 1, which no supply has: the sensor's power and apparent power contradict"
    return Metric(value=factor, unit="1", bound=bound, scope="node_ac", reason=doubt)


def _peak(value: float | None, doubt: str | None) -> Metric:
    return Metric(value=value, unit="W", scope="device", reason="the sensors show no peaks" if value is None else doubt)
