"""The Slurm launcher against Slurm itself: a cluster of virtual nodes. Every point's script is the real one; only the worker inside is a
stand-in where nothing depends on what it measures."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from caraml.launch import Job, queue
from caraml.results.rows import read_table
from caraml.results.store import Store
from caraml.suite.model import Placement, Policy
from caraml.system.model import Container, Network, Scheduler, Site
from tests.debian import install
from tests.slurm.cluster import CPUS, GPUS, Cluster
from tests.slurm.conftest import Bench, make_bench, overlap, real_job, record, wait
from tests.waiting import until

SUITE = """
name = "s"
title = "S"
[[benchmark]]
name = "n"
workload = "command"
params = { argv = ["echo", "answer", "{n}"], n = [1, 2], metrics = { answer = { pattern = "answer (\\\\d+)", unit = "1" } } }
"""
MACHINE = """
name = "virtual"
title = "Virtual nodes"
nodes = 3
devices_per_node = 1
[[devices]]
model = "virtual"
kind = "cpu"
[cpu]
model = "virtual"
threads = 4
[sources]
nodes = "this test"
devices_per_node = "this test"
devices = "this test"
cpu = "this test"
[site.scheduler]
partition = "main"
gpus = "none"
"""

Slow = tuple[Bench, list[Job], list[str]]


@pytest.fixture(scope="module", autouse=True)
def slow(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Slow:
    """Two jobs that reach their time limit of a minute while the other tests run: one heeds the warning, one does not."""
    del cluster
    bench = make_bench(tmp_path_factory.mktemp("slow"))
    assert bench.site.scheduler is not None
    minute = {"partition": "short", "max_minutes": 1, "signal_seconds": 25, "extra": ("--nodelist=sn2",)}
    policy = Policy(target=1e-6, min_seconds=280, max_seconds=300, warm_up_max_seconds=1, idle_seconds=0, timeout_seconds=50)
    # It waits for most of the time, and leaves the cores to others.
    waits = {"workload": "known", "params": {"device": "asynchronous", "step_seconds": 0.02}}
    heeding = real_job(bench.root, Site(scheduler=bench.site.scheduler.model_copy(update=minute)), measure=policy, **waits)
    deaf = bench.job("trap '' TERM; sleep 300 & wait; sleep 300", minute, timeout=50)
    return bench, [heeding, deaf], list(bench.launcher().submit([heeding, deaf]))


def test_a_job_ends_with_its_point_s_exit_code(bench: Bench) -> None:
    jobs = [bench.job("measured"), bench.job("echo broken >&2; exit 3")]
    launcher = bench.launcher(one_at_a_time=True)
    states = wait(launcher, launcher.submit(jobs))
    assert [(state.state, state.exit_code) for state in states] == [("ended", 0), ("ended", 3)]
    assert [record(job).status for job in jobs] == ["ok", "failed"]
    assert "exit status 3" in (record(jobs[1]).reason or "") and "broken" in (record(jobs[1]).reason or "")
    assert overlap(jobs) == 1


def test_a_script_can_be_submitted_by_hand(bench: Bench) -> None:
    job = bench.job("measured")
    done = subprocess.run(["sbatch", "--wait", str(job.script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert record(job).status == "ok"
    outside = subprocess.run(["bash", str(job.script)], capture_output=True, text=True, check=False)
    assert outside.returncode and "sbatch" in outside.stderr


def test_points_alike_become_one_array_and_keep_to_the_throttle(bench: Bench) -> None:
    both = "touch ../../../here-$$; until [ $(ls ../../../here-* | wc -l) -ge 2 ]; do sleep 0.1; done; sleep 0.6; measured"
    jobs = [*(bench.job(both) for _ in range(3)), bench.job("measured"), bench.job("measured", nodes=2)]
    launcher = bench.launcher(throttle=2)
    handles = list(launcher.submit(jobs))
    numbers = [handle.split(":")[1] for handle in handles]
    array = numbers[0].partition("_")[0]
    assert numbers[:3] == [f"{array}_{task}" for task in range(3)]
    assert "_" not in "".join(numbers[3:]), "one is left over by the longest array of this cluster, one has other needs"
    assert {state.exit_code for state in wait(launcher, handles)} == {0}
    assert overlap(jobs[:3]) == 2


def test_small_points_share_a_job_one_after_another(bench: Bench) -> None:
    behaviour = "echo $SLURM_JOB_ID >number; sleep 0.2; measured"
    jobs = [bench.job(behaviour), bench.job("exit 4"), bench.job(behaviour, nodes=2), bench.job(behaviour)]
    launcher = bench.launcher(pack=3)
    handles = list(launcher.submit(jobs))
    states = wait(launcher, handles)
    assert [state.exit_code for state in states] == [0, 4, 0, 0]
    assert overlap([jobs[0], jobs[1], jobs[3]]) == 1
    numbers = [(jobs[index].folder / "number").read_text() for index in (0, 2, 3)]
    assert numbers[0] == numbers[2] != numbers[1], "points of equal node count share a job"


def test_one_point_of_a_shared_job_is_cancelled_and_the_others_go_on(bench: Bench) -> None:
    jobs = [bench.job("sleep 900"), bench.job("sleep 900"), bench.job("measured")]
    launcher = bench.launcher(pack=3)
    handles = list(launcher.submit(jobs))
    until((jobs[0].folder / "begin").exists)
    assert launcher.poll(handles)[handles[0]].state == "running"
    assert launcher.poll(handles)[handles[1]].state == "waiting", "its turn has not come"
    launcher.cancel(handles[:2])
    states = wait(launcher, handles)
    assert [state.state for state in states] == ["ended", "lost", "ended"]
    assert states[2].exit_code == 0 and not (jobs[1].folder / "begin").exists()


def test_cancelling_ends_running_and_waiting_jobs(bench: Bench) -> None:
    jobs = [bench.job("sleep 900 & echo $! >child; wait"), bench.job("measured")]
    launcher = bench.launcher(one_at_a_time=True)
    handles = list(launcher.submit(jobs))
    until(lambda: (jobs[0].folder / "child").exists() and (jobs[0].folder / "child").read_text().endswith("\n"))
    assert launcher.poll(handles)[handles[1]].reason == "Dependency"
    said = launcher.waiting_text(handles)
    assert said is not None and said.startswith(
        "1 job waits in the queue: another job has to end first (Dependency); the first has place 1 of"
    )
    launcher.cancel(handles)
    states = wait(launcher, handles)
    assert [state.state for state in states] == ["lost", "lost"]
    assert all("CANCELLED" in (state.reason or "") for state in states)
    child = Path("/proc") / (jobs[0].folder / "child").read_text().strip()
    until(lambda: not child.exists())  # the job is cancelled before its processes are gone


def test_a_lost_node_is_a_lost_job_or_one_that_starts_again(bench: Bench, cluster: Cluster) -> None:
    on_third = ("--nodelist=sn3",)
    behaviour = '[ -n "${SLURM_RESTART_COUNT:-}" ] || sleep 300; measured'
    lost = bench.job("sleep 300; measured", {"extra": on_third})
    again = bench.job(behaviour, {"extra": on_third, "requeue": True})
    launcher = bench.launcher()
    handles = list(launcher.submit([lost, again]))
    until(lambda: all((job.folder / "begin").exists() for job in (lost, again)))
    assert {state.state for state in launcher.poll(handles).values()} == {"running"}
    cluster.kill_node("sn3")
    # As the controller does after a minute without an answer, SlurmdTimeout; whoever stops for seconds is not lost.
    subprocess.run(["scontrol", "update", "NodeName=sn3", "State=DOWN", "Reason=no power"], check=True)
    try:
        (state,) = wait(launcher, handles[:1])
        assert state.state == "lost" and "NODE_FAIL" in (state.reason or "")
        assert launcher.poll(handles)[handles[1]].state == "waiting"
    finally:
        cluster.start_node("sn3")
    (state,) = wait(launcher, handles[1:])
    assert (state.state, state.exit_code) == ("ended", 0)
    assert record(again).status == "ok"


def test_a_requeued_job_starts_afresh(bench: Bench) -> None:
    job = bench.job(
        'echo "${SLURM_RESTART_COUNT:-0}" >>starts; [ -n "${SLURM_RESTART_COUNT:-}" ] || sleep 300; measured', {"requeue": True}
    )
    launcher = bench.launcher()
    handles = list(launcher.submit([job]))
    until((job.folder / "starts").exists)
    subprocess.run(["scontrol", "requeue", handles[0].split(":")[1]], check=True)
    (state,) = wait(launcher, handles)
    assert (state.state, state.exit_code) == ("ended", 0) and record(job).status == "ok"
    assert (job.folder / "starts").read_text().split() == ["0", "1"]


def test_a_job_warned_before_it_has_a_result_goes_back_into_the_queue_once(bench: Bench) -> None:
    """What Slurm does at the end of the time, done early: the warning goes to the job's shell."""
    program = (
        "import os, signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1)); "
        "open('starts', 'a').write(os.environ.get('SLURM_RESTART_COUNT', '0')); time.sleep(300)"
    )
    job = bench.job(f'{sys.executable} -c "{program}"', {"requeue": True})
    starts, launcher = job.folder / "starts", bench.launcher()
    (handle,) = launcher.submit([job])
    for count in ("0", "01"):
        until(lambda count=count: starts.exists() and starts.read_text() == count)  # type: ignore[misc]
        assert launcher.poll([handle])[handle].state == "running"
        subprocess.run(["scancel", "--batch", "--signal=USR1", handle.split(":")[1]], check=True)
    (state,) = wait(launcher, [handle])
    assert state.state == "ended" and state.exit_code and record(job).status == "failed" and starts.read_text() == "01"


def test_jobs_are_found_again_by_another_process(bench: Bench) -> None:
    job = bench.job("until [ -e seen ]; do sleep 0.1; done; measured")
    (handle,) = bench.launcher().submit([job])
    code = f"""
import json, sys, time
from pathlib import Path
from caraml.launch.slurm import SlurmLauncher
from caraml.system.model import Scheduler
launcher, handle, seen = SlurmLauncher(Scheduler(), Path("elsewhere")), {handle!r}, []
while not seen or seen[-1] in ("waiting", "running"):
    seen.append(launcher.poll([handle])[handle].state)
    Path({str(job.folder)!r}, "seen").touch()
    time.sleep(0.1)
print(json.dumps(seen))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    seen = json.loads(done.stdout)
    assert seen[-1] == "ended" and set(seen[:-1]) <= {"waiting", "running"} and len(seen) > 1


def test_a_controller_that_is_away_loses_nothing(bench: Bench, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = bench.launcher()
    running = bench.job("until [ -e ../../../go ]; do sleep 0.1; done; measured")
    (handle,) = launcher.submit([running])
    until((running.folder / "begin").exists)  # a step that has not started yet needs the controller
    monkeypatch.setenv("SLURM_CONF", str(cluster.impatient()))
    cluster.stop_controller()
    back = threading.Timer(2, cluster.start_controller)
    try:
        state = launcher.poll([handle])[handle]
        assert state.state == "running" and "does not answer" in (state.reason or "")
        (bench.root / "go").touch()
        (state,) = wait(launcher, [handle])
        assert (state.state, state.exit_code) == ("ended", 0), "the job's own files say how it ended"
        late = bench.job("measured")
    finally:
        back.start()
    monkeypatch.undo()
    handles = list(launcher.submit([late]))
    back.join()
    assert wait(launcher, handles)[0].exit_code == 0


def test_a_job_that_nobody_remembers_is_lost(bench: Bench) -> None:
    """There is no accounting database here, as on many machines."""
    job = bench.job("measured")
    handle = f"slurm:999999:{job.folder}"
    assert queue.in_accounting(["999999"]) == {}
    (state,) = wait(bench.launcher(), [handle])
    assert state.state == "lost" and "no accounting" in (state.reason or "")


@pytest.mark.parametrize(
    ("site", "values", "words"),
    [
        ({"partition": "man"}, {}, "invalid partition"),
        ({}, {"nodes": 9}, "node"),
        ({"gpus": "gres"}, {"device_class": "gpu", "devices": GPUS + 1}, "node configuration"),
        ({"partition": "short"}, {}, "more than the partition's time limit of 1 min"),
        ({"account": "nobody", "extra": ("--no-such-option",)}, {}, "no-such-option"),
    ],
)
def test_slurm_s_own_objection_is_told(bench: Bench, site: dict[str, object], values: dict[str, object], words: str) -> None:
    job = bench.job("measured", site, **values)  # type: ignore[arg-type]
    objection = bench.launcher().check(job.script.read_text())
    assert objection is not None and words in objection.lower()


def test_a_refused_point_does_not_stop_the_others(bench: Bench) -> None:
    jobs = [bench.job("measured", {"partition": "man"}), bench.job("measured")]
    launcher = bench.launcher()
    states = wait(launcher, launcher.submit(jobs))
    assert states[0].state == "lost" and "Invalid partition" in (states[0].reason or "") and str(jobs[0].script) in (states[0].reason or "")
    assert states[1].exit_code == 0


@pytest.mark.parametrize("way", ["gres", "gpus-per-node"])
def test_a_point_sees_the_gpus_it_asked_for(bench: Bench, way: str) -> None:
    jobs = [bench.job('echo "$CUDA_VISIBLE_DEVICES" >gpus; measured', {"gpus": way}, device_class="gpu", devices=n) for n in (1, GPUS)]
    launcher = bench.launcher(pack=2)  # a job with the GPUs of the larger; each point sees its own share
    assert {state.exit_code for state in wait(launcher, launcher.submit(jobs))} == {0}
    assert [len((job.folder / "gpus").read_text().split(",")) for job in jobs] == [1, GPUS]


def test_a_step_has_all_cpus_of_the_job(bench: Bench) -> None:
    behaviour = 'echo "$SLURM_CPUS_PER_TASK $OMP_NUM_THREADS" >cpus; measured'
    jobs = [bench.job(behaviour, {"cpus_per_device": 2}, devices=2), bench.job(behaviour, {"exclusive": True})]
    launcher = bench.launcher()
    assert {state.exit_code for state in wait(launcher, launcher.submit(jobs))} == {0}
    assert [(job.folder / "cpus").read_text().split() for job in jobs] == [["4", "2"], [str(CPUS), str(CPUS)]]


def test_a_point_runs_in_its_container(bench: Bench) -> None:
    reason = install(("bubblewrap",), ("bwrap",))
    if reason is not None:
        pytest.skip(reason)
    python = str(bench.root / "venv" / "bin" / "python3")
    bench.site = bench.site.model_copy(update={"container": Container(runtime="bubblewrap", image="/", python=python)})
    job = bench.job("touch /usr/of-the-host 2>denied; measured")
    launcher = bench.launcher()
    assert wait(launcher, launcher.submit([job]))[0].exit_code == 0, (job.folder / "worker.log").read_text()
    assert "Read-only" in (job.folder / "denied").read_text() and not Path("/usr/of-the-host").exists()


CHAIN = """
name = "chain"
title = "C"
[[benchmark]]
name = "second"
workload = "command"
needs = "first"
params = { argv = ["cat", "{folder}/needed/kept"], metrics = { answer = { pattern = "(\\\\d+)", unit = "1" } } }
[[benchmark]]
name = "first"
workload = "command"
params = { argv = ["sh", "-c", 'sleep 2; echo 42 >"$0/kept"; exit {code}', "{folder}"], code = 0 }
"""


@pytest.mark.parametrize(("code", "pack"), [(0, 1), (3, 4)])
def test_a_dependent_job_waits_and_is_not_run_where_the_other_failed(code: int, pack: int, bench: Bench) -> None:
    """Left at once: nobody but Slurm sees to the order."""
    bench.root.mkdir(exist_ok=True)
    (bench.root / "chain.toml").write_text(CHAIN.replace("code = 0", f"code = {code}"))
    (bench.root / "machine.toml").write_text(MACHINE)
    words = ["run", "chain.toml", "--system", "./machine.toml", "--launcher", "slurm", "--pack", str(pack)]

    def caraml(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "caraml", *words, *more]
        return subprocess.run(command, cwd=bench.root, capture_output=True, text=True, timeout=300, check=False)

    left = caraml("--detach")
    assert left.returncode == 0, left.stdout + left.stderr
    queued = subprocess.run(["squeue", "--noheader", "--format=%E"], capture_output=True, text=True, check=True).stdout
    assert "afterok:" in queued, queued
    taken = caraml("--no-report")
    found = {one.point.benchmark: one for one in Store(bench.root / "caraml-results").records("chain")}
    assert found.keys() == {"first", "second"}, taken.stdout + taken.stderr
    if code == 0:
        assert taken.returncode == 0 and found["second"].value("answer") == 42
        return
    assert taken.returncode == 1 and found["first"].status == "failed"
    assert found["second"].status == "skipped" and (found["second"].reason or "").startswith("needs first code=3, which is failed: ")


def test_what_was_cancelled_while_nobody_looked_is_submitted_anew_and_so_is_what_needs_it(bench: Bench) -> None:
    bench.root.mkdir(exist_ok=True)
    (bench.root / "chain.toml").write_text(CHAIN.replace("sleep 2; echo", 'until [ -e "$0/../../../../go" ]; do sleep 0.1; done; echo'))
    (bench.root / "machine.toml").write_text(MACHINE)
    words = [sys.executable, "-m", "caraml", "run", "chain.toml", "--system", "./machine.toml", "--launcher", "slurm", "--no-report"]
    subprocess.run([*words, "--detach"], cwd=bench.root, check=True, timeout=300)
    store = Store(bench.root / "caraml-results")
    (first,) = [path for path in store.points.glob("*/1") if 'kept"; exit' in (path / "point.json").read_text().replace("\\", "")]
    subprocess.run(["scancel", (first / "handle").read_text().split(":")[1]], check=True)
    (bench.root / "go").touch()
    taken = subprocess.run(words, cwd=bench.root, capture_output=True, text=True, timeout=300, check=False)
    assert taken.returncode == 0, taken.stdout + taken.stderr
    assert {(one.status, one.attempt) for one in store.records("chain")} == {("ok", 2)}
    assert "gone when the campaign was taken up again: job" in (record(Job(first, first, 1, 1, 1)).reason or "")


def test_a_campaign_is_left_and_taken_up_again(bench: Bench) -> None:
    """The command line from end to end: a machine's file, a suite, two calls."""
    bench.root.mkdir(exist_ok=True)
    (bench.root / "suite.toml").write_text(SUITE)
    (bench.root / "machine.toml").write_text(MACHINE)
    words = ["suite.toml", "--system", "./machine.toml", "--launcher", "slurm"]

    def caraml(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "caraml", *more]
        return subprocess.run(command, cwd=bench.root, capture_output=True, text=True, timeout=300, check=False)

    planned = caraml("plan", *words)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    left = caraml("run", *words, "--detach")
    assert left.returncode == 0, left.stdout + left.stderr
    taken = caraml("run", *words)
    assert taken.returncode == 0, taken.stdout + taken.stderr
    store = Store(bench.root / "caraml-results")
    found = [store.latest(key.rpartition("-")[2]) for key in (path.name for path in store.points.iterdir())]
    assert sorted(one.value("answer") for one in found if one is not None) == [1, 2]
    assert {(one.status, one.attempt) for one in found if one is not None} == {("ok", 1)}
    (bench.root / "machine.toml").write_text(MACHINE.replace('"main"', '"man"'))
    refused = caraml("run", *words, "--detach", "--again")
    told = ("2 points did not get into the queue", "no job waits or runs; caraml status")
    assert refused.returncode == 1 and all(text in refused.stdout for text in told), refused.stdout + refused.stderr
    assert "2 lost" in (said := caraml("status").stdout) and "sbatch refused" in said, said
    (bench.root / "machine.toml").write_text(MACHINE)
    refused = caraml("plan", "suite.toml", "--system", "./machine.toml", "--launcher", "slurm", "--set", "measure.timeout_seconds=7200")
    assert refused.returncode == 2 and "partition's time limit of 60 min" in " ".join(refused.stdout.split())


def test_local_work_is_refused_on_a_node_that_is_none_of_the_cluster_s(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    del bench
    assert "none of the 3 nodes of a Slurm cluster" in (queue.login_node() or "")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert queue.login_node() is None


def test_a_pack_is_no_longer_than_the_partition_allows_where_the_site_does_not_say(bench: Bench) -> None:
    """One job of 66 minutes would wait for ever in a partition that ends after 60."""
    jobs = [bench.job("measured", timeout=1200) for _ in range(4)]
    launcher = bench.launcher(pack=10)
    assert [len(group) for group, _ in launcher.scripts(jobs)] == [2, 2]


def test_a_warned_point_writes_what_it_has_measured(slow: Slow) -> None:
    bench, (heeding, _), handles = slow
    (state,) = wait(bench.launcher(), handles[:1])
    assert (state.state, state.exit_code) == ("ended", 0), (heeding.folder / "worker.log").read_text()
    measured = record(heeding)
    assert measured.status == "ok" and "truncated" in measured.flags
    assert measured.window is not None and 0 < measured.window.seconds < 280 and measured.value("throughput")


@pytest.mark.parametrize("placement", [Placement(), Placement(cp=2)], ids=["copies", "cp2"])
def test_a_point_trains_on_two_nodes(cluster: Cluster, tmp_path: Path, placement: Placement) -> None:
    """Rank 0 may be on either node; names of the fast network differ from the hosts' own, as on machines that need a suffix."""
    scheduler = Scheduler(exclusive=False, gpus="none", cpus_per_device=1)
    site = Site(scheduler=scheduler, network=Network(interface="lo", address_suffix="i"))
    policy = Policy(target=0.5, min_seconds=0, min_steps=4, max_steps=8, max_seconds=2, warm_up_max_seconds=0.1, idle_seconds=0)
    job = real_job(tmp_path, site, nodes=2, measure=policy, placement=placement)
    launcher = make_bench(tmp_path / "bench").launcher()
    assert launcher.check(job.script.read_text()) is None
    (state,) = wait(launcher, launcher.submit([job]))
    assert (state.state, state.exit_code) == ("ended", 0), (job.folder / "worker.log").read_text()
    measured = record(job)
    assert measured.status == "ok"
    slurm = measured.environment["slurm"]
    assert isinstance(slurm, dict) and slurm["SLURM_JOB_NUM_NODES"] == "2"
    steps = read_table(job.folder / measured.files["steps"])
    assert sorted(set(steps["rank"])) == [0, 1] and measured.window is not None
    assert measured.window.samples == 4 * measured.window.steps


def test_a_point_that_does_not_heed_the_warning_times_out(slow: Slow) -> None:
    bench, (_, deaf), handles = slow
    (state,) = wait(bench.launcher(), handles[1:])
    assert state.state == "ended" and state.exit_code
    assert record(deaf).status == "timeout" and "time limit" in (record(deaf).reason or "")
