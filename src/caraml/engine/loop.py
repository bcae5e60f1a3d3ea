"""The measuring loop: first step, warm-up, and one window whose two ends are the edges of rate, time and energy.

Inside the window nothing waits for the device and nothing is printed; ranks exchange one integer at each look. The wall time of the
window runs from one synchronisation to the next on every rank, and the slowest rank's time counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from caraml.engine.control import Verdict, look, settled, steps_until_next_look, warm_up_over
from caraml.engine.device import Device, StepTimer
from caraml.engine.ranks import Ranks
from caraml.engine.step import Step
from caraml.engine.steps import Outcomes, StepPhase, StepRow, StepTable
from caraml.stats import Interval, drift
from caraml.suite.model import Measure

FEWEST_STEPS = 4
"""Below that a window has no spread, so even a hurried one waits for them."""
_CUT = 2
"""What ranks agree on to end a window early."""


@dataclass(frozen=True)
class Progress:
    """What rank 0 can say while it works. Times in seconds."""

    phase: str
    steps: int = 0
    step_time: Interval | None = None
    remaining: float | None = None


@dataclass(frozen=True)
class EpochRow:
    """One epoch of one rank: when it began, when its training part ended, when its validation ended, and what that found."""

    number: int
    begin: float
    trained: float
    end: float
    steps: int
    cut: bool
    """Trained, in part or whole, after the batch system's warning: not validated any more."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass
class Measurement:
    """What one rank measured. Times are this host's monotonic clock."""

    begin: float
    end: float
    rows: StepTable
    losses: list[float]
    first_step_time: float
    first_step_end: float
    skipped_updates: int
    flags: list[str] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    """Where training went by epochs."""
    steps_per_epoch: int | None = None

    @property
    def window_rows(self) -> StepTable:
        """Rows of the window."""
        return self.rows.of_phase("measure")


@dataclass
class Hooks:
    """What the worker wants to know while the loop runs."""

    phase: Callable[[str], AbstractContextManager[None]]
    progress: Callable[[Progress], None]
    edge: Callable[[], None]
    """Called just before the window opens and just after it has closed: reads every sensor once."""
    hurry: Callable[[], bool] = lambda: False
    """True once the batch system has said that it will end the job: the window is then closed as soon as it says anything."""


class MeasuringLoop:
    """Runs steps until they have been measured."""

    def __init__(self, device: Device, ranks: Ranks, step: Step, policy: Measure, hooks: Hooks) -> None:
        self._device, self._ranks, self._step, self._policy, self._hooks = device, ranks, step, policy, hooks
        self._rows = StepTable()
        self._outcomes = Outcomes()
        self._flags: list[str] = []

    def run(self) -> Measurement:
        """Measure. Collective: every rank calls it."""
        with self._hooks.phase("first_step"):
            first_step_time, first_step_end = self._first_step()
        with self._hooks.phase("warm_up"):
            self._warm_up()
        with self._hooks.phase("measure"):
            begin, end = self._window()
        losses, skipped = self._read_outcomes()
        return Measurement(begin, end, self._rows, losses, first_step_time, first_step_end, skipped, self._flags)

    def _first_step(self) -> tuple[float, float]:
        self._hooks.progress(Progress("first_step"))
        self._device.synchronize()
        begin = self._device.now()
        outcome = self._step()
        self._device.synchronize()
        end = self._device.now()
        self._outcomes.append(outcome)
        self._rows.append(StepRow("first", begin, end - begin, outcome.data_wait))
        return end - begin, end

    def _warm_up(self) -> None:
        anchor = self._device.now()
        timer = StepTimer(self._device)
        while True:
            for _ in range(self._ranks.agree(steps_until_next_look(timer.finished(), timer.launched))):
                self._one(timer)
            elapsed = self._device.now() - anchor
            self._hooks.progress(Progress("warm_up", timer.launched))
            if self._ranks.agree(warm_up_over(timer.finished(), elapsed, self._policy) or self._hooks.hurry()):
                break
        self._device.synchronize()
        if not settled(timer.finished(), self._policy):
            self._flags.append("not_steady")
        self._append_rows("warm_up", anchor, timer, first_outcome=1)

    def _window(self) -> tuple[float, float]:
        self._ranks.barrier()
        self._device.synchronize()
        self._hooks.edge()
        first_outcome = len(self._outcomes)
        begin = self._device.now()
        timer = StepTimer(self._device)
        while True:
            for _ in range(self._ranks.agree(self._next_steps(timer))):
                self._one(timer)
            verdict = look(timer.finished(), timer.launched, self._device.now() - begin, self._policy)
            self._hooks.progress(Progress("measure", timer.launched, verdict.interval, verdict.remaining))
            cut = not verdict.stop and self._hooks.hurry() and timer.launched >= FEWEST_STEPS
            decision = self._ranks.agree(_CUT if cut else verdict.stop)
            if decision == _CUT:
                self._flags.append("truncated")
            if decision:
                break
        self._device.synchronize()
        end = self._device.now()
        self._hooks.edge()
        self._append_rows("measure", begin, timer, first_outcome)
        self._judge(timer, end - begin)
        return begin, end

    def _next_steps(self, timer: StepTimer) -> int:
        steps = steps_until_next_look(timer.finished() or [row.seconds for row in self._rows[1:]], timer.launched)
        if self._policy.max_steps is not None:
            steps = min(steps, self._policy.max_steps - timer.launched)
        return max(steps, 1)

    def _judge(self, timer: StepTimer, seconds: float) -> Verdict:
        """The last look, at every step of the window: flags what the stop rule could not get."""
        finished = timer.finished()
        verdict = look(finished, timer.launched, seconds, self._policy)
        if not verdict.precise:
            self._flags.append("imprecise")
        if abs(drift(finished)) > self._policy.target and "not_steady" not in self._flags:
            self._flags.append("not_steady")
        return verdict

    def _one(self, timer: StepTimer) -> None:
        self._outcomes.append(self._step())
        timer.step_ended()

    def _append_rows(self, phase: StepPhase, anchor: float, timer: StepTimer, first_outcome: int) -> None:
        start = anchor
        for seconds, data_wait in zip(timer.finished(), self._outcomes.data_waits[first_outcome:], strict=True):
            self._rows.append(StepRow(phase, start, seconds, data_wait))
            start += seconds

    def _read_outcomes(self) -> tuple[list[float], int]:
        """Losses of all steps, and how many updates of the window the loss scaler skipped."""
        scales = self._outcomes.scales()
        inside = (index for index, row in enumerate(self._rows) if row.phase == "measure" and index > 0)
        skipped = sum(scales[index] < scales[index - 1] for index in inside) if scales else 0
        return self._outcomes.losses(), skipped
