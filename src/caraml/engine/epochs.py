"""The loop over epochs: a fixed number of them, one of which counts, or as many as it takes to reach a quality.

EPICURE's vision benchmark trains five epochs and looks at the fourth. What is timed of it: the whole epoch, its training part, and each
batch. Before and after each of the three, ranks wait for each other and for their devices, as EPICURE's script does; inside a training
part no device waits. When training goes on until a quality is reached, everything from the first step on counts, validation included.

Once the batch system has said that it will end the job, the epoch that counts begins at once and ends as soon as it says anything; nothing
is validated any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from caraml.engine.control import steps_until_next_look
from caraml.engine.device import Device, StepTimer
from caraml.engine.loop import FEWEST_STEPS, EpochRow, Hooks, Measurement, MeasuringLoop, Progress, StepPhase
from caraml.engine.ranks import Ranks
from caraml.engine.step import Step
from caraml.stats import mean_interval
from caraml.suite.model import Measure

Validate = Callable[[], tuple[float | None, float | None]]
"""One pass over the held-out batches, on every rank: loss and share answered right, the same on all ranks."""


class EpochLoop(MeasuringLoop):
    """Runs ``policy.epochs`` epochs of ``steps`` steps, each followed by a validation pass."""

    def __init__(self, device: Device, ranks: Ranks, step: Step, policy: Measure, hooks: Hooks, *, steps: int, validate: Validate) -> None:
        super().__init__(device, ranks, step, policy, hooks)
        self._steps, self._validate = steps, validate
        self._epochs: list[EpochRow] = []
        self._first_step_took: tuple[float, float] = (0.0, 0.0)
        self._cut = False
        """Whether the ranks have agreed to hurry."""

    def run(self) -> Measurement:
        """Measure. Collective: every rank calls it."""
        policy, begin, end = self._policy, 0.0, 0.0
        assert policy.epochs is not None
        if policy.to_target:
            begin = self._edge()
        for number in range(1, policy.epochs + 1):
            counts = number == policy.counted_epoch and not policy.to_target
            if self._cut and not counts:
                continue
            if counts:
                begin = self._edge()
            timer = self._train(number)
            if counts:
                end = self._edge(after=True)
                self._judge(timer, end - begin)
            self._conclude_epoch()
            if policy.to_target and self._reached():
                break
        if any(row.cut and self._phase(row.number) == "measure" for row in self._epochs):
            self._flags.append("truncated")
        if policy.to_target:
            end = self._edge(after=True)
            if not self._reached():
                self._flags.append("target_missed")
        losses, skipped = self._read_outcomes()
        took, ended = self._first_step_took
        return Measurement(begin, end, self._rows, losses, took, ended, skipped, self._flags, self._epochs, self._steps)

    def _edge(self, after: bool = False) -> float:
        """An end of the window: everybody ready, sensors read. Returns its time."""
        self._device.synchronize()
        if after:
            end = self._device.now()
            self._hooks.edge()
            return end
        self._ranks.barrier()
        self._hooks.edge()
        return self._device.now()

    def _phase(self, number: int) -> StepPhase:
        counted = self._policy.counted_epoch
        assert counted is not None
        if self._policy.to_target or number == counted:
            return "measure"
        return "warm_up" if number < counted else "after"

    def _train(self, number: int) -> StepTimer:
        """The training part of an epoch."""
        self._ranks.barrier()
        begin, phase = self._device.now(), self._phase(number)
        if number == 1:
            with self._hooks.phase("first_step"):
                self._first_step_took = self._first_step()
            if phase == "measure":  # its items were trained in the window, so it is one of the window's steps
                self._rows[0] = replace(self._rows[0], phase="measure")
        with self._hooks.phase(phase):
            first_outcome, anchor = len(self._outcomes), self._device.now()
            timer = StepTimer(self._device)
            left = self._steps - (number == 1)
            while left and not self._cut_short(phase, timer):
                for _ in range(self._ranks.agree(min(left, steps_until_next_look(timer.finished(), timer.launched)))):
                    self._one(timer)
                left = self._steps - (number == 1) - timer.launched
                self._report(number, timer, left)
            self._device.synchronize()
            trained = self._device.now()
            self._append_rows(phase, anchor, timer, first_outcome)
        self._epochs.append(EpochRow(number, begin, trained, trained, timer.launched + (number == 1), self._cut))
        return timer

    def _cut_short(self, phase: StepPhase, timer: StepTimer) -> bool:
        """Whether all ranks leave this epoch now because rank 0 was told to hurry; a window has its fewest steps first."""
        enough = phase != "measure" or timer.launched >= FEWEST_STEPS
        if not self._ranks.agree(enough and self._hooks.hurry()):
            return False
        self._cut = True
        return True

    def _conclude_epoch(self) -> None:
        """Validate, and note when the epoch was over."""
        if self._cut:
            return
        with self._hooks.phase("validate"):
            loss, accuracy = self._validate()
            self._device.synchronize()
            self._ranks.barrier()
        self._epochs[-1] = replace(self._epochs[-1], end=self._device.now(), loss=loss, accuracy=accuracy)

    def _reached(self) -> bool:
        """Whether the last epoch's validation shows what was asked for. The same on every rank, because the validation is."""
        policy, last = self._policy, self._epochs[-1]
        accurate = policy.until_accuracy is None or (last.accuracy is not None and last.accuracy >= policy.until_accuracy)
        low = policy.until_loss is None or (last.loss is not None and last.loss <= policy.until_loss)
        return accurate and low

    def _report(self, number: int, timer: StepTimer, left: int) -> None:
        finished = timer.finished()
        interval = mean_interval(finished) if len(finished) >= 4 else None
        assert self._policy.epochs is not None
        steps = left + (self._policy.epochs - number) * self._steps
        remaining = interval.mean * steps if interval is not None else None
        self._hooks.progress(Progress(self._phase(number), len(self._rows) + timer.launched, interval, remaining))
