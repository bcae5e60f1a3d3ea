"""What a Slurm job asks for, and the scripts of jobs that run several points."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.launch import Job
from caraml.suite.model import Point
from caraml.system.model import Scheduler

START_UP_SECONDS = 120
"""Allowed on top of a point's own time: starting the job, and finishing it."""
SLURM_LOG = "slurm.log"
CANCELLED = "cancelled"
"""File that keeps a point from being started by a job that runs several."""
EXIT = "exit"
"""File that a scheduled point leaves behind at its very end: its exit code."""
LOOK = "USR2"
"""Signal to a job that runs several: the point that runs now may have been cancelled."""
_ENDED = 143
"""Exit code of what was ended by TERM."""
PREFIX = "#SBATCH "


@dataclass(frozen=True)
class SlurmOptions:
    """How the jobs of one campaign go into the queue."""

    throttle: int | None = None
    """Most tasks of an array that run at the same time."""
    one_at_a_time: bool = False
    """Never two jobs of the campaign at the same time, so that they do not disturb each other's energy or network."""
    pack: int = 1
    """Most points of equal node count that share one job and run in it one after another."""
    name: str = "caraml"
    """Name of the campaign's jobs: of arrays and packs, and of every job where ``one_at_a_time`` needs one name for all."""
    array_size: int = 10_000
    """Most points in one array; Slurm's own limit (``MaxArraySize``) may be lower."""
    grace_seconds: float = 30.0
    """How long after a job's end its files may stay invisible here before it counts as lost."""
    patience_seconds: float = 300.0
    """How long to try again when the controller does not answer."""


def step_name(folder: Path) -> str:
    """Name of the job, and of its step, that runs the point of an attempt's folder."""
    return f"{folder.parent.name}-{folder.name}"


def resources(point: Point, folder: Path, threads: int, scheduler: Scheduler) -> list[str]:
    """The options of one point's job, as ``sbatch`` takes them; ``threads`` are a node's usable CPUs. Raises ``InputError`` where the time
    is longer than the partition allows, or a value has a line break."""
    given = {
        "job-name": step_name(folder),
        "output": str(folder / SLURM_LOG).replace("%", "%%"),
        "open-mode": "append",
        "partition": scheduler.partition,
        "account": scheduler.account,
        "qos": scheduler.qos,
        "constraint": scheduler.constraint,
        "reservation": scheduler.reservation,
        "nodes": str(point.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": _cpus(scheduler, point, threads),
        "time": str(minutes(scheduler, point.measure.timeout_seconds)),
        "signal": f"B:USR1@{scheduler.signal_seconds}",
    }
    lines = [f"--{key}={shlex.quote(_one_line(key, value))}" for key, value in given.items() if value is not None]
    lines += ["--exclusive"] if scheduler.exclusive else []
    lines += gpus(scheduler, point.devices) if point.device_class == "gpu" else []
    lines += ["--requeue" if scheduler.requeue else "--no-requeue"]
    return [*lines, *(_extra(line) for line in scheduler.extra)]


def gpus(scheduler: Scheduler, devices: int) -> list[str]:
    """How GPUs are asked for, of a job and of a step in it."""
    if scheduler.gpus == "none":
        return []
    value = f"{scheduler.gres}:{devices}" if scheduler.gpus == "gres" else str(devices)
    return [f"--{scheduler.gpus}={shlex.quote(_one_line(scheduler.gpus, value))}"]


def minutes(scheduler: Scheduler, timeout: float) -> int:
    """Time limit of a job: the point's own ``timeout`` [s], the warning, and a margin to start and finish, rounded up to whole minutes;
    never over the partition's. Raises ``InputError`` where the point alone takes longer than the partition allows."""
    needed = math.ceil((timeout + scheduler.signal_seconds + START_UP_SECONDS) / 60)
    longest = scheduler.max_minutes
    if longest is None or needed <= longest:
        return needed
    if timeout > longest * 60:
        possible = longest * 60 - scheduler.signal_seconds - START_UP_SECONDS
        raise InputError(
            f"timeout_seconds = {timeout:g} is {math.ceil(timeout / 60)} min; jobs here end after {longest} min (scheduler.max_minutes)",
            f"lower measure.timeout_seconds to {possible} or less, or use another partition",
        )
    return longest


def _cpus(scheduler: Scheduler, point: Point, threads: int) -> str | None:
    """CPUs of a node's one task. An exclusive job has them all; a job with GPUs gets what the site gives by default."""
    if scheduler.cpus_per_device is not None:
        return str(scheduler.cpus_per_device * point.devices)
    return None if scheduler.exclusive or point.device_class == "gpu" else str(threads)


def _one_line(key: str, value: str) -> str:
    if any(character in value for character in "\n\r\0"):
        raise InputError(f"scheduler.{key.replace('-', '_')}: found {value!r}, expected one line")
    return value


def _extra(line: str) -> str:
    if not line.startswith("-"):
        raise InputError(f"scheduler.extra: found {line!r}, expected an option such as '--hint=nomultithread'")
    return _one_line("extra", line)


def options_of(script: Path | str) -> list[str]:
    """The ``#SBATCH`` options of a script, by its path or its text, also of one that was edited by hand."""
    lines = (script if isinstance(script, str) else script.read_text(encoding="utf-8")).split("\n")
    return [line.removeprefix(PREFIX).strip() for line in lines if line.startswith(PREFIX)]


def alike(script: Path) -> tuple[str, ...]:
    """What jobs must have in common to be tasks of one array."""
    return tuple(line for line in options_of(script) if not line.startswith(("--job-name=", "--output=")))


def shared_head(jobs: Sequence[Job], scheduler: Scheduler) -> list[str]:
    """Options of a job in which ``jobs`` run one after another: the most devices and CPUs, and the time of all."""
    largest = max(jobs, key=lambda job: job.devices)
    head = [line for line in options_of(largest.script) if not line.startswith(("--job-name=", "--output=", "--time="))]
    return [*head, f"--time={pack_minutes(jobs, scheduler)}"]


def pack_minutes(jobs: Sequence[Job], scheduler: Scheduler) -> int:
    """Time limit of a job in which ``jobs`` run one after another; not capped by the partition's."""
    free = scheduler.model_copy(update={"max_minutes": None})
    return sum(minutes(free, job.timeout) for job in jobs)


def packs(jobs: Sequence[Job], scheduler: Scheduler, most: int) -> list[list[Job]]:
    """Jobs that share an allocation: equal node count, at most ``most``, and together no longer than the partition allows.

    A program has all devices of its job, and their energy is its: it shares one with programs of as many devices alone.
    """
    groups: list[list[Job]] = []
    for job in sorted(jobs, key=_needs):
        group = groups[-1] if groups else []
        fits = bool(group) and _needs(group[0]) == _needs(job) and len(group) < most
        if fits and (scheduler.max_minutes is None or pack_minutes([*group, job], scheduler) <= scheduler.max_minutes):
            group.append(job)
        else:
            groups.append([job])
    return groups


def _needs(job: Job) -> tuple[int, int]:
    """Nodes, and the devices of a program; the step of any other point has its own share of the job's."""
    return job.nodes, job.devices if job.folder.parent.name.startswith("command-") else 0


def array_script(folders: Sequence[Path], head: Sequence[str], options: SlurmOptions, logs: Path) -> str:
    """The script of an array: task N runs the script in the Nth of these attempts' folders."""
    throttle = f"%{options.throttle}" if options.throttle else ""
    lines = [*head, f"--job-name={shlex.quote(options.name)}", f"--array=0-{len(folders) - 1}{throttle}", f"--output={_log(logs, '%A_%a')}"]
    return f"""{_top(lines)}
# {count(len(folders), "point")}, one task each.
{_points(folders)}
exec bash "${{points[SLURM_ARRAY_TASK_ID]}}/run.sh"
"""


def pack_script(limits: Mapping[Path, float], head: Sequence[str], options: SlurmOptions, logs: Path, signal_seconds: int) -> str:
    """The script of a job in which points run one after another: their attempts' folders, each with its time-out [s]."""
    lines = [*head, f"--job-name={shlex.quote(options.name)}", f"--output={_log(logs, '%j')}"]
    times = " ".join(str(math.ceil(timeout) + START_UP_SECONDS) for timeout in limits.values())
    return f"""{_top(lines)}
# {count(len(limits), "point")}, one after another. A point is warned when its own time [s] is over, and ended when it does not heed that.
{_points(tuple(limits))}
limits=({times})
over='' child=''
trap 'over=1; [ -z "$child" ] || kill -USR1 "$child"' USR1
trap 'over=1; [ -z "$child" ] || kill -TERM "$child"' TERM
trap '[ -z "$child" ] || [ ! -e "$point/{CANCELLED}" ] || kill -TERM "$child"' {LOOK}
for number in "${{!points[@]}}"; do
  point=${{points[number]}}
  if [ -n "$over" ] || [ -e "$point/{CANCELLED}" ]; then continue; fi
  bash "$point/run.sh" &
  child=$!
  {{ sleep "${{limits[number]}}"; kill -USR1 "$child"; sleep {signal_seconds}; kill -TERM "$child"; }} 2>/dev/null &
  watcher=$!
  until wait "$child" || ! kill -0 "$child" 2>/dev/null; do :; done
  kill "$watcher" 2>/dev/null
  child=''
  if [ -e "$point/{CANCELLED}" ] && [ ! -e "$point/{EXIT}" ]; then echo {_ENDED} >"$point/{EXIT}"; fi
done
"""


def points_of(script: Path) -> list[Path]:
    """The folders of the points that an array's or a pack's script runs."""
    _, _, rest = script.read_text(encoding="utf-8").partition("\npoints=(")
    return [Path(word) for word in shlex.split(rest.partition("\n)")[0])]


def _top(lines: Sequence[str]) -> str:
    return "\n".join(["#!/usr/bin/env bash", *(PREFIX + line for line in lines)])


def _points(folders: Sequence[Path]) -> str:
    return "\n".join(["points=(", *(f"  {shlex.quote(str(folder))}" for folder in folders), ")"])


def _log(folder: Path, name: str) -> str:
    return shlex.quote(str(folder).replace("%", "%%") + f"/{name}.log")
