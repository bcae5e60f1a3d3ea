"""The meter on real clocks, threads and processes: the few claims that a clock of the tests' own cannot show."""

from __future__ import annotations

import threading
import time

import pytest

from caraml.power import Meter
from caraml.power.model import Reading
from caraml.power.signals import Constant, FakeSource, Square

PATIENCE_S = 300.0
"""Only what is broken takes so long."""


def test_a_window_has_the_true_energy_within_its_bound() -> None:
    source = FakeSource(Square(period=0.4), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(1.0)
    assert window.start is not None and window.end is not None
    device = window.energy.boundaries["device"]
    start, end = window.start - source.origin, window.end - source.origin
    assert device.energy_j == pytest.approx(source.signal.energy(end) - source.signal.energy(start), abs=device.bound_j)


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
    """However long that takes here: whoever is read only where the caller lets it be is never read ten times."""

    class Counting(FakeSource):
        reads = 0

        def read(self) -> list[Reading]:
            self.reads += 1
            return super().read()

    source = Counting(Constant(), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter, meter.window("busy") as window:
        end, enough = time.monotonic() + PATIENCE_S, source.reads + 12
        while source.reads < enough and time.monotonic() < end:
            sum(range(1000))
    assert window.energy.channels[0].readings >= 10
