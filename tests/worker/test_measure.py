"""A loop of one's own gives the record that a built-in workload gives: alone, on several ranks, and when it goes wrong."""

from __future__ import annotations

import errno
import gc
import io
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import caraml
from caraml.analysis.grouping import work_of
from caraml.base import signals
from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.engine.device import CpuDevice
from caraml.engine.ranks import LooseRanks, Ranks
from caraml.power.signals import Constant
from caraml.report.terminal import record_view
from caraml.results.record import Record
from caraml.results.rows import read_table, row_of, write_table
from caraml.results.store import Store
from caraml.suite.model import Policy
from caraml.worker import measure as own_loop
from caraml.worker import measure_record, place

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"
QUICK = Policy(target=0.2, min_seconds=0.4, max_seconds=5, min_steps=8, warm_up_max_seconds=5, idle_seconds=0)


def example() -> str:
    """The example's source, with a window that ends after a second however much the steps vary: both ranks compute all the time."""
    text = EXAMPLE.read_text(encoding="utf-8")
    longest = "min_seconds=1, max_seconds=10"
    assert text.count(longest) == 1
    return text.replace(longest, "min_seconds=0.3, max_seconds=1, warm_up_max_seconds=0.5")


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
    before = records[0].model_dump(mode="json")
    del before["point"]["params"]["counted"]
    assert work_of(Record.model_validate(before)) == work_of(records[0]), "records of earlier versions do not say it there"


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
    with pytest.raises(KeyboardInterrupt), caraml.measure("interrupted", out=tmp_path, policy=QUICK) as m:
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


def test_a_thread_that_goes_on_waits_for_the_one_whose_step_closes_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several ranks: it would ask the others for what they measured while they are told of it, and nobody would answer."""
    asked, known, gather = threading.Event(), threading.Event(), own_loop.gathered
    calls = list[str]()

    def slow(*arguments: Any, **named: Any) -> Any:
        calls.append(threading.current_thread().name)
        asked.set()
        known.wait(0.3)
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
        assert not m.step(1)
        assert calls == ["closes"]
        closes.join()
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
                monkeypatch.setattr(Twins, "kept", lambda self, kept=kept: kept)
                monkeypatch.setattr(measure_record, "write_record", lambda *_: os.open("/dev/full", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        monkeypatch.setattr(measure_record, "write_record", write)
        assert m.record is not None and m.record.attempt == attempt
        assert Store(tmp_path).newest(m.record.key, None)[-1] == early


# -- where a loop goes while it is measured -----------------------------------------------------------------------------------------------


def test_sensors_are_read_no_more_where_the_idle_baseline_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    reading = lambda: [thread.name for thread in threading.enumerate() if thread.name.startswith("power-")]  # noqa: E731
    found: list[str] = []

    def interrupted(*_: Any) -> None:
        found.extend(reading())
        raise KeyboardInterrupt

    monkeypatch.setattr(own_loop, "quiet_baseline", interrupted)
    before = reading()
    with pytest.raises(KeyboardInterrupt), caraml.measure("early", out=tmp_path, policy=QUICK):
        pytest.fail("the block began")
    assert len(found) > len(before) and reading() == before
    record = only(tmp_path)
    assert (record.status, record.reason, {*record.files}) == ("failed", "KeyboardInterrupt", {"power"})
    assert [phase.name for phase in record.phases] == ["idle"]


def test_results_go_where_the_block_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with caraml.measure("moves", out="results", policy=QUICK) as m:
        os.chdir("elsewhere")
        m.step(1)
    assert only(tmp_path / "results") == m.record and not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("fails", ["claim_attempt", "make_record"])
def test_a_full_disk_takes_no_measurement_with_it(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the table of steps, or in it; what was written until then is taken along."""
    out, todo = tmp_path / "out", [1]
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    monkeypatch.setattr(measure_record.tempfile, "gettempdir", lambda: str(tmp_path))
    where: Any = Store if fails == "claim_attempt" else measure_record
    whole = getattr(where, fails)

    def full_once(*arguments: Any) -> Any:
        if todo:
            todo.pop()
            raise OSError(errno.ENOSPC, "No space left on device", str(out))
        return whole(*arguments)

    monkeypatch.setattr(where, fails, full_once)
    record = measured(out)
    (other,) = tmp_path.glob("caraml-results*")
    assert only(other) == record and record.status == "ok" and not Store(out).records()
    assert all((Store(other).folder(record) / file).exists() for file in record.files.values()) and set(record.files) == {"steps", "power"}
    assert f"{out}: No space left on device; the record goes to {other}" in capsys.readouterr().err


@pytest.mark.parametrize("fails", [False, True])
def test_a_launcher_that_ends_all_ranks_waits_for_the_record(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it does as soon as one has failed, and asks first."""
    there, write = list[bool](), measure_record.write_record

    def ended(folder: Path, record: Record) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(folder, record)

    monkeypatch.setattr(measure_record, "write_record", ended)
    before = signal.signal(signal.SIGTERM, lambda *_: there.append(bool(Store(tmp_path).records())))
    try:
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            measured(tmp_path, items=lambda: 1 // (not fails))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert there == [True]


def test_a_program_that_ends_at_once_when_it_is_asked_to_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked, from the end of the baseline on: what it raises then waits for the record."""
    of_steps = measure_record.LoopRecords.of_steps

    def asked(self: measure_record.LoopRecords, everyone: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return of_steps(self, everyone)

    def over(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(measure_record.LoopRecords, "of_steps", asked)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with pytest.raises(SystemExit):
            measured(tmp_path)
        monkeypatch.setattr(own_loop, "quiet_baseline", lambda ranks, instruments, seconds: seconds and over())
        with pytest.raises(SystemExit), caraml.measure("baseline", out=tmp_path, policy=QUICK) as m:
            while m.step(1):
                time.sleep(0.005)
            monkeypatch.setattr(own_loop, "quiet_baseline", over)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [(record.status, record.attempt) for record in Store(tmp_path).records()] == [("ok", 1)] * 2


def test_a_signal_that_ends_the_loop_waits_for_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that were written at once one was cut off, and left an attempt without a record."""
    taken: list[bool] = []
    write = own_loop.write_readings

    def held(*rest: Any) -> dict[str, str]:
        thread = threading.Thread(target=lambda: taken.append(m._writing.acquire(blocking=False)))
        thread.start()
        thread.join()
        return write(*rest)

    monkeypatch.setattr(own_loop, "write_readings", held)
    with caraml.measure("held", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.005)
    assert taken == [False] and only(tmp_path).status == "ok"


def test_readings_that_cannot_be_written_leave_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    asked: list[Any] = []

    def full(folder: Path, name: str, *rest: Any) -> str:
        if name == "power":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_table(folder, name, *rest)

    monkeypatch.setattr("caraml.worker.record.write_table", full)
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    monkeypatch.setattr(Twins, "gather", lambda self, value: asked.append(value) or [value, value])
    record = measured(tmp_path)
    assert record.status == "ok" and set(record.files) == {"steps"} and None in asked


def test_a_loop_whose_errors_nobody_reads_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    assert measured(tmp_path).status == "ok"


@pytest.mark.parametrize("where", ["idle", "warm_up", "measure", "idle_after"])
@pytest.mark.parametrize("kind", [Ranks, Twins])
def test_a_loop_that_is_killed_leaves_a_record(where: str, kind: type[Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Slurm at the time limit, or by scancel: in its idle baselines, in its steps, and as it waits for other ranks."""
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    monkeypatch.setattr(own_loop, "ranks_in_use", kind)
    killed = threading.Event()
    monkeypatch.setattr(signals, "_end_by", lambda number: killed.set())

    def kill() -> None:
        signal.raise_signal(signal.SIGTERM)
        assert killed.wait(60)
        raise SystemExit  # the process would be gone

    def baseline(ranks: Ranks, instruments: Any, seconds: float) -> None:
        if where == ("idle" if "m" not in loops else "idle_after"):
            kill()

    monkeypatch.setattr(own_loop, "quiet_baseline", baseline)
    steps, loops = 0, dict[str, Any]()
    with pytest.raises(SystemExit), caraml.measure("killed", out=tmp_path, policy=QUICK) as m:
        loops["m"] = m
        while m.step(1):
            time.sleep(0.005)
            steps += 1
            if m._log.current == where and len(m._loop._timer.read) > 3:
                kill()
    record = only(tmp_path)
    assert record.attempt == 1 and "power" in record.files
    if where == "idle_after":
        assert record.status == "ok" and record.window is not None
        return
    assert record.phases[-1].name == where
    assert Store(tmp_path).newest(record.key, 1) == [], "it says nothing of the machine"
    rank = "rank 0: " if kind is Twins else ""
    assert (record.status, record.reason) == ("failed", f"{rank}killed by SIGTERM in phase {where}, after {steps} steps")
    assert where == "idle" or len(read_table(Store(tmp_path).folder(record) / record.files["steps"])["seconds"]) >= steps - 1


FORKED = """
import multiprocessing, signal, sys, time, caraml

def wait():
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    time.sleep(60)

context, policy = multiprocessing.get_context("fork"), caraml.Policy(min_steps=4, max_steps=40, warm_up_max_seconds=0.1, idle_seconds=0)
with caraml.measure("forks", out=sys.argv[1], policy=policy) as m:
    while m.step(1):
        process = context.Process(target=wait)
        process.start()
        process.terminate()
        process.join()
        assert process.exitcode == -signal.SIGTERM
    other = context.Process(target=wait)
    other.start()
other.terminate()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("on")
"""


def test_a_signal_for_a_fork_ends_the_fork_alone(tmp_path: Path) -> None:
    """At once, and with the status that it has without CARAML; and one that lives on keeps no block open."""
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout == "on\n", done.stderr
    assert only(tmp_path).status == "ok"


GENERATOR = """
import sys, time, caraml

def measured(name, data):
    with caraml.measure(name, out=sys.argv[1], policy=caraml.Policy(min_seconds=60, warm_up_max_seconds=0.1, idle_seconds=0)) as m:
        for batch in data:
            yield batch
            m.step(2)

def some(batches):
    for batch in batches:
        time.sleep(0.005)
        if batch == 60:
            break

some(measured("closed", range(1000)))
open_still = measured("open", range(1000))
some(open_still)
print("on")
"""


def test_a_generator_that_is_left_before_its_end_is_measured_until_then(tmp_path: Path) -> None:
    """Also where only the end of the program closes it: threads cannot be started any more then, and who waited for one hung."""
    done = subprocess.run([sys.executable, "-c", GENERATOR, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stdout == "on\n", done.stderr
    records = {record.point.benchmark: record for record in Store(tmp_path).records()}
    assert {name: record.status for name, record in records.items()} == {"closed": "ok", "open": "ok"}, records


FORKS = """
import os, sys, time, caraml
with caraml.measure("forks", out=sys.argv[1], policy=caraml.Policy(min_steps=4, max_steps=4, warm_up_max_seconds=0.1, idle_seconds=0)) as m:
    while m.step(1):
        time.sleep(0.01)
        if m._loop.steps == 2 and os.fork() == 0:
            try:
                m.step(1)
            except caraml.base.errors.InputError as error:
                print(error)
            sys.exit()
    os.wait()
"""


def test_a_fork_measures_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False)
    assert "found a fork of the process that measures" in done.stdout, done.stderr
    assert only(tmp_path).status == "ok" and only(tmp_path).attempt == 1


def test_a_device_that_is_used_from_within_the_block_on_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the host would say how fast steps are launched."""
    device = SimpleNamespace(torch_device=torch.device("cuda", 0))
    with pytest.raises(InputError, match="found a loop on cuda:0, and on cpu"), caraml.measure("late", out=tmp_path, policy=QUICK) as m:
        for module in (own_loop, place):
            monkeypatch.setattr(module, "device_in_use", lambda: device)
        with pytest.raises(InputError):
            m.step(1)
        m.step(1)  # no less wrong than the first


def test_steps_after_the_block_are_not_measured(tmp_path: Path) -> None:
    with caraml.measure("short", out=tmp_path, policy=QUICK) as m:
        assert m.step(1) and not m.done
    assert not m.step(1) and m.done and m.record is not None and "1 step," in (m.record.reason or "")
    m.finish(None)
    assert only(tmp_path).attempt == 1, "nor recorded once more"


def test_steps_of_several_threads_all_count(tmp_path: Path) -> None:
    def work() -> None:
        while m.step(1):
            pass

    with caraml.measure("threads", out=tmp_path, policy=QUICK) as m:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert m.record is not None and m.record.window is not None and m.record.window.items == m.record.window.steps


# -- ranks that part ---------------------------------------------------------------------------------------------------------------------


LATE, GONE = "Timed out waiting 60000ms for send operation to complete", "Connection closed by peer"


class Pair(LooseRanks):
    """Rank 0 of two, of which the other leaves its loop after ``ends`` steps, or is never heard of again then."""

    def __init__(self, ends: int, silent: str = "", alone: bool = False) -> None:
        super().__init__(0, 2, None)
        self.ends_at, self.silent, self.alone, kept = ends, silent, alone, dict[str, Any]()
        add = lambda key, more: kept.__setitem__(key, kept.get(key, 0) + more) or kept[key]  # noqa: E731
        self._store = SimpleNamespace(set=kept.__setitem__, get=kept.get, check=lambda keys: keys[0] in kept, add=add)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def _exchange(self, mine: list[int], patience: float | None) -> list[list[int]]:
        if self.silent and self.steps >= self.ends_at and (mine[2] or self.alone):
            raise RuntimeError(self.silent)
        return [mine, [0, min(self.steps, self.ends_at), int(self.steps > self.ends_at or mine[2])]]


@pytest.mark.parametrize(
    ("ranks", "steps", "words"),
    [
        (Pair(12), 1000, r"rank 1 ended after 12 steps, rank 0 going on after \d+ steps"),
        (Pair(19), 20, "rank 0 ended after 20 steps, rank 1 ended after 19 steps|rank 1 ended after 19 steps, rank 0 ended after 20 steps"),
        (Pair(20, LATE), 20, "rank 0 ended after 20 steps, rank 1 not ended 60 s later"),
        (
            Pair(1, LATE, alone=True),
            20,
            r"rank 0 going on after 1 step, rank 1 not at its next step \d+ s later(.|\n)*longer CARAML_H",
        ),
        (Pair(20), 20, None),
    ],
    ids=["goes on", "one more", "hangs", "m.step on one alone", "together"],
)
def test_ranks_whose_loops_end_apart_are_told_where(
    ranks: Pair, steps: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait in one collective then, and some in another, or in one of the loop's own: for half an hour, as gloo does by default."""
    left: list[Any] = []
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    monkeypatch.setattr(ranks, "leave", lambda: left.append(ranks))
    policy = QUICK.model_copy(update={"min_seconds": 300.0, "max_seconds": 300.0})
    with (
        pytest.raises(InputError, match=words) if words else nullcontext(),
        caraml.measure("apart", out=tmp_path, policy=policy) as m,
    ):
        for _ in range(steps):
            time.sleep(0.001)
            m.step(1)
    record = only(tmp_path)
    if words is None:
        assert record.status == "ok" and left == [ranks], "its group has files and threads"
        return
    assert record.status == "failed" and re.search(words, record.reason or "") and record.files["steps"]


@pytest.mark.parametrize("comes", ["not", "late", "to a disk of its own"])
def test_a_rank_that_does_not_leave_its_loop_holds_no_other_for_long(
    comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hang in a collective of its own, for as long as that lasts. What was measured is known, and the program goes on as without."""
    ranks = Pair(1, LATE if comes == "not" else GONE)
    left: list[Any] = []
    if comes != "not":
        ranks._store.set(f"{ranks._key}/parted", "")
    if "disk" in comes:
        monkeypatch.setattr(ranks, "telling", lambda: nullcontext(False))
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    monkeypatch.setattr(ranks, "leave", lambda: left.append(ranks))
    monkeypatch.setattr(ranks, "_longest", lambda: 60.0)
    exchange, asked = ranks._exchange, []
    monkeypatch.setattr(ranks, "_exchange", lambda mine, patience: asked.append(patience) or exchange([*mine[:2], 0], patience))
    with caraml.measure("hangs", out=tmp_path, policy=QUICK) as m:
        ranks.ends_at = 10**6
        while m.step(1):
            time.sleep(0.005)
        monkeypatch.setattr(ranks, "_exchange", lambda *_: exchange([0, ranks.steps, 1], 60.0))
        ranks.ends_at = 0
    assert m.record == only(tmp_path) and m.record.status == "ok" and left == [ranks] and ranks._parted()
    assert "rank 0 leaves the block of 'hangs' without others" in capsys.readouterr().err
    assert m.record.phases[-1].name == "measure" and {*asked} == {60.0}


def test_the_first_of_several_ranks_that_fail_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others fail of that it is gone, which says nothing."""
    ranks = Pair(12, GONE, alone=True)
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    for _ in range(2):  # again, where it could not
        with ranks.telling() as first:
            assert first
    ranks = Pair(12, GONE, alone=True)
    ranks._store = SimpleNamespace(add=lambda *_: 2, wait=lambda *_: None)
    with pytest.raises(RuntimeError, match="Connection closed"), caraml.measure("second", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.001)
    assert not Store(tmp_path).records()


def test_a_rank_records_where_rank_0_and_the_store_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say then which rank is to: the one that makes the attempt."""

    def gone(*_: Any) -> None:
        raise RuntimeError("Broken pipe")

    loops: list[own_loop.OwnLoop] = []
    for _ in range(2):
        ranks = Pair(12, GONE, alone=True)
        ranks._store = SimpleNamespace(add=gone, wait=gone, set=gone, check=gone)
        monkeypatch.setattr(own_loop, "ranks_in_use", lambda ranks=ranks: ranks)
        with pytest.raises(RuntimeError, match="Connection closed"), caraml.measure("survivor", out=tmp_path, policy=QUICK) as m:
            m._records._next_attempt = 1  # as if both were ranks of one loop
            loops.append(m)
            while m.step(1):
                time.sleep(0.001)
    assert only(tmp_path).attempt == 1 and "Connection closed" in (only(tmp_path).reason or "")
    assert loops[0].record == only(tmp_path) and loops[1].record is None


def test_the_group_of_a_loop_is_gone_after_it() -> None:
    """Each has files and threads: a few hundred loops in a process would be too many."""
    files = Path("/proc/self/fd")
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = len([*files.iterdir()])
        ranks = LooseRanks(0, 1, dist.new_group(backend="gloo"))
        assert ranks.agree(7) == 7 and len([*files.iterdir()]) > before
        ranks.leave()
        assert len([*files.iterdir()]) <= before
    finally:
        dist.destroy_process_group()


def test_a_loop_may_destroy_its_groups_before_the_block_ends() -> None:
    """As programs do at the end of their training. Nor does it matter where they have torch make tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = LooseRanks(0, 1, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
    with torch.device("meta"):
        ranks.ends(60.0)
    with ranks.telling() as first:
        assert first
    assert ranks.gather(7) == [7]
    ranks.leave()


APART = """
import sys, torch, torch.distributed as dist, caraml
dist.init_process_group("gloo")
with caraml.measure("apart", out=sys.argv[1], policy=caraml.Policy(min_seconds=60, max_seconds=60, idle_seconds=0)) as m:
    for _ in range(30 - 10 * dist.get_rank()):
        dist.all_reduce(torch.ones(1))
        m.step(1)
"""


def test_a_rank_that_waits_for_one_that_left_is_not_waited_for_long(tmp_path: Path) -> None:
    """As in DDP: the longer loop waits for the gradients of the shorter one, which waits for its end."""
    script, start = tmp_path / "apart.py", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script.write_text(APART)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CARAML_HANG_SECONDS": "0.5"}
    done = subprocess.run([*start, str(script), str(tmp_path / "out")], env=environment, capture_output=True, timeout=120, check=False)
    reason = only(tmp_path / "out").reason or ""
    assert done.returncode and re.search("rank 1: .*rank 1 ended after 20 steps, rank 0 not ended .* s later", reason), reason


# -- what is known, and what is not -----------------------------------------------------------------------------------------------------


def measured(out: Path, name: str = "loop", items: Callable[[], Any] = lambda: 4, **told: Any) -> Record:
    with caraml.measure(name, out=out, policy=QUICK, **told) as m:
        while m.step(items()):
            time.sleep(0.005)
    assert m.record is not None
    return m.record


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
        time.sleep(0.2)
    record = only(tmp_path)
    rows = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    over = rows["start"][-1] + rows["seconds"][-1]
    assert "not_steady" in record.flags and rows["phase"].count("after") == inside
    assert all(phase.end <= over for phase in record.phases if phase.name != "idle_after")
    assert record.value("training_time") == pytest.approx(over - rows["start"][0], abs=0.1)


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
