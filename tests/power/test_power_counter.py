"""Counters that wrap, restart, freeze and glitch; power sensors that stop, repeat and round."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensors import channel, instants, sampled
from telegraph import Telegraph

from caraml.power.counter import counter_energy, unwrap
from caraml.power.energy import boundary_energy, domain_energy, window_energy
from caraml.power.integral import power_energy
from caraml.power.model import Channel, WindowEnergy
from caraml.power.readings import ChannelReadings
from caraml.power.signals import Constant, Square
from caraml.power.source import with_apparent
from caraml.power.store import ReadingSeries, silent

WINDOW = (10.0, 20.0)
RAPL = channel("energy", update_period_s=0.001, resolution=61e-6, wrap_j=262143.0, max_power_w=400.0, boundary="cpu")


def regular(sensor: Channel, watts: float = 250.0, start: float = 0.0, end: float = 30.0, step: float = 0.1) -> ReadingSeries:
    count = int((end - start) / step)
    return sampled(sensor, Constant(watts), [start + step * k for k in range(count)])


def changed(series: ReadingSeries, change: Callable[[float, float], float | None]) -> ReadingSeries:
    """The readings with other values; those for which ``change`` says ``None`` are lost."""
    result = ReadingSeries()
    for t, value in zip(series.t, series.value, strict=True):
        new = change(t, value)
        if new is not None:
            result.add(t, t, new)
    return result


def test_one_wrap_is_not_seen_in_the_energy() -> None:
    series = changed(regular(RAPL), lambda t, v: (v + 262143.0 - 3750.0) % 262143.0)
    assert any(b < a for a, b in pairwise(series.value))
    found = counter_energy(series, RAPL, *WINDOW)
    assert found.energy_j == pytest.approx(2500, abs=found.bound_j)
    assert found.flags == set()


def test_a_gap_in_which_the_counter_may_have_wrapped_twice_is_flagged() -> None:
    small = channel("energy", update_period_s=0.001, wrap_j=1000.0, max_power_w=400.0)
    series = changed(regular(small), lambda t, v: None if 11 < t < 19 else v)
    found = counter_energy(series, small, *WINDOW)
    assert "wrap_ambiguous" in found.flags


def test_a_restart_adds_no_energy_and_is_flagged() -> None:
    series = changed(regular(RAPL), lambda t, v: v + 1000 if t < 15 else v - 3750)
    found = counter_energy(series, RAPL, *WINDOW)
    assert found.flags == {"reset"}
    assert found.energy_j is not None
    assert found.energy_j < 2500
    assert found.energy_j == pytest.approx(2500, abs=found.bound_j)
    assert found.coverage == pytest.approx(0.99, abs=0.001)


def test_a_counter_that_falls_by_megajoules_adds_no_terawatts() -> None:
    intel = channel("energy", update_period_s=0.01, max_power_w=600.0)
    series = changed(regular(intel), lambda t, v: 200.0 if 14.95 < t < 15.05 else v + 22e6)
    found = counter_energy(series, intel, *WINDOW)
    assert found.energy_j == pytest.approx(2500, abs=found.bound_j)
    assert found.parts.get("gaps", 0.0) == 0.0  # one reading contradicts both neighbours, and is dropped


def test_a_jump_forward_is_no_energy_either() -> None:
    series = changed(regular(RAPL), lambda t, v: v if t < 15 else v + 1e6)
    found = counter_energy(series, channel("energy", update_period_s=0.001, max_power_w=400.0), *WINDOW)
    assert found.energy_j is not None
    assert found.energy_j < 2600
    assert "reset" in found.flags


def test_a_glitch_backwards_is_dropped() -> None:
    series = changed(regular(RAPL), lambda t, v: v - 40 if 14.95 < t < 15.05 else v)
    counter = unwrap(series, RAPL)
    assert len(counter.t) == len(series) - 1
    assert counter.cuts == []


@pytest.mark.parametrize("back", [30.0, 45.0, 60.0])
def test_a_counter_that_falls_a_little_and_goes_on_from_there_is_flagged(back: float) -> None:
    """The reading after the fall is above that before it, so that the fall looked like a wrong reading, and its energy was lost."""
    sensor = channel("energy", update_period_s=0.01, max_power_w=800.0)
    series = changed(regular(sensor), lambda t, v: v - back if t > 15 else v)
    found = counter_energy(series, sensor, *WINDOW)
    assert found.flags == {"reset"} and found.energy_j == pytest.approx(2500, abs=found.bound_j)


def test_a_frozen_counter_has_no_number() -> None:
    found = counter_energy(changed(regular(RAPL), lambda t, v: 77.0), RAPL, *WINDOW)
    assert found.energy_j is None
    assert "frozen" in found.flags
    assert "stood still" in (found.reason or "")


def test_a_counter_that_froze_for_a_while_is_flagged_and_bounded() -> None:
    series = changed(regular(RAPL), lambda t, v: min(v, 13 * 250.0) if t < 17 else v - 4 * 250.0)
    found = counter_energy(series, RAPL, *WINDOW)
    assert "frozen" in found.flags
    assert found.energy_j == pytest.approx(2500, abs=found.bound_j)


def test_a_lost_reading_costs_a_counter_nothing() -> None:
    series = changed(regular(RAPL), lambda t, v: None if 12 < t < 18 else v)
    found = counter_energy(series, RAPL, *WINDOW)
    assert found.energy_j == pytest.approx(2500, abs=found.bound_j)
    assert found.coverage == 1.0
    assert found.flags == set()


def test_a_pause_over_the_end_of_the_work_has_what_it_hides_in_the_bound() -> None:
    """300 W to the end of the window and 40 W after it: on the straight line through a pause, two seconds of work count as 213 W."""
    work, rest = sampled(RAPL, Constant(300.0), [0.1 * k for k in range(200)]), [20 + 0.1 * k for k in range(100)]
    for t in rest:
        work.add(t, t, 6000 + 40 * (t - 20))
    found = counter_energy(changed(work, lambda t, v: None if 18 < t < 21 else v), RAPL, *WINDOW)
    assert found.energy_j == pytest.approx(3000, abs=found.bound_j) and found.energy_j != pytest.approx(3000, abs=150)
    assert (found.bound_j or 0.0) < 0.15 * 3000


@pytest.mark.parametrize("edge", [10.0, 15.0, 20.0])
def test_one_value_of_power_beyond_all_measure_is_none(edge: float) -> None:
    """Also where the sensor holds it while it is read several times, where it had it for long before the window, and of apparent power."""
    sensor = channel("power_instant", update_period_s=0.1, max_power_w=800.0)
    series = changed(regular(sensor, step=0.02), lambda t, v: 2.0**32 if 0 <= t - edge < 0.09 or 2 < t < 6 else v)
    found = domain_energy([ChannelReadings(each, series) for each in (sensor, with_apparent(sensor))], *WINDOW)
    assert found.energy_j == pytest.approx(2500) and found.peak_w == pytest.approx(250)
    assert found.mean_va == pytest.approx(250) and found.peak_va == pytest.approx(250) and found.missed > 0


def test_zero_watts_of_what_is_on_are_no_reading() -> None:
    """Some drivers answer so where they cannot read: half the energy was valid, and all of it 0 J; an outlet may be off."""
    sensor = channel("power_instant")
    now_and_then = changed(regular(sensor), lambda t, v: -1.0 if int(10 * t) % 7 == 3 else v)
    found = domain_energy([ChannelReadings(sensor, now_and_then)], *WINDOW)
    assert found.energy_j == pytest.approx(2500) and found.flags == ["one_value"] and found.missed > 10
    half, none = (changed(regular(sensor), lambda t, v, since=since: 0.0 if t > since else v) for since in (14.0, -1.0))
    for series, share in ((half, 0.4), (none, 0.0)):
        found = domain_energy([ChannelReadings(sensor, series)], *WINDOW)
        assert (
            found.energy_j is None and found.coverage == pytest.approx(share, abs=0.02) and "it showed 0 W or less" in (found.reason or "")
        )
    outlet = channel("power_instant", boundary="node_ac")
    assert domain_energy([ChannelReadings(outlet, none)], *WINDOW).energy_j == 0
    against = domain_energy([ChannelReadings(outlet, changed(none, lambda t, v: -5.0))], *WINDOW)
    assert against.energy_j is None and against.flags == [], "it is not for its length that it has none"
    for left in (ReadingSeries(), regular(channel("energy"), end=15.0)):
        lost = domain_energy([ChannelReadings(channel("energy"), left), ChannelReadings(sensor, none)], *WINDOW)
        assert lost.energy_j is None, "a counter that is silent leaves the power alone"
    beside = [ChannelReadings(channel("energy"), regular(channel("energy"))), ChannelReadings(sensor, half)]
    assert domain_energy(beside, *WINDOW).flags == [], "the counter is right"


@pytest.mark.parametrize("high", [lambda t: t > 14, lambda t: t % 1 < 0.05 or 17 < t < 18], ids=["lasts", "mostly single readings"])
def test_a_power_that_stays_beyond_the_limit_of_its_device_counts(high: Callable[[float], bool]) -> None:
    sensor = channel("power_instant", max_power_w=800.0)
    series = changed(regular(sensor), lambda t, v: 2500.0 if high(t) else v)
    found = domain_energy([ChannelReadings(sensor, series)], *WINDOW)
    assert found.peak_w == 2500 and found.energy_j == pytest.approx(power_energy(series, sensor, *WINDOW, 0.1).energy_j)
    assert "beyond_limit" in found.flags and not boundary_energy([found], 10.0).valid, "the sensor, its unit or the limit is wrong"


def test_a_counter_slower_than_declared_is_found_out() -> None:
    slow = channel("energy", update_period_s=0.5)
    series = sampled(slow, Constant(300.0), [0.05 * k for k in range(600)])
    declared = channel("energy", update_period_s=0.02)
    bound = counter_energy(series, declared, *WINDOW).bound_j
    assert bound is not None
    assert bound > 100


def test_what_a_counter_makes_up_for_is_no_restart() -> None:
    """It showed one value for a second, and then all the energy of that second within two hundredths: read at its step, as by a mark."""
    declared, real = (channel("energy", update_period_s=period, max_power_w=800.0) for period in (0.1, 1.0))
    series = sampled(real, Constant(700.0), sorted([0.05 * k for k in range(600)] + [k + 0.001 for k in range(30)]))
    found = counter_energy(series, declared, *WINDOW)
    assert found.flags == set() and found.energy_j == pytest.approx(7000, abs=found.bound_j)
    assert (found.bound_j or 0.0) < 0.15 * 7000


def test_a_standstill_that_began_before_the_window_and_is_made_up_for_is_flagged() -> None:
    """The counter shows five seconds of work at once within the window, of which one is the window's."""
    sensor = channel("energy", update_period_s=0.1, max_power_w=800.0)
    series = changed(regular(sensor, 300.0, 9.0), lambda t, v: 1800.0 if t < 10.95 else v)
    found = counter_energy(series, sensor, *WINDOW)
    assert found.energy_j == pytest.approx(4200, abs=60) and found.flags == {"frozen"}
    assert found.energy_j == pytest.approx(3000, abs=found.bound_j)
    at_rest = changed(regular(sensor, 300.0, 9.0), lambda t, v: max(v, 3000.0))
    assert counter_energy(at_rest, sensor, *WINDOW).flags == set(), "0 W until the window begins"


def test_one_joule_steps_of_a_slow_counter() -> None:
    sensor = channel("energy", update_period_s=0.1, resolution=1.0, boundary="node_dc", max_power_w=None)
    draw = random.Random(4)
    for watts in (3.0, 80.0, 2500.0):
        times = instants(*WINDOW, 0.1, draw.random, sensor)
        found = counter_energy(sampled(sensor, Constant(watts), times), sensor, *WINDOW)
        assert found.energy_j == pytest.approx(10 * watts, abs=found.bound_j)
        assert found.flags == set()


def test_repeated_values_of_a_power_sensor_are_readings() -> None:
    sensor = channel("power_instant", resolution=1.0)
    found = power_energy(regular(sensor, 300.0), sensor, *WINDOW, interval=0.1)
    assert found.energy_j == pytest.approx(3000)


@pytest.mark.parametrize("kind", ["energy", "power_instant"])
def test_a_sensor_that_dies_leaves_a_part_and_no_total(kind: str) -> None:
    sensor = RAPL if kind == "energy" else channel("power_instant")
    series = changed(regular(sensor), lambda t, v: v if t < 16 else None)
    view = domain_energy([ChannelReadings(sensor, series, error="GPU is lost")], *WINDOW)
    assert view.energy_j is None
    assert view.partial_j == pytest.approx(250 * 6, rel=0.02)
    assert view.coverage == pytest.approx(0.6, abs=0.02)
    assert "partial_coverage" in view.flags
    assert "GPU is lost" in (view.reason or "")


def test_a_gap_in_power_is_not_bridged_in_silence() -> None:
    sensor = channel("power_instant")
    times = [0.1 * k for k in range(300)]
    series = changed(sampled(sensor, Square(period=7.0), times), lambda t, v: None if 13 < t < 15 else v)
    found = power_energy(series, sensor, *WINDOW, interval=0.1)
    truth = Square(period=7.0).energy(20) - Square(period=7.0).energy(10)
    assert found.coverage == pytest.approx(0.8, abs=0.02)
    assert "partial_coverage" in found.flags
    assert found.energy_j == pytest.approx(truth, abs=found.bound_j)


def test_no_peak_is_below_the_mean() -> None:
    series, slow = ReadingSeries(), channel("energy", update_period_s=0.1)
    for step in range(300):
        series.add(t := 0.1 * step, t, 10 * t + 90 * max(t - 10.5, 0.0))  # 10 W, then 100 W when the peak's last span has ended
    found = domain_energy([ChannelReadings(slow, series)], 9.95, 10.85)
    assert found.mean_w is not None and found.peak_w is not None and found.peak_w >= found.mean_w > 40


def test_a_window_of_few_updates_is_too_short() -> None:
    sensor = channel("energy", update_period_s=0.1)
    assert "too_short" in counter_energy(regular(sensor), sensor, 10.0, 10.9).flags
    assert "too_short" not in counter_energy(regular(sensor), sensor, 10.0, 11.1).flags


def test_a_window_within_one_step_of_a_counter_is_not_zero() -> None:
    counter, power = channel("energy", update_period_s=0.1), channel("power_instant", update_period_s=0.1)
    views = [ChannelReadings(counter, regular(counter)), ChannelReadings(power, regular(power))]
    found = domain_energy(views, 10.01, 10.03)
    assert found.energy_j == pytest.approx(5.0, rel=0.01)
    assert found.method == "power_integral"
    assert "too_short" in found.flags


@pytest.mark.parametrize(("watts", "ratio"), [(250.0, 1.76), (0.0, None)])
def test_counter_and_power_that_contradict_each_other_are_flagged(watts: float, ratio: float | None) -> None:
    counter, power = channel("energy", update_period_s=0.02, resolution=3.6), channel("power_instant")
    views = [ChannelReadings(counter, regular(counter, watts)), ChannelReadings(power, regular(power, 440.0))]
    found = domain_energy(views, *WINDOW)
    assert found.crosscheck_ratio == (None if ratio is None else pytest.approx(ratio, rel=0.01))
    assert found.flags == ["counter_power_mismatch"] and "integral of power" in (found.reason or "")
    assert found.energy_j == pytest.approx(10 * watts, rel=0.01)


@pytest.mark.parametrize(("watts", "contradicts"), [(650.0, False), (250.0, False), (900.0, True), (225.0, True)])
def test_a_load_that_repeats_with_the_power_sensor_s_instants_leaves_the_counter_right(watts: float, contradicts: bool) -> None:
    """A step of 100 ms beside a sensor of NVIDIA's: 250 W and 650 W in turn, of which it shows one; a factor of two is told."""
    counter, power = (channel(kind, update_period_s=0.1) for kind in ("energy", "power_instant"))
    views = [ChannelReadings(counter, regular(counter, 450.0)), ChannelReadings(power, regular(power, watts))]
    found = domain_energy(views, *WINDOW)
    assert ("counter_power_mismatch" in found.flags) == contradicts and found.crosscheck_ratio == pytest.approx(watts / 450, rel=0.01)


@pytest.mark.parametrize("jitter", [0.0, 0.2, 0.5])
def test_jitter_late_wake_ups_and_a_stall(jitter: float) -> None:
    draw = random.Random(5)
    sensor, signal = channel("power_instant"), Square(period=1.0)
    grid = [0.1 * k + 0.1 * jitter * (draw.random() - 0.5) for k in range(300)]
    late = sorted(t + (0.05 if draw.random() < 0.1 else 0.0) for t in grid if not 14 < t < 15)
    found = power_energy(sampled(sensor, signal, late), sensor, *WINDOW, interval=0.1)
    assert found.energy_j == pytest.approx(3000, abs=found.bound_j)


def window_of(start: float, end: float, seed: int, parents: bool = False) -> WindowEnergy:
    """A window over a random load, with a part inside its whole if wanted."""
    draw = random.Random(seed)
    whole = channel("energy", update_period_s=0.02, domain="whole")
    part = channel("energy", update_period_s=0.02, domain="part", parent="whole", id="p")
    load = Telegraph(dwell=0.5, seed=seed, length=60)
    times = instants(0.0, 40.0, 0.1, draw.random, whole)
    views = [ChannelReadings(whole, sampled(whole, load, [t + 3 for t in times]))]
    if parents:
        share = sampled(part, Telegraph(low=40.0, high=200.0, dwell=0.5, seed=seed, length=60), [t + 3 for t in times])
        views.append(ChannelReadings(part, share))
    return window_energy("w", views, start, end)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.lists(st.floats(6.0, 38.0), min_size=1, max_size=4, unique=True))
def test_windows_that_follow_each_other_add_up(seed: int, cuts: list[float]) -> None:
    edges = [5.0, *sorted(cuts), 39.0]
    total = window_of(5.0, 39.0, seed).boundaries["device"]
    parts = [window_of(a, b, seed).boundaries["device"] for a, b in pairwise(edges)]
    assert total.energy_j is not None
    # The same instant is interpolated in the same way from both sides, so nothing is lost or added at a cut.
    assert sum(p.energy_j or 0.0 for p in parts) == pytest.approx(total.energy_j, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_a_part_is_not_added_to_its_whole(seed: int) -> None:
    window = window_of(5.0, 35.0, seed, parents=True)
    whole, part = window.channels
    total = window.boundaries["device"]
    assert total.channels == ["whole"]
    assert total.energy_j == whole.energy_j
    assert whole.energy_j is not None
    assert part.energy_j is not None
    assert part.energy_j <= whole.energy_j + (whole.bound_j or 0.0)


def test_a_sensor_is_silent_for_no_longer_than_the_window() -> None:
    series = ReadingSeries()
    for at in (0.0, 1.0):
        series.add(at, at, 5.0)
    assert silent(series, 0.5, 1.0) is None
    assert silent(series, 0.5, 3.0) == "the sensor was silent for the last 2 s of the window"
    assert silent(series, 9.0, 10.0) == "the sensor was silent for the last 1 s of the window"
