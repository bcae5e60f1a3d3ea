"""Made-up sensors that follow a signal with a known integral: for demonstrations and tests, and labelled so everywhere."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from caraml.errors import InputError
from caraml.power.model import Channel, Kind, Reading
from caraml.power.signals import Constant, Signal, Square
from caraml.power.sources.visible import select

SHAPES = {"constant": Constant, "square": Square}


class FakeSource:
    """One made-up device with a counter and a power channel that follow ``signal`` from the moment of ``open``.

    Args:
        signal: power over time, in seconds after ``open``.
        update_period_s: the sensors show a new value this often [s]; 0 means always fresh.
        mean_window_s: the power channel averages over this long [s].
        kinds: which channels exist.
    """

    min_interval_s = 0.0

    def __init__(
        self,
        signal: Signal,
        *,
        name: str = "fake",
        update_period_s: float = 0.02,
        mean_window_s: float = 0.0,
        kinds: Sequence[Kind] = ("energy", "power_instant"),
        wrap_j: float | None = None,
    ) -> None:
        self.name = name
        self.signal = signal
        self.wanted: Sequence[str] | None = None
        """Devices that were asked for; there is one only."""
        self.origin = 0.0
        """Monotonic time at which the signal's clock is 0 [s]."""
        self._channels = [
            Channel(
                id=f"{name}:0:{kind}",
                source=name,
                kind=kind,
                boundary="device",
                label="fake device (made-up signal)",
                domain=f"{name}:0",
                hardware=name,
                resolution=0.001,
                update_period_s=update_period_s,
                mean_window_s=mean_window_s if kind == "power_mean" else 0.0,
                wrap_j=wrap_j if kind == "energy" else None,
                max_power_w=1000.0,
                accuracy=0.0,
                flags=("fake",),
            )
            for kind in kinds
        ]

    def open(self) -> None:
        """Start the signal's clock."""
        device = f"{self.name}:0"
        select([device], {device: ["0", device]}, self.wanted, None)
        self.origin = time.monotonic()

    def channels(self) -> list[Channel]:
        """A counter and a power channel, unless told otherwise."""
        return self._channels

    def true_energy(self, start: float, end: float) -> float:
        """Exact energy between two monotonic instants [J]."""
        return self.signal.energy(end - self.origin) - self.signal.energy(start - self.origin)

    def value(self, channel: Channel, at: float) -> float:
        """What the sensor shows at a monotonic instant, with its update period, averaging and wrap."""
        t = at - self.origin
        if channel.update_period_s > 0:
            t = math.floor(t / channel.update_period_s) * channel.update_period_s
        if channel.kind == "energy":
            energy = self.signal.energy(t)
            return energy % channel.wrap_j if channel.wrap_j else energy
        if channel.kind == "power_mean" and channel.mean_window_s > 0:
            return (self.signal.energy(t) - self.signal.energy(t - channel.mean_window_s)) / channel.mean_window_s
        return self.signal.power(t)

    def read(self) -> list[Reading]:
        """One reading per channel."""
        readings = []
        for channel in self._channels:
            before = time.monotonic()
            value = self.value(channel, before)
            readings.append(Reading(channel.id, before, time.monotonic(), value))
        return readings

    def close(self) -> None:
        """Nothing to release."""


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> FakeSource:
    """``fake``, ``fake:square`` (100 W and 500 W, 1 s) or ``fake:constant`` (300 W)."""
    shape = argument or "square"
    if shape not in SHAPES:
        raise InputError(f"unknown fake signal {shape!r}; known: {', '.join(sorted(SHAPES))}")
    source = FakeSource(SHAPES[shape]())
    source.wanted = devices
    return source
