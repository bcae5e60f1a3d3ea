"""Launchers by name, and the one that a job's handle belongs to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from caraml.errors import InputError
from caraml.launch.base import Launcher
from caraml.launch.batch import SlurmOptions
from caraml.launch.local import LocalLauncher
from caraml.launch.printer import PrintLauncher
from caraml.launch.slurm import SlurmLauncher
from caraml.system.model import System
from caraml.system.site import Scheduler

Name = Literal["local", "slurm", "print"]
SCRIPTS = "slurm"
"""Folder below the store for the scripts and logs of arrays and packs."""


def default_name(system: System) -> Name:
    """``slurm`` on a machine whose description has a scheduler, else ``local``."""
    return "local" if system.site.scheduler is None else "slurm"


def launcher(name: Name, system: System, root: Path, options: SlurmOptions | None = None, show: Callable[[str], None] = print) -> Launcher:
    """The launcher called ``name``. Raises ``InputError`` for Slurm on a machine whose description has no scheduler."""
    if name == "local":
        return LocalLauncher()
    scheduler = system.site.scheduler
    slurm = SlurmLauncher(scheduler, root / SCRIPTS, options) if scheduler is not None else None
    if name == "print":
        return PrintLauncher(show, slurm)
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
