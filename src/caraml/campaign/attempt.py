"""One attempt at one point, from the claim to the record.

A command on this machine of which no mark is waited for needs no worker: the shell that starts it does. Its script notes how it ended
behind its announcement, from which any runner can write the record, also days later. Where there are sensors the runner itself reads
them; what it read is lost with it. This is what makes ten thousand short runs cheap: no Python starts for them.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from caraml.base.files import write_file, write_new
from caraml.base.format import human
from caraml.engine.instruments import BUSY_SHARE, CpuTime, Instruments, cpu_time_of_children, share_of_others
from caraml.launch.base import Job, JobState, Launcher
from caraml.launch.script import SCRIPT, Recipe, link_to
from caraml.metrics.definitions import unit_of
from caraml.metrics.energy import ENERGY_METRICS
from caraml.metrics.model import Metric
from caraml.power.node import node_key
from caraml.results.claim import GATE, HANDLE, STARTED, Runner, alive, handle_of, holder, take_over, withdraw, young
from caraml.results.finish import LOG, finish
from caraml.results.record import FINAL, Record, Status
from caraml.results.status import ProgressLine, ProgressReader
from caraml.results.store import POINT, RECORD, Store, attempts, folder_name, latest_in, read_record
from caraml.suite.expand import PlannedPoint
from caraml.suite.model import Point
from caraml.system.variables import PROGRAM, SITE, behind, concealed, forget, hand_over, is_reference, loading, missing, of_caller
from caraml.worker.command import COMMAND, MAXRSS, Command
from caraml.worker.command_record import NO_ENERGY, Ran, measured_by, names_of, once, record_of_run, window_of
from caraml.worker.nodes import NO_SHARE, put_together
from caraml.workloads.command import Params, filled

if TYPE_CHECKING:
    from caraml.campaign.runner import Campaign


_VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_ANNOUNCING_SECONDS = 1.0
"""How long a script may take between making its announcement and writing it."""


@dataclass
class PointTask:
    """A point of the plan with what the campaign needs to know of it again and again."""

    index: int
    planned: PlannedPoint
    key: str
    name: str
    """Of the point's folder."""
    label: str
    light: Params | None
    """Parameters of a command that needs no worker."""
    after: tuple[str, ...] = ()
    """Handles of the jobs that have to succeed first."""


class Sensors:
    """The instruments around a program that the shell alone runs: opened, and read at rest, before it is started."""

    def __init__(self, item: str, idle_seconds: float) -> None:
        self._item, self._idle_seconds, self._instruments = item, idle_seconds, Instruments()
        self._instruments.measure_idle(idle_seconds)
        self._instruments.meter.mark()
        self._offsets = [time.time() - time.monotonic()]

    def line(self, seconds: float) -> ProgressLine:
        """What the sensors say now, ``seconds`` after the start."""
        return ProgressLine(t=seconds, phase="run", item=self._item, watts=self._instruments.meter.latest_power_w())

    def over(self) -> None:
        """The program has ended."""
        self._instruments.meter.mark()
        self._offsets.append(time.time() - time.monotonic())

    def close(self) -> None:
        """Read no more."""
        self._instruments.meter.stop()

    def completed(self, point: Point, params: Params, names: Mapping[str, Any], folder: Path, how: Ran) -> Ran:
        """How the program ran, with its energy; if it did not fail the machine is read at rest once more."""
        # The shell's clock may be set, or drift, while the program runs: its instants are put on ours at each end. A large step is out of
        # the seconds already.
        drift = self._offsets[1] - self._offsets[0]
        begin = how.at - self._offsets[0]
        end = begin + (how.seconds or 0.0) - (drift if abs(drift) <= _STEPPED else 0.0)
        if how.seconds is not None and end > begin:
            how = replace(how, seconds=end - begin)
        window = window_of(point, params, names, folder, how)
        if window is None:
            return how
        if not how.exit_code:
            self._instruments.measure_idle(self._idle_seconds)
        mine = self._instruments.summary(begin, end, {"run": (begin, end)})
        nodes = put_together({node_key(): [mine]}, {node_key(): [0]}, window)
        measured, fields = measured_by(nodes, self._instruments.meter, window, begin, item=params.item, folder=folder)
        return replace(how, measured=measured, extras={**how.extras, **fields, "environment": mine.environment})


@dataclass
class RunningPoint:
    """A job under way."""

    work: PointTask
    folder: Path
    handle: str
    timeout: float
    launcher: Launcher
    deadline: float | None = None
    reader: ProgressReader | None = field(default=None)
    since: float = field(default_factory=time.monotonic)
    """When it was launched."""
    begun: CpuTime | None = None
    """CPU time when a program was started by the shell alone, of which nobody else knows what others used."""
    sensors: Sensors | None = None
    """Read by this process, around a program that the shell alone runs."""

    def look(self, state: JobState) -> bool:
        """Note when the job began to run; true when its time is over."""
        if self.deadline is None and state.state == "running":
            self.deadline = time.monotonic() + self.timeout
        return self.deadline is not None and time.monotonic() > self.deadline


@dataclass(frozen=True)
class FoundAttempt:
    """What a point has when a campaign comes to it: at most one of the three."""

    record: Record | None = None
    """Its newest whole record."""
    adopted: tuple[Path, str] | None = None
    """Folder and handle of a job whose runner is dead, now claimed by us."""
    busy: Runner | None = None
    """Another campaign that works on it now."""
    attempts: int = 0
    """Highest number of an attempt when we looked."""


def find(store: Store, name: str, me: Runner, launcher: str = "local") -> FoundAttempt:
    """Look at a point. An attempt without a record whose runner is dead is taken over: adopted if its job started, void if not."""
    folder = store.points / name
    numbers = sorted(attempts(folder) or (), reverse=True)
    for number in numbers:
        attempt = folder / str(number)
        if (attempt / RECORD).exists():
            return FoundAttempt(record=read_record(attempt / RECORD), attempts=numbers[0])
        if number == numbers[0]:
            found = _take(store, attempt, me, launcher)
            if found is not None:
                return found
    return FoundAttempt(attempts=max(numbers, default=0))


def _take(store: Store, attempt: Path, me: Runner, launcher: str) -> FoundAttempt | None:
    """Take over an attempt that has no record; ``None`` when nothing of it will ever come."""
    number, runner = holder(attempt)
    if runner is not None and runner != me and alive(runner, store.root):
        return FoundAttempt(busy=runner)
    if runner is not None and runner.place != me.place and (handle_of(attempt) or "").startswith("local:") and young(attempt, store.root):
        return FoundAttempt(busy=runner)  # its process cannot be seen from here, but its files change
    if number and runner != me and not take_over(attempt, number, me):
        return FoundAttempt(busy=holder(attempt)[1] or me)
    if (attempt / RECORD).exists():  # it ended while we looked
        return FoundAttempt(record=read_record(attempt / RECORD), attempts=int(attempt.name))
    handle = handle_of(attempt)
    if handle is not None and handle.startswith("print:") and launcher != "print":
        handle = None  # its script was printed: whoever starts it later finds the start taken, unless it was started already
    if handle is None and not withdraw(attempt):
        handle = _announced(attempt)
    if handle is None:
        forget(attempt)
    return None if handle is None else FoundAttempt(adopted=(attempt, handle))


def _announced(attempt: Path) -> str | None:
    """The handle in an announcement that may be being written just now."""
    deadline = time.monotonic() + _ANNOUNCING_SECONDS
    while not (attempt / STARTED).stat().st_size and time.monotonic() < deadline:
        time.sleep(0.02)
    return handle_of(attempt, announced=True)


def note_handle(folder: Path, handle: str) -> None:
    """Keep a job's handle in its attempt's folder, whole or not at all. Not synced: after a power cut there is no job either, or it has
    announced itself."""
    write_file(f"{folder}/{HANDLE}", handle, sync="none")


def accepted(record: Record, planned: PlannedPoint) -> bool:
    """Whether a known record is the point's result, so that nothing has to be run."""
    return record.status in FINAL and (record.status == "skipped") == (planned.skip is not None)


def finish_attempt(work: PointTask, folder: Path, exit_code: int, status: Status | None = None, reason: str | None = None) -> None:
    """See that an attempt has a record: also one of a command without a worker, whose folder does not have the point."""
    if not (folder / POINT).exists():
        write_new(f"{folder}/{POINT}", work.planned.point.model_dump_json(indent=1))
    finish(folder, exit_code, status, reason)


def summary_record(work: PointTask, record: Record) -> Record:
    """How a point ended, and nothing more."""
    point, status, reason = work.planned.point, record.status, record.reason
    return Record(key=record.key, attempt=record.attempt, point=point, status=status, reason=reason, started_at=record.started_at)


def wait_until_visible(folder: Path) -> None:
    """A job that ended well has a record; a network file system may show what another host renamed some seconds late."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while RECORD not in os.listdir(folder) and time.monotonic() < deadline:  # noqa: PTH208 -- asks the server
        time.sleep(_LOOK_SECONDS)


class Watcher(Protocol):
    """Is told what happens, in the campaign's own thread."""

    def started(self, point: Point, index: int, total: int) -> None:
        """A point is being launched."""
        ...

    def progress(self, point: Point, line: ProgressLine) -> None:
        """A point said something."""
        ...

    def finished(self, record: Record, reused: bool) -> None:
        """A point has its record; ``reused`` when it had one before."""
        ...

    def left(self, text: str) -> None:
        """How long the whole campaign will take yet, in words, as far as results so far tell."""
        ...


_UNREAD = "the campaign that read the sensors ended before the program did"
_PATIENCE = 5.0
"""Seconds between asking a program to end and ending it."""


_STEPPED = 0.05
"""Seconds by which the clock and the uptime may differ over a run: the uptime is told in hundredths."""


def filled_command(params: Params, names: Mapping[str, Any]) -> tuple[list[str], dict[str, str], str]:
    """Arguments, those variables that may be shown, and folder of a program, with the templates filled in."""
    argv = [filled(word, names) for word in params.argv]
    env = {name: filled(text, names) for name, text in params.env.items() if not is_reference(text)}
    return argv, env, filled(params.cwd, names)


def references(params: Params) -> list[str]:
    """Names of a program's variables whose values are elsewhere."""
    return [name for name, text in params.env.items() if is_reference(text)]


def needed_by(campaign: Campaign, point: Point) -> Path | None:
    """Folder of the newest attempt at the one point that another needs, for its script."""
    if len(point.needs) != 1:
        return None
    folder = campaign.store.points.absolute() / point.needs[0]
    folder /= str(max(attempts(folder) or (1,)))
    return folder if campaign.options.elsewhere is None else campaign.options.elsewhere.path(folder)


def script(point: Point, params: Params, title: str, folder: str, suite_folder: str, *, needed: Path | None = None) -> str:
    """The text of ``run.sh``. ``title`` says what it is, ``folder`` is the attempt's, absolute."""
    argv, env, cwd = filled_command(params, names_of(point, params, folder, suite_folder))
    if argv[0] in _shell_words():  # `time` and `echo` are programs, too: the shell's own are not meant
        found = shutil.which(argv[0], path=env.get("PATH"))
        argv = ["env", *argv] if found is None else [found, *argv[1:]]
    exports = "".join(f"export {name}={shlex.quote(text)}\n" for name, text in env.items())
    exports += "".join(f"{line}\n" for line in loading(references(params), PROGRAM, last=True))
    return f"""#!/usr/bin/env bash
# {" ".join(title.split())}
set -u
cd {shlex.quote(folder)} || exit
{GATE}
{link_to(needed)}{exports}exec 3>>{STARTED} >>{LOG} 2>&1 </dev/null
cd {shlex.quote(cwd)} || exit
read -r up _ </proc/uptime
begin=$EPOCHREALTIME
{shlex.join(argv)} 3>&-
code=$?
end=$EPOCHREALTIME
read -r now _ </proc/uptime
echo "$code $begin $end $up $now" >&3
exit "$code"
"""


@cache
def _shell_words() -> frozenset[str]:
    """Names that bash takes for its own before it looks for a program."""
    done = subprocess.run(["bash", "-c", "compgen -bk"], capture_output=True, text=True, check=False)  # noqa: S607 -- the bash that its user has
    return frozenset(done.stdout.split())


def files_of(campaign: Campaign, point: Point, folder: Path) -> dict[str, str]:
    """The script of a point and what else its job reads, by name, for an attempt's folder, which need not be there."""
    params = Params.model_validate(point.params) if point.workload == "command" else None
    elsewhere, suite_folder, site = campaign.options.elsewhere, campaign.suite_folder, campaign.system.site
    if params is not None and campaign.is_light(params):
        title = f"{point.label}; point {point.key}, attempt {folder.name}"
        return {SCRIPT: script(point, params, title, str(folder.absolute()), suite_folder, needed=needed_by(campaign, point))}
    home = folder.resolve() if elsewhere is None else elsewhere.path(folder)
    files: dict[str, str] = {}
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
        cpu.usable_threads or cpu.threads or 1,
        site,
        kind,
        away=elsewhere is not None,
        needed=needed_by(campaign, point),
        suite_folder=None if params is not None or elsewhere is not None else suite_folder,
    )
    return {**files, SCRIPT: made.text()}


def ran(folder: str) -> Ran | None:
    """How the program ran, by the second line of its script's announcement; ``None`` if it has not said so."""
    try:
        descriptor = os.open(f"{folder}/{STARTED}", os.O_RDONLY)
    except FileNotFoundError:
        return None
    text = os.read(descriptor, 4096).decode()
    os.close(descriptor)
    lines = text.split("\n")
    if len(lines) != 3:
        return None
    code, *times = lines[1].replace(",", ".").split()  # some locales have a decimal comma
    begin, end, *uptime = map(float, times)
    started_at = datetime.fromtimestamp(begin, UTC).astimezone().isoformat(timespec="milliseconds")
    seconds = end - begin
    if uptime and abs(uptime[1] - uptime[0] - seconds) > _STEPPED:  # nobody can set the uptime, which is coarser
        seconds = uptime[1] - uptime[0]
    if seconds < 0:  # of a script that an earlier version wrote, without the uptime
        return Ran(int(code), started_at, None, doubt="the clock was stepped while the program ran", at=begin)
    return Ran(int(code), started_at, seconds, at=begin)


def conclude(running: RunningPoint, names: Mapping[str, Any], how: Ran, resident: int | None, sensor: str | None) -> Record:
    """The record of a program that ended.

    Args:
        running: the attempt at it.
        names: what its templates may name.
        how: what its script says.
        resident: the largest resident set of its processes, as the kernel has it [B].
        sensor: why no energy was measured, where it was asked for.
    """
    params, point = running.work.light, running.work.planned.point
    assert params is not None
    measured, flags = {**_no_energy(params.item, (sensor or _UNREAD) if params.energy else NO_ENERGY)}, []
    if running.sensors is not None:
        how = running.sensors.completed(point, params, names, running.folder, how)
        running.sensors.close()
    if params.energy:
        share = share_of_others(running.begun, cpu_time_of_children(), how.seconds or 0.0, os.cpu_count() or 1)
        others = Metric(value=share, unit="1", reason=NO_SHARE if share is None else None)
        measured |= {"run_time": once(how.seconds, "s"), "peak_host_memory": _peak_memory(resident), "other_cpu_share": others}
        flags = ["busy_machine"] if (share or 0.0) > BUSY_SHARE else []
    how = replace(how, measured={**measured, **how.measured}, flags=flags)
    return record_of_run(point, running.folder, params, names, how)


def _peak_memory(resident: int | None) -> Metric:
    """The kernel counts in what the process that started a program had at that time."""
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * MAXRSS
    if resident is not None and resident > ours:
        return Metric(value=resident, unit="B")
    hidden = f"at most the {human(ours, 'B')} of what started it, which hide it"
    return Metric(value=None, unit="B", reason=hidden if resident is not None else "another process than this one started it")


class Shells:
    """Starts light scripts as a launcher does, with less ado: no Python object and no look into /proc for each."""

    slots = 1

    def __init__(self) -> None:
        self._bash = shutil.which("bash") or "/bin/bash"
        self._environment = dict(os.environb)  # of bytes, as the kernel wants them: encoding them anew takes longer than the call
        self._pids: dict[str, int] = {}
        self.resident: dict[str, int] = {}
        """Largest resident set of the processes of scripts that ended [B], by handle; whoever reads it takes it out."""

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Start the scripts. A handle names the process only; the script's announcement has the rest, for whoever comes after us."""
        handles = []
        for job in jobs:
            pid = os.posix_spawn(self._bash, ["bash", str(job.script)], self._environment, setsid=True)
            handles.append(f"local:{pid}:")
            self._pids[handles[-1]] = pid
        return handles

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        """Running, or ended with its exit code."""
        return {handle: self._state(handle) for handle in handles}

    def _state(self, handle: str) -> JobState:
        pid, status, used = os.wait4(self._pids[handle], os.WNOHANG)
        if not pid:
            return JobState("running")
        del self._pids[handle]
        self.resident[handle] = used.ru_maxrss * MAXRSS
        return JobState("ended", os.waitstatus_to_exitcode(status))

    def cancel(self, handles: Sequence[str]) -> None:
        """Ask each to end, with all that it started, then end it."""
        for handle in handles:
            for number, patience in ((signal.SIGTERM, _PATIENCE), (signal.SIGKILL, _PATIENCE)):
                deadline = time.monotonic() + patience
                if handle in self._pids:
                    os.killpg(self._pids[handle], number)
                while handle in self._pids and self._state(handle).state == "running" and time.monotonic() < deadline:
                    time.sleep(0.02)


@lru_cache(maxsize=64)
def _no_energy(item: str, reason: str) -> dict[str, Metric]:
    names = ENERGY_METRICS if reason == NO_ENERGY else (*ENERGY_METRICS, "run_energy", "run_node_energy", "action")
    return {name: Metric(value=None, unit=unit_of(name, item), reason=reason) for name in names}


def lacking(campaign: Campaign, planned: PlannedPoint) -> list[str]:
    """A sentence for each variable of a point that is to run whose value is not known here."""
    if planned.skip is not None:
        return []
    site = {name: text for name, text in concealed(campaign.system.site.software.variables).items() if is_reference(text)}
    env = planned.point.params.get("env") if planned.point.workload == "command" else None
    found = [*missing(site, {}), *missing(cast(dict[str, str], env or {}), campaign.suite.values)]
    if not found or campaign.again or campaign.options.only is not None:
        return found
    known = latest_in(campaign.store.points / folder_name(planned.point))
    return [] if known is not None and accepted(known, planned) else found


def hand_to(work: PointTask, folder: Path, campaign: Campaign) -> None:
    """Leave what a point's scripts do not say where only the job's user can read it."""
    if work.light is not None and not references(work.light):
        return  # ten thousand times in a row
    point, program = work.planned.point, {}
    if point.workload == "command":
        params = work.light or Params.model_validate(point.params)
        names = names_of(point, params, folder.absolute(), campaign.suite_folder)
        templates = {name: behind(name, params.env[name], campaign.suite.values) for name in references(params)}
        program = {name: filled(template, names) for name, template in templates.items() if template is not None}
    site = {} if work.light else of_caller(concealed(campaign.system.site.software.variables))
    hand_over(folder, {SITE: site, PROGRAM: program})
