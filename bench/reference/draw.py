"""Drawings of the gallery: the page's style, but each a file of its own, with its legend and its colours inside."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import vl_convert

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07a00", "#3a9bd9", "#1b1f24")
"""Colours of the page in light mode, two of them darker for small marks; people who confuse colours can tell them apart."""
INK, GRID = "#1b1f24", "#e3e6eb"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
CONFIG: Mapping[str, Any] = {
    "background": "#fff",
    # A wide font measures the labels, so that no browser's own font needs more room.
    "font": "DejaVu Sans, Verdana, sans-serif",
    "padding": {"left": 4, "right": 14, "top": 6, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "domainColor": INK,
        "tickColor": INK,
        "gridColor": GRID,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelOverlap": "greedy",
        "labelSeparation": 8,
        "tickCount": 5,
    },
    "axisX": {"grid": False, "titlePadding": 8},
    # The y title lies flat above its axis: easier to read and never cut by the edge.
    "axisY": {
        "minExtent": 30,
        "domain": False,
        "ticks": False,
        "titleAngle": 0,
        "titleAlign": "left",
        "titleAnchor": "end",
        "titleX": 0,
        "titleY": -10,
        "titleBaseline": "bottom",
    },
    "text": {"fontSize": 12, "fill": INK},
}
PANEL = {"width": 330, "height": 240}
MARKER: dict[str, Any] = {"size": 55, "opacity": 1, "strokeWidth": 1.5, "filled": True}
LEGEND: dict[str, Any] = {
    "orient": "bottom",
    "title": None,
    "labelFontSize": 12,
    "symbolStrokeWidth": 1.5,
    "symbolSize": 70,
    "labelLimit": 420,
}


@dataclass(frozen=True)
class Axis:
    """Title and scale of a numeric axis; ``log`` is the base of a logarithmic one."""

    title: str
    log: int | None = None
    zero: bool = False
    ticks: Sequence[float] = ()
    domain: tuple[float, float] | None = None

    def encoding(self) -> dict[str, Any]:
        """Arguments of an Altair channel."""
        scale: dict[str, Any] = {"zero": self.zero, "nice": self.domain is None}
        if self.log:
            scale = {"type": "log", "base": self.log, "nice": self.domain is None}
        if self.domain:
            scale["domain"] = list(self.domain)
        axis: dict[str, Any] = {"title": self.title, "format": ",~r"}
        ticks = list(self.ticks) or self._decades()
        if ticks:
            axis |= {"values": ticks, "labelOverlap": False, "tickCount": 50}  # of few ticks, a logarithmic axis drops labels
        return {"scale": alt.Scale(**scale), "axis": alt.Axis(**axis)}

    def _decades(self) -> list[float]:
        """Ticks at 1, 2 and 5 of each decade, or at its beginning where there are many; none for a linear axis."""
        if self.log != 10 or not self.domain:
            return []
        low, high = self.domain
        steps = (1, 2, 5) if high / low < 1000 else (1,)
        ticks = [step * 10.0**power for power in range(-2, 7) for step in steps]
        return [tick for tick in ticks if low <= tick <= high]


@dataclass(frozen=True)
class Look:
    """How a series looks: number of its colour, number of its marker, and whether it is dashed with hollow markers."""

    colour: int
    shape: int = 0
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart: rows of ``series``, ``x`` and ``y``, and its axes."""

    x: Axis
    y: Axis
    rows: Sequence[Mapping[str, Any]] = field(default_factory=list)


def _scale(looks: Mapping[str, Look], values: Iterable[Any]) -> alt.Scale:
    return alt.Scale(domain=list(looks), range=list(values))


def _markers(looks: Mapping[str, Look], columns: int) -> dict[str, Any]:
    """Outline, filling and shape of each series, in one legend; none for a single series."""
    legend = alt.Legend(columns=columns, **LEGEND) if len(looks) > 1 else None
    return {
        "stroke": alt.Stroke("series:N", scale=_scale(looks, (COLOURS[one.colour] for one in looks.values())), legend=legend),
        "fill": alt.Fill(
            "series:N", scale=_scale(looks, ("#fff" if one.hollow else COLOURS[one.colour] for one in looks.values())), legend=legend
        ),
        "shape": alt.Shape("series:N", scale=_scale(looks, (SHAPES[one.shape] for one in looks.values())), legend=legend),
    }


def lines(panels: Sequence[Panel], looks: Mapping[str, Look], title: str, columns: int = 4) -> str:
    """Panels side by side with lines and markers; the legend is below."""
    look, dash = _markers(looks, columns), _scale(looks, ([4, 3] if one.hollow else [1, 0] for one in looks.values()))
    charts = []
    for panel in panels:
        base = alt.Chart(alt.Data(values=[dict(row) for row in panel.rows])).encode(
            alt.X("x:Q", **panel.x.encoding()), alt.Y("y:Q", **panel.y.encoding()), stroke=look["stroke"]
        )
        line = base.mark_line(strokeWidth=1.5).encode(strokeDash=alt.StrokeDash("series:N", scale=dash, legend=None))
        marker = base.mark_point(**MARKER).encode(fill=look["fill"], shape=look["shape"])
        charts.append(alt.layer(line, marker).properties(**PANEL))
    return _drawn(alt.hconcat(*charts, spacing=34), title)


def dots(panels: Sequence[Panel], order: Sequence[str], looks: Mapping[str, Look], title: str, columns: int = 6) -> str:
    """Panels side by side: a marker for each series in each row ``y``, one above the other, over a numeric ``x``."""
    charts = []
    for index, panel in enumerate(panels):
        axis = _names(labels=index == 0)
        axis.tickBand, axis.grid = "extent", True
        y = alt.Y("y:N", sort=list(order), scale=alt.Scale(domain=list(order), paddingInner=0.25), axis=axis)
        base = alt.Chart(alt.Data(values=[dict(row) for row in panel.rows])).encode(
            alt.X("x:Q", **panel.x.encoding()), y, yOffset=alt.YOffset("series:N", scale=alt.Scale(domain=list(looks)))
        )
        charts.append(base.mark_point(**MARKER).encode(**_markers(looks, columns)).properties(width=PANEL["width"], height=48 * len(order)))
    return _drawn(alt.hconcat(*charts, spacing=24), title)


def bars(rows: Sequence[Mapping[str, Any]], parts: Sequence[str], x: Axis, title: str) -> str:
    """Horizontal bars of stacked ``part`` segments, one per ``y``; ``text`` stands behind the bar."""
    order = list(dict.fromkeys(row["y"] for row in rows))
    data = alt.Data(values=[dict(row) for row in rows])
    y = alt.Y("y:N", sort=order, axis=_names())
    colour = alt.Scale(domain=list(parts), range=[COLOURS[index] for index in range(len(parts))])
    legend = alt.Legend(**LEGEND) if len(parts) > 1 else None
    bar = (
        alt.Chart(data)
        .mark_bar(fillOpacity=0.75, strokeWidth=1, height=16)
        .encode(
            alt.X("a:Q", **x.encoding()),
            y,
            alt.X2("b:Q"),
            color=alt.Color("part:N", scale=colour, legend=legend),
            stroke=alt.Stroke("part:N", scale=colour, legend=None),
        )
    )
    last = [row for row in rows if row.get("text")]
    text = alt.Chart(alt.Data(values=[dict(row) for row in last])).mark_text(align="left", dx=5).encode(alt.X("b:Q"), y, text="text:N")
    return _drawn(alt.layer(bar, text).properties(width=460, height=26 * len(order)), title)


def matrices(panels: Sequence[tuple[str, Sequence[Mapping[str, Any]]]], columns: Sequence[str], rows: Sequence[str], title: str) -> str:
    """Tables of shaded cells side by side: ``x``, ``y``, ``text``, and ``shade`` from 0, light, to 1, dark."""
    charts = []
    for index, (heading, cells) in enumerate(panels):
        x = alt.X("x:N", sort=list(columns), scale=alt.Scale(domain=list(columns)), axis=_names(orient="top", labelAngle=0))
        y = alt.Y("y:N", sort=list(rows), scale=alt.Scale(domain=list(rows)), axis=_names(labels=index == 0))
        base = alt.Chart(alt.Data(values=[dict(cell) for cell in cells])).encode(x, y)
        box = base.mark_rect(fill=COLOURS[0], stroke="white", strokeWidth=2).encode(
            fillOpacity=alt.FillOpacity("shade:Q", scale=alt.Scale(domain=[0, 1], range=[0.08, 0.55]), legend=None)
        )
        text = base.mark_text(fontSize=11, lineBreak="|", lineHeight=13, dy=-6 if any("|" in cell["text"] for cell in cells) else 0).encode(
            text="text:N"
        )
        head = alt.TitleParams(heading, anchor="start", fontSize=12, fontWeight="normal", dy=-4)
        charts.append(alt.layer(box, text).properties(width=66 * len(columns), height=38 * len(rows), title=head))
    return _drawn(alt.hconcat(*charts, spacing=20), title)


def _names(**more: Any) -> alt.Axis:
    return alt.Axis(
        title=None, domain=False, ticks=False, grid=False, labelFontSize=12, labelLimit=260, labelPadding=6, minExtent=0, **more
    )


def _drawn(chart: Any, title: str) -> str:
    """The finished file: on white, and with a title for those who cannot see it."""
    svg = vl_convert.vegalite_to_svg({**chart.to_dict(), "config": dict(CONFIG)}, vl_version="6.4")
    svg = re.sub(r'(?<= d=")[^"]*|(?<= transform=")[^"]*', lambda place: _short(place.group()), svg)
    head = re.match(r"<svg[^>]*>", svg)
    assert head is not None, "vl-convert draws an SVG"
    return f"{head.group()}<title>{html.escape(title)}</title>{svg[head.end() :]}\n"


def _short(numbers: str) -> str:
    """Coordinates to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), numbers)
