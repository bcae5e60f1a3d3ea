"""The contract of a launcher. A job is a script in an attempt's folder; a launcher starts it, watches it, and can end it.

A handle is text that finds the job again from any process on any login node, so that a campaign can be left and taken up later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

State = Literal["waiting", "running", "ended", "lost"]
"""``lost``: the job is gone and did not say how it ended."""


@dataclass(frozen=True)
class Job:
    """A script to run and what it needs. ``timeout`` in seconds; ``devices`` are those of each node."""

    folder: Path
    script: Path
    nodes: int
    devices: int
    timeout: float
    after: tuple[str, ...] = ()
    """Handles of jobs that must have succeeded first."""
    awaited: bool = False
    """Whether others may be submitted with this one in their ``after``."""


@dataclass(frozen=True)
class Elsewhere:
    """Where the folder of the results lies on the machine on which scripts will be started."""

    here: Path
    there: Path

    def path(self, path: Path) -> Path:
        """A path of this machine as that one has it: what lies beside the results here lies beside them there."""
        return Path(os.path.normpath(self.there / os.path.relpath(path.resolve(), self.here.resolve())))


@dataclass(frozen=True)
class JobState:
    """Where a job stands; ``exit_code`` once it has ended (negative: a signal), ``reason`` what the scheduler says about it."""

    state: State
    exit_code: int | None = None
    reason: str | None = None


class Launcher(Protocol):
    """Starts jobs somewhere."""

    @property
    def slots(self) -> int | None:
        """Jobs that may be in its hands at the same time: 1 on a machine of one's own, ``None`` where a scheduler queues them."""

    def submit(self, jobs: Sequence[Job]) -> Iterable[str]:
        """Start jobs, or queue them; a handle for each, in order. Each that is yielded is noted before the next job is asked for."""

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look at jobs without waiting."""

    def cancel(self, handles: Sequence[str]) -> None:
        """End jobs and everything they started."""
