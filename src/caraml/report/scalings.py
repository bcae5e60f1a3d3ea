"""How rates grow with devices: efficiency by family, what more devices did to time and energy, and a result over the months."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caraml.analysis.estimate import Estimate
from caraml.analysis.history import Series, attempts, history
from caraml.analysis.laws import Law
from caraml.analysis.scaling import Cell, Curve, Family, Quantity, matrix, scaling, solutions_of
from caraml.base.text import printable
from caraml.report.figure import Axis, Figure, marks
from caraml.report.groups import MOST_FIGURES, MOST_SERIES, first
from caraml.report.heat import grid
from caraml.report.labels import labels
from caraml.report.numbers import counted, plain, written
from caraml.results.record import Metric, Record

MOST_LAWS = 12
"""Families to which laws are fitted, which takes longer than all else; ``caraml scaling`` fits them to any number."""
FEWEST_ATTEMPTS = 3
"""Attempts from which a result over time is worth a figure."""


def efficiencies(records: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """Scaling efficiency over the number of devices: a figure for each benchmark and kind of scaling, a line for each family."""
    groups: dict[str, list[Family]] = {}
    families = scaling(records, efficiency=None)
    if len(families) <= MOST_LAWS:
        families = scaling(records)
    for family in families:
        groups.setdefault(printable(f"{family.records[0].point.benchmark}, {family.kind} scaling"), []).append(family)
    shown, more = first(list(groups.items()), MOST_FIGURES, "figure")
    return [_efficiency(name, families) for name, families in shown], [more.strip()] if more else []


def _efficiency(name: str, families: Sequence[Family]) -> Figure:
    """One family is drawn by each of its rates, several by the training part."""
    names = _names(families)
    if len(families) == 1:
        lines: list[tuple[str, Curve]] = [(curve.basis, curve) for curve in families[0].curves]
    else:
        lines = [(names[family.name], curve) for family in families if (curve := family.curve("training")) is not None]
    chosen, more = first(lines, MOST_SERIES, "line")
    series = [[_size_mark(line, curve, index) for index in range(len(curve.sizes))] for line, curve in chosen]
    worlds = sorted({size.world for _, curve in chosen for size in curve.sizes})
    x = Axis("devices", log=2, ticks=[float(world) for world in worlds], domain=(worlds[0] / 1.15, worlds[-1] * 1.15))
    title = f"Scaling efficiency: {name}"
    svg = marks(series, x, Axis("efficiency [%]", zero=True), title)
    columns = ["family", "rate", "devices", "batch", "speed-up", "efficiency", "law"]
    listed = families[:MOST_SERIES]
    rows = [_size_row(names[one.name], curve, at) for one in listed for curve in one.curves for at in range(len(curve.sizes))]
    note = "Rate over that of the smallest number of devices, times the ratio of devices; the short lines show the 95 % interval."
    note += f" {_law_text(lines[0][1].laws[0])}" if len(families) == 1 and lines[0][1].laws else ""
    return Figure(title, svg, [(index, line) for index, (line, _) in enumerate(chosen)], "mark", columns, rows, note + more)


def _names(families: Sequence[Family]) -> dict[str, str]:
    """A name within the figure for each family, by its own name; those that differ in the micro batch only are counted."""
    short = [_short(family, families) for family in families]
    counts = [short[: index + 1].count(name) for index, name in enumerate(short)]
    return {one.name: name if n == 1 else f"{name} ({n})" for one, name, n in zip(families, short, counts, strict=True)}


def _short(family: Family, families: Sequence[Family]) -> str:
    """What tells a family from the others of its figure."""
    point = family.records[0].point
    batch = f"b{point.global_batch}" if family.kind == "strong" else f"b{point.global_batch // point.world} per device"
    words = [family.device.rpartition(" x")[0] or family.device, batch]
    for field in ("precision", "compile"):
        if len({getattr(other.records[0].point, field) for other in families}) > 1:
            words.append(getattr(point, field))
    return printable(" ".join(words))


def _size_mark(line: str, curve: Curve, index: int) -> dict[str, Any]:
    size = curve.sizes[index]
    low, high = _ends(size.efficiency)
    spoken = f"{line}, {size.world} devices: {_share(size.efficiency)}"
    return {"x": size.world, "y": 100 * size.efficiency.value, "low": 100 * low, "high": 100 * high, "d": spoken}


def _size_row(name: str, curve: Curve, index: int) -> list[str]:
    size = curve.sizes[index]
    law = _law_text(curve.laws[0]) if curve.laws and index == len(curve.sizes) - 1 else ""
    speed_up = written("", _metric(size.speed_up)) if index else "1"
    return [name, curve.basis, f"{size.world:,}", f"{size.global_batch:,}", speed_up, _share(size.efficiency) if index else "100 %", law]


def _law_text(law: Law) -> str:
    serial = f"{law.name}: serial share {plain('mfu', law.serial, '1')}"
    if law.serial_low is not None and law.serial_high is not None:
        serial += f" ({plain('mfu', law.serial_low, '1')} to {plain('mfu', law.serial_high, '1')})"
    limit = law.limit
    if limit.devices is None:
        return f"{serial}."
    beyond = ", extrapolated" if limit.extrapolated else ""
    return f"{serial}; efficiency below {100 * limit.efficiency:.0f} % beyond {plain('', limit.devices, '')} devices{beyond}."


def _ends(estimate: Estimate) -> tuple[float, float]:
    low, high = estimate.low, estimate.high
    return (estimate.value if low is None else low), (estimate.value if high is None else high)


def _metric(estimate: Estimate) -> Metric:
    return Metric(value=estimate.value, unit="1", low=estimate.low, high=estimate.high)


def _share(estimate: Estimate) -> str:
    return written("mfu", _metric(estimate))


TITLES: dict[Quantity, str] = {"time": "Time to solution with more devices", "energy": "Energy to solution with more devices"}


def matrices(records: Sequence[Record]) -> list[Figure]:
    """MAELSTROM's Figs. 1 to 3 for these records: ratio at the best number of devices to the smallest, by application and device."""
    solutions = solutions_of(records)
    kinds: tuple[tuple[Quantity, Quantity, str], ...] = (
        ("time", "time", ""),
        ("energy", "energy", ""),
        ("energy", "time", " chosen for time"),
    )
    found = [(f"{TITLES[quantity]}{words}", matrix(solutions, quantity, best_by)) for quantity, best_by, words in kinds]
    return [_matrix(title, cells) for title, cells in found if any(cell.ratio is not None for cell in cells)]


def _matrix(title: str, cells: Sequence[Cell]) -> Figure:
    rows, columns = (list(dict.fromkeys(printable(getattr(cell, name)) for cell in cells)) for name in ("row", "column"))
    placed = [
        {
            "row": rows.index(printable(cell.row)),
            "column": columns.index(printable(cell.column)),
            "text": cell.text,
            "value": cell.ratio.value if cell.ratio is not None else None,
            "d": f"{printable(cell.row)}, {printable(cell.column)}: {_ratio(cell)}",
        }
        for cell in cells
    ]
    svg = grid(rows, columns, placed, title, 110)
    note = "Cost at the best number of devices over the cost at the smallest, then smallest → best: 0.5, 1 → 4 means half with four."
    table = [[printable(cell.row), printable(cell.column), _ratio(cell)] for cell in cells]
    return Figure(title, svg, [], "block", ["application", "device", "ratio"], table, note)


def _ratio(cell: Cell) -> str:
    ratio = "not known" if cell.ratio is None else written("", _metric(cell.ratio)) if cell.smallest != cell.best else "1"
    return f"{ratio}, {cell.smallest} → {cell.best} devices"


def histories(root: Path, records: Sequence[Record], metric: str = "throughput") -> tuple[list[Figure], list[str]]:
    """Every attempt at the work of ``records`` over time, where there are several; changes of the level first."""
    keys = {record.key for record in records}
    if not keys:
        return [], []
    series = history([record for record in attempts([root]) if record.key in keys], metric)
    told = sorted((one for one in series if len(one.entries) >= FEWEST_ATTEMPTS), key=lambda one: not one.changes)
    shown, more = first(told, MOST_FIGURES, "figure")
    named = labels(records)
    return [_history(one, named[one.entries[-1].key]) for one in shown], [more.strip()] if more else []


def _history(series: Series, label: str) -> Figure:
    factor, unit = counted(max(entry.value for entry in series.entries), series.unit)
    times = [1000 * entry.time.timestamp() for entry in series.entries]
    texts = [written(series.metric, Metric(value=one.value, unit=series.unit, low=one.low, high=one.high)) for one in series.entries]
    points = []
    for entry, time, text in zip(series.entries, times, texts, strict=True):
        low, high = (entry.value if end is None else end for end in (entry.low, entry.high))
        spoken = f"{entry.time:%Y-%m-%d %H:%M}: {text}"
        points.append({"x": time, "y": entry.value / factor, "low": low / factor, "high": high / factor, "d": spoken})
    levels = [{"x": times[index], "y": level / factor} for begin, end, level in series.levels() for index in (begin, end)]
    title = f"{series.metric.replace('_', ' ').capitalize()} over time: {label}"
    svg = marks([points], Axis("", time=True), Axis(f"[{unit}]", zero=True), title, lines=False, path=levels)
    changes = {
        change.index: f"{100 * (change.ratio - 1):+.1f} %" + (", provisional" if change.provisional else "") for change in series.changes
    }
    rows = [
        [f"{entry.time:%Y-%m-%d %H:%M}", str(entry.attempt), text, changes.get(index, ""), printable(entry.software)]
        for index, (entry, text) in enumerate(zip(series.entries, texts, strict=True))
    ]
    note = "The dashed line is the level between changes. " + (
        _change_text(series) or f"No change{f': {series.note}' if series.note else ''}."
    )
    return Figure(title, svg, [], "mark", ["date", "attempt", "value", "change of level", "software"], rows, note)


def _change_text(series: Series) -> str:
    texts = []
    for change in series.changes:
        why = "; ".join(f"{one.name} {one.a} → {one.b}" for one in change.changed[:4])
        when = series.entries[change.index].time
        texts.append(f"{when:%Y-%m-%d}: {100 * (change.ratio - 1):+.1f} %{f', together with {printable(why)}' if why else ''}.")
    return " ".join(texts)
