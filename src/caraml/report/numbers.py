"""How a number with its uncertainty is written: ``1,234 ± 5 token/s``."""

from __future__ import annotations

import math

from caraml.results.record import Metric
from caraml.units import GIB, METRICS, significant

SHARES = frozenset(
    {"mfu", "mfu_measured", "hfu", "rank_imbalance", "share_of_limit", *(name for name in METRICS if name.endswith("_share"))}
)
"""Metrics of unit 1 that people read as a percentage."""
COUNTS = frozenset({"steps"})

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_PREFIXED = ("s", "J", "W", "FLOP/s", "B/s", "J s", "Wh")
PERCENT_FROM = 100.0
MOST_DECIMALS = 3
"""From this half-width on, or with more decimals than that, a percentage is shorter and clearer than the absolute figure."""

WIDE, LOPSIDED = 0.1, 1.2
"""Half-width over value, and longer over shorter side, from which both ends of an interval are written."""


def scaled(value: float, unit: str) -> tuple[float, str]:
    """The factor to divide by and the unit to write so that ``value`` reads well: ``(1e-3, "ms")`` for 0.012 s."""
    if unit == "B":
        return GIB, "GiB"
    if unit in _PREFIXED or unit.startswith("J/"):
        for factor, prefix in _PREFIXES:
            if abs(value) >= factor:
                return factor, f"{prefix}{unit}"
    return 1.0, "" if unit == "1" else unit


def counted(value: float, unit: str) -> tuple[float, str]:
    """Like :func:`scaled`, and for counts a power of ten that leaves at most four digits before the point."""
    factor, written = scaled(value, unit)
    if factor != 1.0 or value < 1e4:
        return factor, written
    return (1e6, f"10⁶ {unit}") if value >= 1e7 else (1e3, f"10³ {unit}")


def half_width(metric: Metric) -> float | None:
    """The larger distance from the value to an end of its interval, in the metric's unit."""
    if metric.value is None or metric.low is None or metric.high is None:
        return None
    return max(metric.value - metric.low, metric.high - metric.value)


def written(name: str, metric: Metric | None) -> str:
    """A metric as people read it, with its interval and, apart from it, its bound, where it has them; ``–`` if unknown."""
    if metric is None or metric.value is None:
        return "–"
    if not metric.bound:
        return _with_interval(name, metric)
    factor, unit = _scale(name, metric.value, metric.unit)
    bound = metric.bound / factor
    return f"{_with_interval(name, metric)}, ± at most {_rounded(bound, _error_digits(bound))} {unit}".rstrip()


def _with_interval(name: str, metric: Metric) -> str:
    assert metric.value is not None
    half = half_width(metric)
    if not half:
        return plain(name, metric.value, metric.unit)
    if _lopsided(metric):
        return _with_ends(name, metric)
    factor, unit = _scale(name, metric.value, metric.unit)
    value, half = metric.value / factor, half / factor
    decimals = max(0, _error_digits(half) - 1 - math.floor(math.log10(half)))
    if (half >= PERCENT_FROM or decimals > MOST_DECIMALS) and value and unit != "%":
        share = 100 * half / abs(value)
        return f"{_rounded(value, 4)} ± {_rounded(share, _error_digits(share))} % {unit}".rstrip()
    return f"{value:,.{decimals}f} ± {half:,.{decimals}f} {unit}".rstrip()


def _lopsided(metric: Metric) -> bool:
    """True where ± would mislead: a wide interval whose ends lie at different distances from the value."""
    assert metric.value is not None and metric.low is not None and metric.high is not None
    below, above = metric.value - metric.low, metric.high - metric.value
    return max(below, above) > WIDE * abs(metric.value) and max(below, above) > LOPSIDED * min(below, above)


def _with_ends(name: str, metric: Metric) -> str:
    assert metric.value is not None and metric.low is not None and metric.high is not None
    factor, unit = _scale(name, metric.value, metric.unit)
    value, low, high = (_rounded(number / factor, 2) for number in (metric.value, metric.low, metric.high))
    return f"{value} ({low} to {high}) {unit}".rstrip()


def plain(name: str, value: float | None, unit: str, digits: int | None = None) -> str:
    """A number without uncertainty."""
    if value is None:
        return "–"
    if name in COUNTS:
        return f"{value:,.0f}"
    factor, unit = _scale(name, value, unit)
    return f"{_rounded(value / factor, digits or _digits(value / factor))} {unit}".rstrip()


def count(number: int, noun: str) -> str:
    """``1 device``, ``1,024 devices``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def interval(name: str, metric: Metric) -> str | None:
    """Both ends of a metric's interval, or ``None`` if it has none."""
    if metric.low is None or metric.high is None or metric.value is None:
        return None
    factor, unit = _scale(name, metric.value, metric.unit)
    low, high = metric.low / factor, metric.high / factor
    if high == low:
        return f"{_rounded(low, 4)} {unit}".rstrip()
    decimals = max(0, 1 - math.floor(math.log10(abs(high - low))))  # two digits of the difference
    return f"{low:,.{decimals}f} to {high:,.{decimals}f} {unit}".rstrip()


def _scale(name: str, value: float, unit: str) -> tuple[float, str]:
    return (0.01, "%") if name in SHARES else scaled(value, unit)


def _rounded(value: float, digits: int) -> str:
    """Rounded before it is written, so that 99.99 becomes 100 and not 100.0."""
    return significant(float(f"{value:.{digits}g}"), digits)


def _digits(value: float) -> int:
    """Three significant digits, but never a rounded thousand: 1,234 and not 1,230."""
    return 3 if abs(value) < 999.5 else 4


def _error_digits(half: float) -> int:
    """One digit of an uncertainty, two if the first is a 1, as is usual in physics."""
    return 2 if half / 10 ** math.floor(math.log10(half)) < 1.95 else 1
