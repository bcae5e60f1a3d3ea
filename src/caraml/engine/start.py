"""Starts the processes of a point on this node, one for each device, and sees that they end together.

    python -m caraml.engine.start --devices 4 [--nodes 2] MODULE ARGUMENTS

Every process gets torch's usual variables (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``) and a folder to meet in that
only its user can open. On one node nothing but loopback is listened on. ``torchrun`` does the same through a key-value store that listens
on every address of the node and whose contents it unpickles, so that every other user of the node could run code as this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from caraml.base.files import new_folder_beside, write_file
from caraml.base.signals import end_with_caller, on_signals

MEET = "CARAML_MEET"
"""Environment variable: the folder, its user's alone, in which the processes of a point find each other."""
SECRET = "secret"  # noqa: S105 -- the name of a file
"""File in it: what only processes of the point can read."""
PEER = "CARAML_PEER"
"""Environment variable, on several nodes: name of one that is not the first, on the network of the job."""
_MEMORY = Path("/dev/shm")  # noqa: S108 -- for folders with random names, made exclusively and for their user only
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_PATIENCE = 5.0
"""Seconds between asking processes to end and ending them."""


class Starter:
    """The processes of one node. The first that fails decides how it ends."""

    def __init__(self, devices: int, nodes: int, command: Sequence[str]) -> None:
        self._devices, self._nodes, self._command = devices, nodes, list(command)
        self._node = 0 if nodes == 1 else int(os.environ["SLURM_PROCID"])
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        # What happened: a rank and its exit code, or a signal to this process and no code.
        self._events: queue.SimpleQueue[tuple[int, int | None]] = queue.SimpleQueue()

    def run(self) -> int:
        """Start them and wait; returns the exit code of the first that failed as a shell has it (128 + number for a signal), or 0."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_signals((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), lambda number: self._events.put((number, None))))
            if self._nodes == 1:
                meet = str(own_folder())
                stack.callback(shutil.rmtree, meet, ignore_errors=True)
            else:
                meet = os.environ[MEET]
            # The batch system's warning is meant for the ranks, which ignore it until they are ready. Slurm tells each of them, and scripts
            # have this process ignore it; Podman tells nobody in a container but this one.
            tells = signal.signal(signal.SIGUSR1, signal.SIG_IGN) != signal.SIG_IGN
            try:
                for local in range(self._devices):
                    self._start(local, meet)
                if tells:
                    stack.enter_context(on_signals((signal.SIGUSR1,), lambda number: self._events.put((number, None))))
                code = self._wait()
            finally:
                killed = self._end()
            if killed is not None and 0 < code < 128:  # as the others failed for want of it, and were seen before it
                print(f"caraml: rank {killed} was killed by SIGKILL before that", file=sys.stderr, flush=True)
                return 128 + signal.SIGKILL
            return code

    def _start(self, local: int, meet: str) -> None:
        rank = self._node * self._devices + local
        ranks = {"RANK": rank, "WORLD_SIZE": self._nodes * self._devices, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self._devices}
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **{name: str(value) for name, value in ranks.items()}, MEET: meet}
        if self._nodes == 1:
            variables |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
        child = self._children[rank] = subprocess.Popen([sys.executable, "-P", "-m", *self._command], env=variables)  # noqa: S603 -- this interpreter, with a module and arguments of the point's script
        threading.Thread(target=lambda: self._events.put((rank, child.wait())), daemon=True).start()

    def _wait(self) -> int:
        """Until all have ended well, one has not, or this process is told to end."""
        left = len(self._children)
        while left:
            which, code = self._events.get()
            if code is None and which == signal.SIGUSR1:
                for child in self._children.values():
                    child.send_signal(which)
                continue
            if code is None:
                return 128 + which
            if code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
                rank = f"rank {which} (process {self._children[which].pid})"
                print(f"caraml: {rank} {how}; the others are ended", file=sys.stderr, flush=True)
                return 128 - code if code < 0 else code
            left -= 1
        return 0

    def _end(self) -> int | None:
        """End those that are left. Returns a rank that was killed, if one was, and not by this process."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            killed = next((rank for rank, child in self._children.items() if child.returncode == -signal.SIGKILL), None)
            for child in self._children.values():
                child.send_signal(number)  # does nothing to one that has ended
            deadline = time.monotonic() + _PATIENCE
            for child in self._children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(deadline - time.monotonic(), 0))
        return killed


def own_folder() -> Path:
    """A new folder of this user's, on this machine: a network's file system may not have the locks that meeting needs."""
    try:
        return _folder_below(_MEMORY)
    except OSError:  # there is none, or it is full: everybody may fill it
        return _folder_below(Path(tempfile.gettempdir()))


def _folder_below(place: Path) -> Path:
    folder = new_folder_beside(place / "caraml", mode=0o700)
    try:
        write_file(folder / SECRET, secrets.token_bytes(32), mode=0o600, sync="none")
    except OSError:
        folder.rmdir()
        raise
    return folder


def main() -> int:
    """Read the command line, start the processes and wait for them."""
    parser = argparse.ArgumentParser(prog="python -m caraml.engine.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="processes on this node")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes; this one's number is SLURM_PROCID")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="MODULE ...", help="module to run, and its arguments")
    asked = parser.parse_args()
    end_with_caller()
    return Starter(asked.devices, asked.nodes, asked.command).run()


if __name__ == "__main__":
    sys.exit(main())
