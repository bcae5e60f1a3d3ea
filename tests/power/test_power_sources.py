"""Every source against a fake of its interface: units, nesting, masks, and what it does when the interface misbehaves."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import trees

from caraml.base.errors import InputError
from caraml.power import Meter
from caraml.power.energy import window_energy
from caraml.power.model import HEADLINES, Channel, WindowEnergy
from caraml.power.readings import ChannelReadings
from caraml.power.source import BUILT_IN, Source, SourceUnavailable, UnknownDeviceError, create, timed
from caraml.power.sources import files
from caraml.power.sources.files import CraySource
from caraml.power.sources.rapl import RaplSource
from caraml.power.store import ReadingSeries

MODULES = Path(__file__).resolve().parents[1] / "fakes" / "power" / "modules"


def use(monkeypatch: pytest.MonkeyPatch, module: str, **environment: object) -> None:
    """Make ``import module`` find the fake, configured by ``environment``."""
    monkeypatch.syspath_prepend(str(MODULES))
    monkeypatch.delitem(sys.modules, module, raising=False)
    for mask in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HABANA_VISIBLE_DEVICES"):
        monkeypatch.delenv(mask, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value if isinstance(value, str) else json.dumps(value))
    fake = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, module, fake)
    assert "fakes" in (fake.__file__ or "")


def opened(source: Source) -> tuple[dict[str, Channel], dict[str, float | None]]:
    """Channels by id and one round of readings."""
    source.open()
    try:
        return {c.id: c for c in source.channels()}, {r.channel: r.value for r in source.read()}
    finally:
        source.close()


def energy_at_constant_power(channels: list[Channel], watts: dict[str, float]) -> WindowEnergy:
    """A 10 s window in which every domain draws a known constant power."""
    measured = []
    for c in channels:
        series = ReadingSeries()
        for k in range(140):
            t = -2 + 0.1 * k
            series.add(t, t, watts[c.domain] * (t if c.kind == "energy" else 1) + (1e6 if c.kind == "energy" else 0))
        measured.append(ChannelReadings(c, series))
    return window_energy("w", measured, 0.0, 10.0)


# --- RAPL -----------------------------------------------------------------------------------------------------------


def test_rapl_domains_are_nested_and_counted_once(tmp_path: Path) -> None:
    trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000, constraint_0_power_limit_uw=200_000_000)
    trees.rapl_zone(tmp_path, "intel-rapl:0/intel-rapl:0:0", "core", 500_000)
    trees.rapl_zone(tmp_path, "intel-rapl:0/intel-rapl:0:1", "dram", 250_000)
    trees.rapl_zone(tmp_path, "intel-rapl:1", "package-1", 2_000_000)
    trees.rapl_zone(tmp_path, "intel-rapl:2", "psys", 9_000_000)
    trees.rapl_zone(tmp_path, "intel-rapl-mmio:0", "package-0", 1_000_000)
    channels, values = opened(RaplSource(tmp_path))
    assert list(values.values()) == pytest.approx([1.0, 0.5, 0.25, 2.0, 9.0])
    assert [c.wrap_j for c in channels.values()] == pytest.approx([262143.32885] * 5)
    assert channels["rapl:0:package-0"].max_power_w == pytest.approx(400)
    watts = {"cpu:package-0": 100.0, "cpu:package-0:core": 60.0, "cpu:package-0:dram": 20.0, "cpu:package-1": 90.0, "cpu:psys": 400.0}
    window = energy_at_constant_power(list(channels.values()), watts)
    assert window.boundaries["cpu"].energy_j == pytest.approx(2100, abs=1)  # two packages and memory; cores are inside
    assert window.boundaries["node_dc"].energy_j == pytest.approx(4000, abs=1)
    assert window.boundaries["cpu"].energy_j < window.boundaries["node_dc"].energy_j


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"0_max_power": 15, "0_power_limit": 15, "1_power_limit": 55}, 150),
        ({"0_max_power": 6, "1_power_limit": 25, "2_power_limit": 78}, 156),
        ({"0_max_power": 125, "0_power_limit": 4095}, 1500),
    ],
)
def test_a_processor_that_boosts_far_above_its_long_limit_is_measured(tmp_path: Path, limits: dict[str, int], expected: float) -> None:
    trees.rapl_zone(
        tmp_path, "intel-rapl:0", "package-0", 1, **{f"constraint_{name}_uw": watts * 1_000_000 for name, watts in limits.items()}
    )
    (package,) = opened(RaplSource(tmp_path))[0].values()
    assert package.max_power_w == pytest.approx(expected) and package.wrap_j is not None
    window = energy_at_constant_power([package], {"cpu:package-0": 60.0})
    assert window.boundaries["cpu"].energy_j == pytest.approx(600, abs=1) and window.flags == []
    for start, flag in ((package.wrap_j - 500, None), (package.wrap_j / 2, "reset")):  # the counter goes back to 0 on its own, or too early
        series, at_zero = ReadingSeries(), -2 + 500 / 60
        for k in range(140):
            t = -2 + 0.1 * k
            series.add(t, t, start + 60 * (t + 2) if t < at_zero else 60 * (t - at_zero))
        window = window_energy("w", [ChannelReadings(package, series)], 0.0, 10.0)
        assert (window.flags == []) if flag is None else (flag in window.flags)
        assert flag is not None or window.boundaries["cpu"].energy_j == pytest.approx(600, abs=1)


def test_the_platform_of_a_second_socket_is_no_package(tmp_path: Path) -> None:
    watts = {"package-0": 100.0, "psys": 300.0, "package-1": 90.0, "psys-1": 200.0}
    for number, name in enumerate(watts):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", name, number + 1)
    window = energy_at_constant_power(list(opened(RaplSource(tmp_path))[0].values()), {f"cpu:{name}": w for name, w in watts.items()})
    assert window.boundaries["cpu"].energy_j == pytest.approx(1900, abs=1)
    assert window.boundaries["node_dc"].energy_j == pytest.approx(5000, abs=1)


@pytest.mark.parametrize(("second", "joules"), [(300.0, None), (300.2, None), (302.0, 6020.0), (0.0, 3000.0)])
def test_a_platform_that_two_sockets_may_show_twice_is_not_doubled(tmp_path: Path, second: float, joules: float | None) -> None:
    for number, name in enumerate(("package-0", "psys", "package-1", "psys-1")):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", name, 0 if name == "psys-1" and not second else number + 1)
    watts = {"cpu:package-0": 100.0, "cpu:psys": 300.0, "cpu:package-1": 100.0, "cpu:psys-1": second}
    window = energy_at_constant_power(list(opened(RaplSource(tmp_path))[0].values()), watts)
    node = window.boundaries["node_dc"]
    assert window.boundaries["cpu"].energy_j == pytest.approx(2000, abs=1), "packages under equal load are two"
    assert node.energy_j == (None if joules is None else pytest.approx(joules, abs=1))
    if joules is None:
        assert node.partial_j == pytest.approx(3000, abs=1) and not node.valid
        assert node.reason == "cpu:psys-1: it advances like cpu:psys: the platform shown twice, or equal parts of it"


def test_a_platform_that_is_counted_in_joules_is_not_doubled(tmp_path: Path) -> None:
    """As on Sapphire Rapids: two looks at one platform may be steps of the counter apart, whatever their relative difference."""
    for number, name in enumerate(("psys", "psys-1")):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", name, (number + 1) * 1_000_000, max_energy_range_uj=4_294_967_295_000_000)
    measured = []
    for channel, ahead in zip(opened(RaplSource(tmp_path))[0].values(), (0.0, 0.4), strict=True):
        series = ReadingSeries()
        for k in range(40):
            series.add(k / 10 - 1, k / 10 - 1, float(int(35.03 * k + ahead)))
        measured.append(ChannelReadings(channel, series))
    window = window_energy("w", measured, 0.0, 1.0)
    assert [channel.energy_j for channel in window.channels] == pytest.approx([350, 351])
    for channel in window.channels:
        assert channel.energy_j == pytest.approx(350.3, abs=channel.bound_j)
    node = window.boundaries["node_dc"]
    assert node.energy_j is None and node.reason and "it advances like cpu:psys" in node.reason


def test_the_unit_of_a_rapl_counter_is_its_own(tmp_path: Path) -> None:
    trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    trees.rapl_zone(tmp_path, "intel-rapl:1", "psys", 6, max_energy_range_uj=4_294_967_295_000_000)
    (trees.rapl_zone(tmp_path, "intel-rapl:2", "package-1", 7) / "max_energy_range_uj").unlink()
    assert [c.resolution for c in opened(RaplSource(tmp_path))[0].values()] == pytest.approx([2**-14, 1, 61e-6], rel=1e-5)


def test_one_counter_of_the_platform_under_two_names_counts_once(tmp_path: Path) -> None:
    for number, name in enumerate(("psys", "psys-1")):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", name, 5)
    (channel,) = opened(RaplSource(tmp_path))[0].values()
    assert (channel.label, channel.users, channel.flags) == ("psys", ("psys", "psys-1"), ())


def test_dies_that_mirror_one_counter_count_once(tmp_path: Path) -> None:
    for number, name, value in ((0, "package-0-die-0", 5), (1, "package-0-die-1", 5), (2, "package-1-die-0", 5), (3, "package-1-die-1", 6)):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", name, value)
    channels, _ = opened(RaplSource(tmp_path))
    assert [c.label for c in channels.values()] == ["package-0-die-0", "package-1-die-0", "package-1-die-1"]
    first = next(iter(channels.values()))
    assert first.users == ("package-0-die-0", "package-0-die-1")
    assert first.flags == ("shared_device",)


def test_twelve_packages_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(12):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", number + 1)
    channels, _ = opened(RaplSource(tmp_path))
    assert [c.label for c in channels.values()] == [f"package-{n}" for n in range(12)]


def test_a_domain_that_is_listed_but_not_filled_is_left_out(tmp_path: Path) -> None:
    trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 5)
    trees.rapl_zone(tmp_path, "intel-rapl:0/intel-rapl:0:0", "dram", 0)
    assert [c.label for c in opened(RaplSource(tmp_path))[0].values()] == ["package-0"]
    trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    with pytest.raises(SourceUnavailable, match="show 0"):
        RaplSource(tmp_path).open()


def test_a_package_that_shows_nothing_beside_one_that_counts_leaves_no_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed to the user, or at 0: the sum of the others was taken for the energy of all processors."""
    for number, shown in enumerate((5_000_000, 7_000_000, 0)):
        trees.rapl_zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", shown)
    trees.rapl_zone(tmp_path, "intel-rapl:3", "psys", 0)
    really = os.open

    def refuse(path: Any, flags: int) -> int:
        if "intel-rapl:1" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, flags)

    monkeypatch.setattr("caraml.power.sources.files.os.open", refuse)
    source = RaplSource(tmp_path)
    channels, values = opened(source)
    assert [(c.label, values[c.id]) for c in channels.values()] == [("package-0", 5.0), ("package-2", 0.0), ("package-1", None)]
    source.close()
    with Meter([RaplSource(tmp_path)]) as meter, meter.window("w") as window:
        pass
    waits: list[float] = []
    with Meter([RaplSource(tmp_path)]) as meter:
        at = meter.mark()
        monkeypatch.setattr(meter.store, "wait_until", lambda ready, timeout: waits.append(timeout))
        meter.energy("before it was asked", at - 2, at - 1)
    assert not waits, "half a second for the one that never answers"
    (cpu,) = (energy for energy in window.energy.boundaries.values())
    assert cpu.energy_j is None and not window.energy.valid
    assert "cpu:package-1: the sensor gave no reading: PermissionError" in (cpu.reason or "") and "fix: sudo chmod" in (cpu.reason or "")


def test_a_rapl_range_of_64_bits_makes_no_step_of_kilojoules(tmp_path: Path) -> None:
    trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 5, max_energy_range_uj=2**64 - 1)
    (found,) = opened(RaplSource(tmp_path))[0].values()
    assert found.resolution == 1.0 and found.wrap_j == pytest.approx(1.8e13, rel=0.1)


def test_rapl_tells_absent_masked_and_closed_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceUnavailable, match="does not exist") as absent:
        RaplSource(tmp_path / "none").open()
    assert absent.value.kind == "absent"
    (tmp_path / "masked" / "intel-rapl").mkdir(parents=True)
    with pytest.raises(SourceUnavailable, match="masked") as masked:
        RaplSource(tmp_path / "masked").open()
    assert masked.value.kind == "masked"
    assert "-v /sys" in (masked.value.hint or "")
    trees.rapl_zone(tmp_path / "closed", "intel-rapl:0", "package-0", 1)

    def refuse(path: Any, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(SourceUnavailable, match="only root") as closed:
        RaplSource(tmp_path / "closed").open()
    assert closed.value.kind == "unreadable"
    assert (closed.value.hint or "").startswith("sudo chmod")
    with Meter([RaplSource(tmp_path / "masked"), RaplSource(tmp_path / "closed")]) as meter, meter.window("w") as window:
        pass
    assert window.energy.flags == ["masked", "no_source", "unreadable"]
    assert "fix: sudo chmod" in (window.energy.reason or "")


def test_a_zone_that_disappears_is_a_failed_reading_not_a_number(tmp_path: Path) -> None:
    zone = trees.rapl_zone(tmp_path, "intel-rapl:0", "package-0", 1)
    source = RaplSource(tmp_path)
    source.open()
    (zone / "energy_uj").write_text("")
    reading = source.read()[0]
    assert reading.value is None
    assert reading.error is not None
    source.close()


# --- Grace, Cray, cards with a kernel driver --------------------------------------------------------------------------


def test_grace_rails_are_nested(tmp_path: Path) -> None:
    watts = {"Module": 600.0, "Grace": 150.0, "CPU": 100.0, "SysIO": 20.0}
    for number, (rail, value) in enumerate(watts.items()):
        trees.grace_rail(tmp_path, number + 2, rail, 0, value)
    trees.write(tmp_path, {"hwmon9/device/power1_average": 5, "hwmon9/device/power1_oem_info": "Something else"})
    channels, values = opened(create(f"grace:{tmp_path}"))
    assert sorted(values.values()) == pytest.approx(sorted(watts.values()))
    assert {c.mean_window_s for c in channels.values()} == {0.05}
    window = energy_at_constant_power(list(channels.values()), {f"grace:0:{rail}": w for rail, w in watts.items()})
    assert window.boundaries["module"].energy_j == pytest.approx(6000)
    assert window.boundaries["cpu"].energy_j == pytest.approx(1500)
    assert "mean_sensor" in window.flags
    assert "module_scope" in window.flags


def test_grace_without_its_middle_rail_still_nests(tmp_path: Path) -> None:
    trees.grace_rail(tmp_path, 0, "Module", 0, 600)
    trees.grace_rail(tmp_path, 1, "CPU", 0, 100)
    channels, _ = opened(create(f"grace:{tmp_path}"))
    assert channels["grace:0:CPU"].parent == "grace:0:Module"


@pytest.mark.parametrize(("gpus", "headline"), [(0, "module"), (1, "cpu")])
def test_a_module_with_a_gpu_that_is_not_used_is_not_the_processors(tmp_path: Path, gpus: int, headline: str) -> None:
    hwmon = tmp_path / "class/hwmon"
    for number, rail in enumerate(("Module", "Grace")):
        trees.grace_rail(hwmon, number, rail, 0, 600 - 400 * number)
    for number, kind in enumerate(["0x060400", "0x030200"][: 1 + gpus]):  # a bridge, a GPU
        trees.write(tmp_path / f"bus/pci/devices/0009:0{number}:00.0", {"vendor": "0x10de", "class": kind})
    for devices, expected in (([], headline), (None, "module")):
        channels = list(opened(create(f"grace:{hwmon}", devices))[0].values())
        sensed = energy_at_constant_power(channels, {"grace:0:Module": 600.0, "grace:0:Grace": 200.0}).sensed(*HEADLINES)
        assert sensed is not None and sensed[0] == expected


def test_a_module_that_is_left_out_is_told(tmp_path: Path) -> None:
    hwmon, why = tmp_path / "class/hwmon", "Module Power Socket 0 includes a GPU, which is not used"
    trees.grace_rail(hwmon, 0, "Module", 0, 600)
    trees.write(tmp_path / "bus/pci/devices/0009:01:00.0", {"vendor": "0x10de", "class": "0x030200"})
    with pytest.raises(SourceUnavailable) as alone:
        opened(create(f"grace:{hwmon}", []))
    assert (alone.value.args[0], alone.value.kind) == (why, "unused")
    trees.grace_rail(hwmon, 1, "Grace", 0, 200)
    with Meter([create(f"grace:{hwmon}", [])], interval=0.02) as meter:
        assert ([channel.label for channel in meter.channels], meter.reasons) == (["Grace socket 0"], [f"grace: {why}"])


def test_sensors_of_what_is_not_used_are_not_called_absent(tmp_path: Path) -> None:
    trees.drm_card(tmp_path, 1, "0000:03:00.0", "xe", {"energy1_input": 7_000_000})
    for devices, why in (([], "what is measured uses none"), (["some"], "torch does not tell which")):
        with Meter([create(f"intel:{tmp_path}", devices)]) as meter, meter.window("w") as window:
            pass
        meter._automatic = True  # as where nobody asked for the source
        assert window.energy.reason is not None and why in window.energy.reason and "not on this machine" not in window.energy.reason
        assert window.energy.flags == ["no_source"]


def cray(root: Path, drm: Path, devices: list[str] | None = None) -> CraySource:
    source = CraySource(root, devices)
    source.drm = drm
    return source


def test_cray_counters_of_a_lumi_node(tmp_path: Path) -> None:
    accelerators = {f"accel{n}": 400 for n in range(4)}
    trees.pm_counters(tmp_path, {"": 2500, "cpu": 250, "memory": 60, **accelerators}, {"": 2500, "cpu": 250, "memory": 60, **accelerators})
    source = cray(tmp_path, tmp_path / "drm")
    channels, values = opened(source)
    assert values["cray:energy"] == 2500
    assert values["cray:accel3_power"] == 400
    assert len(channels) == 14
    watts = {"cray:node": 2500.0, "cray:cpu": 250.0, "cray:memory": 60.0, **{f"cray:accel{n}": 400.0 for n in range(4)}}
    window = energy_at_constant_power(list(channels.values()), watts)
    assert window.boundaries["module"].energy_j == pytest.approx(16000)
    assert window.boundaries["cpu"].energy_j == pytest.approx(3100)
    assert window.boundaries["node_dc"].energy_j == pytest.approx(25000)


def test_idle_accelerators_of_a_cray_node_are_not_the_energy_of_its_processors(tmp_path: Path) -> None:
    watts = {"": 900, "cpu": 250, "memory": 60, "accel0": 90, "accel1": 90}
    trees.pm_counters(tmp_path, watts, watts)
    channels, _ = opened(cray(tmp_path, tmp_path / "drm", []))
    window = energy_at_constant_power(list(channels.values()), {"cray:node": 900.0, "cray:cpu": 250.0, "cray:memory": 60.0})
    assert list(window.boundaries) == ["cpu", "node_dc"]
    sensed = window.sensed(*HEADLINES)
    assert sensed is not None and sensed[1].energy_j == pytest.approx(3100)


@pytest.mark.parametrize(("number", "expected"), [("0x74a0", ("module", 8000)), ("0x74a1", None)])
def test_processor_cores_in_an_accelerator_s_package_have_its_counter(
    tmp_path: Path, number: str, expected: tuple[str, float] | None
) -> None:
    """A node of MI300A has no processors but those in its packages."""
    watts = {"": 900, "accel0": 400, "accel1": 400}
    trees.pm_counters(tmp_path, watts, watts)
    trees.write(tmp_path / "drm", {"card0/device/vendor": "0x1a03", "card1/device/vendor": "0x1002", "card1/device/device": number})
    channels, _ = opened(cray(tmp_path, tmp_path / "drm", []))
    window = energy_at_constant_power(list(channels.values()), {"cray:node": 900.0, "cray:accel0": 400.0, "cray:accel1": 400.0})
    sensed = window.sensed(*HEADLINES)
    assert (sensed and (sensed[0], sensed[1].energy_j)) == (expected and (expected[0], pytest.approx(expected[1])))


def test_cray_parts_of_a_grace_hopper_node_are_not_added_to_their_sum(tmp_path: Path) -> None:
    trees.pm_counters(tmp_path, {"": 9, "cpu": 4, "cpu0": 1, "cpu1": 1, "accel0": 2}, {"": 9, "cpu": 4, "cpu0": 1, "cpu1": 1, "accel0": 2})
    channels, _ = opened(cray(tmp_path, tmp_path))
    assert channels["cray:cpu0_energy"].parent == "cray:cpu"
    assert channels["cray:cpu_energy"].parent == "cray:node"


def test_cray_reads_again_when_the_values_changed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.pm_counters(tmp_path, {"": 100}, {"": 10})
    source = cray(tmp_path, tmp_path)
    source.open()
    fresh = iter(["1", "2", "3", "3", "1700000000"])  # torn once, then whole; the last answer is for `startup`
    monkeypatch.setattr(files, "read", lambda path: next(fresh) if path.name == "freshness" else "1700000000")
    readings = source.read()
    assert [r.value for r in readings] == [100, 10]
    assert next(fresh) == "1700000000"
    source.close()


def test_a_restart_of_the_cray_controller_ends_the_series(tmp_path: Path) -> None:
    trees.pm_counters(tmp_path, {"": 100}, {"": 10})
    source = cray(tmp_path, tmp_path)
    source.open()
    trees.write(tmp_path, {"startup": 1700009999})
    assert {r.value for r in source.read()} == {None}
    source.close()


def test_intel_card_contains_its_package(tmp_path: Path) -> None:
    trees.drm_card(tmp_path, 1, "0000:03:00.0", "xe", {"energy1_input": 7_000_000, "energy2_input": 5_000_000, "power1_max": 300_000_000})
    trees.drm_card(tmp_path, 2, "0000:04:00.0", "i915", {"energy1_input": 3_000_000})
    trees.drm_card(tmp_path, 3, "0000:05:00.0", "nouveau", {"energy1_input": 3_000_000})
    channels, values = opened(create(f"intel:{tmp_path}"))
    assert list(values.values()) == pytest.approx([7, 5, 3])
    assert [c.parent for c in channels.values()] == [None, "0000:03:00.0", None]
    watts = {"0000:03:00.0": 200.0, "0000:03:00.0:package": 150.0, "0000:04:00.0": 50.0}
    assert energy_at_constant_power(list(channels.values()), watts).boundaries["device"].energy_j == pytest.approx(2500, abs=1)


@pytest.mark.parametrize("mask", ["ZE_AFFINITY_MASK=0", "ONEAPI_DEVICE_SELECTOR=level_zero:1", "ONEAPI_DEVICE_SELECTOR=level_zero:gpu", ""])
def test_an_intel_card_that_is_hidden_nobody_knows_how_counts_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str
) -> None:
    if mask:
        monkeypatch.setenv(*mask.split("=", 1))
    trees.drm_card(tmp_path, 1, "0000:03:00.0", "xe", {"energy1_input": 7_000_000})
    assert list(opened(create(f"intel:{tmp_path}"))[1].values()) == pytest.approx([7]), "the only card is the one that is left"
    trees.drm_card(tmp_path, 2, "0000:04:00.0", "xe", {"energy1_input": 3_000_000})
    if mask.endswith(("0", "1")):
        with pytest.raises(SourceUnavailable, match="hides some of 2 devices, by numbers that their sensors do not have"):
            opened(create(f"intel:{tmp_path}"))
    else:
        assert list(opened(create(f"intel:{tmp_path}"))[1].values()) == pytest.approx([7, 3])
    assert list(opened(create(f"intel:{tmp_path}", devices=["1"]))[1].values()) == pytest.approx([3]), "asked for by its number"
    with pytest.raises(SourceUnavailable, match="none was asked for"):
        opened(create(f"intel:{tmp_path}", devices=[]))


def test_amd_cards_by_kernel_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    trees.drm_card(tmp_path, 0, "0000:c1:00.0", "amdgpu", {"power1_average": 90_000_000, "power1_cap": 300_000_000})
    trees.drm_card(tmp_path, 1, "0000:c6:00.0", "amdgpu", {"power1_input": 80_000_000, "power1_average": 1, "power1_cap": 1})
    trees.drm_card(tmp_path, 2, "0000:c9:00.0", "amdgpu", {"temp1_input": 40})  # a second die knows no power
    channels, values = opened(create(f"amdgpu:{tmp_path}"))
    assert list(values.values()) == pytest.approx([90, 80])
    assert [c.kind for c in channels.values()] == ["power_mean", "power_instant"]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert list(opened(create(f"amdgpu:{tmp_path}"))[1].values()) == pytest.approx([80])
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert list(opened(create(f"amdgpu:{tmp_path}"))[1].values()) == pytest.approx([90]), "HIP obeys CUDA's variable, too"


def test_the_graphics_of_an_amd_processor_are_no_card(tmp_path: Path) -> None:
    trees.drm_card(tmp_path, 0, "0000:0b:00.0", "amdgpu", {"power1_average": 45_000_000})
    with pytest.raises(SourceUnavailable, match="has no limit of its power") as alone:
        create(f"amdgpu:{tmp_path}").open()
    assert alone.value.kind == "absent"
    trees.drm_card(tmp_path, 1, "0000:03:00.0", "amdgpu", {"power1_average": 90_000_000, "power1_cap_max": 300_000_000})
    source = create(f"amdgpu:{tmp_path}")
    with Meter([source], interval=0.02) as meter:
        assert [channel.domain for channel in meter.channels] == ["0000:03:00.0"]
        (reason,) = meter.reasons
    assert reason.startswith("amdgpu: 0000:0b:00.0 has no limit")


def test_the_power_of_a_package_with_processor_cores_is_not_its_gpu_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watts = {"power1_input": 9_000_000, "power1_average": 9_000_000, "power1_cap": 15_000_000, "power1_label": "slowPPT"}
    trees.drm_card(tmp_path, 0, "0000:04:00.0", "amdgpu", {**watts, "in1_label": "vddnb"}, device="0x163f")  # Van Gogh has a limit
    with pytest.raises(SourceUnavailable, match=r"0000:04:00\.0 is a processor's graphics"):
        create(f"amdgpu:{tmp_path}").open()
    trees.drm_card(tmp_path, 1, "0000:41:00.0", "amdgpu", {"power1_input": 400_000_000, "power1_cap": 550_000_000}, device="0x74a0")
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"name": "AMD Instinct MI300A"}])
    for source in (f"amdgpu:{tmp_path}", "amdsmi"):
        channels, _ = opened(create(source))
        assert {(c.boundary, c.flags) for c in channels.values()} == {("module", ("module_scope",))}
    (tmp_path / "devices/0000:41:00.0/hwmon/hwmon1/power1_cap").unlink()
    assert len(opened(create(f"amdgpu:{tmp_path}"))[0]) == 1, "also where the kernel shows no limit of an MI300A"


def test_amd_cards_that_a_job_may_not_open_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers count what is left, by PCI address and not by the kernel's numbers; unique ids are what ROCm calls the cards."""
    monkeypatch.setattr(files.AmdGpuSource, "nodes", tmp_path / "dri")
    for number, bus in enumerate(("c9", "c1", "c6", "ce")):
        watts = {"power1_average": int(bus, 16) * 1_000_000, "power1_cap": 500_000_000}
        hwmon = trees.drm_card(tmp_path, number, f"0000:{bus}:00.0", "amdgpu", watts, unique_id=f"5a{bus}")
        (hwmon.parents[1] / "drm" / f"renderD{128 + number}").mkdir(parents=True)
    with pytest.raises(SourceUnavailable, match=r"renderD128 does not open") as none:
        create(f"amdgpu:{tmp_path}").open()
    assert none.value.kind == "absent", "nobody has asked for them"
    trees.write(tmp_path / "dri", {"renderD128": "", "renderD130": "", "renderD131": ""})  # of c9, c6 and ce

    def measured(*devices: str) -> list[str]:
        return [c.domain for c in opened(create(f"amdgpu:{tmp_path}", devices or None))[0].values()]

    assert measured() == ["0000:c6:00.0", "0000:c9:00.0", "0000:ce:00.0"]
    assert measured("1") == measured("GPU-5ac9") == ["0000:c9:00.0"]
    with pytest.raises(SourceUnavailable, match=r"'0000:c1:00.0' here.*0000:c1:00.0: .*renderD129 does not open") as one:
        measured("0000:c1:00.0")
    assert one.value.kind == "unreadable"
    with pytest.raises(UnknownDeviceError, match=r"'0000:c2:00.0' here"):
        measured("0000:c2:00.0")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-5ace,GPU-5ac6")
    assert measured() == ["0000:ce:00.0", "0000:c6:00.0"]


def test_numbers_count_the_partitions_of_an_amd_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In CPX mode the second device of ROCm is a part of the first card; its power is that of all parts."""
    monkeypatch.setattr(files.AmdGpuSource, "nodes", tmp_path / "dri")
    for domain in range(2):
        watts = {"power1_input": (domain + 1) * 100_000_000, "power1_cap": 550_000_000}
        known = {"device": "0x74a0", "current_compute_partition": "CPX"}
        hwmon = trees.drm_card(tmp_path / "drm", domain, f"000{domain}:01:00.0", "amdgpu", watts, **known)
        (hwmon.parents[1] / "drm" / f"renderD{128 + 6 * domain}").mkdir(parents=True)
        for part in range(6):
            number = 6 * domain + part
            told = f"simd_count 152\nlocation_id {part << 28 | 0x100}\ndomain {domain}\ndrm_render_minor {128 + number}"
            trees.write(tmp_path, {f"kfd/kfd/topology/nodes/{number + 4}/properties": told, f"dri/renderD{128 + number}": ""})

    def measured(*devices: str) -> list[tuple[str, int, tuple[str, ...]]]:
        channels = opened(create(f"amdgpu:{tmp_path / 'drm'}", devices or None))[0].values()
        return [(c.domain, len(c.users), c.flags) for c in channels]

    flags = ("shared_device", "module_scope")
    first, second = ("0000:01:00.0", 6, flags), ("0001:01:00.0", 6, flags)
    assert measured() == [first, second]
    assert measured("7") == measured("0001:01:00") == [second], "as torch names it"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2")
    assert measured() == [first]
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0")
    for number in range(12):
        if number != 9:
            (tmp_path / f"dri/renderD{128 + number}").unlink()
    assert measured() == [("0001:01:00.0", 1, flags)], "a job that has one part"


@pytest.mark.parametrize("silent", [{"temp1_input": 40}, {"power1_average": 0, "power1_cap": 0}])
def test_both_dies_of_an_amd_card_are_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent: dict[str, object]) -> None:
    loud = {"power1_average": 400_000_000, "power1_cap": 560_000_000}
    for number, bus in enumerate(("c1", "c6", "c9", "ce")):
        trees.drm_card(tmp_path, number, f"0000:{bus}:00.0", "amdgpu", silent if number % 2 else loud, device="0x7408")
    channels, values = opened(create(f"amdgpu:{tmp_path}"))
    assert [(c.domain, c.users, c.flags) for c in channels.values()] == [
        ("0000:c1:00.0", ("0000:c1:00.0", "0000:c6:00.0"), ("dual_die_parent",)),
        ("0000:c9:00.0", ("0000:c9:00.0", "0000:ce:00.0"), ("dual_die_parent",)),
    ]
    assert list(values.values()) == pytest.approx([400, 400])
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "3")  # a process that is given the silent die only
    assert [(c.domain, c.flags) for c in opened(create(f"amdgpu:{tmp_path}"))[0].values()] == [("0000:c9:00.0", ("dual_die_parent",))]


# --- NVIDIA -----------------------------------------------------------------------------------------------------------

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")


def test_nvml_reads_joules_and_watts(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A}])
    channels, values = opened(create("nvml"))
    assert values[f"nvml:{A}:device:energy"] == pytest.approx(5000, abs=50)
    assert values[f"nvml:{A}:device:power_instant"] == pytest.approx(300)
    counter = channels[f"nvml:{A}:device:energy"]
    assert (counter.domain, counter.boundary, counter.max_power_w) == (A, "device", pytest.approx(1400))


@pytest.mark.parametrize(("name", "share"), [("NVIDIA H200", 0.25), ("NVIDIA H100 80GB HBM3", 0.25), ("NVIDIA GH200 480GB", 1.0)])
def test_nvml_asks_the_counter_first_and_knows_what_power_sees_a_part_of_the_time(
    monkeypatch: pytest.MonkeyPatch, name: str, share: float
) -> None:
    """The first question about a GPU has the driver fetch all its sensors: 3 to 4 ms on an H200, and 0.06 ms for the next."""
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A, "name": name}])
    channels, _ = opened(create("nvml"))
    assert [(c.kind, c.duty) for c in channels.values()] == [("energy", 1.0), ("power_instant", share)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, [A, B, C]),
        ("1", [B]),
        ("2,0", [C, A]),
        (B, [B]),
        ("GPU-bbbb", [B]),
        ("00000000:03:00.0", [C]),
        ("0,7,1", [A]),
        ("", None),
        ("MIG-c1", [C]),
    ],
)
def test_masks_in_all_spellings(monkeypatch: pytest.MonkeyPatch, mask: str | None, expected: list[str] | None) -> None:
    gpus = [{"uuid": u, "pci": f"00000000:0{i + 1}:00.0", "mig": ["MIG-c1", "MIG-c2"] if u == C else []} for i, u in enumerate((A, B, C))]
    use(monkeypatch, "pynvml", FAKE_GPUS=gpus)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    if expected is None:
        with pytest.raises(SourceUnavailable, match="no NVIDIA GPU is visible"):
            opened(create("nvml"))
        return
    channels, _ = opened(create("nvml"))
    assert list(dict.fromkeys(c.domain for c in channels.values())) == expected
    everything, _ = opened(create("nvml", ["all"]))
    assert {c.domain for c in everything.values()} == {A, B, C}


def test_numbers_of_different_gpus_are_cuda_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's GPU 0 is the fastest, NVML's the one of the lowest address: the energy of the small card was taken for the other's."""
    gpus = [{"uuid": A, "name": "NVIDIA T400"}, {"uuid": B, "name": "NVIDIA A100-SXM4-40GB"}]
    use(monkeypatch, "pynvml", FAKE_GPUS=gpus, CUDA_VISIBLE_DEVICES="0")
    with pytest.raises(SourceUnavailable, match="counts the fastest of these different GPUs first") as unknown:
        opened(create("nvml"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in (unknown.value.hint or "")
    assert {c.domain for c in opened(create("nvml", ["1"]))[0].values()} == {B}, "asked for by the number that sensors have"
    for name, value, expected in (("DEVICE_ORDER", "PCI_BUS_ID", {A}), ("VISIBLE_DEVICES", B, {B}), ("VISIBLE_DEVICES", "1,0", {A, B})):
        monkeypatch.setenv(f"CUDA_{name}", value)
        assert {c.domain for c in opened(create("nvml"))[0].values()} == expected
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def test_index_ten_is_not_index_one(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [f"GPU-{i:08d}-x" for i in range(12)]
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": u} for u in uuids], CUDA_VISIBLE_DEVICES="10")
    channels, _ = opened(create("nvml"))
    assert {c.domain for c in channels.values()} == {uuids[10]}


def test_asking_for_a_gpu_that_is_not_there_names_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A}])
    with pytest.raises(InputError, match="GPU-aaaa"):
        opened(create("nvml", ["GPU-9"]))


def test_a_lost_gpu_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": "GPU-a"}, {"uuid": "GPU-b", "lost": True}, {"uuid": "GPU-c"}])
    with Meter(["nvml"], interval=0.02) as meter:
        assert {channel.domain for channel in meter.channels} == {"GPU-a", "GPU-c"}
        assert meter.reasons == ["nvml: GPU 1 does not open: NVML: GPU is lost; numbers count those that open"]
    assert {channel.domain for channel in opened(create("nvml", ["1"]))[0].values()} == {"GPU-c"}, "torch's second"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert {channel.domain for channel in opened(create("nvml"))[0].values()} == {"GPU-c"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert {channel.domain for channel in opened(create("nvml", ["GPU-c"]))[0].values()} == {"GPU-c"}
    with pytest.raises(SourceUnavailable, match=r"'GPU-b' here.*GPU 1 does not open: NVML: GPU is lost"):
        create("nvml", ["GPU-b"]).open()
    with Meter(["nvml"], devices=["GPU-b"], interval=0.02) as meter, meter.window("w") as window:
        pass
    assert "GPU is lost" in (window.energy.reason or "")
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"lost": True}])
    with pytest.raises(SourceUnavailable, match=r"^GPU 0 does not open: NVML: GPU is lost"):
        create("nvml").open()


def test_slices_share_their_parents_number(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A, "mig": ["MIG-1", "MIG-2"]}], CUDA_VISIBLE_DEVICES="MIG-1,MIG-2")
    channels, _ = opened(create("nvml"))
    counter = channels[f"nvml:{A}:device:energy"]
    assert counter.users == ("MIG-1", "MIG-2")
    assert set(counter.flags) == {"mig_parent", "shared_device"}
    assert len([c for c in channels.values() if c.kind == "energy"]) == 1


def test_the_counter_of_a_superchip_is_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A, "name": "NVIDIA GH200 120GB", "module": True}])
    channels, values = opened(create("nvml"))
    assert channels[f"nvml:{A}:module:energy"].boundary == "module"
    assert values[f"nvml:{A}:module:power_instant"] == pytest.approx(375)
    assert values[f"nvml:{A}:device:power_instant"] == pytest.approx(300)
    assert channels[f"nvml:{A}:device:power_instant"].parent == f"{A}:module"
    window = energy_at_constant_power(list(channels.values()), {A: 300.0, f"{A}:module": 375.0})
    assert window.boundaries["module"].energy_j == pytest.approx(3750)
    assert window.boundaries["device"].energy_j == pytest.approx(3000)


@pytest.mark.parametrize("name", ["NVIDIA GB200", "NVIDIA GB300"])
def test_a_module_of_two_gpus_does_not_count_twice(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """On a GB200 at rest each of four GPUs shows 160 W of its own and 465 W of its module, of which there are two."""
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": f"GPU-{n}", "name": name, "module": True} for n in range(4)])
    source = create("nvml")
    channels, _ = opened(source)
    assert {(c.boundary, c.kind, c.parent) for c in channels.values()} == {("device", "power_instant", None)}
    assert len(source.left_out) == 4  # type: ignore[attr-defined]
    window = energy_at_constant_power(list(channels.values()), {f"GPU-{n}": 160.0 for n in range(4)})
    assert list(window.boundaries) == ["device"] and window.boundaries["device"].energy_j == pytest.approx(6400)


def test_a_module_seen_by_two_sources_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A, "name": "NVIDIA GH200 120GB", "module": True, "gpu_scope": False}])
    trees.grace_rail(tmp_path, 0, "Module", 0, 375)
    channels = [*opened(create("nvml"))[0].values(), *opened(create(f"grace:{tmp_path}"))[0].values()]
    window = energy_at_constant_power(channels, {f"{A}:module": 375.0, "grace:0:Module": 375.0})
    assert window.boundaries["module"].energy_j == pytest.approx(3750)
    assert window.boundaries["module"].channels == [f"{A}:module"]  # the counter is preferred
    assert "device" not in window.boundaries


@pytest.mark.parametrize(("mask", "expected"), [("2", 375.0), ("0,1,2,3", 1500.0)])
def test_modules_of_the_whole_node_do_not_stand_for_some(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mask: str, expected: float
) -> None:
    gpu = {"name": "NVIDIA GH200 120GB", "module": True, "energy": False}
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": f"GPU-{n}", **gpu} for n in range(4)], CUDA_VISIBLE_DEVICES=mask)
    trees.pm_counters(tmp_path, {f"accel{n}": 9 for n in range(4)}, {})  # counters, and so preferred to power
    trees.write(tmp_path / "drm", {"card0/device/vendor": "0x10de"})
    channels = [*opened(create("nvml"))[0].values(), *opened(cray(tmp_path, tmp_path / "drm"))[0].values()]
    watts = {f"GPU-{n}{part}": 375.0 for n in range(4) for part in ("", ":module")} | {f"cray:accel{n}": 375.0 for n in range(4)}
    assert energy_at_constant_power(channels, watts).boundaries["module"].energy_j == pytest.approx(10 * expected, abs=1)


def test_one_card_of_a_node_has_no_modules_energy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A}, {"uuid": B}], CUDA_VISIBLE_DEVICES="0")
    trees.pm_counters(tmp_path, {"accel0": 9, "accel1": 9}, {})
    trees.write(tmp_path / "drm", {"card0/device/vendor": "0x10de"})
    channels = [*opened(create("nvml"))[0].values(), *opened(cray(tmp_path, tmp_path / "drm"))[0].values()]
    window = energy_at_constant_power(channels, {A: 300.0, "cray:accel0": 400.0, "cray:accel1": 400.0})
    assert window.valid and window.boundaries["device"].energy_j == pytest.approx(3000)
    module = window.boundaries["module"]
    assert (module.energy_j, module.valid) == (None, False)
    assert module.reason == "cray shows all 2 accelerators of the node, of which 1 are measured"


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (-1, -1, -1, -1)])
@pytest.mark.parametrize(("mask", "expected"), [("0,1", None), ("0,1,2,3", 24000.0)])
def test_modules_of_several_gpus_do_not_stand_for_half_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: tuple[int, ...], mask: str, expected: float | None
) -> None:
    gpu = {"name": "NVIDIA GB200", "energy": False}
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": f"GPU-{n}", **gpu} for n in range(4)], CUDA_VISIBLE_DEVICES=mask)
    for socket in range(2):
        trees.grace_rail(tmp_path / "class/hwmon", socket, "Module", socket, 1200)
    for number, node in enumerate(nodes):
        trees.write(tmp_path / f"bus/pci/devices/000{number}:01:00.0", {"vendor": "0x10de", "class": "0x030200", "numa_node": node})
    channels = [*opened(create("nvml"))[0].values(), *opened(create(f"grace:{tmp_path / 'class/hwmon'}"))[0].values()]
    watts = {f"GPU-{n}": 500.0 for n in range(4)} | {f"grace:{n}:Module": 1200.0 for n in range(2)}
    module = energy_at_constant_power(channels, watts).boundaries["module"]
    assert module.energy_j == (None if expected is None else pytest.approx(expected, abs=1))
    assert expected is not None or module.reason == "grace shows all 4 accelerators of the node, of which 2 are measured"


def test_an_old_gpu_has_power_only_and_the_field_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A, "energy": False, "instant": False}])
    channels, values = opened(create("nvml"))
    assert list(values) == [f"nvml:{A}:device:power_mean"]
    assert channels[f"nvml:{A}:device:power_mean"].mean_window_s == 1.0


@pytest.mark.usefixtures("virtual_time")
def test_the_meter_sees_gpus_that_others_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pynvml", FAKE_GPUS=[{"uuid": A}, {"uuid": B, "signal": ["Constant", {"watts": 200.0}]}])
    with Meter(["nvml"], interval=0.05) as meter, meter.window("w") as window:
        time.sleep(1.2)
    total = window.energy.boundaries["device"]
    assert total.energy_j == pytest.approx(500 * window.energy.duration_s, abs=total.bound_j)
    assert window.energy.valid, window.energy.reason
    # The declared 100 ms were replaced by what the counter showed, so that the bound is not wider than it needs to be.
    periods = [c.update_period_s for c in meter.channels if c.kind == "energy"]
    assert all(0.02 <= p <= 0.06 for p in periods)


# --- AMD, Gaudi, Graphcore --------------------------------------------------------------------------------------------


def test_amd_counter_is_accumulator_times_resolution(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"watts": 300}])
    sys.modules.pop("amdsmi")
    capsys.readouterr()
    channels, values = opened(create("amdsmi"))
    assert capsys.readouterr().out == ""  # the library's talk on import does not reach the user
    assert [c.kind for c in channels.values()] == ["energy", "power_instant"]
    assert list(values.values()) == pytest.approx([300, 300], rel=0.01)


def test_libraries_that_load_at_the_same_time_leave_the_output_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    output, inside, over = sys.stdout, threading.Event(), threading.Event()
    amd, gaudi = create("amdsmi"), create("gaudi")

    def opening(source: Source) -> None:
        with pytest.raises(SourceUnavailable, match="cannot be loaded"):
            source.open()

    other = threading.Thread(target=opening, args=(amd,))

    def importing(name: str) -> None:  # AMD's begins while Gaudi's is loaded, and ends after it
        if name == "pyhlml":
            other.start()
            assert inside.wait(60)
        else:
            inside.set()
            assert over.wait(60)
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", importing)
    opening(gaudi)
    over.set()
    other.join(60)
    assert sys.stdout is output


def test_a_dual_die_card_is_one_channel_with_two_users(monkeypatch: pytest.MonkeyPatch) -> None:
    primary = {"name": "AMD Instinct MI250X", "power": "average_socket_power"}
    silent = {"name": "AMD Instinct MI250X", "watts": None, "energy": False}
    devices = [{"bdf": f"0000:{bus}:00.0", **(primary if i % 2 == 0 else silent)} for i, bus in enumerate(("c1", "c6", "c9", "ce"))]
    use(monkeypatch, "amdsmi", FAKE_AMD=devices)
    channels, _ = opened(create("amdsmi"))
    assert [c.domain for c in channels.values() if c.kind == "energy"] == ["uuid-0000:c1:00.0", "uuid-0000:c9:00.0"]
    assert {c.flags for c in channels.values()} == {("dual_die_parent",)}
    assert next(iter(channels.values())).users == ("uuid-0000:c1:00.0", "uuid-0000:c6:00.0")
    # A process that is given the silent die only still gets its package.
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert {c.domain for c in opened(create("amdsmi"))[0].values()} == {"uuid-0000:c1:00.0"}


def test_both_ways_to_ask_know_the_same_dual_die_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(files.DUAL_DIE, "0xabcd", "MI999")
    for number, bus in enumerate(("c1", "c6")):
        watts = {} if number else {"power1_average": 400_000_000, "power1_cap": 560_000_000}
        trees.drm_card(tmp_path, number, f"0000:{bus}:00.0", "amdgpu", watts, device="0xabcd")
    dies: list[dict[str, object]] = [{"bdf": "0000:c1:00.0"}, {"bdf": "0000:c6:00.0", "watts": None, "energy": False}]
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"name": "AMD Instinct MI999", **die} for die in dies])
    for source in ("amdsmi", f"amdgpu:{tmp_path}"):
        assert {(len(c.users), c.flags) for c in opened(create(source))[0].values()} == {(2, ("dual_die_parent",))}


def test_an_mi300_is_not_taken_for_a_dual_die_card(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"bdf": "0000:01:00.0"}, {"bdf": "0000:02:00.0", "watts": 200}])
    assert len({c.domain for c in opened(create("amdsmi"))[0].values()}) == 2


def test_partitions_of_one_socket_are_one_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"bdf": f"0000:01:00.{n}"} for n in range(4)])
    channels, _ = opened(create("amdsmi"))
    assert len({c.domain for c in channels.values()}) == 1
    assert len(next(iter(channels.values())).users) == 4


def test_masks_count_in_the_runtimes_order(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [{"bdf": f"0000:0{n}:00.0", "hip_id": 2 - n} for n in range(3)]
    use(monkeypatch, "amdsmi", FAKE_AMD=devices, HIP_VISIBLE_DEVICES="0")
    assert {c.domain for c in opened(create("amdsmi"))[0].values()} == {"uuid-0000:02:00.0"}


def test_a_counter_that_amd_s_firmware_does_not_fill_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "amdsmi", FAKE_AMD=[{}])
    import amdsmi

    unfilled = {"energy_accumulator": 2**64 - 1, "counter_resolution": 15.3, "timestamp": 0}
    monkeypatch.setattr(amdsmi, "amdsmi_get_energy_count", lambda handle: unfilled)
    assert [channel.kind for channel in opened(create("amdsmi"))[0].values()] == ["power_instant"]


@pytest.mark.usefixtures("virtual_time")
def test_a_frozen_amd_counter_gives_way_to_power(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "amdsmi", FAKE_AMD=[{"frozen": True}])
    with Meter(["amdsmi"], interval=0.05) as meter, meter.window("w") as window:
        time.sleep(1.5)
    channel = window.energy.channels[0]
    assert channel.method == "power_integral"
    assert "frozen" in channel.flags
    assert channel.energy_j == pytest.approx(300 * window.energy.duration_s, rel=0.05)
    assert not window.energy.valid


def test_gaudi_zero_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "pyhlml", FAKE_GAUDI_MW=[250000, 0])
    _, values = opened(create("gaudi"))
    with monkeypatch.context() as patch, pytest.raises(SourceUnavailable, match="HABANA_VISIBLE_MODULES hides some of 2 devices"):
        patch.setenv("HABANA_VISIBLE_MODULES", "0")
        opened(create("gaudi"))
    assert list(values.values()) == [250.0, None]
    for mask, read in (("all", [250.0, None]), ("1", [None])):
        monkeypatch.setenv("HABANA_VISIBLE_DEVICES", mask)
        assert list(opened(create("gaudi"))[1].values()) == read


NPU_SMI = """+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc2                 Version: 24.1.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | {0}        50                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3393 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | {1}        48                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3391 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 1       0                 | 4711          | python                   | 1024                    |
+===========================+===============+====================================================+
"""


@pytest.mark.processes
def test_ascend_chips_are_read_from_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answer, program = tmp_path / "answer", tmp_path / "npu-smi"
    with pytest.raises(SourceUnavailable, match="npu-smi is missing"):
        create("ascend").open()
    program.write_text(
        f'#!/bin/sh\n[ "$*" = info ] && [ -e {answer} ] || {{ echo dcmi module initialize failed >&2; exit 1; }}\ncat {answer}\n'
    )
    program.chmod(0o755)
    with pytest.raises(SourceUnavailable, match="npu-smi info fails: dcmi module initialize failed"):
        create("ascend").open()
    answer.write_text(NPU_SMI.format("94.6", " NA "))
    channels, values = opened(create("ascend"))
    assert values == {"ascend:0000:c1:00.0:power": 94.6, "ascend:0000:01:00.0:power": None}
    assert {channel.boundary for channel in channels.values()} == {"device"}
    answer.write_text(NPU_SMI.format("94.6", "95.5"))
    assert opened(create("ascend", ["0000:01:00.0"]))[1] == {"ascend:0000:01:00.0:power": 95.5}
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    source = create("ascend")
    assert opened(source)[1] == {"ascend:0000:01:00.0:power": 95.5}
    answer.unlink()
    (reading,) = source.read()
    assert reading.value is None and "dcmi module initialize failed" in (reading.error or "")
    answer.write_text(NPU_SMI.format("NA", "NA"))
    with pytest.raises(SourceUnavailable, match="tells its power"):
        create("ascend").open()


def test_graphcore_devices_keep_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "gcipuinfo", FAKE_IPU=["N/A", "101.50W", "99.00W"])
    _, values = opened(create("graphcore"))
    assert values == {"graphcore:ipu:0:power": None, "graphcore:ipu:1:power": 101.5, "graphcore:ipu:2:power": 99.0}
    use(monkeypatch, "gcipuinfo", FAKE_IPU=["N/A"])
    with pytest.raises(SourceUnavailable, match="N/A"):
        opened(create("graphcore"))


def test_a_made_up_sensor_is_read_also_where_no_accelerator_is_asked_for() -> None:
    """As by a point on a CPU, whose energy would be null with the reason that it asked for none."""
    _, values = opened(create("fake:constant", []))
    assert list(values.values())[-1] == 300.0
    with pytest.raises(InputError, match="1"):
        create("fake:constant", ["1"]).open()


@pytest.mark.processes  # ipmitool and npu-smi, where they are
def test_every_source_answers_or_says_why_on_this_machine() -> None:
    for entry in BUILT_IN.values():
        if entry.argument is not None:
            continue
        source = create(entry.name, automatic=True)
        assert isinstance(source, Source)
        try:
            source.open()
        except SourceUnavailable as error:
            assert error.kind in ("absent", "unreadable", "masked")
            assert len(error.args[0]) > 10
        finally:
            source.close()


def test_a_reading_is_not_a_number_when_it_failed() -> None:
    def ask() -> float:
        raise OSError("gone")

    failed = timed("c", ask, (OSError,))
    assert (failed.value, failed.error) == (None, "OSError: gone") and failed.t_before <= failed.t_after
    with pytest.raises(OSError, match="gone"):
        timed("c", ask, (ValueError,))
