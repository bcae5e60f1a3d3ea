"""A training of ours: build, warm up, measure, write the record.

Runs as ``python -m caraml.worker FOLDER``, alone or as one of several; FOLDER holds ``point.json``. Rank 0 writes the record. Whatever goes
wrong is left in ``failure.json`` by the rank that saw it first, and the script around the worker turns that into a record.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from caraml.base.errors import InputError
from caraml.engine.afterwards import Tracer, quality, save_model, validate, validation_loss
from caraml.engine.device import CpuDevice, Device, open_device, sensors_of
from caraml.engine.epochs import EpochLoop
from caraml.engine.instruments import Instruments, quiet_baseline
from caraml.engine.loop import Hooks, MeasuringLoop, Progress
from caraml.engine.matmul import replacements
from caraml.engine.precision import ARITHMETIC, attention_kernel, check_fit, compute_in_fp8, set_kernels
from caraml.engine.ranks import Ranks
from caraml.engine.replacement import Replacement
from caraml.engine.step import Watch, make_step
from caraml.engine.steps import RankSummary, Step, full
from caraml.engine.watchdog import Watchdog
from caraml.metrics.model import ONLY_TRAINED, Bandwidth, Peak, own_definitions, steps_per_epoch, unknown
from caraml.metrics.run import TO_THE_END
from caraml.metrics.window import bandwidth_of, peak_of
from caraml.results.finish import MEASURED, NOT_DONE, Failure, note_failure, now, put_away, reason_of, without_room, write_as_it_fits
from caraml.results.record import Profile, Record, Status
from caraml.results.status import ProgressWriter
from caraml.suite.model import Point
from caraml.system import affinity
from caraml.system.environment import own_checkout
from caraml.worker.record import PhaseLog, gathered, make_record, process_start, stopped, write_readings
from caraml.worker.so_far import SoFar
from caraml.worker.together import Known
from caraml.workloads import load_workload, software_of
from caraml.workloads.base import BuildContext, Task, checked

if TYPE_CHECKING:
    from caraml.engine.parallel.divide import Divided
    from caraml.system.kernels import Kind


class Worker:
    """Measures one point in this process."""

    def __init__(self, folder: Path, point: Point) -> None:
        self.folder, self.point, self.origin = folder, point, process_start()
        self.started_at = now(time.monotonic() - self.origin)
        self.rank = int(os.environ.get("RANK", "0"))
        self._progress = ProgressWriter(folder, self.origin) if self.rank == 0 else None
        self.log = PhaseLog(self.origin, self._say)
        self._so_far = SoFar(lambda: folder, self.rank, self.log, self.started_at)
        self._instruments: Instruments | None = None
        self._hurried = False
        self.resumed: list[float] = []
        """When this process went on after it had been stopped, on the monotonic clock."""
        self._own_device: Any = None
        self._replacements: list[Replacement] = []
        self._divided: Divided | None = None
        self._measuring: MeasuringLoop | None = None
        self.measured, self._rescuing = False, threading.Lock()
        """Whether what was measured is put away."""

    def run(self) -> Record | None:
        """Measure and write the record; returns it on rank 0, ``None`` elsewhere."""
        with self.log.phase("start"):
            device, ranks = self._open()
        starting = time.monotonic() - self.origin
        with self.log.phase("idle"):
            quiet_baseline(ranks, self._instruments, self.point.measure.idle_seconds)
        limits = self._limits(device)
        own_checkout()  # once, before the run, which is to be of the work alone
        device.forget_peak_memory()
        ranks.barrier()  # a node that had to search for its limits must not lengthen the run of the others
        run_began = time.monotonic()
        with self.log.phase("build"):
            task = self._build(device, ranks)
            ranks.know_each_other()  # in the groups of its placement, too
            self._known = self._facts(task, device.torch_device, limits)
        with ExitStack() as opened:
            opened.callback(self._close, task)
            if device.torch_device.type == "cpu" and self._own_device is None:
                self._replacements = replacements(self.point, ranks)
                self._known.chosen |= {one.name: one.told for one in self._replacements}
                for one in self._replacements:
                    opened.callback(one.close)
            with Watchdog(ranks, self._give_up) as watchdog:
                tracer, step = self._step(task, device, watchdog.watch)
                self._measuring = self._loop(device, ranks, task, watchdog)
                mine = self._measuring.run(step)
            mine.device_memory, mine.affinity = device.peak_memory(), self._affinity | affinity.as_found()
            self._look(task, mine)
            kept, aside = self._keep(ranks, task, mine, run_began)
            self._validate_and_save(task, device.torch_device, mine, ranks)
            self._look(task, mine)
            if tracer is None:
                opened.close()
            run = (run_began, time.monotonic())
            self._put_away(kept)
            with self.log.phase("idle_after"):
                quiet_baseline(ranks, self._instruments, self.point.measure.idle_seconds)
            with self.log.phase("save"):
                everyone = gathered(ranks, mine, self._instruments, run, aside)
                files: dict[str, str] = {}
                with without_room():
                    files = write_readings(ranks, everyone, self._instruments, self.folder, self.origin)
                runtime = starting + run[1] - run[0] - (aside[1] - aside[0])
                self._known = replace(self._known, files=files, runtime=runtime, phases=self.log.phases)
                record = self._record(everyone) if ranks.rank == 0 else None
            if tracer is not None:
                record = self._traced(ranks, task, tracer, step, record)
        if record is not None:
            write_as_it_fits(self.folder, record)
        ranks.barrier()  # a rank that went before the record is written and failed would end the one that writes it
        ranks.leave()
        return record

    # -- before the window ---------------------------------------------------------------------------------------------

    def _open(self) -> tuple[Device, Ranks]:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self._affinity = affinity.bind(local_rank, self.point.devices, self.folder)
        if self._affinity["bound"]:  # the script's count knows the node, not the cores of this process
            torch.set_num_threads(min(torch.get_num_threads(), affinity.usable_cpus(self.point.devices)))
        self._workload = load_workload(self.point.workload)
        self._params = self._workload.params.model_validate(self.point.params)
        if self._workload.device is not None:
            self._own_device = self._workload.device(self._params)
        device = self._own_device or open_device(self.point.device_class, local_rank)
        if self._own_device is None:
            check_fit(self.point, device.torch_device)
        set_kernels(self.point)
        ranks = Ranks.from_environment(device.torch_device, self.point.measure.timeout_seconds)
        if local_rank == 0:
            family = [os.getppid()] if self.point.world > 1 else None  # what starts the ranks of a node is their parent
            self._instruments = Instruments(sensors_of(device.torch_device, self.point.devices), family=family)
        return device, ranks

    def _limits(self, device: Device) -> tuple[Peak, Bandwidth, Bandwidth | None]:
        """What the device can do: FLOP/s, bytes/s from memory and, on CPUs, bytes/s from the last-level cache."""
        dtype = ARITHMETIC[self.point.precision]
        if self._own_device is not None:
            return self._own_device.peak(dtype), Bandwidth(value=None, reason="a device of known speed has no memory"), None
        from caraml.system.limits import looks, must_search

        on_cpu = device.torch_device.type == "cpu"
        kinds: list[Kind] = ["arithmetic", "memory", "cache"] if on_cpu else ["arithmetic", "memory"]
        processes = self.point.devices
        with self.log.phase("full_probe" if must_search("arithmetic", device.torch_device, dtype, processes=processes) else "probe"):
            found = looks(kinds, device.torch_device, dtype, processes=processes, keep=os.environ.get("LOCAL_RANK", "0") == "0")
        cache = bandwidth_of(found["cache"], "cache") if on_cpu else None
        return peak_of(found["arithmetic"], dtype), bandwidth_of(found["memory"], "memory"), cache

    def _build(self, device: Device, ranks: Ranks) -> Any:
        point = self.point
        mesh = None
        if point.placement.split:  # what divides models takes as long to import as torch itself: only where it is needed
            from caraml.engine.parallel.divide import Mesh

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
            accumulation=point.accumulation,
            divided=mesh is not None,
            tp=point.placement.tp,
            knobs=point.knobs,
        )
        task = checked(self._workload.build(context), point.workload)
        if task.own_step is None:
            task.batches = full(task.batches, point.micro_batch, task.samples_in)
        if point.precision == "fp8":
            compute_in_fp8(task.model)
        if mesh is not None:
            from caraml.engine.parallel.divide import divide

            self._divided = divide(task, point, mesh, device.torch_device)
        if task.start_from is not None:
            from caraml.engine.parallel import checkpoint

            with self.log.phase("load_checkpoint"):
                checkpoint.load(*self._parts(task), Path(task.start_from), ranks)
        return task

    def _facts(self, task: Task, device: torch.device, limits: tuple[Peak, Bandwidth, Bandwidth | None]) -> Known:
        """What is known before anything is trained."""
        point = self.point
        known = Known(self.folder, point, task.facts.in_mode(point.mode, task.batches_per_step), self.origin, self.started_at, *limits)
        if self._own_device is not None:
            known.datasheet = known.probed
        if task.attention is not None and point.mode != "data":
            known.chosen["attention"] = attention_kernel(point.knobs.attention, task.attention, point.precision, device)
        if task.quality is not None:
            known.quality = task.quality.unknown(ONLY_TRAINED)
            known.definitions = own_definitions(task.quality.own, software_of(point.workload) or "CARAML")
        return known

    def _step(self, task: Task, device: Device, watch: Watch) -> tuple[Tracer | None, Step]:
        """The step, and what will trace it once everything is measured."""
        takes = self.point.accumulation * task.batches_per_step
        if task.own_step is not None or self.point.placement.split:
            self._known.meetings = takes
        overlaps = device.torch_device.type != "cpu" and self.point.mode in ("train", "inference")
        if takes > 1 and overlaps and not device.behind:
            self._known.no_wait = "the device's events tell no time, so what a wait within a step costs is not known"
        tracer = None
        if self.point.profile:
            tracer = Tracer(self.point, device, self.folder if self.rank == 0 else None)
            looked_after = watch
            watch = lambda batches: tracer.watch(looked_after(batches))  # noqa: E731
        step = make_step(task, self.point, device.torch_device, self._divided, watch, clock=device, told=self._known.chosen)
        for one in self._replacements:
            step = one.around(step, self.log.phase)
        return tracer, step

    def _loop(self, device: Device, ranks: Ranks, task: Task, watchdog: Watchdog) -> MeasuringLoop:
        """The loop that the measuring policy asks for: over a span of time, or over epochs."""
        point, policy = self.point, self.point.measure
        edge = self._instruments.edge if self._instruments is not None else lambda: None
        hooks = Hooks(phase=self.log.phase, progress=self._show, edge=edge, hurry=lambda: self._hurried)
        if ranks.rank == 0:
            hooks.meanwhile = self._meanwhile
        if policy.epochs is None:
            return MeasuringLoop(device, ranks, policy, hooks, paces=point.paces)
        samples, steps = task.facts.samples_per_epoch or 0, steps_per_epoch(task.facts, point)
        if steps is None or samples < point.global_batch:
            length = f"an epoch of {samples or 'unknown'} samples"
            raise InputError(f"measure.epochs: found {policy.epochs}; {length} has no batch of {point.global_batch}")
        if policy.to_target and (point.mode != "train" or task.validation is None):
            raise InputError("measure.until_...: nothing to judge by; expected mode train and held-out data", "see params.validation")

        def check() -> tuple[float | None, float | None]:
            if point.mode != "train":
                return None, None
            return validate(task, point.precision, device.torch_device, ranks, watchdog.watch_validation)

        return EpochLoop(device, ranks, policy, hooks, steps=steps, validate=check)

    def _parts(self, task: Task) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """What this process trains."""
        return ([task.model], [task.optimizer]) if self._divided is None else (self._divided.stages, self._divided.optimizers)

    # -- while the loop runs -------------------------------------------------------------------------------------------

    def hurry(self) -> None:
        """The job is about to be ended: measure no longer than it takes to say anything."""
        self._hurried = True

    def _meanwhile(self) -> None:
        assert self._measuring is not None
        self._so_far.look(self._measuring, self._instruments)

    def _say(self, phase: str) -> None:
        if self._progress is not None:
            self._progress.write(phase)

    def _show(self, progress: Progress) -> None:
        if self._progress is None:
            return
        interval, items = progress.step_time, self.point.global_batch * self._known.facts.items_per_sample
        finite = interval is not None and np.isfinite(interval.relative)
        self._progress.write(
            progress.phase,
            steps=progress.steps,
            rate=items / interval.mean if interval is not None and interval.mean > 0 else None,
            relative=interval.relative if interval is not None and finite else None,
            item=self._known.facts.item,
            watts=self._instruments.meter.latest_power_w() if self._instruments is not None else None,
            remaining=progress.remaining,
        )

    def _give_up(self, hanging: str) -> None:
        if self.note("failed", f"{hanging} (in phase {self.log.current})"):
            self.rescue()

    def note(self, status: Status, reason: str, trace: str | None = None) -> bool:
        """Leave a failure behind; whether this was the first."""
        told = {"rank": self.rank, "started_at": self.started_at, "phases": self.log.phases, "traceback": trace}
        return note_failure(self.folder, Failure.model_validate({"status": status, "reason": reason, **told}))

    def rescue(self) -> None:
        """Put away what was measured before a failure, or a signal, or both at once: that of rank 0."""
        with self._rescuing:
            if self.rank == 0 and not self.measured:
                self._so_far.rest(self._measuring, self._instruments)
            self.measured = True

    # -- after the window ----------------------------------------------------------------------------------------------

    @staticmethod
    def _look(task: Task, mine: RankSummary) -> None:
        """Note what has grown by now."""
        mine.host_memory, mine.damaged = CpuDevice().peak_memory(), task.damaged() if task.damaged is not None else {}

    def _keep(self, ranks: Ranks, task: Task, mine: RankSummary, run_began: float) -> tuple[list[RankSummary], tuple[float, float]]:
        """Put away what all ranks measured: whatever comes after the window may end one of them, and with it the others. Gives that on the
        rank that puts it away, and the time that this took. Collective."""
        began = time.monotonic()
        mine.flags += stopped(mine, self.resumed)
        if mine.epochs:  # every one of them was validated
            self._known.validation_loss = mine.epochs[-1].loss
        with self.log.phase("save"):
            everyone = gathered(ranks, mine, self._instruments, (run_began, began), last=False)
            everyone = everyone if ranks.rank == 0 else []
            with self._rescuing:
                self._put_away(everyone, validates=self.point.mode == "train", saves=task.save_to is not None)
                self.measured = True
                self._so_far.close(measured=(self.folder / MEASURED).exists())
        return everyone, (began, time.monotonic())

    def _put_away(self, everyone: list[RankSummary], *, validates: bool = False, saves: bool = False) -> None:
        """Put away, on rank 0, the record as it is by now, if the worker gets no further: without what is known at the end of the run."""
        if not everyone:
            return
        known = replace(self._known, runtime=time.monotonic() - self.origin, phases=self.log.phases)
        if validates:
            known.lack(NOT_DONE)
        record = make_record(everyone, known, table=False)
        update = {"reason": NOT_DONE, "metrics": record.metrics | unknown(TO_THE_END, NOT_DONE)}
        if saves:  # other points may need that
            update["status"] = "failed"
        put_away(self.folder, record.model_copy(update=update))

    def _validate_and_save(self, task: Task, device: torch.device, mine: RankSummary, ranks: Ranks) -> None:
        """Rank 0 validates and saves what was trained on real input; a checkpoint is everyone's. What fails becomes a reason."""
        together = self._divided is not None or task.save_to is not None
        if (self.rank != 0 and not together) or self.point.mode != "train":
            return
        if self._divided is not None and task.division is not None and task.division.tensor_plan is None:
            self._known.afterwards_failed = "what a library divides is not put together: neither validated nor saved"
            return
        # To compile a model anew, for evaluation and for a last batch that is smaller, would take longer than a few passes do.
        once = self.point.compile != "off" and not mine.epochs
        as_written = torch.compiler.set_stance("force_eager") if once else nullcontext()
        # A workload may raise anything, and so does what reads its held-out data.
        with self._as_reasons(Exception), self.log.phase("evaluate"), as_written:
            if not mine.epochs and self._divided is None:
                self._known.validation_loss = validation_loss(task, self.point.precision, device)
            if self.rank == 0:
                self._known.quality |= quality(task, self.point.precision, device, whole=bool(mine.epochs))
        # What is no OSError while all save together only one rank knows of: it ends, so that the others do not wait for it.
        with self._as_reasons(OSError if together and ranks.world > 1 else Exception), self.log.phase("save_model"):
            if together:
                from caraml.engine.parallel import checkpoint

                checkpoint.save(*self._parts(task), Path(task.save_to) if task.save_to else None, self.folder, ranks)
            else:
                save_model(task.model, self.folder)

    def _record(self, everyone: list[RankSummary]) -> Record:
        """The record, if need be without the table of steps."""
        with without_room():
            return make_record(everyone, self._known)
        return make_record(everyone, self._known, table=False)

    @staticmethod
    def _close(task: Task) -> None:
        """End what the task holds. What fails there, whatever a workload raises, costs no measurement: the log has it."""
        try:
            task.close()
        except Exception:  # noqa: BLE001
            traceback.print_exc()

    @property
    def where(self) -> str:
        """The phase in which something failed, and the plug-in whose work it is, in brackets."""
        plug_in = None
        with suppress(LookupError):  # it is not installed here
            plug_in = software_of(self.point.workload)
        whose = f" of plug-in {plug_in}" if plug_in else ""
        return f" (in phase {self.log.phases[-1].name}{whose})" if self.log.phases else ""

    @contextmanager
    def _as_reasons(self, kind: type[Exception]) -> Iterator[None]:
        """What fails after the window becomes the reason why something is not known."""
        try:
            yield
        except kind as error:
            self._known.lack(reason_of(error))

    def _traced(self, ranks: Ranks, task: Task, tracer: Tracer, step: Step, record: Record | None) -> Record | None:
        """Trace a few steps more, once what was measured is safe in a file; the record with what they show. Collective."""
        why = None
        if record is not None:
            why = None if put_away(self.folder, record) else "there was no room to put away first what was measured"
        ranks.barrier()
        why = "the batch system was about to end the job" if self._hurried else why
        profile, files = Profile(reason=why), dict[str, str]()
        if not ranks.agree(why is not None):
            for part in self._parts(task)[0]:
                part.train(self.point.mode != "inference")  # validation has left it in evaluation
            with self.log.phase("profile"):
                profile, files = tracer.run(step)
        if record is None:
            return None
        return record.model_copy(update={"profile": profile, "files": {**record.files, **files}, "phases": list(self.log.phases)})
