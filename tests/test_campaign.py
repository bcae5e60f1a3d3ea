"""Campaigns: holes are filled, failures are results, and killing one loses nothing that was measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

from caraml.base.errors import EnvironmentUnfitError, ExitCode
from caraml.base.files import write_file
from caraml.base.toml import parse_toml
from caraml.campaign import Campaign, Options, exit_code, runner
from caraml.campaign.preview import preview
from caraml.campaign.runner import run_campaign
from caraml.launch import Job, JobState, Launcher, slurm
from caraml.launch.batch import SlurmOptions
from caraml.launch.slurm import SlurmLauncher
from caraml.metrics.model import Metric
from caraml.results.finish import Failure, note_failure
from caraml.results.record import Record, Status
from caraml.results.status import ProgressLine
from caraml.results.store import Store, read_record, write_record
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.model import Point
from caraml.system.catalogue import with_given
from caraml.system.detect import detect
from caraml.system.model import Figure, Scheduler, Site

SUITE = """
name = "s"
title = "S"
[[benchmark]]
name = "n"
workload = "gpt"
global_batch = [1, 2, 3, 4]
micro_batch = 2
params = { preset = "4M" }
"""


@dataclass
class Watcher:
    """Remembers what it was told."""

    ran: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def started(self, point: Point, index: int, total: int) -> None:
        self.ran.append(point.global_batch)

    def progress(self, point: Point, line: ProgressLine) -> None:
        pass

    def finished(self, record: Record, reused: bool) -> None:
        if reused:
            self.reused.append(record.point.global_batch)

    def left(self, text: str) -> None:
        self.told.append(text)


@dataclass
class FakeLauncher:
    """Ends jobs as told, by global batch: a status to record, an exit code without record, or never."""

    outcomes: dict[int, Status | int | None]
    cancelled: int = 0
    slots = 1

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        return [str(job.folder) for job in jobs]

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        return {handle: self.state(Path(handle)) for handle in handles}

    def state(self, folder: Path) -> JobState:
        point = Point.model_validate_json((folder / "point.json").read_text())
        outcome = self.outcomes.get(point.global_batch, "ok")
        if outcome is None:
            return JobState("running")
        if isinstance(outcome, int):
            return JobState("ended", outcome)
        record = Record(key=point.key, attempt=int(folder.name), point=point, status=outcome, started_at="x")
        write_record(folder, record)
        return JobState("ended", 0)

    def cancel(self, handles: Sequence[str]) -> None:
        self.cancelled += 1


def campaign(root: Path, launcher: Launcher, again: bool = False, text: str = SUITE) -> tuple[Campaign, Watcher]:
    document = parse_toml(text, "s.toml")
    watcher = Watcher()
    return Campaign(SuiteFile(document.validate(Suite), document), detect(), Store(root), launcher, watcher, again), watcher


def test_workers_are_told_what_the_description_of_the_machine_gives(tmp_path: Path) -> None:
    """A peak in a file that `--system` names was in the plan and in no record: workers knew only what they detect."""
    run, _ = campaign(tmp_path, FakeLauncher({}))
    peak = {"fp32": Figure(value=2e11, unit="FLOP/s", source="contract")}
    run.system = run.system.model_copy(update={"name": "mine", "peak": peak})
    (record,) = [one for one in run_campaign(run) if one.point.global_batch == 4]
    assert with_given(detect(), run.store.folder(record)).peak == peak


def statuses(records: list[Record]) -> list[Status]:
    return [record.status for record in records]


def test_points_that_cannot_run_are_skipped_with_a_reason(tmp_path: Path) -> None:
    run, watcher = campaign(tmp_path, FakeLauncher({}))
    records = run_campaign(run)
    assert statuses(records) == ["skipped", "ok", "skipped", "ok"]
    assert "not divisible" in (records[0].reason or "")
    assert watcher.ran == [2, 4] and exit_code(records) == ExitCode.OK


def test_the_same_command_fills_only_the_holes(tmp_path: Path) -> None:
    run_campaign(campaign(tmp_path, FakeLauncher({4: 1}))[0])
    run, watcher = campaign(tmp_path, FakeLauncher({}))
    records = run_campaign(run)
    assert watcher.ran == [4] and watcher.reused == [1, 2, 3]
    assert statuses(records)[3] == "ok" and records[3].attempt == 2
    run, watcher = campaign(tmp_path, FakeLauncher({}))
    run_campaign(run)
    assert watcher.ran == []


def test_a_record_that_cannot_be_read_is_not_measured_over_unasked(tmp_path: Path) -> None:
    """One of a newer CARAML ended the campaign, and every other that wrote to the folder."""
    run_campaign(campaign(tmp_path, FakeLauncher({}))[0])
    store = Store(tmp_path)
    newer = store.folder(next(record for record in store.records() if record.status == "ok")) / "record.json"
    newer.write_text('{"schema_version": 99}')
    made, watcher = campaign(tmp_path, FakeLauncher({}))
    records = run_campaign(made)
    assert watcher.ran == [] and sorted(watcher.reused) == [1, 2, 3, 4] and exit_code(records) == ExitCode.POINTS_FAILED
    assert statuses(records).count("invalid") == 1
    assert [one.action for one in preview(made).points if str(one.reason).startswith("cannot be read: ")] == ["known"]
    assert "invalid" not in statuses(run_campaign(campaign(tmp_path, FakeLauncher({}), again=True)[0]))
    assert newer.read_text() == '{"schema_version": 99}' and (newer.parents[1] / "2" / "record.json").exists()


def test_a_job_of_a_newer_caraml_ends_its_point_and_not_the_campaign(tmp_path: Path) -> None:
    """As in an image that has one: the campaign ended at the first record, and the same command at the next."""

    class Newer(FakeLauncher):
        def state(self, folder: Path) -> JobState:
            super().state(folder)
            if folder.parent.name == name:
                (folder / "record.json").write_text('{"schema_version": 99}')
            return JobState("ended", 0)

    (name, *_) = [one.point.folder_name for one in campaign(tmp_path, FakeLauncher({}))[0].plan().points if one.skip is None]
    records = run_campaign(campaign(tmp_path, Newer({}))[0])
    assert statuses(records) == ["skipped", "invalid", "skipped", "ok"] and records[1].point.global_batch == 2


def test_again_measures_again_and_keeps_the_earlier_result(tmp_path: Path) -> None:
    first, _ = campaign(tmp_path, FakeLauncher({}))
    before = run_campaign(first)[1]
    run, watcher = campaign(tmp_path, FakeLauncher({}), again=True)
    after = run_campaign(run)[1]
    assert watcher.ran == [2, 4] and (before.attempt, after.attempt) == (1, 2)
    assert read_record(first.store.folder(before) / "record.json") == before


def test_out_of_memory_is_a_result_and_a_failure_is_not(tmp_path: Path) -> None:
    run, _ = campaign(tmp_path, FakeLauncher({2: "oom"}))
    assert exit_code(run_campaign(run)) == ExitCode.OK
    run, _ = campaign(tmp_path / "b", FakeLauncher({2: 3}))
    records = run_campaign(run)
    assert exit_code(records) == ExitCode.POINTS_FAILED == 1
    assert records[1].status == "failed" and "exit status 3" in (records[1].reason or "")


def test_the_time_left_is_said_from_the_beginning(tmp_path: Path) -> None:
    run, watcher = campaign(tmp_path, FakeLauncher({}))
    run_campaign(run)
    assert watcher.told[0].startswith("at least "), "the least that the policies of two points allow"
    assert watcher.told[-1] == "about 0:00 left"
    write_runtime(tmp_path, 600.0)
    run, watcher = campaign(tmp_path, FakeLauncher({}), again=True)
    run_campaign(run)
    assert watcher.told[0] == "about 20:00 left"
    run, watcher = campaign(tmp_path, FakeLauncher({}))
    run_campaign(run)
    assert set(watcher.told) == {"about 0:00 left"}, "what has a result takes no time"


def write_runtime(root: Path, seconds: float) -> None:
    """Let every record below say how long its point took."""
    for path in root.glob("points/*/*/record.json"):
        record = read_record(path)
        write_record(path.parent, record.model_copy(update={"metrics": {"runtime": Metric(value=seconds, unit="s")}}))
    Store(root).rows()


class FakeCluster(SlurmLauncher):
    """Jobs wait for three looks; the queue is looked at at every one of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Scheduler(), folder)
        self.looks, self.ends = 0, FakeLauncher({})

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        return [str(job.folder) for job in jobs]

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        self.looks += 1
        return dict.fromkeys(handles, JobState("waiting")) if self.looks < 4 else self.ends.poll(handles)

    def waiting_text(self, handles: Iterable[str]) -> str:  # type: ignore[override] -- always says something
        return f"{len(list(handles))} wait, place {max(5 - self.looks, 3)}"


def test_what_a_scheduler_s_queue_says_is_told_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_QUEUE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(runner, "_SCHEDULER_POLL_SECONDS", 0.01)
    run, said = campaign(tmp_path, FakeCluster(tmp_path))[0], list[str]()
    run.say = said.append
    assert statuses(run_campaign(run)).count("ok") == 2
    assert said == ["2 wait, place 4", "2 wait, place 3", "no job waits in the queue any more"]


class NodeGone(FakeCluster):
    """Jobs of which a rank says something before Slurm has the last word."""

    def __init__(self, folder: Path, word: str) -> None:
        super().__init__(folder)
        self.word = word

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        for handle in handles:
            note_failure(Path(handle), Failure(status="failed", reason="Connection reset by peer", rank=1, started_at="x"))
        return dict.fromkeys(handles, JobState("lost", reason=f"job 5: {self.word}"))


@pytest.mark.parametrize(("word", "status", "reason"), [("NODE_FAIL", "lost", "NODE_FAIL"), ("FAILED", "failed", "Connection reset")])
def test_a_lost_node_is_the_cause_of_what_other_ranks_say(
    word: str, status: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_SCHEDULER_POLL_SECONDS", 0.01)
    records = run_campaign(campaign(tmp_path, NodeGone(tmp_path, word))[0])
    assert {(one.status, reason in (one.reason or "")) for one in records if one.status != "skipped"} == {(status, True)}


def stand_ins(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Slurm's programs, of a cluster without accounting: lines of bash by name."""
    for name, line in {"sacct": "exit 1", "scontrol": "exit 1", "sinfo": "echo 'main*'", **programs}.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(runner, "_SCHEDULER_POLL_SECONDS", 0.01)


def test_the_queue_is_asked_once_for_all_jobs_that_are_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a campaign is left at once, as by cron: a job that was lost meanwhile is no other's to submit anew."""
    jobs, calls = tmp_path / "jobs", tmp_path / "calls"
    stand_ins(tmp_path, monkeypatch, sbatch=f"echo 7 | tee -a {calls}", squeue=f"echo asked >>{calls}; cat {jobs}")
    launcher = SlurmLauncher(Scheduler(gpus="none"), tmp_path / "slurm", SlurmOptions(grace_seconds=0))
    run, _ = campaign(tmp_path / "out", launcher)
    run.options = Options(launcher="slurm", detach=True)
    launcher.news = lambda handles: None  # type: ignore[method-assign]
    assert statuses(run_campaign(run)) == ["skipped", "skipped"]
    calls.write_text("")
    jobs.write_text("7_0|PENDING|Priority\n7_1|NODE_FAIL|None\n")
    run_campaign(run)
    assert calls.read_text().split() == ["asked", "7"], "one is submitted anew"
    lost = [record for path in (tmp_path / "out" / "points").glob("*/1/record.json") if (record := read_record(path)).status == "lost"]
    assert len(lost) == 1 and "gone when the campaign was taken up again: job 7_1: NODE_FAIL" in (lost[0].reason or "")


def test_a_run_says_of_jobs_that_are_too_long_for_their_partition_that_they_never_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a site does not refuse them, also one that leaves at once."""
    stand_ins(tmp_path, monkeypatch, sbatch="echo 7", sinfo="echo 'main*|30:00'")
    scheduler, said = Scheduler(gpus="none"), list[str]()
    run, _ = campaign(tmp_path / "out", SlurmLauncher(scheduler, tmp_path / "slurm"))
    run.system = run.system.model_copy(update={"site": Site(scheduler=scheduler)})
    run.options, run.say = Options(launcher="slurm", detach=True), said.append
    run_campaign(run)
    (told,) = said
    assert told.startswith(
        "33 min are more than the partition's time limit of 30 min; such a job would wait for ever: write max_minutes = 30"
    )


CHAIN = """
name = "chain"
title = "C"
[[benchmark]]
name = "second"
workload = "command"
needs = "first"
params = { argv = ["true"] }
[[benchmark]]
name = "first"
workload = "command"
params = { argv = ["false"] }
"""


@pytest.mark.parametrize("grace", [0, 5])
def test_what_waits_for_a_job_that_was_cancelled_meanwhile_is_submitted_anew(
    grace: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm ends it half a minute later, or not at all where a site says so."""
    jobs, calls = tmp_path / "jobs", tmp_path / "calls"
    stand_ins(
        tmp_path,
        monkeypatch,
        sbatch=f"echo $(($(grep -c . {calls}) + 1)); echo $* | grep -o 'afterok:.' >>{calls} || echo alone >>{calls}",
        squeue=f"cat {jobs}",
        scancel=f'echo ended ${{@: -1}} >>{calls}; echo "1|CANCELLED|None" >{jobs}',
    )
    options = SlurmOptions(grace_seconds=grace)  # until a job whose files have not appeared is lost
    launcher = SlurmLauncher(Scheduler(gpus="none"), tmp_path / "slurm", options, clock=count().__next__)
    launcher.news = lambda handles: None  # type: ignore[method-assign]
    run, _ = campaign(tmp_path / "out", launcher, text=CHAIN)
    run.options = Options(launcher="slurm", detach=True)
    calls.write_text("")
    run_campaign(run)
    assert calls.read_text().splitlines() == ["alone", "afterok:1"]
    jobs.write_text("1|CANCELLED|None\n2|PENDING|Dependency\n")
    run_campaign(run)
    assert calls.read_text().splitlines() == ["alone", "afterok:1", "ended 2", "alone", "afterok:4"]


def test_without_a_cluster_no_attempt_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'sinfo: fatal: Could not establish a configuration source' >&2; exit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run, watcher = campaign(tmp_path / "out", FakeCluster(tmp_path))
    run.options = Options(launcher="slurm")
    with pytest.raises(EnvironmentUnfitError, match=r"no cluster answers here .*configuration source") as told:
        run_campaign(run)
    assert "--launcher print" in str(told.value) and not (tmp_path / "out").exists()
    down = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho '{down}' >&2; exit 1\n")
    monkeypatch.setattr(runner, "_SCHEDULER_POLL_SECONDS", 0.01)
    run_campaign(run)
    assert watcher.ran == [2, 4], "a controller that is down comes back"


def test_a_point_that_never_ends_is_a_timeout(tmp_path: Path) -> None:
    text = SUITE + "measure = { timeout_seconds = 0.3 }\n"
    launcher = FakeLauncher({2: None})
    run, _ = campaign(tmp_path, launcher, text=text)
    records = run_campaign(run)
    assert records[1].status == "timeout" and launcher.cancelled == 1 and records[3].status == "ok"


def test_interrupting_cancels_the_point_and_keeps_the_others(tmp_path: Path) -> None:
    class Interrupting(FakeLauncher):
        def state(self, folder: Path) -> JobState:
            if Point.model_validate_json((folder / "point.json").read_text()).global_batch == 4:
                raise KeyboardInterrupt
            return super().state(folder)

    launcher = Interrupting({})
    run, _ = campaign(tmp_path, launcher)
    with pytest.raises(KeyboardInterrupt):
        run_campaign(run)
    assert launcher.cancelled == 1
    kept = Store(tmp_path).records("s")
    assert statuses(kept) == ["skipped", "ok", "skipped", "failed"]
    assert "KeyboardInterrupt" in (kept[3].reason or "")


def test_kill_at_any_moment_and_run_again(tmp_path: Path) -> None:
    """A real campaign of real points is killed; what it had measured stays, and the next one does the rest."""
    suite = tmp_path / "tiny.toml"
    write_file(
        suite,
        'name = "tiny"\ntitle = "T"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = [1, 2]\n'
        'params = { preset = "4M", width = 16, layers = 1, heads = 1, sequence_length = 8, vocab_size = 64, data = "synthetic" }\n'
        "measure = { target = 0.5, min_seconds = 0, min_steps = 4, max_seconds = 2, warm_up_max_seconds = 1 }\n",
    )
    command = [sys.executable, "-m", "caraml", "run", str(suite), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    store, deadline = Store(tmp_path / "out"), time.monotonic() + 300
    while not list((tmp_path / "out").glob("points/*/1/record.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    known = [record for record in store.records() if record.status == "ok"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = store.records("tiny")
    assert statuses(records) == ["ok", "ok"]
    assert known and all(record in records for record in known), "the point that was measured before the kill is not measured again"
