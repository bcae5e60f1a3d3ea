"""Writing so that a file exists whole or not at all, and tables of raw numbers."""

from __future__ import annotations

import csv
import errno
import importlib.util
import os
from collections.abc import Iterable, Sequence
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


def write_new(path: str, text: str, *, executable: bool = False) -> None:
    """Write a file that must not exist, without syncing it. Raises ``OSError`` also when only a part fitted on the disk."""
    content = text.encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755 if executable else 0o644)
    try:
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    finally:
        os.close(descriptor)


def publish_quickly(folder: str, name: str, content: bytes) -> None:
    """As :func:`write_atomically` with half the waiting: the file is whole or not there, but after a power cut the newest may be gone."""
    temporary = f"{folder}/.{name}.{os.getpid()}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temporary)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, f"{folder}/{name}")  # noqa: PTH104 -- called ten thousand times in a row


def write_table(folder: Path, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Write rows as ``name.parquet``, or ``name.csv`` where DuckDB is missing (a bare worker). Returns the file's name.

    Rows are written as they come: a run of a day has millions of them, which need not be in memory together.
    """
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
