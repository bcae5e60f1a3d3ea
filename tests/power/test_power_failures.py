"""Sensors that fail, hang or never open. Nothing hangs, nothing is lost in silence."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from caraml.metrics.energy import joules
from caraml.power import Meter
from caraml.power.merge import merge
from caraml.power.model import HEADLINES, Channel, Reading
from caraml.power.signals import Constant, FakeSource
from caraml.power.source import SourceUnavailable

pytestmark = pytest.mark.usefixtures("virtual_time")
PATIENCE_S = 2.0
"""By the tests' own clock."""


class Faulty(FakeSource):
    """A source that misbehaves in one way, from a time after its opening on."""

    def __init__(self, fault: str, after: float = 0.3) -> None:
        super().__init__(Constant(), update_period_s=0.01)
        self.fault, self.after = fault, after
        self.done = False

    def open(self) -> None:
        if self.fault == "open":
            raise SourceUnavailable("the card is gone", "plug it in")
        if self.fault == "crash at open":
            raise RuntimeError("driver says no")
        if self.fault == "exit at open":
            raise SystemExit("driver ends")
        super().open()

    def read(self) -> list[Reading]:
        readings = super().read()
        if time.monotonic() - self.origin < self.after:
            return readings
        if self.fault == "raises":
            raise OSError("bus error")
        if self.fault == "hangs" and not self.done:
            self.done = True
            time.sleep(5)
        if self.fault == "fails" or (self.fault == "fails once" and not self.done):
            self.done = True
            return [Reading(r.channel, r.t_before, r.t_after, None, "GPU is lost") for r in readings]
        return readings

    def close(self) -> None:
        if self.fault == "close":
            raise OSError("cannot close")


def measured(fault: str, length: float = 1.0) -> tuple[Meter, Any, float]:
    begin = time.monotonic()
    with Meter([Faulty(fault)], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(length)
    energy = window.energy
    return meter, energy, time.monotonic() - begin - length


@pytest.mark.parametrize("fault", ["fails", "raises", "hangs"])
def test_a_sensor_that_stops_leaves_no_number_but_its_part(fault: str) -> None:
    meter, energy, extra = measured(fault)
    assert extra < PATIENCE_S
    assert not energy.valid
    device = energy.boundaries["device"]
    assert device.energy_j is None
    assert device.partial_j is not None
    assert 30 < device.partial_j < 250
    assert "partial_coverage" in energy.flags
    if fault == "fails":
        assert "GPU is lost" in (energy.reason or "")
    if fault == "raises":
        assert any("bus error" in r for r in meter.reasons) and "bus error" in (energy.reason or "")


class Odd(FakeSource):
    """A source whose channels, or whose readings, are none."""

    def __init__(self, value: float = 100.0, **described: Any) -> None:
        super().__init__(Constant(), update_period_s=0.01)
        self.answered, self.description = value, described

    def channels(self) -> list[Channel]:
        return [replace(channel, **self.description) for channel in super().channels()]

    def read(self) -> list[Reading]:
        return [replace(reading, value=self.answered) for reading in super().read()]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_answer_that_is_no_number_is_no_reading(value: float) -> None:
    with Meter([Odd(value)], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.5)
    assert window.energy.boundaries["device"].energy_j is None and f"answered {value}" in (window.energy.reason or "")
    assert json.loads(json.dumps(window.energy.to_dict(), allow_nan=False))


@pytest.mark.parametrize(
    ("key", "found", "expected"),
    [
        ("kind", "watts", "one of "),
        ("boundary", "socket", "one of "),
        ("label", None, "text"),
        ("accuracy", float("nan"), "a number from 0 on"),
        ("update_period_s", "10 ms", "a number from 0 on"),
        ("duty", None, "a number from 0 on"),
        ("max_power_w", -1.0, "a number from 0 on"),
    ],
)
def test_a_channel_of_which_no_energy_can_be_told_is_a_reason(key: str, found: Any, expected: str) -> None:
    """And not an error after the measurement, which would cost all the others theirs."""
    with Meter([Odd(**{key: found}), FakeSource(Constant(), name="other")], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.5)
    assert [channel.source for channel in meter.channels] == ["other", "other"] and window.energy.valid
    assert f"{key}: found {found!r}, expected {expected}" in meter.reasons[0]
    assert json.loads(json.dumps(window.energy.to_dict(), allow_nan=False))


class Twins(Odd):
    """Two devices under one id, of which only one would count."""

    def channels(self) -> list[Channel]:
        return [replace(channel, id="twin", domain=f"device {i}") for i, channel in enumerate(FakeSource.channels(self))]


def test_two_channels_of_one_id_are_a_reason() -> None:
    with Meter([Twins()], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.2)
    assert not meter.channels and "channel 'twin': a second one of this id" in (window.energy.reason or "")


class Same(Odd):
    """One device, whatever the source is called."""

    def channels(self) -> list[Channel]:
        return [replace(FakeSource.channels(self)[1], id="same")]

    def read(self) -> list[Reading]:
        return [replace(FakeSource.read(self)[1], channel="same")]


def test_a_channel_with_the_id_of_another_source_is_a_reason() -> None:
    sources = Same(), Same()
    sources[1].name = "other"
    with Meter(list(sources), interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.5)
    assert len(meter.channels) == 1 and "channel 'same': source '" in meter.reasons[0] and window.energy.valid, window.energy


class Empty(FakeSource):
    def channels(self) -> list[Channel]:
        return []

    def read(self) -> list[Reading]:
        return []


def test_a_source_without_a_sensor_is_named() -> None:
    with Meter([Empty(Constant())], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(0.2)
    assert window.energy.reason == "no power sensor: fake: it opened, and has no sensor"


class Feeding(FakeSource):
    """A sensor of power alone that is connected the wrong way round."""

    def channels(self) -> list[Channel]:
        return [replace(channel, boundary="node_ac") for channel in super().channels() if channel.kind != "energy"]

    def read(self) -> list[Reading]:
        known = {channel.id for channel in self.channels()}
        return [replace(reading, value=-5.0) for reading in super().read() if reading.channel in known]


def test_nothing_draws_less_than_nothing() -> None:
    with Meter([Feeding(Constant())], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(1.0)
    device = window.energy.boundaries["node_ac"]
    assert device.energy_j is None and not window.energy.valid and "the sensor showed -5 W on average" in (device.reason or "")


def test_one_failed_read_costs_nothing() -> None:
    _, energy, _ = measured("fails once")
    device = energy.boundaries["device"]
    assert energy.valid, energy.reason
    assert device.energy_j == pytest.approx(300 * energy.duration_s, abs=device.bound_j)
    assert energy.channels[0].missed >= 1


@pytest.mark.parametrize(("fault", "words"), [("open", "plug it in"), ("crash at open", "driver says no"), ("exit at open", "driver ends")])
def test_a_sensor_that_does_not_open_is_a_reason(fault: str, words: str) -> None:
    meter, energy, extra = measured(fault, 0.1)
    assert extra < PATIENCE_S
    assert words in meter.reasons[0]
    assert words in energy.reason
    assert energy.flags == ["no_source"]
    assert [words in str(found.reason) and found.energy_j is None for found in energy.boundaries.values()] == [True] * (fault != "open")


def test_no_other_boundary_replaces_accelerators_whose_sensors_did_not_open() -> None:
    """Nor are those of a node's other ranks all that there are, where their sensors opened."""
    processors = FakeSource(Constant(100.0), name="processors", kinds=("power_instant",), update_period_s=0.01)
    processors.listed = [replace(channel, boundary="cpu") for channel in processors.listed]
    windows = []
    for source in (Faulty("crash at open"), FakeSource(Constant(), update_period_s=0.01)):
        with Meter([source, processors], interval=0.03) as meter, meter.window("w") as window:
            time.sleep(1.0)
        windows.append(window.energy)
    alone, other = windows
    assert alone.boundaries["cpu"].valid and "driver says no" in str(joules(alone, *HEADLINES).reason)
    assert joules(alone, *HEADLINES).value is None and joules(other, *HEADLINES).value == pytest.approx(300, rel=0.1)
    total = merge([("rank 0", other), ("rank 1", alone)]).boundaries["device"]
    assert total.total_j is None and total.partial_j == pytest.approx(300, rel=0.1)


def test_accelerators_that_are_not_used_replace_no_processors() -> None:
    """Though their sensors break: what computes on processors has the energy of these."""
    processors = FakeSource(Constant(100.0), name="processors", kinds=("power_instant",), update_period_s=0.01)
    processors.listed = [replace(channel, boundary="cpu") for channel in processors.listed]
    with Meter([Faulty("crash at open"), processors], devices=[], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(1.0)
    assert joules(window.energy, *HEADLINES).value == pytest.approx(100, rel=0.1) and "driver says no" in meter.reasons[0]


def test_a_sensor_that_does_not_close_is_reported_and_harms_nothing() -> None:
    meter, energy, _ = measured("close", 0.5)
    assert energy.valid, energy.reason
    assert "cannot close" in meter.reasons[0]


def test_one_dead_sensor_does_not_silence_another() -> None:
    good = FakeSource(Constant(100.0), name="good", update_period_s=0.01)
    with Meter([Faulty("hangs"), good], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(1.0)
    channels = {c.source: c for c in window.energy.channels}
    assert channels["fake"].energy_j is None
    assert channels["good"].energy_j == pytest.approx(100 * window.energy.duration_s, abs=channels["good"].bound_j)


class NotANumber(FakeSource):
    """Answers 0 in place of power."""

    def value(self, channel: Channel, at: float) -> float:
        return 0.0


def test_zero_watts_beside_a_running_counter_is_a_contradiction() -> None:
    class Half(FakeSource):
        def value(self, channel: Channel, at: float) -> float:
            return 0.0 if channel.kind != "energy" else super().value(channel, at)

    with Meter([Half(Constant(), update_period_s=0.01)], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(1.0)
    assert "counter_power_mismatch" in window.energy.flags
    assert not window.energy.valid


def test_a_counter_that_always_says_zero_is_frozen_not_zero_joules() -> None:
    with Meter([NotANumber(Constant(), kinds=("energy",))], interval=0.03) as meter, meter.window("w") as window:
        time.sleep(1.5)
    assert window.energy.channels[0].energy_j is None
    assert "frozen" in window.energy.flags


def test_a_standstill_is_seen_that_ends_soon_after_the_window_began() -> None:
    """It is longer than a counter may be slow, though most of it lies before what the window's energy is made of."""
    with Meter([FakeSource(Constant(), kinds=("energy",), update_period_s=0.001)], interval=0.1) as meter:
        (counter,) = meter.channels
    meter.store._columns.clear()
    times = [i / 10 for i in range(60, 260)]
    shown = [2700.0 if 9.0 < t < 10.3 else 300.0 * t for t in times]
    meter.store.add([Reading(counter.id, t, t, value) for t, value in zip(times, shown, strict=True)])
    assert "frozen" in meter.energy("w", 10.0, 20.0).flags
