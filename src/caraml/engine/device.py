"""The device behind the measuring loop: its clock, its end-of-work, its memory.

An accelerator works behind the host's back. Marks are therefore put into its queue (CUDA and HIP events) and read later; on a CPU, where
work is done when the call returns, a mark is the time itself. Tests put a device of known speed in this place.
"""

from __future__ import annotations

import resource
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from caraml.errors import EnvironmentUnfitError
from caraml.system.model import DeviceClass


class Device(Protocol):
    """What the measuring loop needs of a device. Times in seconds, memory in bytes."""

    torch_device: torch.device
    settle_seconds: float
    """What a warm-up takes at least, for clocks to come down to what power and heat allow."""
    window_seconds: float
    """What a window takes at least: clocks that settle over minutes show in none that is shorter."""

    def now(self) -> float:
        """The host's monotonic clock."""
        ...

    def synchronize(self) -> None:
        """Return when everything launched so far has finished."""
        ...

    def mark(self) -> Any:
        """Put a mark behind everything launched so far, without waiting."""
        ...

    def between(self, first: Any, last: Any) -> float | None:
        """Time from one mark to a later one; ``None`` while the device has not come to the later one."""
        ...

    def forget_peak_memory(self) -> None:
        """Begin anew with ``peak_memory``, where the device can."""
        ...

    def peak_memory(self) -> int | None:
        """Highest memory in use so far."""
        ...


class CpuDevice:
    """The host's own processor."""

    torch_device = torch.device("cpu")
    settle_seconds = window_seconds = 0.0

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()

    def synchronize(self) -> None:
        """Nothing to wait for: a CPU call returns when its work is done."""

    def mark(self) -> float:
        """The time itself."""
        return time.monotonic()

    def between(self, first: float, last: float) -> float:
        """Difference of two times."""
        return last - first

    def forget_peak_memory(self) -> None:
        """The kernel keeps the highest resident set for the life of a process."""

    def peak_memory(self) -> int:
        """Highest resident set of this process."""
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class CudaDevice:
    """A CUDA or ROCm GPU."""

    settle_seconds, window_seconds = 15.0, 20.0

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()

    def synchronize(self) -> None:
        """Wait for the device's whole queue."""
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        """Device time between two events; asks, does not wait."""
        return first.elapsed_time(last) / 1e3 if last.query() else None

    def forget_peak_memory(self) -> None:
        """Begin anew, so that what came before the model does not count."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int:
        """Most bytes that tensors held at one time (not what the allocator reserved)."""
        return torch.cuda.max_memory_allocated(self.torch_device)


def open_device(device_class: DeviceClass, local_rank: int) -> Device:
    """The device of this process. Raises ``EnvironmentUnfitError`` when the point wants a GPU and torch sees none."""
    if device_class == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise EnvironmentUnfitError("the point wants a GPU, but torch sees none", "caraml doctor")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise EnvironmentUnfitError(
            f"local rank {local_rank} has no GPU: torch sees {count}", "check CUDA_VISIBLE_DEVICES and the launcher"
        )
    return CudaDevice(local_rank)


def gpus(indices: Iterable[int]) -> list[str]:
    """PCI addresses of these GPUs, as this process counts them, by which their sensors are found.

    Libraries agree on addresses only: a HIP UUID is written in another way than amdsmi's, and a MIG slice's is not its GPU's. A torch
    without them gives the UUIDs.
    """
    found = []
    for index in indices:
        gpu: Any = torch.cuda.get_device_properties(index)
        known = hasattr(gpu, "pci_bus_id")
        found.append(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}" if known else f"GPU-{gpu.uuid}")
    return found


class StepTimer:
    """A chain of marks: the end of one step is the start of the next. Finished steps are read without waiting for the device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[Any] = deque([device.mark()])
        """The mark up to which steps have been read, and all later ones: on a GPU each is an event."""
        self._seconds = array("d")

    def step_ended(self) -> None:
        """Put the mark that ends the current step."""
        self._pending.append(self._device.mark())

    @property
    def launched(self) -> int:
        """Steps whose end has been marked."""
        return len(self._seconds) + len(self._pending) - 1

    def finished(self) -> Sequence[float]:
        """Times of the steps that the device has finished by now, in order."""
        while len(self._pending) > 1:
            seconds = self._device.between(self._pending[0], self._pending[1])
            if seconds is None:
                break
            self._seconds.append(seconds)
            self._pending.popleft()
        return self._seconds
