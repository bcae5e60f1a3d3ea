"""A device of known speed: work is launched at once and finishes later, as on a GPU, after exactly the time that it was told."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from caraml.metrics.model import Peak
from caraml.system.model import DType

PEAK_MEMORY = 3 * 2**30
"""Bytes that the device says it held at most."""
PEAK_FLOPS: dict[DType, float] = {"fp32": 1e13, "tf32": 2e13, "bf16": 4e13, "fp16": 4e13}
"""Peak rate of the device in FLOP/s."""


class Clock(Protocol):
    """The host's time in seconds."""

    def now(self) -> float:
        """The time."""

    def wait_until(self, instant: float) -> None:
        """Return when it is at least ``instant``."""


class HostClock:
    """The monotonic clock itself."""

    def now(self) -> float:
        """The time."""
        return time.monotonic()

    def wait_until(self, instant: float) -> None:
        """Sleep until then."""
        time.sleep(max(instant - time.monotonic(), 0.0))


class VirtualClock:
    """A clock that only moves when somebody waits, so that minutes of work take no time and nothing disturbs them."""

    def __init__(self, start: float) -> None:
        self.time = start

    def now(self) -> float:
        """The time."""
        return self.time

    def wait_until(self, instant: float) -> None:
        """Make it then."""
        self.time = max(self.time, instant)


class KnownDevice:
    """A device whose every launch takes the time it is told. The host runs ahead of it by up to ``queue`` seconds."""

    torch_device = torch.device("cpu")
    settle_seconds = window_seconds = 0.0

    def __init__(self, clock: Clock, launch_cost: float = 0.0, queue: float = 0.25) -> None:
        self.clock, self.launch_cost, self.queue = clock, launch_cost, queue
        self.free_at = clock.now()
        self.synchronised = 0
        """How often the host waited for the device."""

    def launch(self, seconds: float) -> None:
        """Put work of this length into the queue; blocks while the queue is full, as drivers do."""
        self.clock.wait_until(self.clock.now() + self.launch_cost)
        self.free_at = max(self.free_at, self.clock.now()) + seconds
        self.clock.wait_until(self.free_at - self.queue)

    def now(self) -> float:
        """The host's clock."""
        return self.clock.now()

    def synchronize(self) -> None:
        """Return when everything launched so far has finished."""
        self.synchronised += 1
        self.clock.wait_until(self.free_at)

    def mark(self) -> float:
        """When everything launched so far will have finished."""
        self.free_at = max(self.free_at, self.clock.now())
        return self.free_at

    def between(self, first: float, last: float) -> float | None:
        """Time from one mark to a later one; ``None`` while the device has not come to the later one."""
        return last - first if last <= self.clock.now() else None

    def wait(self, mark: float) -> None:
        """Return when the device has come to the mark."""
        self.clock.wait_until(mark)

    def forget_peak_memory(self) -> None:
        """The peak is a constant."""

    def peak_memory(self) -> int:
        """The constant."""
        return PEAK_MEMORY

    def peak(self, dtype: DType) -> Peak:
        """The known peak, in place of a data sheet and a probe."""
        return Peak(value=PEAK_FLOPS[dtype], dtype=dtype, source="known")


def asynchronous() -> KnownDevice:
    """A known device on the host's clock, for energy and waiting that take real time."""
    return KnownDevice(HostClock())


def virtual() -> KnownDevice:
    """A known device on a clock of its own, which starts now so that its times fit those of the host."""
    return KnownDevice(VirtualClock(time.monotonic()), launch_cost=0.001, queue=1.0)
