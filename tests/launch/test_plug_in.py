"""Launchers of other packages: their jobs are found again by their handles, which have one form, and no point runs twice."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError
from caraml.base.plugins import Plugin
from caraml.campaign import Options
from caraml.campaign.attempt import note_handle
from caraml.campaign.runner import run_campaign
from caraml.launch import Job, JobState, Launcher, launchers
from caraml.launch.launchers import plug_in
from caraml.results.claim import STARTED, WITHDRAWN, job_of
from caraml.results.status import standings
from caraml.results.store import Store
from tests.test_campaign import FakeLauncher, campaign
from tests.test_campaign_durability import ran, suite
from tests.waiting import until

QUEUE = """
import os, signal, subprocess
from pathlib import Path
from caraml.launch import JobState
from caraml.results.store import RECORD

class Queue:
    slots = None

    def submit(self, jobs):
        for job in jobs:
            child = subprocess.Popen(["bash", str(job.script)], start_new_session=True)
            with open(Path(__file__).with_name("queued"), "a") as queued:
                queued.write(f"{child.pid}\\n")
            yield f"hq:{child.pid}:{job.folder.resolve()}"

    def poll(self, handles):
        return {handle: self.state(*handle.split(":", 2)[1:]) for handle in handles}

    def state(self, job, folder):
        try:
            lives = ") Z " not in Path(f"/proc/{job}/stat").read_text()
        except OSError:
            lives = False
        if (Path(folder) / RECORD).exists():
            return JobState("ended", 0)
        return JobState("running") if lives else JobState("lost", reason="no such process")

    def cancel(self, handles):
        for handle in handles:
            os.killpg(int(handle.split(":")[1]), signal.SIGKILL)
"""


def test_a_plug_in_s_job_outlives_its_runner_and_no_second_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug, out = tmp_path / "plug", tmp_path / "out"
    (plug / "hq-1.0.dist-info").mkdir(parents=True)
    (plug / "hq_queue.py").write_text(QUEUE)
    (plug / "hq-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hq\nVersion: 1.0\n")
    (plug / "hq-1.0.dist-info" / "entry_points.txt").write_text("[caraml.launchers]\nhq = hq_queue:Queue\n")
    without = os.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", f"{plug}:{without}")
    here = suite(tmp_path, 1, f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    through = [*here, "--launcher", "hq"]
    first = subprocess.Popen(through, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "ran").exists() and (tmp_path / "ran").read_text())
    first.kill()
    first.wait()
    store = Store(out)
    until(lambda: [one.state for one in standings(store, store.campaigns()[0])] == ["left"])
    (left,) = standings(store, store.campaigns()[0])
    assert "install the plug-in that has launcher 'hq'" in (left.reason or "")
    for command, words in ((here, "`--launcher hq` takes it up"), (through, "unknown launcher 'hq'"), (here, "install the plug-in")):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        monkeypatch.setenv("PYTHONPATH", without)
        assert done.returncode in (2, 3) and words in done.stderr, done.stderr
    assert f"its job {job_of(left.handle or '')} may still run" in done.stderr
    monkeypatch.setenv("PYTHONPATH", f"{plug}:{without}")
    (tmp_path / "go").touch()
    done = subprocess.run(through, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(tmp_path) == Counter({"0": 1}) and len((plug / "queued").read_text().split()) == 1
    assert {path.parent.name for path in out.glob("points/*/*/record.json")} == {"1"}


@dataclass
class Names(FakeLauncher):
    """Calls its jobs as told."""

    name: str = ""
    asked: list[str] = field(default_factory=list)
    slots = None  # type: ignore[assignment] -- a queue's

    def submit(self, jobs: Sequence[Job]) -> Iterator[str]:  # type: ignore[override]
        for job in jobs:
            yield self.name.format(folder=job.folder.resolve())

    def cancel(self, handles: Sequence[str]) -> None:
        self.asked += handles
        raise OSError("no queue")


BAD = ["7", "hq:f3/x", "hq:--all", "hq:", "hq:1 2", "hq:1\n", "pbs:7", f"hq:{'1' * 201}"]


@pytest.mark.parametrize("name", [*(f"{bad}:{{folder}}" for bad in BAD), "hq:7:/x"])
def test_a_handle_by_which_nobody_would_find_the_job_is_refused_when_it_is_submitted(tmp_path: Path, name: str) -> None:
    launcher = Names({}, name=name)
    asked, watcher = campaign(tmp_path, launcher)
    asked.options = Options(launcher="hq")
    with pytest.raises(InputError, match=r"'hq' gave a job the handle .*, expected hq:JOB:FOLDER; it could not cancel.*no queue") as told:
        run_campaign(asked)
    attempts = [path.parent for path in tmp_path.glob("points/*/1/point.json") if not (path.parent / "record.json").exists()]
    assert "JOB is letters" in str(told.value) and set(launcher.asked) == {name.format(folder=attempt) for attempt in attempts}
    assert all((attempt / STARTED).exists() for attempt in attempts), "should they come yet, they end at once"
    assert watcher.ran == [2, 4]


def plugged(monkeypatch: pytest.MonkeyPatch, own: object) -> Launcher:
    """The launcher that ``hq 1.0`` has under its entry point."""
    monkeypatch.setattr("caraml.tests_hq", own, raising=False)
    point = EntryPoint("hq", "caraml:tests_hq", "caraml.launchers")
    monkeypatch.setattr(launchers, "launcher_plugins", lambda: {"hq": Plugin("caraml.launchers", "hq", "hq", "1.0", point)})
    return plug_in("hq")


class Good(Names):
    """Calls its jobs one after another, or as told."""

    def __init__(self) -> None:
        super().__init__({}, name="hq:7:{folder}")


def needing(folder: Path) -> Good:
    return Good()


class Needing(Good):
    def __init__(self, queue: str) -> None:
        super().__init__()


class Bare:
    def submit(self, jobs: Sequence[Job]) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("own", "error", "words"),
    [
        (needing, InputError, "found caraml:tests_hq, a function; expected a class\n  next step: repair"),
        (Needing, EnvironmentUnfitError, r"\(caraml:tests_hq\): calling it without arguments failed: TypeError: .*'queue'"),
        (Bare, InputError, r"\(caraml:tests_hq\): found no slots, no poll, no cancel, expected slots, submit, poll and cancel"),
        (type("None", (Good,), {"slots": 0}), InputError, "found slots = 0, expected None for a queue, or a number from 1"),
    ],
)
def test_what_is_no_launcher_is_an_error_that_names_the_package(
    own: object, error: type[CaramlError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=f"(?s)launcher 'hq' of plug-in hq 1.0.*{words}"):
        plugged(monkeypatch, own)


def one_and(then: object) -> Callable[..., object]:
    def submit(self: Names, jobs: Sequence[Job]) -> Iterator[object]:
        yield self.name.format(folder=jobs[0].folder.resolve())
        if isinstance(then, BaseException):
            raise then
        yield from [f"hq:8:{job.folder.resolve()}" for job in (*jobs[1:], *jobs)] if then == "more" else ()

    return submit


@pytest.mark.parametrize(
    ("submit", "error", "words", "kept"),
    [
        (one_and(OSError("no queue")), EnvironmentUnfitError, "submit failed: OSError: no queue", 1),
        (one_and(SystemExit("no queue")), EnvironmentUnfitError, "submit failed: SystemExit: no queue", 1),
        (one_and("few"), InputError, "found 1 handle from submit, expected one for each of 2 jobs", 1),
        (one_and("more"), InputError, "found more handles from submit, expected one for each of 2 jobs", 2),
        (lambda self, jobs: None, EnvironmentUnfitError, "submit failed: TypeError: 'NoneType' object is not iterable", 0),
    ],
)
def test_a_submit_that_fails_is_an_error_and_loses_no_job_that_has_a_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, submit: object, error: type[CaramlError], words: str, kept: int
) -> None:
    asked, _ = campaign(tmp_path, plugged(monkeypatch, type("Own", (Good,), {"submit": submit})))
    asked.options = Options(launcher="hq")
    with pytest.raises(error, match=rf"launcher 'hq' of plug-in hq 1.0 \(caraml:tests_hq\): {words}"):
        run_campaign(asked)
    handles = {path.parent: path.read_text() for path in tmp_path.glob("points/*/1/handle")}
    assert len(handles) == kept and not list(tmp_path.glob("points/*/1/started")), "each may still run, and is found again"
    assert all(handle.endswith(str(folder)) for folder, handle in handles.items())


@pytest.mark.parametrize("state", ["ended", JobState("done"), None])  # type: ignore[arg-type] -- a plug-in's may be anything
def test_a_state_that_there_is_not_is_an_error(monkeypatch: pytest.MonkeyPatch, state: object) -> None:
    """The campaign waited for ever for a job that was `done`."""
    asked = plugged(monkeypatch, type("Own", (Good,), {"poll": lambda self, handles: dict.fromkeys(handles, state)}))
    with pytest.raises(InputError, match=r"found .* from poll, expected a JobState of waiting, running, ended, lost"):
        asked.poll(["hq:1:/folder"])


def test_what_is_no_text_is_no_handle(tmp_path: Path) -> None:
    assert not note_handle(tmp_path, None, "hq") and (tmp_path / STARTED).exists()  # type: ignore[arg-type] -- a submit that returns nothing


def test_a_lost_job_that_comes_later_does_not_run_beside_its_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Names({}, name="hq:7:{folder}")
    monkeypatch.setattr(launcher, "poll", lambda handles: dict.fromkeys(handles, JobState("lost")))
    asked, _ = campaign(tmp_path, launcher)
    asked.options = Options(launcher="hq")
    lost = [record for record in run_campaign(asked) if record.status == "lost"]
    assert [(asked.store.folder(record) / STARTED).read_text() for record in lost] == [WITHDRAWN] * 2
