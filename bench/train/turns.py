"""Programs that take turns in random order, and what can be said of their ratios."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Turn:
    """Mean seconds of a step in one turn: by the clock, and of CPU; and the highest resident set so far [B]."""

    wall: float
    cpu: float
    memory: int = 0


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


class Program:
    """A training program in a process of its own, which stands still until it is told to do some steps."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, pipes: str) -> None:
        self.name, self._log = name, log
        (read_command, write_command), (read_reply, write_reply) = os.pipe(), os.pipe()
        own = {**os.environ, **environment, pipes: f"{read_command},{write_reply}"}
        with log.open("w", encoding="utf-8") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command], env=own, pass_fds=(read_command, write_reply), stdout=output, stderr=output
            )
        os.close(read_command)
        os.close(write_reply)
        self._commands: TextIO = os.fdopen(write_command, "w")
        self._replies: TextIO = os.fdopen(read_reply, "r")

    def started(self) -> str | None:
        """Wait for its first steps. Returns why it does not train, if it does not."""
        return None if self._replies.readline() else self._last_lines()

    def turn(self, steps: int) -> Turn:
        """Let it do ``steps`` steps."""
        try:
            print(steps, file=self._commands, flush=True)
            reply = self._replies.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()} (-9: killed, as for memory): {self._last_lines()}")
        told = json.loads(reply)
        return Turn(told["wall"] / steps, told["cpu"] / steps, told["memory"])

    def end(self) -> None:
        """It ends by itself when nobody asks it any more; what does not is killed."""
        with suppress(BrokenPipeError):  # it may have ended by itself, with something still to be said to it
            self._commands.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_lines(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def take_turns(programs: Sequence[Program], rounds: int, seconds: float) -> dict[str, list[Turn]]:
    """Every program once in each round, in an order drawn anew, for about ``seconds`` each; the first round is not kept."""
    longest = max(program.turn(1).wall for program in programs)
    steps = max(1, round(seconds / longest))
    turns: dict[str, list[Turn]] = {program.name: [] for program in programs}
    for number in range(rounds + 1):
        for program in random.sample(programs, len(programs)):
            turn = program.turn(steps)
            if number:
                turns[program.name].append(turn)
    return turns


def median(values: Sequence[float], rng: random.Random | None = None) -> Estimate:
    """The median of ``values`` with the 95 % interval of medians of samples drawn from them with replacement."""
    rng = rng or random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return Estimate(statistics.median(values), drawn[int(0.025 * BOOTSTRAPS)], drawn[int(0.975 * BOOTSTRAPS)])


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Median over rounds of ``over / under``, both taken in the same round, so that what disturbs a round disturbs both."""
    return median([a / b for a, b in zip(over, under, strict=True)])
