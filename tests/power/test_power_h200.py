"""The sensors of an NVIDIA H200 as they were measured (driver 580), replayed: what they showed while matrix products began and ended at
known instants between times at rest, three of them for 50 to 100 ms.

``h200_sensors.csv`` has when each sensor was first seen with each value, asked every 9 ms: ``counter_j``, ``instant_w`` (field 186) and
``mean_w`` (field 185). ``work_j`` is the energy at which work began and ended in turn, from the counter's next value and 120 W at rest.
"""

from __future__ import annotations

import csv
import random
import time
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sensors import channel

from caraml.power import Meter
from caraml.power.counter import counter_energy
from caraml.power.energy import domain_energy
from caraml.power.integral import power_energy
from caraml.power.model import ChannelEnergy
from caraml.power.readings import ChannelReadings
from caraml.power.sampler import available_sources
from caraml.power.source import BUILT_IN, AskedSensors
from caraml.power.store import ReadingSeries, SeriesEstimate, interpolate

REFRESHED_S, PERIOD_S = 0.06, 0.1
"""When the counter was first refreshed, and how often it is."""
CALLS_S = (0.0024, 0.0026, 0.003, 0.0035, 0.004, 0.005, 0.008, 0.015, 0.029)
"""How long calls took that had the driver fetch the sensors."""
SHOWN: dict[str, tuple[list[float], list[float]]] = {}
for row in csv.DictReader(Path(__file__).with_name("h200_sensors.csv").read_text(encoding="utf-8").splitlines()):
    for column, text in zip(SHOWN.setdefault(row["sensor"], ([], [])), (row["seconds"], row["value"]), strict=True):
        column.append(float(text))
POINTS = sorted([(REFRESHED_S + PERIOD_S * k, j) for k, j in enumerate(SHOWN["counter_j"][1])] + list(zip(*SHOWN["work_j"], strict=True)))
TRUE = [t for t, _ in POINTS], [j for _, j in POINTS]
COUNTER = channel("energy", update_period_s=PERIOD_S, resolution=0.001, max_power_w=1400.0)
INSTANT = channel("power_instant", update_period_s=PERIOD_S, resolution=0.001, max_power_w=1400.0, duty=0.25)
MEAN = channel("power_mean", update_period_s=PERIOD_S, mean_window_s=1.0, resolution=0.001, max_power_w=1400.0)
EDGES = SHOWN["work_j"][0]


def value(sensor: str, at: float) -> float:
    times, values = SHOWN[sensor]
    return values[max(bisect_right(times, at) - 1, 0)]


def energy(start: float, end: float) -> float:
    """What was used [J]."""
    return interpolate(*TRUE, end) - interpolate(*TRUE, start)


def read(start: float, end: float, draw: random.Random) -> dict[str, ReadingSeries]:
    """What a meter reads around a window: at a random instant in every 0.1 s, and as its marks ask for. A call fetches all sensors."""
    first, seen = max(start - 1.3, 0.1), {name: ReadingSeries() for name in ("counter_j", "instant_w", "mean_w")}
    asked = [first + 0.1 * (k + draw.random()) for k in range(int((min(end + 1.0, 12.9) - first) / 0.1))]
    free = 0.0
    for at in sorted([*asked, *(edge + age for edge in (start, end) for age in (0.0, COUNTER.age_s, MEAN.age_s))]):
        before = max(at, free)
        after = before + draw.choice(CALLS_S)
        free = after + 1e-4
        fetched = draw.uniform(before, after)
        for name, series in seen.items():
            series.add(*((before, after) if name == "counter_j" else (after, after + 6e-5)), value(name, fetched))
    return seen


def windows(length: float, draw: random.Random, count: int = 100) -> list[tuple[float, float]]:
    """Half of them begin near an edge of the work."""
    starts = [draw.uniform(1.3, 11.6 - length) for _ in range(count // 2)]
    near = [edge + draw.uniform(-0.12, 0.12) for edge in EDGES if 1.3 < edge + length < 11.5]
    return [(start, start + length) for start in (*starts, *draw.choices(near, k=count // 2))]


def estimated(seen: dict[str, ReadingSeries], start: float, end: float) -> dict[str, SeriesEstimate | ChannelEnergy]:
    views = [ChannelReadings(COUNTER, seen["counter_j"]), ChannelReadings(INSTANT, seen["instant_w"])]
    return {
        "counter": counter_energy(seen["counter_j"], COUNTER, start, end, seen["instant_w"]),
        "instant": power_energy(seen["instant_w"], INSTANT, start, end, 0.1),
        "mean": power_energy(seen["mean_w"], MEAN, start, end, 0.1),
        "published": domain_energy(views, start, end),
    }


@pytest.mark.parametrize("length", [0.4, 1.1, 2.0, 4.0])
def test_the_bounds_hold_for_the_sensors_of_an_h200(length: float) -> None:
    draw = random.Random(length)
    held: dict[str, list[bool]] = {}
    flags: set[str] = set()
    wide = []
    for start, end in windows(length, draw):
        for name, found in estimated(read(start, end, draw), start, end).items():
            assert found.energy_j is not None and found.bound_j is not None
            held.setdefault(name, []).append(abs(found.energy_j - energy(start, end)) <= found.bound_j)
            if isinstance(found, ChannelEnergy):
                flags.update(found.flags)
                wide.append(found.bound_j)
    assert {name: sum(each) / len(each) for name, each in held.items() if sum(each) < 0.95 * len(each)} == {}
    assert length < 1 or flags == set()
    assert sum(wide) / len(wide) < 70, "J, which is one period of the counter at full power"


def test_a_mean_of_power_beside_a_counter_narrows_nothing() -> None:
    """It would not show a load that stops for a moment."""
    seen = read(2.0, 4.0, random.Random(1))
    beside = domain_energy([ChannelReadings(COUNTER, seen["counter_j"]), ChannelReadings(MEAN, seen["mean_w"])], 2.0, 4.0)
    alone = counter_energy(seen["counter_j"], COUNTER, 2.0, 4.0).bound_j
    assert beside.bound_j is not None and alone is not None and beside.bound_j >= alone


def test_what_an_instant_power_does_not_see_of_short_work_the_counter_has() -> None:
    """Two stretches of 50 ms. The counter has both in full; the power has a third of them, though it has a new value every 0.1 s."""
    start, end = 7.45, 8.25
    rest = 120.5 * (end - start)
    series = ReadingSeries()
    for k in range(1000):
        series.add(t := 7.0 + 0.002 * k, t, value("instant_w", t))
    by_power = power_energy(series, INSTANT, start, end, 0.002)
    assert energy(start, end) - rest == pytest.approx(70, abs=10)
    assert by_power.energy_j is not None and by_power.energy_j - rest < 35
    assert energy(start, end) == pytest.approx(by_power.energy_j, abs=by_power.bound_j)


class Node(AskedSensors):
    """GPUs, each with its own second of the replay: a call for a counter takes its time, and one for power next to none after it."""

    name = "csv"

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__()
        self.begun, self.draw = [1.0 + 0.15 * gpu for gpu in range(count)], random.Random(seed)

    def open(self) -> None:
        self.origin = time.monotonic()
        for gpu in range(len(self.begun)):
            for of, sensor, takes in ((COUNTER, "counter_j", CALLS_S), (INSTANT, "instant_w", (6e-5,))):
                self.add(replace(of, id=f"{gpu}:{sensor}", domain=f"{gpu}"), partial(self.ask, gpu, sensor, takes))

    def ask(self, gpu: int, sensor: str, takes: tuple[float, ...]) -> float:
        if time.monotonic() > self.origin + 0.001:  # a meter that starts waits by another clock for the first readings
            time.sleep(self.draw.choice(takes))
        return value(sensor, self.at(gpu, time.monotonic()))

    def at(self, gpu: int, now: float) -> float:
        """The instant of the replay at a monotonic one."""
        return now - self.origin + self.begun[gpu]


@pytest.mark.usefixtures("virtual_time")
def test_a_round_over_eight_such_gpus_keeps_up() -> None:
    node = Node(8)
    with Meter([node], offset=random.Random(0).random) as meter:
        time.sleep(1.5)
        with meter.window("work") as window:
            time.sleep(4.0)
    found = window.energy
    assert found.valid and len(found.channels) == 8 and window.start is not None and window.end is not None
    for gpu, each in enumerate(found.channels):
        true = energy(node.at(gpu, window.start), node.at(gpu, window.end))
        assert each.energy_j == pytest.approx(true, abs=each.bound_j) and each.bound_j is not None and each.bound_j < 0.1 * true
        assert each.readings > 35 and each.missed <= 4, "of two sensors"


@pytest.mark.usefixtures("virtual_time")
def test_calls_that_take_long_do_not_lengthen_the_period_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.power.sampler.chosen_sources", lambda: ["csv:x"])
    monkeypatch.setattr("caraml.power.sampler.create", lambda *_, **__: Node(1))
    monkeypatch.setattr("caraml.power.sampler.entries", lambda: {"csv": BUILT_IN["csv"]})
    (found,) = available_sources()
    assert found["channels"][0]["measured_period_s"] == pytest.approx(PERIOD_S, abs=0.006)
