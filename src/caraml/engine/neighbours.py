"""How much of the machine's CPU time went to processes that are not ours: a number measured beside other work is not the machine's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class CpuTime:
    """CPU seconds since boot: of all processes, and of one process with its living and ended descendants."""

    everyone: float
    ours: float


def cpu_time(family: int, proc: Path = _PROC) -> CpuTime | None:
    """A snapshot with ``family`` and its descendants as ours, or ``None`` where the kernel does not tell (no /proc)."""
    try:
        first = (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, irq, softirq = (int(value) for value in first[1:8])
    return CpuTime((user + nice + system + irq + softirq) / ticks, _family(proc, family) / ticks)


def share_of_others(begin: CpuTime | None, end: CpuTime | None, seconds: float, cpus: int) -> float | None:
    """Share of ``cpus`` that others used in the ``seconds`` between two snapshots; ``None`` if one is missing."""
    if begin is None or end is None or seconds <= 0:
        return None
    others = (end.everyone - begin.everyone) - (end.ours - begin.ours)
    return max(others, 0.0) / (seconds * cpus)


def _family(proc: Path, root: int) -> int:
    """Clock ticks of a process and its descendants."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        pid = int(folder.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(value) for value in fields[11:15])  # utime, stime, and those of children that were waited for
    return sum(value for pid, value in ticks.items() if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid > 1:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return pid == root
