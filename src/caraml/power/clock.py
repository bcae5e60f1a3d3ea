"""Clocks: the monotonic one for arithmetic, one wall anchor for people, and proof that neither was disturbed."""

from __future__ import annotations

import os
import socket
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STEP_S = 0.5
"""The wall clock moved against the monotonic one by more than this: it was set [s]."""

SUSPEND_S = 0.05
"""The boot clock moved against the monotonic one by more than this: the machine slept [s]."""

DRIFT = 1e-4
"""The clocks of two nodes in order do not run apart faster than this [s per s]: twice the tolerance of a crystal."""


NODE = "CARAML_NODE"
"""Environment variable: what this node is called instead. Processes of one host that have different ones count as nodes of their own."""


def node_key() -> str:
    """Host name and boot id: the same for all processes of one node until it restarts."""
    if os.environ.get(NODE):
        return os.environ[NODE]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}:{boot.read_text().strip() if boot.exists() else 'unknown'}"


def suspended_s() -> float:
    """Time that the machine has slept since it was started, up to a constant [s]; 0 where the kernel does not tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() if hasattr(time, "CLOCK_BOOTTIME") else 0.0


class ClockLog:
    """Offsets of wall and boot clock against the monotonic one, noted now and then."""

    def __init__(self) -> None:
        self._t, self._wall, self._boot = array("d"), array("d"), array("d")
        self.note()

    def note(self) -> None:
        """Compare the clocks now."""
        now = time.monotonic()
        self._wall.append(time.time() - now)
        self._boot.append(suspended_s())
        self._t.append(now)

    def wall(self, t: float) -> float:
        """Wall time of a monotonic instant [s since 1970], by the comparison before it."""
        return t + self._wall[max(bisect_right(self._t, t) - 1, 0)]

    def flags(self, start: float, end: float) -> list[str]:
        """``clock_step`` if the wall clock was set, ``suspended`` if the machine slept, between the two instants."""
        first, last = max(bisect_right(self._t, start) - 1, 0), min(bisect_right(self._t, end), len(self._t) - 1)
        found = []
        for offsets, limit, flag in ((self._wall, STEP_S, "clock_step"), (self._boot, SUSPEND_S, "suspended")):
            seen = offsets[first : last + 1]
            if max(seen) - min(seen) > limit:
                found.append(flag)
        return found


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """How far another node's monotonic clock is ahead of this one's."""

    offset_s: float
    """Add this to a time of this node to get the time of the other [s]."""
    half_width_s: float
    """The offset is known to within this [s]: half the round trip of the quickest exchange."""
    at: float
    """This node's monotonic time of the measurement [s]."""


def best_offset(exchanges: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Offset from exchanges of (sent here, answered there, received here), by the one with the shortest round trip.

    The answer was given somewhere between sending and receiving (Cristian, Distributed Computing 3, 1989).
    """
    sent, there, received = min(exchanges, key=lambda e: e[2] - e[0])
    return ClockOffset(there - (sent + received) / 2, (received - sent) / 2, (sent + received) / 2)


def offset_at(offsets: Sequence[ClockOffset], t: float) -> ClockOffset:
    """Offset at time ``t`` from measurements at start and end: clocks drift evenly, so it lies on the line between.

    Outside of them nothing is known but that clocks drift slowly, and the uncertainty grows with the distance.
    """
    first, last = min(offsets, key=lambda o: o.at), max(offsets, key=lambda o: o.at)
    span = last.at - first.at
    share = min(max((t - first.at) / span, 0.0), 1.0) if span > 0 else 0.0
    offset = first.offset_s + share * (last.offset_s - first.offset_s)
    outside = max(first.at - t, t - last.at, 0.0)
    return ClockOffset(offset, max(first.half_width_s, last.half_width_s) + DRIFT * outside, t)


def drift(offsets: Sequence[ClockOffset]) -> tuple[float, bool]:
    """How far the clocks ran apart between the first and the last measurement [s], and whether faster than they should."""
    first, last = min(offsets, key=lambda o: o.at), max(offsets, key=lambda o: o.at)
    moved = last.offset_s - first.offset_s
    return moved, abs(moved) > first.half_width_s + last.half_width_s + DRIFT * (last.at - first.at)


@dataclass(slots=True)
class ClockRecord:
    """What one rank knows about its node's clock, compared with the node of the first rank."""

    reference: str | None = None
    """Host and boot id of the node whose clock the others are compared with."""
    start: ClockOffset | None = None
    """The reference's clock against this node's when the command started; ``None`` on the reference itself."""
    end: ClockOffset | None = None
    """The same after the command ended."""
    reason: str | None = None
    """Why an offset is not known."""
