"""A figure of the page: drawing, legend, note, and the same numbers as a table; and the drawings that most figures need."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from caraml.report.drawing import SPOKEN, Axis, Drawing, as_is, clamped, said, stroke
from caraml.report.groups import wide_range
from caraml.report.svg import SHADE, TEXT, Words, block_opacity, dash, series_colour, shape
from caraml.report.thin import Points

__all__ = ["Axis", "Figure", "Key", "Series", "bars", "curves", "marks"]

Key = Literal["line", "mark", "block"]


@dataclass(frozen=True)
class Figure:
    """What the page shows of one chart. ``svg`` is markup that was made here; every other text is still to be escaped."""

    title: str
    svg: str
    legend: list[tuple[int, str]]
    """Number of the series, which decides its colour, dash and shape, and its name."""
    key: Key
    columns: list[str]
    rows: list[list[str]]
    note: str = ""
    panels: Sequence[str] = ()
    """Further drawings beside ``svg``, with the same legend."""

    @property
    def drawings(self) -> list[str]:
        """All drawings, in their order."""
        return [self.svg, *self.panels]

    @property
    def slug(self) -> str:
        """The title as the beginning of a file's name."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")[:80] or "figure"


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Points
    summary: str
    """Read out where a single point cannot be."""
    total: int = 0
    """Points before thinning."""


def curves(series: Sequence[Series], x: Axis, y: Axis, title: str, *, step: bool = False, shade: tuple[float, float] | None = None) -> str:
    """Lines of long series, without markers. ``shade`` marks a span of x."""
    drawing = Drawing()
    if shade is not None:
        span = drawing.data([{"a": shade[0], "b": shade[1]}])
        drawing.add(span, {"type": "rect", "fill": SHADE}, x=x.of("a"), x2={"field": "b"}, description=said("measured window"))
    for index, one in enumerate(series):
        data = drawing.data({"i": i, "x": px, "y": py} for i, (px, py) in enumerate(one.points))
        line = {"type": "line", "strokeWidth": 1.5, "interpolate": "step-after" if step else "linear", **stroke(index)}
        order = {"field": "i", "type": "quantitative"}
        drawing.add(data, line, x=x.of("x"), y=y.of("y"), order=order, description=said(one.summary))
    return drawing.svg(title, clamped([one.summary for one in series]))


def marks(
    series: Sequence[Sequence[dict[str, Any]]], x: Axis, y: Axis, title: str, *, lines: bool = True, path: Sequence[dict[str, Any]] = ()
) -> str:
    """Lines with a marker and an error bar at each point: ``x``, ``y``, ``low``, ``high`` and ``d``, which is read out.

    Where a point also has ``x_low`` and ``x_high``, a bar shows that error as well; without ``lines`` there are markers only.
    ``path`` is joined by a line of its own.
    """
    drawing = Drawing()
    if path:
        line = {"type": "line", "strokeWidth": 1.5, "stroke": TEXT, "strokeDash": [3, 3], "strokeOpacity": 0.7}
        drawing.add(drawing.data(path), line, x=x.of("x"), y=y.of("y"), description=said(""))
    rows = [{**point, "g": index, **_look(index)} for index, points in enumerate(series) for point in points]
    data, across, up = drawing.data(rows), x.of("x"), y.of("y")
    colour, fill = as_is("c"), {"fill": as_is("c")}
    if lines:
        line = {"type": "line", "strokeWidth": 1.5}
        drawing.add(data, line, x=across, y=up, stroke=colour, strokeDash=as_is("dash"), detail=as_is("g"), description=said(""))
    rule = {"type": "rule", "strokeWidth": 1.5}
    low, high = {"field": "low", "type": "quantitative"}, {"field": "high", "type": "quantitative"}
    drawing.add(data, rule, x=across, y=low, y2={"field": "high"}, stroke=colour, description=said(""))
    tick = {"type": "tick", "opacity": 1, "thickness": 1.5, "size": 8, "orient": "horizontal"}
    for end in (low, high):
        drawing.add(data, tick, x=across, y=end, **fill, description=said(""))
    if any("x_low" in row for row in rows):
        drawing.add(data, rule, y=up, x=x.of("x_low"), x2={"field": "x_high"}, stroke=colour, description=said(""))
    point = {"type": "point", "filled": True, "opacity": 1, "size": 50}
    drawing.add(data, point, x=across, y=up, **fill, shape=as_is("shape"), description=SPOKEN)
    return drawing.svg(title, clamped([point["d"] for points in series for point in points]))


def _look(index: int) -> dict[str, Any]:
    """How a series is told from the others, as columns of its rows: one layer for all series is drawn in half the time of one for each."""
    return {"c": series_colour(index), "dash": list(dash(index)), "shape": shape(index)}


ROW = 40
"""Height of a bar with its label above it [px]."""


def bars(rows: Sequence[str], segments: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]], axis_title: str, title: str) -> str:
    """Horizontal bars, each below its label.

    A segment has ``row``, ``a``, ``b``, ``series`` and ``d``, which is read out; an error has ``row``, ``low``, ``high`` and ``d``.
    """
    far = max([segment["b"] for segment in segments] + [error["high"] for error in errors])
    x = Axis(axis_title, domain=(0, far * 1.02), zero=True)
    drawing = Drawing()
    for index in sorted({segment["series"] for segment in segments}):
        colour = series_colour(index)
        ours = _placed(drawing, [segment for segment in segments if segment["series"] == index])
        bar = {"type": "rect", "fill": colour, "fillOpacity": block_opacity(index), "stroke": colour, "strokeWidth": 1}
        drawing.add(ours, bar, x=x.of("a"), x2={"field": "b"}, y=_down(rows, "y"), y2={"field": "y2"}, description=SPOKEN)
    if errors:
        rule = {"type": "rule", "stroke": TEXT, "strokeWidth": 2}
        drawing.add(_placed(drawing, errors), rule, x=x.of("low"), x2={"field": "high"}, y=_down(rows, "m"), description=SPOKEN)
    _names(drawing, rows)
    return drawing.svg(title, clamped([segment["d"] for segment in segments]), ROW * len(rows))


def dots(rows: Sequence[str], series: Sequence[Sequence[dict[str, Any]]], axis_title: str, title: str) -> str:
    """Markers along a line below each label, a shape for each series.

    A marker has ``row``, ``x`` and ``d``, which is read out, and may have the ends ``low`` and ``high`` of a bar. The axis is logarithmic
    where the markers need it.
    """
    values = [mark[name] for marks_ in series for mark in marks_ for name in ("x", "low", "high") if name in mark]
    log = wide_range(values)
    near, far = (min(values) / 1.3, max(values) * 1.3) if log else (0.0, max(values) * 1.04)
    x = Axis(axis_title, domain=(near, far), zero=True, log=10 if log else None)
    drawing = Drawing()
    rule = {"type": "rule", "strokeWidth": 2}
    spans = [[mark["x"] for marks_ in series for mark in marks_ if mark["row"] == row] for row in range(len(rows))]
    joined = _placed(drawing, [{"row": row, "a": min(span), "b": max(span)} for row, span in enumerate(spans) if span])
    line = {"type": "rule", "stroke": TEXT, "strokeOpacity": 0.4}
    drawing.add(joined, line, x=x.of("a"), x2={"field": "b"}, y=_down(rows, "m"), description=said(""))
    for index, ours in enumerate(series):
        colour = series_colour(index)
        ends = [mark for mark in ours if "low" in mark]
        if ends:
            bar = {**rule, "stroke": colour}
            drawing.add(_placed(drawing, ends), bar, x=x.of("low"), x2={"field": "high"}, y=_down(rows, "m"), description=SPOKEN)
        point = {"type": "point", "filled": True, "fill": colour, "opacity": 1, "size": 60, "shape": shape(index)}
        drawing.add(_placed(drawing, ours), point, x=x.of("x"), y=_down(rows, "m"), description=SPOKEN)
    _names(drawing, rows)
    return drawing.svg(title, clamped([mark["d"] for ours in series for mark in ours]), ROW * len(rows))


def _down(rows: Sequence[str], name: str) -> dict[str, Any]:
    scale = {"domain": [0, ROW * len(rows)], "reverse": True, "nice": False}
    return {"field": name, "type": "quantitative", "scale": scale, "axis": None}


def _placed(drawing: Drawing, values: Sequence[dict[str, Any]]) -> str:
    """Rows of data with the heights of their bar: top, middle and bottom."""
    tops = (ROW * value["row"] + 20 for value in values)
    return drawing.data({**value, "y": top, "m": top + 7, "y2": top + 14} for value, top in zip(values, tops, strict=True))


def _names(drawing: Drawing, rows: Sequence[str]) -> None:
    drawing.words += [Words(0, ROW * row + 15, name) for row, name in enumerate(rows)]
