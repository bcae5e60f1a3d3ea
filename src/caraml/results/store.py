"""Where records live: a folder of files, written by whoever ran the point, read by everyone.

    ROOT/points/WORKLOAD-KEY/ATTEMPT/   point.json run.sh worker.log progress.jsonl record.json steps.parquet power.parquet
    ROOT/suites/SUITE.json              the listing of its newest campaign: the suite's text and points, who asked, where it runs
    ROOT/suites/SUITE+HASH.json         the newest of a variant by --set; ...@ROUND.json an earlier one
    ROOT/runners/                       who runs campaigns now
    ROOT/open/WORKLOAD-KEY.ATTEMPT      marks a loop of ``caraml.measure`` that has no record yet
    ROOT/index.jsonl                    table of contents; made from the files, never the truth

An attempt never overwrites another: its folder appears whole, by a rename that only one can win, and the newest attempt with a whole
record is the point's result. Two campaigns may therefore write to one folder, and a killed one leaves nothing behind that looks like a
result. The campaigns of a suite are numbered in the order in which they were asked for, variants included.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from caraml.base.errors import EnvironmentUnfitError, InputError, in_a_line
from caraml.base.files import intruder, make_folder, nearest_folder, new_folder_beside, trusting, who_else, write_file, write_new
from caraml.base.limits import LISTING, read_json
from caraml.results.reading import POINT, read_record, record_of, see_readable
from caraml.results.rows import RECORD, Index, Scalar, attempts, point_folders, recorded
from caraml.system.variables import digest, forget

if TYPE_CHECKING:  # building these models takes longer than listing ten thousand records by the index, which does without
    from caraml.results.record import Record
    from caraml.suite.model import Point

__all__ = ["POINT", "RECORD", "Listing", "Store", "attempts", "read_listing", "read_record", "record_of", "see_readable", "write_record"]

ROOM = ".room"
"""File of no worth in the folder of an attempt under way: it keeps room on the disk for the record, and for what comes before it."""
JOURNAL = "so_far.bin"
"""What a worker has measured so far (see :mod:`caraml.results.journal`), until there is a record."""
_AGAIN = "run the suite again: what has a result is not measured twice"


def command_of(file: str, name: str, system: str = "local", settings: Sequence[str] = ()) -> str:
    """What runs a suite, for hints; ``file`` is the path that it was read from, if it is none of the catalogue."""
    options = ["--system", system] if system not in ("", "local") else []
    options += [word for one in settings for word in ("--set", one)]
    return shlex.join(["caraml", "run", file if file.endswith(".toml") else name, *options])


class Listing(BaseModel):
    """A campaign: a suite as it was run into a store."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    title: str = ""
    file: str = Field("", description="name or path by which the suite was asked for")
    text: str = Field("", description="the suite file itself, with what it includes, so that it can be run again without it")
    settings: list[str] = Field([], description="`--set` values")
    system: str = "local"
    system_file: str = Field("", description="path of the description that was asked for, if by its file")
    launcher: str = "local"
    launchers: list[str] = Field([], description="those that it was told to use before, while it went on")
    machine: str = Field("", description="what computes, with its software")
    tags: list[str] = []
    comment: str = ""
    asked_at: str = ""
    imported: str = Field("", description="the archive that it came from: its programs are not run before somebody has seen them")
    points: list[tuple[str, str]] = Field([], description="key and label of each point, in order")
    round: int = Field(1, description="number of the campaign among those of its suite, from 1")
    again: bool = Field(False, description="whether it measured anew what had a result")
    before: dict[str, int] = Field({}, description="by key, the highest number of an attempt at a point when the campaign began")
    seal: str = Field("", description="what only this user's key makes of all this: who copies the folder of another has no such listing")

    @property
    def campaign(self) -> str:
        """Its name with what ``--set`` changed: ``quick+global_batch=16``; it stands for the newest round of this variant."""
        return "+".join([self.name, *self.settings])

    @property
    def stem(self) -> str:
        """Name of the file of the newest round of this variant, without its ending."""
        if not self.settings:
            return self.name
        return f"{self.name}+{hashlib.sha256(json.dumps(self.settings).encode()).hexdigest()[:8]}"

    def to_json(self) -> str:
        """The listing as its file has it."""
        return self.model_dump_json(indent=1)

    def sealed(self) -> Listing:
        """The listing with the seal of the user who runs this; with none where the user's key cannot be kept."""
        try:
            return self.model_copy(update={"seal": self._seal()})
        except EnvironmentUnfitError:
            return self

    @property
    def mine(self) -> bool:
        """Whether the user who runs this asked for it."""
        try:
            return hmac.compare_digest(self.seal.encode(), self._seal().encode())
        except EnvironmentUnfitError:
            return False

    def stranger(self) -> str:
        """Whose programs it names, if not those of the user who runs this: the archive that it came from, or somebody. Empty otherwise."""
        return self.imported or ("" if self.mine else "another user, another machine or an earlier version")

    def _seal(self) -> str:
        return digest("listing", self.model_copy(update={"seal": ""}).model_dump_json(exclude_defaults=True))


def read_listing(path: Path) -> Listing:
    """Read a listing. Raises ``InputError`` for anything else."""
    try:
        listing = Listing.model_validate_json(read_json(path, LISTING))
    except (ValidationError, ValueError, RecursionError, FileNotFoundError) as error:  # a link to nothing is listed, too
        raise InputError(f"{path}: not a list of a suite's points: {in_a_line(error)}", _AGAIN) from error
    if not all(key.isalnum() for key, _ in listing.points):
        raise InputError(f"{path}: not a list of keys", _AGAIN)
    return listing.model_copy(update={"name": suite_of(path.stem)})  # whatever it calls itself: it is asked for by the file's name


def suite_of(stem: str) -> str:
    """Name of the suite whose campaign a file of this name (without its ending) lists."""
    return stem.partition("@")[0].partition("+")[0]


class Store:
    """The records below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.points = root / "points"
        self.index = Index(root, record_of)
        self._known_names: dict[str, str] = {}

    # -- writing -------------------------------------------------------------------------------------------------------

    def make(self) -> None:
        """Make the folder, or see that what is started from it is what this user wrote into it.

        Raises:
            InputError: somebody else could put another script in the place of one.
        """
        if intruder(self.root) is None:
            make_folder(self.points)
        if (found := self._intruder()) is not None:
            raise _not_ours(self.root, *found)

    def unfit(self) -> str | None:
        """Why nothing can be started from the folder, as far as is known without writing to it."""
        try:
            if (found := self._intruder()) is not None:
                return _not_ours(self.root, *found).line
            place = nearest_folder(self.points)
            if not os.access(place, os.W_OK | os.X_OK):
                return f"{place}: you may not write to it; next step: --out FOLDER"
            return f"{place}: found 0 bytes free, expected some; next step: make room, or --out FOLDER" if self.free() == 0 else None
        except OSError as error:
            return f"{error.filename or self.root}: {error.strerror}"

    def free(self) -> int | None:
        """Bytes that this user can still write below the folder; ``None`` where its file system does not say."""
        disk = shutil.disk_usage(nearest_folder(self.points))
        return (disk.free if os.geteuid() else disk.total - disk.used) if disk.total else None

    def _intruder(self) -> tuple[str, str] | None:
        """As ``intruder`` for the folder and what is in it, as far as it is there."""
        folders = [folder for folder in (self.root, self.points) if folder.is_dir()]
        return intruder(self.root) or next(filter(None, map(_intruder_inside, folders)), None)

    def new_attempt(self, point: Point, files: Callable[[Path], Mapping[str, str]] | None = None) -> Path:
        """Make and return the folder of a new attempt at ``point``, with ``files`` as in :meth:`claim_attempt`."""
        name, number = point.folder_name, 0
        while True:
            number = max([number, *attempts(self.points / name)]) + 1  # another host's may not be listed yet
            if (folder := self.claim_attempt(point, name, number, files)) is not None:
                return folder

    def claim_attempt(self, point: Point, name: str, number: int, files: Callable[[Path], Mapping[str, str]] | None = None) -> Path | None:
        """Make attempt ``number`` at ``point``, or return ``None`` if it exists: of several campaigns that try, one gets it.

        ``name`` is that of the point's folder, ``number`` one more than the attempts that the caller has looked at. ``files`` makes names
        and texts of what is in the attempt's folder from its first moment on; without it that is ``point.json`` alone.
        """
        folder = self.points / name
        attempt = folder / str(number)
        make_folder(folder)
        temporary = new_folder_beside(attempt)
        try:
            contents = files(attempt) if files is not None else {POINT: point.model_dump_json(indent=1)}
            for file, text in contents.items():
                write_new(f"{temporary}/{file}", text, mode=0o755 if file.endswith(".sh") else 0o644)
            os.rename(temporary, attempt)  # noqa: PTH104 -- fails when the attempt exists, since that is never empty
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY) or os.path.lexists(attempt):
                return None
            raise
        return attempt

    def remember(self, listing: Listing, anew: bool = False) -> None:
        """Note which points a suite consists of, so that it can be reported and taken up without its file.

        The campaign of the same points goes on, unless they are measured ``anew``. Any other is a round of its own, and the one before it
        is kept under its number.
        """
        folder = self.root / "suites"
        make_folder(folder)
        path, old = folder / f"{listing.stem}.json", None
        with suppress(InputError):  # damaged: replaced
            old = read_listing(path) if path.exists() else None
        if old is not None and _work(old) == _work(listing) and not anew:
            tags, comment = list(dict.fromkeys([*old.tags, *listing.tags])), listing.comment or old.comment
            goes_on = {"round": old.round, "again": old.again, "before": old.before, "asked_at": old.asked_at or listing.asked_at}
            told = [name for name in dict.fromkeys([*old.launchers, old.launcher]) if name != listing.launcher] if old.mine else []
            listing = listing.model_copy(update={**goes_on, "tags": tags, "comment": comment, "launchers": told})
        else:
            if old is not None:
                write_file(folder / f"{listing.stem}@{old.round}.json", old.to_json())
            number = 1 + max((one.round for one in self.rounds(listing.name)), default=0)
            names = self.names()
            highest = {key: max(attempts(self.points / names[key]), default=0) for key, _ in listing.points if key in names}
            again = anew and listing.launcher != "import"  # rows of a table that are known belong to this round, too
            begun = {"round": number, "again": again, "before": {key: most for key, most in highest.items() if most}}
            listing = listing.model_copy(update=begun)
        write_file(path, listing.sealed().to_json())

    # -- reading -------------------------------------------------------------------------------------------------------

    def folder(self, record: Record) -> Path:
        """Folder of a record's raw files."""
        return self.points / f"{record.point.workload}-{record.key}" / str(record.attempt)

    def latest(self, key: str) -> Record | None:
        """The newest whole record of a point, or ``None``."""
        folder = self._folder_of(key)
        return None if folder is None else latest_in(folder)

    def newest(self, key: str, most: int | None, until: int | None = None) -> list[Record]:
        """The newest whole records of a point, the newest first, up to attempt ``until`` if that is given; without attempts that somebody
        ended."""
        folder = self._folder_of(key)
        found = () if folder is None else (record_of(folder / str(number) / RECORD) for number in recorded(folder))
        counted = (record for record in found if not record.ended_by_hand and (until is None or record.attempt <= until))
        return list(islice(counted, most))

    def suites(self) -> list[str]:
        """Names of the suites that were run into this folder."""
        return sorted(set(map(suite_of, self._listed())))

    def current(self, suite: str) -> list[Listing]:
        """The newest campaign of a suite as it is written, then of each variant. Raises ``InputError`` for
        one that was not run into this folder."""
        stems = [stem for stem in self._listed() if suite_of(stem) == suite and "@" not in stem]
        if not stems:
            raise InputError(f"no results of suite {suite!r} below {self.root}", f"caraml run {suite}")
        return sorted(map(self._read_listing, stems), key=lambda one: (bool(one.settings), one.round))

    def campaigns(self) -> list[Listing]:
        """The newest campaign of every variant of every suite."""
        return [listing for suite in self.suites() for listing in self.current(suite)]

    def rounds(self, suite: str) -> list[Listing]:
        """Every campaign of a suite, in the order of their numbers; empty for one that was not run."""
        found = map(self._read_listing, (stem for stem in self._listed() if suite_of(stem) == suite))
        return sorted(found, key=lambda one: one.round)

    def _read_listing(self, stem: str) -> Listing:
        return read_listing(self.root / "suites" / f"{stem}.json")

    def _listed(self) -> list[str]:
        try:
            return sorted(name.removesuffix(".json") for name in os.listdir(self.root / "suites") if name.endswith(".json"))  # noqa: PTH208
        except FileNotFoundError:
            return []

    def records(self, suite: str | None = None) -> list[Record]:
        """The newest record of every point in the order in which they last changed, or of a suite and its variants in their order."""
        names = self.names()
        keys = names if suite is None else dict.fromkeys(key for listing in self.current(suite) for key, _ in listing.points)
        found = (latest_in(self.points / names[key]) for key in keys if key in names)
        return [record for record in found if record is not None]

    def rows(self) -> list[dict[str, Scalar]]:
        """As :meth:`records`, each as a flat row without its unknown columns; by the index, so that many are read in no time."""
        entries = self.fresh_index().entries
        return [entries[name].row for name in self.names().values() if name in entries]

    def fresh_index(self) -> Index:
        """The index, up to date with the files."""
        if not self.index.entries:
            self.index.load()
        self.index.refresh()
        self.index.save()
        return self.index

    def _folder_of(self, key: str) -> Path | None:
        """Folder of a point. All are listed once, and again for a key that was not there: one listing per key is quadratic."""
        if key not in self._known_names:
            self._known_names = self.names()
        return self.points / self._known_names[key] if key in self._known_names else None

    def names(self) -> dict[str, str]:
        """Name of each point's folder by the point's key, in the order in which they last changed."""
        found = dict[str, int]()
        for entry in point_folders(self.points):
            with suppress(FileNotFoundError):  # removed meanwhile
                found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
        return {name.rpartition("-")[2]: name for name in sorted(found, key=lambda name: (found[name], name))}


def _work(listing: Listing) -> list[str]:
    """Keys of a campaign's points; labels are those of the version that wrote them. Rows of a table may stand in any order."""
    keys = [key for key, _ in listing.points]
    return sorted(keys) if listing.launcher == "import" else keys


def _intruder_inside(folder: Path) -> tuple[str, str] | None:
    """As ``intruder`` for what is in a folder, files left out."""
    with os.scandir(folder) as entries:
        others = (entry for entry in entries if not entry.is_file(follow_symlinks=False))
        doubtful = (one.path for one in others if one.is_symlink() or who_else(one.path, one.stat(follow_symlinks=False)))
        return next((found for path in doubtful if (found := intruder(path))), None)


def _not_ours(root: Path, place: str, who: str) -> InputError:
    trusted = f", or, if you trust all of them, {trusting(place)}"
    if Path(place).is_relative_to(root.resolve()) and not os.access(place, os.W_OK):
        trusted = ""  # this user could not write there all the same
    mend = "" if who.startswith("belongs") else f"chmod go-w {shlex.quote(place)}, or "
    return InputError(
        f"{root}: nothing is started from here, because others could put another program in its place: {place}: {who}",
        f"{mend}--out with a folder of your own (caraml archive and caraml import share what is in it){trusted}",
    )


def latest_in(folder: Path) -> Record | None:
    """The newest whole record in a point's folder, or ``None``."""
    return next((record_of(folder / str(number) / RECORD) for number in recorded(folder)), None)


def write_record(folder: Path, record: Record) -> None:
    """Write a record into its attempt's folder, whole or not at all, where need be in the room that was kept for it. What only its job was
    to know goes."""
    (folder / ROOM).unlink(missing_ok=True)
    write_file(folder / RECORD, record.model_dump_json(indent=1))
    forget(folder)
