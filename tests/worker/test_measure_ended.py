"""Where a loop of one's own goes while it is measured, and what ends it: full disks, signals, forks, threads."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import caraml
from caraml.base import signals
from caraml.base.errors import InputError
from caraml.engine.ranks import Ranks
from caraml.results.record import Record
from caraml.results.rows import read_table, write_table
from caraml.results.store import Store
from caraml.worker import measure as own_loop
from caraml.worker import measure_record, place
from tests.worker.loops import QUICK, Twins, measured, only


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
        if (todo and fails == "make_record") or getattr(arguments[0], "root", None) == out:  # while it is measured, too
            todo.clear()
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
    assert there == [True] * (1 if fails else 2)


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


def test_a_measured_loop_has_its_record_before_the_baseline_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which takes seconds, in which SIGKILL leaves no time to write it; and tells of it once."""
    found: list[list[Record]] = []
    monkeypatch.setattr(own_loop, "quiet_baseline", lambda *_: found.append(Store(tmp_path).records()))
    record = measured(tmp_path)
    before, early = found
    assert not before and early[0].status == "ok" and early[0].metrics["throughput"] == record.metrics["throughput"]
    assert record == only(tmp_path) and (early[0].attempt, record.attempt) == (1, 1)
    assert capsys.readouterr().err.count("record.json") == 1


@pytest.mark.parametrize("kills", [True, False])
def test_a_loop_of_several_ranks_that_ends_as_its_record_is_begun_has_one_attempt(
    kills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a signal, or as another rank is gone: the attempt that was made for the last word has the early one."""
    killed = threading.Event()

    def ended(*_: Any) -> None:
        if kills:
            signal.raise_signal(signal.SIGTERM)
            assert killed.wait(60)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(signals, "_end_by", lambda number: killed.set())
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    monkeypatch.setattr(own_loop, "write_readings", ended)
    with pytest.raises(RuntimeError, match="Connection closed"):
        measured(tmp_path)
    assert (only(tmp_path).status, only(tmp_path).attempt) == ("ok", 1)
    assert [path.name for path in Store(tmp_path).folder(only(tmp_path)).parent.iterdir()] == ["1"]


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
    done = subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
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
    done = subprocess.run([sys.executable, "-c", GENERATOR, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
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
    done = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False)
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
