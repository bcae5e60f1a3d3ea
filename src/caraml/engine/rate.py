"""The learning rate over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.optim.lr_scheduler import LambdaLR


def rates(optimizers: Sequence[torch.optim.Optimizer], factor: Callable[[int], float] | None) -> list[LambdaLR]:
    """Schedules that multiply each optimizer's learning rate by ``factor(step)``; none for a constant rate."""
    return [] if factor is None else [LambdaLR(optimizer, factor) for optimizer in optimizers]
