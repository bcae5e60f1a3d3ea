"""Small terminal tables: answers to queries, and the doctor's findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from caraml.system.describe import Row
    from caraml.system.doctor import Check
    from caraml.system.model import System

_STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def query_table(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> Table:
    """The answer to a query."""
    table = Table(*columns, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*(Text("–" if value is None else str(value)) for value in line))
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """What the doctor found, and what would mend it."""
    table = Table("", "check", "found", "what would help", box=None, pad_edge=False)
    for check in checks:
        table.add_row(Text(check.status, style=_STYLES[check.status]), Text(check.name), Text(check.found), Text(check.fix or ""))
    return table


def systems_table(systems: Sequence[System]) -> Table:
    """Machines by name, with the devices of a node."""
    table = Table("name", "also called", "a node has", "", box=None, pad_edge=False)
    table.add_row("local", "", "", Text("this machine, detected when it is used"))
    for system in systems:
        devices = f"{system.devices_per_node} x {system.devices[0].model}"
        table.add_row(Text(system.name, no_wrap=True), Text(", ".join(system.aliases)), Text(devices), Text(system.title))
    return table


def rows_table(rows: Sequence[Row]) -> Table:
    """A machine's figures with their sources; what is missing comes last, with the reason. A quotation mark is the source above."""
    table = Table("figure", "value", "source", box=None, pad_edge=False)
    above = ""
    for row in rows:
        style, source = "" if row.value else "dim", '"' if row.source == above else row.source
        table.add_row(Text(row.name, style=style, no_wrap=True), Text(row.value or "missing", style=style), Text(source, style=style))
        above = row.source
    return table


def safe_cells(line: Sequence[Any]) -> list[Any]:
    """A line of CSV whose texts no spreadsheet takes for a formula: those that begin like one get an apostrophe in front."""
    return [f"'{cell}" if isinstance(cell, str) and cell.lstrip().startswith(("=", "+", "-", "@")) else cell for cell in line]
