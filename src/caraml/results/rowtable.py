"""Flat rows as a table of DuckDB and as a Parquet file: the columns are always the same, whatever the rows know."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import to_json

from caraml.base.database import reading, table
from caraml.base.limits import MEMBERS
from caraml.results.rows import INTEGERS, NUMBERS, TEXT, Scalar

if TYPE_CHECKING:
    import duckdb

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
