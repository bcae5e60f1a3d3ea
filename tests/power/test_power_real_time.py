"""The meter on real clocks, threads and processes: the few claims that a clock of the tests' own cannot show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from caraml.power import Meter
from caraml.power.model import Reading
from caraml.power.process import ProcessSampling
from caraml.power.signals import Constant, Square
from caraml.power.sources.fake import FakeSource

PATIENCE_S = 300.0
"""Only what is broken takes so long."""


def test_a_window_has_the_true_energy_within_its_bound() -> None:
    source = FakeSource(Square(period=0.4), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(1.0)
    assert window.start is not None and window.end is not None
    device = window.energy.boundaries["device"]
    assert device.energy_j == pytest.approx(source.true_energy(window.start, window.end), abs=device.bound_j)


def test_a_sensor_that_hangs_holds_nobody_up() -> None:
    """It hangs until it is let go at the very end: whoever waited for it would wait for ever."""

    class Hanging(FakeSource):
        def read(self) -> list[Reading]:
            if not first:
                first.append(True)
                return super().read()
            released.wait()
            return []

    first, released = list[bool](), threading.Event()
    with Meter([Hanging(Constant())], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.2)
    assert not window.energy.valid and window.energy.boundaries["device"].energy_j is None
    released.set()


def test_sampling_goes_on_while_the_caller_is_busy() -> None:
    source = FakeSource(Constant(), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter, meter.window("busy") as window:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
    assert window.energy.channels[0].readings >= 10


# --- the sampler process ----------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_the_sampler_process_measures_as_the_threads_do() -> None:
    with Meter(["fake:constant"], interval=0.05, process=True) as meter, meter.window("w") as window:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            sum(range(10000))
    energy = window.energy
    device = energy.boundaries["device"]
    assert energy.valid, energy.reason
    assert device.energy_j == pytest.approx(300 * energy.duration_s, abs=device.bound_j)
    assert energy.channels[0].readings >= 10


@pytest.mark.processes
def test_a_killed_sampler_process_is_noticed_and_what_it_read_is_kept() -> None:
    with Meter(["fake:constant"], interval=0.05, process=True) as meter:
        sampling = meter._sampling
        assert isinstance(sampling, ProcessSampling)
        assert sampling.pid is not None
        with meter.window("w") as window:
            time.sleep(0.5)
            os.kill(sampling.pid, signal.SIGKILL)
            time.sleep(0.3)
        energy = window.energy
    assert not energy.valid
    assert energy.boundaries["device"].energy_j is None
    assert energy.boundaries["device"].partial_j == pytest.approx(150, rel=0.3)
    assert "signal 9" in meter.reasons[0]


@pytest.mark.processes
def test_the_sampler_process_ends_with_its_parent() -> None:
    code = (
        "import os, signal, time\n"
        "from caraml.power import Meter\n"
        "meter = Meter(['fake'], process=True)\n"
        "meter.start()\n"
        "print(meter._sampling.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    child = int(done.stdout)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.05)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
