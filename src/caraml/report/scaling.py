"""How rates grow with devices: efficiency by family, what more devices did to time and energy, and a result over the months."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from caraml.analysis.estimate import Estimate
from caraml.analysis.grouping import told_apart
from caraml.analysis.history import Series, attempts, history
from caraml.analysis.scaling import (
    OTHER_BOUNDARIES,
    Basis,
    Cell,
    Curve,
    Quantity,
    ScalingFamily,
    Size,
    batch_of,
    device_name,
    left_out,
    matrix,
    scaling,
    solutions_of,
)
from caraml.base.chart import Axis, Drawing, cells, marks
from caraml.base.format import count, printable
from caraml.metrics.model import Metric, scaled
from caraml.report.comparison import law_text
from caraml.report.figures import MOST_COLUMNS, MOST_LINES
from caraml.report.grouping import LABEL, MOST_SERIES, first, first_figures, keys, labels, marker, repeated
from caraml.report.numbers import counted, plain, written
from caraml.report.section import ReportFigure, clipped
from caraml.results.record import Record

MOST_LAWS = 12
"""Families to which laws are fitted, which takes longer than all else; ``caraml scaling`` fits them to any number."""
FEWEST_ATTEMPTS = 3
"""Attempts from which a result over time is worth a figure."""


def efficiencies(records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    """Scaling efficiency over the number of devices: a figure for each benchmark and kind of scaling, a line for each family."""
    groups: dict[str, list[ScalingFamily]] = {}
    families = scaling(records, efficiency=None)
    if len(families) <= MOST_LAWS:
        families = scaling(records)
    for family in families:
        groups.setdefault(printable(f"{family.records[0].point.benchmark}, {family.kind} scaling"), []).append(family)
    figures, notes = first_figures([_efficiency(name, families) for name, families in groups.items()])
    missing = left_out(records)
    return figures, [
        *notes,
        *([f"{missing[0].upper()}{missing[1:]}."] if missing and len({record.point.world for record in records}) > 1 else []),
    ]


def _efficiency(name: str, families: Sequence[ScalingFamily]) -> ReportFigure:
    """One family is drawn by each of its rates, several in a panel for each rate; beside them what one device does."""
    names = _names(families)
    shown, more = first(list(families), MOST_SERIES, "line")
    bases = list(dict.fromkeys(curve.basis for family in shown for curve in family.curves))
    alone: list[Curve | None] = [*families[0].curves] if len(families) == 1 else []
    lines: list[str] = [*bases] if alone else [names[family.name] for family in shown]
    x = _Across([size for family in shown for curve in family.curves for size in curve.sizes])
    title = f"Scaling efficiency: {name}"
    told = {f"efficiency, {_TOLD.get(basis, basis)}": [family.curve(basis) for family in shown] for basis in bases}
    drawings = []
    for what, curves in ({"efficiency": alone} if alone else told).items():
        about = title if alone or len(told) == 1 else f"{what[0].upper()}{what[1:]}: {name}"
        drawings += _panel(lines, curves, x, what=what, about=about, unit="", value=lambda _, size: _metric(size.efficiency))
    item = families[0].records[0].item
    for what, basis, unit, value in _PER_DEVICE:
        curves, about = alone or [family.curve(basis) for family in shown], f"{what[0].upper()}{what[1:]}: {name}"
        drawings += _panel(lines, curves, x, what=what, about=about, unit=unit.format(item=item), value=value)
    columns = ["family", "rate", "devices", "nodes", "batch", "FLOP/s per device", "speed-up", "efficiency", "law"]
    listed = families[:MOST_SERIES]
    rows = [_size_row(names[one.name], curve, at) for one in listed for curve in one.curves for at in range(len(curve.sizes))]
    note = "Rate over that of the smallest number of devices, times the ratio of devices; the short lines show the 95 % interval."
    laws = families[0].curves[0].laws
    note += f" {law_text(laws[0])}" if alone and laws else ""
    return ReportFigure(title, drawings, lines, "mark", columns, rows, note + more)


class _Across:
    """The horizontal axis: nodes, where all sizes have equally many devices on each, else devices."""

    def __init__(self, sizes: Sequence[Size]) -> None:
        each = {size.world / size.nodes for size in sizes}
        self.nodes = len(each) == 1 and max(size.nodes for size in sizes) > 1
        places = sorted({self.place(size) for size in sizes})
        title = f"nodes of {count(round(each.pop()), 'device')}" if self.nodes else "devices"
        self.axis = Axis(title, log=2, ticks=[float(place) for place in places], domain=(places[0] / 1.15, places[-1] * 1.15))

    def place(self, size: Size) -> int:
        """Where a size stands."""
        return size.nodes if self.nodes else size.world


_Value: TypeAlias = Callable[[Curve, Size], Metric | None]


def _of_rate(basis: Basis) -> _Value:
    """A curve's rate over its devices, if it is the rate of ``basis``."""
    return lambda curve, size: scaled(_metric(size.mean or size.rate), 1 / size.world, "1") if curve.basis == basis else None


_TOLD: dict[Basis, str] = {"training": "training part"}
_PER_DEVICE: tuple[tuple[str, Basis, str, _Value], ...] = (
    ("rate per device", "training", "{item}/s", _of_rate("training")),
    ("rate of the median batch per device", "median batch", "sample/s", _of_rate("median batch")),
    ("arithmetic of a device", "training", "FLOP/s", lambda _, size: size.flops),
)
"""What one device does over their number: flat where scaling is perfect. EPICURE has the second of images, the third of language models."""


def _panel(
    lines: Sequence[str], curves: Sequence[Curve | None], x: _Across, *, what: str, about: str, unit: str, value: _Value
) -> list[Drawing]:
    """A number of one device, or a share where there is no unit, over the number of devices; nothing where no size has it."""
    found = [[(size, metric) for size in curve.sizes if (metric := value(curve, size)) is not None] if curve else [] for curve in curves]
    values = [metric.value for one in found for _, metric in one if metric.value is not None]
    if not values:
        return []
    factor, written_unit = counted(max(values), unit) if unit else (0.01, "%")
    series: list[list[dict[str, Any]]] = [[] for _ in lines]
    for line, one, drawn in zip(lines, found, series, strict=True):
        for size, metric in one:
            told = f"{plain('', metric.value, unit)} per device" if unit else written("mfu", metric)
            drawn.append(marker(x.place(size), metric, factor, f"{line}, {count(size.world, 'device')}: {told}", keys(size.keys)))
    return [marks(series, x.axis, Axis(f"{what} [{written_unit}]", zero=True), about)]


def _names(families: Sequence[ScalingFamily]) -> dict[str, str]:
    """A name within the figure for each family, by its own name: device and batch, and what tells it from others with these."""
    bases = [f"{device_name(one.records[0].point.device)} {batch_of(one.records[0].point, one.kind)}" for one in families]
    told = told_apart(bases, [one.details for one in families])
    return {one.name: printable(name) for one, name in zip(families, told, strict=True)}


def _size_row(name: str, curve: Curve, index: int) -> list[str]:
    size = curve.sizes[index]
    law = law_text(curve.laws[0]) if curve.laws and index == len(curve.sizes) - 1 else ""
    speed_up = written("", _metric(size.speed_up)) if index else "1"
    arithmetic = written("throughput", size.flops)
    sizes = f"{size.world:,}", f"{size.nodes:,}", f"{size.global_batch:,}"
    return [name, curve.basis, *sizes, arithmetic, speed_up, _share(size.efficiency) if index else "100 %", law]


def _metric(estimate: Estimate) -> Metric:
    return Metric(value=estimate.value, unit="1", low=estimate.low, high=estimate.high)


def _share(estimate: Estimate) -> str:
    return written("mfu", _metric(estimate))


TITLES: dict[Quantity, str] = {"time": "Time to solution with more devices", "energy": "Energy to solution with more devices"}


def matrices(records: Sequence[Record]) -> list[ReportFigure]:
    """MAELSTROM's Figs. 1 to 3 for these records: ratio at the best number of devices to the smallest, by application and device."""
    solutions = solutions_of(records)
    kinds: tuple[tuple[Quantity, Quantity, str], ...] = (
        ("time", "time", ""),
        ("energy", "energy", ""),
        ("energy", "time", " chosen for time"),
    )
    found = [(f"{TITLES[quantity]}{words}", matrix(solutions, quantity, best_by)) for quantity, best_by, words in kinds]
    missing = left_out(records, ("devices",))
    note = f" {missing[0].upper()}{missing[1:]}." if missing else ""
    every, dark = {one.key for one in solutions}, {one.key for one in solutions if one.energy is None}
    without = f" Left out: {len(dark)} of {count(len(every), 'point')}, without a known energy." if dark else ""
    return [
        _matrix(title, cells, note + without * ("energy" in (quantity, best_by)))
        for (title, cells), (quantity, best_by, _) in zip(found, kinds, strict=True)
        if any(cell.ratio is not None or cell.reason for cell in cells)
    ]


def _matrix(title: str, ratios: Sequence[Cell], others: str) -> ReportFigure:
    """``others``: what is said of results that are in no cell."""
    drawing, more = ratio_cells(ratios, title)
    note = "Cost at the best number of devices over the cost at the smallest, then smallest → best: 0.5, 1 → 4 means half with four."
    note += f" –: {OTHER_BOUNDARIES} are not comparable." if any(cell.reason for cell in ratios) else ""
    table = [[printable(cell.row), printable(cell.column), _ratio(cell)] for cell in ratios]
    return ReportFigure(title, [drawing], [], "block", ["application", "device", "ratio"], table, note + others + more)


def ratio_cells(ratios: Sequence[Cell], title: str, heading: str = "") -> tuple[Drawing, str]:
    """A matrix of ratios, and a sentence about rows and columns that it does not hold."""
    every = [list(dict.fromkeys(printable(getattr(cell, name)) for cell in ratios)) for name in ("row", "column")]
    (rows, more), (columns, wider) = _fitting(every[0], MOST_LINES, "row"), _fitting(every[1], MOST_COLUMNS, "column")
    placed = [
        {
            "row": rows.index(row),
            "column": columns.index(column),
            "text": cell.text,
            "value": cell.ratio.value if cell.ratio is not None else None,
            "d": f"{row}, {column}: {_ratio(cell)}",
        }
        for cell in ratios
        for row, column in [(printable(cell.row), printable(cell.column))]
        if row in rows and column in columns
    ]
    names = clipped(rows, LABEL), clipped(columns, LABEL // min(len(columns), 3))
    return cells(*names, placed, title, 110, heading=heading), more + wider


def _fitting(names: Sequence[str], limit: int, noun: str) -> tuple[Sequence[str], str]:
    """As many rows or columns as a drawing holds, and a sentence about the others."""
    more = f" {count(len(names) - limit, f'further {noun}')} not drawn; the table of this figure has them." if len(names) > limit else ""
    return names[:limit], more


def _ratio(cell: Cell) -> str:
    if cell.reason:
        return f"not known: {cell.reason}"
    ratio = "not known" if cell.ratio is None else written("", _metric(cell.ratio)) if cell.smallest != cell.best else "1"
    return f"{ratio}, {cell.smallest} → {cell.best} devices"


def histories(root: Path, records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    """Every attempt at the work of ``records`` over time, where there are several; changes of the level first."""
    keys = {record.key for record in records}
    if not keys:
        return [], []
    series = history(attempts([root], keys))
    told = sorted((one for one in series if len(one.records) >= FEWEST_ATTEMPTS), key=lambda one: not one.changes)
    lines = repeated(records, ())
    means = labels([line.mean for line in lines])
    named = {run.key: means[line.mean.key] for line in lines for run in line.runs}
    return first_figures([_history(one, named[one.records[-1].key]) for one in told])


def _history(series: Series, label: str) -> ReportFigure:
    factor, unit = counted(max(one.value for one in series.values), series.unit)
    times = [1000 * one.time.timestamp() for one in series.values]
    values = [record.metrics[series.metric] for record in series.records]
    texts = [written(series.metric, value) for value in values]
    days = [f"{one.time:%Y-%m-%d %H:%M}" for one in series.values]
    of = keys(series.records[-1:])  # all are attempts at one point
    points = [marker(time, value, factor, f"{day}: {text}", of) for time, value, day, text in zip(times, values, days, texts, strict=True)]
    levels = [{"x": times[index], "y": level / factor} for begin, end, level in series.levels() for index in (begin, end)]
    title = f"{series.metric.replace('_', ' ').capitalize()} over time: {label}"
    drawing = marks([points], Axis("", time=True), Axis(f"[{unit}]", zero=True), title, lines=False, path=levels)
    changes = {
        change.index: f"{100 * (change.ratio - 1):+.1f} %" + (", provisional" if change.provisional else "") for change in series.changes
    }
    rows = [
        [day, str(record.attempt), text, changes.get(index, ""), printable(record.point.software)]
        for index, (record, day, text) in enumerate(zip(series.records, days, texts, strict=True))
    ]
    note = "The dashed line is the level between changes. " + (
        _change_text(series) or f"No change{f': {series.note}' if series.note else ''}."
    )
    return ReportFigure(title, [drawing], [], "mark", ["date", "attempt", "value", "change of level", "software"], rows, note)


def _change_text(series: Series) -> str:
    texts = []
    for change in series.changes:
        why = "; ".join(f"{one.name} {one.a} → {one.b}" for one in change.changed[:4])
        when = series.values[change.index].time
        texts.append(f"{when:%Y-%m-%d}: {100 * (change.ratio - 1):+.1f} %{f', together with {printable(why)}' if why else ''}.")
    return " ".join(texts)
