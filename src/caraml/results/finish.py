"""The record of a point whose worker did not write one.

A worker that fails leaves ``failure.json``; one that was killed leaves nothing. Either way the attempt ends with a whole record that says
what happened. Runs as ``python -m caraml.results.finish FOLDER EXIT_CODE [STATUS REASON]`` at the end of a point's script, or from a
campaign.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter, ValidationError

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError, in_a_line
from caraml.base.files import cache_home, make_folder, there, write_file, write_once
from caraml.base.limits import read_json
from caraml.base.limits import tail as tail_of
from caraml.base.toml import FrozenModel
from caraml.metrics.model import Phase
from caraml.results import journal
from caraml.results.claim import LOG
from caraml.results.record import Profile, Record, Status
from caraml.results.store import JOURNAL, RECORD, ROOM, record_of, write_record
from caraml.suite.model import Point
from caraml.system.files import read_int
from caraml.system.host import oom_kills
from caraml.system.variables import forget

FAILURE = "failure.json"
MEASURED = "measured.json"
"""The record of a worker that has measured and still validates, saves or traces: the attempt's, if the worker ends before it is done."""
NOT_DONE = "the worker ended before it was done"
"""Why such a record is not whole."""
_OOM_KILLS = ".oom_kills"
_WAS_KILLED = {code for number in (signal.SIGKILL, signal.SIGTERM) for code in (-number, 128 + number)}
_STARVED = "the kernel killed a process of the point: the host memory that it may use was full"
_ROOM_BYTES, _ROOM_OF_RANK = 128 << 10, 8 << 10
"""Several times what records take: of one rank 30 kB."""
_TAIL_LINES = 3
_ENDED_FIRST = re.compile(r"^srun: error: (\S+): (tasks? [\d,-]+): (?!Terminated|Exited with exit code 143$)(.+)$", re.MULTILINE)
"""What srun says of a task that has ended in another way than it should, after which Slurm ends those that are left: by SIGTERM, which is
143 of what starts several ranks, and of Podman."""
_OF_SLURM = ("srun: ", "slurmstepd-")
_LONGEST_REASON = 400
_TABLES = (".parquet", ".csv")


class Failure(FrozenModel):
    """Why a worker stopped, written by the first rank that did."""

    status: Status
    reason: str
    rank: int
    started_at: str
    phases: list[Phase] = Field([])
    traceback: str | None = None


def note_failure(folder: Path, failure: Failure) -> bool:
    """Leave a failure behind, unless another rank was first: the first cause is the one that matters. Whether this was it."""
    # What another node has written a moment ago may not be seen here yet.
    return not (folder / FAILURE).exists() and write_once(folder / FAILURE, failure.model_dump_json(indent=1))


def reason_of(error: BaseException) -> str:
    """One line for tables, with the error behind it: some libraries say there what happened, and above it only that something did."""
    if isinstance(error, CaramlError):
        words = error.line
    else:
        behind = f", because {type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ is not None else ""
        words = f"{type(error).__name__}: {error}".removesuffix(": ") + behind
    words, step, hint = " ".join(words.split()).partition("; next step: ")  # which is kept of what is too long: the log has the rest
    return (words[: max(_LONGEST_REASON - len(step + hint), _LONGEST_REASON // 2)] + step + hint)[:_LONGEST_REASON]


def now(ago: float = 0.0) -> str:
    """The wall clock, as it is or was some seconds ``ago``, in ISO 8601 with offset."""
    return (datetime.now(UTC) - timedelta(seconds=ago)).astimezone().isoformat(timespec="milliseconds")


def finish(folder: Path, exit_code: int, status: Status | None = None, reason: str | None = None) -> None:
    """Write the record of an attempt that has none yet. ``status`` and ``reason``, when given, are the launcher's word and go first."""
    if there(folder / RECORD):
        (folder / MEASURED).unlink(missing_ok=True)  # the worker was killed between the two; a journal without tables yet stays
        return
    try:
        point = Point.model_validate_json(read_json(folder / "point.json"))
    except ValidationError as error:
        raise InputError(f"{folder / 'point.json'}: not a point: {in_a_line(error)}") from error
    failure = None
    with suppress(FileNotFoundError, ValidationError):  # a damaged one is as good as none
        failure = Failure.model_validate_json(read_json(folder / FAILURE))
    before, count = read_int(folder / _OOM_KILLS), oom_kills()
    # What other ranks say of one that was killed is that it does not answer; those of other nodes may be killed for what one says.
    told = failure if exit_code not in _WAS_KILLED or point.nodes > 1 or (failure and failure.status != "failed") else None
    starved = told is None and before is not None and count is not None and count > before
    why = reason or (told.reason if told else _STARVED if starved else death(folder, exit_code))
    how = status or (told.status if told else "oom" if starved else "failed")
    left, phases = _put_away_by(folder)
    files = {name: file.name for name in ("steps", "power") for file in sorted(folder.glob(f"{name}.*")) if file.suffix in _TABLES}
    record = record_of(folder / MEASURED) if (folder / MEASURED).exists() else None
    if record is not None and record.unreadable:  # of a job that has another CARAML, say
        why, record = f"{why}; {record.reason}", None
    if record is not None and record.window is not None:
        update = {
            "status": how if record.status == "failed" else record.status,  # as if nothing was measured: something was not saved
            "reason": record.reason and f"{record.reason}: {why}",
            "profile": Profile(reason=why) if point.profile else None,
            "traceback": failure and failure.traceback,
            "files": {**files, **record.files},
        }
        write_record(folder, record.model_copy(update=update))
        tidy(folder)
        return
    has_tables = make_tables(folder, files)
    if phases and not left.get("whole"):
        why += f"; what was measured until {phases[-1].end:.1f} s is kept"
    known = {
        "attempt": int(folder.name),
        "status": how,
        "reason": why,
        "started_at": failure.started_at if failure else left.get("started_at", record.started_at if record is not None else now()),
        "phases": failure.phases if failure else phases,
        "traceback": failure and failure.traceback,
        "files": files,
    }
    whole = record.model_copy(update=known) if record is not None else Record.model_validate({"key": point.key, "point": point, **known})
    write_record(folder, whole)
    if has_tables:
        tidy(folder)


def _put_away_by(folder: Path) -> tuple[dict[str, Any], list[Phase]]:
    """What a worker had put away says, and its phases; nothing where that is damaged, or cannot be read."""
    with suppress(Exception):
        left = journal.told(folder)
        return left, [Phase.model_validate(phase) for phase in left["phases"]]
    return {}, []


def make_tables(folder: Path, files: dict[str, str]) -> bool:
    """Make tables of what a worker had put away, and add their names to the ``files``. Whether that went well."""
    try:
        files |= journal.tables(folder)
    except Exception as error:  # noqa: BLE001 -- whatever a library raises: without them there is still a record
        print(f"caraml: {reason_of(error)}; the record does without, and {folder / JOURNAL} stays", file=sys.stderr, flush=True)
        return False
    return True


def tidy(folder: Path) -> None:
    """Remove what only stands in for a record."""
    with suppress(OSError):  # a network's disk may fail for a moment: the record is there
        for path in (folder / MEASURED, *journal.of_ranks(folder)):
            path.unlink(missing_ok=True)


@contextmanager
def without_room() -> Iterator[None]:
    """Go on where the disk is full, say: what was measured is worth more than its tables. The log has it, if it has room."""
    try:
        yield
    except OSError as error:
        with suppress(OSError):
            print(f"caraml: {reason_of(error)}; the record does without", file=sys.stderr, flush=True)


def put_away(folder: Path, record: Record) -> bool:
    """Have a record for :func:`finish`, if the worker gets no further. Whether there was room, if need be that which was kept for it."""
    for _ in range(2):
        with without_room():
            write_file(folder / MEASURED, record.model_dump_json())
            return True
        (folder / ROOM).unlink(missing_ok=True)
    return False


def write_as_it_fits(folder: Path, record: Record) -> None:
    """Write a worker's record; where there is no room for it, in that of the tables beside it, and else as it was put away. Raises
    ``EnvironmentUnfitError``, with the place where it is instead, where it can only be written elsewhere, and else ``OSError``."""
    with without_room():
        write_record(folder, record)
    if not (folder / RECORD).exists():
        for file in record.files.values():
            (folder / file).unlink(missing_ok=True)
        small = record.model_copy(update={"files": {}})
        try:
            write_record(folder, small)
        except OSError as error:
            if not (folder / MEASURED).exists():
                raise _elsewhere(folder, small, error) from error
            os.rename(folder / MEASURED, folder / RECORD)  # noqa: PTH104 -- takes no room
            forget(folder)
    tidy(folder)


def _spare(folder: Path) -> Path:
    """Folder of an attempt whose own is gone or cannot be written: of results beside what is kept for later runs."""
    root = hashlib.sha256(os.fsencode(folder.absolute().parents[2])).hexdigest()[:12]
    return cache_home() / "results" / root / "points" / folder.parent.name / folder.name


def _elsewhere(folder: Path, record: Record, error: OSError) -> Exception:
    """Write a record where there is a place for it; what is to be raised."""
    place = _spare(folder)
    try:
        make_folder(place)
        write_record(place, record)
    except (OSError, InputError):
        return error
    return EnvironmentUnfitError(f"{folder}: {error.strerror}{kept(folder)}")


def kept(folder: Path) -> str:
    """Where the measurement is of an attempt that cannot be finished, for the end of a sentence; empty where there is none."""
    place = next((path for path in (folder / MEASURED, _spare(folder) / RECORD) if path.exists()), None)
    return "" if place is None else f"; what was measured is in {place}"


def note_start(folder: Path, ranks: int) -> None:
    """Keep room for the record, and note how many processes the kernel had killed for want of memory before this attempt, so that one more
    can be told from it."""
    with suppress(OSError):  # what there is may do
        write_file(folder / ROOM, os.urandom(_ROOM_BYTES + _ROOM_OF_RANK * ranks), sync="file")
    count = oom_kills()
    if count is not None:
        write_file(folder / _OOM_KILLS, str(count), sync="none")


def skipped(folder: Path, point: Point, reason: str) -> None:
    """Write the record of a point that cannot run."""
    write_record(folder, Record(key=point.key, attempt=int(folder.name), point=point, status="skipped", reason=reason, started_at=now()))


def death(folder: Path, exit_code: int, who: str = "worker") -> str:
    """What can be said of a process that left no word: its signal or exit status, and the end of its log. Of several nodes the one that
    was the first to end, after which Slurm ended the others."""
    number = exit_code - 128 if exit_code > 128 else -exit_code if exit_code < 0 else 0
    if 0 < number < signal.NSIG:  # above, a program's own status: 255 of many that give -1
        try:
            how = f"killed by {signal.Signals(number).name}"
        except ValueError:
            how = f"killed by signal {number}"
        if number == signal.SIGKILL:
            how += " (out of host memory, or by hand)"
    else:
        how = f"{who} ended with exit status {exit_code}" + (" and no result" if who == "worker" else "")
    log = folder / LOG
    text = tail_of(log).strip() if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if number == signal.SIGTERM and (first := _ENDED_FIRST.search(text)) is not None:
        how = f"{first[2]} on {first[1]}: {first[3]}, and Slurm ended the rest"
        lines = [line for line in lines if not line.startswith(_OF_SLURM)]
    return how + (": " + " | ".join(lines[-_TAIL_LINES:]) if lines else "")


if __name__ == "__main__":
    try:
        status, reason = (TypeAdapter(Status).validate_python(sys.argv[3]), sys.argv[4]) if len(sys.argv) > 4 else (None, None)
        finish(Path(sys.argv[1]), int(sys.argv[2]), status, reason)
    except (OSError, InputError) as error:
        sys.exit(f"the attempt in {sys.argv[1]} cannot be finished: {error}{kept(Path(sys.argv[1]))}")
