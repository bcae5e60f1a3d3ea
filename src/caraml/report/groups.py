"""Records that belong into one figure, and the names of its series: only what tells them apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

from caraml.base.text import printable
from caraml.report.labels import machine
from caraml.report.numbers import count
from caraml.results.record import Record
from caraml.suite.model import Point

MOST_SERIES = 14
"""Lines that one figure can hold and a reader can still tell apart."""
MOST_ROWS = 40
"""Bars that one figure can hold."""
WIDE_RANGE = 20
"""Largest over smallest value from which an axis is logarithmic."""
MOST_FIGURES = 16
"""Figures of one kind; the tables have the rest."""

LABEL = 46
"""Longest label above a bar, in characters; the table beside the figure has all of it."""

T = TypeVar("T")


def placement(point: Point) -> str:
    """Nodes and devices per node: ``1x4``."""
    return f"{point.nodes}x{point.devices}"


def works(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by what they train, whatever the machine, its devices, the batch and the arithmetic; named by what tells them apart.

    Work that was never built (it failed, or was skipped) stands beside the same work that was.
    """
    found: dict[tuple[str, str, str, str], list[Record]] = {}
    for record in records:
        point = record.point
        found.setdefault((point.benchmark, point.workload, json.dumps(point.params, sort_keys=True), point.mode), []).append(record)
    named: dict[str, list[Record]] = {}
    for (benchmark, workload, params, mode), group in found.items():
        sharing = [other for other in found if other[0] == benchmark]
        details = [
            *([workload] if len({other[1] for other in sharing}) > 1 else []),
            *([mode] if len({other[3] for other in sharing}) > 1 else []),
            *_differing(params, [other[2] for other in sharing]),
        ]
        named[printable(" ".join([benchmark, *details]))] = group
    return named


def item_of(records: Sequence[Record]) -> str:
    """What records of one work count, by those that were built."""
    return next((record.item for record in records if record.facts is not None), "item")


def _differing(params: str, others: Sequence[str]) -> list[str]:
    """``name=value`` of the parameters in which works of one benchmark differ."""
    loaded, ours = [json.loads(other) for other in others], json.loads(params)
    names = sorted({name for one in loaded for name in one})
    differing = [name for name in names if len({json.dumps(one.get(name)) for one in loaded}) > 1]
    return [f"{name}={ours.get(name)}" for name in differing]


FIELDS: dict[str, Callable[[Point], str]] = {
    "machine": machine,
    "device": lambda point: point.device,
    "placement": placement,
    "batch": lambda point: f"b{point.global_batch}",
    "micro batch": lambda point: f"micro batch {point.micro_batch}",
    "precision": lambda point: point.precision,
    "compile": lambda point: f"compile {point.compile}",
    "knobs": lambda point: point.knobs.label or "knobs as they are",
    "deterministic": lambda point: "deterministic" if point.deterministic else "not deterministic",
    "software": lambda point: point.software,
}
"""What can differ between records of one work, in the order in which a name says it."""


def families(records: Sequence[Record], along: Sequence[str]) -> dict[str, list[Record]]:
    """Records of one work by everything in which they differ but ``along`` (names of ``FIELDS``), in their order.

    Two records at one place of a family are repeats; seeds are repeats as well.
    """
    fields = [name for name in FIELDS if name not in along]
    if not _colliding(records, [*fields, *along]):
        fields.remove("micro batch")  # the batch says it
    told = [name for name in fields if len({FIELDS[name](record.point) for record in records}) > 1]
    if "machine" in told and len({(machine(record.point), placement(record.point)) for record in records}) == len(
        {(machine(record.point), placement(record.point), record.point.device) for record in records}
    ):
        told = [name for name in told if name != "device"]  # the machine and the number of devices say it
    found: dict[str, list[Record]] = {}
    for record in records:
        name = " ".join(FIELDS[field](record.point) for field in told) or machine(record.point)
        found.setdefault(printable(name), []).append(record)
    return found


def _colliding(records: Sequence[Record], fields: Sequence[str]) -> bool:
    """True if two records agree in all ``fields`` but the micro batch."""
    others = [name for name in fields if name != "micro batch"]
    places = [(record.point.repeat, record.point.seed, *(FIELDS[name](record.point) for name in others)) for record in records]
    return len(set(places)) < len(places)


def first(found: Sequence[T], limit: int, noun: str) -> tuple[Sequence[T], str]:
    """The first ``limit``, and a sentence about those left out, empty if there are none."""
    if len(found) <= limit:
        return found, ""
    return found[:limit], f" {count(len(found) - limit, f'further {noun}')} not drawn; the table of results has them."


def wide_range(values: Sequence[float]) -> bool:
    """True for positive values that only a logarithmic axis can show together."""
    return min(values) > 0 and max(values) / min(values) > WIDE_RANGE
