"""Printed numbers as all values that round to their digits, and arithmetic with these."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from caraml.reference import Reference, digits


@dataclass(frozen=True)
class Span:
    """All values between ``low`` and ``high``, both included."""

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __sub__(self, other: Span) -> Span:
        return Span(self.low - other.high, self.high - other.low)

    def __mul__(self, other: Span | float) -> Span:
        ends = [a * b for a in (self.low, self.high) for b in _ends(other)]
        return Span(min(ends), max(ends))

    def __truediv__(self, other: Span | float) -> Span:
        ends = _ends(other)
        if min(ends) <= 0 <= max(ends):
            raise ZeroDivisionError(f"division by {other}")
        return self * Span(1 / max(ends), 1 / min(ends))

    @property
    def middle(self) -> float:
        """The value halfway."""
        return (self.low + self.high) / 2

    def overlaps(self, other: Span, relative: float = 0.0) -> bool:
        """Whether a value of one is within ``relative`` of a value of the other. Float rounding never decides."""
        slack = max(relative, 1e-9) * max(abs(self.middle), abs(other.middle))
        return self.low - slack <= other.high and other.low - slack <= self.high


def _ends(number: Span | float) -> tuple[float, float]:
    return (number.low, number.high) if isinstance(number, Span) else (number, number)


def printed_span(text: str) -> Span:
    """Values that round to a printed number: half a unit of its last digit to both sides. Raises ``ValueError`` if there is no number."""
    number, half = digits(text)
    return Span(float(number - half), float(number + half))


def exact(value: float) -> Span:
    """A count, or a number that was not rounded."""
    return Span(value, value)


def mean(spans: Iterable[Span]) -> Span:
    """Mean of numbers that were each rounded by themselves."""
    found = list(spans)
    return Span(math.fsum(one.low for one in found) / len(found), math.fsum(one.high for one in found) / len(found))


def span_of(row: Reference) -> Span:
    """All values in a row's ``unit`` that round to the printed digits. Raises ``ValueError`` if there is no number."""
    if row.value is None:
        raise ValueError(f"{row.source}, {row.table}: {row.metric} has no value")
    span = printed_span(row.printed)
    middle = (span.low + span.high) / 2
    return span * (row.value / middle) if middle else span
