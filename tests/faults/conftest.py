"""A campaign of known work in a process of its own, to which things happen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from caraml.results.record import Record
from caraml.results.store import RECORD, read_record
from tests.conftest import STARTS

DEADLINE = 300.0
"""Seconds for anything to happen; only a broken test waits that long."""
FORKED = str(STARTS / "server.py")
"""In the command line of a process that the fork server made, whatever it runs; its output goes where that of its program does."""


class Victim:
    """``caraml run`` on a suite of known work."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "results"
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def suite(self, *benchmarks: Mapping[str, Any], seconds: float = 2.0, workload: str = "known") -> Path:
        """Write a suite of one benchmark per mapping of values."""
        lines = ['name = "faults"', 'title = "Faults"']
        for number, values in enumerate(benchmarks):
            measure = {"min_seconds": seconds, "max_seconds": seconds + 1, "idle_seconds": 0, **values.get("measure", {})}
            settings = {"global_batch": 4, **{name: value for name, value in values.items() if name != "measure"}, "measure": measure}
            lines += ["[[benchmark]]", f'name = "p{number}"', f'workload = "{workload}"']
            lines += [f"{name} = {_toml(value)}" for name, value in settings.items()]
        path = self._folder / "faults.toml"
        path.write_text("\n".join(lines))
        return path

    def start(self, suite: Path, *, fresh: bool = False, group: Path | None = None, **environment: str) -> subprocess.Popen[str]:
        """Start the campaign, in a control ``group`` from its first moment; what it prints can be read from the process. If ``fresh``,
        without the fork server: its processes are each other's children, as they are for users."""
        settings = {"XDG_RUNTIME_DIR": str(self._folder), "CARAML_POWER": "fake:constant", "CARAML_DEVICE": "cpu"}
        around = {name: value for name, value in os.environ.items() if not (fresh and name == "FORK_SERVER")}
        within = ["sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs")] if group is not None else []
        process = subprocess.Popen(
            [*within, sys.executable, "-m", "caraml", "run", str(suite), "--out", str(self.out), "--even-if-too-large"],
            env={**around, **settings, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def run(self, suite: Path, *, fresh: bool = False, **environment: str) -> tuple[int, str]:
        """Run the campaign to its end: exit code, and what it printed."""
        process = self.start(suite, fresh=fresh, **environment)
        said, _ = process.communicate(timeout=DEADLINE)
        return process.returncode, said

    def wait_for(self, phase: str, attempt: str = "p0") -> Path:
        """Wait until a point is in a phase; its folder."""
        return until(lambda: next((folder for folder in self.attempts() if self._is_in(folder, phase, attempt)), None), f"phase {phase}")

    def attempts(self) -> list[Path]:
        """Folders of all attempts."""
        return sorted((self.out / "points").glob("*-*/[0-9]*"))

    def record(self, folder: Path) -> Record:
        """The record of an attempt, as soon as it is there."""
        until(lambda: (folder / RECORD).exists() or None, f"{folder / RECORD}")
        return read_record(folder / RECORD)

    def records(self) -> list[Record]:
        """Every record that is there, in the order of the suite."""
        found = [read_record(folder / RECORD) for folder in self.attempts() if (folder / RECORD).exists()]
        return sorted(found, key=lambda record: record.point.benchmark)

    def workers(self) -> list[int]:
        """Process numbers of this campaign's workers, lowest first: the ranks of a point in no special order.

        Of workers that the fork server made, and not of the processes that wait for them.
        """
        found = self._processes()
        waiting = [pid for pid, words in found if "caraml.worker" in words and "caraml.engine.start" not in words]
        forked = [pid for pid, words in found if FORKED in words]
        starting = {parent_of(pid) for pid in waiting}
        return [pid for pid in forked if pid not in starting] or waiting

    def left(self) -> list[tuple[int, str]]:
        """Processes that still have to do with this campaign's points."""
        return [(pid, " ".join(words)) for pid, words in self._processes()]

    def no_orphans(self) -> None:
        """All processes of the points end by themselves within seconds."""
        until(lambda: not self.left() or None, "the end of all processes", say=lambda: str(self.left()))

    def end(self) -> None:
        """Nothing of a test outlives it."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for pid, _ in self.left():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def _processes(self) -> list[tuple[int, list[str]]]:
        points, found = str(self.out / "points"), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_text().split("\0")
                dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            output = ""
            with suppress(OSError):  # what closed its output may still be one of ours
                output = str((entry / "fd" / "1").readlink())
            if not dead and any(points in word for word in [*words, output]):
                found.append((int(entry.name), words))
        return sorted(found)

    def _is_in(self, folder: Path, phase: str, benchmark: str) -> bool:
        progress = folder / "progress.jsonl"
        point = folder / "point.json"
        if not progress.exists() or json.loads(point.read_text())["benchmark"] != benchmark:
            return False
        return any(f'"phase":"{phase}"' in line.replace(" ", "") for line in progress.read_text().splitlines())


def parent_of(pid: int) -> int:
    """Number of the process that started another; 0 where that has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def until(condition: Callable[[], Any], what: str, say: Callable[[], str] = str) -> Any:
    """The first value of ``condition`` that is not ``None``."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        value = condition()
        if value is not None:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {DEADLINE:g} s for {what} {say()}")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    return json.dumps(value)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    """A campaign that a test may maltreat."""
    campaign = Victim(tmp_path)
    yield campaign
    campaign.end()
