"""What signals that end processes do: they are heard of at once, whatever the main thread waits for, and what has to be said before is."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1
_KILLS = (signal.SIGTERM, signal.SIGHUP)
_LAST_SECONDS = 20.0
"""Batch systems and launchers that ask a process to end kill it half a minute later."""


@contextmanager
def on_signals(numbers: Collection[int], act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with the number of each of these signals that comes, at once, whatever the main thread waits for: in a thread of its
    own. Only the main thread may ask for it; in another, nothing happens. A signal that was ignored comes as well: scripts of points ignore
    those that are meant for their programs. One whose handler is not of Python's does not come: nothing could give it back.

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
    before = {number: signal.signal(number, _nothing) for number in numbers if _can_be_put_back(number)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(told_before)
        tell.close()
        thread.join()
        heard.close()


def _can_be_put_back(number: int) -> bool:
    """Whether what a signal does now is known to Python: a library may have a handler of its own, as torch's and ``faulthandler``'s are."""
    handler = signal.getsignal(number)
    if handler not in (signal.SIG_DFL, signal.SIG_IGN):
        return handler is not None
    caught = 0
    with suppress(OSError, ValueError, IndexError):  # no Linux
        caught = int(Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").split("SigCgt:")[1].split()[0], 16)
    return not caught >> (number - 1) & 1


def _nothing(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing; unlike ``SIG_IGN``, programs that are started do not inherit it."""


class _LastWords:
    """What hears of signals that are to end this process, while a block of :func:`last_words` is open. The main thread begins it."""

    def __init__(self) -> None:
        self.words: list[Callable[[int], object]] = []
        self.open = False
        self._numbers: list[signal.Signals] = []
        self._came_to: int | None = None
        self._masks: dict[int, set[int | signal.Signals]] = {}
        """Of threads that fork: which signals they had blocked before."""

    def begin(self) -> None:
        self._heard, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._listener = threading.Thread(target=self._listen, name="last words", daemon=True)
        self._listener.start()
        self.open = True
        self._numbers = [number for number in _KILLS if signal.getsignal(number) == signal.SIG_DFL and _can_be_put_back(number)]
        for number in self._numbers:
            signal.signal(number, self._came)
        self._swap_wakeup(-1, self._tell.fileno())

    def end(self) -> None:
        """Leave everything as it was, but for what others have changed since."""
        self._restore()
        self._tell.shutdown(socket.SHUT_RDWR)  # closed, it would be open in forks still
        self._listener.join()
        self._heard.close()
        self._tell.close()
        came_to, self._came_to = self._came_to, None
        if came_to is not None:  # at the last moment: the listener found it nobody's
            _end_by(came_to)

    def _restore(self) -> None:
        self.open = False
        self._swap_wakeup(self._tell.fileno(), -1)
        for number in filter(self._is_ours, self._numbers):
            signal.signal(number, signal.SIG_DFL)

    @staticmethod
    def _swap_wakeup(old: int, new: int) -> None:
        """Have signals written to another descriptor, unless somebody else has them written elsewhere."""
        if (found := signal.set_wakeup_fd(new, warn_on_full_buffer=False)) != old:
            with suppress(ValueError, OSError):  # they have closed it
                signal.set_wakeup_fd(found, warn_on_full_buffer=False)

    def _is_ours(self, number: int) -> bool:
        return signal.getsignal(number) == self._came

    def _came(self, number: int, frame: FrameType | None) -> None:
        if not self._is_ours(number):  # called by the handler that has taken its place
            return
        if self.open:
            self._came_to = number
            with suppress(OSError):  # it is there already, where nobody else has signals written elsewhere
                self._tell.send(bytes([number]))
        else:  # put back by somebody who had found it
            _end_by(number)

    def _listen(self) -> None:
        while came := self._heard.recv(64):
            if (number := next(filter(self._is_ours, came), None)) is not None:
                try:
                    speaker = threading.Thread(target=self._say, args=(number,), daemon=True)
                    speaker.start()
                    speaker.join(_LAST_SECONDS)
                finally:
                    _end_by(number)
                return

    def _say(self, number: int) -> None:
        for say in reversed(self.words):
            with suppress(Exception):
                say(number)

    # A signal that is for a fork must not be heard of here, through what both share at first.

    def before_fork(self) -> None:
        if self.open:
            self._masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)

    def after_fork(self) -> None:
        if (mask := self._masks.pop(threading.get_ident(), None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def in_fork(self) -> None:
        if self.open:
            self._restore()
            self._heard.close()
            self._tell.close()
            self.words.clear()
            self.after_fork()


_last_words = _LastWords()
os.register_at_fork(before=_last_words.before_fork, after_in_parent=_last_words.after_fork, after_in_child=_last_words.in_fork)


@contextmanager
def last_words(say: Callable[[int], object]) -> Iterator[None]:
    """Call ``say`` with the number of a signal of ``_KILLS`` that is to end this process, in a thread of its own, whatever the main thread
    waits for; then let it end the process, after ``_LAST_SECONDS`` in any case. Of blocks within blocks the innermost is first.

    A signal with a handler, or one that is ignored, is left alone, also where it gets that within the block: whoever handles it decides
    what it does, and may call what was there before. Only the main thread can begin it: in another, nothing happens. Forks have no part
    in it.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and not _last_words.open:
        _last_words.begin()
    if _last_words.open:
        _last_words.words.append(say)
    try:
        yield
    finally:
        if say in _last_words.words:  # but in a fork
            _last_words.words.remove(say)
        if _last_words.open and not _last_words.words and threading.current_thread() is threading.main_thread():
            _last_words.end()


def _end_by(number: int) -> None:
    """End this process by a signal, as if nobody had handled it; from any thread, where ``signal.signal`` may not be called."""
    import ctypes

    default = ctypes.CDLL(None).signal
    default.argtypes, default.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    default(number, None)
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)  # it is blocked


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends.

    A parent that is killed alone would leave the ranks behind, waiting for each other on the device. Only Linux can do this; elsewhere
    nothing happens.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended while we asked
        os.kill(os.getpid(), signal.SIGKILL)
