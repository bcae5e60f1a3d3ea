"""Launchers by name, and the one that a job's handle belongs to; those that need no scheduler: local, and printed scripts; the
site's setup lines."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, get_args

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError, unknown_name
from caraml.base.files import make_folder, open_new, touch, write_file
from caraml.base.format import count
from caraml.base.plugins import Plugin
from caraml.base.processes import alone
from caraml.launch import Elsewhere, Job, JobState, Launcher, State
from caraml.launch.batch import SlurmOptions
from caraml.launch.script import SCRIPT, exports, join, modules
from caraml.launch.slurm import SlurmLauncher
from caraml.results.claim import BUILT_IN, HANDLE, job_of, kind_of, launcher_plugins, not_installed, start_time
from caraml.results.finish import reason_of
from caraml.results.store import RECORD
from caraml.system.model import Scheduler, Site, Software, System
from caraml.system.variables import concealed, digest, of_caller, required

SCRIPTS = "slurm"
"""Folder below the store for the scripts and logs of arrays and packs."""


def default_name(system: System) -> str:
    """``slurm`` on a machine whose description has a scheduler, else ``local``."""
    return "local" if system.site.scheduler is None else "slurm"


def launcher(
    name: str,
    system: System,
    root: Path,
    options: SlurmOptions | None = None,
    show: Callable[[str], None] = print,
    *,
    elsewhere: Elsewhere | None = None,
) -> Launcher:
    """The launcher called ``name``; ``elsewhere`` is where printed scripts will be started. Raises ``InputError`` for Slurm on a machine
    whose description has no scheduler, and as :func:`plug_in`."""
    if name == "local":
        return LocalLauncher()
    if name not in BUILT_IN:
        return plug_in(name)
    scheduler, prints = system.site.scheduler, name == "print"
    slurm = SlurmLauncher(scheduler, root / SCRIPTS, options, asks=not prints, elsewhere=elsewhere) if scheduler is not None else None
    if prints:
        return PrintLauncher(show, slurm, elsewhere)
    if slurm is None:
        raise InputError(
            f"system {system.name!r} has no scheduler, so there is nothing to submit to",
            "name a system that has one (caraml list systems), or describe yours with a [site.scheduler]: docs/systems.md",
        )
    return slurm


def launcher_of(handle: str, root: Path) -> Launcher:
    """A launcher that can look at and end the job of this handle; it needs to know nothing of the machine. Raises as :func:`plug_in`."""
    kind = kind_of(handle)
    if kind == "slurm":
        return SlurmLauncher(Scheduler(), root / SCRIPTS)
    if kind == "print":
        return PrintLauncher(lambda text: None)
    return LocalLauncher() if kind == "local" else plug_in(kind)


def plug_in(name: str) -> Launcher:
    """A new launcher of the class that another package has under this name. Raises ``InputError`` where none has, and as
    :class:`PlugInLauncher`."""
    others = launcher_plugins()
    if name not in others:
        error = unknown_name("launcher", name, dict.fromkeys((*BUILT_IN, *others)))
        raise error if error.guess else InputError(error.args[0], not_installed(name))
    return PlugInLauncher(others[name])


class PlugInLauncher:
    """A launcher of another package: whatever that does wrong is an error in which its users find its name. Raises ``InputError`` where it
    is no class, lacks a member, or gives another number of handles than it was given jobs, and ``EnvironmentUnfitError`` where it cannot be
    imported, or something in it raised."""

    def __init__(self, plugin: Plugin) -> None:
        self._what = f"launcher {plugin.name!r} of plug-in {plugin.package} ({plugin.point.value})"
        made = plugin.load(type)
        with self._named("calling it without arguments"):
            self._own: Any = made()
            lacks = [name for name in ("slots", "submit", "poll", "cancel") if not hasattr(self._own, name)]
            self.slots = None if lacks else self._own.slots
        if lacks:
            raise self._wrong(f"no {', no '.join(lacks)}", "slots, submit, poll and cancel")
        if self.slots is not None and not (isinstance(self.slots, int) and self.slots > 0):
            raise self._wrong(f"slots = {self.slots!r}", "None for a queue, or a number from 1")

    def submit(self, jobs: Sequence[Job]) -> Iterator[str]:
        given = 0
        with self._named("submit"):
            for handle in self._own.submit(jobs):
                given += 1
                if given > len(jobs):
                    break
                yield handle
        if given != len(jobs):
            found = "more handles" if given > len(jobs) else count(given, "handle")
            raise self._wrong(f"{found} from submit", f"one for each of {count(len(jobs), 'job')}")

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        with self._named("poll"):
            given = self._own.poll(handles)
            states: dict[str, JobState] = {handle: given[handle] for handle in handles}
        for state in states.values():
            if not isinstance(state, JobState) or state.state not in get_args(State):
                raise self._wrong(f"{state!r} from poll", f"a JobState of {', '.join(get_args(State))}")
        return states

    def cancel(self, handles: Sequence[str]) -> None:
        with self._named("cancel"):
            self._own.cancel(handles)

    def _wrong(self, found: str, expected: str) -> InputError:
        return InputError(f"{self._what}: found {found}, expected {expected}", "repair the package: docs/extend/launcher.md")

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CaramlError:
            raise
        except (Exception, SystemExit) as error:  # a foreign module may raise anything
            raise EnvironmentUnfitError(
                f"{self._what}: {doing} failed: {reason_of(error)}",
                "repair the package, then run the same command again: it finds the jobs that have begun",
            ) from error


def refuse_unasked(jobs: Sequence[tuple[str, Path, str]]) -> NoReturn:
    """Raise ``EnvironmentUnfitError`` for points (label, folder, handle) that have jobs of plug-ins which nobody was told to ask."""
    label, folder, handle = jobs[0]
    kind = kind_of(handle)
    more = f" (and {count(len(jobs) - 1, 'more point')})" if len(jobs) > 1 else ""
    hint = f"`--launcher {kind}` takes it up"
    if kind not in launcher_plugins():
        hint = f"{not_installed(kind)}, then {hint}"
    raise EnvironmentUnfitError(
        f"{label}{more} was not started a second time: its job {job_of(handle)} may still run, and this run asks no launcher {kind!r}",
        f"{hint}; if you know that the job is over, remove {folder / HANDLE}",
    )


def _number_of(folder: Path) -> str:
    """Name of the shell variable that has the number of a printed job."""
    return re.sub(r"\W", "_", f"job_{folder.parent.name}")


class PrintLauncher:
    """Starts nothing: prints one command for each script. A handle is ``print:FOLDER``; a point counts as ended when it has its record.

    With ``slurm`` the commands are that launcher's, arrays and packs included; without it they run the scripts on this machine.
    """

    slots = None

    def __init__(self, show: Callable[[str], None], slurm: SlurmLauncher | None = None, elsewhere: Elsewhere | None = None) -> None:
        self._show, self._slurm, self._elsewhere = show, slurm, elsewhere

    def show(self, script: Path) -> None:
        """Print what runs a script by hand."""
        self._show(shlex.join(["bash", str(script if self._elsewhere is None else self._elsewhere.path(script))]))

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Print what would start the jobs."""
        if self._slurm is None:
            for job in jobs:
                self.show(job.script)
        else:
            for group, script in self._slurm.scripts(jobs):
                after = [f"slurm:${_number_of(Path(handle.partition(':')[2]))}:" for handle in group[0].after]
                line = join(self._slurm.command(script, [replace(group[0], after=tuple(after))]))
                self._show(f"{_number_of(group[0].folder)}=$({line})" if group[0].awaited else line)
        return [f"print:{job.folder.resolve()}" for job in jobs]

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look for records of points that somebody has started."""
        return {handle: self._state(Path(handle.partition(":")[2])) for handle in handles}

    @staticmethod
    def _state(folder: Path) -> JobState:
        return JobState("ended", 0) if (folder / RECORD).exists() else JobState("waiting", reason="its script was printed, not started")

    def cancel(self, handles: Sequence[str]) -> None:
        """There is nothing to end."""


_PATIENCE = 5.0
"""Seconds between asking a job to end and ending it."""
_LOOK_SECONDS = 0.02


class LocalLauncher:
    """Runs a job's script with bash, one at a time. A handle is ``local:PID:START:FOLDER``, START being the kernel's start time of the
    process and FOLDER the attempt's, whose script it runs."""

    slots = 1

    def __init__(self, *, brief: bool = False) -> None:
        """``brief``: handles are ``local:PID:``, without a look into /proc for each of ten thousand short jobs; what their scripts announce
        has the rest, for whoever comes after us."""
        self._brief, self._bash = brief, shutil.which("bash") or "/bin/bash"
        self._closed = [(os.POSIX_SPAWN_CLOSE, number) for number in _inherited()]
        self._codes: dict[str, int | None] = {}
        """Exit codes of the jobs that were started here; ``None``: it runs."""
        self.resident: dict[str, int] = {}
        """Largest resident sets of the processes of those that ended, as the kernel counts; whoever reads one takes it out."""

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Start the scripts; their output goes where they say."""
        around, files = dict(os.environb), [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), *self._closed]
        handles = []
        for job in jobs:
            # Python ignores these signals, and what it starts would.
            argv, ours = ["bash", str(job.script)], [signal.SIGPIPE, signal.SIGXFSZ]
            pid = os.posix_spawn(self._bash, argv, around, file_actions=files, setsid=True, setsigdef=ours)
            handles.append(f"local:{pid}:" if self._brief else f"local:{pid}:{start_time(pid)}:{job.folder.resolve()}")
            self._codes[handles[-1]] = None
        return handles

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        """Running, or ended with its exit code (negative: the signal); ``lost`` for the child of another process that is gone."""
        return {handle: self._state(handle) for handle in handles}

    def _state(self, handle: str) -> JobState:
        if handle not in self._codes:
            return JobState("running") if _alive(handle) else JobState("lost", reason="its process is gone")
        if self._codes[handle] is None:
            try:
                pid, status, used = os.wait4(_pid(handle), os.WNOHANG)
            except ChildProcessError:  # what started us ignores SIGCHLD, so that the kernel keeps no exit codes: the record has the result
                pid, status, used = _pid(handle), 0, None
            if not pid:
                return JobState("running")
            self._codes[handle] = os.waitstatus_to_exitcode(status)
            if used is not None:
                self.resident[handle] = used.ru_maxrss
        return JobState("ended", self._codes[handle])

    def cancel(self, handles: Sequence[str]) -> None:
        """Ask the whole group of each to end, then end it; an interrupt while waiting ends it at once."""
        for handle in handles:
            if handle not in self._codes and not _alive(handle):
                continue
            try:
                self._end(handle, signal.SIGTERM)
            finally:
                self._end(handle, signal.SIGKILL)
            while handle in self._codes and self._state(handle).state == "running":
                time.sleep(_LOOK_SECONDS)

    def _end(self, handle: str, number: int) -> None:
        """Send a signal to all processes of a job, and wait for their end, but not for long."""
        deadline = time.monotonic() + _PATIENCE
        with suppress(ProcessLookupError):  # they are gone
            os.killpg(_pid(handle), number)
            while time.monotonic() < deadline:
                self._state(handle)  # reaps the leader, which would otherwise keep the group alive as a zombie
                os.killpg(_pid(handle), 0)
                time.sleep(_LOOK_SECONDS)


def _inherited() -> Iterator[int]:
    """Descriptors that this process has from what started it: jobs that have them, too, would hold a lock, or keep a pipe open."""
    for name in [path.name for path in Path("/proc/self/fd").iterdir()]:
        with suppress(OSError):  # that of the folder, which is closed
            if int(name) > 2 and os.get_inheritable(int(name)):
                yield int(name)


def _pid(handle: str) -> int:
    return int(handle.split(":")[1])


def _alive(handle: str) -> bool:
    """Whether the process of a handle lives, is ours, and runs the script of the attempt: a handle may be a forgery."""
    _, pid, start, *folder = handle.split(":", 3)
    return bool(start and folder) and start_time(int(pid)) == start and _runs(int(pid), Path(folder[0]))


def _runs(pid: int, folder: Path) -> bool:
    process = Path(f"/proc/{pid}")
    try:
        words = os.fsdecode((process / "cmdline").read_bytes()).split("\0")
        ours, place = process.stat().st_uid == os.geteuid(), (process / "cwd").readlink()
    except OSError:
        return False
    return ours and any(_names(place, word, folder / SCRIPT) for word in words[1:3])


def _names(place: Path, word: str, script: Path) -> bool:
    """Whether a word on the command line of a process is this script. It may begin where the script was before it went into its folder."""
    return os.path.realpath(place / word) == str(script) or (place == script.parent and str(script).endswith(f"/{os.path.normpath(word)}"))


def beforehand(site: Site, launcher: str) -> list[str]:
    """What is executed beside the points themselves, a line each: setup, modules, and an image that a runtime fetches first."""
    software, image = site.software, site.container.image
    where = "by you, before the first script" if launcher == "print" else "here, once, before the first point"
    found = [f"setup ({where}): {line}" for line in software.setup]
    found += [f"modules, for each point: {' '.join(software.modules)}"] if software.modules else []
    found += [f"virtual environment, for each point: {software.venv}"] if software.venv else []
    if site.container.runtime != "none" and image is not None:
        fetched = ", which fetches it where it has none" if "://" in image or site.container.runtime == "podman" else ""
        found.append(f"image, for each point: {image} by {site.container.runtime}{fetched}")
    return found


def setup_script(software: Software, folder: Path) -> Path | None:
    """Write the script of the site's setup lines into ``folder``, without running it; ``None`` where there are none."""
    if not software.setup:
        return None
    hidden = concealed(software.variables)
    lines = ["#!/usr/bin/env bash", "# software.setup of the system, once before the first point."]
    lines += [*modules(software), *exports(software.variables, hidden), *required(hidden)]
    text, unseen = "\n".join([*lines, "set -e", *software.setup, ""]), of_caller(hidden)
    named = digest("setup", f"{text}{unseen}") if unseen else hashlib.sha256(text.encode()).hexdigest()
    make_folder(folder)
    script = folder / f"setup-{named[:12]}.sh"
    if not script.exists() or script.read_text(encoding="utf-8") != text:
        write_file(script, text)
    return script


def set_up(software: Software, folder: Path) -> None:
    """Run the site's setup lines, once for every text of them: a mark in ``folder`` says that they ran. Campaigns wait for each other.
    Raises ``EnvironmentUnfitError`` where a line failed; the log is named."""
    script = setup_script(software, folder)
    if script is None:
        return
    log, done = script.with_suffix(".log"), script.with_suffix(".done")
    with alone(script.with_suffix(".lock"), private=False) as trouble:
        if trouble is not None:
            print(f"caraml: the setup does not wait for other campaigns: {trouble}", file=sys.stderr)
        if done.exists():
            return
        with open_new(log, replace=True) as output:
            result = subprocess.run(  # noqa: S603 -- setup lines of the system's description: running them is what was asked for
                ["bash", str(script)],  # noqa: S607 -- the bash that its user has
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **of_caller(concealed(software.variables))},
                check=False,
            )
        if result.returncode:
            raise EnvironmentUnfitError(f"the setup of this machine failed (exit status {result.returncode}): bash {script}", f"read {log}")
        touch(done)
