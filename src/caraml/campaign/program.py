"""A program that needs no worker: the shell that starts it does.

So it is for a command on this machine of which no mark is waited for. Its script notes how it ended behind its announcement, from which any
runner can write the record, also days later. Where there are sensors the runner itself reads them; what it read is lost with it. This is
what makes ten thousand short runs cheap: no Python starts for them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from caraml.base.locks import node_key
from caraml.engine.instruments import Instruments, put_together
from caraml.launch.script import link_to, title
from caraml.results.claim import GATE, STARTED
from caraml.results.finish import LOG
from caraml.results.status import ProgressLine
from caraml.suite.model import Point
from caraml.system.variables import PROGRAM, is_reference, loading
from caraml.worker.command_record import Ran, measured_by, names_of, window_of
from caraml.workloads.command import Params, filled

_STEPPED = 0.05
"""Seconds by which the clock and the uptime may differ over a run: the uptime is told in hundredths."""


def filled_command(params: Params, names: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Arguments, those variables that may be shown, and folder of a program, with the templates filled in."""
    argv = [filled(word, names) for word in params.argv]
    env = {name: filled(text, names) for name, text in params.env.items() if not is_reference(text)}
    return argv, env, filled(params.cwd, names)


def references(params: Params) -> list[str]:
    """Names of a program's variables whose values are elsewhere."""
    return [name for name, text in params.env.items() if is_reference(text)]


def script(point: Point, params: Params, folder: Path, suite_folder: str, needed: Path | None = None) -> str:
    """The text of ``run.sh``; ``folder`` is the attempt's, absolute."""
    argv, env, cwd = filled_command(params, names_of(point, params, folder, suite_folder))
    if argv[0] in _shell_words():  # `time` and `echo` are programs, too: the shell's own are not meant
        found = shutil.which(argv[0], path=env.get("PATH"))
        argv = ["env", *argv] if found is None else [found, *argv[1:]]
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in env.items())
    exports += "".join(f"{line}\n" for line in loading(references(params), PROGRAM, last=True))
    return f"""#!/usr/bin/env bash
{title(point, folder)}
set -u
cd {shlex.quote(str(folder))} || exit
{GATE}
{link_to(needed)}{exports}exec 3>>{STARTED} >>{LOG} 2>&1 </dev/null
cd {shlex.quote(cwd)} || exit
read -r up _ </proc/uptime
begin=${{EPOCHREALTIME:-$(command -p date +%s.%N)}}
{shlex.join(argv)} 3>&-
code=$?
end=${{EPOCHREALTIME:-$(command -p date +%s.%N)}}
read -r now _ </proc/uptime
echo "$code $begin $end $up $now" >&3
exit "$code"
"""


@cache
def _shell_words() -> frozenset[str]:
    """Names that bash takes for its own before it looks for a program."""
    done = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=False)  # noqa: S607 -- the bash that its user has
    return frozenset(done.stdout.split())


class Sensors:
    """The instruments around a program that the shell alone runs: opened, and read at rest, before it is started."""

    def __init__(self, item: str, idle_seconds: float) -> None:
        self._item, self._idle_seconds, self._instruments = item, idle_seconds, Instruments()
        self._instruments.measure_idle(idle_seconds)
        self._instruments.meter.mark()
        self._offsets = [time.time() - time.monotonic()]

    def line(self, seconds: float) -> ProgressLine:
        """What the sensors say now, ``seconds`` after the start."""
        return ProgressLine(t=seconds, phase="run", item=self._item, watts=self._instruments.meter.latest_power_w())

    def over(self) -> None:
        """The program has ended."""
        self._instruments.meter.mark()
        self._offsets.append(time.time() - time.monotonic())

    def close(self) -> None:
        """Read no more."""
        self._instruments.meter.stop()

    def completed(self, point: Point, params: Params, names: Mapping[str, Any], folder: Path, how: Ran) -> Ran:
        """How the program ran, with its energy; if it did not fail the machine is read at rest once more."""
        # The shell's clock may be set, or drift, while the program runs: its instants are put on ours at each end. A large step is out of
        # the seconds already.
        drift = self._offsets[1] - self._offsets[0]
        begin = how.at - self._offsets[0]
        end = begin + (how.seconds or 0.0) - (drift if abs(drift) <= _STEPPED else 0.0)
        if how.seconds is not None and end > begin:
            how = replace(how, seconds=end - begin)
        window = window_of(point, params, names, folder, how)
        if window is None:
            return how
        if not how.exit_code:
            self._instruments.measure_idle(self._idle_seconds)
        mine = self._instruments.summary(begin, end, {"run": (begin, end)})
        nodes = put_together({node_key(): [mine]}, {node_key(): [0]}, window)
        measured, fields = measured_by(nodes, self._instruments.meter, window, begin, item=params.item, folder=folder)
        return replace(how, measured=measured, extras={**how.extras, **fields, "environment": mine.environment})


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
    code, *times = lines[1].replace(",", ".").split()  # some locales have a decimal comma
    begin, end, *uptime = map(float, times)
    started_at = datetime.fromtimestamp(begin, UTC).astimezone().isoformat(timespec="milliseconds")
    seconds = end - begin
    if uptime and abs(uptime[1] - uptime[0] - seconds) > _STEPPED:  # nobody can set the uptime, which is coarser
        seconds = uptime[1] - uptime[0]
    if seconds < 0:  # of a script that an earlier version wrote, without the uptime
        return Ran(int(code), started_at, None, doubt="the clock was stepped while the program ran", at=begin)
    return Ran(int(code), started_at, seconds, at=begin)
