"""Where campaigns stand, in plain lines; also very many records. Imports nothing heavy: it is asked often."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from caraml.base.text import printable
from caraml.errors import InputError
from caraml.results.listing import Listing
from caraml.results.rows import Scalar
from caraml.results.standing import OPEN, Standing, finished, standings, summary
from caraml.results.store import Store
from caraml.units import human

Found = list[tuple[Listing, list[Standing]]]

MANY = 500
"""Records above which `results` prints plain lines: a table that fits its columns to all of them takes long."""
_SHOWN = 40
"""Points that are listed one by one; of more, those that need no attention are only counted."""
_WATCH_SECONDS = 2.0
_LONGEST_REASON = 200
_QUIET = ("ok", "skipped", "to do")


def listings(root: Path, suite: str | None) -> Found:
    """Every campaign of a store, or one, with where its points stand. Raises ``InputError`` when there is none."""
    store = Store(root)
    names = [suite] if suite is not None else store.suites()
    if not names:
        raise InputError(f"no campaign was started below {root}", "caraml run quick, or --out FOLDER for results elsewhere")
    return [(listing, standings(store, listing)) for listing in map(store.listing, names)]


def status_text(found: Found) -> str:
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


def watch_status(root: Path, suite: str | None) -> None:
    """Show where campaigns stand until all is done."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            found = listings(root, suite)
            live.update(Text(status_text(found).rstrip()), refresh=True)
            if all(finished(points) or not any(one.state in OPEN for one in points) for _, points in found):
                return
            time.sleep(_WATCH_SECONDS)


def _heading(listing: Listing) -> str:
    words = [f"{listing.name}: {listing.title}" if listing.title else listing.name]
    words += [f"[{', '.join(listing.tags)}]"] if listing.tags else []
    words += [f'"{listing.comment}"'] if listing.comment else []
    asked = f", asked for {listing.asked_at}" if listing.asked_at else ""
    return printable("  ".join(words) + f"  ({listing.launcher} on {listing.system}{asked})")


def _about(one: Standing) -> str:
    parts = []
    if one.line is not None:
        from caraml.report.live import rate_text, seconds_text

        parts += [one.line.phase, rate_text(one.line), human(one.line.watts, "W") if one.line.watts is not None else ""]
        parts += [f"{seconds_text(one.line.remaining)} left"] if one.line.remaining is not None else []
    if one.handle is not None:
        parts.append(":".join(one.handle.split(":")[:2]))
    if one.runner is not None and one.state in OPEN:
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
