"""What goes wrong around a point: memory, disks, clocks, sensors, loader workers.

Memory, signals and clocks meet processes as users start them; disks and sensors do not know the difference.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from caraml.results.store import RECORD, read_record
from tests.faults.conftest import DEADLINE, Victim, until

SHORT = {"params": {"device": "asynchronous", "step_seconds": 0.02}}
LONG = {**SHORT, "measure": {"min_seconds": 60, "max_seconds": 90}}
MEMORY = Path("/sys/fs/cgroup")


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A small file system in memory; skips where mounting is not allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def memory_group(megabytes: int) -> Iterator[Path]:
    """A control group with so much memory; skips where none can be made."""
    swap = "memory.swap.max" if (MEMORY / "cgroup.controllers").exists() else "memory.memsw.limit_in_bytes"
    version2 = (MEMORY / "cgroup.controllers").exists()
    mark = "0::" if version2 else ":memory:"
    line = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if mark in line), mark)
    parent = MEMORY / ("" if version2 else "memory") / line.rpartition(":")[2].lstrip("/")
    folder, limit = parent / f"caraml-test-{os.getpid()}", "memory.max" if version2 else "memory.limit_in_bytes"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(megabytes << 20))
        if (folder / swap).exists():  # memory alone, or with what is swapped: what would be too much is not to be put there
            (folder / swap).write_text("0" if version2 else str(megabytes << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield folder
    finally:
        until(lambda: True if not (folder / "cgroup.procs").read_text().strip() else None, "an empty control group")
        folder.rmdir()


HUGE = {"global_batch": 512, "micro_batch": 512, "params": {"preset": "4M", "data": "synthetic-device"}, "mode": "compute"}


def test_a_point_that_is_too_large_ends_before_the_memory_does(victim: Victim) -> None:
    code, said = victim.run(victim.suite(HUGE, workload="gpt"), fresh=True, CARAML_MEMORY_GIB="2")
    (record,) = victim.records()
    assert (code, record.status) == (0, "oom"), said
    assert "the worker may take 2.00 GiB" in (record.reason or "") and "CARAML_MEMORY_GIB" in (record.reason or "")


def test_a_point_that_the_kernel_kills_for_its_memory_is_out_of_memory(victim: Victim) -> None:
    suite = victim.suite(HUGE, workload="gpt")
    with memory_group(700) as group:
        runner = victim.start(suite, fresh=True, group=group, CARAML_MEMORY_GIB="off")
        said, _ = runner.communicate(timeout=DEADLINE)
        (record,) = victim.records()
        assert record.status == "oom", said
        assert runner.returncode == 0, "out of memory is a result"
        victim.no_orphans()


def test_a_folder_that_cannot_be_written_is_named(victim: Victim, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-o", "ro") as disk:
        victim.out = disk / "results"
        code, said = victim.run(victim.suite(SHORT))
    assert code == 3 and str(disk) in said and "Read-only file system" in said
    assert "Traceback" not in said


def enough(victim: Victim) -> None:
    """Have the point that runs measure no longer."""
    for worker in victim.workers():
        os.kill(worker, signal.SIGUSR1)


def test_a_folder_that_is_removed_takes_no_measurement_with_it(victim: Victim, tmp_path: Path) -> None:
    runner = victim.start(victim.suite(LONG), XDG_CACHE_HOME=str(tmp_path / "cache"))
    folder = victim.wait_for("measure")
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
    enough(victim)
    said, _ = runner.communicate(timeout=DEADLINE)
    (place,) = (tmp_path / "cache").rglob(RECORD)
    assert runner.returncode == 3 and f"what was measured is in {place}" in said and "Traceback" not in said, said
    record = read_record(place)
    assert record.status == "ok" and record.value("throughput")


def test_a_disk_that_is_full_is_named_and_takes_no_record(victim: Victim, tmp_path: Path) -> None:
    """Neither those that are whole nor that of the point that runs, for which there is room of its own."""
    size = 256 * os.sysconf("SC_PAGE_SIZE")  # every file takes a page at least, of 4 to 64 KiB
    with mounted(tmp_path / "disk", "-o", f"size={size}") as disk:

        def fill() -> None:
            with pytest.raises(OSError, match="No space left"), (disk / "filler").open("ab", buffering=0) as filler:
                while True:
                    filler.write(bytes(512))

        victim.out = disk / "results"
        points = [SHORT, {**LONG, "global_batch": 8}]
        runner = victim.start(victim.suite(*points))
        victim.wait_for("measure", "p1")
        fill()
        enough(victim)
        said, _ = runner.communicate(timeout=DEADLINE)
        assert "Traceback" not in said
        assert [(record.status, bool(record.value("throughput"))) for record in victim.records()] == [("ok", True)] * 2, said
        victim.no_orphans()
        fill()
        suite = victim.suite(*points, {**SHORT, "global_batch": 12})
        code, said = victim.run(suite)
        assert code in (1, 3) and "No space left on device" in said and "Traceback" not in said
        (disk / "filler").unlink()
        code, said = victim.run(suite)
        assert code == 0, said
        assert [record.status for record in victim.records() if record.status == "ok"] == ["ok"] * 3


WALL_CLOCK = """
import time
from pathlib import Path

_true, _true_ns, _shift = time.time, time.time_ns, Path(__file__).with_name("shift")
time.time = lambda: _true() + float(_shift.read_text() or 0)
time.time_ns = lambda: _true_ns() + int(float(_shift.read_text() or 0) * 1e9)
"""


def test_a_clock_that_is_set_back_and_forth_changes_no_number(victim: Victim, tmp_path: Path) -> None:
    customs = tmp_path / "customs"  # Python runs sitecustomize before anything else: every process of the campaign gets this wall clock
    customs.mkdir()
    (customs / "sitecustomize.py").write_text(WALL_CLOCK)
    set_clock = customs / "shift"
    set_clock.write_text("0")
    path = os.pathsep.join(filter(None, [str(customs), os.environ.get("PYTHONPATH")]))
    runner = victim.start(victim.suite(SHORT, seconds=4.0), fresh=True, PYTHONPATH=path)
    victim.wait_for("measure")
    for seconds in ("3600", "-3600"):
        set_clock.write_text(seconds)
        time.sleep(1.0)
    runner.communicate(timeout=DEADLINE)
    (record,) = victim.records()
    assert record.status == "ok"
    rate, joules = record.metrics["throughput"], record.metrics["energy_per_item"]
    # Steps of 0.02 s take longer on a busy machine, but none takes an hour.
    assert rate.value is not None and 0.01 < rate.value / (4 * 7 / 0.02) < 1.02
    assert joules.value == pytest.approx(300 / rate.value, rel=0.02), "300 W by the made-up sensor"
    assert record.window is not None and 0 < record.window.end - record.window.start < 1000


def test_a_sensor_that_hangs_costs_its_energy_and_nothing_else(victim: Victim, tmp_path: Path) -> None:
    pipe = tmp_path / "meter.csv"
    os.mkfifo(pipe)  # whoever opens it waits for a writer that never comes
    code, said = victim.run(victim.suite(SHORT), CARAML_POWER=f"csv:{pipe}")
    (record,) = victim.records()
    assert code == 0 and record.status == "ok", said
    energy = record.metrics["energy_per_item"]
    assert energy.value is None and energy.reason


def loaders_of(worker: int) -> list[int]:
    """Processes that read for a worker, as torch names them: forked from it, or by a fork server below it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == worker:
                reads = (process / "comm").read_text().startswith("pt_data_worker")
                found += [int(process.name)] if reads else loaders_of(int(process.name))
    return found


def test_a_loader_worker_that_dies_ends_the_point_and_is_named(victim: Victim) -> None:
    reading = {
        "global_batch": 1,
        "mode": "data",
        "params": {"lookalike": "tiny", "workers": 1},
        "measure": {"min_seconds": 60, "max_seconds": 90},
    }
    runner = victim.start(victim.suite(reading, workload="ap4"))
    folder = victim.wait_for("measure")
    worker, loader = victim.workers()[0], until(lambda: next(iter(loaders_of(victim.workers()[0])), None), "a loader")
    os.kill(loader, signal.SIGKILL)
    runner.communicate(timeout=DEADLINE)
    record = victim.record(folder)
    assert runner.returncode == 1 and record.status == "failed"
    # Torch hears of the signal where the loader is its own child, and of its end where the fork server made it.
    ends = rf"DataLoader worker \((pid {loader}\) is killed by signal: Killed|pid\(s\) {loader}\) exited unexpectedly)"
    assert re.search(ends, record.reason or ""), record.reason
    assert worker != loader
    victim.no_orphans()
