"""A campaign in one file: a zip of its attempts, a table of all records for queries, and a manifest with the hash of each file.

Reading one back trusts nothing: names are checked part by part, links and other special entries are refused, sizes are bounded by the
manifest before anything is unpacked, every file must have its hash and every record and listing must be one. All of it is unpacked into a
folder beside its place, and renamed once nothing was wrong, so that of an archive that is refused nothing is left.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from caraml import __version__
from caraml.base.errors import NEWER, EnvironmentUnfitError, InputError, in_a_line
from caraml.base.files import make_folder, making, new_folder_beside, replacing, write_file, write_new
from caraml.base.limits import ARCHIVE, DIRECTORY, LISTING, MEMBER, MEMBERS, NUMBER_KEPT, TABLE, counted, too_large
from caraml.base.limits import RECORD as RECORD_BYTES
from caraml.base.packed import zip_of
from caraml.results.claim import CLAIM, HANDLE
from caraml.results.record import Record
from caraml.results.rows import has_record, recorded, unreadable, write_parquet
from caraml.results.selector import Selection, select
from caraml.results.store import POINT, RECORD, Listing, Store, attempts, read_listing, read_record, record_of

MANIFEST, ROWS = "manifest.json", "records.parquet"
_MEMBER = re.compile(r"points/([A-Za-z0-9_][A-Za-z0-9_.-]{0,99}-[0-9a-f]{16})/([1-9][0-9]{0,8})/([A-Za-z0-9_][A-Za-z0-9._-]{0,99})")
_SUITE = re.compile(r"suites/(([a-z0-9][a-z0-9_-]*)(?:\+[0-9a-f]{8})?(?:@[1-9][0-9]{0,8})?)\.json")
_BLOCK = 1 << 20
_Result = TypeVar("_Result")


class _Member(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sha256: str
    bytes: int = Field(ge=0)


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
    ahead: int = 0
    """Records of an archive at points that the store had: they are the newest attempts there."""
    left_out: list[str] = field(default_factory=list)
    """Why records were not packed."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """Of a table: its columns by what they were taken for."""


def pack(root: Path, name: str, path: Path) -> Done:
    """Pack a suite with all its rounds and variants, or the campaigns that a name stands for, into ``path``.

    Raises ``InputError`` for a name that stands for no campaign, and when the file exists.
    """
    found, done, files = select(name, root), Done(), {}
    store, rows = found.store, found.rows()
    if not found.listings:
        raise InputError(f"{name!r} is no campaign, so it makes no archive", "caraml archive SUITE FILE, or SUITE@ROUND, or a tag")
    if path.exists():
        raise InputError(f"{path} exists already", "name a new file")
    with (
        replacing(path) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        tempfile.TemporaryDirectory() as scratch,
    ):
        table = Path(scratch) / ROWS
        write_parquet((row for row in rows if not unreadable(row)), table)
        files[ROWS] = _add(archive, ROWS, table.parent)
        listings = _listings(found)
        make_folder(Path(scratch) / "suites")
        for member, listing in listings.items():
            write_file(Path(scratch) / member, listing.to_json(), sync="none")
            files[member] = _add(archive, member, Path(scratch))
        for member in _files(found, {key for listing in listings.values() for key, _ in listing.points}, done):
            files[member] = _add(archive, member, store.root)
            if len(files) >= MEMBERS:
                raise too_large(store.root, len(files), MEMBERS - 1, "files of this suite", "packed into one archive")
            done.records += member.endswith(f"/{RECORD}")
        manifest = _Manifest(caraml_archive=1, caraml=__version__, suite=found.listings[0].name, files=files)
        archive.writestr(MANIFEST, manifest.model_dump_json())
    done.files, done.bytes = len(files), path.stat().st_size
    return done


def _listings(found: Selection) -> dict[str, Listing]:
    """Listings with the names of their files: of the newest campaigns of a suite also those of their earlier rounds."""
    listings = list(found.listings)
    if _whole(found):
        chosen = {(one.name, one.campaign) for one in listings}
        suites = dict.fromkeys(one.name for one in listings)
        listings = [one for suite in suites for one in found.store.rounds(suite) if (suite, one.campaign) in chosen]
    newest = {one.stem: one.round for one in listings}
    return {f"suites/{one.stem}{'' if newest[one.stem] == one.round else f'@{one.round}'}.json": one for one in listings}


def _whole(found: Selection) -> bool:
    """Whether all attempts at the points are meant, and not those of one round."""
    return all(point.attempt is None for point in found.points)


def _files(found: Selection, keys: Collection[str], done: Done) -> Iterator[str]:
    """Names below the store of every plain file of the attempts that have a record. Claims and handles mean nothing elsewhere, and with a
    record that cannot be read nobody could read the archive: those are noted."""
    store = found.store
    chosen = None if _whole(found) else {(point.key, point.attempt) for point in found.points}
    for key, name in sorted(store.names().items(), key=lambda item: item[1]):
        folder = store.points / name
        for number in sorted(recorded(folder)) if key in keys else ():
            if chosen is not None and (key, number) not in chosen:
                continue
            if (record := record_of(folder / str(number) / RECORD)).unreadable:
                done.left_out.append(str(record.reason))
                continue
            for path in sorted((folder / str(number)).iterdir()):
                member = f"points/{name}/{number}/{path.name}"
                own = path.name == HANDLE or path.name.startswith(CLAIM)
                if _MEMBER.fullmatch(member) and path.is_file() and not path.is_symlink() and not own:
                    yield member


def _add(archive: zipfile.ZipFile, name: str, folder: Path) -> _Member:
    digest = hashlib.sha256()
    with _plain_file(folder, name) as file, archive.open(zipfile.ZipInfo(name), "w") as member:
        left = size = os.fstat(file.fileno()).st_size
        while left and (block := file.read(min(_BLOCK, left))):
            digest.update(block)
            member.write(block)
            left -= len(block)
    return _Member(sha256=digest.hexdigest(), bytes=size - left)


def _plain_file(folder: Path, name: str) -> BinaryIO:
    """A file below a folder, as it is when it is opened: whoever may write there could have put a link to another in its place.

    Raises:
        InputError: a part of its name is a link, or it is no plain file.
    """
    here = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in name.split("/"):
            outer, here = here, os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=here)
            os.close(outer)
    except OSError as error:
        os.close(here)
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise
        raise InputError(f"{folder / name}: not packed: a link, or no plain file", "give the results without links") from error
    file = os.fdopen(here, "rb") if stat.S_ISREG(os.fstat(here).st_mode) else None
    if file is None:
        os.close(here)
        raise InputError(f"{folder / name}: not packed: no plain file", "remove it")
    return file


def unpack(path: Path, root: Path) -> Done:
    """Read an archive into a store. An attempt whose record is there already is known; a new one keeps its number if that is free.

    Raises:
        InputError: the file is no archive of ours, is damaged, or holds what no archive of ours holds; the store is as it was.
        EnvironmentUnfitError: there is no room for its files.
    """
    return _opened(path, lambda archive: _unpack(archive, path, Store(root)))


def _opened(path: Path, read: Callable[[zipfile.ZipFile], _Result]) -> _Result:
    """What ``read`` makes of an archive, with every way in which a zip can be damaged told as an ``InputError``."""
    try:
        with zip_of(path) as archive:
            return read(archive)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise InputError(f"{path}: not a CARAML archive: {in_a_line(error)}") from error
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
        elif match := _SUITE.fullmatch(name):
            suites.append((name, match[1], match[2]))
    done, there = Done(files=len(manifest.files)), store.root.exists()
    make_folder(store.root)
    scratch = new_folder_beside(store.points, 0o700)
    try:
        _need_room(path, store, manifest)
        said = {}
        for name, stem, _ in suites:
            _extract(archive, path, name, manifest.files[name], scratch / f"{stem}.json")
            said[stem] = read_listing(scratch / f"{stem}.json")
        for (folder, number), names in by_attempt.items():
            for name in names:
                _extract(archive, path, name, manifest.files[name], scratch / folder / number / name.rpartition("/")[2])
            _record(scratch / folder / number, path, folder)
        places: dict[Path, Path] = {}
        numbers: dict[str, dict[int, int]] = defaultdict(dict)
        for folder, number in sorted(by_attempt, key=lambda item: (item[0], int(item[1]))):
            target = _place(scratch / folder / number, store.points / folder, places)
            numbers[folder.rpartition("-")[2]][int(number)] = int(target.name)
            if target in places or target.exists():
                done.known += 1
                continue
            done.records += 1
            done.ahead += 0 < max(attempts(target.parent), default=0) < int(target.name)
            places[target] = scratch / folder / number
        for stem, listing in said.items():
            before = {key: _number_here(number, numbers[key]) for key, number in listing.before.items()}
            # What it says of its own origin is the author's word.
            here = listing.model_copy(update={"imported": path.name, "seal": "", "before": before})
            write_file(scratch / f"{stem}.json", here.to_json(), sync="none")
        known = set(store.suites())  # the campaigns of a suite that is there already are not mixed with others
        listings = {store.root / "suites" / f"{stem}.json": scratch / f"{stem}.json" for _, stem, suite in suites if suite not in known}
        _rename(places | listings)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if not there:
            with suppress(OSError):  # it has something in it
                store.root.rmdir()
    return done


def _need_room(path: Path, store: Store, manifest: _Manifest) -> None:
    needed, free = sum(member.bytes for member in manifest.files.values()), store.free()
    if free is not None and needed > free:
        raise EnvironmentUnfitError(
            f"{store.root}: found {free:,} bytes free; {path} unpacks to {needed:,}", "import it into a folder elsewhere"
        )


def _checked(archive: zipfile.ZipFile, path: Path) -> _Manifest:
    """The manifest, once everything that can be known without unpacking is right."""
    entries = {entry.filename: entry for entry in archive.infolist()}
    manifest = _manifest(archive, path)
    if manifest.caraml_archive != 1:
        raise InputError(f"{path}: archive version {manifest.caraml_archive}, this CARAML reads 1", NEWER)
    if entries.keys() - {MANIFEST} != manifest.files.keys():
        raise InputError(f"{path}: its files are not those that {MANIFEST} lists")
    for name, member in manifest.files.items():
        if not (_MEMBER.fullmatch(name) or _SUITE.fullmatch(name) or name == ROWS):
            raise InputError(f"{path}: refused entry {name[:200]!r}: no archive of CARAML has such a file")
        mode = entries[name].external_attr >> 16
        if mode and not stat.S_ISREG(mode) and stat.S_IFMT(mode):
            raise InputError(f"{path}: refused entry {name!r}: a link or a special file")
        if entries[name].file_size != member.bytes:
            raise InputError(f"{path}: refused entry {name!r}: it has {entries[name].file_size:,} bytes, {MANIFEST} says {member.bytes:,}")
        if member.bytes > (most := _most(name)):
            raise too_large(f"{path}: {name}", member.bytes, most)
    if (total := sum(member.bytes for member in manifest.files.values())) > ARCHIVE:
        raise too_large(path, total, ARCHIVE, "bytes when unpacked")
    return manifest


def _manifest(archive: zipfile.ZipFile, path: Path) -> _Manifest:
    try:
        size = archive.getinfo(MANIFEST).file_size
    except KeyError as error:
        raise InputError(f"{path}: not a CARAML archive: it has no {MANIFEST}") from error
    if size > DIRECTORY:
        raise too_large(f"{path}: {MANIFEST}", size, DIRECTORY)
    content = counted(archive.read(MANIFEST), f"{path}: {MANIFEST}", 3 * MEMBERS, MEMBERS + 2)
    try:
        return _Manifest.model_validate_json(content)
    except ValidationError as error:
        raise InputError(f"{path}: {MANIFEST} is damaged: {in_a_line(error)}") from error


def _most(name: str) -> int:
    """Bytes that a file of this name in an archive may have: as many as will be read of it."""
    if name.endswith((".parquet", ".csv")):
        return TABLE
    return LISTING if name.startswith("suites/") else RECORD_BYTES if name.endswith(f"/{RECORD}") else MEMBER


def _place(unpacked: Path, folder: Path, places: Mapping[Path, Path]) -> Path:
    """Where an attempt that was unpacked and checked goes in a point's folder, or is: as a record that is there already, or among those
    whose ``places`` were found before."""
    record = read_record(unpacked / RECORD)
    there = {number: folder / str(number) for number in attempts(folder)}
    numbers = there | {int(target.name): source for target, source in places.items() if target.parent == folder}
    for number, path in numbers.items():
        if has_record(path) and record_of(path / RECORD).model_copy(update={"attempt": record.attempt}) == record:
            return folder / str(number)
    number = record.attempt if record.attempt not in numbers and 0 < record.attempt <= NUMBER_KEPT else max(numbers, default=0) + 1
    if number != record.attempt:
        write_file(unpacked / RECORD, record.model_copy(update={"attempt": number}).model_dump_json(indent=1), sync="none")
    return folder / str(number)


def _number_here(before: int, numbers: Mapping[int, int]) -> int:
    """The highest number that attempts up to ``before`` have in this store, by the ``numbers`` that those of an archive got."""
    return max((new for old, new in numbers.items() if old <= before), default=min(numbers.values(), default=before + 1) - 1)


def _rename(sources: Mapping[Path, Path]) -> None:
    """Rename sources to their targets, all of them or none."""
    renamed: list[Path] = []
    try:
        for target, source in sources.items():
            make_folder(target.parent)
            source.rename(target)
            renamed.append(target)
    except BaseException:
        for target in reversed(renamed):
            target.rename(sources[target])
            with suppress(OSError):  # others have something in it
                target.parent.rmdir()
        raise


def _record(scratch: Path, path: Path, folder: str) -> Record:
    if not (scratch / RECORD).exists():
        raise InputError(f"{path}: an attempt of {folder} has no {RECORD}")
    try:
        record = read_record(scratch / RECORD)
    except InputError as error:
        raise InputError(f"{path}: {RECORD} of {folder}: {str(error.args[0]).removeprefix(f'{scratch / RECORD}: ')}") from error
    if f"{record.point.workload}-{record.key}" != folder:
        raise InputError(f"{path}: the record in {folder} is one of {record.point.workload}-{record.key}")
    if not (scratch / POINT).exists():
        write_new(scratch / POINT, record.point.model_dump_json(indent=1))
    return record


def _extract(archive: zipfile.ZipFile, path: Path, name: str, member: _Member, target: Path) -> None:
    """Write one entry, no longer than the manifest says, and with its hash."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), member.bytes
    with archive.open(name) as source, making(target) as file:
        while left >= 0 and (block := source.read(min(_BLOCK, left + 1))):
            left -= len(block)
            digest.update(block)
            file.write(block)
    if left < 0 or digest.hexdigest() != member.sha256:
        target.unlink()
        raise InputError(f"{path}: {name} is damaged: its hash is not the one in {MANIFEST}")


def rows_file(path: Path, folder: Path) -> Path:
    """The table of an archive's records, unpacked into ``folder``. Raises ``InputError`` for anything but a sound archive."""

    def unpacked(archive: zipfile.ZipFile) -> Path:
        member = _manifest(archive, path).files.get(ROWS)
        if member is None or ROWS not in archive.namelist():
            raise InputError(f"{path}: not a CARAML archive: it has no {ROWS}")
        if member.bytes > TABLE:
            raise too_large(f"{path}: {ROWS}", member.bytes, TABLE)
        _extract(archive, path, ROWS, member, folder / ROWS)
        return folder / ROWS

    return _opened(path, unpacked)
