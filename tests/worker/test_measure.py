"""A loop of one's own gives the record that a built-in workload gives: alone, on several ranks, and when it goes wrong."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import caraml
from caraml.analysis.grouping import work_of
from caraml.base.errors import InputError
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepTable
from caraml.power.signals import Constant
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import Store
from caraml.worker import measure as own_loop
from caraml.worker import measure_record
from caraml.worker.record import stopped
from tests.worker.loops import EXAMPLE, QUICK, Twins, example, measured, only


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
    assert step is not None and 0.02 <= step < 2 and record.value("first_step_time") >= 0.1  # type: ignore[operator]
    assert record.value("mean_power") == pytest.approx(Constant().watts, abs=record.metrics["mean_power"].bound) and record.files["power"]
    run_energy, run_time = record.metrics["run_energy"], record.value("run_time")
    assert run_time is not None and run_time > record.window.end - record.phases[0].end - 0.01, "from the first step on"
    assert record.value("runtime") == pytest.approx(run_time), "neither the baseline before it nor the writing after it"
    assert run_energy.value == pytest.approx(Constant().watts * run_time, abs=run_energy.bound)
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    assert steps["phase"][0] == "first" and steps["phase"].count("measure") == record.window.steps
    begin = next(start for start, phase in zip(steps["start"], steps["phase"], strict=True) if phase == "measure")
    assert begin == pytest.approx(record.window.start)
    assert record.metrics["data_wait_share"].value is None and record.metrics["data_wait_share"].reason
    assert (record.point.workload, record.point.params, record.item) == (
        "own_loop",
        {"name": "known", "counted": "image", "a": 1},
        "image",
    )


def test_a_loop_that_was_suspended_within_its_window_is_invalid(tmp_path: Path) -> None:
    """What goes on after a stop gets SIGCONT. A step does not show it: it is as long as any that waits."""
    with caraml.measure("stopped", out=tmp_path, policy=QUICK) as m:
        while m.step(4):
            os.kill(os.getpid(), signal.SIGCONT)  # in every step, and so in the longest
            time.sleep(0.005)
    assert m.record is not None and m.record.status == "invalid" and m.record.value("throughput")
    assert "stopped" in m.record.flags and "as when Slurm suspends a job" in (m.record.reason or "")
    assert "stopped" not in measured(tmp_path).flags


@pytest.mark.parametrize(("resumed", "told"), [(5.5, False), (12.9, True), (25.5, False), (13.5, True), (-0.5, False)])
def test_what_goes_on_without_a_stop_was_not_suspended(resumed: float, told: bool) -> None:
    """Before it ends a job, Slurm sends SIGCONT with SIGTERM, which a loop may handle and go on. After a stop the step is a long one;
    between steps nothing tells."""
    rows = StepTable()
    rows.chain("measure", 0.0, [*[1.0] * 10, 3.0], [0.0] * 11)
    rows.chain("measure", 14.0, [1.0] * 9, [0.0] * 9)
    mine = RankSummary(0.0, 24.0, rows, [], 1.0, 1.0, 0)
    assert (stopped(mine, [2.5, resumed]) == ["stopped"]) is told


def test_a_rate_of_uneven_items_is_not_called_precise(tmp_path: Path) -> None:
    draw, policy = random.Random(1), QUICK.model_copy(update={"min_steps": 40, "max_steps": 60, "max_seconds": 300})  # on any machine
    with caraml.measure("uneven", out=tmp_path, policy=policy) as m:
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


def test_loops_that_count_other_things_are_no_repeats(tmp_path: Path) -> None:
    """Their rates are in other units, and the newest would stand for both."""
    for item in ("token", "sequence"):
        with caraml.measure("counts", item=item, params={"width": 8}, out=tmp_path, policy=QUICK) as m:
            m.step(1)
    records = Store(tmp_path).records()
    assert {record.item for record in records} == {"token", "sequence"} and {record.attempt for record in records} == {1}
    assert {record.point.label for record in records} == {"counts width=8"} and len({work_of(record) for record in records}) == 2


def test_a_loop_that_ends_early_says_so(tmp_path: Path) -> None:
    policy = QUICK.model_copy(update={"warm_up_steps": 1000, "warm_up_max_seconds": 600})
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
    assert record.status == "failed" and "1 step," in (record.reason or "")


def test_a_loop_that_breaks_leaves_its_reason_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), caraml.measure("broken", out=tmp_path, policy=QUICK) as m:
        m.step(1)
        1 / 0  # noqa: B018
    assert only(tmp_path).status == "failed" and "ZeroDivisionError" in (only(tmp_path).reason or "")
    with pytest.raises(RuntimeError), caraml.measure("caused", out=tmp_path / "b", policy=QUICK):
        raise RuntimeError("worker failed") from OSError("disk full")
    assert only(tmp_path / "b").reason == "RuntimeError: worker failed, because OSError: disk full", "as of a training"
    with pytest.raises(MemoryError), caraml.measure("full", out=tmp_path / "oom", policy=QUICK):
        raise MemoryError
    assert only(tmp_path / "oom").status == "oom"


def test_what_was_measured_before_a_loop_breaks_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    policy = QUICK.model_copy(update={"min_seconds": 300.0, "max_seconds": 300.0})  # not over before, on any machine
    with pytest.raises(KeyboardInterrupt), caraml.measure("interrupted", out=tmp_path, policy=policy) as m:
        for _ in range(20):
            time.sleep(0.01)
            m.step(1)
        raise KeyboardInterrupt
    record, folder = only(tmp_path), Store(tmp_path).folder(only(tmp_path))
    steps = read_table(folder / record.files["steps"])
    assert (record.status, record.reason) == ("failed", "KeyboardInterrupt")
    assert len(steps["seconds"]) >= 10 and min(steps["seconds"]) > 0.01
    assert read_table(folder / record.files["power"])["value"]


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
    script, out = tmp_path / EXAMPLE.name, tmp_path / "results"
    script.write_text(example())
    environment = {**os.environ, "CARAML_RESULTS": str(out), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*start, str(script)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    # Threads of torch's own: a plain DDP loop over gloo ends so now and then, too.
    aborted = ranks > 1 and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr
    record = only(out)
    assert record.status == "ok" and record.point.world == ranks and record.window is not None
    assert record.window.items == 64 * ranks * record.window.steps and record.point.global_batch == 64 * ranks
    steps = read_table(Store(out).folder(record) / record.files["steps"])
    assert set(steps["rank"]) == set(range(ranks)) and "image/s" in done.stderr


def test_a_rank_that_fails_on_its_way_out_takes_no_record_with_it(tmp_path: Path) -> None:
    script = tmp_path / "own_loop.py"
    late = "if os.environ['RANK'] == '1':\n    os.abort()\n"
    slow = (
        "import caraml.worker.measure_record as m, time as t\nwrite = m.write_record\nm.write_record = lambda *a: (t.sleep(2), write(*a))\n"
    )
    script.write_text(example().replace("import caraml\n", f"import caraml\n{slow}") + f"    {late.replace(chr(10), chr(10) + '    ')}")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "CARAML_RESULTS": str(tmp_path / "results"), "OMP_NUM_THREADS": "1"}
    assert subprocess.run(start, env=environment, capture_output=True, timeout=300, check=False).returncode != 0
    assert only(tmp_path / "results").status == "ok"


@pytest.mark.parametrize("fails", [False, True])
def test_one_rank_of_several_that_fails_after_the_window_writes_what_all_measured(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they said when the window closed: whoever failed cannot wait for the others, who may wait for ever."""
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    if fails:
        monkeypatch.setattr(Twins, "ends", lambda self, patience: pytest.fail("it waits"))
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), caraml.measure("twins", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        assert not fails or 1 / 0
    record = only(tmp_path)
    assert record.status == "ok" and record.window is not None and record.window.items == 2 * record.window.steps


@pytest.mark.parametrize("kind", [Ranks, Twins])
def test_a_loop_that_goes_on_after_its_window_has_its_record(
    kind: type[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training may go on for hours, to whatever end: a time limit, a kill, a node that fails."""
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    monkeypatch.setattr(own_loop, "ranks_in_use", kind)
    with caraml.measure("goes on", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        assert not Store(tmp_path).records(), "a loop that ends there has it once, after its idle baseline"
        for _ in range(3):
            assert not m.step(1)
        early = only(tmp_path)
        assert early.status == "ok" and early.window is not None and early.files.keys() == {"steps", "power"}
        assert early.phases[-1].name == "measure" and early.value("training_time") >= early.window.seconds  # type: ignore[operator]
        assert early.value("runtime") == pytest.approx(early.value("run_time")), "all of it until the sensors were asked"
    record = only(tmp_path)
    assert record.window == early.window and record.attempt == early.attempt == 1 and record.phases[-1].name == "idle_after"
    assert record.value("training_time") == early.value("training_time"), "whatever the loop did after its window"
    assert record.phases[-2].end == pytest.approx(record.window.end)
    assert capsys.readouterr().err.count("caraml: goes on: ok") == 2


def test_a_record_that_cannot_be_written_early_ends_no_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does one that cannot be written again take the earlier one along."""
    monkeypatch.setattr(measure_record, "make_record", lambda *_: 1 / 0)
    with caraml.measure("early", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        assert not m.step(1) and not m.step(1)
        monkeypatch.undo()
    assert m.record is not None and m.record.status == "ok" and capsys.readouterr().err.count("not written yet: ZeroDivisionError") == 1
    with caraml.measure("late", out=tmp_path / "b", policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        m.step(1)
        monkeypatch.setattr(measure_record, "write_record", lambda *_: os.open("/dev/full", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    assert only(tmp_path / "b").status == "ok" and "its record is as it was when the window closed" in capsys.readouterr().err


@pytest.mark.parametrize("goes_on", [True, False])
def test_who_comes_while_a_thread_s_step_closes_the_window_waits_for_it(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several ranks: a thread that goes on, or the end of the block, would ask the others for what they measured while they are told of
    it, and nobody would answer."""
    asked, gather = threading.Event(), own_loop.gathered
    calls = list[str]()

    def slow(*arguments: Any, **named: Any) -> Any:
        calls.append(threading.current_thread().name)
        asked.set()
        time.sleep(0.3)
        calls.append("told")
        return gather(*arguments, **named)

    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    monkeypatch.setattr(own_loop, "gathered", slow)

    def go_on() -> None:
        while m.step(1):
            time.sleep(0.005)

    with caraml.measure("threads", out=tmp_path, policy=QUICK) as m:
        closes = threading.Thread(target=go_on, name="closes")
        closes.start()
        assert asked.wait(60)
        assert not goes_on or not m.step(1)
    closes.join()
    assert calls == ["closes", "told", "MainThread", "told"]
    assert only(tmp_path).status == "ok"


def test_a_loop_that_a_thread_goes_on_with_has_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its block may end while the thread writes it early: one measurement would be two repeats."""
    begun, over, make = threading.Event(), threading.Event(), measure_record.make_record
    monkeypatch.setattr(own_loop, "quiet_baseline", lambda *_: over.set() if begun.is_set() else None)

    def slow(*arguments: Any) -> Record:
        begun.set()
        over.wait(0.3)
        return make(*arguments)

    with caraml.measure("thread", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
        monkeypatch.setattr(measure_record, "make_record", slow)
        thread = threading.Thread(target=m.step, args=(1,))
        thread.start()
        assert begun.wait(60)
    thread.join()
    assert only(tmp_path).attempt == 1 and only(tmp_path) == m.record and m.record.phases[-1].name == "idle_after"


def test_a_record_that_another_rank_wrote_early_stays_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no older one that has its folder's name, where nodes share no disk, is written over."""
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    write = measure_record.write_record
    for attempt in (1, 2):
        with caraml.measure("kept", out=tmp_path, policy=QUICK) as m:
            while m.step(1):
                time.sleep(0.005)
            if attempt == 1:
                m.step(1)
                early, kept = only(tmp_path), m._records.early
                m._records.early = m._records.record = None
                monkeypatch.setattr(Twins, "kept", lambda self, kept=int(kept.name): kept)
                monkeypatch.setattr(measure_record, "write_record", lambda *_: os.open("/dev/full", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        monkeypatch.setattr(measure_record, "write_record", write)
        assert m.record is not None and m.record.attempt == attempt
        assert Store(tmp_path).newest(m.record.key, None)[-1] == early
