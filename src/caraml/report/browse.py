"""The campaigns below a folder, found by looking, never by a path that someone asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caraml.analysis.raw import raw_file
from caraml.errors import InputError
from caraml.report.labels import machine
from caraml.results.record import Record
from caraml.results.store import RECORD, Store

DEEPEST = 6
"""Folders below the root in which results are looked for."""
EVERYTHING = "all"


@dataclass(frozen=True)
class Campaign:
    """The records of one suite, or all, of one results folder."""

    folder: str
    """Of the results, below the root; ``.`` for the root itself."""
    suite: str
    store: Store
    records: list[Record]

    @property
    def title(self) -> str:
        """Heading of its page."""
        name = "All results" if self.suite == EVERYTHING else self.suite
        return name if self.folder == "." else f"{name} in {self.folder}"

    @property
    def newest(self) -> tuple[tuple[str, int], ...]:
        """Changes with every new result."""
        return tuple((record.key, record.attempt) for record in self.records)

    @property
    def facts(self) -> tuple[str, str, str]:
        """Outcome, machines and date of the last result, for a list."""
        statuses = [record.status for record in self.records]
        outcome = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
        machines = "; ".join(dict.fromkeys(machine(record.point) for record in self.records))
        return outcome, machines, max((record.started_at for record in self.records), default="")[:16].replace("T", " ")


class Shelf:
    """All results below a folder. Links out of it are not followed. Raises ``InputError`` if the folder is missing."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InputError(f"{root} is not a folder", "caraml report --serve --out FOLDER, where FOLDER holds results")
        self.root = root.resolve()
        self.faults: list[str] = []
        """What could not be read when the campaigns were last listed."""

    def campaigns(self) -> list[Campaign]:
        """Every suite of every results folder, and all results where they are more than one suite."""
        found, self.faults = [], []
        for folder, store in self.stores().items():
            try:
                suites = store.suites()
                found += [self._campaign(folder, store, suite) for suite in ([EVERYTHING] if len(suites) != 1 else []) + suites]
            except InputError as error:
                self.faults.append(str(error).splitlines()[0].replace(f"{self.root}/", ""))
        return found

    def find(self, folder: str, suite: str) -> Campaign | None:
        """One campaign, or ``None``."""
        store = self.stores().get(folder)
        if store is None or suite not in (EVERYTHING, *store.suites()):
            return None
        return self._campaign(folder, store, suite)

    def stores(self) -> dict[str, Store]:
        """Results folders by their path below the root."""
        return {path.relative_to(self.root).as_posix(): Store(path) for path in results_below(self.root)}

    def _campaign(self, folder: str, store: Store, suite: str) -> Campaign:
        records = store.records(None if suite == EVERYTHING else suite)
        return Campaign(folder, suite, store, [record for record in records if self.holds(store.folder(record) / RECORD)])

    def holds(self, path: Path) -> bool:
        """Whether a file is really below the root, whatever links lead to it."""
        return path.resolve().is_relative_to(self.root)


def results_below(folder: Path, deepest: int = DEEPEST) -> Iterator[Path]:
    """Every results folder: this one, or those below it, in the order of their names. Links are not followed."""
    if _real_folder(folder / "points"):
        yield folder
        return
    if deepest:
        with os.scandir(folder) as entries:
            inside = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
        for name in inside:
            yield from results_below(folder / name, deepest - 1)


def _real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def raw_path(shelf: Shelf, folder: str, key: str, name: str) -> Path | None:
    """The record or a raw file of a point's newest attempt, or ``None`` if that is not what the names say."""
    store = shelf.stores().get(folder)
    record = store.latest(key) if store is not None and key.isalnum() else None
    if store is None or record is None or record.key != key:
        return None
    files = {record.files[kind]: path for kind in record.files if (path := raw_file(store, record, kind)) is not None}
    path = store.folder(record) / RECORD if name == RECORD else files.get(name)
    return path if path is not None and path.is_file() and not path.is_symlink() and shelf.holds(path) else None
