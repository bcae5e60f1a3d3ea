"""Scripts and the commands that submit them, for whoever wants to start them himself."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from caraml.launch.base import Job, JobState
from caraml.launch.slurm import SlurmLauncher
from caraml.results.store import RECORD


class PrintLauncher:
    """Starts nothing: prints one command for each script. A handle is ``print:FOLDER``; a point counts as ended when it has its record.

    With ``slurm`` the commands are that launcher's, arrays and packs included; without it they run the scripts on this machine.
    """

    slots = None

    def __init__(self, show: Callable[[str], None], slurm: SlurmLauncher | None = None) -> None:
        self._show, self._slurm = show, slurm

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Print what would start the jobs."""
        if self._slurm is None:
            commands = [["bash", str(job.script)] for job in jobs]
        else:
            commands = [self._slurm.command(script) for _, script in self._slurm.scripts(jobs)]
        for command in commands:
            self._show(shlex.join(command))
        return [f"print:{job.folder.resolve()}" for job in jobs]

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look for records of points that somebody has started."""
        return {handle: self._state(Path(handle.partition(":")[2])) for handle in handles}

    @staticmethod
    def _state(folder: Path) -> JobState:
        return JobState("ended", 0) if (folder / RECORD).exists() else JobState("waiting", reason="its script was printed, not started")

    def cancel(self, handles: Sequence[str]) -> None:
        """There is nothing to end."""
