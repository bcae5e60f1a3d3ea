"""All points of a suite: plan, skip what is done, launch, watch, finish.

A campaign keeps no state of its own: what is done stands in the store, so running the same command again fills the holes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Protocol

from caraml import __version__
from caraml.errors import ExitCode
from caraml.launch.base import Job, Launcher
from caraml.launch.script import write_script
from caraml.results.finish import finish, skipped
from caraml.results.progress import ProgressLine, ProgressReader
from caraml.results.record import FINAL, Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.expand import Machine, Plan, PlannedPoint, expand
from caraml.suite.load import SuiteFile
from caraml.suite.model import Point
from caraml.system.model import System
from caraml.units import GIB
from caraml.workloads import params_of

_POLL_SECONDS = 0.25


class Watcher(Protocol):
    """Whoever wants to see the campaign work."""

    def started(self, point: Point, index: int, total: int) -> None:
        """A point is being launched."""
        ...

    def progress(self, point: Point, line: ProgressLine) -> None:
        """A point said something."""
        ...

    def finished(self, record: Record, reused: bool) -> None:
        """A point has its record; ``reused`` when it had one before."""
        ...


@dataclass(frozen=True)
class Campaign:
    """A suite on one machine, with results in one store."""

    suite: SuiteFile
    system: System
    store: Store
    launcher: Launcher
    watcher: Watcher
    again: bool = False
    """Measure also what has a result already; earlier results are kept beside."""

    def plan(self) -> Plan:
        """The points of the suite on this system. Raises ``InputError`` with every fault of the suite."""
        return expand(self.suite, machine_of(self.system), params_of)

    def run(self) -> list[Record]:
        """Run what has no result yet; returns the record of every point, in order."""
        plan = self.plan()
        self.store.remember_suite(self.suite.suite.name, [planned.point.key for planned in plan.points])
        return [self.settle(planned, index, len(plan.points)) for index, planned in enumerate(plan.points)]

    def settle(self, planned: PlannedPoint, index: int, total: int) -> Record:
        """Give one point its record: the one it has, or a new one."""
        known = None if self.again else self.store.latest(planned.point.key)
        if known is not None and known.status in FINAL and (known.status == "skipped") == (planned.skip is not None):
            self.watcher.finished(known, reused=True)
            return known
        folder = self.store.new_attempt(planned.point)
        if planned.skip is not None:
            skipped(folder, planned.point, planned.skip)
        else:
            self.watcher.started(planned.point, index, total)
            self._launch(planned.point, folder)
        record = read_record(folder / RECORD)
        self.watcher.finished(record, reused=False)
        return record

    def _launch(self, point: Point, folder: Path) -> None:
        threads = self.system.cpu.usable_threads or 1
        script = write_script(point, folder, threads)
        timeout = point.measure.timeout_seconds
        (handle,) = self.launcher.submit([Job(folder, script, point.nodes, point.devices, timeout)])
        try:
            code = self._watch(handle, point, folder, timeout)
        except BaseException as error:
            self.launcher.cancel([handle])
            finish(folder, 1, "failed", f"the campaign was stopped ({type(error).__name__})")
            raise
        if code is None:
            self.launcher.cancel([handle])
            finish(folder, 1, "timeout", f"no result after {timeout:g} s")
        finish(folder, code or 0)

    def _watch(self, handle: str, point: Point, folder: Path, timeout: float) -> int | None:
        """Exit code of the job, or ``None`` when its time was over."""
        reader, deadline = ProgressReader(folder), time.monotonic() + timeout
        while True:
            state = self.launcher.poll([handle])[handle]
            line = reader.latest()
            if line is not None:
                self.watcher.progress(point, line)
            if state.state in ("ended", "lost"):
                return state.exit_code
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)


def machine_of(system: System) -> Machine:
    """What expansion must know of a system."""
    cpu = system.device_class == "cpu"
    memory = system.devices[0].memory_bytes
    return Machine(
        name=system.name,
        device=system.identity,
        device_class=system.device_class,
        software=f"caraml {__version__}, torch {metadata.version('torch')}",
        nodes=system.nodes or 1,
        # A CPU is one device; more processes on it are for trying out parallel training.
        devices_per_node=(system.cpu.usable_threads or 1) if cpu else system.devices_per_node,
        device_memory_gib=memory / GIB if memory else None,
    )


def exit_code(records: list[Record]) -> ExitCode:
    """0 when every point has a result; out of memory is one, a failure is not."""
    failed = any(record.status in ("failed", "timeout", "invalid") for record in records)
    return ExitCode.POINTS_FAILED if failed else ExitCode.OK
