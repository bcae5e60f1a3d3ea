"""Signals are acted on whatever the main thread waits for, and afterwards everything is as it was."""

from __future__ import annotations

import faulthandler
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from caraml.base import signals
from caraml.base.signals import die_with_parent, on_signals, on_termination
from caraml.data import store


def test_a_wait_that_no_signal_interrupts_delays_none() -> None:
    """As when one comes just before the wait begins: it is another thread that the system interrupts."""
    told: list[int] = []
    acted = threading.Event()
    reading, writing = os.pipe()

    def act(number: int) -> None:
        told.append(number)
        acted.set()

    def tell() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        os.write(writing, b"in time" if acted.wait(60) else b"late")

    with on_signals((signal.SIGUSR1,), act):
        thread = threading.Thread(target=tell)
        thread.start()
        assert os.read(reading, 10) == b"in time"
    thread.join()
    assert told == [signal.SIGUSR1]
    os.close(reading)
    os.close(writing)


def test_only_these_signals_and_only_meanwhile() -> None:
    told: list[int] = []
    others: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: others.append(number)), signal.getsignal(signal.SIGUSR1)
    try:
        with on_signals((signal.SIGUSR1,), told.append):
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
        assert (told, others) == ([signal.SIGUSR1], [signal.SIGUSR2])
        assert signal.getsignal(signal.SIGUSR1) == before[1]
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR2, before[0])


def test_a_handler_that_is_not_python_s_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a program that has Python within it: it cannot be set from here once it is gone."""
    before = signal.getsignal(signal.SIGUSR1)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        with on_signals((signal.SIGUSR1,), lambda number: None):
            patched.undo()
            assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_in_another_thread_nothing_is_changed() -> None:
    found: list[object] = []

    def look() -> None:
        with on_signals((signal.SIGUSR1,), found.append):
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGUSR1)]


# -- termination -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.Queue[int]]:
    """The signals that would have ended this process. Under ``nohup`` one of them is ignored."""
    found: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(signals, "_end_by", found.put)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def test_termination_waits_for_what_is_to_be_done(ends: queue.Queue[int]) -> None:
    """Also while the main thread waits for what no signal interrupts, and if the first to speak fails."""
    said: list[tuple[str, int]] = []

    def fail(number: int) -> None:
        said.append(("inner", number))
        raise OSError

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with on_termination(lambda number: said.append(("outer", number))), on_termination(fail):
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert ends.get(timeout=60) == signal.SIGTERM
        assert said == [("inner", signal.SIGTERM), ("outer", signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
    assert "signals" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("around", [on_signals, lambda numbers, act: on_termination(act)])
def test_a_signal_that_comes_as_the_block_ends_is_not_lost(around: Any, ends: queue.Queue[int], monkeypatch: pytest.MonkeyPatch) -> None:
    listen, put_back, acted, over = signals._Listener._listen, signals._Listener.put_back, list[int](), threading.Event()

    def listen_late(self: signals._Listener) -> None:
        assert over.wait(60)
        listen(self)

    def put_back_first(self: signals._Listener) -> None:
        put_back(self)
        over.set()

    monkeypatch.setattr(signals._Listener, "_listen", listen_late)
    monkeypatch.setattr(signals._Listener, "put_back", put_back_first)
    with around((signal.SIGHUP,), acted.append):
        signal.raise_signal(signal.SIGHUP)
        assert ends.empty() and not acted
    assert acted == [signal.SIGHUP] and ends.qsize() == (around is not on_signals)


def test_a_signal_that_a_block_hears_of_stays_that_block_s(ends: queue.Queue[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes as another block takes it over, or gives it back, could be lost between them, and so could one that is written to
    nobody meanwhile."""
    inner, outer, swaps = list[int](), list[int](), list[int]()
    within = on_signals((signal.SIGTERM, signal.SIGUSR1), inner.append)
    with on_termination(outer.append):
        with monkeypatch.context() as patched:
            patched.setattr(signal, "set_wakeup_fd", swaps.append)
            within.__enter__()
        signal.raise_signal(signal.SIGTERM)
        assert ends.get(timeout=60) == signal.SIGTERM
        signal.raise_signal(signal.SIGUSR1)
        with monkeypatch.context() as patched:
            patched.setattr(signal, "set_wakeup_fd", swaps.append)
            within.__exit__(None, None, None)
    assert (inner, outer, swaps) == ([signal.SIGUSR1], [signal.SIGTERM], [])


def test_who_handles_a_signal_decides_what_it_does(ends: queue.Queue[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's trainer calls the handler that it finds, and ends when its batch does; others put it back after the block."""
    came: list[int] = []

    def theirs(number: int, frame: FrameType | None) -> None:
        came.append(number)
        assert callable(found)
        found(number, frame)

    try:
        with on_termination(ends.put):
            found = signal.signal(signal.SIGTERM, theirs)
            signal.raise_signal(signal.SIGTERM)
        assert came == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == theirs and ends.empty()
        with on_termination(ends.put):
            signal.raise_signal(signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) == theirs
        assert came == [signal.SIGTERM] * 2 and ends.empty()
        signal.signal(signal.SIGTERM, found)
        monkeypatch.setattr(signal, "raise_signal", lambda number: ends.put(number if signal.getsignal(number) == signal.SIG_DFL else 0))
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends.get_nowait() == signal.SIGTERM, "whoever left the block can be ended as before"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_termination_is_heard_of_where_the_main_thread_began_the_block(ends: queue.Queue[int]) -> None:
    found: list[object] = []

    def look() -> None:
        with on_termination(ends.put):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.SIG_DFL]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    try:
        with on_termination(ends.put):  # another loop, as asyncio's, hears of signals first
            assert signal.set_wakeup_fd(writing) == writing
            signal.raise_signal(signal.SIGTERM)
            assert [ends.get(timeout=60), ends.get(timeout=60)] == [signal.SIGTERM] * 2
        assert signal.set_wakeup_fd(-1) == writing
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


def test_a_block_may_end_in_another_thread(ends: queue.Queue[int]) -> None:
    """As where a generator around it is collected there. Handlers can only be set in the main thread: the signal ends the process still."""
    around, found = on_termination(ends.put), list[object]()
    around.__enter__()

    def leave() -> None:
        try:
            found.append(around.__exit__(None, None, None))
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    with on_termination(lambda number: None):  # until the next one ends
        signal.raise_signal(signal.SIGTERM)
        assert (found, ends.get(timeout=60)) == ([False], signal.SIGTERM) and ends.empty()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signals._open


def test_blocks_may_end_in_any_order(ends: queue.Queue[int]) -> None:
    """As where generators are around them."""
    said: list[str] = []
    first, second = on_termination(lambda number: said.append("first")), on_termination(lambda number: said.append("second"))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    signal.raise_signal(signal.SIGTERM)
    assert ends.get(timeout=60) == signal.SIGTERM and said == ["second"]
    second.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not signals._open


def test_a_handler_of_a_library_s_own_is_left_alone(ends: queue.Queue[int], tmp_path: Path) -> None:
    """Python does not know of it, and could not give it back."""
    for around in (on_termination(ends.put), on_signals((signal.SIGTERM,), ends.put)):
        with (tmp_path / "traces").open("w+") as file:
            faulthandler.register(signal.SIGTERM, file)
            try:
                with around:
                    signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)
                file.seek(0)
                assert file.read().count("most recent call first") >= 2 and ends.empty()
            finally:
                faulthandler.unregister(signal.SIGTERM)


def test_where_there_is_no_prctl_a_process_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers of look-alike sets fell over its absence."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("ctypes.CDLL")
    die_with_parent()
    assert store.die_with_parent is die_with_parent, "what data's writers begin with"


def test_what_is_in_a_container_ends_with_what_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no parent of it, and may be killed with what was to hand a signal on."""
    sent: list[int] = []
    reading, writing = os.pipe()
    over = threading.Event()

    def kill(process: int, number: int) -> None:
        assert process == os.getpid()
        sent.append(number)
        if number == signal.SIGKILL:
            over.set()

    monkeypatch.setenv(signals.CALLER, f"12345 {signals._NUMBERS.readlink()}")
    monkeypatch.setattr(os, "pidfd_open", lambda process: {12345: reading}[process])
    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(signals, "_LAST_SECONDS", 0.0)
    signals.end_with_caller()
    assert not sent and signals.CALLER not in os.environ, "what this one starts ends with it"
    os.write(writing, b"over")
    assert over.wait(60) and sent == [signal.SIGTERM, signal.SIGKILL]
    os.close(reading)
    os.close(writing)


def test_what_has_ended_before_a_container_was_ready_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    over = threading.Event()
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setenv(signals.CALLER, f"{ended.pid} {signals._NUMBERS.readlink()}")
    monkeypatch.setattr(os, "kill", lambda process, number: (sent.append(number), over.set() if number == signal.SIGKILL else None))
    monkeypatch.setattr(signals, "_LAST_SECONDS", 0.0)
    signals.end_with_caller()
    assert over.wait(60) and sent == [signal.SIGTERM, signal.SIGKILL]


@pytest.mark.parametrize("caller", ["", "none", "1", "1 ", "1 pid:[1]"])
def test_without_a_caller_that_can_be_seen_nothing_is_waited_for(caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signals.CALLER, caller)
    before = threading.active_count()
    signals.end_with_caller()
    assert threading.active_count() == before
