"""Heat maps: every machine and number of devices (rows) at every batch (columns), with what ran out of memory, failed or was skipped."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from caraml.report.drawing import SPOKEN, Drawing, clamped
from caraml.report.figure import Figure
from caraml.report.groups import MOST_FIGURES, families, first, item_of, wide_range, works
from caraml.report.numbers import counted
from caraml.report.quantities import COST, TOTAL, Quantity
from caraml.report.svg import TEXT, WIDTH, Words, series_colour
from caraml.results.record import Record
from caraml.units import significant

MOST_LINES, MOST_COLUMNS = 24, 24
CELL = 46
"""Least width of a cell [px]: five digits."""
LINE = 42
"""Height of a row with its name above it [px]."""
WORDS = {"oom": "OOM", "timeout": "time", "skipped": "skip", "invalid": "inv.", "failed": "fail"}
"""What stands in the place of a point without a number."""


def heat_maps(records: Sequence[Record]) -> tuple[list[Figure], list[str]]:
    """For each work with two or more rows and columns, throughput, and energy where it was measured."""
    figures = []
    for name, group in works(records).items():
        lines = families(group, ("batch",))
        if len(lines) < 2 or len({record.point.global_batch for record in group}) < 2:
            continue
        figures += [_map(name, group, lines, quantity) for quantity in (TOTAL, COST) if any(quantity.of([one]) for one in group)]
    shown, more = first(figures, MOST_FIGURES, "figure")
    return list(shown), [more.strip()] if more else []


def _map(name: str, group: Sequence[Record], lines: dict[str, list[Record]], quantity: Quantity) -> Figure:
    shown, more = first(list(lines.items()), MOST_LINES, "row")
    batches, wider = first(sorted({record.point.global_batch for record in group}), MOST_COLUMNS, "column")
    unit = quantity.unit.format(item=item_of(group))
    values = [metric.value for one in group if (metric := quantity.of([one])) is not None and metric.value is not None]
    factor, unit = counted(statistics.median(values), unit)
    cells: list[dict[str, Any]] = []
    rows = []
    for row, (line, records) in enumerate(shown):
        for column, batch in enumerate(batches):
            here = [record for record in records if record.point.global_batch == batch]
            if here:
                text, value, spoken = _cell(quantity, here, factor)
                cells.append({"row": row, "column": column, "text": text, "value": value, "d": f"{line}, batch {batch}: {spoken}"})
                rows.append([line, f"{batch:,}", spoken])
    title = f"{quantity.title} by machine and batch: {name}"
    svg = grid([line for line, _ in shown], [f"{batch:,}" for batch in batches], cells, title)
    kinds = sorted({cell["text"] for cell in cells if cell["value"] is None})
    note = f"In {unit}; the darker, the higher. Columns are global batches; an empty place was not asked for."
    words = {word: status for status, word in WORDS.items()}
    note += f" {'; '.join(f'{kind}: {words.get(kind, kind)}' for kind in kinds)}." if kinds else ""
    return Figure(title, svg, [], "block", ["row", "global batch", quantity.title.lower()], rows, note + more + wider)


def _cell(quantity: Quantity, repeats: Sequence[Record], factor: float) -> tuple[str, float | None, str]:
    """What stands in a cell, the value behind it, and what is said of it."""
    metric = quantity.of([record for record in repeats if record.status == "ok"])
    if metric is not None and metric.value is not None:
        return significant(metric.value / factor), metric.value, quantity.text(metric)
    record = next((one for one in repeats if one.status != "ok"), repeats[0])
    if record.status != "ok":
        return WORDS[record.status], None, f"{record.status}: {record.reason or 'no reason recorded'}"
    return "–", None, "not known"


def grid(lines: Sequence[str], columns: Sequence[str], cells: Sequence[dict[str, Any]], title: str, width: float = CELL) -> str:
    """A cell for each ``row`` and ``column`` that has one, at least ``width`` wide, filled by its ``value`` (framed if that is ``None``).

    In it stands ``text``; ``d`` is read out.
    """
    wide = max(WIDTH / len(columns), width)
    across, height = round(wide * len(columns)), LINE * len(lines) + 20
    values = [cell["value"] for cell in cells if cell["value"] is not None]
    scale = math.log if wide_range(values) else float
    low, high = scale(min(values)), scale(max(values))

    def placed(cell: dict[str, Any]) -> dict[str, Any]:
        left, top = cell["column"] * wide, cell["row"] * LINE + 36
        share = (scale(cell["value"]) - low) / (high - low) if cell["value"] is not None and high > low else 0.5
        sides = {"x": left + 1, "x2": left + wide - 1, "xm": left + wide / 2}
        return {**cell, **sides, "y": top, "y2": top + 24, "o": 0.06 + 0.44 * share}  # text keeps its contrast

    drawing = Drawing()
    x, y = (_pixels("x", across), _pixels("y", height, reverse=True))
    for known in (True, False):
        ours = [placed(cell) for cell in cells if (cell["value"] is not None) == known]
        if not ours:
            continue
        data = drawing.data(ours)
        frame = {"stroke": TEXT, "strokeOpacity": 0.5, "strokeDash": [3, 3], "fill": None}
        rect = {"type": "rect", **({"fill": series_colour(0)} if known else frame)}
        strength = {"fillOpacity": {"field": "o", "type": "quantitative", "scale": None}} if known else {}
        drawing.add(data, rect, x=x, y=y, x2={"field": "x2"}, y2={"field": "y2"}, description=SPOKEN, **strength)
        drawing.words += [Words(cell["xm"], cell["y"] + 16, cell["text"], "middle") for cell in ours]
    drawing.words += [Words(0, row * LINE + 32, name) for row, name in enumerate(lines)]
    drawing.words += [Words((column + 0.5) * wide, 12, name, "middle", bold=True) for column, name in enumerate(columns)]
    return drawing.svg(title, clamped([cell["d"] for cell in cells]), height, across)


def _pixels(name: str, length: int, reverse: bool = False) -> dict[str, Any]:
    """A position in pixels."""
    scale = {"domain": [0, length], "nice": False, "zero": False, "reverse": reverse}
    return {"field": name, "type": "quantitative", "scale": scale, "axis": None}
