"""Small terminal tables: answers to queries, the doctor's findings, machines, what points need of memory, and what a campaign would do."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from caraml.base.format import GIB, printable, seconds_text, significant
from caraml.report.section import plain_table

if TYPE_CHECKING:
    from caraml.campaign.preview import Preview
    from caraml.engine.memory import Planned
    from caraml.suite.model import Point
    from caraml.system.describe import Row
    from caraml.system.doctor import Check
    from caraml.system.model import System

_SHOWN = 40
_KINDS = {"shortest": "at least", "expected": "as long as earlier points of these workloads took", "timeout": "at most (every time-out)"}
_SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ", "communication": "comm"}


def query_table(columns: Sequence[str], lines: Sequence[Sequence[Any]]) -> Table:
    """The answer to a query."""
    return plain_table(columns, (["–" if value is None else str(value) for value in line] for line in lines))


def checks_table(checks: Sequence[Check]) -> Table:
    """What the doctor found, and what would mend it."""
    return plain_table(["", "check", "found", "what would help"], ([one.status, one.name, one.found, one.fix or ""] for one in checks))


def systems_table(systems: Sequence[System]) -> Table:
    """Machines by name, with the devices of a node."""
    rows = [[one.name, ", ".join(one.aliases), f"{one.devices_per_node} x {one.devices[0].model}", one.title] for one in systems]
    return plain_table(["name", "also called", "a node has", ""], [["local", "", "", "this machine, detected when it is used"], *rows], 1)


def rows_table(rows: Sequence[Row]) -> Table:
    """A machine's figures with their sources; what is missing comes last, with the reason. A quotation mark is the source above."""
    found, above = [], ""
    for row in rows:
        style = "" if row.value else "dim"
        texts = row.name, row.value or "missing", '"' if row.source == above else row.source
        found.append([Text(text, style=style) for text in texts])
        above = row.source
    return plain_table(["figure", "value", "source"], found, 1)


def memory_table(planned: Sequence[Planned], system: System, shown: int | None = None) -> RenderableType:
    """The parts in GiB and whether they fit a device of ``system``; the first ``shown`` lines of many, those that fit nowhere counted."""
    from caraml.engine.memory import USABLE, MemoryPlan, room

    parts = [Column(_SHORT.get(field.name, field.name), justify="right", no_wrap=True) for field in fields(MemoryPlan)]
    table = Table("GiB of each device", *parts, "fits", box=None, pad_edge=False)
    for one in planned[:shown]:
        point, available = one.point, room(system, one.point)
        layout = f"{point.nodes}x{point.devices} {point.placement.label(point.dp) or f'dp{point.dp}'}"
        label = point.label if point.suite else layout
        fits = "–" if available is None else "yes" if one.fits(available) else "no"
        style = "red" if fits == "no" else ""
        table.add_row(Text(printable(label)), *(f"{value:,.2f}" for value in one.plan.gib().values()), Text(fits, style=style))
    lines: list[RenderableType] = [table]
    if shown is not None and len(planned) > shown:
        lines.append(Text(f"... and {len(planned) - shown:,} more", style="dim"))
    memory, device = system.devices[0].memory_bytes, system.devices[0].model
    if memory is None:
        lines.append(Text(f"{system.name} does not say how much memory a device has"))
        return Group(*lines)
    shared = ", shared by the processes of a node" if system.device_class == "cpu" else ""
    lines.append(Text(f"fits: peak up to {100 * USABLE:g} % of the {memory / GIB:,.1f} GiB of {device}{shared}"))
    too_big = sum(not one.fits(room(system, one.point) or 0) for one in planned)
    if too_big:
        first = next(one.point for one in planned if not one.fits(room(system, one.point) or 0))
        command = shlex.join(["caraml", "memory", "gpt", "--system", system.name, *_settings(first)])
        lines.append(Text(printable(f"{too_big:,} of {len(planned):,} do not fit; the smallest placements that do: {command}")))
    return Group(*lines)


def _settings(point: Point) -> list[str]:
    """What makes `caraml memory` plan a point's model: its preset, and where it is another than that preset's."""
    from caraml.workloads.gpt import Params

    preset = point.params["preset"]
    defaults = Params.model_validate({"preset": preset}).model_dump(mode="json")
    params = {name: value for name, value in point.params.items() if value not in (defaults[name], None) and name != "data"}
    given = {"precision": point.precision, "micro_batch": point.micro_batch, "params.preset": preset}
    given |= {f"params.{name}": value if isinstance(value, str) else json.dumps(value) for name, value in params.items()}
    return [word for name, value in given.items() for word in ("--set", f"{name}={value}")]


def preview_view(found: Preview, system: System, launcher: str, scripts: bool) -> RenderableType:
    """What a campaign would do. ``scripts``: with one script of each kind in full."""
    from caraml.campaign.preview import fates

    parts: list[RenderableType] = [
        Text(f"{fates(found.points)}{_left_out(found)}; launcher {launcher}, system {system.name}", style="bold")
    ]
    rows = ([one.fate, one.point.label, seconds_text(one.point.measure.timeout_seconds), one.reason or ""] for one in found.points[:_SHOWN])
    parts.append(plain_table(["", "point", "time-out", "why"], rows))
    if len(found.points) > _SHOWN:
        parts.append(Text(f"... and {len(found.points) - _SHOWN:,} more", style="dim"))
    if found.memory:
        parts += [Text(""), memory_table(found.memory, system, _SHOWN)]
    parts += [Text(""), _costs(found, system), Text("")]
    for label, (count, text) in found.scripts.items():
        parts.append(Text(f"run.sh of {label}" + (f", and {count - 1:,} like it" if count > 1 else "") + (":" if scripts else "")))
        parts += [Text(text, style="dim", no_wrap=True, overflow="ignore")] if scripts else []
    parts += [Text(printable(note)) for note in found.notes]
    parts += [Text(f"refused: {printable(objection)}", style="bold red") for objection in found.objections]
    return Group(*parts)


def _costs(found: Preview, system: System) -> Table:
    from caraml.campaign.preview import estimated_kwh

    unknown, rows = "nothing like them has run yet", []
    for kind, words in _KINDS.items():
        total = found.total(kind)
        seconds = [
            (one.point, value)
            for one in found.to_run
            if (value := one.point.measure.timeout_seconds if kind == "timeout" else getattr(one, kind)) is not None
        ]
        kwh = estimated_kwh(system, seconds) if total is not None else None
        energy = "" if total is None else "no rated power known" if kwh is None else significant(kwh)
        rows.append([words, unknown if total is None else significant(total / 3600), energy])
    rows.append(["disk", unknown if found.disk is None else f"{found.disk / 2**20:,.1f} MiB", ""])
    return plain_table(["", "node-hours", "kWh (estimated)"], rows)


def _left_out(found: Preview) -> str:
    counts = {"left out by `where`": found.left_out, "of the suite not chosen": found.not_chosen}
    return "".join(f", {count:,} {words}" for words, count in counts.items() if count)
