"""Charts as SVG that takes its colours and its font from the page around it.

Altair describes a chart, vl-convert draws it once, here; the page then needs no JavaScript library, prints, and follows the reader's
light or dark mode, because every colour in the SVG is a CSS variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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


CONFIG: Mapping[str, Any] = {
    "background": None,
    # A wide font measures the labels, so that no browser's own font needs more room.
    "font": "DejaVu Sans, Verdana, sans-serif",
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


def render(spec: Mapping[str, Any], title: str, description: str) -> str:
    """Draw a Vega-Lite specification as inline SVG with a title and a description for those who cannot see it."""
    import vl_convert

    drawn = vl_convert.vegalite_to_svg({**spec, "config": dict(CONFIG)}, vl_version="6.4")
    return _restyled(drawn, title, description)


def _restyled(drawn: str, title: str, description: str) -> str:
    """Take out what the page decides (size, fonts, colours) and what nobody sees (empty groups' backgrounds, long decimals)."""
    head = re.match(r"<svg[^>]*viewBox=\"0 0 ([\d.]+) ([\d.]+)\"[^>]*>", drawn)
    assert head is not None, "vl-convert draws an SVG with a view box"
    body = drawn[head.end() :]
    body = re.sub(r' (font-family|aria-roledescription|role)="[^"]*"', "", body)
    body = re.sub(r"<path class=\"(?:background|foreground)\"[^>]*d=\"[^\"]*\"[^>]*/>", "", body)
    body = re.sub(r' (?:pointer-events="none"|opacity="1"|stroke-width="1"|class="[^"]*")', "", body)
    body = re.sub(r'(?<= d=")[^"]*', lambda path: _short(path.group()), body)
    body = re.sub(r'(?<= transform=")[^"]*', lambda path: _short(path.group()), body)
    body = re.sub(r"#5e00([0-9a-f]{2})", lambda colour: f"var(--s{int(colour.group(1), 16)})", body)
    for stand_in, variable in ((TEXT, "--ink"), (GRID, "--grid"), (SHADE, "--shade")):
        body = body.replace(stand_in, f"var({variable})")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {head.group(1)} {head.group(2)}">'
    return f"{opening}<title>{_escaped(title)}</title><desc>{_escaped(description)}</desc>{body}"


def _short(numbers: str) -> str:
    """Coordinates to a tenth of a pixel."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number.group()):.1f}".removesuffix(".0"), numbers)


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))
