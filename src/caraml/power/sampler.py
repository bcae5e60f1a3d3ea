"""Reads one source at random instants, one per interval, in its own thread.

Why random: instants on a fixed grid and a load that repeats with the grid see the same point of the load for ever, and
nothing in the readings shows it. One uniform instant per interval sees all of it and keeps the samples spread out.
Why one thread per source: a sensor that hangs must not silence the others.

What can be measured here is found out by reading every source for a moment.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any

from caraml.base.errors import CaramlError
from caraml.power.model import BOUNDARIES, UNITS, Channel, Reading
from caraml.power.source import Source, SourceUnavailable, chosen_sources, create, entries
from caraml.power.store import ReadingStore

STALLED_S = 0.5
"""A read that takes longer than this is not waited for [s]."""

CALIBRATED_S = (0.05, 1.0)
"""Declared update periods of counters in this range are replaced by what is seen at the start [s]."""

CALIBRATION_S = 0.45
CALIBRATION_INTERVALS = 3
CALIBRATION_MARGIN = 1.25
"""The longest interval seen is taken this much longer."""

POLL_S = 0.002
"""Pause between questions [s]."""
ANSWER_S = 5.0
"""How much longer than it is observed a source may take, to open above all [s]."""

Offset = Callable[[], float]
"""Where in its interval the next reading falls, 0 to 1."""


class Sampler:
    """The thread that owns one source from open to close."""

    def __init__(self, source: Source, interval: float, store: ReadingStore, offset: Offset | None = None) -> None:
        self.name = source.name
        self.interval = max(interval, source.min_interval_s)
        """Length of a sampling interval [s]."""
        self.channels: list[Channel] = []
        self.left_out: list[str] = []
        """Why devices of the source are not read."""
        self.failure: str | None = None
        """Why the source is not read (any more), with the fix if one is known."""
        self.problem: CaramlError | None = None
        """The failure, if it is one that the source itself tells of."""
        self._source, self._store = source, store
        self._offset = offset or random.Random().random  # noqa: S311 -- when to read a sensor, not a secret
        self._asked: SimpleQueue[float] = SimpleQueue()
        """Instants at which others want a reading [s]; what is put there wakes the thread, at half of what an event costs."""
        self._due: list[float] = []
        """Those that the thread has seen and that have not come yet."""
        self._stop = threading.Event()
        self._opened = threading.Event()
        self._reading_since: float | None = None
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name=f"power-{self.name}", daemon=True)

    def start(self) -> None:
        """Open the source in the thread, since a driver may take its time, and sample it."""
        self._thread.start()

    def wait_open(self, timeout: float) -> None:
        """Wait for the first readings or the failure to open, which it has after ``timeout`` [s] as well."""
        if not self._opened.wait(timeout):
            self.failure = f"{self.name}: did not open within {timeout:.3g} s, its first reading included"

    @property
    def absent(self) -> bool:
        """The sensor does not exist on this machine, as most kinds do not, and nothing can be done about it."""
        return isinstance(self.problem, SourceUnavailable) and self.problem.kind == "absent" and not self.problem.hint

    @property
    def alive(self) -> bool:
        """Is the source open and read?"""
        return self._opened.is_set() and self.failure is None and self._thread.is_alive()

    @property
    def stalled(self) -> bool:
        """Has a read been going on for too long?"""
        since = self._reading_since
        return since is not None and time.monotonic() - since > STALLED_S

    def request(self, at: float) -> None:
        """Read as soon as ``at`` (monotonic seconds) has come, besides the regular readings."""
        self._asked.put(at)

    def read_now(self) -> Callable[[], bool]:
        """Have the source read now, in its thread. Returns a question: has that reading come, or will it never?"""
        if not self.alive or self.stalled:
            return lambda: True
        # A read that is under way began before now, so the next but one is the first that surely began after.
        wanted = self._rounds + (2 if self._reading_since is not None else 1)
        self.request(time.monotonic())
        return lambda: self._rounds >= wanted or not self.alive

    def stop(self) -> None:
        """Ask the thread to end; does not wait."""
        self._stop.set()
        self._asked.put(time.monotonic())

    def join(self, timeout: float) -> None:
        """Wait for the thread. A hung sensor keeps it; it is a daemon and dies with the process."""
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._source.open()
            self.channels = [replace(c, source=self.name) for c in described(self._source.channels())]
            self.left_out = list(getattr(self._source, "left_out", ()))
            self._store.register(self.channels)
            self._read()
            self._opened.set()
            self._calibrate()
            self._sample()
        except CaramlError as error:
            hint = f"; fix: {error.hint}" if error.hint else ""
            self.problem, self.failure = error, f"{self.name}: {error.args[0]}{hint}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - thread boundary: a vendor library may raise anything
            self.failure = f"{self.name}: {type(error).__name__}: {error}"
        finally:
            self._opened.set()
            self._store.notify()
            self._close()

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception as error:  # noqa: BLE001 - thread boundary; what was read is kept, the cause is reported
            self.failure = self.failure or f"{self.name}: closing failed: {type(error).__name__}: {error}"

    def _sample(self) -> None:
        begin = time.monotonic()
        tick = 0
        target = begin + self.interval * self._offset()
        while not self._stop.is_set():
            wake_at = min([target, *self._due])
            delay = wake_at - time.monotonic()
            if delay > 0:
                self._rest(delay)
                continue
            self._drop_due()
            self._read()
            if wake_at == target:
                now = int((time.monotonic() - begin) / self.interval)
                if now > tick + 1:
                    self._store.skip(self.name, time.monotonic(), now - tick - 1)
                tick = max(tick + 1, now)
                target = begin + self.interval * (tick + self._offset())

    def _calibrate(self) -> None:
        """Find out how often counters refresh. What a data sheet declares is cautious, and the bound is made of it."""
        shortest, longest = CALIBRATED_S
        slow = {c.id for c in self.channels if c.kind == "energy" and shortest <= c.update_period_s <= longest}
        watch = PeriodWatch(slow)
        until = time.monotonic() + CALIBRATION_S
        while slow and time.monotonic() < until and not self._stop.is_set() and not watch.seen(CALIBRATION_INTERVALS):
            self._drop_due()
            watch.feed(self._read())
            self._rest(POLL_S)
        seen = watch.periods(max)
        self.channels = [
            replace(c, update_period_s=min(c.update_period_s, CALIBRATION_MARGIN * seen[c.id])) if c.id in seen else c
            for c in self.channels
        ]
        self._store.register(self.channels)

    def _rest(self, seconds: float) -> None:
        """Wait so long, or until a reading is asked for."""
        with suppress(Empty):
            self._due.append(self._asked.get(timeout=seconds))
            while True:
                self._due.append(self._asked.get_nowait())

    def _drop_due(self) -> None:
        now = time.monotonic()
        self._due = [at for at in self._due if at > now]

    def _read(self) -> list[Reading]:
        self._reading_since = time.monotonic()
        try:
            readings: list[Reading] = [_finite(reading) for reading in self._source.read()]
        finally:
            self._reading_since = None
        self._rounds += 1
        found = self._source.channels()
        if len(found) > len(self.channels):
            known = {channel.id for channel in self.channels}
            new = [replace(c, source=self.name) for c in described(found) if c.id not in known]
            self.channels = [*self.channels, *new]
            self._store.register(new)
        self._store.add(readings)
        return readings


_NUMBERS = ("resolution", "update_period_s", "lag_s", "mean_window_s", "spacing_s", "wrap_j", "max_power_w", "duty", "accuracy")
"""Numbers of a channel that energies and bounds are made of."""


def described(channels: Iterable[Channel]) -> Iterator[Channel]:
    """The channels as they are. Raises ``SourceUnavailable`` for one of which no energy could be told: of a kind or boundary that there is
    not, with a text or number that is none, or with the name of another."""
    seen: set[str] = set()
    for channel in channels:
        if fault := _fault(channel) or (f"channel {channel.id!r}: a second one of this id" if channel.id in seen else None):
            raise SourceUnavailable(fault, "repair the source", "unreadable")
        seen.add(channel.id)
        yield channel


def _fault(channel: object) -> str | None:
    """What of a channel is not as it has to be, in words."""
    if not isinstance(channel, Channel):
        return f"channels: found {channel!r}, expected a caraml.power.Channel"
    of = f"channel {channel.id!r}:"
    for what in ("id", "label", "domain", "hardware"):
        if not isinstance(text := getattr(channel, what), str):
            return f"{of} {what}: found {text!r}, expected text"
    for what, found, known in (("kind", channel.kind, tuple(UNITS)), ("boundary", channel.boundary, BOUNDARIES)):
        if found not in known:
            return f"{of} {what}: found {found!r}, expected one of {', '.join(known)}"
    for what in _NUMBERS:
        number, left_out = getattr(channel, what), what in ("wrap_j", "max_power_w")
        if not (isinstance(number, Real) and 0 <= float(number) < math.inf) and not (left_out and number is None):
            return f"{of} {what}: found {number!r}, expected a number from 0 on"
    return None


def _finite(reading: Reading) -> Reading:
    """The reading, without its value if that is NaN or infinite."""
    if reading.value is None or math.isfinite(reading.value):
        return reading
    return replace(reading, value=None, error=f"the sensor answered {reading.value}")


class PeriodWatch:
    """Collects the instants at which channels show a new value."""

    def __init__(self, channels: Iterable[str]) -> None:
        self._last: dict[str, float] = {}
        self._changes: dict[str, list[float]] = {name: [] for name in channels}

    def feed(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            changes = self._changes.get(reading.channel)
            if changes is None or reading.value is None:
                continue
            if reading.channel in self._last and reading.value != self._last[reading.channel]:
                changes.append(reading.t_after)
            self._last[reading.channel] = reading.value

    def seen(self, intervals: int) -> bool:
        """Has every channel shown this many intervals between changes?"""
        return all(len(changes) > intervals for changes in self._changes.values())

    def periods(self, of: Callable[[Iterable[float]], float]) -> dict[str, float]:
        """The longest, or median, time between two changes of each channel that changed at least three times [s]."""
        return {name: of(b - a for a, b in pairwise(changes)) for name, changes in self._changes.items() if len(changes) >= 3}


def available_sources(seconds: float = 0.5) -> list[dict[str, Any]]:
    """One entry per source that exists, in the order in which they are tried, and per source that ``CARAML_POWER`` names with an argument.

    Keys: ``name``, ``title``, ``auto`` (read without being asked for; where the variable is set, what it names), ``asked`` (named by
    the variable), ``found`` (the sensor exists), ``readable``,
    ``reason`` and ``fix`` (why not, and the command that mends it), ``channels``: ``id``, ``label``, ``boundary``,
    ``kind``, ``declared_period_s`` and ``measured_period_s``, the usual time between two changes seen while asking as
    fast as possible for ``seconds``; ``None`` if the value did not change often enough to tell.
    """
    report = []
    known, asked = entries(), chosen_sources()
    bases = {name.partition(":")[0] for name in asked}
    for name in [*(name for name in known if name not in bases and name != "fake"), *asked]:
        entry = known.get(name.partition(":")[0])
        line: dict[str, Any] = {"name": name, "title": entry.title if entry else "", "asked": name in asked}
        line["auto"] = name in asked if asked else entry is not None and entry.auto
        line |= {"found": False, "readable": False, "reason": None, "fix": None, "channels": []}
        report.append(line)
        if entry is not None and entry.argument is not None and name == entry.name:
            line |= {"reason": f"needs its {entry.argument}", "fix": f"use {entry.name}:<{entry.argument}>"}
            continue
        try:
            source = create(name, ["all"], automatic=name not in asked)
            periods = _observed(source, seconds)
        except CaramlError as error:
            line["found"] = isinstance(error, SourceUnavailable) and error.kind != "absent"
            line |= {"reason": error.args[0], "fix": error.hint}
            continue
        line |= {"found": True, "readable": True}
        for c in source.channels():
            told = {name: getattr(c, name) for name in ("id", "label", "boundary", "kind")}
            seen = {"declared_period_s": c.update_period_s or c.spacing_s, "measured_period_s": periods.get(c.id)}
            line["channels"].append(told | seen)
    return report


def _observed(source: Source, seconds: float) -> dict[str, float]:
    """Open a source, ask it as fast as it makes sense for ``seconds``, close it.

    Returns the usual time between changes of every channel that changed often enough [s]. Raises ``SourceUnavailable`` where it cannot
    be opened, or does not answer.
    """
    result: dict[str, float] = {}
    problem: list[SourceUnavailable] = []

    def ask() -> None:
        try:
            source.open()
            watch = PeriodWatch(c.id for c in described(source.channels()))
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                watch.feed(source.read())
                time.sleep(max(POLL_S, source.min_interval_s))
            result.update(watch.periods(median))  # a call may take a third of a period, and a value may come again
        except SourceUnavailable as error:
            problem.append(error)
        except CaramlError as error:
            problem.append(SourceUnavailable(error.args[0], error.hint, "unreadable"))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - thread boundary: a vendor library may raise anything
            problem.append(SourceUnavailable(f"{type(error).__name__}: {error}"))
        finally:
            with suppress(Exception):  # what it measured counts; a measurement that closes it says what fails
                source.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + ANSWER_S)
    if thread.is_alive():
        raise SourceUnavailable(f"did not answer within {seconds + ANSWER_S:g} s")
    if problem:
        raise problem[0]
    return result
