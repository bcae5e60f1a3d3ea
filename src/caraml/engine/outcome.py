"""What a step leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass
class StepOutcome:
    """What a step leaves behind without being asked to finish."""

    loss: torch.Tensor | None
    """Mean loss of the step's micro-batches, on the device; ``None`` in a mode that trains nothing, and on a process that does not see the
    loss."""
    data_wait: float
    """Seconds that the host waited for batches."""
    scale: torch.Tensor | None = None
    """Loss scale after the step, on the device; a fall means that the update was skipped."""


Step = Callable[[], StepOutcome]
