"""A campaign: a suite on one machine with results in one store, which of its points are to be run, and how what runs is ended by hand.

A campaign keeps no state of its own: what is done, and who does the rest, stands in the store, so running the same command again fills
the holes and goes on with jobs that still run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from caraml.base.errors import EnvironmentUnfitError, ExitCode
from caraml.base.format import count
from caraml.campaign.machine import DeviceLock, machine_of, too_large
from caraml.launch import Elsewhere, JobState, Launcher, queue
from caraml.launch.launchers import LocalLauncher, launcher_of
from caraml.launch.slurm import is_refused
from caraml.results.claim import BUILT_IN, Runner, away, job_of, kind_of, myself, recent, runs_here, somebody_else, start_time, withdraw
from caraml.results.finish import FAILURE, Failure, finish, note_failure, now, reason_of
from caraml.results.record import CANCELLED, FINAL, Record
from caraml.results.selector import Selection, select
from caraml.results.status import OPEN, ProgressLine, Standing, standings
from caraml.results.store import POINT, RECORD, Listing, Store, command_of, latest_in, record_of
from caraml.suite.choice import WHOLE, SuitePart, begun_with
from caraml.suite.expand import Plan, PlannedPoint, expand, without_unmet
from caraml.suite.load import CATALOG, SuiteFile
from caraml.suite.model import Point
from caraml.system.model import System
from caraml.workloads import params_of, see_packages, software_of
from caraml.workloads.command import Params

_PATIENCE = 15.0
"""Seconds for a runner to end its jobs and write their records, and for a plug-in's queue to end jobs."""
_LOOK_SECONDS = 0.5
_OVER = ("ended", "lost")


class Watcher(Protocol):
    """Is told what happens, in the campaign's own thread."""

    def started(self, point: Point, index: int, total: int) -> None:
        """A point is being launched."""

    def progress(self, point: Point, line: ProgressLine) -> None:
        """A point said something."""

    def finished(self, record: Record, reused: bool) -> None:
        """A point has its record; ``reused`` when it had one before."""

    def left(self, text: str) -> None:
        """How long the whole campaign will take yet, in words, as far as results so far tell."""


@dataclass(frozen=True)
class Options:
    """What was asked for besides the suite; kept in the store's listing."""

    file: str = ""
    system_file: str = ""
    settings: tuple[str, ...] = ()
    launcher: str = "local"
    tags: tuple[str, ...] = ()
    comment: str = ""
    detach: bool = False
    """Leave as soon as everything is in the launcher's hands."""
    only: frozenset[str] | None = None
    """Keys of the only points to run, anew; ``None`` for all that have no result."""
    labels: frozenset[str] = frozenset()
    """Labels of those points, where they are known: they begin with the names of their benchmarks."""
    part: SuitePart = WHOLE
    """What is to be run of the suite, where that is not all; the rest stays part of the campaign."""
    imported: str = ""
    """The archive that the suite came from, or who else wrote it."""
    elsewhere: Elsewhere | None = None
    """Where the results will lie on the machine that scripts are printed for."""
    too_large: bool = False
    """Run also points whose memory plan does not fit."""
    no_wait: bool = False
    """Rather end than wait for other campaigns on this device before the first point."""
    here: bool = False
    """Measure on this host although it may be a login node."""

    def chosen(self, file: SuiteFile) -> frozenset[str] | None:
        """The benchmarks that settings must fit; ``None`` for all. Of what is tried again only the keys are known: it may be any."""
        return frozenset() if self.only is not None else self.part.benchmarks(file)

    def wanted(self, file: SuiteFile) -> frozenset[str] | None:
        """The benchmarks of which every point is to be in the plan; ``None`` for all."""
        return self.chosen(file) if self.only is None else begun_with(file, self.labels)


@dataclass
class Campaign:
    """A suite on one machine, with results in one store."""

    suite: SuiteFile
    system: System
    store: Store
    launcher: Launcher
    watcher: Watcher
    again: bool = False
    """Measure also what has a result already; earlier results are kept beside."""
    options: Options = Options()
    device: DeviceLock | None = None
    """One at a time on this machine's device; for a launcher that starts jobs here."""
    say: Callable[[str], None] = lambda text: None
    """Is told, in a sentence, what the campaign waits for."""

    @property
    def command(self) -> str:
        """What runs the suite, for hints."""
        options = self.options
        return command_of(options.file, self.suite.suite.name, options.system_file or self.system.name, options.settings)

    @property
    def anew(self) -> bool:
        """Whether what has a result already is measured again."""
        return self.again or self.options.only is not None

    @cached_property
    def suite_folder(self) -> str:
        """From where programs start and paths are meant: the folder of the suite's file, the current one for suites of the catalogue."""
        folder = Path(self.options.file or self.suite.document.name).resolve().parent
        return str(Path.cwd() if folder == CATALOG.resolve() else folder)

    def plan(self) -> Plan:
        """The points of the suite on this system. Raises ``InputError`` with every fault of the suite."""
        machine = machine_of(self.system, self.options.launcher)
        plan = expand(self.suite, machine, params_of, software_of, self.options.wanted(self.suite))
        if not (self.options.only or frozenset()) <= {one.key for one in plan.points}:
            expand(self.suite, machine, params_of, software_of)  # a fault may be why one is missing: it is raised
        if self.options.too_large or self.options.only is not None:  # what is tried again was run before
            return plan
        reasons = too_large(self.system, [one.point for one in plan.points if one.skip is None and not self._has_run(one)])
        return replace(plan, points=without_unmet([replace(one, skip=one.skip or reasons.get(one.key)) for one in plan.points]))

    def _has_run(self, planned: PlannedPoint) -> bool:
        """Whether a point has shown what it needs of memory, or cannot have a memory plan."""
        if planned.point.workload != "gpt":
            return True
        record = latest_in(self.store.points / planned.point.folder_name)
        return record is not None and (record.status == "ok" or (not self.again and record.status in FINAL and record.status != "skipped"))

    def chosen(self, plan: Plan) -> list[PlannedPoint]:
        """The points that are to be run or to be known. Raises ``InputError`` where there are none, and ``EnvironmentUnfitError`` where
        one of them would run here and a package is missing."""
        machine, only = machine_of(self.system, self.options.launcher), self.options.only
        keys = self.options.part.keys(self.suite, plan, machine, params_of)
        found = [planned for planned in plan.points if keys is None or planned.key in keys]
        to_run = [one for one in found if machine.packages_here and one.skip is None and (only is None or one.key in only)]
        for workload in dict.fromkeys(one.point.workload for one in to_run):
            see_packages(workload)
        return found

    def listing(self, points: Sequence[tuple[str, str]]) -> Listing:
        """What this campaign was asked for."""
        options, machine = self.options, machine_of(self.system, self.options.launcher)
        return Listing(
            name=self.suite.suite.name,
            title=self.suite.suite.title,
            file=options.file,
            text=self.suite.document.text,
            settings=list(options.settings),
            system=self.system.name,
            system_file=options.system_file,
            launcher=options.launcher,
            machine=f"{machine.name}: {machine.device}, {machine.software}",
            tags=list(options.tags),
            comment=options.comment,
            asked_at=now(),
            imported=options.imported,
            points=list(points),
        )

    def is_light(self, params: Params) -> bool:
        """Whether the shell alone runs it here: in the environment of whoever started the campaign, so not where the site has its own."""
        site = self.system.site
        bare = site.container.runtime == "none" and not (site.software.modules or site.software.venv or site.software.variables)
        return bare and self.launcher.slots is not None and params.marks is None


def exit_code(records: list[Record]) -> ExitCode:
    """0 when every point has a result; out of memory is one, a failure is not."""
    failed = any(record.status in ("failed", "timeout", "invalid", "lost") for record in records)
    return ExitCode.POINTS_FAILED if failed else ExitCode.OK


# -- the end by hand ---------------------------------------------------------------------------------------------------


def cancel(root: Path, what: str) -> Iterator[str]:
    """End the jobs of what a name stands for, and the runners of campaigns; yields a sentence for each thing done. Raises ``InputError``
    where nothing has this name."""
    found = select(what, root)
    store = found.store
    if found.listings:
        for runner in {one.runner for one in _open(found) if one.runner is not None and _theirs(one) is None}:
            yield _end_runner(runner, root)
    left = _open(found)
    by_kind: dict[str, list[Standing]] = {}
    for one in left:
        if (why := _theirs(one) or _elsewhere(one)) is not None:
            yield why
        else:
            by_kind.setdefault(kind_of(one.handle or BUILT_IN[0]), []).append(one)
    for kind, points in by_kind.items():
        yield from _end_points(store, points) if kind in BUILT_IN else _end_foreign(store, kind, points)
    earlier = list(_left_of_earlier(found))
    yield from earlier or ([] if left else ["no job is left"])


def _left_of_earlier(found: Selection) -> Iterator[str]:
    """What is under way of campaigns of the same suites that are not these: of points that the suite had before it was edited."""
    store, keys = found.store, {point.key for point in found.points}
    for suite in dict.fromkeys(listing.name for listing in found.listings):
        for listing in store.rounds(suite):
            points = {one.key for one in standings(store, listing) if one.state in OPEN} - keys
            keys |= points
            if points:
                name = f"{suite}@{listing.round}"
                yield f"left {count(len(points), 'point')} of {name}, another campaign of this suite, alone: caraml cancel {name}"


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
        for number in (signal.SIGTERM, signal.SIGCONT):  # one that was stopped, as by Ctrl-Z, hears of it when it goes on
            with suppress(ProcessLookupError):
                os.kill(runner.pid, number)
        deadline = time.monotonic() + _PATIENCE
        while start_time(runner.pid) == runner.start and time.monotonic() < deadline:
            time.sleep(0.05)
        if start_time(runner.pid) == runner.start:
            return f"told the runner, process {runner.pid}, to end, and it has not yet: kill -9 {runner.pid} ends it, if it does not"
        return f"ended the runner, process {runner.pid}"
    if start_time(runner.pid) == runner.start:
        return f"left process {runner.pid} alone: nothing but a claim says that it is the runner; kill {runner.pid} ends it, if it is"
    return f"the runner, process {runner.pid}, was gone"


def _theirs(one: Standing) -> str | None:
    """Why a point is left alone: what its folder says is somebody else's word, and may name any process and any job."""
    assert one.folder is not None
    user, left = somebody_else(one.folder), f"left {one.label} ({one.key}) alone"
    return None if user is None else f"{left}: {one.folder} belongs to user {user}, who alone can end it"


def _elsewhere(one: Standing) -> str | None:
    """Why a point is left alone whose job is a process on another host, while its files change: nobody here can end it."""
    assert one.folder is not None
    if kind_of(one.handle or "") != "local" or (job := away(one.folder)) is None or not recent(one.folder):
        return None
    if LocalLauncher().poll([one.handle or ""])[one.handle or ""].state == "running":  # this host had another name
        return None
    return f"left {one.label} ({one.key}) alone: its job is process {job.pid} on {job.host}: end it there"


def _end_points(store: Store, points: Sequence[Standing]) -> Iterator[str]:
    """End jobs of one launcher. Raises ``EnvironmentUnfitError`` where that is Slurm and it does not answer: its jobs would go on."""
    handles = [one.handle for one in points if one.handle is not None]
    if any(kind_of(handle) == "slurm" and not is_refused(handle) for handle in handles):
        try:
            queue.in_queue()
        except queue.SilentError as error:
            raise EnvironmentUnfitError(
                f"no job of Slurm was cancelled: it does not answer ({error})", "the same command, once it does"
            ) from error
    told = [_note_end(one) for one in points]
    if handles:
        launcher_of(handles[0], store.root).cancel(handles)
    yield from told


def _note_end(one: Standing) -> str:
    """Write the record of a point that is cancelled, before its job ends, so that the record has this as the cause."""
    assert one.folder is not None
    trouble = ""
    if (one.folder / POINT).exists():
        try:
            finish(one.folder, 1, "failed", CANCELLED)
        except OSError as error:  # on a full disk, which is why somebody may want to end jobs
            trouble = f"; its record could not be written: {error.strerror}"
    return f"cancelled {one.label} ({one.key}){trouble}"


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
            record = record_of(folder / RECORD)
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
