"""Charts as files of their own: a legend, and the colours that a page would decide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from caraml.base.chart import LETTER, SHAPES, Drawing, block_opacity, dash, escaped, series_colour, shape, text_at

Key = Literal["line", "mark", "block"]

_SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1b1f24")
LIGHT = {f"s{index}": colour for index, colour in enumerate(_SERIES)} | {
    "paper": "#fff",
    "ink": "#1b1f24",
    "grid": "#e3e6eb",
    "shade": "#0072b21f",
}
"""Colours of the page in light mode; those of series are Okabe and Ito's, which the colour-blind tell apart."""


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
    body = re.sub(r"var\(--([a-z0-9]+)\)", lambda name: LIGHT[name[1]], "".join(parts))
    # Papers and vector programs know no colour with a transparent part in its last two digits.
    body = re.sub(r'fill="(#[0-9a-f]{6})([0-9a-f]{2})"', lambda fill: f'fill="{fill[1]}" fill-opacity="{int(fill[2], 16) / 255:.2f}"', body)
    size = f'width="{x:g}" height="{height:g}" viewBox="0 0 {x:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="DejaVu Sans, Verdana, sans-serif" font-size="12">'
    return f'{head}<title>{escaped(title)}</title><rect width="100%" height="100%" fill="{LIGHT["paper"]}"/>{body}</svg>\n'
