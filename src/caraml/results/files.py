"""Writing so that a file exists whole or not at all, and tables of raw numbers."""

from __future__ import annotations

import csv
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path``: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _publish(temporary, path)


def write_table(folder: Path, name: str, columns: Mapping[str, Sequence[Any]]) -> str:
    """Write equally long columns as ``name.parquet``, or ``name.csv`` where DuckDB is missing (a bare worker). Returns the file's name."""
    rows = zip(*columns.values(), strict=True)
    temporary = folder / f".{name}.{os.getpid()}.csv"
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    if importlib.util.find_spec("duckdb") is None:
        _publish(temporary, folder / f"{name}.csv")
        return f"{name}.csv"
    import duckdb

    parquet = folder / f".{name}.{os.getpid()}.parquet"
    with duckdb.connect() as connection:
        source = connection.read_csv(str(temporary), header=True, sample_size=-1)
        source.write_parquet(str(parquet), compression="zstd")
    temporary.unlink()
    _publish(parquet, folder / f"{name}.parquet")
    return f"{name}.parquet"


def read_table(path: Path) -> dict[str, list[Any]]:
    """Columns of a table that :func:`write_table` wrote."""
    import duckdb

    with duckdb.connect() as connection:
        relation = connection.read_parquet(str(path)) if path.suffix == ".parquet" else connection.read_csv(str(path), header=True)
        names, rows = relation.columns, relation.fetchall()
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _publish(temporary: Path, path: Path) -> None:
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
