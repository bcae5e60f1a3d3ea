"""The learning rate over time for large batches (Goyal et al. 2017, "Accurate, Large Minibatch SGD", sections 2.1, 2.2 and 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REFERENCE_BATCH = 256
"""Batch that the unscaled learning rate is meant for."""
DECAY_EPOCHS = (30, 60, 80)
"""After each, the learning rate is a tenth of what it was; a training has 90 epochs."""


def goyal_rate(reference: float, global_batch: int, warm_up_epochs: float) -> Callable[[float], float]:
    """The learning rate as a function of time in epochs.

    It grows linearly from ``reference`` to ``reference * global_batch / 256`` during the warm-up; it falls to a tenth at epochs 30, 60, 80.
    """
    peak = reference * global_batch / REFERENCE_BATCH

    def rate(epoch: float) -> float:
        if epoch < warm_up_epochs:
            return reference + (peak - reference) * epoch / warm_up_epochs
        return peak * 0.1 ** sum(epoch >= decay for decay in DECAY_EPOCHS)

    return rate


def follow(optimizer: torch.optim.Optimizer, rate: Callable[[float], float], steps_per_epoch: int) -> None:
    """Set the learning rate before the first step and after every step; a step that the loss scaler skips does not count."""
    taken = 0

    def apply(*_: Any) -> None:
        nonlocal taken
        for group in optimizer.param_groups:
            group["lr"] = rate(taken / steps_per_epoch)
        taken += 1

    apply()
    optimizer.register_step_post_hook(apply)
