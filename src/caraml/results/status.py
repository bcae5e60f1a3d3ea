"""What a worker says while it works: one JSON line per look, read by whoever shows it. The same file serves local and batch runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from caraml.base.errors import InputError
from caraml.base.files import open_to_append
from caraml.base.format import count
from caraml.base.limits import LINE, opened
from caraml.results.claim import BUILT_IN, STARTED, Runner, alive, handle_of, holder, kind_of, launcher_plugins, not_installed
from caraml.results.rows import has_record
from caraml.results.store import Listing, Store, attempts

PROGRESS = "progress.jsonl"


class ProgressLine(BaseModel):
    """State of a point. Times in seconds, rate in items/s over all devices."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    t: float
    phase: str
    steps: int = 0
    rate: float | None = None
    relative: float | None = None
    """Relative half-width of the rate's interval so far."""
    item: str = "item"
    watts: float | None = None
    remaining: float | None = None


class ProgressWriter:
    """Appends lines; rank 0 only."""

    def __init__(self, folder: Path, origin: float) -> None:
        self._file = open_to_append(folder / PROGRESS)
        self._origin = origin

    def write(self, phase: str, **values: object) -> None:
        """Append one line, visible at once; on a full disk none: what is measured is worth more, and ranks wait for the one that writes."""
        line = ProgressLine.model_validate({"t": time.monotonic() - self._origin, "phase": phase, **values})
        with suppress(OSError):
            self._file.write(f"{line.model_dump_json(exclude_none=True)}\n".encode())
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class ProgressReader:
    """Reads what has been appended since the last time."""

    def __init__(self, folder: Path) -> None:
        self._path, self._offset = folder / PROGRESS, 0

    def latest(self) -> ProgressLine | None:
        """The newest whole line that was not read before, or ``None``."""
        return next(reversed(_lines(self._fresh()[-1:])), None)

    def phases(self) -> list[ProgressLine]:
        """The newest line of each phase among the whole lines that were not read before, in their order."""
        newest: dict[str, ProgressLine] = {}
        for line in _lines(self._fresh()):
            newest.pop(line.phase, None)
            newest[line.phase] = line
        return list(newest.values())

    def _fresh(self) -> list[bytes]:
        try:
            with opened(self._path) as (file, size):
                self._offset = max(self._offset, size - LINE)  # of a file that grew by more, the end is enough
                file.seek(self._offset)
                fresh = file.read(LINE)
        except (OSError, InputError):  # not there yet, or on a disk that fails for a moment: people miss a line
            return []
        whole, end, _ = fresh.rpartition(b"\n")
        self._offset += len(whole) + len(end)
        return whole.split(b"\n") if whole else []


def _lines(texts: list[bytes]) -> list[ProgressLine]:
    found = []
    for text in texts:
        with suppress(ValidationError):  # a line from a full disk, or the end of one; the next one will do
            found.append(ProgressLine.model_validate_json(text))
    return found


OPEN = ("running", "queued", "starting", "left")
"""States of an attempt without a record; ``left``: its job goes on, or has ended, and its runner is gone."""

DONE = ("ok", "skipped", "oom", "timeout", "invalid")
"""Statuses that a campaign does not try again on its own, as in :data:`caraml.results.record.FINAL`, which takes long to import."""
TO_DO = "to do"
"""Of a point that has not been begun."""
UNHAPPY = ("failed", "lost", "timeout", "invalid")
"""Statuses that leave a point without a result."""


@dataclass(frozen=True)
class Standing:
    key: str
    label: str
    state: str
    """A record's status; or ``running``, ``queued``, ``starting``, ``left``; or ``to do``."""
    reason: str | None = None
    folder: Path | None = None
    """The attempt under way."""
    handle: str | None = None
    runner: Runner | None = None
    lives: bool = False
    """Whether the runner does, as far as is known."""
    line: ProgressLine | None = None


def standings(store: Store, listing: Listing) -> list[Standing]:
    """Where every point of a suite stands, in its order."""
    entries = store.fresh_index().entries
    of_key = {name.rpartition("-")[2]: name for name in entries}
    unsure = {key for key, _ in listing.points if key not in of_key or not entries[of_key[key]].certain}
    open_names = {key: name for key, name in store.names().items() if key in unsure} if unsure else {}
    found = []
    for key, label in listing.points:
        entry = entries.get(of_key.get(key, ""))
        name = open_names.get(key)
        under_way = _under_way(store, key, label, name) if name is not None and (entry is None or not entry.certain) else None
        if under_way is not None:
            found.append(under_way)
        elif entry is None:
            found.append(Standing(key, label, TO_DO))
        else:
            reason = entry.row.get("reason")
            found.append(Standing(key, label or str(entry.row["label"]), str(entry.row["status"]), str(reason) if reason else None))
    return found


def _under_way(store: Store, key: str, label: str, name: str) -> Standing | None:
    """The attempt of a point that has no record yet, if its newest is one and has not been given up."""
    number = max(attempts(store.points / name), default=0)
    folder = store.points / name / str(number)
    if not number or has_record(folder):
        return None
    runner, handle = holder(folder)[1], handle_of(folder)
    lives = runner is not None and alive(runner, store.root)
    if handle is None:
        return Standing(key, label, "starting", folder=folder, runner=runner, lives=True) if lives else None
    line = ProgressReader(folder).latest()
    standing = Standing(key, label, "running", folder=folder, handle=handle, runner=runner, lives=lives, line=line)
    kind = kind_of(handle)
    if line is None and (kind == "slurm" or not (kind in BUILT_IN or (folder / STARTED).exists())):
        standing = replace(standing, state="queued")
    lacks = "" if lives or kind in BUILT_IN or kind in launcher_plugins() else f"{not_installed(kind)}, then "
    if lives or (standing.state == "queued" and not lacks):
        return standing
    return replace(standing, state="left", reason=f"its runner is gone: {lacks}the same `caraml run` takes it up")


def summary(found: Sequence[Standing]) -> str:
    """Counts in words, those that need attention last: ``120 points: 96 ok, 20 to do, 3 running, 1 failed``."""
    counts = Counter(one.state for one in found)
    order = ("ok", TO_DO, *OPEN, "skipped", "oom", "timeout", "invalid", "lost", "failed")
    parts = [f"{counts[state]:,} {state}" for state in order if counts[state]]
    return f"{count(len(found), 'point')}: {', '.join(parts) or 'none'}"


def finished(found: Sequence[Standing]) -> bool:
    """Whether every point has a result that stays."""
    return all(one.state in DONE for one in found)
