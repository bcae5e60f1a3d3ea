"""The measuring loop over epochs, each followed by a validation pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from caraml.base.stats import mean_interval
from caraml.engine.control import steps_until_next_look
from caraml.engine.device import Device
from caraml.engine.loop import FEWEST_STEPS, Hooks, MeasuringLoop, Progress
from caraml.engine.ranks import Ranks
from caraml.engine.steps import EpochRow, RankSummary, StepPhase
from caraml.suite.model import Policy

Validate = Callable[[], tuple[float | None, float | None]]
"""One pass over the held-out batches, on every rank: loss and share answered right, the same on all ranks."""


class EpochLoop(MeasuringLoop):
    """Measures ``policy.epochs`` epochs of ``steps`` steps, each followed by a validation pass: as many as are asked for, one of which
    counts, or as many as it takes to reach a quality.

    EPICURE's vision benchmark trains five epochs and looks at the fourth. What is timed of it: the whole epoch, its training part, and each
    batch. Before and after each of the three, ranks wait for each other and for their devices, as EPICURE's script does; inside a training
    part no device waits. When training goes on until a quality is reached, everything from the first step on counts, validation included.

    Once the batch system has said that it will end the job, the epoch that counts begins at once and ends as soon as it says anything;
    nothing is validated any more.
    """

    def __init__(self, device: Device, ranks: Ranks, policy: Policy, hooks: Hooks, *, steps: int, validate: Validate) -> None:
        super().__init__(device, ranks, policy, hooks)
        self._per_epoch, self._validate = steps, validate
        self._epochs: list[EpochRow] = []
        self._number, self._began, self._ahead = 1, 0.0, steps
        """Of the epoch that is trained now: its number, when it began, and how many of its steps are to come."""
        self._cut = False
        """Whether the ranks have agreed to hurry."""

    def __enter__(self) -> EpochLoop:
        """Begin the first epoch. Collective: every rank measures."""
        if self._policy.to_target:
            self._open_window()
        self._begin_epoch()
        return self

    def summary(self) -> RankSummary:
        return replace(super().summary(), epochs=self._epochs)

    # -- an epoch ------------------------------------------------------------------------------------------------------

    @property
    def _timed_phase(self) -> StepPhase | None:
        return self._stage if self._look == self._look_at_epoch else None

    @property
    def _counts(self) -> bool:
        """Whether this epoch alone is the window."""
        return self._number == self._policy.counted_epoch and not self._policy.to_target

    @property
    def _stage(self) -> StepPhase:
        counted = self._policy.counted_epoch
        assert counted is not None
        if self._policy.to_target or self._number == counted:
            return "measure"
        return "warm_up" if self._number < counted else "after"

    def _begin_epoch(self) -> None:
        if self._counts:
            self._open_window()
        self._ranks.barrier()
        self._began, self._ahead = self._device.now(), self._per_epoch
        if self._number == 1:
            self._begin_first_step()
        else:
            self._begin_training()

    def _after_first_step(self) -> None:
        self._end_first_step()
        self._ahead -= 1
        if self._stage == "measure":  # its items were trained in the window, so it is one of the window's steps
            self._rows.put(0, "measure")
        self._begin_training()

    def _begin_training(self) -> None:
        self._enter(self._stage)
        self._begin(self._look_at_epoch)
        self._go_on()

    def _look_at_epoch(self) -> None:
        finished = self._timer.finished()
        interval = mean_interval(finished) if len(finished) >= FEWEST_STEPS else None
        assert self._policy.epochs is not None
        steps = self._ahead - self._timer.launched + (self._policy.epochs - self._number) * self._per_epoch
        remaining = interval.mean * steps if interval is not None else None
        self._hooks.progress(Progress(self._stage, len(self._rows) + self._timer.launched, interval, remaining))
        self._go_on()

    def _go_on(self) -> None:
        """Train until the next look, or end the training part."""
        ahead = self._ahead - self._timer.launched
        if not ahead or self._cut_short():
            self._end_training()
        else:
            self._left = self._ranks.agree(min(ahead, steps_until_next_look(self._timer.finished(), self._timer.launched)))

    def _cut_short(self) -> bool:
        """Whether all ranks leave this epoch now because rank 0 was told to hurry; a window has its fewest steps first."""
        enough = self._stage != "measure" or self._timer.launched >= FEWEST_STEPS
        if not self._ranks.agree(enough and self._hooks.hurry()):
            return False
        self._cut = True
        return True

    def _end_training(self) -> None:
        self._device.synchronize()
        trained = self._device.now()
        self._append_rows(self._stage)
        steps = self._timer.launched + (self._number == 1)
        self._epochs.append(EpochRow(self._number, self._began, trained, trained, steps, self._cut, trained))
        if self._cut and self._stage == "measure":
            self._flags.append("truncated")
        if self._counts:
            self._shut_window()
        self._check()
        self._next_epoch()

    def _check(self) -> None:
        """Validate, and note when the epoch was over."""
        if self._cut:
            return
        self._enter("validate")
        self._ranks.barrier()
        resumed = self._device.now()
        loss, accuracy = self._validate()
        self._device.synchronize()
        self._ranks.barrier()
        self._phase.close()
        self._epochs[-1] = replace(self._epochs[-1], end=self._device.now(), resumed=resumed, loss=loss, accuracy=accuracy)

    def _next_epoch(self) -> None:
        policy = self._policy
        assert policy.epochs is not None
        reached = policy.to_target and self._reached()
        self._number += 1
        while self._cut and self._number <= policy.epochs and not self._counts:
            self._number += 1
        if not reached and self._number <= policy.epochs:
            self._begin_epoch()
            return
        if policy.to_target:
            self._shut_window()
            self._flags += [] if reached else ["target_missed"]
        self.done = True

    def _reached(self) -> bool:
        """Whether the last epoch's validation shows what was asked for. The same on every rank, because the validation is."""
        policy, last = self._policy, self._epochs[-1]
        accurate = policy.until_accuracy is None or (last.accuracy is not None and last.accuracy >= policy.until_accuracy)
        low = policy.until_loss is None or (last.loss is not None and last.loss <= policy.until_loss)
        return accurate and low
