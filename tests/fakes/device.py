"""An accelerator of known speed on a clock of its own: work is launched at once and finishes later, as on a GPU."""

from __future__ import annotations

import torch

QUEUE_SECONDS = 1.0
"""How far the host may run ahead before launching blocks, as drivers do."""


class FakeDevice:
    """A device whose every launch takes the time it is told. ``now`` is the host; the device lags behind it."""

    torch_device = torch.device("cpu")

    def __init__(self, start: float = 1000.0, launch_cost: float = 0.001) -> None:
        self.host = start
        self.free_at = start
        self.launch_cost = launch_cost
        self.synchronised = 0

    def launch(self, seconds: float) -> None:
        """Put work of this length into the queue."""
        self.host += self.launch_cost
        self.free_at = max(self.free_at, self.host) + seconds
        self.host = max(self.host, self.free_at - QUEUE_SECONDS)

    def now(self) -> float:
        return self.host

    def synchronize(self) -> None:
        self.synchronised += 1
        self.host = max(self.host, self.free_at)

    def mark(self) -> float:
        self.free_at = max(self.free_at, self.host)
        return self.free_at

    def between(self, first: float, last: float) -> float | None:
        return last - first if last <= self.host else None

    def forget_peak_memory(self) -> None:
        pass

    def peak_memory(self) -> int:
        return 3 * 2**30
