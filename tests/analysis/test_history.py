"""Levels over time: changes that were put there, and none where there are none."""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_factory import run

from caraml.analysis.history import FEWEST, change_points, history, not_above_zero
from caraml.base.errors import InputError
from caraml.metrics.model import Metric, OwnMetric
from caraml.report.scaling import history_sections
from caraml.results.record import Record

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "analysis"))
import verdicts

START = datetime(2026, 3, 1, tzinfo=UTC)


def nights(rates: list[float], drivers: list[str] | None = None, **changes: object) -> list[Record]:
    """A result every night."""
    found = []
    for index, rate in enumerate(rates):
        environment = {"versions": {"driver": drivers[index]}, "cpu": {"load_1min": index}} if drivers else {}
        found.append(
            run(rate, started_at=(START + timedelta(days=index)).isoformat(), attempt=index + 1, environment=environment, **changes)
        )
    return found


def test_a_lost_factor_is_found_with_the_driver_that_took_it() -> None:
    records = nights([900, 905, 898, 902, 901, 300, 302, 299], ["535"] * 5 + ["550"] * 3)
    (series,) = history(records)
    (change,) = series.changes
    assert (change.index, change.better, change.provisional) == (5, False, False) and change.ratio == pytest.approx(1 / 3, rel=0.01)
    assert [(one.name, one.a, one.b) for one in change.changed] == [("driver", "535", "550")]
    assert [(begin, end) for begin, end, _ in series.levels()] == [(0, 4), (5, 7)]


def test_one_night_is_no_change_but_said_two_are_provisional_and_three_are_firm() -> None:
    level = [900.0, 905.0, 898.0, 902.0, 901.0, 899.0, 903.0]
    (first,), (second,), (third,) = (history(nights(level + [300.0, 302.0, 299.0][:count])) for count in (1, 2, 3))
    assert first.changes == () and first.newest == pytest.approx(1 / 3, rel=0.01)
    assert [(change.index, change.provisional) for change in second.changes] == [(7, True)]
    assert [(change.index, change.provisional) for change in third.changes] == [(7, False)]


def test_the_repeats_of_a_night_are_one_result() -> None:
    """Those of one bad night were a firm level, and nights that differ by more than their repeats were levels of three results each."""
    level = [900.0, 905.0, 898.0, 902.0, 901.0, 899.0, 903.0]

    def on(rates: list[float]) -> list[Record]:
        made = nights([rate for rate in rates for _ in range(3)])
        for index, record in enumerate(made):
            begun = START + timedelta(days=index // 3) + index % 3 * timedelta(minutes=20)
            one = record.model_copy(update={"point": record.point.model_copy(update={"repeat": index % 3}), "attempt": index // 3 + 1})
            made[index] = one.model_copy(update={"started_at": begun.isoformat()})
        return made

    (first,), (second,), (third,) = (history(on(level + [300.0, 302.0, 299.0][:count])) for count in (1, 2, 3))
    assert first.changes == () and first.newest == pytest.approx(1 / 3, rel=0.01)
    assert [(change.index, change.provisional) for change in second.changes] == [(21, True)]
    assert [(change.index, change.provisional) for change in third.changes] == [(21, False)]
    (few,) = history(on(level[:4]))
    assert few.note == "4 of the 5 rounds of repeats that a change needs" and len(few.values) == 12
    (hourly,) = history(
        [one.model_copy(update={"started_at": (START + timedelta(hours=i)).isoformat()}) for i, one in enumerate(nights(level))]
    )
    assert hourly.note is None, "without repeats each run is a result, however soon after another"
    long = [
        one.model_copy(update={"started_at": (START + timedelta(days=i // 3, hours=7 * (i % 3))).isoformat()})
        for i, one in enumerate(on([*level, 300.0]))
    ]
    between = [run(50, global_batch=4).model_copy(update={"started_at": (START + timedelta(hours=2 * i)).isoformat()}) for i in range(96)]
    others = [one.model_copy(update={"attempt": i + 1}) for i, one in enumerate(between) if i % 12 < 8]
    (slow,) = (one for one in history([*long, *others]) if len(one.values) == 24)
    assert slow.changes == (), "also where the other points take hours between its repeats"
    rng = np.random.default_rng(1)
    for _ in range(10):
        assert not history(on(list(1000 * np.exp(0.01 * rng.standard_normal(8)))))[0].changes


def test_a_bad_week_has_two_ends() -> None:
    (series,) = history(nights([100, 101, 99, 100, 60, 61, 60, 100, 101, 99, 100], ["a"] * 4 + ["b"] * 3 + ["a"] * 4))
    assert [change.index for change in series.changes] == [4, 7]
    assert [change.better for change in series.changes] == [False, True]


def test_a_week_that_was_slower_stays_when_it_is_over() -> None:
    """Its two ends counted as slow noise: two weeks later 0 to 12 % of such falls were still shown."""
    rng = np.random.default_rng(2)
    rates = 100 * np.exp(0.005 * rng.standard_normal(90))
    rates[40:47] *= 0.97
    for end in (47, 54, 61, 75, 90):
        (series,) = history(nights(rates[:end].tolist()))
        assert [change.index for change in series.changes[:1]] == [40], end
        assert [change.index for change in series.changes] == [40, 47][: 1 + (end > 48)], end
    assert [change.better for change in series.changes] == [False, True]
    assert verdicts.found_after(10, (14,), 10)[0] >= 0.7


def test_for_costs_more_is_worse_and_for_counts_neither() -> None:
    more = [{"energy_per_item": run(1, energy=joules).metrics["energy_per_item"]} for joules in (1, 1.01, 0.99, 1.5, 1.51, 1.5)]
    records = [record.model_copy(update={"metrics": record.metrics | extra}) for record, extra in zip(nights([1.0] * 6), more, strict=True)]
    (series,) = history(records, "energy_per_item")
    assert [change.better for change in series.changes] == [False] and series.unit == "J/token"


def test_software_may_change_within_a_series_but_work_may_not() -> None:
    records = [*nights([100, 101, 99]), *nights([50, 51, 49], software="new"), *nights([10, 11, 12], global_batch=64)]
    found = history(records)
    assert [len(series.records) for series in found] == [6, 3]
    assert found[1].note is not None and str(FEWEST) in found[1].note
    with pytest.raises(InputError, match="unknown metric"):
        history(records, "speed")


def test_energies_of_another_boundary_are_another_series() -> None:
    """From one night on the meter read the node instead of its devices, which was a change for the worse."""
    records = [*nights([900.0] * 5, energy=1.0), *nights([900.0] * 8, energy=1.0, software="new")[5:]]
    for record in records[5:]:
        record.metrics["energy_per_item"] = Metric(value=3.0, unit="J/token", scope="node_dc")
    series = history(records, "energy_per_item")
    assert [(len(one.records), len(one.changes)) for one in series] == [(5, 0), (3, 0)]
    assert [one.name.rpartition(" ")[2] for one in series] == ["boundary=device", "boundary=node_dc"]
    assert not any("software" in one.name for one in series)
    assert len(history(records)) == 1, "a rate has no boundary"


def test_results_not_above_zero_are_counted() -> None:
    """A ratio needs numbers above zero; those that are not shall not vanish without a word."""
    waits = [{"data_wait_share": Metric(value=value, unit="1")} for value in (0.1, 0.0, 0.2)]
    records = [nights([100.0] * 3, more=more)[at] for at, more in enumerate(waits)]
    (series,) = history(records, "data_wait_share")
    assert len(series.records) == 2 and not_above_zero(records, "data_wait_share") == 1 and not_above_zero(records, "throughput") == 0
    assert "left out: 1 result not above zero, as levels are compared by their ratio" in history_sections([series], 1)[0].notes
    assert not any("left out" in note for note in history_sections([series])[0].notes)
    short = dataclasses.replace(series, changes=(), newest=None, note="too few")
    assert history_sections([short])[1].notes[0].startswith("not looked for: ")
    assert history_sections([short, dataclasses.replace(short, note=None)])[1].notes[0] == "none beyond chance"


def test_a_copy_of_a_result_is_no_other_result() -> None:
    """Folders of which one is an older copy of the other, or was put together from several: numbers of attempts differ."""
    records = nights([900, 905, 898, 902, 901, 904])
    (series,) = history([*records, *(one.model_copy(update={"attempt": one.attempt + 6}) for one in records)])
    assert len(series.records) == len(records)


@given(st.integers(5, 30), st.integers(3, 28), st.floats(0.1, 2.0))
def test_a_large_change_is_found_where_it_is(n: int, at: int, size: float) -> None:
    if at > n - 2:
        return
    wiggle = np.array([0.001 * (-1) ** i for i in range(n)])
    wiggle[at:] += size
    assert change_points(wiggle.tolist()) == [at]


def test_equal_results_have_no_change() -> None:
    assert change_points([5.0] * 10) == [] and change_points([1.0, 9.0]) == []
    assert change_points([0.0, 0.0, 0.0, 0.01], floor=0.02) == [], "smaller than the results' own errors"


@pytest.mark.parametrize("noise", ["heavy tails", "AR(1) 0.7", "AR(1) 0.7, 2 % off by 10 deviations", "weekends 3 deviations higher"])
def test_results_that_resemble_their_neighbours_raise_no_alarm(noise: str) -> None:
    assert verdicts.false_alarms(noise, 10, 150) <= 0.03 and verdicts.false_alarms(noise, 200, 50) <= 0.04


@pytest.mark.slow
def test_a_year_of_looking_every_night_raises_no_firm_alarm() -> None:
    assert verdicts.alarms_a_year("AR(1) 0.7, 2 % off by 10 deviations", 1) == 0


def test_a_step_of_two_deviations_is_firm_within_about_two_weeks() -> None:
    assert float(np.median(verdicts.nights_until_seen("independent", 15))) <= 16


@pytest.mark.parametrize("share", [0.2, 0.35])
def test_results_of_two_levels_are_no_changes(share: float) -> None:
    """A machine with two kinds of nodes, or times in whole seconds: most neighbours are alike, and 10 to 28 alarms a year were raised."""
    rng = np.random.default_rng(9)
    found = [change_points(0.03 * (rng.random(120) < share) + 5e-4 * rng.standard_normal(120), 5e-4) for _ in range(60)]
    assert sum(map(bool, found)) <= 2


@pytest.mark.parametrize(("better", "found"), [("higher", True), ("lower", False), ("unknown", None)])
def test_a_metric_of_a_plug_in_is_followed_in_each_of_its_units(better: str, found: bool | None) -> None:
    def scores(values: list[float], unit: str, software: str) -> list[Record]:
        said = {"score": OwnMetric(unit=unit, better=better, source="caraml-mine 1")}  # type: ignore[arg-type]
        each = [{"score": Metric(value=value, unit=unit)} for value in values]
        return [nights([1.0] * len(each), more=more, definitions=said, software=software)[at] for at, more in enumerate(each)]

    records = [*scores([100, 101, 99, 150, 151, 149], "%", "mine 1"), *scores([1.0, 1.01, 0.99], "1", "mine 2")]
    percent, shares = history(records, "score")
    assert [(change.index, change.better) for change in percent.changes] == [(3, found)] and not shares.changes
    assert [one.name.rpartition(" fp32 ")[2] for one in (percent, shares)] == ["unit=%", "unit=1"]
    images = run(1.0, more={"throughput": Metric(value=1.0, unit="image/s")}, global_batch=32)
    assert not any("image" in one.name for one in history([*records, images])), "other work has another unit anyway"
    told = history_sections([percent, shares])[0].notes
    assert ("direction unknown: nobody said which is better" in told) == (found is None)
    with pytest.raises(InputError, match="unknown metric 'scroe'"):
        history(records, "scroe")


def test_a_series_of_years_is_searched_in_parts_and_nothing_is_lost_between_them() -> None:
    """With all at once 5,000 results took 40 s of computing."""
    rng, changes = np.random.default_rng(3), [198, 297, 304, 401, 590, 610, 1000, 1295]
    levels = np.repeat([0.0, -0.05] * 4 + [0.0], np.diff([0, *changes, 1500]))
    assert change_points(levels + 0.005 * rng.standard_normal(1500), 1e-3) == changes
    assert change_points(0.005 * rng.standard_normal(1500), 1e-3) == []
