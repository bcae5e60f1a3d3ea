"""What was measured of a point, all ranks taken together, which all metrics are made of. The slowest rank counts in every time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from caraml.results.record import Facts, Phase, Window
from caraml.suite.model import Point


@dataclass(frozen=True)
class Epoch:
    """One epoch. Times in seconds, of the slowest rank."""

    number: int
    whole: float
    """Training part and validation: EPICURE's t_epoch."""
    training: float
    """EPICURE's t_train."""
    batches: Sequence[float]
    """Time of each batch."""
    entire: bool
    """Whether every batch was trained and the epoch validated: not so where the batch system was about to end the job."""
    loss: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Measured:
    """A run from its start until its model is saved, and the window in it. Times in seconds, memory in bytes."""

    point: Point
    facts: Facts
    window: Window
    steps: Sequence[float]
    """Time of every step from the first on."""
    data_wait: float | None
    """Longest total wait for batches of any rank inside the window; ``None`` where the loop does not tell."""
    first_step_time: float
    time_to_first_step: float
    device_memory: int | None = None
    host_memory: int | None = None
    losses: Sequence[float] = ()
    """Every step's training loss from the first on, mean over the ranks; empty if the mode has none."""
    rank_steps: Sequence[float] = ()
    """Mean step of each rank in the window."""
    runtime: float = 0.0
    phases: Sequence[Phase] = ()
    """Finished phases; none overlap."""
    whole_data_wait: float | None = None
    """Longest wait for batches of any rank, over all steps."""
    validation_loss: float | None = None
    no_validation: str = "only mode train validates and saves"
    """Why there is no validation loss, or no saved model, if there is none."""
    epochs: Sequence[Epoch] = ()
    """Where training went by epochs."""
    epochs_seconds: float | None = None
    """From the first step to the end of the last epoch's validation."""
    flags: Sequence[str] = field(default=())

    @property
    def window_steps(self) -> Sequence[float]:
        """Time of every step of the window."""
        return self.steps[self.window.first_step : self.window.first_step + self.window.steps]

    @property
    def before(self) -> Sequence[float]:
        """Time of every step between the first and the window."""
        return self.steps[1 : self.window.first_step]

    @property
    def items_per_step(self) -> int:
        """Items of an optimizer step over all ranks."""
        return self.point.global_batch * self.facts.items_per_sample


def steps_per_epoch(facts: Facts, point: Point) -> int | None:
    """Optimizer steps of an epoch; ``None`` if the data has no epochs."""
    return None if facts.samples_per_epoch is None else max(facts.samples_per_epoch // point.global_batch, 1)
