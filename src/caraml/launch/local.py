"""Points on this machine, each in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from caraml.launch.base import Job, JobState

_PATIENCE = 5.0
"""Seconds between asking a job to end and ending it."""


class LocalLauncher:
    """Runs a job's script with bash."""

    def submit(self, job: Job) -> subprocess.Popen[bytes]:
        """Start the script; its output goes where the script says."""
        return subprocess.Popen(["bash", str(job.script)], start_new_session=True, stdin=subprocess.DEVNULL)

    def poll(self, handle: subprocess.Popen[bytes]) -> JobState[subprocess.Popen[bytes]]:
        """Running, or ended with its exit code (negative: the signal)."""
        code = handle.poll()
        return JobState("running") if code is None else JobState("ended", code)

    def cancel(self, handle: subprocess.Popen[bytes]) -> None:
        """Ask the whole group to end, then end it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if _signal_group(handle.pid, number):
                _wait_for_group(handle, _PATIENCE)
        handle.wait()


def _signal_group(group: int, number: int) -> bool:
    """True while the group has processes."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(handle: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        handle.poll()  # reaps the leader, which would otherwise keep the group alive as a zombie
        if not _signal_group(handle.pid, 0):
            return
        time.sleep(0.05)
