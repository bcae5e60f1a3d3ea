"""Campaigns that are killed, run twice at once, left and taken up again, or run out of disk: nothing is lost and nothing runs twice."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from bench.campaign.kill import torment
from caraml.__main__ import main
from caraml.base.errors import ExitCode
from caraml.campaign import machine
from caraml.campaign.attempt import find
from caraml.campaign.machine import DeviceLock, Pace
from caraml.results import claim
from caraml.results.claim import (
    CLAIM,
    HANDLE,
    RUNNERS,
    SILENCE_SECONDS,
    STARTED,
    Heartbeat,
    Runner,
    alive,
    handle_of,
    holder,
    myself,
    start_time,
    take_over,
    withdraw,
)
from caraml.results.status import ProgressLine, ProgressReader
from caraml.results.store import Store
from tests.conftest import MakePoint
from tests.waiting import until

DEAD = Runner(myself().place, 999_999_999, "1")
SUITE = """name = "s"
title = "S"
[[benchmark]]
name = "append"
workload = "command"
params = {{ argv = ["sh", "-c", "echo {{i}} >>{ran}; {then}"], energy = {energy}, i = {values} }}
measure = {{ idle_seconds = 0 }}
"""


def suite(folder: Path, points: int, then: str = "true", energy: bool = False) -> list[str]:
    text = SUITE.format(ran=folder / "ran", then=then, energy=str(energy).lower(), values=list(range(points)))
    (folder / "s.toml").write_text(text)
    return [sys.executable, "-m", "caraml", "run", str(folder / "s.toml"), "--out", str(folder / "out")]


def ran(folder: Path) -> Counter[str]:
    return Counter((folder / "ran").read_text().split())


def claimed(store: Store, make_point: MakePoint, runner: Runner, files: dict[str, str] | None = None) -> tuple[str, Path]:
    point = make_point()
    name = point.folder_name
    attempt = store.claim_attempt(point, name, 1, lambda folder: {"point.json": point.model_dump_json(), f"{CLAIM}1": str(runner)})
    assert attempt is not None
    for file, text in (files or {}).items():
        (attempt / file).write_text(text)
    return name, attempt


def test_of_two_that_make_an_attempt_one_gets_it(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path), make_point()
    first = store.claim_attempt(point, point.folder_name, 1)
    assert first is not None and store.claim_attempt(point, point.folder_name, 1) is None
    assert [path.name for path in first.parent.iterdir()] == ["1"]
    elsewhere = Store(tmp_path / "disk of another node").claim_attempt(point, point.folder_name, 2)
    assert elsewhere is not None and elsewhere.is_dir(), "also where the first is not to be seen"


def test_a_living_runner_keeps_its_point(tmp_path: Path, make_point: MakePoint) -> None:
    store = Store(tmp_path)
    child = subprocess.Popen(["sleep", "60"])
    try:
        other = Runner(myself().place, child.pid, start_time(child.pid))
        name, _ = claimed(store, make_point, other)
        assert find(store, name, myself()).busy == other
    finally:
        child.kill()
        child.wait()
    assert find(store, name, myself()).busy is None


def test_a_dead_runner_s_job_is_adopted_by_its_handle_or_its_announcement(tmp_path: Path, make_point: MakePoint) -> None:
    for number, (files, handle) in enumerate(
        [
            ({HANDLE: "slurm:7:/x"}, "slurm:7"),
            ({HANDLE: "slurm:7_3+pack-12:/x"}, "slurm:7_3+pack-12"),
            ({STARTED: f"12 345 {myself().host} -\n"}, "local:12:345"),
            ({STARTED: f"12 345 {myself().host} -\n0 1.5 2.5\n"}, "local:12:345"),
            ({HANDLE: "pbs:1234[].pbs01:/x", STARTED: "12 345 node7 -\n"}, "pbs:1234[].pbs01"),
            ({HANDLE: "hq:3f0c-a1:/x"}, "hq:3f0c-a1"),
        ]
    ):
        store = Store(tmp_path / str(number))
        (tmp_path / str(number) / RUNNERS).mkdir(parents=True)
        name, attempt = claimed(store, make_point, DEAD, files)
        assert find(store, name, myself()).adopted == (attempt, f"{handle}:{attempt}")
        assert holder(attempt) == (2, myself())


@pytest.mark.parametrize("files", [{}, {HANDLE: "print:/x"}], ids=["unnoted", "printed"])
def test_a_job_on_another_host_that_nobody_has_a_handle_of_is_waited_for(
    files: dict[str, str], tmp_path: Path, make_point: MakePoint
) -> None:
    (tmp_path / RUNNERS).mkdir()
    name, attempt = claimed(Store(tmp_path), make_point, DEAD, {STARTED: "12 345 node7 -\n", **files})
    (attempt / "lock").symlink_to("gone")  # as some programs do
    assert find(Store(tmp_path), name, myself()).busy == Runner("node7", 12, "345")
    long_ago = time.time() - 2 * SILENCE_SECONDS
    for path in attempt.iterdir():
        os.utime(path, (long_ago, long_ago), follow_symlinks=False)
    assert find(Store(tmp_path), name, myself()).adopted == (attempt, f"local:12:345:{attempt}")


def test_an_attempt_that_never_started_is_void_and_cannot_start_any_more(tmp_path: Path, make_point: MakePoint) -> None:
    store = Store(tmp_path)
    name, attempt = claimed(store, make_point, DEAD)
    found = find(store, name, myself())
    assert (found.record, found.adopted, found.busy, found.attempts) == (None, None, None, 1)
    assert (attempt / STARTED).exists() and not withdraw(attempt) and handle_of(attempt) is None
    from caraml.results.claim import GATE

    for restarts in ("0", "1"):  # also one that Slurm put back into the queue before it began
        around = {**os.environ, "SLURM_RESTART_COUNT": restarts}
        done = subprocess.run(["bash", "-c", f"cd {attempt}\n{GATE}\necho ran"], env=around, capture_output=True, text=True, check=False)
        assert done.returncode == 75 and "ran" not in done.stdout and "caraml retry" in done.stderr


def test_the_gate_lets_a_job_through_once_and_a_requeued_one_again(tmp_path: Path) -> None:
    from caraml.results.claim import GATE

    command = ["bash", "-c", f"cd {tmp_path}\n{GATE}\necho ran"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    assert (first.returncode, first.stdout, second.returncode) == (0, "ran\n", 75), first.stderr
    requeued = subprocess.run(command, env={**os.environ, "SLURM_RESTART_COUNT": "1"}, capture_output=True, text=True, check=False)
    assert requeued.stdout == "ran\n"


def test_of_two_that_take_over_one_wins(tmp_path: Path, make_point: MakePoint) -> None:
    _, attempt = claimed(Store(tmp_path), make_point, DEAD)
    assert take_over(attempt, 1, myself()) and not take_over(attempt, 1, DEAD)
    assert holder(attempt) == (2, myself())


def test_a_runner_elsewhere_lives_as_long_as_its_file_is_young(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path)
    elsewhere = Runner("other~1~2", 1, "1")
    file = tmp_path / RUNNERS / elsewhere.file
    assert not alive(elsewhere, tmp_path)
    file.touch()
    assert alive(elsewhere, tmp_path)
    long_ago = time.time() - 2 * SILENCE_SECONDS
    os.utime(file, (long_ago, long_ago))
    assert not alive(elsewhere, tmp_path)
    assert alive(heart.runner, tmp_path)
    heart.end()


@pytest.mark.usefixtures("handlers_back")
def test_a_disk_that_fails_for_a_moment_ends_no_job_and_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a network's does while its server is started anew: what runs on this host does not need it."""
    heart, elsewhere, reader = Heartbeat(tmp_path), Runner("other~1~2", 1, "1"), ProgressReader(tmp_path)
    (tmp_path / RUNNERS / elsewhere.file).touch()

    def fails(code: int) -> Callable[..., NoReturn]:
        def fail(path: Any = "results", *_: Any, **__: Any) -> NoReturn:
            raise OSError(code, os.strerror(code), str(path))

        return fail

    for code, passes in ((errno.ESTALE, True), (errno.EIO, True), (errno.ENOENT, False)):
        monkeypatch.setattr(claim, "touch", fails(code))
        monkeypatch.setattr("caraml.results.status.opened", fails(code))
        heart._last = time.monotonic() - 3600
        with nullcontext() if passes else pytest.raises(FileNotFoundError):
            heart.beat()
        assert alive(elsewhere, tmp_path) is passes and reader.phases() == []
    with pytest.raises(FileNotFoundError):  # not as if nothing had changed there
        claim.recent(tmp_path / "gone")
    monkeypatch.setattr("caraml.__main__.verbs", lambda: fails(errno.ESTALE))
    with pytest.raises(SystemExit) as ended, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["caraml", "status"])
        patch.setattr("signal.signal", lambda *_: None)
        main()
    assert ended.value.code == ExitCode.ENVIRONMENT_UNFIT and "run the same command again once its disk answers" in capsys.readouterr().err
    heart.end()


@pytest.mark.parametrize("text", ["", f"x {'1' * 5000} 1"], ids=["of a full disk", "no number of a process"])
def test_a_broken_claim_is_nobody_s(text: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.campaign.attempt._ANNOUNCING_SECONDS", 0.0)
    store = Store(tmp_path)
    name, attempt = claimed(store, make_point, DEAD, {STARTED: f"{'1' * 5000} 1 node7 -\n"} if text else {})
    (attempt / f"{CLAIM}1").write_text(text)
    assert find(store, name, myself()).busy is None


def test_a_claim_that_is_being_written_is_waited_for(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no hard links it is empty for a moment: another runner took the attempt from the one that had just taken it."""
    store, other = Store(tmp_path), Runner("other~1~2", 7, "1")
    name, attempt = claimed(store, make_point, DEAD, {f"{CLAIM}2": ""})
    (tmp_path / RUNNERS).mkdir()
    (tmp_path / RUNNERS / other.file).touch()
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: (attempt / f"{CLAIM}2").write_text(str(other)))
    monkeypatch.setattr("caraml.campaign.attempt.time", clock)
    assert find(store, name, myself()).busy == other and holder(attempt) == (2, other)


def test_one_at_a_time_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, second, other = DeviceLock("GPU", "suite a"), DeviceLock("GPU", "suite b"), DeviceLock("another GPU", "suite c")
    assert first.acquire() and other.acquire() and not second.acquire()
    first.runs("local:1:not-its-start")
    assert "suite a" in second.queue()
    first.release()
    assert second.acquire()
    child = subprocess.Popen(["sleep", "60"])
    second.runs(f"local:{child.pid}:{start_time(child.pid)}")
    second.release()  # killed; its job goes on
    assert not first.acquire()
    child.kill()
    child.wait()
    assert first.acquire()


def test_who_came_first_has_the_device_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "_TICKET_SECONDS", 1e6)  # however long this test is stopped for
    holder, second, third = (DeviceLock("GPU", f"suite {name}") for name in "abc")
    folder = tmp_path / "attempt"
    folder.mkdir()
    assert holder.acquire() and not second.acquire(120.0) and not third.acquire()
    assert third.queue().startswith(f"place 2 in the queue for the device, which process {os.getpid()}: suite a uses; at least 2:00")
    holder.runs(f"local:1:0:{folder}")
    (folder / "progress.jsonl").write_text(ProgressLine(t=1.0, phase="measure", remaining=15.0).model_dump_json() + "\n")
    assert third.queue().endswith("; about 2:15") and "place 1 in the queue" in second.queue() and second.queue().endswith("; about 0:15")
    holder.release()
    assert not third.acquire() and not holder.acquire(), "one who comes again goes behind those who wait"
    assert second.acquire() and third.ahead() == []
    second.release()
    for ticket in tmp_path.rglob("*.ticket"):
        os.utime(ticket, (1, 1))  # a process that was suspended while it waited
    fourth = DeviceLock("GPU", "suite d")
    assert fourth.acquire()
    fourth.release()
    now = float(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: now)
    assert fourth.acquire(90.0) and not second.acquire()
    assert second.queue().endswith("suite d uses; about 1:30"), "as it says itself, of a point without progress"
    fourth.release()
    for lock in (second, third, holder):
        lock.release()
    assert not list(tmp_path.rglob("*.ticket"))


def test_the_time_that_is_left_is_that_of_points_of_the_kind(make_point: MakePoint) -> None:
    short, long, other = (make_point(benchmark=name, workload=kind) for name, kind in (("a", "gpt"), ("b", "gpt"), ("c", "command")))
    policy = short.measure.min_seconds + 2 * short.measure.idle_seconds
    pace = Pace([short, short, long, long])
    assert pace.left([]) == (4 * policy, False) and pace.expected(short) is None, "of what has not run the least that its policy allows"
    pace.ended(short, 10.0)
    assert pace.left([]) == (30.0, True), "what is known of the workload, where nothing is of the benchmark"
    pace.ended(long, 100.0)
    assert pace.left([]) == (110.0, True) and pace.left([(long, 40.0)])[0] == 70.0 and pace.left([(long, 400.0)])[0] == 10.0
    pace.ended(short, None)
    assert pace.left([]) == (100.0, True) and pace.expected(short) == 10.0
    assert Pace([other]).left([]) == (0.0, False), "of a program nothing is known"


def test_earlier_results_tell_the_time_that_is_left_before_a_point_has_ended(make_point: MakePoint) -> None:
    known, new = make_point(benchmark="a", workload="command"), make_point(benchmark="b", workload="command")
    rows = [{"workload": "command", "benchmark": "a", "status": "ok", "runtime": seconds} for seconds in (3.0, 5.0, 40.0)]
    rows += [
        {"workload": "command", "benchmark": "b", "status": "failed", "runtime": 9.0},
        {"workload": "gpt", "benchmark": "b", "status": "ok"},
    ]
    pace = Pace([known, known, new], rows)
    assert pace.left([(known, 2.0)]) == (8.0, False) and pace.expected(new) is None
    pace.ended(known, 7.0)
    assert pace.expected(known) == 7.0, "what it takes now counts more than what it took"
    steps = {"runtime": 21.0, "time_to_first_step": 12.0, "training_time": 15.0, "first_step_time": 2.0}
    training = make_point(benchmark="c", workload="gpt")
    assert Pace([training], [{"workload": "gpt", "benchmark": "c", "status": "ok", **steps}]).expected(training) == 25.0


def test_two_campaigns_on_one_folder_share_the_work(tmp_path: Path) -> None:
    command = suite(tmp_path, 30, "sleep 0.05")
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0], [process.stderr for process in both]
    assert ran(tmp_path) == Counter(map(str, range(30)))
    assert len(list((tmp_path / "out" / "points").glob("*/*/record.json"))) == 30


@pytest.mark.parametrize("energy", [False, True])
def test_a_job_outlives_its_runner_and_is_taken_up(tmp_path: Path, energy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")  # with a sensor there is a worker, without one the shell alone
    command = suite(tmp_path, 2, f"until [ -e {tmp_path}/go ]; do sleep 0.05; done", energy=energy)
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "ran").exists() and (tmp_path / "ran").read_text())
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    shown = subprocess.run(
        [sys.executable, "-m", "caraml", "status", "s", "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False
    ).stdout
    assert "1 left" in shown and "1 to do" in shown
    (tmp_path / "go").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(tmp_path) == Counter({"0": 1, "1": 1})
    assert {path.parent.name for path in (tmp_path / "out" / "points").glob("*/*/record.json")} == {"1"}


@pytest.mark.parametrize("metered", [False, True])
def test_killed_at_random_instants(tmp_path: Path, metered: bool) -> None:
    """The short version of bench/campaign/kill.py."""
    found = torment(tmp_path / "k", kills=3 if metered else 5, points=8 if metered else 60, seed=7, metered=metered)
    assert found["right"], json.dumps(found, indent=1)


def test_results_that_are_moved_while_a_campaign_runs(tmp_path: Path) -> None:
    command = suite(tmp_path, 2, f"[ -e {tmp_path}/moved ] || mv {tmp_path}/out {tmp_path}/moved")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3 and "out is gone: moved or removed while the campaign ran" in done.stderr, done.stderr
    command[-1] = str(tmp_path / "moved")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert ran(tmp_path) == Counter({"0": 1, "1": 1})


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_stops_the_campaign_and_keeps_whole_records(tmp_path: Path) -> None:
    small, page = tmp_path / "small", os.sysconf("SC_PAGE_SIZE")
    small.mkdir()
    size = f"size={128 * page}"  # every file takes a page at least, of 4 to 64 KiB
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(small)], check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount")
    try:
        command = suite(tmp_path, 200)
        command[-1] = str(small / "out")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 3 and "disk is full" in done.stderr and "same command again" in done.stderr, done.stderr
        records = list((small / "out" / "points").glob("*/*/record.json"))
        assert len(records) > 3 and all(json.loads(path.read_text())["status"] == "ok" for path in records)
        subprocess.run(["mount", "-o", f"remount,size={16384 * page}", str(small)], check=True)
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        assert again.returncode == 0, again.stdout[-2000:] + again.stderr
        kept = {path.parents[1].name for path in records}
        whole = [json.loads(path.read_text()) for path in (small / "out" / "points").glob("*/*/record.json")]
        assert len(whole) == 200 and kept <= {f"command-{record['key']}" for record in whole}
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)
