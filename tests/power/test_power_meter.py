"""The meter and its threads by a clock of their own, with made-up sensors; ``test_power_real_time.py`` has real ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from sensors import channel

from caraml.base.errors import InputError
from caraml.power import Meter, WindowEnergy
from caraml.power.energy import around, sum_domains
from caraml.power.meter import TAIL_SHARE, ClockLog
from caraml.power.model import BoundaryEnergy, Channel, ChannelEnergy, Reading, window_from_dict
from caraml.power.signals import Constant, FakeSource, Square
from caraml.power.source import SourceUnavailable
from caraml.power.store import ReadingStore

pytestmark = pytest.mark.usefixtures("virtual_time")


def test_a_window_has_the_true_energy_within_its_bound() -> None:
    source = FakeSource(Square(period=0.4), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(1.0)
    assert window.start is not None
    assert window.end is not None
    truth = source.signal.energy(window.end - source.origin) - source.signal.energy(window.start - source.origin)
    energy = window.energy
    device = energy.boundaries["device"]
    assert energy.valid, energy.reason
    assert device.energy_j == pytest.approx(truth, abs=device.bound_j)
    assert device.bound_j is not None
    assert device.bound_j < 0.05 * truth
    assert device.mean_w == pytest.approx(truth / energy.duration_s, rel=0.05)
    assert energy.channels[0].crosscheck_ratio == pytest.approx(1.0, abs=0.2)
    assert energy.flags == ["fake"]


def test_windows_nest_overlap_and_add_up() -> None:
    source = FakeSource(Constant(), update_period_s=0.01)
    with Meter([source], interval=0.02) as meter:
        with meter.window("outer") as outer:
            with meter.window("first") as first:
                time.sleep(0.3)
            with meter.window("second") as second:
                time.sleep(0.3)
        total, parts = outer.energy.boundaries["device"], [w.energy.boundaries["device"] for w in (first, second)]
    assert total.energy_j is not None
    assert total.bound_j is not None
    slack = total.bound_j + sum(p.bound_j or 0.0 for p in parts) + 300 * 0.05
    assert sum(p.energy_j or 0.0 for p in parts) == pytest.approx(total.energy_j, abs=slack)
    assert [w.name for w in meter.windows] == ["outer", "first", "second"]


def test_a_decorated_function_leaves_one_window_per_call() -> None:
    with Meter([FakeSource(Constant())], interval=0.02) as meter:

        @meter.window("step")
        def step() -> int:
            time.sleep(0.05)
            return 7

        assert [step(), step()] == [7, 7]
    assert [w.name for w in meter.windows] == ["step", "step"]
    assert all(w.energy.boundaries["device"].energy_j == pytest.approx(15, rel=0.5) for w in meter.windows)


def test_without_a_sensor_there_is_a_reason_and_no_number() -> None:
    with Meter([]) as meter, meter.window("work") as window:
        pass
    energy = window.energy
    assert not energy.valid
    assert energy.boundaries == {}
    assert energy.flags == ["no_source"]
    assert energy.reason is not None
    assert energy.reason.startswith("no power sensor")
    assert meter.latest_power_w() is None


def test_auto_never_raises_and_names_what_is_missing() -> None:
    with Meter("auto") as meter:
        pass
    assert len(meter.channels) > 0 or len(meter.reasons) > 0


def test_idle_is_subtracted_beside_the_gross_number() -> None:
    source = FakeSource(Constant(300.0), update_period_s=0.005)
    with Meter([source], interval=0.02) as meter:
        with meter.window("idle") as idle:
            time.sleep(0.3)
        with meter.window("work", idle=idle.energy) as work:
            time.sleep(0.3)
        device = work.energy.boundaries["device"]
    assert device.energy_j is not None
    assert device.net_bound_j is not None
    assert device.bound_j is not None
    assert device.idle_j == pytest.approx(device.energy_j, rel=0.1)
    assert device.net_j == pytest.approx(0.0, abs=device.net_bound_j)
    assert device.net_bound_j > device.bound_j


def test_idle_power_that_drifts_is_in_the_bound() -> None:
    """A machine that rests at 100 W before the work and at 130 W after it, and never between."""

    def rest(watts: float, seconds: float, *flags: str) -> WindowEnergy:
        window = WindowEnergy("idle", 0.0, seconds)
        joules = watts * seconds
        window.channels = [
            ChannelEnergy("gpu", "a GPU", "s", "device", "gpu", energy_j=joules, mean_w=watts, bound_j=0.01 * joules, flags=list(flags))
        ]
        sum_domains(window, set())
        return window

    before = rest(100.0, 2.0)
    both = around(before, rest(130.0, 1.0))
    device = both.boundaries["device"]
    assert (device.mean_w, device.energy_j, both.duration_s) == (115.0, 230.0, 2.0)
    assert device.bound_j == pytest.approx(0.01 * 130 * 2 + 15 * 2)
    assert sum(both.channels[0].bound_parts.values()) == 30.0 and both.valid
    assert around(before, rest(130.0, 1.0, "too_short")).channels == before.channels
    assert around(before, WindowEnergy("idle", 0.0, 1.0, reason="gone")).channels == before.channels
    assert around(rest(100.0, 2.0, "too_short"), rest(130.0, 1.0)).boundaries["device"].valid is False


def test_an_idle_window_that_is_too_short_is_not_subtracted() -> None:
    source = FakeSource(Constant(), update_period_s=0.05)
    with Meter([source], interval=0.02) as meter:
        with meter.window("idle") as idle:
            time.sleep(0.05)
        with meter.window("work", idle=idle.energy) as work:
            time.sleep(0.6)
        assert "too_short" in idle.energy.flags
        assert work.energy.boundaries["device"].net_j is None


def test_the_record_is_plain_json_and_comes_back() -> None:
    with Meter([FakeSource(Constant())], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(0.3)
    text = json.dumps(window.energy.to_dict(), allow_nan=False)
    assert window_from_dict(json.loads(text)) == window.energy


def test_the_record_can_be_a_field_of_a_pydantic_model() -> None:
    from pydantic import TypeAdapter

    with Meter([FakeSource(Constant())], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(0.3)
    adapter = TypeAdapter(WindowEnergy)
    assert adapter.validate_json(adapter.dump_json(window.energy)) == window.energy


def test_raw_readings_are_kept_as_columns() -> None:
    with Meter([FakeSource(Constant())], interval=0.02) as meter:
        time.sleep(0.2)
    columns = meter.readings()
    assert list(columns) == ["channel", "t_before", "t_after", "value", "kind"]
    assert len({len(values) for values in columns.values()}) == 1
    assert set(columns["channel"]) == {"fake:0:energy", "fake:0:power_instant"}
    later = list(meter.rows(origin=1.0))
    assert [row[1] for row in later] == [t - 1.0 for t in columns["t_before"]]
    assert [row[3] for row in later] == columns["value"]


def test_a_failed_reading_stands_in_its_place_without_a_value() -> None:
    store, one = ReadingStore(), channel("power_instant")
    store.register([one])
    values: list[float | None] = [1.0, None, 3.0]
    store.add([Reading(one.id, t, t + 0.5, value, None if value else "busy") for t, value in enumerate(values)])
    assert list(store.rows(origin=-1.0)) == [
        (one.id, 1.0, 1.5, 1.0, "power_instant"),
        (one.id, 2.0, 2.0, None, "power_instant"),
        (one.id, 3.0, 3.5, 3.0, "power_instant"),
    ]


def test_power_now_is_the_sum_over_devices() -> None:
    first, second = FakeSource(Constant(100.0), name="one"), FakeSource(Constant(200.0), name="two")
    with Meter([first, second], interval=0.02) as meter:
        time.sleep(0.1)
        assert meter.latest_power_w() == pytest.approx(300.0)


def test_each_interval_has_one_reading_and_none_are_bunched() -> None:
    with Meter([FakeSource(Constant())], interval=0.05) as meter:
        time.sleep(2.0)
    times = [t for c, t in zip(*(meter.readings()[k] for k in ("channel", "t_before")), strict=True) if c == "fake:0:energy"]
    assert 30 <= len(times) <= 42


class Stalling(FakeSource):
    """Stops answering for a while, once, some time after it was opened."""

    after, length = 0.2, 0.5

    def read(self) -> list[Reading]:
        if self.length and time.monotonic() - self.origin > self.after:
            pause, self.length = self.length, 0.0
            time.sleep(pause)
        return super().read()


def test_a_stall_is_counted_and_a_counter_bridges_it() -> None:
    source = Stalling(Constant(), update_period_s=0.01)
    with Meter([source], interval=0.05) as meter, meter.window("work") as window:
        time.sleep(1.2)
    channel = window.energy.channels[0]
    assert window.energy.valid, window.energy.reason
    assert channel.energy_j == pytest.approx(300 * window.energy.duration_s, abs=channel.bound_j)
    assert channel.missed >= 7


def test_windows_of_two_threads_do_not_disturb_each_other() -> None:
    found: dict[str, Any] = {}
    with Meter([FakeSource(Constant(), update_period_s=0.01)], interval=0.02) as meter:

        def work(name: str) -> None:
            with meter.window(name) as window:
                time.sleep(0.4)
            found[name] = window.energy

        threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in ("a", "b"):
        assert found[name].boundaries["device"].energy_j == pytest.approx(300 * found[name].duration_s, rel=0.1)


def test_wrong_input_is_told_before_anything_starts() -> None:
    with pytest.raises(InputError, match=r"did you mean 'nvml'"):
        Meter(["nvlm"])
    with pytest.raises(InputError, match="interval"):
        Meter([], interval=0.0)
    with pytest.raises(InputError, match="interval"):
        Meter([], interval=float("nan"))
    with Meter([]) as meter, pytest.raises(InputError, match="not closed"), meter.window("open") as window:
        _ = window.energy


@pytest.mark.parametrize(("busy", "least", "most"), [(False, 80.0, 100.0), (True, 0.0, 10.0)])
def test_a_counter_that_may_be_late_is_read_for_as_long_after_both_ends(busy: bool, least: float, most: float) -> None:
    """300 W, and none after the window."""

    class Ends(FakeSource):
        def value(self, channel: Channel, at: float) -> float:
            return super().value(channel, min(at, self.origin + 4.5))

    source = Ends(Constant(), update_period_s=0.01, kinds=("energy",))
    source.listed = [dataclasses.replace(channel, lag_s=0.3) for channel in source.listed]
    with Meter([source], offset=lambda: 0.5) as meter:
        time.sleep(source.origin + 0.5 - time.monotonic())
        start = meter.mark()
        time.sleep(source.origin + 4.5 - time.monotonic())
        end = meter.mark()
        (found,) = meter.energy("work", start, end, busy=busy).channels
    times = meter.store.series("fake:0:energy").t
    assert all(sum(edge < t < edge + 0.31 for t in times) >= 8 for edge in (start, end))
    assert found.energy_j == pytest.approx(1200, abs=5) and least <= found.bound_parts["lag"] <= most


def test_a_wall_clock_that_is_set_changes_nothing_but_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource(Constant(), update_period_s=0.01)
    real = time.time
    with Meter([source], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(0.2)
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        time.sleep(0.2)
    energy = window.energy
    assert "clock_step" in energy.flags
    assert energy.valid
    assert energy.boundaries["device"].energy_j == pytest.approx(300 * energy.duration_s, rel=0.05)


def test_a_machine_that_slept_gives_no_valid_number(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = [0.0]
    monkeypatch.setattr("caraml.power.meter.suspended_s", lambda: slept[0])
    with Meter([FakeSource(Constant())], interval=0.02) as meter, meter.window("work") as window:
        time.sleep(0.3)
        slept[0] = 60.0
    assert "suspended" in window.energy.flags
    assert not window.energy.valid


@pytest.mark.parametrize("held_up", range(60))
def test_a_thread_that_is_held_up_between_two_clocks_sees_none_jump(held_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy machine, and by others that hold the interpreter: its energy would be that of a machine that slept, and none."""
    now, reads = [100.0], itertools.count()

    def read(_: int = 0) -> float:
        before = now[0]
        now[0] += 1.0 if next(reads) == held_up else 1e-6
        return before

    clocks = SimpleNamespace(monotonic=read, time=read, clock_gettime=read, CLOCK_BOOTTIME=7)
    monkeypatch.setattr("caraml.power.meter.time", clocks)
    log = ClockLog()
    for _ in range(3):
        log.note()
    assert log.flags(100.0, now[0]) == []


def test_every_field_of_the_record_has_a_json_simple_type() -> None:
    def simple(kind: Any) -> bool:
        outer, inner = get_origin(kind), get_args(kind)
        if outer is dict:
            return inner[0] is str and simple(inner[1])
        if outer in (list, Union, UnionType):
            return all(map(simple, inner))
        return outer is Literal or dataclasses.is_dataclass(kind) or kind in (str, int, float, bool, NoneType)

    for record in (WindowEnergy, ChannelEnergy, BoundaryEnergy):
        hints = get_type_hints(record)
        assert hints.keys() == {field.name for field in dataclasses.fields(record)}
        assert [name for name, kind in hints.items() if not simple(kind)] == []
    inside = (get_type_hints(WindowEnergy)[name] for name in ("channels", "boundaries"))
    assert [get_args(kind)[-1] for kind in inside] == [ChannelEnergy, BoundaryEnergy], "no other dataclass is in it"


def test_kinds_of_sensor_that_a_machine_does_not_have_are_only_named() -> None:
    class Absent(FakeSource):
        def open(self) -> None:
            raise SourceUnavailable("there is no such bus")

    class Closed(FakeSource):
        def open(self) -> None:
            raise SourceUnavailable("only root may read it", "sudo chmod a+r it", kind="unreadable")

    with Meter([Absent(Constant(1.0), name="absent"), Closed(Constant(1.0), name="closed")], interval=0.01) as meter:
        meter._automatic = True
        energy = meter.energy("w", meter.mark(), meter.mark() + 0.01)
    assert energy.reason == "no power sensor: closed: only root may read it; fix: sudo chmod a+r it; not on this machine: absent"
    assert any("no such bus" in reason for reason in meter.reasons)


def test_a_meter_is_waited_for_although_another_of_its_name_is_missing() -> None:
    """As of two CSV files of which one is not there: the other's means show the end of a window only later."""

    class Missing(FakeSource):
        def open(self) -> None:
            raise SourceUnavailable("there is no such file")

    source = FakeSource(Constant(), update_period_s=0.02, mean_window_s=0.4, kinds=("power_mean",))
    (mean,) = source.listed
    with Meter([Missing(Constant(), kinds=("energy",)), source], interval=60.0) as meter:
        with meter.window("work") as window:
            time.sleep(0.4)
        assert window.energy.channels
        newest = meter.store.newest(mean.id)
    assert window.start is not None and window.end is not None and newest is not None
    assert (newest[0] + newest[1]) / 2 >= window.end + min(mean.age_s, TAIL_SHARE * (window.end - window.start))


class Controller:
    """A node's controller that has a new value every 60 s."""

    name, min_interval_s = "controller", 1.0

    def open(self) -> None: ...

    def close(self) -> None: ...

    def channels(self) -> list[Channel]:
        return [channel("power_mean", boundary="node_ac", update_period_s=1.0, mean_window_s=1.0, resolution=1.0, period_guessed=True)]

    def read(self) -> list[Reading]:
        now = time.monotonic()
        return [Reading("t:power_mean", now, now, 400.0 + 7 * (now // 60 % 5))]


def test_what_a_sensor_showed_before_a_window_tells_how_often_it_has_a_new_value() -> None:
    with Meter([Controller()]) as meter:
        time.sleep(100)
        with meter.window("work") as work:
            time.sleep(15)
    assert not work.energy.valid and work.energy.flags == ["mean_sensor", "one_value", "too_short"]
