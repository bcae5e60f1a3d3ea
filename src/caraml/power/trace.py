"""A picture of power over time, as an SVG file that any browser shows."""

from __future__ import annotations

from caraml.base.chart import Axis, Line, curves
from caraml.base.chart_file import standalone
from caraml.power.model import Channel
from caraml.power.store import ReadingSeries, ReadingStore

SIZE = (820, 300)
"""Of the plotting area [px]."""
MAX_POINTS = 1500


def power_points(channel: Channel, series: ReadingSeries) -> list[tuple[float, float]]:
    """Power over time [s, W]: the readings, or the slope of a counter over at least five of its updates; none of apparent power."""
    if channel.kind == "apparent_va":
        return []
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


def downsampled(points: list[tuple[float, float]], limit: int = MAX_POINTS) -> list[tuple[float, float]]:
    """At most ``limit`` points: of every stretch the lowest and the highest, so that no peak is lost."""
    if len(points) <= limit:
        return points
    size = -(-2 * len(points) // limit)
    kept = []
    for begin in range(0, len(points), size):
        block = points[begin : begin + size]
        kept += sorted({min(block, key=lambda p: p[1]), max(block, key=lambda p: p[1])})
    return kept


def svg(store: ReadingStore, start: float, end: float, title: str) -> str:
    """The picture of the window ``start`` to ``end`` (monotonic seconds), one line per domain."""
    lines, seen = [], set()
    # Power channels first: they show a domain better than the slope of its counter.
    for channel in sorted(store.channels.values(), key=lambda c: (c.kind == "energy", c.id)):
        points = [(t - start, w) for t, w in power_points(channel, store.series(channel.id, start, end)) if start <= t <= end]
        if channel.domain not in seen and len(points) > 1:
            seen.add(channel.domain)
            lines.append(Line(f"{channel.label} ({channel.domain})", downsampled(points), "", len(points)))
    x = Axis("time [s]" if lines else "no power reading in this window", domain=(0, max(end - start, 1e-3)))
    y = Axis(f"power [W]: {title}", zero=True, domain=None if lines else (0, 1))
    drawing = curves(lines or [Line("", [(0, 0)], "")], x, y, title, size=SIZE)
    return standalone([drawing], title, [line.name for line in lines])
