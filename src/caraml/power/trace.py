"""A picture of power over time, as an SVG file that any browser shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from caraml.power.model import Channel
from caraml.power.series import Series
from caraml.power.store import Store

WIDTH, HEIGHT = 900, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 28, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#b3a100")
"""Colours that colour-blind people can tell apart (Okabe and Ito)."""
MAX_POINTS = 1500


def power_points(channel: Channel, series: Series) -> list[tuple[float, float]]:
    """Power over time [s, W]: the readings, or the slope of a counter over at least five of its updates."""
    if channel.kind != "energy":
        return list(zip(series.t, series.value, strict=True))
    points, first = [], 0
    span = max(5 * channel.update_period_s, 0.1)
    for i in range(1, len(series)):
        length = series.t[i] - series.t[first]
        if length >= span:
            rise = series.value[i] - series.value[first]
            if rise >= 0:
                points.append(((series.t[i] + series.t[first]) / 2, rise / length))
            first = i
    return points


def thin(points: list[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``limit`` points: of every stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= limit:
        return points
    size = -(-2 * len(points) // limit)
    kept = []
    for begin in range(0, len(points), size):
        block = points[begin : begin + size]
        kept += sorted({min(block, key=lambda p: p[1]), max(block, key=lambda p: p[1])})
    return kept


def ticks(highest: float) -> list[float]:
    """About five round numbers from 0 up to ``highest``: steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(highest / 5))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= highest / 5)
    return [round(i * step, 9) for i in range(int(highest / step) + 1)]


def svg(store: Store, start: float, end: float, title: str) -> str:
    """The picture of the window ``start`` to ``end`` (monotonic seconds), one line per domain."""
    lines = []
    seen: set[str] = set()
    # Power channels first: they show a domain better than the slope of its counter.
    for channel in sorted(store.channels.values(), key=lambda c: (c.kind == "energy", c.id)):
        points = [(t - start, w) for t, w in power_points(channel, store.series(channel.id, start, end)) if start <= t <= end]
        if channel.domain not in seen and len(points) > 1:
            seen.add(channel.domain)
            lines.append((f"{channel.label} ({channel.domain})", thin(points)))
    top = max((w for _, points in lines for _, w in points), default=1.0) * 1.05 or 1.0
    span = max(end - start, 1e-3)

    def x(t: float) -> float:
        return LEFT + t / span * (WIDTH - LEFT - RIGHT)

    def y(watts: float) -> float:
        return HEIGHT - BOTTOM - watts / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT + 16 * len(lines)}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        *_axis(span, top, x, y),
    ]
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(t):.1f},{y(w):.1f}" for t, w in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
        below = HEIGHT + 16 * number
        parts.append(f'<rect x="{LEFT}" y="{below - 8}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + 18}" y="{below}">{escape(name)}</text>')
    if not lines:
        parts.append(f'<text x="{LEFT + 20}" y="{HEIGHT / 2}">no power reading in this window</text>')
    return "\n".join([*parts, "</svg>", ""])


def _axis(span: float, top: float, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    """Grid lines, ticks and the names of the axes."""
    parts = []
    for watts in ticks(top):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(watts):.1f}" y2="{y(watts):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(watts) + 4:.1f}" text-anchor="end">{watts:g}</text>')
    for t in ticks(span):
        parts.append(f'<text x="{x(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{t:g}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - BOTTOM + 32}" text-anchor="middle">time [s]</text>')
    parts.append(f'<text x="14" y="{HEIGHT / 2}" transform="rotate(-90 14 {HEIGHT / 2})" text-anchor="middle">power [W]</text>')
    return parts
