"""A record as one flat row: what the index keeps, and what tables and SQL are made of; and tables of raw numbers beside a record.

Column names are the metric names of :mod:`caraml.metrics.model`; ``NAME_low`` and ``NAME_high`` are the ends of the interval, and
``NAME_bound`` is what an energy may be off by besides. The columns are the same for every set of records, so that a query never depends
on what was measured.

The index is a store's table of contents, so that ten thousand records are listed without opening ten thousand files. It is never the
truth: an entry counts only while the times and sizes of the files that it was made from are the same, it may be deleted at any time, and a
store that cannot be written is read without it.
"""

from __future__ import annotations

import csv
import errno
import importlib.util
import io
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from pydantic_core import from_json, to_json

from caraml.base.errors import UNREADABLE, InputError
from caraml.base.files import making, owned, replacing, replacing_by_name
from caraml.base.limits import INDEX, MEMBERS, database, read_bytes, reading, table
from caraml.metrics.energy import ENERGY_METRICS
from caraml.metrics.model import METRICS, own_names

if TYPE_CHECKING:
    import duckdb

    from caraml.results.record import Record

Scalar: TypeAlias = str | int | float | None

TEXT = (
    *("key", "suite", "benchmark", "workload", "label", "status", "reason", "flags"),
    *("system", "device", "device_class", "software", "started_at", "mode", "precision", "compile", "item"),
    *("energy_scope", "energy_reason", "mfu_reason", "own_metrics", "own_units"),
)
"""``own_metrics``: numbers that only this program or plug-in has, as JSON: ``own_metrics->>'$.loss'``; ``own_units``: their units."""
INTEGERS = (
    *("attempt", "nodes", "devices", "world", "global_batch", "micro_batch", "accumulation", "seed", "repeat"),
    *("schema_version", "method_version"),
)
NUMBERS = (*(f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")), *(f"{name}_bound" for name in ENERGY_METRICS))
COLUMNS = TEXT + INTEGERS + NUMBERS
_KNOWN = frozenset(COLUMNS)
_OF_POINT = (
    *("suite", "benchmark", "workload", "label", "system", "device", "device_class", "software", "mode", "precision", "compile"),
    *("nodes", "devices", "world", "global_batch", "micro_batch", "accumulation", "seed", "repeat"),
)
_GUESSED = frozenset({"mode", "precision", "compile", "global_batch", "micro_batch", "accumulation", "seed"})
"""Columns that are null where nobody stated them: a point has some value there."""
_OF_RECORD = ("key", "attempt", "status", "item", "started_at", "schema_version", "method_version")
ALWAYS = frozenset({*_OF_POINT, *_OF_RECORD, "flags"})
"""Columns that every row has."""


def unreadable(row: Mapping[str, Scalar]) -> bool:
    """Whether a row only stands for a record that cannot be read: the file may be mended, or CARAML renewed, so none is written down."""
    return row["status"] == "invalid" and str(row.get("reason")).startswith(UNREADABLE)


def row_of(record: Record) -> dict[str, Scalar]:
    """The row of a record, without the columns that are unknown."""
    point = record.point
    row: dict[str, Scalar] = {name: getattr(point, name) for name in _OF_POINT}
    unknown = {*record.unstated, *(["accumulation"] if "micro_batch" in record.unstated else [])} & _GUESSED
    row |= dict.fromkeys(unknown)
    row |= {name: getattr(record, name) for name in _OF_RECORD} | {"flags": ",".join(record.flags)}
    metrics = record.metrics
    energy, mfu = metrics.get("energy"), metrics.get("mfu")
    row |= {
        name: value
        for name, value in (
            ("reason", record.reason),
            ("energy_scope", energy.scope if energy else None),
            ("energy_reason", energy.reason if energy else None),
            ("mfu_reason", mfu.reason if mfu else None),
        )
        if value is not None
    }
    if own := own_names([record]):
        row["own_metrics"] = to_json({name: metrics[name].value for name in own}).decode()
        row["own_units"] = to_json({name: metrics[name].unit for name in own}).decode()
    for name, metric in metrics.items():
        if name in METRICS:
            for end, number in (("", metric.value), ("_low", metric.low), ("_high", metric.high), ("_bound", metric.bound)):
                if number is not None and f"{name}{end}" in _KNOWN:
                    row[f"{name}{end}"] = number
    return row


TYPES = {**dict.fromkeys(TEXT, "VARCHAR"), **dict.fromkeys(INTEGERS, "BIGINT"), **dict.fromkeys(NUMBERS, "DOUBLE")}
"""DuckDB's type of every column."""


def fill(connection: duckdb.DuckDBPyConnection, table: str, rows: Iterable[Mapping[str, Scalar]]) -> None:
    """Make ``table`` and put the rows into it; by way of a file, which DuckDB reads a hundred times faster than Python hands rows over."""
    columns = ", ".join(f'"{name}" {kind}' for name, kind in TYPES.items())
    connection.execute(f"CREATE TABLE {table} ({columns})")
    with tempfile.NamedTemporaryFile(prefix="caraml-rows-", suffix=".jsonl") as file:
        for row in rows:
            file.write(to_json(row) + b"\n")
        file.flush()
        if file.tell():
            kinds = ", ".join(f"'{name}': '{kind}'" for name, kind in TYPES.items())
            with reading(connection, Path(file.name), "holds a record that no table can have"):
                connection.execute(
                    f"INSERT INTO {table} SELECT * FROM read_json(?, format='newline_delimited', columns={{{kinds}}})",  # noqa: S608 -- names of ours; the path is a parameter
                    [file.name],
                )


def fill_from_parquet(connection: duckdb.DuckDBPyConnection, name: str, path: Path) -> None:
    """Make ``name`` a view of a file that :func:`write_parquet` wrote, also by a version that had fewer columns.

    Raises:
        InputError: it is no such file, or has more rows than an archive has records.
    """
    with reading(connection, path):
        table(connection, path, MEMBERS)
        there = set(connection.read_parquet(str(path)).columns)
        columns = ", ".join(f'"{column}"' if column in there else f'NULL::{kind} AS "{column}"' for column, kind in TYPES.items())
        source = str(path).replace("'", "''")
        connection.execute(f"CREATE VIEW {name} AS SELECT {columns} FROM read_parquet('{source}')")  # noqa: S608 -- names of ours; the path is a parameter, or quoted where a view takes none


def write_parquet(rows: Iterable[Mapping[str, Scalar]], path: Path) -> None:
    """Write rows as a Parquet file."""
    import duckdb

    with duckdb.connect() as connection:
        fill(connection, "rows", rows)
        connection.table("rows").write_parquet(str(path), compression="zstd")


FILE = "index.jsonl"
RECORD = "record.json"
_VERSION = 3
_RACY_NS = 2_000_000_000
"""A folder that changed this recently may change again without its time showing it."""
_SCALARS = {str, int, float, type(None)}
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_ATTEMPT = re.compile(r"[1-9][0-9]{0,8}")
_POINT = re.compile(r"[^.].*-\w+")
"""Names of points' folders: ``WORKLOAD-KEY``."""

Stamp = tuple[int, int, int]
"""Modification time of the point's folder and of the record [ns], size of the record [B]."""
_CLOSED: Stamp = (0, 0, 0)
"""Of what this user may not look at."""


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
        row = row_of(record)
        stamp = self._stamp(name, record.attempt) or _CLOSED
        self.entries[name] = IndexEntry(record.attempt, stamp, stamp != _CLOSED and not unreadable(row), row)
        self._dirty = True

    def refresh(self) -> None:
        """Bring every entry up to date with the files."""
        found = dict.fromkeys(entry.name for entry in point_folders(self._points))
        for name in [name for name in self.entries if name not in found]:
            del self.entries[name]
            self._dirty = True
        for name in found:
            known = self.entries.get(name)
            if known is None or not known.certain or known.stamp != self._stamp(name, known.attempt):
                self._look(name)

    def save(self) -> None:
        """Write the file if anything changed. A store that is somebody else's, or read only, or full, does without."""
        if not self._dirty or not owned(self._root):
            return
        with suppress(OSError), replacing(self._root / FILE, sync="none") as file:
            file.write(to_json({"caraml_index": _VERSION}) + b"\n")
            for name, entry in self.entries.items():
                if unreadable(entry.row):
                    continue
                file.write(to_json((name, entry.attempt, entry.stamp, entry.certain, entry.row)) + b"\n")
            self._dirty = False

    def _stamp(self, name: str, attempt: int) -> Stamp | None:
        try:
            record = os.stat(f"{self._points}/{name}/{attempt}/{RECORD}")  # noqa: PTH116 -- twice per point: path objects are slow
            return os.stat(f"{self._points}/{name}").st_mtime_ns, record.st_mtime_ns, record.st_size  # noqa: PTH116
        except PermissionError:
            return _CLOSED
        except OSError:
            return None

    def _look(self, name: str) -> None:
        """Find the newest whole record of a point."""
        numbers = attempts(self._points / name)
        known = self.entries.get(name)
        for attempt in numbers:
            stamp = self._stamp(name, attempt)
            if stamp is None:
                continue
            # An attempt that is under way may bring a newer record, in a folder whose time is not looked at.
            certain = attempt == numbers[0] and stamp[0] < time.time_ns() - _RACY_NS
            if known is not None and (known.attempt, known.stamp[1:]) == (attempt, stamp[1:]):
                row = known.row
            else:
                row = row_of(self._read(self._points / name / str(attempt) / RECORD))
            certain &= not unreadable(row)
            self._dirty |= known is None or (attempt, stamp, certain) != (known.attempt, known.stamp, known.certain)
            self.entries[name] = IndexEntry(attempt, stamp, certain, row)
            return
        if self.entries.pop(name, None) is not None:
            self._dirty = True


def point_folders(points: Path) -> Iterator[os.DirEntry[str]]:
    """What in a store can be the folder of a point."""
    with suppress(FileNotFoundError), os.scandir(points) as entries:
        yield from (entry for entry in entries if _POINT.fullmatch(entry.name) and entry.name.isprintable())


def attempts(folder: Path) -> list[int]:
    """Numbers of a point's attempts, the newest first; none when there is no such folder. Of one that is closed to this user it is the
    first, of which nobody here can say what came out."""
    try:
        return sorted((int(entry.name) for entry in os.scandir(folder) if _ATTEMPT.fullmatch(entry.name)), reverse=True)
    except PermissionError:
        return [1]
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return []


def has_record(attempt: Path) -> bool:
    """Whether an attempt has a record. One that is closed to this user has: no earlier attempt stands for what nobody here knows."""
    try:
        os.stat(attempt / RECORD)  # noqa: PTH116 -- what ``Path.exists`` makes of a closed folder depends on the version of Python
    except PermissionError:
        return True
    except OSError as error:
        if error.errno not in _NO_FOLDER:
            raise
        return False
    return True


def recorded(folder: Path) -> Iterator[int]:
    """Numbers of a point's attempts that have a record, the newest first."""
    return (number for number in attempts(folder) if has_record(folder / str(number)))


_ROWS = 500_000
"""Of a table that is taken into lists; those of `caraml verify` have some thousands."""


def write_table(folder: Path, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write rows as ``name.parquet``, or ``name.csv`` where DuckDB is missing (a bare worker). Returns the file's name.

    Rows are written as they come: a run of a day has millions of them, which need not be in memory together.
    """
    if importlib.util.find_spec("duckdb") is None:
        with replacing(folder / f"{name}.csv") as file:
            _write_csv(file, columns, rows)
        return f"{name}.csv"
    import duckdb

    with replacing_by_name(folder / f"{name}.parquet") as parquet:
        text = parquet.with_suffix(".csv")
        with making(text) as file:
            _write_csv(file, columns, rows)
        with duckdb.connect() as connection:
            # Not ``connection.read_csv``, which takes three times as long for the steps of a minute; without parameters, which would have
            # all rows in memory.
            path = str(text).replace("'", "''")
            table = connection.sql(f"SELECT * FROM read_csv('{path}', header = true, sample_size = -1)")  # noqa: S608 -- a path of ours
            try:
                table.write_parquet(str(parquet), compression="zstd")
            except duckdb.IOException as error:
                full = "No space left" in str(error)
                raise OSError(errno.ENOSPC if full else errno.EIO, str(error).partition("\n")[0], str(folder)) from error
    return f"{name}.parquet"


def _write_csv(file: BinaryIO, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(rows)
    text.detach()


def read_table(path: Path) -> dict[str, list[Any]]:
    """Columns of a table that :func:`write_table` wrote. Raises ``InputError`` for more than fits into memory, and for anything else."""
    with database() as connection, reading(connection, path):
        found = connection.execute(f"SELECT * FROM {table(connection, path, _ROWS)} LIMIT {_ROWS}", [str(path)])  # noqa: S608 -- constants
        names, rows = [column[0] for column in found.description or ()], found.fetchall()
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
