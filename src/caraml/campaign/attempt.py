"""One attempt at one point, from the claim to the record: who works on it, what its job is given, and how it is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError
from caraml.base.files import there, write_file, write_new
from caraml.base.format import count
from caraml.campaign import Campaign
from caraml.engine.instruments import BUSY_SHARE, NO_SHARE, CpuTime, cpu_time_of_children, share_of_others
from caraml.launch import Job, JobState, Launcher, container
from caraml.launch.script import SCRIPT, Recipe, program_script
from caraml.metrics.energy import ENERGY_METRICS, NO_ENERGY, POWER_METRICS
from caraml.metrics.model import Metric, unknown
from caraml.power.meter import suspended_s
from caraml.results import claim
from caraml.results.finish import finish, kept, reason_of, skipped
from caraml.results.record import FINAL, Record, Status
from caraml.results.rows import has_record
from caraml.results.status import ProgressReader
from caraml.results.store import POINT, RECORD, Store, attempts, latest_in, record_of
from caraml.suite.expand import PlannedPoint
from caraml.suite.model import Point
from caraml.system.catalogue import GIVEN, LOCAL, given
from caraml.system.variables import PROGRAM, SITE, behind, concealed, forget, hand_over, is_reference, missing, of_caller
from caraml.worker.command import COMMAND, Command, peak_memory
from caraml.worker.command_record import Output, Ran, Sensors, once, record_of_run
from caraml.workloads.command import Params, filled, filled_command, names_of, references

_VISIBLE_SECONDS = 30.0
_LOOK_SECONDS = 0.25
_ASLEEP_SECONDS = 1.0
"""A machine that slept for longer while the shell alone ran a program has no time of it: of all clocks that the shell can read, none stops
then."""
_ANNOUNCING_SECONDS = 1.0
"""How long a script may take between making its announcement and writing it, and a runner with its claim where there are no hard links."""


@dataclass
class PointTask:
    """A point of the plan with what the campaign needs to know of it again and again."""

    index: int
    planned: PlannedPoint
    key: str
    name: str
    """Of the point's folder."""
    light: Params | None
    """Parameters of a command that needs no worker."""
    after: tuple[str, ...] = ()
    """Handles of the jobs that have to succeed first."""

    @classmethod
    def of(cls, campaign: Campaign, index: int, planned: PlannedPoint) -> PointTask:
        """What ``campaign`` needs to know of the point at ``index`` of its plan."""
        point = planned.point
        key, commanded = planned.key or point.key, None
        if point.workload == "command":
            params = Params.model_validate(point.params)
            commanded = params if campaign.is_light(params) else None
        return cls(index, planned, key, f"{point.workload}-{key}", commanded)

    @property
    def point(self) -> Point:
        return self.planned.point

    def job(self, folder: Path, *, awaited: bool) -> Job:
        """What a launcher is told of an attempt at it; ``awaited``: others may be submitted that wait for it."""
        point = self.point
        return Job(folder, folder / SCRIPT, point.nodes, point.devices, point.measure.timeout_seconds, self.after, awaited)


@dataclass
class RunningPoint:
    """A job under way."""

    work: PointTask
    folder: Path
    handle: str
    launcher: Launcher
    deadline: float | None = None
    reader: ProgressReader | None = field(default=None)
    since: float = field(default_factory=time.monotonic)
    """When it was launched."""
    begun: CpuTime | None = None
    """CPU time when a program was started by the shell alone, of which nobody else knows what others used."""
    sensors: Sensors | None = None
    """Read by this process, around a program that the shell alone runs."""
    asleep: float = field(default_factory=suspended_s)
    """How long the machine had slept when it was launched."""

    @classmethod
    def of(cls, work: PointTask, folder: Path, handle: str, launcher: Launcher) -> RunningPoint:
        """A job that was launched just now, or is taken up."""
        light = work.light
        begun = cpu_time_of_children() if light is not None and light.energy else None
        return cls(work, folder, handle, launcher, reader=ProgressReader(folder) if light is None else None, begun=begun)

    def look(self, state: JobState) -> bool:
        """Note when the job began to run; true when its time is over."""
        if self.deadline is None and state.state == "running":
            self.deadline = time.monotonic() + self.work.point.measure.timeout_seconds
        return self.deadline is not None and time.monotonic() > self.deadline


@dataclass(frozen=True)
class FoundAttempt:
    """What a point has when a campaign comes to it: at most one of the three."""

    record: Record | None = None
    """Its newest whole record."""
    adopted: tuple[Path, str] | None = None
    """Folder and handle of a job whose runner is dead, now claimed by us."""
    busy: claim.Runner | None = None
    """Another campaign that works on it now."""
    attempts: int = 0
    """Highest number of an attempt when we looked."""


def find(store: Store, name: str, me: claim.Runner, launcher: str = "local") -> FoundAttempt:
    """Look at a point. An attempt without a record whose runner is dead is taken over: adopted if its job started, void if not."""
    folder = store.points / name
    numbers = attempts(folder)
    for number in numbers:
        attempt = folder / str(number)
        if has_record(attempt):
            return FoundAttempt(record=record_of(attempt / RECORD), attempts=numbers[0])
        if number == numbers[0]:
            found = _take(store, attempt, me, launcher)
            if found is not None:
                return found
    return FoundAttempt(attempts=max(numbers, default=0))


def _take(store: Store, attempt: Path, me: claim.Runner, launcher: str) -> FoundAttempt | None:
    """Take over an attempt that has no record; ``None`` when nothing of it will ever come."""
    number, runner = claim.holder(attempt)
    if number and runner is None:
        _await_text(attempt / f"{claim.CLAIM}{number}")
        number, runner = claim.holder(attempt)
    if runner is not None and runner != me and claim.alive(runner, store.root):
        return FoundAttempt(busy=runner)
    hidden = claim.away(attempt) or (runner if runner is not None and runner.place != me.place else None)
    if hidden is not None and claim.kind_of(claim.handle_of(attempt) or "") == "local" and claim.recent(attempt):
        return FoundAttempt(busy=hidden)  # its process cannot be seen from here, but its files change
    if number and runner != me and not claim.take_over(attempt, number, me):
        return FoundAttempt(busy=claim.holder(attempt)[1] or me)
    if there(attempt / RECORD):  # it ended while we looked
        return FoundAttempt(record=record_of(attempt / RECORD), attempts=int(attempt.name))
    handle = claim.handle_of(attempt)
    if handle is not None and claim.kind_of(handle) == "print" and launcher != "print":
        handle = None  # its script was printed: whoever starts it later finds the start taken, unless it was started already
    if handle is None and not claim.withdraw(attempt):
        handle = _announced(attempt)
        if (hidden := claim.away(attempt)) is not None and claim.kind_of(handle or "") == "local" and claim.recent(attempt):
            return FoundAttempt(busy=hidden)
    if handle is None:
        forget(attempt)
    return None if handle is None else FoundAttempt(adopted=(attempt, handle))


def _announced(attempt: Path) -> str | None:
    """The handle in an announcement that may be being written just now."""
    _await_text(attempt / claim.STARTED)
    return claim.handle_of(attempt, announced=True)


def _await_text(path: Path) -> None:
    """Wait a moment for a file that is empty as it is being written just now."""
    deadline = time.monotonic() + _ANNOUNCING_SECONDS
    while os.path.lexists(path) and not path.lstat().st_size and time.monotonic() < deadline:
        time.sleep(0.02)


def note_handle(folder: Path, handle: str, launcher: str) -> bool:
    """Keep a job's handle in its attempt's folder, whole or not at all. Not synced: after a power cut there is no job either, or it has
    announced itself. False for a handle by which nobody would find a job of this launcher again: the job's start is taken away."""
    if launcher not in claim.BUILT_IN and (claim.kind_of(str(handle)) != launcher or claim.checked(str(handle), folder) != handle):
        claim.withdraw(folder)
        return False
    write_file(f"{folder}/{claim.HANDLE}", handle, sync="none")
    return True


def refuse_handles(launcher: Launcher, name: str, handles: Sequence[str]) -> NoReturn:
    """Have jobs cancelled that nobody would find again, and raise ``InputError`` with what their launcher has to call them."""
    try:
        launcher.cancel(handles)
        done = "was told to cancel"
    except Exception as error:  # noqa: BLE001 -- the launcher is somebody else's, and the handle must be told
        done = f"could not cancel ({reason_of(error)})"
    told = f"it {done} {count(len(handles), 'such job')}"
    raise InputError(
        f"launcher {name!r} gave a job the handle {str(handles[0])[:300]!r}, expected {name}:JOB:FOLDER; {told}",
        "JOB is letters, digits and any of _ . - + @ [ ], at most 200, first a letter or digit; FOLDER is job.folder.resolve(): "
        "docs/extend/launcher.md",
    )


def accepted(record: Record, planned: PlannedPoint) -> bool:
    """Whether a known record is the point's result, so that nothing has to be run."""
    return record.status in FINAL and (record.status == "skipped") == (planned.skip is not None)


def finish_attempt(work: PointTask, folder: Path, exit_code: int, status: Status | None = None, reason: str | None = None) -> None:
    """See that an attempt has a record: also one of a command without a worker, whose folder does not have the point. Raises
    ``EnvironmentUnfitError`` where it cannot be written, with the place where it is."""
    try:
        if not (folder / POINT).exists():
            write_new(f"{folder}/{POINT}", work.point.model_dump_json(indent=1))
        finish(folder, exit_code, status, reason)
    except OSError as error:
        if where := kept(folder):
            raise EnvironmentUnfitError(f"{folder}: {error.strerror}{where}") from error
        raise


def summary_record(work: PointTask, record: Record) -> Record:
    """How a point ended, and nothing more."""
    point, status, reason = work.point, record.status, record.reason
    return Record(key=record.key, attempt=record.attempt, point=point, status=status, reason=reason, started_at=record.started_at)


def wait_until_visible(folder: Path) -> None:
    """A job that ended well has a record; a network file system may show what another host renamed some seconds late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not there(folder / RECORD) and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def needed_by(campaign: Campaign, point: Point) -> Path | None:
    """Folder of the newest attempt at the one point that another needs, for its script."""
    if len(point.needs) != 1:
        return None
    folder = campaign.store.points.absolute() / point.needs[0]
    folder /= str(max(attempts(folder) or (1,)))
    return folder if campaign.options.elsewhere is None else campaign.options.elsewhere.path(folder)


def unmet(campaign: Campaign, needs: Iterable[str]) -> str | None:
    """Which point that another needs, by its folder's name, did not succeed; ``None`` if all did."""
    for name in needs:
        record = latest_in(campaign.store.points / name)
        if record is None:
            return f"needs {name}, which has no result: caraml run {campaign.options.file or campaign.suite.suite.name}"
        if record.status != "ok":
            return f"needs {record.point.label}, which is {record.status}: {record.reason or 'no reason is known'}"
    return None


def files_of(campaign: Campaign, point: Point, folder: Path) -> dict[str, str]:
    """The script of a point and what else its job reads, by name, for an attempt's folder, which need not be there. Raises ``InputError``
    where the site lacks its image, or asks for something impossible."""
    params = Params.model_validate(point.params) if point.workload == "command" else None
    elsewhere, suite_folder, site = campaign.options.elsewhere, campaign.suite_folder, campaign.system.site
    if params is not None and campaign.is_light(params):
        return {SCRIPT: program_script(point, params, folder.absolute(), suite_folder, needed_by(campaign, point))}
    if elsewhere is None:
        container.check(site.container)
    home = folder.resolve() if elsewhere is None else elsewhere.path(folder)
    files: dict[str, str] = {} if params is not None or campaign.system.name == LOCAL else {GIVEN: given(campaign.system)}
    if params is not None:
        suite_folder = suite_folder if elsewhere is None else str(elsewhere.path(Path(suite_folder)))
        argv, env, cwd = filled_command(params, names_of(point, params, home, suite_folder))
        command = Command(argv=argv, env=env, unseen=references(params), cwd=cwd, suite_folder=suite_folder)
        files[COMMAND] = command.model_dump_json(indent=1)
    if campaign.launcher.slots is not None:  # it runs where it is started, whatever scheduler the machine has
        site = site.model_copy(update={"scheduler": None})
    cpu, kind = campaign.system.cpu, campaign.system.devices[0].kind
    made = Recipe(
        point,
        home,
        cpu.usable_threads or cpu.threads or cpu.cores or 1,
        site,
        kind,
        away=elsewhere is not None,
        needed=needed_by(campaign, point),
        suite_folder=None if params is not None or elsewhere is not None else suite_folder,
    )
    return {**files, SCRIPT: made.text()}


def lacking(campaign: Campaign, planned: PlannedPoint) -> list[str]:
    """A sentence for each variable of a point that is to run whose value is not known here."""
    if planned.skip is not None:
        return []
    site = {name: text for name, text in concealed(campaign.system.site.software.variables).items() if is_reference(text)}
    env = planned.point.params.get("env") if planned.point.workload == "command" else None
    found = [*missing(site, {}), *missing(cast(dict[str, str], env or {}), campaign.suite.values)]
    if not found or campaign.again or campaign.options.only is not None:
        return found
    known = latest_in(campaign.store.points / planned.point.folder_name)
    return [] if known is not None and accepted(known, planned) else found


def _hand_to(work: PointTask, folder: Path, campaign: Campaign) -> None:
    """Leave what a point's scripts do not say where only the job's user can read it."""
    if work.light is not None and not references(work.light):
        return  # ten thousand times in a row
    point, program = work.point, {}
    if point.workload == "command":
        params = work.light or Params.model_validate(point.params)
        names = names_of(point, params, folder.absolute(), campaign.suite_folder)
        templates = {name: behind(name, params.env[name], campaign.suite.values) for name in references(params)}
        program = {name: filled(template, names) for name, template in templates.items() if template is not None}
    site = {} if work.light else of_caller(concealed(campaign.system.site.software.variables))
    hand_over(folder, {SITE: site, PROGRAM: program})


def prepare(campaign: Campaign, work: PointTask, number: int, runner: claim.Runner) -> Path | Record | None:
    """Make attempt ``number``, claimed by ``runner``, with all that its job needs: its folder; its record, where there is nothing to
    launch; ``None`` where another campaign was faster."""
    folder = campaign.store.claim_attempt(work.point, work.name, number, lambda attempt: _first_files(campaign, work, attempt, runner))
    if folder is None:
        return None
    try:
        if work.planned.skip is None:
            if work.light is None:
                _write_files(campaign, work.point, folder)
            _hand_to(work, folder, campaign)
            return folder
        skipped(folder, work.point, work.planned.skip)
    except CaramlError as error:
        finish(folder, 1, "failed", error.line)
    return record_of(folder / RECORD)


def _first_files(campaign: Campaign, work: PointTask, attempt: Path, runner: claim.Runner) -> dict[str, str]:
    """Names and texts of the files that are in an attempt's folder from its first moment on."""
    files, point = {f"{claim.CLAIM}1": str(runner)}, work.point
    if work.light is None or work.planned.skip is not None:
        return {**files, POINT: point.model_dump_json(indent=1)}
    # Its record will have the point, and nobody else asks.
    return {**files, SCRIPT: program_script(point, work.light, attempt.absolute(), campaign.suite_folder, needed_by(campaign, point))}


def _write_files(campaign: Campaign, point: Point, folder: Path) -> None:
    for name, text in files_of(campaign, point, folder).items():
        own = name == SCRIPT
        write_file(folder / name, text, mode=0o755 if own else 0o644, sync="folder" if own else "none")


def is_printed(folder: Path, handle: str) -> bool:
    """Whether an attempt's script was printed and not started."""
    return claim.kind_of(handle) == "print" and not (folder / claim.STARTED).exists()


def write_again(campaign: Campaign, point: Point, folder: Path) -> None:
    """Have a printed script say what the suite and the machine's description say now, unless it was edited since it was printed."""
    if (folder / SCRIPT).stat().st_mtime_ns <= (folder / claim.HANDLE).stat().st_mtime_ns:
        _write_files(campaign, point, folder)
    elif (folder / SCRIPT).read_text(encoding="utf-8") != files_of(campaign, point, folder)[SCRIPT]:
        campaign.say(f"{folder / SCRIPT} was edited, and stays as it is")


_UNREAD = "the campaign that read the sensors ended before the program did"


def record_of_program(running: RunningPoint, names: Mapping[str, Any], how: Ran, resident: int | None, sensor: str | None) -> Record:
    """The record of a program that ended, by what its script says, ``names`` for its templates, the largest resident set of its processes
    in the kernel's unit, and why no energy was measured where it was asked for."""
    params, point = running.work.light, running.work.point
    assert params is not None
    measured, flags = {**_no_energy(params.item, (sensor or _UNREAD) if params.energy else NO_ENERGY)}, []
    output = Output.of(params, names, running.folder, how.exit_code)
    if suspended_s() - running.asleep > _ASLEEP_SECONDS:
        how = replace(how, seconds=None, doubt="the machine slept while the program ran")
    if running.sensors is not None:
        how = running.sensors.completed(point, output.items, running.folder, how)
        running.sensors.close()
    if params.energy:
        share = share_of_others(running.begun, cpu_time_of_children(), how.seconds or 0.0, os.cpu_count() or 1)
        others = Metric(value=share, unit="1", reason=NO_SHARE if share is None else None)
        measured |= {"run_time": once(how.seconds, "s"), "peak_host_memory": peak_memory(resident), "other_cpu_share": others}
        flags = ["busy_machine"] if (share or 0.0) > BUSY_SHARE else []
    how = replace(how, measured={**measured, **how.measured}, flags=flags)
    return record_of_run(point, running.folder, params, output, how)


@lru_cache(maxsize=64)
def _no_energy(item: str, reason: str) -> dict[str, Metric]:
    names = ENERGY_METRICS if reason == NO_ENERGY else (*ENERGY_METRICS, *POWER_METRICS, "run_energy", "run_node_energy", "action")
    return unknown(names, reason, item=item)
