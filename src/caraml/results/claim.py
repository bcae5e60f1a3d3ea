"""Who works on an attempt: claims that a dead runner cannot keep, and a start that happens once.

An attempt's folder appears by rename with its first claim inside, so it is never without an owner. A claim is the text of a
:class:`Runner`; when its runner is dead, another takes the attempt over with the next claim (``claim.2`` ...), and of several that try
one wins. The job's script announces itself in ``started``, which is made exclusively: a runner that finds an attempt with neither handle
nor announcement takes the start away by making that file first, and the script, should it still come, ends at once. So a job runs once,
whenever its runner is killed.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from caraml.base.files import AWAY, make_folder, owned, touch, write_new, write_once
from caraml.base.limits import tail
from caraml.base.plugins import Plugin, plugins

CLAIM = "claim."
STARTED = "started"
HANDLE = "handle"
LOG = "worker.log"
RUNNERS = "runners"
WITHDRAWN = "withdrawn"
_LONGEST_NUMBER = 10
"""Digits of a claim's number, and one."""
BEAT_SECONDS = 20.0
"""A runner touches its file in this interval."""
SILENCE_SECONDS = 300.0
"""A runner on another host is dead when its file is older."""

BUILT_IN = ("local", "slurm", "print")
"""Kinds of handles of CARAML's own launchers; of any other it is the name of a plug-in."""
_HANDLE = re.compile(
    r"(local:\d{1,10}:\d{0,20}|slurm:(\d+(_\d+)?(\+pack-\d+)?|refused)|print"
    r"|(?!(local|slurm|print):)[a-z][a-z0-9_]{0,63}:[A-Za-z0-9][\w.@+\[\]-]{0,199})(?=:|$)",
    re.ASCII,
)
"""A handle up to the folder in it: process and start, or a job's number as Slurm writes it, or nothing; or what a plug-in calls a job, of
which nothing can be an option, a path or a command."""

GATE = f"""\
# An attempt starts once. A runner that lost sight of it may have taken the start away.
read -r -a _self </proc/$$/stat
_mask=$(umask)
umask go-w  # who writes to these files decides what the record says
set -C
_job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
_job=${{_job:-${{SLURM_JOB_ID:--}}}}
read -r _host </proc/sys/kernel/hostname  # a queue may hand on the HOSTNAME of where the job was submitted
if ! echo "$$ ${{_self[21]}} $_host $_job" 2>/dev/null >{STARTED} &&
  [[ ${{SLURM_RESTART_COUNT:-0}} -eq 0 || $(<{STARTED}) = {WITHDRAWN} ]]; then
  [ -s {STARTED} ] && _why="was started before" || _why="cannot be noted as started: its disk may be full"
  echo "this attempt $_why; remove {STARTED} to start it by hand, or have a new one made: caraml retry" >&2
  exit 75
fi
set +C
: >>{LOG}
umask "$_mask"
"""
"""Shell lines for the head of a point's script, in the attempt's folder."""


@dataclass(frozen=True)
class Runner:
    """A process that runs a campaign. ``place`` is host, boot and process namespace: where its ``pid`` has a meaning."""

    place: str
    pid: int
    start: str
    """The kernel's start time of the process in clock ticks since boot."""

    def __str__(self) -> str:
        return f"{self.place} {self.pid} {self.start}"

    @property
    def file(self) -> str:
        """Name of the file whose time it keeps current."""
        return f"{self.place}.{self.pid}.{self.start}"

    @property
    def host(self) -> str:
        return self.place.partition("~")[0]

    @classmethod
    def parse(cls, text: str) -> Runner | None:
        """The runner that a claim names; ``None`` for text that is no claim (a write that a full disk cut short, or somebody else's)."""
        found = re.fullmatch(r"([^\s/\0]+)\s+(\d{1,10})\s+(\d{1,20})", text.strip(), re.ASCII)
        return None if found is None else cls(found[1], int(found[2]), found[3])


@lru_cache(maxsize=1)
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        namespace = Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        boot, namespace = "", ""
    return f"{socket.gethostname()}~{boot}~{namespace}"


def myself() -> Runner:
    """This process."""
    return Runner(_place(), os.getpid(), start_time(os.getpid()))


def start_time(pid: int) -> str:
    """Start of a process in clock ticks since boot; with the number it names a process for ever. Empty when the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


class Heartbeat:
    """Touches this process's file below ``ROOT/runners``, so that other hosts know that it lives; this one knows by its being open."""

    def __init__(self, root: Path) -> None:
        self.runner = myself()
        self._path = root / RUNNERS / self.runner.file
        make_folder(self._path.parent)
        touch(self._path)
        self._held = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        self._last = time.monotonic()

    def beat(self) -> None:
        """Touch the file if it is time to. A disk that fails for a moment is asked again the next time: what runs goes on."""
        if time.monotonic() - self._last > BEAT_SECONDS:
            self._last = time.monotonic()
            try:
                touch(self._path)
            except OSError as error:
                if error.errno not in AWAY:
                    raise

    def end(self) -> None:
        os.close(self._held)
        self._path.unlink(missing_ok=True)


def alive(runner: Runner, root: Path) -> bool:
    """Whether a runner lives: by its process where we can see that, else by the age of its file on the file system's clock."""
    if runner.place == _place():
        return start_time(runner.pid) == runner.start
    try:
        return _now(root / RUNNERS) - (root / RUNNERS / runner.file).stat().st_mtime < SILENCE_SECONDS
    except OSError as error:
        return error.errno in AWAY  # nothing is taken from one that may live


def runs_here(runner: Runner, root: Path) -> bool:
    """Whether a process of this user's is the runner that a claim names, which may be a forgery: it holds its file here open."""
    try:
        known = os.lstat(root / RUNNERS / runner.file)
        held = list(Path(f"/proc/{runner.pid}/fd").iterdir())
    except OSError:  # neither ours nor there
        return False
    found = False
    for path in held:
        with suppress(OSError):  # closed meanwhile
            found |= os.path.samestat(path.stat(), known)
    return found and known.st_uid == os.geteuid() and known.st_nlink == 1 and start_time(runner.pid) == runner.start


def recent(attempt: Path) -> bool:
    """Whether a file of an attempt changed lately. Raises ``OSError`` where it cannot be looked at."""
    times = [0.0]
    for path in attempt.iterdir():  # glob() finds nothing where a disk does not answer, and nothing is taken from one that may live
        if not path.name.startswith("."):  # no other host's question for the time
            with suppress(FileNotFoundError):  # renamed or removed meanwhile
                times.append(path.lstat().st_mtime)
    return _now(attempt) - max(times) < SILENCE_SECONDS


def young(path: Path) -> bool:
    """Whether a file changed lately. Raises ``OSError`` where it cannot be looked at."""
    return _now(path.parent) - path.lstat().st_mtime < SILENCE_SECONDS


def _now(folder: Path) -> float:
    """The clock of the file system, which all hosts share; in a folder of somebody else, where nothing is written, that of this host."""
    if not owned(folder):
        return time.time()
    probe = folder / f".{secrets.token_hex(8)}.now"
    try:
        touch(probe)
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def holder(attempt: Path) -> tuple[int, Runner | None]:
    """Number of the newest claim on an attempt (0: none) and its runner."""
    names = (name[len(CLAIM) :] for name in os.listdir(attempt) if name.startswith(CLAIM))  # noqa: PTH208
    newest = max((int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < _LONGEST_NUMBER), default=0)
    if not newest:
        return 0, None
    try:
        return newest, Runner.parse(tail(attempt / f"{CLAIM}{newest}"))
    except FileNotFoundError:
        return newest, None


def take_over(attempt: Path, newest: int, runner: Runner) -> bool:
    """Claim an attempt after claim number ``newest``, whose runner is dead. False when another runner was faster."""
    return write_once(attempt / f"{CLAIM}{newest + 1}", str(runner))


def withdraw(attempt: Path) -> bool:
    """Take the start of an attempt away from a job that may still come. False when the job was faster."""
    try:
        write_new(attempt / STARTED, WITHDRAWN)
    except FileExistsError:
        return False
    return True


def handle_of(attempt: Path, announced: bool = False) -> str | None:
    """The handle of an attempt's job: as its runner noted it, else (or only) as the job announced itself; ``None`` if it never started.

    The files may be somebody else's: what is no handle counts as none, and the folder in a handle is the one where it lies.
    """
    for name in (STARTED,) if announced else (HANDLE, STARTED):
        try:
            text = tail(attempt / name).strip()
        except FileNotFoundError:
            continue
        parts = text.partition("\n")[0].split()
        if name == STARTED and len(parts) == 4:
            text = f"slurm:{parts[3]}" if parts[3] != "-" else f"local:{parts[0]}:{parts[1]}"
        if (found := checked(text, attempt)) is not None:
            return found
    return None


def checked(text: str, attempt: Path) -> str | None:
    """A handle of an attempt's job as any later process will find it; ``None`` for text that is none."""
    found = _HANDLE.match(text)
    return None if found is None else f"{found[0]}:{attempt.resolve()}"


def kind_of(handle: str) -> str:
    """Name of the launcher that a handle belongs to."""
    return handle.partition(":")[0]


def job_of(handle: str) -> str:
    """What people call the job of a handle: ``pbs:12.server``."""
    return ":".join(handle.split(":")[:2])


def launcher_plugins() -> dict[str, Plugin]:
    """Launchers of other packages, by name."""
    return plugins("caraml.launchers", BUILT_IN)


def not_installed(kind: str) -> str:
    """What to do about a launcher that no package here has."""
    return f"install the plug-in that has launcher {kind!r} beside CARAML (pip install PACKAGE)"


def away(attempt: Path) -> Runner | None:
    """The job of an attempt that announced itself on another host than this, where no process of it can be seen."""
    try:
        pid, start, host, *_ = tail(attempt / STARTED).partition("\n")[0].split()
    except (FileNotFoundError, ValueError):
        return None
    return Runner.parse(f"{host} {pid} {start}") if host != myself().host else None


def somebody_else(attempt: Path) -> int | None:
    """User whose an attempt is that is not ours to end: its folder, or a file that says who works on it, belongs to them."""
    names = [name for name in os.listdir(attempt) if name in (HANDLE, STARTED) or name.startswith(CLAIM)]  # noqa: PTH208
    users = {path.lstat().st_uid for path in (attempt, *(attempt / name for name in names))} - {os.geteuid()}
    return min(users, default=None)
