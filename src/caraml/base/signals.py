"""Signals that are acted on at once, whatever the main thread waits for."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def on_signals(numbers: Collection[int], act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with the number of each of these signals that comes, in a thread of its own. Only the main thread may ask for it; in
    another, nothing happens. A signal that was ignored comes as well: scripts of points ignore those that are meant for their programs.

    Python runs handlers in the main thread, between two of its instructions. A wait in the system is interrupted for them, but not by a
    signal that comes just before it begins, while the thread lets others run: the handler then runs when the wait is over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, tell = socket.socketpair()
    tell.setblocking(False)

    def listen() -> None:
        while came := heard.recv(64):
            for number in filter(numbers.__contains__, came):
                act(number)

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    told_before = signal.set_wakeup_fd(tell.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, _nothing) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(told_before)
        tell.close()
        thread.join()
        heard.close()


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing; unlike ``SIG_IGN``, programs that are started do not inherit it."""
