"""This process's part of a divided model: stages with memory, starting values and optimizers, each strategy applied in its turn.

The order is the library's: tensor parallelism on the meta device, memory, compilation of the layers, then FSDP or DDP around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from caraml.engine.parallel import data_parallel, fsdp
from caraml.engine.parallel.mesh import Mesh
from caraml.engine.parallel.pipeline import stages_of_rank
from caraml.engine.parallel.tensor import share_layers
from caraml.errors import InputError
from caraml.suite.model import Point
from caraml.workloads.base import Division, Task


@dataclass(frozen=True)
class Divided:
    """The stages that this process holds, as they are called, and an optimizer for each."""

    stages: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    mesh: Mesh


def divide(task: Task, point: Point, mesh: Mesh, device: torch.device) -> Divided:
    """Build this process's stages of a task whose model is on the meta device. Collective."""
    division, placement = task.division, point.placement
    if division is None:
        raise InputError(f"workload {point.workload!r} is trained in whole copies only", "leave out tp, pp and fsdp")
    indices = stages_of_rank(placement, mesh.pp.get_local_rank())
    stages = [_stage(division.stage(index, placement.stages), division, point, mesh, device) for index in indices]
    return Divided(stages, [division.optimizer(together(stage.parameters())) for stage in stages], mesh)


def _stage(stage: nn.Module, division: Division, point: Point, mesh: Mesh, device: torch.device) -> nn.Module:
    placement = point.placement
    if placement.tp > 1:
        share_layers(stage, division, mesh.tp, placement.sp)

    def materialise(module: nn.Module, prefix: str) -> None:
        give_memory(module, prefix, division, device)
        if module is stage:
            division.complete(stage)

    layers = division.layers(stage)
    if point.compile != "off":
        for layer in layers.values():  # its forward, so that the hooks of FSDP stay outside the graph
            layer.forward = torch.compile(layer.forward, mode=None if point.compile == "default" else point.compile)
    if sharded(point):
        fsdp.shard(stage, layers, mesh.sharing, placement.distributed_optimizer, materialise)
        return stage
    materialise(stage, "")
    return data_parallel.copies(stage, mesh.dp, device) if point.dp > 1 else stage


def sharded(point: Point) -> bool:
    """Whether FSDP exchanges the gradients. It also does so for copies whose parameters tensor parallelism divides, as shards of one
    part: DDP takes plain tensors only."""
    placement = point.placement
    return placement.fsdp > 1 or (point.dp > 1 and (placement.distributed_optimizer or placement.tp > 1))


def give_memory(module: nn.Module, prefix: str, division: Division, device: torch.device) -> None:
    """Replace everything on the meta device: parameters by their starting values (each device its part), buffers by empty ones."""
    for owner_name, owner in module.named_modules():
        path = prefix + (f"{owner_name}." if owner_name else "")
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            value = division.initial_value(path + name, parameter.shape, device)
            if isinstance(parameter, DTensor):
                # Every device draws the same whole value, so nothing is sent; a copy lets go of the rest of it.
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None).clone()
            owner.register_parameter(name, nn.Parameter(value))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                owner.register_buffer(
                    name, torch.empty_like(buffer, device=device), persistent=name not in owner._non_persistent_buffers_set
                )


def together(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in lists that one operation over many tensors can take: plain tensors, and those of each mesh."""
    lists: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(lists.values())
