"""Throttling as a difference of counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from caraml.system.nvml import shares, slowed_down, throttled
from tests.system.fake_nvml import FakeGpu, FakeNvml, NVMLError


class Counting(FakeNvml):
    """GPU-0 has the counters, in nanoseconds; the other refuses."""

    times = {0: 2_000_000_000, 1: 500_000_000, 3: 0}  # noqa: RUF012
    silent = ("GPU-1",)

    def nvmlDeviceGetViolationStatus(self, gpu: FakeGpu, policy: int) -> Any:  # noqa: N802
        if gpu.uuid in self.silent:
            raise NVMLError("Not Supported")
        return SimpleNamespace(violationTime=self.times[policy], referenceTime=0)


def test_counters_are_seconds_by_gpu_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Counting([FakeGpu("A"), FakeGpu("B", uuid="GPU-1")])
    monkeypatch.setitem(__import__("sys").modules, "pynvml", library)
    assert throttled() == {"GPU-0": {"power": 2.0, "thermal": 0.5, "board": 0.0}}


def test_only_the_devices_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Counting([FakeGpu("A"), FakeGpu("B", uuid="GPU-2")])
    monkeypatch.setitem(__import__("sys").modules, "pynvml", library)
    assert set(throttled()) == {"GPU-0", "GPU-2"}
    assert set(throttled(["GPU-2"])) == {"GPU-2"} and throttled([]) == {}
    assert set(throttled(["0000:01:00"])) == {"GPU-0", "GPU-2"}, "both fakes say that they are there"
    assert throttled(["0000:02:00"]) == {}


@pytest.mark.parametrize(
    ("reasons", "flagged"),
    [({"power": 0.9, "thermal": 0.0}, False), ({"power": 0.0, "thermal": 0.02}, True), ({"board": 0.5}, True), ({"thermal": 0.005}, False)],
)
def test_power_capping_is_no_fault_and_heat_is(reasons: dict[str, float], flagged: bool) -> None:
    assert slowed_down({"GPU-0": {"power": 0.3}, "GPU-1": reasons}) is flagged


def test_a_share_is_a_difference_over_the_window() -> None:
    begin, end = {"GPU-0": {"power": 2.0, "thermal": 0.5}}, {"GPU-0": {"power": 4.0, "thermal": 0.5}, "GPU-1": {"power": 9.0}}
    assert shares(begin, end, 20.0) == {"GPU-0": {"power": 0.1, "thermal": 0.0}}
    assert shares({}, end, 20.0) == {}


def test_without_a_driver_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml([], fails="Driver Not Loaded"))
    assert throttled() == {}
