"""What follows training: the validation loss, the model's quality, and how long it takes to be saved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from caraml.base.files import replacing
from caraml.engine.precision import autocast
from caraml.engine.ranks import Ranks
from caraml.metrics.model import Metric
from caraml.suite.model import Precision
from caraml.workloads.base import VALIDATION_BATCHES, Task


def validation_loss(task: Task, precision: Precision, device: torch.device) -> float | None:
    """Mean loss per sample over at most ``VALIDATION_BATCHES`` held-out batches, of which the last may be smaller; ``None`` without any.

    They come from all over the data where it can be divided, since images lie class by class; else they are the first ones.
    """
    if task.validation is None:
        return None
    batches: Any = task.validation()
    if hasattr(batches, "share"):
        batches = batches.share(0, max(len(batches) // VALIDATION_BATCHES, 1))
    task.model.eval()
    with torch.no_grad(), autocast(precision, device):
        judged = [_summed(task, batch) for batch in itertools.islice(batches, VALIDATION_BATCHES)]
    if not judged:
        return None
    loss, _, count = torch.stack(judged).cpu().double().sum(0).tolist()
    return float(loss / count)


def validate(
    task: Task, precision: Precision, device: torch.device, ranks: Ranks, watch: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> tuple[float | None, float | None]:
    """Loss per sample and share answered right over all held-out batches, each rank going through its part; the same on every rank.

    ``None`` for what the task does not have. ``watch`` sees each batch. Collective. The model is left in training mode.
    """
    if task.validation is None:
        return None, None
    batches = task.validation()
    agree_on_statistics(task.model, ranks)
    own = batches.share(ranks.rank, ranks.world) if hasattr(batches, "share") else itertools.islice(batches, ranks.rank, None, ranks.world)
    task.model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad(), autocast(precision, device):
        judged = [_judged(task, batch).double() for batch in watch(own)]
    if judged:
        totals = torch.stack(judged).sum(0).cpu()
    task.model.train()
    loss, right, count = (sum(column) for column in zip(*ranks.gather(totals.tolist()), strict=True))
    if not count:
        return None, None
    return loss / count, right / count if task.judge is not None else None


def agree_on_statistics(model: torch.nn.Module, ranks: Ranks) -> None:
    """Give every rank the mean of all ranks' buffers of floating point: what batch normalisation has seen, which differs. Collective."""
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if ranks.world == 1 or not buffers:
        return
    means = ranks.mean(torch.cat([buffer.detach().flatten().float() for buffer in buffers]).cpu())
    for buffer, mean in zip(buffers, means.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))


def _judged(task: Task, batch: Any) -> torch.Tensor:
    """``[sum of losses, number right, number]`` of a batch's samples, none of them right where the task has no judge."""
    return task.judge(task.model, batch) if task.judge is not None else _summed(task, batch)


def _summed(task: Task, batch: Any) -> torch.Tensor:
    """``[sum of losses, 0, number]`` of a batch's samples, from the mean that is the task's loss."""
    loss, count = task.loss(task.model, batch).float(), _samples(batch)
    return torch.stack([loss * count, torch.zeros_like(loss), torch.full_like(loss, count)])


def _samples(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor; 1 where it has none, so that all batches weigh the same."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return len(batch) if isinstance(batch, torch.Tensor) and batch.dim() else 1


def quality(task: Task, precision: Precision, device: torch.device, whole: bool) -> dict[str, Metric]:
    """The task's own metrics over ``VALIDATION_BATCHES`` held-out batches at most, or over the ``whole`` of that data."""
    if task.quality is None:
        return {}
    task.model.eval()
    with torch.no_grad(), autocast(precision, device):
        return task.quality.measure(None if whole else VALIDATION_BATCHES)


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """Write the model's weights into ``folder`` until they are on the disk, and remove them again: only the time is wanted."""
    path = folder / "model.pt"
    try:
        with replacing(path, sync="file") as file:
            torch.save(model.state_dict(), file)
    finally:
        path.unlink(missing_ok=True)
