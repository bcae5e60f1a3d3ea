"""Measure a training loop of one's own as CARAML measures its own: ``with caraml.measure("my-model", item="image") as m: ... m.step(64)``.

The same loop measures it, with the same first step, warm-up, window, stop rule and energy as ``caraml run``, and the same record comes out.
The owner calls ``step`` at the end of each step. Under torchrun every rank does, once ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib import metadata
from numbers import Integral
from pathlib import Path

from pydantic import JsonValue

from caraml import __version__
from caraml.base.errors import InputError, is_out_of_memory
from caraml.base.files import new_folder_beside, write_new
from caraml.base.format import count, human, percent
from caraml.base.limits import COUNT
from caraml.base.processes import on_signals
from caraml.base.toml import checked, shown
from caraml.engine.device import CpuDevice
from caraml.engine.instruments import Instruments, quiet_baseline
from caraml.engine.loop import FEWEST_STEPS, Hooks, MeasuringLoop
from caraml.engine.ranks import LooseRanks, Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.metrics.model import Facts, Metric, Peak
from caraml.power.store import ROW
from caraml.results.finish import now, reason_of
from caraml.results.record import Record, Status
from caraml.results.rows import write_table
from caraml.results.store import Store, attempts, write_record
from caraml.suite.model import COUNTED, NOT_STATED, OWN_LOOP, Point, Policy, Stated
from caraml.system.detect import detect, environment
from caraml.system.variables import PATIENCE, seconds_asked
from caraml.worker.place import RankPlace, Told, device_in_use, place_of, policy_of, ranks_in_use, results_folder
from caraml.worker.record import Known, PhaseLog, gathered, make_record, rescued, write_readings

_NO_PEAK = "not measured beside a loop of one's own"
_NOTHING = StepOutcome(None, 0.0)
FEWEST = 2 * FEWEST_STEPS + 1
"""Steps of a loop that ends in its warm-up: the first, and as many again as are left out of the rest."""
_LATE = f"of one that ends in its warm-up the second half counts, so {FEWEST} are needed"
_UNSTATED = {
    **dict.fromkeys(
        ("compile", "knobs", "placement", "deterministic", "seed", "mode"), "the loop was not made by CARAML, which did not look"
    ),
    "micro_batch": "m.step() is told items, not samples",
}
"""Fields of a point that a loop of one's own leaves open, and why."""
_UNTOLD = {
    **dict.fromkeys(("loss_first", "loss_last"), "m.step() is told no loss"),
    **dict.fromkeys(("loss_validation", "saving_time"), "what the loop validates and saves is its own"),
    **dict.fromkeys(("achieved_flops_per_device", "mfu", "mfu_measured", "hfu"), "caraml.measure(flops_per_item=...) was not given"),
}
"""Metrics that nobody told the numbers of, and why; those of FLOPs only where none were given."""
_PATIENCE, _LONG_STEPS, _STUCK = 60.0, 10, 300.0
"""Seconds, and the fewest steps' time, that ranks whose loop has ended wait for the others to leave theirs; and seconds that ranks whose
loops go on wait for one that does not."""


class OwnLoop:
    """What ``caraml.measure`` gives the loop."""

    def __init__(self, point: Point, facts: Facts, out: Path, ranks: Ranks, place: RankPlace) -> None:
        self.record: Record | None = None
        """What came out, on rank 0 after the ``with`` block."""
        self._point, self._facts, self._out, self._ranks = point, facts, out, ranks
        self._device = device_in_use()
        self._before = self._peaks()
        self._items: list[int] = []
        self._process, self._one_at_a_time, self._ended = os.getpid(), threading.RLock(), False
        self._over = False
        """Whether this rank has nothing to tell any more: rank 0 writes the record."""
        self._closed: list[RankSummary] | None = None
        """What all ranks had measured when the window closed, and all were there: the end of the loop may never come on one."""
        self._tried = False
        self._kept: Path | None = None
        """Folder of a record that was written before the block ended."""
        self._patience = seconds_asked(PATIENCE, _PATIENCE)
        ranks.patience = seconds_asked(PATIENCE, _STUCK)
        next_attempt = max(attempts(out / "points" / point.folder_name), default=0) + 1
        self._left: float | None = None
        """When this rank left its loop."""
        self._started_at, self._origin = now(), time.monotonic()
        self._zero, self._next_attempt = ranks.gather([self._origin, next_attempt])[0]
        """Rank 0's zero of the record's times, and the attempt's number if no other loop of this name takes it meanwhile."""
        self._log = PhaseLog(self._origin, lambda phase: None)
        self._instruments: Instruments | None = None
        try:
            with self._log.phase("idle"):
                if place.leads:
                    self._instruments = Instruments(place.gpus, family=place.family)
                self._device.synchronize()
                quiet_baseline(ranks, self._instruments, point.measure.idle_seconds)
        except BaseException:  # Ctrl-C, say, where the program goes on, as in a notebook
            self._stop_reading()
            raise
        self._run_began = time.monotonic()
        edge = self._instruments.edge if self._instruments is not None else lambda: None
        self._loop = MeasuringLoop(self._device, ranks, point.measure, Hooks(phase=self._log.phase, edge=edge))
        self._loop.__enter__()

    @property
    def done(self) -> bool:
        """Whether the window is closed, or the block has ended: steps after it are not measured."""
        return self._loop.done or self._ended

    def step(self, items: int | None = None) -> bool:
        """A step has ended, with ``items`` items on this rank. False once enough was measured: the loop may then end, or go on."""
        if self.done:
            if not (self._tried or self._ended or self._ranks.rank):  # the loop goes on, to whatever end
                self._keep_while_it_goes_on()
            return False
        if not isinstance(items, Integral) or isinstance(items, bool) or not 1 <= items <= COUNT // self._ranks.world:
            hint = "m.step(len(batch)), or int(...) of a number that the host has"
            given = "" if items is None else shown(items)
            raise InputError(f"m.step({given}): expected a whole number of items above 0, {COUNT:.0e} at most", hint)
        if os.getpid() != self._process:
            raise InputError("m.step(): found a fork of the process that measures", "call it in the process that began the block")
        with self._one_at_a_time:  # of several threads each step counts, and ends the one before it
            if self.done:
                return False
            if not self._items and (now_on := device_in_use().torch_device) != self._device.torch_device:
                fault = f"caraml.measure: found a loop on {now_on}, and on {self._device.torch_device} when its block began"
                raise InputError(fault, "begin the block once the model is on its device: who times the steps is chosen then")
            self._items.append(int(items))
            self._ranks.steps = len(self._items)
            if not self._loop.step_ended(_NOTHING) and self._ranks.world > 1:
                self._closed = self._gathered(last=False)
            return not self._loop.done

    def finish(self, error: BaseException | None) -> None:
        """Close what is open and write the record. Collective, unless the loop failed."""
        if self._ended or os.getpid() != self._process:  # a fork of the process that measures leaves the block, too
            return
        try:
            self._finish(error)
        except BaseException as trouble:  # another rank ended elsewhere, or is gone
            with suppress(OSError):
                self._fail("failed", reason_of(trouble), alone=True)
            raise
        finally:
            self._ended = True
            self._stop_reading()

    def _stop_reading(self) -> None:
        if self._instruments is not None:
            self._instruments.meter.stop()

    def _finish(self, error: BaseException | None) -> None:
        if error is None and not self.done:
            mean = (time.monotonic() - self._run_began) / max(self._loop.steps, 1)
            self._ranks.ends(max(self._patience, _LONG_STEPS * mean) if self._patience else 0.0)
            self._loop.end()
        self._loop.__exit__()
        if self.done and (error is None or self._ranks.world == 1):
            self._record_measurement()
        elif self.done and self._closed is not None:  # without the others, who may never come
            self._keep_early()
        elif error is not None:
            self._fail("oom" if is_out_of_memory(error) else "failed", reason_of(error), alone=True)
        elif not self._loop.steps:
            self._fail("failed", "the loop ended without a step: call m.step(items) at the end of each")
        else:
            inside = len(self._loop.so_far().of_phase("after"))
            late = f", {inside} of them in its window: {FEWEST_STEPS} are needed there, or {FEWEST} before it"
            late = late if inside else f", which are too few; {_LATE}"
            self._fail("failed", f"the loop ended after {count(self._loop.steps, 'step')}{late}")

    # -- the record ----------------------------------------------------------------------------------------------------

    def _gathered(self, *, last: bool) -> list[RankSummary]:
        """What all ranks measured. Collective."""
        mine, run = self._loop.summary(), (self._run_began, time.monotonic() if self._left is None else self._left)
        mine.items = self._items
        # A peak that was there before is that of something earlier in the process.
        peaks = [now if now is not None and now > (before or 0) else None for now, before in zip(self._peaks(), self._before, strict=True)]
        mine.device_memory, mine.host_memory = peaks
        return gathered(self._ranks, mine, self._instruments, run, last=last)

    def _record_measurement(self) -> None:
        ranks, self._left = self._ranks, time.monotonic()
        with self._log.phase("idle_after"):
            self._meet_others()
            quiet_baseline(ranks, self._instruments, self._point.measure.idle_seconds)
        everyone = self._gathered(last=True)
        point, missing = self._of_steps(everyone)
        folder, files = self._out, dict[str, str]()
        if ranks.rank == 0:
            kept = self._kept or ranks.kept()
            folder = kept if kept is not None and kept.is_dir() else self._new_attempt(point)
        with suppress(OSError):  # the record is worth more than its readings
            files = write_readings(ranks, everyone, self._instruments, folder, self._origin)
        try:
            if ranks.rank == 0:
                with _to_its_end():
                    self._write(everyone, self._known(folder, point, files), missing)
        finally:
            self._over = ranks.rank > 0
            ranks.barrier()  # where a rank fails on its way out, its launcher ends the one that writes the record
        if isinstance(ranks, LooseRanks):
            ranks.leave()

    def _meet_others(self) -> None:
        """Wait for the device, and for the others to leave their loops; keep what was measured where one does not for a while."""
        if self._closed is None:
            self._device.synchronize()
            return
        waits = threading.Timer(self._patience or _PATIENCE, self._keep_while_it_goes_on, [True])
        waits.daemon = True
        waits.start()
        try:
            self._device.synchronize()
            self._ranks.ends(0.0)
        finally:
            waits.cancel()
            waits.join()

    def _keep_while_it_goes_on(self, waits: bool = False) -> None:
        """:meth:`_keep_early`, once, beside a loop that is not to end by that."""
        with self._one_at_a_time:
            if self._tried or os.getpid() != self._process:
                return
            self._tried = True
            try:
                self._keep_early()
            except Exception as error:  # noqa: BLE001 -- it is no fault of the loop
                _say(f"caraml: the record is not written yet: {reason_of(error)}; it is tried again at the end of the block")
        if waits:
            _say(f"caraml: rank {self._ranks.rank} waits for the other ranks to leave the block of {self._point.benchmark!r}")

    def _keep_early(self) -> None:
        """Write the record of a complete window before the end of the block, which may be a kill, or never come. Of several ranks the first
        that asks does."""
        ranks = self._ranks
        if self.record is not None or self._over:
            return
        everyone = self._closed or self._gathered(last=False)
        point, missing = self._of_steps(everyone)
        with self._to_record(point, alone=True) as folder:
            if folder is None:
                return
            files, name = dict[str, str](), "power"
            with suppress(Exception):  # the record is worth more than its readings
                if self._instruments is not None and self._instruments.meter.channels and not ranks.rank:
                    files[name] = write_table(folder, name, ROW, self._instruments.meter.rows(self._zero))
            known = self._known(folder, point, files)
            self._write(everyone, known, missing)
            self._kept = known.folder
            ranks.keep(known.folder)

    @contextmanager
    def _to_record(self, point: Point, *, alone: bool) -> Iterator[Path | None]:
        """A new attempt's folder, on the one rank that writes a record now; what it writes is written to its end."""
        ranks, folder = self._ranks, None
        if ranks.rank and not (alone and (self._out / "points").is_dir()):
            yield None
            return
        with _to_its_end(), ranks.telling() if alone else nullcontext(ranks.rank == 0) as first:
            if first is None:  # nobody can say any more which rank it is: the one that makes the attempt
                folder = Store(self._out).claim_attempt(point, point.folder_name, self._next_attempt)
            elif first:
                folder = self._new_attempt(point)
            yield folder

    def _of_steps(self, everyone: list[RankSummary]) -> tuple[Point, dict[str, JsonValue]]:
        """The point with the items of a step as its batch, and what nobody stated."""
        rows = everyone[0].rows
        first = next(index for index, row in enumerate(rows) if row.phase == "measure")
        window = len(everyone[0].window_rows)
        steps = [sum(items) for items in zip(*(rank.items[first : first + window] for rank in everyone), strict=True)]
        missing = self._missing()
        if min(steps) < max(steps):
            missing["point.global_batch"] = f"steps had {min(steps):,} to {max(steps):,} {self._facts.item}s"
        return self._of_batch(max(steps)), missing

    def _known(self, folder: Path, point: Point, files: dict[str, str]) -> Known:
        probed = Peak(value=None, dtype=point.precision, reason=_NO_PEAK)
        known = Known(folder, point, self._facts, self._zero, self._started_at, probed, files=files, tells_wait=False)
        known.runtime, known.phases = (self._left or time.monotonic()) - self._run_began, self._log.phases
        return known

    def _write(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue]) -> None:
        """As :meth:`_write_here`, or where there is room."""
        try:
            self._write_here(everyone, known, missing)
        except OSError as error:
            if known.folder == self._kept:  # what was written before stays
                _say(f"caraml: {known.folder}: {error.strerror or error}; its record is as it was when the window closed")
                return
            self._move(error)
            full, known.folder = known.folder, self._new_attempt(known.point)
            for file in known.files.values():
                write_new(known.folder / file, (full / file).read_bytes())
            shutil.rmtree(full, ignore_errors=True)
            self._write_here(everyone, known, missing)

    def _write_here(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue]) -> None:
        """The record of all ranks."""
        reported = self._peaks()[0] is not None  # the device tells its peak memory
        record = make_record(everyone, known)
        record.environment["missing"] = {**_table(record.environment.get("missing")), **missing}
        for name in ("peak_memory", "peak_host_memory"):
            if record.value(name) is None and (reported or name == "peak_host_memory"):
                record.metrics[name] = Metric(value=None, unit="B", reason="this process had used as much before the loop began")
        for name, reason in _UNTOLD.items():
            if record.value(name) is None and (name.startswith(("loss", "saving")) or self._facts.flops_per_item is None):
                record.metrics[name] = record.metrics[name].model_copy(update={"reason": reason})
        self._keep(record, known.folder)

    def _new_attempt(self, point: Point) -> Path:
        try:
            return Store(self._out).new_attempt(point)
        except OSError as error:
            self._move(error)
            return Store(self._out).new_attempt(point)

    def _move(self, error: OSError) -> None:
        """Give up the folder of the results for a temporary one: its disk is full, or it is gone, and nothing measured is to be lost."""
        made, given_up = new_folder_beside(Path(tempfile.gettempdir()) / "caraml-results", 0o700), self._out
        self._out = made.rename(made.with_name(made.name.removeprefix(".").removesuffix(".tmp")))  # as hard to guess, and not hidden
        _say(f"caraml: {given_up}: {error.strerror or error}; the record goes to {self._out}")

    def _fail(self, status: Status, reason: str, *, alone: bool = False) -> None:
        """Record a failure: of this rank ``alone`` the rank that fails first, since the others wait for it, and are ended with it."""
        ranks, point = self._ranks, self._of_batch(1)
        if self.record is not None or self._over:
            return
        if self.done and (self._closed is not None or ranks.world == 1):
            with suppress(Exception):  # else that it failed is to be told, at least
                self._keep_early()
                return
        with self._to_record(point, alone=alone) as folder:
            if folder is not None:
                self._keep_failure(point, folder, status, reason if ranks.world == 1 or not alone else f"rank {ranks.rank}: {reason}")

    def _keep_failure(self, point: Point, folder: Path, status: Status, reason: str) -> None:
        surroundings = environment()
        missing = {**_table(surroundings.get("missing")), **self._missing(), "point.global_batch": "the loop was not measured to its end"}
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
            environment={**surroundings, "missing": missing},
            files=rescued(folder, self._ranks.rank, self._loop, self._instruments, self._origin),
        )
        self._keep(record, folder)

    def _peaks(self) -> tuple[int | None, int | None]:
        """Highest memory of the device and of the process so far."""
        return self._device.peak_memory(), CpuDevice().peak_memory()

    def _missing(self) -> dict[str, JsonValue]:
        """What nobody said about the point, each with the reason."""
        unstated = dict(_UNSTATED)
        if self._point.precision == NOT_STATED:
            unstated["precision"] = "caraml.measure(precision=...) was not given"
        return {f"point.{name}": reason for name, reason in unstated.items()}

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
        _say(f"caraml: {record.point.benchmark}: {record.status}: {reason}; {folder / 'record.json'}")


@contextmanager
def measure(
    name: str,
    *,
    item: str = "item",
    params: dict[str, JsonValue] | None = None,
    precision: Stated | None = None,
    flops_per_item: float | None = None,
    parameters: int | None = None,
    out: str | Path | None = None,
    policy: Policy | None = None,
) -> Iterator[OwnLoop]:
    """Measure the loop inside the ``with`` block, and write its record when the block ends.

    Args:
        name: of the point, in tables.
        item: what ``m.step`` counts: ``"image"``, ``"token"`` ...
        params: whatever decides the speed (batch, width, ...): loops with equal name, item and params are repeats of one point.
        precision: arithmetic of the loop: ``fp32``, ``tf32``, ``bf16``, ``fp16``; not recorded without.
        flops_per_item: forward and backward FLOPs of an item, if known: gives FLOP/s.
        parameters: weights of the model, if known.
        out: folder of the results; default ``$CARAML_RESULTS``, else ``caraml-results``.
        policy: when warm-up and window end, as ``measure`` in suites.

    Raises:
        InputError: an argument is wrong; several ranks run, and ``torch.distributed`` is not initialised, or nodes have different numbers
            of ranks; the results cannot be written.
    """
    given = {"name": name, "item": item, "params": params, "precision": precision, "flops_per_item": flops_per_item}
    told = checked("caraml.measure", {**given, "parameters": parameters}, Told)
    policy = policy_of(policy)
    ranks = ranks_in_use()
    place = place_of(ranks)
    folder = results_folder(out, ranks)
    system = detect()
    point = Point(
        suite="own",
        benchmark=name,
        workload=OWN_LOOP,
        params={"name": name, COUNTED: item, **(told.params or {})},  # loops that count other things are no repeats of each other
        system=system.name,
        device=system.identity,
        device_class="cpu" if isinstance(device_in_use(), CpuDevice) else "gpu",
        software=f"caraml {__version__}, torch {metadata.version('torch')}",
        nodes=place.nodes,
        devices=ranks.world // place.nodes,
        global_batch=1,
        micro_batch=1,
        precision=told.precision or NOT_STATED,
        measure=policy,
    )
    formula = "as the loop's author gave it" if flops_per_item is not None else "not given"
    facts = Facts(item=item, items_per_sample=1, parameters=parameters, flops_per_item=flops_per_item, flops_formula=formula)
    loop = OwnLoop(point, facts, folder, ranks, place)
    try:
        yield loop
    except BaseException as error:
        loop.finish(error)
        raise
    loop.finish(None)


@contextmanager
def _to_its_end() -> Iterator[None]:
    """Let a record be written to its end: launchers end all ranks as soon as one has failed."""
    came: list[int] = []
    try:
        with on_signals((signal.SIGTERM,), came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed: that is no fault of the loop
        print(text, file=sys.stderr)


def _table(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}
