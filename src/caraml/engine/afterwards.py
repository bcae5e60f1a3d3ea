"""What follows training: the validation loss, and how long the model takes to be saved."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from caraml.engine.precision import autocast
from caraml.suite.model import Precision
from caraml.workloads.base import Task


def validation_loss(task: Task, precision: Precision, device: torch.device) -> float | None:
    """Mean loss over the task's held-out batches, every batch of the same weight; ``None`` if it has none."""
    if task.validation is None:
        return None
    task.model.eval()
    with torch.no_grad(), autocast(precision, device):
        losses = [task.loss(task.model, batch).float() for batch in task.validation()]
    return float(torch.stack(losses).mean())


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """Write the model's weights into ``folder`` until they are on the disk, and remove them again: only the time is wanted."""
    path = folder / "model.pt"
    try:
        with path.open("wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)
