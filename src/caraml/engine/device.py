"""The device behind the measuring loop: its clock, its end-of-work, its memory.

An accelerator works behind the host's back. Marks are therefore put into its queue (events) and read later; on a CPU, where work is done
when the call returns, a mark is the time itself. NVIDIA's and AMD's GPUs have code of their own; every other accelerator that torch knows
goes through ``torch.accelerator``. Tests put a device of known speed in this place, or an emulated accelerator behind torch.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.power.model import SOME
from caraml.system import families, host
from caraml.system.model import SINCE, DeviceClass, lacking

AHEAD = 0.5
"""Seconds of steps by which the host may run ahead of the device."""
_FEWEST_AHEAD, _MOST_AHEAD = 2, 1000
"""Steps that it always may, and never more than."""


class Device(Protocol):
    """What the measuring loop needs of a device. Times in seconds, memory in bytes."""

    torch_device: torch.device
    settle_seconds: float
    """What a warm-up takes at least, for clocks to come down to what power and heat allow."""
    window_seconds: float
    """What a window takes at least: clocks that settle over minutes show in none that is shorter."""
    behind: bool
    """Whether it works behind the host's back, and a mark tells when it came to it; else a mark is the host's own time."""

    def now(self) -> float:
        """The host's monotonic clock."""
        return time.monotonic()

    def synchronize(self) -> None:
        """Return when everything launched so far has finished."""

    def mark(self) -> Any:
        """Put a mark behind everything launched so far, without waiting."""

    def between(self, first: Any, last: Any) -> float | None:
        """Time from one mark to a later one; ``None`` while the device has not come to the later one."""

    def wait(self, mark: Any) -> None:
        """Return when the device has come to a mark."""

    def forget_peak_memory(self) -> None:
        """Begin anew with ``peak_memory``, where the device can."""

    def peak_memory(self) -> int | None:
        """Highest memory in use so far; ``None`` where the device does not tell."""


class CpuDevice(Device):
    """The host's own processor."""

    torch_device = torch.device("cpu")
    settle_seconds = window_seconds = 0.0
    behind = False

    def synchronize(self) -> None:
        """Nothing to wait for: a CPU call returns when its work is done."""

    def mark(self) -> float:
        return time.monotonic()

    def between(self, first: float, last: float) -> float:
        return last - first

    def wait(self, mark: float) -> None:
        """It has been."""

    def forget_peak_memory(self) -> None:
        host.forget_peak_resident()

    def peak_memory(self) -> int:
        """Highest resident set of this process."""
        return host.peak_resident()


class CudaDevice(Device):
    """A CUDA or ROCm GPU."""

    settle_seconds, window_seconds = 15.0, 20.0
    behind = True

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        return first.elapsed_time(last) / 1e3 if last.query() else None

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def forget_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int:
        """Most bytes that tensors held at one time (not what the allocator reserved)."""
        return torch.cuda.max_memory_allocated(self.torch_device)


class AcceleratorDevice(Device):
    """Any other accelerator that torch knows, built in or by a plug-in."""

    settle_seconds, window_seconds = CudaDevice.settle_seconds, CudaDevice.window_seconds

    def __init__(self, device_type: str, index: int) -> None:
        self.torch_device = torch.device(device_type, index)
        torch.accelerator.set_device_index(index)
        self.events_tell_time = self.behind = self._asked_for_time()

    def _asked_for_time(self) -> bool:
        try:
            first, last = self._event(), self._event()
            last.synchronize()
            return first.elapsed_time(last) >= 0
        except (RuntimeError, NotImplementedError, ValueError):  # as torch's backends say that they have no such events
            return False

    def _event(self) -> torch.Event:
        event = torch.Event(self.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch_device))
        return event

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(self.torch_device)

    def mark(self) -> torch.Event | float:
        """An event in the current stream. Where events do not tell time, the device is waited for, and the mark is the time itself."""
        if self.events_tell_time:
            return self._event()
        self.synchronize()
        return self.now()

    def between(self, first: Any, last: Any) -> float | None:
        if not self.events_tell_time:
            return float(last - first)
        return float(first.elapsed_time(last)) / 1e3 if last.query() else None

    def wait(self, mark: Any) -> None:
        if self.events_tell_time:
            mark.synchronize()

    def forget_peak_memory(self) -> None:
        with suppress(RuntimeError):
            torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def peak_memory(self) -> int | None:
        """Most bytes that tensors held at one time; ``None`` where the device's allocator does not count."""
        try:
            return torch.accelerator.max_memory_allocated(self.torch_device) or None
        except RuntimeError:
            return None


class CudaGraph:
    """A CUDA or HIP graph. Torch registers the default random generator of the device with it, so that every replay draws other numbers."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._graph, self._stream = device, torch.cuda.CUDAGraph(), torch.cuda.Stream(device)

    def aside(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Do the work on the stream of the capture."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            found = work()
        current.wait_stream(self._stream)
        found.record_stream(current)
        return found

    def capture(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Record the work without doing it; the tensor that each replay will fill. Other threads, as a loader's that pins memory, may use
        the device meanwhile. Raises ``RuntimeError`` where the work cannot be captured; torch 2.11 then leaves stream, allocator and
        random numbers in the state of the capture, where they are of no use: all three are put back."""
        index, pool = self._device.index or 0, torch.cuda.graph_pool_handle()
        numbers = torch.cuda.default_generators[index].clone_state()
        try:
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                return work()
        except RuntimeError as error:
            torch.cuda.default_generators[index].graphsafe_set_state(numbers)
            with suppress(RuntimeError):  # a newer torch has ended it
                torch._C._cuda_endAllocateToPool(index, pool)
            first = error.__context__  # the end of the capture fails, too, and says no more than that
            raise first if isinstance(first, RuntimeError) else error from None

    def replay(self) -> None:
        """Launch what was recorded, on the current stream."""
        self._graph.replay()

    def drop(self) -> None:
        """Forget what was recorded, and free its memory."""
        self._graph.reset()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def open_device(device_class: DeviceClass, local_rank: int) -> Device:
    """The device of this process, of the kind that ``CARAML_DEVICE`` names, or that torch has. Raises ``EnvironmentUnfitError`` where the
    point wants an accelerator, and torch sees none, or fewer than processes."""
    if device_class == "cpu":
        return CpuDevice()
    kind = accelerator_type()
    if kind is None:
        unfit = families.refusal()
        if unfit is not None:
            raise unfit
        raise EnvironmentUnfitError("the point wants an accelerator, but torch sees none", "caraml doctor")
    family, count = families.family_of(kind), torch.get_device_module(kind).device_count()
    if local_rank >= count:
        variables = " or ".join(family.variables) or "the variables of its plug-in"
        hidden = ", ".join(f"{name}={os.environ[name]}" for name in family.variables if name in os.environ)
        found = f"local rank {local_rank} has no {family.title}: torch sees {count}" + (f", with {hidden}" if hidden else "")
        raise EnvironmentUnfitError(found, f"check {variables}, and how many processes the launcher starts on a node")
    return CudaDevice(local_rank) if kind == "cuda" else AcceleratorDevice(kind, local_rank)


def accelerator_type() -> str | None:
    """Torch's name for the accelerators that are measured: the one that ``CARAML_DEVICE`` asks for, else torch's own choice."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if families.forced() == "cuda" or (found is None and torch.cuda.is_available()):
        return "cuda" if torch.cuda.is_available() else None
    return found.type if found is not None and families.forced() in ("", "cpu", found.type) else None


def gpu_lacks(precision: str, device: torch.device) -> str | None:
    """Why a GPU does not multiply matrices in a precision by itself, or ``None`` if it does."""
    gpu: Any = torch.cuda.get_device_properties(device)
    if precision not in lacking(gpu.gcnArchName if torch.version.hip else f"{gpu.major}.{gpu.minor}"):
        return None
    (major, minor), names = SINCE[precision]
    since = f"NVIDIA's GPUs have from compute capability {major}.{minor} on, and AMD's {', '.join(names)}"
    return f"{gpu.name} has no units for it, which {since}"


def collectives(device: torch.device) -> str:
    """The library by which processes on such devices exchange tensors, as torch calls it. Raises ``EnvironmentUnfitError`` where torch
    knows none."""
    try:
        return torch.distributed.get_default_backend_for_device(device)
    except ValueError as error:
        found = f"torch knows no collectives between devices of type {device.type!r}: {error}"
        raise EnvironmentUnfitError(found, "measure one device per point") from error


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


def sensors_of(device: torch.device, count: int, root: Path = Path("/")) -> list[str] | None:
    """Of the first ``count`` devices of this node, by what their power sensors are found: see ``caraml.power.Meter``. None (``[]``) for a
    CPU, whose idle neighbours do not count; ``["some"]`` where torch tells no addresses. Drivers are looked for below ``root``."""
    if device.type == "cpu":
        return []
    if device.type == "cuda":
        return gpus(range(count))
    if torch.get_device_module(device).device_count() != count:
        return [SOME]
    found = families.told_apart(device.type, count, root)
    return [SOME] if found == [] else found


@dataclass(frozen=True, slots=True)
class Take:
    """One batch that a step took."""

    begin: float
    """When the host asked for it, on its monotonic clock [s]."""
    seconds: float
    """How long the host waited for it."""
    before: Any
    """A mark before it; ``None`` for a step's first batch, as the step begins with a mark."""
    after: Any
    """A mark behind it and whatever brings it to the device, before the work on it."""


class StepTimer:
    """A chain of marks: the end of one step is the start of the next. Finished steps are read without waiting for the device.

    The host may run ahead of the device by ``AHEAD`` seconds of steps, and always by two: then a window ends soon after somebody has
    decided so, whatever the driver's queue holds, and the device never runs out of work because of it.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: deque[tuple[Any, Callable[[Any], float]]] = deque([(device.mark(), lambda start: 0.0)])
        """The mark up to which steps have been read, and all later ones: on a GPU each is an event. With each, what its step lost to its
        input, by the mark at which the step began."""
        self._seconds, self._lost = array("d"), array("d")
        self._began = device.now()
        """When the host began with the current step."""

    def step_ended(self, waited: float = 0.0, takes: Sequence[Take] = ()) -> None:
        """Put the mark that ends the current step; wait if the host is too far ahead. The host ``waited`` for the step's batches [s];
        ``takes`` are its waits, where the device tells what they cost it."""
        began = self._began
        lost = (lambda start: self._idle(start, began, takes)) if takes else (lambda start: waited)
        self._pending.append((self._device.mark(), lost))
        if len(self._pending) > _FEWEST_AHEAD + 1:
            self.finished()
            ahead = max(_FEWEST_AHEAD, int(AHEAD / max(self._seconds[-1], AHEAD / _MOST_AHEAD)) if self._seconds else 0)
            if len(self._pending) > ahead + 1:
                self._device.wait(self._pending[-ahead - 1][0])
        self._began = self._device.now()

    def _idle(self, start: Any, began: float, takes: Sequence[Take]) -> float:
        """Seconds for which the device had nothing to do, because the batches of a step were not there: at most what the host waited for
        them, and more only where they had not come to the device by then. What the host did before it asked for the first one is none, nor
        is what the device then waits for launches: nobody sees which of these the host would have made ahead."""
        idle = 0.0
        for take in takes:
            seconds = self._device.between(start if take.before is None else take.before, take.after) or 0.0
            own = take.begin - began if take.before is None else 0.0
            idle += max(min(seconds, take.seconds), seconds - own)
        return idle

    @property
    def launched(self) -> int:
        """Steps whose end has been marked."""
        return len(self._seconds) + len(self._pending) - 1

    @property
    def read(self) -> Sequence[float]:
        """Times of the steps that are known to have finished; the device is not asked."""
        return self._seconds

    @property
    def lost(self) -> Sequence[float]:
        """What each of these steps lost to its input [s]: on a device that works behind the host's back how long it had no work for want
        of a batch, else how long the host waited."""
        return self._lost

    def finished(self) -> Sequence[float]:
        """Times of the steps that the device has finished by now, in order."""
        while len(self._pending) > 1:
            (start, _), (end, lost) = self._pending[0], self._pending[1]
            seconds = self._device.between(start, end)
            if seconds is None:
                break
            self._seconds.append(seconds)
            self._lost.append(lost(start))
            self._pending.popleft()
        return self._seconds
