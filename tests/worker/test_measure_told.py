"""What is recorded of a loop of one's own, what is not known, and what is refused."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import caraml
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.engine.device import CpuDevice
from caraml.engine.ranks import Ranks
from caraml.report.terminal import record_view
from caraml.results.rows import read_table, row_of
from caraml.results.store import Store
from caraml.suite.model import Policy
from caraml.worker import place
from tests.worker.loops import QUICK, measured, only


def test_nothing_is_recorded_that_nobody_said(tmp_path: Path) -> None:
    record = measured(tmp_path, params={"width": 8})
    assert set(record.unstated) == {"precision", "micro_batch", "compile", "knobs", "placement", "deterministic", "seed", "mode"}
    assert record.point.label == "loop width=8" and record.point.precision == "not stated" and record.peak_datasheet is not None
    assert record.peak_datasheet.value is None and "not stated" in (record.peak_datasheet.reason or "")
    row = row_of(record)
    assert [row[name] for name in ("precision", "compile", "mode", "micro_batch", "accumulation", "seed", "global_batch")] == [
        *[None] * 6,
        4,
    ]
    file = io.StringIO()
    Console(file=file, width=100).print(record_view(record))
    point, _, window = file.getvalue().partition("Numbers")[0].partition("Window")
    assert "fused_optimizer" not in point and "fp32" not in point and "samples" not in window and "items over 1 device" in window
    reasons = {name: record.metrics[name].reason for name in ("loss_first", "loss_validation", "saving_time", "mfu")}
    assert "m.step() is told no loss" in reasons.values() and all("mode" not in str(reason) for reason in reasons.values())
    assert reasons["mfu"] == "caraml.measure(flops_per_item=...) was not given"
    told = measured(tmp_path, precision="bf16")
    assert told.point.label == "loop bf16" and "precision" not in told.unstated and row_of(told)["precision"] == "bf16"


def test_padded_loops_are_repeats_and_have_no_batch(tmp_path: Path) -> None:
    draw = random.Random(2)
    records = [measured(tmp_path, "padded", lambda: draw.randint(1, 50)) for _ in range(2)]
    assert records[0].key == records[1].key and [record.attempt for record in records] == [1, 2]
    assert "global_batch" in records[0].unstated and row_of(records[0])["global_batch"] is None


TWO_LOOPS = """
import sys, time, caraml
from caraml.suite.model import Policy
quick = Policy(target=0.2, min_seconds=0.4, max_seconds=5, min_steps=8, warm_up_max_seconds=5, idle_seconds=0)
for name, size in (("large", 400 << 20), ("small", 1)):
    block = b"x" * size
    with caraml.measure(name, out=sys.argv[1], policy=quick) as m:
        while m.step(1):
            time.sleep(0.005)
    del block
"""
"""In a process of its own: what others needed in this one before is no part of it."""


def test_two_loops_in_one_process_have_their_own_memory_or_none(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TWO_LOOPS, str(tmp_path)], check=True, timeout=300, capture_output=True)
    large, small = sorted((Store(tmp_path).records()), key=lambda record: record.point.benchmark)
    assert (large.value("peak_memory") or 0) > 400 << 20
    for name in ("peak_memory", "peak_host_memory"):
        assert small.metrics[name].value is None and "before the loop began" in (small.metrics[name].reason or "")


def test_measures_within_measures(tmp_path: Path) -> None:
    with caraml.measure("outer", out=tmp_path, policy=QUICK) as outer:
        inner = measured(tmp_path, "inner")
        while outer.step(1):
            time.sleep(0.005)
    assert inner.status == "ok" and outer.record is not None and outer.record.status == "ok"


@pytest.mark.parametrize(
    ("steps", "words"), [(0, "without a step: call m.step"), (1, "1 step,"), (7, "7 steps, which are too few; .* 9 are")]
)
def test_a_loop_that_is_too_short_says_how_long_it_must_be(tmp_path: Path, steps: int, words: str) -> None:
    with caraml.measure("short", out=tmp_path, policy=QUICK) as m:
        for _ in range(steps):
            m.step(1)
    assert m.record is not None and re.search(words, m.record.reason or ""), m.record.reason
    assert not steps or len(read_table(Store(tmp_path).folder(m.record) / m.record.files["steps"])["step"]) == steps, "each once"


def test_a_loop_that_is_too_short_for_its_window_says_so(tmp_path: Path) -> None:
    policy = QUICK.model_copy(update={"warm_up_max_seconds": 0.0, "min_seconds": 5.0})
    with caraml.measure("short", out=tmp_path, policy=policy) as m:
        while not m._loop._rows.of_phase("warm_up") or m._loop._timer.launched < 3:
            m.step(1)
    steps = m._loop.steps
    assert m.record is not None and m.record.reason == (
        f"the loop ended after {steps} steps, 3 of them in its window: 4 are needed there, or 9 before it"
    )
    assert len(read_table(Store(tmp_path).folder(m.record) / m.record.files["steps"])["step"]) == steps


@pytest.mark.parametrize("inside", [0, 2])
def test_what_is_done_after_a_loop_that_is_short_for_its_window_is_no_training(
    inside: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caraml.engine.loop.warm_up_over", lambda seconds, *others: len(seconds) >= 10)
    with caraml.measure("short", out=tmp_path, policy=QUICK.model_copy(update={"min_seconds": 5.0})) as m:
        while m._loop._look != m._loop._look_at_window or m._loop._timer.launched < inside:
            time.sleep(0.002)
            m.step(1)
        time.sleep(0.6)
    record = only(tmp_path)
    rows = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    over = rows["start"][-1] + rows["seconds"][-1]
    assert "not_steady" in record.flags and rows["phase"].count("after") == inside
    assert all(phase.end <= over for phase in record.phases if phase.name != "idle_after")
    assert record.value("training_time") == pytest.approx(over - rows["start"][0], abs=0.5)


@pytest.mark.parametrize("items", [2.5, True, "8", float("nan"), None, torch.tensor(4), 10**16])
def test_items_that_are_no_whole_number_of_the_host(tmp_path: Path, items: Any) -> None:
    with pytest.raises(InputError, match="expected a whole number of items above 0"):
        measured(tmp_path, items=lambda: items)


def test_items_may_be_whole_numbers_of_numpy_s(tmp_path: Path) -> None:
    assert measured(tmp_path, "numpy", lambda: np.int64(3)).window.items % 3 == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"precision": "fp4"}, "precision: found \"fp4\", expected 'fp32'"),
        ({"params": {"net": object()}}, "text, numbers, lists and tables only"),
        ({"params": [1]}, "params: found \\[1\\]"),
        ({"item": ""}, "item: found"),
        ({"flops_per_item": -1}, "flops_per_item: found -1, expected greater than 0"),
        ({"flops_per_item": float("nan")}, "flops_per_item: found nan"),
        ({"flops_per_item": 1e300}, "flops_per_item: found 1e\\+300, expected "),
        ({"params": {"name": "b"}}, "params: .*another key than 'name'"),
        ({"params": {"counted": "b"}}, "params: .*another key than 'counted', which has the argument item"),
        ({"params": {"rate": float("nan")}}, "params: .*finite numbers"),
        ({"parameters": 1.5}, "parameters: found 1.5, expected an integer"),
        ({"policy": {"target": 0.1}}, "policy: found a table(.|\n)*caraml.Policy"),
        ({"policy": Policy(epochs=3)}, "epochs"),
    ],
)
def test_wrong_arguments_are_told_before_anything_runs(tmp_path: Path, told: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words), caraml.measure("wrong", out=tmp_path / "none", **told):
        pass
    assert not (tmp_path / "none").exists()


def test_an_empty_variable_names_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAML_RESULTS", "")
    with caraml.measure("empty", policy=QUICK) as m:
        m.step(1)
    assert only(tmp_path / "caraml-results") == m.record


def test_results_that_cannot_be_written_are_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentUnfitError, match="no results can be written there"), caraml.measure("x", out=tmp_path / "file" / "out"):
        pytest.fail("the training began")


def test_a_folder_that_cannot_be_made_leaves_no_rank_waiting(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    told: list[Any] = []
    ranks = SimpleNamespace(rank=0, gather=lambda value: told.append(value) or [value, None])
    with pytest.raises(EnvironmentUnfitError, match="found a link to nothing"):
        place.results_folder(tmp_path / "link", ranks)  # type: ignore[arg-type]
    assert "link to nothing" in told[0]


def test_a_policy_s_faults_name_the_key_and_the_nearest() -> None:
    with pytest.raises(InputError, match=r"targett: found 1, .*did you mean 'target'"):
        caraml.Policy(targett=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="target: found 7, expected less than 1"):
        caraml.Policy(target=7)
    with pytest.raises(InputError, match=r"caraml.Policy: found a table with min_seconds, max_seconds, expected max_seconds of at least"):
        caraml.Policy(min_seconds=9, max_seconds=1)
    assert caraml.Policy(target=0.5) == Policy(target=0.5)


def test_without_torch_the_next_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in ("measure", "place"):
        monkeypatch.delitem(sys.modules, f"caraml.worker.{module}")
    with pytest.raises(EnvironmentUnfitError, match=r"needs torch(.|\n)*pip install"):
        caraml.measure  # noqa: B018


@pytest.mark.parametrize(
    ("others", "family"),
    [(["n", [], 7, "pid:[1]"], "both"), (["n", [], 7, "pid:[2]"], "none"), (["m", [], 7, "pid:[2]"], "own")],
    ids=["started by shells", "in containers that hide them", "on another node"],
)
def test_the_ranks_of_a_node_are_a_family(monkeypatch: pytest.MonkeyPatch, others: list[Any], family: str) -> None:
    monkeypatch.setattr(place, "node_key", lambda: "n")
    monkeypatch.setattr(place, "_process", lambda world: (6, "pid:[1]"))
    ranks = SimpleNamespace(rank=0, world=2, gather=lambda mine: [mine, others])
    assert place.place_of(ranks).family == {"both": [6, 7], "none": [], "own": [6]}[family]  # type: ignore[arg-type]


def test_a_rank_is_known_by_what_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 77)
    assert place._process(1)[0] == os.getpid() and place._process(2)[0] == 77
    monkeypatch.setattr(os, "getppid", lambda: 1)  # everything descends from the first process
    assert place._process(2)[0] == os.getpid()


@pytest.mark.parametrize(("asked", "sensors"), [("cpu", []), ("", None)])
def test_gpus_that_a_loop_on_cpus_leaves_idle_are_not_metered(
    monkeypatch: pytest.MonkeyPatch, asked: str, sensors: list[str] | None
) -> None:
    monkeypatch.setattr(place, "device_in_use", CpuDevice)
    monkeypatch.setenv("CARAML_DEVICE", asked)
    assert place.place_of(Ranks()).gpus == sensors
