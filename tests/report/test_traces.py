"""Power of many points made small: extremes survive, counters become power, and a broken file costs itself only."""

from __future__ import annotations

import bisect
import random
from pathlib import Path

import pytest
from record_factory import make_point, make_record, save, unpack

from caraml.report.grouping import MOST_SERIES
from caraml.report.page import pack
from caraml.report.series import LEVELS, MOST_BINS, power_figure, read_traces
from caraml.results.record import Node, Record
from caraml.results.rows import write_table
from caraml.results.store import Store


def store_with(root: Path, readings: list[tuple[str, str, float, float]]) -> tuple[Store, Record]:
    store = Store(root)
    record = save(store, make_record(make_point()))
    rows = [(channel, kind, at, at, value) for channel, kind, at, value in readings]
    write_table(store.folder(record), "power", ("channel", "kind", "t_before", "t_after", "value"), rows)
    return store, record.model_copy(update={"files": {**record.files, "power": "power.parquet"}})


def test_extremes_survive(tmp_path: Path) -> None:
    spike, dip = 51_234, 12_345
    watts = [900.0 if i == spike else 3.0 if i == dip else 300.0 + (i % 7) for i in range(100_000)]
    store, record = store_with(tmp_path, [("GPU-0", "power_instant", i / 1000, value) for i, value in enumerate(watts)])
    found, faults = read_traces(store, [record])
    assert faults == []
    trace = found[record.key].packed()
    (channel,) = trace["c"]
    lows = [low * channel["q"] for low in channel["l"]]
    highs = [low + high * channel["q"] for low, high in zip(lows, channel["h"], strict=True)]
    assert len(lows) == MOST_BINS
    assert max(highs) == pytest.approx(900, abs=900 / LEVELS)
    assert min(lows) == pytest.approx(3, abs=900 / LEVELS)
    start, length = trace["t"]
    assert start + (highs.index(max(highs)) + 0.5) * length == pytest.approx(spike / 1000, abs=length)
    assert sorted(highs)[-2] < 310, "one span holds the spike"


def test_apparent_power_is_not_drawn_as_watts(tmp_path: Path) -> None:
    kinds = {"power_mean": 400.0, "apparent_va": 500.0}
    readings = [(f"pdu:{kind}", kind, at / 20, value) for kind, value in kinds.items() for at in range(100)]
    store, record = store_with(tmp_path, readings)
    trace = read_traces(store, [record])[0][record.key]
    assert [(channel.name, max(channel.high)) for channel in trace.channels] == [("pdu:power_mean", 400.0)]


def test_channels_with_one_long_beginning_are_drawn_apart(tmp_path: Path) -> None:
    sides = {"left": 100.0, "right": 400.0}
    readings = [
        (f"csv:/{'a-long-folder/' * 20}{side}.csv", "power_mean", at / 20, watts) for side, watts in sides.items() for at in range(100)
    ]
    store, record = store_with(tmp_path, readings)
    found = [(channel.name, max(channel.high)) for channel in read_traces(store, [record])[0][record.key].channels]
    assert [watts for _, watts in found] == [100.0, 400.0]
    assert all(len(name) == 100 and name.endswith(f"/{side}.csv") for (name, _), side in zip(found, sides, strict=True))


def of_nodes(root: Path, kept: int, channels: int = 2, nodes: int = 3) -> tuple[Store, Record]:
    """A record of several nodes, of which the first ``kept`` left readings: node n draws 100 (n + 1) W from second n to second n + 10."""
    store = Store(root)
    record = save(store, make_record(make_point(nodes=nodes)))
    files = {"power" if node == 0 else f"power-{node}": node for node in range(kept)}
    for file, node in files.items():
        rows = [
            (f"GPU-{number}", kind, node + at / 20, node + at / 20, 100.0 * (node + 1))
            for number in range(channels)
            for kind in ("power_instant", "apparent_va")
            for at in range(201)
        ]
        write_table(store.folder(record), file, ("channel", "kind", "t_before", "t_after", "value"), rows)
    parts = [Node(name=f"n{number + 1}", ranks=[], device="d", cpu="c") for number in range(nodes)]
    return store, record.model_copy(update={"files": {**record.files, **{name: f"{name}.parquet" for name in files}}, "nodes": parts})


def test_the_power_of_every_node_is_drawn_over_one_time(tmp_path: Path) -> None:
    store, record = of_nodes(tmp_path, 3)
    found, faults = read_traces(store, [record])
    trace = found[record.key]
    assert not faults and (trace.start, trace.length * MOST_BINS) == (0, pytest.approx(12))
    assert [channel.name for channel in trace.channels] == [f"n{node}/GPU-{number}" for node in (1, 2, 3) for number in (0, 1)]
    for node, channel in ((number // 2, channel) for number, channel in enumerate(trace.channels)):
        assert set(channel.low) == set(channel.high) == {100.0 * (node + 1)}
        ends = [trace.start + trace.length * edge for edge in (channel.spans[0], channel.spans[-1] + 1)]
        assert ends == [pytest.approx(node, abs=1.01 * trace.length), pytest.approx(node + 10, abs=1.01 * trace.length)]
    figure = power_figure(record, "point", trace)
    assert figure is not None and "nodes" not in figure.note and "not drawn" not in figure.note.lower()
    assert figure.legend == [f"{channel.name} (power)" for channel in trace.channels]


def test_a_figure_says_what_of_several_nodes_is_not_in_it(tmp_path: Path) -> None:
    store, record = of_nodes(tmp_path / "program", 1)
    figure = power_figure(record, "point", read_traces(store, [record])[0][record.key])
    assert figure is not None and "Of 1 of 3 nodes: no others' readings were kept." in figure.note and "n1/GPU-0 (power)" in figure.legend
    store, record = of_nodes(tmp_path / "wide", 3, channels=5)
    trace = read_traces(store, [record])[0][record.key]
    figure = power_figure(record, "point", trace)
    assert [channel.name for channel in trace.channels] == [f"n{node}/GPU-{number}" for node in (1, 2, 3) for number in range(4)]
    assert figure is not None and "Not all channels are drawn" in figure.note
    store, record = of_nodes(tmp_path / "many", 20, channels=1, nodes=20)
    trace = read_traces(store, [record])[0][record.key]
    assert len(trace.channels) == MOST_SERIES and not trace.whole


def test_spans_of_all_nodes_keep_to_the_budget_of_a_page(tmp_path: Path) -> None:
    store, record = of_nodes(tmp_path, 3, channels=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("caraml.report.series.BUDGET", 1200)
        trace = read_traces(store, [record])[0][record.key]
    assert len(trace.channels) == 12 and max(channel.spans[-1] for channel in trace.channels) == 99


def test_a_broken_file_of_a_node_costs_that_node_only(tmp_path: Path) -> None:
    store, record = of_nodes(tmp_path, 3)
    (store.folder(record) / "power-1.parquet").write_bytes(b"nothing")
    found, faults = read_traces(store, [record])
    assert len(faults) == 1 and "power-1.parquet" in faults[0] and str(tmp_path) not in faults[0]
    trace = found[record.key]
    assert [channel.name for channel in trace.channels] == ["n1/GPU-0", "n1/GPU-1", "n3/GPU-0", "n3/GPU-1"] and not trace.whole


def test_a_figure_of_few_readings_draws_each_of_them(tmp_path: Path) -> None:
    store, record = store_with(tmp_path, [("GPU-0", "power_instant", i / 20, 300.0 + i) for i in range(400)])
    figure = power_figure(record, "point", read_traces(store, [record])[0][record.key])
    assert figure is not None
    assert "Drawn from" not in figure.note
    assert figure.drawings[0].body.count("L") == 399
    assert figure.columns == ["channel", "time", "lowest", "highest"]
    assert figure.rows[0][2:] == ["300 W", "300 W"] and figure.rows[-1][2:] == ["699 W", "699 W"]


def test_a_figure_of_many_readings_keeps_the_extremes_and_says_so(tmp_path: Path) -> None:
    watts = [900.0 if i == 5_123 else 3.0 if i == 777 else 300.0 + i % 7 for i in range(20_000)]
    store, record = store_with(tmp_path, [("GPU-0", "power_instant", i / 1000, value) for i, value in enumerate(watts)])
    figure = power_figure(record, "point", read_traces(store, [record])[0][record.key])
    assert figure is not None
    assert "Drawn from the lowest and highest value of 300 bins" in figure.note
    assert "3.00 W to 900 W" in figure.drawings[0].summary


def test_a_counter_becomes_power(tmp_path: Path) -> None:
    store, record = store_with(tmp_path, [("GPU-0", "energy", i / 20, 250.0 * i / 20) for i in range(400)])
    (channel,) = read_traces(store, [record])[0][record.key].packed()["c"]
    assert channel["k"] == "slope of the counter"
    assert {round(low * channel["q"]) for low in channel["l"]} == {250}
    assert not any(channel["h"])


def test_a_counter_as_slow_as_its_readings_shows_the_power_and_not_its_jitter(tmp_path: Path) -> None:
    """As NVIDIA's: 700 W, read every 100 ms, seen with a new value 80 to 135 ms after the last time."""
    draw, updates = random.Random(1), [0.0]
    while updates[-1] < 40:
        updates.append(updates[-1] + draw.uniform(0.08, 0.135))
    readings = [("GPU-0", "energy", i / 10, 700 * updates[bisect.bisect(updates, i / 10) - 1]) for i in range(400)]
    store, record = store_with(tmp_path, readings)
    (channel,) = read_traces(store, [record])[0][record.key].packed()["c"]
    assert min(channel["l"]) * channel["q"] > 600 and max(channel["l"]) * channel["q"] < 800
    store, record = store_with(tmp_path / "short", readings[:9])
    (channel,) = read_traces(store, [record])[0][record.key].packed()["c"]
    assert len(channel["l"]) > 1, "also of a second there is a line"


def test_a_counter_that_starts_again_gives_no_negative_power(tmp_path: Path) -> None:
    values = [250.0 * i / 20 for i in range(200)] + [250.0 * i / 20 for i in range(200)]
    store, record = store_with(tmp_path, [("GPU-0", "energy", i / 20, value) for i, value in enumerate(values)])
    (channel,) = read_traces(store, [record])[0][record.key].packed()["c"]
    assert min(channel["l"]) > 0


def test_a_broken_file_costs_itself_only(tmp_path: Path) -> None:
    store, record = store_with(tmp_path, [("GPU-0", "power_instant", i / 20, 100.0) for i in range(40)])
    other = save(store, make_record(make_point(seed=1)), watts=100.0)
    (store.folder(record) / "power.parquet").write_bytes(b"nothing")
    found, faults = read_traces(store, [record, other])
    assert list(found) == [other.key]
    assert len(faults) == 1
    assert record.key in faults[0]
    assert str(tmp_path) not in faults[0].split(" cannot be drawn")[0]


def test_what_is_packed_can_be_unpacked() -> None:
    content = {"text": "</script><b>\u2028µ", "numbers": [1.5, None], "control": "\x1b"}
    packed = pack(content)
    assert packed.isascii()
    assert "<" not in packed
    assert unpack(packed) == {**content, "text": "</script><b>\N{REPLACEMENT CHARACTER}µ"}
    assert pack(content) == packed, "the same content gives the same page"
