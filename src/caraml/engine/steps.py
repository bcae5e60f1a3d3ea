"""What is kept of every step, in few bytes: a run of a day has millions of steps, and its memory must not grow with them; and what one rank
measured, as plain data, which ranks give each other after a measurement."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import compress
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.optim.lr_scheduler import LambdaLR

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.base.processes import node_key
from caraml.engine.device import Device, Take
from caraml.engine.instruments import NodeSummary

StepPhase = Literal["first", "warm_up", "measure", "after"]
PHASES: tuple[StepPhase, ...] = get_args(StepPhase)
_BLOCK = 1024
"""Scalars on the device that are put together into one tensor: each alone takes half a kilobyte of a GPU."""


@dataclass(frozen=True)
class StepRow:
    """One step of one rank. Times in seconds."""

    phase: StepPhase
    start: float
    seconds: float
    data_wait: float
    """What it lost to its input, of this rank alone."""


class StepTable:
    """Rows of steps, kept as columns of 25 bytes a step; ``seconds`` and ``data_waits`` are those of all steps."""

    def __init__(self, rows: Iterable[StepRow] = ()) -> None:
        self._phases, self._starts, self.seconds, self.data_waits = array("B"), array("d"), array("d"), array("d")
        for row in rows:
            self.append(row)

    def append(self, row: StepRow) -> None:
        self._phases.append(PHASES.index(row.phase))
        self._starts.append(row.start)
        self.seconds.append(row.seconds)
        self.data_waits.append(row.data_wait)

    def chain(self, phase: StepPhase, start: float, seconds: Sequence[float], data_waits: Sequence[float]) -> float:
        """Append steps of a phase that follow each other, the first of them from ``start`` on; when the last of them ends."""
        assert len(seconds) == len(data_waits)
        edges = np.cumsum(np.concatenate([[start], seconds]))
        self._phases.extend(array("B", [PHASES.index(phase)]) * len(seconds))
        self._starts.frombytes(edges[:-1].tobytes())
        self.seconds.extend(seconds)
        self.data_waits.extend(data_waits)
        return float(edges[-1])

    def since(self, first: int) -> StepTable:
        """Its steps from number ``first`` on."""
        found = StepTable()
        for name, column in found.columns().items():
            column.extend(self.columns()[name][first:])
        return found

    def to_data(self) -> dict[str, bytes]:
        """Its columns as bytes, for :meth:`from_data` on a host of the same byte order."""
        return {name: column.tobytes() for name, column in self.columns().items()}

    @classmethod
    def from_data(cls, data: dict[str, bytes]) -> StepTable:
        table = cls()
        for name, column in table.columns().items():
            column.frombytes(data[name])
        return table

    def of_phase(self, phase: StepPhase) -> StepTable:
        chosen, found = [code == PHASES.index(phase) for code in self._phases], StepTable()
        for name, column in found.columns().items():
            column.extend(compress(self.columns()[name], chosen))
        return found

    def columns(self) -> dict[str, array[Any]]:
        """Its columns by name; phases are numbers of :data:`PHASES`."""
        return {"phases": self._phases, "starts": self._starts, "seconds": self.seconds, "data_waits": self.data_waits}

    def __len__(self) -> int:
        return len(self._phases)

    def __iter__(self) -> Iterator[StepRow]:
        return map(StepRow, map(PHASES.__getitem__, self._phases), self._starts, self.seconds, self.data_waits)

    def __getitem__(self, index: int) -> StepRow:
        return StepRow(PHASES[self._phases[index]], self._starts[index], self.seconds[index], self.data_waits[index])

    def put(self, index: int, phase: StepPhase) -> None:
        """Count a step to another phase."""
        self._phases[index] = PHASES.index(phase)


class Scalars:
    """A growing series of scalar tensors, none of which is waited for until their values are asked for."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._latest: list[torch.Tensor] = []

    def append(self, value: torch.Tensor | None) -> None:
        if value is None:
            return
        self._latest.append(value)
        if len(self._latest) == _BLOCK:
            self._blocks.append(torch.stack(self._latest).float())
            self._latest.clear()

    def tolist(self) -> list[float]:
        """The values; waits for the device."""
        rest = [torch.stack(self._latest).float()] if self._latest else []
        values: list[float] = torch.cat([*self._blocks, *rest]).tolist() if self._blocks or rest else []
        return values


class Outcomes:
    """What steps left behind: of each its loss, and the loss scale after it, where there are such."""

    def __init__(self) -> None:
        self.losses, self.scales, self._count = Scalars(), Scalars(), 0

    def append(self, outcome: StepOutcome) -> None:
        self._count += 1
        self.losses.append(outcome.loss)
        self.scales.append(outcome.scale)

    def __len__(self) -> int:
        return self._count


@dataclass
class StepOutcome:
    """What a step leaves behind without being asked to finish."""

    loss: torch.Tensor | None
    """Mean loss of the step's micro-batches, on the device; ``None`` in a mode that trains nothing, and on a process that does not see the
    loss."""
    data_wait: float
    """Seconds that the host waited for batches."""
    scale: torch.Tensor | None = None
    """Loss scale after the step, on the device; a fall means that the update was skipped."""
    undecided: bool = False
    """Whether the step still tries ways to run, so that none of its kind may be measured."""
    takes: Sequence[Take] = ()
    """The waits for batches, where a device tells what they cost it."""


Step = Callable[[], StepOutcome]


class Batches:
    """Batches as steps take them, and how long that takes: the host, and of a ``device`` that works behind the host's back, the device."""

    def __init__(self, source: Iterator[Any], device: Device | None = None) -> None:
        self._source, self._device = source, device
        self._now = time.monotonic if device is None else device.now
        self._waited, self._takes = 0.0, list[Take]()

    def take(self) -> Any:
        """The next one. Raises ``InputError`` where there is none."""
        before = self._device.mark() if self._device is not None and self._takes else None
        begin = self._now()
        try:
            batch = next(self._source)
        except StopIteration:
            raise InputError("the workload's batches came to an end; expected endless ones", "docs/extend/workload.md") from None
        seconds = self._now() - begin
        self._waited += seconds
        if self._device is not None:
            self._takes.append(Take(begin, seconds, before, self._device.mark()))
        return batch

    def outcome(self, loss: torch.Tensor | None, scale: torch.Tensor | None = None, undecided: bool = False) -> StepOutcome:
        """What a step leaves behind that took all batches since the one before."""
        waited, takes, self._waited, self._takes = self._waited, self._takes, 0.0, []
        return StepOutcome(loss, waited, scale, undecided, takes)


def samples_in(batch: Any) -> int | None:
    """Samples of a batch: the first dimension of its tensors, wherever in lists, tuples and dictionaries they are; of packed sequences
    their number. ``None`` where that is not the same everywhere, as in a graph, or there is nothing to see it by."""
    found = {*_first_dimensions(batch)}
    return found.pop() if len(found) == 1 else None


def _first_dimensions(part: Any) -> Iterator[int]:
    if isinstance(part, PackedSequence):  # a tuple, too, of which one member has a number for each time step, in the host's memory
        yield int(part.batch_sizes[0])
    elif isinstance(part, list | tuple | Mapping):
        for inner in part.values() if isinstance(part, Mapping) else part:
            yield from _first_dimensions(inner)
    elif getattr(part, "ndim", 0):  # a tensor's, or an array's: known without a word from the device
        yield part.size(0) if getattr(part, "is_nested", False) else part.shape[0]


def _alike(batch: Any) -> bool:
    """Whether these are tensors of one shape in a list: they may be samples one by one."""
    return isinstance(batch, list) and len({getattr(one, "shape", None) for one in batch}) == 1


def full(batches: Iterator[Any], samples: int, tell: Callable[[Any], int | None] | None) -> Iterator[Any]:
    """The same batches, each with as many samples as a rate counts for it: ``tell``, or else :func:`samples_in`, says how many it has.

    Raises ``InputError`` at one of another size.
    """
    tell = tell or samples_in

    def look(batch: Any) -> Any:
        found = tell(batch)
        if found is not None and found != samples and not (_alike(batch) and len(batch) == samples):
            raise InputError(
                f"the workload's batches: found one of {count(found, 'sample')}, expected micro_batch = {samples}, which the rate counts",
                "leave out a last, smaller one (drop_last=True), or say Task(samples_in=...) where samples are no first dimension",
            )
        return batch

    return map(look, batches)


def rates(optimizers: Sequence[torch.optim.Optimizer], factor: Callable[[int], float] | None) -> list[LambdaLR]:
    """Schedules that multiply each optimizer's learning rate by ``factor(step)``; none for a constant rate."""
    return [] if factor is None else [LambdaLR(optimizer, factor) for optimizer in optimizers]


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
        return self.rows.of_phase("measure")

    def to_data(self) -> dict[str, Any]:
        """Numbers, strings, bytes, lists and dictionaries, for :meth:`from_data`."""
        node = None if self.node is None else self.node.to_data()
        return {**vars(self), "rows": self.rows.to_data(), "epochs": [asdict(row) for row in self.epochs], "node": node}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> RankSummary:
        node = None if data["node"] is None else NodeSummary.from_data(data["node"])
        epochs = [EpochRow(**row) for row in data["epochs"]]
        waits = tuple(data["waits"])
        return cls(**{**data, "waits": waits, "rows": StepTable.from_data(data["rows"]), "epochs": epochs, "node": node})
