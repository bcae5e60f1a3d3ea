"""What is seen while a campaign runs: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections import Counter, deque
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from caraml.base.text import printable
from caraml.results.progress import ProgressLine
from caraml.results.record import Record
from caraml.suite.model import Point
from caraml.units import human, percent

_REFRESH_PER_SECOND = 2
"""Drawing costs CPU time that a CPU benchmark wants."""
_LOG_SECONDS = 5.0
_ENDED_ROWS = 50
"""Ended points that are kept to be shown, as far as the window has room."""
_AROUND_ROWS = 4
"""Lines of a window that the table's rows cannot have."""


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
    """A row per point under way, and the last that ended: phase, rate so far, watts, remaining time. A watcher of a campaign, and a
    context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rows: dict[str, tuple[str, ...]] = {}
        self._ended: deque[tuple[str, ...]] = deque(maxlen=_ENDED_ROWS)
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._note = ""
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=_REFRESH_PER_SECOND, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def started(self, point: Point, index: int, total: int) -> None:
        """A new row."""
        self._total, self._note = total, ""
        self._rows[point.key] = (f"{index + 1}/{total} {point.label}", "start", "", "", "")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Fill the row; what a line does not say stays as it was."""
        title, _, rate, watts, _ = self._rows[point.key]
        now = human(line.watts, "W") if line.watts is not None else watts
        self._rows[point.key] = (title, line.phase, rate_text(line) or rate, now, seconds_text(line.remaining))

    def finished(self, record: Record, reused: bool) -> None:
        """The row's last word; its place is among those that ended."""
        title = self._rows.pop(record.key, (record.point.label,))[0]
        self._counts[record.status] += 1
        metric = record.metrics.get("throughput")
        rate = human(metric.value, metric.unit) if metric else (record.reason or "")
        power = record.value("mean_power")
        watts = "" if power is None else human(power, "W")
        self._ended.append((title, f"{record.status}{' (known)' if reused else ''}", rate, watts, ""))

    def note(self, text: str) -> None:
        """What the campaign waits for."""
        self._note = text

    def _table(self) -> RenderableType:
        table = Table("point", "phase", "rate so far", "power", "remaining", box=None, pad_edge=False)
        room = max(self._console.height - _AROUND_ROWS, 4)
        under_way = list(self._rows.values())[:room]
        for row in [*list(self._ended)[max(len(self._ended) - room + len(under_way), 0) :], *under_way]:
            table.add_row(*row)
        counts = ", ".join(f"{count:,} {status}" for status, count in self._counts.items())
        more = len(self._rows) - len(under_way)
        words = [f"{sum(self._counts.values()):,} of {self._total:,} ended" if self._total else "", counts]
        words += [f"{more:,} more under way" if more > 0 else "", self._note]
        return Group(table, Text("; ".join(word for word in words if word), style="dim"))


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

    def note(self, text: str) -> None:
        """Say what the campaign waits for."""
        self._write(f"  {text}")

    def _write(self, text: str) -> None:
        self._stream.write(f"[{seconds_text(time.monotonic() - self._begin)}] {printable(text)}\n")
        self._stream.flush()
