"""One command point: run the program, watch its marks, read the sensors, write the record. Imports no torch.

Runs as ``python -m caraml.worker.command FOLDER``; FOLDER holds ``point.json`` and ``command.json``, what the templates came to.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field

from caraml.base.errors import CaramlError, InputError
from caraml.base.format import human
from caraml.base.limits import SECONDS, limited, read_json
from caraml.base.processes import node_key
from caraml.base.signals import end_with_caller, on_signals
from caraml.base.toml import FrozenModel
from caraml.engine.instruments import Instruments, Nodes, NodeSummary, put_together
from caraml.metrics.energy import ENERGY_METRICS, NO_ENERGY
from caraml.metrics.model import Metric, Window, unknown
from caraml.results.finish import Failure, death, note_failure, now
from caraml.results.record import Record
from caraml.results.status import ProgressWriter
from caraml.results.store import write_record
from caraml.suite.model import Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.variables import PROGRAM, handed_over
from caraml.worker.command_record import Output, Ran, measured_by, record_of_run, window_of
from caraml.worker.remote import OtherNodes
from caraml.workloads.command import Marks, Params, names_of

COMMAND = "command.json"
NOT_FOUND, NOT_EXECUTABLE = 127, 126
_MAXRSS = 1 if sys.platform == "darwin" else 1024
"""Bytes of the unit in which the kernel tells a resident set."""
_BEAT = 1.0
_MOMENT = 0.1
_ANSWER_SECONDS = 30.0
_ENDED = 128 + signal.SIGTERM
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
"""Signals that a launcher sends before it ends a point: cancelled, or out of time."""


class Command(FrozenModel):
    """A point's templates, filled in."""

    argv: list[str]
    env: dict[str, str]
    unseen: list[str] = Field([])
    """Variables whose values are in the private folder, or else in the environment of whoever starts this by hand."""
    cwd: str
    suite_folder: str


class _Marked:
    """Hands the program's output on, line by line, and notes when the marks came."""

    def __init__(self, marks: Marks, edge: Callable[[str], float]) -> None:
        self._begin, self._end = re.compile(marks.begin), re.compile(marks.end)
        self._edge = edge
        self.begin: float | None = None
        self.end: float | None = None

    def line(self, text: str) -> None:
        at = time.monotonic()
        if self.begin is None:
            if self._found(self._begin, text):
                self.begin = self._edge("begin")
        elif self.end is None and self._found(self._end, text):
            self.end = at
            self._edge("end")

    @staticmethod
    def _found(mark: re.Pattern[str], text: str) -> bool:
        try:
            with limited():
                return mark.search(text) is not None
        except TimeoutError:
            raise InputError(f"the mark {mark.pattern!r} needs more than {SECONDS:g} s for one line") from None


class CommandWorker:
    """Runs one command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.point = Point.model_validate_json(read_json(folder / "point.json"))
        self.command = Command.model_validate_json(read_json(folder / COMMAND))
        self.params = Params.model_validate(self.point.params)
        self._handed_over = handed_over(folder, PROGRAM)
        for name in self.command.unseen:
            if name not in self._handed_over and name not in os.environ:
                raise InputError(f"env.{name}: its value is not kept", f"export {name} first")
        self._progress = ProgressWriter(folder, time.monotonic())
        self._instruments: Instruments | None = None
        self._others = OtherNodes(0)
        self._child: subprocess.Popen[bytes] | None = None
        self._gone: float | None = None
        """When the program was over; its output, where that is read, may go on."""
        self._stopped = 0.0
        """Seconds for which this process did nothing in a stretch where it should have."""
        self._resident = 0
        """Largest resident set of the program and of what it started and waited for, as the kernel counts."""
        self._told: dict[int, float] = {}
        """Signals that came for this process and its program, and when each came first."""
        self._starting = threading.Lock()
        """Held while the program is started: it may run before its process is known here."""

    def run(self) -> int:
        """Run and write the record; returns the program's exit code as a shell has it.

        Of a program that was told to end, and did, whoever told it knows why; there is no record here.
        """
        with on_signals((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2), self._hand_on):
            return self._run()

    def _run(self) -> int:
        if self.params.energy:
            self._progress.write("idle")
            self._instruments = Instruments()
            self._others = OtherNodes(self.point.nodes - 1)
            self._idle(self._instruments)
        self._progress.write("run", item=self.params.item)
        begin = self._edge("begin", together=True) if self.params.marks is None else self._instant("start")
        started_at = now(time.monotonic() - begin)
        code, marked = self._execute()
        end = self._edge("end") if marked is None else self._instant("stop", self._over(marked))
        if (code and self._is_told_to_end()) or self._was_ended(marked):
            return self._cut_off(code or _ENDED, started_at)
        if self._instruments is not None and not code:
            self._idle(self._instruments)
        window = None
        if marked is not None and marked.begin is not None and marked.end is not None:
            window = (marked.begin - begin, marked.end - begin)
        ran = Ran(code, started_at, end - begin, doubt=_doubt(marked), window=window)
        if self._stopped > _BEAT and _was_suspended():
            ran = replace(ran, seconds=None, window=None, doubt=f"Slurm suspended its job for {self._stopped:.0f} s while the program ran")
        record = self._record(ran, begin)
        self._others.close()
        if self._was_ended(marked):  # the program may have heard of it first
            return self._cut_off(code or _ENDED, started_at)
        write_record(self.folder, record)
        return code

    def _idle(self, instruments: Instruments) -> None:
        """Idle power of every node, while nothing runs on any."""
        seconds = self.point.measure.idle_seconds
        self._others.idle(seconds)
        instruments.measure_idle(seconds)
        self._others.wait(seconds)

    def _edge(self, name: str, together: bool = False) -> float:
        """The window opens or closes, on all nodes; returns when on this one. ``together``: not before the others."""
        self._others.note("edge", name)
        if together:
            self._others.wait()
        at = self._instruments.edge() if self._instruments is not None else time.monotonic()
        self._others.reached(name, at)
        return at

    def _instant(self, name: str, at: float | None = None) -> float:
        """The program starts or has ended, and the window is another; returns when. No wait for other nodes is in the run.

        ``at`` is when it was so on this node, if that is over: the others are told as late, and their bounds have it.
        """
        self._others.note("mark", name)
        if name == "start":
            self._others.wait()
        at = time.monotonic() if at is None else at
        self._others.reached(name, at)
        return at

    def _why_not(self, error: OSError) -> str:
        """Why the program was not started, and if its folder is not there, what of the suite names that."""
        program, cwd = self.command.argv[0], self.command.cwd
        if not isinstance(error, FileNotFoundError) or Path(cwd).exists():
            return f"{program} in {cwd}: {error.strerror}"
        names = [name for name in self.params.__pydantic_extra__ or () if f"{{{name}}}" in self.params.cwd]
        options = " or ".join(f"--set params.{name}=FOLDER" for name in names or ["cwd"])
        return f"{cwd}: no such folder, in which {program} was to start; {options} names another"

    def _execute(self) -> tuple[int, _Marked | None]:
        marked = _Marked(self.params.marks, self._edge) if self.params.marks is not None else None
        pipe = subprocess.PIPE if marked is not None else None
        try:
            with self._starting:
                self._child = subprocess.Popen(  # noqa: S603 -- the program of the point: running it is what was asked for; no shell
                    self.command.argv,
                    cwd=self.command.cwd,
                    env={**os.environ, **self.command.env, **self._handed_over},
                    stdin=subprocess.DEVNULL,
                    stdout=pipe,
                    stderr=subprocess.STDOUT if pipe else None,
                )
                for number in self._told:
                    self._send(number)
        except OSError as error:
            print(self._why_not(error), flush=True)
            return (NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE), marked
        watcher = threading.Thread(target=self._see_it_end, args=(self._child,), daemon=True)
        watcher.start()
        threading.Thread(target=self._see_stops, daemon=True).start()
        if marked is not None:
            assert self._child.stdout is not None
            try:
                for line in self._lines(self._child.stdout.fileno(), marked):
                    marked.line(line)
                    print(line, end="", flush=True)
            except InputError:
                self._send(signal.SIGKILL)
                raise
        watcher.join(_BEAT)
        while watcher.is_alive():
            watts = self._instruments.meter.latest_power_w() if self._instruments is not None else None
            self._progress.write("run", item=self.params.item, watts=watts)
            watcher.join(_BEAT)
        code = self._child.returncode
        return (128 - code if code < 0 else code), marked

    def _lines(self, output: int, marked: _Marked) -> Iterator[str]:
        """Lines of the program's output until that is closed or, where both marks have come, a moment after the program has ended: what it
        leaves behind may hold its output open for ever."""
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
        begun, data = list[str](), b"-"  # of a line that has not ended, what there is
        while data and (self._gone is None or marked.end is None or time.monotonic() < self._gone + _BEAT):
            if select.select([output], [], [], _BEAT)[0]:
                data = os.read(output, 1 << 16)
                *ended, last = decoder.decode(data, final=not data).split("\n")
                for text in ended:
                    yield "".join((*begun, text, "\n"))
                    begun.clear()
                begun.append(last)
        if any(begun):
            yield "".join(begun)

    def _see_it_end(self, child: subprocess.Popen[bytes]) -> None:
        """Without a time limit, with which ``subprocess`` looks every 50 ms only. What it leaves behind may hold its output open."""
        _, status, used = os.wait4(child.pid, 0)
        self._gone, self._resident = time.monotonic(), used.ru_maxrss
        child.returncode = os.waitstatus_to_exitcode(status)

    def _see_stops(self) -> None:
        """Note for how long at most this process was stopped while the program ran: whoever stops a job stops all of it."""
        while self._gone is None:
            before = time.monotonic()
            time.sleep(_BEAT)
            self._stopped = max(self._stopped, time.monotonic() - before - _BEAT)

    def _over(self, marked: _Marked) -> float | None:
        """When the program was over; not before its last mark, which may be read a moment later."""
        return None if self._gone is None else max(self._gone, marked.end or 0.0)

    def _hand_on(self, number: int) -> None:
        """The program gets the signal; what it does then decides how this ends."""
        with self._starting:
            self._told.setdefault(number, time.monotonic())
            self._send(number)

    def _send(self, number: int) -> None:
        if self._child is not None and self._gone is None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _is_told_to_end(self) -> bool:
        """The program may have had the signal a moment before this process."""
        if not self._told:
            time.sleep(_MOMENT)
        return bool(_ENDING.intersection(self._told))

    def _was_ended(self, marked: _Marked | None) -> bool:
        """Whether all of the program's processes were told to end before what is measured was over, as Slurm and ``killpg`` end a job. A
        shell whose program was ended goes on with its next line, and says in the end that all went well."""
        at, over = self._told.get(signal.SIGTERM), self._gone if marked is None or marked.end is None else marked.end
        return at is not None and (over is None or at < over + _MOMENT)

    def _cut_off(self, code: int, started_at: str) -> int:
        if signal.SIGUSR1 in self._told:
            reason = f"it was warned that its time would soon be over: {death(self.folder, code, 'program')}"
            note_failure(self.folder, Failure(status="timeout", reason=reason, rank=0, started_at=started_at))
        return code

    def _record(self, ran: Ran, begin: float) -> Record:
        flags: list[str] = []
        apart: tuple[float | None, float | None] = (None, None)
        measured = {"peak_host_memory": peak_memory(self._resident)}
        extras: dict[str, Any] = {"system": detect().model_dump(mode="json")}
        names = names_of(self.point, self.params, self.folder, self.command.suite_folder)
        output = Output.of(self.params, names, self.folder, ran.exit_code)
        window = window_of(self.point, output.items, ran)
        if window is not None and self._instruments is None:
            measured |= unknown(ENERGY_METRICS, NO_ENERGY, item=self.params.item)
        elif window is not None and self._instruments is not None:
            run = (begin, begin + (ran.seconds or 0.0))
            mine = self._instruments.summary(begin + window.start, begin + window.end, {"run": run})
            whole = self.params.marks is not None and ran.window is None
            edges = ("start", "stop") if whole else ("begin", "end")
            nodes = self._nodes(mine, window, edges)
            found, fields = measured_by(nodes, self._instruments.meter, window, begin, item=self.params.item, folder=self.folder)
            measured |= {**found, "other_cpu_share": nodes.other_cpu}
            extras |= {**fields, "environment": mine.environment}
            flags, apart = nodes.flags, (self._others.apart(edges[0]), self._others.apart(edges[1]))
        extras |= {} if "environment" in extras else {"environment": environment()}  # which takes long
        ran = replace(ran, measured=measured, extras=extras, flags=flags, apart=apart)
        return record_of_run(self.point, self.folder, self.params, output, ran)

    def _nodes(self, mine: NodeSummary, window: Window, edges: tuple[str, str]) -> Nodes:
        """All nodes of the point; this process is on the first."""
        if "SLURM_JOB_ID" in os.environ:  # what the program starts by srun is no child of this process
            mine = replace(mine, other_cpu_share=None)
        run = ("begin", "end") if self.params.marks is None else ("start", "stop")
        others = self._others.summaries(edges, {"run": run})
        first = [mine, *others.pop(node_key(), [])]
        return put_together({node_key(): first, **others}, {node_key(): [0]}, window)


def peak_memory(resident: int | None) -> Metric:
    """The largest resident set of a process of a program, in the kernel's unit, which counts in what its parent had when it was started;
    ``None`` where another process than this one started it."""
    hidden = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if resident is None:
        return Metric(value=None, unit="B", reason="another process than this one started it")
    if resident > hidden:
        return Metric(value=resident * _MAXRSS, unit="B")
    return Metric(value=None, unit="B", reason=f"at most the {human(hidden * _MAXRSS, 'B')} of what started it, which hide it")


def _was_suspended() -> bool:
    """Whether Slurm says that this job was suspended, as by gang scheduling or an administrator."""
    done = None
    with suppress(OSError, subprocess.TimeoutExpired, KeyError):  # as in a container without Slurm's programs
        argv = ["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]]
        done = subprocess.run(argv, capture_output=True, timeout=_ANSWER_SECONDS, check=False)  # noqa: S603 -- Slurm's own
    return done is not None and re.search(rb"\bSuspendTime=\d", done.stdout) is not None


def _doubt(marked: _Marked | None) -> str | None:
    if marked is None or marked.end is not None:
        return None
    return f"the line of the mark `{'end' if marked.begin is not None else 'begin'}` was not printed"


def main(folder: Path) -> int:
    """Run the command of an attempt's folder; returns the exit code for the script."""
    end_with_caller()
    try:
        return CommandWorker(folder).run()
    except CaramlError as error:
        note_failure(folder, Failure(status="failed", reason=error.line, rank=0, started_at=now()))
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
