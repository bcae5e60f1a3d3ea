"""The record of a training loop of a user's own: what nobody told of it, and where it goes, whatever happens to the loop."""

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
from pathlib import Path

from pydantic import JsonValue

from caraml.base.errors import InputError
from caraml.base.files import flush, make_folder, names_now, new_folder_beside, owned, there, touch, write_file, write_new
from caraml.base.format import human, percent
from caraml.base.limits import tail
from caraml.base.signals import on_signals
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary
from caraml.metrics.model import Facts, Metric, Peak, Phase
from caraml.results.claim import BEAT_SECONDS, CLAIM, alive, holder, myself, recent, take_over, young
from caraml.results.finish import MEASURED, finish, make_tables, now, tidy
from caraml.results.journal import of_ranks
from caraml.results.record import KILLED, Record, Status
from caraml.results.store import POINT, RECORD, Store, attempts, read_record, write_record
from caraml.suite.model import NOT_STATED, OWN_LOOP, Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.worker.record import PhaseLog, make_record
from caraml.worker.together import Known

_NO_PEAK = "not measured beside a loop of one's own"
_NOT_TOLD = "the loop does not say how long it waited for its input"
_UNSTATED = {
    **dict.fromkeys(
        ("compile", "knobs", "placement", "deterministic", "seed", "mode"), "the loop was not made by CARAML, which did not look"
    ),
    "micro_batch": "m.step() is told items, not samples",
}
"""Fields of a point that a loop of one's own leaves open, and why."""
_OPEN = "open"
"""Folder of the results with a file for each loop that is measured: there may be very many results."""
_OUTRIGHT = f"{KILLED}SIGKILL or a crash, or lost with its node"
"""Why a loop has no record but what it had put away."""
_UNTOLD = {
    **dict.fromkeys(("loss_first", "loss_last"), "m.step() is told no loss"),
    **dict.fromkeys(("loss_validation", "saving_time"), "what the loop validates and saves is its own"),
    **dict.fromkeys(("achieved_flops_per_device", "mfu", "mfu_measured", "hfu"), "caraml.measure(flops_per_item=...) was not given"),
}
"""Metrics that nobody told the numbers of, and why; those of FLOPs only where none were given."""


class LoopRecords:
    """Writes the records of one such loop, whose phases are in ``log``; the times of its records count from ``zero``."""

    def __init__(self, point: Point, facts: Facts, out: Path, ranks: Ranks) -> None:
        self.record: Record | None = None
        """What came out, on the rank that wrote it."""
        self.early: Path | None = None
        """Folder of a record that was written before the block ended."""
        self._made: Path | None = None
        """The attempt that this rank made, whether or not its record is written yet."""
        self._making = threading.RLock()
        self._killed: Record | None = None
        """What is left of the loop if it is killed outright, besides what it has put away."""
        self._point, self._facts, self._ranks, self.out = point, facts, ranks, out
        self.told = ""
        """What was said last of the record: nothing is said twice in a row."""
        if not ranks.rank:
            record_killed(out)
        ranks.barrier()  # those records are no part of this loop, and clocks of several nodes do not compare: zero is now on all ranks
        self.log, self.started_at = PhaseLog(time.monotonic(), lambda phase: None), now()
        next_attempt = max(attempts(out / "points" / point.folder_name), default=0) + 1
        self.zero, self._next_attempt, self._rank_0 = ranks.gather([self.log.origin, next_attempt, str(myself())])[0]
        """Rank 0's zero of the record's times; the attempt's number if no other loop of this name takes it meanwhile; and its claim."""

    @contextmanager
    def to_record(self, point: Point, *, alone: bool) -> Iterator[Path | None]:
        """A new attempt's folder, on the one rank that writes a record now; what it writes is written to its end."""
        ranks, folder = self._ranks, None
        if ranks.rank and not (alone and (self.out / "points").is_dir()):
            yield None
            return
        with to_its_end(), ranks.telling() if alone else nullcontext(ranks.rank == 0) as first:
            if first is None:  # nobody can say any more which rank it is: the one that makes the attempt
                begun = self._made or self._begun_by_rank_0()
                if begun is None:
                    folder = Store(self.out).claim_attempt(point, point.folder_name, self._next_attempt)
                elif take_over(begun, 1, myself()):
                    folder = begun
                    _stay_on(begun / f"{CLAIM}2")
            elif first:
                folder = self.new_attempt(point)
            yield folder

    def of_steps(self, everyone: list[RankSummary]) -> tuple[Point, dict[str, JsonValue]]:
        """The point with the items of a step as its batch, and what nobody stated."""
        rows = everyone[0].rows
        first = next(index for index, row in enumerate(rows) if row.phase == "measure")
        window = len(everyone[0].window_rows)
        steps = [sum(items) for items in zip(*(rank.items[first : first + window] for rank in everyone), strict=True)]
        missing = self._missing()
        if min(steps) < max(steps):
            missing["point.global_batch"] = f"steps had {min(steps):,} to {max(steps):,} {self._facts.item}s"
        return self.of_batch(max(steps)), missing

    def known(self, folder: Path, point: Point, files: dict[str, str], runtime: float, phases: list[Phase]) -> Known:
        """What a record in ``folder`` says besides what the ranks measured; ``runtime`` in seconds, with its ``phases``."""
        facts, began, peak = self._facts, self.started_at, Peak(value=None, dtype=point.precision, reason=_NO_PEAK)
        return Known(folder, point, facts, self.zero, began, peak, runtime=runtime, phases=phases, files=files, no_wait=_NOT_TOLD)

    def write(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue], reported: bool) -> None:
        """The record of all ranks, in the folder that ``known`` names, or where there is room; ``reported`` says whether the device tells
        its peak memory."""
        try:
            self._write_here(everyone, known, missing, reported)
        except OSError as error:
            if known.folder == self.early:  # what was written before stays
                self.read_kept()  # by another rank, maybe
                say(f"caraml: {known.folder}: {error.strerror or error}; its record is as it was when the window closed")
                return
            self._move(error)
            full, known.folder = known.folder, self.new_attempt(known.point)
            for file in known.files.values():
                write_new(known.folder / file, (full / file).read_bytes())
            shutil.rmtree(full, ignore_errors=True)
            self._write_here(everyone, known, missing, reported)

    def _write_here(self, everyone: list[RankSummary], known: Known, missing: dict[str, JsonValue], reported: bool) -> None:
        record = make_record(everyone, known)
        record.environment["missing"] = {**_table(record.environment.get("missing")), **missing}
        for name in ("peak_memory", "peak_host_memory"):
            if record.value(name) is None and (reported or name == "peak_host_memory"):
                record.metrics[name] = Metric(value=None, unit="B", reason="this process had used as much before the loop began")
        for name, reason in _UNTOLD.items():
            if record.value(name) is None and (name.startswith(("loss", "saving")) or self._facts.flops_per_item is None):
                record.metrics[name] = record.metrics[name].model_copy(update={"reason": reason})
        self._keep(record, known.folder)

    def kept(self) -> Path | None:
        """Folder of the record that a rank wrote before the block ended. Where nodes share no disk, what has its name here is older."""
        if self.early is None and (number := self._ranks.kept()) is not None and number >= self._next_attempt:
            self.early = self.out / "points" / self._point.folder_name / str(number)
        if self.early is not None and not self.early.is_dir():
            self.early = None
        return self.early

    def read_kept(self) -> Record | None:
        """The record that another rank wrote before the block ended, where it can be read here."""
        with suppress(InputError, OSError):
            self.record = self.record or (read_record(kept / RECORD) if (kept := self.kept()) is not None else None)
        return self.record

    def new_attempt(self, point: Point) -> Path:
        """A folder for the record of this loop, where there is room: the one that was made for it before, if it was not written then."""
        with self._making:
            self._made = self._made or self._begun_by_rank_0()
            if self._made is None or not self._made.is_dir():  # somebody has removed it
                try:
                    self._made = Store(self.out).new_attempt(point)
                except OSError as error:
                    self._move(error)
                    self._made = Store(self.out).new_attempt(point)
            return self._made

    def begin(self) -> None:
        """Look up what a record says of a loop that is killed outright, before it is measured."""
        self._killed = self._failure("failed", _OUTRIGHT)

    def begun(self) -> Path:
        """The attempt's folder, made while the loop is measured. Raises ``OSError`` where it cannot be, which the loop's end sees to."""
        with self._making:
            if self._made is None:
                assert self._killed is not None
                point, files = self._killed.point, {f"{CLAIM}1": str(myself()), MEASURED: self._killed.model_dump_json()}
                files[POINT] = point.model_dump_json(indent=1)

                def marked(attempt: Path) -> dict[str, str]:  # before it is there: an attempt without a mark has a record from nobody
                    with suppress(OSError):
                        make_folder(self.out / _OPEN)
                        touch(_mark(attempt))
                    return files

                self._made = Store(self.out).new_attempt(point, marked)
                _stay_on(self._made / f"{CLAIM}1")
                with suppress(OSError):
                    for name in files:  # after a power cut they are as whole as what is put away beside them
                        flush(self._made / name)
            return self._made

    def _begun_by_rank_0(self) -> Path | None:
        """The attempt that rank 0 made while the loop was measured, if it is to be seen here and has no record yet."""
        point = self.out / "points" / self._point.folder_name
        with suppress(OSError):  # it was made on another node, after this one had looked
            if self._ranks.rank and there(point):
                names_now(point)
        made = (point / str(number) for number in attempts(point) if number >= self._next_attempt) if self._ranks.rank else ()
        return next((one for one in made if owned(one) and not (one / RECORD).exists() and str(holder(one)[1]) == self._rank_0), None)

    def _move(self, error: OSError) -> None:
        """Give up the folder of the results for a temporary one: its disk is full, or it is gone, and nothing measured is to be lost."""
        made, given_up = new_folder_beside(Path(tempfile.gettempdir()) / "caraml-results", 0o700), self.out
        self.out = made.rename(made.with_name(made.name.removeprefix(".").removesuffix(".tmp")))  # as hard to guess, and not hidden
        self._made = None
        say(f"caraml: {given_up}: {error.strerror or error}; the record goes to {self.out}")

    def keep_failure(self, folder: Path, status: Status, reason: str) -> None:
        """Write the record of a loop that failed into an attempt's ``folder``, with tables of what was put away there."""
        record, files, made = self._failure(status, reason).model_copy(update={"attempt": int(folder.name)}), dict[str, str](), False
        with suppress(Exception):
            write_file(folder / MEASURED, record.model_dump_json())  # for :func:`record_killed`: tables of a day take minutes
            made = make_tables(folder, files)
        self._keep(record.model_copy(update={"files": files}), folder, tables=made)

    def _failure(self, status: Status, reason: str) -> Record:
        surroundings, point = environment(), self.of_batch(1)
        missing = {**_table(surroundings.get("missing")), **self._missing(), "point.global_batch": "the loop was not measured to its end"}
        return Record(
            key=point.key,
            attempt=1,
            point=point,
            status=status,
            reason=reason,
            started_at=self.started_at,
            phases=self.log.so_far,
            facts=self._facts,
            system=detect().model_dump(mode="json"),
            environment={**surroundings, "missing": missing},
        )

    def _missing(self) -> dict[str, JsonValue]:
        """What nobody said about the point, each with the reason."""
        unstated = dict(_UNSTATED)
        if self._point.precision == NOT_STATED:
            unstated["precision"] = "caraml.measure(precision=...) was not given"
        return {f"point.{name}": reason for name, reason in unstated.items()}

    def of_batch(self, batch: int) -> Point:
        """The point with so many items in a step."""
        world = self._point.world
        return self._point.model_copy(update={"global_batch": max(batch, world), "micro_batch": max(batch // world, 1)})

    def _keep(self, record: Record, folder: Path, *, tables: bool = True) -> None:
        write_record(folder, record)
        (folder / MEASURED).unlink(missing_ok=True)
        if tables:
            tidy(folder)
        with suppress(OSError):
            _mark(folder).unlink()
        self.record = record
        reason, rate = record.reason, record.metrics.get("throughput")
        if rate is not None and rate.value is not None:
            near = f" ± {percent((rate.high - rate.low) / 2 / rate.value, 2)}" if rate.low is not None and rate.high is not None else ""
            reason = f"{human(rate.value, rate.unit)}{near}" + (f" ({', '.join(record.flags)})" if record.flags else "")
        told, self.told = self.told, f"caraml: {record.point.benchmark}: {record.status}: {reason}; {folder / 'record.json'}"
        if self.told != told:
            say(self.told)


def _mark(attempt: Path) -> Path:
    """The file that is there while an attempt has no record."""
    return attempt.parents[2] / _OPEN / f"{attempt.parent.name}.{attempt.name}"


def _stay_on(claim: Path) -> None:
    """Touch a claim until its attempt has a record, however long a step or a table takes: by that alone other hosts know that its process
    lives. Where the attempt was removed, and its number is another loop's by now, that is not its business any more."""

    def stay() -> None:
        while not os.path.exists(claim.parent / RECORD):  # noqa: PTH110 -- raises nothing where a disk is away
            try:
                if tail(claim) != str(myself()):
                    return
                os.utime(claim, follow_symlinks=False)
            except FileNotFoundError:
                return
            except OSError:
                pass
            time.sleep(BEAT_SECONDS)

    with suppress(RuntimeError):  # the limit of memory leaves no room for its stack
        threading.Thread(target=stay, name="claim", daemon=True).start()


def record_killed(out: Path) -> None:
    """Write the records of earlier loops that were killed, of what they had put away: nobody else looks after them. Of several loops that
    begin at once, one does."""
    for mark in (out / _OPEN).glob(f"{OWN_LOOP}-*.*"):
        with suppress(Exception):  # of a store that cannot be written, say: it is no fault of the loop that begins
            attempt = out / "points" / mark.stem / mark.suffix[1:]
            if not attempt.is_dir() and young(mark):  # it is made just now, or not to be seen here yet
                continue
            if attempt.is_dir() and not there(attempt / RECORD):
                if not owned(attempt) or attempt.resolve().parents[2] != out.resolve():  # there by a link
                    continue
                number, owner = holder(attempt)
                if alive(owner, out) if owner is not None and owner.place == myself().place else recent(attempt):
                    continue
                left, size = read_record(attempt / MEASURED), sum(path.stat().st_size for path in of_ranks(attempt))
                mine = attempt / f"{CLAIM}{number + 1}"
                write_new(mine, str(myself()))  # raises where another loop was faster
                say(f"caraml: an earlier loop was killed; its record is made first, of {size / 1e6:.0f} MB: {attempt / RECORD}")
                _stay_on(mine)
                finish(attempt, 1, left.status, left.reason)
            mark.unlink()


@contextmanager
def to_its_end() -> Iterator[None]:
    """Let a record be written to its end: launchers end all ranks as soon as one has failed."""
    came: list[int] = []
    try:
        with on_signals((signal.SIGTERM,), came.append):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


def say(text: str) -> None:
    """Tell the user of the loop, on stderr."""
    with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed: that is no fault of the loop
        print(text, file=sys.stderr)


def _table(value: JsonValue) -> dict[str, JsonValue]:
    return value if isinstance(value, dict) else {}
