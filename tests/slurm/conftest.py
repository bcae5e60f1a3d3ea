"""A real Slurm cluster for the tests of this folder, started once and gone afterwards."""

from __future__ import annotations

import itertools
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from caraml.campaign.machine import HERE
from caraml.launch import Job, JobState
from caraml.launch.batch import SlurmOptions
from caraml.launch.slurm import SlurmLauncher
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Point, Policy
from caraml.system.model import Scheduler, Site, Software
from tests.slurm.cluster import Cluster, available
from tests.stores import write_script


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Three virtual nodes; commands of this process and its children speak to them."""
    reason = available()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="caraml-slurm-"))
    folder.chmod(0o755)  # munge trusts its socket only where everybody may come by
    made = Cluster(folder)
    with pytest.MonkeyPatch.context() as patch:
        try:
            made.start()
            patch.setenv("SLURM_CONF", made.environment["SLURM_CONF"])
            patch.setenv(HERE, "1")  # tests of other folders run here, too, while there is a cluster
            yield made
        finally:
            made.stop()


STUB = f"""#!/usr/bin/env bash
# Stands in for the interpreter: does what the point's folder says, without the seconds that a real worker needs to start.
folder=${{@: -1}}
measured() {{
  [ "$SLURM_PROCID" = 0 ] || return 0
  cp "$folder/prepared.json" "$folder/.record" && mv "$folder/.record" "$folder/{RECORD}"
}}
case "$*" in *caraml.results.finish*) exec {shlex.quote(sys.executable)} "$@";; esac
cd "$folder"
date +%s.%N >begin
trap 'date +%s.%N >end' EXIT
. ./behave
"""


@dataclass
class Bench:
    """Makes points whose worker is a stand-in, and sends them into the queue."""

    root: Path
    site: Site
    _seeds: Iterator[int] = field(default_factory=itertools.count)

    def launcher(self, **options: Any) -> SlurmLauncher:
        """A launcher of this site."""
        assert self.site.scheduler is not None
        return SlurmLauncher(
            self.site.scheduler, self.root / "jobs", SlurmOptions(**{"grace_seconds": 1.0, "name": self.root.parent.name, **options})
        )

    def job(self, behave: str, scheduler: dict[str, Any] | None = None, timeout: float = 600, **values: Any) -> Job:
        """A job whose worker runs the shell lines ``behave``; ``measured`` in them leaves a record."""
        assert self.site.scheduler is not None
        point = a_point(seed=next(self._seeds), **{"measure": Policy(timeout_seconds=timeout), **values})
        site = self.site.model_copy(update={"scheduler": self.site.scheduler.model_copy(update=scheduler or {})})
        folder = Store(self.root).new_attempt(point)
        record = Record(key=point.key, attempt=1, point=point, status="ok", started_at="x")
        (folder / "prepared.json").write_text(record.model_dump_json())
        (folder / "behave").write_text(behave)
        return Job(folder, write_script(point, folder, 1, site), point.nodes, point.devices, timeout)


@pytest.fixture
def bench(cluster: Cluster, tmp_path: Path) -> Bench:
    """Points with a stand-in for the worker, in a folder whose name nobody should have chosen."""
    del cluster
    return make_bench(tmp_path / "it's 100% odd")


def make_bench(root: Path) -> Bench:
    """A bench below ``root``."""
    tools = root / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f"PATH={shlex.quote(str(tools))}:$PATH\n")
    (tools / "python3").write_text(STUB)
    (tools / "python3").chmod(0o755)
    scheduler = Scheduler(exclusive=False, gpus="none", signal_seconds=5)
    return Bench(root, Site(scheduler=scheduler, software=Software(venv=str(root / "venv"))))


def wait(launcher: SlurmLauncher, jobs: Iterable[str], seconds: float = 300, until: tuple[str, ...] = ("ended", "lost")) -> list[JobState]:
    """Poll until every job is in one of the states; returns the states in order."""
    handles = list(jobs)
    deadline = time.monotonic() + seconds
    while True:
        states = launcher.poll(handles)
        if all(states[handle].state in until for handle in handles):
            return [states[handle] for handle in handles]
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def overlap(jobs: list[Job]) -> int:
    """The most points that ran at the same time."""
    edges = sorted((float((job.folder / name).read_text()), step) for job in jobs for name, step in (("begin", 1), ("end", -1)))
    running = list(itertools.accumulate(step for _, step in edges))
    return max(running)


def record(job: Job) -> Record:
    """The job's record."""
    return read_record(job.folder / RECORD)


def a_point(**values: Any) -> Point:
    """A point of the fake workload, or of any other."""
    defaults: dict[str, Any] = {"suite": "test", "benchmark": "fake", "workload": "fake", "params": {}, "system": "local", "device": "test"}
    defaults |= {"device_class": "cpu", "software": "test", "global_batch": 4, "micro_batch": 2}
    return Point(**{**defaults, **values})


def real_point(**values: Any) -> Point:
    """A training of a few milliseconds per step."""
    params = {"preset": "4M", "width": 16, "layers": 1, "heads": 1, "sequence_length": 8, "vocab_size": 64, "data": "synthetic"}
    return a_point(**{"workload": "gpt", "params": params, **values})


def real_job(root: Path, site: Site, **values: Any) -> Job:
    """A job that trains."""
    point = real_point(**values)
    folder = Store(root).new_attempt(point)
    return Job(folder, write_script(point, folder, 1, site), point.nodes, point.devices, point.measure.timeout_seconds)
