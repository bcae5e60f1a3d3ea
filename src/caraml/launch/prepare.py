"""Before the first point: what can be refused early, and the site's setup lines."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import make_folder, open_new, touch, write_file
from caraml.base.locks import alone
from caraml.launch import batch, container
from caraml.launch.script import exports
from caraml.suite.model import Point
from caraml.system.site import Site, Software
from caraml.system.variables import concealed, digest, of_caller, required


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
    text, unseen = _setup_script(software), of_caller(concealed(software.variables))
    named = digest("setup", f"{text}{unseen}") if unseen else hashlib.sha256(text.encode()).hexdigest()
    name = f"setup-{named[:12]}"
    make_folder(folder)
    script, log, done = (folder / f"{name}.{ending}" for ending in ("sh", "log", "done"))
    with alone(folder / f"{name}.lock", private=False) as trouble:
        if trouble is not None:
            print(f"caraml: the setup does not wait for other campaigns: {trouble}", file=sys.stderr)
        if done.exists():
            return
        write_file(script, text)
        with open_new(log, replace=True) as output:
            result = subprocess.run(  # noqa: S603 -- setup lines of the system's description: running them is what was asked for
                ["bash", str(script)],  # noqa: S607 -- the bash that its user has
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **unseen},
                check=False,
            )
        if result.returncode:
            raise EnvironmentUnfitError(f"the setup of this machine failed (exit status {result.returncode}): bash {script}", f"read {log}")
        touch(done)


def _setup_script(software: Software) -> str:
    lines = ["#!/usr/bin/env bash", "# software.setup of the system, once before the first point."]
    if software.modules:
        lines += ["type module >/dev/null 2>&1 || . /etc/profile", f"module load {shlex.join(software.modules)} || exit"]
    unseen = concealed(software.variables)
    lines += [*exports(software.variables, unseen), *required(unseen)]
    return "\n".join([*lines, "set -e", *software.setup, ""])
