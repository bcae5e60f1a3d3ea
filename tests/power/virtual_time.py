"""A clock for meters under test: it stands still while anything works, and jumps to the next instant for which anybody waits.

A second of measuring takes a millisecond, and no load of the machine comes between a reading and its instant. Samplers run in threads of
their own as ever; only ``time.monotonic``, ``time.sleep`` and the two waits of samplers and their store go by this clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from caraml.power.sampler import Sampler
from caraml.power.store import ReadingStore

TICK = 1e-6
"""What asking for the time takes [s]: no two instants are equal."""
_POLL = 0.0002
_SAMPLERS = "power-"


class VirtualTime:
    """Seconds that pass when all samplers and at least one of the test's threads wait."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._over = False
        self._strangers = set(threading.enumerate())
        self._changed = threading.Condition()
        self._waiting: dict[threading.Thread, tuple[float, Callable[[], bool]]] = {}

    def monotonic(self) -> float:
        """The time [s]."""
        with self._changed:
            self._now += TICK
            return self._now

    def sleep(self, seconds: float) -> None:
        """Wait so long."""
        self.wait(lambda: False, seconds)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready`` says so, or so long. Returns what it said last."""
        with self._changed:
            until = self._now + seconds
            self._waiting[threading.current_thread()] = until, ready
            try:
                while not ready() and self._now < until and not self._over:
                    if not self._advance():
                        self._changed.wait(_POLL)
                return ready()
            finally:
                del self._waiting[threading.current_thread()]

    def end(self) -> None:
        """Let go whoever still waits, as a sampler whose sensor hangs."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _advance(self) -> bool:
        waiting = set(self._waiting)
        samplers = {thread for thread in threading.enumerate() if thread.name.startswith(_SAMPLERS)} - self._strangers
        due = any(until <= self._now or ready() for until, ready in self._waiting.values())
        if due or not samplers <= waiting or not waiting - samplers:
            return False
        self._now = min(until for until, _ in self._waiting.values())
        self._changed.notify_all()
        return True


def use_virtual_time(patch: pytest.MonkeyPatch) -> VirtualTime:
    """Let this process's meters go by a clock of their own."""
    clock = VirtualTime()

    def rest(sampler: Sampler, seconds: float) -> None:
        clock.wait(lambda: not sampler._asked.empty(), seconds)
        while not sampler._asked.empty():
            sampler._due.append(sampler._asked.get_nowait())

    patch.setattr(time, "monotonic", clock.monotonic)
    patch.setattr(time, "time", lambda: 1e9 + clock.monotonic())
    patch.setattr(time, "sleep", clock.sleep)
    patch.setattr("caraml.power.meter.suspended_s", lambda: 0.0)
    patch.setattr(Sampler, "_rest", rest)
    patch.setattr(ReadingStore, "wait_until", lambda store, ready, timeout: clock.wait(ready, timeout))
    return clock
