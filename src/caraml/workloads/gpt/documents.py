"""The documents of text files, one after another, whatever they are packed in. Nothing is held in memory but the current one."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from caraml.base.errors import InputError, nearest
from caraml.base.limits import CORPUS_ROWS, DOCUMENT, counted, database, reading, table, too_large
from caraml.base.packed import most_unpacked, packed, unpacking, unpacks_too_far

if TYPE_CHECKING:
    import duckdb

_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet",)
_PLAIN_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".toml", ".yaml", ".yml"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".f", ".f90", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".lua"),
    *(".r", ".rb", ".sh", ".pl", ".sql", ".swift", ".scala", ".hs"),
)
_LONG = 1 << 20
"""Characters of a line above which it is looked at before it is parsed."""
_ROW = 16
"""Bytes that a line or a row counts at least, or in addition to its text: a file may have very many empty ones."""
_VECTOR = 2048
"""Rows that DuckDB hands over together."""
_AT_ONCE = 64 << 20
"""Bytes of text that it may hand over together."""


def text_files(inputs: Sequence[Path]) -> list[Path]:
    """The files that ``inputs`` stand for: files as they are, folders searched to the bottom in sorted order.

    Of a folder, files with a known text suffix are taken, compressed or not; hidden files and folders are passed over. Raises
    ``InputError`` if an input does not exist, or a folder holds no text.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(_walk(path))
            if not found:
                what = f"{path}: found no text file; expected JSON Lines, Parquet, plain text or source files"
                raise InputError(what, "name a file itself to have it read as plain text whatever its suffix")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"{path}: no such file or folder")
    return files


def _walk(folder: Path) -> Iterator[Path]:
    known = (*_LINE_SUFFIXES, *_PARQUET_SUFFIXES, *_PLAIN_SUFFIXES)
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith(".") and _format(Path(name)) in known)


def _format(path: Path) -> str:
    """The suffix that says how the content is laid out, below the one that says how it is compressed; lower case."""
    return (Path(path.stem) if packed(path) else path).suffix.lower()


def read_documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """The texts of one file, in order: the field ``text_key`` of each line of JSON Lines, that column of Parquet, or the whole of any other
    file, in parts if it is large. ``.xz``, ``.gz``, ``.bz2`` and ``.zst`` are unpacked on the way, except for Parquet. Raises
    ``InputError`` with the file and, where there is one, the line, for what is not readable, not UTF-8, damaged, or without the text."""
    layout = _format(path)
    if layout in _PARQUET_SUFFIXES:
        return _parquet_documents(path, text_key)
    if layout in _LINE_SUFFIXES:
        return _line_documents(path, text_key)
    return _plain_documents(path)


def _pieces(path: Path, lines: bool) -> Iterator[str]:
    """The unpacked text: its lines with their ends, or as it comes; either at most :data:`~caraml.base.limits.DOCUMENT` bytes long."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with unpacking(path) as raw:
        read = raw.readline if lines else raw.read
        try:
            while piece := read(DOCUMENT):
                yield decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: found byte {error.object[error.start]:#04x}; expected UTF-8 text") from error


def _plain_documents(path: Path) -> Iterator[str]:
    """The whole file; one of more than :data:`~caraml.base.limits.DOCUMENT` bytes as several documents that end where a line does."""
    held = ""
    for piece in _pieces(path, lines=False):
        if held:
            whole, end, rest = piece.rpartition("\n")
            yield held + whole + end
            held = rest
        else:
            held = piece
    if held:
        yield held


def _line_documents(path: Path, text_key: str) -> Iterator[str]:
    most, name = most_unpacked(path.stat().st_size), str(path)
    for number, line in enumerate(_pieces(path, lines=True), start=1):
        if number * _ROW > most:
            raise too_large(path, number, most // _ROW, "lines")
        if line.isspace():
            continue
        where = f"{name}, line {number}"
        if len(line) > _LONG:
            if not line.endswith("\n") and len(line.encode()) >= DOCUMENT:
                raise InputError(f"{where}: found more than {DOCUMENT:,} bytes in it, at most so many are read")
            counted(line.encode(), where)
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: found no JSON ({error}); expected one object per line") from error
        if not isinstance(record, dict):
            raise InputError(f"{where}: found {type(record).__name__}; expected an object with the key {text_key!r}")
        if text_key not in record:
            raise _missing_text(where, text_key, list(record))
        if not isinstance(record[text_key], str):
            raise InputError(f"{where}, key {text_key!r}: found {type(record[text_key]).__name__}; expected text")
        yield _without_surrogates(record[text_key])


def _without_surrogates(text: str) -> str:
    """JSON can spell half a character; it becomes U+FFFD, because a tokenizer takes whole ones only."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


def _parquet_documents(path: Path, text_key: str) -> Iterator[str]:
    with database(threads=1) as connection:
        with reading(connection, path):
            table(connection, path, CORPUS_ROWS, size=None)
            columns = {name: kind for name, kind, *_ in connection.execute("DESCRIBE FROM read_parquet(?)", [str(path)]).fetchall()}
        if text_key not in columns:
            raise _missing_text(str(path), text_key, list(columns))
        if columns[text_key] != "VARCHAR":
            raise InputError(f"{path}, column {text_key!r}: found {columns[text_key]}; expected text")
        text = '"' + text_key.replace('"', '""') + '"'
        with reading(connection, path, seconds=None):  # all of it is read, and text of any length comes
            for part in _parts(connection, path, text):
                found = connection.execute(
                    f"SELECT {text} FROM read_parquet(?, file_row_number = true) WHERE {text} IS NOT NULL{part}",  # noqa: S608 -- the one name from outside is quoted; the path is a parameter
                    [str(path)],
                )
                while row := found.fetchone():
                    yield row[0]


def _parts(connection: duckdb.DuckDBPyConnection, path: Path, text: str) -> Iterator[str]:
    """Conditions that divide a table into parts of which DuckDB may take all rows of a vector at once; usually one, of all rows. Raises
    ``InputError`` where the table unpacks to more than a file of its size should, or a text is longer than is read."""
    numbered = f"SELECT strlen({text}) AS size, file_row_number // {_VECTOR} AS vector FROM read_parquet(?, file_row_number = true)"  # noqa: S608 -- the one name from outside is quoted; the path is a parameter
    vectors = f"SELECT count(*) AS rows, sum(size) AS total, max(size) AS longest FROM ({numbered}) GROUP BY vector"  # noqa: S608 -- the one name from outside is quoted; the path is a parameter
    found = connection.execute(f"SELECT sum(rows), sum(total), max(longest), max(total) FROM ({vectors})", [str(path)]).fetchone()  # noqa: S608 -- the one name from outside is quoted; the path is a parameter
    rows, total, longest, largest = (int(number or 0) for number in found or (0, 0, 0, 0))
    if total + _ROW * rows > (most := most_unpacked(path.stat().st_size)):
        raise unpacks_too_far(path, most)
    if longest > DOCUMENT:
        raise too_large(path, longest, DOCUMENT, "bytes in a text")
    if largest <= _AT_ONCE:
        yield ""
        return
    step = max(1, _AT_ONCE // longest)
    for first in range(0, rows, step):
        yield f" AND file_row_number BETWEEN {first} AND {first + step - 1}"


def _missing_text(where: str, text_key: str, found: list[str]) -> InputError:
    guess = nearest(text_key, found) or next(iter(found), "KEY")
    what = f"{where}: found the keys {', '.join(found) or 'none'}; expected {text_key!r}"
    return InputError(what, f"name the text's key, such as {guess!r}")
