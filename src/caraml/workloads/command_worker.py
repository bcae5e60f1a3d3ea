"""One command point: run the program, watch its marks, read the sensors, write the record. Imports no torch.

Runs as ``python -m caraml.workloads.command_worker FOLDER``; FOLDER holds ``point.json`` and ``command.json``, what the templates came to.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import BaseModel, ConfigDict

from caraml.errors import CaramlError
from caraml.power import Meter
from caraml.power.model import WindowEnergy
from caraml.power.store import ROW
from caraml.results.files import write_table
from caraml.results.finish import Failure, note_failure, now
from caraml.results.metrics import energies
from caraml.results.progress import ProgressWriter
from caraml.results.record import Metric, Record, Window
from caraml.results.store import write_record
from caraml.suite.model import Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.workloads.command import Marks, Params
from caraml.workloads.command_record import NO_ENERGY, Ran, items_of, names_of, read_metrics, record_of_run

COMMAND = "command.json"
POWER_SOURCES = "CARAML_POWER"
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_BEAT = 1.0


class Command(BaseModel):
    """A point's templates, filled in."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    argv: list[str]
    env: dict[str, str]
    cwd: str
    suite_folder: str


class _Marked:
    """Hands the program's output on, line by line, and notes when the marks came."""

    def __init__(self, marks: Marks, meter: Meter | None) -> None:
        self._begin, self._end = re.compile(marks.begin), re.compile(marks.end)
        self._meter = meter
        self.begin: float | None = None
        self.end: float | None = None

    def line(self, text: str) -> None:
        at = time.monotonic()
        if self.begin is None:
            if self._begin.search(text):
                self.begin = self._mark() or at
        elif self.end is None and self._end.search(text):
            self.end = at
            self._mark()

    def _mark(self) -> float | None:
        return self._meter.mark() if self._meter is not None else None


class CommandWorker:
    """Runs one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.point = Point.model_validate_json((folder / "point.json").read_text(encoding="utf-8"))
        self.command = Command.model_validate_json((folder / COMMAND).read_text(encoding="utf-8"))
        self.params = Params.model_validate(self.point.params)
        self._progress = ProgressWriter(folder, time.monotonic())
        self._meter: Meter | None = None
        self._child: subprocess.Popen[str] | None = None

    def run(self) -> int:
        """Run and write the record; returns the program's exit code as a shell has it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._hand_on)
        idle = self._start_meter() if self.params.energy else None
        self._progress.write("run", item=self.params.item)
        started_at = now()
        begin = self._mark()
        code, marked = self._execute()
        end = self._mark()
        window = None
        if marked is not None and marked.begin is not None and marked.end is not None:
            window = (marked.begin - begin, marked.end - begin)
        ran = Ran(code, started_at, end - begin, doubt=_doubt(marked), window=window)
        write_record(self.folder, self._record(ran, begin, idle))
        return code

    def _start_meter(self) -> WindowEnergy | None:
        chosen = os.environ.get(POWER_SOURCES)
        self._meter = Meter(sources=chosen.split(",") if chosen else "auto")
        self._meter.start()
        seconds = self.point.measure.idle_seconds
        if not self._meter.channels or not seconds:
            return None
        self._progress.write("idle")
        begin = self._meter.mark()
        time.sleep(seconds)
        return self._meter.energy("idle", begin, self._meter.mark())

    def _mark(self) -> float:
        return self._meter.mark() if self._meter is not None else time.monotonic()

    def _execute(self) -> tuple[int, _Marked | None]:
        marked = _Marked(self.params.marks, self._meter) if self.params.marks is not None else None
        pipe = subprocess.PIPE if marked is not None else None
        try:
            self._child = subprocess.Popen(
                self.command.argv,
                cwd=self.command.cwd,
                env={**os.environ, **self.command.env},
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=subprocess.STDOUT if pipe else None,
                text=True,
                errors="replace",
            )
        except OSError as error:
            print(f"{self.command.argv[0]} in {self.command.cwd}: {error.strerror}", flush=True)
            return (NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE), marked
        if marked is not None:
            assert self._child.stdout is not None
            for line in self._child.stdout:
                marked.line(line)
                print(line, end="", flush=True)
        while True:
            try:
                code = self._child.wait(_BEAT)
                break
            except subprocess.TimeoutExpired:
                self._progress.write("run", item=self.params.item, watts=self._meter.latest_power_w() if self._meter else None)
        return (128 - code if code < 0 else code), marked

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        """The program gets the signal; what it does then decides how this ends."""
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _record(self, ran: Ran, begin: float, idle: WindowEnergy | None) -> Record:
        rss = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        measured = {"peak_host_memory": Metric(value=rss, unit="B")} if rss else {}
        extras: dict[str, Any] = {"system": detect().model_dump(mode="json"), "environment": environment()}
        names = names_of(self.point, self.params, self.folder, self.command.suite_folder)
        numbers, _ = read_metrics(self.params.metrics, self.folder, names) if not ran.exit_code else ({}, [])
        items = items_of(self.params, names, numbers)
        start, end = ran.window or (0.0, ran.seconds or 0.0)
        if isinstance(items, int) and end > start:
            window = Window(start=start, end=end, steps=1, samples=self.point.global_batch, items=items, first_step=0)
            energy = self._meter.energy("measure", begin + start, begin + end, idle) if self._meter is not None else None
            measured |= energies(window, self.params.item, energy, idle)
            if self._meter is None:
                measured |= {name: Metric(value=None, unit=m.unit, reason=NO_ENERGY) for name, m in measured.items() if m.value is None}
            extras |= {"energy": _shifted(energy, begin), "idle": _shifted(idle, begin), "files": self._raw_files(begin)}
        return record_of_run(self.point, self.folder, self.params, names, replace(ran, measured=measured, extras=extras))

    def _raw_files(self, begin: float) -> dict[str, str]:
        if self._meter is None:
            return {}
        self._meter.stop()
        if not self._meter.channels:
            return {}
        return {"power": write_table(self.folder, "power", ROW, self._meter.rows(begin))}


def _doubt(marked: _Marked | None) -> str | None:
    if marked is None or marked.end is not None:
        return None
    return f"the line of the mark `{'end' if marked.begin is not None else 'begin'}` was not printed"


def _shifted(energy: WindowEnergy | None, begin: float) -> WindowEnergy | None:
    """The same energy with its edges in the record's seconds."""
    return None if energy is None else replace(energy, start=energy.start - begin, end=energy.end - begin)


def main(folder: Path) -> int:
    """Run the command of an attempt's folder; returns the exit code for the script."""
    try:
        return CommandWorker(folder).run()
    except CaramlError as error:
        reason = " ".join(str(error).split())
        note_failure(folder, Failure(status="failed", reason=reason, rank=0, started_at=now()))
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
