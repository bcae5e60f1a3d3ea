"""One at a time on a device: two campaigns of one user never measure at once on the same machine, whatever folders they write to."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path

from caraml.results.claim import start_time


class Turn:
    """A lock on this machine's compute device, shared by all campaigns of a user. The kernel frees it when its holder ends.

    The file names who holds the lock, for those who wait.
    """

    def __init__(self, device: str, what: str) -> None:
        self._what = " ".join(what.split())
        folder = lock_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / f"device-{hashlib.sha256(device.encode()).hexdigest()[:12]}.lock"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def take(self) -> bool:
        """Take the turn; false while another campaign has it, or a job runs on whose runner was killed."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if _job_lives(self.holder()):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            return False
        return True

    def runs(self, handle: str) -> None:
        """Note what runs now, so that it keeps its turn if this process is killed."""
        text = f"process {os.getpid()}: {self._what}\n{handle}\n".encode()
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def give(self) -> None:
        """Let the others."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def holder(self) -> str:
        """Who has the turn: a line in words, and the handle of the job."""
        return os.pread(self._descriptor, 4096, 0).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Let the others, for good."""
        os.close(self._descriptor)


def lock_folder() -> Path:
    """Where the locks of this user are: a folder of the user's own that goes with the machine, not with a shared home."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "caraml" if base else Path(tempfile.gettempdir()) / f"caraml-{os.getuid()}"


def _job_lives(text: str) -> bool:
    """Whether the local job in a lock's text still runs."""
    parts = text.rpartition("\nlocal:")[2].strip().split(":")
    return len(parts) == 2 and parts[0].isdecimal() and bool(parts[1]) and start_time(int(parts[0])) == parts[1]
