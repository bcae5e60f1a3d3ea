"""How a number with its uncertainty is written, ``1,234 ± 5 token/s``, and nested settings as lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pydantic import JsonValue

from caraml.analysis.observations import is_known_kind
from caraml.base.format import prefixed, significant
from caraml.metrics.definitions import METRICS
from caraml.metrics.model import Metric

PERCENT_FROM = 100.0
MOST_DECIMALS = 3
"""From this half-width on, or with more decimals than that, a percentage is shorter and clearer than the absolute figure."""

WIDE, LOPSIDED = 0.1, 1.2
"""Half-width over value, and longer over shorter side, from which both ends of an interval are written."""


def counted(value: float, unit: str) -> tuple[float, str]:
    """Like :func:`~caraml.base.format.prefixed`, and for counts a power of ten that leaves at most four digits before the point."""
    factor, written = prefixed(value, unit)
    if factor != 1.0 or value < 1e4:
        return factor, written
    return (1e6, f"10⁶ {unit}") if value >= 1e7 else (1e3, f"10³ {unit}")


def half_width(metric: Metric) -> float | None:
    """The larger distance from the value to an end of its interval, in the metric's unit."""
    if metric.value is None or metric.low is None or metric.high is None:
        return None
    return max(metric.value - metric.low, metric.high - metric.value)


def written(name: str, metric: Metric | None) -> str:
    """A metric as people read it, with its interval and, apart from it, its bound, where it has them; ``–`` if unknown.

    A rate, time or energy of which neither is known has ``± ?``: its digits look better known than they are.
    """
    if metric is None or metric.value is None:
        return "–"
    if not metric.bound:
        return _with_interval(name, metric) if half_width(metric) is not None or not is_known_kind(name) else _open(name, metric)
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


def _open(name: str, metric: Metric) -> str:
    """Three digits at most, and that nobody knows how many of them hold."""
    assert metric.value is not None
    factor, unit = _scale(name, metric.value, metric.unit)
    return f"{_rounded(metric.value / factor, 3)} ± ? {unit}".rstrip()


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
    if _shown(name) == "count":
        return f"{value:,.0f}"
    factor, unit = _scale(name, value, unit)
    return f"{_rounded(value / factor, digits or _digits(value / factor))} {unit}".rstrip()


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


def _shown(name: str) -> str:
    return METRICS[name].shown if name in METRICS else "plain"


def _scale(name: str, value: float, unit: str) -> tuple[float, str]:
    return (0.01, "%") if _shown(name) == "percent" else prefixed(value, unit)


def _rounded(value: float, digits: int) -> str:
    """Rounded before it is written, so that 99.99 becomes 100 and not 100.0."""
    return significant(float(f"{value:.{digits}g}"), digits)


def _digits(value: float) -> int:
    """Three significant digits, but never a rounded thousand: 1,234 and not 1,230."""
    return 3 if abs(value) < 999.5 else 4


def _error_digits(half: float) -> int:
    """One digit of an uncertainty, two if the first is a 1, as is usual in physics."""
    return 2 if half / 10 ** math.floor(math.log10(half)) < 1.95 else 1


def flat(values: Mapping[str, JsonValue], prefix: str = "") -> list[tuple[str, str]]:
    """``{"cpu": {"cores": 8}}`` as ``("cpu.cores", "8")``.

    What is null or empty is left out; the elements of a list of tables are numbered.
    """
    lines: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
            lines += flat({str(index): element for index, element in enumerate(value)}, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            lines.append((f"{prefix}{name}", ", ".join(map(str, value)) if isinstance(value, list) else str(value)))
    return lines
