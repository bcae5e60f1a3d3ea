"""Batch normalisation over the images of a group of devices: PEARC '22's "BN span", or synchronised batch normalisation.

On GPUs torch's own layer does it with fused kernels; that one refuses CPUs, so there a layer of plain torch operations takes its place,
which gives the same numbers and lets the arithmetic be tested without a GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce  # the one whose backward pass adds up gradients


def share_batch_norm(model: nn.Module, span: int, device: torch.device) -> nn.Module:
    """``model`` with every batch normalisation taken over ``span`` neighbouring ranks. Collective: every rank calls it.

    Raises:
        ValueError: if the ranks cannot be divided into groups of ``span``.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % span:
        raise ValueError(f"{world} ranks cannot be divided into groups of {span}")
    if span == 1:
        return model
    groups = [dist.new_group(list(range(first, first + span))) for first in range(0, world, span)]
    group = groups[dist.get_rank() // span]
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # knows timm's layers with an activation inside, which torch's own does not

        return convert_sync_batchnorm(model, group)
    return _replaced(model, group)


def _replaced(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, group))
    return SpanBatchNorm(module, group) if isinstance(module, nn.BatchNorm2d) else module


class SpanBatchNorm(nn.Module):
    """A batch normalisation over all ranks of a group, with the parameters, statistics and activation of the layer that it replaces."""

    def __init__(self, layer: nn.BatchNorm2d, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = layer.weight, layer.bias, layer.eps, layer.momentum or 0.1
        self.register_buffer("running_mean", layer.running_mean)
        self.register_buffer("running_var", layer.running_var)
        self.drop, self.act = getattr(layer, "drop", nn.Identity()), getattr(layer, "act", nn.Identity())  # timm's BatchNormAct2d
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x``, (B, C, H, W), with the mean and variance over B, H, W and the group's ranks."""
        assert isinstance(self.running_mean, torch.Tensor) and isinstance(self.running_var, torch.Tensor)
        mean, variance = self.running_mean, self.running_var
        if self.training:
            mean, variance, count = self._moments(x)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        return self.act(self.drop(x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)))

    def _moments(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Mean and variance (C,) over the group, and the number of values that each was taken from."""
        members = dist.get_world_size(self._group)
        mean = all_reduce(x.mean((0, 2, 3)), group=self._group) / members
        deviation = x - mean.view(1, -1, 1, 1)
        variance = all_reduce((deviation * deviation).mean((0, 2, 3)), group=self._group) / members
        return mean, variance, float(x.numel() // x.shape[1] * members)
