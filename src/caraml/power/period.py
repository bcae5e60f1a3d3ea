"""How often a sensor really refreshes, seen by asking it much faster than that."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from itertools import pairwise

from caraml.power.model import Reading
from caraml.power.source import Source, SourceUnavailable

POLL_S = 0.002
"""Pause between questions [s]."""


class PeriodWatch:
    """Collects the instants at which channels show a new value."""

    def __init__(self, channels: Iterable[str]) -> None:
        self._last: dict[str, float] = {}
        self._changes: dict[str, list[float]] = {name: [] for name in channels}

    def feed(self, readings: Iterable[Reading]) -> None:
        """Look at new readings."""
        for reading in readings:
            changes = self._changes.get(reading.channel)
            if changes is None or reading.value is None:
                continue
            if reading.channel in self._last and reading.value != self._last[reading.channel]:
                changes.append(reading.t_after)
            self._last[reading.channel] = reading.value

    def seen(self, intervals: int) -> bool:
        """Has every channel shown this many intervals between changes?"""
        return all(len(changes) > intervals for changes in self._changes.values())

    def longest(self) -> dict[str, float]:
        """Longest time between two changes of each channel that changed at least three times [s]."""
        return {name: max(b - a for a, b in pairwise(changes)) for name, changes in self._changes.items() if len(changes) >= 3}


def observe(source: Source, seconds: float, timeout: float = 5.0) -> tuple[dict[str, float], SourceUnavailable | None]:
    """Open a source, ask it as fast as it makes sense for ``seconds``, close it.

    Returns the longest time between changes of every channel that changed often enough [s], and why the source could
    not be opened. A sensor that does not answer within ``timeout`` [s] is given up.
    """
    result: dict[str, float] = {}
    problem: list[SourceUnavailable] = []

    def ask() -> None:
        try:
            source.open()
            watch = PeriodWatch(c.id for c in source.channels())
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                watch.feed(source.read())
                time.sleep(max(POLL_S, source.min_interval_s))
            result.update(watch.longest())
        except SourceUnavailable as error:
            problem.append(error)
        except Exception as error:  # noqa: BLE001 - thread boundary: a vendor library may raise anything; it is reported
            problem.append(SourceUnavailable(f"{type(error).__name__}: {error}"))
        finally:
            source.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + timeout)
    if thread.is_alive():
        return {}, SourceUnavailable(f"did not answer within {seconds + timeout:g} s")
    return result, problem[0] if problem else None
