"""The campaign itself: claims points, launches them, watches their jobs, and sees that each ends with a record."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from caraml.base.errors import CaramlError, EnvironmentUnfitError, ExitCode, InputError
from caraml.base.files import write_file
from caraml.base.format import seconds_text
from caraml.campaign.attempt import (
    PointTask,
    RunningPoint,
    Sensors,
    Shells,
    Watcher,
    accepted,
    conclude,
    files_of,
    find,
    finish_attempt,
    hand_to,
    lacking,
    needed_by,
    note_handle,
    ran,
    script,
    summary_record,
    wait_until_visible,
)
from caraml.campaign.machine import DeviceLock, Pace, machine_of, refuse_login_node, too_large, wait_for
from caraml.engine.instruments import cpu_time_of_children, why_no_sensor
from caraml.launch.base import Elsewhere, Job, JobState, Launcher
from caraml.launch.launchers import PrintLauncher, launcher_of
from caraml.launch.prepare import set_up, setup_script
from caraml.launch.queue import no_cluster
from caraml.launch.script import SCRIPT
from caraml.launch.slurm import SlurmLauncher
from caraml.results.claim import CLAIM, HANDLE, STARTED, Heartbeat
from caraml.results.finish import finish, now, skipped
from caraml.results.listing import Listing, command_of
from caraml.results.record import FINAL, STOPPED, Record
from caraml.results.status import DONE, ProgressLine, ProgressReader
from caraml.results.store import POINT, RECORD, Store, folder_name, latest_in, read_record
from caraml.suite.expand import WHOLE, Plan, PlannedPoint, SuitePart, expand, without_unmet
from caraml.suite.load import CATALOG, SuiteFile
from caraml.suite.model import Point
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.model import System
from caraml.worker.command_record import names_of
from caraml.workloads import params_of, software_of
from caraml.workloads.command import Params

_POLL_SECONDS = 0.25
_SCHEDULER_POLL_SECONDS = 5.0
_INDEX_SECONDS = 30.0
_TELL_SECONDS, _SOON_SECONDS = 30.0, 0.5
"""How often a campaign that waits for the device says so, and after how long at first and at another place."""
_QUEUE_SECONDS = (60.0, 960.0)
"""How often the whole queue of a scheduler is looked at, at first and after hours: that of a large machine has thousands of jobs."""
_MANY = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Options:
    """What was asked for besides the suite; kept in the store's listing."""

    file: str = ""
    settings: tuple[str, ...] = ()
    launcher: str = "local"
    tags: tuple[str, ...] = ()
    comment: str = ""
    detach: bool = False
    """Leave as soon as everything is in the launcher's hands."""
    only: frozenset[str] | None = None
    """Keys of the only points to run, anew; ``None`` for all that have no result."""
    part: SuitePart = WHOLE
    """What is to be run of the suite, where that is not all; the rest stays part of the campaign."""
    imported: str = ""
    """The archive that the suite came from."""
    elsewhere: Elsewhere | None = None
    """Where the results will lie on the machine that scripts are printed for."""
    too_large: bool = False
    """Run also points whose memory plan does not fit."""
    no_wait: bool = False
    """Rather end than wait for other campaigns on this device before the first point."""
    here: bool = False
    """Measure on this host although it may be a login node."""


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
    _shells: Shells = field(default_factory=Shells, init=False)
    _others: dict[str, Launcher] = field(default_factory=dict, init=False)
    """Launchers of jobs that an earlier campaign started in another way."""
    _waiting: deque[PointTask] = field(default_factory=deque, init=False)
    _running: dict[str, RunningPoint] = field(default_factory=dict, init=False)
    _busy: deque[PointTask] = field(default_factory=deque, init=False)
    _records: dict[int, Record] = field(default_factory=dict, init=False)
    _said: set[str] = field(default_factory=set, init=False)
    _known: set[str] = field(default_factory=set, init=False)
    """Keys of points that had a result when the campaign began."""
    _total: int = field(default=0, init=False)
    _launched: bool = field(default=False, init=False)
    _queue: tuple[str, float, float] = field(default=("", 0.0, _QUEUE_SECONDS[0]), init=False)
    """What was said of a scheduler's queue, when to look at it again, and how long to wait after that."""
    _needed: set[str] = field(default_factory=set, init=False)
    """Folders of points that others need."""
    _told: tuple[int, float] = field(default=(0, 0.0), init=False)
    """Place in the queue for the device as it was told, and when; 0: none, -1: none yet."""

    @property
    def command(self) -> str:
        """What runs the suite, for hints."""
        return command_of(self.options.file, self.suite.suite.name)

    def plan(self) -> Plan:
        """The points of the suite on this system. Raises ``InputError`` with every fault of the suite."""
        plan = expand(self.suite, machine_of(self.system, self.options.launcher), params_of, software_of)
        if self.options.too_large or self.options.only is not None:  # what is tried again was run before
            return plan
        reasons = too_large(self.system, [one.point for one in plan.points if one.skip is None and not self._has_run(one)])
        return replace(plan, points=without_unmet([replace(one, skip=one.skip or reasons.get(one.key)) for one in plan.points]))

    def _has_run(self, planned: PlannedPoint) -> bool:
        """Whether a point has shown what it needs of memory, or cannot have a memory plan."""
        if planned.point.workload != "gpt":
            return True
        record = latest_in(self.store.points / folder_name(planned.point))
        return record is not None and (record.status == "ok" or (not self.again and record.status in FINAL and record.status != "skipped"))

    def chosen(self, plan: Plan) -> list[tuple[int, PlannedPoint]]:
        """The points that are to be run or to be known, and their positions in the plan. Raises ``InputError`` where there are none."""
        machine = machine_of(self.system, self.options.launcher)
        keys = self.options.part.keys(self.suite, plan, machine)
        return [(index, planned) for index, planned in enumerate(plan.points) if keys is None or planned.key in keys]

    def run(self) -> list[Record]:
        """Run what has no result yet; returns the records of the points, in order (of those that have one, when detached).

        Raises:
            InputError: nothing can be run, or others could put their programs in the place of the suite's.
        """
        if self.options.launcher == "local" and not self.options.here:
            refuse_login_node(self.command)
        if isinstance(self.launcher, SlurmLauncher) and self.options.launcher == "slurm" and (why := no_cluster()) is not None:
            raise EnvironmentUnfitError(why, "run on a login node of the machine, or take `--launcher print` for the scripts alone")
        plan, only = self.plan(), self.options.only
        chosen = self.chosen(plan)
        self.store.make()
        work = deque(self._work(index, planned) for index, planned in chosen)
        points = [(planned.key, planned.point.label) for planned in plan.points]
        whole, total = len(work) == len(points), len(points)
        if only is not None:
            work = deque(one for one in work if one.key in only)
            if not work:
                what = f"no point of suite {self.suite.suite.name} has a key that was asked for"
                raise InputError(f"{what}: the suite, the machine or a version is another now", self.command)
        if unknown := dict.fromkeys(sentence for one in work for sentence in lacking(self, one.planned)):
            raise InputError("; ".join(unknown), f"export what is missing, or {self.command}")
        self.store.remember(self.listing(points), anew=self.again and only is None and whole)
        return self._settle(work, total)

    def settle(self, planned: PlannedPoint, index: int, total: int) -> Record:
        """Give one point its record: the one it has, or a new one."""
        self.store.make()
        return self._settle(deque([self._work(index, planned)]), total)[0]

    def listing(self, points: Sequence[tuple[str, str]]) -> Listing:
        """What this campaign was asked for."""
        options = self.options
        return Listing(
            name=self.suite.suite.name,
            title=self.suite.suite.title,
            file=options.file,
            text=self.suite.document.text,
            settings=list(options.settings),
            system=self.system.name,
            launcher=options.launcher,
            tags=list(options.tags),
            comment=options.comment,
            asked_at=now(),
            imported=options.imported,
            points=list(points),
        )

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _work(self, index: int, planned: PlannedPoint) -> PointTask:
        point = planned.point
        key, commanded = planned.key or point.key, None
        if point.workload == "command":
            params = Params.model_validate(point.params)
            commanded = params if self.is_light(params) else None
        return PointTask(index, planned, key, f"{point.workload}-{key}", point.label, commanded)

    def _settle(self, work: deque[PointTask], total: int) -> list[Record]:
        """Give every point its record; ``work`` is used up, so that ten thousand points are not kept twice."""
        self._waiting, self._busy, self._running, self._records = work, deque(), {}, {}
        self._total, self._pace, self._known = total, Pace(()), set()
        self._needed = {name for one in work for name in one.planned.point.needs}
        try:
            with ExitStack() as stack:
                self._heart = Heartbeat(self.store.root)
                stack.callback(self._heart.end)
                stack.callback(self.store.index.save)
                self.store.index.load()
                self._expect(work)
                self._set_up()
                self._saved = time.monotonic()
                self._loop()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise EnvironmentUnfitError(
                f"the disk is full: {error.strerror} while writing below {self.store.root}; every record that was written is whole",
                "make room, then run the same command again: it goes on where it stopped",
            ) from error
        return [self._records[index] for index in sorted(self._records)]

    def _expect(self, work: Iterable[PointTask]) -> None:
        """Say how long it will take, as far as earlier results tell."""
        if self.launcher.slots is None:
            return
        entries, anew = self.store.index.entries, self.again or self.options.only is not None
        self._known = {one.key for one in work if not anew and (entry := entries.get(one.name)) is not None and entry.row["status"] in DONE}
        earlier = (entry.row for entry in entries.values() if entry.row.get("device") == self.system.identity)
        self._pace = Pace((one.planned.point for one in work if one.planned.skip is None and one.key not in self._known), earlier)
        self._tell_left()

    def _loop(self) -> None:
        try:
            while self._waiting or self._running or self._busy:
                self._launch()
                if self.options.detach and not self._waiting:
                    return
                self._look()
                self._look_at_busy()
                self._heart.beat()
                if time.monotonic() - self._saved > _INDEX_SECONDS:
                    self.store.index.save()
                    self._saved = time.monotonic()
        except BaseException as error:
            # What a scheduler holds goes on; what runs here would be without anybody who ends it.
            if self.launcher.slots is not None and self._running:
                for launcher in (self.launcher, self._shells):
                    launcher.cancel([handle for handle, running in self._running.items() if running.launcher is launcher])
                with suppress(OSError):  # a full disk
                    for running in self._running.values():
                        finish_attempt(running.work, running.folder, 1, "failed", f"{STOPPED} ({type(error).__name__})")
            raise
        finally:
            if self.device is not None:
                self.device.release()

    def _set_up(self) -> None:
        """What the site has done before the first point; of scripts that are only printed, by whoever starts them."""
        software, launcher = self.system.site.software, self.launcher
        if not isinstance(launcher, PrintLauncher):
            set_up(software, self.store.root)
        elif (script := setup_script(software, self.store.root)) is not None:
            launcher.show(script)

    # -- launching -----------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        """Launch as many as the launcher takes."""
        slots = self.launcher.slots
        batch: list[tuple[PointTask, Path]] = []
        for _ in range(len(self._waiting)):
            if slots is not None and len(self._running) + len(batch) >= slots:
                break
            work = self._waiting[0]
            if any(one.name in work.planned.point.needs for one, _ in batch):  # it waits for their handles
                self._submit(batch)
                batch = []
            if not self._may_start(work):
                self._waiting.rotate(-1)
                continue
            number = self._open(work, batch)
            if number is not None and work.planned.skip is None and not self._has_device(bool(batch)):
                return
            self._waiting.popleft()
            folder = self._prepare(work, number) if number is not None else None
            if folder is not None:
                batch.append((work, folder))
        if batch:
            self._submit(batch)

    def _may_start(self, work: PointTask) -> bool:
        """Whether what a point needs has ended, or is a scheduler's job; where it did not succeed, the point is to be skipped."""
        if work.planned.skip is not None or not work.planned.point.needs:
            return True
        unsettled = {one.name for one in (*self._waiting, *self._busy)}.intersection(work.planned.point.needs)
        running = {one.work.name: handle for handle, one in self._running.items() if one.work.name in work.planned.point.needs}
        if unsettled or (running and self.launcher.slots is not None):
            return False
        work.after = tuple(running.values())
        if (why := self._unmet(work)) is not None:
            work.planned = replace(work.planned, skip=why)
        return True

    def _unmet(self, work: PointTask) -> str | None:
        """Which point that another needs did not succeed, and does not run either."""
        for name in set(work.planned.point.needs) - {one.work.name for one in self._running.values()}:
            record = latest_in(self.store.points / name)
            if record is None:
                return f"needs {name}, which has no result: caraml run {self.options.file or self.suite.suite.name}"
            if record.status != "ok":
                return f"needs {record.point.label}, which is {record.status}: {record.reason or 'no reason is known'}"
        return None

    def _has_device(self, ours: bool) -> bool:
        """Whether the machine's device is ours to use."""
        if self.device is None or self._running or ours or self.device.acquire(self._pace.expected(self._waiting[0].planned.point)):
            self._told = (0, 0.0)
            if self.device is not None and self.device.trouble is not None:
                self._say_once(f"not waiting for other campaigns on this device: {self.device.trouble}")
            return True
        if self.options.no_wait and not self._launched:
            raise EnvironmentUnfitError(f"not waiting: {self.device.queue()}", "leave out --no-wait to wait for it")
        now, place = time.monotonic(), len(self.device.ahead()) + 1
        if not self._told[0]:  # whose turn it is may only have to be noticed
            self._told = (-1, now)
        elif now - self._told[1] > (_SOON_SECONDS if place != self._told[0] else _TELL_SECONDS):
            self._told = (place, now)
            self.say(self.device.queue())
        return False

    def _open(self, work: PointTask, batch: list[tuple[PointTask, Path]]) -> int | None:
        """Look at what a point has; the number of the attempt that must be made, if one must. What was printed and not started is put into
        ``batch`` again."""
        found = find(self.store, work.name, self._heart.runner, self.options.launcher)
        anew = self.again or self.options.only is not None
        if found.busy is not None:
            self._busy.append(work)
            self._say_once(f"{work.planned.point.label}: process {found.busy.pid} on {found.busy.host} works on it")
        elif found.adopted is not None and self._is_printed(*found.adopted):
            self._print_again(work, found.adopted[0])
            batch.append((work, found.adopted[0]))
        elif found.adopted is not None:
            self._adopt(work, *found.adopted)
        elif found.record is not None and not anew and accepted(found.record, work.planned):
            self._done(work, found.record)
        else:
            return found.attempts + 1
        return None

    def _is_printed(self, folder: Path, handle: str) -> bool:
        """Whether an attempt's script was printed and not started, and is to be printed again."""
        return isinstance(self.launcher, PrintLauncher) and handle.startswith("print:") and not (folder / STARTED).exists()

    def _print_again(self, work: PointTask, folder: Path) -> None:
        """Have a printed script say what the suite and the machine's description say now, unless it was edited since it was printed."""
        if (folder / SCRIPT).stat().st_mtime_ns <= (folder / HANDLE).stat().st_mtime_ns:
            self._write_files(work.planned.point, folder)
        elif (folder / SCRIPT).read_text(encoding="utf-8") != files_of(self, work.planned.point, folder)[SCRIPT]:
            self.say(f"{folder / SCRIPT} was edited, and stays as it is")

    def _adopt(self, work: PointTask, folder: Path, handle: str) -> None:
        launcher = self._launcher_of(handle)
        if work.light is None and launcher.poll([handle])[handle].state == "lost":
            # It ended while nobody looked and left no word, as on a full disk: noted, and tried anew.
            finish_attempt(work, folder, 1, "lost", "its job was gone when the campaign was taken up again")
            self._waiting.append(work)
            return
        self.watcher.started(work.planned.point, work.index, self._total)
        self._running[handle] = self._running_point(work, folder, handle, launcher)

    def _launcher_of(self, handle: str) -> Launcher:
        """Ours, if it can have started the job."""
        kind = handle.partition(":")[0]
        if kind not in ("local", "slurm", "print") or kind == self.options.launcher:
            return self.launcher
        return self._others.setdefault(kind, launcher_of(handle, self.store.root))

    def _running_point(self, work: PointTask, folder: Path, handle: str, launcher: Launcher) -> RunningPoint:
        reader = None if work.light is not None else ProgressReader(folder)
        begun = cpu_time_of_children() if work.light is not None and work.light.energy else None
        return RunningPoint(work, folder, handle, work.planned.point.measure.timeout_seconds, launcher, reader=reader, begun=begun)

    def _prepare(self, work: PointTask, number: int) -> Path | None:
        """Make a new attempt, claimed by us, with all that its job needs; ``None`` when nothing is left to launch."""
        point, skip = work.planned.point, work.planned.skip
        folder = self.store.claim_attempt(point, work.name, number, lambda attempt: self._first_files(work, attempt))
        if folder is None:
            self._busy.append(work)
            return None
        try:
            if skip is None:
                if work.light is None:
                    self._write_files(point, folder)
                hand_to(work, folder, self)
                return folder
            skipped(folder, point, skip)
        except CaramlError as error:
            finish(folder, 1, "failed", str(error))
        self._done(work, read_record(folder / RECORD), reused=False)
        return None

    def _first_files(self, work: PointTask, attempt: Path) -> dict[str, str]:
        files = {f"{CLAIM}1": str(self._heart.runner)}
        if work.light is not None and work.planned.skip is None:  # its record will have the point, and nobody else asks
            title = f"{work.label}; point {work.key}, attempt {attempt.name}"
            point, needed = work.planned.point, needed_by(self, work.planned.point)
            return {**files, SCRIPT: script(point, work.light, title, str(attempt.absolute()), self.suite_folder, needed=needed)}
        return {**files, POINT: work.planned.point.model_dump_json(indent=1)}

    def _write_files(self, point: Point, folder: Path) -> None:
        for name, text in files_of(self, point, folder).items():
            own = name == SCRIPT
            write_file(folder / name, text, mode=0o755 if own else 0o644, sync="folder" if own else "none")

    def is_light(self, params: Params) -> bool:
        """Whether the shell alone runs it here: in the environment of whoever started the campaign, so not where the site has its own."""
        site = self.system.site
        bare = site.container.runtime == "none" and not (site.software.modules or site.software.venv or site.software.variables)
        return bare and self.launcher.slots is not None and params.marks is None

    @cached_property
    def _no_sensor(self) -> str | None:
        """Why energy cannot be measured on this node; ``None`` if it can."""
        return why_no_sensor()

    def _submit(self, batch: list[tuple[PointTask, Path]]) -> None:
        self._launched = True
        for work, _ in batch:
            self.watcher.started(work.planned.point, work.index, self._total)
        for launcher, some in (
            (self._shells, [one for one in batch if one[0].light]),
            (self.launcher, [one for one in batch if not one[0].light]),
        ):
            jobs = [self._job(work, folder) for work, folder in some]
            sensors = self._read_sensors(some[0][0]) if launcher is self._shells and some else None
            for (work, folder), handle in zip(some, launcher.submit(jobs) if jobs else [], strict=True):
                self._running[handle] = self._running_point(work, folder, handle, launcher)
                self._running[handle].sensors = sensors
                if work.light is None:  # the others announce themselves, and end in no time
                    note_handle(folder, handle)
                    if self.device is not None:
                        self.device.runs(handle)

    def _read_sensors(self, work: PointTask) -> Sensors | None:
        """Sensors for a program that the shell alone runs, where it wants energy and there are any."""
        assert work.light is not None
        if not work.light.energy or self._no_sensor is not None:
            return None
        self.watcher.progress(work.planned.point, ProgressLine(t=0.0, phase="idle", item=work.light.item))
        return Sensors(work.light.item, work.planned.point.measure.idle_seconds)

    def _job(self, work: PointTask, folder: Path) -> Job:
        point, awaited = work.planned.point, work.name in self._needed
        return Job(folder, folder / SCRIPT, point.nodes, point.devices, point.measure.timeout_seconds, work.after, awaited)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Wait a little, then see which jobs have ended."""
        if not self._running:
            if self._waiting or self._busy:
                time.sleep(_POLL_SECONDS)
            return
        wait_for(self._running, _POLL_SECONDS if self.launcher.slots is not None else _SCHEDULER_POLL_SECONDS)
        states = self._poll()
        self._tell_queue([handle for handle, state in states.items() if state.state == "waiting"])
        for handle, state in states.items():
            running = self._running[handle]
            line = running.reader.latest() if running.reader is not None else None
            if line is None and running.sensors is not None:
                line = running.sensors.line(time.monotonic() - running.since)
            if line is not None:
                self.watcher.progress(running.work.planned.point, line)
                self._tell_left()
            if state.state in ("ended", "lost"):
                del self._running[handle]
                self._conclude(running, state)
            elif self.launcher.slots is not None and running.look(state):
                running.launcher.cancel([handle])
                del self._running[handle]
                finish_attempt(running.work, running.folder, 1, "timeout", f"no result after {running.timeout:g} s")
                self._done(running.work, read_record(running.folder / RECORD), running)
        if not self._running and self.device is not None:
            self.device.release()

    def _tell_queue(self, handles: Sequence[str]) -> None:
        """Say what the jobs wait for that a scheduler has not started, when that has changed."""
        text, at, wait = self._queue
        if not isinstance(self.launcher, SlurmLauncher) or time.monotonic() < at or not (handles or text):
            return
        now = (self.launcher.outlook(handles) or "") if handles else ""
        if now != text:
            self.say(now or "no job waits in the queue any more")
        self._queue = (now, time.monotonic() + wait, min(2 * wait, _QUEUE_SECONDS[1]))

    def _poll(self) -> dict[str, JobState]:
        states: dict[str, JobState] = {}
        for launcher in (self.launcher, self._shells, *self._others.values()):
            handles = [handle for handle, running in self._running.items() if running.launcher is launcher]
            states |= launcher.poll(handles) if handles else {}
        return states

    def _conclude(self, running: RunningPoint, state: JobState) -> None:
        """See that an attempt whose job is over has its record."""
        work, folder = running.work, running.folder
        if running.sensors is not None:
            running.sensors.over()
        how = ran(str(folder)) if work.light is not None else None
        if work.light is not None and how is not None:
            names = names_of(work.planned.point, work.light, folder, self.suite_folder)
            resident, sensor = self._shells.resident.pop(running.handle, None), self._no_sensor if work.light.energy else None
            record = conclude(running, names, replace(how, extras=self._surroundings), resident, sensor)
            write_file(f"{folder}/{RECORD}", record.__pydantic_serializer__.to_json(record, indent=1), sync="file")
            self._done(work, record, running)
            return
        if state.exit_code == 0:
            wait_until_visible(folder)
        if state.state == "lost" and (why := self._unmet(work)) is not None:  # Slurm ends what waits for a job that failed
            finish_attempt(work, folder, 1, "skipped", why)
        if state.state == "lost" and not (folder / "failure.json").exists():
            finish_attempt(work, folder, 1, "lost", state.reason or "its job is gone")
        finish_attempt(work, folder, state.exit_code or 0)
        self._done(work, read_record(folder / RECORD), running)

    def _look_at_busy(self) -> None:
        """Take up points that others had, once they are done or dead."""
        if self._running and self.launcher.slots is not None:
            return
        for _ in range(len(self._busy)):
            work = self._busy.popleft()
            found = find(self.store, work.name, self._heart.runner, self.options.launcher)
            if found.record is not None:
                self._done(work, found.record)
            elif found.adopted is not None:
                self._adopt(work, *found.adopted)
            elif found.busy is not None:
                self._busy.append(work)
            else:
                self._waiting.append(work)

    def _done(self, work: PointTask, record: Record, running: RunningPoint | None = None, *, reused: bool | None = None) -> None:
        """A point has its record: from what was ``running``, or else one that it had before, unless ``reused`` says otherwise."""
        # Of very many records only the summary_record stays in memory; the store has the rest.
        self._records[work.index] = record if self._total <= _MANY else summary_record(work, record)
        self.store.index.note(work.name, record)
        self.watcher.finished(record, running is None if reused is None else reused)
        if running is not None and running.sensors is not None:
            running.sensors.close()
        if work.planned.skip is None and work.key not in self._known:
            self._pace.ended(work.planned.point, None if running is None else time.monotonic() - running.since)
            self._tell_left()

    def _tell_left(self) -> None:
        """Say how long all points will take yet where they run one after another; when a scheduler starts them nobody knows."""
        if self.launcher.slots is None:
            return
        now = time.monotonic()
        seconds, known = self._pace.left([(running.work.planned.point, now - running.since) for running in self._running.values()])
        told = f"{'about' if known else 'at least'} {seconds_text(seconds)} left"
        self.watcher.left(told if known or seconds >= 1 else "time left unknown")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    @cached_property
    def suite_folder(self) -> str:
        """From where programs start and paths are meant: the folder of the suite's file, the current one for suites of the catalogue."""
        folder = Path(self.options.file or self.suite.document.name).resolve().parent
        return str(Path.cwd() if folder == CATALOG.resolve() else folder)

    @cached_property
    def _surroundings(self) -> dict[str, Any]:
        """System and environment as they were when the first short run ended; asking anew for each would take longer than the run."""
        return {"system": detect().model_dump(mode="json"), "environment": environment()}


def exit_code(records: list[Record]) -> ExitCode:
    """0 when every point has a result; out of memory is one, a failure is not."""
    failed = any(record.status in ("failed", "timeout", "invalid", "lost") for record in records)
    return ExitCode.POINTS_FAILED if failed else ExitCode.OK
