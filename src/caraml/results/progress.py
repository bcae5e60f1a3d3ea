"""What a worker says while it works: one JSON line per look, read by whoever shows it. The same file serves local and batch runs."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from caraml.base.files import open_to_append
from caraml.base.limits import LINE, opened
from caraml.errors import InputError

PROGRESS = "progress.jsonl"


class ProgressLine(BaseModel):
    """State of a point. Times in seconds, rate in items/s over all devices."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    t: float
    phase: str
    steps: int = 0
    rate: float | None = None
    relative: float | None = None
    """Relative half-width of the rate's interval so far."""
    item: str = "item"
    watts: float | None = None
    remaining: float | None = None


class ProgressWriter:
    """Appends lines; rank 0 only."""

    def __init__(self, folder: Path, origin: float) -> None:
        self._file = open_to_append(folder / PROGRESS)
        self._origin = origin

    def write(self, phase: str, **values: object) -> None:
        """Append one line, visible at once."""
        line = ProgressLine.model_validate({"t": time.monotonic() - self._origin, "phase": phase, **values})
        self._file.write(f"{line.model_dump_json(exclude_none=True)}\n".encode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProgressReader:
    """Reads what has been appended since the last time."""

    def __init__(self, folder: Path) -> None:
        self._path, self._offset = folder / PROGRESS, 0

    def latest(self) -> ProgressLine | None:
        """The newest whole line that was not read before, or ``None``."""
        try:
            with opened(self._path) as (file, size):
                self._offset = max(self._offset, size - LINE)  # of a file that grew by more, the end is enough
                file.seek(self._offset)
                fresh = file.read(LINE)
        except (FileNotFoundError, InputError):
            return None
        whole, _, _ = fresh.rpartition(b"\n")
        if not whole:
            return None
        self._offset += len(whole) + 1
        try:
            return ProgressLine.model_validate_json(whole.rpartition(b"\n")[2])
        except ValidationError:  # a line from a full disk; the next one will do
            return None
