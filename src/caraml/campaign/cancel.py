"""The end of what runs: the jobs of what a name stands for, and the runners of campaigns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from caraml.launch.launchers import launcher_of
from caraml.results.claim import Runner, myself, runs_here, somebody_else, start_time
from caraml.results.finish import finish
from caraml.results.record import CANCELLED
from caraml.results.selector import Selection, select
from caraml.results.status import OPEN, Standing, standings
from caraml.results.store import POINT, Store

_PATIENCE = 15.0
"""Seconds for a runner to end its jobs and write their records."""


def cancel(root: Path, what: str) -> Iterator[str]:
    """End the jobs of what a name stands for, and the runners of campaigns; yields a sentence for each thing done.

    Raises:
        InputError: nothing has this name.
    """
    found = select(what, root)
    store = found.store
    if found.listings:
        for runner in {one.runner for one in _open(found) if one.runner is not None and _theirs(one) is None}:
            yield _end_runner(runner, root)
    left = _open(found)
    for one in left:
        yield _theirs(one) or _end_point(store, one)
    if not left:
        yield "no job is left"


def _open(found: Selection) -> list[Standing]:
    """The points of a selection that are not over, as whichever campaign lists them."""
    store, keys = found.store, {point.key for point in found.points}
    every = (one for listing in found.listings or store.campaigns() for one in standings(store, listing) if one.key in keys)
    return [one for one in {one.key: one for one in every}.values() if one.state in OPEN]


def _end_runner(runner: Runner, root: Path) -> str:
    """Ask a runner of this host to end; it ends its jobs."""
    if runner.place != myself().place:
        return f"the runner is process {runner.pid} on {runner.host}: end it there, or it will start the points that are left"
    if runs_here(runner, root):
        os.kill(runner.pid, signal.SIGTERM)
        deadline = time.monotonic() + _PATIENCE
        while start_time(runner.pid) == runner.start and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"ended the runner, process {runner.pid}"
    if start_time(runner.pid) == runner.start:
        return f"left process {runner.pid} alone: nothing but a claim says that it is the runner; kill {runner.pid} ends it, if it is"
    return f"the runner, process {runner.pid}, was gone"


def _theirs(one: Standing) -> str | None:
    """Why a point is left alone: what its folder says is somebody else's word, and may name any process and any job."""
    assert one.folder is not None
    user = somebody_else(one.folder)
    if user is None:
        return None
    return f"left {one.label} ({one.key}) alone: {one.folder} belongs to user {user}, who alone can end it"


def _end_point(store: Store, one: Standing) -> str:
    assert one.folder is not None
    if (one.folder / POINT).exists():  # before its job ends, so that the record has this as the cause
        finish(one.folder, 1, "failed", CANCELLED)
    if one.handle is not None:
        launcher_of(one.handle, store.root).cancel([one.handle])
    return f"cancelled {one.label} ({one.key})"
