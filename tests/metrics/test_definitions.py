"""How numbers read."""

from __future__ import annotations

import pytest

from caraml.base.format import count, human, percent, significant
from caraml.metrics.definitions import METRICS, title_of, unit_of


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.00123, "s", "1.23 ms"),
        (12.34, "s", "12.3 s"),
        (5 * 2**30, "B", "5.00 GiB"),
        (1234567.0, "token/s", "1,230,000 token/s"),
        (0.5, "token/s", "0.500 token/s"),
        (3.2e12, "FLOP/s", "3.20 TFLOP/s"),
        (0.0031, "J/token", "3.10 mJ/token"),
        (0.0, "W", "0 W"),
        (None, "W", "–"),
    ],
)
def test_human(value: float | None, unit: str, text: str) -> None:
    assert human(value, unit) == text


def test_significant_never_uses_exponents_for_everyday_sizes() -> None:
    assert significant(999.96) == "1,000" and significant(99.97) == "100"
    assert significant(0.00012) == "0.000120"
    assert "e" in significant(1e-9)


def test_one_of_a_thing_is_no_plural() -> None:
    assert [count(number, "file") for number in (0, 1, 2, 1200)] == ["0 files", "1 file", "2 files", "1,200 files"]
    assert [count(2, noun) for noun in ("batch", "epoch", "loss")] == ["2 batches", "2 epochs", "2 losses"]


def test_percent() -> None:
    assert percent(0.4567) == "45.7 %"
    assert percent(None) == "–"


def test_every_metric_has_its_words() -> None:
    for name, definition in METRICS.items():
        assert definition.title and definition.unit and definition.definition.endswith("."), name
    assert unit_of("energy_per_item", "token") == "J/token"
    assert title_of("items_per_watt_hour", "image") == "images per Wh"
