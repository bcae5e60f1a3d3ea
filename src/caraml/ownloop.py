"""Measure a training loop of one's own as CARAML measures its own: ``with caraml.measure("my-model", item="image") as m: ... m.step(64)``.

The same first step, warm-up, window, stop rule and energy as ``caraml run``, and the same record. The loop calls ``step`` at the end of
each of its steps; everything else follows from that. Under torchrun every rank does, once ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import JsonValue

from caraml import __version__
from caraml.engine.control import look, settled, steps_until_next_look, warm_up_over
from caraml.engine.device import CpuDevice, CudaDevice, Device, StepTimer
from caraml.engine.neighbours import CpuTime, cpu_time, share_of_others
from caraml.engine.ranks import Ranks
from caraml.errors import InputError
from caraml.power import Meter
from caraml.power.model import WindowEnergy
from caraml.power.store import ROW
from caraml.results.files import write_table
from caraml.results.finish import now
from caraml.results.metrics import Measured, derive
from caraml.results.record import Facts, Metric, Peak, Phase, Record, Status, Window
from caraml.results.store import Store, write_record
from caraml.stats import drift
from caraml.suite.model import Measure, Point, Precision
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.units import human, percent

POWER_SOURCES = "CARAML_POWER"
RESULTS = "CARAML_RESULTS"
WORKLOAD = "own_loop"
BUSY_SHARE = 0.05
_NOT_TOLD = "the loop does not say how long it waited for its input"
_NO_PEAK = "not measured beside a loop of one's own"
_FEWEST = 4
"""Steps without which there is no window."""


@dataclass
class _Series:
    """The steps of one rank, and its window. Times are this host's monotonic clock."""

    seconds: list[float] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0
    flags: list[str] = field(default_factory=list)
    first_step_end: float = 0.0
    peak_memory: int | None = None
    host_memory: int = 0


class OwnLoop:
    """What ``caraml.measure`` gives the loop."""

    def __init__(self, point: Point, facts: Facts, out: Path, ranks: Ranks, policy: Measure) -> None:
        self.record: Record | None = None
        """What came out, on rank 0 after the ``with`` block."""
        self._point, self._facts, self._out, self._ranks, self._policy = point, facts, out, ranks, policy
        self._device: Device = _device()
        self._series = _Series()
        self._phase = "first"
        self._left = 1
        self._edges: list[CpuTime | None] = []
        self._idle: WindowEnergy | None = None
        self._meter = self._open_meter() if int(os.environ.get("LOCAL_RANK", "0")) == 0 else None
        self._started_at, self._origin = now(), time.monotonic()
        self._device.synchronize()
        self._anchor = self._device.now()
        self._timer = StepTimer(self._device)

    @property
    def done(self) -> bool:
        """Whether the window is closed: steps after it are not measured."""
        return self._phase == "done"

    def step(self, items: int) -> bool:
        """A step has ended, with ``items`` items on this rank. False once enough was measured: the loop may then end, or go on."""
        if self.done:
            return False
        if items < 1:
            raise InputError(f"m.step({items!r}): expected a whole number of items above 0")
        self._timer.step_ended()
        self._series.items.append(items)
        self._left -= 1
        if not self._left:
            {"first": self._after_first, "warm_up": self._look_at_warm_up, "measure": self._look_at_window}[self._phase]()
        return not self.done

    # -- the loop's life -----------------------------------------------------------------------------------------------

    def _after_first(self) -> None:
        self._device.synchronize()
        self._series.first_step_end = self._device.now()
        self._take_steps()
        self._begin("warm_up")
        self._left = self._ranks.agree(1)

    def _look_at_warm_up(self) -> None:
        finished, elapsed = self._timer.finished(), self._device.now() - self._anchor
        if not self._ranks.agree(warm_up_over(finished, elapsed, self._policy)):
            self._left = self._ranks.agree(steps_until_next_look(finished, self._timer.launched))
            return
        self._device.synchronize()
        if not settled(self._timer.finished(), self._policy):
            self._series.flags.append("not_steady")
        self._take_steps()
        self._ranks.barrier()
        self._edge()
        self._begin("measure")
        self._series.begin = self._anchor
        self._left = self._ranks.agree(self._next_steps())

    def _look_at_window(self) -> None:
        verdict = look(self._timer.finished(), self._timer.launched, self._device.now() - self._anchor, self._policy)
        if self._ranks.agree(verdict.stop):
            self._close()
        else:
            self._left = self._ranks.agree(self._next_steps())

    def _next_steps(self) -> int:
        steps = steps_until_next_look(self._timer.finished() or self._series.seconds[1:], self._timer.launched)
        if self._policy.max_steps is not None:
            steps = min(steps, self._policy.max_steps - self._timer.launched)
        return max(steps, 1)

    def _close(self) -> None:
        """Close the window; the last look is at every step in it."""
        self._device.synchronize()
        self._series.end = self._device.now()
        self._edge()
        finished = self._timer.finished()
        verdict = look(finished, self._timer.launched, self._series.end - self._series.begin, self._policy)
        self._series.flags += [] if verdict.precise else ["imprecise"]
        if len(finished) >= _FEWEST and abs(drift(finished)) > self._policy.target:
            self._series.flags.append("not_steady")
        self._take_steps()
        self._phase = "done"

    def _begin(self, phase: str) -> None:
        self._phase, self._anchor, self._timer = phase, self._device.now(), StepTimer(self._device)

    def _take_steps(self) -> None:
        finished = self._timer.finished()
        self._series.seconds += finished
        self._series.phases += [self._phase] * len(finished)

    def _edge(self) -> None:
        if self._meter is not None:
            self._meter.mark()
        family = os.getppid() if self._ranks.world > 1 else os.getpid()  # torchrun is the parent of all ranks of a node
        self._edges.append(cpu_time(family))

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, error: BaseException | None) -> None:
        """Close what is open and write the record. Collective, unless the loop failed."""
        if self._phase == "measure" and error is None:
            self._close()
        elif self._phase == "warm_up" and error is None:
            self._late_window()
        if error is not None and not self.done:
            self._fail(error)
        elif self.done:
            series = self._series
            series.peak_memory, series.host_memory = self._device.peak_memory(), CpuDevice().peak_memory()
            everyone = [series] if error is not None else self._ranks.gather(series)
            self._write(everyone)
        elif self._ranks.rank == 0:
            count = len(self._series.seconds) + self._timer.launched
            self._save("failed", f"the loop ended after {count} steps; a window needs {_FEWEST} after the first step", {})
        if self._meter is not None:
            self._meter.stop()

    def _late_window(self) -> None:
        """The loop ended in its warm-up: its second half is the window, and is not steady."""
        self._device.synchronize()
        finished = list(self._timer.finished())
        self._take_steps()
        half = len(finished) - len(finished) // 2
        if len(finished) - half < _FEWEST:
            return
        series, first = self._series, len(self._series.seconds) - (len(finished) - half)
        series.phases[first:] = ["measure"] * (len(series.phases) - first)
        series.begin, series.end = self._anchor + sum(finished[:half]), self._anchor + sum(finished)
        series.flags += ["imprecise", "not_steady"]
        self._edges = [None, None]
        self._phase = "done"

    def _write(self, ranks: list[_Series]) -> None:
        if self._ranks.rank != 0:
            return
        mine, seconds = ranks[0], max(series.end - series.begin for series in ranks)
        first = mine.phases.index("measure")
        steps = mine.phases.count("measure")
        items = sum(sum(series.items[first : first + steps]) for series in ranks)
        begin = mine.begin - self._origin
        window = Window(start=begin, end=begin + seconds, steps=steps, samples=items, items=items, first_step=first)
        times = [max(series.seconds[index] for series in ranks) for index in range(len(mine.seconds))]
        peaks = [series.peak_memory for series in ranks if series.peak_memory is not None]
        measured = Measured(
            window=window,
            step_times=times[first : first + steps],
            data_wait=0.0,
            world=len(ranks),
            facts=self._facts,
            first_step_time=times[0],
            time_to_first_step=mine.first_step_end - self._origin,
            peak_memory=max(peaks) if peaks else None,
            losses=[],
        )
        energy = self._meter.energy("measure", mine.begin, mine.begin + seconds, self._idle) if self._meter is not None else None
        no_peak = Peak(value=None, dtype=self._point.precision, reason=_NO_PEAK)
        metrics = derive(measured, energy, self._idle, no_peak, no_peak)
        metrics["data_wait_share"] = Metric(value=None, unit="1", reason=_NOT_TOLD)
        metrics["runtime"] = Metric(value=time.monotonic() - self._origin, unit="s")
        metrics["peak_host_memory"] = Metric(value=max(series.host_memory for series in ranks), unit="B")
        share = share_of_others(self._edges[0], self._edges[1], seconds, os.cpu_count() or 1)
        metrics["other_cpu_share"] = Metric(value=share, unit="1", reason=None if share is not None else "not known for this window")
        flags = sorted({flag for series in ranks for flag in series.flags} | ({"busy_machine"} if (share or 0) > BUSY_SHARE else set()))
        step_items = [sum(series.items[index] for series in ranks) for index in range(len(times))]
        fields = {"window": window, "flags": flags, "energy": self._on_our_clock(energy), "idle": self._on_our_clock(self._idle)}
        self._save("ok", None, metrics, ranks, batch=max(step_items[first : first + steps]), **fields)

    def _fail(self, error: BaseException) -> None:
        if self._ranks.rank != 0:
            return
        oom = isinstance(error, MemoryError | torch.OutOfMemoryError)
        self._save("oom" if oom else "failed", " ".join(f"{type(error).__name__}: {error}".split())[:400], {})

    def _save(
        self,
        status: Status,
        reason: str | None,
        metrics: dict[str, Metric],
        ranks: list[_Series] | None = None,
        batch: int = 1,
        **fields: Any,
    ) -> None:
        world = self._point.world
        point = self._point.model_copy(update={"global_batch": max(batch, world), "micro_batch": max(batch // world, 1)})
        folder = Store(self._out).new_attempt(point)
        record = Record(
            key=point.key,
            attempt=int(folder.name),
            point=point,
            status=status,
            reason=reason,
            started_at=self._started_at,
            phases=[Phase(name="run", start=0.0, end=time.monotonic() - self._origin)],
            facts=self._facts,
            metrics=metrics,
            system=detect().model_dump(mode="json"),
            environment=environment(),
            files=self._raw_files(folder, ranks or []),
            **fields,
        )
        write_record(folder, record)
        self.record = record
        rate = metrics.get("throughput")
        if rate is not None and rate.value is not None:
            near = f" ± {percent((rate.high - rate.low) / 2 / rate.value, 2)}" if rate.low is not None and rate.high is not None else ""
            reason = f"{human(rate.value, rate.unit)}{near}" + (f" ({', '.join(record.flags)})" if record.flags else "")
        print(f"caraml: {point.benchmark}: {status}: {reason}; {folder / 'record.json'}", file=sys.stderr)

    def _raw_files(self, folder: Path, ranks: list[_Series]) -> dict[str, str]:
        if not ranks:
            return {}
        columns = ("step", "rank", "phase", "start", "seconds", "data_wait", "loss")
        files = {"steps": write_table(folder, "steps", columns, self._step_rows(ranks))}
        if self._meter is not None and self._meter.channels:
            files["power"] = write_table(folder, "power", ROW, self._meter.rows(self._origin))
        return files

    def _step_rows(self, ranks: list[_Series]) -> Iterator[tuple[Any, ...]]:
        for rank, series in enumerate(ranks):
            first = series.phases.index("measure")
            start = series.begin - self._origin - sum(series.seconds[:first])
            for index, (seconds, phase) in enumerate(zip(series.seconds, series.phases, strict=True)):
                yield index, rank, phase, start, seconds, None, None
                start += seconds

    def _on_our_clock(self, energy: WindowEnergy | None) -> WindowEnergy | None:
        return None if energy is None else replace(energy, start=energy.start - self._origin, end=energy.end - self._origin)

    def _open_meter(self) -> Meter:
        chosen, uuids = os.environ.get(POWER_SOURCES), None
        if isinstance(self._device, CudaDevice):
            count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(min(count, torch.cuda.device_count()))]
        meter = Meter(sources=chosen.split(",") if chosen else "auto", devices=uuids)
        meter.start()
        if meter.channels and self._policy.idle_seconds:
            begin = meter.mark()
            time.sleep(self._policy.idle_seconds)
            self._idle = meter.energy("idle", begin, meter.mark())
        return meter


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
        InputError: several ranks run, and ``torch.distributed`` is not initialised.
    """
    ranks, policy = _ranks(), policy or Measure()
    system = detect()
    point = Point(
        suite="own",
        benchmark=name,
        workload=WORKLOAD,
        params={"name": name, **(params or {})},
        system=system.name,
        device=system.identity,
        device_class="gpu" if isinstance(_device(), CudaDevice) else "cpu",
        software=f"caraml {__version__}, torch {metadata.version('torch')}",
        nodes=max(ranks.world // int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks.world))), 1),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.world > 1 else 1,
        global_batch=1,
        micro_batch=1,
        precision=precision,
        measure=policy,
    )
    formula = "as the loop's author gave it" if flops_per_item is not None else "not given"
    facts = Facts(item=item, items_per_sample=1, parameters=parameters, flops_per_item=flops_per_item, flops_formula=formula)
    folder = Path(out if out is not None else os.environ.get(RESULTS, "caraml-results"))
    loop = OwnLoop(point, facts, folder, ranks, policy)
    try:
        yield loop
    except BaseException as error:
        loop.finish(error)
        raise
    loop.finish(None)


def _device() -> Device:
    """The GPU that this process uses, if it uses one, else the CPU."""
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_available() and torch.cuda.is_initialized() else CpuDevice()


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
