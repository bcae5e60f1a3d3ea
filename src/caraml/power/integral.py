"""From readings of power to the energy of a window, with a bound: by integration.

Power is integrated by the trapezoid through the readings, closed at both edges by interpolation. With one reading at a random
instant of every sampling interval (stratified sampling) the weight of a reading does not depend, on average, on where in
its interval it fell, so the sum has no bias for any load, also not for one that repeats with the sampling interval.
Its scatter is estimated from the readings themselves.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import median

from caraml.power.counter import CONTROLLER_LAG_S, MIN_STEPS, Counter, late_bound, power_range
from caraml.power.model import Channel
from caraml.power.store import ReadingSeries, SeriesEstimate, interpolate, silent, usable_shift

MIN_READINGS = 10
"""A window with fewer readings than this, or fewer updates of the sensor, is too short for its number to be used."""

SIGMAS = 2.1
"""Half-width of the sampling part in standard deviations: 95 % of a normal distribution is 1.96; the rest is for the error
of the variance, which is itself estimated."""

QUIET, NEAR = 0.25, 3
"""A change is a lone step if its neighbours, so many on either side, are below this share of it."""

HIDDEN_SWING = 1.0
"""What is not seen (inside the window of an averaging sensor, between very few readings) is taken to change by at least
this share of the highest power that was."""

MIN_MEAN_WINDOWS = 5
"""A window that is not longer than this many averaging times of the sensor is too short: its edges are most of it."""

REPEATED = 2
"""A value that is read so often in a row, usually, is held by the sensor and not by the load."""

FEW_HELD, FEW_VALUES = 3, 10
"""Fewer values than this that came and went by a jump tell little, and of a sensor that showed fewer in all there are no more."""

SLOWEST_S = 60.0
"""No sensor of which nobody publishes it is taken to hold a value for longer [s]; controllers of nodes take up to a minute."""

HELD_SHARE = 0.75
"""Share of the times for which a sensor was seen to hold a value that are no longer than its update period is taken to be. Two values that
are equal by chance look like one that was held for twice as long."""

WHOLE = 0.5
"""A sensor that averages over longer than this share of a window may not have shown all of the load when it ended."""

NOISE_WEIGHT = 0.7
"""Variance of the sum per squared residual, for readings that do not depend on each other. A residual is a reading minus
the line between its neighbours and has 3/2 of the variance of a reading; the weights of stratified instants add 1/24:
(1 + 1/24) / (3/2)."""


def _lone_steps(changes: list[float]) -> list[bool]:
    """For each change between readings: is it a single jump between two quiet stretches?"""
    sizes = [abs(change) for change in changes]
    near = (sizes[max(i - NEAR, 0) : i] + sizes[i + 1 : i + 1 + NEAR] for i in range(len(sizes)))
    return [size > 0 and all(other <= QUIET * size for other in others) for size, others in zip(sizes, near, strict=True)]


def told_anew(t: Sequence[float], period: float) -> list[int]:
    """Indices of the readings that surely are new values: a sensor that holds its value for ``period`` [s] repeats it to whoever asks
    sooner, and with repeats the scatter would seem smaller than it is. The first reading and the last are always among them."""
    kept, last = [0], t[0]
    for i in range(1, len(t) - 1):
        if t[i] - last >= period:
            kept.append(i)
            last = t[i]
    return [*kept, len(t) - 1]


def sampling_bound(t: list[float], power: list[float], period: float = 0.0) -> float:
    """How far the trapezoid sum may be from the integral [J], estimated from the readings at ``t`` [s].

    Of a sensor that holds its value for ``period`` [s], each value counts once. Three cases. A lone step of size D happened somewhere
    between two readings a gap g apart, and the trapezoid puts it in the middle: a uniform error, variance D² g² / 12 (plus D² period² / 12
    if the sensor holds its value). Everything else is taken as noise around the line between neighbours, weighted for independent readings.
    Residuals that all have one sign are curvature, which the trapezoid cuts off: for a parabola a sixth of their weighted sum with even
    gaps and a quarter with stratified ones.
    """
    weight = NOISE_WEIGHT
    if period > 0:
        told = told_anew(t, period)
        # Those that are kept lie up to an interval further apart than the values are, and stand for as many as were seen.
        weight *= min(max(period * (len(told) - 1) / (t[-1] - t[0]), (len(told) - 1) / (len(t) - 1)), 1.0)
        t, power = [t[i] for i in told], [power[i] for i in told]
    changes = [b - a for a, b in pairwise(power)]
    gaps = [b - a for a, b in pairwise(t)]
    lone = _lone_steps(changes)
    variance = sum(change**2 * (gap**2 + period**2) / 12 for change, gap, alone in zip(changes, gaps, lone, strict=True) if alone)
    curvature = 0.0
    for i in range(1, len(power) - 1):
        width = (t[i + 1] - t[i - 1]) / 2
        if lone[i - 1] or lone[i] or width <= 0:
            continue
        share = gaps[i - 1] / (2 * width)
        residual = power[i] - (power[i - 1] + share * (power[i + 1] - power[i - 1]))
        variance += weight * residual**2 * width**2
        curvature += residual * width
    few = 1 + 2 / len(power)  # a variance that comes from few readings is uncertain itself
    return SIGMAS * few * variance**0.5 + abs(curvature) / 4


def seen_period(series: ReadingSeries, channel: Channel) -> float:
    """Update period [s] that the readings show where that of the data sheet is a guess; the declared one where they do not tell.

    A load that is steady for the sensor's resolution repeats, too, so only values count that came and went by a jump; and they tell nothing
    where most values were read only once, since then the sensor has a new one whenever it is asked. Where no value came or went by a jump,
    one that is asked holds each for no longer than the shortest time between two changes, and where there were no two, for as long as one
    stood; of rows that come by themselves each is a value.
    """
    if not channel.period_guessed or len(series) < 2:
        return channel.update_period_s
    begins = [i for i, (a, b) in enumerate(pairwise(series.value), start=1) if a != b]
    ends = [0, *begins, len(series) - 1]
    jumped = {i for i in begins if abs(series.value[i] - series.value[i - 1]) > 2 * channel.resolution}
    spans = [(a, b) for a, b in pairwise(begins) if a in jumped and b in jumped]
    if len(spans) < FEW_HELD and len(begins) < FEW_VALUES:  # then also those that came or went by one, or are cut at an end of the readings
        spans = [(a, b) for a, b in pairwise(ends) if a in jumped or b in jumped]
    held = [(series.t[b] - series.t[a], b - a) for a, b in spans]
    if not held and not channel.spacing_s:
        stood = [series.t[b] - series.t[a] for a, b in pairwise(ends)]
        return max(channel.update_period_s, min(min(stood[1:-1], default=max(stood)), SLOWEST_S))
    if not held or median(count for _, count in held) < REPEATED:
        return channel.update_period_s
    times = sorted(time for time, _ in held)
    return max(channel.update_period_s, times[int(HELD_SHARE * len(times))])


def averaged_bound(series: ReadingSeries, channel: Channel, start: float, end: float, *, busy: bool = False) -> float:
    """How far the energy of the window may be off because a controller averages over more than the lag that it is taken to have [J].

    A mean over W seconds takes W / 2 for the middle half of a step, by which it is late at the edges, and in any time dt changes by no more
    than dt / W of what power does, which is taken to be twice what is shown. So W is no more than twice the shortest time in which readings
    went through the middle half of their range, or would have gone through all of it as they do in a lone jump; where the window may be all
    that moved them, nobody knows, and single values may be false. ``busy``: what ran did so until the end, so what is shown then tells
    nothing more of it.
    """
    if channel.lag_s < CONTROLLER_LAG_S:
        return 0.0
    t, value = series.t, _lasting(series, channel.update_period_s)
    low, high = min(value), max(value)
    quarter = (high - low) / 4
    outside = [(i, v > high - quarter) for i, v in enumerate(value) if not low + quarter <= v <= high - quarter]
    passed = [t[j] - t[i] for (i, above), (j, below) in pairwise(outside) if above != below]
    shortest = min([*passed, *_jumps(t, value, channel.update_period_s, high - low)], default=0.0)
    longest = min(SLOWEST_S if 2 * shortest > WHOLE * (end - start) else 2 * (shortest - channel.mean_window_s), SLOWEST_S)
    low, high = series.extremes(start - longest, end if busy else end + longest) or (low, high)
    return longest * (high - low) if longest > channel.lag_s else 0.0


def _lasting(series: ReadingSeries, period: float) -> list[float]:
    """The values; in place of one unlike both those a ``period`` [s] before and after it, which may be false, the nearer of them."""
    t, value = series.t, series.value
    before = (value[max(bisect_right(t, at - period) - 1, 0)] for at in t)
    after = (value[min(bisect_left(t, at + period), len(t) - 1)] for at in t)
    return [sorted(three)[1] for three in zip(before, value, after, strict=True)]


def _jumps(t: Sequence[float], value: Sequence[float], period: float, swing: float) -> Iterator[float]:
    """Of each change between three values and the next three that are all above or below them, the time in which power would go through
    its ``swing`` [W] as fast as there [s]. Values are up to ``period`` [s] old."""
    told = told_anew(t, period)
    for i in range(NEAR, len(told) - NEAR + 1):
        before, after = ([value[k] for k in told[at : at + NEAR]] for at in (i - NEAR, i))
        if (apart := max(min(after) - max(before), min(before) - max(after))) > 0:
            jump, k = max((abs(value[k] - value[k - 1]), k) for k in range(told[i - 1] + 1, told[i] + 1))
            yield (t[k] - t[k - 1] + period) * swing / min(jump, apart)


def _areas(t: Sequence[float], power: Sequence[float]) -> Iterator[float]:
    """Integrals of the straight lines from each point to the next [J]."""
    return ((b - a) * (p + q) / 2 for (a, b), (p, q) in zip(pairwise(t), pairwise(power), strict=True))


def trapezoid(t: Sequence[float], power: Sequence[float]) -> float:
    """Integral of the straight lines through the points [J]."""
    return sum(_areas(t, power))


def power_energy(
    series: ReadingSeries, channel: Channel, start: float, end: float, interval: float, *, busy: bool = False
) -> SeriesEstimate:
    """Energy between ``start`` and ``end`` by integration of power sampled about every ``interval`` seconds.

    ``busy``: what ran did so until ``end``, as it did in the window.
    Parts of the bound: ``sampling`` (see ``sampling_bound``), ``lag`` (age and averaging at the edges, and ``_late``), ``timing``,
    ``resolution``, ``gaps`` (missing readings, at the lowest to the highest power seen), ``blind`` (time that a
    part-time sensor does not observe).
    """
    estimate = SeriesEstimate()
    channel = replace(channel, update_period_s=seen_period(series, channel))
    why = silent(series, start, end)
    if why or len(series) < 2:
        if seen := estimate.seen_in_part(series.t, start, end, why or "the sensor gave one reading only"):
            t, power = _closed(series, *seen)
            estimate.partial_j, estimate.peak_w = trapezoid(t, power), max(power)
        return estimate
    shift = usable_shift(channel.age_s, series, end)
    dated = ReadingSeries(array("d", (t - shift for t in series.t)), series.half, series.value)
    t, power = _closed(dated, start, end)
    duration, low, high = end - start, min(power), max(power)
    estimate.energy_j, estimate.peak_w = trapezoid(t, power), high

    window = channel.mean_window_s
    near = max(window, channel.update_period_s, interval)
    ranges = [hi - lo for lo, hi in (dated.extremes(at - near, at + near) or (0.0, 0.0) for at in (start, end))]
    late, held = channel.age_s - shift, channel.update_period_s / 2
    estimate.parts = {
        "sampling": sampling_bound(t, power, channel.update_period_s),
        "lag": sum(max(r, HIDDEN_SWING * high) * window / 8 + r * (held + late) for r in ranges)
        + max(
            _late(dated, channel, (start, end), max(channel.update_period_s, interval), busy=busy),
            averaged_bound(dated, channel, start, end, busy=busy),
        ),
        "timing": (high - low) * max(dated.half[max(bisect_right(dated.t, start) - 1, 0) : bisect_left(dated.t, end) + 1]),
        "resolution": channel.resolution / 2 * duration,
    }
    if _shown(series, channel, start, end) < MIN_READINGS:
        # Too few readings to estimate their scatter from: assume that the load moves as much as it may inside one interval.
        around = dated.extremes(start - near, end + near) or (low, high)
        swing = max(around[1] - around[0], HIDDEN_SWING / 2 * high)
        estimate.parts["sampling"] = max(estimate.parts["sampling"], swing * duration)
    _power_defects(estimate, dated, channel, (start, end), interval=interval)
    if estimate.energy_j < 0:
        estimate.reason = f"the sensor showed {estimate.energy_j / duration:.3g} W on average, and nothing draws less than 0"
        estimate.energy_j, estimate.peak_w, estimate.parts = None, None, {}
    return estimate


def _late(series: ReadingSeries, channel: Channel, window: tuple[float, float], step: float, *, busy: bool) -> float:
    """What a sensor of power that may be late beside its age hides, as a counter does [J]; it has a new value about every ``step`` [s]."""
    if not channel.lag_s:
        return 0.0
    start, end = window
    shown = Counter(series.t, series.half, array("d", accumulate(_areas(series.t, series.value), initial=0.0)))
    lowest, highest = power_range(shown, replace(channel, update_period_s=step), start, end)
    near = [series.extremes(at, at + channel.lag_s) or (0.0, 0.0) for at in window]
    going_on = busy and lowest is not None and end - start >= MIN_STEPS * channel.lag_s
    powers = (lowest or 0.0, highest or 0.0) if going_on else (0.0, max(highest or 0.0, *(high for _, high in near)))
    bound = late_bound(shown, window, channel.lag_s, near, powers, going_on=going_on)
    if not channel.period_guessed:
        return bound
    # Nor does anybody publish whether it averages, and an average is late by several times at once.
    (low, high), *ends = (series.extremes(at - channel.lag_s, at + channel.lag_s) or (0.0, 0.0) for at in window)
    lowest, highest = powers if going_on else ends[0]
    return max(bound, channel.lag_s * max(highest - low, high - lowest))


def _shown(series: ReadingSeries, channel: Channel, start: float, end: float) -> float:
    """How many values the sensor showed in the window: as many as were read, and no more than it has updates."""
    updates = round((end - start) / channel.update_period_s, 6) if channel.update_period_s > 0 else math.inf
    return min(series.count(start, end), updates)


def _closed(series: ReadingSeries, start: float, end: float) -> tuple[list[float], list[float]]:
    """The readings strictly inside the window, with interpolated points at its edges."""
    inside = slice(bisect_right(series.t, start), bisect_left(series.t, end))
    first, last = (interpolate(series.t, series.value, at) for at in (start, end))
    return [start, *series.t[inside], end], [first, *series.value[inside], last]


def _power_defects(
    estimate: SeriesEstimate, series: ReadingSeries, channel: Channel, window: tuple[float, float], *, interval: float
) -> None:
    """Flags and bound of missing readings, of sensors that are blind in between or average, and of shortness."""
    start, end = window
    low, high = min(series.value), max(series.value)  # also of long before, since nobody knows what a gap hides
    longest = 3 * max(interval, channel.update_period_s, channel.spacing_s)
    times = series.t[max(bisect_right(series.t, start) - 1, 0) : bisect_left(series.t, end) + 1]
    gaps = [(max(a, start), min(b, end)) for a, b in pairwise(times) if b - a > longest]
    missing = sum(b - a for a, b in gaps)
    if missing > 0:
        middle = [(interpolate(series.t, series.value, (a + b) / 2), b - a) for a, b in gaps]
        estimate.parts["gaps"] = sum(max(high - mean, mean - low) * length for mean, length in middle)
    estimate.coverage = max(0.0, 1.0 - missing / (end - start))
    if estimate.coverage < 0.99:
        estimate.flags.add("partial_coverage")
        estimate.reason = f"no reading during {missing:.3g} s of {end - start:.3g} s"
    if channel.duty < 1:
        near = max(10 * channel.update_period_s, 2 * max(channel.mean_window_s, channel.lag_s), 4 * interval)
        low, high = series.extremes(start - near, end + near) or (low, high)
        estimate.parts["blind"] = (high - low) / 2 * (1 - channel.duty) * (end - start)
    if channel.duty < 1 or (channel.kind == "power_instant" and channel.update_period_s > 0):
        # The sensor's own instants are regular, and no choice of ours makes them random: a load that repeats with them
        # looks constant, so there is nothing in the readings that could tell.
        estimate.flags.add("aliasing_possible")
    if channel.kind == "power_mean":
        estimate.flags.add("mean_sensor")
    shortest = max(MIN_MEAN_WINDOWS * channel.mean_window_s, 2 * channel.lag_s)
    hidden = 0 <= (estimate.energy_j or 0.0) < estimate.parts["lag"]
    if _shown(series, channel, start, end) < MIN_READINGS or end - start < shortest or hidden:
        estimate.flags.add("too_short")
