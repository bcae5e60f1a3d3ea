"""The meter: start it, mark instants, and ask for the energy between any two of them."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING

from caraml.base.errors import InputError
from caraml.base.processes import node_key
from caraml.power.counter import LAGS, patience
from caraml.power.energy import boundary_energy, window_energy
from caraml.power.model import Channel, ChannelEnergy, WindowEnergy
from caraml.power.readings import ChannelReadings
from caraml.power.sampler import STALLED_S, Sampler
from caraml.power.source import Source, SourceUnavailable, UnknownDeviceError, chosen_sources, create_all, entries, source_names
from caraml.power.store import ROW, ReadingSeries, ReadingStore, Row

if TYPE_CHECKING:
    import pandas

TAIL_S = 0.5
"""How long beyond its age a reading after the window's end is waited for [s]."""

TAIL_SHARE = 0.1
"""A window is not followed for longer than this share of its own length: a short one is uncertain anyhow."""

SEEN_S = 300.0
"""Readings of this long before a window show how often a sensor of power has a new value; those of nodes take up to a minute [s]."""

SHORTEST_INTERVAL_S = 0.001

OPEN_TIMEOUT_S = 10.0
"""A driver without persistence mode may take seconds to wake its devices; longer than this is a fault [s]."""

STEP_S, SUSPEND_S = 0.5, 0.05
"""By how much the wall clock moves at least against the monotonic one when it is set, and the boot clock when the machine sleeps [s]."""


def suspended_s() -> float:
    """Time that the machine has slept since it was started, up to a constant [s]; 0 where the kernel does not tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() if hasattr(time, "CLOCK_BOOTTIME") else 0.0


class ClockLog:
    """Offsets of wall and boot clock against the monotonic one, noted now and then."""

    def __init__(self) -> None:
        self._t, self._wall, self._boot = array("d"), array("d"), array("d")
        self.note()

    def note(self) -> None:
        _, now, wall, boot = min(self._look() for _ in range(3))  # a thread that is held up within a look would see clocks jump
        self._wall.append(wall)
        self._boot.append(boot)
        self._t.append(now)

    def _look(self) -> tuple[float, float, float, float]:
        """How long the look took, when it began, and the offsets [s]."""
        now = time.monotonic()
        wall, boot = time.time() - now, suspended_s()
        return time.monotonic() - now, now, wall, boot

    def wall(self, t: float) -> float:
        """Wall time of a monotonic instant [s since 1970], by the comparison before it."""
        return t + self._wall[max(bisect_right(self._t, t) - 1, 0)]

    def flags(self, start: float, end: float) -> list[str]:
        """``clock_step`` if the wall clock was set, ``suspended`` if the machine slept, between the two instants."""
        first, last = max(bisect_right(self._t, start) - 1, 0), min(bisect_right(self._t, end), len(self._t) - 1)
        watched = ((self._wall, STEP_S, "clock_step"), (self._boot, SUSPEND_S, "suspended"))
        return [flag for offsets, limit, flag in watched if max(seen := offsets[first : last + 1]) - min(seen) > limit]


class MeterWindow(ContextDecorator):
    """A named stretch of time. Windows may nest, overlap, and be used as decorators (one window per call)."""

    def __init__(self, meter: Meter, name: str, idle: WindowEnergy | None = None) -> None:
        self._meter, self._idle = meter, idle
        self._energy: WindowEnergy | None = None
        self.name = name
        self.start: float | None = None
        """``time.monotonic()`` at entry [s]."""
        self.end: float | None = None

    def _recreate_cm(self) -> MeterWindow:
        return MeterWindow(self._meter, self.name, self._idle)

    def __enter__(self) -> MeterWindow:
        self._meter.windows.append(self)
        self.start = self._meter.mark()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end = self._meter.mark()

    @property
    def energy(self) -> WindowEnergy:
        """Energy of the closed window. The first call may wait for the readings after its end (see ``Meter.energy``)."""
        if self.start is None or self.end is None:
            raise InputError(f"the window {self.name!r} is not closed yet", "ask for .energy after its with block")
        if self._energy is None:
            self._energy = self._meter.energy(self.name, self.start, self.end, self._idle)
        return self._energy


class Meter:
    """Samples power and energy sensors and answers for any window of time while it ran.

    Args:
        sources: ``"auto"`` (those that the variable ``CARAML_POWER`` names, else every cheap source that answers; the
            others leave a reason), names as in ``caraml.power.source_names()``, or objects with the ``Source`` interface.
            Asking for a name that is unknown is an error; asking for one that does not answer is not, since the run must
            go on: see ``reasons``.
        devices: ids of accelerators (``GPU-…`` UUID, PCI address, index); ``None`` keeps to what the environment makes
            visible to this process (``CUDA_VISIBLE_DEVICES`` and the like), ``["all"]`` takes all of the node, ``[]`` none;
            ``["some"]``: nobody tells which are used, and no sensor of them counts.
        interval: length of a sampling interval [s]; one reading at a random instant in each.
        offset: where in its interval a reading falls (0 to 1); random unless a test wants otherwise.
    """

    def __init__(
        self,
        sources: str | Sequence[str | Source] = "auto",
        devices: Sequence[str] | None = None,
        interval: float = 0.1,
        *,
        offset: Callable[[], float] | None = None,
    ) -> None:
        if not interval >= SHORTEST_INTERVAL_S:
            raise InputError(f"sampling interval is {interval!r} s, expected at least {SHORTEST_INTERVAL_S} s")
        self.interval = interval
        self.windows: list[MeterWindow] = []
        self.clock = ClockLog()
        self.store = ReadingStore()
        self._running = False
        self._marks: tuple[float, float] | None = None
        """The first and the last mark [s]."""
        wanted: Sequence[str | Source] = [sources] if isinstance(sources, str) else sources
        chosen = chosen_sources()
        self._automatic = sources == "auto" and not chosen
        if sources == "auto":
            wanted = chosen or source_names(auto_only=True)
        self._samplers = [Sampler(one, interval, self.store, offset) for one in create_all(wanted, devices, self._automatic)]
        self._uses_accelerators = devices is None or bool(devices)

    def start(self) -> None:
        """Open the sources, all at the same time, and begin to sample. Returns after the first reading of each."""
        for sampler in self._samplers:
            sampler.start()
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        for sampler in self._samplers:
            sampler.wait_open(max(deadline - time.monotonic(), 0.0))
        self._running = True
        self.clock.note()

    def stop(self) -> None:
        """Wait for the tail of the last window, then end sampling. What was read stays available."""
        if not self._running:
            return
        if self._marks is not None:
            self._await_tail(*self._marks)
        self._running = False
        self.clock.note()
        for sampler in self._samplers:
            sampler.stop()
        deadline = time.monotonic() + 1.0  # one that hangs in its sensor is left behind: it cannot keep the process alive
        for sampler in self._samplers:
            sampler.join(max(deadline - time.monotonic(), 0.0))

    def __enter__(self) -> Meter:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def channels(self) -> list[Channel]:
        return list(self.store.channels.values())

    @property
    def reasons(self) -> list[str]:
        """Why sources, or some of their devices, are not read, or no longer; each with the command that would mend it, if there is one."""
        failures = [s.failure for s in self._samplers if s.failure is not None]
        return failures + [f"{s.name}: {why}" for s in self._samplers if s.failure is None for why in s.left_out]

    def check_devices(self, devices: Sequence[str] | None) -> None:
        """Raise an ``InputError`` with those that exist, if accelerators were asked for that no source knows. After ``start``.

        A source that does not answer cannot judge: then the run goes on, and its reason is in the result.
        """
        known = entries()
        judges = [s for s in self._samplers if s.name in known and known[s.name].accelerator]
        if devices is None or list(devices) == ["all"] or not judges or any(s.failure is None for s in judges):
            return
        refusals = [s.problem for s in judges if isinstance(s.problem, UnknownDeviceError)]
        if refusals or all(s.absent for s in judges):
            # With devices of several makers, a name that one source knows is not unknown, but no source knows all.
            unknown = [word for word in devices if all(word in r.words for r in refusals)] or list(devices)
            raise UnknownDeviceError(unknown, [device for r in refusals for device in r.present])

    def mark(self) -> float:
        """Read every channel now; returns the monotonic time of the call [s], to be used as the edge of a window."""
        at = time.monotonic()
        self._marks = (self._marks[0] if self._marks else at, at)
        if self._running:
            self._request(at)
            answered = [sampler.read_now() for sampler in self._samplers]
            self.store.wait_until(lambda: all(done() for done in answered), STALLED_S)
            self.clock.note()
        return at

    def window(self, name: str, idle: WindowEnergy | None = None) -> MeterWindow:
        """A context manager, or decorator, that marks its start and end; its ``energy`` is there afterwards."""
        return MeterWindow(self, name, idle)

    def energy(self, name: str, start: float, end: float, idle: WindowEnergy | None = None, *, busy: bool = False) -> WindowEnergy:
        """Energy between two monotonic instants [s] while the meter ran.

        Waits, but not for ever, until readings after ``end`` have come, so that the edges are interpolated. ``idle`` is
        the energy of a window in which nothing ran; with it the result has idle and net energy beside the gross. ``busy``: what ran did
        so until ``end``, as in the window, which narrows the bound of counters that may be late.
        """
        self._await_tail(start, end)
        self.clock.note()
        problems = [s.problem for s in self._samplers if isinstance(s.problem, SourceUnavailable)]
        flags = [*self.clock.flags(start, end), *(problem.kind for problem in problems if problem.kind in ("unreadable", "masked"))]
        measured = self._measured(start, end, busy, dated="clock_step" not in flags)
        window = window_energy(name, measured, start, end, idle=idle, reasons=self._reasons_in_short(), flags=flags)
        unopened = self._unopened()
        if unopened and not any(channel.boundary in ("device", "module") for channel in window.channels):
            window.channels += unopened
            window.boundaries = {"device": boundary_energy(unopened, window.duration_s), **window.boundaries}
        window.start_unix = self.clock.wall(start)
        window.node = node_key()
        if window.interval_s is None:
            window.interval_s = self.interval
        return window

    def powers(self) -> list[tuple[Channel, float | None]]:
        """Power of every domain now [W], by a channel that tells it; ``None`` where all of them have been silent."""
        found: dict[tuple[str, str], tuple[Channel, float | None]] = {}
        for channel in sorted((c for c in self.channels if c.kind != "apparent_va"), key=lambda c: c.kind == "energy"):
            if found.get(key := (channel.source, channel.domain), (channel, None))[1] is None:
                found[key] = channel, channel_power(channel, self.store, self._sampler(channel).interval)
        return list(found.values())

    def latest_power_w(self) -> float | None:
        """Power now [W], for a live display: the sum over accelerators (modules where known), else processors, else the node."""
        known = [(channel, power) for channel, power in self.powers() if power is not None]
        for boundaries in (("module", "device"), ("cpu",), ("node_dc",), ("node_ac",)):
            if seen := [pair for pair in known if pair[0].boundary in boundaries]:
                return sum(_one_view(seen, hardware, boundaries) for hardware in {channel.hardware for channel, _ in seen})
        return None

    def rows(self, origin: float = 0.0) -> Iterator[Row]:
        """All readings as rows of the columns ``ROW``, one channel after the other, in seconds after ``origin`` (monotonic)."""
        return self.store.rows(origin)

    def readings(self) -> dict[str, list[object]]:
        """All readings as columns ``channel``, ``t_before``, ``t_after`` (monotonic, s), ``value`` (J or W) and ``kind``."""
        rows = list(self.rows())
        return {name: [row[index] for row in rows] for index, name in enumerate(ROW)}

    def power_frame(self) -> pandas.DataFrame:
        """Power of every domain as a table of the form that jpwr's has: see :func:`caraml.power.result.power_frame`."""
        from caraml.power.result import domains, power_frame

        shown = domains(self.store).items()
        columns = {channel.domain: ([t for t, _ in points], [watts for _, watts in points]) for channel, points in shown}
        first = min((times[0] for times, _ in columns.values()), default=0.0)
        return power_frame(columns, self.clock.wall(first) - first)

    def _reasons_in_short(self) -> list[str]:
        """As ``reasons``, but kinds of sensor that the machine simply does not have are only named, at the end."""
        absent = [s.name for s in self._samplers if s.absent] if self._automatic else []
        reasons = [reason for reason in self.reasons if not any(reason.startswith(f"{name}: ") for name in absent)]
        reasons += [f"{s.name}: it opened, and has no sensor" for s in self._samplers if s.failure is None and not s.channels]
        return [*reasons, f"not on this machine: {', '.join(absent)}"] if absent else reasons

    def _unopened(self) -> list[ChannelEnergy]:
        """Sources of accelerators that hung or broke when they were opened, as devices without a number: what others measure is not theirs.
        One that tells why it has no sensor, or none that may be read, leaves none unmeasured that it knows to be used; nor is any used by
        what computes on processors."""
        known = entries() if self._uses_accelerators else {}
        broken = [s for s in self._samplers if s.failure and s.problem is None and not s.channels and s.name in known]
        why = {s.name: str(s.failure).removeprefix(f"{s.name}: ") for s in broken if known[s.name].accelerator}
        return [ChannelEnergy(name, known[name].title, name, "device", hardware=name, reason=reason) for name, reason in why.items()]

    def _measured(self, start: float, end: float, busy: bool, dated: bool) -> list[ChannelReadings]:
        """Every channel with its readings in the window and some way beyond; none of those that a clock dates which was set."""
        found = []
        for channel in self.channels:
            sampler = self._sampler(channel)
            still = patience(channel) if channel.kind == "energy" else SEEN_S  # so that a standstill is seen whole
            margin = max(still, 2 * channel.lag_s, 4 * sampler.interval)
            series = self.store.series(channel.id, start - margin, end + margin)
            missed = self.store.missed(channel, start, end)
            error = self.store.last_error(channel.id) or sampler.failure
            if channel.spacing_s and not dated:
                series, error = ReadingSeries(), "its times are those of the wall clock, which was set meanwhile"
            found.append(ChannelReadings(channel, series, missed, error, sampler.interval, busy))
        return found

    def _await_tail(self, start: float, end: float) -> None:
        """Wait until every channel that still answers has a reading that shows the instant ``end``."""
        if not self._running:
            return
        longest = TAIL_SHARE * (end - start)

        def reached(channel: Channel) -> bool:
            newest = self.store.newest(channel.id)
            return newest is not None and (newest[0] + newest[1]) / 2 - min(channel.tail_s, longest) >= end

        def expected(channel: Channel) -> bool:
            sampler = self._sampler(channel)
            return sampler.alive and not sampler.stalled and self.store.newest(channel.id) is not None  # not one that is closed

        waiting = [c for c in self.channels if expected(c) and not reached(c)]
        if not waiting:
            return
        tails = {min(c.tail_s, longest) for c in waiting}
        for tail in tails:
            self._request(end + tail)
        timeout = max(end + max(tails) - time.monotonic(), 0.0) + TAIL_S
        self.store.wait_until(lambda: all(reached(c) or not expected(c) for c in waiting), timeout)

    def _request(self, at: float) -> None:
        """Have each source read at ``at``, once more for each different age of its channels' readings, and while they may be late."""
        for sampler in self._samplers:
            for delay in {0.0, *(channel.age_s + channel.lag_s * k / LAGS for channel in sampler.channels for k in range(LAGS + 1))}:
                sampler.request(at + delay)

    def _sampler(self, channel: Channel) -> Sampler:
        """Who reads a channel, by its id: CSV files share a source's name."""
        return next(s for s in self._samplers if any(c.id == channel.id for c in s.channels))


SPAN_S = 1.0
"""Power of a counter is its slope over about this long [s]."""

STALE_S = 1.0
"""A channel whose newest reading is older than its span and this is silent [s]."""


def channel_power(channel: Channel, store: ReadingStore, interval: float) -> float | None:
    """Newest power of one channel [W]; ``None`` if it has been silent."""
    now = time.monotonic()
    newest = store.newest(channel.id)
    span = max(SPAN_S, 3 * interval, 5 * channel.update_period_s)
    if channel.kind == "apparent_va" or newest is None or now - newest[1] > span + STALE_S:
        return None
    if channel.kind != "energy":
        return newest[2]
    series = store.series(channel.id, now - span)
    if len(series) < 2 or series.t[-1] - series.t[0] < max(2 * channel.update_period_s, interval / 2):
        return None
    rise = series.value[-1] - series.value[0]
    return rise / (series.t[-1] - series.t[0]) if rise >= 0 else None


def _one_view(seen: list[tuple[Channel, float]], hardware: str, boundaries: tuple[str, ...]) -> float:
    """Power of one class of hardware [W], from one source at the outermost boundary."""
    members = [(c, power) for c, power in seen if c.hardware == hardware]
    boundary, source = min({(c.boundary, c.source) for c, _ in members}, key=lambda key: (boundaries.index(key[0]), key[1]))
    view = {c.domain: (c, power) for c, power in members if c.boundary == boundary and c.source == source}
    return sum(power for c, power in view.values() if c.parent not in view)
