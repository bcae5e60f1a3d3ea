"""Before the first point: what can be refused early, and the site's setup lines."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import make_folder, open_new, touch, write_file
from caraml.base.locks import alone
from caraml.launch import batch, container
from caraml.launch.script import exports, modules
from caraml.suite.model import Point
from caraml.system.model import Site, Software
from caraml.system.variables import concealed, digest, of_caller, required


def beforehand(site: Site, launcher: str) -> list[str]:
    """What is executed beside the points themselves, a line each: setup, modules, and an image that a runtime fetches first."""
    software, image = site.software, site.container.image
    where = "by you, before the first script" if launcher == "print" else "here, once, before the first point"
    found = [f"setup ({where}): {line}" for line in software.setup]
    found += [f"modules, for each point: {' '.join(software.modules)}"] if software.modules else []
    found += [f"virtual environment, for each point: {software.venv}"] if software.venv else []
    if site.container.runtime != "none" and image is not None:
        fetched = ", which fetches it where it has none" if "://" in image or site.container.runtime == "podman" else ""
        found.append(f"image, for each point: {image} by {site.container.runtime}{fetched}")
    return found


def faults(site: Site, points: Iterable[Point], *, away: bool = False) -> list[str]:
    """What would keep points from running on this machine, in words: a missing image, more time than a job may take, values with line
    breaks. ``away``: images are on another machine. Asks no scheduler; :meth:`SlurmLauncher.check` does."""
    found = []
    try:
        if not away:
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


def setup_script(software: Software, folder: Path) -> Path | None:
    """Write the script of the site's setup lines into ``folder``, without running it; ``None`` where there are none."""
    if not software.setup:
        return None
    text, unseen = _setup_script(software), of_caller(concealed(software.variables))
    named = digest("setup", f"{text}{unseen}") if unseen else hashlib.sha256(text.encode()).hexdigest()
    make_folder(folder)
    script = folder / f"setup-{named[:12]}.sh"
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        write_file(script, text)
    return script


def set_up(software: Software, folder: Path) -> None:
    """Run the site's setup lines, once for every text of them: a mark in ``folder`` says that they ran. Campaigns wait for each other.

    Raises:
        EnvironmentUnfitError: a line failed; the log is named.
    """
    script = setup_script(software, folder)
    if script is None:
        return
    log, done = script.with_suffix(".log"), script.with_suffix(".done")
    with alone(script.with_suffix(".lock"), private=False) as trouble:
        if trouble is not None:
            print(f"caraml: the setup does not wait for other campaigns: {trouble}", file=sys.stderr)
        if done.exists():
            return
        with open_new(log, replace=True) as output:
            result = subprocess.run(  # noqa: S603 -- setup lines of the system's description: running them is what was asked for
                ["bash", str(script)],  # noqa: S607 -- the bash that its user has
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **of_caller(concealed(software.variables))},
                check=False,
            )
        if result.returncode:
            raise EnvironmentUnfitError(f"the setup of this machine failed (exit status {result.returncode}): bash {script}", f"read {log}")
        touch(done)


def _setup_script(software: Software) -> str:
    lines, unseen = ["#!/usr/bin/env bash", "# software.setup of the system, once before the first point."], concealed(software.variables)
    lines += [*modules(software), *exports(software.variables, unseen), *required(unseen)]
    return "\n".join([*lines, "set -e", *software.setup, ""])
