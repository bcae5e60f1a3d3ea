"""Who am I among the processes of a job: node, rank, and which one of a node's processes measures what they share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

RANK = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
SIZE = ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
STEP = ("SLURM_STEP_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    found = next((environment[name] for name in names if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher started more than one; else ``None``."""
    return _number(RANK, environment) if (world_size(environment) or 1) > 1 else None


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks that the launcher started."""
    return _number(SIZE, environment)


def job(environment: Mapping[str, str] = os.environ) -> str:
    """Name that all ranks of one launch share, and no other launch has: job and step, else the session."""
    found = [next((environment[name] for name in names if environment.get(name)), None) for names in (JOB, STEP)]
    return ".".join(part for part in found if part) or f"session-{os.getsid(0)}"


class Election:
    """At most one process per node and job is elected: the one that gets a lock. It stays elected until it ends.

    Processes that are not elected leave what the whole node shares (processors, memory, the node's supply) to the one
    that is, so that nothing is counted once per rank.
    """

    def __init__(self, name: str | None = None, folder: Path | None = None) -> None:
        safe = "".join(c if c.isalnum() or c in ".-" else "_" for c in name or job())
        self._path = (folder or Path(tempfile.gettempdir())) / f"caraml-power-{os.getuid()}-{safe}.lock"
        self._file = self._path.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.elected = True
        except BlockingIOError:
            self.elected = False

    def close(self) -> None:
        """Step down."""
        if self.elected:
            self._path.unlink(missing_ok=True)
        self._file.close()
