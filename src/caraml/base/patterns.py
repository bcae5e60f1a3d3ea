"""Time for what may take for ever: regular expressions of other people's suites, which can need centuries for forty letters."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from caraml.base.limits import SECONDS


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raise ``TimeoutError`` once the process has computed for so long in the block: Python's patterns look for signals as they search.

    Signals reach the main thread only: in any other the block has all the time it wants.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _over)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _over(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise TimeoutError
