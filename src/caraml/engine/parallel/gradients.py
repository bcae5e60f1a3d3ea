"""Gradients that lie on several devices: their norm, their clipping, and the loss scaler's search for overflow."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from caraml.engine.parallel.divide import together
from caraml.engine.parallel.mesh import Mesh


def clip(stages: Sequence[nn.Module], largest: float, mesh: Mesh) -> None:
    """Scale all gradients so that their norm over the whole model is at most ``largest``. Collective.

    Parameters that tensor parallelism leaves whole have the same gradient on all its devices and count once.
    """
    groups = together(parameter for stage in stages for parameter in stage.parameters())
    norms = [get_total_norm([parameter.grad for parameter in group if parameter.grad is not None]) for group in groups]
    squares = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).square().sum()
    if mesh.placement.pp > 1:
        dist.all_reduce(squares, group=mesh.pipeline)
    for group in groups:
        clip_grads_with_norm_(group, largest, squares.sqrt())


class DividedScaler(ShardedGradScaler):
    """Torch's scaler for sharded gradients, shown the part of each that lies here; one overflow anywhere skips the update everywhere."""

    def _unscale_grads_(self, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        here = [SimpleNamespace(grad=_local(parameter.grad)) for group in optimizer.param_groups for parameter in group["params"]]
        return super()._unscale_grads_(SimpleNamespace(param_groups=[{"params": here}]), *arguments, **named)  # type: ignore[arg-type]

    def unscale_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Unscale the gradients of every stage here, and agree on overflow: an update is made by all stages or by none. Collective."""
        if not self.is_enabled():
            return
        for optimizer in optimizers:
            self.unscale_(optimizer)
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        found = torch.stack([verdict.sum() for state in states for verdict in state["found_inf_per_device"].values()]).sum()
        for state in states:  # a fused optimizer takes the verdict as a scalar
            state["found_inf_per_device"] = {found.device: found}


def _local(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
