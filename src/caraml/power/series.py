"""Readings of one channel as columns of time and value, and the estimate that a rule makes of them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from caraml.power.model import Reading


def doubles() -> array[float]:
    """An empty column of numbers, eight bytes each: a day has a million readings of every channel."""
    return array("d")


@dataclass(slots=True)
class Series:
    """Successful readings of one channel, in order of time."""

    t: array[float] = field(default_factory=doubles)
    """Midpoint between before and after the call [s]."""
    half: array[float] = field(default_factory=doubles)
    """Half the length of the call [s]: the sensor was asked somewhere in ``t ± half``."""
    value: array[float] = field(default_factory=doubles)
    """[J] or [W]."""

    def add(self, t_before: float, t_after: float, value: float) -> None:
        """Append a reading."""
        self.t.append((t_before + t_after) / 2)
        self.half.append((t_after - t_before) / 2)
        self.value.append(value)

    def __len__(self) -> int:
        return len(self.t)

    def between(self, start: float, end: float) -> Series:
        """The readings in ``[start, end]``, and the one before and after it."""
        first = max(bisect_right(self.t, start) - 1, 0)
        last = min(bisect_left(self.t, end) + 1, len(self.t))
        return Series(self.t[first:last], self.half[first:last], self.value[first:last])

    def count(self, start: float, end: float) -> int:
        """Number of readings in ``[start, end]``."""
        return bisect_right(self.t, end) - bisect_left(self.t, start)

    def extremes(self, start: float, end: float) -> tuple[float, float] | None:
        """Lowest and highest value in ``[start, end]`` and at the readings on either side of it."""
        values = self.between(start, end).value
        return (min(values), max(values)) if values else None


def series_of(readings: Iterable[Reading]) -> Series:
    """The successful ones among ``readings``, which must be of one channel, sorted by time."""
    series = Series()
    for reading in sorted(readings, key=lambda r: r.t_before):
        if reading.value is not None:
            series.add(reading.t_before, reading.t_after, reading.value)
    return series


@dataclass(slots=True)
class Estimate:
    """What one rule says about one window."""

    energy_j: float | None = None
    partial_j: float | None = None
    """Energy of the covered part, where the whole is unknown [J]."""
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the bound [J]."""
    peak_w: float | None = None
    coverage: float = 0.0
    flags: set[str] = field(default_factory=set)
    reason: str | None = None

    @property
    def bound_j(self) -> float | None:
        """Sum of the parts [J]. Worst cases add linearly: they may all point the same way."""
        return None if self.energy_j is None else sum(self.parts.values())


def interpolate(t: Sequence[float], y: Sequence[float], at: float) -> float:
    """Value at ``at``, which must lie within ``t``, on the straight line between its neighbours."""
    right = min(max(bisect_left(t, at), 1), len(t) - 1)
    left = right - 1
    span = t[right] - t[left]
    share = (at - t[left]) / span if span > 0 else 0.0
    return y[left] + share * (y[right] - y[left])


def usable_shift(age: float, series: Series, end: float) -> float:
    """By how much readings may be dated back for their expected age, while the last one still reaches ``end`` [s]."""
    return min(age, max(series.t[-1] - end, 0.0))


def silent(series: Series, start: float, end: float) -> str | None:
    """Why the readings do not enclose the window, or ``None`` if they do."""
    if not series.t:
        return "the sensor gave no reading"
    if series.t[0] > start:
        return f"the first reading came {series.t[0] - start:.3g} s after the start of the window"
    if series.t[-1] < end:
        return f"the sensor was silent for the last {end - series.t[-1]:.3g} s of the window"
    return None
