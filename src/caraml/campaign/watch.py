"""Whoever wants to see a campaign work."""

from __future__ import annotations

from typing import Protocol

from caraml.results.progress import ProgressLine
from caraml.results.record import Record
from caraml.suite.model import Point


class Watcher(Protocol):
    """Is told what happens, in the campaign's own thread."""

    def started(self, point: Point, index: int, total: int) -> None:
        """A point is being launched."""
        ...

    def progress(self, point: Point, line: ProgressLine) -> None:
        """A point said something."""
        ...

    def finished(self, record: Record, reused: bool) -> None:
        """A point has its record; ``reused`` when it had one before."""
        ...
