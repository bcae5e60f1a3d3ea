"""A figure as one SVG file for a paper: its drawings side by side and the legend below, in the colours of the light page."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from caraml.report.figure import Figure
from caraml.report.svg import FONT, Words, size_of, symbol

GAP = 14.0
LETTER = 7.3
"""Width of a letter of the legend [px], generously."""
LINE = 18.0


@cache
def light() -> dict[str, str]:
    """Colours of the page in light, from its style sheet."""
    style = files("caraml.report").joinpath("style.css").read_text(encoding="utf-8")
    block = style[style.index(":root {") : style.index("}")]
    return dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]+)", block))


def standalone(figure: Figure) -> str:
    """One SVG document without a reference to anything outside."""
    parts, x, below = [], 0.0, 0.0
    for drawing in figure.drawings:
        width, height = size_of(drawing)
        inner = re.sub(r"<(title|desc)>.*?</\1>", "", drawing, flags=re.DOTALL)
        parts.append(inner.replace("<svg ", f'<svg x="{x:g}" y="0" width="{width:g}" height="{height:g}" overflow="visible" ', 1))
        x, below = x + width + GAP, max(below, height)
    legend, height = _legend(figure, x, below + 6)
    body = re.sub(r"var\(--([a-z0-9]+)\)", lambda name: light()[name[1]], "".join(parts) + legend)
    # Papers and vector programs know no colour with a transparent part in its last two digits.
    body = re.sub(r'fill="(#[0-9a-f]{6})([0-9a-f]{2})"', lambda fill: f'fill="{fill[1]}" fill-opacity="{int(fill[2], 16) / 255:.2f}"', body)
    title = Words(0, 0, figure.title).escaped
    size = f'width="{x:g}" height="{height:g}" viewBox="0 0 {x:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="12">'
    return f'{head}<title>{title}</title><rect width="100%" height="100%" fill="{light()["paper"]}"/>{body}</svg>\n'


def _legend(figure: Figure, width: float, top: float) -> tuple[str, float]:
    """Symbols and names in lines of ``width``, and where they end."""
    parts, x, y = [], 0.0, top
    for index, name in figure.legend:
        long = 34 + LETTER * len(name) + GAP
        if x and x + long > width:
            x, y = 0.0, y + LINE
        mark = symbol(index, figure.key).replace("<svg ", f'<svg x="{x + 4:g}" y="{y:g}" width="28" height="12" ', 1)
        parts.append(f'{mark}<g fill="var(--ink)">{Words(x + 38, y + 10, name).svg()}</g>')
        x += long
    return "".join(parts), y + LINE if figure.legend else top
