"""A stream beside the one on which a model runs: copies on it overlap with the model's work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from caraml.system.families import family_of

if TYPE_CHECKING:
    import torch


class SideStream(Protocol):
    """What launches beside the model and lets it take over."""

    def launching(self) -> AbstractContextManager[None]:
        """What is launched inside runs on this stream."""
        ...

    def join(self) -> None:
        """The model's stream waits for all that was launched here."""
        ...

    def lend(self, tensor: torch.Tensor) -> None:
        """The model uses a tensor of this stream: its memory is not given out again before the model has done."""
        ...


class CudaStream:
    """Of a CUDA or ROCm GPU."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._device = torch, device
        self._side = torch.cuda.Stream(device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What is launched inside runs on this stream."""
        with self._torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """The model's stream waits for all that was launched here."""
        self._torch.cuda.current_stream(self._device).wait_stream(self._side)

    def lend(self, tensor: torch.Tensor) -> None:
        """Memory of this stream; without this it could be given to the next copy while the model reads it."""
        tensor.record_stream(self._torch.cuda.current_stream(self._device))


class AcceleratorStream:
    """Of any accelerator, by torch's interface for all of them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch, self._device = torch, device
        self._side = torch.Stream(device)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What is launched inside runs on this stream."""
        with self._side:
            yield

    def join(self) -> None:
        """The model's stream waits for all that was launched here."""
        self._torch.accelerator.current_stream(self._device).wait_stream(self._side)

    def lend(self, tensor: torch.Tensor) -> None:
        """As for CUDA: the allocator learns who else uses the memory."""
        tensor.record_stream(self._torch.accelerator.current_stream(self._device))


def side_stream(device: torch.device) -> SideStream | None:
    """A stream of its own on a device; ``None`` where copies do not overlap with work: on CPUs, and on devices of one stream."""
    if device.type == "cpu" or not family_of(device.type).streams:
        return None
    return CudaStream(device) if device.type == "cuda" else AcceleratorStream(device)


def pins(device: torch.device) -> bool:
    """Whether page-locked memory makes copies to the device overlap with its work."""
    return device.type != "cpu" and family_of(device.type).streams
