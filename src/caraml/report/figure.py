"""A figure of the page: drawing, legend, note, and the same numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from caraml.report.svg import HEIGHT, SERIES, SHADE, TEXT, WIDTH, dash, render, series_colour, shape
from caraml.report.thin import Points

if TYPE_CHECKING:
    import altair as alt

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


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    points: Points
    summary: str
    """Read out where a single point cannot be."""
    total: int = 0
    """Points before thinning."""


@dataclass(frozen=True)
class Axis:
    """Title and scale of an axis."""

    title: str
    log: int | None = None
    zero: bool = False
    ticks: list[float] = field(default_factory=list)
    domain: tuple[float, float] | None = None

    def encoding(self) -> dict[str, Any]:
        """Arguments of an Altair channel."""
        import altair as alt

        scale: dict[str, Any] = {"zero": self.zero, "nice": self.domain is None}
        if self.log:
            scale = {"type": "log", "base": self.log, "nice": False}
        if self.domain:
            scale["domain"] = list(self.domain)
        axis: dict[str, Any] = {"title": self.title, "format": ",~r"}
        if self.ticks:
            axis["values"] = self.ticks
        return {"scale": alt.Scale(**scale), "axis": alt.Axis(**axis)}


class _Drawing:
    """Layers of a chart, and their data beside them: Altair would check every single value of data inside against its schema."""

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self._datasets: dict[str, list[dict[str, Any]]] = {}

    def chart(self, values: Iterable[dict[str, Any]]) -> alt.Chart:
        """A chart of these rows, to be given marks and added to ``layers``."""
        import altair as alt

        name = f"data{len(self._datasets)}"
        self._datasets[name] = list(values)
        return alt.Chart(alt.NamedData(name=name))

    def svg(self, title: str, summary: str, height: int = HEIGHT) -> str:
        """The finished drawing."""
        import altair as alt

        spec = alt.layer(*self.layers).properties(width=WIDTH, height=height).to_dict()
        return render({**spec, "datasets": self._datasets}, title, summary)


def curves(series: Sequence[Series], x: Axis, y: Axis, title: str, *, step: bool = False, shade: tuple[float, float] | None = None) -> str:
    """Lines of long series, without markers. ``shade`` marks a span of x."""
    import altair as alt

    drawing = _Drawing()
    if shade is not None:
        span = drawing.chart([{"a": shade[0], "b": shade[1]}]).mark_rect(fill=SHADE)
        drawing.layers.append(span.encode(x=alt.X("a:Q", **x.encoding()), x2="b:Q", description=alt.value("measured window")))
    for index, one in enumerate(series):
        data = drawing.chart({"i": i, "x": px, "y": py} for i, (px, py) in enumerate(one.points))
        line = data.mark_line(strokeWidth=1.5, interpolate="step-after" if step else "linear", **_stroke(index))
        across, up = alt.X("x:Q", **x.encoding()), alt.Y("y:Q", **y.encoding())
        drawing.layers.append(line.encode(across, up, order="i:Q", description=alt.value(one.summary)))
    return drawing.svg(title, "; ".join(one.summary for one in series))


def _stroke(index: int) -> dict[str, Any]:
    return {"stroke": series_colour(index), **({"strokeDash": list(dash(index))} if dash(index) else {})}


def marks(series: Sequence[Sequence[dict[str, Any]]], x: Axis, y: Axis, title: str) -> str:
    """Lines with a marker and an error bar at each point: ``x``, ``y``, ``low``, ``high`` and ``d``, which is read out."""
    import altair as alt

    drawing = _Drawing()
    for index, points in enumerate(series):
        base = drawing.chart(points).encode(alt.X("x:Q", **x.encoding()))
        point, colour = base.encode(description="d:N"), series_colour(index)
        at = alt.Y("y:Q", **y.encoding())
        tick = point.mark_tick(color=colour, thickness=1.5, size=11, orient="horizontal")
        drawing.layers += [
            base.mark_line(strokeWidth=1.5, **_stroke(index)).encode(at, description=alt.value("")),
            point.mark_rule(stroke=colour, strokeWidth=1.5).encode(y="low:Q", y2="high:Q"),
            tick.encode(y="low:Q"),
            tick.encode(y="high:Q"),
            point.mark_point(filled=True, fill=colour, opacity=1, size=50, shape=shape(index)).encode(at),
        ]
    summary = "; ".join(point["d"] for points in series for point in points)
    return drawing.svg(title, summary)


ROW = 40
"""Height of a bar with its label above it [px]."""


def bars(rows: Sequence[str], segments: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]], axis_title: str, title: str) -> str:
    """Horizontal bars, each below its label.

    A segment has ``row``, ``a``, ``b``, ``series`` and ``d``, which is read out; an error has ``row``, ``low``, ``high`` and ``d``.
    """
    import altair as alt

    height = ROW * len(rows)
    far = max([segment["b"] for segment in segments] + [error["high"] for error in errors])
    x = Axis(axis_title, domain=(0, far * 1.02), zero=True)
    y: dict[str, Any] = {"scale": alt.Scale(domain=[0, height], reverse=True, nice=False), "axis": None}

    def placed(values: Sequence[dict[str, Any]]) -> alt.Chart:
        tops = (ROW * value["row"] + 20 for value in values)
        return drawing.chart({**value, "y": top, "m": top + 7, "y2": top + 14} for value, top in zip(values, tops, strict=True))

    drawing = _Drawing()
    for index in sorted({segment["series"] for segment in segments}):
        colour = series_colour(index)
        ours = [segment for segment in segments if segment["series"] == index]
        bar = placed(ours).mark_rect(fill=colour, fillOpacity=0.55 if index < SERIES else 0.1, stroke=colour, strokeWidth=1)
        drawing.layers.append(bar.encode(x=alt.X("a:Q", **x.encoding()), x2="b:Q", y=alt.Y("y:Q", **y), y2="y2:Q", description="d:N"))
    if errors:
        rule = placed(errors).mark_rule(stroke=TEXT, strokeWidth=2)
        drawing.layers.append(rule.encode(x=alt.X("low:Q", **x.encoding()), x2="high:Q", y=alt.Y("m:Q", **y), description="d:N"))
    names = placed([{"row": row, "name": name} for row, name in enumerate(rows)]).mark_text(align="left", baseline="bottom", dy=-3)
    drawing.layers.append(names.encode(x=alt.value(0), y=alt.Y("y:Q", **y), text="name:N", description=alt.value("")))
    return drawing.svg(title, "; ".join(segment["d"] for segment in segments), height)
