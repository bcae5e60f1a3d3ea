"""Which records a figure takes together: those of one work, on whatever machine, number of devices, batch and arithmetic."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue

from caraml.analysis.grouping import Axes, axes, by_way, counting, disturbances, grouped, told_apart, unstated_size, valid, ways, without
from caraml.analysis.scaling import KEPT, PLACEMENT, batch_of, families_of, kind_of, left_out, micro_batch
from caraml.base.format import count, printable, some
from caraml.metrics.model import METRICS, Metric
from caraml.report.grouping import MOST_FIGURES, Quantity, families, of_runs, placement
from caraml.report.section import ReportFigure
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED, Point

Work = tuple[str, str, str, str]
"""Benchmark, workload, parameters as JSON, and mode."""


def works(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by what they train, whatever the machine, its devices, the batch and the arithmetic; named by what tells them apart.

    Work that was never built (it failed, or was skipped) stands beside the same work that was. A point at which weak and strong scaling
    meet is measured once, with the name of one of them, and belongs to both.
    """
    found: dict[Work, list[Record]] = {}
    for parts in grouped(records, lambda record: _work(record.point, _counting(record.point))):
        exact = {_work(group[0].point, set()): group for group in grouped(parts, lambda record: _work(record.point, set()))}
        runs = [{without(_but_params(axes(record.point)), ()) for record in group} for group in exact.values()]
        alike = len(set().union(*runs)) == sum(map(len, runs))  # no run counts its items in two ways
        found |= {_work(parts[0].point, _counting(parts[0].point)): parts} if alike else exact
    named: dict[str, list[Record]] = {}
    position = {id(record): number for number, record in enumerate(records)}
    lanes = {name: _lanes(group) for name, group in found.items()}
    details = [
        {"workload": workload, "mode": mode} | {f"params.{key}": str(value) for key, value in json.loads(params).items()}
        for _, workload, params, mode in found
    ]
    for (name, group), words in zip(found.items(), map(printable, told_apart([name[0] for name in found], details)), strict=True):
        others = [lanes[other] for other in found if other[0] != name[0] and other[1:] == name[1:]]
        same = sum(other == words or other.startswith(f"{words} (") for other in named)  # `1` and `"1"`, say
        named[f"{words} ({same + 1})" if words in named else words] = sorted(
            [*group, *_meeting(lanes[name], others)], key=lambda one: position[id(one)]
        )
    return named


Lanes = dict[tuple[object, object], list[Record]]
"""Records of one work by how they were measured, and by everything else but devices and batch."""


def _meeting(own: Lanes, others: Sequence[Lanes]) -> Iterator[Record]:
    """Of the same work under other names, the records along which this benchmark scales; one with a single record of its own does so where
    the other scales in the other way. None for a place of which it has records that were measured otherwise: no mean of both."""
    for (how, what), ours in own.items():
        otherwise = {_place(one) for lane, group in own.items() if lane[1] == what and lane[0] != how for one in group}
        for theirs in (other[how, what] for other in others if (how, what) in other):
            mine, their = kind_of(ours), kind_of(theirs)
            ways = [kept for way, kept in KEPT if len({*map(kept, ours)}) == 1 and (way == mine if mine else their not in (None, way))]
            yield from (one for one in theirs if _place(one) not in otherwise and any(kept(one) == kept(ours[0]) for kept in ways))


def _but_params(found: Axes) -> Axes:
    return {name: value for name, value in found.items() if not name.startswith("params.")}


def _place(record: Record) -> tuple[object, ...]:
    return tuple(getattr(record.point, name) for name in PLACEMENT)


def _lanes(records: Iterable[Record]) -> Lanes:
    """Also measured in the same way: what two benchmarks ask for is one point only then."""
    found: Lanes = {}
    for record in records:
        point = record.point
        how = (point.seed, point.profile, point.measure.model_dump_json())
        found.setdefault((how, without(_but_params(axes(point)), PLACEMENT)), []).append(record)
    return found


def _work(point: Point, counting: Collection[str]) -> Work:
    params = {name: value for name, value in point.deciding_params.items() if name not in counting}
    return point.benchmark, point.workload, json.dumps(params, sort_keys=True), point.mode


def _counting(point: Point) -> set[str]:
    """Parameters of a program that only `items` names: they count what a run does and leave the run as it is."""
    named = {name: _names_in(value) for name, value in point.deciding_params.items()} if point.workload == "command" else {}
    return named.pop("items", set()) - set().union(*named.values())


def _names_in(value: JsonValue) -> set[str]:
    """Names that the templates of a program's parameter stand for."""
    if isinstance(value, str):
        with suppress(ValueError):  # no template
            return {name for _, name, _, _ in string.Formatter().parse(value) if name}
    return set().union(*map(_names_in, value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()))


def of_stated_batch(group: Sequence[Record]) -> tuple[list[Record], str]:
    """The records that have a place over the batch, and a sentence about the others."""
    others = left_out(group, ("global_batch",))
    return [record for record in group if "global_batch" not in unstated_size(record)], f" {others.capitalize()}." if others else ""


def disturbed(lines: Lines) -> str:
    """Which points rest on runs that something disturbed, as they have no others, as a sentence; empty where none does."""
    found = [f"{name} ({', '.join(flags)})" for name, repeats in lines if (flags := disturbances(counting(repeats)))]
    return f" Something disturbed every run of {some(found, _NAMED)}." if found else ""


_NAMED = 4
"""Points that a sentence names."""


def item_of(records: Sequence[Record]) -> str:
    """What records of one work count, by those that were built."""
    return next((record.item for record in records if record.facts is not None), "item")


def own_quantities(records: Sequence[Record]) -> list[Quantity]:
    """What suites and plug-ins define themselves, each in each of its units: numbers of different units share no axis."""
    found = dict.fromkeys((name, one.metrics[name].unit) for one in records for name in one.definitions if one.value(name) is not None)

    def of(name: str, unit: str) -> Quantity:
        def value(record: Record) -> Metric | None:
            metric = record.metrics.get(name)
            return metric if metric is not None and metric.unit == unit else None

        return Quantity(name, name, unit.replace("{", "{{").replace("}", "}}"), value)

    return [of(name, unit) for name, unit in found if name not in METRICS and f"{name}{unit}".isprintable()]


Lines = Sequence[tuple[str, list[Record]]]
"""Repeats of one point, or points along one line of a figure, by name."""
Figures = tuple[list[ReportFigure], list[str]]
"""Figures, and sentences about what is not in them."""


def of_works(
    what: str,
    records: Iterable[Record],
    having: Collection[str],
    wanted: Sequence[Quantity],
    draw: Callable[[str, Lines, str], ReportFigure | None],
) -> Figures:
    """A figure for each work, and boundary of energy: ``draw`` gets its name, its points with all the ``wanted`` quantities, and a sentence
    about the others, which is a note about ``what`` where nothing is drawn. Of a point count the runs ``having`` these metrics."""
    figures: list[ReportFigure] = []
    notes: list[str] = []
    for name, group in works(valid(records)).items():
        known, missing = _known(group, having, wanted)
        for words, lines, apart in by_boundary(known, wanted):
            named, others = f"{name}{words}", missing + apart
            figure = draw(named, lines, others) if lines and len(figures) < MOST_FIGURES else None
            if figure is not None:
                figures.append(figure)
            elif others:
                notes.append(f"{what}, {named}:{others}")
    return figures, notes


def by_boundary(lines: Lines, wanted: Sequence[Quantity]) -> list[tuple[str, Lines, str]]:
    """Lines by the boundary of their energy: what a title says of it, where there are several; the lines; a sentence about the others."""

    def boundary(line: tuple[str, list[Record]]) -> str:
        return " and ".join(dict.fromkeys(filter(None, (quantity.boundary(line[1]) for quantity in wanted)))) or NOT_STATED

    found = {boundary(part[0]): part for part in grouped(lines, boundary)}
    if len(found) < 2:
        return [("", lines, "")]
    counted = {name: f"{count(len(part), 'point')} ({name})" for name, part in found.items()}
    return [
        (f", boundary {name}", part, f" Not comparable, as their energy has another boundary: {', '.join(others)}.")
        for name, part in found.items()
        for others in [[words for other, words in counted.items() if other != name]]
    ]


def _known(group: Sequence[Record], having: Collection[str], wanted: Sequence[Quantity]) -> tuple[Lines, str]:
    """The points of a work that have all the ``wanted`` quantities, by name and of how many of their runs, and why others have not."""
    lines = [
        (f"{name}{of_runs(len(runs), len(repeats))}", runs)
        for name, repeats in families(group, ()).items()
        if (runs := [one for one in counting(repeats) if all(one.value(metric) is not None for metric in having)])
    ]
    known = [line for line in lines if all(quantity.of(line[1]) for quantity in wanted)]
    reasons = dict.fromkeys(reason for _, repeats in lines for quantity in wanted if (reason := quantity.reason(repeats)))
    others = f" {count(len(lines) - len(known), 'point')} not drawn: {'; '.join(reasons)}."
    return known, others if reasons else ""


def runs_of(lines: Lines) -> list[Record]:
    """The runs of some points."""
    return [record for _, repeats in lines for record in repeats]


@dataclass(frozen=True)
class Track:
    """Results of one line of a figure, of which no two are at one place of the horizontal axis, and what tells them from others."""

    records: Sequence[Record]
    way: str
    """How the model is divided."""
    batch: str
    stays: str = ""
    """Of a device's batch, over the number of devices."""

    @property
    def details(self) -> Axes:
        """What tells lines of one name apart."""
        point = self.records[0].point
        return {"batch": self.stays, "placement": placement(point), "device": point.device}


def tracks_over_devices(family: Sequence[Record]) -> list[Track]:
    """Lines over the number of devices, each of one way to divide the model and one kind of scaling.

    What is on more nodes than another result with as many devices is on a line of its own, and so is what scales with nothing.
    """
    lines: list[Track] = []
    rest = list(family)
    while rest:
        found = [
            Track([size[0] for size in sizes], way, batch_of(sizes[0][0].point, kind), stays)
            for way, alike in by_way(rest, lambda _: "")
            for kind, stays, sizes in families_of(alike)
        ]
        drawn = {record.key for line in found for record in line.records}
        lines += found or [Track([one], ways(one.point)[0], batch_of(one.point, "strong"), micro_batch(one.point)) for one in rest]
        rest = [record for record in rest if record.key not in drawn] if found else []
    return lines


def tracks_over_batch(family: Sequence[Record], place: Callable[[Record], float]) -> list[Track]:
    """A family as one line, or as lines of so many micro-batches a step, or of one batch: the fewest without two results at one place."""
    words: tuple[Callable[[Record], str], ...] = (
        lambda _: "",
        lambda one: f"{count(one.point.accumulation, 'micro-batch')} a step",
        lambda one: f"b{one.point.global_batch}",
    )

    def crowded(lines: Sequence[Track]) -> tuple[int, int]:
        places = [[*map(place, line.records)] for line in lines]
        return sum(len(one) - len({*one}) for one in places), len(lines)

    return min(([Track(group, "", word(group[0])) for group in grouped(family, word)] for word in words), key=crowded)
