"""Published numbers as lines: for terminals, and as cells of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from caraml.base.format import human
from caraml.reference.rows import FIELDS, SOURCES, Reference

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
            counted = (f"{runs} run{'s' * (runs != 1)}, " if runs else "") + f"{len(group)} numbers"
            lines.append(f"  {table:<24}{about:<36} {_names(row.system for row in group):<18} {counted}")
    return "\n".join(lines[1:])


def _names(values: Iterable[str]) -> str:
    """The name that all have, or how many there are."""
    names = [name for name in dict.fromkeys(values) if name]
    return names[0] if len(names) == 1 else f"{len(names)} different" if names else ""
