"""Figures of scaling in the form in which guides publish them: each rate in a panel of its own, and what a device does."""

from __future__ import annotations

import pytest
from campaign_factory import campaign

from caraml.analysis.scaling import scaling
from caraml.report.document import _read_steps
from caraml.report.numbers import plain
from caraml.report.scaling import efficiencies
from caraml.report.times import step_distributions
from caraml.results.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return campaign(tmp_path_factory.mktemp("published"), points=60)


def test_families_have_a_panel_for_each_rate_and_one_for_the_rate_of_a_device(store: Store) -> None:
    figure = next(one for one in efficiencies(store.records())[0] if len(one.legend) > 1)
    panels = [drawing.svg for drawing in figure.drawings]
    titles = ["efficiency, training part [%]", "efficiency, median batch [%]", "efficiency, epoch [%]", "rate per device ["]
    assert [title in panel for title, panel in zip(titles, panels, strict=True)] == [True] * 4
    family = next(one for one in scaling(store.records()) if f"{one.records[0].point.benchmark}, {one.kind}" in figure.title)
    curve = family.curve("training")
    assert curve is not None
    for size in curve.sizes:
        assert f"{size.world} devices: {plain('', size.rate.value / size.world, f'{family.item}/s')} per device" in panels[3]


def test_one_family_keeps_its_rates_in_one_panel(store: Store) -> None:
    family = next(one for one in scaling(store.records()) if len(one.curves) == 3)
    (figure,) = efficiencies(list(family.records))[0]
    assert list(figure.legend) == ["training", "median batch", "epoch"] and len(figure.drawings) == 2


def test_step_times_stand_beside_their_shares_of_the_median(store: Store) -> None:
    records = store.records()[:12]
    figure = step_distributions(records, _read_steps(store, records)[0])[0]
    relative, absolute = [drawing.svg for drawing in figure.drawings]
    assert "the point's median" in relative.replace("&#39;", "'").replace("&#x27;", "'") and "step time [" in absolute
