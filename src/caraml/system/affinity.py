"""Which cores the processes of a point run on: each near its device, none on another's, none where the job may not be.

The devices' neighbourhood comes from the system's description, else from /sys, else from NVML; CPU processes get contiguous blocks of
physical cores, NUMA node by NUMA node. Memory follows by itself: Linux places a page on the node of the thread that touches it first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.system import host
from caraml.system.catalogue import with_given
from caraml.system.detect import detect
from caraml.system.files import ROOT, cpu_list, cpu_numbers, listing
from caraml.system.host import Core
from caraml.system.model import Affinity, System

WANTED = "CARAML_AFFINITY"
"""Environment variable: ``compact``, ``spread`` or ``none``, the ``affinity`` of a point as its script sets it; else it is ``auto``."""
SWITCH = "CARAML_BIND"
"""Environment variable: ``off`` leaves every process where the launcher put it."""
_BY_NUMA = "contiguous blocks of physical cores, NUMA node by NUMA node"


def plan(processes: int, system: System, allowed: Set[int], root: Path = ROOT) -> tuple[list[list[Core]], str]:
    """The cores of each process and by what rule; no list, and the reason, where the cores are too few.

    ``allowed`` are the CPUs that may be used: this process's affinity mask, which a cgroup's cpuset has narrowed already. Processes next
    to the same NUMA node get equal blocks of its physical cores; cores of a socket next to no device are divided among the socket's
    devices. The hardware threads of a core stay together.
    """
    here = host.cores(allowed, root)
    if len(here) < processes:
        return [], _too_few(processes, here)
    homes, source = _homes(processes, system, root)
    near = _near_devices(here, homes) if homes else None
    return (near, source) if near else (_blocks(here, processes), _BY_NUMA)


def bind(local_rank: int, processes_on_node: int, system: System | Path, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Bind this process, with every thread that it has, to its part of the node; what was done, for the record.

    Points of one process keep all CPUs, and a process that its launcher has bound (its mask is not its parent's) is left there.
    ``system`` is this machine, or the attempt's folder, whose description of it counts; the rules of :data:`WANTED` do without it.
    """
    wanted, mask = environ.get(WANTED, ""), host.job_mask()
    done: dict[str, Any] = {"bound": False, "cpus": cpu_list(mask), "numa_nodes": _nodes(mask), "rule": None, "reason": None}
    done["reason"] = _why_not(processes_on_node, mask, environ)
    if done["reason"]:
        if wanted in _RULES and mask:  # its OpenMP has bound the calling thread to the first core, and all that it starts
            host.set_mask(mask)
        return done
    if wanted in _RULES:
        planned, rule = _by_rule(wanted, host.cores(mask), processes_on_node)
    else:
        planned, rule = plan(processes_on_node, with_given(detect(), system) if isinstance(system, Path) else system, mask)
    if not planned:
        return done | {"reason": rule}
    cpus = {cpu for core in planned[local_rank] for cpu in core.cpus}
    try:
        host.set_mask(cpus)
    except OSError as error:
        return done | {"reason": f"the kernel refuses: {error.strerror}"}
    return done | {"bound": True, "cpus": cpu_list(cpus), "numa_nodes": _nodes(cpus), "rule": rule}


def switched_off(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether :data:`SWITCH` is ``off``. Raises ``InputError`` for a word that it does not have."""
    asked = environ.get(SWITCH, "").strip().lower()
    if asked not in ("", "on", "off"):
        raise InputError(f"{SWITCH}: found {asked!r}, expected off, or on", f"export {SWITCH}=off, or unset it")
    return asked == "off"


def bind_early(environ: Mapping[str, str] = os.environ) -> None:
    """Bind this process by the rule that its point asks for, if any, before torch is loaded: OpenMP lays its places out over the mask that
    it finds then. :func:`bind` says later what was done, and gives the calling thread, which OpenMP binds to one core, the others back."""
    with suppress(InputError):  # which `bind` raises again, where a record says so
        if environ.get(WANTED) in _RULES:
            bind(int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", "1")), Path(), environ)


def as_found() -> dict[str, Any]:
    """Which CPUs the kernel lets this process's main thread run on now, and how many of its threads have each mask."""
    try:
        masks = [cpu_list(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]
        return {"found": cpu_list(os.sched_getaffinity(os.getpid())), "threads": {one: masks.count(one) for one in sorted(set(masks))}}
    except (OSError, AttributeError):  # a thread has ended meanwhile, or the system has no masks
        return {"found": cpu_list(host.mask()), "threads": None}


def where_it_runs(local_rank: int, processes_on_node: int, seconds: float = 0.1) -> dict[str, Any]:
    """Bind this process, keep it busy for a while, and tell on which CPUs the kernel let it run: :func:`bind`'s answer and ``ran_on``."""
    done = bind(local_rank, processes_on_node, detect())
    ran_on, until = set(), time.monotonic() + seconds
    while time.monotonic() < until:
        ran_on.add(int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[36]))
    return done | {"ran_on": sorted(ran_on)}


def usable_cpus(processes_on_node: int) -> int:
    """Logical CPUs for this process alone: its mask once it is bound, before that its share of the mask; at least 1."""
    usable = len(host.mask()) or os.cpu_count() or 1
    return usable if host.is_bound() else max(1, usable // max(1, processes_on_node))


def _why_not(processes: int, mask: Set[int], environ: Mapping[str, str]) -> str | None:
    if switched_off(environ):
        return f"{SWITCH}=off"
    if environ.get(WANTED) == "none":
        return 'affinity = "none"'
    if processes < 2:
        return "one process alone may use every CPU of the job"
    if not mask:
        return "this operating system has no affinity masks"
    try:
        inherited = os.sched_getaffinity(os.getppid())
    except OSError:  # the parent is another user's or gone: nothing to compare with
        return None
    return None if inherited == mask else "the launcher has bound this process already"


def _by_rule(wanted: str, cores: list[Core], processes: int) -> tuple[list[list[Core]], str]:
    """As :func:`plan`, by a rule that a point asks for."""
    divide, rule = _RULES[wanted]
    return (divide(cores, processes), rule) if len(cores) >= processes else ([], _too_few(processes, cores))


def _too_few(processes: int, cores: list[Core]) -> str:
    return f"{processes} processes would share {count(len(cores), 'core')}"


def _nodes(cpus: Set[int]) -> list[int]:
    return sorted({core.node for core in host.cores(cpus)})


def _homes(processes: int, system: System, root: Path) -> tuple[list[frozenset[int]], str]:
    """The CPUs next to the device of each process, and who says so; an empty list if nobody knows."""
    if system.device_class == "cpu" or processes > len(system.devices):
        return [], ""
    affinity = system.affinity or host.device_affinity(system.devices, root)
    if isinstance(affinity, str):
        return [], affinity
    source = system.sources.get("affinity", "/sys or NVML")
    return neighbours(affinity, system, root)[:processes], f"next to each device, by {source}"


def _near_devices(here: list[Core], homes: list[frozenset[int]]) -> list[list[Core]] | None:
    """Cores of each process out of its device's neighbourhood; ``None`` where neighbourhoods cross or have too few cores."""
    ranks_of: dict[tuple[Core, ...], list[int]] = {}
    for rank, cpus in enumerate(homes):
        ranks_of.setdefault(tuple(core for core in here if cpus.intersection(core.cpus)), []).append(rank)
    taken = [core for home in ranks_of for core in home]
    if len(set(taken)) < len(taken) or any(len(home) < len(ranks) for home, ranks in ranks_of.items()):
        return None
    found: dict[int, list[Core]] = {}
    for home, ranks in ranks_of.items():
        whole = sorted([*home, *_spare(here, list(ranks_of), home)], key=here.index)
        found |= dict(zip(ranks, _blocks(whole, len(ranks)), strict=True))
    return [found[rank] for rank in range(len(homes))]


def _spare(here: list[Core], homes: list[tuple[Core, ...]], home: tuple[Core, ...]) -> list[Core]:
    """``home``'s share of the cores of its socket that are nobody's home."""
    taken = {core for cores in homes for core in cores}
    free = [core for core in here if core not in taken and core.socket == home[0].socket]
    sharers = sorted((other for other in homes if other[0].socket == home[0].socket), key=lambda other: here.index(other[0]))
    size, place = len(free) // len(sharers), sharers.index(home)
    return free[place * size : (place + 1) * size]


def neighbours(affinity: Affinity, system: System, root: Path = ROOT) -> list[frozenset[int]]:
    """The logical CPUs next to each device by a description: its CPUs, else those of its NUMA node, else those of its socket."""
    if affinity.cpus:
        return [cpu_numbers(text) for text in affinity.cpus]
    if affinity.numa_nodes:
        nodes = host.numa_cpus(root) or {node: cpu_numbers(text) for node, text in enumerate(system.cpu.numa_cpus)}
        return [nodes.get(node, frozenset()) for node in affinity.numa_nodes]
    present = [int(path.name.removeprefix("cpu")) for path in listing(root / "sys/devices/system/cpu", "cpu[0-9]*")]
    return [frozenset(cpu for cpu in present if host.socket(cpu, root) == wanted) for wanted in affinity.sockets]


def _blocks(cores: list[Core], count: int) -> list[list[Core]]:
    """``count`` equal contiguous blocks. What is left over stays free, so that no process is slower than the others.

    None crosses a NUMA node where the nodes can be divided evenly, unless a mask has left so little of one that it costs half of each.
    """
    nodes = [list(group) for _, group in groupby(cores, key=lambda core: core.node)]
    size = len(cores) // count
    per_node, rest = divmod(count, len(nodes))
    within = 0 if rest else min(map(len, nodes)) // per_node
    if 2 * within > size:
        return [node[i * within : (i + 1) * within] for node in nodes for i in range(per_node)]
    return [cores[i * size : (i + 1) * size] for i in range(count)]


def _dealt(cores: list[Core], count: int) -> list[list[Core]]:
    """Cores by turns, as many to each: every process has some of every NUMA node."""
    return [cores[i::count][: len(cores) // count] for i in range(count)]


_RULES: dict[str, tuple[Callable[[list[Core], int], list[list[Core]]], str]] = {
    "compact": (_blocks, f"compact: {_BY_NUMA}"),
    "spread": (_dealt, "spread: physical cores by turns, over all NUMA nodes"),
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(where_it_runs(*map(int, sys.argv[1:]))))
