"""Published results as data: the tables and stated figures of the sources that CARAML builds on, and what disagrees in
them. One row is one number of one table, as it was printed and in our unit."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from caraml.base.errors import InputError, unknown_name
from caraml.base.format import count, human
from caraml.suite.model import WORKLOAD_ALIASES

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

LEFT_OUT = {"job", "jube_id", "jube_wp", "node", "hardware", "tasks", "cpus", "location", "experiment", "method"}
LEFT_OUT |= {"replicas", "steps_per_execution", "dataset_mb", "effective_batch_mb"}
"""Parameters that a terminal does not show."""


def full_lines(rows: Sequence[Reference]) -> Lines:
    """Every field of every row; parameters as JSON."""
    return list(FIELDS), [tuple(_cell(row, name) for name in FIELDS) for row in rows]


def _cell(row: Reference, name: str) -> Cell:
    value: Cell = getattr(row, name) if name != "parameters" else json.dumps(dict(row.parameters), ensure_ascii=False)
    return value


def rows_text(rows: Sequence[Reference]) -> str:
    """The rows below their tables: the number in our unit, as printed where that differs, and what is to be said of it as footnotes."""
    lines: list[str] = []
    notes: list[str] = []
    for (source, table, system), group in groupby(rows, lambda row: (row.source, row.table, row.system)):
        lines.append(" ".join(filter(None, (source, f"{table}:" if system else table, system))))
        lines += [_line(row, notes) for row in group]
    return "\n".join(lines + [f"[{number}] {note}" for number, note in enumerate(notes, start=1)])


def _line(row: Reference, notes: list[str]) -> str:
    mark = ""
    if row.note:
        if row.note not in notes:
            notes.append(row.note)
        mark = f" [{notes.index(row.note) + 1}]"
    whole = row.unit == "1" and row.value is not None and row.value.is_integer()
    value, printed = f"{row.value:,.0f}" if whole else human(row.value, row.unit, 4), as_printed(row)
    shown = "" if printed.replace(" s", "") in value else f"printed {printed}"
    facts = " ".join(f"{key}={value}" for key, value in row.parameters.items() if key not in LEFT_OUT)
    device = f"{row.devices} x {row.device}" if row.devices and row.device else row.device
    where = f"{row.run or '':<3}{device:<15}"
    return f"  {where} {row.metric:<22} {value:<16} {shown:<22} {facts}{mark}".rstrip()


def as_printed(row: Reference) -> str:
    return f"{row.printed} {row.printed_unit}".strip()


def overview(rows: Sequence[Reference]) -> str:
    """One line per table below each source: what it is about, and how many runs and numbers it has."""
    lines = []
    for source, of_source in groupby(rows, lambda row: row.source):
        lines += ["", f"{source}: {SOURCES[source]}"]
        tables: dict[str, list[Reference]] = {}
        for row in of_source:
            tables.setdefault(row.table, []).append(row)
        for table, group in tables.items():
            about = f"{_names(row.workload for row in group)} {_names(row.mode for row in group)}".strip()
            runs = len({row.run for row in group} - {0})
            counted = (f"{count(runs, 'run')}, " if runs else "") + count(len(group), "number")
            lines.append(f"  {table:<24}{about:<36} {_names(row.system for row in group):<18} {counted}")
    return "\n".join(lines[1:])


def _names(values: Iterable[str]) -> str:
    """The name that all have, or how many there are."""
    names = [name for name in dict.fromkeys(values) if name]
    return names[0] if len(names) == 1 else f"{len(names)} different" if names else ""
