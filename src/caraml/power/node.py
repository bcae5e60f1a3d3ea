"""Who am I among the processes of a job: node, rank, and which one of a node's processes measures what they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from caraml.base.locks import Lock, machine_folder

# What mpirun says comes first: inside a Slurm job its daemons are Slurm's tasks, and what those say is inherited.
RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOCAL = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
JOB = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
STEP = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_STEP_ID")


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int | None:
    found = next((environment[name] for name in names if environment.get(name, "").isdigit()), None)
    return None if found is None else int(found)


def rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if a launcher started more than one; else ``None``."""
    return _number(RANK, environment) if (world_size(environment) or 1) > 1 else None


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of ranks that the launcher started."""
    return _number(SIZE, environment)


def node_count(environment: Mapping[str, str] = os.environ) -> int | None:
    """Number of nodes on which the launcher started ranks; ``None`` where it does not say."""
    size, local = world_size(environment), _number(LOCAL_SIZE, environment)
    if size and local:
        return -(-size // local)
    # Slurm counts the nodes of the job, of which another launcher need not use all.
    foreign = any(name in environment for name in RANK if name.startswith(("OMPI", "PMI_")))
    return None if foreign else _number(NODES, environment)


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
        self._lock = Lock((folder or machine_folder()) / f"power-{safe}.lock")
        self.elected = self._lock.take()
        self.trouble = self._lock.trouble
        """Why there was no lock to be had; then the launcher's first rank of the node is elected, or nobody where it counts none."""
        if self.trouble is not None:
            self.elected = _number(LOCAL, os.environ) == 0

    def close(self) -> None:
        """Step down."""
        self._lock.close(remove=self.elected)
