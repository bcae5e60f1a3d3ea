"""How results over several records are written."""

from __future__ import annotations

import io

import pytest
from record_factory import HOSTILE, make_point, make_record
from rich.console import Console

from caraml.analysis.compare import compare
from caraml.analysis.estimate import Estimate
from caraml.analysis.laws import EfficiencyLimit, Law
from caraml.reference import Side
from caraml.report.comparison import change, comparison_sections, estimated
from caraml.report.scaling import law_text
from caraml.report.section import Section, markdown, terminal


def printed(sections: list[Section], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal(sections))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (Estimate(1.05, None), "+5.0 ± ? %"),
        (Estimate(0.9, 0.01), "-10.0 % (-11.7 to -8.2)"),
        (Estimate(3.0, 0.0), "+200 % (+200 to +200)"),
        (Estimate(1e21, None), "+1.0e+23 ± ? %"),
        (None, "–"),
    ],
)
def test_a_ratio_is_written_as_a_change(ratio: Estimate | None, text: str) -> None:
    assert change(ratio) == text


def test_an_estimate_carries_its_interval() -> None:
    assert estimated(Estimate(1000, 0.01), "token/s") == "1,000 ± 20 token/s"
    assert estimated(Estimate(0.012, None), "s") == "12.0 ± ? ms" and estimated(None, "s") == "–"


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (EfficiencyLimit(0.8, 13.5, 13.0, 15.9, False), "below efficiency 80 % beyond 14 devices (from 13 to 16)"),
        (EfficiencyLimit(0.8, 40.0, 30.0, None, True), "beyond 40 devices (from 30 on), extrapolated beyond what was measured"),
        (EfficiencyLimit(0.8, 40.0, 30.0, 2.8e14, True), "beyond 40 devices (from 30 on), extrapolated beyond what was measured"),
        (EfficiencyLimit(0.8, 2.8e14, None, None, True), "never below efficiency 80 % by this fit (extrapolated)"),
        (
            EfficiencyLimit(0.8, None, 90.0, None, True),
            "never below efficiency 80 % by this fit (extrapolated), but may fall below it beyond 90 devices",
        ),
        (EfficiencyLimit(0.8, 6.3, None, None, False), "below efficiency 80 % beyond 6.3 devices ± ?"),
    ],
)
def test_an_extrapolated_limit_says_so(limit: EfficiencyLimit, words: str) -> None:
    law = Law("Amdahl", 0.02, 0.01, 0.03, 0.5, limit)
    assert words in law_text(law) and law_text(law).startswith("Amdahl: serial share 2.0 % (1.0 to 3.0 %); ")


def test_a_share_that_is_rounding_is_none() -> None:
    law = Law("Amdahl", 1.6e-15, None, None, None, EfficiencyLimit(0.8, 2.8e14, None, None, True))
    assert law_text(law).startswith("Amdahl: serial share 0 ± ? %; ")


def test_a_law_that_does_not_fit_says_so() -> None:
    law = Law("Gustafson", 0.02, 0.01, 0.03, 0.001, EfficiencyLimit(0.8, 13.5, 13.0, 15.9, False))
    assert "which does not describe these rates" in law_text(law)


def test_strange_names_stay_text() -> None:
    sides = [Side(name, (make_record(make_point(benchmark=f"{HOSTILE}|\x1b[31m", software=name)),)) for name in ("a", "b")]
    sections = comparison_sections(compare(*sides))
    text = markdown(sections)
    assert "<script" not in text and "\x1b" not in text and "\\|" in text
    assert "\x1b[31m" not in printed(sections)


def test_nothing_is_cut_off_in_a_narrow_terminal() -> None:
    section = Section("Numbers", ("metric", "verdict"), (("Throughput per device", "indistinguishable"),))
    text = printed([section], 30)
    assert "indistinguishab" in text and "\u2026" not in text and text.replace(" ", "").replace("\n", "").endswith("le")


def test_of_many_numbers_only_those_with_a_verdict_are_listed() -> None:
    sides = []
    for name, slow in (("a", 1.0), ("b", 3.0)):
        records = [
            make_record(make_point(global_batch=4 * n, software=name), step=0.01 * n * (slow if n == 3 else 1)) for n in range(1, 15)
        ]
        sides.append(Side(name, tuple(records)))
    found = compare(*sides)
    titles = [section.title for section in comparison_sections(found)]
    assert [title for title in titles if title.startswith("gpt-mini")] == ["gpt-mini b12 fp32 (runs of A: 1, of B: 1)"]
    everything = [section.title for section in comparison_sections(found, every=True)]
    assert sum(title.startswith("gpt-mini") for title in everything) == 14
    assert any("--all lists them" in note for section in comparison_sections(found) for note in section.notes)
