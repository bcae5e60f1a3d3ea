"""From readings of an energy counter to the energy of a window, with a bound: by difference.

A counter shows the energy up to some instant in the recent past: it is refreshed every ``u`` seconds, so a reading at
time t is E(t - a) with an age a between 0 and u. Every reading is therefore dated back by u/2, the window's edges are
interpolated between readings, and what the age can still do is part of the bound.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from caraml.power.model import Channel
from caraml.power.store import ReadingSeries, SeriesEstimate, doubles, interpolate, silent, usable_shift

DEFAULT_MAX_POWER_W = {"device": 2000.0, "module": 4000.0, "cpu": 1500.0, "node_dc": 40000.0, "node_ac": 40000.0}
"""No plausible power is higher, where the sensor does not say."""

MARGIN = 1.5
"""A step may exceed the highest plausible power by this factor before it counts as a restart of the counter."""

VARIED_TIMES = 6
"""So often the powers near an edge are taken to be twice as far apart, where readings of the counter contradict them."""

WELL_SEEN = 4
"""With so many readings of its power within reach of an edge, a load that stops there and goes on would be seen."""

MIN_STEPS = 10
"""A window of fewer updates than this is too short for its number to be used."""

UNKNOWN_LAG_S, LAGS = 0.3, 6
"""Nobody publishes by how much most sensors are late: it is taken to be no more than this [s]. So many lags up to it are tried."""
AVERAGED_LAG_S, CONTROLLER_LAG_S = 1.0, 5.0
"""The same where nobody publishes either whether a power is averaged, as over 1 s on other accelerators; and of controllers of nodes, which
ask their supplies one after the other [s]."""


@dataclass(slots=True)
class Counter:
    """Readings made continuous: wraps added, glitches dropped, restarts cut out."""

    t: array[float] = field(default_factory=doubles)
    half: array[float] = field(default_factory=doubles)
    energy: array[float] = field(default_factory=doubles)
    """Energy since the first reading, without what fell into ``cuts`` [J]."""
    cuts: list[tuple[float, float]] = field(default_factory=list)
    """Intervals whose energy is unknown because the counter restarted."""
    ambiguous: list[tuple[float, float]] = field(default_factory=list)
    """Intervals so long that the counter may have wrapped unseen."""


def max_power(channel: Channel) -> float:
    """Highest plausible power of the channel [W]."""
    return channel.max_power_w or DEFAULT_MAX_POWER_W[channel.boundary]


def _increment(delta: float, dt: float, channel: Channel) -> tuple[float | None, bool]:
    """The plausible energy of one step, or ``None``; and whether a wrap may have been missed."""
    limit = MARGIN * max_power(channel) * (dt + channel.update_period_s) + 2 * channel.resolution
    doubtful = channel.wrap_j is not None and dt >= channel.wrap_j / (2 * max_power(channel))
    if delta < 0 and channel.wrap_j is not None:
        delta += channel.wrap_j
    return (delta if 0 <= delta <= limit else None), doubtful


def unwrap(series: ReadingSeries, channel: Channel) -> Counter:
    """Turn a counter that wraps, restarts and glitches into one that only rises.

    A decrease is a wrap only if the energy that it implies is plausible; everything else is a restart, and the interval
    is cut out: no energy is made up for it. A lost reading costs nothing, since the next one contains it; nor does a standstill that
    the counter makes up for. A single reading that contradicts both neighbours is dropped;
    one from which the counter may have gone on is a restart, since what it fell by would be lost in silence.
    """
    times, values = series.t, series.value
    counter = Counter(times[:1], series.half[:1], array("d", [0.0] if values else []))
    last, since = (values[0], times[0]) if values else (0.0, 0.0)  # what it shows, and when that was first seen
    for i, value in enumerate(values[1:], start=1):
        delta, doubtful = _increment(value - last, times[i] - since, channel)
        if delta is None and i + 1 < len(values):
            around, _ = _increment(values[i + 1] - last, times[i + 1] - since, channel)
            onward, _ = _increment(values[i + 1] - value, times[i + 1] - times[i], channel)
            if around is not None and onward is None:
                continue
        if delta is None:
            counter.cuts.append((counter.t[-1], times[i]))
        elif doubtful:
            counter.ambiguous.append((counter.t[-1], times[i]))
        counter.t.append(times[i])
        counter.half.append(series.half[i])
        counter.energy.append(counter.energy[-1] + (delta or 0.0))
        last, since = value, since if value == last else times[i]
    return counter


def _slope(counter: Counter, start: float, end: float) -> float | None:
    """Mean power between the readings that enclose ``[start, end]`` [W]."""
    left = max(bisect_right(counter.t, start) - 1, 0)
    right = min(bisect_left(counter.t, end), len(counter.t) - 1)
    span = counter.t[right] - counter.t[left]
    return (counter.energy[right] - counter.energy[left]) / span if span > 0 else None


def _local_power(counter: Counter, power: ReadingSeries | None, at: float, reach: float) -> tuple[float, float]:
    """Lowest and highest power near ``at`` [W], from both sides of it and from the power channel if there is one.

    A slope over five update periods is off by up to a fifth, because its ends may be one period old. Where no reading came for longer than
    ``reach``, that of the whole pause hides what it was at its ends, so those count, too.
    """
    left, right = max(bisect_right(counter.t, at) - 1, 0), min(bisect_left(counter.t, at), len(counter.t) - 1)
    ends = {at} if counter.t[right] - counter.t[left] <= reach else {at, counter.t[left], counter.t[right]}
    slopes = [s for end in ends for s in (_slope(counter, end - reach, end), _slope(counter, end, end + reach)) if s is not None]
    low, high = (0.8 * min(slopes), 1.2 * max(slopes)) if slopes else (0.0, 0.0)
    seen = power.extremes(at - reach / 2, at + reach / 2) if power is not None and len(power) else None
    return (min(low, seen[0]), max(high, seen[1])) if seen else (low, high)


def _interpolation_bound(t: Sequence[float], energy: Sequence[float], at: float, low: float, high: float) -> float:
    """How far a straight line can be from the energy at ``at``, if power stays between ``low`` and ``high`` [J]."""
    right = min(max(bisect_left(t, at), 1), len(t) - 1)
    left = right - 1
    before, after = at - t[left], t[right] - at
    if before + after <= 0:
        return 0.0
    slope = (energy[right] - energy[left]) / (before + after)
    low, high = min(low, slope), max(high, slope)
    below = min((slope - low) * before, (high - slope) * after)
    above = min((high - slope) * before, (slope - low) * after)
    return max(below, above)


def _farthest(counter: Counter, at: float, energy_j: float, period: float, powers: tuple[float, float]) -> float:
    """How far the energy at ``at`` may be from ``energy_j`` by all readings near it together [J].

    Every reading tells the energy of an instant up to ``period`` [s] before it, and from there to ``at`` power lay between ``powers`` [W].
    Where readings contradict each other, it varied more; where they do so whatever it was, nothing is known.
    """
    t, (low, high) = counter.t, powers
    near = range(max(bisect_left(t, at - 2 * period) - 1, 0), min(bisect_right(t, at + 2 * period) + 1, len(t)))
    for _ in range(VARIED_TIMES):
        least = max(counter.energy[i] + (at - t[i]) * (low if at > t[i] else high) for i in near)
        most = min(counter.energy[i] + (at - t[i] + period) * (high if at > t[i] - period else low) for i in near)
        if least <= most:
            return max(most - energy_j, energy_j - least)
        low, high = low / 2, 2 * high
    return math.inf


def _stuck(counter: Counter, channel: Channel, start: float, end: float) -> float:
    """Time in the window during which the counter stood still and did not catch up afterwards [s].

    Also that of a standstill that began before the window: how much of the energy that it catches up with is the window's, nobody knows.
    """
    first, last = max(bisect_right(counter.t, start) - 1, 0), min(bisect_left(counter.t, end), len(counter.t) - 1)
    total = counter.t[last] - counter.t[first]
    typical = (counter.energy[last] - counter.energy[first]) / total if total > 0 else 0.0
    before = bisect_left(counter.energy, counter.energy[first])  # since when the counter shows what it does at the start
    stuck, i = 0.0, first
    while i < last:
        j = i
        while j < last and counter.energy[j + 1] <= counter.energy[i]:
            j += 1
        flat, span = counter.t[j] - counter.t[i], counter.t[min(j + 1, last)] - counter.t[i]
        rise = counter.energy[min(j + 1, last)] - counter.energy[i]
        earlier = counter.t[i] - counter.t[before] if i == first else 0.0
        if flat > patience(channel) and (rise < 0.5 * typical * span or rise == 0):
            stuck += flat
        elif earlier > 0 and earlier + flat > patience(channel) and rise > 0.5 * typical * (earlier + span):
            stuck += earlier + flat
        i = max(j, i + 1)
    return min(stuck, end - start)


def patience(channel: Channel) -> float:
    """A counter that does not move for longer than this stands still [s]; before, it may only be slow."""
    return max(10 * channel.update_period_s, 5 * channel.resolution, 1.0)


def _longest_repeat(counter: Counter, channel: Channel) -> float:
    """Longest time without a change, where it is neither standstill nor the counter's coarse step [s].

    A counter that was seen unchanged for this long refreshes no more often, whatever its data sheet says.
    """
    mean = counter.energy[-1] / max(counter.t[-1] - counter.t[0], 1e-9)
    longest, since = 0.0, 0
    for i in range(1, len(counter.t)):
        if counter.energy[i] > counter.energy[since]:
            since = i
            continue
        repeat = counter.t[i] - counter.t[since]
        if longest < repeat <= patience(channel) and repeat * mean > 2 * channel.resolution:
            longest = repeat
    return longest


def counter_energy(
    series: ReadingSeries,
    channel: Channel,
    start: float,
    end: float,
    power: ReadingSeries | None = None,
    *,
    instant: bool = True,
    busy: bool = False,
) -> SeriesEstimate:
    """Energy between ``start`` and ``end`` by counter difference.

    ``power`` is the power channel of the same domain, if there is one: it tells how high the load was at the edges, and where it is of the
    instant, also that it did not stop there, so that all readings near an edge together narrow its ``steps``.
    ``busy``: what ran did so until ``end``, as it did in the window.
    Parts of the bound: ``steps`` (age of the readings), ``edges`` (interpolation), ``lag`` (see ``_late``), ``timing`` (length of calls),
    ``resolution``, ``gaps`` (restarts and standstill, at the highest power seen).
    """
    estimate = SeriesEstimate()
    why = silent(series, start, end)
    counter = unwrap(series, channel)
    if why or len(counter.t) < 2:
        if seen := estimate.seen_in_part(counter.t, start, end, why or "the sensor gave one reading only"):
            estimate.partial_j = interpolate(counter.t, counter.energy, seen[1]) - interpolate(counter.t, counter.energy, seen[0])
        return estimate
    period = max(channel.update_period_s, _longest_repeat(counter, channel))
    shift = usable_shift(channel.update_period_s / 2, series, end)
    t = array("d", (instant - shift for instant in counter.t))
    at_start, at_end = (interpolate(t, counter.energy, at) for at in (start, end))
    estimate.energy_j = at_end - at_start

    reach = max(5 * period, (counter.t[-1] - counter.t[0]) / (len(counter.t) - 1))  # or the mean time between readings
    (low_s, high_s), (low_e, high_e) = (_local_power(counter, power, at, reach) for at in (start, end))
    old, young = shift, period - shift
    estimate.parts = {
        "steps": max(high_s * old + high_e * young, high_s * young + high_e * old),
        "edges": _interpolation_bound(t, counter.energy, start, low_s, high_s)
        + _interpolation_bound(t, counter.energy, end, low_e, high_e),
        "timing": high_s * _half_at(counter, start) + high_e * _half_at(counter, end),
        "resolution": channel.resolution,
    }
    if power and instant and all(power.count(at - reach, at + reach) >= WELL_SEEN for at in (start, end)):
        off = _farthest(counter, start, at_start, period, (low_s, high_s)) + _farthest(counter, end, at_end, period, (low_e, high_e))
        if off < estimate.parts["steps"] + estimate.parts["edges"]:
            estimate.parts |= {"steps": off, "edges": 0.0}
    lowest, estimate.peak_w = power_range(counter, channel, start, end)
    if channel.lag_s > 0:
        going_on = busy and lowest is not None and end - start >= MIN_STEPS * channel.lag_s
        highest = estimate.peak_w or 0.0
        powers = (lowest or 0.0, highest) if going_on else (0.0, max(highest, high_s, high_e))
        estimate.parts["lag"] = _late(replace(counter, t=t), (start, end), channel.lag_s + shift, reach, powers, going_on=going_on)
    estimate.coverage = 1.0
    _counter_defects(estimate, counter, channel, (start, end), max(high_s, high_e, estimate.peak_w or 0.0))
    return estimate


def _counter_defects(estimate: SeriesEstimate, counter: Counter, channel: Channel, window: tuple[float, float], highest: float) -> None:
    """Flags and bound of restarts, possible missed wraps, standstill and shortness."""
    start, end = window
    lost = sum(max(0.0, min(b, end) - max(a, start)) for a, b in counter.cuts)
    if lost > 0:
        estimate.flags.add("reset")
        estimate.parts["gaps"] = (channel.max_power_w or highest) * lost
        estimate.coverage = max(0.0, 1.0 - lost / (end - start))
    if any(b > start and a < end for a, b in counter.ambiguous):
        estimate.flags.add("wrap_ambiguous")
    stuck = _stuck(counter, channel, start, end)
    if stuck > 0:
        estimate.flags.add("frozen")
        estimate.parts["gaps"] = estimate.parts.get("gaps", 0.0) + (channel.max_power_w or highest) * stuck
        estimate.coverage = max(0.0, estimate.coverage - stuck / (end - start))
        if stuck >= 0.9 * (end - start):
            estimate.energy_j, estimate.parts = None, {}
            estimate.reason = f"the counter stood still for {stuck:.3g} s"
    if end - start < max(MIN_STEPS * channel.update_period_s, 2 * channel.lag_s):  # else work may be over before any of it is shown
        estimate.flags.add("too_short")


def _half_at(counter: Counter, at: float) -> float:
    """Time uncertainty of the readings on either side of ``at`` [s]."""
    right = min(max(bisect_left(counter.t, at), 1), len(counter.t) - 1)
    return max(counter.half[right - 1], counter.half[right])


def power_range(counter: Counter, channel: Channel, start: float, end: float) -> tuple[float | None, float | None]:
    """Lowest and highest mean power over spans of at least five update periods inside the window [W]."""
    t, energy, span = counter.t, counter.energy, max(5 * channel.update_period_s, 1e-3)
    powers, a = [], bisect_left(t, start)
    for b in range(a + 1, bisect_right(t, end)):
        if t[b] - t[a] >= span:
            powers.append((energy[b] - energy[a]) / (t[b] - t[a]))
            a = b
    return min(powers, default=None), max(powers, default=None)


def _late(counter: Counter, window: tuple[float, float], lag: float, reach: float, powers: tuple[float, float], *, going_on: bool) -> float:
    """``late_bound`` of a counter that is dated back by its age; readings of its power lie ``reach`` [s] apart."""
    around = [[_local_power(counter, None, at + lag * k / LAGS, r) for k in range(LAGS + 1) for r in (reach, lag)] for at in window]
    near = [(min(low for low, _ in each), max(high for _, high in each)) for each in around]
    return late_bound(counter, window, lag, near, powers, going_on=going_on)


def late_bound(
    shown: Counter,
    window: tuple[float, float],
    lag: float,
    near: Sequence[tuple[float, float]],
    powers: tuple[float, float],
    *,
    going_on: bool,
) -> float:
    """How far the energy of ``window`` may be off because what is ``shown`` is late by ``lag`` [s] or less [J].

    What was used in as long before an edge is then shown after it, where power lay between those ``near`` each edge [W]. Of what was
    ``going_on`` until the end, and where there are no more readings, it lay between ``powers`` [W].
    """
    (start, end), t, energy, most = window, shown.t, shown.energy, 0.0
    for late in (lag * k / (4 * LAGS) for k in range(1, 4 * LAGS + 1)):
        seen = 0.0 if going_on else min(late, t[-1] - end)
        more = interpolate(t, energy, end + seen) - interpolate(t, energy, end)
        more -= interpolate(t, energy, start + late) - interpolate(t, energy, start)
        between = sum(_interpolation_bound(t, energy, at, *of) for at, of in zip((start + late, end + seen), near, strict=True))
        most = max(most, *(abs(more + power * (late - seen)) + between for power in powers))
    return most
