"""No process of a point outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends.

    torchrun puts every rank into a session of its own, where a signal to the point's process group does not reach it: a torchrun that is
    killed would leave its ranks behind, waiting for each other on the device. Only Linux can do this; elsewhere nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended while we asked
        os.kill(os.getpid(), signal.SIGKILL)
