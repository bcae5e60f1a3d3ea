"""The measuring loop: first step, warm-up, and one window whose two ends are the edges of rate, time and energy.

Whoever trains tells it where each step ends (:meth:`MeasuringLoop.step_ended`); it decides when to look, where the window opens and
closes. Inside the window nothing waits for the device, unless the host is far ahead of it, and nothing is printed; ranks exchange one
integer at each look. The wall time of the window runs from one synchronisation to the next on every rank, and the slowest rank's time
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace

from caraml.base.stats import Interval
from caraml.engine.control import look, steps_until_next_look, warm_up_over
from caraml.engine.device import Device, StepTimer
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Outcomes, RankSummary, Step, StepOutcome, StepPhase, StepRow, StepTable
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


@dataclass
class Hooks:
    """What the loop's owner wants to know while it runs."""

    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
    progress: Callable[[Progress], None] = lambda progress: None
    edge: Callable[[], object] = lambda: None
    """Called just before the window opens and just after it has closed: reads every sensor once."""
    hurry: Callable[[], bool] = lambda: False
    """True once the batch system has said that it will end the job: the window is then closed as soon as it says anything."""


class MeasuringLoop:
    """Measures the steps that it is told of. A context manager: the first step begins where it is entered."""

    def __init__(self, device: Device, ranks: Ranks, policy: Measure, hooks: Hooks) -> None:
        self._device, self._ranks, self._policy, self._hooks = device, ranks, policy, hooks
        self._rows, self._outcomes = StepTable(), Outcomes()
        self._flags: list[str] = []
        self._phase = ExitStack()
        self._first_step = (0.0, 0.0)
        self._window = (0.0, 0.0)
        self._waits: tuple[float | None, float | None] = (None, None)
        self._undecided = False
        self._look: Callable[[], None] = lambda: None
        self.done = False
        """Whether the window is closed: steps after it are not measured."""

    # -- what the owner calls ------------------------------------------------------------------------------------------

    def __enter__(self) -> MeasuringLoop:
        """Begin with the first step. Collective: every rank measures."""
        self._begin_first_step(self._after_first_step)
        return self

    def __exit__(self, *error: object) -> None:
        """End the phase that the loop is in."""
        self._phase.close()

    def step_ended(self, outcome: StepOutcome) -> bool:
        """A step has been launched to its end. False once enough was measured."""
        self._outcomes.append(outcome)
        self._undecided = outcome.undecided
        self._timer.step_ended()
        self._left -= 1
        if not self._left:
            self._look()
        return not self.done

    def run(self, step: Step) -> RankSummary:
        """Measure a step that can be called as often as it takes."""
        with self:
            while self.step_ended(step()):
                pass
        return self.summary()

    def end(self) -> None:
        """No more steps will come: an open window closes, and of a warm-up the second half is the window if it has enough steps."""
        if self._look == self._look_at_window and self._timer.launched >= FEWEST_STEPS:
            self._close_window()
        elif self._look == self._look_at_warm_up:
            self._late_window()

    def summary(self) -> RankSummary:
        """What this rank measured, once it is done. Waits for the device."""
        scales, losses = self._outcomes.scales(), self._outcomes.losses()
        inside = (index for index, row in enumerate(self._rows) if row.phase == "measure" and index > 0)
        skipped = sum(scales[index] < scales[index - 1] for index in inside) if scales else 0
        return RankSummary(*self._window, self._rows, losses, *self._first_step, skipped, self._flags, waits=self._waits)

    def so_far(self) -> StepTable:
        """The steps that are known to have finished. Does not ask the device: it may be what has failed."""
        rows = StepTable(self._rows)
        if self._look in (self._look_at_warm_up, self._look_at_window) and not self.done:
            phase: StepPhase = "measure" if self._look == self._look_at_window else "warm_up"
            start = self._anchor
            waits = self._outcomes.data_waits[self._first_outcome :]
            for seconds, data_wait in zip(self._timer.read, waits, strict=False):
                rows.append(StepRow(phase, start, seconds, data_wait))
                start += seconds
        return rows

    @property
    def steps(self) -> int:
        """Steps that have ended so far."""
        return len(self._outcomes)

    # -- from one stage to the next ------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(self._hooks.phase(phase))

    def _begin(self, look: Callable[[], None], at: float | None = None) -> None:
        """From here on, or from the instant ``at``, steps are counted and timed anew; ``look`` is called when it is time to."""
        self._look, self._first_outcome = look, len(self._outcomes)
        self._anchor, self._timer = self._device.now() if at is None else at, StepTimer(self._device)

    def _begin_first_step(self, after: Callable[[], None]) -> None:
        self._enter("first_step")
        self._hooks.progress(Progress("first_step"))
        self._device.synchronize()
        self._begin(after)
        self._left = 1

    def _end_first_step(self) -> None:
        self._device.synchronize()
        begin, end = self._anchor, self._device.now()
        self._first_step = end - begin, end
        self._rows.append(StepRow("first", begin, end - begin, self._outcomes.data_waits[0]))

    def _after_first_step(self) -> None:
        self._end_first_step()
        self._enter("warm_up")
        self._begin(self._look_at_warm_up)
        self._left = self._ranks.agree(self._next_steps())

    def _look_at_warm_up(self) -> None:
        timer, elapsed = self._timer, self._device.now() - self._anchor
        self._hooks.progress(Progress("warm_up", timer.launched))
        over = not self._undecided and warm_up_over(timer.finished(), elapsed, self._policy, self._device.settle_seconds)
        if not self._ranks.agree(over or self._hooks.hurry()):
            self._left = self._ranks.agree(steps_until_next_look(timer.finished(), timer.launched))
            return
        self._device.synchronize()
        self._append_rows("warm_up")
        self._enter("measure")
        self._open_window()
        self._begin(self._look_at_window, at=self._window[0])
        self._left = self._ranks.agree(self._next_steps())

    def _look_at_window(self) -> None:
        timer = self._timer
        elapsed, before = self._device.now() - self._anchor, self._rows.seconds[1:]
        verdict = look(before, timer.finished(), timer.launched, elapsed, self._policy, at_least=self._device.window_seconds)
        self._hooks.progress(Progress("measure", timer.launched, verdict.interval, verdict.remaining))
        cut = not verdict.stop and self._hooks.hurry() and timer.launched >= FEWEST_STEPS
        decision = self._ranks.agree(_CUT if cut else verdict.stop)
        if decision == _CUT:
            self._flags.append("truncated")
        if decision:
            self._close_window()
        else:
            self._left = self._ranks.agree(self._next_steps())

    def _next_steps(self) -> int:
        timer = self._timer
        if self._look != self._look_at_window:
            return steps_until_next_look(timer.finished(), timer.launched)
        steps = steps_until_next_look(timer.finished() or [row.seconds for row in self._rows[1:]], timer.launched)
        if self._policy.max_steps is not None:
            steps = min(steps, self._policy.max_steps - timer.launched)
        return max(steps, 1)

    # -- the window ----------------------------------------------------------------------------------------------------

    def _open_window(self) -> None:
        """Everybody ready, sensors read. Reading takes its time, and on one rank of a node only: so everybody meets once more."""
        self._ranks.barrier()
        self._device.synchronize()
        self._hooks.edge()
        self._ranks.barrier()
        waited = self._meet()
        self._window, self._waits = (self._device.now(), 0.0), (waited, None)

    def _shut_window(self) -> None:
        """Everybody done, then sensors read."""
        self._device.synchronize()
        self._window = self._window[0], self._device.now()
        self._waits = self._waits[0], self._meet()
        self._hooks.edge()

    def _meet(self) -> float:
        """Wait for all ranks; how long that took this one [s]: the others came, and left, no more than that apart."""
        begin = self._device.now()
        self._ranks.barrier()
        return self._device.now() - begin

    def _close_window(self) -> None:
        self._shut_window()
        self._append_rows("measure")
        self.done = True

    def _late_window(self) -> None:
        """The loop ended in its warm-up: its second half is the window, without edges, and is not steady."""
        self._device.synchronize()
        self._append_rows("warm_up")  # all of it, to begin with
        count = (len(self._rows) - 1) // 2
        if count < FEWEST_STEPS:
            return
        for index in range(len(self._rows) - count, len(self._rows)):
            self._rows[index] = replace(self._rows[index], phase="measure")
        first, last = self._rows[-count], self._rows[-1]
        self._window = first.start, last.start + last.seconds
        self._flags += ["imprecise", "not_steady"]
        self.done = True

    def _append_rows(self, phase: StepPhase) -> None:
        start = self._anchor
        for seconds, data_wait in zip(self._timer.finished(), self._outcomes.data_waits[self._first_outcome :], strict=True):
            self._rows.append(StepRow(phase, start, seconds, data_wait))
            start += seconds
