"""Where the points of a campaign stand, from the files that runners and jobs write; read by whoever asks, from any host."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from caraml.results.claim import Runner, alive, handle_of, holder
from caraml.results.listing import Listing
from caraml.results.progress import ProgressLine, ProgressReader
from caraml.results.store import RECORD, Store, attempts

OPEN = ("running", "queued", "starting", "left")
"""States of an attempt without a record; ``left``: its job goes on, or has ended, and its runner is gone."""

DONE = ("ok", "skipped", "oom", "timeout", "invalid")
"""Statuses that a campaign does not try again on its own, as in :data:`caraml.results.record.FINAL`, which takes long to import."""
UNHAPPY = ("failed", "lost", "timeout", "invalid")
"""Statuses that leave a point without a result."""


@dataclass(frozen=True)
class Standing:
    """Where one point stands."""

    key: str
    label: str
    state: str
    """A record's status; or ``running``, ``queued``, ``starting``, ``left``; or ``to do``."""
    reason: str | None = None
    folder: Path | None = None
    """The attempt under way."""
    handle: str | None = None
    runner: Runner | None = None
    line: ProgressLine | None = None


def standings(store: Store, listing: Listing) -> list[Standing]:
    """Where every point of a suite stands, in its order."""
    entries = store.fresh_index().entries
    of_key = {name.rpartition("-")[2]: name for name in entries}
    open_names = _names(store, {key for key, _ in listing.points if key not in of_key or not entries[of_key[key]].certain})
    found = []
    for key, label in listing.points:
        entry = entries.get(of_key.get(key, ""))
        name = open_names.get(key)
        under_way = _under_way(store, key, label, name) if name is not None and (entry is None or not entry.certain) else None
        if under_way is not None:
            found.append(under_way)
        elif entry is None:
            found.append(Standing(key, label, "to do"))
        else:
            reason = entry.row.get("reason")
            found.append(Standing(key, label or str(entry.row["label"]), str(entry.row["status"]), str(reason) if reason else None))
    return found


def _names(store: Store, keys: set[str]) -> dict[str, str]:
    """Names of the folders of these points, as far as they have one."""
    if not keys:
        return {}
    try:
        names = [entry.name for entry in os.scandir(store.points)]
    except FileNotFoundError:
        return {}
    return {key: name for name in names if (key := name.rpartition("-")[2]) in keys}


def _under_way(store: Store, key: str, label: str, name: str) -> Standing | None:
    """The attempt of a point that has no record yet, if its newest is one and has not been given up."""
    number = max(attempts(store.points / name) or (), default=0)
    folder = store.points / name / str(number)
    if not number or (folder / RECORD).exists():
        return None
    runner, handle = holder(folder)[1], handle_of(folder)
    lives = runner is not None and alive(runner, store.root)
    if handle is None:
        return Standing(key, label, "starting", folder=folder, runner=runner) if lives else None
    line = ProgressReader(folder).latest()
    standing = Standing(key, label, "running", folder=folder, handle=handle, runner=runner, line=line)
    if line is None and handle.startswith("slurm:"):
        return replace(standing, state="queued")
    return standing if lives else replace(standing, state="left", reason="its runner is gone: the same `caraml run` takes it up")


def summary(found: Sequence[Standing]) -> str:
    """Counts in words, those that need attention last: ``120 points: 96 ok, 20 to do, 3 running, 1 failed``."""
    counts = Counter(one.state for one in found)
    order = ("ok", "to do", *OPEN, "skipped", "oom", "timeout", "invalid", "lost", "failed")
    parts = [f"{counts[state]:,} {state}" for state in order if counts[state]]
    return f"{len(found):,} point{'' if len(found) == 1 else 's'}: {', '.join(parts) or 'none'}"


def finished(found: Sequence[Standing]) -> bool:
    """Whether every point has a result that stays."""
    return all(one.state in DONE for one in found)


def pick(found: Sequence[Standing], name: str) -> list[Standing]:
    """The points whose key or label starts with ``name``; an exact one goes first."""
    exact = [one for one in found if name in (one.key, one.label)]
    return exact or [one for one in found if one.key.startswith(name) or one.label.startswith(name)]
