"""What a pass through a layer of GPT, and through the end of the network, needs of a device's memory.

Both are run on tensors without content, with the widths that tensor parallelism leaves them: what they keep for the backward pass is
counted, not taken from a formula, so that recomputation, autocast's copies of weights and the chunked loss are what they are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caraml.engine.precision import HALF
from caraml.suite.model import Point
from caraml.workloads.base import Attend
from caraml.workloads.gpt.model import Block, GPTConfig, Norm, chunk_bytes_of, linear_cross_entropy, rows_of_chunk

FLOAT = 4
FEW_CHUNKS = 16  # of the loss, which are counted one by one; of more than twice as many the memory follows from these


def state_bytes(config: GPTConfig) -> int:
    """Of a number of the hidden states between layers."""
    return 2 if config.half_residual else FLOAT


@dataclass(frozen=True)
class Passes:
    """Bytes that a forward and a backward pass need beside weights and inputs."""

    kept: int
    """Between the passes, the result included."""
    cached: int
    """Beside that until autocast ends: its copies of weights, of which nothing is kept where a layer is recomputed."""
    forward: int
    """In the forward pass, at most."""
    backward: int
    """In the backward pass, at most: what was kept, and the gradients of parameters made so far."""

    @property
    def most(self) -> int:
        """In either."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class Micro:
    """Bytes of one micro-batch on one device."""

    layer: Passes
    embedded: int
    """Kept by the embedding."""
    loss: Passes
    """The final norm and the loss."""
    unit: int
    """Of a number of the weights that the passes see: FSDP gathers them in 16 bits where autocast would make them so."""

    @classmethod
    def of(cls, point: Point, config: GPTConfig) -> Micro:
        """Found by running a layer and the loss on tensors without content."""
        placement, on_cpu = point.placement, point.device_class == "cpu"
        local = dataclasses.replace(config, sequence_length=config.sequence_length // placement.cp)
        compiled = point.compile != "off" and not placement.split  # of a divided model only the layers are, not the loss
        half, in_parts = HALF.get(point.precision), on_cpu or compiled
        chunk = chunk_bytes_of(point.device_class, compiled)
        # A CPU's parts are far smaller, and a kernel of the compiler's holds none; so many of them are quick to count.
        loss = chunk, chunk // 16 if in_parts else chunk
        weights, masked, scores = half if point.sharded else None, on_cpu and placement.cp > 1, point.knobs.attention == "math"
        kind = _Kind(local, placement.tp, placement.sp, placement.cp, half, weights, masked, scores)
        return _run(kind, point.micro_batch, loss)


@dataclass(frozen=True)
class _Kind:
    """What decides which operators run on a device."""

    config: GPTConfig
    """With the part of a sequence that a device has."""
    tp: int = 1
    sp: bool = False
    cp: int = 1
    dtype: torch.dtype | None = None
    """Autocast's, ``None`` for none."""
    weights: torch.dtype | None = None
    """Of weights that come in 16 bits."""
    masked: bool = False
    scores: bool = False
    """Whether attention keeps its scores: a number for each pair of tokens."""

    @property
    def part(self) -> int:
        """How many share a sequence between the pairs of matrices."""
        return self.tp if self.sp else 1

    @property
    def stream(self) -> torch.dtype | None:
        """Type of the hidden states between layers."""
        return self.dtype if self.config.half_residual else torch.float32


@functools.cache
def _run(kind: _Kind, micro_batch: int, loss_bytes: tuple[int, int]) -> Micro:
    config, tp = kind.config, kind.tp
    T, C = config.sequence_length, config.width

    def layer() -> tuple[object, object]:
        block = _gathered_as(kind.weights, _shared(Block(config), config, tp, kind.part))
        if kind.cp > 1:
            block.attention.attend = _attend_in_part(kind.cp, T // 2, kind.dtype or torch.float32, kind.masked)
        x = torch.empty(micro_batch, T // kind.part, C, requires_grad=True, dtype=kind.stream)
        rotary = None
        if config.positions == "rotary":
            rotary = torch.empty(T, C // config.heads), torch.empty(T, C // config.heads)
        return (lambda: block(x, rotary)), (block, x, rotary)

    rows = rows_of_chunk(micro_batch * T, loss_bytes[0] // (4 * config.vocab_size))
    alone = rows // math.gcd(rows, T)  # micro-batches of whole chunks as large as these
    few = -(-FEW_CHUNKS * rows // (T * alone)) * alone
    if tp > 1 or micro_batch <= 2 * few:
        loss = _passes_of_loss(kind, loss_bytes, micro_batch)
    else:  # each chunk more takes as long to count as the one before it, and as much memory
        counted = [_passes_of_loss(kind, (rows * 4 * config.vocab_size, loss_bytes[1]), batch) for batch in (few, 2 * few)]
        low, high = map(dataclasses.astuple, counted)
        loss = Passes(*(a + (b - a) * (micro_batch - few) // few for a, b in zip(low, high, strict=True)))
    embedded = state_bytes(config) * micro_batch * T * C // kind.part
    with sdpa_kernel(SDPBackend.MATH) if kind.scores else nullcontext():
        passes = passes_of(layer, kind.dtype)  # type: ignore[arg-type]
    return Micro(passes, embedded, loss, FLOAT if kind.weights is None else 2)


@functools.cache
def _passes_of_loss(kind: _Kind, loss_bytes: tuple[int, int], micro_batch: int) -> Passes:
    """Of the final norm and the loss."""
    config, tp, part = kind.config, kind.tp, kind.part
    T, C = config.sequence_length, config.width

    def end() -> tuple[object, object]:
        norm, head = (_gathered_as(kind.weights, one) for one in (Norm(C), nn.Linear(C, config.vocab_size // tp, bias=False)))
        x = torch.empty(micro_batch, T // part, C, requires_grad=True, dtype=kind.stream)
        targets = torch.zeros(micro_batch, T, dtype=torch.int64)

        def loss() -> torch.Tensor:
            hidden = torch.cat([norm(x)] * part, dim=1)
            if tp == 1:
                return linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten(), *loss_bytes)
            return _LossInParts.apply(head(hidden).flatten(0, 1).float(), targets.flatten())

        return loss, (norm, head, x, targets)

    return passes_of(end, kind.dtype)  # type: ignore[arg-type]


class _LossInParts(torch.autograd.Function):
    """What torch's ``loss_parallel`` does with a part of the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(log_probabilities)
        return -log_probabilities.gather(1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, None]:
        (log_probabilities,) = ctx.saved_tensors
        return (torch.zeros_like(log_probabilities) + log_probabilities.exp()) * slopes[0], None


def _attend_in_part(cp: int, piece: int, dtype: torch.dtype, masked: bool) -> Attend:
    """What the fullest device does, which has the last piece of a sequence: with the whole sequence's keys and values."""
    from caraml.engine.parallel.divide import attend_in_pieces, masks_of  # loads much of torch that other plans do without

    pieces = (0, 2 * cp - 1)
    masks = masks_of(pieces, piece, torch.device("cpu"), dtype) if masked else dict.fromkeys(pieces)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = torch.stack([torch.stack((k, v))] * cp).unbind(1)
        return attend_in_pieces(q, keys, values, masks)

    return attend


_Module = TypeVar("_Module", bound=nn.Module)


def _shared(block: Block, config: GPTConfig, tp: int, part: int) -> Block:
    """The block as one of ``tp`` devices has it; with sequence parallelism, hidden states come in parts, gathered for the matrices."""
    if tp == 1:
        return block
    C = config.width
    block.attention.qkv, block.attention.out = nn.Linear(C, 3 * C // tp), nn.Linear(C // tp, C)
    block.mlp_up, block.mlp_down = nn.Linear(C, 4 * C // tp), nn.Linear(4 * C // tp, C)
    if part > 1:  # torch gathers and scatters along the first axis
        for inward in (block.attention.qkv, block.mlp_up):
            inward.register_forward_pre_hook(lambda module, given: (torch.cat(torch.cat([given[0]] * part).chunk(part), dim=1),))
        for outward in (block.attention.out, block.mlp_down):
            outward.register_forward_hook(lambda module, given, out: torch.cat(out.chunk(part, dim=1))[: len(out)].clone())
    return block


def _gathered_as(dtype: torch.dtype | None, module: _Module) -> _Module:
    for owner in module.modules() if dtype is not None else ():
        for name, weight in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(weight.detach().to(dtype)))
    return module


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, from their making until nobody holds them any more."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in given:
                self._add(leaf.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size


def passes_of(build: Callable[[], tuple[Callable[[], torch.Tensor], Any]], dtype: torch.dtype | None) -> Passes:
    """What forward and backward passes need beside what ``build`` made. Nothing is computed and next to no memory used.

    Args:
        build: makes the modules and inputs; returns the forward pass and whatever must stay alive.
        dtype: type of autocast around the forward pass; ``None`` for none.
    """
    with FakeTensorMode():
        forward, alive = build()
        with LiveBytes() as live:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                result = forward()
                inside = live.now
            kept, forward_peak = live.now, live.peak
            live.peak = live.now
            gradient = torch.empty_like(result)
            result.backward(gradient)
            backward_peak = live.peak
    del alive
    return Passes(kept, inside - kept, forward_peak, backward_peak)
