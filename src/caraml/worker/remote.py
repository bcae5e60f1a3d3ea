"""Sensors of the nodes on which a command point runs besides the one where it is started: a process reads them on each of these.

The worker on the first node starts them with ``srun`` and writes one instruction a line, which all of them get:
``idle SECONDS``, ``edge NAME`` (the window opens or closes), ``mark NAME`` (some other instant), and ``summary WINDOW SPAN ...`` with
``NAME=FROM,TO`` of each. Every answer begins with the number of its instruction. Each node measures by its own clock, so clocks are not
compared: how far apart the edges of the nodes are is known from how long the answers took, and the bound of the energy has what that may
be worth. A node that is asked for an answer and does not give it in time counts no more: what it is told would come too late.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from caraml.base.processes import node_key
from caraml.engine.instruments import Instruments, NodeSummary
from caraml.power.merge import displaced

START_S = 60.0
"""The processes are waited for this long, before the program starts [s]."""
ANSWER_S = 10.0
"""An answer is waited for this long, beyond what its instruction takes [s]."""
_PIECE = 800
"""Characters of a line: srun hands on longer ones in parts, and mixes those of several nodes."""
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_HAS_ENDED = re.compile(r": tasks? \d[^:]*: ")
"""What srun says of a process that ended in another way than it should: ``srun: error: HOST: task 0: Killed``."""
_LAST_WORDS = 200
"""Characters of what is quoted of a process that did not answer."""
_SILENT = "what reads its sensors did not answer"


@dataclass
class _Node:
    """What the process of one node has said."""

    host: str = ""
    answered: dict[int, float] = field(default_factory=dict)
    """When each instruction was answered, on this node's clock."""
    summary: str = ""
    late: bool = False
    """Whether an answer that was waited for did not come in time."""
    words: str = ""
    """The last that it said on its way to an end."""


@dataclass
class _Instant:
    """One that all nodes note."""

    number: int
    """Of the instruction."""
    sent: float
    here: float
    """When this node noted it."""

    def apart(self, node: _Node) -> float:
        """How far from this node's the instant of another may lie [s]: it came after it was told to, and before it answered."""
        return max(node.answered[self.number] - self.here, self.here - self.sent)


class OtherNodes:
    """The sensors of the job's other nodes. Whatever goes wrong with them costs their energy, and never the run."""

    def __init__(self, count: int) -> None:
        """Start a process on each of ``count`` nodes and wait until they are ready, but not for ever. With none there is nothing to do."""
        self._count, self._hosts = count, _other_hosts() if count else []
        self.trouble: str | None = None
        """Why there are none, if so."""
        self._nodes = {str(task): _Node() for task in range(count)}
        self._instants: dict[str, _Instant] = {}
        self._number = 0
        self._changed = threading.Condition()
        self._steps: subprocess.Popen[str] | None = None
        self._ended = False
        self._words: dict[str, str] = {}
        """The last that srun said of each host, and by the empty name of none."""
        if not count:
            return
        if len(self._hosts) != count:
            self.trouble = "outside of a Slurm job of all nodes nobody reads its sensors"
            return
        options = ["--overlap", "--label", "--quiet", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
        where = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(self._hosts)}"]
        argv = ["srun", *options, *where, sys.executable, "-P", "-m", "caraml.worker.remote"]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)  # the program's output is nobody else's
        try:
            self._steps = subprocess.Popen(argv, **pipes, text=True, errors="replace")  # type: ignore[call-overload] # noqa: S603 -- Slurm's own program, with a module of ours
        except OSError as error:
            self.trouble = f"srun, which would start what reads its sensors: {error.strerror}"
            return
        for listener in (self._listen, self._listen_to_complaints):
            threading.Thread(target=listener, daemon=True).start()
        self._wait(0, START_S)

    def idle(self, seconds: float) -> None:
        """Begin to measure the idle power of every node; returns at once."""
        self._say("idle", f"{seconds}")

    def note(self, word: Literal["edge", "mark"], name: str) -> None:
        """Open or close the window on every node (``edge``), or note an instant there (``mark``); returns at once."""
        self._say(word, name)
        now = time.monotonic()
        self._instants[name] = _Instant(self._number, now, now)

    def reached(self, name: str, at: float) -> None:
        """When this node came to an instant that the others were told of."""
        self._instants[name].here = at

    def wait(self, seconds: float = 0.0) -> None:
        """Until every node has done what it was told last, which takes ``seconds``. One that has not by then counts no more."""
        self._wait(self._number, seconds + ANSWER_S)

    def apart(self, name: str) -> float | None:
        """How far from this node's an instant of the others may lie [s]; ``None`` where one did not say."""
        instant, nodes = self._instants[name], self._nodes.values()
        known = bool(nodes) and all(instant.number in node.answered and not node.late for node in nodes)
        return max(instant.apart(node) for node in nodes) if known else None

    def summaries(self, window: tuple[str, str], spans: Mapping[str, tuple[str, str]]) -> dict[str, list[NodeSummary]]:
        """What each node's sensors say, by node (host and boot id); of a node that said nothing, why its energy is not known."""
        ends = {"window": window, **spans}
        self._say("summary", *(f"{name}={','.join(span)}" for name, span in ends.items()))
        self.wait()
        if self.trouble is not None:
            return {f"node {number + 2} of {self._count + 1}": [NodeSummary.unread(self.trouble)] for number in range(self._count)}
        said = {node.host: node for node in self._nodes.values() if node.host and not node.late}
        found: dict[str, list[NodeSummary]] = {}
        for host in self._hosts:
            key, summary = self._summary(said[host], ends) if host in said else (host, NodeSummary.unread(self._why_silent(host)))
            found.setdefault(key, []).append(summary)
        return found

    def _summary(self, node: _Node, ends: Mapping[str, tuple[str, str]]) -> tuple[str, NodeSummary]:
        """A node's key and what it measured, with a bound that allows for edges beside this node's."""
        try:
            key, data = json.loads(node.summary)
            summary = NodeSummary.from_data(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return node.host, NodeSummary.unread(f"what reads its sensors is not understood: {type(error).__name__}: {error}"[:_LAST_WORDS])
        shifts = {name: sum(self._instants[end].apart(node) for end in span) for name, span in ends.items()}
        further = {name: displaced(span, shifts[name]) for name, span in summary.spans.items()}
        return key, replace(summary, energy=displaced(summary.energy, shifts["window"]), spans=further)

    def _why_silent(self, host: str) -> str:
        own = next((node.words for node in self._nodes.values() if node.host == host), "")
        words = own or self._words.get(host) or (self._words.get("", "") if self._ended else "")
        return f"{_SILENT}: {words}" if words else _SILENT

    def close(self) -> None:
        """End the processes: they end where nothing more can be said to them. Those that do not are ended by srun."""
        if self._steps is None or self._steps.stdin is None:
            return
        with contextlib.suppress(OSError):
            self._steps.stdin.close()
        patience = 1.0 if any(node.late for node in self._nodes.values()) else ANSWER_S
        for end in (self._steps.terminate, self._steps.kill):
            try:
                self._steps.wait(patience)
            except subprocess.TimeoutExpired:
                end()
                patience = ANSWER_S
        self._steps.wait()

    def _say(self, word: str, *rest: str) -> None:
        self._number += 1
        if self._steps is None or self._steps.stdin is None:
            return
        with contextlib.suppress(OSError):  # they have ended; no answer says so
            self._steps.stdin.write(" ".join((word, *rest)) + "\n")
            self._steps.stdin.flush()

    def _wait(self, number: int, patience: float) -> None:
        """Until every node that counts has answered an instruction, or nothing more can come."""
        if self._steps is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or all(number in node.answered or node.late for node in self._nodes.values()), patience
            )
            for node in self._nodes.values():
                node.late = node.late or number not in node.answered

    def _listen(self) -> None:
        assert self._steps is not None and self._steps.stdout is not None
        for line in self._steps.stdout:
            at = time.monotonic()
            task, _, words = line.partition(": ")
            number, _, text = words.rstrip("\n").partition(" ")
            node = self._nodes.get(task.strip())
            if node is None or not number.isdecimal():
                continue  # words of Slurm's, or of a library
            with self._changed:
                if number == "0":
                    node.host = text
                if text.startswith("+"):
                    node.summary += text[1:]
                else:
                    node.answered[int(number)] = at
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _listen_to_complaints(self) -> None:
        """Keep the last line of every process, and of what srun says of every host."""
        assert self._steps is not None and self._steps.stderr is not None
        for line in self._steps.stderr:
            task, _, words = line.strip().partition(": ")
            if task in self._nodes:
                self._nodes[task].words = words[:_LAST_WORDS]
            else:
                about = next((host for host in self._hosts if host in re.findall(_HOST, line)), "")
                self._words[about] = line.strip()[:_LAST_WORDS]
                if about and _HAS_ENDED.search(line):
                    self._lose(about)

    def _lose(self, host: str) -> None:
        """Nobody waits for a process that has ended."""
        with self._changed:
            for node in self._nodes.values():
                node.late = node.late or node.host == host
            self._changed.notify_all()


def _other_hosts() -> list[str]:
    """The hosts of this Slurm job, by Slurm's names, without the one where this runs; empty outside of one."""
    listed, own = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURMD_NODENAME")
    if not listed or not own:
        return []
    try:
        told = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True).stdout  # noqa: S603, S607 -- Slurm's own program, of the job that runs this
    except (OSError, subprocess.CalledProcessError):
        return []
    return [host for host in told.split() if host != own and _HOST.fullmatch(host)]


def _answers(instruments: Instruments, lines: Iterator[str]) -> Iterator[str]:
    instants: dict[str, float] = {}
    for number, line in enumerate(lines, 1):
        word, *rest = line.split()
        if word == "idle":
            instruments.measure_idle(float(rest[0]))
        elif word == "edge":
            instants[rest[0]] = instruments.edge()
        elif word == "mark":
            instants[rest[0]] = time.monotonic()
        elif word == "summary":
            named = {name: ends.split(",") for name, _, ends in (each.partition("=") for each in rest)}
            spans = {name: (instants[begin], instants[end]) for name, (begin, end) in named.items()}
            begin, end = spans.pop("window")
            # What the program does on this node is no child of this process: nobody can tell whose the CPU time is.
            summary = replace(instruments.summary(begin, end, spans), other_cpu_share=None)
            text = json.dumps([node_key(), summary.to_data()])
            yield from (f"{number} +{text[start : start + _PIECE]}" for start in range(0, len(text), _PIECE))
        yield f"{number} done"


def main() -> None:
    """Read the sensors of this node as the lines of standard input say, until they end."""
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):  # warnings that are meant for the program
        signal.signal(number, signal.SIG_IGN)
    instruments = Instruments()
    print(f"0 {os.environ.get('SLURMD_NODENAME') or socket.gethostname()}", flush=True)
    for answer in _answers(instruments, iter(sys.stdin.readline, "")):
        print(answer, flush=True)
    instruments.meter.stop()


if __name__ == "__main__":
    main()
