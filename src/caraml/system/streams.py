"""A stream beside the one on which a model runs: copies on it overlap with the model's work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from caraml.system.families import family_of

if TYPE_CHECKING:
    import torch


class SideStream:
    """Launches beside the model and lets it take over."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"  # beside a plug-in, CUDA is not torch's current accelerator
        self._device, self._of_the_model = device, (torch.cuda if cuda else torch.accelerator).current_stream
        side: Any = torch.cuda.Stream(device) if cuda else torch.Stream(device)
        self._side = side
        self.launching: Callable[[], AbstractContextManager[None]] = lambda: torch.cuda.stream(side) if cuda else side
        """What is launched inside runs on this stream."""

    def join(self) -> None:
        """The model's stream waits for all that was launched here."""
        self._of_the_model(self._device).wait_stream(self._side)

    def lend(self, tensor: torch.Tensor) -> None:
        """The model uses a tensor of this stream: its memory is not given out again, say to the next copy, before the model has done."""
        tensor.record_stream(self._of_the_model(self._device))


def side_stream(device: torch.device) -> SideStream | None:
    """A stream of its own on a device; ``None`` where copies do not overlap with work: on CPUs, and on devices of one stream."""
    return SideStream(device) if pins(device) else None


def pins(device: torch.device) -> bool:
    """Whether page-locked memory makes copies to the device overlap with its work."""
    return device.type != "cpu" and family_of(device.type).streams
