"""DuckDB for tables that other people made: within the limits of memory, time and rows, and with one line for what goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from caraml.base.errors import InputError
from caraml.base.limits import DATABASE, FOOTER, LINE, MEMORY, ROWS_SCANNED, SECONDS, TABLE, too_large

if TYPE_CHECKING:
    import duckdb

_THREADS = 4
_LONGEST = 200
_LOOK = 0.1
"""Seconds between looks at what a query has taken."""
_PATIENCE = 12
"""Times its computing that a query may last: disks and machines are busy."""


def database(spill: Path | None = None, threads: int = _THREADS) -> duckdb.DuckDBPyConnection:
    """A database in memory, also for a ``with`` block, that takes at most :data:`~caraml.base.limits.DATABASE`; what does not fit
    goes into the folder ``spill``.

    Each of its ``threads`` works on a part of a table of its own in memory.
    """
    import duckdb

    config: dict[str, Any] = {
        "memory_limit": f"{DATABASE >> 20}MiB",
        "threads": min(threads, os.cpu_count() or 1),
        "temp_directory": str(spill or ""),
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    return duckdb.connect(config=config)


@contextmanager
def reading(
    connection: duckdb.DuckDBPyConnection, path: Path, what: str = "is not a table that can be read", seconds: float | None = SECONDS
) -> Iterator[None]:
    """Give a block that reads ``path`` its time; with ``seconds = None`` all that it wants, as what comes row by row does.

    Raises:
        InputError: naming the file: it took more than it may, or ``what`` with DuckDB's reason.
    """
    import duckdb

    done = threading.Event()
    if seconds is not None:
        threading.Thread(target=_watch, args=(connection, done, seconds), name="caraml-database", daemon=True).start()
    try:
        yield
    except duckdb.InterruptException as error:
        raise InputError(f"{path}: reading it takes more than {seconds:g} s") from error
    except duckdb.OutOfMemoryException as error:
        raise InputError(f"{path}: reading it takes more than {MEMORY >> 20} MiB") from error
    except duckdb.Error as error:
        raise InputError(f"{path} {what}: {' '.join(str(error).split())[:_LONGEST]}") from error
    finally:
        done.set()


def _watch(connection: duckdb.DuckDBPyConnection, done: threading.Event, seconds: float) -> None:
    """Interrupt a query when the process has computed for its time, or has waited for a disk or a busy machine for far longer."""
    computed, began = time.process_time(), time.monotonic()
    while not done.wait(_LOOK):
        if time.process_time() - computed > seconds or time.monotonic() - began > _PATIENCE * seconds:
            connection.interrupt()
            return


def table(connection: duckdb.DuckDBPyConnection, path: Path, most: int = ROWS_SCANNED, size: int | None = TABLE) -> str:
    """SQL for the table in a Parquet or CSV file, whose name is the parameter that the query is given; to be used within :func:`reading`.

    Raises:
        InputError: no plain file, larger than ``size`` bytes, or with more rows than ``most``.
        duckdb.Error: not a table.
    """
    found = path.stat()
    if not S_ISREG(found.st_mode):
        raise InputError(f"{path}: not a plain file")
    if set("*?[") & set(str(path)) and connection.execute("SELECT file FROM glob(?)", [str(path)]).fetchall() not in ([], [(str(path),)]):
        raise InputError(f"{path}: not read: its name stands for other files, too")  # for DuckDB, also where there is a file of this name
    if size is not None and found.st_size > size:
        raise too_large(path, found.st_size, size)
    if path.suffix != ".parquet":
        return f"read_csv(?, header = true, sample_size = -1, max_line_size = {LINE})"
    with path.open("rb") as file:
        file.seek(max(0, found.st_size - 8))
        end = file.read(8)
    footer = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1":
        raise InputError(f"{path} cannot be read: it is no Parquet file, or only the beginning of one")
    if footer > FOOTER:
        raise too_large(path, footer, FOOTER, "bytes of contents table")
    rows = connection.execute("SELECT sum(num_rows) FROM parquet_file_metadata(?)", [str(path)]).fetchone()
    if rows is not None and rows[0] is not None and rows[0] > most:
        raise too_large(path, rows[0], most, "rows")
    return "read_parquet(?)"
