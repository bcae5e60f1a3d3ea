"""Where records live: a folder of files, written by whoever ran the point, read by everyone.

    ROOT/points/WORKLOAD-KEY/ATTEMPT/   point.json run.sh worker.log progress.jsonl record.json steps.parquet power.parquet
    ROOT/suites/SUITE.json              a suite's text and its points, in order
    ROOT/runners/                       who runs campaigns now
    ROOT/index.jsonl                    table of contents; made from the files, never the truth

An attempt never overwrites another: its folder appears whole, by a rename that only one can win, and the newest attempt with a whole
record is the point's result. Two campaigns may therefore write to one folder, and a killed one leaves nothing behind that looks like a
result.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from caraml.errors import InputError
from caraml.results.files import write_atomically, write_new
from caraml.results.index import RECORD, Index
from caraml.results.listing import Listing, read_listing
from caraml.results.rows import Scalar

if TYPE_CHECKING:  # building these models takes longer than listing ten thousand records by the index, which does without
    from caraml.results.record import Record
    from caraml.suite.model import Point

__all__ = ["RECORD", "Store", "attempts", "read_record", "write_record"]

POINT = "point.json"
_LISTED = 20
"""Records that an error names."""


class Store:
    """The records below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.points = root / "points"
        self.index = Index(root, read_record)

    # -- writing -------------------------------------------------------------------------------------------------------

    def new_attempt(self, point: Point) -> Path:
        """Make and return the folder of a new attempt at ``point``."""
        name = folder_name(point)
        while True:
            number = max(attempts(self.points / name) or (), default=0) + 1
            folder = self.claim_attempt(point, name, number)
            if folder is not None:
                return folder

    def claim_attempt(self, point: Point, name: str, number: int, files: Callable[[Path], Mapping[str, str]] | None = None) -> Path | None:
        """Make attempt ``number`` at ``point``, or return ``None`` if it exists: of several campaigns that try, one gets it.

        Args:
            point: the point.
            name: of the point's folder (see ``folder_name``).
            number: one more than the attempts that the caller has looked at.
            files: makes names and texts of the files that are in the attempt's folder from its first moment on; ``point.json`` alone
                without it.
        """
        folder = self.points / name
        attempt, temporary = folder / str(number), f"{folder}/.{number}.{os.getpid()}.tmp"
        if number == 1:
            folder.mkdir(parents=True, exist_ok=True)
        try:
            _empty_folder(temporary)
            contents = files(attempt) if files is not None else {POINT: point.model_dump_json(indent=1)}
            for file, text in contents.items():
                write_new(f"{temporary}/{file}", text, executable=file.endswith(".sh"))
            os.rename(temporary, attempt)  # noqa: PTH104 -- fails when the attempt exists, since that is never empty
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return None
            raise
        return attempt

    def remember(self, listing: Listing) -> None:
        """Note which points a suite consists of, so that it can be reported and taken up without its file."""
        folder = self.root / "suites"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{listing.name}.json", listing.to_json())

    def remember_suite(self, name: str, keys: Iterable[str]) -> None:
        """As :meth:`remember` for bare keys."""
        self.remember(Listing(name=name, points=[(key, "") for key in keys]))

    # -- reading -------------------------------------------------------------------------------------------------------

    def folder(self, record: Record) -> Path:
        """Folder of a record's raw files."""
        return self.points / f"{record.point.workload}-{record.key}" / str(record.attempt)

    def latest(self, key: str) -> Record | None:
        """The newest whole record of a point, or ``None``."""
        return next((found for folder in self.points.glob(f"*-{key}") if (found := latest_in(folder)) is not None), None)

    def suites(self) -> list[str]:
        """Names of the suites that were run into this folder."""
        return sorted(path.stem for path in (self.root / "suites").glob("*.json"))

    def listing(self, suite: str) -> Listing:
        """What a suite consists of. Raises ``InputError`` for one that was not run into this folder."""
        path = self.root / "suites" / f"{suite}.json"
        if "/" in suite or not path.exists():
            raise InputError(f"no results of suite {suite!r} below {self.root}", f"caraml run {suite}")
        return read_listing(path)

    def records(self, suite: str | None = None) -> list[Record]:
        """The newest record of every point, or of every point of one suite in its order."""
        found = (latest_in(self.points / name) for name in self._names(suite))
        return [record for record in found if record is not None]

    def rows(self, suite: str | None = None) -> list[dict[str, Scalar]]:
        """As :meth:`records`, each as a flat row without its unknown columns; by the index, so that many are read in no time."""
        entries = self.fresh_index().entries
        return [entries[name].row for name in self._names(suite) if name in entries]

    def fresh_index(self) -> Index:
        """The index, up to date with the files."""
        if not self.index.entries:
            self.index.load()
        self.index.refresh()
        self.index.save()
        return self.index

    def find(self, name: str) -> Record:
        """The record whose key or label starts with ``name``. Raises ``InputError`` when none or several do."""
        rows = self.rows()
        found = [row for row in rows if str(row["key"]).startswith(name) or str(row["label"]).startswith(name)]
        exact = [row for row in found if name in (row["key"], row["label"])]
        if len(exact or found) == 1:
            row = (exact or found)[0]
            return read_record(self.points / f"{row['workload']}-{row['key']}" / str(row["attempt"]) / RECORD)
        lines = "".join(f"\n  {row['key']}  {row['label']}" for row in (found or rows)[:_LISTED])
        what = f"{len(found)} records start" if found else "no record starts"
        raise InputError(
            f"{what} with {name!r} below {self.root}{':' if lines else ''}{lines}", "give a key or label from `caraml results`"
        )

    def _names(self, suite: str | None) -> list[str]:
        """Names of points' folders: of a suite in its order, or all in the order in which they last changed."""
        try:
            found = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(self.points) if "-" in entry.name}
        except FileNotFoundError:
            found = {}
        if suite is None:
            return sorted(found, key=lambda name: (found[name], name))
        of_key = {name.rpartition("-")[2]: name for name in found}
        return [of_key[key] for key, _ in self.listing(suite).points if key in of_key]


def folder_name(point: Point) -> str:
    """Name of a point's folder."""
    return f"{point.workload}-{point.key}"


def attempts(folder: Path) -> list[int] | None:
    """Numbers of a point's attempts; ``None`` when there is no such folder."""
    try:
        return [int(entry.name) for entry in os.scandir(folder) if entry.name.isdecimal()]
    except FileNotFoundError:
        return None


def latest_in(folder: Path) -> Record | None:
    """The newest whole record in a point's folder, or ``None``."""
    for number in sorted(attempts(folder) or (), reverse=True):
        path = folder / str(number) / RECORD
        if path.exists():
            return read_record(path)
    return None


def write_record(folder: Path, record: Record) -> None:
    """Write a record into its attempt's folder, whole or not at all."""
    write_atomically(folder / RECORD, record.model_dump_json(indent=1))


def read_record(path: Path) -> Record:
    """Read one record. Raises ``InputError`` for a file that is not a record, or one written by a newer CARAML."""
    from pydantic import ValidationError

    from caraml.results.record import SCHEMA_VERSION, Record

    text = path.read_bytes()
    try:
        found = json.loads(text).get("schema_version")
        if isinstance(found, int) and found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", "pip install --upgrade caraml")
        return Record.model_validate_json(text)
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a CARAML record: {error}") from error


def _empty_folder(path: str) -> None:
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:  # of a process with our number, long dead
        shutil.rmtree(path)
        os.mkdir(path)  # noqa: PTH102
