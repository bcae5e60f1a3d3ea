"""A record as one flat row: what the index keeps, and what tables and SQL are made of.

Column names are the metric names of :mod:`caraml.metrics.definitions`; ``NAME_low`` and ``NAME_high`` are the ends of the interval, and
``NAME_bound`` is what an energy may be off by besides. The columns are the same for every set of records, so that a query never depends
on what was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pydantic_core import to_json

from caraml.base.database import reading, table
from caraml.base.limits import MEMBERS
from caraml.metrics.definitions import METRICS
from caraml.metrics.energy import ENERGY_METRICS

if TYPE_CHECKING:
    import duckdb

    from caraml.results.record import Record


Scalar: TypeAlias = str | int | float | None

TEXT = (
    *("key", "suite", "benchmark", "workload", "label", "status", "reason", "flags"),
    *("system", "device", "device_class", "software", "started_at", "mode", "precision", "compile", "item"),
    *("energy_scope", "energy_reason", "mfu_reason", "own_metrics"),
)
"""``own_metrics``: numbers that only this program has, as JSON: ``own_metrics->>'$.loss'``."""
INTEGERS = (
    *("attempt", "nodes", "devices", "world", "global_batch", "micro_batch", "accumulation", "seed", "repeat"),
    *("schema_version", "method_version"),
)
NUMBERS = (*(f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")), *(f"{name}_bound" for name in ENERGY_METRICS))
COLUMNS = TEXT + INTEGERS + NUMBERS
_KNOWN = frozenset(COLUMNS)
_OF_POINT = tuple(
    name
    for name in (*TEXT, *INTEGERS)
    if name
    in {
        *("suite", "benchmark", "workload", "label", "system", "device", "device_class", "software", "mode", "precision", "compile"),
        *("nodes", "devices", "world", "global_batch", "micro_batch", "accumulation", "seed", "repeat"),
    }
)

_GUESSED = frozenset({"mode", "precision", "compile", "global_batch", "micro_batch", "accumulation", "seed"})
"""Columns that are null where nobody stated them: a point has some value there."""
ALWAYS = frozenset({*_OF_POINT, "key", "attempt", "status", "flags", "item", "started_at", "schema_version", "method_version"})
"""Columns that every row has."""


def row_of(record: Record) -> dict[str, Scalar]:
    """The row of a record, without the columns that are unknown."""
    point = record.point
    row: dict[str, Scalar] = {name: getattr(point, name) for name in _OF_POINT}
    unknown = {*record.unstated, *(["accumulation"] if "micro_batch" in record.unstated else [])} & _GUESSED
    row |= dict.fromkeys(unknown)
    row |= {
        "key": record.key,
        "attempt": record.attempt,
        "status": record.status,
        "flags": ",".join(record.flags),
        "item": record.item,
        "started_at": record.started_at,
        "schema_version": record.schema_version,
        "method_version": record.method_version,
    }
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
    own = {name: metric.value for name, metric in metrics.items() if name not in METRICS}
    if own:
        row["own_metrics"] = to_json(own).decode()
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
