"""Printed numbers as intervals."""

from __future__ import annotations

import pytest
from spans import Span, exact, mean, printed_span


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("0.05", 0.045, 0.055),
        ("12", 11.5, 12.5),
        ("1,948.5", 1948.45, 1948.55),
        ("2 984 960", 2984959.5, 2984960.5),
        ("5.60E-01", 0.5595, 0.5605),
        ("10⁶", 1e6, 1e6),
        ("0", -0.5, 0.5),
    ],
)
def test_half_a_unit_of_the_last_digit(text: str, low: float, high: float) -> None:
    span = printed_span(text)
    assert (span.low, span.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("text", ["", "N/A", "nan", "1.2.3"])
def test_what_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        printed_span(text)


def test_arithmetic_holds_every_combination() -> None:
    a, b = Span(1, 2), Span(3, 5)
    assert a + b == Span(4, 7)
    assert a - b == Span(-4, -1)
    assert a * b == Span(3, 10)
    assert a * -1 == Span(-2, -1)
    quotient = a / b
    assert (quotient.low, quotient.high) == (pytest.approx(0.2), pytest.approx(2 / 3))
    assert mean([a, b]) == Span(2, 3.5)
    with pytest.raises(ZeroDivisionError):
        a / Span(-1, 1)


def test_numbers_agree_if_their_roundings_can() -> None:
    assert printed_span("0.35").overlaps(exact(0.345))
    assert not printed_span("0.35").overlaps(exact(0.344))
    assert printed_span("0.35").overlaps(exact(0.33), relative=0.05)
    assert not printed_span("0.35").overlaps(exact(0.32), relative=0.05)
