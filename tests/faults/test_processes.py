"""Processes that are killed, stopped, or told to end: a right status, a right exit code, no orphans, and nothing lost that was there.

Of each kind, one test meets processes that are each other's children, as they are for users; the others those of the fork server.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from caraml.engine.watchdog import SILENCE
from caraml.results.journal import tables
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import JOURNAL
from caraml.system.variables import PATIENCE
from tests.faults.conftest import DEADLINE, Victim, until

SHORT = {"params": {"device": "asynchronous", "step_seconds": 0.02}}
LONG = {**SHORT, "measure": {"min_seconds": 900, "max_seconds": 900}}
"""Longer than anything is waited for: what has ended was ended."""
TWO_RANKS = {**LONG, "devices": 2}
SILENT = 34
"""Seconds of patience: a healthy rank that a busy machine stops for ten seconds is not called silent."""


def put_away(folder: Path) -> int:
    """Steps of a window that are on the disk while it is open, once there are any."""

    def measured() -> int | None:
        steps = read_table(folder / name)["phase"].count("measure") if (name := tables(folder).get("steps")) else 0
        return steps or None

    found: int = until(measured, "steps in the window")
    for table in folder.glob("*.parquet"):
        table.unlink()
    return found


def kept_with_the_reason(record: Record, folder: Path, steps: int) -> None:
    assert record.status == "failed" and "SIGKILL" in (record.reason or "")
    assert re.search(r"what was measured until \d+\.\d s is kept", record.reason or "") and {*record.files} == {"steps", "power"}
    assert read_table(folder / record.files["steps"])["phase"].count("measure") >= steps
    assert record.phases[-1].name == "measure" and not (folder / JOURNAL).exists()


def test_a_killed_worker_is_a_failed_point_and_the_next_one_is_measured(victim: Victim) -> None:
    runner = victim.start(victim.suite(LONG, {**SHORT, "global_batch": 8}))
    folder = victim.wait_for("measure")
    steps = put_away(folder)
    os.kill(victim.workers()[0], signal.SIGKILL)
    said, _ = runner.communicate(timeout=DEADLINE)
    assert runner.returncode == 1
    kept_with_the_reason(victim.record(folder), folder, steps)
    assert [record.status for record in victim.records()] == ["failed", "ok"], said
    victim.no_orphans()


def test_a_killed_rank_takes_the_others_with_it(victim: Victim) -> None:
    runner = victim.start(victim.suite(TWO_RANKS), fresh=True)
    folder = victim.wait_for("measure")
    os.kill(victim.workers()[-1], signal.SIGKILL)
    runner.communicate(timeout=DEADLINE)
    record = victim.record(folder)
    assert runner.returncode == 1 and record.status == "failed" and "killed by SIGKILL" in (record.reason or "")
    assert {*record.files} == {"steps", "power"}, "what rank 0 measured"
    victim.no_orphans()


def test_ranks_that_are_killed_at_once_leave_what_was_measured(victim: Victim) -> None:
    """As by the kernel, or with their node."""
    runner = victim.start(victim.suite(TWO_RANKS))
    folder = victim.wait_for("measure")
    steps = put_away(folder)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # else the last may be asked to end before it is killed
        for pid in victim.workers():
            os.kill(pid, number)
    runner.communicate(timeout=DEADLINE)
    assert runner.returncode == 1
    kept_with_the_reason(victim.record(folder), folder, steps)
    victim.no_orphans()


def test_a_rank_that_is_killed_after_the_window_takes_no_measurement_with_it(victim: Victim) -> None:
    runner = victim.start(victim.suite({**SHORT, "devices": 2, "measure": {"idle_seconds": 10}}))
    folder = victim.wait_for("idle_after")
    os.kill(victim.workers()[-1], signal.SIGKILL)
    said, _ = runner.communicate(timeout=DEADLINE)
    record = victim.record(folder)
    assert runner.returncode == 0 and record.status == "ok" and record.value("throughput") and record.value("energy"), said
    assert "ended before it was done: killed by SIGKILL" in (record.reason or "") and "ended before it was done" in said
    victim.no_orphans()


def test_a_stopped_rank_is_named_by_the_watchdog(victim: Victim) -> None:
    runner = victim.start(victim.suite(TWO_RANKS), **{PATIENCE: str(SILENT)})
    folder = victim.wait_for("measure")
    os.kill(victim.workers()[-1], signal.SIGSTOP)
    runner.communicate(timeout=DEADLINE)
    record = victim.record(folder)
    assert runner.returncode == 1 and record.status == "failed"
    assert f"left no sign of life for {SILENT * SILENCE:.3g} s" in (record.reason or "") and (record.reason or "").startswith("rank ")
    victim.no_orphans()


def test_input_that_hangs_is_named_by_the_watchdog(victim: Victim) -> None:
    hanging = {"devices": 2, "params": {**SHORT["params"], "hang_at": 60}}
    code, said = victim.run(victim.suite({**LONG, **hanging}), **{PATIENCE: str(SILENT)})
    (record,) = victim.records()
    assert code == 1, said
    assert record.status == "failed" and re.search(r"no step for \d\S* s: rank 1 waiting for input", record.reason or "")
    victim.no_orphans()


def test_a_killed_runner_loses_nothing(victim: Victim) -> None:
    suite = victim.suite(SHORT, {**SHORT, "global_batch": 8})
    runner = victim.start(suite, fresh=True)
    folder = victim.wait_for("measure")
    runner.kill()
    runner.wait()
    assert victim.record(folder).status == "ok", "the point that was running ends by itself"
    victim.no_orphans()
    code, _ = victim.run(suite)
    assert code == 0 and [record.status for record in victim.records()] == ["ok", "ok"]
    assert len(victim.attempts()) == 2, "what has a result is not measured again"


@pytest.mark.parametrize(("number", "code", "fresh"), [(signal.SIGTERM, 143, True), (signal.SIGINT, 130, False)])
def test_a_runner_that_is_told_to_end_ends_its_point_and_can_go_on(victim: Victim, number: signal.Signals, code: int, fresh: bool) -> None:
    suite = victim.suite(SHORT, {**LONG, "global_batch": 8})
    runner = victim.start(suite, fresh=fresh)
    folder = victim.wait_for("measure", "p1")
    runner.send_signal(number)
    said, _ = runner.communicate(timeout=DEADLINE)
    assert runner.returncode == code and "run the same command again" in said
    assert [record.status for record in victim.records()] == ["ok", "failed"]
    assert "the campaign was stopped" in (victim.record(folder).reason or "")
    victim.no_orphans()


def test_an_impatient_user_gets_out_at_once_and_leaves_nothing_behind(victim: Victim) -> None:
    runner = victim.start(victim.suite({**LONG, "devices": 2}), fresh=True)
    victim.wait_for("measure")
    for pid in victim.workers():
        os.kill(pid, signal.SIGSTOP)  # such a worker cannot obey, so that the second interrupt comes while the first is being seen to
    runner.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        runner.wait(timeout=1.0)
    runner.send_signal(signal.SIGINT)
    runner.communicate(timeout=DEADLINE)
    assert runner.returncode == 130
    victim.no_orphans()
