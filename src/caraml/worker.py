"""One point in one process group: build, warm up, measure, write the record.

Runs as ``python -m caraml.worker FOLDER``, alone or under torchrun; FOLDER holds ``point.json``. Rank 0 writes the record. Whatever goes
wrong is left in ``failure.json`` by the rank that saw it first, and the script around the worker turns that into a record.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caraml.engine.afterwards import save_model, validation_loss
from caraml.engine.device import CpuDevice, Device, open_device
from caraml.engine.loop import Hooks, Measurement, MeasuringLoop, Progress
from caraml.engine.neighbours import CpuTime, cpu_time, share_of_others
from caraml.engine.phases import PhaseLog, process_start
from caraml.engine.precision import ARITHMETIC, set_deterministic, set_matmul_precision
from caraml.engine.ranks import Ranks
from caraml.engine.step import make_step
from caraml.errors import CaramlError
from caraml.power import Meter
from caraml.power.model import WindowEnergy
from caraml.results.files import write_table
from caraml.results.finish import Failure, note_failure, now
from caraml.results.metrics import Measured, derive
from caraml.results.progress import ProgressWriter
from caraml.results.record import Facts, Fingerprint, Metric, Peak, Record, Status, Window
from caraml.results.run_metrics import Run, run_metrics
from caraml.results.store import write_record
from caraml.suite.model import Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.model import DType, System
from caraml.system.throttle import Throttled, shares, throttled
from caraml.workloads import load_workload
from caraml.workloads.base import BuildContext, Task

POWER_SOURCES = "CARAML_POWER"
"""Environment variable: comma-separated names of power sources to use instead of all that answer."""
PROBE_SECONDS = 2.0
THROTTLED_SHARE = 0.01
"""Share of the window for which a GPU was held back above which it is flagged `throttled`."""
_LONGEST_REASON = 400
FINGERPRINT_STEP = 4
"""Whose loss is the fingerprint: three updates stand in it, and every point has at least as many steps."""
BUSY_SHARE = 0.05
"""Share of the host's CPU time used by others above which a window is flagged `busy_machine`."""


@dataclass(frozen=True)
class Edge:
    """What is noted at an end of the window besides the sensors."""

    cpu: CpuTime | None
    throttled: Throttled


@dataclass(frozen=True)
class Window0:
    """Rank 0's view of the window, all ranks taken together: the slowest rank counts."""

    begin: float
    seconds: float
    step_times: list[float]
    data_wait: float
    losses: list[float]
    first_step_time: float
    skipped_updates: int
    flags: list[str]

    @classmethod
    def of(cls, ranks: list[Measurement]) -> Window0:
        """Take the measurements of all ranks together."""
        times = np.array([[row.seconds for row in rank.window_rows] for rank in ranks])
        losses = np.array([rank.losses for rank in ranks])
        return cls(
            begin=ranks[0].begin,
            seconds=max(rank.end - rank.begin for rank in ranks),
            step_times=times.max(axis=0).tolist(),
            data_wait=max(sum(row.data_wait for row in rank.window_rows) for rank in ranks),
            losses=losses.mean(axis=0).tolist(),
            first_step_time=max(rank.first_step_time for rank in ranks),
            skipped_updates=max(rank.skipped_updates for rank in ranks),
            flags=sorted({flag for rank in ranks for flag in rank.flags}),
        )


class Worker:
    """Measures one point in this process."""

    def __init__(self, folder: Path, point: Point) -> None:
        self.folder, self.point, self.origin = folder, point, process_start()
        self.started_at = now()
        self.rank = int(os.environ.get("RANK", "0"))
        self._progress = ProgressWriter(folder, self.origin) if self.rank == 0 else None
        self.log = PhaseLog(self.origin, self._say)
        self._meter: Meter | None = None
        self._facts: Facts | None = None
        self._edges: list[Edge] = []
        self._own_device: Any = None
        self._peak_memory: int | None = None
        self._validation_loss: float | None = None
        self._afterwards_failed: str | None = None

    def run(self) -> Record | None:
        """Measure and write the record; returns it on rank 0, ``None`` elsewhere."""
        with self.log.phase("start"):
            device, ranks = self._open()
        with self.log.phase("idle"):
            idle = self._idle_baseline()
        with self.log.phase("probe"):
            probed = self._probe(device)
            device.forget_peak_memory()
        with self.log.phase("build"):
            task = self._build(device, ranks)
        try:
            step = make_step(task, self.point, device.torch_device)
            measurement = MeasuringLoop(device, ranks, step, self.point.measure, self._hooks()).run()
            self._peak_memory = device.peak_memory()
            self._afterwards(task, device.torch_device)
        finally:
            task.close()
        with self.log.phase("save"):
            record = self._conclude(device, ranks, measurement, idle, probed)
        ranks.leave()
        if record is not None:
            write_record(self.folder, record)
        return record

    # -- before the window ---------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Device, Ranks]:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._workload = load_workload(self.point.workload)
        self._params = self._workload.params.model_validate(self.point.params)
        if self._workload.device is not None:
            self._own_device = self._workload.device(self._params)
        device = self._own_device or open_device(self.point.device_class, local_rank)
        set_matmul_precision(self.point.precision)
        set_deterministic(self.point.deterministic)
        ranks = Ranks.from_environment(self.point.device_class)
        if local_rank == 0:
            self._meter = _open_meter(device.torch_device, self.point.devices)
        return device, ranks

    def _idle_baseline(self) -> WindowEnergy | None:
        """Energy of the machine at rest: the device is open, nothing runs."""
        meter, seconds = self._meter, self.point.measure.idle_seconds
        if meter is None or not meter.channels or not seconds:
            return None
        begin = meter.mark()
        time.sleep(seconds)
        return meter.energy("idle", begin, meter.mark())

    def _probe(self, device: Device) -> Peak:
        from caraml.system.probe import measured_peak

        dtype = ARITHMETIC[self.point.precision]
        if self._own_device is not None:
            return self._own_device.peak(dtype)
        try:
            result = measured_peak(device.torch_device, dtype, budget_s=PROBE_SECONDS)
        except CaramlError as error:
            return Peak(value=None, dtype=dtype, reason=str(error))
        shape = " x ".join(str(size) for size in result.shape)
        source = f"best of {len(result.trials)} matrix products in this process, {shape}; median of its repetitions"
        return Peak(value=result.flops_per_s, dtype=dtype, source=source, low=result.low, high=result.high)

    def _build(self, device: Device, ranks: Ranks) -> Any:
        point = self.point
        context = BuildContext(
            params=self._params,
            device=device.torch_device,
            rank=ranks.rank,
            world=ranks.world,
            processes_on_node=point.devices,
            micro_batch=point.micro_batch,
            seed=point.seed,
            phase=self.log.phase,
            own_device=self._own_device,
        )
        task = self._workload.build(context)
        # Reading alone computes nothing, inference goes forward only: FLOPs that were not done must not appear as a rate.
        flops = {"data": None, "inference": task.facts.forward_flops_per_item}.get(point.mode, task.facts.flops_per_item)
        self._facts = task.facts.model_copy(update={"flops_per_item": flops})
        return task

    # -- while the loop runs -------------------------------------------------------------------------------------------

    def _hooks(self) -> Hooks:
        return Hooks(phase=self.log.phase, progress=self._show, edge=self._edge)

    def _edge(self) -> None:
        """At both ends of the window: read every sensor, and note who used the CPU and how long GPUs were held back."""
        if self._meter is not None:
            opening = not self._edges
            if not opening:
                self._meter.mark()
            family = os.getppid() if self.point.world > 1 else os.getpid()  # torchrun is the parent of all ranks of a node
            self._edges.append(Edge(cpu_time(family), throttled() if self.point.device_class == "gpu" else {}))
            if opening:
                self._meter.mark()

    def _say(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.write(phase)

    def _show(self, progress: Progress) -> None:
        if self._progress is None or self._facts is None:
            return
        interval = progress.step_time
        finite = interval is not None and np.isfinite(interval.relative)
        self._progress.write(
            progress.phase,
            steps=progress.steps,
            rate=self._items_per_step / interval.mean if interval is not None and interval.mean > 0 else None,
            relative=interval.relative if interval is not None and finite else None,
            item=self._facts.item,
            watts=self._meter.latest_power_w() if self._meter is not None else None,
            remaining=progress.remaining,
        )

    @property
    def _items_per_step(self) -> int:
        assert self._facts is not None
        return self.point.global_batch * self._facts.items_per_sample

    # -- after the window ----------------------------------------------------------------------------------------------

    def _afterwards(self, task: Task, device: torch.device) -> None:
        """Rank 0 validates and saves what was trained on real input; the others wait at the next agreement."""
        if self.rank != 0 or self.point.mode != "train":
            return
        # What was measured is not lost by what fails now: the failure becomes a reason.
        try:
            with self.log.phase("evaluate"):
                self._validation_loss = validation_loss(task, self.point.precision, device)
            with self.log.phase("save_model"):
                save_model(task.model, self.folder)
        except (CaramlError, OSError, RuntimeError) as error:
            self._afterwards_failed = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]

    def _run(self, measurements: list[Measurement], window: Window, host_memory: int) -> Run:
        assert self._facts is not None
        times = np.array([[row.seconds for row in rank.rows] for rank in measurements])
        loss, trained = self._validation_loss, self.point.mode == "train"
        if loss is not None and not np.isfinite(loss):
            loss, why = None, "it was NaN or infinite"
        else:
            why = "the workload has no held-out data" if trained else "only mode train validates and saves"
        return Run(
            runtime=time.monotonic() - self.origin,
            phases=self.log.phases,
            step_times=times.max(axis=0).tolist(),
            window_step=window.seconds / window.steps,
            data_wait=max(sum(row.data_wait for row in rank.rows) for rank in measurements),
            global_batch=self.point.global_batch,
            facts=self._facts,
            validation_loss=loss,
            no_validation=self._afterwards_failed or why,
            host_memory=host_memory,
        )

    def _conclude(self, device: Device, ranks: Ranks, mine: Measurement, idle: WindowEnergy | None, probed: Peak) -> Record | None:
        measurements = ranks.gather(mine)
        peaks, host_peaks = ranks.gather(self._peak_memory), ranks.gather(CpuDevice().peak_memory())
        window0 = Window0.of(measurements)
        energy = None
        if self._meter is not None:
            energy = self._meter.energy("measure", mine.begin, mine.begin + window0.seconds, idle)
            self._meter.stop()
        if ranks.rank != 0:
            return None
        assert self._facts is not None
        system, surroundings = detect(), environment()
        window, measured = self._measured(window0, mine, ranks.world, peaks)
        datasheet = probed if self._own_device is not None else _datasheet(system, ARITHMETIC[self.point.precision])
        metrics = derive(measured, energy, idle, datasheet, probed)
        metrics["other_cpu_share"] = self._others(window0.seconds, system)
        metrics |= run_metrics(self._run(measurements, window, max(host_peaks)), energy)
        surroundings["throttled"] = shares(self._edges[0].throttled, self._edges[1].throttled, window0.seconds)
        return Record(
            key=self.point.key,
            attempt=int(self.folder.name),
            point=self.point,
            status="ok" if not window0.losses or np.isfinite(window0.losses).all() else "invalid",
            flags=self._flags(window0, metrics, surroundings["throttled"]),
            started_at=self.started_at,
            phases=self.log.phases,
            window=window,
            fingerprint=_fingerprint(measurements),
            facts=self._facts,
            metrics=metrics,
            peak_datasheet=datasheet,
            peak_measured=probed,
            energy=self._on_our_clock(energy),
            idle=self._on_our_clock(idle),
            system=system.model_dump(mode="json"),
            environment=surroundings,
            files=self._raw_files(measurements),
        )

    def _measured(self, window0: Window0, mine: Measurement, world: int, peaks: list[int | None]) -> tuple[Window, Measured]:
        assert self._facts is not None
        steps = len(window0.step_times)
        trained = steps - window0.skipped_updates
        begin = window0.begin - self.origin
        window = Window(
            start=begin,
            end=begin + window0.seconds,
            steps=steps,
            samples=trained * self.point.global_batch,
            items=trained * self._items_per_step,
            first_step=len(mine.rows) - steps,
        )
        known = [peak for peak in peaks if peak is not None]
        measured = Measured(
            window=window,
            step_times=window0.step_times,
            data_wait=window0.data_wait,
            world=world,
            facts=self._facts,
            first_step_time=window0.first_step_time,
            time_to_first_step=mine.first_step_end - self.origin,
            peak_memory=max(known) if known else None,
            losses=window0.losses,
        )
        return window, measured

    def _others(self, seconds: float, system: System) -> Metric:
        begin, end = (edge.cpu for edge in self._edges)
        share = share_of_others(begin, end, seconds, system.cpu.threads or os.cpu_count() or 1)
        return Metric(value=share, unit="1", reason=None if share is not None else "the kernel does not tell (no /proc/stat)")

    def _flags(self, window0: Window0, metrics: dict[str, Metric], held_back: Throttled) -> list[str]:
        flags = list(window0.flags)
        if window0.losses and not np.isfinite(window0.losses).all():
            flags.append("nan_loss")
        others = metrics["other_cpu_share"].value
        if others is not None and others > BUSY_SHARE:
            flags.append("busy_machine")
        if any(share > THROTTLED_SHARE for reasons in held_back.values() for share in reasons.values()):
            flags.append("throttled")
        return flags

    def _on_our_clock(self, energy: WindowEnergy | None) -> WindowEnergy | None:
        """The same energy with its edges in the record's seconds."""
        if energy is None:
            return None
        return dataclasses.replace(energy, start=energy.start - self.origin, end=energy.end - self.origin)

    def _raw_files(self, measurements: list[Measurement]) -> dict[str, str]:
        steps: dict[str, list[Any]] = {name: [] for name in ("step", "rank", "phase", "start", "seconds", "data_wait", "loss")}
        for rank, measurement in enumerate(measurements):
            losses: list[float] | list[None] = measurement.losses or [None] * len(measurement.rows)
            for index, (row, loss) in enumerate(zip(measurement.rows, losses, strict=True)):
                values = (index, rank, row.phase, row.start - self.origin, row.seconds, row.data_wait, loss)
                for name, value in zip(steps, values, strict=True):
                    steps[name].append(value)
        files = {"steps": write_table(self.folder, "steps", steps)}
        if self._meter is not None and self._meter.channels:
            readings: dict[str, list[Any]] = dict(self._meter.readings())
            kinds = {channel.id: channel.kind for channel in self._meter.channels}
            readings["kind"] = [kinds[channel] for channel in readings["channel"]]
            for name in ("t_before", "t_after"):
                readings[name] = [instant - self.origin for instant in readings[name]]
            files["power"] = write_table(self.folder, "power", readings)
        return files


def _fingerprint(measurements: list[Measurement]) -> Fingerprint | None:
    """The loss of an early step on every rank; ``None`` in a mode that trains nothing."""
    if not all(measurement.losses for measurement in measurements):
        return None
    losses = [float(measurement.losses[FINGERPRINT_STEP - 1]).hex() for measurement in measurements]
    return Fingerprint(step=FINGERPRINT_STEP, losses=losses)


def _open_meter(device: torch.device, count: int) -> Meter:
    """A running meter over this node's sensors: of the GPUs that this point uses, or of the CPU."""
    chosen = os.environ.get(POWER_SOURCES)
    uuids = None
    if device.type == "cuda":
        uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
    meter = Meter(sources=chosen.split(",") if chosen else "auto", devices=uuids)
    meter.start()
    return meter


def _datasheet(system: System, dtype: DType) -> Peak:
    figure = (system.peak or {}).get(dtype)
    if figure is None:
        reason = system.missing.get("peak") or f"the data sheet of {system.devices[0].model} has no {dtype}"
        return Peak(value=None, dtype=dtype, reason=reason)
    return Peak(value=figure.value, dtype=dtype, source=figure.source)


def _status_of(error: BaseException) -> Status:
    """Out of memory is a result; everything else is a failure."""
    text = str(error).lower()
    on_host = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text)
    return "oom" if on_host or isinstance(error, torch.OutOfMemoryError) else "failed"


def main(folder: Path) -> None:
    """Measure the point of an attempt's folder. What fails is noted there and raised."""
    point = Point.model_validate_json((folder / "point.json").read_text(encoding="utf-8"))
    worker = Worker(folder, point)
    try:
        worker.run()
    except BaseException as error:
        words = str(error) if isinstance(error, CaramlError) else f"{type(error).__name__}: {error}"
        reason = " ".join(words.split())[:_LONGEST_REASON]  # one line for tables; the log has it all
        phases = worker.log.phases
        where = f" (in phase {phases[-1].name})" if phases else ""
        failure = Failure(status=_status_of(error), reason=reason + where, rank=worker.rank, started_at=worker.started_at, phases=phases)
        note_failure(folder, failure)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
