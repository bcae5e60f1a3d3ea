"""What figures show of records: one number each, or the mean of repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caraml.report.numbers import written
from caraml.results.record import Metric, Record


@dataclass(frozen=True)
class Quantity:
    """Something that a figure shows of every record."""

    name: str
    """The metric whose way of writing numbers is used."""
    title: str
    unit: str
    """``{item}`` stands for what is counted."""
    metric: Callable[[Record], Metric | None]

    def of(self, records: Sequence[Record]) -> Metric | None:
        """The mean over repeats, within the lowest and highest end of their intervals; ``None`` if one of them has no value."""
        found = [metric for record in records if (metric := self.metric(record)) is not None and metric.value is not None]
        if not found or len(found) < len(records):
            return None
        if len(found) == 1:
            return found[0]
        values = [metric.value for metric in found if metric.value is not None]
        lows = [value if metric.low is None else metric.low for metric, value in zip(found, values, strict=True)]
        highs = [value if metric.high is None else metric.high for metric, value in zip(found, values, strict=True)]
        bound = max((metric.bound for metric in found if metric.bound is not None), default=None)
        return Metric(value=sum(values) / len(values), unit=found[0].unit, low=min(lows), high=max(highs), bound=bound, n=len(found))

    def text(self, metric: Metric | None) -> str:
        """As people read it."""
        return written(self.name, metric)


def metric(name: str, title: str = "", unit: str = "") -> Quantity:
    """A metric of the records as it is."""
    return Quantity(name, title, unit, lambda record: record.metrics.get(name))


def _scaled(found: Metric | None, factor: float, unit: str) -> Metric | None:
    """A metric with its interval times an exact factor."""
    if found is None or found.value is None:
        return None
    ends = {end: value * factor for end in ("low", "high", "bound") if (value := getattr(found, end)) is not None}
    return Metric(value=found.value * factor, unit=unit, **ends)


def _per_item(name: str) -> Callable[[Record], Metric | None]:
    """An energy of the window over the items of the window [J/item]."""

    def value(record: Record) -> Metric | None:
        return (
            _scaled(record.metrics.get(name), 1 / record.window.items, f"J/{record.item}")
            if record.window and record.window.items
            else None
        )

    return value


def _hour(record: Record) -> Metric | None:
    """Energy that a device's share takes in an hour [Wh]: watts are watt-hours per hour."""
    return _scaled(record.metrics.get("mean_power"), 1 / record.point.world, "Wh")


def _time(record: Record) -> Metric | None:
    """Wall time of ``AMOUNT`` items at the throughput of the window [s]."""
    rate = record.metrics.get("throughput")
    if rate is None or not rate.value:
        return None
    low, high = (AMOUNT / end if end else None for end in (rate.high, rate.low))
    return Metric(value=AMOUNT / rate.value, unit="s", low=low, high=high)


def _energy(record: Record) -> Metric | None:
    """Energy of ``AMOUNT`` items [J]."""
    return _scaled(record.metrics.get("energy_per_item"), AMOUNT, "J")


def _action(record: Record) -> Metric | None:
    """Energy times time of ``AMOUNT`` items [J s]; its interval joins the ends of both."""
    time, energy = _time(record), _energy(record)
    if time is None or energy is None or time.value is None or energy.value is None:
        return None
    known = None not in (time.low, time.high, energy.low, energy.high)
    low, high = (time.low * energy.low, time.high * energy.high) if known else (None, None)  # type: ignore[operator]
    bound = None if energy.bound is None else time.value * energy.bound
    return Metric(value=time.value * energy.value, unit="J s", low=low, high=high, bound=bound)


AMOUNT = 1e6
"""Items whose time and energy are compared: a fixed amount of work, whatever the window was."""
RATE = metric("throughput_per_device", "Rate per device", "{item}/s")
TOTAL = metric("throughput", "Throughput", "{item}/s")
EFFICIENCY = metric("items_per_watt_hour", "Efficiency", "{item}/Wh")
COST = metric("energy_per_item", "Energy", "J/{item}")
HOUR = Quantity("energy", "Energy of an hour per device", "Wh", _hour)
NODE = Quantity("energy_per_item", "Node energy", "J/{item}", _per_item("node_energy"))
DEVICES = Quantity("energy_per_item", "Device energy", "J/{item}", _per_item("device_energy"))
TIME = Quantity("runtime", "Time", "s", _time)
ENERGY = Quantity("energy", "Energy", "J", _energy)
ACTION = Quantity("energy_time_product", "Action", "J s", _action)


def node_only(record: Record) -> str | None:
    """Joules per item of whole nodes as people read them, where these are all that a sensor sees; else ``None``."""
    devices = record.metrics.get(COST.name)
    metric = NODE.metric(record)
    return f"{NODE.text(metric)} (node)" if metric is not None and (devices is None or devices.value is None) else None
