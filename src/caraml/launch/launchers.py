"""Launchers by name, and the one that a job's handle belongs to."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from caraml.base.errors import InputError
from caraml.launch.base import Elsewhere, Job, JobState, Launcher
from caraml.launch.batch import SlurmOptions
from caraml.launch.local import LocalLauncher
from caraml.launch.script import join
from caraml.launch.slurm import SlurmLauncher
from caraml.results.store import RECORD
from caraml.system.model import System
from caraml.system.site import Scheduler

Name = Literal["local", "slurm", "print"]
SCRIPTS = "slurm"
"""Folder below the store for the scripts and logs of arrays and packs."""


def default_name(system: System) -> Name:
    """``slurm`` on a machine whose description has a scheduler, else ``local``."""
    return "local" if system.site.scheduler is None else "slurm"


def launcher(
    name: Name,
    system: System,
    root: Path,
    options: SlurmOptions | None = None,
    show: Callable[[str], None] = print,
    *,
    elsewhere: Elsewhere | None = None,
) -> Launcher:
    """The launcher called ``name``; ``elsewhere`` is where printed scripts will be started. Raises ``InputError`` for Slurm on a machine
    whose description has no scheduler."""
    if name == "local":
        return LocalLauncher()
    scheduler, prints = system.site.scheduler, name == "print"
    slurm = SlurmLauncher(scheduler, root / SCRIPTS, options, asks=not prints, elsewhere=elsewhere) if scheduler is not None else None
    if prints:
        return PrintLauncher(show, slurm, elsewhere)
    if slurm is None:
        raise InputError(
            f"system {system.name!r} has no scheduler, so there is nothing to submit to",
            "name a system that has one (caraml list systems), or describe yours with a [site.scheduler]: docs/systems.md",
        )
    return slurm


def launcher_of(handle: str, root: Path) -> Launcher:
    """A launcher that can look at and end the job of this handle; it needs to know nothing of the machine."""
    kind = handle.partition(":")[0]
    if kind == "slurm":
        return SlurmLauncher(Scheduler(), root / SCRIPTS)
    if kind == "print":
        return PrintLauncher(lambda text: None)
    return LocalLauncher()


def _number_of(folder: Path) -> str:
    """Name of the shell variable that has the number of a printed job."""
    return re.sub(r"\W", "_", f"job_{folder.parent.name}")


class PrintLauncher:
    """Starts nothing: prints one command for each script. A handle is ``print:FOLDER``; a point counts as ended when it has its record.

    With ``slurm`` the commands are that launcher's, arrays and packs included; without it they run the scripts on this machine.
    """

    slots = None

    def __init__(self, show: Callable[[str], None], slurm: SlurmLauncher | None = None, elsewhere: Elsewhere | None = None) -> None:
        self._show, self._slurm, self._elsewhere = show, slurm, elsewhere

    def show(self, script: Path) -> None:
        """Print what runs a script by hand."""
        self._show(shlex.join(["bash", str(script if self._elsewhere is None else self._elsewhere.path(script))]))

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Print what would start the jobs."""
        if self._slurm is None:
            for job in jobs:
                self.show(job.script)
        else:
            for group, script in self._slurm.scripts(jobs):
                after = [f"slurm:${_number_of(Path(handle.partition(':')[2]))}:" for handle in group[0].after]
                line = join(self._slurm.command(script, [replace(group[0], after=tuple(after))]))
                self._show(f"{_number_of(group[0].folder)}=$({line})" if group[0].awaited else line)
        return [f"print:{job.folder.resolve()}" for job in jobs]

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look for records of points that somebody has started."""
        return {handle: self._state(Path(handle.partition(":")[2])) for handle in handles}

    @staticmethod
    def _state(folder: Path) -> JobState:
        return JobState("ended", 0) if (folder / RECORD).exists() else JobState("waiting", reason="its script was printed, not started")

    def cancel(self, handles: Sequence[str]) -> None:
        """There is nothing to end."""
