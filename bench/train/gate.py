"""Holds a program after any of its steps, so that programs which know nothing of each other take turns.

Torch calls a hook after every ``optimizer.step()``, whoever trains. From one call to the next lies one whole step of the program, logging
and fetching of its next batch included, without a line of it being changed. A program without an optimizer, or
whose updates a graph replays, calls the gate itself. A turn ends when the accelerator, if there is one, has done all its work.
"""

from __future__ import annotations

import json
import os
import resource
import time
from typing import Any, TextIO

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PIPES = "CARAML_BENCH_PIPES"
"""Environment variable: the file descriptors that commands come from and replies go to."""
FIRST_STEPS = 3
"""Steps before a program counts as started: compilation, optimizer state, allocator."""


class Gate:
    """Called after each optimizer step. A command is a number of steps; the reply is what they took."""

    def __init__(self, commands: TextIO, replies: TextIO) -> None:
        self._commands, self._replies = commands, replies
        self._left = FIRST_STEPS
        self._since = self._now()

    def __call__(self, *_: Any) -> None:
        """One step more is done; when it was the last one asked for, reply and wait."""
        self._left -= 1
        if self._left:
            return
        wall, cpu = (now - then for now, then in zip(self._now(), self._since, strict=True))
        device = torch.accelerator.current_accelerator(check_available=True)
        memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if device is None else torch.accelerator.max_memory_allocated()
        told = {"wall": wall, "cpu": cpu, "memory": memory}
        print(json.dumps(told), file=self._replies, flush=True)
        command = self._commands.readline()
        if not command:  # whoever asked has gone
            os._exit(0)
        self._left = int(command)
        self._since = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds by the clock, and of CPU over all threads of this process, when everything launched so far has been done."""
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter(), time.process_time()


def install(*, by_hook: bool = True) -> Gate:
    """Gate this process by the pipes that its parent gave it; without the hook, the program calls the gate itself after each step."""
    commands, replies = (int(number) for number in os.environ[PIPES].split(","))
    gate = Gate(os.fdopen(commands, "r"), os.fdopen(replies, "w"))
    if by_hook:
        register_optimizer_step_post_hook(gate)
    return gate
