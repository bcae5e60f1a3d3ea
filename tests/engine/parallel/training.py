"""Trains a tiny GPT at several placements in one process group.

``python -m caraml.engine.start --devices N tests.engine.parallel.training JOBS.json``

A job is ``{"name", "placement", "point", "params", "steps"}``; beside JOBS.json, rank 0 leaves ``losses.json``: for each job the loss of
each step (mean over copies), the number of parameters that each rank holds and a digest of their values at the end, and the ranks that
have the other parts of its sequences. ``"live"`` adds each rank's peak by the storages that operators make (not those that FSDP empties),
``"exchanges"`` the formats of what is gathered and scattered; ``"torch_buffers"`` has a pipeline use torch's own stages; ``"scale"`` is the
loss scale to begin with.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import sys
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from caraml.engine.matmul import Products
from caraml.engine.parallel import checkpoint
from caraml.engine.parallel import divide as division
from caraml.engine.parallel import step as divided_step
from caraml.engine.parallel.divide import Mesh, divide
from caraml.engine.passes import LiveBytes
from caraml.engine.ranks import Ranks
from caraml.engine.step import make_step
from caraml.engine.steps import Step, StepOutcome
from caraml.suite.model import Knobs, Placement, Point
from caraml.workloads.base import BuildContext
from caraml.workloads.gpt import tokens
from caraml.workloads.gpt import training as gpt

CPU = torch.device("cpu")
STEP = "one step"
TINY = {"preset": "4M", "width": 64, "layers": 2, "heads": 4, "sequence_length": 32, "vocab_size": 128, "tied_head": False}
TINY |= {"data": "synthetic-device", "learning_rate": 3e-3, "clip_norm": 0.5}


def train(job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Run one job on every rank of the group."""
    placement = Placement(**job.get("placement", {}))
    point = point_of(job, placement, ranks.world)
    torch.manual_seed(0)
    mesh = Mesh(point, CPU) if placement.split else None
    params = gpt.Params.model_validate(point.params)
    copy, copies = (mesh.copy, point.dp) if mesh is not None else (ranks.rank, ranks.world)
    context = BuildContext(
        params,
        CPU,
        copy,
        copies,
        1,
        point.micro_batch,
        seed=0,
        phase=lambda _: nullcontext(),
        divided=mesh is not None,
        tp=point.placement.tp,
        accumulation=point.accumulation,
        knobs=point.knobs,
    )
    task = gpt.build(context)
    if params.data != "text":
        task.batches = same_samples(copy, copies, point, params)
    for _ in range(job.get("skip", 0) * point.accumulation):
        next(task.batches)
    with graphs_as_they_are():
        divided = divide(task, point, mesh, CPU) if mesh is not None else None
    parts = ([task.model], [task.optimizer]) if divided is None else (divided.stages, divided.optimizers)
    if params.start_from:
        checkpoint.load(*parts, Path(params.start_from), ranks)
    step, chosen = make_step(task, point, CPU, divided), None
    if "scale" in job:
        scaler: Any = step._scaler  # type: ignore[attr-defined]
        scaler.scale(torch.ones(()))  # makes a scale where there is none yet
        scaler._scale.fill_(job["scale"])
    if "matmul" in job:
        chosen = Products(point.model_copy(update={"knobs": Knobs(matmul=job["matmul"])}), ranks)
        step = chosen.around(step, lambda _: nullcontext())
    exchanges = Exchanges()
    with exchanges if job.get("exchanges") else nullcontext():
        outcomes = [_marked(step) for _ in range(job.get("steps", 10))]
    told = ranks.gather(chosen.told if chosen is not None else {})
    if chosen is not None:
        chosen.close()
    if params.save_to:
        checkpoint.save(*parts, Path(params.save_to), beside=Path(), ranks=ranks)
    losses = [outcome.loss.item() for outcome in outcomes if outcome.loss is not None]
    seen = [own for own in ranks.gather(losses) if own]
    own = [local(parameter).detach() for stage in parts[0] for parameter in stage.parameters()]
    held = ranks.gather(sum(tensor.numel() for tensor in own))
    beside = ranks.gather(dist.get_process_group_ranks(mesh.cp) if mesh is not None and mesh.cp is not None else [])
    digests = ranks.gather(hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in own)).hexdigest())
    task.close()
    mean = [sum(column) / len(column) for column in zip(*seen, strict=True)]
    return {
        "losses": mean,
        "held": held,
        "beside": beside,
        "digests": digests,
        "matmul": told,
        "exchanged": sorted(exchanges.seen),
        "graphs": counters["stats"]["unique_graphs"],
    }


def _marked(step: Step) -> StepOutcome:
    with record_function(STEP):
        return step()


@contextmanager
def graphs_as_they_are() -> Iterator[None]:
    """Have what is compiled inside run as the graphs that the code generator would get; they are counted."""
    own = torch.compile
    counters.clear()
    torch.compile = functools.partial(own, backend="aot_eager")  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = own  # type: ignore[assignment]


class Exchanges(TorchDispatchMode):
    """Which collectives ran inside on tensors of which format."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "gather" in str(func) or "scatter" in str(func):
            self.seen |= {f"{func} {leaf.dtype}" for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        return func(*args, **(kwargs or {}))


def local(parameter: torch.Tensor) -> torch.Tensor:
    """The part of a parameter that lies here."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[no-any-return]


def point_of(job: dict[str, Any], placement: Placement, world: int) -> Point:
    values: dict[str, Any] = {"global_batch": 8, "micro_batch": 2, "mode": "train", "device_class": "cpu", **job.get("point", {})}
    params = gpt.Params.model_validate({**TINY, **job.get("params", {})}).model_dump(mode="json")
    names = {"suite": "parity", "benchmark": job["name"], "workload": "gpt", "system": "local", "device": "test", "software": "test"}
    nodes = 2 if world > 2 else 1  # the same processes: what divides a model must not stop at a node
    return Point(**names, params=params, nodes=nodes, devices=world // nodes, placement=placement, **values)


def same_samples(copy: int, copies: int, point: Point, params: gpt.Params) -> Any:
    """Micro-batches of one copy; every division of the copies goes through the same samples in a step."""
    generator = torch.Generator().manual_seed(7)
    while True:
        samples = torch.randint(params.vocab_size // 4, (point.global_batch, params.sequence_length + 1), generator=generator)
        own = samples.chunk(copies)[copy]
        for batch in own.split(point.micro_batch):
            yield batch[:, :-1], batch[:, 1:]


@contextmanager
def measured_peak() -> Iterator[Callable[[], int]]:
    """Most bytes that torch's CPU allocator had given out at a time, by the profiler's record of every allocation inside.

    The first step, in which the optimizer begins, does not count.
    """
    gc.collect()  # what earlier jobs leave must not be freed inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: max(peaks[1:])
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    allocations = [event for event in events if event.name() == "[memory]"]
    starts = [event.start_ns() for event in allocations]
    held = list(itertools.accumulate(event.nbytes() for event in allocations))
    steps = [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in events if event.name() == STEP]
    peaks = [max(held[bisect(starts, begin) - 1 : bisect(starts, end)]) for begin, end in steps]


class Given(LiveBytes):
    """Live bytes of storages that have memory."""

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._add(storage)


def main(path: Path) -> None:
    ranks = Ranks.from_environment(torch.device("cpu"))
    # Jobs of one grid share its groups: each has a thread of gloo that looks for work 100 times a second.
    division.init_device_mesh = functools.cache(init_device_mesh)  # type: ignore[attr-defined]
    division.middle_group = functools.cache(division.middle_group)
    tokens.synthetic_tokens = functools.partial(tokens.synthetic_tokens, samples=64)  # of a million, drawing the order takes long
    results, is_lean = {}, divided_step.is_lean
    for job in json.loads(path.read_text()):
        divided_step.is_lean = (lambda: False) if job.get("torch_buffers") else is_lean  # type: ignore[assignment]
        with Given() if job.get("live") else nullcontext() as live:
            results[job["name"]] = train(job, ranks)
        results[job["name"]]["peaks"] = ranks.gather(live.peak if live is not None else 0)
    if ranks.rank == 0:
        (path.parent / "losses.json").write_text(json.dumps(results))
    ranks.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
