"""Rate, energy and efficiency over the batch, by machine: the three panels of CARAML's figure of language models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caraml.report.figure import Axis, Figure, bars, marks
from caraml.report.groups import LABEL, MOST_FIGURES, MOST_ROWS, MOST_SERIES, families, first, works
from caraml.report.labels import clipped, labels
from caraml.report.numbers import count, counted
from caraml.report.quantities import EFFICIENCY, HOUR, RATE, TOTAL, Quantity
from caraml.results.record import Record


def over_batch(records: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """For each work, rate, energy of an hour and efficiency over the batch, a line for each machine; bars where no batch was swept."""
    figures, single = [], []
    for name, group in works([record for record in records if record.value("throughput") is not None]).items():
        lines = families(group, ("batch",))
        swept = any(len({record.point.global_batch for record in line}) > 1 for line in lines.values())
        if swept and any(RATE.of([record]) is not None for record in group):
            figures.append(_panels(name, lines))
        else:
            single += group
    for item in dict.fromkeys(record.item for record in single):
        figures.append(_throughput_bars([record for record in single if record.item == item]))
    shown, more = first(figures, MOST_FIGURES, "figure")
    return list(shown), [more.strip()] if more else []


def _panels(name: str, lines: dict[str, list[Record]]) -> Figure:
    shown, more = first(list(lines.items()), MOST_SERIES, "line")
    item = shown[0][1][0].item
    places = [(line, repeats) for line, records in shown for repeats in _by_batch(records)]
    quantities = [quantity for quantity in (RATE, HOUR, EFFICIENCY) if any(quantity.of(repeats) is not None for _, repeats in places)]
    batches = sorted({repeats[0].point.global_batch for _, repeats in places})
    # One octave of the axis is a tick; a single one would have no width.
    x = Axis("global batch [samples]", log=2, ticks=[float(batch) for batch in batches], domain=(batches[0] / 1.15, batches[-1] * 1.15))
    drawings = []
    for quantity in quantities:
        values = [metric.value for _, repeats in places if (metric := quantity.of(repeats)) is not None and metric.value is not None]
        factor, unit = counted(max(values), quantity.unit.format(item=item))
        series = [[_mark(quantity, line, repeats, factor) for repeats in _by_batch(records)] for line, records in shown]
        drawn = [[mark for mark in marks_ if mark] for marks_ in series]
        title = f"{quantity.title} [{unit}]"
        about = f"{title} over global batch: {name}" if len(quantities) > 1 else f"Rate over global batch: {name}"
        drawings.append(marks(drawn, x, Axis(title, zero=True), about))
    columns = ["series", "global batch", "runs", *(quantity.title.lower() for quantity in quantities)]
    rows = [[line, f"{_batch(repeats):,}", str(len(repeats)), *(q.text(q.of(repeats)) for q in quantities)] for line, repeats in places]
    kinds = "Rate, energy and efficiency" if len(quantities) > 1 else "Rate"
    note = "The short lines show the 95 % confidence interval"
    note += "; of repeats, the mean and the widest ends." if any(len(repeats) > 1 for _, repeats in places) else "."
    missing = sum(RATE.of(repeats) is not None and EFFICIENCY.of(repeats) is None for _, repeats in places) if len(quantities) > 1 else 0
    note += f" {count(missing, 'point')} without energy." if missing else ""
    title = f"{kinds} over global batch: {name}"
    return Figure(title, drawings[0], _legend(shown), "mark", columns, rows, note + more, tuple(drawings[1:]))


def _legend(shown: Sequence[tuple[str, Any]]) -> list[tuple[int, str]]:
    return [(index, name) for index, (name, _) in enumerate(shown)]


def _batch(repeats: Sequence[Record]) -> int:
    return repeats[0].point.global_batch


def _by_batch(records: Sequence[Record]) -> list[list[Record]]:
    """Repeats together, by growing batch."""
    found: dict[int, list[Record]] = {}
    for record in sorted(records, key=lambda record: record.point.global_batch):
        found.setdefault(record.point.global_batch, []).append(record)
    return list(found.values())


def _mark(quantity: Quantity, line: str, repeats: Sequence[Record], factor: float) -> dict[str, Any] | None:
    metric = quantity.of(repeats)
    if metric is None or metric.value is None:
        return None
    low, high = (metric.value if end is None else end for end in (metric.low, metric.high))
    spoken = f"{line}, batch {_batch(repeats)}: {quantity.text(metric)}"
    return {"x": _batch(repeats), "y": metric.value / factor, "low": low / factor, "high": high / factor, "d": spoken}


def _throughput_bars(records: Sequence[Record]) -> Figure:
    """A bar for each record, where no line would have two points."""
    shown, more = first(records, MOST_ROWS, "point")
    named, item = labels(records), records[0].item
    brief = clipped([named[record.key] for record in shown], LABEL // 2)
    segments, errors, names = [], [], []
    for row, record in enumerate(shown):
        metric, text = record.metrics["throughput"], TOTAL.text(record.metrics["throughput"])
        spoken = f"{named[record.key]}: {text}"
        segments.append({"row": row, "a": 0, "b": metric.value, "series": 0, "d": spoken})
        if metric.low is not None and metric.high is not None:
            errors.append({"row": row, "low": metric.low, "high": metric.high, "d": spoken})
        names.append(f"{brief[row]}: {text}")
    title = f"Throughput, {item}/s"
    rows = [[named[record.key], f"{record.point.global_batch:,}", TOTAL.text(record.metrics["throughput"])] for record in records]
    without = [named[record.key] for record in shown if record.metrics["throughput"].low is None]
    note = "The short lines show the 95 % confidence interval." + (f" Without one: {', '.join(without)}." if without else "")
    svg = bars(names, segments, errors, f"{item}/s", title)
    return Figure(title, svg, [], "block", ["point", "global batch", "throughput"], rows, note + more)
