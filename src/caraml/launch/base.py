"""The contract of a launcher. A job is a script in an attempt's folder; a launcher starts it, watches it, and can end it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

State = Literal["waiting", "running", "ended"]
H = TypeVar("H")


@dataclass(frozen=True)
class Job:
    """A script to run and what it needs."""

    folder: Path
    script: Path
    nodes: int
    devices: int
    timeout: float


@dataclass(frozen=True)
class JobState(Generic[H]):
    """Where a job stands; ``exit_code`` once it has ended."""

    state: State
    exit_code: int | None = None


class Launcher(Protocol[H]):
    """Starts jobs somewhere."""

    def submit(self, job: Job) -> H:
        """Start a job, or queue it."""
        ...

    def poll(self, handle: H) -> JobState[H]:
        """Look at a job without waiting."""
        ...

    def cancel(self, handle: H) -> None:
        """End a job and everything it started."""
        ...
