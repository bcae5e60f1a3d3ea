"""Published figures with the user's results beside them: one way to draw each form, and what is drawn stands in ``caraml.reference``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from caraml.analysis.estimate import Estimate
from caraml.analysis.grouping import grouped, told_apart, unstated_size
from caraml.analysis.scaling import Solution, device_name, matrix, solutions_of
from caraml.base.chart import Axis, Drawing, bars, cells, dots, marks
from caraml.base.format import count, printable, significant
from caraml.metrics.model import Metric
from caraml.reference import SHORT
from caraml.reference.figures import (
    APPLICATIONS,
    Experiment,
    Panel,
    PublishedFigure,
    drawn_names,
    experiments,
    has_published_size,
    own_names,
    published_figures,
)
from caraml.report.grouping import LABEL, MOST_SERIES, SHARES, families, first, keys, labels, machine, marker, repeated
from caraml.report.scaling import ratio_cells
from caraml.report.section import ReportFigure, plain
from caraml.report.series import clipped
from caraml.report.works import tracks_over_batch, tracks_over_devices, works
from caraml.results.record import Record

MOST_OWN = 30
"""Results of the user in one figure."""
OWN = "yours"
"""What stands before the user's results in a figure, where published ones have the name of their source."""


class FigureLine:
    """What has one name in a figure: a published row or line, or one of the user's."""

    def __init__(self, name: str, own: bool, found: Sequence[Experiment], of: str = "") -> None:
        self.name, self.own, self.found, self.of = printable(name), own, found, of

    def number(self, panel: Panel, value: str, one: Experiment) -> float | None:
        """A value of a panel for one of its experiments."""
        return one.number(panel.own.get(value, panel.values[value]) if self.own else panel.values[value])

    def numbers(self, panel: Panel) -> Iterator[tuple[Experiment, str, float]]:
        """Every known value of a panel: its experiment, its name, the number."""
        for one in self.found:
            for value in panel.values:
                if (number := self.number(panel, value, one)) is not None:
                    yield one, value, number


def beside(records: Sequence[Record]) -> tuple[list[ReportFigure], list[str]]:
    """Every published figure of a workload, mode and setting that is among the records and has a number of theirs.

    Of figures that show nothing which the records have, or have on another number of devices or of another size only, only their names.
    """
    good = [record for record in records if record.status == "ok"]
    own = [(line.mean, _fields(line.mean)) for line in repeated(good, drawn_names())]
    figures: list[ReportFigure] = []
    empty: list[str] = []
    other: list[str] = []
    for figure in published_figures():
        of_figure = experiments(figure)
        kinds = set() if figure.own else {(one.fields["workload"], one.fields["mode"]) for one in of_figure}
        mine = [record for record, one in own if _of(figure, kinds, one)]
        chosen = [record for record in mine if _as_published(figure, of_figure, record)]
        name = f"{SHORT[figure.source]} {figure.name}"
        if mine and not chosen:
            other.append(name)
        if not chosen:
            continue
        drawn = draw(figure, chosen, len(mine) - len(chosen))
        if drawn is None:
            empty.append(name)
        else:
            figures.append(drawn)
    notes = [f"Not drawn, since your results have none of their numbers: {', '.join(empty)}."] if empty else []
    notes += [f"Not drawn, since {_OTHER} than theirs: {', '.join(other)}."] if other else []
    return figures, notes


_OTHER = "your results are of another size, or on another number of devices,"


def _as_published(figure: PublishedFigure, of_figure: Sequence[Experiment], record: Record) -> bool:
    """Whether a result is of the published size and, unless the figure is over devices, on a number of them that the source has."""
    point = record.point
    if {"devices", "nodes"} & {*record.unstated} or not has_published_size(point.workload, point.params):
        return False
    same = [one for one in of_figure if one.fields["workload"] == point.workload] or of_figure  # a command is of any
    return figure.any_devices or point.world in {one.fields["devices"] for one in same}


def draw(figure: PublishedFigure, records: Sequence[Record] = (), others: int = 0) -> ReportFigure | None:
    """A figure, with the results of ``records``, each the mean of its repeats, in the same axes; ``None`` if none of those has a number.

    ``others``: how many results there are besides, of another size or number of devices.
    """
    published = [one for one in experiments(figure) if _told(figure, one, own=False)]
    of_source = SHORT[figure.source]
    rows_of = grouped(published, lambda one: figure.row.format_map(one.fields))
    lines = [FigureLine(f"{of_source}: {figure.row.format_map(group[0].fields)}", False, group) for group in rows_of]
    placed = [record for record in records if not (figure.x and "global_batch" in unstated_size(record))]
    mine = [record for record in placed if _told(figure, _fields(record), own=True)]
    limit, noun = (MOST_SERIES, "line of yours") if figure.form == "lines" else (MOST_OWN, "result of yours")
    own, more = first(_own_lines(figure, mine), limit, noun)
    lines += own
    shown, rows, legend = _FORMS[figure.form](figure, lines)
    if records and not any(row[0].startswith(OWN) for row in rows):
        return None
    systems = ", ".join(dict.fromkeys(str(one.fields["system"]) for one in published))
    note = f"{figure.note} Systems: {systems}." + "".join(f" {one}." for one in _notes(figure, published)) + more
    told = dict.fromkeys(mark for record in mine for mark in _marks(figure, record))
    note += "".join(f" {mark}: {_MARKS.get(mark, _OF_BOUNDARY)}." for mark in told)
    note += f" Not drawn: {count(others, 'result')} of yours of another size or number of devices." if others else ""
    key = {"dots": "mark", "lines": "mark"}.get(figure.form, "block")
    columns = ["result", "value", "number"]
    title = f"{of_source} {figure.name}: {figure.title}"
    return ReportFigure(title, shown, legend, key, columns, rows, note)  # type: ignore[arg-type]


def _fields(record: Record) -> Experiment:
    """A result of the user as an experiment."""
    point = record.point
    fields: dict[str, Any] = {name: value for name, value in point.params.items() if isinstance(value, str | int | float)}
    fields |= {
        name: getattr(point, name) for name in ("benchmark", "workload", "mode", "precision", "nodes", "global_batch", "micro_batch")
    }
    fields |= {"devices": point.world, "device": point.device, "system": machine(point)}
    fields |= {"app": APPLICATIONS.get(point.workload, point.workload)}
    known = {name: one for name, one in record.metrics.items() if one.value is not None}
    # An epoch that is projected from the window says nothing about first and later ones.
    return Experiment(fields | {name: one.value for name, one in known.items() if not (name.startswith("epoch_time") and one.reason)})


def _of(figure: PublishedFigure, kinds: Collection[tuple[str, str]], one: Experiment) -> bool:
    """Whether a result of the user is of what a figure shows. ``kinds``: workloads and modes in its tables."""
    return one.holds(figure.own) if figure.own else (one.fields["workload"], one.fields["mode"]) in kinds


def _told(figure: PublishedFigure, one: Experiment, own: bool) -> bool:
    return any(True for panel in figure.panels for _ in FigureLine("", own, [one]).numbers(panel))


_WHOLE_RUN = frozenset(("run_time", "run_energy", "run_node_energy", "action", "runtime", "training_time", "loading_time")) | SHARES
"""Numbers of a whole run: what they are depends on how long it was."""
_ENERGIES = frozenset(("run_energy", "energy_per_item", "items_per_watt_hour"))
_MARKS = {"by the clock": "ended with its window and not after the epochs of the source; time, energy and shares are of as long as it ran"}
_OF_BOUNDARY = "energy of this boundary, which does not compare with that of devices"


def _marks(figure: PublishedFigure, record: Record) -> list[str]:
    """Why numbers of a result are not those of the published run."""
    names = own_names(figure.panels)
    by_clock = record.point.measure.epochs is None and record.point.workload != "command"
    scopes = (record.metrics[name].scope for name in sorted(names & _ENERGIES) if record.value(name) is not None)
    return [
        *(_MARKS if by_clock and names & _WHOLE_RUN else ()),
        *dict.fromkeys(scope for scope in scopes if scope not in {None, "device"}),
    ]


def _own_line(figure: PublishedFigure, name: str, records: Sequence[Record]) -> FigureLine:
    marks = dict.fromkeys(mark for record in records for mark in _marks(figure, record))
    start = f"{OWN} ({', '.join(marks)})" if marks else OWN
    return FigureLine(f"{start}: {name}", True, [_fields(one) for one in records], keys(records))


def _own_lines(figure: PublishedFigure, records: Sequence[Record]) -> list[FigureLine]:
    """The user's results, each a row; along a horizontal axis those that differ in what the axis shows as one line."""
    if figure.form == "ratios":
        return _own_ratios(records)
    if not figure.x:
        labelled = labels(records)
        several = len({machine(record.point) for record in records}) > 1
        names = [labelled[one.key] for one in records]
        if several:  # some labels have it, as nothing else tells them apart
            named = [(name, machine(one.point)) for name, one in zip(names, records, strict=True)]
            names = [name if name.endswith(f" {where}") else f"{name} {where}" for name, where in named]
        return [_own_line(figure, name, [one]) for name, one in zip(names, records, strict=True)]

    def place(record: Record) -> float:
        return _x(figure, FigureLine("", True, ()), _fields(record))

    over_devices = "placement" in figure.along
    lines = [
        (f"{work} {family}", line)
        for work, of_work in works(records).items()
        for family, found in families(of_work, [*figure.along, "micro batch", *(["division"] if over_devices else [])]).items()
        for line in (tracks_over_devices(found) if over_devices else tracks_over_batch(found, place))
    ]
    names = told_apart([name for name, _ in lines], [{"placement": line.way, "batch": line.batch} for _, line in lines])
    names = told_apart(names, [line.details for _, line in lines])
    return [_own_line(figure, name, line.records) for name, (_, line) in zip(names, lines, strict=True)]


def _own_ratios(records: Sequence[Record]) -> list[FigureLine]:
    """A row for each work of the user's, as in the matrices of their own: an application is enough to name one that has no other."""
    by_key = {record.key: record for record in records}
    rows = {found[0].row: found for found in grouped(solutions_of(records), lambda one: one.row)}
    apps = {row: str(_fields(by_key[found[0].key]).fields["app"]) for row, found in rows.items()}
    alone = {app for app in apps.values() if [*apps.values()].count(app) == 1}
    return [
        FigureLine(
            f"{OWN}: {apps[row] if apps[row] in alone else f'{apps[row]}, {row}'}",
            True,
            [Experiment({**_fields(by_key[one.key]).fields, "column": one.column, "boundary": one.boundary}) for one in found],
            keys(one.key for one in found),
        )
        for row, found in rows.items()
    ]


def _notes(figure: PublishedFigure, found: Sequence[Experiment]) -> list[str]:
    """What the tables say wrongly of the numbers that are drawn."""
    told = " ".join(formula for panel in figure.panels for formula in panel.values.values())
    notes = dict.fromkeys(note for one in found for metric, note in one.notes if metric in told and "misprint" in note)
    return list(notes)


def _rows(figure: PublishedFigure, lines: Sequence[FigureLine]) -> list[list[str]]:
    """The table of a figure: a row for each number."""
    rows = []
    for line in lines:
        for panel in figure.panels:
            for one, value, number in line.numbers(panel):
                place = [figure.series.format_map(one.fields)] if figure.series and not line.own else []
                place += [f"{figure.x_axis.split(' [')[0]} {_x(figure, line, one):g}"] if figure.x else []
                spoken = f"{value}: {panel.axis}" if value else panel.axis
                rows.append([" ".join([line.name, *place]), spoken, plain("", number, panel.unit)])
    return rows


def _x(figure: PublishedFigure, line: FigureLine, one: Experiment) -> float:
    found = one.number(figure.x_own if line.own and figure.x_own else figure.x)
    assert found is not None, f"{figure.name}: every experiment has its place on the horizontal axis"
    return found


Drawn = tuple[list[Drawing], list[list[str]], list[str]]
"""Drawings, the rows of their table, and the legend."""


def _dots(figure: PublishedFigure, lines: Sequence[FigureLine]) -> Drawn:
    """A row for each line, a marker for each series or value."""
    published = [one for line in lines if not line.own for one in line.found]
    series = list(dict.fromkeys(figure.series.format_map(one.fields) for one in published)) if figure.series else []
    legend = [*series, OWN] if series and any(line.own for line in lines) else series or [*figure.panels[0].values]
    names = clipped([line.name for line in lines], LABEL)
    drawings = []
    for panel in figure.panels:
        found: list[list[dict[str, Any]]] = [[] for _ in legend]
        for row, line in enumerate(lines):
            for one, value, number in line.numbers(panel):
                name = OWN if line.own else figure.series.format_map(one.fields)
                index = legend.index(name) if series else [*panel.values].index(value)
                words = line.name, name if series and not line.own else "", value, plain("", number, panel.unit)
                found[index].append({"row": row, "x": number, "d": " ".join(filter(None, words)), "of": line.of})
        if any(found):
            drawings.append(dots(names, found, panel.axis, f"{figure.title}: {panel.axis}"))
    return drawings, _rows(figure, lines), [] if legend == [""] else legend


def _bars(figure: PublishedFigure, lines: Sequence[FigureLine]) -> Drawn:
    """A bar for each line, of parts one after the other; the sum stands in its name."""
    drawings = []
    for panel in figure.panels:
        segments, names = [], []
        brief = clipped([line.name for line in lines], LABEL - 10)
        for row, line in enumerate(lines):
            parts = {value: number for _, value, number in line.numbers(panel)}
            start = 0.0
            for at, value in enumerate(panel.values):
                length = parts.get(value, -1.0)
                if length >= 0:  # parts that are measured apart may be more than the whole, and leave no rest
                    spoken = f"{line.name}, {value}: {plain('', parts[value], panel.unit)}"
                    segments.append({"row": row, "a": start, "b": start + length, "series": at, "d": spoken, "of": line.of})
                    start += length
            total = f": {plain('', sum(parts.values()), panel.unit)}" if parts and panel.unit != "%" else ""
            names.append(f"{brief[row]}{total}")
        drawings.append(bars(names, segments, [], panel.axis, f"{figure.title}: {panel.axis}"))
    return drawings, _rows(figure, lines), [*figure.panels[0].values]


def _lines(figure: PublishedFigure, lines: Sequence[FigureLine]) -> Drawn:
    """A line with markers for each, over the horizontal axis."""
    drawings = []
    for panel in figure.panels:
        series = []
        for line in lines:
            found = sorted((_x(figure, line, one), number) for one, _, number in line.numbers(panel) if number > 0 or not panel.log)
            spoken = [f"{line.name}, {x:g}: {plain('', y, panel.unit)}" for x, y in found]
            series.append([marker(x, Metric(value=y, unit=""), 1.0, words, line.of) for (x, y), words in zip(found, spoken, strict=True)])
        places = sorted({mark["x"] for one in series for mark in one})
        if places:
            x = Axis(figure.x_axis, log=2, ticks=places, domain=(places[0] / 1.15, places[-1] * 1.15))
            heights = [mark["y"] for one in series for mark in one]
            y = Axis(panel.axis, log=10, domain=(min(heights) / 1.2, max(heights) * 1.2)) if panel.log else Axis(panel.axis, zero=True)
            drawings.append(marks(series, x, y, f"{figure.title}: {panel.axis}"))
    return drawings, _rows(figure, lines), [line.name for line in lines]


def _cells(figure: PublishedFigure, lines: Sequence[FigureLine]) -> Drawn:
    """A row for each line, a column for each place on the horizontal axis."""
    columns = sorted({_x(figure, line, one) for line in lines for one in line.found})
    drawings = []
    for panel in figure.panels:
        found = []
        for row, line in enumerate(lines):
            for one, _, number in line.numbers(panel):
                x = _x(figure, line, one)
                spoken = f"{line.name}, {x:g}: {plain('', number, panel.unit)}"
                place = {"row": row, "column": columns.index(x)}
                found.append({**place, "text": significant(number), "value": number, "d": spoken, "of": line.of})
        names = clipped([line.name for line in lines], LABEL)
        drawings.append(cells(names, [f"{x:g}" for x in columns], found, panel.axis, heading=panel.axis))
    return drawings, _rows(figure, lines), []


def _ratios(figure: PublishedFigure, lines: Sequence[FigureLine]) -> Drawn:
    """MAELSTROM's matrices: the cost at the best number of devices over that at the smallest, by line and device."""
    drawings, rows = [], []
    for panel in figure.panels:
        solutions, joules = [], own_names([panel]) & _ENERGIES
        for line in lines:
            for one in line.found:
                cost, by = line.number(panel, "cost", one), line.number(panel, "by" if "by" in panel.values else "cost", one)
                if cost is not None and by is not None:
                    column = str(one.fields["column"]) if line.own else device_name(str(one.fields["device"]))
                    costs, boundary = (Estimate(by, None), Estimate(cost, None)), one.fields["boundary"] if line.own and joules else None
                    solutions.append(Solution(line.name, column, one.fields["devices"], *costs, boundary=boundary))
        ratios = [
            cell for cell in matrix(solutions, "energy", "time" if "by" in panel.values else None) if cell.ratio is not None or cell.reason
        ]
        drawings.append(ratio_cells(ratios, panel.axis, panel.axis)[0])
        rows += [[f"{one.row}, {one.column}", panel.axis, one.reason or one.text] for one in ratios]
    return drawings, rows, []


_FORMS: dict[str, Callable[[PublishedFigure, Sequence[FigureLine]], Drawn]] = {
    "dots": _dots,
    "bars": _bars,
    "lines": _lines,
    "cells": _cells,
    "ratios": _ratios,
}
