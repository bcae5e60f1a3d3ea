"""A table of contents of a store, so that ten thousand records are listed without opening ten thousand files.

It is never the truth: an entry counts only while the times and sizes of the files that it was made from are the same, it may be
deleted at any time, and a store that cannot be written is read without it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json, to_json

from caraml.base.errors import InputError
from caraml.base.files import owned, replacing
from caraml.base.limits import INDEX, read_bytes
from caraml.results.rows import ALWAYS, Scalar, row_of

if TYPE_CHECKING:
    from caraml.results.record import Record

FILE = "index.jsonl"
RECORD = "record.json"
_VERSION = 2
_RACY_NS = 2_000_000_000
"""A folder that changed this recently may change again without its time showing it."""
_SCALARS = {str, int, float, type(None)}
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")

Stamp = tuple[int, int, int]
"""Modification time of the point's folder and of the record [ns], size of the record [B]."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """The newest record of a point. ``certain``: the folder's time is old enough to show any later change."""

    attempt: int
    stamp: Stamp
    certain: bool
    row: dict[str, Scalar]


class Index:
    """The entries of a store by the name of the point's folder."""

    def __init__(self, root: Path, read: Callable[[Path], Record]) -> None:
        self._root, self._read = root, read
        self._points = root / "points"
        self.entries: dict[str, IndexEntry] = {}
        self._dirty = False

    def load(self) -> None:
        """Read the file; a missing or damaged one is an empty one."""
        self.entries = {}
        with suppress(OSError, ValueError, TypeError, AttributeError, IndexError, InputError):
            lines = read_bytes(self._root / FILE, INDEX).splitlines()
            if from_json(lines[0]) == {"caraml_index": _VERSION}:
                for line in lines[1:]:
                    name, attempt, stamp, certain, row = from_json(line)
                    if not (row.keys() >= ALWAYS and set(map(type, row.values())) <= _SCALARS):
                        raise ValueError("no row of a record")
                    self.entries[name] = IndexEntry(attempt, tuple(stamp), certain, row)

    def note(self, name: str, record: Record) -> None:
        """Take up a record of an attempt that this process has seen to its end: nobody makes a newer one in the same instant."""
        self.entries[name] = IndexEntry(record.attempt, self._stamp(name, record.attempt), True, row_of(record))
        self._dirty = True

    def refresh(self) -> None:
        """Bring every entry up to date with the files."""
        try:
            found = [entry.name for entry in os.scandir(self._points) if "-" in entry.name]
        except FileNotFoundError:
            found = []
        names = set(found)
        for name in [name for name in self.entries if name not in names]:
            del self.entries[name]
            self._dirty = True
        for name in found:
            known = self.entries.get(name)
            if known is None or not known.certain or known.stamp != self._stamp_if_there(name, known.attempt):
                self._look(name)

    def save(self) -> None:
        """Write the file if anything changed. A store that is somebody else's, or read only, or full, does without."""
        if not self._dirty or not owned(self._root):
            return
        with suppress(OSError), replacing(self._root / FILE, sync="none") as file:
            file.write(to_json({"caraml_index": _VERSION}) + b"\n")
            for name, entry in self.entries.items():
                file.write(to_json((name, entry.attempt, entry.stamp, entry.certain, entry.row)) + b"\n")
            self._dirty = False

    def _stamp(self, name: str, attempt: int) -> Stamp:
        record = os.stat(f"{self._points}/{name}/{attempt}/{RECORD}")  # noqa: PTH116 -- twice per point: a path object costs more than the call
        return os.stat(f"{self._points}/{name}").st_mtime_ns, record.st_mtime_ns, record.st_size  # noqa: PTH116

    def _stamp_if_there(self, name: str, attempt: int) -> Stamp | None:
        try:
            return self._stamp(name, attempt)
        except OSError:
            return None

    def _look(self, name: str) -> None:
        """Find the newest whole record of a point."""
        numbers = sorted(attempts(self._points / name) or (), reverse=True)
        known = self.entries.get(name)
        for attempt in numbers:
            stamp = self._stamp_if_there(name, attempt)
            if stamp is None:
                continue
            # An attempt that is under way may bring a newer record, in a folder whose time is not looked at.
            certain = attempt == numbers[0] and stamp[0] < time.time_ns() - _RACY_NS
            if known is not None and (known.attempt, known.stamp[1:]) == (attempt, stamp[1:]):
                row = known.row
            else:
                row = row_of(self._read(self._points / name / str(attempt) / RECORD))
            self._dirty |= known is None or (attempt, stamp, certain) != (known.attempt, known.stamp, known.certain)
            self.entries[name] = IndexEntry(attempt, stamp, certain, row)
            return
        if self.entries.pop(name, None) is not None:
            self._dirty = True


def attempts(folder: Path) -> list[int] | None:
    """Numbers of a point's attempts; ``None`` when there is no such folder."""
    try:
        return [int(entry.name) for entry in os.scandir(folder) if _ATTEMPT.fullmatch(entry.name)]
    except FileNotFoundError:
        return None
