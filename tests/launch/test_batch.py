"""What jobs ask for and how they are put together; no Slurm is needed for that."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.launch import Job, batch, queue
from caraml.launch.batch import START_UP_SECONDS, SlurmOptions
from caraml.launch.launchers import PrintLauncher, set_up
from caraml.launch.slurm import SlurmLauncher
from caraml.results.finish import NOT_DONE, finish
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Knobs, Policy
from caraml.system.catalogue import list_systems
from caraml.system.model import Network, Scheduler, Site, Software
from tests.conftest import MakePoint
from tests.report.record_factory import make_record
from tests.stores import write_script

FULL = Site(
    scheduler=Scheduler(
        partition="booster",
        account="an account",
        qos="urgent",
        constraint="gpu&largedata",
        reservation="r1",
        cpu_bind="mask_cpu:0xff",
        max_minutes=120,
        extra=("--hint=nomultithread",),
        srun_extra=("--mpi=pmi2",),
    ),
    network=Network(interface="ib0", address_suffix="i"),
    software=Software(modules=("GCC", "CUDA/12"), venv="/sw/my venv", variables={"UCX_TLS": "b c", "A": "t0k"}),
)


def script(tmp_path: Path, point: Any, site: Site = FULL) -> str:
    return write_script(point, Store(tmp_path).new_attempt(point), 64, site, "cuda").read_text()


def test_a_script_has_everything_that_the_site_says(tmp_path: Path, make_point: MakePoint) -> None:
    text = script(tmp_path, make_point(device_class="gpu", nodes=4, devices=4, global_batch=64))
    for option in (
        *("--partition=booster", "--account='an account'", "--qos=urgent", "--constraint='gpu&largedata'", "--reservation=r1"),
        *("--nodes=4", "--ntasks-per-node=1", "--gres=gpu:4", "--exclusive", "--time=33", "--signal=B:USR1@60", "--hint=nomultithread"),
    ):
        assert f"\n#SBATCH {option}\n" in text, option
    assert text.index("#SBATCH") < text.index("module load GCC CUDA/12 || exit") < text.index(". '/sw/my venv/bin/activate' || exit")
    assert (
        "\nexport UCX_TLS='b c'\n" in text and "\nexport NCCL_SOCKET_IFNAME=ib0\n" in text and "\nexport GLOO_SOCKET_IFNAME=ib0\n" in text
    )
    assert "t0k" not in text and "<.private/site" in text and ': "${A?its value' in text
    assert "mkdir -m 700 .meet && head -c 32 /dev/urandom >.meet/secret || exit" in text
    meeting = text[text.index("mapfile -t hosts") : text.index("\n", text.index("export CARAML_MEET"))]
    for host, peer in (("n2", "n2i"), ("n2.a.site", "n2i.a.site")):
        stand_in = f"scontrol() {{ printf '%s\\n' n1 {host}; }}; SLURM_JOB_NODELIST='n[1-2]'; {meeting}\necho $CARAML_PEER"
        assert subprocess.run(["bash", "-uc", stand_in], capture_output=True, text=True, check=False).stdout == f"{peer}\n"
    srun = next(line for line in text.replace(" \\\n ", "").splitlines() if line.startswith("srun "))
    assert {"--nodes=4", "--ntasks=4", "--cpu-bind=mask_cpu:0xff", "--gres=gpu:4", "--mpi=pmi2"} <= set(srun.split())
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    bound = script(tmp_path, make_point(device_class="gpu", nodes=4, devices=4, global_batch=64, knobs=Knobs(affinity="compact")))
    assert "--cpu-bind=none" in bound and "mask_cpu" not in bound and "\nexport OMP_PROC_BIND=close\n" in bound


@pytest.mark.parametrize(("state", "ended"), [("COMPLETING", True), ("PENDING", True), ("RUNNING", False), ("", False)])
def test_a_step_that_is_ended_before_its_job_is_no_failure(tmp_path: Path, make_point: MakePoint, state: str, ended: bool) -> None:
    """Slurm ends steps and shell one by one. A job that is put back into the queue would have its result already when it starts again."""
    folder = Store(tmp_path / "results").new_attempt(make_point())
    for name, code in (("srun", "exit 143"), ("squeue", f"echo {state}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "1"}
    path = write_script(make_point(), folder, 1, Site(scheduler=Scheduler()))
    assert subprocess.run(["bash", str(path)], env=environment, capture_output=True, check=False).returncode == 143
    assert (folder / "exit").exists() == (folder / RECORD).exists() == (not ended)


@pytest.mark.parametrize(
    ("told", "step"),
    [
        ({"SLURM_CPUS_ON_NODE": "8", "SLURM_JOB_CPUS_PER_NODE": "8,4(x2),16"}, "4"),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_JOB_CPUS_PER_NODE": "4,16(x2)"}, "4"),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x2)"}, "8"),  # as salloc has it
        ({"SLURM_CPUS_ON_NODE": "8"}, "8"),
    ],
)
def test_a_step_on_nodes_of_unequal_size_has_the_cpus_of_the_smallest(
    told: dict[str, str], step: str, tmp_path: Path, make_point: MakePoint
) -> None:
    """It asks for as many on each: of an exclusive job that began on a large node Slurm refused the step."""
    stand_in(tmp_path, "srun", 'echo "$* OMP $OMP_NUM_THREADS" >"${0%/*}/asked"; exit 1')
    stand_in(tmp_path, "scontrol", "echo sn1; echo sn2")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "sn[1-2]", **told}
    point = make_point(nodes=2, global_batch=4)
    path = write_script(point, Store(tmp_path / "results").new_attempt(point), 1, Site(scheduler=Scheduler()))
    subprocess.run(["bash", str(path)], env=environment, capture_output=True, check=False)
    assert f" --cpus-per-task={step} " in (asked := (tmp_path / "asked").read_text()) and asked.endswith(f"OMP {step}\n"), asked


@pytest.mark.parametrize(("devices", "seen"), [(1, "3 GPU-a"), (2, "3,0 GPU-a,GPU-b")])
def test_a_program_sees_the_gpus_that_it_asked_for(devices: int, seen: str, tmp_path: Path, make_point: MakePoint) -> None:
    """Slurm gives an exclusive job all of its node: a program of one GPU had the energy of four."""
    params = {"argv": ["true"], "energy": False}
    point = make_point(workload="command", params=params, device_class="gpu", devices=devices, global_batch=4)
    folder = Store(tmp_path / "results").new_attempt(point)
    stand_in(tmp_path, "python3", 'echo "$CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES${ZE_AFFINITY_MASK+ set}" >>"${0%/*}/seen"')
    masks = {"CUDA_VISIBLE_DEVICES": "3,0,1,2", "ROCR_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_CPUS_ON_NODE": "1", **masks}
    site = Site(scheduler=Scheduler(), software=Software(python=str(tmp_path / "python3")))
    done = subprocess.run(["bash", str(write_script(point, folder, 1, site))], env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "seen").exists(), done.stderr
    assert (tmp_path / "seen").read_text().splitlines()[0] == seen


@pytest.mark.parametrize("workload", ["command", "known"])
def test_only_what_a_worker_had_put_away_is_removed_where_a_job_starts_again(workload: str, tmp_path: Path, make_point: MakePoint) -> None:
    """A program may go on from files that happen to be called so."""
    point = make_point(workload=workload, params={"argv": ["true"]} if workload == "command" else {})
    (removed,) = [line for line in script(tmp_path, point).splitlines() if "rm -f " in line]
    assert ("so_far.bin" in removed) == ("steps" in removed) == (workload != "command")


@pytest.mark.parametrize(("requeue", "taken"), [(False, True), (True, True), (True, False)])
def test_a_preempted_job_that_has_a_while_left_is_no_failure(requeue: bool, taken: bool, tmp_path: Path, make_point: MakePoint) -> None:
    """Where the partition has a GraceTime, the step is ended and the job's state stays RUNNING."""
    folder = Store(tmp_path / "results").new_attempt(make_point())
    stand_in(tmp_path, "srun", "exit 143")
    stand_in(tmp_path, "squeue", 'case "$*" in *--Format=PreemptTime*) echo 2030-01-02T03:04:05;; *) echo RUNNING;; esac')
    stand_in(tmp_path, "scontrol", f'echo "$*" >"$0.told"; exit {0 if taken else 1}')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    path = write_script(make_point(), folder, 1, Site(scheduler=Scheduler(requeue=requeue)))
    for count in ("", "1"):  # as often as it is preempted
        subprocess.run(["bash", str(path)], env={**environment, "SLURM_RESTART_COUNT": count}, capture_output=True, check=False)
        assert (tmp_path / "scontrol.told").exists() == requeue
        (tmp_path / "scontrol.told").unlink(missing_ok=True)
        if requeue and taken:
            assert not (folder / "exit").exists() and not (folder / RECORD).exists()
        else:
            found = read_record(folder / RECORD)
            assert (found.status, found.reason) == ("lost", "Slurm preempted its job")
            break


def test_a_task_of_an_array_warns_itself_alone(tmp_path: Path, make_point: MakePoint) -> None:
    """One task has the array's number for its own: all others were warned, too, and put back into the queue."""
    folder = Store(tmp_path / "results").new_attempt(make_point())
    stand_in(tmp_path, "srun", "kill -USR1 $PPID; exec sleep 0.3")
    stand_in(tmp_path, "scancel", 'echo "scancel $*" >>"${0%/*}/told"')
    stand_in(tmp_path, "scontrol", 'echo "scontrol $*" >>"${0%/*}/told"')
    task = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_CPUS_ON_NODE": "1"}
    path = write_script(make_point(), folder, 1, Site(scheduler=Scheduler(requeue=True)))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **task}
    subprocess.run(["bash", str(path)], env=environment, capture_output=True, check=False)
    assert (tmp_path / "told").read_text().splitlines() == ["scancel --signal=USR1 7_2", "scontrol requeue 7_2"]


@pytest.mark.parametrize("signalled", [True, False], ids=["its time is nearly over", "cut off before"])
def test_a_measurement_is_the_record_of_the_run_that_made_it(signalled: bool, tmp_path: Path, make_point: MakePoint) -> None:
    """Not of a later run of the same job, which fails: with that one's tables beside it. A job that has measured needs no other run."""
    point = make_point()
    folder = Store(tmp_path / "results").new_attempt(point)
    measured = make_record(point, attempt=1).model_copy(update={"reason": NOT_DONE, "files": {}}).model_dump_json()
    (tmp_path / "measured.json").write_text(measured)
    left = folder if not signalled else tmp_path
    for name in ("measured.json", "steps.parquet", "power.csv"):
        (left / name).write_text(measured)
    now = f"cp {tmp_path}/measured.json {folder}; kill -USR1 $PPID; sleep 0.3; " if signalled else ""
    stand_in(tmp_path, "srun", f"{now}exit 1")
    stand_in(tmp_path, "scancel", "")
    stand_in(tmp_path, "scontrol", 'echo "$*" >"$0.told"')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    path = write_script(point, folder, 1, Site(scheduler=Scheduler(requeue=True)))
    subprocess.run(["bash", str(path)], env=environment, capture_output=True, check=False)
    record = read_record(folder / RECORD)
    assert (record.status, record.files) == ("ok" if signalled else "failed", {})
    assert not (tmp_path / "scontrol.told").exists() and not (folder / "measured.json").exists()


def test_one_node_needs_no_network(tmp_path: Path, make_point: MakePoint) -> None:
    text = script(tmp_path, make_point(device_class="gpu", devices=4, global_batch=16))
    assert "CARAML_PEER" not in text and ".meet" not in text and "SOCKET_IFNAME" not in text


def test_without_a_scheduler_the_script_runs_where_it_is_started(tmp_path: Path, make_point: MakePoint) -> None:
    text = script(tmp_path, make_point(), FULL.model_copy(update={"scheduler": None}))
    assert "SBATCH" not in text and "srun" not in text and "module load" in text


def test_every_machine_of_the_catalogue_gives_a_sound_script(tmp_path: Path, make_point: MakePoint) -> None:
    scheduled = [system for system in list_systems() if system.site.scheduler is not None]
    assert scheduled
    for number, system in enumerate(scheduled):
        devices = system.devices_per_node if system.device_class == "gpu" else 1
        point = make_point(seed=number, device_class=system.device_class, nodes=2, devices=devices, global_batch=4 * devices)
        folder = Store(tmp_path).new_attempt(point)
        text = write_script(point, folder, system.cpu.threads or 1, system.site, system.devices[0].kind).read_text()
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0, system.name
        assert "\n#SBATCH --nodes=2\n" in text and "srun --nodes=2" in text, system.name


def asked(make_point: MakePoint, scheduler: Scheduler, device_class: str = "gpu") -> list[str]:
    return batch.resources(make_point(devices=4, global_batch=16, device_class=device_class), Path("/out/attempt"), 64, scheduler)


@pytest.mark.parametrize(
    ("scheduler", "expected", "absent"),
    [
        ({"gpus": "gpus-per-node"}, "--gpus-per-node=4", "--gres"),
        ({"gpus": "none"}, "--nodes=1", "gpu"),
        ({"gres": "gpu:a100"}, "--gres=gpu:a100:4", "--gpus-per-node"),
        ({"exclusive": False, "cpus_per_device": 12}, "--cpus-per-task=48", "--exclusive"),
        ({"requeue": True}, "--requeue", "--no-requeue"),
        ({"requeue": False}, "--no-requeue", "--requeue"),
    ],
)
def test_options(scheduler: dict[str, Any], expected: str, absent: str, make_point: MakePoint) -> None:
    lines = asked(make_point, Scheduler(**scheduler))
    assert expected in lines and not any(line.startswith(absent) for line in lines)


def test_a_cpu_job_that_shares_its_node_asks_for_its_cpus(make_point: MakePoint) -> None:
    assert "--cpus-per-task=64" in asked(make_point, Scheduler(exclusive=False), "cpu")


@given(name=st.sampled_from(["partition", "account", "qos", "constraint", "reservation", "gres"]), value=st.text(min_size=1))
def test_no_value_leaves_its_line(make_point: MakePoint, name: str, value: str) -> None:
    """A line break would let the rest of a value become a command of the script."""
    try:
        lines = asked(make_point, Scheduler(**{name: value}))  # type: ignore[arg-type]
    except InputError:
        assert set(value) & set("\n\r\0")
        return
    assert not any(set(line) & set("\n\r\0") for line in lines)


def test_extra_lines_are_options(make_point: MakePoint) -> None:
    with pytest.raises(InputError, match="expected an option"):
        asked(make_point, Scheduler(extra=("rm -rf x",)))
    with pytest.raises(InputError, match="expected one line"):
        asked(make_point, Scheduler(extra=("--comment=x\nrm",)))


def test_the_time_limit_is_the_point_s_with_room_for_warning_and_start() -> None:
    assert batch.minutes(Scheduler(signal_seconds=60), 1800) == (1800 + 60 + START_UP_SECONDS) / 60
    assert [batch.minutes(Scheduler(signal_seconds=60), timeout) for timeout in (0.5, 60, 60.1, 90)] == [4, 4, 5, 5], "whole minutes, up"
    assert batch.minutes(Scheduler(max_minutes=31), 1800) == 31, "never over the partition's"
    with pytest.raises(InputError, match="max_minutes"):
        batch.minutes(Scheduler(max_minutes=29), 1800)
    with pytest.raises(InputError, match=r"1801 is 31 min; jobs here end after 30 min"):
        batch.minutes(Scheduler(max_minutes=30), 1801)


# -- several points in one job -----------------------------------------------------------------------------------------


def jobs(tmp_path: Path, make_point: MakePoint, nodes: list[int], site: Site) -> list[Job]:
    made = []
    for seed, count in enumerate(nodes):
        point = make_point(seed=seed, nodes=count, measure=Policy(timeout_seconds=600))
        folder = Store(tmp_path).new_attempt(point)
        made.append(Job(folder, write_script(point, folder, 4, site), count, 1, 600))
    return made


def test_points_of_equal_node_count_share_a_job_as_long_as_the_partition_allows(tmp_path: Path, make_point: MakePoint) -> None:
    scheduler = Scheduler(gpus="none", max_minutes=30)  # room for two points of 13 minutes
    made = jobs(tmp_path, make_point, [1, 2, 1, 1], Site(scheduler=scheduler))
    groups = batch.packs(made, scheduler, most=8)
    assert [[job.nodes for job in group] for group in groups] == [[1, 1], [1], [2]]
    launcher = SlurmLauncher(scheduler, tmp_path / "jobs", SlurmOptions(pack=8))
    ((_, shared), *_) = launcher.scripts(made)
    assert "--time=26" in batch.options_of(shared)
    assert batch.points_of(shared) == [job.folder for job in groups[0]]
    assert subprocess.run(["bash", "-n", str(shared)], check=False).returncode == 0


def test_an_edited_script_stays_out_of_the_array_of_the_others(tmp_path: Path, make_point: MakePoint) -> None:
    made = jobs(tmp_path, make_point, [1, 1, 1], Site(scheduler=Scheduler(gpus="none")))
    made[1].script.write_text(made[1].script.read_text().replace("--time=13", "--time=99"))
    launcher = SlurmLauncher(Scheduler(), tmp_path / "jobs", SlurmOptions(throttle=5))
    (array, alone) = launcher.scripts(made)
    assert array[0] == [made[0], made[2]] and alone == ([made[1]], made[1].script)
    assert "--array=0-1%5" in batch.options_of(array[1])


def prints(tmp_path: Path, **options: int) -> SlurmLauncher:
    """As the launcher that only prints has it."""
    return SlurmLauncher(Scheduler(), tmp_path / "jobs", SlurmOptions(**options), asks=False)


def test_large_sweeps_become_several_arrays(tmp_path: Path, make_point: MakePoint) -> None:
    made = jobs(tmp_path, make_point, [1] * 5, Site(scheduler=Scheduler(gpus="none")))
    launcher = SlurmLauncher(Scheduler(), tmp_path / "jobs", SlurmOptions(array_size=2))
    assert [len(group) for group, _ in launcher.scripts(made)] == [2, 2, 1]
    first, second, printed = ({script for _, script in one.scripts(made)} for one in (launcher, launcher, prints(tmp_path, array_size=2)))
    assert len(first & second) == 1, "written anew"
    assert printed == {script for _, script in prints(tmp_path, array_size=2).scripts(made)}, "what is only printed keeps its name"


def test_print_shows_commands_and_starts_nothing(tmp_path: Path, make_point: MakePoint) -> None:
    shown: list[str] = []
    made = jobs(tmp_path, make_point, [1, 1], Site(scheduler=Scheduler(gpus="none")))
    launcher = PrintLauncher(shown.append, SlurmLauncher(Scheduler(), tmp_path / "jobs"))
    handles = launcher.submit(made)
    assert shown == [f"sbatch --parsable {tmp_path / 'jobs' / 'array-1.sh'}"]
    assert {state.state for state in launcher.poll(handles).values()} == {"waiting"}
    PrintLauncher(shown.append).submit(made[:1])
    assert shown[1] == f"bash {made[0].script}"
    finish(made[0].folder, 1, "timeout", "it reached its time limit")
    assert launcher.poll(handles)[handles[0]].state == "ended"
    assert read_record(made[0].folder / RECORD).status == "timeout"


# -- Slurm's answers ---------------------------------------------------------------------------------------------------


def test_accounting_is_asked_for_what_the_queue_forgot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for squeue and sacct; the lines are of the form that the real ones print."""
    programs = {
        "squeue": "12_0|RUNNING|None\n5|PREEMPTED|None",
        "sacct": "7|CANCELLED by 1000|None\n8|OUT_OF_MEMORY|OutOfMemory\n9|COMPLETED|None",
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{lines}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    times = iter(range(100))
    launcher = SlurmLauncher(Scheduler(), tmp_path, SlurmOptions(grace_seconds=3), clock=lambda: float(next(times)))
    handles = [f"slurm:{job}:{tmp_path / job}" for job in ("12_0", "7", "8", "5")]
    first = launcher.poll(handles)
    assert [first[handle].state for handle in handles] == ["waiting", *["running"] * 3], "its files may still be on their way"
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '12_0|RUNNING|None'\n")
    launcher.poll(handles)
    last = launcher.poll(handles)
    assert [last[handle].state for handle in handles] == ["waiting", *["lost"] * 3]
    assert last[handles[3]].reason == "job 5: PREEMPTED", "what was said while it was known"
    assert last[handles[1]].reason == "job 7: CANCELLED by 1000" and last[handles[2]].reason == "job 8: OUT_OF_MEMORY (OutOfMemory)"


SACCT = r"""
case "$*" in *_*) exit 0;; esac  # a task that never began is in no line of its own
echo '12_0|COMPLETED|None'; echo '12_[1-2,7%2]|CANCELLED by 0|PartitionDown'; echo '13|RUNNING|None'
"""


def test_accounting_tells_of_tasks_that_never_began_and_of_jobs_whose_end_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that the database has as running for ever, as after an outage, must not be waited for."""
    stand_in(tmp_path, "sacct", SACCT)
    stand_in(tmp_path, "squeue", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launcher = SlurmLauncher(Scheduler(), tmp_path, SlurmOptions(grace_seconds=0))
    handles = [f"slurm:{job}:{tmp_path / job}" for job in ("12_1", "12_7", "13")]
    found = launcher.poll(handles)
    assert [found[handle].state for handle in handles] == ["lost"] * 3
    assert [found[handle].reason for handle in handles] == [
        "job 12_1: CANCELLED by 0 (PartitionDown)",
        "job 12_7: CANCELLED by 0 (PartitionDown)",
        "job 13: RUNNING (by accounting alone: the controller has forgotten it)",
    ]


def test_a_job_that_could_write_nothing_is_lost_with_that_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk names can be made, and nothing put into them."""
    stand_in(tmp_path, "squeue", "echo '5|FAILED|NonZeroExitCode'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "exit").touch()
    (state,) = SlurmLauncher(Scheduler(), tmp_path, SlurmOptions(grace_seconds=0)).poll([f"slurm:5:{tmp_path / '5'}"]).values()
    assert state.state == "lost" and "as where the disk is full" in (state.reason or "")


SQUEUE = r"""#!/bin/sh
case "$*" in
*--me*--states=all*) printf '%s\n' '12_0|main|50|2030-01-02T03:04:05|PENDING|Priority' '12_1|main|50|2030-01-02T09:00:00|PENDING|Priority' \
  '13|short,main|70|N/A|PENDING|QOSMaxJobsPerUserLimit' '14|main|0|N/A|PENDING|JobHeldUser' '15|main|1|N/A|PENDING|SomethingNew' \
  '17|main|0|N/A|SPECIAL_EXIT|job requeued in held state' '18|main|0|N/A|PENDING|launch failed requeued held' '19|main|5|N/A|RUNNING|None';;
*--states=PENDING*) printf '%s\n' '7|main|50|N/A|PENDING|Resources' '9|main|60|N/A|PENDING|Priority' '12_0|main|50||PENDING|' \
  '12_1|main|50||PENDING|' '13|short,main|70||PENDING|' '14|main|0||PENDING|' '15|main|1||PENDING|' '16|main|50||PENDING|' \
  '99|short|9|N/A|PENDING|Priority';;
esac
"""


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for a cluster in whose queue seven jobs of this user wait, two of which had begun, among four of others."""
    for name, text in (("squeue", SQUEUE), ("scontrol", "#!/bin/sh\necho 'PrivateData             = usage'\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_the_queue_says_why_a_job_waits_at_which_place_and_until_when(busy: Path) -> None:
    found = queue.turns()
    assert str(found["12_1"]) == (
        "jobs of higher priority come first (Priority); place 4 of 7 by priority; expected to start 2030-01-02 09:00:00"
    ), "the older of one priority come first, and what is held does not count"
    assert (found["13"].place, found["13"].among) == (1, 2) and found["13"].why == "a limit of the QOS (QOSMaxJobsPerUserLimit)"
    assert str(found["14"]) == (
        "held by their user; scontrol release starts them (JobHeldUser); place unknown; Slurm does not say when it starts"
    )
    assert found["15"].why == "SomethingNew" and "19" not in found
    assert queue.waiting_text(["12_0", "12_1", "77"]) == (
        "2 jobs wait in the queue: jobs of higher priority come first (Priority); the first has place 4 of 7 by priority; "
        "Slurm expects to start the first 2030-01-02 03:04:05, and the last 2030-01-02 09:00:00"
    )
    some = queue.waiting_text(["12_0", "13", "14"]) or ""
    assert "1 x a limit of the QOS" in some and "the first has place 1 of 2" in some
    assert "and the last" not in some, "of one of them nobody knows"
    assert queue.waiting_text(["77"]) is None
    assert "place 1 of 2" in (SlurmLauncher.waiting_text([f"slurm:13+pack-1:{busy}", f"slurm:13+pack-1:{busy / 'x'}"]) or "")


def test_a_job_that_slurm_holds_after_it_had_begun_says_what_starts_it(busy: Path) -> None:
    """As one that a node could not start, or whose exit code is one of a site's ``RequeueExitHold``: nobody was told that it waits."""
    found = queue.turns()
    assert str(found["17"]).startswith("put back into the queue and held; scontrol release starts them (job requeued in held state); place")
    assert (
        found["18"].why == "could not be started on their nodes, and are held; scontrol release starts them (launch failed requeued held)"
    )
    assert (queue.waiting_text(["17", "18"]) or "").startswith(f"2 jobs wait in the queue: 1 x {found['17'].why}; 1 x ")


def test_a_place_among_hidden_jobs_is_unknown(busy: Path) -> None:
    (busy / "scontrol").write_text("#!/bin/sh\necho 'PrivateData             = accounts,jobs'\n")
    assert all(turn.place is None for turn in queue.turns().values())
    assert "their places are unknown" in (queue.waiting_text(["12_0"]) or "")
    (busy / "squeue").write_text("#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2; exit 1\n")
    assert queue.waiting_text(["12_0"]) == (
        "where the jobs are in the queue is unknown: Slurm does not answer (Unable to contact slurm controller)"
    )


def test_without_slurm_the_error_says_where_to_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironmentUnfitError, match="login node"):
        queue.in_queue()
    assert queue.in_accounting(["1"]) == {}


@pytest.mark.parametrize(
    ("text", "minutes"), [("1:00", 1), ("30:00", 30), ("1:00:00", 60), ("2-00:00:30", 2880.5), ("infinite", None), ("", None)]
)
def test_partition_limits(text: str, minutes: float | None) -> None:
    assert queue._minutes(text) == minutes


def test_a_job_of_several_partitions_may_take_as_long_as_in_the_longest(busy: Path) -> None:
    """It starts in any of them; the first one's limit was taken for all."""
    stand_in(
        busy, "sinfo", "case $* in *main*) echo 'main|1:00:00';; esac; echo 'short*|1:00'; case $* in *long*) echo 'long|infinite';; esac"
    )
    assert [queue.minutes_of(one) for one in (None, "short", "short,main", "short,long")] == [1, 1, 60, None]
    told = SlurmLauncher(Scheduler(), busy).too_long(["--partition=short,main", "--time=61"]) or ""
    assert "61 min are more than the partition's time limit of 60 min" in told and "max_minutes = 60 below [site.scheduler]" in told


def stand_in(folder: Path, name: str, text: str) -> None:
    """A program of this name, a shell script."""
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_variables_of_the_user_hide_no_job_and_replace_nothing_that_a_script_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the real ones: they obey SQUEUE_PARTITION, and SBATCH_PARTITION goes before a script's own line."""
    stand_in(tmp_path, "squeue", '[ -n "$SQUEUE_PARTITION" ] || echo "5|RUNNING|None"')
    stand_in(tmp_path, "sbatch", 'echo "partition=$SBATCH_PARTITION account=$SBATCH_ACCOUNT time=$SBATCH_TIMELIMIT $LC_ALL" >&2; exit 1')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SQUEUE_PARTITION", "SBATCH_PARTITION", "SBATCH_ACCOUNT", "SBATCH_TIMELIMIT"):
        monkeypatch.setenv(name, "own")
    monkeypatch.setenv("LC_ALL", "POSIX")
    assert queue.in_queue().keys() == {"5"}
    said = SlurmLauncher(Scheduler(), tmp_path).check("#SBATCH --partition=booster\n#SBATCH --time=9\n")
    assert said == "partition= account=own time= POSIX", "jobs have the language of whoever submits them"


def test_answers_that_nobody_expects_are_no_traces(busy: Path) -> None:
    stand_in(busy, "squeue", "echo 'CLUSTER: far'; echo; echo '12|main|50|N/A|PENDING|Priority'")
    assert queue.turns().keys() == {"12"}
    stand_in(busy, "sbatch", "printf 'Ung\\374ltiges Konto' >&2; exit 1")
    assert (SlurmLauncher(Scheduler(), busy).check("") or "").startswith("Ung")
    stand_in(busy, "squeue", "echo 'queue full, retrying' >&2; exec sleep 300")
    said = (queue.complaint(queue.call(["squeue"], seconds=seconds).stderr) for seconds in (0.2, 2, 20, 200))  # until it has begun to speak
    assert "retrying; squeue did not answer within " in next(text for text in said if text.startswith("queue full"))


SBATCH = r"""
tasks=$(sed -n 's/^#SBATCH --array=0-\([0-9]*\).*/\1/p' "${@: -1}"); tasks=$((${tasks:-0} + 1))
here=$(cat "$0.jobs")
if [ $((here + tasks)) -gt 5 ]; then
  echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2
  echo 'sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, ...)' >&2
  exit 1
fi
echo $((here + tasks)) >"$0.jobs"; echo 'Your project has 7 core hours left.'; echo "$((here + tasks));far"; echo 'Thank you.'
"""


def test_an_array_of_more_tasks_than_may_be_in_the_queue_is_cut(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = jobs(tmp_path, make_point, [1] * 12, Site(scheduler=Scheduler(gpus="none")))
    stand_in(tmp_path, "sbatch", SBATCH)
    stand_in(tmp_path, "scontrol", "exit 1")  # whatever cluster there is has limits of its own
    (tmp_path / "sbatch.jobs").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    launcher = SlurmLauncher(Scheduler(), tmp_path / "jobs")
    handles = list(launcher.submit(made))
    assert [handle.split(":")[1] for handle in handles] == ["3_0", "3_1", "3_2", "4", "5", *["refused"] * 7]
    reasons = {launcher.poll([handle])[handle].reason for handle in handles[5:]}
    (reason,) = reasons
    assert reason is not None and "QOSMaxSubmitJobPerUserLimit" in reason and "the same command submits it" in reason
    stand_in(tmp_path, "sbatch", "echo 'Thank you.'")
    (handle,) = launcher.submit(made[:1])
    assert launcher.poll([handle])[handle].reason == "sbatch answered 'Thank you.', expected the number of a job"


def test_a_site_may_allow_fewer_tasks_than_numbers_of_tasks(busy: Path) -> None:
    stand_in(busy, "scontrol", "echo 'MaxArraySize            = 4001'; echo 'SchedulerParameters     = bf_x,max_array_tasks=300,y=1'")
    assert queue.array_limit() == 300


def test_jobs_are_told_as_soon_as_the_queue_has_them(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a campaign that ends in between knows those that it has."""
    made = jobs(tmp_path, make_point, [1, 1], Site(scheduler=Scheduler(gpus="none")))
    stand_in(tmp_path, "sbatch", 'echo >>"$0.calls"; wc -l <"$0.calls"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    handles = SlurmLauncher(Scheduler(), tmp_path / "jobs", SlurmOptions(one_at_a_time=True)).submit(made)
    assert next(handles).startswith("slurm:1:") and (tmp_path / "sbatch.calls").read_text() == "\n"


# -- before the first point --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "variables", "words"),
    [
        ("nobodys-1 nobodys-2", {}, "none of the 2 nodes of a Slurm cluster"),
        ("{host} nobodys-2", {}, "one of the 2 nodes"),
        ("{host}", {}, None),  # a workstation with a scheduler of its own
        ("nobodys-1 nobodys-2", {"SLURM_JOB_ID": "7"}, None),
        ("", {}, None),  # programs without a cluster
    ],
)
def test_a_login_node_is_known_by_what_slurm_says(
    nodes: str, variables: dict[str, str], words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for sinfo, outside any job; tests/slurm asks a real one, also inside."""
    host = socket.gethostname().partition(".")[0]
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\nprintf '%s\\n' {nodes.format(host=host)}\n" + ("" if nodes else "exit 1\n"))
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(queue, "read", lambda path: "0::/user.slice")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    why = queue.login_node()
    assert why is None if words is None else words in (why or "")


def test_setup_lines_run_once_and_stop_at_the_first_failure(tmp_path: Path) -> None:
    software = Software(variables={"WHERE": str(tmp_path / "a b")}, setup=('echo once >>"$WHERE"', "true"))
    for _ in range(2):
        set_up(software, tmp_path / "jobs")
    assert (tmp_path / "a b").read_text() == "once\n"
    with pytest.raises(EnvironmentUnfitError, match="exit status 1"):
        set_up(Software(setup=("false", f"touch {tmp_path}/later")), tmp_path / "jobs")
    assert not (tmp_path / "later").exists()
    set_up(Software(), tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
