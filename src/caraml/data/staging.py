"""Bringing data to storage of this node before anything is timed: a file or folder is copied, an archive unpacked.

EPICURE's guide keeps a copy of the whole data set in each node's memory (tmpfs), because small reads in random order are what a parallel
file system does worst. The copy takes minutes and is no part of training: its time and size are reported by themselves. One process of a
node stages, the others wait; what is there already, whole and from the same source, is used again.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import subprocess
import tarfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import write_new
from caraml.base.limits import ZIPPED, files_below
from caraml.base.packed import unpacking, zip_of
from caraml.base.processes import alone, private_folder, user_folder
from caraml.data.store import build_folder

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
SQUASH_SUFFIXES = (".sqsh", ".squashfs", ".sqfs")
ARCHIVE_SUFFIXES = (*TAR_SUFFIXES, ".zip", *SQUASH_SUFFIXES)
_NOTE = "staged.json"
_CONTENT = "content"
_LONGEST = 1000
"""Characters of a name in an archive, folders included."""


@dataclass(frozen=True)
class Staged:
    """Where staged data lies, and what bringing it there took: seconds of wall time and bytes as they lie there."""

    path: Path
    seconds: float
    bytes: int
    again: bool
    """It was there already; ``seconds`` is what it took then."""


def stage(source: Path, to: Path, *, unpack: bool) -> Staged:
    """Copy a file or folder into the folder ``to`` of this node, which is made if it does not exist; or ``unpack`` an archive there: tar
    (also compressed), zip, SquashFS. Raises ``InputError`` if ``source`` does not exist, is no archive, is damaged, or has a member that
    would land outside of ``to``, and ``EnvironmentUnfitError`` if ``to`` has no room or cannot be written, or ``unsquashfs`` is needed and
    missing."""
    source = source.resolve()
    if not source.exists():
        raise InputError(f"{source}: no such file or folder to stage")
    if not (source.is_file() or source.is_dir()):
        raise InputError(f"{source}: neither a plain file nor a folder")
    if unpack and not (source.is_file() and source.name.lower().endswith(ARCHIVE_SUFFIXES)):
        raise InputError(f"{source}: no archive; expected a file whose name ends in one of {', '.join(ARCHIVE_SUFFIXES)}")
    stat = source.stat()
    identity = json.dumps([str(source), stat.st_size, stat.st_mtime_ns, unpack, *(_inside(source) if source.is_dir() else [])])
    final = _own_folder(to) / hashlib.sha256(identity.encode()).hexdigest()[:16]
    with alone(final.with_name(f".{final.name}.lock")):
        again = (final / _NOTE).is_file()
        if not again:
            build_folder(final, lambda folder: _fill(folder, source, unpack))
    note = json.loads((final / _NOTE).read_text(encoding="utf-8"))
    content = final / _CONTENT
    return Staged(content if unpack or source.is_dir() else content / source.name, note["seconds"], note["bytes"], again)


def _inside(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of what lies in a folder itself: a file that comes or goes one folder further in changes that one's time, not its
    own. Looking at every file would take as long as to copy them."""
    try:
        stats = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def unstage(to: Path) -> list[Path]:
    """Remove everything that was staged into ``to``; returns what was removed. Raises ``InputError`` if ``to`` is no folder."""
    if not to.is_dir():
        raise InputError(f"{to}: {'no folder' if to.exists() else 'no such folder'}", "give the folder that the data was staged to")
    own = user_folder(to)
    found = sorted(folder for folder in _own_folder(to).iterdir() if (folder / _NOTE).is_file()) if own.exists() else []
    for folder in found:
        shutil.rmtree(folder)
    return found


def _own_folder(to: Path) -> Path:
    """This user's folder in one that other users may share: what lies in it was staged by this user."""
    try:
        return private_folder(user_folder(to))
    except OSError as error:
        where, wrong = error.filename or to, isinstance(error, FileExistsError | NotADirectoryError)
        found = f"{where}: cannot stage data here: {error.strerror or error}"
        raise (InputError if wrong else EnvironmentUnfitError)(found, "choose another folder of this node") from error


def _fill(folder: Path, source: Path, unpack: bool) -> None:
    begin = time.monotonic()
    # Images hardly shrink in an archive, so the archive's own size is what will be needed at least.
    _refuse_full(folder, source, _bytes_below(source) if source.is_dir() else source.stat().st_size)
    content = folder / _CONTENT
    try:
        if unpack:
            _unpack(source, content)
        elif source.is_dir():
            content.mkdir()
            for path in files_below(source):
                target = content / Path(path).relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
        else:
            content.mkdir()
            shutil.copy2(source, content)
        size = _bytes_below(content)
    except OSError as error:
        raise EnvironmentUnfitError(f"{folder.parent}: staging {source} failed: {error}", "free space there, or stage elsewhere") from error
    write_new(folder / _NOTE, json.dumps({"source": str(source), "seconds": time.monotonic() - begin, "bytes": size}))


def _bytes_below(folder: Path) -> int:
    return sum(os.stat(path).st_size for path in files_below(folder))  # noqa: PTH116 -- a million Path objects are slow


def _refuse_full(folder: Path, source: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        found = f"{folder.parent}: found {free:,} bytes free; staging {source} needs {needed:,}"
        raise EnvironmentUnfitError(found, "stage elsewhere, or use a smaller set")


def _unpack(source: Path, content: Path) -> None:
    content.mkdir()
    name = source.name.lower()
    try:
        if name.endswith(".zip"):
            _unpack_zip(source, content)
        elif name.endswith(SQUASH_SUFFIXES):
            _unpack_squash(source, content)
        else:
            _unpack_tar(source, content)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, NotImplementedError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{source}: damaged archive: {error}", "copy it again") from error


def _unpack_tar(source: Path, content: Path) -> None:
    """As a stream, so that a list of millions of members is never in memory."""
    with unpacking(source) as file, tarfile.open(fileobj=file, mode="r|") as archive:
        archive.extraction_filter = lambda member, _: member  # Python's own filters let links out in many of its releases
        members = (_plain_member(source, member) for member in _one_by_one(archive))
        archive.extractall(content, members=members)  # noqa: S202 -- every member was looked at


def _plain_member(source: Path, member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Files and folders below the destination, with this user as the owner and plain rights: without links nothing leads out of it."""
    member.name = member.name.lstrip("/")
    if not (member.isreg() or member.isdir()):
        raise InputError(f"{source}: not unpacked: {member.name[:200]!r} is a link or a device", "pack plain files: caraml data pack does")
    _refuse_outside(source, member.name)
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    member.mode, member.mtime = 0o755 if member.isdir() else 0o644, 0
    return member


def _refuse_outside(source: Path, name: str) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or len(name) > _LONGEST:
        found = f"{source}: not unpacked: {name[:200]!r} would land outside the destination, or is too long"
        raise InputError(found, "do not trust this archive")


def _one_by_one(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in archive:
        yield member
        archive.members.clear()  # type: ignore[attr-defined]


def _unpack_zip(source: Path, content: Path) -> None:
    with zip_of(source, ZIPPED) as archive:
        for name in archive.namelist():
            _refuse_outside(source, name)
        _refuse_full(content, source, sum(entry.file_size for entry in archive.infolist()))
        archive.extractall(content)  # noqa: S202 -- a zip archive, whose names were looked at above


def _unpack_squash(source: Path, content: Path) -> None:
    tool = shutil.which("unsquashfs")
    if tool is None:
        raise EnvironmentUnfitError(f"{source}: unpacking SquashFS needs unsquashfs", "install squashfs-tools, or use a tar or zip archive")
    command = [tool, "-quiet", "-no-progress", "-no-xattrs", "-force", "-dest", str(content), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- unsquashfs; no shell
    if done.returncode:
        raise InputError(f"{source}: not readable as SquashFS: {' '.join(done.stderr.split())[-200:]}")
    for path in content.rglob("*"):
        if not (path.is_file() or path.is_dir()) or not path.resolve().is_relative_to(content.resolve()):
            raise InputError(f"{source}: not unpacked: {path.name!r} is a device or a link out of the archive", "do not trust this archive")
