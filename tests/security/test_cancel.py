"""`caraml cancel` in folders that say anything: it ends what is ours and what runs the attempt, and nothing else."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from caraml import campaign as ending
from caraml.campaign import cancel
from caraml.launch import Job, JobState, State, launchers, queue
from caraml.results.claim import CLAIM, HANDLE, RUNNERS, STARTED, Runner, handle_of, myself, start_time
from caraml.results.finish import FAILURE
from caraml.results.store import RECORD, Listing, Store, read_record
from tests.conftest import MakePoint
from tests.security.users import ATTACKER, needs_two_users


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that has nothing to do with any campaign."""
    process = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@dataclass
class Queue:
    """What a plug-in's launcher was told to cancel; it then says these states, the last one again and again, or that there is no queue."""

    states: list[State] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    slots = None

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        raise AssertionError

    def cancel(self, handles: Sequence[str]) -> None:
        self.told += handles

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        if not self.states:
            raise OSError("no queue")
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {handle: JobState(state, reason="as it likes") for handle in handles}


@pytest.fixture
def queue_of_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue()
    monkeypatch.setattr(launchers, "plug_in", lambda name: found)
    monkeypatch.setattr(ending, "_PATIENCE", 0.1)
    monkeypatch.setattr(ending, "_LOOK_SECONDS", 0.01)
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Slurm was asked."""
    calls: list[list[str]] = []

    def call(argv: list[str]) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(queue, "call", call)
    return calls


def attempt(root: Path, make_point: MakePoint, launcher: str = "local", **files: str) -> Path:
    """An attempt under way in a suite called ``planted``."""
    store, point = Store(root), make_point()
    folder = store.new_attempt(point)
    for name, text in files.items():
        (folder / name).write_text(text)
    store.remember(Listing(name="planted", launcher=launcher, points=[(point.key, "label")]))
    return folder


def claim(process: subprocess.Popen[bytes]) -> str:
    return str(Runner(myself().place, process.pid, start_time(process.pid)))


def test_a_process_that_does_not_run_the_attempt_is_left_alone(
    tmp_path: Path, make_point: MakePoint, bystander: subprocess.Popen[bytes]
) -> None:
    handle = f"local:{bystander.pid}:{start_time(bystander.pid)}"
    folder = attempt(tmp_path, make_point, **{HANDLE: handle, f"{CLAIM}1": "x 1 1"})
    assert [sentence.split()[0] for sentence in cancel(tmp_path, "planted")] == ["the", "cancelled"]
    assert bystander.poll() is None
    assert read_record(folder / RECORD).reason == "cancelled"


@pytest.mark.parametrize("planted", [False, True], ids=["a claim alone", "with a runner's file"])
def test_a_process_that_is_no_runner_of_the_folder_is_left_alone(
    planted: bool, tmp_path: Path, make_point: MakePoint, bystander: subprocess.Popen[bytes]
) -> None:
    attempt(tmp_path, make_point, **{f"{CLAIM}1": claim(bystander)})
    if planted:
        (tmp_path / RUNNERS).mkdir()
        (tmp_path / RUNNERS / Runner(myself().place, bystander.pid, start_time(bystander.pid)).file).touch()
    sentence = next(cancel(tmp_path, "planted"))
    assert f"left process {bystander.pid} alone" in sentence and bystander.poll() is None


@pytest.mark.parametrize("heeds", [True, False])
def test_a_runner_of_the_folder_is_ended(heeds: bool, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that Ctrl-Z has stopped; one that does not end is not called ended."""
    monkeypatch.setattr(ending, "_PATIENCE", 60.0 if heeds else 0.1)
    program = "import sys, signal, time; from pathlib import Path; from caraml.results.claim import Heartbeat\n"
    program += "" if heeds else "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    program += "held = Heartbeat(Path(sys.argv[1])); print(held.runner, flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        attempt(tmp_path, make_point, **{f"{CLAIM}1": runner.stdout.readline().strip()})
        runner.send_signal(signal.SIGSTOP)
        sentence = next(cancel(tmp_path, "planted"))
        if heeds:
            assert sentence == f"ended the runner, process {runner.pid}"
        else:
            assert f"told the runner, process {runner.pid}, to end, and it has not yet: kill -9 {runner.pid}" in sentence
            runner.kill()
        assert runner.wait(300) < 0


@pytest.mark.parametrize("way", ["absolute", "relative", "inside"])
def test_a_process_that_runs_the_attempt_is_ended_however_it_was_started(way: str, tmp_path: Path, make_point: MakePoint) -> None:
    folder = attempt(tmp_path, make_point)
    (folder / "run.sh").write_text(f"cd {folder}\ntouch there\nsleep 300\n")
    place, name = {"absolute": ("/", str(folder / "run.sh")), "relative": (tmp_path, str((folder / "run.sh").relative_to(tmp_path)))}.get(
        way, (folder, "./run.sh")
    )
    process = subprocess.Popen(["bash", name], cwd=place, start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()  # reaps it at once: to others a zombie is a process that will not end
    try:
        deadline = time.monotonic() + 300
        while not (folder / "there").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (folder / STARTED).write_text(f"{process.pid} {start_time(process.pid)} host -\n")
        assert any("cancelled" in sentence for sentence in cancel(tmp_path, "planted"))
        assert process.wait(300) < 0
    finally:
        process.kill()


@needs_two_users
def test_another_user_s_folder_names_no_process_and_no_job_of_ours(
    tmp_path: Path, make_point: MakePoint, bystander: subprocess.Popen[bytes], asked: list[list[str]]
) -> None:
    runner = subprocess.Popen(["sleep", "300"])
    try:
        files = {HANDLE: "slurm:12:/x", f"{CLAIM}1": claim(runner)}
        folder = attempt(tmp_path, make_point, **files)
        for path in (folder, *folder.iterdir()):
            os.chown(path, ATTACKER, ATTACKER)
        (sentence,) = cancel(tmp_path, "planted")
        assert f"belongs to user {ATTACKER}" in sentence and str(folder) in sentence
        assert runner.poll() is None and asked == [] and not (folder / RECORD).exists()
    finally:
        runner.kill()
        runner.wait()


@needs_two_users
@pytest.mark.parametrize("name", [HANDLE, STARTED, f"{CLAIM}1", f"{CLAIM}2"])
def test_one_file_of_another_user_is_enough(name: str, tmp_path: Path, make_point: MakePoint, asked: list[list[str]]) -> None:
    folder = attempt(tmp_path, make_point, **{HANDLE: "slurm:12:/x", f"{CLAIM}1": "x 1 1", name: "slurm:12:/x"})
    os.chown(folder / name, ATTACKER, ATTACKER)
    assert "belongs to user" in next(cancel(tmp_path, "planted")) and asked == []


@pytest.mark.parametrize("job", ["--user=victim", "1 2", "1;2", "all", "-1", "1_[0-9]", "1+pack-x", "\u0661", ""])
def test_a_job_s_number_is_a_number(job: str, tmp_path: Path, make_point: MakePoint, asked: list[list[str]]) -> None:
    folder = attempt(tmp_path, make_point, **{HANDLE: f"slurm:{job}:/x", f"{CLAIM}1": "x 1 1"})
    assert handle_of(folder) is None
    list(cancel(tmp_path, "planted"))
    assert asked == []


def test_a_full_disk_keeps_no_job(tmp_path: Path, make_point: MakePoint, asked: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    attempt(tmp_path, make_point, **{HANDLE: "slurm:12:/x", f"{CLAIM}1": "x 1 1"})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ending, "finish", full)
    assert list(cancel(tmp_path, "planted"))[-1].endswith("; its record could not be written: No space left on device")
    assert asked[-1] == ["scancel", "--quiet", "--", "12"]


OTHERS = ["--option", "$(x)", "`x`", "1;x", "../..", "/etc", "a/..", "1\n2", "1 2", "1*", "", "\u0661", "1" * 201, "1" * 100_000]


FORGED = [*(f"evil:{job}:/x" for job in OTHERS), "Evil:1:/x", "../evil:1:/x", f"{'e' * 65}:1:/x", "slurm:x:/x", "local:x:/x"]


@pytest.mark.parametrize("handle", FORGED, ids=range(len(FORGED)))
def test_a_job_of_a_plug_in_is_a_word(handle: str, tmp_path: Path, make_point: MakePoint, queue_of_a_plug_in: Queue) -> None:
    folder = attempt(tmp_path, make_point, "evil", **{HANDLE: handle, f"{CLAIM}1": "x 1 1"})
    assert handle_of(folder) is None
    list(cancel(tmp_path, "planted"))
    assert queue_of_a_plug_in.told == []


@pytest.mark.parametrize(
    ("states", "words"),
    [
        (["running", "lost"], "cancelled label ("),
        (["ended"], "cancelled label ("),
        (["running"], "was told to cancel label ("),
        ([], "not cancelled: label ("),
    ],
)
def test_a_plug_in_s_job_is_cancelled_when_it_says_so(
    states: list[State], words: str, tmp_path: Path, make_point: MakePoint, queue_of_a_plug_in: Queue
) -> None:
    folder = attempt(tmp_path, make_point, "hq", **{HANDLE: "hq:12:/elsewhere", f"{CLAIM}1": "x 1 1"})
    queue_of_a_plug_in.states = states
    *_, sentence = cancel(tmp_path, "planted")
    assert words in sentence and "hq:12" in sentence and queue_of_a_plug_in.told == [f"hq:12:{folder}"]
    assert ("it is running (as it likes)" in sentence, "OSError: no queue" in sentence) == (states == ["running"], not states)
    assert (folder / RECORD).exists() == (folder / STARTED).exists() == words.startswith("cancelled"), "what was cancelled starts no more"
    assert not (folder / RECORD).exists() or read_record(folder / RECORD).reason == "cancelled"


def test_a_launcher_that_no_campaign_of_ours_used_is_told_nothing(tmp_path: Path, make_point: MakePoint, queue_of_a_plug_in: Queue) -> None:
    folder = attempt(tmp_path, make_point, "hq", **{HANDLE: "evil:12:/x", f"{CLAIM}1": "x 1 1"})
    queue_of_a_plug_in.states = ["running"]
    assert "was told to use launcher 'evil'" in list(cancel(tmp_path, "planted"))[-1]
    (folder / HANDLE).write_text("hq:12:/x")
    point = Store(tmp_path).campaigns()[0].points
    Store(tmp_path).remember(Listing(name="planted", points=point))
    assert "was told to cancel label" in list(cancel(tmp_path, "planted"))[-1], "it was told before it went on"
    queue_of_a_plug_in.told.clear()
    listing = tmp_path / "suites" / "planted.json"
    listing.write_text(listing.read_text().replace('"label"', '"forged"'))
    assert "left forged" in list(cancel(tmp_path, "planted"))[-1]
    Store(tmp_path).remember(Listing(name="planted", points=point))
    assert "left label" in list(cancel(tmp_path, "planted"))[-1], "what was forged is not signed later"
    assert queue_of_a_plug_in.told == [] and not (folder / RECORD).exists()


def test_a_launcher_that_does_not_say_where_a_job_is_has_cancelled_nothing(
    tmp_path: Path, make_point: MakePoint, queue_of_a_plug_in: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = attempt(tmp_path, make_point, "hq", **{HANDLE: "hq:12:/x", f"{CLAIM}1": "x 1 1"})
    monkeypatch.setattr(queue_of_a_plug_in, "poll", lambda handles: {})
    assert list(cancel(tmp_path, "planted"))[-1].startswith("not cancelled: label (")
    assert not (folder / RECORD).exists() and not (folder / FAILURE).exists()


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path, make_point: MakePoint) -> None:
    attempt(tmp_path, make_point, "hq", **{HANDLE: "hq:12:/x", f"{CLAIM}1": "x 1 1"})
    sentence = list(cancel(tmp_path, "planted"))[-1]
    assert sentence.startswith("not cancelled: label (") and "install the plug-in that has launcher 'hq'" in sentence


def test_a_process_on_another_host_is_not_called_cancelled_while_its_files_change(tmp_path: Path, make_point: MakePoint) -> None:
    folder = attempt(tmp_path, make_point, **{STARTED: "12 345 node7 -\n", f"{CLAIM}1": "x 1 1"})
    assert list(cancel(tmp_path, "planted"))[-1].endswith("alone: its job is process 12 on node7: end it there")
    assert not (folder / RECORD).exists()


@pytest.mark.parametrize(("handle", "told"), [("slurm:12:/elsewhere", "12"), ("slurm:12_3:/elsewhere", "12_3")])
def test_a_job_is_ended_as_a_job_and_in_its_own_folder(
    handle: str, told: str, tmp_path: Path, make_point: MakePoint, asked: list[list[str]]
) -> None:
    folder = attempt(tmp_path, make_point, **{HANDLE: handle, f"{CLAIM}1": "x 1 1"})
    assert handle_of(folder) == f"slurm:{told}:{folder}"
    list(cancel(tmp_path, "planted"))
    assert [one[0] for one in asked] == ["squeue", "scancel"] and asked[1] == ["scancel", "--quiet", "--", told]
