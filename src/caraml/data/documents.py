"""The documents of text files, one after another, whatever they are packed in. Nothing is held in memory but the current one."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO, cast

from caraml.errors import InputError, nearest

_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_PARQUET_SUFFIXES = (".parquet",)
_PLAIN_SUFFIXES = (
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".tsv", ".toml", ".yaml", ".yml"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".f", ".f90", ".rs", ".go", ".java", ".js", ".ts", ".jl", ".lua"),
    *(".r", ".rb", ".sh", ".pl", ".sql", ".swift", ".scala", ".hs"),
)
_ROWS_AT_ONCE = 256


def _open_zstd(path: Path) -> IO[bytes]:
    import zstandard

    return cast(IO[bytes], zstandard.open(path, "rb"))


_UNPACKERS: Mapping[str, Callable[[Path], Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open, ".zst": _open_zstd}
"""What opens a compressed file for reading bytes, by its suffix."""


def _unpack_errors(path: Path) -> tuple[type[Exception], ...]:
    """What a damaged file raises; the zstandard package is asked only where there is such a file."""
    if path.suffix.lower() != ".zst":
        return (OSError, EOFError, lzma.LZMAError, zlib.error)
    from zstandard import ZstdError

    return (OSError, EOFError, ZstdError)


def text_files(inputs: Sequence[Path]) -> list[Path]:
    """The files that ``inputs`` stand for: files as they are, folders searched to the bottom in sorted order.

    Of a folder, files with a known text suffix are taken, compressed or not; hidden files and folders are passed over.

    Raises:
        InputError: if an input does not exist, or a folder holds no text.
    """
    files: list[Path] = []
    for path in inputs:
        if path.is_dir():
            found = sorted(_walk(path))
            if not found:
                raise InputError(
                    f"{path}: found no text file; expected JSON Lines, Parquet, plain text or source files",
                    "name a file itself to have it read as plain text whatever its suffix",
                )
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
    packed = path.suffix.lower() in _UNPACKERS
    return (Path(path.stem) if packed else path).suffix.lower()


def read_documents(path: Path, text_key: str = "text") -> Iterator[str]:
    """The texts of one file, in order: a line of JSON Lines, a row of Parquet, or the whole of any other file.

    Args:
        path: the file; ``.xz``, ``.gz``, ``.bz2`` and ``.zst`` are unpacked on the way, except for Parquet.
        text_key: the field of a line, or the column of a table, that holds the text.

    Raises:
        InputError: naming the file and, where there is one, the line: not readable, not UTF-8, damaged, or without the text.
    """
    layout = _format(path)
    if layout in _PARQUET_SUFFIXES:
        return _parquet_documents(path, text_key)
    if layout in _LINE_SUFFIXES:
        return _line_documents(path, text_key)
    return _whole_document(path)


def _lines(path: Path, read: Callable[[TextIO], Iterator[str]]) -> Iterator[str]:
    """What ``read`` takes from the unpacked text, with every way in which a file can be damaged told as an InputError."""
    unpack = _UNPACKERS.get(path.suffix.lower(), partial(Path.open, mode="rb"))
    try:
        with unpack(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="\n") as text:
            yield from read(text)
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: found byte {error.object[error.start]:#04x}; expected UTF-8 text") from error
    except _unpack_errors(path) as error:
        raise InputError(f"{path}: cannot be read or unpacked: {error}") from error


def _whole_document(path: Path) -> Iterator[str]:
    return _lines(path, lambda text: iter([text.read()]))


def _line_documents(path: Path, text_key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path, iter), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: found no JSON ({error}); expected one object per line") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: found {type(record).__name__}; expected an object with the key {text_key!r}")
        if text_key not in record:
            raise _missing_text(f"{path}, line {number}", text_key, list(record))
        if not isinstance(record[text_key], str):
            raise InputError(f"{path}, line {number}, key {text_key!r}: found {type(record[text_key]).__name__}; expected text")
        yield _without_surrogates(record[text_key])


def _without_surrogates(text: str) -> str:
    """JSON can spell half a character; it becomes U+FFFD, because a tokenizer takes whole ones only."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


def _parquet_documents(path: Path, text_key: str) -> Iterator[str]:
    import duckdb

    try:
        with duckdb.connect() as connection:
            columns = {name: kind for name, kind, *_ in connection.execute("DESCRIBE FROM read_parquet($1)", [str(path)]).fetchall()}
            if text_key not in columns:
                raise _missing_text(str(path), text_key, list(columns))
            if columns[text_key] != "VARCHAR":
                raise InputError(f"{path}, column {text_key!r}: found {columns[text_key]}; expected text")
            quoted = '"' + text_key.replace('"', '""') + '"'
            rows = connection.execute(f"SELECT {quoted} FROM read_parquet($1) WHERE {quoted} IS NOT NULL", [str(path)])
            while batch := rows.fetchmany(_ROWS_AT_ONCE):
                yield from (text for (text,) in batch)
    except duckdb.Error as error:
        raise InputError(f"{path}: not readable as Parquet: {error}") from error


def _missing_text(where: str, text_key: str, found: list[str]) -> InputError:
    guess = nearest(text_key, found) or next(iter(found), "KEY")
    return InputError(
        f"{where}: found the keys {', '.join(found) or 'none'}; expected {text_key!r}", f"name the text's key, such as {guess!r}"
    )
