"""Waits of tests for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str = "", seconds: float = 300.0) -> T:
    """The first value of ``condition`` that is true; fails with ``what`` was waited for after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return value
