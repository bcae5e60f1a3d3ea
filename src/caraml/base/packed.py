"""Compressed files and archives of other people: unpacked piece by piece, and no further than a file of its size should need."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from caraml.base.errors import InputError, in_a_line
from caraml.base.limits import DIRECTORY, MEMBERS, RATIO, UNPACKED, WINDOW, opened, too_large

_BLOCK = 1 << 18
_ENTRY = b"PK\x01\x02"
"""What every entry of a zip's list begins with."""


def most_unpacked(size: int) -> int:
    """Bytes that a packed file of so many bytes may unpack to."""
    return max(UNPACKED, RATIO * size)


def unpacks_too_far(path: Path, most: int) -> InputError:
    """The error for a file that unpacks to more than :func:`most_unpacked` says."""
    return InputError(f"{path}: refused: it unpacks to more than {most:,} bytes, the most that are read of a file of its size")


@contextmanager
def unpacking(path: Path) -> Iterator[BinaryIO]:
    """The content of a file that is compressed as its suffix says (``.gz``, ``.xz``, ``.bz2``, ``.zst``), or of any other as it is.

    Raises:
        InputError: naming the file: not readable, damaged, or, when it is read so far, more than a file of its size should unpack to.
    """
    unpack = _UNPACKERS.get(path.suffix.lower())
    try:
        stack = ExitStack()
        file, size = stack.enter_context(opened(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    with stack:
        raw = stack.enter_context(unpack(file)) if unpack else file
        yield cast(BinaryIO, io.BufferedReader(Bounded(raw, path, most_unpacked(size)), _BLOCK))


def packed(path: Path) -> bool:
    """Whether :func:`unpacking` unpacks a file of this name."""
    return path.suffix.lower() in _UNPACKERS


class Bounded(io.RawIOBase):
    """What another file gives, up to ``most`` bytes; a read beyond raises the ``InputError`` that names ``path`` and the limit."""

    def __init__(self, file: IO[bytes] | io.RawIOBase, path: Path, most: int) -> None:
        super().__init__()
        self._file, self._path, self._most, self._left = file, path, most, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self._file.read(min(len(buffer), self._left + 1)) or b""
        except _damage(self._path) as error:
            raise InputError(f"{self._path}: cannot be read or unpacked: {in_a_line(error)}") from error
        self._left -= len(content)
        if self._left < 0:
            raise unpacks_too_far(self._path, self._most)
        buffer[: len(content)] = content
        return len(content)


class _Xz(io.RawIOBase):
    """An xz file by a decompressor of bounded memory: its header may ask for 4 GiB. ``lzma.open`` has no way to say so."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file, self._decoder = file, self._new()

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=WINDOW)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            block = b""
            if self._decoder.eof:  # another stream may follow, after zeros that fill up to four bytes
                block = self._decoder.unused_data.lstrip(b"\0") or self._file.read(_BLOCK).lstrip(b"\0")
                if not block:
                    return 0
                self._decoder = self._new()
            elif self._decoder.needs_input:
                block = self._file.read(_BLOCK)
                if not block:
                    raise EOFError("it ends before its end-of-stream marker")
            content = self._decoder.decompress(block, len(buffer))
            if content:
                buffer[: len(content)] = content
                return len(content)


def _zstd(file: BinaryIO) -> IO[bytes]:
    import zstandard

    return cast(IO[bytes], zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(file, read_across_frames=True))


_UNPACKERS: Mapping[str, Callable[[BinaryIO], Any]] = {
    ".xz": _Xz,
    **dict.fromkeys((".gz", ".tgz"), lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": bz2.BZ2File,
    ".zst": _zstd,
}
"""What unpacks a compressed file, by its suffix."""


def _damage(path: Path) -> tuple[type[Exception], ...]:
    """What a damaged file raises; the zstandard package is asked only where there is such a file."""
    if path.suffix.lower() != ".zst":
        return (OSError, EOFError, lzma.LZMAError, zlib.error)
    from zstandard import ZstdError

    return (OSError, EOFError, ZstdError)


class _Listed(io.FileIO):
    """A zip whose list of files is looked at before objects are made of its entries, which take ten times its bytes."""

    def __init__(self, path: Path, members: int) -> None:
        super().__init__(path)
        self._members = members

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > DIRECTORY:
            raise too_large(str(self.name), size, DIRECTORY, "bytes in its list of files")
        content = super().read(-1 if size is None else size)
        if (count := content.count(_ENTRY)) > self._members:
            raise too_large(str(self.name), count, self._members, "files")
        return content


@contextmanager
def zip_of(path: Path, members: int = MEMBERS) -> Iterator[zipfile.ZipFile]:
    """A zip of others whose list of files is within limits, and whose files unpack to no more than they should, by its own word.

    Raises:
        InputError: more files than ``members``, the same name twice, or more bytes than a file of its size should unpack to.
        zipfile.BadZipFile: it is damaged, and whatever else ``zipfile`` raises.
    """
    with opened(path) as (_, size), _Listed(path, members) as file, zipfile.ZipFile(cast(BinaryIO, file)) as archive:
        entries = archive.infolist()
        if len(archive.NameToInfo) < len(entries):
            raise InputError(f"{path}: refused: it has two files of the same name")
        if sum(entry.file_size for entry in entries) > (most := most_unpacked(size)):
            raise unpacks_too_far(path, most)
        yield archive
