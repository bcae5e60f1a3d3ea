"""Compare the clocks of a job's nodes while its command runs: the first rank's node answers, one rank of each other asks.

They find each other by a small file in the folder of results, which all nodes share. The comparison at the start runs
beside the command, the one at the end follows the written result, and both give up after a short time: a clock that is not
compared costs a number about clocks, never a measurement.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from caraml.base.files import write_file
from caraml.power.clock import ClockOffset, ClockRecord, node_key
from caraml.power.exchange import Address, ClockServer, Phase, interface_addresses, measure_offset, own_hosts

ADDRESS_FILE = ".clock"
"""In the folder of results while the first rank runs; only its owner may read it."""

INTERFACE = "GLOO_SOCKET_IFNAME"
"""What a point's script says of the network of the job; without it every address of the node answers, to who knows the token."""
START_S = 10.0
"""The first rank is looked for this long [s], beside the command."""
END_S = 2.0
"""After the command, clocks hold nobody up for longer than this [s]."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5


class Partner(Protocol):
    """One rank's part in the comparison."""

    def begin(self) -> None:
        """Before the command starts; returns at once."""

    def finish(self) -> ClockRecord:
        """After the result is written; returns within ``END_S``."""


def partner(folder: Path, rank: int, nodes: int | None, *, elected: bool) -> Partner:
    """The part of this rank.

    Args:
        folder: folder of results, seen by all nodes.
        rank: number of this rank; rank 0 answers.
        nodes: number of nodes, if it is known.
        elected: this rank asks on behalf of its node.
    """
    if nodes == 1:
        return Bystander("all ranks are on one node")
    if rank == 0:
        return Reference(folder, nodes)
    return Asking(folder) if elected else Bystander("compared by another rank of this node")


class Bystander:
    """A rank that has nothing to compare."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def begin(self) -> None:
        """Nothing to do."""

    def finish(self) -> ClockRecord:
        """Why there is nothing."""
        return ClockRecord(reason=self._reason)


class Reference:
    """The first rank: tells the others its time, from before its command until they are done."""

    def __init__(self, folder: Path, nodes: int | None) -> None:
        self._path, self._nodes = folder / ADDRESS_FILE, nodes
        self._server: ClockServer | None = None
        self._trouble: str | None = None

    def begin(self) -> None:
        """Start to answer and publish where."""
        try:
            host = interface_addresses().get(os.environ.get(INTERFACE, ""), "")
            self._server = ClockServer(host)
            publish(self._path, Address(node_key(), [host] if host else own_hosts(), self._server.port, self._server.token))
        except OSError as error:
            self._trouble = f"clocks cannot be compared: {error.strerror or error}"

    def finish(self) -> ClockRecord:
        """Wait, but not for long, until every other node has asked for the last time."""
        if self._server is not None:
            complete = self._server.wait(None if self._nodes is None else self._nodes - 1, 0.0 if self._trouble else END_S)
            if not complete and self._trouble is None:
                self._trouble = "not every other node has compared its clock at the end"
            self._server.close()
            with contextlib.suppress(OSError):  # a later start in this folder replaces it
                self._path.unlink()
        return ClockRecord(reference=node_key(), reason=self._trouble)


class Asking:
    """A rank on another node: asks when its command starts and when it has ended, each in a thread of its own.

    A thread that still waits for a name server when its time is over is left behind; it changes nothing any more.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ADDRESS_FILE
        self._own = node_key()
        self._began = 0.0
        self._give_up = threading.Event()
        self._offsets: dict[Phase, ClockOffset] = {}
        self._reasons: dict[Phase, str] = {}
        self._reference: str | None = None
        self._asking: threading.Thread | None = None

    def begin(self) -> None:
        """Look for the first rank beside the command."""
        self._began = time.monotonic()
        self._asking = self._ask("start", START_S)

    def finish(self) -> ClockRecord:
        """Ask for the last time; what has not come within the time is unknown."""
        until = time.monotonic() + END_S
        if self._asking is not None:
            self._asking.join(max(min(self._began + END_S, until) - time.monotonic(), 0.0))
        self._give_up.set()
        if self._reference != self._own:
            self._ask("end", 0.0).join(max(until - time.monotonic(), 0.0))
        if self._reference == self._own:
            return ClockRecord(reference=self._reference)
        offsets, reasons = dict(self._offsets), dict(self._reasons)
        missing = {phase: reasons.get(phase, f"no answer within {END_S:g} s") for phase in ("start", "end") if phase not in offsets}
        reason = "; ".join(f"clock not compared at the {phase}: {why}" for phase, why in missing.items())
        return ClockRecord(self._reference, offsets.get("start"), offsets.get("end"), reason or None)

    def _ask(self, phase: Phase, patience: float) -> threading.Thread:
        thread = threading.Thread(target=self._compare, args=(phase, patience), name=f"power-clock-{phase}", daemon=True)
        thread.start()
        return thread

    def _compare(self, phase: Phase, patience: float) -> None:
        """Try until it succeeds, or ``patience`` [s] is over, or nobody waits any more."""
        deadline, pause = time.monotonic() + patience, FIRST_PAUSE_S
        while True:
            try:
                address = find(self._path)
                self._reference = address.node
                if address.node != self._own:
                    self._offsets[phase] = measure_offset(address, self._own, phase, END_S)
                return
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._reasons[phase] = (
                    "the first rank does not answer, or its folder is not shared"
                    if isinstance(error, FileNotFoundError)
                    else f"{type(error).__name__}: {error}"
                )
            if time.monotonic() > deadline or self._give_up.wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE_S)


def publish(path: Path, address: Address) -> None:
    """Write the address whole or not at all, readable by its owner only: it contains the token."""
    write_file(path, json.dumps(asdict(address)), mode=0o600, sync="none")


def find(path: Path) -> Address:
    """The address that the first rank has published; ``FileNotFoundError`` if there is none (yet)."""
    # A network file system remembers for a while that a file was not there, unless its folder is opened.
    os.close(os.open(path.parent, os.O_RDONLY))
    return Address(**json.loads(path.read_text()))
