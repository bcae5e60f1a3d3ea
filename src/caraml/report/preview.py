"""What a campaign would do, in a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from caraml.base.text import printable
from caraml.campaign.preview import Preview, estimated_kwh, fates
from caraml.report.live import seconds_text
from caraml.report.memory import memory_table
from caraml.system.model import System
from caraml.units import significant

_SHOWN = 40
_KINDS = {"shortest": "at least", "expected": "as long as earlier points of these workloads took", "timeout": "at most (every time-out)"}


def preview_view(found: Preview, system: System, launcher: str, scripts: bool) -> RenderableType:
    """What a campaign would do. ``scripts``: with one script of each kind in full."""
    parts: list[RenderableType] = [
        Text(f"{fates(found.points)}{_left_out(found)}; launcher {launcher}, system {system.name}", style="bold")
    ]
    table = Table("", "point", "time-out", "why", box=None, pad_edge=False)
    for one in found.points[:_SHOWN]:
        table.add_row(
            one.fate, Text(printable(one.point.label)), seconds_text(one.point.measure.timeout_seconds), Text(printable(one.reason or ""))
        )
    parts.append(table)
    if len(found.points) > _SHOWN:
        parts.append(Text(f"... and {len(found.points) - _SHOWN:,} more", style="dim"))
    if found.memory:
        parts += [Text(""), memory_table(found.memory, system, _SHOWN)]
    parts += [Text(""), _costs(found, system), Text("")]
    for label, (count, text) in found.scripts.items():
        parts.append(Text(f"run.sh of {label}" + (f", and {count - 1:,} like it" if count > 1 else "") + (":" if scripts else "")))
        parts += [Text(text, style="dim")] if scripts else []
    parts += [Text(f"refused: {printable(objection)}", style="bold red") for objection in found.objections]
    return Group(*parts)


def _costs(found: Preview, system: System) -> Table:
    table = Table("", "node-hours", "kWh (estimated)", box=None, pad_edge=False)
    for kind, words in _KINDS.items():
        total = found.total(kind)
        seconds = [
            (one.point, value)
            for one in found.to_run
            if (value := one.point.measure.timeout_seconds if kind == "timeout" else getattr(one, kind)) is not None
        ]
        kwh = estimated_kwh(system, seconds) if total is not None else None
        why = "no rated power known" if total is not None else ""
        table.add_row(
            words, "nothing like them has run yet" if total is None else significant(total / 3600), why if kwh is None else significant(kwh)
        )
    disk = "nothing like them has run yet" if found.disk is None else f"{found.disk / 2**20:,.1f} MiB"
    table.add_row("disk", disk, "")
    return table


def _left_out(found: Preview) -> str:
    return f", {found.left_out:,} left out by `where`" if found.left_out else ""
