"""What a user can name as one side of a comparison.

``NAME`` is tried as: a results folder; a suite of the results folder in use; the key or label of a point there, ``NAME/ATTEMPT`` for an
earlier attempt at it. ``FOLDER:NAME`` looks in another folder, and ``reference:SOURCE/TABLE/RUN`` in the published figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from caraml.analysis.published import PREFIX, published
from caraml.errors import InputError
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record


@dataclass(frozen=True)
class Side:
    """Records under the name that the user gave."""

    name: str
    records: tuple[Record, ...]


def side(name: str, root: Path) -> Side:
    """The records that ``name`` stands for; ``root`` is the results folder in use. Raises ``InputError`` if there are none."""
    if name.startswith(PREFIX):
        return Side(name, tuple(published(name)))
    folder, separator, rest = name.rpartition(":")
    if separator and rest and (Path(folder) / "points").is_dir():
        return Side(name, tuple(_below(Store(Path(folder)), rest)))
    records = tuple(Store(Path(name)).records() if (Path(name) / "points").is_dir() else _below(Store(root), name))
    if not records:
        raise InputError(f"no results below {name}", "caraml run SUITE --out FOLDER")
    return Side(name, records)


def _below(store: Store, name: str) -> list[Record]:
    """Records of a suite, or of one point, in a store."""
    if name in store.suites():
        return store.records(name)
    point, separator, attempt = name.rpartition("/")
    if separator and attempt.isdecimal():
        return [_attempt(store, point, attempt)]
    try:
        return [store.find(name)]
    except InputError as error:
        what = f"{name!r} is neither a results folder, nor a suite or point below {store.root}"
        known = ", ".join(store.suites()) or "none"
        raise InputError(f"{what} (suites: {known}); {str(error).splitlines()[0]}", "caraml results --out FOLDER lists points") from error


def _attempt(store: Store, point: str, attempt: str) -> Record:
    path = store.folder(store.find(point)).parent / attempt / RECORD
    if not path.exists():
        found = sorted(file.parent.name for file in path.parents[1].glob(f"*/{RECORD}") if file.parent.name.isdecimal())
        raise InputError(f"{point!r} has no attempt {attempt}; it has {', '.join(found)}")
    return read_record(path)
