"""What the points need of each device's memory, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from caraml.base.text import printable
from caraml.units import GIB

if TYPE_CHECKING:
    from caraml.engine.fitting import Planned
    from caraml.system.model import System

_SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ", "communication": "comm"}


def memory_table(planned: Sequence[Planned], system: System, shown: int | None = None) -> RenderableType:
    """The parts in GiB and whether they fit a device of ``system``; the first ``shown`` lines of many, those that fit nowhere counted."""
    from caraml.engine.fitting import USABLE, room
    from caraml.engine.memory import MemoryPlan

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
        lines.append(
            Text(f"{too_big:,} of {len(planned):,} do not fit; the smallest placements that do: caraml memory gpt --system {system.name}")
        )
    return Group(*lines)
