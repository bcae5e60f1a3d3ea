"""Charts as SVG that takes its colours and its font from the page around it.

vl-convert draws each chart, a Vega-Lite specification, once, here; the page then needs no JavaScript library, prints, and follows the
reader's light or dark mode, because every colour in the SVG is a CSS variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from caraml.base.text import printable

WIDTH, HEIGHT = 330, 190
"""Size of the plotting area [px]. A whole figure is about 400 px wide, so that a phone shows it without making its text small."""
SERIES = 7
"""Number of colours; the next series takes the first colour again: a line with another dash and shape, a block almost empty."""
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 3), (2, 2), (9, 3, 2, 3), (4, 4))
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")

TEXT, GRID, SHADE = "#5e0100", "#5e0200", "#5e0300"
"""Stand-ins for colours that the page decides; no other colour begins like them."""


def series_colour(index: int) -> str:
    """Stand-in for the colour of the series with this number."""
    return f"#5e00{index % SERIES:02x}"


def dash(index: int) -> tuple[int, ...]:
    """Dash of a series: differs from its neighbours', so that no meaning hangs on colour alone."""
    return DASHES[index % len(DASHES)]


def shape(index: int) -> str:
    """Marker of a series."""
    return SHAPES[index % len(SHAPES)]


FONT = "DejaVu Sans, Verdana, sans-serif"
CONFIG: Mapping[str, Any] = {
    "background": None,
    # A wide font measures the labels, so that no browser's own font needs more room.
    "font": FONT,
    "padding": {"left": 4, "right": 14, "top": 6, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": TEXT,
        "titleColor": TEXT,
        "domainColor": TEXT,
        "tickColor": TEXT,
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
    "text": {"fontSize": 12, "fill": TEXT},
}


@dataclass(frozen=True)
class Words:
    """A text of a drawing, at a place of the plotting area [px]. Vega would spend most of its time on measuring each of hundreds."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    bold: bool = False

    @property
    def escaped(self) -> str:
        """The text as markup shows it."""
        return _escaped(printable(self.text))

    def svg(self) -> str:
        """As markup."""
        weight = ' font-weight="600"' if self.bold else ""
        return f'<text x="{self.x:.1f}" y="{self.y:.1f}" text-anchor="{self.anchor}"{weight}>{self.escaped}</text>'


def render(spec: Mapping[str, Any], title: str, description: str, words: Sequence[Words] = ()) -> str:
    """Draw a Vega-Lite specification as inline SVG with a title and a description for those who cannot see it.

    Texts of the specification are escaped by whoever draws it.
    """
    import vl_convert

    # A control character in a text would abort the process in the converter's own code.
    drawn = vl_convert.vegalite_to_svg({**_printable(spec), "config": dict(CONFIG)}, vl_version="6.4")
    return printable(_restyled(drawn, title, description, "".join(word.svg() for word in words)))


def _printable(value: Any) -> Any:
    """A specification whose texts are all printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {name: _printable(inside) for name, inside in value.items()}
    return [_printable(inside) for inside in value] if isinstance(value, list) else value


def _restyled(drawn: str, title: str, description: str, words: str) -> str:
    """Add ``words``; take out what the page decides (size, fonts, colours) and what nobody sees (empty backgrounds, long decimals)."""
    head = re.match(r"<svg[^>]*viewBox=\"0 0 ([\d.]+) ([\d.]+)\"[^>]*>", drawn)
    assert head is not None, "vl-convert draws an SVG with a view box"
    body = drawn[head.end() :]
    body = re.sub(r' (font-family|aria-roledescription|role)="[^"]*"', "", body)
    body = re.sub(r"<path class=\"(?:background|foreground)\"[^>]*d=\"[^\"]*\"[^>]*/>", "", body)
    body = re.sub(r' (?:pointer-events="none"|opacity="1"|stroke-width="1"|font-size="12px"|aria-label=""|class="[^"]*")', "", body)
    body = re.sub(r'(?<= d=")[^"]*', lambda path: _short(path.group()), body)
    body = re.sub(r'(?<= transform=")[^"]*', lambda path: _short(path.group()), body)
    body = re.sub(r'(?<= (?:x2|y2)=")[^"]*', lambda end: _short(end.group()), body)
    body = re.sub(r'(?<=-opacity=")0\.\d+', lambda share: f"{float(share.group()):.3f}", body)
    body = re.sub(r"(?:<g></g>)+|<g aria-hidden=\"true\"></g>", "", body)
    # A drawing is one image to a screen reader; what its marks say is for those who point at them.
    body = re.sub(r'(<g[^>]*?) aria-label="[^"]*"', r"\1", body).replace(' aria-label="', ' data-tip="')
    body = re.sub(r"#5e00([0-9a-f]{2})", lambda colour: f"var(--s{int(colour.group(1), 16)})", body)
    for stand_in, variable in ((TEXT, "--ink"), (GRID, "--grid"), (SHADE, "--shade")):
        body = body.replace(stand_in, f"var({variable})")
    inside = body.rindex("</g></svg>")
    body = f'{_compact(body[:inside])}<g fill="var(--ink)">{words}</g>{body[inside:]}' if words else _compact(body)
    size = f'viewBox="0 0 {head.group(1)} {head.group(2)}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" font-size="12" {size}>'
    return f"{opening}<title>{_escaped(title)}</title><desc>{_escaped(description)}</desc>{body}"


_LINE = re.compile(r'<line(?: transform="translate\(([-\d.]+),([-\d.]+)\)")? x2="([-\d.]+)" y2="([-\d.]+)"([^>]*)/>')
_SILENT = re.compile(r'<path d="([^"]*)"([^>]*)/>(?:<path d="[^"]*"\2/>)+')
_GROUP = re.compile(r"<g>((?:<path [^>]*/>|<text [^>]*>[^<]*</text>){2,})</g>")
_ATTRIBUTE = re.compile(r' (?!d=|transform=|data-tip=)[\w-]+="[^"]*"')


def _compact(body: str) -> str:
    """The same drawing in about half the letters: marks that say nothing joined to one path, what a group's marks share said once."""
    body = _LINE.sub(lambda line: f'<path d="M{line[1] or 0},{line[2] or 0}l{line[3]},{line[4]}"{line[5]}/>', body)
    body = _SILENT.sub(lambda run: f'<path d="{_joined(run[0])}"{run[2]}/>', body)
    return _GROUP.sub(lambda group: _hoisted(group[1]), body)


def _joined(paths: str) -> str:
    return "".join(re.findall(r' d="([^"]*)"', paths))


def _hoisted(marks: str) -> str:
    """A group whose marks have in common what they can inherit."""
    heads = re.findall(r"<(?:path|text)[^>]*>", marks)
    common = [one for one in _ATTRIBUTE.findall(heads[0]) if all(one in head for head in heads)]

    def without(head: re.Match[str]) -> str:
        return _ATTRIBUTE.sub(lambda one: "" if one[0] in common else one[0], head[0])

    return f"<g{''.join(common)}>{re.sub(r'<(?:path|text)[^>]*>', without, marks)}</g>"


def _short(numbers: str) -> str:
    """Coordinates to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), numbers)


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


def size_of(drawing: str) -> tuple[float, float]:
    """Width and height of a drawing [px]."""
    head = re.match(r'<svg[^>]*viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
    assert head is not None, "a drawing has a view box"
    return float(head[1]), float(head[2])


_MARKERS = (
    "M10 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M10.5 2.5h7v7h-7z",
    "M14 1.5l4.5 8h-9z",
    "M14 1l4 5-4 5-4-5z",
    "M12.5 2h3v2.5H18v3h-2.5V10h-3V7.5H10v-3h2.5z",
)
"""``SHAPES``, drawn for a legend."""


def symbol(index: int, key: str) -> str:
    """What stands for a series in a legend: a ``line``, a line with its ``mark``, or a ``block``."""
    colour = f"var(--s{index % SERIES})"
    if key == "block":
        inside = f'<rect x="6" y="1" width="16" height="10" fill="{colour}" fill-opacity="{block_opacity(index)}" stroke="{colour}"/>'
    else:
        dashes = " ".join(map(str, dash(index))) or "none"
        inside = f'<path d="M0 6H28" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'
        inside += f'<path fill="{colour}" d="{_MARKERS[index % len(_MARKERS)]}"/>' if key == "mark" else ""
    return f'<svg class="key" viewBox="0 0 28 12" aria-hidden="true">{inside}</svg>'


def block_opacity(index: int) -> float:
    """How strongly a block is filled: almost not at all once its colour comes for the second time."""
    return 0.55 if index < SERIES else 0.1
