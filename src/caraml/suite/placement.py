"""How a point's model and batch are divided among its devices, what makes a division, or the whole point, impossible, and what goes
first: the order of benchmarks by what they need, circles, and what a point takes from the points before it.

The words, used the same everywhere: ``dp`` copies of the model see different samples; within a copy, ``pp`` stages hold different layers,
``cp`` devices have different parts of every sequence, and ``tp`` devices share every layer. ``nodes x devices = pp x dp x cp x tp``; ``dp``
is what is left over. ``fsdp`` of the ``dp x cp`` devices with the same parameters share one set of them, so that there are
``dp x cp / fsdp`` whole sets. ``sp`` also divides the sequence among the tp devices where they would otherwise do the same work twice.
"""

from __future__ import annotations

import itertools
import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel

from caraml.base.format import count
from caraml.suite.model import TRAINING, Placement, Point, Schedule
from caraml.system.model import DeviceClass

NEEDED = "needed/"
"""How a path begins that is below the folder of the point that goes first."""
_MOST_TRIED = 100_000
"""Devices, and samples of a micro-batch, up to which other divisions of them are looked for."""
_TAKES = re.compile(rf"(?<![\w.-]){NEEDED}")


@dataclass(frozen=True)
class ModelShape:
    """What a placement must know of a model that can be divided."""

    layers: int
    heads: int
    vocabulary: int
    sequence_length: int
    tied_head: bool
    ours: bool = True
    """Whether it is CARAML's own: only that can share parameters and divide sequences."""


@dataclass(frozen=True)
class Machine:
    """What expansion must know of the system that the points will run on."""

    name: str
    device: str
    device_class: DeviceClass
    software: str
    nodes: int | None
    """In reach of the launcher; ``None``: nobody said how many there are, the scheduler will."""
    devices_per_node: int
    most_per_node: int | None = None
    """Processes that ``devices`` may ask for by number, where ``all`` and ``world`` put fewer on a node: cores of a CPU node."""
    job_nodes: int | None = None
    job_devices: int | None = None
    """What a job may have of them, where the scheduler has such limits."""
    device_memory_gib: float | None = None
    emulates: tuple[str, ...] = ()
    """Precisions that it has no instructions for."""
    may_emulate: tuple[str, ...] = ()
    """Those of which nobody knows before a worker asks the device, since there is no data sheet."""
    without: tuple[str, ...] = ()
    """Those that nothing computes in on its devices."""
    compiles: bool = False
    """Whether models are compiled for it where nothing else is asked for."""
    only_programs: str | None = None
    """Why nothing but programs of others computes on its devices, if so."""
    packages_here: bool = False
    """Whether points run with the packages of this Python: in no container, and where the site brings none."""


def extent(values: dict[str, Any], machine: Machine) -> tuple[int, int]:
    """Nodes, and devices of each. ``world`` devices are equally many on each node: the most that a node has and that divide them."""
    devices = machine.devices_per_node if values["devices"] == "all" else values["devices"]
    if "world" not in values:
        return values["nodes"], devices
    world = values["world"]
    devices = next(each for each in range(min(machine.devices_per_node, world), 0, -1) if world % each == 0)
    return world // devices, devices


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """Layers of one stage: as even as they can be, the first stages taking what is left over."""
    each, left = divmod(layers, stages)
    start = stage * each + min(stage, left)
    return range(start, start + each + (stage < left))


def misfit(point: Point, shape: ModelShape | None) -> str | None:
    """Why a point's placement cannot be, with the nearest one that can; ``None`` if it can. ``shape`` is missing if the model is always
    whole."""
    reason = impossible(point, shape)
    if reason is None:
        return None
    nearest = next((other for other in _by_distance(point) if _batch_reason(other) is None and impossible(other, shape) is None), None)
    if nearest is None:
        return f"{reason}; no placement on {count(point.world, 'device')} fits"
    return f"{reason}; nearest that fits: {_spelt(nearest, point)}"


def impossible(point: Point, shape: ModelShape | None) -> str | None:
    """Why a point's placement cannot be; ``None`` if it can."""
    placement = point.placement
    if not placement.split:
        return None
    if shape is None:
        return f"workload {point.workload!r} is trained in whole copies only"
    if point.mode == "inference":
        return "mode inference runs whole copies only"
    if not shape.ours and (placement.fsdp > 1 or placement.distributed_optimizer or placement.sp or placement.cp > 1):
        return "fsdp, distributed_optimizer, sp and cp need params.backend = 'torch'"
    return (
        _division_reason(point) or _tensor_reason(placement, shape) or _sequence_reason(placement, shape) or _pipeline_reason(point, shape)
    )


def _division_reason(point: Point) -> str | None:
    placement, world = point.placement, point.world
    if world % placement.model_parallel:
        names = [name for name in ("tp", "cp", "pp") if name != "cp" or placement.cp > 1]
        sizes = " x ".join(str(getattr(placement, name)) for name in names)
        return f"{' x '.join(names)} = {sizes} = {placement.model_parallel} does not divide {count(world, 'device')}"
    if point.holders % placement.fsdp:
        whose = "dp" if placement.cp == 1 else "dp x cp"
        return f"fsdp = {placement.fsdp} does not divide {whose} = {point.holders}"
    if placement.distributed_optimizer and placement.fsdp > 1:
        return "fsdp and distributed_optimizer exclude each other: fsdp divides the optimizer too"
    return _batch_reason(point)


def _batch_reason(point: Point) -> str | None:
    if point.global_batch % (point.micro_batch * point.dp):
        copies = "dp" if point.placement.split else "devices"
        product = f"{point.micro_batch} x {point.dp} = {point.micro_batch * point.dp}"
        return f"global batch {point.global_batch} is not divisible by micro-batch x {copies} = {product}"
    return None


def _tensor_reason(placement: Placement, shape: ModelShape) -> str | None:
    tp = placement.tp
    for what, size in (("heads", shape.heads), ("padded vocabulary", shape.vocabulary)):
        if size % tp:
            return f"tp = {tp} does not divide the {what} ({size})"
    return None


def _sequence_reason(placement: Placement, shape: ModelShape) -> str | None:
    tp, cp, length = placement.tp, placement.cp, shape.sequence_length
    if cp > 1 and length % (2 * cp):  # a piece from its beginning and one from its end for each device
        return f"2 x cp = {2 * cp} does not divide the sequence length ({length})"
    if placement.sp and length // cp % tp:
        return f"sp: tp = {tp} does not divide the sequence length ({length // cp}{' of each device' if cp > 1 else ''})"
    return None


def _pipeline_reason(point: Point, shape: ModelShape) -> str | None:
    placement, micro_batches = point.placement, point.accumulation
    if placement.pp == 1:
        return None
    if placement.stages > shape.layers:
        return f"{placement.stages} pipeline stages for {count(shape.layers, 'layer')}"
    if shape.tied_head:
        return f"pp = {placement.pp} needs params.tied_head = false: first and last stage would hold the same weight"
    if placement.schedule == "1f1b" and micro_batches < placement.pp:
        return f"schedule 1f1b needs at least pp = {placement.pp} micro-batches per step, found {micro_batches}"
    if placement.schedule == "interleaved" and micro_batches % max(1, micro_batches // placement.pp):
        rounds = micro_batches // placement.pp
        return f"schedule interleaved needs micro-batches in {rounds} equal rounds of at least pp = {placement.pp}, found {micro_batches}"
    return None


def _by_distance(point: Point) -> Iterator[Point]:
    """Other placements and micro-batches of the same devices, the most alike first."""
    asked, world = point.placement, point.world
    if world > _MOST_TRIED:
        return
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    candidates = []
    parts = divisors if asked.cp > 1 else [1]
    for tp, cp, pp, fsdp in itertools.product(divisors, parts, divisors, divisors):
        if world % (tp * cp * pp) or world // (tp * pp) % fsdp:
            continue
        schedules = get_args(Schedule) if asked.pp > 1 else [asked.schedule]
        with_sp, with_optimizer = {asked.sp and tp > 1, False}, {asked.distributed_optimizer and fsdp == 1, False}
        for schedule, sp, optimizer, micro_batch in itertools.product(schedules, with_sp, with_optimizer, _divisors_near(point)):
            changes = {"tp": tp, "cp": cp, "pp": pp, "fsdp": fsdp, "schedule": schedule, "sp": sp, "distributed_optimizer": optimizer}
            other = point.model_copy(update={"placement": Placement.of(changes), "micro_batch": micro_batch})
            distance = (
                sum(abs(math.log2(changes[name] / getattr(asked, name))) for name in ("tp", "cp", "pp", "fsdp"))
                + (schedule != asked.schedule)
                + (sp != asked.sp)
                + (optimizer != max(with_optimizer))
                + abs(math.log2(micro_batch / point.micro_batch))
            )
            candidates.append((distance, tp, cp, pp, fsdp, schedule, other))
    yield from (candidate[-1] for candidate in sorted(candidates, key=lambda candidate: candidate[:-1]))


def _divisors_near(point: Point) -> list[int]:
    """The micro-batch asked for and those of the batch's divisors that are nearest to it."""
    divisors = [n for n in range(1, min(point.global_batch, 4 * point.micro_batch, _MOST_TRIED) + 1) if point.global_batch % n == 0]
    near = sorted(divisors, key=lambda n: abs(math.log2(n / point.micro_batch)))[:4]
    return list(dict.fromkeys([point.micro_batch, *near]))


def _spelt(found: Point, asked: Point) -> str:
    """The keys of a suite that would ask for it."""
    placement = found.placement
    parts = [f"dp = {found.dp}"]
    parts += [f"{name} = {getattr(placement, name)}" for name in ("tp", "cp", "pp", "fsdp") if getattr(placement, name) > 1]
    if placement.pp > 1 and placement.schedule != asked.placement.schedule:
        parts.append(f'schedule = "{placement.schedule}"')
    if placement.tp > 1 and asked.placement.sp and not placement.sp:
        parts.append("sp = false")
    if asked.placement.distributed_optimizer and not placement.distributed_optimizer:
        parts.append("distributed_optimizer = false")
    if found.micro_batch != asked.micro_batch:
        parts.append(f"micro_batch = {found.micro_batch}")
    return ", ".join(parts)


def why_skipped(point: Point, machine: Machine, params: BaseModel) -> str | None:
    """Why a point cannot run on this machine; ``None`` if it can. Nothing is rounded to make it fit."""
    if machine.only_programs is not None and point.workload != "command":
        return machine.only_programs
    if (reason := _too_large(point, machine)) is not None:
        return reason
    if not point.placement.split and (reason := _batch_reason(point)) is not None:
        return reason
    if point.precision in machine.emulates and point.workload != "command" and not point.knobs.emulated:
        return f"{machine.device} only emulates {point.precision}, which may take far longer: ask for fp32, or for emulated = true"
    if point.precision in machine.without and point.workload != "command":
        return f"{machine.device} has no units for {point.precision}: ask for {'fp16' if 'bf16' in machine.emulates else 'bf16'}"
    shape = getattr(params, "model_shape", None)  # of a workload whose model can be divided
    return _contradiction(point, params) or misfit(point, shape() if shape is not None else None)


def _too_large(point: Point, machine: Machine) -> str | None:
    if machine.nodes is not None and point.nodes > machine.nodes:
        return f"needs {point.nodes} nodes, {machine.nodes} of {machine.name} in reach"
    if point.devices > (most := machine.most_per_node or machine.devices_per_node):
        return f"needs {point.devices} devices per node, {machine.name} has {most}{' cores' if machine.most_per_node else ''}"
    for what, asked, limit in (("nodes", point.nodes, machine.job_nodes), ("devices", point.world, machine.job_devices)):
        if limit is not None and asked > limit:
            return f"needs {asked} {what}, a job on {machine.name} may have {limit}"
    return None


def _contradiction(point: Point, params: BaseModel) -> str | None:
    """Why no machine of this class of device can run a point, or ``None``."""
    unfit = getattr(params, "unfit", None)  # of a workload that has more to say than a placement must know
    if unfit is not None and (reason := unfit(point)) is not None:
        return str(reason)
    if getattr(params, "own_step", False) and point.accumulation > 1 and point.mode in TRAINING:
        return f"{point.workload} makes its own step over the whole batch: expected micro_batch = {point.global_batch // point.world}"
    if point.compile != "off" and (reason := getattr(params, "uncompiled", None)) is not None:
        return f'{reason}: expected compile = "off", found {point.compile!r}'
    no_graphs = 'compile = "default" or "max-autotune-no-cudagraphs"'
    if point.cuda_graphs and point.placement.split:
        return f"compile = {point.compile!r} replays CUDA graphs, and those of a divided model do not stay in place: {no_graphs}"
    if point.cuda_graphs and point.accumulation > 1 and point.mode != "inference":
        what = f"compile = {point.compile!r} replays CUDA graphs, and each overwrites the gradients of the micro-batch before"
        return f"{what}: {no_graphs}, or micro_batch = {point.global_batch // point.dp}"
    return _without_kernels(point)


def _without_kernels(point: Point) -> str | None:
    """Why nobody has kernels for the point's arithmetic or attention, or ``None``."""
    if point.precision in ("tf32", "fp8") and point.device_class == "cpu":
        return f"{point.precision} is an arithmetic of GPUs"
    if point.precision == "fp8" and (point.workload != "gpt" or point.placement.split or point.params.get("backend") != "torch"):
        return (
            "fp8 is for the linear layers of workload gpt, backend torch, in whole copies: ask for bf16, or leave out tp, cp, pp and fsdp"
        )
    if point.knobs.attention in ("cudnn", "efficient") and point.device_class == "cpu":
        return f"the attention kernel {point.knobs.attention!r} is one of GPUs"
    if point.knobs.attention == "cudnn" and point.placement.cp > 1:
        return "the attention kernel 'cudnn' takes whole sequences only: leave out cp, or ask for 'flash'"
    return None


def needed_first(needs: Sequence[tuple[str, str | None]]) -> tuple[list[int], dict[int, list[str]]]:
    """Positions of benchmarks by their names and what each needs: each after what it needs; and those that wait for themselves, each with
    the names of its circle."""
    order, waiting, before = list[int](), list(range(len(needs))), list[int]()
    while waiting != before:
        before, names = waiting, {needs[index][0] for index in waiting}
        order += [index for index in waiting if needs[index][1] not in names]
        waiting = [index for index in waiting if needs[index][1] in names]
    ahead, behind = dict[str, set[str]](), dict[str, set[str]]()
    for name, other in ((needs[index][0], needs[index][1] or "") for index in waiting):
        ahead.setdefault(name, set()).add(other)
        behind.setdefault(other, set()).add(name)
    circles: dict[str, list[str]] = {}
    for name in ahead.keys() & behind.keys():
        if name not in circles:
            both = reached([name], ahead) & reached([name], behind)
            circles |= dict.fromkeys(both, sorted(both))
    return order, {index: circle for index in waiting if needs[index][1] in (circle := circles.get(needs[index][0], []))}


def reached(names: Iterable[str], edges: Mapping[str, Iterable[str]]) -> set[str]:
    """Where edges lead from some names, over any number of them."""
    found, left = set[str](), list(names)
    while left:
        new = set(edges.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def waited_for(point: Point, repeat: int, values: Mapping[str, Any], every: Sequence[tuple[Point, Mapping[str, Any]]]) -> list[Point] | str:
    """The points that a point, without its ``repeat``, waits for: all of the benchmark that it needs or, where it takes files of several,
    the one that agrees with it in all that is swept there. In words what was expected where that is not one.

    ``values`` are those of the point, by the names that a sweep has for them; ``every``: the points of the needed benchmark, each with what
    is swept there.
    """
    if len(every) < 2 or not _TAKES.search(json.dumps(point.params)):
        return [one for one, _ in every]
    again = any(one.repeat for one, _ in every)
    found = [one for one, swept in every if all(values.get(name) == value for name, value in swept.items())]
    found = [one for one in found if one.repeat == repeat or not again]
    if len(found) == 1:
        return found
    axes = [*dict.fromkeys(name for _, swept in every for name in swept), *(["repeats"] if again else [])]
    alike = ", ".join(f"{name} = {json.dumps(repeat if name == 'repeats' else values.get(name))}" for name in axes)
    expected = f"a benchmark of one point, or with one for each of these: needed/ names its files, and {len(found)} of its "
    return f"{expected}{len(every)} points have {alike}"


def not_kept(point: Point, params: BaseModel, first: Sequence[Point] | None) -> str | None:
    """What was expected where the checkpoint that a point starts from will not be among the files of the points that go ``first``, or not
    be one of its model; ``None`` where it will, or nobody can say: a program may leave any file. Without ``first`` it needs no benchmark.

    ``params`` are those of the point, with whose ``checkpoint_facts`` a checkpoint must agree.
    """
    path = posixpath.normpath(str(point.params.get("start_from") or ""))
    if not path.startswith(NEEDED) or path.startswith(2 * NEEDED):  # what goes before that is looked at there
        return None
    if first is None:
        return f"a path of its own, or `needs` beside it: {NEEDED} is the folder of the point that goes first"
    return next((expected for one in first if "save_to" in one.params and (expected := _unlike(path, point, params, one))), None)


def _unlike(path: str, point: Point, params: BaseModel, one: Point) -> str | None:
    """Why a path is not that of a checkpoint of the point's model which another point saves; ``None`` if it is."""
    kept, name = one.params["save_to"], one.benchmark
    if kept is None:
        return f"what benchmark {name!r} keeps, and it has no params.save_to"
    if (there := posixpath.normpath(posixpath.join(NEEDED, str(kept)))) != path:
        return f"{json.dumps(there)}, which benchmark {name!r} saves to"
    if one.mode != "train":
        return f"a checkpoint of mode 'train': benchmark {name!r} has {one.mode!r}, which keeps none"
    ours = getattr(params, "checkpoint_facts", None)
    if ours is None or one.workload != point.workload:
        return None
    theirs = type(params).model_validate(one.params).checkpoint_facts  # type: ignore[attr-defined]  # as ours has
    told = ", ".join(f"{key} {json.dumps(theirs.get(key))}, not {json.dumps(ours[key])}" for key in ours if theirs.get(key) != ours[key])
    return f"a checkpoint of the same model: that of benchmark {name!r} has {told}" if told else None
