"""A launcher of your own: each point becomes a job of a PBS queue.

python examples/launcher.py SUITE.toml [SYSTEM]
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError
from caraml.campaign import Campaign, Options, exit_code, run_campaign
from caraml.launch.base import Job, JobState
from caraml.report.progress import LogLines
from caraml.results.store import RECORD, Store
from caraml.suite.load import load_suite
from caraml.system.catalogue import load_system

MARGIN_S = 180
"""Wall time for starting and ending a job, on top of the point's own."""


class PbsLauncher:
    """Queues scripts with ``qsub``. A handle is ``pbs:JOB:FOLDER``: any process on any login node finds the job by it."""

    slots = None  # the queue takes as many jobs as there are

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Queue the scripts; a handle for each, in order."""
        return [f"pbs:{self._queued(job)}:{job.folder.resolve()}" for job in jobs]

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look without waiting, first at what the jobs wrote, then at the queue."""
        return {handle: self._state(handle) for handle in handles}

    def cancel(self, handles: Sequence[str]) -> None:
        """End jobs, queued or running."""
        for handle in handles:
            subprocess.run(["qdel", handle.split(":")[1]], check=False)

    @staticmethod
    def _queued(job: Job) -> str:
        options = ["-l", f"select={job.nodes}", "-l", f"walltime={int(job.timeout) + MARGIN_S}", "-o", str(job.folder), "-j", "oe"]
        if job.after:
            options += ["-W", ":".join(["depend=afterok", *(handle.split(":")[1] for handle in job.after)])]
        done = subprocess.run(["qsub", *options, str(job.script)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentUnfitError(f"qsub refused {job.script}: {done.stderr.strip()}")
        return done.stdout.strip()

    @staticmethod
    def _state(handle: str) -> JobState:
        _, job, folder = handle.split(":", 2)
        known = subprocess.run(["qstat", "-f", job], capture_output=True, text=True, check=False)
        if (Path(folder) / RECORD).exists():  # looked at last: it may have appeared just now
            return JobState("ended", 0)
        if known.returncode:
            return JobState("lost", reason=f"PBS does not know job {job} any more, and it left no record")
        return JobState("waiting" if "job_state = Q" in known.stdout else "running")


def main(suite: str, system: str = "local") -> int:
    """Run a suite through the launcher; the results are where those of ``caraml run`` are."""
    store, options = Store(Path("caraml-results")), Options(file=suite, launcher="pbs")
    campaign = Campaign(load_suite(suite), load_system(system), store, PbsLauncher(), LogLines(sys.stdout), options=options)
    return exit_code(run_campaign(campaign))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
