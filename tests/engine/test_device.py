"""Units and patience of the devices, where no GPU is needed to see them."""

from __future__ import annotations

import pytest

from caraml.engine.device import CudaDevice


class Event:
    """What torch's event answers: milliseconds, and whether the device has come to it."""

    def __init__(self, at_ms: float, reached: bool = True) -> None:
        self.at_ms, self.reached = at_ms, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, other: Event) -> float:
        assert other.reached, "torch raises here"
        return other.at_ms - self.at_ms


def test_events_are_read_in_seconds_and_only_when_they_happened() -> None:
    device = object.__new__(CudaDevice)  # its constructor wants a GPU; its arithmetic does not
    assert device.between(Event(100.0), Event(350.0)) == pytest.approx(0.25)  # type: ignore[arg-type]
    assert device.between(Event(100.0), Event(350.0, reached=False)) is None  # type: ignore[arg-type]
