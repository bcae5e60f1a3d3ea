"""This node and its clocks: its name, which of its processes reads shared sensors, and proof that no clock was disturbed."""

from __future__ import annotations

import os
import socket
import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path

from caraml.base.locks import Lock, machine_folder

STEP_S, SUSPEND_S = 0.5, 0.05
"""By how much the wall clock moves at least against the monotonic one when it is set, and the boot clock when the machine sleeps [s]."""

NODE = "CARAML_NODE"
"""Environment variable: what this node is called instead. Processes of one host that have different ones count as nodes of their own."""


def node_key() -> str:
    """Host name and boot id: the same for all processes of one node until it restarts."""
    if os.environ.get(NODE):
        return os.environ[NODE]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}:{boot.read_text().strip() if boot.exists() else 'unknown'}"


def suspended_s() -> float:
    """Time that the machine has slept since it was started, up to a constant [s]; 0 where the kernel does not tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() if hasattr(time, "CLOCK_BOOTTIME") else 0.0


class ClockLog:
    """Offsets of wall and boot clock against the monotonic one, noted now and then."""

    def __init__(self) -> None:
        self._t, self._wall, self._boot = array("d"), array("d"), array("d")
        self.note()

    def note(self) -> None:
        now = time.monotonic()
        self._wall.append(time.time() - now)
        self._boot.append(suspended_s())
        self._t.append(now)

    def wall(self, t: float) -> float:
        """Wall time of a monotonic instant [s since 1970], by the comparison before it."""
        return t + self._wall[max(bisect_right(self._t, t) - 1, 0)]

    def flags(self, start: float, end: float) -> list[str]:
        """``clock_step`` if the wall clock was set, ``suspended`` if the machine slept, between the two instants."""
        first, last = max(bisect_right(self._t, start) - 1, 0), min(bisect_right(self._t, end), len(self._t) - 1)
        found = []
        for offsets, limit, flag in ((self._wall, STEP_S, "clock_step"), (self._boot, SUSPEND_S, "suspended")):
            seen = offsets[first : last + 1]
            if max(seen) - min(seen) > limit:
                found.append(flag)
        return found


# What mpirun says comes first: inside a Slurm job its daemons are Slurm's tasks, and what those say is inherited.
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
STEP = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_STEP_ID")

SLURM_OWN_STEPS = 0xFFFFFFF0
"""From here on the numbers of steps are those that Slurm gives to a job's script and to a shell in an allocation."""


def _own(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without what Slurm says by PMIx: jobs and steps inherit it from a shell that srun started, and ``SLURM_*``, which
    each has of its own, says the same."""
    if not environment.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        return environment
    return {name: value for name, value in environment.items() if not name.startswith("PMIX_")}


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    found = next((environment[name] for name in names if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)


def _launched(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    """What the launcher says. Slurm tells a job's script the tasks of the whole job, but only a step's processes are ranks."""
    environment = _own(environment)
    step = environment.get("SLURM_STEP_ID", "")
    if not (step.isdigit() and int(step) < SLURM_OWN_STEPS) and not any(n in environment for n in RANK if not n.startswith("SLURM_")):
        names = tuple(name for name in names if not name.startswith("SLURM_"))
    return _number(names, environment)


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher started more than one; else ``None``."""
    return _launched(RANK, environment) if (world_size(environment) or 1) > 1 else None


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks that the launcher started."""
    return _launched(SIZE, environment)


def job(environment: Mapping[str, str] = os.environ) -> str:
    """Name that all ranks of one launch share, and no other launch has: job and step, else the session."""
    own = _own(environment)
    found = [next((own[name] for name in names if own.get(name)), None) for names in (JOB, STEP)]
    return ".".join(part for part in found if part) or f"session-{os.getsid(0)}"


class Election:
    """At most one process per node and job is elected: the one that gets a lock. It stays elected until it ends.

    Processes that are not elected leave what the whole node shares (processors, memory, the node's supply) to the one
    that is, so that nothing is counted once per rank.
    """

    def __init__(self, name: str | None = None, folder: Path | None = None) -> None:
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in name or job())
        self._lock = Lock((folder or machine_folder()) / f"power-{safe}.lock")
        self.elected = self._lock.take()
        self.trouble = self._lock.trouble
        """Why there was no lock to be had; then the launcher's first rank of the node is elected, or nobody where it counts none."""
        if self.trouble is not None:
            self.elected = _number(LOCAL, os.environ) == 0

    def close(self) -> None:
        self._lock.close(remove=self.elected)
