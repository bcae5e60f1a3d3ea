"""The loop over epochs on a device of known speed: which epoch counts, what is timed apart, when a target ends it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from caraml.engine.epochs import EpochLoop
from caraml.engine.loop import Hooks, Progress
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepOutcome
from caraml.suite.model import Policy
from caraml.verify import KnownDevice, VirtualClock
from caraml.worker.record import _places

STEP, CHECK, STEPS = 0.05, 0.2, 10


class Run:
    """What happened in one run of the loop."""

    def __init__(self, policy: Policy, losses: list[float] | None = None, steps: int = STEPS, warned_at: int | None = None) -> None:
        self.clock = VirtualClock(1000.0)
        self.device = KnownDevice(self.clock, 0.0, queue=1.0)
        self.edges: list[float] = []
        self.phases: list[str] = []
        self.progress: list[Progress] = []
        self._losses = iter(losses or [1.0] * 100)
        self.checks = 0
        self.trained = 0

        def hurry() -> bool:
            return warned_at is not None and self.trained >= warned_at

        hooks = Hooks(self._phase, self.progress.append, lambda: self.edges.append(self.clock.now()), hurry)
        loop = EpochLoop(self.device, Ranks(), policy, hooks, steps=steps, validate=self._validate)
        self.measured: RankSummary = loop.run(self._step)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.phases.append(name)
        yield

    def _step(self) -> StepOutcome:
        self.device.launch(STEP)
        self.trained += 1
        return StepOutcome(torch.tensor(1.0), 0.0)

    def _validate(self) -> tuple[float, float]:
        self.device.launch(CHECK)
        self.checks += 1
        loss = next(self._losses)
        return loss, 1 - loss


def test_five_epochs_of_which_the_fourth_counts() -> None:
    run = Run(Policy(epochs=5))
    measured = run.measured
    assert [row.number for row in measured.epochs] == [1, 2, 3, 4, 5] and run.checks == 5
    assert len(measured.rows) == 5 * STEPS == len(measured.losses)
    counted = [index for index, row in enumerate(measured.rows) if row.phase == "measure"]
    assert counted == list(range(30, 40))
    assert [row.phase for row in list(measured.rows)[40:]] == ["after"] * STEPS
    assert measured.end - measured.begin == pytest.approx(STEPS * STEP)
    fourth = measured.epochs[3]
    assert fourth.trained - fourth.begin == pytest.approx(STEPS * STEP)
    assert fourth.end - fourth.begin == pytest.approx(STEPS * STEP + CHECK)
    assert run.edges == [pytest.approx(measured.begin), pytest.approx(measured.end)]
    assert run.phases == ["first_step", "warm_up", "validate", *["warm_up", "validate"] * 2, "measure", "validate", "after", "validate"]


def test_any_epoch_can_count_even_the_first() -> None:
    run = Run(Policy(epochs=2, count_epoch=1))
    assert [row.phase for row in run.measured.rows] == ["measure"] * STEPS + ["after"] * STEPS
    assert run.measured.end - run.measured.begin == pytest.approx(STEPS * STEP), "the first step is one of the window's"


@pytest.mark.parametrize(
    ("policy", "epochs"), [(Policy(epochs=9, until_loss=0.5), 3), (Policy(epochs=9, until_accuracy=0.55), 4)], ids=["loss", "accuracy"]
)
def test_a_target_ends_training_and_everything_counts(policy: Policy, epochs: int) -> None:
    run = Run(policy, [0.9, 0.7, 0.5, 0.4, 0.3])
    assert len(run.measured.epochs) == epochs
    assert run.measured.end - run.measured.begin == pytest.approx(epochs * (STEPS * STEP + CHECK))
    assert all(row.phase == "measure" for row in run.measured.rows) and "target_missed" not in run.measured.flags
    assert len(run.edges) == 2


def test_a_target_that_is_not_reached_is_said() -> None:
    run = Run(Policy(epochs=3, until_loss=0.1), [0.9, 0.8, 0.7])
    assert len(run.measured.epochs) == 3 and run.measured.flags == ["target_missed"]


def test_a_warning_before_the_epoch_that_counts_lets_it_begin_at_once() -> None:
    run = Run(Policy(epochs=5), steps=1000, warned_at=100)
    measured = run.measured
    assert [row.number for row in measured.epochs] == [1, 4] and run.checks == 0, "no more validation"
    assert "truncated" in measured.flags
    assert sum(row.steps for row in measured.epochs) == len(measured.rows) < 300
    assert 4 <= len(measured.window_rows) == measured.epochs[1].steps
    assert measured.end - measured.begin == pytest.approx(measured.epochs[1].steps * STEP)


def test_steps_are_told_of_the_epoch_that_they_were_trained_in() -> None:
    """The first epoch of a thousand steps was left soon after a warning: the step after it is the first of the fourth."""
    measured = Run(Policy(epochs=5), steps=1000, warned_at=100).measured
    first, fourth = (row.steps for row in measured.epochs)
    assert list(_places(measured, 1000)) == [(1, batch) for batch in range(first)] + [(4, batch) for batch in range(fourth)]
    plain = dataclasses.replace(measured, epochs=[])
    assert list(_places(plain, 50))[49:51] == [(1, 49), (2, 0)] and set(_places(plain, None)) == {(None, None)}


def test_an_epoch_too_short_to_be_cut_is_still_known_to_lack_its_validation() -> None:
    measured = Run(Policy(epochs=5), steps=6, warned_at=1).measured
    assert [(row.number, row.cut) for row in measured.epochs] == [(1, True), (4, True)]
    assert "truncated" in measured.flags


def test_a_warning_in_the_epoch_that_counts_ends_it_and_the_run() -> None:
    run = Run(Policy(epochs=5), steps=1000, warned_at=3100)
    assert [row.steps == 1000 for row in run.measured.epochs] == [True] * 3 + [False]
    assert run.checks == 3 and "truncated" in run.measured.flags


def test_a_warning_after_the_epoch_that_counts_takes_nothing_from_it() -> None:
    run = Run(Policy(epochs=5), steps=1000, warned_at=4100)
    assert run.measured.epochs[3].steps == 1000 and "truncated" not in run.measured.flags


def test_a_warning_on_the_way_to_a_target_says_that_it_was_missed() -> None:
    run = Run(Policy(epochs=9, until_loss=0.1), steps=1000, warned_at=1500)
    assert run.measured.flags[-2:] == ["truncated", "target_missed"] and len(run.measured.epochs) == 2


def test_progress_tells_how_long_it_will_take() -> None:
    progress = Run(Policy(epochs=3), steps=200).progress
    remaining = [(said.steps, said.remaining) for said in progress if said.remaining is not None]
    assert len(remaining) > 10
    assert all(left == pytest.approx((600 - steps) * STEP, rel=0.01) for steps, left in remaining)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count_epoch": 2}, "expected `epochs`"),
        ({"until_loss": 0.1}, "expected `epochs`"),
        ({"epochs": 2, "count_epoch": 3}, r"count_epoch of at most epochs \(2\), not 3"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**values)  # type: ignore[arg-type]


def test_the_counted_epoch_is_the_last_but_one() -> None:
    assert [Policy(epochs=count).counted_epoch for count in (1, 2, 5)] == [1, 1, 4]
    assert Policy().counted_epoch is None and Policy(epochs=5, count_epoch=2).counted_epoch == 2
