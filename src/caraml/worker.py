"""One point in one process group: build, warm up, measure, write the record.

Runs as ``python -m caraml.worker FOLDER``, alone or under torchrun; FOLDER holds ``point.json``. Rank 0 writes the record. Whatever goes
wrong is left in ``failure.json`` by the rank that saw it first, and the script around the worker turns that into a record.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from caraml.conclude import Conclusion, Edge, Seen, Window0, with_damaged
from caraml.engine.afterwards import save_model, validate, validation_loss
from caraml.engine.device import CpuDevice, Device, open_device
from caraml.engine.epochs import EpochLoop
from caraml.engine.lifeline import die_with_parent
from caraml.engine.loop import Hooks, Measurement, MeasuringLoop, Progress
from caraml.engine.neighbours import cpu_time
from caraml.engine.phases import PhaseLog, process_start
from caraml.engine.precision import ARITHMETIC, set_attention, set_deterministic, set_matmul_precision
from caraml.engine.ranks import Ranks
from caraml.engine.step import Step, make_step
from caraml.engine.watchdog import Watchdog
from caraml.errors import CaramlError, InputError
from caraml.power import Meter
from caraml.power.model import WindowEnergy
from caraml.results.finish import Failure, note_failure, note_start, now
from caraml.results.progress import ProgressWriter
from caraml.results.record import Bandwidth, Facts, Peak, Record, Status
from caraml.results.store import write_record
from caraml.suite.model import Point
from caraml.system import affinity
from caraml.system.throttle import throttled
from caraml.workloads import load_workload
from caraml.workloads.base import BuildContext, Task

if TYPE_CHECKING:
    from caraml.engine.parallel.divide import Divided

POWER_SOURCES = "CARAML_POWER"
"""Environment variable: comma-separated names of power sources to use instead of all that answer."""
PROBE_SECONDS = 1.5
STREAM_SECONDS = 0.3
STREAM_BYTES = {"cpu": 64 * 2**20, "gpu": 1024 * 2**20}
"""Of each of three arrays. On a CPU they need what the matrices of the probe before them needed: the peak of memory stays as it is."""
_LONGEST_REASON = 400


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
        self._hurried = False
        self._edges: list[Edge] = []
        self._own_device: Any = None
        self._divided: Divided | None = None
        self._peak_memory: int | None = None
        self._validation_loss: float | None = None
        self._afterwards_failed: str | None = None
        self._damaged: dict[str, str] = {}

    def run(self) -> Record | None:
        """Measure and write the record; returns it on rank 0, ``None`` elsewhere."""
        with self.log.phase("start"):
            device, ranks = self._open()
        with self.log.phase("idle"):
            idle = self._idle_baseline()
        with self.log.phase("probe"):
            probed = self._probe(device)
            self._bandwidth = self._probe_memory(device)
            device.forget_peak_memory()
        with self.log.phase("build"):
            task = self._build(device, ranks)
        try:
            with Watchdog(ranks, self._give_up) as watchdog:
                task.batches = watchdog.watch(task.batches)
                step = make_step(task, self.point, device.torch_device, self._divided)
                measurement = self._loop(device, ranks, step, task).run()
            self._peak_memory = device.peak_memory()
            if measurement.epochs:
                self._validation_loss = measurement.epochs[-1].loss
            self._afterwards(task, device.torch_device)
            self._damaged = task.damaged() if task.damaged is not None else {}
        finally:
            task.close()
        with self.log.phase("save"):
            record = self._conclude(device, ranks, measurement, idle, probed)
        if record is not None:
            write_record(self.folder, record)
        ranks.barrier()  # a rank that went before the record is written would make torchrun end the one that writes it
        ranks.leave()
        return record

    # -- before the window ---------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Device, Ranks]:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._affinity = affinity.bind(local_rank, self.point.devices, self.point.system)
        if self._affinity["bound"]:  # the script's count knows the node, not the cores of this process
            torch.set_num_threads(min(torch.get_num_threads(), affinity.usable_cpus(self.point.devices)))
        self._workload = load_workload(self.point.workload)
        self._params = self._workload.params.model_validate(self.point.params)
        if self._workload.device is not None:
            self._own_device = self._workload.device(self._params)
        device = self._own_device or open_device(self.point.device_class, local_rank)
        set_matmul_precision(self.point.precision)
        set_deterministic(self.point.deterministic)
        set_attention(self.point.knobs.attention)
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

    def _probe_memory(self, device: Device) -> Bandwidth:
        from caraml.system.probe import measured_bandwidth

        if self._own_device is not None:
            return Bandwidth(value=None, reason="a device of known speed has no memory")
        try:
            result = measured_bandwidth(device.torch_device, budget_s=STREAM_SECONDS, array_bytes=STREAM_BYTES[self.point.device_class])
        except CaramlError as error:
            return Bandwidth(value=None, reason=str(error))
        source = f"{result.kernel} of {result.array_bytes >> 20} MiB arrays in this process, read + written; median of its repetitions"
        return Bandwidth(value=result.bytes_per_s, source=source, low=result.low, high=result.high)

    def _build(self, device: Device, ranks: Ranks) -> Any:
        point = self.point
        mesh = None
        if point.placement.split:  # what divides models takes as long to import as torch itself: only where it is needed
            from caraml.engine.parallel.mesh import Mesh

            mesh = Mesh(point, device.torch_device)
        context = BuildContext(
            params=self._params,
            device=device.torch_device,
            rank=mesh.copy if mesh is not None else ranks.rank,
            world=point.dp,
            processes_on_node=point.devices,
            micro_batch=point.micro_batch,
            seed=point.seed,
            phase=self.log.phase,
            own_device=self._own_device,
            global_batch=point.global_batch,
            divided=mesh is not None,
            knobs=point.knobs,
        )
        task = self._workload.build(context)
        if mesh is not None:
            from caraml.engine.parallel.divide import divide

            self._divided = divide(task, point, mesh, device.torch_device)
        if task.start_from is not None:
            from caraml.engine.parallel import checkpoint

            with self.log.phase("load_checkpoint"):
                checkpoint.load(*self._parts(task), Path(task.start_from))
        # Reading alone computes nothing, inference goes forward only: FLOPs that were not done must not appear as a rate.
        flops = {"data": None, "inference": task.facts.forward_flops_per_item}.get(point.mode, task.facts.flops_per_item)
        trains = point.mode in ("train", "compute")
        again = task.facts.hardware_flops_per_item if trains else None
        moved = task.facts.traffic_per_item if trains else None
        self._facts = task.facts.model_copy(update={"flops_per_item": flops, "hardware_flops_per_item": again, "traffic_per_item": moved})
        return task

    def _loop(self, device: Device, ranks: Ranks, step: Step, task: Task) -> MeasuringLoop:
        """The loop that the measuring policy asks for: over a span of time, or over epochs."""
        point, policy = self.point, self.point.measure
        if policy.epochs is None:
            return MeasuringLoop(device, ranks, step, policy, self._hooks())
        samples = task.facts.samples_per_epoch
        if samples is None or samples < point.global_batch:
            length = f"an epoch of {samples or 'unknown'} samples"
            raise InputError(f"measure.epochs: found {policy.epochs}; {length} has no batch of {point.global_batch}")

        if policy.to_target and (point.mode != "train" or task.validation is None):
            raise InputError("measure.until_...: nothing to judge by; expected mode train and held-out data", "see params.validation")

        def check() -> tuple[float | None, float | None]:
            return validate(task, point.precision, device.torch_device, ranks) if point.mode == "train" else (None, None)

        return EpochLoop(device, ranks, step, policy, self._hooks(), steps=samples // point.global_batch, validate=check)

    def _parts(self, task: Task) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """What this process trains."""
        return ([task.model], [task.optimizer]) if self._divided is None else (self._divided.stages, self._divided.optimizers)

    # -- while the loop runs -------------------------------------------------------------------------------------------

    def _hooks(self) -> Hooks:
        return Hooks(phase=self.log.phase, progress=self._show, edge=self._edge, hurry=lambda: self._hurried)

    def hurry(self) -> None:
        """The job is about to be ended: measure no longer than it takes to say anything."""
        self._hurried = True

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

    def _give_up(self, hanging: str) -> None:
        """The watchdog's last word."""
        reason = f"{hanging} (in phase {self.log.current})"
        failure = Failure(status="failed", reason=reason, rank=self.rank, started_at=self.started_at, phases=self.log.phases)
        note_failure(self.folder, failure)

    # -- after the window ----------------------------------------------------------------------------------------------

    def _afterwards(self, task: Task, device: torch.device) -> None:
        """Rank 0 validates and saves what was trained on real input; the others wait at the next agreement. A checkpoint is everyone's."""
        together = self._divided is not None or task.save_to is not None
        if (self.rank != 0 and not together) or self.point.mode != "train":
            return
        # What was measured is not lost by what fails now: the failure becomes a reason.
        try:
            with self.log.phase("evaluate"):
                if self.point.measure.epochs is None and self._divided is None:  # else every epoch was validated
                    self._validation_loss = validation_loss(task, self.point.precision, device)
            with self.log.phase("save_model"):
                if together:
                    from caraml.engine.parallel import checkpoint

                    checkpoint.save(*self._parts(task), Path(task.save_to) if task.save_to else None, self.folder)
                else:
                    save_model(task.model, self.folder)
        except (CaramlError, OSError, RuntimeError) as error:
            self._afterwards_failed = _in_words(error)

    def _conclude(self, device: Device, ranks: Ranks, mine: Measurement, idle: WindowEnergy | None, probed: Peak) -> Record | None:
        """The record, on rank 0; the other ranks give what they measured."""
        measurements = ranks.gather(mine)
        damaged = {name: why for found in ranks.gather(self._damaged) for name, why in found.items()}
        device_peaks, host_peaks = ranks.gather(self._peak_memory), ranks.gather(CpuDevice().peak_memory())
        affinities = ranks.gather(self._affinity)
        window0, energy = Window0.of(measurements), None
        if self._meter is not None:
            energy = self._meter.energy("measure", mine.begin, mine.begin + window0.seconds, idle)
            self._meter.stop()
        if ranks.rank != 0:
            return None
        assert self._facts is not None
        seen = Seen(
            folder=self.folder,
            point=self.point,
            facts=with_damaged(self._facts, damaged),
            origin=self.origin,
            started_at=self.started_at,
            runtime=time.monotonic() - self.origin,
            phases=self.log.phases,
            edges=self._edges,
            meter=self._meter,
            probed=probed,
            bandwidth=self._bandwidth,
            own_device=self._own_device is not None,
            peak_memory=device_peaks,
            host_memory=host_peaks,
            affinity=affinities,
            validation_loss=self._validation_loss,
            afterwards_failed=self._afterwards_failed,
        )
        return Conclusion(seen, measurements).record(energy, idle)


def _open_meter(device: torch.device, count: int) -> Meter:
    """A running meter over this node's sensors: of the GPUs that this point uses, or of the CPU."""
    chosen = os.environ.get(POWER_SOURCES)
    uuids = None
    if device.type == "cuda":
        uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)]
    meter = Meter(sources=chosen.split(",") if chosen else "auto", devices=uuids)
    meter.start()
    return meter


def _status_of(error: BaseException) -> Status:
    """Out of memory is a result; everything else is a failure."""
    text = str(error).lower()
    on_host = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text)
    return "oom" if on_host or isinstance(error, torch.OutOfMemoryError) else "failed"


def _in_words(error: BaseException) -> str:
    """One line for tables, with the error behind it: some libraries say there what happened, and above it only that something did."""
    if isinstance(error, CaramlError):
        words = str(error)
    else:
        behind = f", because {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else ""
        words = f"{type(error).__name__}: {error}{behind}"
    return " ".join(words.split())[:_LONGEST_REASON]  # the log has it all


def main(folder: Path) -> None:
    """Measure the point of an attempt's folder. What fails is noted there and raised."""
    point = Point.model_validate_json((folder / "point.json").read_text(encoding="utf-8"))
    die_with_parent()
    if os.environ.get("RANK", "0") == "0":
        note_start(folder)
    worker = Worker(folder, point)
    signal.signal(signal.SIGUSR1, lambda number, frame: worker.hurry())  # what `sbatch --signal` sends before the time is over
    try:
        worker.run()
    except BaseException as error:
        phases = worker.log.phases
        where = f" (in phase {phases[-1].name})" if phases else ""
        failure = Failure(
            status=_status_of(error),
            reason=_in_words(error) + where,
            rank=worker.rank,
            started_at=worker.started_at,
            phases=phases,
            traceback=f"rank {worker.rank}: {traceback.format_exc()}",
        )
        note_failure(folder, failure)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # Everything is written. Torch's own threads may still be on their way out, and an interpreter that is taken down around them aborts.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
