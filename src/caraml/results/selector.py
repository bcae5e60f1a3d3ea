"""What a user can name as results: one language for all verbs, described in ``docs/names.md``.

A name is tried as: a folder or file; a suite, ``SUITE+SETTING`` for a variant; ``NAME@ROUND``, ``NAME@DATE``, ``NAME@TAG`` for a campaign;
a tag; a point by its key or label, or by their beginning, ``POINT/ATTEMPT`` for one attempt at it. ``FOLDER:NAME`` looks in another folder.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from caraml.base.errors import InputError, nearest
from caraml.base.format import some
from caraml.base.limits import LOG_END, tail
from caraml.results.rows import Scalar, has_record, recorded, row_of
from caraml.results.status import TO_DO, UNHAPPY, standings
from caraml.results.store import RECORD, Listing, Store, attempts, command_of, read_record, record_of

if TYPE_CHECKING:
    from caraml.results.record import Record

_LISTED = 12
"""Names of a kind that an error lists."""
_DATE = re.compile(r"\d{4}-\d\d(-\d\d(T\d\d(:\d\d)*)?)?")
_LOGS = ("worker.log", "slurm.log", "failure.json")
_REPEAT = re.compile(r" #[0-9]+$")


@dataclass(frozen=True)
class SelectedPoint:
    """A point, and which attempt at it."""

    key: str
    label: str
    attempt: int | None = None
    """``None``: the newest with a record; 0: it has none."""


@dataclass(frozen=True)
class Selection:
    """What a name stands for."""

    name: str
    """As the user wrote it; empty for everything in the folder."""
    store: Store
    points: tuple[SelectedPoint, ...]
    listings: tuple[Listing, ...] = ()
    """The campaigns that it names; empty for a folder and for points."""
    record: Record | None = None
    """The only one, where a file is named."""

    @property
    def title(self) -> str:
        """For the heading of a report: the suite's title, and which campaign of it."""
        if not self.name:
            return "All results"
        titles = dict.fromkeys(listing.title for listing in self.listings if listing.title)
        plain = self.name in {listing.name for listing in self.listings}
        return " ".join([*titles, *([f"({self.name})"] if titles and not plain else [])]) or self.name

    @property
    def slug(self) -> str:
        """The name as the beginning of a file's name."""
        return re.sub(r"[^A-Za-z0-9._@+=-]+", "-", self.name).strip("-.")[:80] or "all"

    def rows(self) -> list[dict[str, Scalar]]:
        """A flat row for each record that there is; by the index, so that many are read in no time."""
        if self.record is not None:
            return [row_of(self.record)]
        entries, names = self.store.fresh_index().entries, self.store.names()
        found = []
        for point in self.points:
            entry = entries.get(names.get(point.key, ""))
            if entry is not None and point.attempt in (None, entry.attempt):
                found.append(entry.row)
            elif point.attempt:
                found.append(row_of(record_of(self.store.points / names[point.key] / str(point.attempt) / RECORD)))
        return found

    def records(self) -> list[Record]:
        """The records that there are, in the order of the points."""
        if self.record is not None:
            return [self.record]
        names, found = self.store.names(), []
        for point in self.points:
            folder = self.store.points / names.get(point.key, point.key)
            number = newest(folder, 0, None) if point.attempt is None else point.attempt
            found += [record_of(folder / str(number) / RECORD)] if number else []
        return found

    def every_attempt(self) -> list[Record]:
        """Every record of the points; of a suite those of all its rounds."""
        if self.record is not None or any(point.attempt is not None for point in self.points):
            return self.records()
        suites = dict.fromkeys(listing.name for listing in self.listings)
        keys = dict.fromkeys(key for suite in suites for listing in self.store.rounds(suite) for key, _ in listing.points)
        names = self.store.names()
        folders = [self.store.points / names[key] for key in keys or [point.key for point in self.points] if key in names]
        paths = (folder / str(number) / RECORD for folder in folders for number in reversed(list(recorded(folder))))
        return [record_of(path) for path in paths]

    def only(self) -> SelectedPoint:
        """The one point that is named. Raises ``InputError`` when there are several, with their keys."""
        if len(self.points) == 1:
            return self.points[0]
        suites = {key: listing.campaign for listing in self.store.campaigns() for key, _ in listing.points}
        listed = self.points[:_LISTED]
        ran = {row["key"]: f"  {row['system']}: {row['device']}" for row in self.store.rows()}
        ran = ran if len({ran.get(one.key, "") for one in listed}) > 1 else {}  # on one machine nobody needs its name
        lines = "".join(f"\n  {one.key}  {one.label}  {suites.get(one.key, '')}{ran.get(one.key, '')}".rstrip() for one in listed)
        raise InputError(f"{len(self.points)} points are meant by {self.name!r} below {self.store.root}:{lines}", "give one of the keys")

    def logs(self, lines: int) -> Iterator[tuple[str, str]]:
        """Path and last lines of every log of the only point's newest attempt."""
        point = self.only()
        folder = self.store.points / self.store.names().get(point.key, point.key)
        number = point.attempt or max(attempts(folder), default=0)
        if not number:
            raise InputError(f"{point.label} was not started yet", f"caraml status --out {self.store.root}")
        there = [log for log in (folder / str(number) / file for file in _LOGS) if log.exists()]
        if not there:
            what = "it waits yet, was imported, or is a loop of caraml.measure"
            raise InputError(f"{folder / str(number)} has no log: {what}", "caraml status")
        for log in there:
            text = tail(log, LOG_END).splitlines()[-lines:]
            yield str(log), "".join(f"{line}\n" for line in text)


def newest(folder: Path, above: int, most: int | None) -> int:
    """Number of the newest attempt of a point's folder that has a record, above ``above`` and at most ``most``; 0 if there is none."""
    return next((number for number in recorded(folder) if number > above and (most is None or number <= most)), 0)


def elsewhere(root: Path) -> str:
    """Next step of who finds no results below a folder: that of a name like it, if it is not there."""
    near = None if root.exists() else nearest(root.name, (path.parent.name for path in root.parent.glob("*/points")))
    return (
        f"did you mean --out {shlex.quote(str(root.with_name(near)))}?"
        if near
        else "caraml run quick, or --out FOLDER for results elsewhere"
    )


def select(name: str | None, root: Path) -> Selection:
    """What ``name`` stands for below the results folder ``root``; everything there without a name.

    Raises:
        InputError: it stands for nothing, with the nearest name and what there is.
    """
    if name is None:
        return _everything("", Store(root))
    path = Path(name)
    if path.is_dir() and (path / "points").is_dir():
        return _everything(name, Store(path))
    number = newest(path, 0, None) if path.is_dir() else 0
    file = next((one / RECORD for one in (path, path / str(number)) if (one / RECORD).is_file()), path)
    if file.name == RECORD and file.is_file():
        record = read_record(file)
        return Selection(name, _store_of(file), (SelectedPoint(record.key, record.point.label, record.attempt),), record=record)
    folder, colon, rest = name.rpartition(":")
    if colon and rest and (Path(folder) / "points").is_dir():
        return _below(Store(Path(folder)), rest, name)
    return _below(Store(root), name, name)


def to_retry(root: Path, names: Sequence[str], failed: bool, oom: bool) -> list[tuple[Listing, list[str]]]:
    """Suites with the keys of those of their points that are to be measured again. Raises ``InputError`` when nothing was asked for.

    Of a suite, a round or a tag these are the points that were begun: others may never have been wanted (``--only``). Points that are named
    themselves are all meant.
    """
    if not names and not failed and not oom:
        raise InputError("nothing to try again was named", "caraml retry --failed, caraml retry --oom, or caraml retry POINT")
    store = Store(root)
    states = (*(UNHAPPY if failed else ()), *(("oom",) if oom else ()))
    named = [select(name, root) for name in names]
    wanted = {one.key for selection in named for one in selection.points}
    alone = {one.key for selection in named if not selection.listings for one in selection.points}
    chosen: list[tuple[Listing, list[str]]] = []
    taken: set[str] = set()
    for listing in store.campaigns():
        there = [one for one in standings(store, listing) if one.key not in taken]
        keys = [one.key for one in there if one.state in states or (one.key in wanted and (one.state != TO_DO or one.key in alone))]
        taken.update(keys)
        if keys:
            chosen.append((listing, keys))
    return chosen


def last_two(name: str, root: Path) -> tuple[Selection, Selection]:
    """The last round but one of a suite, and the last: of the variant that was run last, if several have two rounds.

    Raises:
        InputError: it is no suite, or no variant of it has two rounds.
    """
    found = select(name, root)
    store, suites = found.store, list(dict.fromkeys(listing.name for listing in found.listings))
    variants = {listing.campaign for listing in found.listings}
    if len(suites) != 1 or "@" in name:
        raise InputError(f"{name!r} is one result, and a comparison needs two", "caraml compare A B, or caraml compare SUITE")
    rounds = [one for one in store.rounds(suites[0]) if one.campaign in variants]
    for last in reversed(rounds):
        before = [one for one in rounds if one.campaign == last.campaign and one.round < last.round]
        if before:
            return _of_round(store, before[-1]), _of_round(store, last)
    told, newest = ", ".join(map(_told, rounds)), rounds[-1]
    again = f"{command_of(newest.file, suites[0], newest.system_file or newest.system, newest.settings)} --again"
    hint = f"caraml import TABLE --suite {suites[0]} adds a table of newer results" if newest.launcher == "import" else again
    raise InputError(f"suite {suites[0]} has no two rounds of the same points to compare: {told}", hint)


def _everything(name: str, store: Store) -> Selection:
    found = tuple(SelectedPoint(str(row["key"]), str(row["label"])) for row in store.rows())
    return Selection(name, store, found)


def _store_of(file: Path) -> Store:
    """The store that a record lies in, by where it lies; its own folder for one that was copied out of one."""
    parents = file.resolve().parents
    inside = len(parents) > 3 and parents[2].name == "points"
    return Store(file.parents[3] if inside and len(file.parents) > 3 else parents[3] if inside else file.parent)


def _below(store: Store, text: str, name: str) -> Selection:
    """Campaigns or points of a store; ``text`` is the name without its folder."""
    current = store.campaigns()
    base, at, which = text.rpartition("@")
    exact = [one for one in current if text in (one.name, one.campaign)]
    if exact or (named := [one for one in current if one.settings and one.campaign.startswith(text) and "+" in text]):
        return _of_campaigns(name, store, exact or named)
    if at and (named := [one for one in current if base in (one.name, one.campaign)]):
        return _round(name, store, named, which)
    tagged = {one.campaign: one for suite in store.suites() for one in store.rounds(suite) if text in one.tags}
    if tagged:
        return _joined(name, store, [_of_round(store, one) for one in tagged.values()])
    points = _points(store, current)
    found = _named(points, text)
    if not found:
        point, slash, attempt = text.rpartition("/")
        if slash and attempt.isdecimal() and (meant := _named(points, point)):
            return Selection(name, store, tuple(_attempt(store, one, int(attempt), text) for one in meant))
        raise _nothing(store, text, current, points)
    return Selection(name, store, tuple(found))


def _of_campaigns(name: str, store: Store, listings: Sequence[Listing]) -> Selection:
    """The newest result of every point of some campaigns."""
    labels = {key: label for listing in reversed(listings) for key, label in listing.points}
    keys = dict.fromkeys(key for listing in listings for key, _ in listing.points)
    return Selection(name, store, tuple(SelectedPoint(key, labels[key]) for key in keys), tuple(listings))


def _of_round(store: Store, listing: Listing) -> Selection:
    """What a campaign found: the attempts that were made before the next one of its suite began."""
    later = [one for one in store.rounds(listing.name) if one.round > listing.round]
    ends: dict[str, int] = {}
    for one in reversed(later):
        ends |= {key: one.before.get(key, 0) for key, _ in one.points}
    names, found = store.names(), []
    for key, label in listing.points:
        begin = listing.before.get(key, 0) if listing.again else 0
        number = newest(store.points / names[key], begin, ends.get(key)) if key in names else 0
        found.append(SelectedPoint(key, label, number))
    return Selection(f"{listing.campaign}@{listing.round}", store, tuple(found), (listing,))


def _joined(name: str, store: Store, parts: Sequence[Selection]) -> Selection:
    """Several campaigns together; of a point that several have, the newest attempt."""
    points: dict[str, SelectedPoint] = {}
    for part in parts:
        for point in part.points:
            known = points.get(point.key)
            points[point.key] = point if known is None or (point.attempt or 0) > (known.attempt or 0) else known
    return Selection(name, store, tuple(points.values()), tuple(listing for part in parts for listing in part.listings))


def _round(name: str, store: Store, named: Sequence[Listing], which: str) -> Selection:
    """A campaign of a suite, or of a variant of it, by its number, its date or a tag: of several the newest."""
    suite, variants = named[0].name, {one.campaign for one in named}
    rounds = [one for one in store.rounds(suite) if one.campaign in variants]
    if which.isdecimal():
        found = [one for one in rounds if one.round == int(which)]
    elif _DATE.fullmatch(which):
        found = [one for one in rounds if one.asked_at.startswith(which)]
    else:
        found = [one for one in rounds if which in one.tags]
    if found:
        return _joined(name, store, [_of_round(store, found[-1])])
    what = "round" if which.isdecimal() else "round of" if _DATE.fullmatch(which) else "round with the tag"
    if which.isdecimal() and rounds:
        near: str | None = str(min(rounds, key=lambda one: abs(one.round - int(which[:9]))).round)
    else:
        known = [name for one in rounds for name in (*one.tags, one.asked_at[: len(which)])]
        near = nearest(which, known, 0.5)
    told = ", ".join(map(_told, rounds[-_LISTED:]))
    hint = f"did you mean {name.rpartition('@')[0]}@{near}?" if near else f"caraml status {suite} lists the rounds"
    raise InputError(f"suite {suite} has no {what} {which}; it has {told}", hint)


def _told(listing: Listing) -> str:
    """A campaign among those of its suite: ``2 (2026-11-22 10:00, nightly, global_batch=16)``."""
    words = [listing.asked_at[:16].replace("T", " "), *listing.tags, *listing.settings]
    about = ", ".join(word for word in words if word)
    return f"{listing.round}{f' ({about})' if about else ''}"


def _points(store: Store, current: Sequence[Listing]) -> dict[str, SelectedPoint]:
    """Every point that has a result or was asked for, by its key."""
    found = {str(row["key"]): SelectedPoint(str(row["key"]), str(row["label"])) for row in store.rows()}
    asked = {key: SelectedPoint(key, label) for listing in current for key, label in listing.points if key not in found}
    return found | asked


def _named(points: dict[str, SelectedPoint], text: str) -> list[SelectedPoint]:
    """Points by key, by label (without the number of a repeat: all repeats), or by the beginning of either."""
    if text in points:
        return [points[text]]
    exact = [one for one in points.values() if text in (one.label, _REPEAT.sub("", one.label))]
    return exact or [one for one in points.values() if text and (one.key.startswith(text) or one.label.startswith(text))]


def _attempt(store: Store, point: SelectedPoint, number: int, text: str) -> SelectedPoint:
    folder = store.points / store.names().get(point.key, point.key)
    if not has_record(folder / str(number)):
        known = ", ".join(map(str, sorted(recorded(folder))))
        raise InputError(
            f"{text.rpartition('/')[0]!r} has no attempt {number}; it has {known or 'none'}", "caraml history shows all of them"
        )
    return SelectedPoint(point.key, point.label, number)


def _nothing(store: Store, text: str, current: Sequence[Listing], points: dict[str, SelectedPoint]) -> InputError:
    """The error for a name that stands for nothing."""
    suites, tags = store.suites(), sorted({tag for suite in store.suites() for one in store.rounds(suite) for tag in one.tags})
    labels = list(dict.fromkeys(_REPEAT.sub("", one.label) for one in points.values()))
    kinds = (("suites", suites), ("variants", [one.campaign for one in current if one.settings]), ("tags", tags), ("points", labels))
    parts = [f"{kind}: {some(known, _LISTED)}" for kind, known in kinds if known]
    if not parts:
        return InputError(f"no results below {store.root}, where {text!r} was looked for", elsewhere(store.root))
    near = nearest(text, (name for _, known in kinds for name in known))
    hint = f"did you mean {near!r}?" if near else "caraml status lists suites and their rounds, caraml results points"
    return InputError(f"{text!r} is no folder of results, and no suite, tag or point below {store.root} ({'; '.join(parts)})", hint)
