"""Tensor and sequence parallelism: every layer is shared by the devices of one group (torch's ``parallelize_module``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

from caraml.workloads.base import Division


def share_layers(stage: nn.Module, division: Division, tp: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide the parameters of a stage on the meta device, and have its loss computed where the logits are."""
    parallelize_module(stage, tp, division.tensor_plan(stage, sequence_parallel))
    division.complete(stage)
    if hasattr(stage, "loss"):
        setattr(stage, "loss", vocabulary_parallel_loss)  # noqa: B010  -- a function, which torch's types do not expect on a module


def vocabulary_parallel_loss(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits whose vocabulary is divided; nobody ever holds a whole row. Needs :func:`around_step`."""
    logits = head(hidden)  # (B, T, V), V divided
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


def around_step(tp: int) -> AbstractContextManager[None]:
    """What forward and backward passes of a step run in."""
    return loss_parallel() if tp > 1 else nullcontext()
