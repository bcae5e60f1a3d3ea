"""Where records live: a folder of files, written by whoever ran the point, read by everyone.

    ROOT/points/WORKLOAD-KEY/ATTEMPT/   point.json run.sh worker.log progress.jsonl record.json steps.parquet power.parquet
    ROOT/suites/SUITE.json              the keys of a suite, in order

An attempt never overwrites another: its folder is made exclusively, and the newest attempt with a whole record is the point's result. Two
campaigns may therefore write to one folder, and a killed one leaves nothing behind that looks like a result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import ValidationError

from caraml.errors import InputError
from caraml.results.files import write_atomically
from caraml.results.record import SCHEMA_VERSION, Record
from caraml.suite.model import Point

RECORD = "record.json"
_LISTED = 20
"""Records that an error names."""


class Store:
    """The records below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def new_attempt(self, point: Point) -> Path:
        """Make and return the folder of a new attempt at ``point``."""
        folder = self.root / "points" / f"{point.workload}-{point.key}"
        folder.mkdir(parents=True, exist_ok=True)
        number = max(_attempts(folder), default=0)
        while True:
            number += 1
            attempt = folder / str(number)
            try:
                attempt.mkdir()
            except FileExistsError:  # another campaign was faster
                continue
            write_atomically(attempt / "point.json", point.model_dump_json(indent=1))
            return attempt

    def folder(self, record: Record) -> Path:
        """Folder of a record's raw files."""
        return self.root / "points" / f"{record.point.workload}-{record.key}" / str(record.attempt)

    def latest(self, key: str) -> Record | None:
        """The newest whole record of a point, or ``None``."""
        for folder in (self.root / "points").glob(f"*-{key}"):
            for number in sorted(_attempts(folder), reverse=True):
                path = folder / str(number) / RECORD
                if path.exists():
                    return read_record(path)
        return None

    def remember_suite(self, name: str, keys: Iterable[str]) -> None:
        """Note which points a suite consists of, so that it can be reported without expanding it again."""
        folder = self.root / "suites"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{name}.json", json.dumps(list(keys), indent=1))

    def suites(self) -> list[str]:
        """Names of the suites that were run into this folder."""
        return sorted(path.stem for path in (self.root / "suites").glob("*.json"))

    def records(self, suite: str | None = None) -> list[Record]:
        """The newest record of every point, or of every point of one suite in its order."""
        if suite is not None:
            path = self.root / "suites" / f"{suite}.json"
            if not path.exists():
                raise InputError(f"no results of suite {suite!r} below {self.root}", f"caraml run {suite}")
            found = (self.latest(key) for key in _keys_of(path))
        else:
            found = (self.latest(key) for key in self._keys())
        return [record for record in found if record is not None]

    def find(self, name: str) -> Record:
        """The record whose key or label starts with ``name``. Raises ``InputError`` when none or several do."""
        records = self.records()
        found = [record for record in records if record.key.startswith(name) or record.point.label.startswith(name)]
        exact = [record for record in found if name in (record.key, record.point.label)]
        if len(exact or found) == 1:
            return (exact or found)[0]
        lines = "".join(f"\n  {record.key}  {record.point.label}" for record in (found or records)[:_LISTED])
        what = f"{len(found)} records start" if found else "no record starts"
        raise InputError(
            f"{what} with {name!r} below {self.root}{':' if lines else ''}{lines}", "give a key or label from `caraml results`"
        )

    def _keys(self) -> Iterator[str]:
        seen = sorted((self.root / "points").glob("*-*"), key=lambda path: path.stat().st_mtime)
        return (path.name.rpartition("-")[2] for path in seen)


def write_record(folder: Path, record: Record) -> None:
    """Write a record into its attempt's folder, whole or not at all."""
    write_atomically(folder / RECORD, record.model_dump_json(indent=1))


def read_record(path: Path) -> Record:
    """Read one record. Raises ``InputError`` for a file that is not a record, or one written by a newer CARAML."""
    text = path.read_bytes()
    try:
        found = json.loads(text).get("schema_version")
        if isinstance(found, int) and found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", "pip install --upgrade caraml")
        return Record.model_validate_json(text)
    except (ValidationError, ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path}: not a CARAML record: {error}") from error


def _keys_of(listing: Path) -> list[str]:
    """The keys of a suite, from the file that lists them. Raises ``InputError`` for anything but a list of keys."""
    try:
        keys = json.loads(listing.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{listing}: not a list of keys: {error}", "run the suite again: what has a result is not measured twice"
        ) from error
    if not isinstance(keys, list) or not all(isinstance(key, str) and key.isalnum() for key in keys):
        raise InputError(f"{listing}: not a list of keys", "run the suite again: what has a result is not measured twice")
    return keys


def _attempts(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
