"""Small terminal tables: answers to queries, the doctor's findings, machines with a source for every figure, what points need of memory,
what a campaign would do, and published results; and the file that describes a detected machine."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import date
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from caraml import __version__
from caraml.base.format import GIB, count, human, printable, seconds_text, significant
from caraml.system.model import System

if TYPE_CHECKING:
    from caraml.campaign.preview import Preview
    from caraml.engine.memory import Planned
    from caraml.reference import Reference
    from caraml.suite.model import Point

STYLES = {
    **{"ok": "green", "skipped": "dim", "oom": "yellow", "timeout": "yellow", "invalid": "red", "failed": "bold red"},
    **{"worse": "bold red", "better": "green", "unknown": "dim", "warn": "yellow", "missing": "red"},
}
"""Cells that stand out in a terminal: a status, a verdict, the outcome of a check."""
_OF_THIS_JOB = {"usable_threads"}
_OF_THIS_DEVICE = {"index", "uuid", "pci_bus_id", "power_limit_w"}
"""True for one node or job only; a description is for all of them."""
_DESCRIBED = ("devices_per_node", "devices", "cpu", "memory_bytes", "affinity")


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], whole: int = 0) -> Table:
    """A table in which nothing is cut off. The first ``whole`` columns are never wrapped; cells of :data:`STYLES` stand out."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(Text(printable(column)), overflow="fold", no_wrap=index < whole)
    for row in rows:
        table.add_row(*(Text(printable(cell), style=STYLES.get(cell, "")) if isinstance(cell, str) else cell for cell in row))
    return table


class Footnotes:
    """Each text once."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """The mark of a footnote, which is added if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"


class Row(NamedTuple):
    """One line of a description: ``value`` is ``None`` for what is missing, and ``source`` then says why."""

    name: str
    value: str | None
    source: str


def system_rows(system: System) -> list[Row]:
    """Everything known about a system, and what is not known, in an order for reading."""
    absent = (Row(key, None, why) for key, why in system.missing.items())
    return [*_hardware(system), *_peaks(system), *_links(system), *_site(system), *absent]


def as_toml(system: System) -> str:
    """The file for a machine that was detected: a description that others may read, check and extend.

    Peaks stay out, since they come with the device's name; so does what only holds for this job.
    """
    import tomli_w

    described = system.model_dump(
        mode="json",
        include={"nodes", "devices_per_node", "memory_bytes", "os", "cpu", "affinity"},
        exclude={"cpu": _OF_THIS_JOB},
        exclude_none=True,
        exclude_defaults=True,
    )
    devices = [device.model_dump(mode="json", exclude=_OF_THIS_DEVICE, exclude_none=True) for device in system.devices]
    source = f"detected by caraml {__version__} on {date.today().isoformat()}"
    known = {key: why for key, why in system.missing.items() if key.split(".")[0] in System.model_fields and key not in described}
    data: dict[str, Any] = {
        "name": _slug(system.hostname),
        "title": system.identity,
        **{key: described.pop(key) for key in ("nodes", "devices_per_node", "memory_bytes", "os") if key in described},
        "devices": devices[:1] if all(device == devices[0] for device in devices) else devices,
        **described,
        "sources": {key: source for key in ("nodes", *_DESCRIBED) if getattr(system, key) is not None},
        "missing": {key: why for key, why in known.items() if key not in ("peak", "memory_bandwidth")},
    }
    told = "--system takes this file, or its name where it lies in ~/.config/caraml/systems, or in systems beside a suite."
    head = f"# {source}\n# Give it a name and a title. {told}\n"
    return head + tomli_w.dumps({key: value for key, value in data.items() if value != {}})


def _slug(hostname: str | None) -> str:
    short = re.sub(r"[^a-z0-9-]+", "-", (hostname or "").split(".")[0].lower()).strip("-")
    return short if short not in ("", "local", "localhost") else "my-machine"


def _source(system: System, key: str) -> str:
    found = system.sources.get(key) or system.sources.get(key.partition(".")[0])
    return found or ("detected" if system.name == "local" else "")


def _hardware(system: System) -> Iterator[Row]:
    cpu, device, models = system.cpu, system.devices[0], [device.model for device in system.devices]
    values = {
        "nodes": system.nodes,
        "devices_per_node": " + ".join(f"{models.count(name)} x {name}" for name in sorted(set(models))),
        "devices.memory_bytes": _bytes(device.memory_bytes),
        "devices.tdp_w": f"{device.tdp_w:g} W" if device.tdp_w else None,
        "devices.compute_capability": device.compute_capability,
        "devices.multiprocessors": device.multiprocessors,
        "cpu": cpu.model,
        "cpu.cores": " on ".join(str(part) for part in (cpu.cores, cpu.sockets and f"{cpu.sockets} sockets") if part),
        "cpu.threads": cpu.threads,
        "cpu.numa_nodes": cpu.numa_nodes,
        "memory_bytes": _bytes(system.memory_bytes),
        "ssd_bytes": "none" if system.ssd_bytes == 0 else _bytes(system.ssd_bytes),
        "affinity": _affinity(system),
    }
    return (Row(key, str(value), _source(system, key)) for key, value in values.items() if value)


def _peaks(system: System) -> Iterator[Row]:
    for dtype, figure in (system.peak or {}).items():
        yield Row(f"peak.{dtype}", human(figure.value, figure.unit), figure.source)
    if system.memory_bandwidth:
        yield Row("memory_bandwidth", human(system.memory_bandwidth.value, system.memory_bandwidth.unit), system.memory_bandwidth.source)


def _links(system: System) -> Iterator[Row]:
    for link in system.links:
        rate = f"{human(link.bandwidth_bytes_per_s, 'B/s')} per direction and {link.per}" if link.bandwidth_bytes_per_s else None
        latency = human(link.latency_s, "s") if link.latency_s else None
        yield Row(f"link {link.scope}", ", ".join(part for part in (link.name, rate, latency, link.topology) if part), link.source)


def _site(system: System) -> Iterator[Row]:
    given = system.site.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    for part, settings in given.items():
        for key, value in (settings or {}).items():
            shown = " ".join(map(str, value)) if isinstance(value, list) else value
            yield Row(f"site.{part}.{key}", str(shown), _source(system, f"site.{part}"))


def _affinity(system: System) -> str | None:
    affinity = system.affinity
    if affinity is None:
        return None
    if affinity.cpus:
        return "CPUs " + " | ".join(affinity.cpus)
    return f"NUMA nodes {_listed(affinity.numa_nodes)}" if affinity.numa_nodes else f"sockets {_listed(affinity.sockets)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers)) + " of device 0, 1, ..."


def _bytes(count: int | None) -> str | None:
    """In the unit that the source used: whole gigabytes, else gibibytes."""
    if count is None:
        return None
    return f"{count / 10**9:,.0f} GB" if count % 10**9 == 0 else f"{count / 2**30:,.4g} GiB"


_SHOWN = 40
_KINDS = {"shortest": "shortest time", "expected": "as long as earlier points of these workloads took", "timeout": "every time-out"}
_SHORT = {"parameters": "params", "gradients": "grads", "optimizer": "optim", "activations": "activ", "communication": "comm"}


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
    what = "" if planned[0].point.suite else f", {planned[0].point.precision}"  # a point of a suite has it in its label
    table = Table(f"GiB of each device{what}", *parts, "fits", box=None, pad_edge=False)
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
    if too_big := [one.point for one in planned if not one.fits(room(system, one.point) or 0)]:
        command = shlex.join(["caraml", "memory", "gpt", "--system", system.name, *_settings(too_big[0])])
        lines.append(Text(printable(f"{len(too_big):,} of {len(planned):,} do not fit; the smallest placements that do: {command}")))
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
    from caraml.campaign.preview import planned_counts

    parts: list[RenderableType] = [
        Text(f"{planned_counts(found.points)}{_left_out(found)}; launcher {launcher}, system {system.name}", style="bold")
    ]
    rows = ([it.action, it.point.label, seconds_text(it.point.measure.timeout_seconds), it.reason or ""] for it in found.points[:_SHOWN])
    parts.append(plain_table(["", "point", "time-out", "why"], rows))
    if len(found.points) > _SHOWN:
        parts.append(Text(f"... and {len(found.points) - _SHOWN:,} more", style="dim"))
    if found.memory:
        parts += [Text(""), memory_table(found.memory, system, _SHOWN)]
    parts += [Text(""), _costs(found, system), Text("")]
    for label, (number, text) in found.scripts.items():
        parts.append(Text(f"run.sh of {label}" + (f", and {number - 1:,} like it" if number > 1 else "") + (":" if scripts else "")))
        parts += [Text(text, style="dim", no_wrap=True, overflow="ignore")] if scripts else []
    parts += [Text(printable(note)) for note in found.notes]
    parts += [Text(f"refused: {printable(objection)}", style="bold red") for objection in found.objections]
    return Group(*parts)


def _costs(found: Preview, system: System) -> Table:
    from caraml.campaign.preview import estimated_kwh

    unknown, rows = "nothing like them has run yet", []
    for kind, words in _KINDS.items():
        each = found.seconds(kind)
        total = None if each is None else sum(seconds * point.nodes for point, seconds in each)
        kwh = None if each is None else estimated_kwh(system, each)
        energy = "" if total is None else "no rated power known" if kwh is None else significant(kwh)
        rows.append([words, unknown if total is None else significant(total / 3600), energy])
    rows.append(["disk", unknown if found.disk is None else f"{found.disk / 2**20:,.1f} MiB", ""])
    return plain_table(["", "node-hours", "kWh (devices alone, by data sheet)"], rows)


def _left_out(found: Preview) -> str:
    counts = {"left out by `where`": found.left_out, "of the suite not chosen": found.not_chosen}
    return "".join(f", {count:,} {words}" for words, count in counts.items() if count)


# -- published results --------------------------------------------------------------------------------------------------

_NOT_SHOWN = {"job", "jube_id", "jube_wp", "node", "hardware", "tasks", "cpus", "location", "experiment", "method"}
_NOT_SHOWN |= {"replicas", "steps_per_execution", "dataset_mb", "effective_batch_mb"}
"""Parameters that a terminal does not show."""


def references_text(rows: Sequence[Reference]) -> str:
    """The rows below their tables: the number in our unit, as printed where that differs, and what is to be said of it as footnotes."""
    lines: list[str] = []
    notes = Footnotes()
    for (source, table, system), group in groupby(rows, lambda row: (row.source, row.table, row.system)):
        lines.append(" ".join(filter(None, (source, f"{table}:" if system else table, system))))
        lines += [_reference_line(row, notes) for row in group]
    return "\n".join(lines + [f"{notes.mark(note)} {note}" for note in notes.texts])


def _reference_line(row: Reference, notes: Footnotes) -> str:
    mark = f" {notes.mark(row.note)}" if row.note else ""
    whole = row.unit == "1" and row.value is not None and row.value.is_integer()
    value, printed = f"{row.value:,.0f}" if whole else human(row.value, row.unit, 4), row.as_printed
    shown = "" if printed.replace(" s", "") in value else f"printed {printed}"
    facts = " ".join(f"{key}={value}" for key, value in row.parameters.items() if key not in _NOT_SHOWN)
    device = f"{row.devices} x {row.device}" if row.devices and row.device else row.device
    where = f"{row.run or '':<3}{device:<15}"
    return f"  {where} {row.metric:<22} {value:<16} {shown:<22} {facts}{mark}".rstrip()


def references_overview(rows: Sequence[Reference]) -> str:
    """One line per table below each source: what it is about, and how many runs and numbers it has."""
    from caraml.reference import SOURCES

    lines = []
    for source, of_source in groupby(rows, lambda row: row.source):
        lines += ["", f"{source}: {SOURCES[source]}"]
        tables: dict[str, list[Reference]] = {}
        for row in of_source:
            tables.setdefault(row.table, []).append(row)
        for table, group in tables.items():
            about = f"{_one_or_many(row.workload for row in group)} {_one_or_many(row.mode for row in group)}".strip()
            runs = len({row.run for row in group} - {0})
            counted = (f"{count(runs, 'run')}, " if runs else "") + count(len(group), "number")
            lines.append(f"  {table:<24}{about:<36} {_one_or_many(row.system for row in group):<18} {counted}")
    return "\n".join(lines[1:])


def _one_or_many(values: Iterable[str]) -> str:
    """The name that all have, or how many there are."""
    names = [name for name in dict.fromkeys(values) if name]
    return names[0] if len(names) == 1 else f"{len(names)} different" if names else ""
