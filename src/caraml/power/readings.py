"""Which readings of power count: not those beyond any plausible power, nor those by which a sensor that hangs repeats its last one."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from itertools import compress, groupby, pairwise

from caraml.power.counter import MARGIN, max_power
from caraml.power.integral import seen_period, told_anew
from caraml.power.model import HEADLINES, Channel
from caraml.power.store import ReadingSeries

NOTHING = "it showed 0 W or less"

BLOCK = 20
"""So many values in a row tell how often a sensor moves, at the least."""
FEWEST_BLOCKS, LEVELS = 2, 3
"""So many blocks are needed to tell, and each needs this many different values: between two next to each other only a coarse one moves."""
FINE, LOUDER = 5e-4, 1.1
"""A sensor whose step is no more than this share of the power moves with any load, if it did at no more than so many times the power: at
rest, where steps are a larger share, it may be still. So may a coarser one at any time, as at a limit that holds the power."""
MOVES_LESS, BY_CHANCE = 0.85, 1e-4
"""A sensor is taken to move by this factor less often than where it was seen to do so least, and to repeat itself by chance in no more than
this share of windows."""


@dataclass(slots=True)
class ChannelReadings:
    """One channel with its readings around a window, and how many were missed inside it."""

    channel: Channel
    series: ReadingSeries
    missed: int = 0
    error: str | None = None
    interval_s: float = 0.1
    busy: bool = False
    """What ran did so until the end of the window, as it did in it."""
    frozen: bool = False
    """Readings were left out that repeated one power."""


def plausible(measured: ChannelReadings, start: float, end: float, *, alone: bool) -> ChannelReadings:
    """The readings of power without those beyond any plausible power, which count as missed: some drivers and controllers show all ones
    for a moment. Where one does so in the window for longer than it holds one value, the power is that high, and the limit is wrong.
    Nor does an accelerator or a processor that is on draw 0 W or less, as some drivers answer where they cannot; an outlet may. A sensor
    that shows nothing else contradicts the counter beside it, unless it is ``alone``, as where that is silent."""
    series, channel = measured.series, measured.channel
    highest = MARGIN * max_power(channel)
    kept = [value <= highest for value in series.value]
    runs = [list(run) for good, run in groupby(range(len(kept)), kept.__getitem__) if not good] if not all(kept) else []
    held = ((series.t[run[0]], series.t[run[-1]]) for run in runs)
    if any(first <= end and last >= start and last - first > seen_period(series, channel) for first, last in held):
        kept = [True] * len(kept)
    nothing = channel.boundary in HEADLINES and min(series.value, default=1.0) <= 0 and (alone or max(series.value) > 0)
    if nothing:
        kept = [keep and value > 0 for keep, value in zip(kept, series.value, strict=True)]
    return _without(measured, kept, start, end, NOTHING if nothing else None)


def standstill(series: ReadingSeries, channel: Channel, start: float, end: float) -> tuple[int, int] | None:
    """The first and the last reading of one value that the sensor repeats in the window for longer than it would, or ``None``.

    How often it shows a new value is taken from its other readings at as much power or less, in the block of them where it does so least.
    One that was still in any of these may be still here.
    """
    if len(series) < FEWEST_BLOCKS * BLOCK:
        return None
    told = told_anew(series.t, seen_period(series, channel))
    value = [series.value[i] for i in told]
    begins = [0, *(i for i, (a, b) in enumerate(pairwise(value), start=1) if a != b), len(value)]
    runs = [(a, b) for a, b in pairwise(begins) if series.t[told[a]] < end and series.t[told[b - 1]] > start]
    first, last = max(runs, key=lambda run: run[1] - run[0], default=(0, 0))
    blocks = (value[at : at + BLOCK] for part in (range(0, first), range(last, len(value))) for at in part[::BLOCK][: len(part) // BLOCK])
    apart = [block for block in blocks if min(block) <= LOUDER * value[first]]
    step = min((abs(b - a) for block in apart for a, b in pairwise(block) if a != b), default=math.inf)
    if step > FINE * value[first] or len(apart) < FEWEST_BLOCKS or any(len(set(block)) < LEVELS for block in apart):
        return None
    moves = min(sum(a != b for a, b in pairwise(block)) for block in apart) / (BLOCK - 1)
    by_chance = len(value) * (1 - MOVES_LESS * moves) ** (last - first - 1)
    return (told[first], told[last - 1]) if by_chance < BY_CHANCE else None


def moving(measured: ChannelReadings, start: float, end: float) -> ChannelReadings:
    """The readings of power without those by which a sensor repeats a value for longer than it does elsewhere: then it hangs, or what reads
    it answers the last value where it cannot. The first stays."""
    if (still := standstill(measured.series, measured.channel, start, end)) is None:
        return measured
    (first, last), series = still, measured.series
    kept = [not first < i <= last for i in range(len(series))]
    error = f"it repeated {series.value[first]:.4g} W for {series.t[last] - series.t[first]:.3g} s"
    return replace(_without(measured, kept, start, end, None), error=error, frozen=True)


def _without(measured: ChannelReadings, kept: list[bool], start: float, end: float, error: str | None) -> ChannelReadings:
    """Those of the readings that are kept; the others of the window count as missed."""
    if all(kept):
        return measured
    series = ReadingSeries(*(array("d", compress(c, kept)) for c in (measured.series.t, measured.series.half, measured.series.value)))
    lost = measured.series.count(start, end) - series.count(start, end)
    return replace(measured, series=series, missed=measured.missed + lost, error=measured.error or error)


def one_value(measured: ChannelReadings, start: float, end: float) -> bool:
    """Whether one power was shown for half of the window or more: because the load was steady, or by a sensor that hangs."""
    t, value = measured.series.t, measured.series.value
    begins = [t[0], *(t[i] for i, (a, b) in enumerate(pairwise(value), start=1) if a != b), t[-1]]
    return any(min(b, end) - max(a, start) >= (end - start) / 2 for a, b in pairwise(begins))


def beyond_limit(measured: ChannelReadings, start: float, end: float) -> bool:
    """Whether readings of the window that were kept are beyond any plausible power: the sensor, its unit or the limit is wrong."""
    series = measured.series
    inside = series.value[bisect_left(series.t, start) : bisect_right(series.t, end)]
    return max(inside, default=0.0) > MARGIN * max_power(measured.channel)
