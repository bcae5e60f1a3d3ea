"""What a worker has measured so far: all that is left of one that is killed outright, as by the kernel or with its node.

While it measures, it puts blocks behind each other into one file of the attempt's folder: a line of JSON, which says what the block is, and
its columns as they lie in memory. That takes next to no time. A block that did not reach the disk whole, also in the middle, is told by its
checksum; what is before it counts. Once the worker is gone, tables are made of it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any
from zlib import crc32

from caraml.base.files import names_now
from caraml.base.limits import RECORD, opened
from caraml.power.store import ROW
from caraml.results.rows import write_table
from caraml.results.store import JOURNAL

STEP_COLUMNS = ("step", "rank", "phase", "start", "seconds", "data_wait", "loss", "epoch", "batch")
"""Of the table of steps; ``epoch`` counts from 1, ``batch`` within it from 0, both null where the data has no end."""
_TABLES = {"steps": STEP_COLUMNS, "power": ROW}
_TIMES = ("start", "t_before", "t_after")
"""Columns of times, which are seconds after the block's ``origin`` in tables."""


def block(columns: Mapping[str, array[Any]] | None = None, **told: Any) -> bytes:
    """A block of equally long columns. ``told``: of which ``table`` they are; values that all rows have (``same``); what the numbers of a
    column stand for (``names``); zero of its times (``origin``); or anything else, without columns."""
    columns = columns or {}
    rows = min(map(len, columns.values()), default=0)
    parts = [column[:rows].tobytes() for column in columns.values()]
    told |= {"rows": rows, "columns": {name: column.typecode for name, column in columns.items()}, "checksum": _checksum(parts)}
    return b"".join([json.dumps(told).encode(), b"\n", *parts])


def _checksum(parts: Iterable[bytes | array[Any]]) -> int:
    return reduce(lambda found, part: crc32(part, found), parts, 0)


def of_ranks(folder: Path) -> list[Path]:
    """The journals of an attempt: rank 0's, and those of ranks that have put away theirs as they failed."""
    return [folder / name for name in sorted(names_now(folder)) if name.startswith(JOURNAL)]


def told(folder: Path) -> dict[str, Any]:
    """What blocks without columns say, the last word on each."""
    found: dict[str, Any] = {}
    for head, columns in chain.from_iterable(map(_blocks, of_ranks(folder))):
        found |= {} if columns else head
    return found


def tables(folder: Path) -> dict[str, str]:
    """Write the tables of which there are rows; the files' names, by kind. Raises ``OSError`` where they cannot be written."""
    files = {}
    for name, columns in _TABLES.items():
        rows = chain.from_iterable(_rows(path, name, columns) for path in of_ranks(folder))
        first = next(rows, None)
        if first is not None:
            files[name] = write_table(folder, name, columns, chain([first], rows))
    return files


def _blocks(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, array[Any]]]]:
    """Every block until the first that is not whole; none where there is no such file."""
    if not path.exists():
        return
    with opened(path) as (raw, size), open(raw.fileno(), "rb", closefd=False) as file:
        while line := file.readline(RECORD):
            try:
                head = json.loads(line)
                columns = {name: array(kind) for name, kind in head["columns"].items()}
                lengths = {name: head["rows"] * column.itemsize for name, column in columns.items()}
                if not 0 <= sum(lengths.values()) <= size - file.tell():
                    return
                for name, column in columns.items():
                    column.frombytes(file.read(lengths[name]))
                if head["checksum"] != _checksum(columns.values()):
                    return
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # cut off, or damaged
                return
            yield head, columns


def _rows(path: Path, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    count = 0
    for head, found in _blocks(path):
        if head.get("table") != table or not found:
            continue
        steps = range(count, count + head["rows"])
        count = steps.stop
        yield from islice(zip(*(steps if name == "step" else _values(name, head, found) for name in columns), strict=False), len(steps))


def _values(name: str, head: dict[str, Any], found: dict[str, array[Any]]) -> Iterator[Any]:
    """Of one column of a table; endless where all rows have the same."""
    if name not in found:
        return repeat(head.get("same", {}).get(name))
    if name in head.get("names", {}):
        return map(head["names"][name].__getitem__, found[name])
    origin = head.get("origin", 0.0) if name in _TIMES else 0.0
    return (None if value != value else value - origin for value in found[name])  # noqa: PLR0124 -- of all numbers NaN alone
