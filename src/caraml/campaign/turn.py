"""One at a time on a device: two campaigns of one user never measure at once on the same machine, whatever folders they write to."""

from __future__ import annotations

import hashlib
import os

from caraml.base.locks import Lock, machine_folder
from caraml.results.claim import start_time


class Turn:
    """A lock on this machine's compute device, shared by all campaigns of a user. The kernel frees it when its holder ends.

    The file names who holds the lock, for those who wait.
    """

    def __init__(self, device: str, what: str) -> None:
        self._what = " ".join(what.split())
        self._lock = Lock(machine_folder() / f"device-{hashlib.sha256(device.encode()).hexdigest()[:12]}.lock")

    @property
    def trouble(self) -> str | None:
        """Why this machine gives no such lock, so that campaigns do not wait for each other; else ``None``."""
        return self._lock.trouble

    def take(self) -> bool:
        """Take the turn; false while another campaign has it, or a job runs on whose runner was killed."""
        if not self._lock.take():
            return False
        if _job_lives(self.holder()):
            self._lock.give()
            return False
        return True

    def runs(self, handle: str) -> None:
        """Note what runs now, so that it keeps its turn if this process is killed."""
        self._lock.note(f"process {os.getpid()}: {self._what}\n{handle}\n")

    def give(self) -> None:
        """Let the others."""
        self._lock.give()

    def holder(self) -> str:
        """Who has the turn: a line in words, and the handle of the job."""
        return self._lock.noted()

    def close(self) -> None:
        """Let the others, for good."""
        self._lock.close()


def _job_lives(text: str) -> bool:
    """Whether the local job in a lock's text still runs."""
    parts = text.rpartition("\nlocal:")[2].strip().split(":")
    return len(parts) > 1 and parts[0].isdecimal() and bool(parts[1]) and start_time(int(parts[0])) == parts[1]
