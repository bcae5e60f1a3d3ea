"""Loops of one's own that are killed outright: what they had put away, and who makes their records of it."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import caraml
from caraml.base.files import write_file
from caraml.results import claim
from caraml.results.claim import CLAIM, myself
from caraml.results.finish import MEASURED
from caraml.results.journal import tables
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import JOURNAL, RECORD, Store, read_record
from caraml.suite.model import OWN_LOOP, Policy
from caraml.worker import measure as own_loop
from caraml.worker import measure_record, so_far
from caraml.worker.so_far import SoFar
from tests.conftest import MakePoint
from tests.faults.conftest import until
from tests.late_disk import LateDisk
from tests.worker.loops import QUICK, Twins, only

STEADY = Policy(min_seconds=300, max_seconds=300, idle_seconds=0, warm_up_max_seconds=0.05)
DEAD = dataclasses.replace(myself(), start="1")


@contextmanager
def in_its_window(out: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[own_loop.OwnLoop, Path]]:
    """A loop that has put away something and goes on, and its attempt; after the block it is gone, as if it was killed outright."""
    monkeypatch.setattr(so_far, "_EVERY", 0.0)
    with caraml.measure("killed", out=out, policy=STEADY) as m:
        while not (journals := [*out.glob("points/*/1/so_far.bin")]) or b'"steps"' not in journals[0].read_bytes():
            time.sleep(0.002)
            m.step(4)
        assert m._so_far._idle.acquire(timeout=60)
        m._so_far._idle.release()
        yield m, journals[0].parent
        m._ended = True
        m._until_ended.close()
        m._loop.__exit__()


def aged(folder: Path) -> None:
    for path in folder.iterdir():
        os.utime(path, (1, 1))


@contextmanager
def on_another_host() -> Iterator[None]:
    """One whose clock is an hour ahead."""
    with pytest.MonkeyPatch.context() as there:
        there.setattr(claim, "_place", lambda: "other~1~2")
        there.setattr(claim, "time", SimpleNamespace(time=lambda: time.time() + 3600))
        yield


KILLED = """
import os, sys, time, caraml

policy = caraml.Policy(min_seconds=900, max_seconds=900, warm_up_max_seconds=0.1, idle_seconds=0)
print(os.getpid(), flush=True)
with caraml.measure("killed", out=sys.argv[1], policy=policy) as m:
    while m.step(4):
        time.sleep(0.005)
"""


def test_a_loop_that_is_killed_outright_has_its_record_once_the_next_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of its steps and readings until at most two minutes before. One that goes on is left alone."""
    program, out = tmp_path / "killed_loop.py", tmp_path / "out"
    program.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(program), str(out)], stdout=subprocess.PIPE, text=True, env=METERED) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        try:
            folder: Path = until(lambda: next(out.glob("points/*/1/so_far.bin"), None), "anything put away").parent
            steps: int = until(lambda: measured_so_far(folder) or None, "steps of the window")
            again(out)
            assert not (folder / RECORD).exists()
        finally:
            os.kill(pid, signal.SIGKILL)
        process.wait(300)
    again(out)
    record = read_record(folder / RECORD)
    assert record.status == "failed" and record.ended_by_hand and record.value("throughput") is None
    assert re.fullmatch(
        r"killed by SIGKILL or a crash, or lost with its node; what was measured until \d+\.\d s is kept", record.reason or ""
    )
    assert {*record.files} == {"steps", "power"} and record.phases[-1].name == "measure" and record.facts is not None
    assert read_table(folder / record.files["steps"])["phase"].count("measure") >= steps
    assert record.unstated and str(folder / RECORD) in capsys.readouterr().err
    assert not {path.name for path in folder.iterdir()} & {"so_far.bin", "measured.json"}


def test_only_loops_of_ones_own_that_have_ended_have_their_record_from_the_next(
    tmp_path: Path, make_point: MakePoint, capsys: pytest.CaptureFixture[str]
) -> None:
    """One on another machine, or that is ending just now, is known by its files alone, and its attempt may not be seen here yet; what a
    link leads to has somebody else. Of one whose files are damaged no loop after it says that its record is made."""
    ended, ending, damaged = (Store(tmp_path / "out").new_attempt(make_point(workload=OWN_LOOP, seed=seed)) for seed in (1, 2, 3))
    linked = Store(tmp_path / "other").new_attempt(make_point(workload=OWN_LOOP))
    for folder in (ended, ending, damaged, linked):
        (folder / JOURNAL).touch()
        left = Record(key="1", attempt=1, point=make_point(), status="failed", reason="killed", started_at="then")
        (folder / MEASURED).write_text(left.model_dump_json())
    (damaged / MEASURED).write_text("")
    for folder in (ended, damaged, linked):
        aged(folder)
    (ended.parent / "2").symlink_to(linked)
    marks = [measure_record._mark(folder) for folder in (ended, ending, damaged, *(ended.parent / number for number in "234"))]
    marks[0].parent.mkdir()
    for mark in marks:
        mark.touch()
    os.utime(marks[4], (1, 1))
    measure_record.record_killed(tmp_path / "out")
    assert [(folder / RECORD).exists() for folder in (ended, ending, damaged, linked)] == [True, False, False, False]
    assert [mark.exists() for mark in marks] == [False, True, True, True, False, True], "what is over is not looked at again"
    assert not [*damaged.glob(f"{CLAIM}*")] and str(damaged) not in capsys.readouterr().err


def test_a_loop_that_is_killed_as_it_makes_its_attempt_has_its_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody would make its record. After a power cut its files are as whole as its steps."""
    marked, whole, rename, flush = list[bool](), list[str](), os.rename, measure_record.flush

    def as_it_appears(made: str, place: str) -> None:
        if Path(place).name == "1":
            marked.append(measure_record._mark(Path(place)).exists())
        rename(made, place)

    monkeypatch.setattr(os, "rename", as_it_appears)
    monkeypatch.setattr(measure_record, "flush", lambda path: (whole.append(path.name), flush(path)))
    with in_its_window(tmp_path, monkeypatch):
        pass
    assert marked == [True] and {"claim.1", "measured.json", "point.json"} == {*whole}


@pytest.mark.parametrize("of_another", [False, True], ids=["removed", "of another loop by now"])
def test_a_loop_whose_attempt_was_removed_gives_no_sign_of_life_there(
    of_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on for ever, and another loop that had got the number counted as alive when it was killed."""
    monkeypatch.setattr(measure_record, "BEAT_SECONDS", 0.001)
    mine = tmp_path / f"{CLAIM}1"
    mine.write_text(str(myself()))
    before = {*threading.enumerate()}  # loops of other tests go on
    measure_record._stay_on(mine)
    signs = {*threading.enumerate()} - before
    if of_another:
        write_file(mine, str(DEAD))
    else:
        mine.unlink()
    for thread in signs:
        thread.join(60)
    assert signs and not any(thread.is_alive() for thread in signs)


class Second(Twins):
    """Rank 1 of them, on the same disk."""

    def __init__(self, tells: bool | None = True) -> None:
        super().__init__()
        self.rank, self._tells = 1, tells

    def telling(self) -> Any:
        return nullcontext(self._tells)


def test_what_rank_0_of_several_has_put_away_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All may be killed outright at once. Of two attempts at one loop one would say of it what nobody knows: a rank that can say more uses
    rank 0's, which has the sensors."""
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    for name in ("all", "rank 0"):
        out = tmp_path / name
        with in_its_window(out, monkeypatch) as (m, folder):
            pass
        (mark,) = (out / "open").iterdir()
        if name == "all":
            (folder / f"{CLAIM}1").write_text(str(DEAD))
            measure_record.record_killed(out)
            assert "SIGKILL" in (read_record(folder / RECORD).reason or "") and not mark.exists()
            continue
        monkeypatch.setattr(measure_record, "BEAT_SECONDS", 0.001)
        records = [measure_record.LoopRecords(m._point, m._records._facts, out, Second(tells)) for tells in (True, None, None)]
        for one in records:
            one._next_attempt = 1  # as rank 0 has it
        assert [one.to_record(m._point, alone=True).__enter__() for one in records] == [folder, folder, None]
        os.utime(folder / f"{CLAIM}2", (1, 1))
        until(lambda: (folder / f"{CLAIM}2").stat().st_mtime > 1 or None, "a sign of life of the rank that took over")
        SoFar(lambda: tmp_path, 1, m._log, "then").rest(m._loop, None, folder)
        records[0].keep_failure(folder, "failed", "rank 1: gone")
        assert {*read_table(folder / only(out).files["steps"])["rank"]} == {0, 1}
        assert not mark.exists() and not [*folder.glob("so_far*")] and only(out).attempt == 1
        SoFar(partial(Path, folder), 0, m._log, "then").rest(m._loop, None)
        assert not [*folder.glob("so_far*")], "rank 0 lives on for a moment"


def test_a_rank_uses_the_attempt_of_a_node_that_is_gone_before_it_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It made one of its own, with the number of that; the record said of the loop that a folder could not be renamed."""
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    with in_its_window(tmp_path, monkeypatch) as (m, folder):
        pass
    LateDisk(tmp_path, monkeypatch).not_seen(folder.parent)
    records = measure_record.LoopRecords(m._point, m._records._facts, tmp_path, Second(None))
    assert records._next_attempt == 1 and records.to_record(m._point, alone=True).__enter__() == folder
    (folder / RECORD).touch()


METERED = {**os.environ, "CARAML_POWER": "fake:constant"}


def measured_so_far(folder: Path) -> int:
    found = tables(folder)
    count = read_table(folder / found["steps"])["phase"].count("measure") if "steps" in found else 0
    for file in found.values():
        (folder / file).unlink()
    return count


def again(out: Path) -> None:
    with caraml.measure("smaller", out=out, policy=QUICK) as m:
        m.step(4)


def test_a_loop_in_a_long_step_is_not_taken_for_dead_by_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put away in a step or a validation of ten minutes, nor beyond 512 MB."""
    monkeypatch.setattr(measure_record, "BEAT_SECONDS", 0.001)
    with in_its_window(tmp_path, monkeypatch) as (_, folder):
        aged(folder)
        until(lambda: claim.recent(folder) or None, "a sign of life")
        with on_another_host():
            measure_record.record_killed(tmp_path)
        assert not (folder / RECORD).exists()
        (folder / RECORD).touch()


def test_of_several_loops_that_begin_at_once_one_makes_the_record_of_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other found no journal any more, and its record had no tables. It takes minutes: the user is told before."""
    with in_its_window(tmp_path, monkeypatch) as (_, folder):
        pass
    (folder / f"{CLAIM}1").write_text(str(DEAD))
    finish, begun = measure_record.finish, list[Path]()

    def at_once(attempt: Path, *told: Any) -> None:
        begun.append(attempt)
        assert f"its record is made first, of 0 MB: {attempt / RECORD}" in capsys.readouterr().err
        with on_another_host():
            measure_record.record_killed(tmp_path)
        measure_record.record_killed(tmp_path)
        finish(attempt, *told)

    monkeypatch.setattr(measure_record, "finish", at_once)
    measure_record.record_killed(tmp_path)
    assert begun == [folder] and "steps" in only(tmp_path).files and not [*(tmp_path / "open").iterdir()]


def test_a_loop_that_is_killed_as_it_makes_its_tables_keeps_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a day take minutes; it was recorded as killed by SIGKILL. The next loop needs no room for a thread to make its record."""

    def killed(*_: Any) -> None:
        raise SystemExit

    def full(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with in_its_window(tmp_path, monkeypatch) as (m, folder), monkeypatch.context() as now:
        now.setattr("caraml.results.journal.tables", killed)
        with suppress(SystemExit):
            m._fail("oom", "the device is full", alone=True)
    assert not (folder / RECORD).exists()
    began = read_record(folder / MEASURED).started_at
    (folder / f"{CLAIM}1").write_text(str(DEAD))
    with monkeypatch.context() as now:
        now.setattr("threading.Thread.start", full)
        measure_record.record_killed(tmp_path)
    record = only(tmp_path)
    assert (record.status, record.reason, {*record.files}, record.started_at) == ("oom", "the device is full", {"steps"}, began)


def test_what_a_loop_had_put_away_stays_where_there_is_no_room_for_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with in_its_window(tmp_path, monkeypatch) as (m, folder), monkeypatch.context() as now:
        now.setattr("caraml.results.journal.tables", full)
        m._fail("oom", "the device is full", alone=True)
    assert (only(tmp_path).reason, only(tmp_path).files) == ("the device is full", {}) and not (folder / MEASURED).exists()
    assert "steps" in tables(folder)


def test_records_of_earlier_loops_are_no_part_of_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take minutes, which stood in the loop's phases and in the time to its first step. All ranks count from when they are done."""
    times = list[float]()
    note = lambda *_: times.append(time.monotonic())  # noqa: E731
    monkeypatch.setattr(measure_record, "record_killed", note)
    monkeypatch.setattr(Twins, "barrier", note)
    monkeypatch.setattr(own_loop, "ranks_in_use", Twins)
    with caraml.measure("later", out=tmp_path, policy=QUICK) as m:
        assert len(times) >= 2 and m._log.origin >= times[1]
        m.step(1)
