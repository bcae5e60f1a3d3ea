"""Charts as inline SVG: lines, markers with error bars, bars and cells, with their axes.

Every colour is a CSS variable (``--s0`` to ``--s6`` of the series, ``--ink``, ``--grid``, ``--shade``), so a drawing follows the light or
dark mode of its page, and needs neither a script nor a library there. A mark may say in ``of`` what it belongs to, as words: a page hides
marks by them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

from caraml.base.axis import Axis, Scale, wide_range
from caraml.base.format import printable

WIDTH, HEIGHT = 330, 190
"""Size of the plotting area [px]. A whole figure is about 400 px wide, so that a phone shows it without making its text small."""
LETTER = 7.3
"""Width of a letter of 12 px [px], generously: no font of a browser needs more."""
SERIES = 7
"""Number of colours; the next series takes the first colour again: a line with another dash and marker, a block almost empty."""
DASHES = ("", "7 3", "2 2", "9 3 2 3", "4 4")
SHAPES = {
    "circle": "m-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "square": "m-3.5-3.5h7v7h-7z",
    "triangle": "m0-4.5l4.5 8h-9z",
    "diamond": "m0-5l4 5-4 5-4-5z",
    "cross": "m-1.5-4h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5z",
}
"""Markers around the point where a path begins."""
ROW, LINE, CELL = 40, 42, 46
"""Height of a bar and of a row of cells, each with its label above it, and least width of a cell [px]: five digits."""
Points = list[tuple[float, float]]
Key = Literal["line", "mark", "block"]
_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1f24")
LIGHT = {f"s{index}": colour for index, colour in enumerate(_SERIES)} | {
    "paper": "#fff",
    "ink": "#1b1f24",
    "grid": "#e3e6eb",
    "shade": "#0072b21f",
}
"""Colours of the page in light mode; those of series are Okabe and Ito's, which the colour-blind tell apart."""


def series_colour(index: int) -> str:
    return f"var(--s{index % SERIES})"


def dash(index: int) -> str:
    """Dash of a series: differs from its neighbours', so that no meaning hangs on colour alone."""
    return DASHES[index % len(DASHES)]


def shape(index: int) -> str:
    return list(SHAPES)[index % len(SHAPES)]


def block_opacity(index: int) -> float:
    """How strongly a block is filled: almost not at all once its colour comes for the second time."""
    return 0.55 if index < SERIES else 0.1


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    summary: str
    """Read out where a single point cannot be."""
    total: int = 0
    """Points before downsampling."""
    of: str = ""


@dataclass(frozen=True)
class Drawing:
    """A finished chart: the markup of its marks, its size [px], and what is read to those who cannot see it."""

    title: str
    summary: str
    width: float
    height: float
    body: str

    @property
    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" font-size="12" viewBox="0 0 {_px(self.width)} {_px(self.height)}">'
        return f"{head}<title>{escaped(self.title)}</title><desc>{escaped(self.summary)}</desc>{self.body}</svg>"


def _px(value: float) -> str:
    """A coordinate to a tenth of a pixel."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _at(x: float, y: float) -> str:
    return f"{_px(x)},{_px(y)}"


def escaped(text: str) -> str:
    return escape(printable(text))


def _about(tip: str, of: str = "") -> str:
    """What the page shows of a mark when it is pointed at, and the words, apart by spaces, by which it finds the mark."""
    return "".join(f' data-{name}="{escaped(text)}"' for name, text in (("tip", tip), ("of", of)) if text)


def text_at(x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False, of: str = "") -> str:
    weight = ' font-weight="600"' if bold else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{_about("", of)} x="{_px(x)}" y="{_px(y)}"{place}{weight}>{escaped(text)}</text>'


@dataclass
class _Plot:
    """Marks within a plotting area, and the axes around it. Marks are added in the order in which they are drawn, in pixels."""

    width: float = WIDTH
    height: float = HEIGHT
    parts: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    left: float = 4.0
    right: float = 14.0
    top: float = 6.0
    bottom: float = 4.0

    def x_axis(self, axis: Axis, values: Iterable[float] = ()) -> Scale:
        """An axis below; labels that would touch the one before are left out."""
        scale = Scale(axis, values, self.width)
        ticks = "".join(f"M{_at(at, self.height)}v5" for at, _ in scale.ticks)
        self.parts.append(f'<path stroke="var(--ink)" d="M0,{_px(self.height)}h{_px(self.width)}{ticks}"/>')
        free = -math.inf
        for at, label in scale.ticks:
            half = LETTER * len(label) / 2
            if at - half >= free:
                self.words.append(text_at(at, self.height + 17, label, "middle"))
                self.left, self.right, free = max(self.left, half - at + 2), max(self.right, at + half - self.width + 2), at + half + 8
        self.bottom = 26.0
        if axis.title:
            self.words.append(text_at(self.width / 2, self.height + 36, axis.title, "middle"))
            self.bottom = 42.0
        return scale

    def y_axis(self, axis: Axis, values: Iterable[float] = ()) -> Scale:
        """An axis at the left with grid lines; its title lies flat above it: easier to read, and never cut by the edge."""
        scale = Scale(axis, values, self.height, upward=True)
        self.parts.append(f'<path stroke="var(--grid)" d="{"".join(f"M0,{_px(at)}h{_px(self.width)}" for at, _ in scale.ticks)}"/>')
        free = math.inf
        for at, label in scale.ticks:
            if at <= free:
                self.words.append(text_at(-4, at + 4, label, "end"))
                self.left, free = max(self.left, LETTER * len(label) + 8), at - 18
        self.words.append(text_at(0, -12, axis.title))
        self.left, self.top = max(self.left, 34.0), 29.0
        return scale

    def group(self, marks: Iterable[str], **attributes: object) -> None:
        """Add marks that share their attributes."""
        if inside := "".join(marks):
            shared = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items() if value != "")
            self.parts.append(f"<g{shared}>{inside}</g>")

    def drawing(self, title: str, told: Sequence[str], most: int = 16) -> Drawing:
        """The finished chart. ``told`` says what is in it: all of that, or the first and how many more the table has."""
        more = f"; and {len(told) - most} more, in the table of this figure" if len(told) > most else ""
        words = f'<g fill="var(--ink)">{"".join(self.words)}</g>'
        body = f'<g fill="none" transform="translate({_at(self.left, self.top)})">{"".join(self.parts)}{words}</g>'
        size = self.left + self.width + self.right, self.top + self.height + self.bottom
        return Drawing(title, "; ".join(told[:most]) + more, *size, body)


def _path(d: str, tip: str = "", of: str = "") -> str:
    return f'<path{_about(tip, of)} d="{d}"/>'


def _rect(ends: tuple[float, float], y: float, height: float, tip: str, *, more: str = "", of: str = "") -> str:
    """A rectangle between two ends along x, so wide that it can be seen."""
    x, x2 = ends
    return f'<rect{_about(tip, of)} x="{_px(x)}" y="{_px(y)}" width="{_px(max(x2 - x, 0.1))}" height="{_px(height)}"{more}/>'


def _joined(points: Iterable[tuple[float, float]], step: bool = False) -> str:
    """A line through points, or one that keeps its height until the next."""
    first, *rest = points
    return f"M{_at(*first)}" + "".join(f"H{_px(x)}V{_px(y)}" if step else f"L{_at(x, y)}" for x, y in rest)


def curves(
    lines: Sequence[Line],
    x: Axis,
    y: Axis,
    title: str,
    *,
    step: bool = False,
    shade: tuple[float, float] | None = None,
    size: tuple[float, float] = (WIDTH, HEIGHT),
) -> Drawing:
    """Lines of long series, without markers. ``shade`` marks a span of x; ``size`` is that of the plotting area [px]."""
    plot = _Plot(*size)
    down = plot.y_axis(y, (value for line in lines for _, value in line.points))
    across = plot.x_axis(x, [*(value for line in lines for value, _ in line.points), *(shade or ())])
    if shade is not None:
        plot.group([_rect((across(shade[0]), across(shade[1])), 0, plot.height, "measured window")], fill="var(--shade)")
    for index, line in enumerate(lines):
        d = _joined(((across(px), down(py)) for px, py in line.points), step)
        plot.group([_path(d, line.summary, line.of)], stroke=series_colour(index), stroke_width=1.5, stroke_dasharray=dash(index))
    return plot.drawing(title, [line.summary for line in lines])


def marks(
    series: Sequence[Sequence[dict[str, Any]]], x: Axis, y: Axis, title: str, *, lines: bool = True, path: Sequence[dict[str, Any]] = ()
) -> Drawing:
    """Lines with a marker and an error bar at each point: ``x``, ``y``, ``low``, ``high`` and ``d``, which is read out.

    Where a point also has ``x_low`` and ``x_high``, a bar shows that error as well; without ``lines`` there are markers only.
    ``path`` is joined by a dashed line of its own.
    """
    plot, points = _Plot(), [point for one in series for point in one]
    down = plot.y_axis(y, (point[name] for point in [*points, *path] for name in ("y", "low", "high") if name in point))
    across = plot.x_axis(x, (point[name] for point in [*points, *path] for name in ("x", "x_low", "x_high") if name in point))

    def joined(found: Sequence[dict[str, Any]]) -> list[str]:
        if len(found) < 2:
            return []
        line = _path(_joined((across(one["x"]), down(one["y"])) for one in found), of=_of(found))
        return [line.replace("data-of", "data-all")]  # a line through points that are not all shown would say what it does not know

    plot.group(joined(path), stroke="var(--ink)", stroke_width=1.5, stroke_dasharray="3 3", stroke_opacity=0.7)
    for index, one in enumerate(series):
        if lines:
            plot.group(joined(one), stroke=series_colour(index), stroke_width=1.5, stroke_dasharray=dash(index))
    for index, one in enumerate(series):
        errors = []
        for point in one:
            d = _error(across(point["x"]), down(point["low"]), down(point["high"]))
            d += f"M{_at(across(point['x_low']), down(point['y']))}H{_px(across(point['x_high']))}" if "x_low" in point else ""
            errors.append(_path(d, of=_of([point])))
        plot.group(errors, stroke=series_colour(index), stroke_width=1.5)
        markers = (_path(f"M{_at(across(point['x']), down(point['y']))}{SHAPES[shape(index)]}", point["d"], _of([point])) for point in one)
        plot.group(markers, fill=series_colour(index))
    return plot.drawing(title, [point["d"] for point in points])


def _of(marks: Iterable[dict[str, Any]]) -> str:
    """The words of several marks."""
    return " ".join(dict.fromkeys(word for mark in marks for word in mark.get("of", "").split()))


def _error(x: float, low: float, high: float) -> str:
    return f"M{_at(x, low)}V{_px(high)}" + "".join(f"M{_at(x - 4, y)}h8" for y in (low, high))


def bars(rows: Sequence[str], segments: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]], axis_title: str, title: str) -> Drawing:
    """Horizontal bars, each below its label.

    A segment has ``row``, ``a``, ``b``, ``series`` and ``d``, which is read out; an error has ``row``, ``low``, ``high`` and ``d``.
    """
    plot = _Plot(height=ROW * len(rows))
    far = max([0.0] + [segment["b"] for segment in segments] + [error["high"] for error in errors])
    across = plot.x_axis(Axis(axis_title, domain=(0, far * 1.02)))
    for index in sorted({segment["series"] for segment in segments}):
        ours = [segment for segment in segments if segment["series"] == index]
        rects = (_rect((across(one["a"]), across(one["b"])), _top(one), 14, one["d"], of=_of([one])) for one in ours)
        plot.group(rects, fill=series_colour(index), fill_opacity=block_opacity(index), stroke=series_colour(index))
    plot.group((_span(across, error) for error in errors), stroke="var(--ink)", stroke_width=2)
    plot.words += _row_names(rows, segments)
    return plot.drawing(title, [segment["d"] for segment in segments])


def _row_names(rows: Sequence[str], marks: Sequence[dict[str, Any]]) -> list[str]:
    return [text_at(0, ROW * row + 15, name, of=_of(mark for mark in marks if mark["row"] == row)) for row, name in enumerate(rows)]


def _top(mark: dict[str, Any]) -> float:
    return float(ROW * mark["row"] + 20)


def _span(across: Scale, mark: dict[str, Any]) -> str:
    """From ``low`` to ``high`` through the middle of a row's bar."""
    return _path(f"M{_at(across(mark['low']), _top(mark) + 7)}H{_px(across(mark['high']))}", mark.get("d", ""), _of([mark]))


def dots(rows: Sequence[str], series: Sequence[Sequence[dict[str, Any]]], axis_title: str, title: str) -> Drawing:
    """Markers along a line below each label, a shape for each series.

    A marker has ``row``, ``x`` and ``d``, which is read out, and may have the ends ``low`` and ``high`` of a bar. The axis is logarithmic
    where the markers need it.
    """
    every = [mark for one in series for mark in one]
    values = [mark[name] for mark in every for name in ("x", "low", "high") if name in mark]
    log = wide_range(values)
    domain = (min(values) / 1.3, max(values) * 1.3) if log else (min(0.0, *values) * 1.04, max(0.0, *values) * 1.04)
    plot = _Plot(height=ROW * len(rows))
    across = plot.x_axis(Axis(axis_title, domain=domain, log=10 if log else None))
    spans = {row: [mark for mark in every if mark["row"] == row] for row in range(len(rows))}
    ends = {row: (min(mark["x"] for mark in one), max(mark["x"] for mark in one), _of(one)) for row, one in spans.items() if one}
    joined = (_span(across, {"row": row, "low": low, "high": high, "of": of}) for row, (low, high, of) in ends.items())
    plot.group(joined, stroke="var(--ink)", stroke_opacity=0.4)
    for index, ours in enumerate(series):
        plot.group((_span(across, mark) for mark in ours if "low" in mark), stroke=series_colour(index), stroke_width=2)
        markers = (_path(f"M{_at(across(mark['x']), _top(mark) + 7)}{SHAPES[shape(index)]}", mark["d"], _of([mark])) for mark in ours)
        plot.group(markers, fill=series_colour(index))
    plot.words += _row_names(rows, every)
    return plot.drawing(title, [mark["d"] for mark in every])


def cells(
    rows: Sequence[str], columns: Sequence[str], found: Sequence[dict[str, Any]], title: str, width: float = CELL, *, heading: str = ""
) -> Drawing:
    """A cell for each ``row`` and ``column`` that has one, at least ``width`` wide, filled by its ``value`` (framed if that is ``None``).

    In it stands ``text``; ``d`` is read out. ``heading`` stands above, where there are several drawings.
    """
    wide = max(WIDTH / len(columns), width)
    plot = _Plot(round(wide * len(columns)), LINE * len(rows) + 20)
    values = [cell["value"] for cell in found if cell["value"] is not None]
    scale = math.log if values and wide_range(values) else float
    low, high = scale(min(values, default=0.0)), scale(max(values, default=0.0))

    def rect(cell: dict[str, Any]) -> str:
        left, top, value = cell["column"] * wide, cell["row"] * LINE + 36, cell["value"]
        share = (scale(value) - low) / (high - low) if value is not None and high > low else 0.5
        filled = f' fill-opacity="{0.06 + 0.44 * share:.3f}"' if value is not None else ""  # text keeps its contrast
        plot.words.append(text_at(left + wide / 2, top + 16, cell["text"], "middle", of=_of([cell])))
        return _rect((left + 1, left + wide - 1), top, 24, cell["d"], more=filled, of=_of([cell]))

    plot.group((rect(cell) for cell in found if cell["value"] is not None), fill=series_colour(0))
    unknown = (rect(cell) for cell in found if cell["value"] is None)
    plot.group(unknown, stroke="var(--ink)", stroke_opacity=0.5, stroke_dasharray="3 3", pointer_events="all")
    plot.words += [text_at(0, row * LINE + 32, name) for row, name in enumerate(rows)]
    plot.words += [text_at((column + 0.5) * wide, 12, name, "middle", bold=True) for column, name in enumerate(columns)]
    if heading:
        plot.words.append(text_at(0, -12, heading))
        plot.top = 29.0
    return plot.drawing(title, [cell["d"] for cell in found])


# -- charts as files of their own ------------------------------------------------------------------------------------------------------


def symbol(index: int, key: Key) -> str:
    """What stands for a series in a legend of 28 x 12 px: a ``line``, a line with its ``mark``, or a ``block``."""
    colour = series_colour(index)
    if key == "block":
        return f'<rect x="6" y="1" width="16" height="10" fill="{colour}" fill-opacity="{block_opacity(index)}" stroke="{colour}"/>'
    line = f'<path d="M0 6H28" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash(index) or "none"}"/>'
    return line + (f'<path fill="{colour}" d="M14 6{SHAPES[shape(index)]}"/>' if key == "mark" else "")


def standalone(drawings: Sequence[Drawing], title: str, legend: Sequence[str] = (), key: Key = "line") -> str:
    """Drawings side by side as one SVG document, for a paper or a picture viewer, with the legend below, in light colours."""
    parts, x, below = [], 0.0, 0.0
    for drawing in drawings:
        parts.append(f'<g transform="translate({x:g},0)">{drawing.body}</g>')
        x, below = x + drawing.width + 14, max(below, drawing.height)
    across, y = 0.0, below + 6
    for index, name in enumerate(legend):
        long = 48 + LETTER * len(name)
        if across and across + long > x:
            across, y = 0.0, y + 18
        mark = f'<g transform="translate({across + 4:g},{y:g})">{symbol(index, key)}</g>'
        parts.append(f'{mark}<g fill="var(--ink)">{text_at(across + 38, y + 10, name)}</g>')
        across += long
    height = y + 18 if legend else y
    body = re.sub(r"var\(--([a-z0-9]+)\)", lambda name: LIGHT.get(name[1], name[0]), "".join(parts))
    # Papers and vector programs know no colour with a transparent part in its last two digits.
    body = re.sub(r'fill="(#[0-9a-f]{6})([0-9a-f]{2})"', lambda fill: f'fill="{fill[1]}" fill-opacity="{int(fill[2], 16) / 255:.2f}"', body)
    size = f'width="{x:g}" height="{height:g}" viewBox="0 0 {x:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="DejaVu Sans, Verdana, sans-serif" font-size="12">'
    return f'{head}<title>{escaped(title)}</title><rect width="100%" height="100%" fill="{LIGHT["paper"]}"/>{body}</svg>\n'
