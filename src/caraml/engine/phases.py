"""The worker's life as intervals on one clock, without gaps between an inner phase and the outer one around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from caraml.metrics.model import Phase


def process_start() -> float:
    """When this process was started, on the monotonic clock: the interpreter's and torch's start-up are part of a point's life.

    Where the kernel does not tell, now.
    """
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return now
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22: ticks since boot
    return now - (time.clock_gettime(time.CLOCK_BOOTTIME) - started)


class PhaseLog:
    """Records phases. A phase inside another splits it, so that the intervals never overlap and can be added."""

    def __init__(self, origin: float, announce: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.origin, self._announce, self._clock = origin, announce, clock
        self._stack: list[str] = []
        self._since = origin
        self._done: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside belongs to ``name``, also when it fails."""
        if self._stack or self._done:  # the first phase begins with the process
            self._cut()
        self._stack.append(name)
        self._announce(name)
        try:
            yield
        finally:
            self._cut()
            self._stack.pop()

    @property
    def phases(self) -> list[Phase]:
        """Finished intervals, in seconds since the origin; one cut short by a failure included."""
        return list(self._done)

    @property
    def current(self) -> str:
        """Name of the phase that has not ended yet."""
        return self._stack[-1] if self._stack else "none"

    def _cut(self) -> None:
        now = self._clock()
        if self._stack and now > self._since:
            self._done.append(Phase(name=self._stack[-1], start=self._since - self.origin, end=now - self.origin))
        self._since = now
