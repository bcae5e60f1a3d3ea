"""Where readings go: typed columns per channel, shared between the threads that read sensors and those that ask."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge

from caraml.power.model import Channel, Reading


def doubles() -> array[float]:
    """An empty column of numbers, eight bytes each: a day has a million readings of every channel."""
    return array("d")


@dataclass(slots=True)
class ReadingSeries:
    """Successful readings of one channel, in order of time."""

    t: array[float] = field(default_factory=doubles)
    """Midpoint between before and after the call [s]."""
    half: array[float] = field(default_factory=doubles)
    """Half the length of the call [s]: the sensor was asked somewhere in ``t ± half``."""
    value: array[float] = field(default_factory=doubles)
    """[J] or [W]."""

    def add(self, t_before: float, t_after: float, value: float) -> None:
        self.t.append((t_before + t_after) / 2)
        self.half.append((t_after - t_before) / 2)
        self.value.append(value)

    def __len__(self) -> int:
        return len(self.t)

    def count(self, start: float, end: float) -> int:
        return bisect_right(self.t, end) - bisect_left(self.t, start)

    def extremes(self, start: float, end: float) -> tuple[float, float] | None:
        """Lowest and highest value in ``[start, end]`` and at the readings on either side of it."""
        values = self.value[max(bisect_right(self.t, start) - 1, 0) : bisect_left(self.t, end) + 1]
        return (min(values), max(values)) if values else None


@dataclass(slots=True)
class SeriesEstimate:
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

    def seen_in_part(self, t: Sequence[float], start: float, end: float, why: str) -> tuple[float, float] | None:
        """Note why the energy of the whole is not known; from when to when the readings at ``t`` lie in the window [s]."""
        self.reason = why
        self.flags.add("partial_coverage")
        if len(t) < 2 or min(end, t[-1]) <= max(start, t[0]):
            return None
        seen = max(start, t[0]), min(end, t[-1])
        self.coverage = (seen[1] - seen[0]) / (end - start)
        return seen


def interpolate(t: Sequence[float], y: Sequence[float], at: float) -> float:
    """Value at ``at``, which must lie within ``t``, on the straight line between its neighbours."""
    right = min(max(bisect_left(t, at), 1), len(t) - 1)
    left = right - 1
    span = t[right] - t[left]
    share = (at - t[left]) / span if span > 0 else 0.0
    return y[left] + share * (y[right] - y[left])


def usable_shift(age: float, series: ReadingSeries, end: float) -> float:
    """By how much readings may be dated back for their expected age, while the last one still reaches ``end`` [s]."""
    return min(age, max(series.t[-1] - end, 0.0))


def silent(series: ReadingSeries, start: float, end: float) -> str | None:
    """Why the readings do not enclose the window, or ``None`` if they do."""
    if not series.t:
        return "the sensor gave no reading"
    if series.t[0] > start:
        return f"the first reading came {series.t[0] - start:.3g} s after the start of the window"
    if series.t[-1] < end:
        return f"the sensor was silent for the last {end - max(series.t[-1], start):.3g} s of the window"
    return None


Row = tuple[str, float, float, float | None, str]
ROW = ("channel", "t_before", "t_after", "value", "kind")
"""Columns of a :data:`Row`: times in seconds, values in J or W."""


@dataclass(slots=True)
class Column:
    """Readings of one channel: times and values of the good ones, times and causes of the failed ones."""

    before: array[float] = field(default_factory=doubles)
    after: array[float] = field(default_factory=doubles)
    value: array[float] = field(default_factory=doubles)
    failed: array[float] = field(default_factory=doubles)
    last_error: str | None = None


class ReadingStore:
    """Readings of all channels. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._skipped: dict[str, array[float]] = {}
        self._grown = threading.Condition()
        self._listeners: list[Callable[[list[Reading]], None]] = []
        self.channels: dict[str, Channel] = {}

    def listen(self, listener: Callable[[list[Reading]], None]) -> None:
        """Call ``listener`` with every batch of readings, in the thread that read them."""
        self._listeners.append(listener)

    def register(self, channels: Iterable[Channel]) -> None:
        """Announce channels before their first reading. Raises ``ValueError`` for the id of another source's: readings are kept by it."""
        with self._grown:
            new = list(channels)
            for channel in new:
                if (known := self.channels.get(channel.id, channel)).source != channel.source:
                    raise ValueError(f"channel {channel.id!r}: source {known.source!r} has one of this id")
            for channel in new:
                self.channels[channel.id] = channel
                self._columns.setdefault(channel.id, Column())
            self._grown.notify_all()

    def add(self, readings: list[Reading]) -> None:
        """Append readings; within a channel they must come in order of time."""
        with self._grown:
            for reading in readings:
                column = self._columns.setdefault(reading.channel, Column())
                if reading.value is None:
                    column.failed.append(reading.t_before)
                    column.last_error = reading.error
                else:
                    column.before.append(reading.t_before)
                    column.after.append(reading.t_after)
                    column.value.append(reading.value)
            self._grown.notify_all()
        for listener in self._listeners:
            listener(readings)

    def skip(self, source: str, at: float, ticks: int) -> None:
        """Note that ``ticks`` sampling intervals of a source passed without a reading, before ``at`` [s]."""
        with self._grown:
            self._skipped.setdefault(source, doubles()).extend([at] * ticks)

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until ``ready()``, which is asked after every batch of readings; False if ``timeout`` [s] passed first."""
        with self._grown:
            return self._grown.wait_for(ready, timeout)

    def notify(self) -> None:
        with self._grown:
            self._grown.notify_all()

    def newest(self, channel: str) -> tuple[float, float, float] | None:
        """The newest good reading: before and after the call [s], and value."""
        with self._grown:
            column = self._columns.get(channel)
            return (column.before[-1], column.after[-1], column.value[-1]) if column and column.value else None

    def last_error(self, channel: str) -> str | None:
        with self._grown:
            column = self._columns.get(channel)
            return column.last_error if column else None

    def series(self, channel: str, start: float = float("-inf"), end: float = float("inf")) -> ReadingSeries:
        """Good readings in ``[start, end]``, and the one before and after it."""
        with self._grown:
            column = self._columns.get(channel, Column())
            first = max(bisect_right(column.before, start) - 1, 0)
            last = min(bisect_left(column.after, end) + 1, len(column.value))
            before, after, value = column.before[first:last], column.after[first:last], column.value[first:last]
        series = ReadingSeries()
        for b, a, v in zip(before, after, value, strict=True):
            series.add(b, a, v)
        return series

    def missed(self, channel: Channel, start: float, end: float) -> int:
        """Failed reads of the channel and skipped ticks of its source in ``[start, end]``."""
        with self._grown:
            failed = self._columns.get(channel.id, Column()).failed
            skipped = self._skipped.get(channel.source, doubles())
            return sum(bisect_right(times, end) - bisect_left(times, start) for times in (failed, skipped))

    def since(self, known: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, str, Column]]:
        """Of each channel its id, its kind and its readings, without so many good and so many failed ones as are ``known`` of it."""
        with self._grown:
            names = list(self._columns)
        for name in names:
            good, failed = known.get(name, (0, 0))
            with self._grown:
                column = self._columns[name]
                parts = (column.before[good:], column.after[good:], column.value[good:], column.failed[failed:])
            yield name, self.channels[name].kind, Column(*parts)

    def rows(self, origin: float = 0.0) -> Iterator[Row]:
        """Every reading so far, channel by channel in order of time, in seconds after ``origin``; failed reads have no value."""
        for name, kind, column in self.since({}):
            good, failed = zip(column.before, column.after, column.value, strict=True), ((t, t, None) for t in column.failed)
            for before, after, value in merge(good, failed, key=lambda reading: reading[0]):
                yield name, before - origin, after - origin, value, kind
