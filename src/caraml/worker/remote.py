"""Sensors of the nodes on which a command point runs besides the one where it is started: a process reads them on each of these.

The worker on the first node starts them with ``srun`` and writes one instruction a line, which all of them get:
``idle SECONDS``, ``edge NAME`` (the window opens or closes), ``mark NAME`` (some other instant), and ``summary WINDOW SPAN ...`` with
``NAME=FROM,TO`` of each. Every answer begins with the number of its instruction. Each node measures by its own clock, so clocks are not
compared: how far apart the edges of the nodes are is known from how long the answers took.
"""

from __future__ import annotations

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

from caraml.engine.instruments import Instruments, NodeSummary
from caraml.power.clock import node_key
from caraml.power.model import WindowEnergy

START_S = 60.0
"""The processes are waited for this long, before the program starts [s]."""
ANSWER_S = 10.0
"""An answer is waited for this long, beyond what its instruction takes [s]."""
_PIECE = 800
"""Characters of a line: srun hands on longer ones in parts, and mixes those of several nodes."""
_HOST = re.compile(r"[A-Za-z0-9._-]+")


@dataclass
class _Node:
    """What the process of one node has said."""

    host: str = ""
    answered: dict[int, float] = field(default_factory=dict)
    """When each instruction was answered, on this node's clock."""
    summary: dict[int, str] = field(default_factory=dict)


class OtherNodes:
    """The sensors of the job's other nodes. Whatever goes wrong with them costs their energy, and never the run."""

    def __init__(self, count: int) -> None:
        """Start a process on each of ``count`` nodes and wait until they are ready, but not for ever."""
        self._count, self._hosts = count, _other_hosts()
        self.trouble: str | None = None
        """Why there are none, if so."""
        self._nodes: dict[str, _Node] = {}
        self._sent: dict[str, tuple[int, float]] = {}
        self._number = 0
        self._changed = threading.Condition()
        self._steps: subprocess.Popen[str] | None = None
        self._ended = False
        if len(self._hosts) != count:
            self.trouble = "outside of a Slurm job of all nodes nobody reads its sensors"
            return
        options = ["--overlap", "--label", "--quiet", "--mpi=none", "--cpu-bind=none", "--export=ALL", "--kill-on-bad-exit=0", "--wait=0"]
        where = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(self._hosts)}"]
        argv = ["srun", *options, *where, sys.executable, "-P", "-m", "caraml.worker.remote"]
        try:
            self._steps = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, errors="replace")  # noqa: S603 -- Slurm's own program, with a module of ours
        except OSError as error:
            self.trouble = f"srun, which would start what reads its sensors: {error.strerror}"
            return
        threading.Thread(target=self._listen, daemon=True).start()
        self._wait(0, START_S)

    def idle(self, seconds: float) -> None:
        """Begin to measure the idle power of every node; returns at once."""
        self._say("idle", f"{seconds}")

    def edge(self, name: str) -> None:
        """Open or close the window on every node; returns at once."""
        self._say("edge", name)

    def mark(self, name: str) -> None:
        """Note an instant on every node; returns at once."""
        self._say("mark", name)

    def wait(self, seconds: float = 0.0) -> None:
        """Until every node has done what it was told last, which takes ``seconds``."""
        self._wait(self._number, seconds + ANSWER_S)

    def apart(self, name: str) -> float | None:
        """How long after this node the last of the others came to an instant, at most [s]."""
        number, sent = self._sent.get(name, (-1, 0.0))
        answers = [node.answered.get(number) for node in self._nodes.values()]
        known = [answer - sent for answer in answers if answer is not None]
        return max(known) if known and len(known) == self._count else None

    def summaries(self, window: tuple[str, str], spans: Mapping[str, tuple[str, str]]) -> dict[str, list[NodeSummary]]:
        """What each node's sensors say, by node (host and boot id); of a node that said nothing, why its energy is not known."""
        words = [f"{name}={','.join(span)}" for name, span in {"window": window, **spans}.items()]
        self._say("summary", *words)
        self.wait()
        heard = [node for node in self._nodes.values() if self._number in node.answered]
        found: dict[str, list[NodeSummary]] = {}
        for node in heard:
            key, summary = json.loads(node.summary[self._number])
            found.setdefault(key, []).append(NodeSummary.from_data(summary))
        if self.trouble is None:
            why = dict.fromkeys(set(self._hosts) - {node.host for node in heard}, "what reads its sensors did not answer")
        else:
            why = {f"node {number + 2} of {self._count + 1}": self.trouble for number in range(self._count)}
        nothing = {name: NodeSummary(WindowEnergy("measure", 0.0, 1.0, flags=["no_source"], reason=reason)) for name, reason in why.items()}
        return found | {name: [summary] for name, summary in nothing.items()}

    def close(self) -> None:
        """End the processes: they end where nothing more can be said to them."""
        if self._steps is None or self._steps.stdin is None:
            return
        try:
            self._steps.stdin.close()
            self._steps.wait(ANSWER_S)
        except (OSError, subprocess.TimeoutExpired):
            self._steps.kill()
            self._steps.wait()

    def _say(self, word: str, *rest: str) -> None:
        self._number += 1
        self._sent[rest[0]] = (self._number, time.monotonic())
        if self._steps is None or self._steps.stdin is None:
            return
        try:
            self._steps.stdin.write(" ".join((word, *rest)) + "\n")
            self._steps.stdin.flush()
        except OSError:  # they have ended; no answer says so
            pass

    def _wait(self, number: int, patience: float) -> None:
        """Until every node has answered an instruction, or nothing more can come."""
        if self._steps is None:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or sum(number in node.answered for node in self._nodes.values()) == self._count, patience
            )

    def _listen(self) -> None:
        assert self._steps is not None and self._steps.stdout is not None
        for line in self._steps.stdout:
            at = time.monotonic()
            task, _, words = line.partition(": ")
            number, _, text = words.rstrip("\n").partition(" ")
            if not number.isdecimal():
                continue  # words of Slurm's, or of a library
            with self._changed:
                self._heard(self._nodes.setdefault(task.strip(), _Node()), int(number), text, at)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @staticmethod
    def _heard(node: _Node, number: int, text: str, at: float) -> None:
        if number == 0:
            node.host = text
        if text.startswith("+"):
            node.summary[number] = node.summary.get(number, "") + text[1:]
        else:
            node.answered[number] = at


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
    """Do as told, a line each. The name of an instant that did not come leaves a summary out, which then is unknown."""
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
            spans = {name: _span(instants, ends) for name, _, ends in (each.partition("=") for each in rest)}
            begin, end = spans.pop("window")
            # What the program does on this node is no child of this process: nobody can tell whose the CPU time is.
            summary = replace(instruments.summary(begin, end, spans), other_cpu_share=None)
            text = json.dumps([node_key(), summary.to_data()])
            yield from (f"{number} +{text[start : start + _PIECE]}" for start in range(0, len(text), _PIECE))
        yield f"{number} done"


def _span(instants: Mapping[str, float], ends: str) -> tuple[float, float]:
    begin, _, end = ends.partition(",")
    return instants[begin], instants[end]


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
