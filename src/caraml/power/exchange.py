"""Time stamps exchanged between nodes (TCP): one node answers with its monotonic time, the others ask.

Question and answer are lines of text, each signed with a token that only the processes of the job know: a stranger on
the network can neither pass for the reference nor for a partner.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from caraml.power.clock import ClockOffset, best_offset

EXCHANGES = 20
CONNECT_S = 0.5
"""An address that does not answer by then is not the right one of the node [s]."""
ANSWER_S = 0.5
LONGEST_LINE = 1024
"""More than this without a line's end is not a question [bytes]."""
ADDRESS_OF_INTERFACE = 0x8915
"""Linux: the ioctl ``SIOCGIFADDR``."""

Phase = Literal["start", "end"]
LAST = "done"
"""Instead of a phase: the partner has all it needs."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the reference node can be asked for its time."""

    node: str
    """Host and boot id."""
    hosts: list[str]
    """Its addresses, the likeliest first."""
    port: int
    token: str


def interface_addresses() -> dict[str, str]:
    """IPv4 address of every network interface that has one."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(asking.fileno(), ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def own_hosts() -> list[str]:
    """Addresses under which other nodes may reach this one, found without asking a name server; the own machine's last."""
    found = sorted(interface_addresses().values(), key=lambda host: host.startswith("127."))
    outside = [host for host in found if not host.startswith("127.")]
    return [*outside, socket.gethostname(), *found[len(outside) :]]


def _signature(token: str, *words: str) -> str:
    import hmac

    return hmac.digest(token.encode(), " ".join(words).encode(), "sha256").hex()


class ClockServer:
    """Answers with this node's monotonic time whoever knows the token. Runs on one node; the others ask it."""

    def __init__(self, host: str = "", port: int = 0) -> None:
        self.token = secrets.token_hex(16)
        self._socket = socket.create_server((host, port), backlog=1024)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._changed = threading.Condition()
        self._greeted: set[str] = set()
        self._done: set[str] = set()
        self._closing, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="power-clock", daemon=True)
        self._thread.start()

    def wait(self, partners: int | None, timeout: float) -> bool:
        """Wait until ``partners`` other nodes (``None``: those that have asked anything) need nothing more; False if not so."""

        def satisfied() -> bool:
            return not self._greeted - self._done and (partners is None or len(self._done) >= partners)

        with self._changed:
            return self._changed.wait_for(satisfied, timeout)

    def close(self) -> None:
        """Stop answering."""
        self._wake.close()
        self._thread.join(1.0)

    def _serve(self) -> None:
        buffers: dict[socket.socket, bytearray] = {}
        with selectors.DefaultSelector() as ready, self._socket, self._closing:
            ready.register(self._socket, selectors.EVENT_READ)
            ready.register(self._closing, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    asking = key.fileobj
                    if asking is self._closing:
                        for connection in buffers:
                            connection.close()
                        return
                    if asking is self._socket:
                        with contextlib.suppress(OSError):  # gone before it was accepted
                            connection, _ = self._socket.accept()
                            connection.setblocking(False)
                            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                            buffers[connection] = bytearray()
                            ready.register(connection, selectors.EVENT_READ)
                    elif isinstance(asking, socket.socket) and not self._take(asking, buffers[asking]):
                        ready.unregister(asking)
                        del buffers[asking]
                        asking.close()

    def _take(self, connection: socket.socket, buffer: bytearray) -> bool:
        """Answer the questions that have come; False if there will be, or should be, no more."""
        try:
            received = connection.recv(4096)
            buffer += received
            while b"\n" in buffer:
                line, _, rest = bytes(buffer).partition(b"\n")
                buffer[:] = rest
                if not self._answer(connection, line.decode(errors="replace").split()):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        return bool(received) and len(buffer) <= LONGEST_LINE

    def _answer(self, connection: socket.socket, words: list[str]) -> bool:
        import hmac

        if len(words) != 4 or not hmac.compare_digest(_signature(self.token, *words[:3]).encode(), words[3].encode()):
            return False
        phase, node, nonce, _ = words
        now = repr(time.monotonic())
        connection.sendall(f"{nonce} {now} {_signature(self.token, nonce, now)}\n".encode())
        with self._changed:
            self._greeted.add(node)
            if phase == LAST:
                self._done.add(node)
            self._changed.notify_all()
        return True


def measure_offset(address: Address, node: str, phase: Phase, timeout: float = 2.0, exchanges: int = EXCHANGES) -> ClockOffset:
    """How far the clock of a ``ClockServer`` is ahead of this node's.

    Args:
        address: where it answers; its hosts are tried one after the other.
        node: name of this node.
        phase: after ``end`` the server need not wait for this node any more.
        timeout: for all of it [s], except for resolving a host name.
        exchanges: number of time stamps; the quickest one counts.

    Raises ``OSError`` if nobody answers, or nobody who knows the token.
    """
    deadline, problems = time.monotonic() + timeout, []
    for host in address.hosts:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        try:
            with socket.create_connection((host, address.port), timeout=min(CONNECT_S, left)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                found = best_offset(_exchanges(connection, address.token, node, phase, deadline=deadline, exchanges=exchanges))
                if phase == "end":
                    with contextlib.suppress(OSError):  # the offset is known; that this node is done is a courtesy
                        _ask(connection, address.token, node, LAST)
                return found
        except OSError as error:
            problems.append(f"{host} port {address.port}: {error.strerror or error}")
    raise ConnectionError("; ".join(problems) or "no address of the first rank's node is known")


def _exchanges(
    connection: socket.socket, token: str, node: str, phase: str, *, deadline: float, exchanges: int
) -> Iterator[tuple[float, float, float]]:
    """Exchanges of (sent here, answered there, received here); fewer if time runs out, but at least one."""
    for number in range(exchanges):
        left = deadline - time.monotonic()
        if number > 0 and left <= 0:
            return
        connection.settimeout(min(ANSWER_S, max(left, 0.01)))
        try:
            yield _ask(connection, token, node, phase)
        except OSError:
            if number == 0:
                raise
            return  # what came until now will do


def _ask(connection: socket.socket, token: str, node: str, phase: str) -> tuple[float, float, float]:
    import hmac

    nonce = secrets.token_hex(8)
    question = f"{phase} {node} {nonce} {_signature(token, phase, node, nonce)}\n".encode()
    sent = time.monotonic()
    connection.sendall(question)
    answer = b""
    while not answer.endswith(b"\n"):
        received = connection.recv(LONGEST_LINE)
        if not received or len(answer) > LONGEST_LINE:
            raise ConnectionError("the connection was closed without an answer")
        answer += received
    back = time.monotonic()
    words = answer.decode(errors="replace").split()
    if len(words) != 3 or words[0] != nonce or not hmac.compare_digest(_signature(token, *words[:2]).encode(), words[2].encode()):
        raise ConnectionError("the answer does not come from this job")
    return sent, float(words[1]), back
