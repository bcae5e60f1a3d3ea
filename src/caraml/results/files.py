"""Tables of raw numbers beside a record."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from caraml.base.database import database, reading, table
from caraml.base.files import making, replacing, replacing_by_name

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
            connection.read_csv(str(text), header=True, sample_size=-1).write_parquet(str(parquet), compression="zstd")
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
