"""The figures of the page: which numbers of which records each of them shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from caraml.analysis.distribution import elbow
from caraml.analysis.raw import Steps, Trace
from caraml.report.figure import Axis, Figure, Series, bars, curves
from caraml.report.groups import LABEL, MOST_FIGURES, MOST_SERIES, wide_range
from caraml.report.labels import clipped, labels
from caraml.report.numbers import count, plain, scaled
from caraml.report.thin import LIMIT, Points, distribution, paired, sampled, thinned
from caraml.results.record import Phase, Record

MOST_PHASES = 24
"""Points whose phases are worth a bar each."""
_MOST_PARTS = 200
"""Phases of one point that are drawn: the longest, because others cannot be seen."""


def step_distributions(records: Sequence[Record], steps: dict[str, Steps]) -> list[Figure]:
    """Cumulative distribution of the step times in the window, a figure for each benchmark."""

    def points(record: Record) -> Points:
        return distribution(steps[record.key].measured())

    def bend(record: Record) -> str:
        found = elbow(steps[record.key].measured())
        return f"{plain('', found.seconds, 's')}, {100 * found.share:.0f} % of the steps" if found is not None else "none"

    groups = _benchmarks(records, steps, lambda found: bool(found.measured()))
    return [_distribution(group, points, bend) for group in groups[:MOST_FIGURES]]


def _distribution(records: Sequence[Record], points: Callable[[Record], Points], bend: Callable[[Record], str]) -> Figure:
    """Several points share the axis by their medians, or the fast ones would be upright lines; a single one keeps its seconds."""
    named = labels(records)
    shown = records[:MOST_SERIES]
    found = {record.key: points(record) for record in shown}
    medians = {key: _at(one, 0.5) for key, one in found.items()}
    factor, unit = scaled(medians[shown[0].key], "s")
    x_title = f"step time [{unit}]" if len(shown) == 1 else "step time / the point's median"
    series = []
    for record in shown:
        divisor = factor if len(shown) == 1 else medians[record.key] or 1.0
        line = [(x / divisor, y) for x, y in found[record.key]]
        summary = f"{named[record.key]}: {_quantiles(found[record.key])}"
        series.append(Series(named[record.key], [(line[0][0], 0.0), *line], summary))
    ends = [end for one in series for end in (one.points[0][0], one.points[-1][0])]
    log = 10 if wide_range(ends) else None
    title = f"Step times in the window: {records[0].point.benchmark}"
    svg = curves(series, Axis(x_title, log=log), Axis("share of steps at or below", domain=(0, 1)), title, step=True)
    shares = (0, 0.05, 0.5, 0.95, 1)
    rows = [[named[one.key], *(plain("", _at(found[one.key], share), "s") for share in shares), bend(one)] for one in shown]
    columns = ["point", "shortest", "5 %", "median", "95 %", "longest", "elbow"]
    note = "The slowest rank's time of each step; the elbow in the table is where the bulk ends and a tail begins." + _left_out(records)
    return Figure(title, svg, _legend(series), "line", columns, rows, note)


def _at(points: Points, share: float) -> float:
    """The value that ``share`` of a distribution lies at or below."""
    return next((value for value, at in points if at >= share), points[-1][0])


def _quantiles(points: Points) -> str:
    return f"median {plain('', _at(points, 0.5), 's')}, 95 % below {plain('', _at(points, 0.95), 's')}"


@dataclass(frozen=True)
class _Quantity:
    """Something that has a value at every step."""

    name: str
    unit: str
    title: str
    note: str
    points: Callable[[Steps], Points]


def _times(found: Steps) -> Points:
    return _known(found, found.seconds, [phase != "first" for phase in found.phase])


def _losses(found: Steps) -> Points:
    return _known(found, found.loss, [True] * len(found.loss))


def _known(found: Steps, values: Sequence[float], shown: Sequence[bool]) -> Points:
    """The values that are known over their steps; of very many, the extremes of equal spans."""
    chosen = np.asarray(shown, dtype=bool) & ~np.isnan(values)
    return paired(np.asarray(found.step)[chosen].tolist(), np.asarray(values)[chosen].tolist())


STEP_TIME = _Quantity("step time", "s", "Step time over steps", "The slowest rank's time; warm-up included, the first step not.", _times)
LOSS = _Quantity("loss", "1", "Training loss over steps", "From the first step on; mean over ranks.", _losses)


def over_steps(quantity: _Quantity, records: Sequence[Record], steps: dict[str, Steps]) -> list[Figure]:
    """``STEP_TIME`` or ``LOSS`` over the steps, a figure for each benchmark."""
    groups = _benchmarks(records, steps, lambda found: bool(quantity.points(found)))
    return [_over_steps(quantity, group, steps) for group in groups[:MOST_FIGURES]]


def _over_steps(quantity: _Quantity, records: Sequence[Record], steps: dict[str, Steps]) -> Figure:
    named, unit = labels(records), quantity.unit
    shown = records[:MOST_SERIES]
    found = {record.key: quantity.points(steps[record.key]) for record in shown}
    values = [y for points in found.values() for _, y in points]
    factor, written_unit = scaled(statistics.median(values), unit)
    series, limit = [], _limit(len(shown))
    for record in shown:
        points = found[record.key]
        ends = f"{plain('', points[0][1], unit)} at step {points[0][0]:.0f}, {plain('', points[-1][1], unit)} at step {points[-1][0]:.0f}"
        summary = f"{named[record.key]}: {quantity.name} {ends}"
        series.append(Series(named[record.key], [(x, y / factor) for x, y in thinned(points, limit)], summary, len(points)))
    log = 10 if quantity is STEP_TIME and wide_range(values) else None
    title = f"{quantity.title}: {records[0].point.benchmark}"
    y_axis = Axis(f"{quantity.name} [{written_unit}]" if written_unit else quantity.name, log=log)
    last = max(points[-1][0] for points in found.values())
    svg = curves(series, Axis("step", domain=(0, last)), y_axis, title)
    rows = [[named[record.key], f"{x:.0f}", plain("", y, unit)] for record in shown for x, y in sampled(found[record.key])]
    note = quantity.note + _thinned_note(series, limit) + _left_out(records)
    return Figure(title, svg, _legend(series), "line", ["point", "step", quantity.name], rows, note)


def phases(records: Sequence[Record]) -> list[Figure]:
    """Where each point's time went, from the start of the worker."""
    shown = [record for record in records if record.phases]
    if not shown:
        return []
    named = labels(shown)
    drawn = [_longest(record) for record in shown]
    kinds = list(dict.fromkeys(_spoken(phase.name) for parts in drawn for phase in parts))
    # The window always has the first colour.
    number = {kind: index for index, kind in enumerate(sorted(kinds, key=lambda kind: kind != "measure"))}
    segments, rows = [], []
    for row, (record, parts) in enumerate(zip(shown, drawn, strict=True)):
        for phase in parts:
            length = plain("", phase.end - phase.start, "s")
            facts = {"row": row, "a": phase.start, "b": phase.end, "series": number[_spoken(phase.name)]}
            segments.append(
                {**facts, "d": f"{named[record.key]}, {_spoken(phase.name)}: {length}, {phase.start:,.2f} to {phase.end:,.2f} s"}
            )
            rows.append([named[record.key], _spoken(phase.name), f"{phase.start:,.2f} s", f"{phase.end:,.2f} s", length])
    title = "Phases of each point"
    svg = bars(clipped([named[record.key] for record in shown], LABEL), segments, [], "seconds since the start of the worker", title)
    cut = any(len(record.phases) > _MOST_PARTS for record in shown)
    note = f"Of each point only its {_MOST_PARTS} longest phases are shown." if cut else ""
    return [Figure(title, svg, [(number[kind], kind) for kind in kinds], "block", ["point", "phase", "start", "end", "length"], rows, note)]


def _longest(record: Record) -> list[Phase]:
    chosen = set(sorted(range(len(record.phases)), key=lambda n: record.phases[n].start - record.phases[n].end)[:_MOST_PARTS])
    return [phase for number, phase in enumerate(record.phases) if number in chosen]


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def power(record: Record, label: str, traces: Sequence[Trace]) -> Figure | None:
    """Power over time of one point's channels, with the window shaded."""
    series, rows = [], []
    limit = _limit(len(traces[:MOST_SERIES]) or 1)
    for trace in traces[:MOST_SERIES]:
        points = paired(trace.seconds, trace.watts)
        if not points:
            continue
        name = f"{trace.channel} ({'slope of the counter' if trace.counter else 'power'})"
        watts = [y for _, y in points]
        summary = f"{name}: {plain('', min(watts), 'W')} to {plain('', max(watts), 'W')}"
        series.append(Series(name, thinned(points, limit), summary, len(trace.seconds)))
        rows += [[name, f"{x:,.2f} s", plain("", y, "W")] for x, y in sampled(points)]
    if not series:
        return None
    title = f"Power: {label}"
    shade = (record.window.start, record.window.end) if record.window else None
    svg = curves(series, Axis("seconds since the start of the worker"), Axis("power [W]", zero=True), title, shade=shade)
    note = "The shaded span is the window of rate and energy." if shade else ""
    return Figure(title, svg, _legend(series), "line", ["channel", "time", "power"], rows, note + _thinned_note(series, limit))


def _benchmarks(records: Sequence[Record], steps: dict[str, Steps], usable: Callable[[Steps], bool]) -> list[list[Record]]:
    """The records with usable steps, by benchmark and in their order."""

    def benchmark(record: Record) -> str:
        return record.point.benchmark

    order = list(dict.fromkeys(map(benchmark, records)))
    found = sorted(
        (record for record in records if record.key in steps and usable(steps[record.key])), key=lambda one: order.index(benchmark(one))
    )
    return [list(group) for _, group in groupby(found, benchmark)]


def _legend(series: Sequence[Series]) -> list[tuple[int, str]]:
    return [(index, one.name) for index, one in enumerate(series)]


def _limit(lines: int) -> int:
    """Most points of each of several drawn lines, so that many lines make no larger a drawing than a few."""
    return max(LIMIT // 5, min(LIMIT, 4 * LIMIT // lines))


def _thinned_note(series: Sequence[Series], limit: int) -> str:
    longest = max(one.total for one in series)
    if longest <= limit:
        return ""
    return f" Drawn from the lowest and highest value of {limit // 2} bins; the longest series has {count(longest, 'value')}."


def _left_out(records: Sequence[Record]) -> str:
    return f" {len(records) - MOST_SERIES} further points are not drawn." if len(records) > MOST_SERIES else ""
