"""Published results as data: the tables and stated figures of the sources that CARAML builds on, and what disagrees in
them. One row is one number of one table, as it was printed and in our unit.

And the sides of a comparison: results by name (:mod:`caraml.results.selector`), and ``reference:SOURCE/TABLE/RUN`` of what is published. A
published experiment is one column or row of a table. What its source does not state (precision, compile mode, mostly the batch) is not
made up: the record's ``unstated`` names it, and comparisons say "not stated". Runs of one table with equal parameters count as repeats.
What rounding to the printed digits may make is the bound of every number, where four digits or fewer leave something open.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import cast, get_args

from pydantic import JsonValue

from caraml.base.errors import InputError, unknown_name
from caraml.base.stats import SMALLEST_SD
from caraml.metrics.model import METRICS, Metric
from caraml.results.record import Record
from caraml.results.selector import Selection, last_two
from caraml.results.selector import select as selected
from caraml.suite.model import NOT_STATED, WORKLOAD_ALIASES, Mode, Point

SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "caraml": "John: Performance and Power: Systematic Evaluation of AI Workloads on Accelerators with CARAML, slides, SC24",
        "maelstrom": "Nassyr, Herten, Paladino: MAELSTROM D3.7, Final Report on Hardware Performance Benchmarking, 2024",
        "pearc": "Nasari et al.: Benchmarking the Performance of Accelerators ..., PEARC '22, doi:10.1145/3491418.3530772",
        "epicure": "EPICURE: best practice guide on AI scaling on EuroHPC systems, version 1.0, 2026",
    }
)
"""Names of the sources and what they stand for."""
SHORT = {"caraml": "CARAML", "maelstrom": "D3.7", "pearc": "PEARC '22", "epicure": "EPICURE"}
"""What figures call the sources."""

Parameter = str | int | float


@dataclass(frozen=True)
class Reference:
    """One published number."""

    source: str
    """A name of :data:`SOURCES`."""
    table: str
    """``Table 17``, or ``text 4.2.3`` for a number of a sentence."""
    run: int
    """Column or row of the table, from 1: what has the same source, table and run belongs to one experiment. 0 in a text."""
    system: str
    device: str
    devices: int | None
    nodes: int | None
    workload: str
    """CARAML's name where it has this workload."""
    mode: str
    """``train``, ``compute`` (without input), ``data`` (input alone) or ``inference``; empty where it does not apply."""
    parameters: Mapping[str, Parameter]
    """What else the source says of the run: batch, flags, job and node ids, the name of a claim."""
    metric: str
    value: float | None
    """In ``unit``; ``None`` where the source prints that it has none."""
    unit: str
    printed: str
    """The digits as printed, errors included."""
    printed_unit: str
    note: str
    """What is wrong with the printed number or its heading, and how it was read."""

    @property
    def as_printed(self) -> str:
        """The number with its unit, as printed."""
        return f"{self.printed} {self.printed_unit}".strip()

    @property
    def rounding(self) -> float:
        """By how much the number may be off because of its printed digits, in ``unit``; 0 without a number, and of a zero."""
        number, half = digits(self.printed) if self.value else (Decimal(0), Decimal(0))
        return float(half / number) * self.value if self.value and number else 0.0


def digits(printed: str) -> tuple[Decimal, Decimal]:
    """A printed number, and half a unit of its last digit: what rounds to these digits is not farther away.

    ``1,234.50``, ``1 234`` and ``5.60E-01`` are understood. A power of ten, ``10⁶``, is a definition and exact.

    Raises ``ValueError`` if there is no number.
    """
    if printed == "10⁶":
        return Decimal(10**6), Decimal(0)
    try:
        number = Decimal(printed.replace(",", "").replace(" ", ""))
    except InvalidOperation as error:
        raise ValueError(f"{printed!r} is not a number") from error
    exponent = number.as_tuple().exponent
    if not isinstance(exponent, int):
        raise ValueError(f"{printed!r} is not finite")
    return number, Decimal(5).scaleb(exponent - 1)


FIELDS = tuple(field.name for field in fields(Reference))


def paths() -> list[str]:
    """The CSV file of each source."""
    return [str(files("caraml.reference") / "data" / f"{source}.csv") for source in SOURCES]


@cache
def load() -> tuple[Reference, ...]:
    """Every published number, in the order of sources and tables."""
    return tuple(row for path in map(Path, paths()) for row in parse(path.read_text(encoding="utf-8"), path.name))


def parse(text: str, name: str) -> list[Reference]:
    """The rows of one file. Raises ``InputError`` with the line if a cell has the wrong type."""
    reader = csv.DictReader(text.splitlines())
    if tuple(reader.fieldnames or ()) != FIELDS:
        raise InputError(f"{name}, line 1: expected the columns {','.join(FIELDS)}, found {reader.fieldnames}")
    rows = []
    for cells in reader:
        try:
            rows.append(_row(cells))
        except (ValueError, TypeError) as error:
            raise InputError(f"{name}, line {reader.line_num}: {error}") from error
    return rows


def _row(cells: Mapping[str, str]) -> Reference:
    parameters = json.loads(cells["parameters"] or "{}")
    if not isinstance(parameters, dict) or not all(isinstance(value, Parameter) for value in parameters.values()):
        raise ValueError(f"parameters: expected a flat JSON object, found {cells['parameters']}")
    text = {name: cells[name] for name in FIELDS if name not in ("run", "devices", "nodes", "parameters", "value")}
    return Reference(
        run=int(cells["run"]),
        devices=int(cells["devices"]) if cells["devices"] else None,
        nodes=int(cells["nodes"]) if cells["nodes"] else None,
        parameters=MappingProxyType(parameters),
        value=float(cells["value"]) if cells["value"] else None,
        **text,
    )


def select(rows: Iterable[Reference] | None = None, **wanted: str | None) -> list[Reference]:
    """Rows whose fields have the wanted values; ``None`` wants anything.

    ``select(source="pearc", metric="throughput")``; a field is one of :data:`FIELDS` that holds a text, and ``table`` may be given as
    ``17``. Raises ``InputError`` for a value that no row has, with the nearest one that exists.
    """
    found: Sequence[Reference] = load() if rows is None else list(rows)
    everything = found
    for field, value in wanted.items():
        if value is None:
            continue
        full = f"Table {value}" if field == "table" and re.fullmatch(r"\d+", value) else value
        full = WORKLOAD_ALIASES.get(value.lower(), value) if field == "workload" else full
        known = {getattr(row, field) for row in everything} - {""}
        if full not in known:
            error = unknown_name(field, full, known)
            # A number is spelt like others and means none of them.
            raise error if full == value else InputError(error.args[0], "caraml references lists the tables")
        found = [row for row in found if getattr(row, field) == full]
    return list(found)


Cell = str | int | float | None
Lines = tuple[list[str], list[tuple[Cell, ...]]]


def full_lines(rows: Sequence[Reference]) -> Lines:
    """Every field of every row; parameters as JSON."""
    return list(FIELDS), [tuple(_cell(row, name) for name in FIELDS) for row in rows]


def _cell(row: Reference, name: str) -> Cell:
    value: Cell = getattr(row, name) if name != "parameters" else json.dumps(dict(row.parameters), ensure_ascii=False)
    return value


# -- sides of a comparison ----------------------------------------------------------------------------------------------

PREFIX = "reference:"

_IDS = {"job", "node", "experiment", "jube_id", "jube_wp", "tasks", "cpus", "location", "hardware", "name", "devices_printed"}
"""Parameters that name a run rather than its work."""
_UNKNOWN = ("precision", "compile", "knobs", "deterministic", "micro_batch")


@dataclass(frozen=True)
class Side:
    """Records under the name that the user gave."""

    name: str
    records: tuple[Record, ...]


def side(name: str, root: Path) -> Side:
    """The records that ``name`` stands for; ``root`` is the results folder in use. Raises ``InputError`` if there are none."""
    return Side(name, tuple(published(name))) if name.startswith(PREFIX) else _side_of(selected(name, root))


def sides(a: str, b: str | None, root: Path) -> tuple[Side, Side]:
    """Both sides of a comparison; of a suite alone its last two rounds. Raises ``InputError`` if there are none."""
    if b is not None:
        return side(a, root), side(b, root)
    if a.startswith(PREFIX):
        raise InputError(f"{a} is one result, and a comparison needs two", "caraml references lists what there is")
    before, last = last_two(a, root)
    return _side_of(before), _side_of(last)


def _side_of(found: Selection) -> Side:
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
    rows = [row for row in select(source=source, table=table or None) if not run or str(row.run) == run]
    groups = groupby(sorted(rows, key=_experiment), key=_experiment)
    records = [record for _, group in groups if (record := _record(list(group))) is not None]
    if not records:
        raise InputError(f"{name}: no published experiment with one of CARAML's metrics", "caraml references lists what there is")
    return records


def _experiment(row: Reference) -> tuple[str, str, int, str, int, int, str, str]:
    where = (row.system, row.devices or 1, row.nodes or 1)
    work = repr(sorted((name, str(value)) for name, value in row.parameters.items() if name not in {*_IDS, "boundary"}))
    return (row.source, row.table, row.run, *where, row.mode, work)


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


@dataclass(frozen=True)
class PublishedNote:
    """What is wrong with printed numbers, or how they were read."""

    note: str
    metrics: tuple[str, ...]
    places: tuple[str, ...]
    """Source, table and run of each."""


def notes_of(records: Iterable[Record], metrics: Collection[str]) -> tuple[PublishedNote, ...]:
    """The notes of these metrics' published numbers, each once."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for record in records:
        notes = record.environment.get("notes")
        for metric, note in notes.items() if isinstance(notes, dict) else ():
            if metric in metrics:
                of, places = found.setdefault(str(note), ({}, {}))
                of[metric] = places[str(record.environment.get("published"))] = None
    return tuple(PublishedNote(note, tuple(of), tuple(places)) for note, (of, places) in found.items())
