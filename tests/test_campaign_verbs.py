"""The verbs of campaigns: plan, --set, status, logs, cancel, retry, detach, tags, archive and import."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.base.toml import parse_toml
from caraml.campaign import Campaign, Options
from caraml.campaign.machine import DeviceLock
from caraml.launch.launchers import LocalLauncher
from caraml.report import progress
from caraml.report.progress import LogLines
from caraml.results.claim import handle_of
from caraml.results.status import PROGRESS
from caraml.results.store import Store
from caraml.suite.choice import with_settings
from caraml.suite.expand import expand
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.placement import Machine
from caraml.system.detect import detect
from caraml.system.files import read
from caraml.workloads import params_of
from caraml.workloads.image_classification.store import generate_image_folder

SUITE = """name = "verbs"
title = "Verbs"
[[benchmark]]
name = "sleep"
workload = "command"
params = { argv = ["sh", "-c", "echo words of {n}; sleep {pause}; exit {code}"], energy = false, n = [1, 2], pause = 0, code = 0 }
[[benchmark]]
name = "wide"
workload = "command"
devices = 4096
params = { argv = ["true"], energy = false }
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "verbs.toml").write_text(SUITE)
    (tmp_path / "locks").mkdir()
    return tmp_path


def caraml(here: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "caraml", *arguments]
    env = {**os.environ, "COLUMNS": "140", "XDG_RUNTIME_DIR": str(here / "locks"), **environment}
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=300, check=False)


def file_of(text: str) -> SuiteFile:
    document = parse_toml(text, "s.toml")
    return SuiteFile(document.validate(Suite), document)


def test_a_suite_without_a_point_on_this_system_says_so(here: Path) -> None:
    (here / "none.toml").write_text(SUITE.partition('[[benchmark]]\nname = "wide"')[0] + "where = [\"device_class == 'gpu'\"]\n")
    done = caraml(here, "run", "none.toml")
    assert done.returncode == 0 and "suite verbs has no point on this system" in done.stdout, done.stdout + done.stderr
    assert not (here / "caraml-results" / "verbs.html").exists(), "nothing to show"


def test_settings_replace_values_everywhere_they_are_known() -> None:
    text = """name = "s"
title = "S"
[[benchmark]]
name = "a"
workload = "gpt"
global_batch = [1, 2]
params = { preset = "4M" }
[benchmark.on.cpu]
global_batch = 4
[[benchmark]]
name = "b"
workload = "image_classification"
global_batch = 8
"""
    changed = with_settings(file_of(text), ["global_batch=[16, 32]", "params.preset=117M", "measure.target=0.2"], params_of).suite
    a, b = changed.benchmark
    assert a.asked("cpu")["global_batch"] == a.global_batch == b.global_batch == [16, 32]
    assert a.params == {"preset": "117M"} and b.params is None
    assert a.measure is not None and b.measure is not None and a.measure.target == b.measure.target == 0.2


def labels(text: str, *settings: str) -> list[str]:
    """Of the points of a suite with settings, on a CPU."""
    machine = Machine("local", "test device", "cpu", "test", nodes=1, devices_per_node=8)
    return [planned.point.label for planned in expand(with_settings(file_of(text), settings, params_of), machine, params_of).points]


def test_a_label_says_what_a_setting_changed() -> None:
    head = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "gpt-117M"\nworkload = "gpt"\nglobal_batch = 4\n'
    text = head + 'params = { preset = "117M" }\n'
    assert labels(text) == ["gpt-117M b4 fp32"] == labels(text, "params.preset=117M"), "as the file says"
    large = head.replace("117M", "800M") + 'params = { preset = "800M" }\n'
    assert labels(large, "params.preset=800M") == ["gpt-800M b4 fp32"], "not what the workload takes by itself, but what the file says"
    assert labels(text, "params.preset=800M") == ["gpt-117M preset=800M b4 fp32"]
    assert labels(text, "params.preset=800M", "params.layers=3") == ["gpt-117M preset=800M layers=3 b4 fp32"]
    assert labels(text, 'params.preset=["117M", "800M"]') == ["gpt-117M preset=117M b4 fp32", "gpt-117M preset=800M b4 fp32"]
    assert labels(head, "params.layers=3") == ["gpt-117M layers=3 b4 fp32"], "the file leaves it to the workload"
    swept = head + 'params = { preset = ["117M", "800M"] }\n'
    assert labels(swept) == ["gpt-117M 117M b4 fp32", "gpt-117M 800M b4 fp32"]
    assert labels(swept, "params.preset=800M") == ["gpt-117M preset=800M b4 fp32"]
    assert labels(text, "micro_batch=2", "seed=1") == ["gpt-117M micro_batch=2 seed=1 b4 fp32"]
    assert labels(text + "micro_batch = 2\n", "seed=0", "micro_batch=2") == ["gpt-117M b4 fp32"], "as it is by itself"
    on_cpu = text + '[benchmark.on.cpu]\nparams = { preset = "4M" }\n'
    assert labels(on_cpu, "params.preset=117M") == ["gpt-117M preset=117M b4 fp32"], "here the file says 4M"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("global_bach=8", "did you mean 'global_batch'"),
        ("params.presett=4M", "did you mean 'params.preset'"),
        ("params.presses=4M", "did you mean 'params.preset'"),
        ("param.preset=4M", "did you mean 'params.preset'"),
        ("params.rowing=4M", "has the key 'params.rowing'\n  next step: known: "),
        ("measure.targett=1", "did you mean 'measure.target'"),
        ("workload=gpt", "no benchmark"),
        ("global_batch", "expected key=value"),
        ("global_batch=many", "global_batch"),
        ("measure.target=7", "target"),
    ],
)
def test_faults_of_settings_name_the_key(setting: str, words: str) -> None:
    text = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "a"\nworkload = "gpt"\nglobal_batch = 1\n'
    with pytest.raises(InputError, match=words):
        with_settings(file_of(text), [setting], params_of)


def test_plan_says_what_a_run_would_do_and_does_nothing(here: Path) -> None:
    done = caraml(here, "plan", "verbs.toml", "--scripts")
    assert done.returncode == 0, done.stderr
    assert "3 points: 2 to run, 1 skipped" in done.stdout and "needs 4096 devices" in done.stdout
    assert "nothing like them has run yet" in done.stdout and "kWh (devices alone, by data sheet)" in done.stdout
    assert "at most" not in done.stdout, "rated power of devices is no limit of what nodes take"
    assert "sh -c 'echo words of 1; sleep 0; exit 0'" in done.stdout and "caraml-plan-" not in done.stdout
    assert not (here / "caraml-results").exists()
    caraml(here, "run", "verbs.toml", "--no-report")
    again = caraml(here, "plan", "verbs.toml", "--again")
    assert "2 known" in caraml(here, "plan", "verbs.toml").stdout and "2 to run" in again.stdout and "MiB" in again.stdout


def test_a_part_of_a_suite_runs_and_the_rest_stays_to_do(here: Path) -> None:
    done = caraml(here, "run", "verbs.toml", "--only", "slep")
    assert done.returncode == 2 and "did you mean 'sleep'?" in done.stderr and not (here / "caraml-results").exists()
    done = caraml(here, "plan", "verbs.toml", "--only", "sleep", "--where", "n == 2")
    assert done.returncode == 0 and "1 point: 1 to run, 2 of the suite not chosen" in done.stdout, done.stdout
    done = caraml(here, "run", "verbs.toml", "--only", "sleep", "--where", "n == 2", "--no-report")
    assert done.returncode == 0, done.stderr
    assert "point 1 of 1, " in done.stdout, f"it counted what was not chosen: {done.stdout}"
    store = Store(here / "caraml-results")
    assert [record.point.params["n"] for record in store.records()] == [2]
    assert "3 points: 1 ok, 2 to do" in caraml(here, "status", "verbs").stdout
    done = caraml(here, "run", "verbs.toml", "--only", "sleep", "--no-report")
    assert "known from before" in done.stdout and len(store.records()) == 2 and len(store.rounds("verbs")) == 1


def test_status_logs_tags_and_retry(here: Path) -> None:
    done = caraml(here, "run", "verbs.toml", "--set", "params.code=3", "--tag", "red", "--comment", "a first try")
    assert done.returncode == 1, done.stdout
    shown = caraml(here, "status")
    assert shown.returncode == 1 and "[red]" in shown.stdout and "a first try" in shown.stdout
    assert "3 points: 1 skipped, 2 failed" in shown.stdout and "exit status 3: words of 1" in shown.stdout
    assert "words of 2" in caraml(here, "logs", "sleep pause=0 code=3 n=2").stdout
    two = caraml(here, "logs", "sleep")
    assert two.returncode == 2 and "2 points are meant by 'sleep'" in two.stderr
    (here / "verbs.toml").unlink()
    again = caraml(here, "retry", "sleep pause=0 code=3 n=2", "--pack", "2")  # the suite is remembered, settings included
    assert "--pack: no effect, since launcher local makes no jobs" in again.stderr
    store = Store(here / "caraml-results")
    assert again.returncode == 1 and sorted(record.attempt for record in store.records("verbs")) == [1, 1, 2], again.stdout + again.stderr
    assert caraml(here, "retry", "--failed").returncode == 1
    assert sorted(record.attempt for record in store.records("verbs")) == [1, 2, 3]
    assert "nothing to try again" in caraml(here, "retry", "--oom").stdout
    assert caraml(here, "retry").returncode == 2


def test_points_are_tried_again_on_the_machine_of_a_file(here: Path) -> None:
    (here / "machine.toml").write_text(caraml(here, "system", "detect").stdout.replace('name = "', 'name = "nobodys-', 1))
    done = caraml(here, "run", "verbs.toml", "--system", "machine.toml", "--set", "params.code=3", "--no-report")
    assert done.returncode == 1, done.stderr
    (here / "below").mkdir()
    again = caraml(here / "below", "retry", "--failed", "--out", "../caraml-results")
    store = Store(here / "caraml-results")
    assert sorted(record.attempt for record in store.records("verbs")) == [1, 2, 2], again.stderr
    (here / "machine.toml").unlink()
    again = caraml(here, "retry", "--failed")
    assert again.returncode == 2 and "machine.toml" in again.stderr, "never silently by another description of this name"


def test_what_was_chosen_is_tried_again_though_its_settings_do_not_fit_the_rest(here: Path) -> None:
    with (here / "verbs.toml").open("a") as file:
        file.write('[[benchmark]]\nname = "world"\nworkload = "command"\nworld = 1\nparams = { argv = ["true"], energy = false }\n')
    done = caraml(here, "run", "verbs.toml", "--only", "sleep", "--set", "nodes=1", "--set", "params.code=3", "--no-report")
    assert done.returncode == 1, done.stdout + done.stderr
    again = caraml(here, "retry", "--failed")
    store = Store(here / "caraml-results")
    assert sorted(record.attempt for record in store.records()) == [2, 2], again.stdout + again.stderr
    assert "2 failed" in caraml(here, "status", "verbs").stdout
    again = caraml(here, "retry", "verbs")
    assert sorted(record.attempt for record in store.records()) == [3, 3], "of a suite, what was begun: nobody has asked for the rest"


def test_a_fault_that_keeps_points_from_being_tried_again_is_told(here: Path) -> None:
    """Of points that are to be run again none is left out without a word: here the suite lost their values."""
    plain = with_settings(file_of(SUITE), ["params.code=3"], params_of)
    store, there = Store(here), detect()
    whole = Campaign(plain, there, store, LocalLauncher(), LogLines(sys.stdout))
    keys = frozenset(one.key for one in whole.plan().points if one.point.benchmark == "sleep")
    again = replace(whole, options=Options(only=keys, settings=plain.settings))
    assert keys <= {one.key for one in again.plan().points}
    wrong = with_settings(file_of(SUITE.replace("n = [1, 2]", "n = []")), ["params.code=3"], params_of)
    with pytest.raises(InputError, match="at least one value to sweep"):
        replace(again, suite=wrong).plan()


def test_what_lies_in_the_current_folder_is_no_part_of_caraml(here: Path, real_start: None) -> None:
    """Somebody may have left it there."""
    del real_start
    (here / "caraml").mkdir()
    (here / "caraml" / "__init__.py").touch()
    (here / "caraml" / "__main__.py").write_text("open('ran', 'w')")
    command = [str(Path(sys.executable).parent / "caraml"), "run", "verbs.toml", "--detach"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    store, deadline = Store(here / "caraml-results"), time.monotonic() + 300
    while not list(store.points.glob("*/1/record.json")):
        assert not (here / "ran").exists() and time.monotonic() < deadline
        time.sleep(0.05)


def test_detach_status_and_cancel(here: Path) -> None:
    done = caraml(here, "run", "verbs.toml", "--set", "params.pause=300", "--detach")
    assert done.returncode == 0 and "runs suite verbs" in done.stdout, done.stderr
    store = Store(here / "caraml-results")
    deadline = time.monotonic() + 300
    while not list(store.points.glob("*/1/started")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "1 running" in caraml(here, "status", "verbs").stdout
    ended = caraml(here, "cancel", "verbs")
    assert ended.returncode == 0 and "ended the runner" in ended.stdout, ended.stderr
    shown = caraml(here, "status", "verbs")
    assert "1 failed" in shown.stdout and "2 to do" in shown.stdout and "SystemExit" in shown.stdout
    assert caraml(here, "cancel", "verbs").stdout == "no job is left\n"


def test_print_launcher_writes_scripts_and_starts_nothing(here: Path) -> None:
    done = caraml(here, "run", "verbs.toml", "--launcher", "print")
    assert done.returncode == 0, done.stderr
    scripts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("bash ")]
    store = Store(here / "caraml-results")
    assert len(scripts) == 2 and [record.status for record in store.records("verbs")] == ["skipped"]
    subprocess.run(["bash", scripts[0]], cwd=here, check=True)
    again = caraml(here, "run", "verbs.toml")  # one was started by hand and is known; the other is taken back and run
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(record.status for record in store.records("verbs")) == ["ok", "ok", "skipped"]
    late = subprocess.run(["bash", scripts[1]], cwd=here, capture_output=True, text=True, check=False)
    assert late.returncode == 75 and "started before" in late.stderr


MACHINE = """extends = "jedi"
name = "far"
[site.scheduler]
partition = "p"
[site.software]
modules = ["Stages/2025"]
setup = ["touch SETUP"]
"""


def test_plan_and_print_execute_nothing_and_repeat_themselves(here: Path) -> None:
    (here / "far.toml").write_text(MACHINE.replace("SETUP", str(here / "setup")))
    before = {path.name for path in here.iterdir()}
    planned = caraml(here, "plan", "verbs.toml", "--system", "./far.toml", "--launcher", "print")
    assert planned.returncode == 0 and f"setup (by you, before the first script): touch {here / 'setup'}" in planned.stdout, planned.stderr
    assert "modules, for each point: Stages/2025" in planned.stdout and {path.name for path in here.iterdir()} == before
    words = ("run", "verbs.toml", "--system", "./far.toml", "--launcher", "print", "--remote", "/far/results")
    first, second = caraml(here, *words), caraml(here, *words)
    assert first.returncode == 0 and first.stdout == second.stdout, "nothing but commands, the same again"
    setup, submit = first.stdout.splitlines()
    assert setup.startswith("bash /far/results/setup-") and submit == "sbatch --parsable /far/results/slurm/array-1.sh"
    assert {path.name for path in here.iterdir()} == before | {"caraml-results"}
    results = here / "caraml-results"
    scripts = [*results.rglob("*.sh"), *results.rglob("command.json")]
    assert len(scripts) == 6
    for path in scripts:
        told = path.read_text().replace(str(here / "setup"), "")
        assert str(here) not in told and sys.executable not in told, f"{path} names what only this machine has"
    # Another description makes other scripts, but nothing that somebody edited is lost.
    (here / "far.toml").write_text((here / "far.toml").read_text().replace("Stages/2025", "Stages/2026"))
    runs = sorted(results.glob("points/*/1/run.sh"))
    runs[0].write_text(runs[0].read_text() + "# by hand\n")
    third = caraml(here, *words)
    assert f"{runs[0]}".removeprefix(f"{here}/") + " was edited" in third.stderr and runs[0].read_text().endswith("# by hand\n")
    assert "Stages/2025" in runs[0].read_text() and "Stages/2026" in runs[1].read_text()


def test_a_remote_folder_is_for_printed_scripts(here: Path) -> None:
    for words in (("--remote", "/far"), ("--launcher", "print", "--remote", "far")):
        done = caraml(here, "run", "verbs.toml", *words)
        assert done.returncode == 2 and "it is for --launcher print, and a whole path" in done.stderr


def test_options_of_jobs_say_where_they_have_no_effect(here: Path) -> None:
    words = ("run", "verbs.toml", "--launcher", "print", "--one-at-a-time", "--pack", "3", "--throttle", "2")
    done = caraml(here, *words)
    for option in ("--pack", "--throttle"):
        assert f"{option}: no effect, since launcher print makes no jobs of Slurm on local\n" in done.stderr, done.stderr
    assert done.returncode == 0 and "no effect" not in done.stdout
    (here / "far.toml").write_text(MACHINE.replace("SETUP", str(here / "setup")))
    for more in (("--system", "./far.toml"), ("--system", "local", "--pack", "1")):
        done = caraml(here, *words[:4], "--pack", "3", *more)
        assert done.returncode == 0 and "no effect" not in done.stderr, done.stderr


def test_a_point_that_does_not_fit_is_skipped_with_the_numbers(here: Path) -> None:
    large = 'name = "large"\ntitle = "L"\n[[benchmark]]\nname = "g"\nworkload = "gpt"\nglobal_batch = 1\n'
    (here / "large.toml").write_text(f'{large}params = {{ preset = "175B", data = "synthetic-device" }}\n')
    for verb in ("plan", "run"):
        done = caraml(here, verb, "large.toml", CARAML_DEVICE="cpu")
        said = " ".join(done.stdout.split())
        assert done.returncode == 0 and "GiB of memory by plan" in said and "GiB are available (90 % of the" in said, said + done.stderr
    (record,) = Store(here / "caraml-results").records("large")
    assert record.status == "skipped" and "--even-if-too-large runs it" in (record.reason or "")
    assert "1 to run" in caraml(here, "plan", "large.toml", "--even-if-too-large", CARAML_DEVICE="cpu").stdout


def test_status_says_what_a_point_waits_for_in_the_queue(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {
        "sbatch": "echo 7",
        "squeue": "echo '7_0|main|5|2030-01-02T03:04:05|PENDING|Priority'",
        "sinfo": "echo 'main*'",
        "scontrol": ":",
    }
    for name, line in programs.items():
        (here / name).write_text(f"#!/bin/sh\n{line}\n")
        (here / name).chmod(0o755)
    machine = caraml(here, "system", "detect").stdout
    (here / "there.toml").write_text(f'{machine}\n[site.scheduler]\ngpus = "none"\n')
    surroundings = {"PATH": f"{here}:{os.environ['PATH']}"}
    left = caraml(here, "run", "verbs.toml", "--system", "there.toml", "--detach", **surroundings)
    assert left.returncode == 0, left.stderr
    waits = [line for line in caraml(here, "status", **surroundings).stdout.splitlines() if "queued" in line and "slurm:" in line]
    assert len(waits) == 2 and "(Priority); place 1 of 1 by priority; expected to start 2030-01-02 03:04:05" in waits[0], waits
    assert "no job of yours waits here for it: it has begun, maybe with other points of it, or is over" in waits[1], waits
    assert not any("runner" in line for line in waits), "it has ended, as asked"
    (began,) = [folder for folder in (here / "caraml-results" / "points").glob("*/1") if "slurm:7_0:" in (handle_of(folder) or "")]
    monkeypatch.setenv("PATH", surroundings["PATH"])
    monkeypatch.setattr(progress, "_turns", lru_cache(maxsize=1)(progress._turns.__wrapped__))  # what other tests have asked is not known

    def states() -> list[str]:  # as `status --watch` does, in one process
        return [one.state for _, points in progress.listings(here / "caraml-results", None) for one in points if one.folder is not None]

    queued, listed = states(), (here / "squeue").read_text()
    (began / PROGRESS).write_text('{"t": 3.0, "phase": "measure"}\n')
    (here / "squeue").write_text("#!/bin/sh\n")
    assert queued == ["queued", "queued"] and sorted(states()) == ["left", "queued"], "it has begun since the queue was looked at"
    (here / "squeue").write_text(listed)
    again = caraml(here, "status", **surroundings).stdout
    assert "(Priority); place 1 of 1" in again and "measure" not in again, "it was put back into the queue"
    (here / "squeue").write_text("#!/bin/sh\necho 'squeue: error: down' >&2; exit 1\n")
    assert "why it waits is unknown: Slurm does not answer (down)" in caraml(here, "status", **surroundings).stdout
    (here / "squeue").write_text(listed)
    (here / "scancel").write_text("#!/bin/sh\n")
    (here / "scancel").chmod(0o755)
    (here / "verbs.toml").write_text(SUITE.replace("n = [1, 2]", "n = [3, 4]"))
    more = caraml(here, "run", "verbs.toml", "--system", "there.toml", "--detach", **surroundings)
    assert more.returncode == 0, more.stderr
    (here / "squeue").write_text("#!/bin/sh\necho 'squeue: error: down' >&2; exit 1\n")
    refused = caraml(here, "cancel", "verbs", **surroundings)  # its jobs would go on as points that were cancelled
    assert refused.returncode == 3 and "no job of Slurm was cancelled: it does not answer (down)" in refused.stderr, refused.stdout
    (here / "squeue").write_text(listed)
    ended = caraml(here, "cancel", "verbs", **surroundings).stdout
    assert ended.count("cancelled ") == 2, ended
    ended = caraml(here, "cancel", "verbs", **surroundings).stdout
    assert ended == "left 2 points of verbs@1, another campaign of this suite, alone: caraml cancel verbs@1\n"


def test_a_login_node_is_not_measured_by_mistake(here: Path) -> None:
    if "/job_" in (read(Path("/proc/self/cgroup")) or ""):
        pytest.skip("login nodes: a process in a Slurm job is on none")
    (here / "sinfo").write_text("#!/bin/sh\necho nobodys-1\necho nobodys-2\n")
    (here / "sinfo").chmod(0o755)
    surroundings = {"PATH": f"{here}:{os.environ['PATH']}", "CARAML_HERE": "", "SLURM_JOB_ID": ""}
    for more in ((), ("--detach",)):
        refused = caraml(here, "run", "verbs.toml", *more, **surroundings)
        assert refused.returncode == 2 and "none of the 2 nodes of a Slurm cluster" in refused.stderr and "--here" in refused.stderr
    assert not (here / "caraml-results").exists()
    assert caraml(here, "plan", "verbs.toml", **surroundings).returncode == 0
    assert caraml(here, "run", "verbs.toml", "--here", "--no-report", **surroundings).returncode == 0
    assert caraml(here, "accept", "verbs", "--as", "there").returncode == 0
    refused = caraml(here, "check", "verbs.toml", "--baseline", "there", **surroundings)
    assert refused.returncode == 2 and "none of the 2 nodes" in refused.stderr, refused.stderr
    assert caraml(here, "check", "verbs.toml", "--baseline", "there", "--here", **surroundings).returncode in (0, 4, 5)


def test_no_wait_ends_where_another_campaign_has_the_device(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here / "locks"))
    lock = DeviceLock(detect().identity, "suite other into /x")
    assert lock.acquire()
    try:
        refused = caraml(here, "run", "verbs.toml", "--no-wait", "--bell")
    finally:
        lock.release()
    assert refused.returncode == 3 and "place 1 in the queue for the device, which process" in refused.stderr, refused.stderr
    assert "suite other into /x uses" in refused.stderr and "leave out --no-wait" in refused.stderr and "\a" in refused.stderr
    done = caraml(here, "run", "verbs.toml", "--no-wait", "--no-report")
    assert done.returncode == 0 and "\a" not in done.stderr, done.stderr
    assert re.search(r"point 2 of 3, about \d+:\d\d", done.stdout), done.stdout


def test_what_is_piped_is_neither_wrapped_nor_cut(here: Path) -> None:
    """A line for each row, so that other programs find it; the variable COLUMNS asks for a width all the same."""
    long = "a" * 150
    suite = SUITE.replace("words of {n};", "words of {n} {word};").replace("n = [1, 2],", f'n = [1, 2], word = ["{long}", "b"],')
    (here / "verbs.toml").write_text(suite)
    planned = caraml(here, "plan", "verbs.toml", "--scripts", COLUMNS="")
    script = next(line for line in planned.stdout.splitlines() if line.startswith("sh -c"))
    assert script == f"sh -c 'echo words of 1 {long}; sleep 0; exit 0' 3>&-", planned.stdout
    caraml(here, "run", "verbs.toml", "--no-report")
    rows = [line for line in caraml(here, "results", COLUMNS="").stdout.splitlines() if long in line and "n=2" in line]
    assert len(rows) == 1 and "run/s" in rows[0] and " ok " in rows[0] and rows[0] == rows[0].rstrip()
    folded = caraml(here, "results", COLUMNS="80").stdout.splitlines()
    assert max(map(len, folded)) <= 80
    (number,) = {
        record.value("throughput")
        for record in Store(here / "caraml-results").records("verbs")
        if {long, "n=2"} <= set(record.point.label.replace("word=", "").split())
    }
    told = caraml(
        here, "results", "--sql", "select label, throughput from records where label like '%n=2%aaa%' or label like '%aaa%n=2%'", COLUMNS=""
    ).stdout
    assert told.splitlines()[1].split()[-1] == repr(number)
    key = next(record.key for record in Store(here / "caraml-results").records("verbs") if record.status == "ok")
    shown = caraml(here, "show", key, COLUMNS="").stdout
    assert "─" not in shown and any(
        line.startswith("Throughput ") and "run/s" in line and "wall time" in line for line in shown.splitlines()
    )


def test_every_fault_of_a_suite_is_told_at_once(here: Path) -> None:
    """Those of its form, of values, of conditions and of names, each in a line, in the order of the file."""
    (here / "bad.toml").write_text(
        """name = "bad"
title = "Bad"
[[benchmark]]
name = "a"
workload = "gtp"
global_batch = 4
[[benchmark]]
name = "b"
workload = "gpt"
global_batch = [2, 4]
where = ["batch < 4"]
params = { preset = "4m" }
[[benchmark]]
name = "c"
workload = "gpt"
global_batch = 4
precision = "bf17"
"""
    )
    for words in (("plan",), ("run",), ("run", "--detach")):
        done = caraml(here, words[0], "bad.toml", *words[1:])
        lines = done.stderr.splitlines()
        assert done.returncode == 2 and lines[0] == "caraml: 4 faults in bad.toml" and len(lines) == 5, done.stderr
        assert (
            lines[1].startswith('  bad.toml:5: benchmark[0].workload: found "gtp", expected one of ') and "did you mean 'gpt'?" in lines[1]
        )
        assert lines[2].startswith('  bad.toml:11: benchmark[1].where[0]: found "batch < 4"') and "did you mean 'global_batch'?" in lines[2]
        assert lines[3].startswith('  bad.toml:12: benchmark[1].params.preset: found "4m"')
        assert lines[4].startswith('  bad.toml:17: benchmark[2].precision: found "bf17"') and "did you mean 'bf16'?" in lines[4]
    assert not (here / "caraml-results").exists()


def test_energy_that_nobody_asked_for_is_no_missing_sensor(here: Path) -> None:
    done = caraml(here, "run", "verbs.toml")
    assert "not asked [1]" in done.stdout and "no sensor" not in done.stdout and "caraml doctor" not in done.stdout
    page = (here / "caraml-results" / "verbs.html").read_text()
    assert "No energy: not asked for: `energy = false`." in page and "caraml doctor: it names" not in page


def test_unknown_names_are_told(here: Path) -> None:
    for arguments, words in (
        (("run", "verbs.toml", "--launcher", "slurmm"), "did you mean 'slurm'"),
        (("run", "verbs.toml", "--launcher", "slurm"), "has no scheduler"),
        (("run", "verbs.toml", "--system", "jedii"), "jedi"),
        (("status", "nothing"), "where 'nothing' was looked for"),
        (("cancel", "nothing"), "where 'nothing' was looked for"),
        (("archive", "nothing", "x.zip"), "where 'nothing' was looked for"),
        (("import", "nothing.zip"), "no such file"),
    ):
        done = caraml(here, *arguments)
        assert done.returncode == 2 and words in done.stderr, (arguments, done.stderr)


def test_an_archive_comes_back_whole(here: Path) -> None:
    caraml(here, "run", "verbs.toml", "--no-report")
    done = caraml(here, "archive", "verbs", "verbs.caraml.zip")
    assert done.returncode == 0 and "3 records" in done.stdout, done.stderr
    assert "exists already" in caraml(here, "archive", "verbs", "verbs.caraml.zip").stderr
    count = caraml(here, "results", "--out", "verbs.caraml.zip", "--sql", "select count(*) as n, min(status) as s from records", "--csv")
    assert count.stdout == "n,s\n3,ok\n", count.stderr
    stolen = caraml(here, "results", "--out", "verbs.caraml.zip", "--sql", "select * from read_csv('/etc/passwd')")
    assert stolen.returncode == 2
    assert "3 records added, 0 known" in caraml(here, "import", "verbs.caraml.zip", "--out", "other").stdout
    assert "0 records added, 3 known" in caraml(here, "import", "verbs.caraml.zip", "--out", "other").stdout
    assert Store(here / "other").records("verbs") == Store(here / "caraml-results").records("verbs")
    assert "3 points: 2 ok, 1 skipped" in caraml(here, "status", "--out", "other").stdout


def test_a_program_sees_the_site_s_variables_with_and_without_energy(here: Path) -> None:
    machine = caraml(here, "system", "detect").stdout
    (here / "there.toml").write_text(f'{machine}\n[site.software.variables]\nOMP_WAIT_POLICY = "active"\n')
    program = 'params = { argv = ["sh", "-c", "echo is $OMP_WAIT_POLICY"], energy = false }\n'
    (here / "env.toml").write_text(f'name = "env"\ntitle = "E"\n[[benchmark]]\nname = "e"\nworkload = "command"\n{program}')
    for number, more in enumerate((("--set", "params.energy=false"), ("--set", "params.energy=true", "--set", "measure.idle_seconds=0"))):
        out = f"out{number}"
        done = caraml(here, "run", "env.toml", "--system", "there.toml", "--out", out, *more, CARAML_POWER="fake:constant")
        assert done.returncode == 0, done.stderr
        (log,) = (here / out).glob("points/*/1/worker.log")
        assert log.read_text() == "is active\n", more


IMAGES = """name = "images"
title = "Images"
[[benchmark]]
name = "resnet"
workload = "image_classification"
global_batch = 4
params = { model = "test_resnet", image_size = 32, data = "images", path = "photos" }
measure = { target = 0.5, min_seconds = 0, max_seconds = 30, min_steps = 4, max_steps = 4, warm_up_max_seconds = 0.1, idle_seconds = 0 }
"""


def test_input_with_a_relative_path_lies_beside_its_suite_and_for_one_of_the_catalogue_in_the_current_folder(here: Path) -> None:
    (here / "study").mkdir()
    for part in ("train", "val"):
        generate_image_folder(here / "study" / "photos" / part, classes=2, images_per_class=8, seed=0)
    (here / "study" / "images.toml").write_text(IMAGES)
    done = caraml(here, "run", "study/images.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = Store(here / "caraml-results").records("images")
    assert record.status == "ok" and record.point.params["path"] == "photos"  # where the study lies is no part of its keys
    assert record.value("loss_validation") is not None, "of the held-out images beside those of training"
    printed = caraml(here, "run", "vision", "--set", "params.data=images", "--set", "params.path=study/photos", "--launcher", "print")
    assert printed.returncode == 0, printed.stderr
    scripts = [path.read_text() for path in (here / "caraml-results" / "points").glob("*/1/run.sh")]
    assert len(scripts) > 1 and sum(f"export CARAML_SUITE_FOLDER={here}\n" in text for text in scripts) == len(scripts) - 1
