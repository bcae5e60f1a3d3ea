"""Measure a training loop of one's own as CARAML measures its own: ``with caraml.measure("my-model", item="image") as m: ... m.step(64)``.

The same loop measures it, with the same first step, warm-up, window, stop rule and energy as ``caraml run``, and the same record comes out.
The owner calls ``step`` at the end of each step. Under torchrun every rank does, once ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from importlib import metadata
from numbers import Integral
from pathlib import Path

from pydantic import JsonValue

from caraml.base.errors import CaramlError, InputError, is_out_of_memory
from caraml.base.format import count
from caraml.base.limits import COUNT
from caraml.base.signals import on_signals, on_termination
from caraml.base.toml import checked, shown
from caraml.engine.device import CpuDevice
from caraml.engine.instruments import Instruments, quiet_baseline
from caraml.engine.loop import FEWEST_STEPS, Hooks, MeasuringLoop
from caraml.engine.ranks import LooseRanks, Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.metrics.model import Facts, Phase
from caraml.results.finish import reason_of
from caraml.results.record import KILLED, Record, Status
from caraml.suite.model import COUNTED, NOT_STATED, OWN_LOOP, Point, Policy, Stated
from caraml.system.detect import detect
from caraml.system.variables import PATIENCE, seconds_asked
from caraml.worker.measure_record import LoopRecords, say, to_its_end
from caraml.worker.place import RankPlace, Told, device_in_use, place_of, policy_of, ranks_in_use, results_folder
from caraml.worker.record import gathered, readings_alone, stopped, write_readings
from caraml.worker.so_far import SoFar
from caraml.worker.together import Known
from caraml.workloads import computes_with

_NOTHING = StepOutcome(None, 0.0)
FEWEST = 2 * FEWEST_STEPS + 1
"""Steps of a loop that ends in its warm-up: the first, and as many again as are left out of the rest."""
_LATE = f"of one that ends in its warm-up the second half counts, so {FEWEST} are needed"
_BEHIND = 1.0
"""Seconds that other ranks leave rank 0 to begin with the record of ranks that are killed."""
_LEFT_OPEN = GeneratorExit("the program ended within the block")
_PATIENCE, _LONG_STEPS, _STUCK = 60.0, 10, 300.0
"""Seconds, and the fewest steps' time, that ranks whose loop has ended wait for the others to leave theirs; and seconds that ranks whose
loops go on wait for one that does not."""


class OwnLoop:
    """What ``caraml.measure`` gives the loop."""

    def __init__(self, point: Point, facts: Facts, out: Path, ranks: Ranks, place: RankPlace) -> None:
        self._point, self._ranks = point, ranks
        self._device = device_in_use()
        self._before = self._peaks()
        self._items: list[int] = []
        self._process, self._one_at_a_time, self._ended = os.getpid(), threading.RLock(), False
        self._writing = threading.RLock()
        """Held where a record is written: the loop may end, a thread of it go on, and a signal end the process, all at once."""
        self._over = False
        """Whether this rank has nothing to tell any more: rank 0 writes the record."""
        self._closed: list[RankSummary] | None = None
        """What all ranks had measured when the window closed, and all were there: the end of the loop may never come on one."""
        self._tried = False
        self._patience = seconds_asked(PATIENCE, _PATIENCE)
        ranks.patience = seconds_asked(PATIENCE, _STUCK)
        self._left: float | None = None
        """When this rank left its loop."""
        self._told: tuple[float, list[Phase]] = 0.0, []
        """Seconds since the loop began, and its phases, when the ranks last told each other what they had measured."""
        self._records = LoopRecords(point, facts, out, ranks)
        self._log = self._records.log
        self._so_far = SoFar(self._records.begun, ranks.rank, self._log, self._records.started_at)
        self._instruments: Instruments | None = None
        edge = lambda: self._instruments is None or self._instruments.edge()  # noqa: E731
        hooks = Hooks(phase=self._log.phase, edge=edge)
        if not ranks.rank:
            hooks.meanwhile = lambda: self._so_far.look(self._loop, self._instruments)
        self._loop = MeasuringLoop(self._device, ranks, point.measure, hooks)
        self._until_ended = ExitStack()
        self._until_ended.enter_context(on_termination(self._keep_before_killed))
        self._resumed: list[float] = []
        self._until_ended.enter_context(on_signals((signal.SIGCONT,), lambda number: self._resumed.append(time.monotonic())))
        atexit.register(self.finish, _LEFT_OPEN)  # no thread can be started later on
        self._until_ended.callback(atexit.unregister, self.finish)
        try:
            with self._log.phase("idle"):
                if not ranks.rank:
                    self._records.begin()
                if place.leads:
                    self._instruments = Instruments(place.gpus, family=place.family)
                    self._until_ended.callback(self._instruments.meter.stop)
                self._device.synchronize()
                quiet_baseline(ranks, self._instruments, point.measure.idle_seconds)
            self._run_began = time.monotonic()
            self._loop.__enter__()
        except BaseException as error:  # Ctrl-C, say, where the program goes on, as in a notebook
            with self._until_ended, suppress(Exception):  # the error is what is to be told
                if not isinstance(error, CaramlError):  # of what was asked for, before anything was measured
                    self._fail("failed", reason_of(error), alone=True)
            raise

    @property
    def record(self) -> Record | None:
        """What came out, on rank 0 after the ``with`` block."""
        return self._records.record

    @property
    def done(self) -> bool:
        """Whether the window is closed, or the block has ended: steps after it are not measured."""
        return self._loop.done or self._ended

    def step(self, items: int | None = None) -> bool:
        """A step has ended, with ``items`` items on this rank. False once enough was measured: the loop may then end, or go on."""
        if self.done:
            if not (self._tried or self._ended or self._ranks.rank):  # the loop goes on, to whatever end
                with self._one_at_a_time:  # once a thread whose step closed the window has heard what all ranks measured
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
        """Close what is open and write the record. Collective, unless the loop failed. A generator around the block has not failed where it
        is asked for nothing more; on several ranks nobody knows whether the others' are."""
        if self._ended or os.getpid() != self._process:  # a fork of the process that measures leaves the block, too
            return
        try:
            self._finish(None if isinstance(error, GeneratorExit) and self._ranks.world == 1 else error)
        except BaseException as trouble:  # another rank ended elsewhere, or is gone
            with suppress(OSError):
                self._fail("failed", reason_of(trouble), alone=True)
            raise
        finally:
            self._ended = True
            self._until_ended.close()

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            with self._one_at_a_time:  # once a thread whose step closes the window has heard what all ranks measured
                self._end_loop()
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

    def _end_loop(self) -> None:
        if not self.done:
            mean = (time.monotonic() - self._run_began) / max(self._loop.steps, 1)
            self._ranks.ends(max(self._patience, _LONG_STEPS * mean) if self._patience else 0.0)
            self._loop.end()

    # -- the record ----------------------------------------------------------------------------------------------------

    def _gathered(self, *, last: bool) -> list[RankSummary]:
        """What all ranks measured. Collective."""
        mine, run = self._loop.summary(), (self._run_began, time.monotonic() if self._left is None else self._left)
        row = mine.rows[-1]  # after the window where that is the second half of the warm-up
        over = max(mine.end, row.start + row.seconds) - self._log.origin  # what the loop does after that is no part of its phases
        loop, idle = ([one for one in self._log.so_far if (one.name == "idle_after") == after] for after in (False, True))
        self._told = run[1] - run[0], [one.model_copy(update={"end": min(one.end, over)}) for one in loop if one.start < over] + idle
        mine.items, mine.flags = self._items, [*mine.flags, *stopped(mine, self._resumed)]
        # A peak that was there before is that of something earlier in the process.
        peaks = [now if now is not None and now > (before or 0) else None for now, before in zip(self._peaks(), self._before, strict=True)]
        mine.device_memory, mine.host_memory = peaks
        return gathered(self._ranks, mine, self._instruments, run, last=last)

    def _record_measurement(self) -> None:
        ranks, self._left = self._ranks, time.monotonic()
        if ranks.world == 1 and not self._tried:  # of several ranks, those that live on keep it
            self._keep_while_it_goes_on()
        else:
            self._records.told = ""  # long ago, maybe
        with self._log.phase("idle_after"):
            if not self._meet_others():
                self._leave_alone()
                return
            with self._writing:  # of a thread that still steps nothing is written beside the last word
                self._tried = True
            quiet_baseline(ranks, self._instruments, self._point.measure.idle_seconds)
        everyone = self._gathered(last=True)
        alone = ranks.world == 1  # else one that is gone may be waited for
        with self._writing if alone else nullcontext(), to_its_end() if alone else nullcontext():
            self._write_last(everyone)
        if isinstance(ranks, LooseRanks):
            ranks.leave()

    def _write_last(self, everyone: list[RankSummary]) -> None:
        """Write the record, with its readings. Collective."""
        ranks = self._ranks
        point, missing = self._records.of_steps(everyone)
        folder, files = self._records.out, dict[str, str]()
        if ranks.rank == 0:
            with self._writing:
                folder = self._records.kept() or self._records.new_attempt(point)
        with suppress(OSError):  # the record is worth more than its readings
            files = write_readings(ranks, everyone, self._instruments, folder, self._log.origin)
        try:
            if ranks.rank == 0:
                with self._writing, to_its_end():
                    self._write(everyone, self._records.known(folder, point, files, *self._told), missing)
        finally:
            self._over = ranks.rank > 0
            ranks.barrier()  # where a rank fails on its way out, its launcher ends the one that writes the record

    def _leave_alone(self) -> None:
        """Another rank does not leave its loop, or has left without this one: the record is as it was when the window closed."""
        ranks = self._ranks
        self._keep_early()
        if self._records.read_kept() is None and not ranks.rank:  # it is on another node's disk
            with self._writing:
                self._write_early(alone=False)
        self._over = self.record is None
        ranks.leave()
        say(f"caraml: rank {ranks.rank} leaves the block of {self._point.benchmark!r} without others, with no idle baseline after it")

    def _meet_others(self) -> bool:
        """Wait for the device, and for the others to leave their loops, and whether they did; keep what was measured where one does not for
        a while."""
        if self._closed is None:
            self._device.synchronize()
            return True
        waits = threading.Timer(self._patience or _PATIENCE, self._keep_while_it_goes_on, [True])
        waits.daemon = True
        waits.start()
        try:
            self._device.synchronize()
            return self._ranks.leave_together()
        finally:
            waits.cancel()
            waits.join()

    def _keep_while_it_goes_on(self, waits: bool = False) -> None:
        """:meth:`_keep_early`, once, beside a loop that is not to end by that."""
        with self._writing:
            if self._tried or os.getpid() != self._process:
                return
            self._tried = True
            try:
                self._keep_early()
            except Exception as error:  # noqa: BLE001 -- it is no fault of the loop
                say(f"caraml: the record is not written yet: {reason_of(error)}; it is tried again at the end of the block")
        if waits:
            say(f"caraml: rank {self._ranks.rank} waits for the other ranks to leave the block of {self._point.benchmark!r}")

    def _keep_early(self) -> None:
        """Write the record of a complete window before the end of the block, which may be a kill, or never come. Of several ranks the first
        that asks does."""
        with self._writing:
            if self.record is None and not self._over:
                self._write_early()

    def _write_early(self, *, alone: bool = True) -> None:
        ranks = self._ranks
        everyone = self._closed or self._gathered(last=False)
        point, missing = self._records.of_steps(everyone)
        with self._records.to_record(point, alone=alone) as folder:
            if folder is None:
                return
            files = readings_alone(folder, None if ranks.rank else self._instruments, self._records.zero)
            known = self._records.known(folder, point, files, *self._told)
            self._write(everyone, known, missing)
            self._records.early = known.folder
            ranks.keep(int(known.folder.name))

    def _write(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue]) -> None:
        self._so_far.close()
        self._records.write(everyone, known, missing, reported=self._peaks()[0] is not None)

    def _fail(self, status: Status, reason: str, *, alone: bool = False) -> None:
        """Record a failure: of this rank ``alone`` the rank that fails first, since the others wait for it, and are ended with it."""
        ranks = self._ranks
        with self._writing, to_its_end():
            if self.record is not None or self._over:
                return
            if self.done and (self._closed is not None or ranks.world == 1):
                with suppress(Exception):  # else that it failed is to be told, at least
                    self._keep_early()
                    return
            with self._records.to_record(self._records.of_batch(1), alone=alone) as folder:
                if folder is not None:
                    self._so_far.rest(self._loop, self._instruments, folder)
                    self._records.keep_failure(folder, status, reason if ranks.world == 1 or not alone else f"rank {ranks.rank}: {reason}")

    def _keep_before_killed(self, number: int) -> None:
        """Record what was measured so far: a signal is to end this process, in whose main thread anything may go on."""
        if self._ended or os.getpid() != self._process:
            return
        if self._ranks.rank:  # rank 0, which has the sensors, comes first where the signal is for all
            time.sleep(_BEHIND)
        where = f"{KILLED}{signal.Signals(number).name} in phase {self._log.current}, after {count(self._loop.steps, 'step')}"
        self._fail("failed", where, alone=True)

    def _peaks(self) -> tuple[int | None, int | None]:
        """Highest memory of the device and of the process so far."""
        return self._device.peak_memory(), CpuDevice().peak_memory()


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
        software=computes_with(metadata.version("torch")),
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
