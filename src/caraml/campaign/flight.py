"""One attempt at one point, from the claim to the record."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from caraml.base.files import write_file, write_new
from caraml.launch.base import JobState, Launcher
from caraml.results.claim import HANDLE, STARTED, Runner, alive, handle_of, holder, take_over, withdraw, young
from caraml.results.finish import finish
from caraml.results.progress import ProgressReader
from caraml.results.record import FINAL, Record, Status
from caraml.results.store import POINT, RECORD, Store, attempts, read_record
from caraml.suite.expand import PlannedPoint
from caraml.system.variables import forget
from caraml.workloads.command import Params

_VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_ANNOUNCING_SECONDS = 1.0
"""How long a script may take between making its announcement and writing it."""


@dataclass
class Work:
    """A point of the plan with what the campaign needs to know of it again and again."""

    index: int
    planned: PlannedPoint
    key: str
    name: str
    """Of the point's folder."""
    label: str
    light: Params | None
    """Parameters of a command that needs no worker."""


@dataclass
class Flight:
    """A job under way."""

    work: Work
    folder: Path
    handle: str
    timeout: float
    launcher: Launcher
    deadline: float | None = None
    reader: ProgressReader | None = field(default=None)

    def look(self, state: JobState) -> bool:
        """Note when the job began to run; true when its time is over."""
        if self.deadline is None and state.state == "running":
            self.deadline = time.monotonic() + self.timeout
        return self.deadline is not None and time.monotonic() > self.deadline


@dataclass(frozen=True)
class Found:
    """What a point has when a campaign comes to it: at most one of the three."""

    record: Record | None = None
    """Its newest whole record."""
    adopted: tuple[Path, str] | None = None
    """Folder and handle of a job whose runner is dead, now claimed by us."""
    busy: Runner | None = None
    """Another campaign that works on it now."""
    attempts: int = 0
    """Highest number of an attempt when we looked."""


def find(store: Store, name: str, me: Runner, launcher: str = "local") -> Found:
    """Look at a point. An attempt without a record whose runner is dead is taken over: adopted if its job started, void if not."""
    folder = store.points / name
    numbers = sorted(attempts(folder) or (), reverse=True)
    for number in numbers:
        attempt = folder / str(number)
        if (attempt / RECORD).exists():
            return Found(record=read_record(attempt / RECORD), attempts=numbers[0])
        if number == numbers[0]:
            found = _take(store, attempt, me, launcher)
            if found is not None:
                return found
    return Found(attempts=max(numbers, default=0))


def _take(store: Store, attempt: Path, me: Runner, launcher: str) -> Found | None:
    """Take over an attempt that has no record; ``None`` when nothing of it will ever come."""
    number, runner = holder(attempt)
    if runner is not None and runner != me and alive(runner, store.root):
        return Found(busy=runner)
    if runner is not None and runner.place != me.place and (handle_of(attempt) or "").startswith("local:") and young(attempt, store.root):
        return Found(busy=runner)  # its process cannot be seen from here, but its files change
    if number and runner != me and not take_over(attempt, number, me):
        return Found(busy=holder(attempt)[1] or me)
    if (attempt / RECORD).exists():  # it ended while we looked
        return Found(record=read_record(attempt / RECORD), attempts=int(attempt.name))
    handle = handle_of(attempt)
    if handle is not None and handle.startswith("print:") and launcher != "print":
        handle = None  # its script was printed: whoever starts it later finds the start taken, unless it was started already
    if handle is None and not withdraw(attempt):
        handle = _announced(attempt)
    if handle is None:
        forget(attempt)
    return None if handle is None else Found(adopted=(attempt, handle))


def _announced(attempt: Path) -> str | None:
    """The handle in an announcement that may be being written just now."""
    deadline = time.monotonic() + _ANNOUNCING_SECONDS
    while not (attempt / STARTED).stat().st_size and time.monotonic() < deadline:
        time.sleep(0.02)
    return handle_of(attempt, announced=True)


def note_handle(folder: Path, handle: str) -> None:
    """Keep a job's handle in its attempt's folder, whole or not at all. Not synced: after a power cut there is no job either, or it has
    announced itself."""
    write_file(f"{folder}/{HANDLE}", handle, sync="none")


def accepted(record: Record, planned: PlannedPoint) -> bool:
    """Whether a known record is the point's result, so that nothing has to be run."""
    return record.status in FINAL and (record.status == "skipped") == (planned.skip is not None)


def finish_attempt(work: Work, folder: Path, exit_code: int, status: Status | None = None, reason: str | None = None) -> None:
    """See that an attempt has a record: also one of a command without a worker, whose folder does not have the point."""
    if not (folder / POINT).exists():
        write_new(f"{folder}/{POINT}", work.planned.point.model_dump_json(indent=1))
    finish(folder, exit_code, status, reason)


def gist(work: Work, record: Record) -> Record:
    """How a point ended, and nothing more."""
    point, status, reason = work.planned.point, record.status, record.reason
    return Record(key=record.key, attempt=record.attempt, point=point, status=status, reason=reason, started_at=record.started_at)


def wait_until_visible(folder: Path) -> None:
    """A job that ended well has a record; a network file system may show what another host renamed some seconds late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while RECORD not in os.listdir(folder) and time.monotonic() < deadline:  # noqa: PTH208 -- asks the server
        time.sleep(_LOOK_SECONDS)
