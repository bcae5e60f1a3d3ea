"""Readings of an ideal, late, averaging or quantised sensor, made by arithmetic alone: no clock, no sleeping."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from caraml.power.model import Channel, Kind
from caraml.power.signals import Signal
from caraml.power.store import ReadingSeries


def channel(kind: Kind = "energy", **known: Any) -> Channel:
    """A channel of a made-up device."""
    fields: dict[str, Any] = {
        "id": f"t:{kind}",
        "source": "t",
        "boundary": "device",
        "label": "made up",
        "domain": "t:0",
        "hardware": "t",
        "max_power_w": 1000.0,
    }
    return Channel(kind=kind, **(fields | known))


def shown(sensor: Channel, signal: Signal, t: float, phase: float = 0.0) -> float:
    """What ``sensor`` shows at ``t`` while the load follows ``signal``; ``phase`` shifts the sensor's own updates [s]."""
    period = sensor.update_period_s
    at = math.floor((t - phase) / period) * period + phase if period > 0 else t
    if sensor.kind == "energy":
        value = signal.energy(at)
    elif sensor.kind == "power_mean":
        value = (signal.energy(at) - signal.energy(at - sensor.mean_window_s)) / sensor.mean_window_s
    else:
        value = signal.power(at)
    if sensor.resolution > 0:
        value = math.floor(value / sensor.resolution) * sensor.resolution
    return value % sensor.wrap_j if sensor.wrap_j else value


def instants(start: float, end: float, interval: float, offset: Callable[[], float], sensor: Channel) -> list[float]:
    """One instant per interval from before to after the window, and those that its marks ask for."""
    lead = 2.0
    count = int((end - start + 2 * lead) / interval)
    regular = [start - lead + interval * (k + offset()) for k in range(count)]
    return sorted([*regular, *(edge + age for edge in (start, end) for age in (1e-4, sensor.age_s + 1e-6))])


def sampled(sensor: Channel, signal: Signal, times: list[float], phase: float = 0.0) -> ReadingSeries:
    """Readings at ``times``, each taking 40 µs."""
    series = ReadingSeries()
    for t in times:
        series.add(t - 2e-5, t + 2e-5, shown(sensor, signal, t, phase))
    return series


def observed(
    sensor: Channel,
    signal: Signal,
    window: tuple[float, float],
    draw: random.Random,
    *,
    interval: float = 0.1,
    offset: Callable[[], float] | None = None,
) -> ReadingSeries:
    """Readings of a meter that samples at random instants (or where ``offset`` says) around ``window``."""
    times = instants(*window, interval, offset or draw.random, sensor)
    return sampled(sensor, signal, times, phase=draw.random() * sensor.update_period_s)
