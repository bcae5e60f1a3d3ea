"""Made-up loads with a closed-form integral, and a source whose sensors follow one: for demonstrations and for testing a meter against a
known truth, and labelled so everywhere."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from caraml.base.errors import InputError
from caraml.base.processes import rank
from caraml.power.model import SOME, Channel, Kind
from caraml.power.source import AskedSensors, SensorError, select


class Signal(Protocol):
    """Power over time, and its exact integral from time 0."""

    def power(self, t: float) -> float:
        """Power at ``t`` seconds [W]."""

    def energy(self, t: float) -> float:
        """Integral of power from 0 to ``t`` [J]."""


@dataclass(frozen=True)
class Constant:
    """The same power for ever [W]."""

    watts: float = 300.0

    def power(self, t: float) -> float:
        return self.watts

    def energy(self, t: float) -> float:
        return self.watts * t


@dataclass(frozen=True)
class Square:
    """``high`` in the first half of every ``period``, ``low`` in the second [W, s]; ``phase`` shifts it [s]."""

    low: float = 100.0
    high: float = 500.0
    period: float = 1.0
    phase: float = 0.0

    def power(self, t: float) -> float:
        return self.high if (t + self.phase) % self.period < self.period / 2 else self.low

    def _primitive(self, t: float) -> float:
        cycles, rest = divmod(t, self.period)
        return (self.low + self.high) / 2 * cycles * self.period + self.low * rest + (self.high - self.low) * min(rest, self.period / 2)

    def energy(self, t: float) -> float:
        return self._primitive(t + self.phase) - self._primitive(self.phase)


def square(mean: float) -> Square:
    """A square wave of this mean power [W], five times as high at its top as at its bottom."""
    return Square(low=mean / 3, high=mean * 5 / 3)


MEAN_W = 300.0
SHAPES: dict[str, Callable[[float], Signal]] = {"constant": Constant, "square": square}


class FakeSource(AskedSensors):
    """One made-up device with a counter and a power channel that follow ``signal`` from the moment of ``open``.

    Args:
        signal: power over time, in seconds after ``open``.
        update_period_s: the sensors show a new value this often [s]; 0 means always fresh.
        mean_window_s: the power channel averages over this long [s].
        kinds: which channels exist.
        answers_s: for how long the sensors answer [s].
    """

    failures = (SensorError,)

    def __init__(
        self,
        signal: Signal,
        *,
        name: str = "fake",
        update_period_s: float = 0.02,
        mean_window_s: float = 0.0,
        kinds: Sequence[Kind] = ("energy", "power_instant"),
        wrap_j: float | None = None,
        answers_s: float = math.inf,
    ) -> None:
        super().__init__()
        self.name, self.signal, self._answers_s = name, signal, answers_s
        self.origin = 0.0
        """Monotonic time at which the signal's clock is 0 [s]."""
        for kind in kinds:
            channel = Channel(
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
            self.add(channel, partial(self._shown, channel))

    def open(self) -> None:
        device = f"{self.name}:0"
        # Stands for any sensor: nothing is held back from a CPU's point, which asks for no accelerator, or where nobody tells which is used
        if self.devices and list(self.devices) != [SOME]:
            select([device], {}, self.devices)
        self.origin = time.monotonic()

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

    def _shown(self, channel: Channel) -> float:
        at = time.monotonic()
        if at - self.origin > self._answers_s:
            raise SensorError(f"made to go silent after {self._answers_s:g} s")
        return self.value(channel, at)


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> FakeSource:
    """``fake:SHAPE[:WATTS[@SECONDS][/WATTS...]]``: ``constant``, or ``square`` (a third of the mean and five thirds in turn, 1 s).

    The mean is 300 W unless it is given; of several, the ranks of a job take one each in turn. The sensor goes silent after ``SECONDS``.
    """
    shape, _, watts = argument.partition(":")
    shape = shape or "square"
    if shape not in SHAPES:
        raise InputError(f"unknown fake signal {shape!r}; known: {', '.join(sorted(SHAPES))}")
    given = watts.split("/")
    mean, _, seconds = given[int(os.environ.get("RANK") or rank() or 0) % len(given)].partition("@")
    try:
        source = FakeSource(SHAPES[shape](float(mean or MEAN_W)), answers_s=float(seconds or math.inf))
    except ValueError:
        raise InputError(f"fake:{argument}: found {watts!r}, expected watts such as 300, 300/500 or 300@2.5") from None
    source.devices = devices
    return source
