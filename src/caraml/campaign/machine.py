"""The machine under a campaign: what expansion must know of it, and how to wait for its jobs and for its device; and its disk."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import select
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.format import GIB, seconds_text
from caraml.base.processes import Lock, machine_folder
from caraml.launch.queue import login_node
from caraml.results.claim import start_time
from caraml.results.rows import Scalar
from caraml.results.status import ProgressReader
from caraml.suite.model import Point
from caraml.suite.placement import Machine
from caraml.system.families import FAMILIES, refusal
from caraml.system.model import DeviceKind, System
from caraml.workloads import computes_with

HERE = "CARAML_HERE"
"""Environment variable: measure on this host although it may be a login node."""
_ONLY_PROGRAMS: dict[DeviceKind, str] = {
    "ipu": "torch drives no IPU, which computes by its vendor's programs only: suite caraml-ipu runs those",
    "fpga": "torch drives no FPGA, which computes what was synthesised for it: workload command runs programs that use it",
}
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TICKET = ".ticket"
_TICKET_SECONDS = 10.0
"""A ticket with which nobody has asked for so long does not count."""
_TELL_SECONDS, _SOON_SECONDS = 30.0, 0.5
"""How often a campaign that waits for the device says so, and after how long at first and at another place."""


def time_taken(row: Mapping[str, Scalar]) -> float | None:
    """How long a point took [s], by its row of results: at least its runtime, which has no idle baselines and probes, and until the end of
    its steps, which has those before them. ``None`` if neither is known."""
    steps = [value for name in ("time_to_first_step", "training_time", "first_step_time") if isinstance(value := row.get(name), float)]
    ends = [steps[0] + steps[1] - steps[2]] if len(steps) == 3 else []
    runtime = row.get("runtime")
    return max([*ends, *([runtime] if isinstance(runtime, float) else [])], default=None)


class Pace:
    """How long points take here, and what that makes of those that are left."""

    def __init__(self, points: Iterable[Point], earlier: Iterable[Mapping[str, Scalar]] = ()) -> None:
        """``points`` are to be run; ``earlier`` are rows of results on the same machine."""
        self._left: Counter[tuple[str, ...]] = Counter()
        self._least: dict[tuple[str, ...], float] = {}
        for point in points:
            kind = _kind(point)
            self._left[kind] += 1
            self._least[kind] = min(shortest(point), self._least.get(kind, math.inf))
        took: dict[tuple[str, ...], list[float]] = {}
        for row in earlier:
            if row["status"] == "ok" and (seconds := time_taken(row)) is not None:
                took.setdefault((str(row["workload"]), str(row["benchmark"])), []).append(seconds)
        self._earlier = {kind: statistics.median(some) for kind, some in took.items()}
        self._took: dict[tuple[str, ...], tuple[float, int]] = {}

    def ended(self, point: Point, seconds: float | None) -> None:
        """A point has its record; it took ``seconds``, or was known before."""
        kind = _kind(point)
        self._left[kind] -= 1
        for name in (kind, kind[:1]) if seconds is not None else ():
            total, count = self._took.get(name, (0.0, 0))
            self._took[name] = (total + (seconds or 0.0), count + 1)

    def expected(self, point: Point) -> float | None:
        """What points of its benchmark took in the mean, here or in earlier results, or else those of its workload [s]; ``None`` if none
        has ended."""
        return self._mean(_kind(point))

    def left(self, under_way: Iterable[tuple[Point, float]]) -> tuple[float, bool]:
        """Seconds until all points have ended one after another, of which some have been ``under_way`` for so long, and whether that is all
        that they will take: of kinds of which none has ended the least counts that their policy allows."""
        kinds = {kind: self._mean(kind) for kind, count in self._left.items() if count > 0}
        each = {kind: self._least[kind] if mean is None else mean for kind, mean in kinds.items()}
        total = sum(self._left[kind] * seconds for kind, seconds in each.items())
        return total - sum(min(seconds, each.get(_kind(point), 0.0)) for point, seconds in under_way), None not in kinds.values()

    def left_text(self, under_way: Iterable[tuple[Point, float]]) -> str:
        """:meth:`left` in words."""
        seconds, known = self.left(under_way)
        return f"{'about' if known else 'at least'} {seconds_text(seconds)} left" if known or seconds >= 1 else "time left unknown"

    def _mean(self, kind: tuple[str, ...]) -> float | None:
        if kind not in self._took and kind in self._earlier:
            return self._earlier[kind]
        total, count = self._took.get(kind) or self._took.get(kind[:1]) or (0.0, 0)
        return total / count if count else None


def shortest(point: Point) -> float:
    """Seconds that a point takes at least; 0 for a program, of which nothing is known."""
    if point.workload == "command":
        return 0.0
    return point.measure.min_seconds + 2 * point.measure.idle_seconds


def _kind(point: Point) -> tuple[str, ...]:
    return point.workload, point.benchmark


def machine_of(system: System, launcher: str = "slurm") -> Machine:
    """What expansion must know of a system. Launcher ``local`` reaches the node that it is on, the others all that there are. Raises
    ``EnvironmentUnfitError`` where this machine has an accelerator that its torch cannot drive, or two kinds to choose from."""
    unfit = refusal() if "devices" in system.missing else None
    if unfit is not None:
        raise unfit
    cpu = system.device_class == "cpu"
    memory, jobs = system.devices[0].memory_bytes, system.site.scheduler if launcher != "local" else None
    brought = system.site.software
    return Machine(
        name=system.name,
        device=system.identity,
        device_class=system.device_class,
        software=computes_with(_torch_of(system)),
        nodes=1 if launcher == "local" else system.nodes,
        # A CPU is one device; more processes on it are for trying out parallel training.
        devices_per_node=(system.cpu.usable_threads or 1) if cpu else system.devices_per_node,
        most_per_node=system.cpu.cores if cpu and system.cpu.usable_threads is None else None,
        job_nodes=jobs.max_nodes if jobs else None,
        job_devices=jobs.max_devices if jobs else None,
        device_memory_gib=memory / GIB if memory else None,
        emulates=system.cpu.emulates if cpu else tuple(dtype for dtype in system.lacks or () if dtype != "fp8"),
        may_emulate=() if cpu or system.lacks is not None else ("bf16",),
        without=tuple(dtype for dtype in system.lacks or () if dtype == "fp8"),  # which nothing emulates
        compiles=not cpu and any(family.compiled for family in FAMILIES if family.kind == system.devices[0].kind),
        only_programs=_ONLY_PROGRAMS.get(system.devices[0].kind),
        packages_here=launcher != "print"
        and system.site.container.runtime == "none"
        and not (brought.modules or brought.venv or brought.python or brought.variables),
    )


def _torch_of(system: System) -> str | None:
    """Version of torch in the virtual environment, or that of the interpreter, which the machine's description names for its jobs, else of
    torch here; ``None`` where neither is seen, as on login nodes whose jobs alone have torch: records say what computed."""
    brought = system.site.software
    if system.site.container.runtime == "none" and (brought.python or brought.venv):
        folder = Path(brought.python).parent.parent if brought.python else Path(brought.venv or "")
        places = [str(place) for place in folder.glob("lib*/python3*/site-packages")]
        for found in metadata.distributions(name="torch", path=places):
            return found.version
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return None


def too_large(system: System, points: Sequence[Point]) -> dict[str, str]:
    """Why points are not to be run, by key: those whose memory plan does not fit their devices, with what is needed and available."""
    if not points or find_spec("torch") is None:
        return {}  # nothing below is imported for nothing: it needs torch
    from caraml.engine.memory import USABLE, planned_of, room

    reasons, device = {}, system.devices[0]
    for one in planned_of(points):
        available = room(system, one.point)
        if available is None or one.fits(available):
            continue
        whole = f"{100 * USABLE:g} % of the {available / GIB:,.1f} GiB of {device.model}"
        if system.device_class == "cpu" and one.point.devices > 1:
            whole += f" for each of {one.point.devices} processes"
        reasons[one.point.key] = (
            f"needs {one.plan.peak / GIB:,.1f} GiB of memory by plan, {USABLE * available / GIB:,.1f} GiB are available ({whole}); "
            "--even-if-too-large runs it"
        )
    return reasons


def refuse_login_node(command: str, option: str = "--here") -> None:
    """Raise ``InputError`` where ``command`` would work on a node that is there for everybody to log in to, unless its ``option``, if it
    has one, or the variable says so."""
    if os.environ.get(HERE, "") in ("", "0") and (why := login_node()) is not None:
        raise InputError(
            f"{why}: measuring here would disturb others, and be disturbed",
            f"{command} --system FILE --launcher slurm, or inside salloc; {f'{option} (or {HERE}=1)' if option else f'{HERE}=1'} measures "
            "on this host",
        )


@contextmanager
def writing_below(root: Path) -> Iterator[None]:
    """Say what to do where what is inside fails because the folder of the results is gone, or its disk full: ``EnvironmentUnfitError``."""
    try:
        yield
    except OSError as error:
        if not root.exists():
            raise EnvironmentUnfitError(
                f"{root} is gone: moved or removed while the campaign ran",
                "jobs of a scheduler go on; where the folder was moved, give its new name by --out and run the same command again",
            ) from error
        if error.errno not in _FULL:
            raise
        raise EnvironmentUnfitError(
            f"the disk is full: {error.strerror} while writing below {root}; every record that was written is whole",
            "make room, then run the same command again: it goes on where it stopped",
        ) from error


def wait_for(handles: Iterable[str], seconds: float) -> None:
    """Wait until a local job of these ends, but no longer than ``seconds``; where the kernel cannot tell, and for other jobs, just wait."""
    with ExitStack() as stack:
        poll, any_local = select.poll(), False
        for handle in handles:
            kind, _, rest = handle.partition(":")
            if kind == "local" and hasattr(os, "pidfd_open"):
                try:
                    descriptor = os.pidfd_open(int(rest.partition(":")[0]))
                except ProcessLookupError:
                    return
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                any_local = True
        if any_local:
            poll.poll(seconds * 1000)
        else:
            time.sleep(seconds)


class DeviceLock:
    """A lock on this machine's compute device, shared by all campaigns of a user. The kernel frees it when its holder ends.

    The file names who holds the lock, for those who wait. Each of these has a ticket, a lock of its own whose name has the time: who came
    first goes first. A ticket that nobody has asked with for a while (a suspended process) does not count.
    """

    def __init__(self, device: str, what: str) -> None:
        self._what = " ".join(what.split())
        self._path = machine_folder() / f"device-{hashlib.sha256(device.encode()).hexdigest()[:12]}"
        self._lock = Lock(self._path.with_suffix(".lock"))
        self._ticket: Lock | None = None
        self._until = ""
        """Second since 1970 at which its point should have ended; empty if unknown."""
        self._told = (0, 0.0)
        """Our place among those who wait as it was told, and when; 0: none, -1: none yet."""

    @property
    def trouble(self) -> str | None:
        """Why this machine gives no such lock, so that campaigns do not wait for each other; else ``None``."""
        return self._lock.trouble

    def acquire(self, expected: float | None = None) -> bool:
        """Take the lock; false while another campaign has it or came first, or a job runs on whose runner was killed. ``expected`` is how
        long it is wanted [s], for those behind."""
        if self.ahead() or not self._lock.take():
            self._wait(expected)
            return False
        if _job_lives(self._lock.noted()):
            self._lock.give()
            self._wait(expected)
            return False
        self._leave_queue()
        self._told = (0, 0.0)
        self._until = "" if expected is None else f"{time.time() + expected:.0f}"
        self.runs("")
        return True

    def _wait(self, expected: float | None) -> None:
        if self._ticket is None:
            self._ticket = Lock(self._path.with_name(f"{self._path.name}-{time.time_ns():020d}-{os.getpid()}{_TICKET}"))
            self._ticket.take()
        self._ticket.note(f"{'' if expected is None else f'{expected:.0f}'}\n")

    def _leave_queue(self) -> None:
        if self._ticket is not None:
            self._ticket.close(remove=True)
            self._ticket = None

    def ahead(self) -> list[float | None]:
        """For how long each campaign that came first wants the device [s], if it knows. Tickets of the dead are thrown away."""
        own, found = self._ticket.path.name if self._ticket is not None else "~", []
        for path in sorted(self._path.parent.glob(f"{self._path.name}-*{_TICKET}")) if self.trouble is None else ():
            if path.name >= own:
                break
            ticket = Lock(path)
            try:
                recent = ticket.trouble is None and time.time() - path.stat().st_mtime < _TICKET_SECONDS
            except OSError:  # its campaign has its turn
                recent = False
            dead = ticket.trouble is None and ticket.take()
            if recent and not dead:
                text = ticket.noted().strip()
                found.append(float(text) if text.isdecimal() else None)
            ticket.close(remove=dead)
        return found

    def queue(self) -> str:
        """Who has the device, our place among those who wait, and how long that may take as far as it is known."""
        words, handle, until, *_ = [*self._lock.noted().split("\n"), "", ""]
        folder, ahead = handle.split(":", 3)[3:], self.ahead()
        line = ProgressReader(Path(folder[0])).latest() if folder else None
        by_pace = max(float(until) - time.time(), 0.0) if until.isdecimal() else None
        seconds = [line.remaining if line is not None and line.remaining is not None else by_pace, *ahead]
        known = [one for one in seconds if one is not None]
        exact = "about" if len(known) == len(seconds) else "at least"
        about = f"{exact} {seconds_text(sum(known))}" if known else "nobody knows how long"
        return f"place {len(ahead) + 1} in the queue for the device, which {words} uses; {about}"

    def news(self) -> str | None:
        """What to say while we wait: :meth:`queue`, soon and at another place, else now and then; ``None`` in between."""
        now, place = time.monotonic(), len(self.ahead()) + 1
        if not self._told[0]:  # whose turn it is may only have to be noticed
            self._told = (-1, now)
        elif now - self._told[1] > (_SOON_SECONDS if place != self._told[0] else _TELL_SECONDS):
            self._told = (place, now)
            return self.queue()
        return None

    def runs(self, handle: str) -> None:
        """Note what runs now, so that the lock stays taken if this process is killed."""
        self._lock.note(f"process {os.getpid()}: {self._what}\n{handle}\n{self._until}\n")

    def release(self) -> None:
        self._leave_queue()
        self._lock.give()


def _job_lives(text: str) -> bool:
    """Whether the local job in a lock's text still runs."""
    parts = text.rpartition("\nlocal:")[2].strip().split(":")
    return len(parts) > 1 and parts[0].isdecimal() and bool(parts[1]) and start_time(int(parts[0])) == parts[1]
