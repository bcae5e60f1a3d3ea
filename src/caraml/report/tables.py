"""Small terminal tables: answers to queries, and the doctor's findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from caraml.system.doctor import Check

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
