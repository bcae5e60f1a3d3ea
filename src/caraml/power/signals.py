"""Made-up loads with a closed-form integral, for demonstrations and for testing a meter against a known truth."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol


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


class Telegraph:
    """Random jumps between two powers, at times drawn once from an exponential distribution with mean ``dwell`` [s]."""

    def __init__(self, low: float = 100.0, high: float = 500.0, dwell: float = 0.3, seed: int = 0, length: float = 120.0) -> None:
        self.low, self.high = low, high
        draw = random.Random(seed)  # noqa: S311 -- a test signal, the same for the same seed
        self.times, self.energies = [0.0], [0.0]
        while self.times[-1] < length:
            step = draw.expovariate(1 / dwell)
            level = high if len(self.times) % 2 else low
            self.energies.append(self.energies[-1] + level * step)
            self.times.append(self.times[-1] + step)

    def power(self, t: float) -> float:
        return self.high if bisect_right(self.times, max(t, 0.0)) % 2 else self.low

    def energy(self, t: float) -> float:
        last = bisect_right(self.times, max(t, 0.0)) - 1
        return self.energies[last] + self.power(t) * (t - self.times[last])
