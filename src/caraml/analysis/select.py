"""The sides of a comparison: results by name (:mod:`caraml.results.selector`), and ``reference:SOURCE/TABLE/RUN`` in the published figures.

A published experiment is one column or row of a table. What its source does not state (precision, compile mode, mostly the batch) is not
made up: the record's ``unstated`` names it, and comparisons say "not stated". Runs of one table with equal parameters count as repeats.
What rounding to the printed digits may make is the bound of every number, where four digits or fewer leave something open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import cast, get_args

from pydantic import JsonValue

from caraml.analysis.estimate import SMALLEST_SD
from caraml.base.errors import InputError
from caraml.metrics.model import METRICS, Metric
from caraml.reference import SOURCES, Reference
from caraml.reference import select as select_rows
from caraml.results.record import Record
from caraml.results.selector import Selection, last_two
from caraml.results.selector import select as selected
from caraml.suite.model import NOT_STATED, Mode, Point

PREFIX = "reference:"

_IDS = {"job", "node", "experiment", "jube_id", "jube_wp", "tasks", "cpus", "location", "hardware", "name", "devices_printed"}
"""Parameters that name a run rather than its work."""
_UNKNOWN = ("precision", "compile", "knobs", "deterministic", "micro_batch")


@dataclass(frozen=True)
class Side:
    """Records under the name that the user gave."""

    name: str
    records: tuple[Record, ...]


def select(name: str, root: Path) -> Side:
    """The records that ``name`` stands for; ``root`` is the results folder in use. Raises ``InputError`` if there are none."""
    return Side(name, tuple(published(name))) if name.startswith(PREFIX) else _side(selected(name, root))


def sides(a: str, b: str | None, root: Path) -> tuple[Side, Side]:
    """Both sides of a comparison; of a suite alone its last two rounds. Raises ``InputError`` if there are none."""
    if b is not None:
        return select(a, root), select(b, root)
    if a.startswith(PREFIX):
        raise InputError(f"{a} is one result, and a comparison needs two", "caraml references lists what there is")
    before, last = last_two(a, root)
    return _side(before), _side(last)


def _side(found: Selection) -> Side:
    records = tuple(found.records())
    if not records:
        of = f" of {found.name}" if found.listings else ""
        raise InputError(f"no results{of} below {found.store.root}", "caraml run SUITE --out FOLDER")
    return Side(found.name, records)


def published(name: str) -> list[Record]:
    """The experiments of ``reference:SOURCE``, ``reference:SOURCE/TABLE`` or ``reference:SOURCE/TABLE/RUN``.

    Raises ``InputError`` if there is nothing of that name, or nothing that is one of CARAML's metrics.
    """
    source, _, rest = name.removeprefix(PREFIX).partition("/")
    table, _, run = rest.partition("/")
    rows = [row for row in select_rows(source=source, table=table or None) if not run or str(row.run) == run]
    groups = groupby(sorted(rows, key=_experiment), key=_experiment)
    records = [record for _, group in groups if (record := _record(list(group))) is not None]
    if not records:
        raise InputError(f"{name}: no published experiment with one of CARAML's metrics", "caraml references lists what there is")
    return records


def _experiment(row: Reference) -> tuple[str, str, int, str, int, int, str, str]:
    where = (row.system, row.devices or 1, row.nodes or 1)
    return (row.source, row.table, row.run, *where, row.mode, _text(row))


def _text(row: Reference) -> str:
    return repr(sorted((name, str(value)) for name, value in row.parameters.items() if name not in {*_IDS, "boundary"}))


def _record(rows: Sequence[Reference]) -> Record | None:
    """One experiment; ``None`` if it is not of a workload, or none of its numbers is one of our metrics above zero."""
    first = rows[0]
    metrics = {
        row.metric: Metric(
            value=row.value,
            unit=row.unit,
            bound=row.rounding if row.rounding > SMALLEST_SD * row.value else None,
            scope=None if (scope := row.parameters.get("boundary")) is None else str(scope),
        )
        for row in rows
        if row.metric in METRICS and row.value is not None and row.value > 0
    }
    if not first.workload or not metrics:
        return None
    batch, nodes = first.parameters.get("batch"), first.nodes or 1
    samples = batch if isinstance(batch, int) and batch > 0 else 1
    point = Point(
        suite="published",
        benchmark=first.workload,
        workload=first.workload,
        params={name: value for name, value in first.parameters.items() if name not in {*_IDS, "boundary"}},
        system=first.system or NOT_STATED,
        device=first.device or NOT_STATED,
        device_class="gpu",
        software=SOURCES[first.source],
        nodes=nodes,
        devices=max((first.devices or 1) // nodes, 1),
        mode=cast("Mode", first.mode) if first.mode in get_args(Mode) else "train",
        global_batch=samples,
        micro_batch=samples,
        repeat=first.run,
    )
    missing = _UNKNOWN if "batch" in point.params else (*_UNKNOWN, "global_batch")
    environment: dict[str, JsonValue] = {"published": f"{first.source}, {first.table}, run {first.run}"}
    environment["notes"] = {row.metric: row.note for row in rows if row.metric in metrics and row.note}
    environment["missing"] = {f"point.{name}": NOT_STATED for name in missing}
    return Record(
        key=point.key, attempt=1, point=point, status="ok", started_at="1970-01-01T00:00:00+00:00", metrics=metrics, environment=environment
    )
