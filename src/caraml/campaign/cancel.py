"""The end of what runs: the jobs of what a name stands for, and the runners of campaigns."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from caraml.launch import JobState, Launcher
from caraml.launch.launchers import LocalLauncher, launcher_of
from caraml.results.claim import BUILT_IN, Runner, away, job_of, kind_of, myself, recent, runs_here, somebody_else, start_time, withdraw
from caraml.results.finish import FAILURE, Failure, finish, note_failure, now, reason_of
from caraml.results.record import CANCELLED
from caraml.results.selector import Selection, select
from caraml.results.status import OPEN, Standing, standings
from caraml.results.store import POINT, RECORD, Store, read_record

_PATIENCE = 15.0
"""Seconds for a runner to end its jobs and write their records, and for a plug-in's queue to end jobs."""
_LOOK_SECONDS = 0.5
_OVER = ("ended", "lost")


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
    foreign: dict[str, list[Standing]] = {}
    for one in left:
        kind = kind_of(one.handle or BUILT_IN[0])
        if (why := _theirs(one) or _elsewhere(one, root)) is None and kind not in BUILT_IN:
            foreign.setdefault(kind, []).append(one)
        else:
            yield why or _end_point(store, one)
    for kind, points in foreign.items():
        yield from _end_foreign(store, kind, points)
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
    user, left = somebody_else(one.folder), f"left {one.label} ({one.key}) alone"
    return None if user is None else f"{left}: {one.folder} belongs to user {user}, who alone can end it"


def _elsewhere(one: Standing, root: Path) -> str | None:
    """Why a point is left alone whose job is a process on another host, while its files change: nobody here can end it."""
    assert one.folder is not None
    if kind_of(one.handle or "") != "local" or (job := away(one.folder)) is None or not recent(one.folder, root):
        return None
    if LocalLauncher().poll([one.handle or ""])[one.handle or ""].state == "running":  # this host had another name
        return None
    return f"left {one.label} ({one.key}) alone: its job is process {job.pid} on {job.host}: end it there"


def _end_point(store: Store, one: Standing) -> str:
    assert one.folder is not None
    if (one.folder / POINT).exists():  # before its job ends, so that the record has this as the cause
        finish(one.folder, 1, "failed", CANCELLED)
    if one.handle is not None:
        launcher_of(one.handle, store.root).cancel([one.handle])
    return f"cancelled {one.label} ({one.key})"


def _end_foreign(store: Store, kind: str, points: Sequence[Standing]) -> Iterator[str]:
    """End jobs of a plug-in's launcher. A point is cancelled, and has a record of it, once the launcher says that its job is over."""
    jobs = {one.handle: one.folder for one in points if one.handle is not None and one.folder is not None}
    names = {one.handle: f"{one.label} ({one.key}), {job_of(one.handle or '')}" for one in points}
    mine = [listing for suite in store.suites() for listing in store.rounds(suite) if listing.mine]
    if not any(kind in (listing.launcher, *listing.launchers) for listing in mine):
        why = f"no campaign of yours was told to use launcher {kind!r}; one that is, by `--launcher {kind}`, takes it up"
        yield from (f"left {names[handle]} alone: {why}" for handle in jobs)
        return
    failure = Failure(status="failed", reason=CANCELLED, rank=0, started_at=now())
    noted = [folder for folder in jobs.values() if note_failure(folder, failure)]  # whoever writes the record has this as the cause
    try:
        launcher = launcher_of(next(iter(jobs)), store.root)
        launcher.cancel(list(jobs))
        states = _once_over(launcher, list(jobs))
    except Exception as error:  # noqa: BLE001 -- a foreign module may raise anything
        for folder in noted:
            (folder / FAILURE).unlink(missing_ok=True)
        yield from (f"not cancelled: {names[handle]}, may still run: {reason_of(error)}" for handle in jobs)
        return
    for handle, folder in jobs.items():
        state = states[handle]
        if state.state in _OVER:
            withdraw(folder)  # a queue may not know a job yet that comes later
            finish(folder, 1, "failed", CANCELLED)
            record = read_record(folder / RECORD)
            yield f"cancelled {names[handle]}" if record.ended_by_hand else f"{names[handle]}, had ended: {record.status}"
        else:
            why = f" ({state.reason})" if state.reason else ""
            yield f"launcher {kind!r} was told to cancel {names[handle]}, and says that it is {state.state}{why}"


def _once_over(launcher: Launcher, handles: Sequence[str]) -> Mapping[str, JobState]:
    """The states of jobs when all are over, or after a while."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        states = launcher.poll(handles)
        if all(state.state in _OVER for state in states.values()) or time.monotonic() > deadline:
            return {handle: states[handle] for handle in handles}
        time.sleep(_LOOK_SECONDS)
