"""The measuring loop: first step, warm-up, and one window whose two ends are the edges of rate, time and energy.

Whoever trains tells it where each step ends (:meth:`MeasuringLoop.step_ended`); it decides when to look, where the window opens and
closes. Inside the window nothing waits for the device, unless the host is far ahead of it, and nothing is printed; ranks exchange one
integer at each look. The wall time of the window runs from one synchronisation to the next on every rank, and the slowest rank's time
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from caraml.base.stats import Interval
from caraml.engine.control import look, steps_until_next_look, warm_up_over
from caraml.engine.device import Device, StepTimer
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Outcomes, RankSummary, Step, StepOutcome, StepPhase, StepRow, StepTable
from caraml.suite.model import Policy

FEWEST_STEPS = 4
"""Below that a window has no spread, so even a hurried one waits for them."""
_STOP, _CUT = -1, -2
"""What ranks agree on to end a stage, and to end a window early; otherwise on the steps until the next look."""


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
    meanwhile: Callable[[], None] = lambda: None
    """Called after a step, about as often as a short window is looked at: looks at a long one are a twentieth of its steps apart."""


class MeasuringLoop:
    """Measures the steps that it is told of. A context manager: the first step begins where it is entered."""

    def __init__(self, device: Device, ranks: Ranks, policy: Policy, hooks: Hooks, *, paces: int = 1) -> None:
        """``paces``: of how many ranks each goes at its own; such do not wait for each other in steps, nor shall they at looks."""
        self._device, self._ranks, self._policy, self._hooks = device, ranks, policy, hooks
        self._paces = paces
        self._late = paces > 1 and policy.max_steps is None  # a number of steps is exact only if all know at once that it is reached
        self._decided: Callable[[], int] | None = None
        """Of late ranks: waits for what was decided at the look before."""
        self._rows, self._outcomes = StepTable(), Outcomes()
        self._flags: list[str] = []
        self._phase = ExitStack()
        self._first_step = (0.0, 0.0)
        self._window = (0.0, 0.0)
        self._waits: tuple[float | None, float | None] = (None, None)
        self._counted = 0, 0.0
        """Steps of the running stretch, and when the last of them ended: as far as they were asked for."""
        self._undecided = False
        self._kept = False
        """Whether the rows of the current stage are in the table already."""
        self._until_meanwhile = 0
        self._look: Callable[[], None] = lambda: None
        self.done = False
        """Whether the window is closed: steps after it are not measured."""

    # -- what the owner calls ------------------------------------------------------------------------------------------

    def __enter__(self) -> MeasuringLoop:
        """Begin with the first step. Collective: every rank measures."""
        self._begin_first_step()
        return self

    def __exit__(self, *error: object) -> None:
        self._phase.close()

    def step_ended(self, outcome: StepOutcome) -> bool:
        """A step has been launched to its end. False once enough was measured."""
        if self.done:
            return False
        self._outcomes.append(outcome)
        self._undecided = outcome.undecided
        self._timer.step_ended(outcome.data_wait, outcome.takes)
        self._left -= 1
        self._until_meanwhile -= 1
        if self._until_meanwhile <= 0:
            self._until_meanwhile = steps_until_next_look(self._timer.read, 0)
            self._hooks.meanwhile()
        if self._left <= 0:  # below, where what the owner raised from a signal cut a look short
            self._look()
        return not self.done

    def run(self, step: Step) -> RankSummary:
        """Measure a step that can be called as often as it takes."""
        with self:
            while self.step_ended(step()):
                pass
        return self.summary()

    def end(self) -> None:
        """No more steps will come: an open window ends with its last step, and of a warm-up the second half is the window if it has enough
        steps. That goes for a window, too, that has too few."""
        if self._look == self._look_at_window and self._timer.launched >= FEWEST_STEPS:
            self._close_window()
            begin, end = self._window  # what the owner did after its last step is no part of it
            self._window = begin, min(end, begin + sum(self._timer.finished()))
            self._waits = self._waits[0], None  # for those who left their loops later: that bounds no distance of last steps
        elif self._look in (self._look_at_warm_up, self._look_at_window):
            self._late_window()

    def summary(self) -> RankSummary:
        """What this rank measured, once it is done. Waits for the device."""
        scales, losses = self._outcomes.scales.tolist(), self._outcomes.losses.tolist()
        inside = (index for index, row in enumerate(self._rows) if row.phase == "measure" and index > 0)
        skipped = sum(scales[index] < scales[index - 1] for index in inside) if scales else 0
        return RankSummary(*self._window, self._rows, losses, *self._first_step, skipped, self._flags, waits=self._waits)

    def so_far(self, first: int = 0) -> StepTable:
        """The steps that are known to have finished, from number ``first`` on. Does not ask the device: it may be what has failed."""
        rows, phase = self._rows.since(first), self._timed_phase
        if phase is None or self._kept:
            return rows
        known = max(first - len(self._rows), 0)
        counted, start = self._counted if self._counted[0] <= known else (0, self._anchor)
        start += sum(self._timer.read[counted:known])
        waits = self._timer.lost[known:]
        seconds = self._timer.read[known : known + len(waits)]
        self._counted = known + len(seconds), rows.chain(phase, start, seconds, waits[: len(seconds)])
        return rows

    @property
    def _timed_phase(self) -> StepPhase | None:
        """Phase of the steps that are being timed one after another; ``None`` before they are."""
        phases: dict[Callable[[], None], StepPhase] = {self._look_at_warm_up: "warm_up", self._look_at_window: "measure"}
        return phases.get(self._look)

    @property
    def steps(self) -> int:
        return len(self._outcomes)

    # -- from one stage to the next ------------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self._phase.close()
        self._phase.enter_context(self._hooks.phase(phase))

    def _begin(self, look: Callable[[], None], at: float | None = None) -> None:
        """From here on, or from the instant ``at``, steps are counted and timed anew; ``look`` is called when it is time to."""
        self._anchor, self._timer = self._device.now() if at is None else at, StepTimer(self._device)
        self._counted = 0, self._anchor
        self._look, self._kept = look, False

    def _begin_first_step(self) -> None:
        self._enter("first_step")
        self._hooks.progress(Progress("first_step"))
        self._device.synchronize()
        self._begin(self._after_first_step)
        self._left = 1

    def _end_first_step(self) -> None:
        self._device.synchronize()
        begin, end = self._anchor, self._device.now()
        self._first_step = end - begin, end
        self._timer.finished()
        self._rows.append(StepRow("first", begin, end - begin, self._timer.lost[0]))

    def _after_first_step(self) -> None:
        self._end_first_step()
        self._enter("warm_up")
        self._begin(self._look_at_warm_up)
        self._left = self._stride = self._ranks.agree(self._next_steps())

    def _look_at_warm_up(self) -> None:
        timer, elapsed = self._timer, self._device.now() - self._anchor
        self._hooks.progress(Progress("warm_up", timer.launched))
        over = not self._undecided and warm_up_over(timer.finished(), elapsed, self._policy, self._device.settle_seconds)
        stop = over or self._hooks.hurry()
        if not self._ended(_STOP if stop else steps_until_next_look(timer.finished(), timer.launched)):
            return
        self._device.synchronize()
        self._append_rows("warm_up")
        self._enter("measure")
        self._open_window()
        self._begin(self._look_at_window, at=self._window[0])
        self._left = self._stride = self._ranks.agree(self._next_steps())

    def _look_at_window(self) -> None:
        timer = self._timer
        elapsed, before = self._device.now() - self._anchor, self._rows.seconds[1:]
        shortest = self._device.window_seconds
        verdict = look(before, timer.finished(), timer.launched, elapsed, self._policy, at_least=shortest, paces=self._paces)
        self._hooks.progress(Progress("measure", timer.launched, verdict.interval, verdict.remaining))
        cut = not verdict.stop and self._hooks.hurry() and timer.launched >= FEWEST_STEPS
        decision = self._ended(_CUT if cut else _STOP if verdict.stop else self._next_steps())
        if decision == _CUT:
            self._flags.append("truncated")
        if decision:
            self._close_window()

    def _ended(self, decision: int) -> int:
        """Whether the ranks go on to the next stage, and why, by rank 0's decision: that, or the steps until the next look.

        Late ranks go by its decision at the look before. So each waits only for those that are farther behind than from one look to the
        next: waiting for all at every look, they would be as slow as the slowest of them in every stretch between two.
        """
        if not self._late:
            found = self._ranks.agree(decision)
        else:
            before, self._decided = self._decided, self._ranks.agree_later(decision)
            found = before() if before is not None else self._stride
        if found > 0:
            self._left = self._stride = found
            return 0
        self._decided = None  # all ranks have asked, or will before they meet
        return found

    def _next_steps(self) -> int:
        timer = self._timer
        if self._look != self._look_at_window:
            return steps_until_next_look(timer.finished(), timer.launched)
        steps = steps_until_next_look(timer.finished() or self._rows.seconds[1:], timer.launched)
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
        """The loop ended in its warm-up, or right after it: its second half is the window, without edges, and is not steady."""
        self._device.synchronize()
        opened = self._look == self._look_at_window
        after = len(self._rows)
        self._append_rows("after" if opened else "warm_up")  # all of it, to begin with
        ended = after if opened else len(self._rows)
        count = (ended - 1) // 2
        if count < FEWEST_STEPS:
            return
        for index in range(ended - count, ended):
            self._rows.put(index, "measure")
        first, last = self._rows[ended - count], self._rows[ended - 1]
        self._window, self._waits = (first.start, last.start + last.seconds), (None, None)
        self._flags += ["imprecise", "not_steady"]
        self.done = True

    def _append_rows(self, phase: StepPhase) -> None:
        self._rows.chain(phase, self._anchor, self._timer.finished(), self._timer.lost)
        self._kept = True  # what fails from here on leaves no further rows to be rescued
