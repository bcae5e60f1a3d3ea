"""Bringing data to storage of this node before anything is timed: a file or folder is copied, an archive unpacked.

EPICURE's guide keeps a copy of the whole data set in each node's memory (tmpfs), because small reads in random order are what a parallel
file system does worst. The copy takes minutes and is no part of training: its time and size are reported by themselves. One process of a
node stages, the others wait; what is there already, whole and from the same source, is used again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from caraml.data.store import build_folder
from caraml.errors import EnvironmentUnfitError, InputError

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
SQUASH_SUFFIXES = (".sqsh", ".squashfs", ".sqfs")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip", *SQUASH_SUFFIXES)
_NOTE = "staged.json"
_CONTENT = "content"


@dataclass(frozen=True)
class Staged:
    """Where staged data lies, and what bringing it there took: seconds of wall time and bytes as they lie there."""

    path: Path
    seconds: float
    bytes: int
    again: bool
    """It was there already; ``seconds`` is what it took then."""


def is_archive(source: Path) -> bool:
    """Whether a name ends as an archive's does."""
    return source.name.lower().endswith(ARCHIVE_SUFFIXES)


def stage(source: Path, to: Path, *, unpack: bool) -> Staged:
    """Copy ``source`` into the folder ``to`` or, with ``unpack``, unpack the archive ``source`` there.

    Args:
        source: a file, a folder, or an archive: tar (also compressed), zip, SquashFS.
        to: a folder on this node, such as ``/dev/shm``; it is made if it does not exist.
        unpack: unpack the archive, rather than copy the file.

    Raises:
        InputError: if ``source`` does not exist, is no archive, is damaged, or has a member that would land outside of ``to``.
        EnvironmentUnfitError: if ``to`` has no room or cannot be written, or ``unsquashfs`` is needed and missing.
    """
    source = source.resolve()
    if not source.exists():
        raise InputError(f"{source}: no such file or folder to stage")
    if unpack and not (source.is_file() and is_archive(source)):
        raise InputError(f"{source}: no archive; expected a file whose name ends in one of {', '.join(ARCHIVE_SUFFIXES)}")
    stat = source.stat()
    identity = json.dumps([str(source), stat.st_size, stat.st_mtime_ns, unpack])
    final = to / f"caraml-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    with _alone(to, final.name):
        again = (final / _NOTE).is_file()
        if not again:
            build_folder(final, lambda folder: _fill(folder, source, unpack))
    note = json.loads((final / _NOTE).read_text(encoding="utf-8"))
    content = final / _CONTENT
    return Staged(content if unpack or source.is_dir() else content / source.name, note["seconds"], note["bytes"], again)


def unstage(to: Path) -> list[Path]:
    """Remove everything that was staged into ``to``; returns what was removed."""
    found = sorted(folder for folder in to.glob("caraml-*") if (folder / _NOTE).is_file())
    for folder in found:
        shutil.rmtree(folder)
    return found


@contextlib.contextmanager
def _alone(to: Path, name: str) -> Iterator[None]:
    try:
        to.mkdir(parents=True, exist_ok=True)
        lock = (to / f".{name}.lock").open("w")
    except OSError as error:
        raise EnvironmentUnfitError(f"{to}: cannot stage data here: {error.strerror or error}", "choose a folder of this node") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fill(folder: Path, source: Path, unpack: bool) -> None:
    begin = time.monotonic()
    _need_room(folder, source)
    content = folder / _CONTENT
    try:
        if unpack:
            _unpack(source, content)
        elif source.is_dir():
            shutil.copytree(source, content)
        else:
            content.mkdir()
            shutil.copy2(source, content)
    except OSError as error:
        raise EnvironmentUnfitError(f"{folder.parent}: staging {source} failed: {error}", "free space there, or stage elsewhere") from error
    size = sum(path.stat().st_size for path in content.rglob("*") if path.is_file())
    (folder / _NOTE).write_text(json.dumps({"source": str(source), "seconds": time.monotonic() - begin, "bytes": size}), encoding="utf-8")


def _need_room(folder: Path, source: Path) -> None:
    """Images hardly shrink in an archive, so the archive's own size is what will be needed."""
    paths = source.rglob("*") if source.is_dir() else [source]
    needed = sum(path.stat().st_size for path in paths if path.is_file())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise EnvironmentUnfitError(
            f"{folder.parent}: found {free:,} bytes free; staging {source} needs {needed:,}", "stage elsewhere, or use a smaller set"
        )


def _unpack(source: Path, content: Path) -> None:
    content.mkdir()
    name = source.name.lower()
    try:
        if name.endswith(".zip"):
            _unpack_zip(source, content)
        elif name.endswith(SQUASH_SUFFIXES):
            _unpack_squash(source, content)
        else:
            with tarfile.open(source) as archive:
                archive.extractall(content, filter="data")  # refuses members that would land outside
    except tarfile.FilterError as error:
        raise InputError(f"{source}: not unpacked: {error}", "an archive of images has no such members: do not trust it") from error
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise InputError(f"{source}: damaged archive: {error}", "copy it again") from error


def _unpack_zip(source: Path, content: Path) -> None:
    with zipfile.ZipFile(source) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise InputError(f"{source}: not unpacked: {name!r} would land outside the destination", "do not trust this archive")
        archive.extractall(content)


def _unpack_squash(source: Path, content: Path) -> None:
    tool = shutil.which("unsquashfs")
    if tool is None:
        raise EnvironmentUnfitError(f"{source}: unpacking SquashFS needs unsquashfs", "install squashfs-tools, or use a tar or zip archive")
    command = [tool, "-quiet", "-no-progress", "-no-xattrs", "-force", "-dest", str(content), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"{source}: not readable as SquashFS: {' '.join(done.stderr.split())[-200:]}")
    for path in content.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(content.resolve()):
            raise InputError(f"{source}: not unpacked: {path.name!r} is a link out of the archive", "do not trust this archive")
