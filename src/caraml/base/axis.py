"""Axes of charts: their ends, their ticks, and where on them a value lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

WIDE_RANGE = 20
"""Largest over smallest value from which an axis is logarithmic."""
_TIMES = (60, 300, 900, 3600, 3 * 3600, 6 * 3600, 12 * 3600, *(86400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)))
"""Distances between the ticks of a time axis [s]."""


def wide_range(values: Sequence[float]) -> bool:
    """True for positive values that only a logarithmic axis can show together."""
    return min(values) > 0 and max(values) / min(values) > WIDE_RANGE


@dataclass(frozen=True)
class Axis:
    """Title and scale of an axis."""

    title: str
    log: int | None = None
    """Base of a logarithmic axis."""
    zero: bool = False
    ticks: Sequence[float] = ()
    domain: tuple[float, float] | None = None
    time: bool = False
    """Values are milliseconds since 1970, written as dates."""


class Scale:
    """Where the values of an axis lie along ``length`` pixels, from the far end if ``upward``."""

    def __init__(self, axis: Axis, values: Iterable[float], length: float, upward: bool = False) -> None:
        low, high = _apart(axis, *axis.domain) if axis.domain else _ends(axis, list(values))
        self._of: Callable[[float], float] = (lambda value: math.log(max(value, low))) if axis.log else float
        self._low, self._high, self._length, self._upward = self._of(low), self._of(high), length, upward
        ticks = list(axis.ticks) or (_log_ticks if axis.log else _time_ticks if axis.time else _ticks)(low, high)
        self.ticks = [(self(tick), _date(tick, high - low) if axis.time else _number(tick)) for tick in ticks]

    def __call__(self, value: float) -> float:
        share = (self._of(value) - self._low) / (self._high - self._low)
        return self._length * (1 - share if self._upward else share)


def _ends(axis: Axis, values: list[float]) -> tuple[float, float]:
    """Both ends of an axis that holds ``values``; those of a linear one are round."""
    if axis.zero and not axis.log:
        values = [*values, 0.0]
    if axis.log:
        values = [value for value in values if value > 0]
    low, high = _apart(axis, min(values, default=1.0), max(values, default=1.0))
    if axis.log or axis.time:
        return low, high
    step = _step(low, high, 10)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def _apart(axis: Axis, low: float, high: float) -> tuple[float, float]:
    """Two ends with a distance that can be drawn: equal ones, and ends of a logarithmic axis at or below zero, are moved."""
    if axis.log and low <= 0:
        low, high = (high / 10, high) if high > 0 else (1.0, 1.0)
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high
    if axis.log:
        return low / 2, high * 2
    half = 43_200_000 if axis.time else max(0.5, 1e-6 * abs(high))
    return low - half, high + half


def _step(low: float, high: float, parts: int) -> float:
    """1, 2 or 5 times a power of ten that divides a span into about ``parts``."""
    raw = (high - low) / parts
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next(factor for factor, limit in ((1, 2**0.5), (2, 10**0.5), (5, 50**0.5), (10, math.inf)) if raw / power < limit)


def _ticks(low: float, high: float) -> list[float]:
    step = _step(low, high, 5)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; of a short axis 1, 2 and 5 of each, or the ticks of a linear one."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        found = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(found) > 2:
            return found
    return _ticks(low, high)


def _time_ticks(low: float, high: float) -> list[float]:
    step = 1000 * next((step for step in _TIMES if (high - low) / 1000 / step <= 4), _TIMES[-1])
    return [float(index * step) for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _date(tick: float, span: float) -> str:
    return f"{datetime.fromtimestamp(tick / 1000, UTC):{'%Y-%m-%d' if span > 3 * 86_400_000 else '%m-%d %H:%M'}}"


def _number(value: float) -> str:
    """A tick's number without trailing zeros."""
    return f"{Decimal(f'{value:.6g}').normalize():,f}"
