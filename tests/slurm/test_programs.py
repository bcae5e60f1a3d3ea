"""The energy of a program on several nodes, by sensors that are made up: one process on each node, started by Slurm, told when to look."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from caraml.launch import Job
from caraml.results.finish import LOG
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Policy
from caraml.system.model import Scheduler, Site, Software
from caraml.worker.command import COMMAND, Command
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import Bench, a_point, make_bench, record, wait
from tests.stores import write_script
from tests.waiting import until

WATTS = "300/500"
MARKS = {"begin": "^go", "end": "^end"}


def program_of(root: Path, program: str, *, sensors: str = WATTS, nodes: int = 3, idle: float = 0.2, gpus: int = 0, **params: Any) -> Job:
    """A job of a shell program with its attempt's folder below ``root``."""
    variables = {"CARAML_POWER": f"fake:constant:{sensors}"}
    scheduler = Scheduler(exclusive=False, gpus="gres" if gpus else "none", cpus_per_device=1)
    site = Site(scheduler=scheduler, software=Software(variables=variables))
    values = {"argv": ["bash", "-c", program], "item": "image", "items": 30, **params}
    measure = Policy(idle_seconds=idle, timeout_seconds=120)
    kind = {"device_class": "gpu", "devices": gpus} if gpus else {}
    batch = nodes * max(gpus, 1)
    point = a_point(workload="command", params=values, nodes=nodes, global_batch=batch, micro_batch=1, measure=measure, **kind)
    folder = Store(root).new_attempt(point)
    command = Command(argv=values["argv"], env={}, cwd=str(root), suite_folder=str(root))
    (folder / COMMAND).write_text(command.model_dump_json())
    return Job(folder, write_script(point, folder, 1, site), nodes, point.devices, 120)


class Program:
    """A shell program as a point of all nodes, in the queue."""

    def __init__(self, root: Path, program: str, sensors: str = WATTS, idle: float = 0.2, **params: Any) -> None:
        job = program_of(root, program, sensors=sensors, idle=idle, **params)
        self.folder = job.folder
        self._launcher = make_bench(root / "bench").launcher()
        self.handles = list(self._launcher.submit([job]))

    def ended(self) -> Record:
        """The record, when the job is over."""
        wait(self._launcher, self.handles)
        return read_record(self.folder / RECORD)

    def said(self) -> str:
        """The program's output so far."""
        log = self.folder / LOG
        return log.read_text() if log.exists() else ""


def readers(cluster: Cluster, node: str) -> list[int]:
    """Processes that read a node's sensors."""
    found = []
    for process in cluster.processes(node):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found += [process] if b"caraml.worker.remote" in words and words[0] != b"srun" else []
    return found


@pytest.mark.parametrize(("sensors", "dead"), [("300/500", False), ("300/500@2", True)])
def test_the_energy_of_a_program_is_that_of_all_its_nodes(cluster: Cluster, tmp_path: Path, sensors: str, dead: bool) -> None:
    """Made-up sensors of 300, 300 and 500 W; the one of 500 W goes silent in the second case, two seconds after it was opened."""
    program = "srun --ntasks=3 --ntasks-per-node=1 true; sleep 1; echo go; srun --ntasks=3 sleep 3; echo end; sleep 0.5"
    run = Program(tmp_path, program, sensors, idle=0.5, marks=MARKS)
    measured = run.ended()
    assert measured.status == "ok" and measured.window is not None and measured.energy is not None, (measured.reason, run.said())
    assert [node.name for node in measured.nodes] == cluster.nodes and measured.window.seconds > 2
    opened, closed = measured.window.opened_within or 0, measured.window.closed_within or 0
    assert opened > 0 and closed > 0
    idle, seconds = measured.metrics["idle_power"], measured.window.seconds
    energy, whole, net = (measured.metrics[name] for name in ("energy", "run_energy", "energy_net"))
    if dead:
        assert energy.value is None and "sn3: " in (energy.reason or "") and net.value is None
        assert 600 * (seconds - opened - closed) * 0.97 < (measured.energy.boundaries["device"].partial_j or 0) < 1100 * seconds
    else:
        assert idle.value == pytest.approx(1100, abs=idle.bound) and net.value == pytest.approx(0, abs=net.bound)
        assert energy.value == pytest.approx(1100 * seconds, abs=energy.bound)
        assert whole.value == pytest.approx(1100 * (measured.value("run_time") or 0), abs=whole.bound)
        assert [node.energy and node.energy.boundaries["device"].mean_w for node in measured.nodes] == pytest.approx(
            [300, 300, 500], rel=0.03
        )
        apart = [channel.bound_parts.get("edges_apart", 0.0) for channel in measured.energy.channels]
        assert apart[0] == 0 and max(apart[1:]) <= 520 * (opened + closed) and min(apart[1:]) > 0, "what the edges apart may be worth"


def test_a_program_that_fails_has_its_own_last_words(cluster: Cluster, tmp_path: Path) -> None:
    """Between its marks, so that one end of the window never came; the energy is that of the run, on all nodes."""
    run = Program(tmp_path, "echo go; sleep 1; echo the real trouble; exit 3", marks=MARKS)
    measured = run.ended()
    assert measured.status == "failed" and measured.reason == "program ended with exit status 3: go | the real trouble"
    assert run.said().split() == ["go", "the", "real", "trouble"]
    assert measured.energy is not None and [node.name for node in measured.nodes] == cluster.nodes
    device = measured.energy.boundaries["device"]
    assert device.energy_j == pytest.approx(1100 * measured.energy.duration_s, abs=device.bound_j)


@pytest.mark.usefixtures("real_start")
def test_a_node_whose_sensors_hang_is_missing_and_costs_the_run_no_time(cluster: Cluster, tmp_path: Path) -> None:
    """Stopped while its idle power is measured, and for good: it is waited for before the program starts, and ended with the job."""
    run = Program(tmp_path, "sleep 1", idle=4)  # seconds for what follows to come in time on a busy machine
    until(lambda: bool(readers(cluster, "sn3")) and '"idle"' in (run.folder / "progress.jsonl").read_text())
    time.sleep(0.5)
    for process in readers(cluster, "sn3"):
        os.kill(process, signal.SIGSTOP)
    measured = run.ended()
    assert measured.status == "ok" and measured.window is not None
    assert 1 <= measured.window.seconds < 10, "an answer is waited for ten seconds"
    energy = measured.metrics["energy"]
    assert energy.value is None and (energy.reason or "").startswith("sn3: what reads its sensors did not answer")
    assert measured.window.opened_within is None
    until(lambda: not any(readers(cluster, node) for node in cluster.nodes))


@pytest.mark.usefixtures("real_start")
def test_a_node_whose_reader_is_killed_is_missing_by_name(cluster: Cluster, tmp_path: Path) -> None:
    run = Program(tmp_path, "echo go; until [ -e go-on ]; do sleep 0.1; done; echo end", marks=MARKS)
    until(lambda: "go" in run.said().split())
    for process in readers(cluster, "sn2"):
        os.kill(process, signal.SIGKILL)
    (tmp_path / "go-on").touch()
    measured = run.ended()
    assert measured.status == "ok" and run.said().split() == ["go", "end"], "nobody else's words are among the program's"
    energy = measured.metrics["energy"]
    assert (
        energy.value is None
        and "sn2: what reads its sensors did not answer: " in (energy.reason or "")
        and "illed" in (energy.reason or "")
    )


def test_a_program_is_warned_of_its_time_limit_and_its_steps_are_not(cluster: Cluster, tmp_path: Path) -> None:
    """What Slurm does before the end of the time, done early: the program may tell its steps, which have had no signal from others."""
    del cluster
    end = "echo warned; touch go-on; wait; exit 7"
    step = "echo begun; until [ -e go-on ]; do sleep 0.1; done; echo done"
    run = Program(
        tmp_path, f"trap '{end}' USR1; echo go; srun --ntasks=1 --nodes=1 --export=ALL bash -c '{step}' & wait; echo end", marks=MARKS
    )
    until(lambda: "begun" in run.said().split())
    subprocess.run(["scancel", "--batch", "--signal=USR1", run.handles[0].split(":")[1]], check=True)
    ended = run.ended()
    assert run.said().split() == ["go", "begun", "warned", "done"]
    assert ended.status == "timeout" and "warned that its time" in (ended.reason or "") and "exit status 7" in (ended.reason or "")


def test_a_program_of_a_shared_job_is_cancelled_and_the_others_go_on(bench: Bench) -> None:
    """It is no step of the job, which would be cancelled by itself."""
    jobs = [program_of(bench.root, f"echo go; sleep {seconds}", nodes=1) for seconds in (300, 1)]
    launcher = bench.launcher(pack=2)
    handles = list(launcher.submit(jobs))
    until(lambda: (jobs[0].folder / LOG).exists() and "go" in (jobs[0].folder / LOG).read_text())
    launcher.cancel(handles[:1])
    states = wait(launcher, handles)
    assert [state.state for state in states] == ["ended", "ended"] and states[0].exit_code and states[1].exit_code == 0
    assert not (jobs[0].folder / RECORD).exists() and record(jobs[1]).status == "ok"


def test_programs_of_a_shared_job_see_the_gpus_they_asked_for(bench: Bench) -> None:
    """They have no steps with a share of the job's: a program of one GPU would have the two of its neighbour, and their energy."""
    jobs = [program_of(bench.root, 'echo "$CUDA_VISIBLE_DEVICES"', nodes=1, gpus=count) for count in (1, 2, 1)]
    launcher = bench.launcher(pack=3)
    handles = list(launcher.submit(jobs))
    assert {state.exit_code for state in wait(launcher, handles)} == {0}
    assert [len((job.folder / LOG).read_text().strip().split(",")) for job in jobs] == [1, 2, 1]
    numbers = [handle.split(":")[1].partition("+")[0] for handle in handles]
    assert numbers[0] == numbers[2] != numbers[1]
