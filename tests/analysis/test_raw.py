"""Raw files as series."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest
from record_factory import make_point, make_record, save

from caraml.analysis import scaling
from caraml.analysis.table import raw_file, read_power, read_steps
from caraml.base.errors import InputError
from caraml.results.rows import write_table
from caraml.results.store import Store


def test_steps_take_the_slowest_rank_and_skip_what_is_not_finite(tmp_path: Path) -> None:
    rows = [
        (0, 0, "first", 0, 3.0, 0.0, 4.0),
        (0, 1, "first", 0, 2.5, 0.0, 6.0),
        (1, 0, "measure", 3, 1.0, 0.0, "nan"),
        (1, 1, "measure", 3, 1.5, 0.0, None),
    ]
    name = write_table(tmp_path, "steps", ("step", "rank", "phase", "start", "seconds", "data_wait", "loss"), rows)
    steps = read_steps(tmp_path / name)
    assert (list(steps.step), [steps.phases[one] for one in steps.phase], list(steps.seconds)) == ([0, 1], ["first", "measure"], [3.0, 1.5])
    assert steps.loss[0] == 5.0 and isnan(steps.loss[1])
    assert steps.measured() == [1.5]


def test_steps_of_ranks_that_do_not_meet_are_those_of_the_slowest(tmp_path: Path) -> None:
    times = {0: (9.0, 1.0, 3.0), 1: (2.0, 4.0, 0.5)}  # the first steps are no part of the window
    rows = [(step, rank, "measure" if step else "first", 0.0, own[step], 0.0, None) for rank, own in times.items() for step in range(3)]
    path = tmp_path / write_table(tmp_path, "steps", ("step", "rank", "phase", "start", "seconds", "data_wait", "loss"), rows)
    assert list(read_steps(path).seconds) == [9.0, 4.0, 3.0]
    assert list(read_steps(path, in_step=False).seconds) == [2.0, 4.0, 0.5]


def test_steps_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,rank,phase,start,seconds,data_wait,loss\n0,0,measure,0.0,0.25,0,\n")
    steps = read_steps(tmp_path / "steps.csv")
    assert steps.measured() == [0.25] and isnan(steps.loss[0])


def test_power_of_a_counter_is_its_slope(tmp_path: Path) -> None:
    times = [0.1 * i for i in range(200)]
    joules = [50.0 * (i // 2) * 0.2 for i in range(200)]  # 50 W from a counter that moves every second reading
    watts = [50.0 + (-1) ** i for i in range(200)]
    columns = {
        "channel": ["c"] * 200 + ["p"] * 200,
        "kind": ["energy"] * 200 + ["power_instant"] * 200,
        "t_before": times * 2,
        "t_after": [time + 0.002 for time in times] * 2,
        "value": joules + watts,
    }
    counter, power = read_power(tmp_path / write_table(tmp_path, "power", list(columns), zip(*columns.values(), strict=True)))
    assert (counter.channel, counter.counter, power.counter) == ("c", True, False)
    assert counter.watts == pytest.approx([50.0] * 19)
    assert list(power.watts) == watts
    assert power.seconds[0] == pytest.approx(0.001)


def test_channels_with_one_long_beginning_stay_apart(tmp_path: Path) -> None:
    """As meters whose files lie deep in a tree."""
    names = [f"csv:/{'a-long-folder/' * 20}{side}.csv" for side in ("left", "right")]
    rows = [(name, "power_mean", at, at, watts) for name, watts in zip(names, (100.0, 400.0), strict=True) for at in (0.0, 1.0)]
    found = read_power(tmp_path / write_table(tmp_path, "power", ("channel", "kind", "t_before", "t_after", "value"), rows))
    assert [(trace.channel, list(trace.watts)) for trace in found] == [(names[0], [100.0] * 2), (names[1], [400.0] * 2)]


def test_power_of_a_counter_survives_a_wrap(tmp_path: Path) -> None:
    joules = [float(10 * i % 550) for i in range(100)]
    columns = {"channel": ["c"] * 100, "kind": ["energy"] * 100, "t_before": list(range(100)), "t_after": list(range(100)), "value": joules}
    (trace,) = read_power(tmp_path / write_table(tmp_path, "power", list(columns), zip(*columns.values(), strict=True)))
    assert trace.counter
    assert set(trace.watts) == {10.0}
    assert len(trace.watts) == 98


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = save(store, make_record())
    path = raw_file(store, record, "steps")
    assert path is not None
    assert raw_file(store, record, "power") is None
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"steps\.parquet cannot be read"):
        read_steps(path)


def test_steps_of_a_median_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run that is in several families: they were read for each."""
    read: list[Path] = []
    monkeypatch.setattr(scaling, "read_steps", lambda path, **how: read.append(path) or read_steps(path, **how))
    store, sizes = Store(tmp_path), [(1, 32, 32), (2, 32, 16), (2, 64, 32)]
    points = [make_point(devices=devices, global_batch=batch, micro_batch=micro) for devices, batch, micro in sizes]
    families = scaling.scaling([save(store, make_record(point, steps=80), ranks=point.world) for point in points], store)
    assert sorted(family.kind for family in families) == ["strong", "weak"] and len(read) == len(set(read)) == 3
