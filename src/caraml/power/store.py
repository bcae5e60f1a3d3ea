"""Where readings go: typed columns per channel, shared between the threads that read sensors and those that ask."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge

from caraml.power.model import Channel, Reading
from caraml.power.series import Series, doubles

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


class Store:
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
        """Announce channels before their first reading."""
        with self._grown:
            for channel in channels:
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
        """Have waiting threads look again."""
        with self._grown:
            self._grown.notify_all()

    def last_time(self, channel: str) -> float | None:
        """Midpoint of the newest good reading [s]."""
        with self._grown:
            column = self._columns.get(channel)
            return (column.before[-1] + column.after[-1]) / 2 if column and column.value else None

    def last_value(self, channel: str) -> tuple[float, float] | None:
        """Time [s] and value of the newest good reading."""
        with self._grown:
            column = self._columns.get(channel)
            return (column.after[-1], column.value[-1]) if column and column.value else None

    def last_error(self, channel: str) -> str | None:
        """Cause of the newest failed read."""
        with self._grown:
            column = self._columns.get(channel)
            return column.last_error if column else None

    def series(self, channel: str, start: float = float("-inf"), end: float = float("inf")) -> Series:
        """Good readings in ``[start, end]``, and the one before and after it."""
        with self._grown:
            column = self._columns.get(channel, Column())
            first = max(bisect_right(column.before, start) - 1, 0)
            last = min(bisect_left(column.after, end) + 1, len(column.value))
            before, after, value = column.before[first:last], column.after[first:last], column.value[first:last]
        series = Series()
        for b, a, v in zip(before, after, value, strict=True):
            series.add(b, a, v)
        return series

    def missed(self, channel: Channel, start: float, end: float) -> int:
        """Failed reads of the channel and skipped ticks of its source in ``[start, end]``."""
        with self._grown:
            failed = self._columns.get(channel.id, Column()).failed
            skipped = self._skipped.get(channel.source, doubles())
            return sum(bisect_right(times, end) - bisect_left(times, start) for times in (failed, skipped))

    def rows(self, origin: float = 0.0) -> Iterator[Row]:
        """Every reading so far, channel by channel in order of time, in seconds after ``origin``; failed reads have no value."""
        with self._grown:
            known = [(name, self.channels[name].kind, column) for name, column in self._columns.items()]
        for name, kind, column in known:
            with self._grown:
                good = zip(column.before[:], column.after[:], column.value[:], strict=True)
                failed = ((t, t, None) for t in column.failed[:])
            for before, after, value in merge(good, failed, key=lambda reading: reading[0]):
                yield name, before - origin, after - origin, value, kind
