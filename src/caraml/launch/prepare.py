"""Before the first point: what can be refused early, and the site's setup lines."""

from __future__ import annotations

import fcntl
import hashlib
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path

from caraml.errors import EnvironmentUnfitError, InputError
from caraml.launch import batch, container
from caraml.launch.script import exports
from caraml.results.files import write_atomically
from caraml.suite.model import Point
from caraml.system.site import Site, Software


def faults(site: Site, points: Iterable[Point]) -> list[str]:
    """What would keep points from running on this machine, in words: a missing image, more time than a job may take, values with line
    breaks. Asks no scheduler; :meth:`SlurmLauncher.check` does."""
    found = []
    try:
        container.check(site.container)
    except InputError as error:
        found.append(str(error))
    shapes = {(point.nodes, point.devices, point.measure.timeout_seconds, point.device_class == "gpu") for point in points}
    for nodes, devices, timeout, gpu in sorted(shapes if site.scheduler else ()):
        assert site.scheduler is not None
        try:
            batch.resources(batch.Request("name", Path("folder"), nodes, devices, 1, timeout, gpu), site.scheduler)
        except InputError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def set_up(software: Software, folder: Path) -> None:
    """Run the site's setup lines, once for every text of them: a mark in ``folder`` says that they ran. Campaigns wait for each other.

    Raises:
        EnvironmentUnfitError: a line failed; the log is named.
    """
    if not software.setup:
        return
    text = _setup_script(software)
    name = f"setup-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    script, log, done = (folder / f"{name}.{ending}" for ending in ("sh", "log", "done"))
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        write_atomically(script, text)
        with log.open("w", encoding="utf-8") as output:
            result = subprocess.run(["bash", str(script)], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if result.returncode:
            raise EnvironmentUnfitError(f"the setup of this machine failed (exit status {result.returncode}): bash {script}", f"read {log}")
        done.touch()


def _setup_script(software: Software) -> str:
    lines = ["#!/usr/bin/env bash", "# software.setup of the system, once before the first point."]
    if software.modules:
        lines += ["type module >/dev/null 2>&1 || . /etc/profile", f"module load {shlex.join(software.modules)} || exit"]
    lines += exports(software.variables)
    return "\n".join([*lines, "set -e", *software.setup, ""])
