"""What a point needs of each device's memory, before anything runs, and which placements fit.

Parameters, and what is exchanged of them, by arithmetic; activations and the loss as :mod:`caraml.engine.passes` counts them. The sums
are those of every moment of a step that can be the fullest. Left out: the driver's context, the libraries' own buffers, fragmentation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from caraml.base.errors import InputError
from caraml.engine.passes import FLOAT, Micro, Passes, state_bytes
from caraml.engine.precision import HALF
from caraml.suite.model import TRAINING, Placement, Point
from caraml.suite.placement import ModelShape, impossible, layers_of_stage
from caraml.system.model import System
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.model import GPTConfig
from caraml.workloads.gpt.training import config_of

_TOKEN = 8
_MOMENTS = 2  # AdamW's, in fp32 as the weights are


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
    if not point.accumulation:  # the batch is too small for the devices: planned as the smallest that is not
        point = point.model_copy(update={"global_batch": point.micro_batch * point.dp})
    config = config_of(Params.model_validate(point.params), point.knobs)
    last = point.placement.pp - 1  # from the second rank on, layers and micro-batches in flight only become fewer, until the loss
    plans = [_Rank(point, config, rank).plan() for rank in sorted({0, min(1, last), last})]
    return max(plans, key=lambda plan: plan.peak)


@dataclass(frozen=True)
class _Rank:
    """A device of a rank of the pipeline; without one, any device. Sizes are bytes, but parameters where they are called so."""

    point: Point
    config: GPTConfig
    rank: int

    @cached_property
    def micro(self) -> Micro:
        return Micro.of(self.point, self.config)

    @cached_property
    def stages(self) -> list[range]:
        """Layers of each stage held."""
        placement = self.point.placement
        return [layers_of_stage(self.config.layers, stage, placement.stages) for stage in placement.stages_of(self.rank)]

    @property
    def first(self) -> bool:
        return self.stages[0].start == 0

    @property
    def last(self) -> bool:
        return self.stages[-1].stop == self.config.layers

    @cached_property
    def layer(self) -> int:
        """Parameters of one layer: matrices and the biases of those divided by columns are shared, the rest is not."""
        C = self.config.width
        return (12 * C * C + 7 * C) // self.point.placement.tp + 4 * C + 2 * C

    @cached_property
    def ends(self) -> int:
        """Parameters outside the layers."""
        config = self.config
        count = self.words if self.first else 0
        if self.first and config.positions == "learned":
            count += config.sequence_length * config.width
        if self.last:
            count += 2 * config.width + (0 if config.tied_head and self.first else self.words)
        return count

    @property
    def words(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.config.vocab_size * self.config.width // self.point.placement.tp

    @cached_property
    def whole(self) -> int:
        """Weights, before copies share them."""
        return FLOAT * (sum(map(len, self.stages)) * self.layer + self.ends)

    @property
    def shards(self) -> int:
        return self.point.placement.shards(self.point.holders)

    @property
    def late(self) -> bool:
        """Whether gradients are exchanged once per step, and whole until then."""
        placement = self.point.placement
        return placement.distributed_optimizer or placement.pp > 1 or placement.fsdp == 1

    @property
    def buckets(self) -> bool:
        """Whether DDP exchanges the gradients."""
        return self.point.holders > 1 and not self.point.sharded

    def plan(self) -> MemoryPlan:
        """Of the fullest moment."""
        point, own = self.point, self.whole // self.shards
        steady = _pipelined(point, self.config, self.rank) + _masks(point, self.config.sequence_length)
        if self.buckets and point.accumulation > 1:  # without accumulation the gradients lie in them
            steady += self.whole
        passes, communication = max(self.moments(), key=sum)
        peak = own * (1 + _MOMENTS) + passes + steady + communication
        logits = self.micro.loss.most if self.last else 0
        return MemoryPlan(own, self.gradients, own * _MOMENTS, self.activations, logits, steady + communication, peak)

    def moments(self) -> Iterator[tuple[int, int]]:
        """What there is beside weights and moments when most is, in the order of a micro-batch: all but gathered parameters, and those."""
        point, micro, sharded = self.point, self.micro, self.point.sharded
        forward, backward = micro.layer.forward - micro.layer.kept, micro.layer.backward - micro.layer.kept
        end = micro.loss if self.last else Passes(0, 0, 0, 0)
        before, gathered = self.gradients_before, self.gathered
        copies = max(map(len, self.stages)) * micro.layer.cached
        yield before + self.activations + copies + max(end.forward, forward), gathered.forward
        ends = micro.unit * self.ends if sharded else 0
        if not point.placement.distributed_optimizer:  # the ends were dropped, and come again through a buffer of their size
            yield before + self.activations + end.kept, gathered.forward + ends
        yield before + self.activations + end.backward, gathered.forward
        head = micro.unit * self.words if self.last and (self.apart or not before) else 0  # its gradient, which comes first
        yield before + head + self.activations + backward, gathered.backward
        others = self.activations - max(self.costs)
        if self.waiting_losses:  # the second micro-batch in the backward pass
            yield self.gradients + others + end.backward - end.kept, gathered.backward
        exchanged = self.exchanged(self.layer) if sharded and point.placement.pp == 1 else 0  # by the layer before
        few = min(gathered.backward, gathered.end + 2 * micro.unit * self.layer)
        yield self.gradients + self.copied + (head if self.apart else 0) + others + micro.layer.kept + exchanged + backward, few
        slopes = ends if self.apart else 0
        yield self.gradients + self.copied + slopes + others + micro.embedded + exchanged + self.of_embedding[1], gathered.end
        if sharded:  # the gradients of the ends are exchanged together, which a pipeline does after all passes
            yield self.gradients + self.copied + (slopes if point.placement.pp == 1 else 0) + self.exchanged(self.ends), gathered.end
        if not point.knobs.fused_optimizer and point.device_class != "cpu":  # then all parameters go through each operator together
            yield self.gradients + self.whole // self.shards, 0

    @property
    def copied(self) -> int:
        """What FSDP holds beside the gradients of what was summed among copies of shards; in the first pass these are the gradients."""
        summed = self.point.sharded and not self.late and self.point.accumulation > 1 and self.point.holders > self.shards
        return self.whole // self.shards if summed else 0

    @property
    def apart(self) -> bool:
        """Whether the gradients that a pass makes of the ends wait beside all others for its end: FSDP's, but for those that are summed
        in fp32 at once."""
        whole = self.late and (self.point.accumulation > 1 or self.point.placement.pp > 1)
        return self.point.sharded and not (whole and self.micro.unit == FLOAT)

    def exchanged(self, parameters: int) -> int:
        """FSDP's gradients of so many parameters on their way: whole, and this device's part that is added to those of earlier passes."""
        return FLOAT * parameters + (FLOAT * parameters // self.shards if self.point.accumulation > 1 else 0)

    @property
    def gradients(self) -> int:
        """When all are there."""
        several = self.point.accumulation > 1 or self.point.placement.pp > 1
        return self.of_embedding[0] + (self.whole if self.late and several else self.whole // self.shards)

    @cached_property
    def gradients_before(self) -> int:
        """What is there of gradients while the activations of all micro-batches in flight are: those of earlier micro-batches, or DDP's
        buckets."""
        point, stages = self.point, len(self.stages)
        if point.accumulation == 1:
            return self.gradients if self.buckets else 0
        done = max(0, point.accumulation * stages - 1 - _passes_ahead(point, self.rank))  # backward passes before the last forward pass
        found = self.gradients * min(stages, -(-done // _round(point))) // stages
        if point.sharded and not self.late:  # what the ends have left to be summed over devices, and all that was among copies
            found += FLOAT * self.ends + (self.copied if point.accumulation > 2 else 0)
        return found

    @cached_property
    def of_embedding(self) -> tuple[int, int]:
        """Of the embedding's gradient, beside its part of all gradients: until the update, and while a pass ends. With tensor parallelism
        every device makes a whole one, of its own tokens, a part of a sum; it stays so unless it is added to that of the head."""
        point, config, unit, words = self.point, self.config, self.micro.unit, self.words
        if not self.first:
            return 0, 0
        table, several = config.vocab_size * config.width, point.accumulation > 1
        parts = words < table and not config.tied_head
        summed = several and (self.late or not point.sharded)  # with what is there, in fp32, which a CPU first makes of 16 bits
        widened = FLOAT * (table if parts else words) if summed and unit < FLOAT and point.device_class == "cpu" else 0
        if parts:
            lasting = FLOAT * (table - words) if self.late or not point.sharded else 0
            return lasting, widened + (unit * table if several or point.sharded else 0)
        if config.tied_head:
            return 0, widened + unit * (words if words == table else table + 2 * words)
        return 0, widened + (unit * words if summed and not self.apart else 0)

    @cached_property
    def costs(self) -> list[int]:
        """Of a micro-batch in flight, for each stage."""
        micro = self.micro
        return [len(stage) * micro.layer.kept + (micro.embedded if stage.start == 0 else 0) for stage in self.stages]

    @cached_property
    def activations(self) -> int:
        return _most_in_flight(self.point, self.rank, self.costs) + self.waiting_losses

    @property
    def waiting_losses(self) -> int:
        """What is kept by losses whose backward passes come after all forward passes."""
        placement = self.point.placement
        all_first = self.last and placement.pp > 1 and placement.schedule == "gpipe"
        return (self.point.accumulation - 1) * self.micro.loss.kept if all_first else 0

    @cached_property
    def gathered(self) -> _Gathered:
        """The ends are gathered through both passes. A layer is copied out of the buffer that it came in, which is kept until the next
        layer's has come; in the backward pass the next layer comes while one is at work. A distributed optimizer keeps all layers, a
        pipeline those whose backward pass is done."""
        placement, unit = self.point.placement, self.micro.unit
        if not self.point.sharded:
            return _Gathered(0, 0, 0)
        buffer = unit * self.layer if self.shards > 1 else 0
        few, every = unit * self.ends, self.whole * unit // FLOAT
        kept = placement.distributed_optimizer and self.point.accumulation > 1
        return _Gathered(
            (every if placement.distributed_optimizer or placement.schedule == "interleaved" else few) + buffer,
            every if placement.distributed_optimizer or placement.pp > 1 else few + unit * self.layer + buffer,
            every if kept or placement.pp > 1 else few,
        )


@dataclass(frozen=True)
class _Gathered:
    """Bytes of parameters that FSDP holds beside the shards."""

    forward: int
    """At the end of the forward pass."""
    backward: int
    """In a layer's backward pass."""
    end: int
    """At the end of the backward pass."""


def _masks(point: Point, length: int) -> int:
    """What a CPU adds to the scores of attention, a number for each pair of tokens; all layers share it."""
    cp, unit = point.placement.cp, 2 if point.precision in HALF else FLOAT
    return unit * (2 * cp + 1) * (length // (2 * cp)) ** 2 if cp > 1 and point.device_class == "cpu" else 0


def _pipelined(point: Point, config: GPTConfig, rank: int) -> int:
    """What a pipeline rank holds beside its activations: hidden states received for the micro-batches in flight, gradients of such states
    on their way, and all tokens of a step, inputs on the first rank and targets on the last."""
    placement, count = point.placement, point.accumulation
    if placement.pp == 1:
        return 0
    from caraml.engine.parallel.step import is_lean  # which loads torch's pipelines

    length = config.sequence_length // placement.cp
    states = state_bytes(config) * point.micro_batch * length * config.width // (placement.tp if placement.sp else 1)
    tokens = _TOKEN * count * point.micro_batch * length if rank in (0, placement.pp - 1) else 0
    held = placement.stages_of(rank)
    behind, before = sum(stage > 0 for stage in held), sum(stage < placement.stages - 1 for stage in held)
    if not is_lean():  # torch's own stages have a buffer for every micro-batch; the interleaved schedule keeps as many sent tensors
        return count * (behind + before) * (2 if placement.schedule == "interleaved" else 1) * states + tokens
    inputs, gradients = _most_in_flight(point, rank, [int(stage > 0) for stage in held]), 2
    if placement.schedule == "interleaved":  # a receive is posted when its sender is done, which may be some passes ahead
        inputs, gradients = inputs + 1, _round(point) // 2 + 1 if rank == placement.pp - 1 else 1
    return ((inputs if behind else 0) + (gradients if before else 0) + behind) * states + tokens


def _round(point: Point) -> int:
    """Micro-batches that the interleaved schedule takes through a stage before it turns to the next."""
    return point.accumulation // max(1, point.accumulation // point.placement.pp)


def _passes_ahead(point: Point, rank: int) -> int:
    """Forward passes of a rank before the one that its first backward pass follows."""
    placement, behind = point.placement, point.placement.pp - 1 - rank
    match placement.schedule:
        case "gpipe":
            return point.accumulation - 1 if placement.pp > 1 else 0
        case "1f1b":
            return behind
        case "interleaved":
            return (placement.stages // placement.pp - 1) * _round(point) + 2 * behind


def _most_in_flight(point: Point, rank: int, costs: Sequence[int]) -> int:
    """Most bytes that wait for backward passes at once, of which a micro-batch in flight takes ``costs[i]`` on the rank's i-th stage."""
    stages, turn, ahead = len(costs), _round(point), _passes_ahead(point, rank)
    passes = min(point.accumulation * stages, ahead + 2 * turn * stages)  # the rest repeats that
    order = [index // turn % stages for index in range(passes)]
    held = most = 0
    for index, stage in enumerate(order):
        held += costs[stage]
        most = max(most, held)
        if index >= ahead:
            held -= costs[stages - 1 - order[index - ahead]]
    return most


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
    planned = [point for point in points if is_planned(point)]
    possible = (point for point in planned if impossible(point, Params.model_validate(point.params).model_shape()) is None)
    return [Planned(point, memory_plan(point)) for point in possible]


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
