"""The script of a point: everything that decides how it runs, in one file that can be read, edited, and started by hand."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from caraml.errors import InputError
from caraml.launch import batch, container
from caraml.results.claim import GATE
from caraml.results.files import write_atomically
from caraml.results.finish import FAILURE, LOG
from caraml.results.store import RECORD
from caraml.suite.model import Point
from caraml.system.model import DeviceKind
from caraml.system.site import Scheduler, Site

SCRIPT = "run.sh"
EXIT = "exit"
"""File that a scheduled point leaves behind at its very end: its exit code."""

_READABLE = 110
"""Columns after which a command line is continued on the next line."""

# glibc returns every large block to the kernel when it is freed, and takes it back in the next step: page faults that cost a fifth of a
# convolution network's rate on CPUs. With these it keeps the blocks: none is mapped by itself, and the heap does not shrink. A high
# MALLOC_MMAP_THRESHOLD_ would do the same from glibc 2.35 on; before (RHEL 9 has 2.34) one above 32 MiB is ignored.
_KEEP_BLOCKS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}


class Shell(str):
    """Text of a command line that the shell expands: it is not quoted."""


def join(argv: Sequence[str]) -> str:
    """A command line for the shell."""
    return " ".join(word if isinstance(word, Shell) else shlex.quote(word) for word in argv)


def folded(argv: Sequence[str], indent: str = "  ") -> str:
    """A command line for the shell, in lines that a person can read."""
    lines = [""]
    for word in argv:
        text = join([word])
        if lines[-1] and len(lines[-1]) + len(text) > _READABLE:
            lines.append("")
        lines[-1] += f" {text}" if lines[-1] else text
    return f" \\\n{indent}".join(lines)


def environment_of(point: Point, threads: int) -> dict[str, str]:
    """Variables that the point's processes run under; ``threads`` are the node's usable CPUs."""
    variables = {"OMP_NUM_THREADS": str(max(threads // point.devices, 1))}
    if point.workload == "command":  # somebody else's program has its own mind about threads and memory
        variables = {}
    elif point.device_class == "cpu":
        variables |= _KEEP_BLOCKS if point.knobs.keep_freed_memory else {}
    elif point.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to give the same bits every time
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        variables["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries)  # noqa: PTH100  -- the script changes folder
    return variables


def command_of(point: Point, folder: Path, python: str = sys.executable, suffix: str = "") -> list[str]:
    """The worker's command line on one node: plain Python for one process, torchrun for several.

    On several nodes it stands in a script that sets ``head_node``, ``port`` and ``is_host``; ``suffix`` makes a node's name that of its
    fast network. Which node gets rank 0 is torchrun's choice; where the nodes meet is ours.
    """
    if point.workload == "command":  # one process; the program starts its own on other devices and nodes
        return [python, "-m", "caraml.workloads.command_worker", str(folder)]
    worker = ["-m", "caraml.worker", str(folder)]
    if point.world == 1:
        return [python, *worker]
    meet = ["--standalone"]
    if point.nodes > 1:
        meet = [
            f"--nnodes={point.nodes}",
            "--rdzv-backend=c10d",
            Shell('--rdzv-id="$SLURM_JOB_ID"'),
            Shell(f'--rdzv-endpoint="$head_node"{shlex.quote(suffix) if suffix else ""}:"$port"'),
            # torchrun would compare names to find out who hosts the meeting, and a node does not know itself by its fast network's name.
            Shell('--rdzv-conf="is_host=$is_host"'),
            Shell(f'--local-addr="$SLURMD_NODENAME"{shlex.quote(suffix) if suffix else ""}'),
        ]
    return [python, "-m", "torch.distributed.run", *meet, f"--nproc-per-node={point.devices}", *worker]


def step_name(folder: Path) -> str:
    """Name of the job's step that runs the point of an attempt's folder."""
    return f"{folder.parent.name}-{folder.name}"


def write_script(point: Point, folder: Path, threads: int, site: Site | None = None, kind: DeviceKind = "cpu") -> Path:
    """Write ``run.sh`` into an attempt's folder and return its path.

    ``site`` is how the machine is used; with a scheduler in it the script is a Slurm job's, without one it runs where it is started.
    ``kind`` says which GPUs a container has to show.

    Raises:
        InputError: the site asks for something impossible, such as more time than the partition gives.
    """
    folder, site = folder.resolve(), site or Site()
    make = _local if site.scheduler is None else _slurm
    path = folder / SCRIPT
    write_atomically(path, make(point, folder, threads, site, kind))
    path.chmod(0o755)
    return path


def _local(point: Point, folder: Path, threads: int, site: Site, kind: DeviceKind) -> str:
    quoted = shlex.quote(str(folder))
    return f"""#!/usr/bin/env bash
{_title(point, folder)}
cd {quoted} || exit
{GATE}{_software(point, threads, site)}
{folded(_inside(point, folder, threads, site, kind))} >>{LOG} 2>&1
code=$?

# A worker that measured has written its record; for any other the record says what happened.
[ "$code" -eq 0 ] || {shlex.quote(sys.executable)} -m caraml.results.finish {quoted} "$code"
exit "$code"
"""


def _slurm(point: Point, folder: Path, threads: int, site: Site, kind: DeviceKind) -> str:
    scheduler = site.scheduler
    assert scheduler is not None
    timeout, gpu = point.measure.timeout_seconds, point.device_class == "gpu"
    head = batch.resources(batch.Request(step_name(folder), folder, point.nodes, point.devices, threads, timeout, gpu), scheduler)
    heading = "\n".join(batch.PREFIX + line for line in head)
    finish = f"{shlex.quote(sys.executable)} -m caraml.results.finish {shlex.quote(str(folder))}"
    return f"""#!/usr/bin/env bash
{heading}
{_title(point, folder)}
: "${{SLURM_JOB_ID:?submit this script with sbatch, or run it inside an allocation}}"
cd {shlex.quote(str(folder))} || exit
if [ -e {RECORD} ]; then echo "this attempt has its result already: $PWD/{RECORD}"; exit 0; fi
{GATE}rm -f {EXIT} {FAILURE}  # left by a run of this job that was cut off
{_software(point, threads, site)}{_rendezvous(point, site)}
# What runs on each node. The warning is meant for the worker; the programs around it must survive it.
node() {{
  trap '' USR1
{_host_of_rendezvous(point)}  exec {folded(_inside(point, folder, threads, site, kind), "    ")}
}}
export -f node

# Slurm warns with USR1 before the time is over, and ends a job with TERM.
warned='' ended='' caught='' step=''
trap 'warned=1 caught=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
trap 'ended=1 caught=1; kill "$step"' TERM
{_srun(point, folder, site, gpu)}bash -c node >>{LOG} 2>&1 &
step=$!
while wait "$step"; code=$?; [ -n "$caught" ] && [ -z "$ended" ]; do caught=''; done
[ -z "$ended" ] || sleep 2  # the worker may be writing its record just now

# A worker that measured has written its record; for any other the record says what happened.
why=()
if [ ! -e {RECORD} ] && [ -n "$ended" ]; then
  [ -n "$warned" ] || exit "$code"  # cancelled, preempted or put back into the queue: Slurm knows which, and whether it starts again
  why=(timeout 'it reached its time limit')
fi
{_requeue(scheduler)}[ -e {RECORD} ] || {finish} "$code" "${{why[@]}}"
echo "$code" >{EXIT}
exit "$code"
"""


def _title(point: Point, folder: Path) -> str:
    return f"# {_one_line(point.label)}; point {point.key}, attempt {folder.name}"


def _software(point: Point, threads: int, site: Site) -> str:
    """Modules, virtual environment and variables. Modules and activation read unset variables, so ``set -u`` comes after them."""
    software, lines = site.software, []
    if software.modules:
        lines += ["type module >/dev/null 2>&1 || . /etc/profile", f"module load {shlex.join(software.modules)} || exit"]
    if software.venv is not None:
        lines.append(f". {shlex.quote(software.venv.rstrip('/') + '/bin/activate')} || exit")
    lines.append("set -u")
    if site.scheduler is not None:  # a job's CPUs are Slurm's to tell; salloc and sbatch have different words for them
        lines.append("cpus=${SLURM_CPUS_ON_NODE:-${SLURM_JOB_CPUS_PER_NODE%%[(,]*}}")
    lines += exports(_variables(point, threads, site))
    return "\n# Environment.\n" + "\n".join(lines) + "\n"


def _variables(point: Point, threads: int, site: Site) -> dict[str, str]:
    """What the script exports; the site's own variables go before every other word."""
    variables = environment_of(point, threads) | _network(point, site) | _image_variables(site)
    if site.scheduler is not None:
        variables["OMP_NUM_THREADS"] = Shell(f"$((cpus > {point.devices} ? cpus / {point.devices} : 1))")
    return variables | site.software.variables


def exports(variables: Mapping[str, str]) -> list[str]:
    """Lines that export variables. Raises ``InputError`` for a name that the shell would take for something else."""
    for name in variables:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"software.variables: found {name!r}, expected the name of a variable")
    return [f"export {name}={join([value])}" for name, value in variables.items()]


def _network(point: Point, site: Site) -> dict[str, str]:
    interface = site.network.interface
    return {} if interface is None or point.nodes == 1 else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def _image_variables(site: Site) -> dict[str, str]:
    """What the record says about the container; only the script knows it."""
    image = container.image_of(site.container)
    if image is None:
        return {}
    digest = container.digest(site.container.runtime, image)
    known = {"RUNTIME": site.container.runtime, "IMAGE": image, "DIGEST": digest}
    return {f"CARAML_CONTAINER_{name}": value for name, value in known.items() if value is not None}


def _inside(point: Point, folder: Path, threads: int, site: Site, kind: DeviceKind) -> list[str]:
    """The worker's command line, inside the site's image if it has one."""
    image = container.image_of(site.container)
    python = site.container.python if image else "python3" if site.software.venv else sys.executable
    if image is None:
        return command_of(point, folder, python, site.network.address_suffix)
    # Podman passes no variables on by itself; a name alone takes the script's value.
    passed = [f"--env={name}" for name in _variables(point, threads, site)] if site.container.runtime == "podman" else []
    return container.wrap(
        command_of(point, folder, python, site.network.address_suffix),
        site.container.runtime,
        image,
        binds=[*site.container.binds, str(folder)],
        workdir=str(folder),
        gpus="cuda" if kind == "cuda" else "rocm" if kind == "rocm" else None,
        extra=[*site.container.extra, *passed],
    )


def _rendezvous(point: Point, site: Site) -> str:
    if point.nodes == 1:
        return ""
    return f"""
# The nodes meet at the first of them.
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$(({site.network.port} + SLURM_JOB_ID % 1000))
export head_node port
"""


def _host_of_rendezvous(point: Point) -> str:
    return "" if point.nodes == 1 else '  if [ "$SLURMD_NODENAME" = "$head_node" ]; then is_host=1; else is_host=0; fi\n'


def _srun(point: Point, folder: Path, site: Site, gpu: bool) -> str:
    """One task per node, with all CPUs of the job: a step would have one CPU otherwise. A command starts its own steps."""
    scheduler = site.scheduler
    assert scheduler is not None
    if point.workload == "command":
        return ""
    if point.workload == "command":
        return ""
    options = [f"--nodes={point.nodes}", f"--ntasks={point.nodes}", "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=1"]
    options += [f"--job-name={step_name(folder)}", Shell('--cpus-per-task="$cpus"')]
    options += [f"--cpu-bind={scheduler.cpu_bind}"] if scheduler.cpu_bind else []
    options += batch.gpus(scheduler, point.devices) if gpu else []
    return folded(["srun", *options, *scheduler.srun_extra]) + " "


def _requeue(scheduler: Scheduler) -> str:
    """Once: a job that is cut off again would be so for ever."""
    if not scheduler.requeue:
        return ""
    return f"""if [ ! -e {RECORD} ] && [ -n "$warned" ] && [ -z "${{SLURM_RESTART_COUNT:-}}" ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
"""


def _one_line(text: str) -> str:
    """Text that cannot leave its comment."""
    return " ".join(text.split())
