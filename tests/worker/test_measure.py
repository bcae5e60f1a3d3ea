"""A loop of one's own gives the record that a built-in workload gives: alone, on several ranks, and when it goes wrong."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import caraml
from caraml.base.errors import InputError
from caraml.engine.ranks import Ranks
from caraml.power.signals import Constant
from caraml.results.files import read_table
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.model import Measure
from caraml.worker import measure as own_loop

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
QUICK = Measure(target=0.2, min_seconds=0.4, max_seconds=5, min_steps=8, warm_up_max_seconds=5, idle_seconds=0)


def only(out: Path) -> Record:
    (record,) = Store(out).records()
    return record


def test_importing_caraml_imports_no_torch() -> None:
    assert subprocess.run([sys.executable, "-c", "import sys, caraml; sys.exit('torch' in sys.modules)"], check=False).returncode == 0


def test_rate_and_energy_are_those_of_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of known length under a sensor of constant power: every number is known."""
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    with caraml.measure("known", item="image", params={"a": 1}, out=tmp_path, policy=QUICK) as m:
        time.sleep(0.1)
        while m.step(8):
            time.sleep(0.02)
    record = only(tmp_path)
    assert m.done and m.record == record and record.status == "ok" and record.window is not None
    assert record.window.items == 8 * record.window.steps and record.window.steps >= 8
    assert record.value("throughput") == pytest.approx(8 * record.window.steps / record.window.seconds)
    step = record.value("step_time_median")
    assert step is not None and 0.02 <= step < 0.2 and record.value("first_step_time") >= 0.1  # type: ignore[operator]
    assert record.value("mean_power") == pytest.approx(Constant().watts, rel=0.05) and record.files["power"]
    run_energy, run_time = record.metrics["run_energy"], record.value("run_time")
    assert run_time is not None and run_time > record.window.end - record.phases[0].end - 0.01, "from the first step on"
    assert run_energy.value == pytest.approx(Constant().watts * run_time, abs=run_energy.bound)
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    assert steps["phase"][0] == "first" and steps["phase"].count("measure") == record.window.steps
    begin = next(start for start, phase in zip(steps["start"], steps["phase"], strict=True) if phase == "measure")
    assert begin == pytest.approx(record.window.start)
    assert record.metrics["data_wait_share"].value is None and record.metrics["data_wait_share"].reason
    assert (record.point.workload, record.point.params, record.item) == ("own_loop", {"name": "known", "a": 1}, "image")


def test_a_rate_of_uneven_items_is_not_called_precise(tmp_path: Path) -> None:
    draw = random.Random(1)
    with caraml.measure("uneven", out=tmp_path, policy=QUICK) as m:
        while m.step(draw.choice((1, 1, 1, 200))):
            time.sleep(0.02)
    record = only(tmp_path)
    rate = record.metrics["throughput"]
    assert "imprecise" in record.flags and rate.value is not None
    assert rate.high is None or rate.high > 1.1 * rate.value


def test_equal_loops_are_repeats_of_one_point(tmp_path: Path) -> None:
    for _ in range(2):
        with caraml.measure("twice", out=tmp_path, policy=QUICK) as m:
            while m.step(1):
                time.sleep(0.01)
    assert only(tmp_path).attempt == 2


def test_a_loop_that_ends_early_says_so(tmp_path: Path) -> None:
    policy = QUICK.model_copy(update={"warm_up_steps": 1000})
    with caraml.measure("short", out=tmp_path / "a", policy=policy) as m:
        for _ in range(20):
            time.sleep(0.005)
            assert m.step(2)
    record = only(tmp_path / "a")
    assert record.status == "ok" and {"imprecise", "not_steady"} <= set(record.flags)
    assert record.window is not None and record.window.steps == 9 and record.window.items == 18
    with caraml.measure("none", out=tmp_path / "b", policy=QUICK) as m:
        m.step(1)
    record = only(tmp_path / "b")
    assert record.status == "failed" and "1 steps" in (record.reason or "")


def test_a_loop_that_breaks_leaves_its_reason_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), caraml.measure("broken", out=tmp_path, policy=QUICK) as m:
        m.step(1)
        1 / 0  # noqa: B018
    assert only(tmp_path).status == "failed" and "ZeroDivisionError" in (only(tmp_path).reason or "")
    with pytest.raises(MemoryError), caraml.measure("full", out=tmp_path / "oom", policy=QUICK):
        raise MemoryError
    assert only(tmp_path / "oom").status == "oom"


def test_what_was_measured_is_not_lost_by_what_breaks_later(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), caraml.measure("late", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert only(tmp_path).status == "ok"


def test_items_are_whole_and_above_zero(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="above 0"), caraml.measure("items", out=tmp_path, policy=QUICK) as m:
        m.step(0)


def test_ranks_without_a_group_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="init_process_group"), caraml.measure("alone", out=tmp_path):
        pass


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_measures_itself(tmp_path: Path, ranks: int) -> None:
    start = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "CARAML_RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(EXAMPLE)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    record = only(tmp_path)
    assert record.status == "ok" and record.point.world == ranks and record.window is not None
    assert record.window.items == 64 * ranks * record.window.steps and record.point.global_batch == 64 * ranks
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    assert set(steps["rank"]) == set(range(ranks)) and "image/s" in done.stderr


class Twins(Ranks):
    """Rank 0 of two that measure the same."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def agree(self, value: int) -> int:
        return int(value)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        """Nobody to wait for."""


@pytest.mark.parametrize("fails", [False, True])
def test_one_rank_of_several_that_failed_is_not_all_of_them(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its window, too: what the others did is not known then, and half of the items are half of the rate."""
    monkeypatch.setattr(own_loop, "_ranks", Twins)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), caraml.measure("twins", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        assert not fails or 1 / 0
    record = only(tmp_path)
    if fails:
        assert record.status == "failed" and record.window is None and "ZeroDivisionError" in (record.reason or "")
    else:
        assert record.status == "ok" and record.window is not None and record.window.items == 2 * record.window.steps
