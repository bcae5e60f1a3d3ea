"""Figures of time: what runtimes went into, epochs, phases, the distribution of step times, and step time and loss over the steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from caraml.analysis.grouping import valid
from caraml.analysis.table import Steps, batches
from caraml.base.chart import Axis, Line, bars, curves, dots, wide_range
from caraml.base.format import count, prefixed
from caraml.base.stats import elbow
from caraml.metrics.model import Phase
from caraml.report.figures import stacked
from caraml.report.grouping import LABEL, MOST_FIGURES, MOST_ROWS, MOST_SERIES, first, keys, labels, labels_and_statuses, metric
from caraml.report.section import ReportFigure, plain
from caraml.report.series import clipped, distribution, downsampled, downsampling_note, points_per_line, sampled
from caraml.report.works import Figures, Lines, disturbed, of_works, runs_of
from caraml.results.record import Record

if TYPE_CHECKING:
    import numpy.typing as npt

MOST_PHASES = 24
"""Points whose phases are worth a bar each."""
_MOST_PARTS = 200
"""Phases of one point that are drawn: the longest, because others cannot be seen."""

PARTS = {"training": metric("training_share"), "loading": metric("loading_share"), "rest": metric("rest_share")}
RUNTIME = metric("runtime")
EPOCHS = {"first epoch": metric("epoch_time_first"), "mean epoch": metric("epoch_time_mean")}


def runtime_parts(records: Sequence[Record]) -> Figures:
    """For each work, the parts of every point's total runtime: loading, training and the rest."""

    def draw(name: str, found: Lines, others: str) -> ReportFigure:
        lines, more = first(found, MOST_ROWS, "point")
        segments, rows = [], []
        for row, (line, repeats) in enumerate(lines):
            shares = {part: quantity.value(repeats) for part, quantity in PARTS.items()}
            texts = {part: plain("rest_share", share, "1") for part, share in shares.items()}
            segments += stacked(row, line, keys(repeats), ((100 * share, f"{part} {texts[part]}") for part, share in shares.items()))
            runtime = RUNTIME.of(repeats)
            rows.append([line, plain("runtime", runtime.value if runtime else 0.0, "s"), *texts.values()])
        title = f"Parts of the runtime: {name}"
        drawing = bars(clipped([line for line, _ in lines], LABEL), segments, [], "share of the runtime [%]", title)
        return ReportFigure(
            title, [drawing], list(PARTS), "block", ["point", "runtime", *PARTS], rows, (others + more + disturbed(lines)).strip()
        )

    return of_works("Parts of the runtime", records, [one.name for one in PARTS.values()], [*PARTS.values()], draw)


def epochs(records: Sequence[Record]) -> Figures:
    """For each work that ran whole epochs, the first epoch beside the mean of all, with the shortest and longest."""

    def draw(name: str, found: Lines, others: str) -> ReportFigure:
        lines, more = first(found, MOST_ROWS, "point")
        factor, unit = prefixed(max(EPOCHS["mean epoch"].value([one]) for one in runs_of(found)), "s")
        series: list[list[dict[str, Any]]] = [[], []]
        rows = []
        for row, (line, repeats) in enumerate(lines):
            both = {word: quantity.value(repeats) for word, quantity in EPOCHS.items()}
            texts = [plain("", value, "s") for value in both.values()]
            for one, (word, mean), text in zip(series, both.items(), texts, strict=True):
                one.append({"row": row, "x": mean / factor, "d": f"{line}: {word} {text}", "of": keys(repeats)})
            extremes = [[value for one in repeats if (value := one.value(f"epoch_time_{end}")) is not None] for end in ("min", "max")]
            if all(extremes):
                series[1][-1] |= {"low": min(extremes[0]) / factor, "high": max(extremes[1]) / factor}
            ratio = both["first epoch"] / both["mean epoch"] if all(both.values()) else None
            rows.append([line, *texts, plain("", ratio, "1")])
        title = f"First and mean epoch: {name}"
        drawing = dots(clipped([line for line, _ in lines], LABEL), series, f"time [{unit}]", title)
        note = "The bar reaches from the shortest to the longest epoch." + others + more + disturbed(lines)
        return ReportFigure(title, [drawing], list(EPOCHS), "mark", ["point", *EPOCHS, "first / mean"], rows, note)

    return of_works("First and mean epoch", records, [one.name for one in EPOCHS.values()], [*EPOCHS.values()], draw)


def phases(records: Sequence[Record]) -> list[ReportFigure]:
    """Where each point's time went, from the start of the worker."""
    shown = [record for record in records if record.phases]
    if not shown:
        return []
    named = labels_and_statuses(shown)
    drawn = [_longest(record) for record in shown]
    # The window always has the first colour.
    kinds = sorted(dict.fromkeys(_spoken(phase.name) for parts in drawn for phase in parts), key=lambda kind: kind != "measure")
    segments, rows = [], []
    for row, (record, parts) in enumerate(zip(shown, drawn, strict=True)):
        for phase in parts:
            kind, length = _spoken(phase.name), plain("", phase.end - phase.start, "s")
            spoken = f"{named[record.key]}, {kind}: {length}, {phase.start:,.2f} to {phase.end:,.2f} s"
            place = {"row": row, "a": phase.start, "b": phase.end}
            segments.append({**place, "series": kinds.index(kind), "d": spoken, "of": keys([record])})
            rows.append([named[record.key], kind, f"{phase.start:,.2f} s", f"{phase.end:,.2f} s", length])
    title = "Phases of each point"
    drawing = bars(clipped([named[record.key] for record in shown], LABEL), segments, [], "seconds since the start of the worker", title)
    cut = any(len(record.phases) > _MOST_PARTS for record in shown)
    note = f"Of each point only its {_MOST_PARTS} longest phases are shown." if cut else ""
    return [ReportFigure(title, [drawing], kinds, "block", ["point", "phase", "start", "end", "length"], rows, note)]


def _longest(record: Record) -> list[Phase]:
    chosen = set(sorted(range(len(record.phases)), key=lambda n: record.phases[n].start - record.phases[n].end)[:_MOST_PARTS])
    return [phase for number, phase in enumerate(record.phases) if number in chosen]


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def step_distributions(records: Sequence[Record], steps: dict[str, Steps]) -> list[ReportFigure]:
    """Cumulative distribution of the step times in the window, a figure for each benchmark; of epochs without first and last batch."""
    groups = _benchmarks(valid(records), steps, lambda found: bool(found.measured()))
    figures = []
    for group, more in groups:
        every = {record.key: steps[record.key].measured() for record in group}
        times = {record.key: batches(record, steps[record.key]) or every[record.key] for record in group}
        left_out = sum(len(every[key]) - len(times[key]) for key in times)
        figures.append(_distribution(group, times, left_out, more))
    return figures


def _distribution(records: Sequence[Record], times: dict[str, list[float]], left_out: int, more: str) -> ReportFigure:
    """Several points share the axis by their medians, or the fast ones would be upright lines; a single one keeps its seconds.

    ``left_out``: how many first and last batches of epochs are not in ``times``; ``more``: what is said of points that are not drawn.
    """
    named = labels(records)
    found = {record.key: distribution(times[record.key]) for record in records}
    medians = {key: float(np.median(times[key])) for key in found}
    factor, unit = prefixed(medians[records[0].key], "s")
    lines, rows = [], []
    for record in records:
        points, name = found[record.key], named[record.key]
        divisor = factor if len(records) == 1 else medians[record.key] or 1.0
        texts = [plain("", float(value), "s") for value in np.quantile(times[record.key], (0, 0.05, 0.5, 0.95, 1))]
        line = [(x / divisor, y) for x, y in points]
        spoken = f"{name}: median {texts[2]}, 95 % below {texts[3]}"
        lines.append(Line(name, [(line[0][0], 0.0), *line], spoken, of=keys([record])))
        bend = elbow(times[record.key])
        rows.append([name, *texts, f"{plain('', bend.seconds, 's')}, {100 * bend.share:.0f} % of the steps" if bend else "none"])
    log = 10 if wide_range([x for line in lines for x, _ in line.points]) else None
    title = f"Step times in the window: {records[0].point.benchmark}"
    x_title = f"step time [{unit}]" if len(records) == 1 else "step time / the point's median"
    y = Axis("share of steps at or below", domain=(0, 1))
    drawings = [curves(lines, Axis(x_title, log=log), y, title, step=True)]
    if len(records) > 1:  # as they are, too: whose steps take longer, and by how much
        factor, unit = prefixed(max(medians.values()), "s")
        own = [
            replace(line, points=[(x * medians[key] / factor, share) for x, share in line.points])
            for line, key in zip(lines, found, strict=True)
        ]
        log = 10 if wide_range([x for line in own for x, _ in line.points]) else None
        drawings.append(curves(own, Axis(f"step time [{unit}]", log=log), y, f"{title}, absolute", step=True))
    columns = ["point", "shortest", "5 %", "median", "95 %", "longest", "elbow"]
    note = "The slowest rank's time of each step; the elbow in the table is where the bulk ends and a tail begins."
    if left_out:
        note += f" Without the first and the last batch of each epoch ({count(left_out, 'step')}), as in EPICURE's guide, section 5.2."
    return ReportFigure(title, drawings, [line.name for line in lines], "line", columns, rows, note + more)


@dataclass(frozen=True)
class PerStep:
    """Something that has a value at every step."""

    name: str
    unit: str
    title: str
    note: str
    values: Callable[[Steps], npt.NDArray[np.float64]]
    with_first: bool
    """Whether the first step, which also compiles, is drawn."""

    def series(self, found: Steps) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """The steps at which the value is known, and the values."""
        values = self.values(found)
        chosen = np.isfinite(values) & (self.with_first | ~found.within("first"))
        return found.step[chosen], values[chosen]


STEP_TIME = PerStep(
    "step time",
    "s",
    "Step time over steps",
    "The slowest rank's time; warm-up included, the first step not.",
    lambda found: found.seconds,
    False,
)
LOSS = PerStep("loss", "1", "Training loss over steps", "From the first step on; mean over ranks.", lambda found: found.loss, True)


def over_steps(quantity: PerStep, records: Sequence[Record], steps: dict[str, Steps]) -> list[ReportFigure]:
    """``STEP_TIME`` of the runs with a result, or ``LOSS`` of all, over the steps, a figure for each benchmark."""
    groups = _benchmarks(records if quantity is LOSS else valid(records), steps, lambda found: len(quantity.series(found)[0]) > 0)
    return [_over_steps(quantity, group, steps, more) for group, more in groups]


def _over_steps(quantity: PerStep, records: Sequence[Record], steps: dict[str, Steps], more: str) -> ReportFigure:
    named, unit = labels_and_statuses(records), quantity.unit
    found = [(record, *quantity.series(steps[record.key])) for record in records]
    values = np.concatenate([ys for _, _, ys in found])
    factor, written_unit = prefixed(float(np.median(values)), unit)
    lines, rows, most = [], [], points_per_line(len(records))
    for record, xs, ys in found:
        name = named[record.key]
        told = ", ".join(f"{plain('', float(ys[at]), unit)} at step {xs[at]}" for at in (0, -1))
        lines.append(Line(name, downsampled(xs, ys / factor, most), f"{name}: {quantity.name} {told}", len(xs), keys([record])))
        rows += [[name, f"{x:.0f}", plain("", y, unit)] for x, y in sampled(xs, ys)]
    log = 10 if quantity is STEP_TIME and wide_range([values.min(), values.max()]) else None
    title = f"{quantity.title}: {records[0].point.benchmark}"
    y_axis = Axis(f"{quantity.name} [{written_unit}]" if written_unit else quantity.name, log=log)
    last = max(float(xs[-1]) for _, xs, _ in found)
    drawing = curves(lines, Axis("step", domain=(0, last)), y_axis, title)
    note = quantity.note + downsampling_note(lines, most) + more
    return ReportFigure(title, [drawing], [line.name for line in lines], "line", ["point", "step", quantity.name], rows, note)


def _benchmarks(records: Sequence[Record], steps: dict[str, Steps], usable: Callable[[Steps], bool]) -> list[tuple[list[Record], str]]:
    """The records that are drawn, by benchmark and in their order, and a sentence about others with steps, which may not have been read.

    As many benchmarks as there are figures of one kind.
    """
    found: dict[str, list[Record]] = {record.point.benchmark: [] for record in records}
    unread = Counter(record.point.benchmark for record in records if record.key not in steps and "steps" in record.files)
    for record in records:
        if record.key in steps and usable(steps[record.key]):
            found[record.point.benchmark].append(record)
    further = {name: max(len(group) - MOST_SERIES, 0) + unread[name] for name, group in found.items()}
    told = {name: f" Not drawn: {count(number, 'further point')}." if number else "" for name, number in further.items()}
    return [(group[:MOST_SERIES], told[name]) for name, group in found.items() if group][:MOST_FIGURES]
