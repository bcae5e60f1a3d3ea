"""How far points are from what their device could do: the roofline, a figure for each machine and arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from caraml.analysis.roofline import RooflineRow, roofline
from caraml.base.text import printable
from caraml.report.figure import Axis, Figure, marks
from caraml.report.groups import MOST_FIGURES, MOST_SERIES, first
from caraml.report.labels import labels, machine
from caraml.report.numbers import plain, scaled
from caraml.results.record import Record

MARGIN = 1.5
"""Factor between the outermost points and the ends of the axes."""

Placed = tuple[Record, RooflineRow]


def rooflines(records: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """The figures, and why points are in none."""
    measured = [record for record in records if record.window is not None]
    groups: dict[str, list[Placed]] = {}
    missing: dict[str, int] = {}
    for record, row in zip(measured, roofline(measured), strict=True):
        if row.attainable_flops_per_s is None or row.flops_per_s is None:
            missing[row.reason or "not known"] = missing.get(row.reason or "not known", 0) + 1
        else:
            groups.setdefault(printable(f"{machine(record.point)}, {record.point.precision}"), []).append((record, row))
    shown, more = first(list(groups.items()), MOST_FIGURES, "figure")
    notes = [f"Not placed, {number} of {len(measured)}: {printable(reason)}." for reason, number in missing.items()]
    return [_figure(name, placed) for name, placed in shown], [*notes, *([more.strip()] if more else [])]


def _figure(name: str, placed: Sequence[Placed]) -> Figure:
    """Limits differ a little from point to point, since each measures its own: the roof is that of their medians."""
    peak = median(row.peak_flops_per_s or 0.0 for _, row in placed)
    bandwidth = median(row.bandwidth_bytes_per_s or 0.0 for _, row in placed)
    factor, unit = scaled(peak, "FLOP/s")
    benchmarks = list(dict.fromkeys(record.point.benchmark for record, _ in placed))
    chosen, more = first(benchmarks, MOST_SERIES, "benchmark")
    named = labels([record for record, _ in placed])
    series = [[_mark(row, named[record.key], factor) for record, row in placed if record.point.benchmark == one] for one in chosen]
    places = [mark["x"] for marks_ in series for mark in marks_] + [peak / bandwidth]
    left, right = min(places) / MARGIN, max(places) * MARGIN
    path = [{"x": x, "y": min(peak, bandwidth * x) / factor} for x in (left, peak / bandwidth, right)]
    heights = [mark["y"] for marks_ in series for mark in marks_] + [corner["y"] for corner in path]
    y = Axis(f"rate of one device [{unit}]", log=10, domain=(min(heights) / MARGIN, max(heights) * MARGIN))
    x = Axis("FLOPs per byte moved (estimated)", log=10, domain=(left, right))
    title = f"Roofline: {name}"
    svg = marks(series, x, y, title, lines=False, path=path)
    note = (
        f"Dashed: what the device can reach, fed at {plain('', bandwidth, 'B/s')} from memory and cache and with the fastest kernel's "
        f"{plain('', peak, 'FLOP/s')}, both measured. Bytes are an estimate, good to a factor of two."
    )
    columns = ["point", "FLOP/B", "rate", "limit", "bound by", "share of the limit"]
    rows = [_line(row, named[record.key]) for record, row in placed]
    return Figure(title, svg, [(index, printable(one)) for index, one in enumerate(chosen)], "mark", columns, rows, note + more)


def _mark(row: RooflineRow, label: str, factor: float) -> dict[str, Any]:
    assert row.intensity is not None
    assert row.flops_per_s is not None
    y = row.flops_per_s / factor
    return {"x": row.intensity, "y": y, "low": y, "high": y, "d": f"{label}: {', '.join(_line(row, label)[2:])}"}


def _line(row: RooflineRow, label: str) -> list[str]:
    share = plain("mfu", row.share, "1") if row.share is not None else f"not known: {row.reason}"
    limit = plain("", row.attainable_flops_per_s, "FLOP/s")
    return [label, plain("", row.intensity, ""), plain("", row.flops_per_s, "FLOP/s"), limit, str(row.limit), share]
