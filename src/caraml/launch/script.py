"""The script of a point: everything that decides how it runs, in one file that can be read, edited, and started by hand."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from caraml.base.signals import CALLER
from caraml.engine.start import MEET, PEER, SECRET
from caraml.launch import batch, container
from caraml.launch.batch import EXIT, step_name
from caraml.results.claim import GATE, STARTED
from caraml.results.finish import FAILURE, LOG, MEASURED
from caraml.results.store import JOURNAL, RECORD
from caraml.suite.model import Point
from caraml.system import affinity
from caraml.system.model import DeviceKind, Scheduler, Site, Software
from caraml.system.variables import PROGRAM, SITE, check_name, concealed, loading
from caraml.workloads.base import SUITE_FOLDER
from caraml.workloads.command import Params, filled_command, names_of, references

SCRIPT = "run.sh"
NEEDED = "needed"
"""Link in an attempt's folder to that of the point that it needs."""

_MEET = ".meet"
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

# A user's own, which Slurm passes on, would bind every process to the same core when torch is loaded, before CARAML gives each its part.
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


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


def environment_of(point: Point, threads: int, kind: DeviceKind = "cpu") -> dict[str, str]:
    """Variables that the point's processes run under; ``threads`` are the node's usable CPUs, ``kind`` is that of its devices."""
    variables = {"OMP_NUM_THREADS": str(max(threads // point.devices, 1))}
    if point.workload == "command":  # somebody else's program has its own mind about threads and memory
        variables = {}
    elif point.device_class == "cpu":
        variables |= _KEEP_BLOCKS if point.knobs.keep_freed_memory else {}
    elif point.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what cuBLAS needs to give the same bits every time
    return variables | _affinity(point) | (_rocm(point) if kind == "rocm" and point.workload != "command" else {})


def _affinity(point: Point) -> dict[str, str]:
    """What binds the processes and OpenMP's threads of a point; processes of a program are those of its own steps, bound by Slurm."""
    wanted = point.knobs.affinity
    if wanted == "auto":
        return {}
    variables = {affinity.WANTED: wanted, "OMP_PROC_BIND": {"compact": "close", "spread": "spread", "none": "false"}[wanted]}
    if wanted != "none":
        variables["OMP_PLACES"] = "cores"
    if point.workload == "command":
        variables["SLURM_CPU_BIND"] = "none" if wanted == "none" else "cores"
        variables |= {} if wanted == "none" else {"SLURM_DISTRIBUTION": "block:block" if wanted == "compact" else "block:cyclic"}
    return variables


def _rocm(point: Point) -> dict[str, str]:
    """Without these, torch on AMD GPUs ignores what it was asked for, silently: channels innermost, and products in tf32."""
    variables: dict[str, str] = {}
    if point.knobs.channels_last:
        variables |= {"PYTORCH_MIOPEN_SUGGEST_NHWC": "1", "PYTORCH_MIOPEN_SUGGEST_NHWC_BATCHNORM": "1"}
    if point.precision == "tf32":
        variables["HIPBLASLT_ALLOW_TF32"] = "1"
    return variables


def command_of(point: Point, folder: Path, python: str = sys.executable) -> list[str]:
    """The worker's command line on one node: plain Python for one process, for several what starts them."""
    module = [python, "-P", "-m"]  # the current folder has no modules of ours
    if point.workload == "command":  # one process; the program starts its own on other devices and nodes
        return [*module, "caraml.worker.command", str(folder)]
    worker = ["caraml.worker", str(folder)]
    if point.world == 1:
        return [*module, *worker]
    nodes = [f"--nodes={point.nodes}"] if point.nodes > 1 else []
    return [*module, "caraml.engine.start", *nodes, f"--devices={point.devices}", *worker]


@dataclass(frozen=True)
class Recipe:
    """What the script of a point is made of."""

    point: Point
    folder: Path
    """The attempt's, as the machine has it on which the script runs."""
    threads: int
    """Usable CPUs of a node."""
    site: Site
    """How the machine is used; with a scheduler in it the script is a Slurm job's, without one it runs where it is started."""
    kind: DeviceKind = "cpu"
    """Which GPUs a container has to show."""
    away: bool = False
    """Whether the script will run on a machine that has nothing of this one."""
    needed: Path | None = None
    """Folder of the attempt that the point builds on."""
    suite_folder: str | None = None
    """From which relative paths of input are meant."""

    @property
    def python(self) -> str:
        """The interpreter that has CARAML, outside of containers."""
        software = self.site.software
        return software.python or ("python3" if software.venv or self.away else sys.executable)

    @property
    def image(self) -> str | None:
        """The image as the script names it; files of another machine are left as they were given."""
        return container.image_of(self.site.container, away=self.away)

    def text(self) -> str:
        """The script. Raises ``InputError`` where the site asks for something impossible, such as more time than the partition gives."""
        return _local(self) if self.site.scheduler is None else _slurm(self)


def _local(made: Recipe) -> str:
    quoted = shlex.quote(str(made.folder))
    return f"""#!/usr/bin/env bash
{title(made.point, made.folder)}
cd {quoted} || exit
{GATE}{link_to(made.needed)}{_software(made)}
{folded(_inside(made))} >>{LOG} 2>&1
code=$?

# A worker that measured has written its record; for any other the record says what happened.
[ "$code" -eq 0 ] || {shlex.quote(made.python)} -P -m caraml.results.finish {quoted} "$code"
exit "$code"
"""


def _slurm(made: Recipe) -> str:
    point, folder, site, scheduler = made.point, made.folder, made.site, made.site.scheduler
    assert scheduler is not None
    meets = point.nodes > 1 and point.workload != "command"
    # A command's worker is no step of the job: the steps are its program's.
    warning = 'kill -USR1 "$step"' if point.workload == "command" else 'scancel --signal=USR1 "$_job"'
    measured = f" {JOURNAL} {{steps,power}}.{{parquet,csv}}"
    tables = "" if point.workload == "command" else measured  # a program may go on from files of such a name
    heading = "\n".join(batch.PREFIX + line for line in batch.resources(point, folder, made.threads, scheduler))
    finish = f"{shlex.quote(made.python)} -P -m caraml.results.finish {shlex.quote(str(folder))}"
    return f"""#!/usr/bin/env bash
{heading}
{title(point, folder)}
: "${{SLURM_JOB_ID:?submit this script with sbatch, or run it inside an allocation}}"
cd {shlex.quote(str(folder))} || exit
if [ -e {RECORD} ]; then echo "this attempt has its result already: $PWD/{RECORD}"; exit 0; fi
{GATE}rm -f {EXIT} {FAILURE} {MEASURED}{tables}  # left by a run of this job that was cut off
{link_to(made.needed)}{_software(made)}{_own_gpus(point)}{_meeting_folder(site) if meets else ""}
# What runs on each node. The warning is meant for the worker; the programs around it must survive it.
node() {{
  trap '' USR1
  exec {folded(_inside(made), "    ")}
}}
export -f node

# Slurm warns with USR1 before the time is over, and ends a job with TERM. One task of an array has the array's number for its own: by
# that, all tasks would be meant.
warned='' ended='' caught='' step=''
trap 'warned=1 caught=1; {warning}' USR1
trap 'ended=1 caught=1; kill "$step"' TERM
{_srun(point, folder, scheduler)}bash -c node >>{LOG} 2>&1 &
step=$!
while wait "$step"; code=$?; [ -n "$caught" ] && [ -z "$ended" ]; do caught=''; done
# Slurm ends the steps of a job and its shell one by one: a step that was killed may have been told first. So is that of a job that is
# preempted, which may go on for a while.
preempted=''
if [ -z "$ended" ] && [ "$code" -gt 128 ]; then
  case $(squeue --noheader --format=%T --jobs="$_job" 2>/dev/null) in '' | *RUNNING*) ;; *) ended=1 ;; esac
  case $(squeue --noheader --Format=PreemptTime:30 --jobs="$_job" 2>/dev/null) in *[0-9]*) preempted=1 ;; esac
fi
[ -z "$ended" ] || sleep 2  # the worker may be writing its record just now
{f"rm -rf {_MEET}" if meets else ""}
# A worker that measured has written its record; for any other the record says what happened.
why=()
if [ ! -e {RECORD} ] && [ -n "$ended" ]; then
  [ -n "$warned" ] || exit "$code"  # cancelled, preempted or put back into the queue: Slurm knows which, and whether it starts again
  why=(timeout 'it reached its time limit')
fi
[ -z "$preempted" ] || why=(lost 'Slurm preempted its job')
{_requeue(scheduler)}[ -e {RECORD} ] || {finish} "$code" "${{why[@]}}"
echo "$code" >{EXIT}
exit "$code"
"""


def program_script(point: Point, params: Params, folder: Path, suite_folder: str, needed: Path | None = None) -> str:
    """The script of a program that needs no worker: the shell that starts it does. ``folder`` is the attempt's, absolute.

    So it is for a command on this machine of which no mark is waited for. Its script notes how it ended behind its announcement, from which
    any runner can write the record, also days later. Where there are sensors the runner itself reads them; what it read is lost with it.
    This is what makes ten thousand short runs cheap: no Python starts for them.
    """
    argv, env, cwd = filled_command(params, names_of(point, params, folder, suite_folder))
    if argv[0] in _shell_words():  # `time` and `echo` are programs, too: the shell's own are not meant
        found = shutil.which(argv[0], path=env.get("PATH"))
        argv = ["env", *argv] if found is None else [found, *argv[1:]]
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in env.items())
    exports += "".join(f"{line}\n" for line in loading(references(params), PROGRAM, last=True))
    return f"""#!/usr/bin/env bash
{title(point, folder)}
set -u
cd {shlex.quote(str(folder))} || exit
{GATE}
{link_to(needed)}{exports}exec 3>>{STARTED} >>{LOG} 2>&1 </dev/null
cd {shlex.quote(cwd)} || exit
read -r up _ </proc/uptime
begin=${{EPOCHREALTIME:-$(command -p date +%s.%N)}}
{shlex.join(argv)} 3>&-
code=$?
end=${{EPOCHREALTIME:-$(command -p date +%s.%N)}}
read -r now _ </proc/uptime
echo "$code $begin $end $up $now" >&3
exit "$code"
"""


@cache
def _shell_words() -> frozenset[str]:
    """Names that bash takes for its own before it looks for a program."""
    done = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=False)  # noqa: S607 -- the bash that its user has
    return frozenset(done.stdout.split())


def link_to(needed: Path | None) -> str:
    """The line that gives the folder of a point that another needs a name beside the other's files."""
    return "" if needed is None else f"ln -sfn ../../{shlex.quote(needed.parent.name)}/{needed.name} {NEEDED}\n"


def title(point: Point, folder: Path) -> str:
    """The comment that says what a script runs, in one line: a label cannot leave it."""
    return f"# {' '.join(point.label.split())}; point {folder.parent.name}, attempt {folder.name}"


def _software(made: Recipe) -> str:
    """Modules, virtual environment and variables. Modules and activation read unset variables, so ``set -u`` comes after them."""
    site, variables = made.site, _variables(made)
    software = site.software
    lines = [] if made.point.workload == "command" else [join(["unset", *(name for name in _BINDING if name not in variables)])]
    lines += modules(software)
    if software.venv is not None:
        lines.append(f". {shlex.quote(software.venv.rstrip('/') + '/bin/activate')} || exit")
    lines.append("set -u")
    if site.scheduler is not None:  # a job's CPUs are Slurm's to tell; salloc and sbatch have different words for them
        lines.append("cpus=${SLURM_CPUS_ON_NODE:-},${SLURM_JOB_CPUS_PER_NODE:-}  # of the smallest node: a step has as many on each")
        lines.append("cpus=$(printf '%s\\n' ${cpus//,/ } | sort -n | head -n 1) cpus=${cpus%%(*}")
    unseen = concealed(software.variables)
    lines += [*exports(variables, unseen), *loading(unseen, SITE)]
    return "\n# Environment.\n" + "\n".join(lines) + "\n"


def modules(software: Software) -> list[str]:
    """Lines that load the modules of a site."""
    load = ["type module >/dev/null 2>&1 || . /etc/profile", f"module load {shlex.join(software.modules)} || exit"]
    return load if software.modules else []


def _variables(made: Recipe) -> dict[str, str]:
    """What the script exports; the site's own variables go before every other word."""
    point, site = made.point, made.site
    variables = environment_of(point, made.threads, made.kind)
    places = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]  # noqa: PTH100
    if places and not made.away:  # with whole paths: the script changes folder; an empty one would be the current, whoever writes there
        variables["PYTHONPATH"] = os.pathsep.join(places)
    variables |= {} if made.suite_folder is None else {SUITE_FOLDER: made.suite_folder}
    variables |= _image_variables(made)
    if site.network.interface is not None and point.nodes > 1:
        variables |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), site.network.interface)
    if made.kind == "cuda":  # CUDA would begin with the fastest GPU, where drivers, and so sensors and masks, go by addresses
        variables["CUDA_DEVICE_ORDER"] = Shell('"${CUDA_DEVICE_ORDER-PCI_BUS_ID}"')
    if site.scheduler is not None:
        variables["OMP_NUM_THREADS"] = Shell(f"$((cpus > {point.devices} ? cpus / {point.devices} : 1))")
    return variables | site.software.variables


def exports(variables: Mapping[str, str], unseen: Collection[str] = ()) -> list[str]:
    """Lines that export the variables that are not ``unseen``. Raises ``InputError`` for a name that the shell would take for something
    else."""
    for name in variables:
        check_name("software.variables", name)
    return [f"export {name}={join([value])}" for name, value in variables.items() if name not in unseen]


def _image_variables(made: Recipe) -> dict[str, str]:
    """What the record says about the container; only the script knows it."""
    image, runtime = made.image, made.site.container.runtime
    if image is None:
        return {}
    known = {"RUNTIME": runtime, "IMAGE": image, "DIGEST": None if made.away else container.digest(runtime, image)}
    return {f"CARAML_CONTAINER_{name}": value for name, value in known.items() if value is not None}


def _inside(made: Recipe) -> list[str]:
    """The worker's command line, inside the site's image if it has one."""
    point, folder, site = made.point, made.folder, made.site
    if made.image is None:
        return command_of(point, folder, made.python)
    # Podman passes few variables on by itself; a name alone takes the script's value. What is in the container must end with the process
    # that runs it: Slurm ends that one alone, with all that it starts to hand a signal on.
    caller = Shell(f'--env={CALLER}="$$ $(readlink /proc/self/ns/pid)"')
    passed = [caller, *(f"--env={name}" for name in _variables(made))] if site.container.runtime == "podman" else []
    return container.wrap(
        command_of(point, folder, site.container.python),
        site.container.runtime,
        made.image,
        binds=[*site.container.binds, *_input_binds(made), str(folder), *([str(made.needed)] if made.needed else [])],
        workdir=str(folder),
        gpus="cuda" if made.kind == "cuda" else "rocm" if made.kind == "rocm" else None,
        extra=[*site.container.extra, *passed],
    )


def _input_binds(made: Recipe) -> list[str]:
    """Folders, to be read only, of what the point's parameters name by relative paths: those mean the suite's folder, also in an image."""
    if made.suite_folder is None:
        return []
    texts = [text for text in made.point.params.values() if isinstance(text, str) and text and not os.path.isabs(text)]  # noqa: PTH117
    paths = [os.path.normpath(os.path.join(made.suite_folder, text)) for text in texts]  # noqa: PTH118 -- a text that is no path is no error
    # The corpus of a language model is named by what its files begin with.
    found = [path for path in paths if os.path.exists(path) or os.path.exists(f"{path}.idx")]  # noqa: PTH110
    if not found:
        return []
    folders = dict.fromkeys([made.suite_folder, *(path if os.path.isdir(path) else os.path.dirname(path) for path in found)])  # noqa: PTH112, PTH120
    outer = [one for one in folders if not any(Path(one).is_relative_to(other) for other in folders if other != one)]
    read_only = made.site.container.runtime != "charliecloud"  # which binds everything writable
    return [f"{one}:{one}:ro" if read_only else one for one in outer]


def _own_gpus(point: Point) -> str:
    """A program is no step with a share of its job's GPUs; that of one node sees as many as it asked for, and their energy is its."""
    if point.workload != "command" or point.device_class != "gpu" or point.nodes > 1:
        return ""
    return f"""
# Slurm gives an exclusive job all GPUs of its node, whatever it asked for.
for mask in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ZE_AFFINITY_MASK; do
  [ -z "${{!mask:-}}" ] || export "$mask=$(cut -d, -f 1-{point.devices} <<<"${{!mask}}")"
done
"""


def _meeting_folder(site: Site) -> str:
    suffix = site.network.address_suffix
    peer = f"""{join([suffix])}"${{peer#"${{peer%%.*}}"}}"  # before a domain""" if suffix else ""
    return f"""
# The ranks of all nodes meet in a folder that only their user can open: it has their secret, and the address of the first.
rm -rf {_MEET} && mkdir -m 700 {_MEET} && head -c 32 /dev/urandom >{_MEET}/{SECRET} || exit
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
peer=${{hosts[-1]}}
export {MEET}="$PWD/{_MEET}" {PEER}="${{peer{"%%.*" if suffix else ""}}}"{peer}
"""


def _srun(point: Point, folder: Path, scheduler: Scheduler) -> str:
    """One task per node, with all CPUs of the job: a step would have one CPU otherwise. A command starts its own steps."""
    if point.workload == "command":
        return ""
    options = [f"--nodes={point.nodes}", f"--ntasks={point.nodes}", "--ntasks-per-node=1", "--export=ALL", "--kill-on-bad-exit=1"]
    options += [f"--job-name={step_name(folder)}", Shell('--cpus-per-task="$cpus"')]
    bind = scheduler.cpu_bind if point.knobs.affinity == "auto" else "none"  # one task has the whole node; its processes bind themselves
    options += [f"--cpu-bind={bind}"] if bind else []
    options += batch.gpus(scheduler, point.devices) if point.device_class == "gpu" else []
    return folded(["srun", *options, *scheduler.srun_extra]) + " "


def _requeue(scheduler: Scheduler) -> str:
    """After a warning once: a job that is cut off again would be so for ever."""
    if not scheduler.requeue:
        return ""
    return f"""[ -n "${{SLURM_RESTART_COUNT:-}}" ] || [ -e {MEASURED} ] || preempted="$preempted$warned"
if [ ! -e {RECORD} ] && [ -n "$preempted" ]; then
  scontrol requeue "$_job" && exit "$code"
fi
"""
