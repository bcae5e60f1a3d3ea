"""Charts: round ticks that hold every value, labels that do not touch, places in proportion, and texts that stay texts."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from caraml.base.axis import Scale
from caraml.base.chart import HEIGHT, WIDTH, Axis, Drawing, Line, bars, cells, curves, dots, marks


def texts(drawing: Drawing) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawing.svg).iter() if element.tag.endswith("text")]


def line(points: list[tuple[float, float]], x: Axis | None = None, y: Axis | None = None, **more: bool) -> Drawing:
    return curves([Line("one", points, "told")], x or Axis("x"), y or Axis("y"), "Title", **more)


def path(drawing: Drawing) -> str:
    (found,) = re.findall(r'data-tip="told" d="([^"]*)"', drawing.body)
    return str(found)


@pytest.mark.parametrize(("high", "labels"), [(10.0, ["0", "2", "4", "6", "8", "10"]), (0.37, ["0", "0.1", "0.2", "0.3", "0.4"])])
def test_ticks_are_round(high: float, labels: list[str]) -> None:
    assert texts(line([(0, 0), (1, high)], y=Axis("y", zero=True)))[: len(labels)] == labels


def test_a_linear_axis_ends_at_round_numbers() -> None:
    drawing = line([(0, 0), (10, 47)], y=Axis("watts", zero=True))
    assert texts(drawing)[:6] == ["0", "10", "20", "30", "40", "50"]
    assert path(drawing) == f"M0,{HEIGHT}L{WIDTH},{HEIGHT * (1 - 47 / 50):.1f}"


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(0.013, 730.0, ["0.1", "1", "10", "100"]), (3.0, 60.0, ["5", "10", "20", "50"]), (40.0, 47.0, ["40", "41", "42"])],
)
def test_a_logarithmic_axis_has_few_round_ticks(low: float, high: float, labels: list[str]) -> None:
    drawing = line([(1, low), (2, high)], y=Axis("y", log=10))
    assert texts(drawing)[: len(labels)] == labels
    assert path(drawing) == f"M0,{HEIGHT}L{WIDTH},0"


def test_ticks_that_are_asked_for_are_where_they_belong() -> None:
    drawing = line([(1, 0), (8, 1)], x=Axis("devices", log=2, ticks=[1, 2, 4, 8], domain=(1, 8)))
    places = re.findall(r'<text x="([\d.]+)" y="207" text-anchor="middle">(\d)</text>', drawing.body)
    assert places == [("0", "1"), ("110", "2"), ("220", "4"), ("330", "8")]


def test_a_time_axis_says_dates() -> None:
    start, day = datetime(2026, 10, 1, tzinfo=UTC).timestamp() * 1000, 86_400_000
    assert "2026-10-04" in texts(line([(start, 1), (start + 9 * day, 2)], x=Axis("", time=True)))
    assert "10-01 06:00" in texts(line([(start, 1), (start + day / 2, 2)], x=Axis("", time=True)))
    assert line([(start, 1), (start, 2)], x=Axis("", time=True)).width > 0


def test_labels_do_not_touch() -> None:
    drawing = line([(0, 1), (1, 2)], x=Axis("x", ticks=[index / 20 for index in range(21)], domain=(0, 1)))
    places = [(float(x), label) for x, label in re.findall(r'<text x="([\d.]+)" y="207" text-anchor="middle">([^<]*)</text>', drawing.body)]
    assert len(places) > 5
    for (a, one), (b, two) in pairwise(places):
        assert b - a > 7 * (len(one) + len(two)) / 2


def test_a_step_keeps_its_height() -> None:
    assert path(line([(0, 0), (1, 1), (2, 1)], y=Axis("y", domain=(0, 1)), step=True)) == f"M0,{HEIGHT}H165V0H{WIDTH}V0"


def test_values_of_no_extent_have_an_axis() -> None:
    for axis in (Axis("y"), Axis("y", log=10), Axis("y", zero=True)):
        assert HEIGHT >= float(path(line([(1, 5), (2, 5)], y=axis)).rpartition(",")[2]) >= 0
    assert path(line([(0, 0), (1, 0)], y=Axis("y", zero=True)))


@pytest.mark.parametrize("ends", [(0.0, 0.0), (7.0, 7.0), (-3.0, -3.0), (1e20, 1e20), (0.0, 5.0), (-2.0, 0.0)])
@pytest.mark.parametrize("log", [None, 10])
def test_an_axis_has_an_extent_whatever_its_ends(ends: tuple[float, float], log: int | None) -> None:
    for scale in (Scale(Axis("x", log=log, domain=ends), [], WIDTH), Scale(Axis("x", log=log), ends, WIDTH)):
        assert all(0 <= scale(value) <= WIDTH for value in ends)
        assert scale.ticks and all(math.isfinite(at) for at, _ in scale.ticks)
    assert Scale(Axis("x", log=log), [], WIDTH).ticks, "without a value"


def test_bars_and_cells_without_a_length_are_drawn() -> None:
    assert bars(["a"], [{"row": 0, "a": 0, "b": 0, "series": 0, "d": "a: 0"}], [], "s", "Bars").width
    assert dots(["a"], [[{"row": 0, "x": 0.0, "d": "a: 0"}]], "s", "Dots").width
    unknown = {"row": 0, "column": 0, "text": "–", "value": None, "d": "not known"}
    assert "not known" in cells(["a"], ["b"], [unknown], "Cells").svg


def test_marks_say_what_they_share_once_and_texts_stay_texts() -> None:
    points = [{"x": i, "y": i, "low": i - 1, "high": i + 1, "d": f'mark {i} fill="x" <&>'} for i in range(20)]
    drawing = marks([points], Axis("x"), Axis("y"), "Title <1>\x07")
    assert drawing.body.count("var(--s0)") == 3, "line, error bars, markers"
    assert drawing.body.count("data-tip=") == 20
    assert 'data-tip="mark 3 fill=&quot;x&quot; &lt;&amp;&gt;"' in drawing.svg
    assert "<title>Title &lt;1&gt;\N{REPLACEMENT CHARACTER}</title><desc>mark 0 " in drawing.svg
    assert "; and 4 more, in the table of this figure</desc>" in drawing.svg


def test_bars_and_cells_lie_in_their_rows() -> None:
    drawing = bars(["a", "b"], [{"row": 1, "a": 0, "b": 10, "series": 0, "d": "b: 10"}], [], "s", "Bars")
    assert re.search(rf'data-tip="b: 10" x="0" y="60" width="{WIDTH / 1.02:.1f}" height="14"', drawing.body)
    assert drawing.height > 80
    few = [
        {"row": 0, "column": 0, "text": "1", "value": 1.0, "d": "one"},
        {"row": 0, "column": 1, "text": "OOM", "value": None, "d": "none"},
    ]
    drawing = cells(["a"], ["8", "16"], few, "Cells")
    assert drawing.body.count("<rect") == 2 and "fill-opacity" in drawing.body and "OOM" in texts(drawing)
    spread = dots(["a"], [[{"row": 0, "x": 1.0, "d": "1"}], [{"row": 0, "x": 1e3, "d": "", "low": 900.0, "high": 1100.0}]], "s", "Dots")
    assert {"1", "10", "100", "1,000"} <= set(texts(spread)), "a wide range is logarithmic"
