"""What one rank measured: the one thing that ranks give each other after a measurement, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from caraml.engine.instruments import NodeSummary
from caraml.engine.steps import StepTable
from caraml.power.node import node_key


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
    resumed: float
    """When validation began: what is read where the window closes lies between this and ``trained``."""
    loss: float | None = None
    accuracy: float | None = None


@dataclass
class RankSummary:
    """What one rank measured. Times are its host's monotonic clock [s]."""

    begin: float
    """Of the window."""
    end: float
    rows: StepTable
    losses: list[float]
    """Of every step that has one."""
    first_step_time: float
    first_step_end: float
    skipped_updates: int
    """Updates of the window that the loss scaler skipped."""
    flags: list[str] = field(default_factory=list)
    epochs: list[EpochRow] = field(default_factory=list)
    """Where training went by epochs."""
    items: list[int] = field(default_factory=list)
    """Of every step of this rank, where the loop counts them itself."""
    clock: str = field(default_factory=node_key)
    """Whose monotonic clock the times are of: those of one node can be compared."""
    waits: tuple[float | None, float | None] = (None, None)
    """How long this rank waited for all others where the window opened, and where it had closed [s]."""
    device_memory: int | None = None
    """Peak of this rank's device [B]."""
    host_memory: int | None = None
    """Highest resident set of this rank [B]."""
    affinity: dict[str, Any] = field(default_factory=dict)
    """What `caraml.system.affinity.bind` did."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Damaged input files that this rank met, each with its reason."""
    node: NodeSummary | None = None
    """What the node's instruments say, from the rank that has them."""

    @property
    def window_rows(self) -> StepTable:
        """Rows of the window."""
        return self.rows.of_phase("measure")

    def to_data(self) -> dict[str, Any]:
        """Numbers, strings, bytes, lists and dictionaries, for :meth:`from_data`."""
        node = None if self.node is None else self.node.to_data()
        return {**vars(self), "rows": self.rows.to_data(), "epochs": [asdict(row) for row in self.epochs], "node": node}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankSummary:
        """The inverse of :meth:`to_data`."""
        node = None if data["node"] is None else NodeSummary.from_data(data["node"])
        epochs = [EpochRow(**row) for row in data["epochs"]]
        waits = tuple(data["waits"])
        return cls(**{**data, "waits": waits, "rows": StepTable.from_data(data["rows"]), "epochs": epochs, "node": node})
