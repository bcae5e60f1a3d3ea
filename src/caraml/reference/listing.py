"""Published numbers as lines: for terminals, and as cells of a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby

from caraml.reference.audit import Check, checks
from caraml.reference.rows import FIELDS, SOURCES, Reference
from caraml.units import human, significant

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
    value, printed = f"{row.value:,.0f}" if whole else human(row.value, row.unit, 4), _printed(row)
    as_printed = "" if printed.replace(" s", "") in value else f"printed {printed}"
    facts = " ".join(f"{key}={value}" for key, value in row.parameters.items() if key not in LEFT_OUT)
    device = f"{row.devices} x {row.device}" if row.devices and row.device else row.device
    where = f"{row.run or '':<3}{device:<15}"
    return f"  {where} {row.metric:<22} {value:<16} {as_printed:<22} {facts}{mark}".rstrip()


def _printed(row: Reference) -> str:
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


def audit_lines(rows: Sequence[Reference]) -> Lines:
    """The disagreements about these rows."""
    columns = ["source", "table", "run", "metric", "printed", "recomputed", "difference", "rule"]
    found = [check for check in about(rows) if not check.holds]
    return columns, [
        (*(c.printed.source, c.printed.table, c.printed.run, c.printed.metric), *(_printed(c.printed), *_outcome(c), c.rule)) for c in found
    ]


def audit_text(rows: Sequence[Reference]) -> str:
    """The disagreements about these rows, those of one rule together, and how many comparisons were made."""
    found = about(rows)
    failed = [check for check in found if not check.holds]
    lines = []
    for (source, table, metric, rule), group in groupby(failed, lambda c: (c.printed.source, c.printed.table, c.printed.metric, c.rule)):
        checked = list(group)
        about_it = f" ({checked[0].printed.note})" if table.startswith("text") and checked[0].printed.note else ""
        lines.append(f"{source} {table}: {metric}, expected: {rule}{about_it}")
        for check in checked:
            where = f"run {check.printed.run}" if check.printed.run else ""
            value, difference = _outcome(check)
            lines.append(f"    {where:<8}printed {_printed(check.printed):<18} recomputed {value:<12} {difference}")
    return "\n".join([*lines, f"{len(found)} comparisons of printed with recomputed numbers; {len(failed)} disagree"])


def _outcome(check: Check) -> tuple[str, str]:
    sign = "+" if check.difference > 0 else "-"
    difference = "identical" if check.relation == "unlike" else f"{sign}{significant(abs(100 * check.difference), 2)} %"
    return significant(check.recomputed, 5), difference


def about(rows: Iterable[Reference]) -> list[Check]:
    """The comparisons whose printed number is one of these rows; those of one table and rule stand together."""
    wanted = set(map(id, rows))
    found = [check for check in checks() if id(check.printed) in wanted]
    order = {key: place for place, key in enumerate(dict.fromkeys((c.printed.source, c.printed.table, c.rule) for c in found))}
    return sorted(found, key=lambda c: order[c.printed.source, c.printed.table, c.rule])
