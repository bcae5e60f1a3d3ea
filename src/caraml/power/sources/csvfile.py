"""A meter that someone else reads: a CSV file that grows while the run goes on (a PDU, a wall-plug meter, a logger).

The first line names the columns. One is the time, ``time`` or ``timestamp``: seconds since 1970 or ISO 8601 with an
offset. One is the value, with its unit in the name: ``power_w``, ``power_kw``, ``energy_j``, ``energy_wh``,
``energy_kwh``. Two more are allowed: ``channel``, if there are several outlets, and ``apparent_va``, apparent power beside
the value. Times are the writer's: its clock must agree with this node's. A row that is from later than now shows that it does not, and
counts as none; a clock that is behind cannot be told from a writer that is slow.
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
import time
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from caraml.base.errors import InputError
from caraml.base.limits import LINE, LOG_END, opened
from caraml.power.counter import UNKNOWN_LAG_S
from caraml.power.model import Channel, Kind, Reading
from caraml.power.source import SensorGroup, SourceUnavailable, with_apparent

TIMES = ("time", "timestamp")
VALUES: dict[str, tuple[Kind, float]] = {
    "power_w": ("power_mean", 1.0),
    "power_kw": ("power_mean", 1e3),
    "energy_j": ("energy", 1.0),
    "energy_wh": ("energy", 3.6e3),
    "energy_kwh": ("energy", 3.6e6),
}
DEFAULT_PERIOD_S = 1.0
APPARENT = "apparent_va"
AHEAD_S = 1.0
"""By how much a row may seem to be from later than now [s]: some writers round to whole seconds."""
_BROKEN = (ValueError, IndexError, OverflowError, csv.Error)
"""What rows raise that are not text, have too few cells, or hold no number."""


class CsvSource(SensorGroup):
    """The rows of a CSV file as readings, as they come: ``csv:<path of the file>``."""

    name = "csv"
    min_interval_s = 0.2

    def __init__(self, argument: str | Path, devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        super().__init__(argument, devices, automatic)
        if not self.argument:
            raise InputError("the source csv needs a file", "use csv:/path/to/meter.csv")
        self._path = Path(argument)
        self._position = 0
        self._rest = b""
        self._meter = ""
        self._header: list[str] = []
        self._channels: dict[str, Channel] = {}
        self._newest: dict[str, float] = {}
        self._waiting: list[Reading] = []

    @property
    def identity(self) -> str:
        """By which the file is known under every path that leads to it."""
        try:
            found = self._path.stat()
        except OSError:
            return str(self._path.resolve())
        return f"{found.st_dev} {found.st_ino}"

    def open(self) -> None:
        """Read the header and what is already there; the time between rows becomes the update period."""
        try:
            readings = self._new_rows()
        except OSError as error:
            raise SourceUnavailable(f"{self._path} cannot be read: {error.strerror}", kind="unreadable") from error
        except _BROKEN as error:
            raise InputError(f"{self._path}: found a row that is none: {error}; expected numbers below the header's columns") from error
        if not self._header:
            raise SourceUnavailable(f"{self._path} is empty", "start the logger first: the header must be there")
        if "channel" in self._header and not self._channels:
            raise SourceUnavailable(f"{self._path} names no outlet yet", "start the logger first: a row of every outlet must be there")
        if not self._channels:
            self._channel("")
        if ahead := next((reading.error for reading in reversed(readings) if reading.value is None), None):
            raise SourceUnavailable(f"{self._path}: {ahead}", "have both clocks set by the same servers (NTP)", kind="unreadable")
        self._waiting = readings

    def _columns(self) -> tuple[int, int, int | None]:
        """Positions of time, value and channel."""
        instants = [i for i, name in enumerate(self._header) if name in TIMES]
        values = [i for i, name in enumerate(self._header) if name in VALUES]
        if len(instants) != 1 or len(values) != 1:
            raise InputError(
                f"{self._path}: the header is {', '.join(self._header) or 'empty'}; expected one of {', '.join(TIMES)} "
                f"and one of {', '.join(VALUES)}"
            )
        return instants[0], values[0], self._header.index("channel") if "channel" in self._header else None

    def _channel(self, outlet: str, period: float = DEFAULT_PERIOD_S, written: Sequence[str] = ()) -> Channel:
        """The channel of an outlet, made when it is first seen; ``written`` are its values so far."""
        if outlet not in self._channels:
            value = next(name for name in self._header if name in VALUES)
            kind, scale = VALUES[value]
            step = _step(written, scale) if kind != "energy" else scale if scale == 1.0 else 0.0
            name = f"csv:{self.argument}" + (f":{outlet}" if outlet else "")  # the whole path: meters elsewhere may have the same end of it
            self._channels[outlet] = Channel(
                id=name,
                source=self.name,
                kind=kind,
                boundary="node_ac",
                label=f"{self._path.name} {outlet}".strip(),
                domain=name,
                hardware="node",
                resolution=step,
                update_period_s=period if kind == "energy" else 0.0,
                period_guessed=kind != "energy",
                lag_s=UNKNOWN_LAG_S,
                mean_window_s=period if kind != "energy" else 0.0,
                spacing_s=period,
                meter=f"{self._meter}:{outlet}",
            )
        return self._channels[outlet]

    def _new_text(self) -> str:
        """The complete lines below the header that were added, at most so many bytes of them at a time; of what is there in the beginning
        the end."""
        with opened(self._path) as (file, size):
            first = b"" if self._header else file.readline(LINE)
            if first.endswith(b"\n"):
                self._header = [cell.strip().lower() for cell in next(csv.reader([first.decode()]))]
                self._columns()
                self._position = max(len(first), size - LOG_END)
                self._meter = _known_by(file)
            elif not self._header:
                return ""
            file.seek(self._position)
            content = file.read(LOG_END)
        skipped = bool(first) and self._position > len(first)
        self._position += len(content)
        if skipped:  # it begins in the middle of a line
            content = content.partition(b"\n")[2]
        lines, _, self._rest = (self._rest + content).rpartition(b"\n")
        if len(self._rest) > LINE:
            raise ValueError(f"a line of more than {LINE:,} bytes")
        return lines.decode()

    def _new_rows(self) -> list[Reading]:
        """Readings of the complete lines that were added since the last look."""
        rows = list(csv.reader(self._new_text().splitlines()))
        now = time.monotonic()
        offset = now - time.time()
        when, what, where = self._columns() if self._header else (0, 0, None)
        scale = VALUES[self._header[what]][1] if self._header else 1.0
        beside = self._header.index(APPARENT) if APPARENT in self._header else None
        parsed = [
            (
                r[where] if where is not None else "",
                _instant(r[when]) + offset,
                _number(r[what]) * scale,
                r[what],
                None if beside is None or not r[beside].strip() else _number(r[beside]),
            )
            for r in rows
            if r
        ]
        for outlet in dict.fromkeys(outlet for outlet, *_ in parsed):
            own = [row for row in parsed if row[0] == outlet]
            self._channel(outlet, _spacing([row[1] for row in own]), [row[3] for row in own])
        readings = []
        for outlet, at, value, _, va in parsed:
            if at > self._newest.get(outlet, float("-inf")):
                self._newest[outlet] = at
                name = self._channels[outlet].id
                if at > now + AHEAD_S:
                    readings.append(Reading(name, now, now, None, f"a row is from {at - now:.3g} s later than this node's clock says"))
                    continue
                readings.append(Reading(name, at, at, value))
                if va is not None:
                    readings.append(Reading(f"{name}:va", at, at, va))
        return readings

    def channels(self) -> list[Channel]:
        """One per outlet seen so far, and where the file has it one for its apparent power. An outlet that comes later has its own then, so
        that windows which began before its first row have no energy rather than too little."""
        own = list(self._channels.values())
        return own + ([with_apparent(channel) for channel in own] if APPARENT in self._header else [])

    def read(self) -> list[Reading]:
        before, waiting = time.monotonic(), self._waiting
        self._waiting = []
        try:
            return waiting + self._new_rows()
        except (OSError, InputError, *_BROKEN) as cause:
            error = f"{type(cause).__name__}: {cause}"
            return waiting + [Reading(c.id, before, before, None, error) for c in self._channels.values()]


def _known_by(file: BinaryIO) -> str:
    """What tells a file on a disk that several nodes share from files of one path on their own disks: its number on the disk and its first
    row, or when it was written if it has none yet. ``file`` is read past its header."""
    found, row = os.fstat(file.fileno()), file.readline(LINE)
    first = row if row.endswith(b"\n") else str(found.st_mtime_ns).encode()
    return hashlib.sha256(b"%d %b" % (found.st_ino, first)).hexdigest()[:16]


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text.strip()} is no reading")
    return value


def _step(written: Sequence[str], scale: float) -> float:
    """Smallest step of a power [W] by the decimals with which it was ``written``; 1 W where there is none yet."""
    places = [int(Decimal(text.strip()).as_tuple().exponent) for text in written]
    return scale * 10.0 ** min(places) if places else 1.0


def _instant(text: str) -> float:
    """Seconds since 1970."""
    try:
        return _number(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()


def _spacing(times: list[float]) -> float:
    """Median time between rows [s]."""
    gaps = sorted(b - a for a, b in pairwise(times) if b > a)
    return gaps[len(gaps) // 2] if gaps else DEFAULT_PERIOD_S
