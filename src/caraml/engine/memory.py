"""What a point needs of each device's memory, before anything runs: parameters by arithmetic, activations from the layers themselves.

One layer and the end of the network are run on tensors without content, with the widths that tensor parallelism leaves them: what they
keep for the backward pass is counted, not taken from a formula, so that recomputation, autocast's copies of weights and the chunked loss
are what they are. Left out: the driver's context, the libraries' own buffers, fragmentation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caraml.base.errors import InputError
from caraml.engine.precision import HALF
from caraml.suite.model import TRAINING, Placement, Point
from caraml.suite.placement import ModelShape, impossible, layers_of_stage
from caraml.system.model import System
from caraml.workloads.base import Attend
from caraml.workloads.gpt import Params, config_of
from caraml.workloads.gpt.model import Block, GPTConfig, Norm, chunk_bytes_of, linear_cross_entropy, rows_of_chunk

_FLOAT = 4
_TOKEN = 8
_MOMENTS = 2  # AdamW's, in fp32 as the weights are
GATHERED_LAYERS = 2  # whose parameters FSDP holds whole at a time: the one at work and the next


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device, that of the pipeline rank which needs most. The parts do not all stand at the same time; ``peak`` is the most
    that does."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """What the layers' forward passes keep, for all micro-batches in flight."""
    logits: int
    """The loss at work: logits, and the gradients that it makes at once."""
    communication: int
    """Gathered parameters of FSDP, buckets of DDP, what a pipeline receives, masks of divided sequences."""
    peak: int

    def gib(self) -> dict[str, float]:
        """The parts by name in GiB."""
        return {field.name: getattr(self, field.name) / 2**30 for field in fields(self)}


def is_planned(point: Point) -> bool:
    """Whether the memory of a point can be planned: a training's. Forward passes alone need far less."""
    return point.workload == "gpt" and point.params.get("backend", "torch") == "torch" and point.mode in TRAINING


def memory_plan(point: Point) -> MemoryPlan:
    """The plan of a point.

    Raises:
        InputError: the workload is not one whose model can be divided, or the point does not train.
    """
    if not is_planned(point):
        what = f"backend {point.params['backend']!r}" if point.workload == "gpt" else repr(point.workload)
        what = f"mode {point.mode!r}" if point.mode not in TRAINING else what
        raise InputError(f"memory is planned for workload 'gpt' with backend 'torch', not for {what}", "caraml memory gpt --system SYSTEM")
    config = config_of(Params.model_validate(point.params), point.knobs)
    last = point.placement.pp - 1  # from the second rank on, layers and micro-batches in flight only become fewer, until the loss
    plans = [_of_rank(point, config, rank) for rank in sorted({0, min(1, last), last})]
    return max(plans, key=lambda plan: plan.peak)


def _of_rank(point: Point, config: GPTConfig, rank: int) -> MemoryPlan:
    placement, micro = point.placement, _Micro.of(point, config)
    stages = [layers_of_stage(config.layers, stage, placement.stages) for stage in placement.stages_of(rank)]
    layers = sum(map(len, stages))
    first, last = stages[0].start == 0, stages[-1].stop == config.layers
    layer, ends = _layer_parameters(config, placement.tp), _end_parameters(config, placement.tp, first, last)
    whole, shards = _FLOAT * (layers * layer + ends), placement.shards(point.holders)
    own = whole // shards
    keep_gradients = placement.distributed_optimizer or placement.pp > 1 or placement.fsdp == 1
    gradients = whole if keep_gradients and point.accumulation > 1 else own
    communication = _pipelined(point, config, rank) + _masks(point, config.sequence_length)
    if point.sharded:
        communication += _gathered(point, layer, ends, whole)
    elif point.holders > 1 and point.accumulation > 1:  # DDP's buckets; without accumulation the gradients lie in them
        communication += whole
    activations = int(micro.in_flight(point, rank) * (len(stages[0]) * micro.kept + (micro.embedded if first else 0)))
    logits = micro.loss if last else 0
    # The end of the last forward pass, with the gradients of earlier micro-batches or DDP's buckets; and the end of the backward pass.
    there = gradients if point.accumulation > 1 or (point.holders > 1 and not point.sharded) else 0
    tie = _FLOAT * config.vocab_size * config.width // placement.tp if last and not there else 0
    moments = max(there + activations + logits + tie, gradients + micro.kept + micro.working, there + activations + micro.working)
    state = own * (1 + _MOMENTS)
    return MemoryPlan(own, gradients, own * _MOMENTS, activations, logits, communication, state + communication + moments)


def _masks(point: Point, length: int) -> int:
    """What a CPU adds to the scores of attention, a number for each pair of tokens; all layers share it."""
    cp, unit = point.placement.cp, 2 if point.precision in HALF else _FLOAT
    return unit * (2 * cp + 1) * (length // (2 * cp)) ** 2 if cp > 1 and point.device_class == "cpu" else 0


def _layer_parameters(config: GPTConfig, tp: int) -> int:
    """Parameters of one layer on a device: matrices and the biases of those divided by columns are shared, the rest is not."""
    C = config.width
    return (12 * C * C + 7 * C) // tp + 4 * C + 2 * C


def _end_parameters(config: GPTConfig, tp: int, first: bool, last: bool) -> int:
    words = config.vocab_size * config.width // tp
    count = words if first else 0
    if first and config.positions == "learned":
        count += config.sequence_length * config.width
    if last:
        count += 2 * config.width + (0 if config.tied_head and first else words)
    return count


def _gathered(point: Point, layer: int, ends: int, whole: int) -> int:
    """Parameters that FSDP holds beside the shards: a layer or two and the ends, or all of them for a distributed optimizer; and a
    layer's gradients on their way."""
    placement = point.placement
    copies = point.holders // placement.shards(point.holders)
    unit = 2 if point.precision in HALF else _FLOAT
    if placement.shards(point.holders) == 1:
        return unit * GATHERED_LAYERS * layer if copies > 1 else 0
    if placement.distributed_optimizer or placement.pp > 1:
        return whole * unit // _FLOAT
    return unit * (2 * GATHERED_LAYERS * layer + 2 * ends)


def _state_bytes(config: GPTConfig) -> int:
    """Of a number of the hidden states between layers."""
    return 2 if config.half_residual else _FLOAT


def _pipelined(point: Point, config: GPTConfig, rank: int) -> int:
    """What a pipeline rank holds beside its activations: hidden states received for the micro-batches in flight, gradients of such states
    on their way, and all tokens of a step, inputs on the first rank and targets on the last."""
    placement, count = point.placement, point.accumulation
    if placement.pp == 1:
        return 0
    from caraml.engine.parallel.step import is_lean  # which loads torch's pipelines

    length = config.sequence_length // placement.cp
    states = _state_bytes(config) * point.micro_batch * length * config.width // (placement.tp if placement.sp else 1)
    tokens = _TOKEN * count * point.micro_batch * length if rank in (0, placement.pp - 1) else 0
    held = placement.stages_of(rank)
    behind, before = sum(stage > 0 for stage in held), sum(stage < placement.stages - 1 for stage in held)
    if not is_lean():  # torch's own stages have a buffer for every micro-batch; the interleaved schedule keeps as many sent tensors
        return count * (behind + before) * (2 if placement.schedule == "interleaved" else 1) * states + tokens
    inputs, gradients = _Micro.in_flight(point, rank) * behind / len(held), 2
    if placement.schedule == "interleaved":  # a receive is posted when its sender is done, which may be some passes ahead
        inputs, gradients = inputs + 1, _round(point) // 2 + 1 if rank == placement.pp - 1 else 1
    return int((inputs if behind else 0) + (gradients if before else 0) + behind) * states + tokens


def _round(point: Point) -> int:
    """Micro-batches that the interleaved schedule takes through a stage before it turns to the next."""
    return point.accumulation // max(1, point.accumulation // point.placement.pp)


@dataclass(frozen=True)
class _Micro:
    """Bytes of one micro-batch on one device."""

    kept: int
    """By a layer, for its backward pass."""
    working: int
    """In a layer's backward pass, beside what was kept."""
    embedded: int
    """By the embedding."""
    loss: int
    """By the final norm and the loss, at their peak."""

    @classmethod
    def of(cls, point: Point, config: GPTConfig) -> _Micro:
        """Found by running a layer and the loss on tensors without content."""
        placement, on_cpu = point.placement, point.device_class == "cpu"
        local = dataclasses.replace(config, sequence_length=config.sequence_length // placement.cp)
        compiled = point.compile != "off" and not placement.split  # of a divided model only the layers are, not the loss
        half, in_parts = HALF.get(point.precision), on_cpu or compiled
        masked, chunk = on_cpu and placement.cp > 1, chunk_bytes_of(point.device_class, compiled)
        # A CPU's parts are far smaller, and a kernel of the compiler's holds none; so many of them are quick to count.
        loss = chunk, chunk // 16 if in_parts else chunk
        return _run(local, point.micro_batch, placement.tp, placement.sp, half, cp=placement.cp, masked=masked, loss_bytes=loss)

    @staticmethod
    def in_flight(point: Point, rank: int) -> float:
        """How many micro-batches keep activations of a stage at once; for several stages, the sum over them."""
        placement, count = point.placement, point.accumulation
        if placement.pp == 1:
            return 1
        if placement.schedule == "gpipe":
            return count
        if placement.schedule == "1f1b":
            return min(placement.pp - rank, count)
        ahead = (placement.stages // placement.pp - 1) * _round(point) + 2 * (placement.pp - 1 - rank)
        return min(ahead + 1, count * placement.stages // placement.pp)


@functools.cache
def _run(
    config: GPTConfig,
    micro_batch: int,
    tp: int,
    sp: bool,
    dtype: torch.dtype | None,
    *,
    cp: int,
    masked: bool,
    loss_bytes: tuple[int, int],
) -> _Micro:
    T, C, part = config.sequence_length, config.width, tp if sp else 1
    stream = dtype if config.half_residual else torch.float32

    def layer() -> tuple[object, object]:
        block = _shared(Block(config), config, tp, part)
        if cp > 1:
            block.attention.attend = _attend_in_part(cp, T // 2, dtype or torch.float32, masked)
        x = torch.empty(micro_batch, T // part, C, requires_grad=True, dtype=stream)
        rotary = None
        if config.positions == "rotary":
            rotary = torch.empty(T, C // config.heads), torch.empty(T, C // config.heads)
        return (lambda: block(x, rotary)), (block, x, rotary)

    kept, forward, backward = kept_and_peaks(layer, dtype)  # type: ignore[arg-type]
    ends = functools.partial(_peaks_of_loss, config, tp, part, dtype, stream)
    rows = rows_of_chunk(micro_batch * T, loss_bytes[0] // (4 * config.vocab_size))
    alone = rows // math.gcd(rows, T)  # micro-batches of whole chunks as large as these
    few = -(-FEW_CHUNKS * rows // (T * alone)) * alone
    if tp > 1 or micro_batch <= 2 * few:
        loss = max(ends(loss_bytes, micro_batch))
    else:  # each chunk more takes as long to count as the one before it, and as much memory
        low, high = (ends((rows * 4 * config.vocab_size, loss_bytes[1]), batch) for batch in (few, 2 * few))
        loss = max(a + (b - a) * (micro_batch - few) // few for a, b in zip(low, high, strict=True))
    return _Micro(kept, max(forward, backward) - kept, _state_bytes(config) * micro_batch * T * C // part, loss)


@functools.cache
def _peaks_of_loss(  # noqa: PLR0917
    config: GPTConfig,
    tp: int,
    part: int,
    dtype: torch.dtype | None,
    stream: torch.dtype | None,
    loss_bytes: tuple[int, int],
    micro_batch: int,
) -> tuple[int, int]:
    """Of the final norm and the loss, in the forward and the backward pass."""
    T, C = config.sequence_length, config.width

    def end() -> tuple[object, object]:
        norm, head = Norm(C), nn.Linear(C, config.vocab_size // tp, bias=False)
        x = torch.empty(micro_batch, T // part, C, requires_grad=True, dtype=stream)
        targets = torch.zeros(micro_batch, T, dtype=torch.int64)

        def loss() -> torch.Tensor:
            hidden = torch.cat([norm(x)] * part, dim=1)
            if tp == 1:
                return linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten(), *loss_bytes)
            logits = head(hidden).flatten(0, 1).float()  # what torch's loss_parallel does, one operator after the other
            shifted = logits - logits.amax(-1, keepdim=True)
            log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
            return -log_probabilities.gather(1, targets.flatten()[:, None]).mean()

        return loss, (norm, head, x, targets)

    return kept_and_peaks(end, dtype)[1:]  # type: ignore[arg-type]


def _attend_in_part(cp: int, piece: int, dtype: torch.dtype, masked: bool) -> Attend:
    """What the fullest device does, which has the last piece of a sequence: with the whole sequence's keys and values."""
    from caraml.engine.parallel.divide import attend_in_pieces, masks_of  # loads much of torch that other plans do without

    pieces = (0, 2 * cp - 1)
    masks = masks_of(pieces, piece, torch.device("cpu"), dtype) if masked else dict.fromkeys(pieces)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = torch.stack([torch.stack((k, v))] * cp).unbind(1)
        return attend_in_pieces(q, keys, values, masks)

    return attend


def _shared(block: Block, config: GPTConfig, tp: int, part: int) -> Block:
    """The block as one of ``tp`` devices has it; with sequence parallelism, hidden states come in parts, gathered for the matrices."""
    if tp == 1:
        return block
    C = config.width
    block.attention.qkv, block.attention.out = nn.Linear(C, 3 * C // tp), nn.Linear(C // tp, C)
    block.mlp_up, block.mlp_down = nn.Linear(C, 4 * C // tp), nn.Linear(4 * C // tp, C)
    if part > 1:
        for inward in (block.attention.qkv, block.mlp_up):
            inward.register_forward_pre_hook(lambda module, given: (torch.cat([given[0]] * part, dim=1),))
        for outward in (block.attention.out, block.mlp_down):
            outward.register_forward_hook(lambda module, given, out: out[:, : out.shape[1] // part].clone())
    return block


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


def kept_and_peaks(build: Callable[[], tuple[Callable[[], torch.Tensor], Any]], dtype: torch.dtype | None) -> tuple[int, int, int]:
    """What forward and backward passes need beside what ``build`` made. Nothing is computed and next to no memory used.

    Args:
        build: makes the modules and inputs; returns the forward pass and whatever must stay alive.
        dtype: type of autocast around the forward pass; ``None`` for none.

    Returns:
        Bytes kept between the passes (result included), the forward pass's peak, and the backward pass's peak, which counts what was
        kept and the gradients of parameters made so far.
    """
    with FakeTensorMode():
        forward, alive = build()
        with LiveBytes() as live:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                result = forward()
            kept, forward_peak = live.now, live.peak
            live.peak = live.now
            gradient = torch.empty_like(result)
            result.backward(gradient)
            backward_peak = live.peak
    del alive
    return kept, forward_peak, backward_peak


FEW_CHUNKS = 16  # of the loss, which are counted one by one; of more than twice as many the memory follows from these
USABLE = 0.9  # of a device's memory, which a plan may fill; the rest is left to the driver, the libraries' buffers and fragmentation
MOST_DEVICES = 4096
SHORTEST_PART = 4096  # tokens of a sequence, at least, where `cp` is proposed: with fewer a device waits for the others' keys and values


@dataclass(frozen=True)
class Planned:
    """A point and what it needs of each device."""

    point: Point
    plan: MemoryPlan

    def fits(self, memory: float) -> bool:
        """Whether it fits devices of ``memory`` bytes."""
        return self.plan.peak <= USABLE * memory


def planned_of(points: Iterable[Point]) -> list[Planned]:
    """The plans of those points whose memory can be planned and whose placement can be."""
    return [Planned(point, memory_plan(point)) for point in points if is_planned(point) and _possible(point)]


def _possible(point: Point) -> bool:
    shape = Params.model_validate(point.params).model_shape()
    return shape is not None and impossible(point, shape) is None


def room(system: System, point: Point) -> float | None:
    """Bytes that a process of ``point`` has for itself; ``None`` if the system does not say. Processes on a CPU share its memory."""
    memory = system.devices[0].memory_bytes
    return memory if memory is None or system.device_class != "cpu" else memory / point.devices


def smallest_that_fit(point: Point, shape: ModelShape, memory: float, devices_per_node: int) -> list[Planned]:
    """The placements on the fewest devices (a power of two) of ``memory`` bytes that fit, the emptiest device first; the point gives
    everything but placement, devices and batch. ``cp`` is tried for long sequences, where nothing else fits. Nothing up to ``MOST_DEVICES``
    fits: an empty list."""
    world = 1
    while world <= MOST_DEVICES:
        for several in (False, True):
            planned = (Planned(one, memory_plan(one)) for one in _on(point, shape, world, devices_per_node, several))
            if fitting := [one for one in planned if one.fits(memory)]:
                return sorted(fitting, key=lambda one: one.plan.peak)
        world *= 2
    return []


def _on(point: Point, shape: ModelShape, world: int, devices_per_node: int, several: bool) -> Iterator[Point]:
    """Points on ``world`` devices in every placement that can be, all with ``cp`` or none. Tensor parallelism stays inside a node and takes
    the sequence too."""
    devices = min(world, devices_per_node)
    powers = [2**power for power in range(world.bit_length()) if world % 2**power == 0]
    parts = [n for n in powers[1:] if shape.sequence_length >= n * SHORTEST_PART] if several else [1]
    for tp, cp, pp in itertools.product((n for n in powers if n <= devices_per_node), parts, powers):
        if world % (tp * cp * pp) or world % devices:
            continue
        holders = world // (tp * pp)
        for sharing in ({}, {"distributed_optimizer": True}, {"fsdp": holders}) if holders > 1 else ({},):
            placement = Placement.of({"tp": tp, "cp": cp, "pp": pp, "sp": tp > 1, **sharing})
            batch = max(point.accumulation, pp) * point.micro_batch * placement.copies(world)
            values = {"nodes": world // devices, "devices": devices, "placement": placement, "global_batch": batch}
            if impossible(candidate := point.model_copy(update=values), shape) is None:
                yield candidate
