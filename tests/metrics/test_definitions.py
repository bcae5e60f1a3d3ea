"""How numbers read."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from caraml.base.errors import UnknownNameError
from caraml.base.format import count, human, percent, significant, some, spell_out
from caraml.metrics import model
from caraml.metrics.model import METRICS, Metric, OwnMetric, StatedMetric, check_stated, definition_of, see_known, title_of, unit_of
from caraml.results.record import Record
from tests.report.record_factory import make_record


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


def test_the_first_of_many_are_named_and_the_others_counted() -> None:
    assert [some(["a", "b", "c"][:number], 2) for number in range(4)] == ["", "a", "a, b", "a, b and 1 more"]
    assert some([*"abc"], 1, "; ") == "a; and 2 more" and some([*"abc"], 1, "\n") == "a\nand 2 more"


def test_percent() -> None:
    assert percent(0.4567) == "45.7 %"
    assert percent(None) == "–"


UNITS = {"1", "s", "J", "W", "Wh", "VA", "VAh", "B", "FLOP", "dB", "bit", "pixel", "{item}"}
"""What units are made of, as products (``J s``) and quotients (``FLOP/s``)."""


def test_every_metric_has_its_words() -> None:
    for name, definition in METRICS.items():
        assert definition.title and definition.definition.endswith(".") and "  " not in definition.definition, name
        assert {*re.split("[ /]", definition.unit)} <= UNITS, f"{name}: {definition.unit} is spelt wrongly, or UNITS lacks a part of it"
        assert definition.better != "unknown", f"{name}: of CARAML's own metrics it is known which direction is better"
    text = Path(model.__file__).with_name("metrics.toml").read_text(encoding="utf-8")
    assert len(METRICS) == text.count("title = "), "a name stands under two headings"
    assert unit_of("energy_per_item", "token") == "J/token"
    assert title_of("items_per_watt_hour", "image") == "images per Wh"


def own(unit: str = "GB/s", better: str | None = "higher") -> Record:
    """A record with the metric ``triad``; ``better=None``: as versions before wrote it, without a definition."""
    said = {} if better is None else {"triad": OwnMetric(unit=unit, better=better, definition="Best rate.", source="the suite")}  # type: ignore[arg-type]
    return make_record(metrics={"triad": Metric(value=1.0, unit=unit)}, definitions=said)


@pytest.mark.parametrize(
    ("records", "unit", "better", "words", "source"),
    [
        ([own()], "GB/s", "higher", "Best rate. Higher is better.", "the suite"),
        ([own(), own(better=None)], "GB/s", "higher", "Best rate. Higher is better.", "the suite"),
        ([own(better="unknown")], "GB/s", "unknown", "Best rate. Direction unknown", "the suite"),
        ([own(), own(better="lower")], "GB/s", "unknown", "Best rate. Direction unknown", "the suite"),
        ([own(), own("MB/s")], "GB/s or MB/s", "higher", "only numbers of one unit are averaged or compared: GB/s, MB/s.", "the suite"),
        ([own(better=None)], "GB/s", "unknown", "no definition of this metric", "not described"),
    ],
)
def test_own_metrics_are_what_their_records_say(records: list[Record], unit: str, better: str, words: str, source: str) -> None:
    found = definition_of("triad", records)
    assert (found.title, found.unit, found.better, found.source) == ("triad", unit, better, source) and words in found.definition
    assert definition_of("throughput", records) is METRICS["throughput"]
    see_known("triad", records)
    with pytest.raises(UnknownNameError, match="unknown metric 'traid'") as refused:
        see_known("traid", records)
    assert refused.value.guess == "triad"


@pytest.mark.parametrize(
    ("name", "stated", "fault"),
    [
        ("throughput", {"unit": "token/s"}, "unit 'image/s'"),
        ("throughput", {"unit": "image/s", "better": "lower"}, "another name"),
        ("throughput", {"unit": "image/s", "definition": "mine"}, "another name"),
        ("<b>", {"unit": "1"}, "names of small letters"),
        ("x", {"unit": "\x1b[31m"}, "control characters"),
        ("x", {"unit": "1", "definition": "a\nb"}, "control characters"),
        ("x", {"unit": "m" * 41}, "at most 40"),
        ("x", {"unit": "1", "better": "up"}, "'higher'"),
    ],
)
def test_what_is_no_metric_of_one_s_own_is_refused(name: str, stated: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_stated({name: StatedMetric(**stated)}, "image")
    check_stated({"throughput": StatedMetric(unit="image/s", better="higher"), "x": StatedMetric(unit="<m>")}, "image")


@pytest.mark.parametrize(
    ("encoding", "written"), [("ascii", "8 +- 1 us - ? ?"), ("latin-1", "8 ± 1 µs - ? ?"), ("utf-8", "8 ± 1 µs – \u2603 ?")]
)
def test_what_an_encoding_lacks_is_spelled_out(encoding: str, written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of results ended with an error of Python where a locale was not UTF-8, as on some clusters."""
    kept = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(kept, encoding=encoding))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    spell_out()
    print("8 ± 1 µs – \u2603 \udcff", flush=True)
    assert kept.getvalue().decode(encoding) == f"{written}\n"
