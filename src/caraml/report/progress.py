"""What a campaign does and where campaigns stand: a live table on a terminal, and plain lines, also of very many records.

Imports nothing heavy: where campaigns stand is asked often.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from caraml.base.errors import InputError
from caraml.base.format import count, human, percent, printable, seconds_text
from caraml.results.claim import job_of, kind_of
from caraml.results.record import Record
from caraml.results.rows import Scalar
from caraml.results.selector import SelectedPoint, elsewhere, select
from caraml.results.status import OPEN, TO_DO, ProgressLine, Standing, finished, standings, summary
from caraml.results.store import RECORD, Listing, Store, record_of
from caraml.suite.model import Point

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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


def _so_far(line: ProgressLine) -> list[str]:
    """Rate, power and what remains, as far as a line says them."""
    watts = human(line.watts, "W") if line.watts is not None else ""
    return [rate_text(line), watts, f"{seconds_text(line.remaining)} left" if line.remaining is not None else ""]


class LiveTable:
    """A row per point under way, and the last that ended: phase, rate so far, watts, remaining time. A watcher of a campaign, and a
    context manager."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._rows: dict[str, tuple[str, ...]] = {}
        self._ended: deque[tuple[str, ...]] = deque(maxlen=_ENDED_ROWS)
        self._counts: Counter[str] = Counter()
        self._total = 0
        self._note = self._left = ""
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=_REFRESH_PER_SECOND, transient=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def started(self, point: Point, index: int, total: int) -> None:
        self._total, self._note = total, ""
        self._rows[point.key] = (f"{index + 1}/{total} {point.label}", "start", "", "", "")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Fill the row; what a line does not say stays as it was."""
        title, _, rate, watts, _ = self._rows[point.key]
        now = human(line.watts, "W") if line.watts is not None else watts
        self._rows[point.key] = (title, line.phase, rate_text(line) or rate, now, seconds_text(line.remaining))

    def finished(self, record: Record, reused: bool) -> None:
        title = self._rows.pop(record.key, (record.point.label,))[0]
        self._counts[record.status] += 1
        metric = record.metrics.get("throughput")
        rate = human(metric.value, metric.unit) if metric else (record.reason or "")
        power = record.value("mean_power")
        watts = "" if power is None else human(power, "W")
        self._ended.append((title, f"{record.status}{' (known)' if reused else ''}", rate, watts, ""))

    def left(self, text: str) -> None:
        """How long the whole campaign will take yet."""
        self._left = text

    def note(self, text: str) -> None:
        self._note = text

    def _table(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("point", "phase", "rate so far", "power", "remaining", box=None, pad_edge=False)
        room = max(self._console.height - _AROUND_ROWS, 4)
        under_way = list(self._rows.values())[:room]
        for row in [*list(self._ended)[max(len(self._ended) - room + len(under_way), 0) :], *under_way]:
            table.add_row(*(Text(printable(cell)) for cell in row))  # never read as markup
        counts = ", ".join(f"{count:,} {status}" for status, count in self._counts.items())
        more = len(self._rows) - len(under_way)
        words = [f"{sum(self._counts.values()):,} of {self._total:,} ended" if self._total else "", counts, self._left]
        words += [f"{more:,} more under way" if more > 0 else "", self._note]
        return Group(table, Text("; ".join(word for word in words if word), style="dim"))


class LogLines:
    """The same as plain lines, one per phase and every few seconds, for files and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._begin, self._last, self._phase, self._left = stream, time.monotonic(), 0.0, "", ""

    def __enter__(self) -> LogLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to restore."""

    def started(self, point: Point, index: int, total: int) -> None:
        self._phase = ""
        self._write(f"point {index + 1} of {total}{self._left}: {point.label}")

    def progress(self, point: Point, line: ProgressLine) -> None:
        """Say a new phase at once, anything else at most every few seconds."""
        now = time.monotonic()
        if line.phase == self._phase and now - self._last < _LOG_SECONDS:
            return
        self._phase, self._last = line.phase, now
        parts = [line.phase, count(line.steps, "step") if line.steps else "", *_so_far(line)]
        self._write(f"  {point.label}: {', '.join(part for part in parts if part)}")

    def finished(self, record: Record, reused: bool) -> None:
        reason = f": {record.reason}" if record.reason else ""
        self._write(f"  {record.point.label}: {record.status}{' (known from before)' if reused else ''}{reason}")

    def left(self, text: str) -> None:
        """Said with the next point."""
        self._left = f", {text}"

    def note(self, text: str) -> None:
        self._write(f"  {text}")

    def _write(self, text: str) -> None:
        self._stream.write(f"[{seconds_text(time.monotonic() - self._begin)}] {printable(text)}\n")
        self._stream.flush()


# -- where campaigns stand -----------------------------------------------------------------------------------------------

Campaigns = list[tuple[Listing, list[Standing]]]
"""What was asked for, and where its points stand."""

MANY = 500
"""Records above which `results` prints plain lines: a table that fits its columns to all of them takes long."""
_SHOWN = 40
"""Points that are listed one by one; of more, those that need no attention are only counted."""
_WATCH_SECONDS = 2.0
_LONGEST_REASON = 200
_SLURM_SECONDS = (10.0, 60.0)
"""How long Slurm is waited for, which need not be there, and how often its whole queue is looked at."""
_NOT_WAITING = (
    "no job of yours waits here for it: it has begun, maybe with other points of it, or is over, which the same `caraml run` finds out"
)
_QUIET = ("ok", "skipped", TO_DO)


def listings(root: Path, what: str | None) -> Campaigns:
    """The newest campaign of every suite and variant of a store, or what a name stands for, with where the points stand.

    Raises ``InputError`` when there is none.
    """
    found = select(what, root)
    store, chosen = found.store, {point.key: point for point in found.points}
    listed = found.listings or store.campaigns()
    if what is not None and not found.listings:
        listed = [one for one in listed if any(key in chosen for key, _ in one.points)]
    if not listed:
        raise InputError(f"no campaign was started below {store.root}", elsewhere(store.root))
    campaigns = [
        (one, [_as_found(store, each, chosen) for each in standings(store, one) if what is None or each.key in chosen]) for one in listed
    ]
    if shutil.which("squeue") is None or not any(_in_slurm(each) for _, points in campaigns for each in points):
        return campaigns
    begun = frozenset(_job(each) for _, points in campaigns for each in points if _in_slurm(each) and each.state != "queued")
    turns, silent = _turns(int(time.monotonic() / _SLURM_SECONDS[1]), begun)

    def told(one: Standing, otherwise: str | None) -> Standing:
        if not _in_slurm(one):
            return one
        turn = turns.get(_job(one))
        if one.state != "queued":  # a job that was put back into the queue waits again, whatever it said before
            return one if turn is None else replace(one, state="queued", reason=turn, line=None)
        return replace(one, reason=silent or turn or otherwise)

    return [(one, [told(each, None if one.stranger() else _NOT_WAITING) for each in points]) for one, points in campaigns]


def _in_slurm(one: Standing) -> bool:
    return one.state in OPEN and kind_of(one.handle or "") == "slurm"


def _job(one: Standing) -> str:
    """The number of its job; several points may share one."""
    return (one.handle or "").split(":")[1].partition("+")[0]


@lru_cache(maxsize=1)
def _turns(minute: int, begun: frozenset[str]) -> tuple[dict[str, str], str | None]:
    """What Slurm says of this user's jobs that wait, by number, or why it says nothing. Asked each minute, and when a job has begun."""
    del minute, begun
    from caraml.launch import queue

    try:
        return {name: str(turn) for name, turn in queue.turns(_SLURM_SECONDS[0]).items()}, None
    except queue.SilentError as error:
        return {}, f"why it waits is unknown: Slurm does not answer ({error})"


def _as_found(store: Store, one: Standing, chosen: Mapping[str, SelectedPoint]) -> Standing:
    """A point as an earlier round found it, where such a round was asked for."""
    number = chosen[one.key].attempt if one.key in chosen else None
    if not number:
        return one if number is None else Standing(one.key, one.label, one.state if one.state in OPEN else TO_DO)
    record = record_of(store.points / store.names()[one.key] / str(number) / RECORD)
    return Standing(one.key, one.label, record.status, record.reason)


def status_text(found: Campaigns) -> str:
    """Where campaigns stand, in plain lines."""
    lines = []
    for listing, points in found:
        lines += [_heading(listing), f"  {summary(points)}"]
        rows = [one for one in points if len(points) <= _SHOWN or one.state not in _QUIET]
        width = max((len(one.label) for one in rows[:_SHOWN]), default=0)
        for one in rows[:_SHOWN]:
            about = printable(_about(one))[:_LONGEST_REASON]
            lines.append(f"  {one.key}  {printable(one.label):<{width}}  {one.state:<8}  {about}".rstrip())
        if len(rows) > _SHOWN:
            lines.append(f"  ... and {len(rows) - _SHOWN:,} more")
    return "\n".join(lines) + "\n"


def watch_status(root: Path, what: str | None) -> None:
    """Show where campaigns stand until all is done."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            found = listings(root, what)
            live.update(Text(status_text(found).rstrip()), refresh=True)
            if all(finished(points) or not any(one.state in OPEN for one in points) for _, points in found):
                return
            time.sleep(_WATCH_SECONDS)


def _heading(listing: Listing) -> str:
    name = f"{listing.campaign}@{listing.round}"
    words = [f"{name}: {listing.title}" if listing.title else name]
    words += [f"[{', '.join(listing.tags)}]"] if listing.tags else []
    words += [f'"{listing.comment}"'] if listing.comment else []
    asked = f", asked for {listing.asked_at}" if listing.asked_at else ""
    return printable("  ".join(words) + f"  ({listing.launcher} on {listing.system}{asked})")


def _about(one: Standing) -> str:
    parts = [one.line.phase, *_so_far(one.line)] if one.line is not None else []
    if one.handle is not None:
        parts.append(job_of(one.handle))
    if one.runner is not None and one.lives:
        parts.append(f"runner {one.runner.pid} on {one.runner.host}")
    return ", ".join(part for part in [*parts, one.reason or ""] if part)


def rows_text(rows: Sequence[Mapping[str, Scalar]]) -> str:
    """Very many records, a plain line each: key, status, rate, energy per item, label."""
    lines = []
    for row in rows:
        item, rate, energy = row["item"], row.get("throughput"), row.get("energy_per_item")
        numbers = f"{human(float(rate), f'{item}/s') if rate else '':>22} {human(float(energy), f'J/{item}') if energy else '':>18}"
        lines.append(f"{row['key']}  {row['status']:<8} {numbers}  {printable(str(row['label']))}")
    return "\n".join(lines) + "\n"
