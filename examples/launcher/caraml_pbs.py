"""A launcher of your own: each point becomes a job of a PBS queue."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from caraml.base.errors import EnvironmentUnfitError
from caraml.launch import Job, JobState
from caraml.results.store import RECORD

MARGIN_S = 180
"""Wall time for starting and ending a job, on top of the point's own."""
GONE = (153, 35)
"""Exit codes of ``qstat`` for a job that PBS does not know (any more), and for one that has finished."""


class PbsLauncher:
    """Queues scripts with ``qsub``. A handle is ``pbs:JOB:FOLDER``: any process on any login node finds the job by it."""

    slots = None  # the queue takes as many jobs as there are

    def submit(self, jobs: Sequence[Job]) -> Iterator[str]:
        """Queue the scripts; a handle for each, in order, as soon as it is known."""
        for job in jobs:
            yield f"pbs:{self._queued(job)}:{job.folder.resolve()}"

    def poll(self, handles: Sequence[str]) -> Mapping[str, JobState]:
        """Look without waiting, first at what the jobs wrote, then at the queue."""
        return {handle: self._state(handle) for handle in handles}

    def cancel(self, handles: Sequence[str]) -> None:
        """End jobs, queued or running; ``poll`` says whether that worked."""
        for handle in handles:
            subprocess.run(["qdel", handle.split(":")[1]], check=False)

    @staticmethod
    def _queued(job: Job) -> str:
        folder, script = str(job.folder.resolve()), str(job.script.resolve())
        options = ["-l", f"select={job.nodes}", "-l", f"walltime={int(job.timeout) + MARGIN_S}", "-o", folder, "-j", "oe"]
        if job.after:
            options += ["-W", ":".join(["depend=afterok", *(handle.split(":")[1] for handle in job.after)])]
        done = subprocess.run(["qsub", *options, script], capture_output=True, text=True, check=False)
        if done.returncode:
            raise EnvironmentUnfitError(f"qsub refused {script}: {done.stderr.strip()}")
        return done.stdout.strip()

    @staticmethod
    def _state(handle: str) -> JobState:
        _, job, folder = handle.split(":", 2)
        known = subprocess.run(["qstat", "-f", job], capture_output=True, text=True, check=False)
        if (Path(folder) / RECORD).exists():  # looked at last: it may have appeared just now
            return JobState("ended", 0)
        if known.returncode in GONE:
            return JobState("lost", reason=f"PBS does not know job {job} any more, and it left no record")
        if known.returncode:  # a server that does not answer has lost no job
            return JobState("running", reason=known.stderr.strip())
        return JobState("waiting" if "job_state = Q" in known.stdout else "running")
