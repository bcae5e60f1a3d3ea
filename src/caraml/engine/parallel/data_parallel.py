"""Whole copies of a stage that exchange gradients (torch's DDP)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel


def copies(stage: nn.Module, dp: DeviceMesh, device: torch.device) -> nn.Module:
    """The stage inside DDP over its copies. Parameters must be plain tensors: those that tensor parallelism divides go through FSDP."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(stage, device_ids=ids, process_group=dp.get_group(), gradient_as_bucket_view=True)


def exchange(stage: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Keep DDP quiet in all micro-batches but the last."""
    if isinstance(stage, DistributedDataParallel) and not last:
        return stage.no_sync()
    return nullcontext()
