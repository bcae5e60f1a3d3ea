"""Programs that take turns in random order, and what can be said of their ratios."""

from __future__ import annotations

import json
import math
import os
import random
import re
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

BOOTSTRAPS = 2000
SILENT = 30.0
"""Seconds, beside those of a turn, after which a program is given up where there is an end to all turns."""
LATE = 5.0
"""Of these, seconds that are left of it at the end."""


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

    def started(self, seconds: float = math.inf) -> str | None:
        """Wait for its first steps, for at most so long. Returns why it does not train, if it does not."""
        reply = self._reply(seconds)
        return "not ready in time" if reply is None else None if reply else self._last_lines()

    def turn(self, steps: int, limit: float = math.inf) -> Turn:
        """Let it do ``steps`` steps. One that ends, or is not ready within ``limit`` seconds, is a ``RuntimeError``."""
        try:
            print(steps, file=self._commands, flush=True)
            reply = self._reply(limit)
        except BrokenPipeError:
            reply = ""
        if reply is None:
            self.kill()
            raise RuntimeError(f"{self.name} had not done {steps} steps after {limit:.0f} s")
        if not reply:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait()} (-9: killed, as for memory): {self._last_lines()}")
        told = json.loads(reply)
        return Turn(told["wall"] / steps, told["cpu"] / steps, told["memory"])

    def _reply(self, seconds: float) -> str | None:
        """Its next line; empty if it has ended, ``None`` if nothing comes in time."""
        if seconds < math.inf and not select.select([self._replies], [], [], max(seconds, 0.0))[0]:
            return None
        return self._replies.readline()

    def dismiss(self) -> None:
        """Tell it that nobody asks any more: it ends by itself then, several at the same time."""
        with suppress(BrokenPipeError):  # it may have ended by itself, with something still to be said to it
            self._commands.close()

    def kill(self) -> None:
        """End it at once: it does not listen before its first steps are done."""
        self._process.kill()

    def end(self) -> None:
        """Wait until it has ended, as nobody asks it any more; what does not is killed."""
        self.dismiss()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_lines(self) -> str:
        """The last error, which torch's compiler says more after, or else the last line."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception)\b", line)]
        return (errors or lines or ["it said nothing"])[-1][:300]


def take_turns(
    programs: Sequence[Program],
    rounds: int,
    seconds: float,
    *,
    until: float = math.inf,
    failed: list[str] | None = None,
    after_round: Callable[[dict[str, list[Turn]]], None] = lambda turns: None,
) -> dict[str, list[Turn]]:
    """Every program once in each round, in an order drawn anew, for about ``seconds`` each; the first round is not kept.

    Fewer rounds where the next one would not end before ``until`` (of ``time.monotonic``). A program that ends is left out, and ``failed``
    says why; without that list it is an error. ``after_round`` gets the turns of all rounds so far.
    """
    running, turns = list(programs), {program.name: list[Turn]() for program in programs}

    def one(program: Program, steps: int) -> Turn | None:
        limit = math.inf if until == math.inf else min(SILENT, max(until - time.monotonic(), 0.0) + LATE) + seconds
        try:
            return program.turn(steps, limit) if limit < math.inf else program.turn(steps)
        except RuntimeError as error:
            if failed is None:
                raise
            failed.append(str(error))
            running.remove(program)
            del turns[program.name]
            return None

    first = [turn for program in programs if (turn := one(program, 1))]
    steps = max(1, round(seconds / max((turn.wall for turn in first), default=seconds)))
    lasted = 0.0
    for number in range(rounds + 1):
        begin = time.monotonic()
        if not running or begin + lasted > until:
            break
        for program in random.sample(running, len(running)):
            turn = one(program, steps)
            if number and turn is not None:
                turns[program.name].append(turn)
        lasted = time.monotonic() - begin
        if number:
            after_round(turns)
    return {name: own for name, own in turns.items() if own}


def median(values: Sequence[float], rng: random.Random | None = None) -> Estimate:
    """The median of ``values`` with the 95 % interval of medians of samples drawn from them with replacement."""
    rng = rng or random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(BOOTSTRAPS))
    return Estimate(statistics.median(values), drawn[int(0.025 * BOOTSTRAPS)], drawn[int(0.975 * BOOTSTRAPS)])


def ratio(over: Sequence[float], under: Sequence[float]) -> Estimate:
    """Median over rounds of ``over / under``, both taken in the same round, so that what disturbs a round disturbs both."""
    return median([a / b for a, b in zip(over, under, strict=True)])
