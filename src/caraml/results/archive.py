"""A campaign in one file: a zip of its attempts, a table of all records for queries, and a manifest with the hash of each file.

Reading one back trusts nothing: names are checked part by part, links and other special entries are refused, sizes are bounded by the
manifest before anything is unpacked, every file must have its hash and every record must be one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, ValidationError

from caraml import __version__
from caraml.errors import InputError
from caraml.results.claim import CLAIM, HANDLE
from caraml.results.listing import read_listing
from caraml.results.record import Record
from caraml.results.rowtable import write_parquet
from caraml.results.store import POINT, RECORD, Store, attempts, read_record

MANIFEST, ROWS = "manifest.json", "records.parquet"
_MEMBER = re.compile(r"points/([a-z0-9_]+-[0-9a-f]{16})/([1-9][0-9]{0,8})/([A-Za-z0-9_][A-Za-z0-9._-]{0,99})")
_SUITE = re.compile(r"suites/([a-z0-9][a-z0-9_-]*)\.json")
_LARGEST_FILE = 4 * 2**30
_LARGEST_TOTAL = 256 * 2**30
_LARGEST_MANIFEST = 2**30
_MOST_FILES = 20_000_000
_BLOCK = 1 << 20


class _Member(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sha256: str
    bytes: int


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="ignore")

    caraml_archive: int
    caraml: str
    suite: str
    files: dict[str, _Member]


@dataclass
class Done:
    """What was packed or read."""

    records: int = 0
    files: int = 0
    bytes: int = 0
    known: int = 0
    """Records that the store had already."""


def pack(root: Path, suite: str, path: Path) -> Done:
    """Pack a suite's points into ``path``. Raises ``InputError`` for an unknown suite, and when the file exists."""
    store, done, files = Store(root), Done(), {}
    listing, rows = store.listing(suite), store.rows(suite)
    if path.exists():
        raise InputError(f"{path} exists already", "name a new file")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, tempfile.TemporaryDirectory() as scratch:
            table = Path(scratch) / ROWS
            write_parquet(rows, table)
            members = [(f"suites/{listing.name}.json", root / "suites" / f"{listing.name}.json"), (ROWS, table)]
            for name, source in (*members, *_attempt_files(store, {key for key, _ in listing.points})):
                files[name] = _add(archive, name, source)
                done.records += name.endswith(f"/{RECORD}")
            manifest = _Manifest(caraml_archive=1, caraml=__version__, suite=suite, files=files)
            archive.writestr(MANIFEST, manifest.model_dump_json())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    done.files, done.bytes = len(files), path.stat().st_size
    return done


def _attempt_files(store: Store, keys: set[str]) -> Iterator[tuple[str, Path]]:
    """Every plain file of the attempts that have a record. Claims and handles mean nothing elsewhere."""
    for folder in sorted(store.points.iterdir()):
        if folder.name.rpartition("-")[2] not in keys:
            continue
        for number in sorted(attempts(folder) or ()):
            if not (folder / str(number) / RECORD).exists():
                continue
            for path in sorted((folder / str(number)).iterdir()):
                name = f"points/{folder.name}/{number}/{path.name}"
                own = path.name == HANDLE or path.name.startswith(CLAIM)
                if _MEMBER.fullmatch(name) and path.is_file() and not path.is_symlink() and not own:
                    yield name, path


def _add(archive: zipfile.ZipFile, name: str, source: Path) -> _Member:
    size, digest = 0, hashlib.sha256()
    with source.open("rb") as file, archive.open(zipfile.ZipInfo(name), "w") as member:
        while block := file.read(_BLOCK):
            digest.update(block)
            member.write(block)
            size += len(block)
    return _Member(sha256=digest.hexdigest(), bytes=size)


def unpack(path: Path, root: Path) -> Done:
    """Read an archive into a store. An attempt whose record is there already is known; a new one takes the next free number.

    Raises:
        InputError: the file is no archive of ours, is damaged, or holds what no archive of ours holds.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _unpack(archive, path, Store(root))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: not a CARAML archive: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:  # a disk, not an offset in the file that points before its start
            raise
        raise InputError(f"{path}: not a CARAML archive: its parts are not where it says") from error


def _unpack(archive: zipfile.ZipFile, path: Path, store: Store) -> Done:
    manifest = _checked(archive, path)
    by_attempt: dict[tuple[str, str], list[str]] = defaultdict(list)
    suites = []
    for name in manifest.files:
        if match := _MEMBER.fullmatch(name):
            by_attempt[match[1], match[2]].append(name)
        elif _SUITE.fullmatch(name):
            suites.append(name)
    done = Done(files=len(manifest.files))
    for (folder, _), names in sorted(by_attempt.items(), key=lambda item: (item[0][0], int(item[0][1]))):
        _import_attempt(archive, path, store, folder, names, manifest, done)
    for name in suites:
        target = store.root / name
        if not target.exists():
            _extract(archive, path, name, manifest.files[name], target)
            read_listing(target)
    return done


def _checked(archive: zipfile.ZipFile, path: Path) -> _Manifest:
    """The manifest, once everything that can be known without unpacking is right."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    found = entries.get(MANIFEST)
    if found is None or len(entries) > _MOST_FILES or found.file_size > _LARGEST_MANIFEST:
        raise InputError(f"{path}: not a CARAML archive: it has no {MANIFEST} of a sensible size")
    try:
        manifest = _Manifest.model_validate_json(archive.read(MANIFEST))
    except ValidationError as error:
        raise InputError(f"{path}: {MANIFEST} is damaged: {error}") from error
    if manifest.caraml_archive != 1:
        raise InputError(f"{path}: archive version {manifest.caraml_archive}, this CARAML reads 1", "pip install --upgrade caraml")
    if len(archive.infolist()) != len(entries) or entries.keys() - {MANIFEST} != manifest.files.keys():
        raise InputError(f"{path}: its files are not those that {MANIFEST} lists")
    for name, member in manifest.files.items():
        if not (_MEMBER.fullmatch(name) or _SUITE.fullmatch(name) or name == ROWS):
            raise InputError(f"{path}: refused entry {name!r}: no archive of CARAML has such a file")
        mode = entries[name].external_attr >> 16
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise InputError(f"{path}: refused entry {name!r}: a link or a special file")
        if entries[name].file_size != member.bytes or not 0 <= member.bytes <= _LARGEST_FILE:
            raise InputError(f"{path}: refused entry {name!r}: it has {entries[name].file_size:,} bytes, {MANIFEST} says {member.bytes:,}")
    if sum(member.bytes for member in manifest.files.values()) > _LARGEST_TOTAL:
        raise InputError(f"{path}: larger than {_LARGEST_TOTAL >> 30} GiB when unpacked")
    return manifest


def _import_attempt(  # noqa: PLR0917 -- one loop's body
    archive: zipfile.ZipFile, path: Path, store: Store, folder: str, names: list[str], manifest: _Manifest, done: Done
) -> None:
    """Unpack one attempt beside its place, check its record, and rename it into the store."""
    target = store.points / folder
    target.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".import-", dir=target))
    try:
        for name in names:
            _extract(archive, path, name, manifest.files[name], scratch / name.rpartition("/")[2])
        record = _record(scratch, path, folder)
        numbers = attempts(target) or []
        if any(_same(target / str(number) / RECORD, record) for number in numbers):
            done.known += 1
            return
        number = record.attempt if record.attempt not in numbers else max(numbers) + 1
        if number != record.attempt:
            renumbered = record.model_copy(update={"attempt": number})
            (scratch / RECORD).write_text(renumbered.model_dump_json(indent=1), encoding="utf-8")
        scratch.chmod(0o755)
        scratch.rename(target / str(number))
        done.records += 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _record(scratch: Path, path: Path, folder: str) -> Record:
    if not (scratch / RECORD).exists():
        raise InputError(f"{path}: an attempt of {folder} has no {RECORD}")
    record = read_record(scratch / RECORD)
    if f"{record.point.workload}-{record.key}" != folder:
        raise InputError(f"{path}: the record in {folder} is one of {record.point.workload}-{record.key}")
    if not (scratch / POINT).exists():
        (scratch / POINT).write_text(record.point.model_dump_json(indent=1), encoding="utf-8")
    return record


def _same(path: Path, record: Record) -> bool:
    """Whether a record is this one, whatever its number here."""
    return path.exists() and read_record(path).model_copy(update={"attempt": record.attempt}) == record


def _extract(archive: zipfile.ZipFile, path: Path, name: str, member: _Member, target: Path) -> None:
    """Write one entry, no longer than the manifest says, and with its hash."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, target.open("xb") as file:
        digest = _copy(source, file, member.bytes)
    if digest != member.sha256:
        target.unlink()
        raise InputError(f"{path}: {name} is damaged: its hash is not the one in {MANIFEST}")


def _copy(source: IO[bytes], file: IO[bytes], most: int) -> str:
    digest, left = hashlib.sha256(), most
    while block := source.read(min(_BLOCK, left + 1)):
        left -= len(block)
        if left < 0:
            return "too long"
        digest.update(block)
        file.write(block)
    return digest.hexdigest()


def rows_file(path: Path, folder: Path) -> Path:
    """The table of an archive's records, unpacked into ``folder``. Raises ``InputError`` for anything but a sound archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            files = json.loads(archive.read(MANIFEST)).get("files", {}) if archive.getinfo(MANIFEST).file_size <= _LARGEST_MANIFEST else {}
            member = _Member.model_validate(files.get(ROWS))
            if member.bytes > _LARGEST_FILE:
                raise InputError(f"{path}: {ROWS} is larger than {_LARGEST_FILE >> 30} GiB")
            _extract(archive, path, ROWS, member, folder / ROWS)
    except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, AttributeError, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{path}: not a CARAML archive: {error}") from error
    return folder / ROWS
