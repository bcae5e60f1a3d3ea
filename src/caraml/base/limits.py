"""Reading what other people made within limits: each limit once, and the readers that keep to them.

Reading one such file takes at most about :data:`MEMORY` and :data:`SECONDS` on top of what the process has already; the tests hold that
with a file of each kind that was made to take more.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, cast

from caraml.base.errors import InputError

if TYPE_CHECKING:
    import duckdb

_MiB = 1 << 20

MEMORY = 512 * _MiB
"""What reading one file may take at most, in bytes, results of it included."""
SECONDS = 10.0
"""What reading one file may take at most, in seconds of computing."""

RECORD = 16 * _MiB
"""Bytes of one JSON file: a record, a point, a failure, a result of `caraml power`, what stands beside a corpus."""
LISTING = 16 * _MiB
"""Bytes of the list of a suite's points."""
JSON_VALUES, JSON_OBJECTS = 500_000, 50_000
"""Values (or arrays) and objects of a JSON file, counted by its commas, brackets and braces.

Each can be a fault, and a fault takes far more memory than it."""
INDEX = 64 * _MiB
"""Bytes of the index of a store; a larger one is not used."""
TOML = _MiB
"""Bytes of a suite or system file."""
VALUES = 100_000
"""Values in a TOML file."""
DEPTH = 32
"""Tables and arrays within each other in a TOML file, dotted keys counted part by part."""
INCLUDED = 10_000
"""Benchmarks of a suite with those of all suites that it includes."""
KEY = 200
"""Characters of a key in a TOML file."""
FAULTS = 50
"""Faults of a file that are told; of more, only their number."""
POINTS = 100_000
"""Points of a suite, and combinations of one benchmark's swept values before conditions."""
NUMBER = 999_999_999
"""Highest number of an attempt."""
NUMBER_KEPT = 1_000_000
"""Highest number that an attempt brings from an archive: above it, it takes the next free one, so that numbers do not run out."""
PHASES, FLAGS, METRICS = 20_000, 100, 1_000
"""Phases, flags and metrics of a record."""
LARGEST = 1e100
"""Largest number of a record; one that is not 0 is larger than its inverse, so that what is made of two or three stays a number."""
NAME = 10_000
"""Characters of a name, label or unit in a record."""
COUNT = 10**15
"""What counts may be at most: batches, devices, steps, repeats."""
MEMBERS = 200_000
"""Files in an archive of ours, records among them."""
ZIPPED = 500_000
"""Files in a zip of data; tar files may have any number, because they are read as they come."""
DIRECTORY = 32 * _MiB
"""Bytes of an archive's own list of its files, and of the manifest in one of ours."""
MEMBER, ARCHIVE = 4 << 30, 256 << 30
"""Bytes of one unpacked file of an archive of ours that is not read here, such as a log, and of all of them."""
RATIO, UNPACKED = 100, 64 * _MiB
"""What is packed may unpack to so many times its size, or to so many bytes if that is more: gzip alone can reach 1,000 times."""
DOCUMENT = 16 * _MiB
"""Bytes of a line of JSON Lines, and of a document of plain text: a longer file is several documents."""
TOKENIZER, TOKENIZER_VALUES, VOCABULARY = 48 * _MiB, 1_600_000, 1_000_000
"""Bytes of a file of a tokenizer, its values and merges, and its tokens."""
GROWTH = 16
"""How many times as long a tokenizer may make a text before it divides it."""
SQUAD, SQUAD_VALUES, SQUAD_OBJECTS = 64 * _MiB, 2_000_000, 600_000
"""Bytes, values and objects of a file of questions, unpacked."""
SQUAD_TEXT = 256 * 10**6
"""Characters of all its texts, each as often as there are questions on it."""
DIGITS = 256 * _MiB
"""Bytes of a file of digits, unpacked."""
IMAGE = 64 * _MiB
"""Bytes of a file of an image."""
PIXELS, PIXELS_OTHER = 64 * 10**6, 25 * 10**6
"""Pixels of a JPEG, and of an image of another form, which takes more memory to decode."""
CLASSES, IMAGES = 1_000_000, 2 * 10**7
"""Classes and images of a set."""
CHUNK, SLICE = 128 * _MiB, 128 * _MiB
"""Bytes of a chunk of an HDF5 file, which is unpacked whole, and of the part of a variable that is read at once."""
LINKS = 10_000
"""Names in an HDF5 file."""
CORPUS_ROWS = 10**9
"""Rows of a Parquet file of text, which is read row by row."""
WINDOW = 128 * _MiB
"""Bytes of what was unpacked last that a format may have kept to unpack the next; `xz -9` asks for half of it."""
CHECKPOINT = 64 * _MiB
"""Bytes of the description of a checkpoint; its tensors are as large as those of the model that takes them."""
TABLE = 1 << 30
"""Bytes of a raw table beside a record."""
FOOTER = 8 * _MiB
"""Bytes of the contents table at the end of a Parquet file."""
ROWS_SCANNED = 200_000_000
"""Rows of a raw table that is summed up: steps over ranks, power over spans of time."""
ROWS = 8_640_000
"""Readings, or rows of a table for SQL, that are taken as they are: a day of 10 ms each."""
RANK_ROWS = 2_000_000
"""Steps of all ranks that are compared one by one."""
CHANNELS = 1_000
"""Channels of a table of power."""
CHANNEL_NAME = 4_200
"""Characters of a channel's name: a meter's has the path of its file, which has 4,096 at most."""
STEPS = 8_640_000
"""Steps of one record: a day of 10 ms each."""
DATABASE = 256 * _MiB
"""What DuckDB takes of the memory."""
JUBE, JUBE_ROWS, JUBE_CELLS = 4 * _MiB, 1_000, 100_000
"""Bytes, rows and cells of a result table of JUBE: each row becomes a record."""
JUBE_TEXT = 20_000
"""Characters of a parameter of a JUBE script, with the values of those in it."""
MERGED, MERGED_CHANNELS, RANKS = 96 * _MiB, 200_000, 100_000
"""Bytes and channels of all results of `caraml power` that are merged, and ranks that a result may say there were."""
OUTPUT = 128 * _MiB
"""Bytes of what a program printed or wrote, from which its numbers are read."""
PATTERN = 1000
"""Characters of a regular expression in a suite."""
LINE = 64 << 10
"""Bytes of a small file of one or two lines, and of the end of a log in which a reason is looked for."""
LOG_END = 4 * _MiB
"""Bytes of the end of a log that is shown."""


def is_measurable(value: float) -> bool:
    """Whether a number has a size that a record may have: not NaN either."""
    return value == 0 or 1 / LARGEST < abs(value) < LARGEST


def read_bytes(path: Path | str, most: int = RECORD) -> bytes:
    """A whole file, of at most so many bytes.

    Raises:
        InputError: it is larger, or no plain file: a pipe would keep its reader waiting, and a device never ends.
        OSError: it is not there, or cannot be read.
    """
    with opened(path) as (file, size):
        if size > most:
            raise too_large(path, size, most)
        return file.read(size)


def read_json(path: Path | str, most: int = RECORD) -> bytes:
    """As :func:`read_bytes` for JSON that a model will check. Raises ``InputError`` also for more values than are read."""
    return counted(read_bytes(path, most), path)


def counted(content: bytes, path: Path | str, values: int = JSON_VALUES, objects: int = JSON_OBJECTS) -> bytes:
    """JSON as it is. Raises ``InputError`` for more values, arrays or objects than are read."""
    for mark, limit, what in ((b",", values, "values"), (b"[", values, "arrays"), (b"{", objects, "objects")):
        if (count := content.count(mark)) > limit:
            raise too_large(path, count, limit, what)
    return content


def read_text(path: Path | str, most: int = RECORD) -> str:
    """As :func:`read_bytes`, as text in UTF-8. Raises ``UnicodeDecodeError`` for anything else."""
    return read_bytes(path, most).decode()


def tail(path: Path | str, most: int = LINE) -> str:
    """The end of a file that may be of any size; what is not UTF-8 in it is replaced. Errors as :func:`read_bytes`."""
    with opened(path) as (file, size):
        file.seek(max(0, size - most))
        return file.read(most).decode("utf-8", errors="replace")


@contextmanager
def opened(path: Path | str) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file to read, unbuffered, and its size now. Raises as :func:`read_bytes`."""
    with open(path, "rb", buffering=0, opener=_opener) as file:
        found = os.fstat(file.fileno())
        if not S_ISREG(found.st_mode):
            raise InputError(f"{path}: not a plain file")
        yield cast(BinaryIO, file), found.st_size


def files_below(folder: Path | str, seen: set[tuple[int, int]] | None = None) -> Iterator[str]:
    """Every plain file below a folder, wherever links lead; pipes, sockets and devices are left out. Its folders are added to those that
    were ``seen`` before.

    Raises:
        InputError: a folder cannot be read, or links lead into one for the second time: there might be no end.
    """
    seen, folders = set() if seen is None else seen, [os.fspath(folder)]
    while folders:
        here = folders.pop()
        try:
            found = os.stat(here)  # noqa: PTH116 -- a million Path objects are slow
            if (found.st_dev, found.st_ino) in seen:
                raise InputError(f"{here}: a link leads into a folder for the second time", "remove the link: nothing is read twice")
            seen.add((found.st_dev, found.st_ino))
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir():
                        folders.append(entry.path)
                    elif entry.is_file():
                        yield entry.path
        except OSError as error:
            raise InputError(f"{here}: cannot be read: {error.strerror or error}") from error


def _opener(path: str, flags: int) -> int:
    del flags
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer opens at once


def too_large(path: Path | str, found: float, most: float, what: str = "bytes", done: str = "read") -> InputError:
    """The error for more of something than is taken in."""
    return InputError(f"{path}: found {_count(found)} {what}, at most {_count(most)} are {done}")


def _count(number: float) -> str:
    return f"{number:,.0f}" if number < 1e18 else f"{number:.3g}"


@contextmanager
def limited() -> Iterator[None]:
    """Raise ``TimeoutError`` once the process has computed for :data:`SECONDS` in the block: Python's patterns look for signals as they
    search.

    Signals reach the main thread only: in any other the block has all the time it wants.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _over)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise TimeoutError


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


def table(
    connection: duckdb.DuckDBPyConnection, path: Path, most: int = ROWS_SCANNED, size: int | None = TABLE, *, numbered: bool = False
) -> str:
    """SQL for the table in a Parquet or CSV file, whose name is the parameter that the query is given; to be used within :func:`reading`.

    With ``numbered`` a Parquet file's has the further column ``file_row_number``, by which a part is found without looking at the rest.

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
    return "read_parquet(?, file_row_number = true)" if numbered else "read_parquet(?)"
