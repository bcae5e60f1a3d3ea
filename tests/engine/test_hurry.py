"""A job that is about to be ended closes its window early, and says so."""

from __future__ import annotations

import torch

from caraml.engine.loop import Hooks, MeasuringLoop
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.suite.model import Policy
from caraml.verify import KnownDevice, VirtualClock

POLICY = Policy(target=1e-9, min_seconds=50, max_seconds=60, idle_seconds=0)
START = 1000.0


def measure(warned_after: float) -> RankSummary:
    """Measure steps of 50 ms on a device of known speed, warned so many seconds after the start."""
    device = KnownDevice(VirtualClock(START), 0.001, queue=1.0)

    def step() -> StepOutcome:
        device.launch(0.05)
        return StepOutcome(torch.tensor(1.0), 0.0)

    return MeasuringLoop(device, Ranks(), POLICY, Hooks(hurry=lambda: device.now() - START > warned_after)).run(step)


def test_the_window_ends_soon_after_the_warning() -> None:
    measured = measure(warned_after=20)
    assert "truncated" in measured.flags
    assert 20 - 5 < measured.end - START < 20 + 2 + POLICY.max_seconds / 20
    assert measured.end - measured.begin < 25


def test_a_warning_before_the_window_still_gives_one() -> None:
    measured = measure(warned_after=0)
    assert "truncated" in measured.flags and len(measured.window_rows) >= 4
    assert measured.end - START < 5


def test_a_window_that_was_done_anyway_is_not_called_truncated() -> None:
    measured = measure(warned_after=1e9)
    assert "truncated" not in measured.flags and measured.end - measured.begin >= 50
