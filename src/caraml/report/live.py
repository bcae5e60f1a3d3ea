"""What is seen while a campaign runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from caraml.results.progress import ProgressLine
from caraml.results.record import Record
from caraml.suite.model import Point
from caraml.units import human, percent

_REFRESH_PER_SECOND = 2
"""Drawing costs CPU time that a CPU benchmark wants."""
_LOG_SECONDS = 5.0


def rate_text(line: ProgressLine) -> str:
    """Rate so far with its relative 95 % interval."""
    if line.rate is None:
        return ""
    rate = human(line.rate, f"{line.item}/s")
    return f"{rate} ± {percent(line.relative, 2)}" if line.relative is not None else rate


def seconds_text(seconds: float | None) -> str:
    """Seconds as ``1:05``; empty if unknown."""
    return "" if seconds is None else f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class LiveTable:
    """One row per point: phase, rate so far, watts, remaining time. A watcher of a campaign, and a context manager."""

    def __init__(self, console: Console) -> None:
        self._rows: dict[str, tuple[str, ...]] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=_REFRESH_PER_SECOND, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def started(self, point: Point, index: int, total: int) -> None:
        """A new row."""
        self._rows[point.key] = (f"{index + 1}/{total} {point.label}", "start", "", "", "")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Fill the row; what a line does not say stays as it was."""
        title, _, rate, watts, _ = self._rows[point.key]
        now = human(line.watts, "W") if line.watts is not None else watts
        self._rows[point.key] = (title, line.phase, rate_text(line) or rate, now, seconds_text(line.remaining))

    def finished(self, record: Record, reused: bool) -> None:
        """The row's last word."""
        title = self._rows.get(record.key, (record.point.label,))[0]
        metric = record.metrics.get("throughput")
        rate = human(metric.value, metric.unit) if metric else (record.reason or "")
        power = record.value("mean_power")
        watts = "" if power is None else human(power, "W")
        self._rows[record.key] = (title, f"{record.status}{' (known)' if reused else ''}", rate, watts, "")

    def _table(self) -> Table:
        table = Table("point", "phase", "rate so far", "power", "remaining", box=None, pad_edge=False)
        for row in self._rows.values():
            table.add_row(*row)
        return table


class LogLines:
    """The same as plain lines, one per phase and every few seconds, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begin, self._last, self._phase = stream, time.monotonic(), 0.0, ""

    def __enter__(self) -> LogLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to restore."""

    def started(self, point: Point, index: int, total: int) -> None:
        """Say what begins."""
        self._phase = ""
        self._write(f"point {index + 1} of {total}: {point.label}")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Say a new phase at once, anything else at most every few seconds."""
        now = time.monotonic()
        if line.phase == self._phase and now - self._last < _LOG_SECONDS:
            return
        self._phase, self._last = line.phase, now
        parts = [line.phase, f"{line.steps} steps" if line.steps else "", rate_text(line)]
        parts += [human(line.watts, "W") if line.watts is not None else ""]
        parts += [f"{seconds_text(line.remaining)} left" if line.remaining is not None else ""]
        self._write(f"  {point.label}: {', '.join(part for part in parts if part)}")

    def finished(self, record: Record, reused: bool) -> None:
        """Say how it ended."""
        reason = f": {record.reason}" if record.reason else ""
        self._write(f"  {record.point.label}: {record.status}{' (known from before)' if reused else ''}{reason}")

    def _write(self, text: str) -> None:
        self._stream.write(f"[{seconds_text(time.monotonic() - self._begin)}] {text}\n")
        self._stream.flush()
