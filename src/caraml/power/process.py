"""Sampling in a process of its own, so that a busy interpreter cannot delay a reading.

The child is this file run as a module. It is a fresh interpreter, not a fork: a GPU library that is initialised in the
parent does not survive a fork. Both sides exchange lines of JSON: the parent sends what to do, the child what it read.
The monotonic clock of Linux is the same for all processes of a node, so times need no conversion. The child ends when its
standard input does, that is with its parent, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from caraml.power.model import Channel, Reading
from caraml.power.sampler import STALLED_S
from caraml.power.sampling import OPEN_TIMEOUT_S, ThreadSampling
from caraml.power.source import create
from caraml.power.store import Store


class ProcessSampling:
    """The parent's side: the same interface as ``ThreadSampling``."""

    def __init__(self, names: Sequence[str], devices: Sequence[str] | None, interval: float, store: Store, automatic: bool) -> None:
        self.store = store
        self._base_interval = interval
        self._setup = {"names": list(names), "devices": devices, "interval": interval, "automatic": automatic}
        self._intervals: dict[str, float] = {}
        self._expected: set[str] = set()
        self._reported: list[str] = []
        self.closed: set[str] = set()
        """Flags of sensors that are there but not for this process."""
        self.absent: list[str] = []
        """Names of sources whose sensors do not exist on this machine."""
        self._death: str | None = None
        self._ready = False
        self._stopping = False
        self._asked = self._answered = 0
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._listener = threading.Thread(target=self._listen, name="power-listener", daemon=True)

    @property
    def reasons(self) -> list[str]:
        """Why sources are not read, or no longer read."""
        return [*self._reported, *([self._death] if self._death else [])]

    @property
    def pid(self) -> int | None:
        """Process id of the child."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child and wait until it has opened its sources."""
        environment = dict(os.environ)
        package_root = str(Path(__file__).resolve().parents[2])
        environment["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, [environment.get("PYTHONPATH")])])
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "caraml.power.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            # A signal for the foreground job must not end the measurement before the job itself.
            start_new_session=True,
        )
        self._listener.start()
        self._send(self._setup)
        self.store.wait_until(lambda: self._ready or self._death is not None, OPEN_TIMEOUT_S + 1.0)

    def read_now(self) -> None:
        """Have the child read every channel now, and wait for it."""
        with self._lock:
            self._asked += 1
            wanted = self._asked
        self._send({"do": "read"})
        self.store.wait_until(lambda: self._answered >= wanted or self._death is not None, 2 * STALLED_S)

    def request(self, at: float) -> None:
        """Have every channel read at ``at`` and when its readings have aged to show ``at``."""
        self._send({"do": "request", "at": at})

    def expects(self, channel: Channel) -> bool:
        """Will further readings of this channel come?"""
        return self._death is None and not self._stopping and channel.id in self._expected

    def interval(self, channel: Channel) -> float:
        """Sampling interval of the channel [s]."""
        return self._intervals.get(channel.source, self._base_interval)

    def stop(self) -> None:
        """End the child; one that does not end is killed."""
        if self._child is None:
            return
        self._stopping = True
        self._send({"do": "stop"})
        try:
            self._child.wait(1.5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._listener.join(0.5)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                _close(pipe)

    def _send(self, message: dict[str, Any]) -> None:
        if self._child is None or self._child.stdin is None or self._death is not None:
            return
        try:
            with self._lock:
                self._child.stdin.write(json.dumps(message) + "\n")
                self._child.stdin.flush()
        except (BrokenPipeError, ValueError):
            self._note_death()

    def _listen(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            try:
                self._take(json.loads(line))
            except json.JSONDecodeError:
                continue  # a line that a vendor library printed, or one cut off by the child's death
        self._note_death()

    def _take(self, message: dict[str, Any]) -> None:
        if "readings" in message:
            self.store.add([Reading(*fields) for fields in message["readings"]])
        if "channels" in message:
            self.store.register(Channel(**{**c, "flags": tuple(c["flags"]), "users": tuple(c["users"])}) for c in message["channels"])
            self._intervals, self._reported = message["intervals"], message["reasons"]
            self._expected, self.closed, self.absent = set(message["expected"]), set(message["closed"]), message["absent"]
            self._ready = True
            self._answered = max(self._answered, message["answered"])
            self.store.notify()

    def _note_death(self) -> None:
        if not self._stopping and self._death is None and self._child is not None:
            try:
                code = self._child.wait(1.0)
            except subprocess.TimeoutExpired:
                code = None
            how = "closed its pipe" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            self._death = f"the sampler process {how}"
        self.store.notify()


def _close(pipe: IO[str]) -> None:
    """Close one end of a pipe whose other end may be gone."""
    with contextlib.suppress(BrokenPipeError):
        pipe.close()


class _Child:
    """The child's side: samples in threads, writes what they read, does what it is told."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.store = Store()
        sources = [create(name, setup["devices"], setup["automatic"]) for name in setup["names"]]
        self.sampling = ThreadSampling(sources, setup["interval"], self.store)
        self._out = threading.Lock()
        self._answered = 0
        self.store.listen(self._report_readings)

    def _write(self, message: dict[str, Any]) -> None:
        with self._out:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()

    def _report_readings(self, readings: list[Reading]) -> None:
        self._write({"readings": [[r.channel, r.t_before, r.t_after, r.value, r.error] for r in readings]})

    def report_state(self) -> None:
        """Tell the parent which channels exist, which of them still answer, and why others do not."""
        channels = list(self.store.channels.values())
        self._write(
            {
                "channels": [asdict(c) for c in channels],
                "intervals": {c.source: self.sampling.interval(c) for c in channels},
                "expected": [c.id for c in channels if self.sampling.expects(c)],
                "reasons": self.sampling.reasons,
                "closed": sorted(self.sampling.closed),
                "absent": self.sampling.absent,
                "answered": self._answered,
            }
        )

    def serve(self) -> None:
        """Follow orders until told to stop, or until the parent is gone."""
        self.sampling.start()
        self.report_state()
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "stop":
                break
            if order["do"] == "request":
                self.sampling.request(order["at"])
            else:
                self.sampling.read_now()
                self._answered += 1
                self.report_state()
        self.sampling.stop()


def main() -> None:
    """Entry of the child process: the first line on standard input says what to sample."""
    _Child(json.loads(sys.stdin.readline())).serve()
    sys.stdout.flush()
    # A thread that hangs in a vendor's library must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
