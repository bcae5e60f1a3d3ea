"""Roofline rows say what records hold."""

from __future__ import annotations

import pytest

from caraml.analysis.bottleneck import roofline
from caraml.metrics.model import Bandwidth, Metric
from tests.report.record_factory import broken_record, make_record


def test_rows_of_records_with_and_without_bytes(make_point) -> None:  # type: ignore[no-untyped-def]
    plain = make_record()
    assert plain.peak_measured is not None and plain.peak_measured.value is not None
    known = {"arithmetic_intensity": Metric(value=10.0, unit="FLOP/B"), "share_of_limit": Metric(value=0.5, unit="1", scope="memory")}
    stream = Bandwidth(value=plain.peak_measured.value / 40)
    told = plain.model_copy(update={"metrics": plain.metrics | known, "bandwidth_measured": stream})
    unknown, row = roofline([plain, broken_record(make_point(), "oom", "out of memory"), told])
    assert unknown.limit is None and unknown.share is None and unknown.reason
    assert row.limit == "memory" and row.share == 0.5
    assert row.attainable_flops_per_s == pytest.approx(plain.peak_measured.value / 4)


def test_a_program_has_no_operations_and_is_not_called_old() -> None:
    made = make_record()
    assert made.facts is not None
    record = made.model_copy(update={"metrics": {name: one for name, one in made.metrics.items() if name != "share_of_limit"}})
    program = record.model_copy(update={"facts": made.facts.model_copy(update={"flops_per_item": None})})
    assert [row.reason for row in roofline([program, record])] == [
        "the operations of a program are not counted",
        "measured by a version of CARAML that knew no roofline",
    ]
