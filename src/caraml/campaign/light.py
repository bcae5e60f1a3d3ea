"""Commands that need no worker: no sensor is read and no mark is waited for, so the shell that starts the program is all there is.

The script notes how it ended behind its announcement, from which any runner can write the record, also days later. This is what makes
ten thousand short runs cheap: no Python starts for them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from caraml.launch.base import Job, JobState
from caraml.results.claim import GATE, STARTED
from caraml.results.finish import LOG
from caraml.results.record import Metric, Record
from caraml.suite.model import Point
from caraml.system.variables import PROGRAM, is_reference, loading
from caraml.units import ENERGY_METRICS, unit_of
from caraml.worker.command_record import NO_ENERGY, Ran, names_of, record_of_run
from caraml.workloads.command import Params, filled

_PATIENCE = 5.0
"""Seconds between asking a program to end and ending it."""


def is_light(params: Params) -> bool:
    """Whether the shell alone can run it."""
    return not params.energy and params.marks is None


def filled_command(params: Params, names: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Arguments, those variables that may be shown, and folder of a program, with the templates filled in."""
    argv = [filled(word, names) for word in params.argv]
    env = {name: filled(text, names) for name, text in params.env.items() if not is_reference(text)}
    return argv, env, filled(params.cwd, names)


def references(params: Params) -> list[str]:
    """Names of a program's variables whose values are elsewhere."""
    return [name for name, text in params.env.items() if is_reference(text)]


def script(point: Point, params: Params, title: str, folder: str, suite_folder: str) -> str:
    """The text of ``run.sh``. ``title`` says what it is, ``folder`` is the attempt's, absolute."""
    argv, env, cwd = filled_command(params, names_of(point, params, folder, suite_folder))
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in env.items())
    exports += "".join(f"{line}\n" for line in loading(references(params), PROGRAM, last=True))
    return f"""#!/usr/bin/env bash
# {" ".join(title.split())}
set -u
cd {shlex.quote(folder)} || exit
{GATE}
{exports}exec 3>>{STARTED} >>{LOG} 2>&1 </dev/null
cd {shlex.quote(cwd)} || exit
begin=$EPOCHREALTIME
{shlex.join(argv)} 3>&-
code=$?
echo "$code $begin $EPOCHREALTIME" >&3
exit "$code"
"""


def ran(folder: str) -> Ran | None:
    """How the program ran, by the second line of its script's announcement; ``None`` if it has not said so."""
    try:
        descriptor = os.open(f"{folder}/{STARTED}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    text = os.read(descriptor, 4096).decode()
    os.close(descriptor)
    lines = text.split("\n")
    if len(lines) != 3:
        return None
    code, begin, end = lines[1].replace(",", ".").split()  # some locales have a decimal comma
    started_at = datetime.fromtimestamp(float(begin), UTC).astimezone().isoformat(timespec="milliseconds")
    seconds = float(end) - float(begin)
    if seconds < 0:
        return Ran(int(code), started_at, None, doubt="the clock was stepped while the program ran")
    return Ran(int(code), started_at, seconds)


def conclude(point: Point, params: Params, folder: Path, names: Mapping[str, Any], how: Ran) -> Record:
    """The record of a program that ended; ``names`` are what its templates may name."""
    return record_of_run(point, folder, params, names, replace(how, measured=_no_energy(params.item)))


class Shells:
    """Starts light scripts as a launcher does, with less ado: no Python object and no look into /proc for each."""

    slots = 1

    def __init__(self) -> None:
        self._bash = shutil.which("bash") or "/bin/bash"
        self._environment = dict(os.environb)  # of bytes, as the kernel wants them: encoding them anew takes longer than the call
        self._pids: dict[str, int] = {}

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Start the scripts. A handle names the process only; the script's announcement has the rest, for whoever comes after us."""
        handles = []
        for job in jobs:
            pid = os.posix_spawn(self._bash, ["bash", str(job.script)], self._environment, setsid=True)
            handles.append(f"local:{pid}:")
            self._pids[handles[-1]] = pid
        return handles

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        """Running, or ended with its exit code."""
        return {handle: self._state(handle) for handle in handles}

    def _state(self, handle: str) -> JobState:
        pid, status = os.waitpid(self._pids[handle], os.WNOHANG)
        if not pid:
            return JobState("running")
        del self._pids[handle]
        return JobState("ended", os.waitstatus_to_exitcode(status))

    def cancel(self, handles: Sequence[str]) -> None:
        """Ask each to end, with all that it started, then end it."""
        for handle in handles:
            for number, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, _PATIENCE)):
                deadline = time.monotonic() + patience
                if handle in self._pids:
                    os.killpg(self._pids[handle], number)
                while handle in self._pids and self._state(handle).state == "running" and time.monotonic() < deadline:
                    time.sleep(0.02)


@lru_cache(maxsize=64)
def _no_energy(item: str) -> dict[str, Metric]:
    return {name: Metric(value=None, unit=unit_of(name, item), reason=NO_ENERGY) for name in ENERGY_METRICS}
