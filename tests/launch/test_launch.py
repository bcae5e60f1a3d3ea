"""The script of a point, and the local launcher: exit codes, process groups, quoting."""

from __future__ import annotations

import os
import platform
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from caraml.launch import Job
from caraml.launch.launchers import LocalLauncher
from caraml.launch.script import command_of, environment_of
from caraml.results.claim import GATE, LOG, STARTED
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Knobs
from caraml.system.model import DeviceKind, Site, Software
from tests.conftest import MakePoint
from tests.stores import write_script
from tests.waiting import until


def job(folder: Path, text: str) -> Job:
    script = folder / "run.sh"
    script.write_text(text)
    return Job(folder, script, 1, 1, 10.0)


def wait(launcher: LocalLauncher, handle: str) -> int | None:
    until(lambda: launcher.poll([handle])[handle].state == "ended")
    return launcher.poll([handle])[handle].exit_code


def test_exit_codes_come_back(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    assert wait(launcher, *launcher.submit([job(tmp_path, "exit 7")])) == 7
    assert wait(launcher, *launcher.submit([job(tmp_path, "kill -9 $$")])) == -9


def test_a_script_has_the_signals_of_a_shell_and_not_those_that_python_ignores(tmp_path: Path) -> None:
    launcher = LocalLauncher(brief=True)
    assert wait(launcher, *launcher.submit([job(tmp_path, "kill -PIPE $$")])) == -signal.SIGPIPE


@pytest.mark.parametrize("brief", [False, True])
def test_a_script_has_no_file_of_what_started_the_campaign(tmp_path: Path, brief: bool) -> None:
    """A job that goes on would hold the caller's lock, or keep the pipe open that the caller reads."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    os.set_blocking(reading, False)
    launcher = LocalLauncher(brief=brief)
    (handle,) = launcher.submit([job(tmp_path, f"while [ ! -e {tmp_path}/go ]; do sleep 0.1; done")])
    os.close(writing)
    assert os.read(reading, 1) == b"", "the job has no end of it"
    (tmp_path / "go").touch()
    assert wait(launcher, handle) == 0
    os.close(reading)


def test_nobody_else_writes_to_what_a_record_is_made_of(tmp_path: Path) -> None:
    """Of a program the log has the numbers and `started` the times: with umask 002 all of a group could change them."""
    text = f"cd {tmp_path}\numask 002\n{GATE}umask >mask\necho words >>{LOG}\nexit 7"
    launcher = LocalLauncher()
    assert wait(launcher, *launcher.submit([job(tmp_path, text)])) == 7
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in (STARTED, LOG, "mask")}
    assert modes == {STARTED: 0o644, LOG: 0o644, "mask": 0o664} and (tmp_path / "mask").read_text() == "0002\n", "the program has its own"


def test_a_start_that_cannot_be_noted_is_not_told_as_one_before(tmp_path: Path) -> None:
    """On a full disk a job said that it had been started before."""
    full, before = "this attempt cannot be noted as started: its disk may be full;", "this attempt was started before;"
    for words, told in (("trap '' XFSZ\nulimit -f 0", full), ("rm started", ""), ("", before)):
        done = subprocess.run(["bash"], input=f"cd {tmp_path}\n{words}\n{GATE}", capture_output=True, text=True, check=False)
        assert done.returncode == (75 if told else 0) and done.stderr.startswith(told)


def test_cancelling_ends_the_whole_group(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    (handle,) = launcher.submit([job(tmp_path, f"trap '' TERM\nsleep 900 & echo $! > {tmp_path}/child\nwait\nsleep 900")])
    until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
    child = int((tmp_path / "child").read_text())
    launcher.cancel([handle])
    until(lambda: not Path(f"/proc/{child}").exists(), "the end of a child, which somebody else reaps")


def test_the_script_can_be_run_by_hand_and_always_leaves_a_record(tmp_path: Path, make_point: MakePoint) -> None:
    owned = tmp_path / "owned"
    point = make_point(workload="gpt", params={"preset": "no such preset"}, benchmark=f"x'; touch {owned}; '\nrm")
    folder = Store(tmp_path / "with space").new_attempt(point)
    script = write_script(point, folder, threads=2)
    done = subprocess.run([str(script)], timeout=300, check=False)
    record = read_record(folder / RECORD)
    assert done.returncode == 1
    assert record.status == "failed" and "preset" in (record.reason or "")
    assert not owned.exists()


def test_one_process_runs_the_worker_and_several_what_starts_them(tmp_path: Path, make_point: MakePoint) -> None:
    assert command_of(make_point(), tmp_path)[1:] == ["-P", "-m", "caraml.worker", str(tmp_path)]
    several = command_of(make_point(devices=2, global_batch=8), tmp_path)
    assert several[1:] == ["-P", "-m", "caraml.engine.start", "--devices=2", "caraml.worker", str(tmp_path)]
    assert "--nodes=2" in command_of(make_point(devices=2, nodes=2, global_batch=8), tmp_path)


def test_cpu_points_keep_their_memory_and_share_the_cores(make_point: MakePoint) -> None:
    variables = environment_of(make_point(devices=2, global_batch=8), threads=8)
    assert variables["OMP_NUM_THREADS"] == "4" and "MALLOC_MMAP_MAX_" in variables
    assert "MALLOC_MMAP_MAX_" not in environment_of(make_point(device_class="gpu"), threads=8)


def test_amd_gpus_are_told_what_torch_would_ignore(make_point: MakePoint, tmp_path: Path) -> None:
    tf32, fp32 = make_point(device_class="gpu", precision="tf32"), make_point(device_class="gpu", knobs=Knobs(channels_last=False))
    told = environment_of(tf32, 8, "rocm")
    assert told["PYTORCH_MIOPEN_SUGGEST_NHWC"] == told["PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM"] == told["HIPBLASLT_ALLOW_TF32"] == "1"
    assert not {name for name in environment_of(fp32, 8, "rocm") if "MIOPEN" in name or "TF32" in name}
    assert environment_of(tf32, 8, "cuda") == environment_of(fp32, 8, "cuda")
    assert "export HIPBLASLT_ALLOW_TF32=1" in write_script(tf32, tmp_path, 8, kind="rocm").read_text()


@pytest.mark.parametrize(
    ("values", "site", "told"),
    [
        ({}, {}, []),
        ({"knobs": Knobs(affinity="compact")}, {}, ["OMP_PLACES=cores", "OMP_PROC_BIND=close"]),
        ({}, {"OMP_PROC_BIND": "spread"}, ["OMP_PROC_BIND=spread"]),
        ({}, {"OMP_PLACES": "$OMP_PLACES"}, ["OMP_PLACES=threads"]),
        ({"workload": "command"}, {}, ["GOMP_CPU_AFFINITY=0", "OMP_PLACES=threads", "OMP_PROC_BIND=true"]),
    ],
)
def test_what_a_user_s_shell_says_of_binding_does_not_reach_trainings(
    tmp_path: Path, make_point: MakePoint, *, values: dict[str, Any], site: dict[str, str], told: list[str]
) -> None:
    """OpenMP would bind every process to the first core before CARAML gives each its own."""
    worker = tmp_path / "python"
    worker.write_text("#!/bin/sh\nenv | sort\n")
    worker.chmod(0o755)
    own = {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads", "GOMP_CPU_AFFINITY": "0"}
    run = write_script(make_point(**values), tmp_path, 2, Site(software=Software(python=str(worker), variables=site)))
    others = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_P", "GOMP_", "KMP_"))}
    assert subprocess.run([str(run)], env={**others, **own}, timeout=300, check=False).returncode == 0
    seen = (tmp_path / LOG).read_text().splitlines()
    assert [line for line in seen if line.startswith(("OMP_P", "GOMP_", "KMP_"))] == told


@pytest.mark.parametrize(
    ("kind", "own", "site", "told"),
    [
        ("cuda", None, {}, "PCI_BUS_ID"),
        ("cuda", "FASTEST_FIRST", {}, "FASTEST_FIRST"),
        ("cuda", None, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, "FASTEST_FIRST"),
        ("cpu", None, {}, "none"),
    ],
)
def test_gpus_are_counted_as_their_driver_does_unless_somebody_says_otherwise(
    tmp_path: Path, make_point: MakePoint, *, kind: DeviceKind, own: str | None, site: dict[str, str], told: str
) -> None:
    worker = tmp_path / "python"
    worker.write_text('#!/bin/sh\necho "${CUDA_DEVICE_ORDER-none}"\n')
    worker.chmod(0o755)
    run = write_script(make_point(), tmp_path, 2, Site(software=Software(python=str(worker), variables=site)), kind)
    others = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    environment = others if own is None else {**others, "CUDA_DEVICE_ORDER": own}
    assert subprocess.run([str(run)], env=environment, timeout=300, check=False).returncode == 0
    assert (tmp_path / LOG).read_text() == f"{told}\n"


_PAGES_OF_A_SECOND_BLOCK = """
import resource
def taken(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
taken(2**27)
print(taken(2**27))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="these are settings of glibc")
def test_a_freed_block_is_used_again_without_asking_the_kernel(make_point: MakePoint) -> None:
    def pages(variables: dict[str, str]) -> int:
        command = [sys.executable, "-c", _PAGES_OF_A_SECOND_BLOCK]
        return int(subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=300).stdout)

    assert pages(environment_of(make_point(), threads=1)) < 100
    assert pages({}) >= 2**27 // resource.getpagesize() // 512, "else nobody would need the settings"
