"""Signals to this process, which a thread of their own hears of, and its end: by a signal, or with its parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

CALLER = "CARAML_CALLER"
"""Environment variable: number of the process that started the container of this one, and the space of process numbers that has it."""
_NUMBERS = Path("/proc/self/ns/pid")
_PR_SET_PDEATHSIG = 1
_TERMINATION = (signal.SIGTERM, signal.SIGHUP)
_LAST_SECONDS = 20.0
"""Batch systems and launchers that ask a process to end kill it half a minute later."""


class _Listener:
    """Calls ``act`` with the number of each of some signals that comes. The main thread makes it."""

    def __init__(self, numbers: Collection[int], act: Callable[[int], object]) -> None:
        self._act = act
        self._heard, self._tell = socket.socketpair()
        self._tell.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        self.before = {number: signal.getsignal(number) for number in numbers}
        _open.append(self)
        if self is _open[0]:  # else a signal that comes during the swap is not written where the block around this waits for it
            _swap_wakeup(-1, self._tell.fileno())
        for number in numbers:
            signal.signal(number, self.came)

    def came(self, number: int, frame: FrameType | None) -> None:
        """The handler of these signals, in the main thread."""
        if signal.getsignal(number) != self.came:  # called by the handler that has taken its place
            return
        if self not in _open:  # put back by somebody who had found it
            signal.signal(number, self.before[number])
            signal.raise_signal(number)
        elif not _swap_wakeup(self._tell.fileno(), self._tell.fileno()):  # Python has written it elsewhere
            with suppress(OSError):
                self._tell.send(bytes([number]))

    def _listen(self) -> None:
        while came := self._heard.recv(1):
            number = came[0]
            if number in self.before and signal.getsignal(number) in (self.came, self.before[number]):
                self._act(number)

    def put_back(self) -> None:
        """Leave handlers as they were, but for those that others have set since."""
        for number, handler in self.before.items():
            if signal.getsignal(number) == self.came:
                signal.signal(number, handler)
        if self is _open[0]:
            _swap_wakeup(self._tell.fileno(), -1)

    def end(self) -> None:
        self.put_back()
        self._tell.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        _open.remove(self)
        self.close()

    def close(self) -> None:
        self._heard.close()
        self._tell.close()


_open: list[_Listener] = []
_forking = threading.local()
_to_do: list[Callable[[int], object]] = []
"""What blocks of :func:`on_termination` do, whichever of them ends first."""
_terminating: list[_Listener] = []
"""Hears for all of them."""


def _before_fork() -> None:
    """A signal that is for a fork must not be heard of here, through what both share at first."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number for listener in _open for number in listener.before})


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _in_fork() -> None:
    for listener in _open:
        listener.put_back()
        listener.close()
    for known in (_open, _terminating, _to_do):
        known.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_fork)


@contextmanager
def on_signals(numbers: Collection[int], act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with the number of each of these signals that comes, at once, whatever the main thread waits for: in a thread of its
    own. Only the main thread may ask for it; in another, nothing happens, and nothing does in forks. A signal that was ignored comes as
    well: scripts of points ignore those that are meant for their programs. One does not come whose handler is not of Python's, as nothing
    could give it back, or one that a block around this hears of, or one that gets another handler within the block.

    Python runs handlers in the main thread, between two of its instructions. A wait in the system is interrupted for them, but not by a
    signal that comes just before it begins, while the thread lets others run: the handler then runs when the wait is over. So it does where
    somebody else, as ``asyncio``, has the numbers of signals written elsewhere: the thread then hears of them from the handler.
    """
    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in numbers if _is_free(number)] if in_main else []
    listener = _Listener(ours, act) if ours else None
    try:
        yield
    finally:
        if listener in _open:  # not in a fork
            listener.end()


@contextmanager
def on_termination(act: Callable[[int], object]) -> Iterator[None]:
    """Call ``act`` with the number of a signal that is to end this process (``_TERMINATION``), as :func:`on_signals` does; then let it end
    the process, after ``_LAST_SECONDS`` in any case. Of blocks within blocks the innermost is first.

    A signal that has a handler, or is ignored, is left alone, also where it gets that within the block: whoever handles it decides what
    it does, and may call what was there before, which does nothing then.
    """
    if threading.current_thread() is threading.main_thread() and not _terminating:
        free = [number for number in _TERMINATION if signal.getsignal(number) == signal.SIG_DFL and _is_free(number)]
        _terminating.extend([_Listener(free, _terminate)] if free else [])
    _to_do.append(act)
    try:
        yield
    finally:
        if _to_do == [act] and threading.current_thread() is threading.main_thread():  # in another, handlers have to stay
            for listener in _terminating:
                listener.end()
            _terminating.clear()
        with suppress(ValueError):  # in a fork
            _to_do.remove(act)


def _terminate(number: int) -> None:
    def do() -> None:
        for act in reversed(_to_do):
            with suppress(Exception):
                act(number)

    try:
        thread = threading.Thread(target=do, daemon=True)
        thread.start()
        thread.join(_LAST_SECONDS)
    finally:
        _end_by(number)


def _end_by(number: int) -> None:
    """End this process by a signal, as if nobody had handled it; from any thread, where ``signal.signal`` may not be called."""
    import ctypes

    default = ctypes.CDLL(None).signal
    default.argtypes, default.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    default(number, None)
    os.kill(os.getpid(), number)
    time.sleep(1)
    os._exit(128 + number)  # it is blocked


def _swap_wakeup(old: int, new: int) -> bool:
    """Have Python write the numbers of signals to another descriptor; false where somebody else has them written, which stays so."""
    if (found := signal.set_wakeup_fd(new, warn_on_full_buffer=False)) != old:
        with suppress(ValueError, OSError):  # they have closed it
            signal.set_wakeup_fd(found, warn_on_full_buffer=False)
    return found == old


def _is_free(number: int) -> bool:
    """Whether no block hears of a signal, and Python knows what it does now: a library may have a handler of its own, as torch's and
    ``faulthandler``'s are."""
    handler = signal.getsignal(number)
    if handler not in (signal.SIG_DFL, signal.SIG_IGN):
        return handler is not None and handler not in [listener.came for listener in _open]
    caught = 0
    with suppress(OSError, ValueError, IndexError):  # no Linux
        caught = int(Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").split("SigCgt:")[1].split()[0], 16)
    return not caught >> (number - 1) & 1


def end_with_caller() -> None:
    """End this process when the one ends that ``CALLER`` names, or at once where that has ended: what started its container, and is no
    parent of it. By SIGTERM, and by SIGKILL where that does not end it. Where none is named, or one in another space of process numbers,
    nothing happens, and nothing does in processes that this one starts."""
    number, _, space = os.environ.pop(CALLER, "").partition(" ")
    caller = None
    try:
        if space != str(_NUMBERS.readlink()):
            return
        caller = os.pidfd_open(int(number))
    except ProcessLookupError:
        pass
    except (AttributeError, ValueError, OSError):
        return
    threading.Thread(target=_end_after, args=(caller,), name="caller", daemon=True).start()


def _end_after(caller: int | None) -> None:
    if caller is not None:
        select.select([caller], [], [])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_LAST_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


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
