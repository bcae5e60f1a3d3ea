"""This process's part of a divided model: stages with memory, starting values and optimizers, each strategy applied in its turn.

The order is the library's: tensor parallelism on the meta device, memory, compilation of the layers, then FSDP or DDP around them.

The processes of a point are one grid, from outside to inside: pipeline stages, parameter copies, shards, tensor parallelism. Ranks that
talk most are close: those of one tensor-parallel group sit on one node as long as it has devices enough. Copies and shards are dealt out
over the devices with the same parameters; of those, as many as divide a sequence follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from caraml.base.errors import InputError
from caraml.engine.precision import HALF
from caraml.engine.ranks import copies
from caraml.suite.model import Placement, Point
from caraml.workloads.base import Division, Task


def vocabulary_parallel_loss(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of logits whose vocabulary is divided; nobody ever holds a whole row. Needs :func:`around_step`."""
    logits = head(hidden)  # (B, T, V), V divided
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return loss.to_local().clone() if isinstance(loss, DTensor) else loss  # no view, which could not be detached from the graph


def around_step(tp: int) -> AbstractContextManager[None]:
    """What forward and backward passes of a step run in."""
    return loss_parallel() if tp > 1 else nullcontext()


Materialise = Callable[[nn.Module, str], None]
"""Gives the parameters of a module memory and their starting values; the text is the prefix of their names."""


def shard(stage: nn.Module, layers: dict[str, nn.Module], sharing: DeviceMesh, point: Point, materialise: Materialise) -> None:
    """Shard a stage layer by layer. Each layer gets its memory just before, so that no device ever holds the whole stage.

    A distributed optimizer leaves parameters gathered between the passes of a step; otherwise they are gathered for each pass and dropped
    after it. A mesh of two axes holds copies (outer) of shards (inner). What is gathered has autocast's format, half the bytes, and
    gradients are summed over the devices in fp32.
    """
    half, keep_whole = HALF.get(point.precision), point.placement.distributed_optimizer
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None, cast_forward_inputs=False)
    for name, layer in layers.items():
        materialise(layer, f"{name}.")
        fully_shard(layer, mesh=sharing, reshard_after_forward=not keep_whole, mp_policy=policy)
    materialise(stage, "")
    fully_shard(stage, mesh=sharing, reshard_after_forward=not keep_whole, mp_policy=policy)


def exchange_shards(stage: nn.Module, last: bool, keep_whole: bool, save_memory: bool) -> None:
    """Before a micro-batch's passes: gradients are exchanged after the last one only, or with ``save_memory`` after each, so that nobody
    keeps whole ones; with ``keep_whole``, parameters are gathered once per step."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last or save_memory)
        stage.set_is_last_backward(last)
        if keep_whole:
            stage.set_reshard_after_backward(last)


class SequencePart:
    """This process's part of every sequence: of twice as many pieces as there are devices, piece r and the r-th from the end.

    So all devices have as much to do under a causal mask. Keys and values of the whole sequence are gathered for each attention (Llama
    Team 2024, "The Llama 3 Herd of Models", section 3.3.2); torch's own context parallelism has no kernel for CPUs.
    """

    def __init__(self, group: dist.ProcessGroup, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self._group, count, rank = group, group.size(), group.rank()
        piece = length // (2 * count)
        self._masks = masks_of((rank, 2 * count - 1 - rank), piece, device, dtype)
        self.places = torch.cat([torch.arange(number * piece, (number + 1) * piece, device=device) for number in self._masks])
        """Which tokens of a sequence these are, int64."""

    def cut(self, batches: Iterator[Any]) -> Iterator[Any]:
        """This part of batches, each tensors (B, T)."""
        return (tuple(tensor[:, self.places.to(tensor.device)] for tensor in batch) for batch in batches)

    @torch.compiler.disable  # a compiled layer leaves its graph here, as it does for everything that is exchanged
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal attention of this part's tokens to all before them: each (B, H, T / n, D) -> (B, H, T / n, D)."""
        keys, values = _Gathered.apply(torch.stack((k, v)), self._group)
        return attend_in_pieces(q, keys, values, self._masks)


def masks_of(pieces: tuple[int, int], length: int, device: torch.device, dtype: torch.dtype) -> dict[int, torch.Tensor | None]:
    """What two pieces of ``length`` tokens see, by their numbers: all before, and of themselves what a causal mask leaves; ``None``: just
    that. Made beforehand, since torch makes none inside recomputation.

    On NVIDIA GPUs kernels need no matrix for it. Those of others refuse, or let the first token see the first key only, as AMD's do
    (``TopLeftAligned`` in torch's mha_all_aot.hip). There it is a matrix of what is added to the scores, which all layers share; each
    would keep its own for the backward pass if torch had to make one of truth values.
    """
    masks: dict[int, torch.Tensor | None] = dict.fromkeys(pieces)
    for number in filter(None, pieces):
        shape = length, (number + 1) * length
        if device.type == "cuda" and torch.version.hip is None:
            masks[number] = causal_lower_right(*shape)
        else:
            masks[number] = torch.full(shape, -torch.inf, dtype=dtype, device=device).triu_(number * length + 1)
    return masks


def attend_in_pieces(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, masks: Mapping[int, torch.Tensor | None]) -> torch.Tensor:
    """Attention of two pieces of a sequence (B, H, T / n, D), whose masks are given by their numbers, to keys and values of all pieces as
    their devices have them, (n, B, H, T / n, D)."""
    ordered = []
    for tensor in (keys, values):
        first, last = tensor.chunk(2, dim=-2)  # of each device
        ordered.append(torch.cat([*first, *last.flip(0)], dim=-2))
    length, parts = q.shape[-2] // 2, []
    for (number, mask), piece in zip(masks.items(), q.chunk(2, dim=-2), strict=True):
        k, v = (tensor[:, :, : (number + 1) * length] for tensor in ordered)
        parts.append(F.scaled_dot_product_attention(piece, k, v, attn_mask=mask, is_causal=mask is None))
    return torch.cat(parts, dim=-2)


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 has another name for them
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Gathered(torch.autograd.Function):
    """Tensors (2, ...) of all devices, as two of (n, ...); gradients are summed over the devices in fp32."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        gathered = own.new_empty(group.size(), *own.shape)
        _gather(gathered.flatten(0, 1), own, group=group)
        return gathered[:, 0], gathered[:, 1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = torch.stack(gradients, dim=1).float()
        own = whole.new_empty(whole.shape[1:])
        _scatter(own, whole.flatten(0, 1), group=ctx.group)
        return own.to(gradients[0].dtype), None


def middle_group(grid: tuple[int, int, int]) -> dist.ProcessGroup:
    """The processes beside this one along the middle axis of a grid of all. Collective."""
    lines = torch.arange(math.prod(grid)).view(grid).transpose(1, 2).reshape(-1, grid[1])
    return dist.new_subgroups_by_enumeration(lines.tolist())[0]


AXES = ("pp", "replicate", "shard", "tp")


class Mesh:
    """The grid, and this process's place on it."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.placement: Placement = point.placement
        shards, cp = self.placement.shards(point.holders), self.placement.cp
        sizes = (self.placement.pp, point.holders // shards, shards, self.placement.tp)
        grid = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self.tp = grid["tp"]
        """The devices that share a layer with this one."""
        self.pp = grid["pp"]
        """The devices that hold the other stages of this copy."""
        self.holders: DeviceMesh = grid["replicate", "shard"]._flatten("holders")
        """The devices that work with the same parameters."""
        self.sharing = grid["shard"] if grid["replicate"].size() == 1 else grid["replicate", "shard"]
        """What ``fully_shard`` works on: shards alone, or copies of shards."""
        self.copy = self.holders.get_local_rank() // cp
        """Which copy of the model this process works for."""
        self.cp: dist.ProcessGroup | None = None
        """The devices that have the other parts of this one's sequences; ``None`` where sequences are whole."""
        if cp > 1:
            self.cp = middle_group((point.world // (cp * self.placement.tp), cp, self.placement.tp))


@dataclass(frozen=True)
class Divided:
    """The stages that this process holds, as they are called, and an optimizer for each."""

    stages: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    mesh: Mesh
    part: SequencePart | None
    """``None`` where sequences are whole."""


def divide(task: Task, point: Point, mesh: Mesh, device: torch.device) -> Divided:
    """Build this process's stages of a task whose model is on the meta device. Collective."""
    division, placement = task.division, point.placement
    if division is None:
        raise InputError(f"workload {point.workload!r} is trained in whole copies only", "leave out tp, cp, pp and fsdp")
    indices = placement.stages_of(mesh.pp.get_local_rank())
    stages = [division.stage(index, placement.stages) for index in indices]
    part = None
    if placement.cp > 1 and division.share_sequence is not None:
        assert mesh.cp is not None
        part = SequencePart(mesh.cp, division.hidden[0], device, HALF.get(point.precision, torch.float32))
        for stage in stages:
            division.share_sequence(stage, part.places, part.attend)
    stages = [_stage(stage, division, point, mesh, device) for stage in stages]
    return Divided(stages, [division.optimizer(together(stage.parameters())) for stage in stages], mesh, part)


def _stage(stage: nn.Module, division: Division, point: Point, mesh: Mesh, device: torch.device) -> nn.Module:
    placement = point.placement
    if placement.tp > 1 and division.tensor_plan is not None:
        parallelize_module(stage, mesh.tp, division.tensor_plan(stage, placement.sp))
        division.complete(stage)
        if hasattr(stage, "loss"):  # it is computed where the logits are
            setattr(stage, "loss", vocabulary_parallel_loss)  # noqa: B010  -- a function, which torch's types do not expect on a module

    def materialise(module: nn.Module, prefix: str) -> None:
        give_memory(module, prefix, division, device)
        if module is stage:
            division.complete(stage)

    layers = division.layers(stage)
    if point.compile != "off":
        for layer in layers.values():  # its forward, so that the hooks of FSDP stay outside the graph
            layer.forward = torch.compile(layer.forward, mode=None if point.compile == "default" else point.compile)
    if point.sharded and division.tensor_plan is not None:
        shard(stage, layers, mesh.sharing, point, materialise)
        return stage
    materialise(stage, "")
    return copies(stage, device, mesh.holders.get_group()) if point.holders > 1 else stage


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


def is_part(parameter: torch.Tensor) -> bool:
    """Whether it is a plain tensor of which the other devices of tensor parallelism hold other parts, as Megatron-Core's are."""
    return bool(getattr(parameter, "tensor_model_parallel", False))


def together(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in lists that one operation over many tensors can take: plain tensors, plain parts, and those of each mesh."""
    lists: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        lists.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else is_part(parameter), []).append(parameter)
    return list(lists.values())
