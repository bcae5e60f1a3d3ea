"""How rates grow with devices: efficiency by family, what more devices did to time and energy, and a result over the months. As figures
of a report, and as what `caraml scaling` and `history` say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from caraml.analysis.compare import UNDIRECTED
from caraml.analysis.grouping import told_apart
from caraml.analysis.history import Series, history
from caraml.analysis.laws import SMALLEST_SHARE, EfficiencyLimit, Law
from caraml.analysis.run_variation import INTERVAL
from caraml.analysis.scaling import (
    OTHER_BOUNDARIES,
    Basis,
    Cell,
    Curve,
    Quantity,
    ScalingFamily,
    Size,
    Solution,
    StepView,
    batch_of,
    device_name,
    left_out,
    matrix,
    scaling,
    solutions_of,
)
from caraml.base.chart import Axis, Drawing, cells, marks
from caraml.base.format import count, prefixed, printable, significant, some
from caraml.metrics.model import Metric, scaled, title_of
from caraml.report.comparison import LARGEST, change, estimated, flagged, signed_percent
from caraml.report.figures import MOST_COLUMNS, MOST_LINES
from caraml.report.grouping import LABEL, MOST_SERIES, first, first_figures, keys, labels, marker, repeated
from caraml.report.section import ReportFigure, Section, counted, plain, written
from caraml.report.series import clipped
from caraml.results.record import Record
from caraml.results.store import Store

MOST_LAWS = 12
"""Families to which laws are fitted, which takes longer than all else; ``caraml scaling`` fits them to any number."""
FEWEST_ATTEMPTS = 3
"""Attempts from which a result over time is worth a figure."""
_SLOWEST = 3
"""Ranks of one record that are listed."""
_MOST_CHANGED = 10
"""Settings that are named as changed with a level."""


def efficiencies(records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    """Scaling efficiency over the number of devices: a figure for each benchmark and kind of scaling, a line for each family."""
    groups: dict[str, list[ScalingFamily]] = {}
    families = scaling(records, efficiency=None)
    if len(families) <= MOST_LAWS:
        families = scaling(records)
    for family in families:
        groups.setdefault(printable(f"{family.records[0].point.benchmark}, {family.kind} scaling"), []).append(family)
    figures, notes = first_figures([_efficiency(name, families) for name, families in groups.items()])
    missing = left_out(records) if len({record.point.world for record in records}) > 1 else ""
    return figures, [*notes, *([f"{missing.capitalize()}."] if missing else [])]


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
        drawings += _panel(lines, curves, x, what=what, about=about, unit="", value=lambda _, size: size.efficiency.metric("1"))
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
    return lambda curve, size: scaled((size.mean or size.rate).metric("1"), 1 / size.world, "1") if curve.basis == basis else None


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
    speed_up = written("", size.speed_up.metric("1")) if index else "1"
    arithmetic = written("throughput", size.flops)
    sizes = f"{size.world:,}", f"{size.nodes:,}", f"{size.global_batch:,}"
    return [name, curve.basis, *sizes, arithmetic, speed_up, written("mfu", size.efficiency.metric("1")) if index else "100 %", law]


MATRICES: tuple[tuple[Quantity, Quantity, str, str], ...] = (
    ("time", "time", "Time to solution with more devices", "Time to solution: best number of devices over smallest"),
    ("energy", "energy", "Energy to solution with more devices", "Energy to solution: best number of devices over smallest"),
    ("energy", "time", "Energy to solution with more devices chosen for time", "Energy at the number of devices with the best time"),
)
"""Figs. 1 to 3 of MAELSTROM's D3.7: what is compared, what the number of devices is best for, title of the figure and of the table."""


def matrices(records: Sequence[Record]) -> list[ReportFigure]:
    """Figures of :data:`MATRICES`: ratio at the best number of devices to the smallest, by application and device."""
    solutions = solutions_of(records)
    missing = left_out(records, ("devices",))
    note = f" {missing.capitalize()}." if missing else ""
    every, dark = {one.key for one in solutions}, {one.key for one in solutions if one.energy is None}
    without = f" Left out: {len(dark)} of {count(len(every), 'point')}, without a known energy." if dark else ""
    return [
        _matrix(title, cells, note + without * ("energy" in (quantity, best_by)))
        for quantity, best_by, title, _ in MATRICES
        for cells in [matrix(solutions, quantity, best_by)]
        if any(cell.ratio is not None or cell.reason for cell in cells)
    ]


def _matrix(title: str, ratios: Sequence[Cell], others: str) -> ReportFigure:
    """``others``: what is said of results that are in no cell."""
    drawing, more = ratio_cells(ratios, title)
    note = "Cost at the best number of devices over the cost at the smallest, then smallest → best: 0.5, 1 → 4 means half with four."
    note += "".join(f" {told[0].upper()}{told[1:]}." for told in _picked(ratios))
    note += f" –: {OTHER_BOUNDARIES} are not comparable." if any(cell.reason for cell in ratios) else ""
    table = [[printable(cell.row), printable(cell.column), _ratio(cell)] for cell in ratios]
    return ReportFigure(title, [drawing], [], "block", ["application", "device", "ratio"], table, note + others + more)


def ratio_cells(ratios: Sequence[Cell], title: str, heading: str = "") -> tuple[Drawing, str]:
    """A matrix of ratios, and a sentence about rows and columns that it does not hold."""
    every = [list(dict.fromkeys(printable(getattr(cell, name)) for cell in ratios)) for name in ("row", "column")]
    rows, more = first(every[0], MOST_LINES, "row", "the table of this figure")
    columns, wider = first(every[1], MOST_COLUMNS, "column", "the table of this figure")
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


def _ratio(cell: Cell) -> str:
    if cell.reason:
        return f"not known: {cell.reason}"
    ratio = "not known" if cell.ratio is None else written("", cell.ratio.metric("1")) if cell.smallest != cell.best else "1"
    return f"{ratio}, {cell.smallest} → {cell.best} devices{_ties(cell)}"


def _ties(cell: Cell) -> str:
    return f"; {some([f'{one}' for one in cell.ties], _MOST_TIES)} may be as good" if cell.ties else ""


_MOST_TIES = 6


def _picked(ratios: Sequence[Cell]) -> tuple[str, ...]:
    """What is said of a matrix in which errors are known."""
    known = any(cell.ties or (cell.ratio is not None and cell.ratio.sd) for cell in ratios)
    told = "the best is picked: its interval holds for all choices at once, and numbers of devices that cannot be told from it are named"
    return (told,) if known else ()


def histories(store: Store, records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    """Every attempt at the work of ``records`` over time, where there are several; changes of the level first."""
    series = history([one for key in sorted({record.key for record in records}) for one in reversed(store.newest(key, None))])
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
    changes = {one.index: f"{100 * (one.ratio - 1):+.1f} %{', provisional' if one.provisional else ''}" for one in series.changes}
    rows = [
        [day, str(record.attempt), text, changes.get(index, ""), printable(record.point.software)]
        for index, (record, day, text) in enumerate(zip(series.records, days, texts, strict=True))
    ]
    told = _change_text(series) or f"No change{f': {series.note}' if series.note else ''}."
    note = f"The dashed line is the level between changes. {told}"
    return ReportFigure(title, [drawing], [], "mark", ["date", "attempt", "value", "change of level", "software"], rows, note)


def _change_text(series: Series) -> str:
    texts = []
    for found in series.changes:
        why = "; ".join(f"{one.name} {one.a} → {one.b}" for one in found.changed[:4])
        when = series.values[found.index].time
        texts.append(f"{when:%Y-%m-%d}: {100 * (found.ratio - 1):+.1f} %{f', together with {printable(why)}' if why else ''}.")
    return " ".join(texts)


# -- in a terminal -------------------------------------------------------------------------------------------------------


def scaling_sections(
    families: Sequence[ScalingFamily], solutions: Sequence[Solution], views: Sequence[StepView], missing: str = ""
) -> list[Section]:
    """Curves and laws of every family, the matrices of time and energy, and the single steps; ``missing``: what is left out."""
    sections = [_curve(family, curve) for family in families for curve in family.curves]
    sections += [Section("", (), (), (missing,))] if missing else []
    for quantity, best_by, _, title in MATRICES:
        found = matrix(solutions, quantity, best_by)
        shown = tuple((cell.row, cell.column, cell.text, cell.reason or change(cell.ratio) + _ties(cell)) for cell in found)
        if shown:
            sections.append(Section(title, ("application", "device", "ratio, devices", "change"), shown, _picked(found)))
    rows = tuple((view.name, str(len(view.batches)), *_elbow(view)) for view in views)
    if rows:
        note = "elbow: where the cumulative distribution is farthest above its chord; cost: what the steps beyond take more than the median"
        sections.append(Section("Single steps", ("record", "steps", "elbow", "at or below", "cost"), rows, (note,)))
    slow = tuple(row for view in views for row in _slow(view))
    if slow:
        note = "compared step by step; in synchronous training a rank's own delay is partly hidden, as all wait for it"
        sections.append(Section("Ranks", ("record", "rank", "behind the median rank", "slowest in", "waits for input", ""), slow, (note,)))
    return sections


def _curve(family: ScalingFamily, curve: Curve) -> Section:
    unit = {"training": f"{family.records[0].item}/s", "median batch": "sample/s", "epoch": "epoch/s"}[curve.basis]
    with_flops = any(size.flops is not None for size in curve.sizes)
    rows = tuple(
        (
            str(size.world),
            str(size.nodes),
            str(size.global_batch),
            str(len(size.keys)),
            estimated(size.mean, unit),
            *([written("throughput", size.flops)] if with_flops else []),
            estimated(size.speed_up, "1"),
            estimated(size.efficiency, "1"),
        )
        for size in curve.sizes
    )
    notes = [law_text(law) for law in curve.laws]
    notes += [f"rests on flagged runs: {flagged(family.rests_on)}"] if family.rests_on else []
    notes += [f"rate: {INTERVAL}", f"speed-up, efficiency and laws: {curve.variation}"]
    flops = ["FLOP/s per device"] if with_flops else []
    columns = ("devices", "nodes", "global batch", "runs", "rate", *flops, "speed-up", "efficiency")
    return Section(f"{family.name}, by {curve.basis}", columns, rows, tuple(notes))


def law_text(law: Law) -> str:
    """A law with its interval, whether it fits, and where the efficiency falls."""
    known = law.serial_low is not None and law.serial_high is not None
    band = f" % ({_percent(law.serial_low)} to {_percent(law.serial_high)} %)" if known else " ± ? %"  # type: ignore[arg-type]
    fits = ", which does not describe these rates" if law.misfit is not None and law.misfit < 0.05 else ""
    return f"{law.name}: serial share {_percent(law.serial)}{band}{fits}; {_limit(law.limit)}"


def _percent(share: float) -> str:
    return significant(100 * share, 2) if share >= SMALLEST_SHARE else "0"


def _limit(limit: EfficiencyLimit) -> str:
    share = f"efficiency {100 * limit.efficiency:g} %"
    if limit.devices is None or limit.devices > LARGEST:
        low = LARGEST + 1 if limit.low is None else limit.low
        sooner = f", but may fall below it beyond {significant(low, 2)} devices" if low <= LARGEST else ""
        return f"never below {share} by this fit (extrapolated){sooner}"
    ends = " ± ?"
    if limit.low is not None:
        to = " on" if limit.high is None or limit.high > LARGEST else f" to {significant(limit.high, 2)}"
        ends = f" (from {significant(limit.low, 2)}{to})"
    extrapolated = ", extrapolated beyond what was measured" if limit.extrapolated else ""
    return f"below {share} beyond {significant(limit.devices, 2)} devices{ends}{extrapolated}"


def _elbow(view: StepView) -> tuple[str, str, str]:
    found = view.elbow
    if found is None:
        return "none", "", ""
    factor, unit = prefixed(found.seconds, "s")
    return f"{significant(found.seconds / factor)} {unit}", f"{100 * found.share:.0f} %", f"{100 * found.cost:.1f} %"


def _slow(view: StepView) -> Iterable[tuple[str, ...]]:
    for one in view.ranks[:_SLOWEST]:
        behind = f"{100 * one.excess:+.2f} % ({100 * one.low:+.2f} to {100 * one.high:+.2f})"
        yield view.name, str(one.rank), behind, f"{100 * one.slowest:.0f} % of steps", f"{100 * one.wait:.1f} %", "slow" if one.slow else ""


def history_sections(series: Sequence[Series], dropped: int = 0) -> list[Section]:
    """A row for each level of each series, and what changed between levels; ``dropped``: results that are not above zero."""
    metric = title_of(series[0].metric)
    rows = tuple(row for one in series for row in _levels(one))
    short = sum(one.note is not None for one in series)
    notes = [f"{short} of {len(series)} series have fewer results, or times, than a change needs"] if short else []
    notes += [f"left out: {count(dropped, 'result')} not above zero, as levels are compared by their ratio"] if dropped else []
    notes += list(dict.fromkeys(UNDIRECTED[one.better] for one in series if one.better in UNDIRECTED))
    notes += [INTERVAL, "changes are between the medians of the stretches"]
    found = [Section(f"{metric} over time", ("work", "device", "from, to", "runs", "mean", "change", ""), rows, tuple(notes))]
    changes = tuple(text for one in series for text in _changes(one))
    alone = tuple(
        f"{one.name}: the newest result is {signed_percent(one.newest)} % off its level; one is no change, so measure it again"
        for one in series
        if one.newest is not None
    )
    none = "none beyond chance" if short < len(series) else "not looked for: no series has enough results for one to be found"
    return [*found, Section("Changes", (), (), (*(changes or (none,)), *alone))]


def _levels(one: Series) -> Iterable[tuple[str, ...]]:
    for number, (begin, end, _) in enumerate(one.levels()):
        found = one.changes[number - 1] if number else None
        what = "" if found is None else f"{signed_percent(found.ratio)} %"
        verdict = "" if found is None or found.better is None else "better" if found.better else "worse"
        span = f"{one.values[begin].time:%Y-%m-%d %H:%M} to {one.values[end].time:%Y-%m-%d %H:%M}"
        name = ("", "") if number else (one.name, one.records[0].point.device)
        yield *name, span, str(end - begin + 1), estimated(one.mean(begin, end), one.unit), what, verdict


def _changes(one: Series) -> Iterable[str]:
    for found in one.changes:
        says = "; ".join(f"{what.name}: {what.a} → {what.b}" for what in found.changed[:_MOST_CHANGED])
        provisional = ", provisional: few results" if found.provisional else ""
        when = f"{one.values[found.index].time:%Y-%m-%d %H:%M}"
        yield f"{when} {one.name} {signed_percent(found.ratio)} %{provisional}. Changed with it: {says or 'nothing that is recorded'}"
