"""Every attempt over time: per system and work a series, and the points at which its level changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from caraml.analysis.changepoint import FEWEST, change_points
from caraml.analysis.grouping import axes, grouped, names, without
from caraml.analysis.lint import Difference, compare_facts, facts
from caraml.analysis.spread import SMALLEST_SD, values
from caraml.errors import InputError, unknown_name
from caraml.results.record import Record
from caraml.results.store import RECORD, read_record
from caraml.units import METRICS

_MAY_CHANGE = ("software",)
"""Axes in which the attempts of one series may differ: what may have changed over time."""

_UNKNOWN = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True)
class Entry:
    """One attempt."""

    time: datetime
    value: float
    low: float | None
    high: float | None
    """The record's own 95 % interval."""
    key: str
    attempt: int
    software: str


@dataclass(frozen=True)
class ChangePoint:
    """A change of the level between two attempts."""

    index: int
    """Of the first entry with the new level."""
    ratio: float
    """New level over old level."""
    better: bool | None
    """``None`` for a metric of which neither direction is better."""
    provisional: bool
    """True where the new level rests on a single attempt."""
    changed: tuple[Difference, ...]
    """What changed with it; ``a`` is before, ``b`` after. First choice: facts that held through the stretch before and through the one
    after. If there is none: what differs between the two neighbours."""


@dataclass(frozen=True)
class Series:
    """One metric of the same work on the same system over time."""

    name: str
    system: str
    device: str
    metric: str
    unit: str
    entries: tuple[Entry, ...]
    """By time."""
    changes: tuple[ChangePoint, ...]
    note: str | None
    """Why no change can be found, if there are too few entries."""

    def levels(self) -> list[tuple[int, int, float]]:
        """First index, last index and level (geometric mean) of each stretch between changes."""
        edges = [0, *(change.index for change in self.changes), len(self.entries)]
        return [(begin, end - 1, _level(self.entries[begin:end])) for begin, end in pairwise(edges)]


def attempts(roots: Iterable[Path]) -> list[Record]:
    """Every record of every attempt below some results folders, by time. Raises ``InputError`` if there is none."""
    folders = list({root.resolve(): root for root in roots}.values())
    found = (path for root in folders for path in sorted((root / "points").glob(f"*/*/{RECORD}")))
    paths = [path for path in found if path.parent.name.isdecimal()]  # not one that is being made
    if not paths:
        raise InputError(f"no results below {', '.join(map(str, folders))}", "caraml run SUITE --again measures once more")
    return sorted((read_record(path) for path in paths), key=_time)


def history(records: Sequence[Record], metric: str = "throughput") -> list[Series]:
    """A series for each work and system among ``records``, which may hold many attempts at a point. Raises ``InputError`` for an unknown
    metric. Only results above zero are on a series, because levels are compared by their ratio."""
    if metric not in METRICS:
        raise unknown_name("metric", metric, METRICS)
    usable = sorted(
        (record for record in records if record.status == "ok" and values([record], metric) and _time(record) != _UNKNOWN), key=_time
    )
    groups = grouped(usable, lambda record: without(axes(record.point), _MAY_CHANGE))
    return [_series(name, group, metric) for name, group in zip(names(groups), groups, strict=True)]


def _time(record: Record) -> datetime:
    """When it was measured; a record that does not say it in a way that can be read comes first and is on no series."""
    try:
        return datetime.fromisoformat(record.started_at).astimezone(UTC)
    except (ValueError, OverflowError):
        return _UNKNOWN


def _series(name: str, records: Sequence[Record], metric: str) -> Series:
    entries = tuple(_entry(record, metric) for record in records)
    errors = [error for _, error in values(records, metric) if error is not None]
    floor = max(median(errors) if errors else 0.0, SMALLEST_SD)
    indices = change_points([math.log(entry.value) for entry in entries], floor)
    edges = [0, *indices, len(entries)]
    found = []
    for before, index, after in zip(edges, indices, edges[2:], strict=False):
        ratio = _level(entries[index:after]) / _level(entries[before:index])
        better = None if METRICS[metric].better == "neither" else (ratio > 1) == (METRICS[metric].better == "higher")
        found.append(ChangePoint(index, ratio, better, after - index == 1, _changed(records[before:index], records[index:after])))
    point = records[0].point
    note = None if len(entries) >= FEWEST else f"{len(entries)} of the {FEWEST} results that a change needs"
    return Series(name, point.system, point.device, metric, records[0].metrics[metric].unit, entries, tuple(found), note)


def _entry(record: Record, metric: str) -> Entry:
    found = record.metrics[metric]
    assert found.value is not None
    return Entry(_time(record), found.value, found.low, found.high, record.key, record.attempt, record.point.software)


def _level(entries: Sequence[Entry]) -> float:
    return math.exp(fmean(math.log(entry.value) for entry in entries))


def _changed(before: Sequence[Record], after: Sequence[Record]) -> tuple[Difference, ...]:
    """Facts that held before and held after, but not the same; failing that, what differs between the neighbours."""
    sides = [[facts(record) for record in side] for side in (before, after)]
    steady = [one for one in compare_facts(*sides) if all(len({found.get(one.name) for found in side}) == 1 for side in sides)]
    return tuple(steady or compare_facts(sides[0][-1:], sides[1][:1]))
