"""Points on this machine, each in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from caraml.launch.base import Job, JobState
from caraml.launch.script import SCRIPT
from caraml.results.claim import start_time

_PATIENCE = 5.0
"""Seconds between asking a job to end and ending it."""


class LocalLauncher:
    """Runs a job's script with bash, one at a time. A handle is ``local:PID:START:FOLDER``, START being the kernel's start time of the
    process and FOLDER the attempt's, whose script it runs."""

    slots = 1

    def __init__(self) -> None:
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, jobs: Sequence[Job]) -> list[str]:
        """Start the scripts; their output goes where they say."""
        handles = []
        for job in jobs:
            child = subprocess.Popen(["bash", str(job.script)], start_new_session=True, stdin=subprocess.DEVNULL)  # noqa: S603, S607 -- the point's script: running it is what was asked for; the bash that its user has
            handles.append(f"local:{child.pid}:{start_time(child.pid)}:{job.folder.resolve()}")
            self._children[handles[-1]] = child
        return handles

    def poll(self, handles: Sequence[str]) -> dict[str, JobState]:
        """Running, or ended with its exit code (negative: the signal); ``lost`` for the child of another process that is gone."""
        return {handle: self._state(handle) for handle in handles}

    def _state(self, handle: str) -> JobState:
        child = self._children.get(handle)
        if child is None:
            return JobState("running") if _alive(handle) else JobState("lost", reason="its process is gone")
        code = child.poll()
        return JobState("running") if code is None else JobState("ended", code)

    def cancel(self, handles: Sequence[str]) -> None:
        """Ask the whole group of each to end, then end it; an interrupt while waiting ends it at once."""
        for handle in handles:
            child = self._children.get(handle)
            if child is None and not _alive(handle):
                continue
            try:
                if _signal_group(_pid(handle), signal.SIGTERM):
                    _wait_for_group(handle, child, _PATIENCE)
            finally:
                if _signal_group(_pid(handle), signal.SIGKILL):
                    _wait_for_group(handle, child, _PATIENCE)
            if child is not None:
                child.wait()


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


def _signal_group(group: int, number: int) -> bool:
    """True while the group has processes."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _wait_for_group(handle: str, child: subprocess.Popen[bytes] | None, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child is not None:
            child.poll()  # reaps the leader, which would otherwise keep the group alive as a zombie
        if not _signal_group(_pid(handle), 0):
            return
        time.sleep(0.05)
