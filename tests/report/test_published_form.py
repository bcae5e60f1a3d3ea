"""Figures of scaling in the form in which guides publish them: each rate in a panel of its own, and what a device does."""

from __future__ import annotations

import numpy as np
import pytest
from campaign_factory import campaign
from record_factory import make_point, make_record

from caraml.analysis.scaling import scaling
from caraml.analysis.table import Steps
from caraml.base.format import count
from caraml.metrics.model import Metric
from caraml.report.document import _read_steps
from caraml.report.scaling import efficiencies, scaling_sections
from caraml.report.section import plain
from caraml.report.times import step_distributions
from caraml.results.record import Record
from caraml.results.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return campaign(tmp_path_factory.mktemp("published"), points=60)


def test_families_have_a_panel_for_each_rate_and_one_for_the_rate_of_a_device(store: Store) -> None:
    figure = next(one for one in efficiencies(store.records())[0] if len(one.legend) > 1)
    panels = [drawing.svg for drawing in figure.drawings]
    titles = ["efficiency, training part [%]", "efficiency, median batch [%]", "efficiency, epoch [%]", "rate per device ["]
    titles += ["rate of the median batch per device [", "arithmetic of a device ["]
    assert [title in panel for title, panel in zip(titles, panels, strict=True)] == [True] * 6
    family = next(one for one in scaling(store.records()) if f"{one.records[0].point.benchmark}, {one.kind}" in figure.title)
    curve = family.curve("training")
    assert curve is not None
    for size in curve.sizes:
        assert (
            f"{count(size.world, 'device')}: {plain('', size.rate.value / size.world, f'{family.records[0].item}/s')} per device"
            in panels[3]
        )


def test_one_family_keeps_its_rates_in_one_panel(store: Store) -> None:
    family = next(one for one in scaling(store.records()) if len(one.curves) == 3)
    (figure,) = efficiencies(list(family.records))[0]
    assert list(figure.legend) == ["training", "median batch", "epoch"] and len(figure.drawings) == 4


def test_step_times_stand_beside_their_shares_of_the_median(store: Store) -> None:
    records = store.records()[:12]
    figure = step_distributions(records, _read_steps(store, records)[0])[0]
    relative, absolute = [drawing.svg for drawing in figure.drawings]
    assert "the point's median" in relative.replace("&#39;", "'").replace("&#x27;", "'") and "step time [" in absolute


def over_nodes(nodes: int, devices: int = 4) -> Record:
    """Twice the nodes take a tenth longer for each step; every device does 100 TFLOP/s on one node."""
    slower = 1 + 0.1 * (nodes.bit_length() - 1)
    point = make_point(nodes=nodes, devices=devices, global_batch=16 * nodes * devices, device="Test GPU x4", device_class="gpu")
    record = make_record(point, step=0.1 * slower)
    flops = Metric(value=1e14 / slower, unit="FLOP/s", low=0.99e14 / slower, high=1.01e14 / slower)
    return record.model_copy(update={"metrics": {**record.metrics, "achieved_flops_per_device": flops}})


def test_arithmetic_of_a_device_stands_over_the_nodes_beside_its_rate() -> None:
    records = [over_nodes(nodes) for nodes in (1, 2, 4)]
    (figure,) = efficiencies(records)[0]
    arithmetic = figure.drawings[-1].svg
    assert "nodes of 4 devices" in arithmetic and "arithmetic of a device [TFLOP/s]" in arithmetic
    assert "training, 8 devices: 90.9 TFLOP/s per device" in arithmetic and "training, 16 devices: 83.3 TFLOP/s per device" in arithmetic
    told = {(row[1], row[3]): row[5] for row in figure.rows}
    assert told["training", "2"].startswith("91 ± ") and told["median batch", "2"] == "–"
    (section, *_) = scaling_sections(scaling(records), [], [])
    place = section.columns.index("FLOP/s per device")
    assert [row[place].split()[0] for row in section.rows][1:] == ["91", "83"]


def test_sizes_with_different_nodes_stand_over_devices() -> None:
    (figure,) = efficiencies([over_nodes(1, 2), over_nodes(1, 4), over_nodes(2, 4)])[0]
    assert "nodes of" not in figure.drawings[0].svg and ">devices<" in figure.drawings[0].svg


def test_no_panel_of_arithmetic_without_known_flops() -> None:
    records = [over_nodes(nodes) for nodes in (1, 2)]
    for record in records:
        del record.metrics["achieved_flops_per_device"]
    (figure,) = efficiencies(records)[0]
    assert not any("arithmetic" in drawing.svg for drawing in figure.drawings)
    assert "FLOP/s per device" not in scaling_sections(scaling(records), [], [])[0].columns


def test_first_and_last_batch_of_each_epoch_are_in_no_distribution() -> None:
    record = make_record(make_point(global_batch=10))
    assert record.facts is not None
    record = record.model_copy(update={"facts": record.facts.model_copy(update={"samples_per_epoch": 100})})  # ten steps
    seconds = np.array([9.0 if step % 10 == 0 else 0.01 if step % 10 == 9 else 0.5 for step in range(40)])
    steps = Steps(np.arange(40), ["measure"], np.zeros(40, np.int16), seconds, np.zeros(40))
    (figure,) = step_distributions([record], {record.key: steps})
    assert figure.rows[0][1:6] == ["500 ms"] * 5
    assert "Without the first and the last batch of each epoch (8 steps)" in figure.note
    (whole,) = step_distributions([make_record()], {make_record().key: steps})
    assert whole.rows[0][1] == "10.0 ms" and "Without" not in whole.note
