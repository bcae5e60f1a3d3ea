"""What reading a file takes: the call runs in a forked child whose memory and computing time are measured, and limited far above."""

from __future__ import annotations

import gc
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caraml.base.errors import CaramlError
from caraml.base.limits import MEMORY, SECONDS

_BACKSTOP = 6 << 30
"""Bytes of address space beyond what the child starts with, so that a mistake does not take the machine."""
_BACKSTOP_SECONDS = 60
SLOW = 3
"""By how much longer than a usual machine a slow one computes, or one whose cores others share."""


@dataclass(frozen=True)
class Taken:
    """How a call ended, and what it took at its peak beyond what the process had."""

    refusal: str | None
    """The error for users; ``None`` if the call returned."""
    fault: str | None
    """Any other error, or the signal that ended the child."""
    memory: int
    seconds: float

    def within_limits(self) -> None:
        """Fail the test if it took more than the limits say."""
        assert self.fault is None, self.fault
        assert self.memory < MEMORY, f"{self.memory / 2**20:.1f} MiB"
        assert self.seconds < SLOW * SECONDS, f"{self.seconds:.1f} s of computing"

    def refused(self, name: str, pattern: str) -> None:
        """Fail the test unless the call was refused within the limits, by one line that names the file and the limit."""
        self.within_limits()
        assert self.refusal is not None, "it was taken"
        line = self.refusal.partition("\n  next step:")[0]
        assert "\n" not in line and name in line and re.search(pattern, line), self.refusal


def taken(act: Callable[[], object]) -> Taken:
    """Run ``act`` in a forked child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        gc.freeze()  # the parent's objects are not looked through, and so not copied
        os.close(reading)
        try:
            found = _measured(act)
        except BaseException as error:  # noqa: BLE001 -- told to the test; this process must not go on with the tests of the other
            found = Taken(None, f"{type(error).__name__}: {error}"[:1000], 0, 0.0)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        content = pipe.read()
    _, status = os.waitpid(child, 0)
    if not content:
        return Taken(None, f"ended by {signal.Signals(os.WTERMSIG(status)).name}", 0, 0.0)
    found = pickle.loads(content)
    assert isinstance(found, Taken)
    return found


def _measured(act: Callable[[], object]) -> Taken:
    _limit()
    before, begin = _status("VmRSS"), _computed()
    refusal = fault = None
    try:
        act()
    except CaramlError as error:
        refusal = str(error)
    except BaseException as error:  # noqa: BLE001 -- told to the test
        fault = f"{type(error).__name__}: {error}"[:1000]
    return Taken(refusal, fault, _status("VmHWM") - before, _computed() - begin)


def _limit() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # the threads of the parent are not in a forked child, and would be waited for
    for what, most in ((resource.RLIMIT_AS, _status("VmSize") + _BACKSTOP), (resource.RLIMIT_CPU, int(_computed()) + _BACKSTOP_SECONDS)):
        _, hard = resource.getrlimit(what)  # a caller's own limit may be lower, and only root may raise it
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _computed() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
