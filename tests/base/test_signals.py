"""Signals are acted on whatever the main thread waits for, and afterwards everything is as it was."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from caraml.base.processes import die_with_parent, on_signals
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


def test_where_there_is_no_prctl_a_process_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers of look-alike sets fell over its absence."""
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.delattr("ctypes.CDLL")
    die_with_parent()
    assert store.die_with_parent is die_with_parent, "what data's writers begin with"
