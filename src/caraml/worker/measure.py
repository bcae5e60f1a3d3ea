"""Measure a training loop of one's own as CARAML measures its own: ``with caraml.measure("my-model", item="image") as m: ... m.step(64)``.

The same loop measures it, with the same first step, warm-up, window, stop rule and energy as ``caraml run``, and the same record comes out.
The owner calls ``step`` at the end of each step. Under torchrun every rank does, once ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import JsonValue

from caraml import __version__
from caraml.base.errors import InputError, is_out_of_memory
from caraml.base.format import human, percent
from caraml.engine.device import AcceleratorDevice, CpuDevice, CudaDevice, Device, accelerator_type, gpus
from caraml.engine.instruments import Instruments, quiet_baseline
from caraml.engine.loop import FEWEST_STEPS, Hooks, MeasuringLoop
from caraml.engine.phases import PhaseLog
from caraml.engine.ranks import Ranks
from caraml.engine.steps import StepOutcome
from caraml.metrics.model import Facts, Peak
from caraml.power.node import node_key
from caraml.results.finish import now
from caraml.results.record import Record, Status
from caraml.results.store import Store, write_record
from caraml.suite.model import Measure, Point, Precision
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.worker.record import Known, gathered, make_record, write_readings

RESULTS = "CARAML_RESULTS"
"""Environment variable: folder of the results, instead of `caraml-results` below the current one; `--out` goes before it."""
WORKLOAD = "own_loop"
_NO_PEAK = "not measured beside a loop of one's own"
_NOTHING = StepOutcome(None, 0.0)


@dataclass(frozen=True)
class _Place:
    """Where a rank is among the nodes."""

    nodes: int
    leads: bool
    """Whether it is the first of its node, which reads the sensors."""
    gpus: list[str] | None
    """Addresses of the GPUs on which the loops of its node compute; ``None`` if torch uses none."""


class OwnLoop:
    """What ``caraml.measure`` gives the loop."""

    def __init__(self, point: Point, facts: Facts, out: Path, ranks: Ranks, place: _Place) -> None:
        self.record: Record | None = None
        """What came out, on rank 0 after the ``with`` block."""
        self._point, self._facts, self._out, self._ranks = point, facts, out, ranks
        self._device = _device()
        self._items: list[int] = []
        self._started_at, self._origin = now(), time.monotonic()
        self._log = PhaseLog(self._origin, lambda phase: None)
        self._instruments: Instruments | None = None
        with self._log.phase("idle"):
            if place.leads:
                self._instruments = Instruments(place.gpus, world=ranks.world)
            self._device.synchronize()
            quiet_baseline(ranks, self._instruments, point.measure.idle_seconds)
        self._run_began = time.monotonic()
        edge = self._instruments.edge if self._instruments is not None else lambda: None
        self._loop = MeasuringLoop(self._device, ranks, point.measure, Hooks(phase=self._log.phase, edge=edge))
        self._loop.__enter__()

    @property
    def done(self) -> bool:
        """Whether the window is closed: steps after it are not measured."""
        return self._loop.done

    def step(self, items: int) -> bool:
        """A step has ended, with ``items`` items on this rank. False once enough was measured: the loop may then end, or go on."""
        if self.done:
            return False
        if items < 1:
            raise InputError(f"m.step({items!r}): expected a whole number of items above 0")
        self._items.append(items)
        return self._loop.step_ended(_NOTHING)

    def finish(self, error: BaseException | None) -> None:
        """Close what is open and write the record. Collective, unless the loop failed."""
        if error is None and not self.done:
            self._loop.end()
        self._loop.__exit__()
        if self.done and (error is None or self._ranks.world == 1):
            self._conclude()
        elif error is not None:  # of several ranks, too, that measured: who would wait for the others may wait for ever
            self._fail("oom" if is_out_of_memory(error) else "failed", " ".join(f"{type(error).__name__}: {error}".split())[:400])
        else:
            self._fail("failed", f"the loop ended after {self._loop.steps} steps; a window needs {FEWEST_STEPS} after the first step")
        if self._instruments is not None:
            self._instruments.meter.stop()

    # -- the record ----------------------------------------------------------------------------------------------------

    def _conclude(self) -> None:
        mine, ranks = self._loop.summary(), self._ranks
        mine.items, mine.device_memory, mine.host_memory = self._items, self._device.peak_memory(), CpuDevice().peak_memory()
        run = (self._run_began, time.monotonic())
        with self._log.phase("idle_after"):
            self._device.synchronize()
            quiet_baseline(ranks, self._instruments, self._point.measure.idle_seconds)
        everyone = gathered(ranks, mine, self._instruments, run)
        first = next(index for index, row in enumerate(mine.rows) if row.phase == "measure")
        steps = zip(*(rank.items[first : first + len(mine.window_rows)] for rank in everyone), strict=True)
        point = self._of_batch(max(map(sum, steps)))
        folder = Store(self._out).new_attempt(point) if ranks.rank == 0 else self._out
        meter = self._instruments.meter if self._instruments is not None else None
        files = write_readings(ranks, everyone, meter, folder, self._origin)
        if ranks.rank != 0:
            return
        known = Known(
            folder=folder,
            point=point,
            facts=self._facts,
            origin=self._origin,
            started_at=self._started_at,
            runtime=time.monotonic() - self._origin,
            phases=self._log.phases,
            probed=Peak(value=None, dtype=point.precision, reason=_NO_PEAK),
            files=files,
            tells_wait=False,
        )
        self._keep(make_record(everyone, known), folder)

    def _fail(self, status: Status, reason: str) -> None:
        if self._ranks.rank != 0:
            return
        point = self._of_batch(1)
        folder = Store(self._out).new_attempt(point)
        record = Record(
            key=point.key,
            attempt=int(folder.name),
            point=point,
            status=status,
            reason=reason,
            started_at=self._started_at,
            phases=self._log.phases,
            facts=self._facts,
            system=detect().model_dump(mode="json"),
            environment=environment(),
        )
        self._keep(record, folder)

    def _of_batch(self, batch: int) -> Point:
        world = self._point.world
        return self._point.model_copy(update={"global_batch": max(batch, world), "micro_batch": max(batch // world, 1)})

    def _keep(self, record: Record, folder: Path) -> None:
        write_record(folder, record)
        self.record = record
        reason, rate = record.reason, record.metrics.get("throughput")
        if rate is not None and rate.value is not None:
            near = f" ± {percent((rate.high - rate.low) / 2 / rate.value, 2)}" if rate.low is not None and rate.high is not None else ""
            reason = f"{human(rate.value, rate.unit)}{near}" + (f" ({', '.join(record.flags)})" if record.flags else "")
        print(f"caraml: {record.point.benchmark}: {record.status}: {reason}; {folder / 'record.json'}", file=sys.stderr)


@contextmanager
def measure(
    name: str,
    *,
    item: str = "item",
    params: dict[str, JsonValue] | None = None,
    precision: Precision = "fp32",
    flops_per_item: float | None = None,
    parameters: int | None = None,
    out: str | Path | None = None,
    policy: Measure | None = None,
) -> Iterator[OwnLoop]:
    """Measure the loop inside the ``with`` block, and write its record when the block ends.

    Args:
        name: of the point, in tables.
        item: what ``m.step`` counts: ``"image"``, ``"token"`` ...
        params: whatever decides the speed (batch, width, ...): loops with equal name and params are repeats of one point.
        precision: arithmetic of the loop, for the record.
        flops_per_item: forward and backward FLOPs of an item, if known: gives FLOP/s.
        parameters: weights of the model, if known.
        out: folder of the results; default ``$CARAML_RESULTS``, else ``caraml-results``.
        policy: when warm-up and window end, as ``measure`` in suites.

    Raises:
        InputError: several ranks run, and ``torch.distributed`` is not initialised, or nodes have different numbers of ranks.
    """
    ranks, policy = _ranks(), policy or Measure()
    place = _place(ranks)
    system = detect()
    point = Point(
        suite="own",
        benchmark=name,
        workload=WORKLOAD,
        params={"name": name, **(params or {})},
        system=system.name,
        device=system.identity,
        device_class="cpu" if isinstance(_device(), CpuDevice) else "gpu",
        software=f"caraml {__version__}, torch {metadata.version('torch')}",
        nodes=place.nodes,
        devices=ranks.world // place.nodes,
        global_batch=1,
        micro_batch=1,
        precision=precision,
        measure=policy,
    )
    formula = "as the loop's author gave it" if flops_per_item is not None else "not given"
    facts = Facts(item=item, items_per_sample=1, parameters=parameters, flops_per_item=flops_per_item, flops_formula=formula)
    folder = Path(out if out is not None else os.environ.get(RESULTS, "caraml-results"))
    loop = OwnLoop(point, facts, folder, ranks, place)
    try:
        yield loop
    except BaseException as error:
        loop.finish(error)
        raise
    loop.finish(None)


def _place(ranks: Ranks) -> _Place:
    """Collective. A launcher may show every rank its own GPU alone, so that none knows those of its node by itself."""
    device = _device()
    mine = gpus([device.torch_device.index]) if isinstance(device, CudaDevice) else []
    everyone = ranks.gather([node_key(), mine])
    keys = [key for key, _ in everyone]
    counts = {key: keys.count(key) for key in keys}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on {key.partition(':')[0]}" for key, count in counts.items())
        raise InputError(f"found nodes with different numbers of ranks: {found}; expected as many on each")
    used = [address for key, addresses in everyone if key == node_key() for address in addresses]
    return _Place(len(counts), keys.index(node_key()) == ranks.rank, list(dict.fromkeys(used)) or None)


def _device() -> Device:
    """The accelerator that this process uses, if it uses one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return CudaDevice(torch.cuda.current_device())
    kind = accelerator_type()
    if kind in (None, "cuda"):
        return CpuDevice()
    device = AcceleratorDevice(kind, torch.accelerator.current_device_index())
    holds = getattr(torch.get_device_module(kind), "current_allocated_memory", device.peak_memory)  # Apple's keeps no peak
    return device if holds() else CpuDevice()


def _ranks() -> Ranks:
    """The loop's own ranks; they agree over a gloo group of the hosts, which puts no work into a device's queue."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), dist.new_group(backend="gloo"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"{os.environ['WORLD_SIZE']} ranks run this loop, and they cannot agree on a window",
            "call torch.distributed.init_process_group() before caraml.measure",
        )
    return Ranks()
