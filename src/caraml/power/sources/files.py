"""Sensors that are files: reading numbers from the kernel's trees, and telling absent from closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caraml.power.model import Channel, Reading
from caraml.power.source import SourceUnavailable, timed

MICRO = 1e-6
"""The kernel counts power and energy in µW and µJ."""

READ_FAILURES = (OSError, ValueError, IndexError)
"""What reading a kernel file can raise: the device is gone, or the text is not a number."""


class FileSensor:
    """A file of the kernel that is kept open and read from its start each time: one system call per reading."""

    def __init__(self, path: Path, scale: float) -> None:
        self.path = path
        self._scale = scale
        self._fd = os.open(path, os.O_RDONLY)

    def number(self) -> float:
        """First number in the file, in the unit that ``scale`` makes of it."""
        return int(os.pread(self._fd, 4096, 0).split()[0]) * self._scale

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class SensorFile:
    """A sensor file, what it measures, and the factor from its unit to J or W."""

    channel: Channel
    path: Path
    scale: float = MICRO


class FileSource:
    """Base of the sources whose sensors are files: they say what they find, the rest is common."""

    name = ""
    min_interval_s = 0.0
    fix: str | None = None
    """Command that opens files which only root may read."""

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._sensors: dict[str, FileSensor] = {}

    def find(self) -> Iterator[SensorFile]:
        """All sensors of this family, readable or not. Raises ``SourceUnavailable`` if there can be none."""
        raise NotImplementedError

    def open(self) -> None:
        """Open every sensor that may be read; fail if there is none."""
        closed: list[Path] = []
        for found in self.find():
            try:
                self._sensors[found.channel.id] = FileSensor(found.path, found.scale)
            except PermissionError:
                closed.append(found.path)
                continue
            self._channels.append(found.channel)
        if not self._channels:
            if closed:
                raise SourceUnavailable(f"{closed[0]} exists, but only root may read it", self.fix, kind="unreadable")
            raise SourceUnavailable(self.absence())

    def absence(self) -> str:
        """The reason if nothing was found."""
        return "no such sensor on this machine"

    def channels(self) -> list[Channel]:
        """What was found and opened."""
        return self._channels

    def read(self) -> list[Reading]:
        """Read every file once."""
        return [timed(name, sensor.number, READ_FAILURES) for name, sensor in self._sensors.items()]

    def close(self) -> None:
        """Close the files."""
        for sensor in self._sensors.values():
            sensor.close()
        self._sensors.clear()


def read_text(path: Path) -> str | None:
    """Content of a small file, or ``None`` if it is not there or not readable."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def read_number(path: Path, scale: float = 1.0) -> float | None:
    """The first number in a small file, or ``None``."""
    text = read_text(path)
    try:
        return float(text.split()[0]) * scale if text else None
    except ValueError:
        return None


def numbered(name: str) -> list[int]:
    """Key that sorts ``card2`` before ``card10``."""
    return [int("".join(c for c in part if c.isdigit()) or 0) for part in name.split(":")]
