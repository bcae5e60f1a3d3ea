"""Measure a training loop of one's own as CARAML measures its own: ``with caraml.measure("my-model", item="image") as m: ... m.step(64)``.

The same loop measures it, with the same first step, warm-up, window, stop rule and energy as ``caraml run``, and the same record comes out.
The owner calls ``step`` at the end of each step. Under torchrun every rank does, once ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import json
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

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from caraml import __version__
from caraml.base.errors import InputError, is_out_of_memory
from caraml.base.files import new_folder_beside, write_new
from caraml.base.format import count, human, percent
from caraml.base.limits import COUNT, NAME
from caraml.base.processes import on_signals
from caraml.base.toml import checked, shown
from caraml.engine.device import CpuDevice
from caraml.engine.instruments import Instruments, quiet_baseline
from caraml.engine.loop import FEWEST_STEPS, Hooks, MeasuringLoop
from caraml.engine.ranks import LooseRanks, Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.metrics.model import Facts, Metric, Peak
from caraml.results.finish import now, reason_of
from caraml.results.record import Record, Status
from caraml.results.store import Store, write_record
from caraml.suite.model import COUNTED, NOT_STATED, OF_EPOCHS, OWN_LOOP, Point, Policy, Stated
from caraml.system.detect import detect, environment
from caraml.system.variables import PATIENCE, seconds_asked
from caraml.worker.place import RankPlace, device_in_use, place_of, ranks_in_use, results_folder
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
_MOST_FLOPS = 1e30
_PATIENCE, _LONG_STEPS = 60.0, 10
"""Seconds, and the fewest steps' time, that ranks whose loop has ended in its window or before wait for the others to leave theirs."""


class _Told(BaseModel):
    """What the arguments of ``measure`` may be."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=NAME)
    item: str = Field(min_length=1, max_length=NAME)
    params: dict[str, JsonValue] | None
    precision: Stated | None
    flops_per_item: float | None = Field(gt=0, lt=_MOST_FLOPS)
    parameters: int | None = Field(gt=0, le=COUNT)

    @field_validator("params")
    @classmethod
    def _tell_loops_apart(cls, params: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        """A record has no NaN: it would be read as null, and so would another."""
        for key, what in (("name", "the name of the loop"), (COUNTED, "the argument item")):
            if key in (params or {}):
                raise ValueError(f"another key than {key!r}, which has {what}")
        try:
            json.dumps(params, allow_nan=False)
        except ValueError:
            raise ValueError("finite numbers") from None
        return params


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
        self._patience = seconds_asked(PATIENCE, _PATIENCE)
        self._started_at, self._origin = now(), time.monotonic()
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
            return self._loop.step_ended(_NOTHING)

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
        elif error is not None:  # of several ranks, too, that measured: who would wait for the others may wait for ever
            self._fail("oom" if is_out_of_memory(error) else "failed", reason_of(error), alone=True)
        elif not self._loop.steps:
            self._fail("failed", "the loop ended without a step: call m.step(items) at the end of each")
        else:
            inside = len(self._loop.so_far().of_phase("after"))
            late = f", {inside} of them in its window: {FEWEST_STEPS} are needed there, or {FEWEST} before it"
            late = late if inside else f", which are too few; {_LATE}"
            self._fail("failed", f"the loop ended after {count(self._loop.steps, 'step')}{late}")

    # -- the record ----------------------------------------------------------------------------------------------------

    def _record_measurement(self) -> None:
        mine, ranks = self._loop.summary(), self._ranks
        run = (self._run_began, time.monotonic())
        mine.items = self._items
        # A peak that was there before is that of something earlier in the process.
        peaks = [now if now is not None and now > (before or 0) else None for now, before in zip(self._peaks(), self._before, strict=True)]
        mine.device_memory, mine.host_memory = peaks
        reported = self._peaks()[0] is not None
        with self._log.phase("idle_after"):
            self._device.synchronize()
            quiet_baseline(ranks, self._instruments, self._point.measure.idle_seconds)
        everyone = gathered(ranks, mine, self._instruments, run)
        first = next(index for index, row in enumerate(mine.rows) if row.phase == "measure")
        steps = [sum(items) for items in zip(*(rank.items[first : first + len(mine.window_rows)] for rank in everyone), strict=True)]
        point = self._of_batch(max(steps))
        missing = self._missing()
        if min(steps) < max(steps):
            missing["point.global_batch"] = f"steps had {min(steps):,} to {max(steps):,} {self._facts.item}s"
        folder, files = self._new_attempt(point) if ranks.rank == 0 else self._out, dict[str, str]()
        with suppress(OSError):  # the record is worth more than its readings
            files = write_readings(ranks, everyone, self._instruments, folder, self._origin)
        probed = Peak(value=None, dtype=point.precision, reason=_NO_PEAK)
        known = Known(folder, point, self._facts, self._origin, self._started_at, probed, files=files, tells_wait=False)
        known.runtime, known.phases = run[1] - run[0], self._log.phases
        try:
            if ranks.rank == 0:
                with _to_its_end():
                    self._write(everyone, known, missing, reported)
        finally:
            self._over = ranks.rank > 0
            ranks.barrier()  # where a rank fails on its way out, its launcher ends the one that writes the record
        if isinstance(ranks, LooseRanks):
            ranks.leave()

    def _write(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue], reported: bool) -> None:
        """As :meth:`_write_here`, or where there is room."""
        try:
            self._write_here(everyone, known, missing, reported)
        except OSError as error:
            self._move(error)
            full, known.folder = known.folder, self._new_attempt(known.point)
            for file in known.files.values():
                write_new(known.folder / file, (full / file).read_bytes())
            shutil.rmtree(full, ignore_errors=True)
            self._write_here(everyone, known, missing, reported)

    def _write_here(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue], reported: bool) -> None:
        """The record of all ranks; ``reported`` says whether the device tells its peak memory."""
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
        ranks = self._ranks
        if self.record is not None or self._over or (ranks.rank and not (alone and (self._out / "points").is_dir())):
            return
        with _to_its_end(), ranks.telling() if alone else nullcontext(ranks.rank == 0) as first:
            if first:
                self._keep_failure(status, reason if ranks.world == 1 or not alone else f"rank {ranks.rank}: {reason}")

    def _keep_failure(self, status: Status, reason: str) -> None:
        point = self._of_batch(1)
        folder, surroundings = self._new_attempt(point), environment()
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
    told = checked("caraml.measure", {**given, "parameters": parameters}, _Told)
    policy = _policy(policy)
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


def _policy(policy: Policy | None) -> Policy:
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise InputError(f"caraml.measure: policy: found {shown(policy)}", "policy=caraml.Policy(target=0.02)")
    epochs = [key for key in OF_EPOCHS if getattr(policy, key) is not None]
    if epochs:
        raise InputError(
            f"caraml.Policy: {', '.join(epochs)}: only for trainings of CARAML's own, which know what an epoch is", "leave it out"
        )
    return policy
