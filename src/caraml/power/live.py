"""Power at this moment, for a display: not a measurement of a window, only the newest readings put together."""

from __future__ import annotations

import time
from collections.abc import Callable

from caraml.power.model import Channel
from caraml.power.store import Store

SPAN_S = 1.0
"""Power of a counter is its slope over about this long [s]."""

STALE_S = 1.0
"""A channel whose newest reading is older than its span and this is silent [s]."""


def channel_power(channel: Channel, store: Store, interval: float) -> float | None:
    """Newest power of one channel [W]; ``None`` if it has been silent."""
    now = time.monotonic()
    newest = store.last_value(channel.id)
    span = max(SPAN_S, 3 * interval, 5 * channel.update_period_s)
    if newest is None or now - newest[0] > span + STALE_S:
        return None
    if channel.kind != "energy":
        return newest[1]
    series = store.series(channel.id, now - span)
    if len(series) < 2 or series.t[-1] - series.t[0] < max(2 * channel.update_period_s, interval / 2):
        return None
    rise = series.value[-1] - series.value[0]
    if rise < 0:
        return None
    return rise / (series.t[-1] - series.t[0])


def latest_power(store: Store, interval: Callable[[Channel], float]) -> float | None:
    """Sum over accelerators (at module level where that is known), else processors, else the node [W]."""
    powers: dict[tuple[str, str], tuple[Channel, float]] = {}
    for channel in sorted(store.channels.values(), key=lambda c: c.kind == "energy"):
        power = channel_power(channel, store, interval(channel))
        if power is not None:
            powers.setdefault((channel.source, channel.domain), (channel, power))
    for boundaries in (("module", "device"), ("cpu",), ("node_dc",), ("node_ac",)):
        seen = [pair for pair in powers.values() if pair[0].boundary in boundaries]
        if seen:
            return sum(_one_view(seen, hardware, boundaries) for hardware in {channel.hardware for channel, _ in seen})
    return None


def _one_view(seen: list[tuple[Channel, float]], hardware: str, boundaries: tuple[str, ...]) -> float:
    """Power of one class of hardware [W], from one source at the outermost boundary."""
    members = [(c, power) for c, power in seen if c.hardware == hardware]
    boundary, source = min({(c.boundary, c.source) for c, _ in members}, key=lambda key: (boundaries.index(key[0]), key[1]))
    view = {c.domain: (c, power) for c, power in members if c.boundary == boundary and c.source == source}
    return sum(power for c, power in view.values() if c.parent not in view)
