"""Parameters, gradients and optimizer state divided among copies of the model (torch's ``fully_shard``, FSDP2)."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

Materialise = Callable[[nn.Module, str], None]
"""Gives the parameters of a module memory and their starting values; the text is the prefix of their names."""


def shard(stage: nn.Module, layers: dict[str, nn.Module], sharing: DeviceMesh, keep_whole: bool, materialise: Materialise) -> None:
    """Shard a stage layer by layer. Each layer gets its memory just before, so that no device ever holds the whole stage.

    ``keep_whole`` leaves parameters gathered between the passes of a step, as a distributed optimizer has it; otherwise they are
    gathered for each pass and dropped after it. A mesh of two axes holds copies (outer) of shards (inner).
    """
    for name, layer in layers.items():
        materialise(layer, f"{name}.")
        fully_shard(layer, mesh=sharing, reshard_after_forward=not keep_whole)
    materialise(stage, "")
    fully_shard(stage, mesh=sharing, reshard_after_forward=not keep_whole)


def exchange(stage: nn.Module, last: bool, keep_whole: bool, save_memory: bool) -> None:
    """Before a micro-batch's passes: gradients are exchanged after the last one only, or with ``save_memory`` after each, so that nobody
    keeps whole ones; with ``keep_whole``, parameters are gathered once per step."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or save_memory)
        stage.set_is_last_backward(last)
        if keep_whole:
            stage.set_reshard_after_backward(last)
