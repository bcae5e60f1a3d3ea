"""The roofline figure and the column that says the same: points at their place below the roof, the others named with their reason."""

from __future__ import annotations

import io

import pytest
from record_factory import make_point, make_record
from rich.console import Console

from caraml.metrics.model import Bandwidth, Metric
from caraml.report.figures import rooflines
from caraml.report.terminal import results_table
from caraml.results.record import Record


def placed(intensity: float, share: float, scope: str, **point: object) -> Record:
    """A record on a device whose ridge lies at 40 FLOP/B."""
    record = make_record(make_point(**point))
    peak = record.peak_measured.value if record.peak_measured is not None else None
    assert peak is not None
    limit = min(peak, peak / 40 * intensity)
    known = {
        "arithmetic_intensity": Metric(value=intensity, unit="FLOP/B"),
        "achieved_flops_per_device": Metric(value=share * limit, unit="FLOP/s"),
        "share_of_limit": Metric(value=share, unit="1", scope=scope),
    }
    return record.model_copy(update={"metrics": record.metrics | known, "bandwidth_measured": Bandwidth(value=peak / 40)})


def test_a_figure_for_each_arithmetic_and_a_reason_for_every_other_point() -> None:
    slow, fast = placed(10.0, 0.5, "memory"), placed(400.0, 0.8, "arithmetic", global_batch=64)
    other = placed(10.0, 0.25, "memory", precision="bf16")
    invalid = placed(10.0, 0.9, "memory", repeat=1).model_copy(update={"status": "invalid", "reason": "the loss is not finite"})
    figures, notes = rooflines([slow, invalid, make_record(make_point(global_batch=4)), fast, other])
    assert [figure.title.rpartition(", ")[2] for figure in figures] == ["fp32", "bf16"]
    assert [row[-2:] for row in figures[0].rows] == [["memory", "50.0 %"], ["arithmetic", "80.0 %"]]
    assert [row[-2:] for row in figures[1].rows] == [["memory", "25.0 %"]]
    assert len(notes) == 1 and notes[0].startswith("Not placed, 1 of 4: ")
    assert figures[0].drawings[0].svg.startswith("<svg") and "50.0 %" in figures[0].drawings[0].svg


def test_nothing_to_place_is_said() -> None:
    figures, notes = rooflines([make_record()])
    assert figures == [] and notes
    good = placed(10.0, 0.5, "memory")
    still = placed(10.0, 0.0, "memory", global_batch=32)  # on a logarithmic axis nothing is at zero
    for none in (still, good.model_copy(update={"bandwidth_measured": Bandwidth(value=0.0)})):
        assert rooflines([none])[0] == [] and len(rooflines([good, none])[0][0].rows) == 1


@pytest.mark.parametrize(("scope", "word"), [("memory", "50 % mem"), ("arithmetic", "50 % ops")])
def test_the_table_in_a_terminal_says_the_distance_and_what_binds(scope: str, word: str) -> None:
    file = io.StringIO()
    Console(file=file, width=80, force_terminal=False).print(results_table([placed(10.0, 0.5, scope)]))
    said = file.getvalue()
    assert word in said and "bound by mem: memory" in " ".join(said.split())
    assert all(len(line) <= 80 for line in said.splitlines())
