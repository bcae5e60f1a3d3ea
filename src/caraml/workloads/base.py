"""The contract between a workload and the engine.

A workload says what is trained; the engine does everything else, the same for all. Torch is imported by a workload's ``build`` only, so
that suites can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from caraml.results.record import Facts

if TYPE_CHECKING:
    import torch

P = TypeVar("P", bound=BaseModel)


@dataclass(frozen=True)
class BuildContext(Generic[P]):
    """What a workload may know when it builds its task."""

    params: P
    device: torch.device
    rank: int
    world: int
    processes_on_node: int
    micro_batch: int
    seed: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Opens a named phase of the record, e.g. ``with ctx.phase("data"):`` around the preparation of input."""
    own_device: Any = None
    """The device that the workload brought itself."""


class StepTools(Protocol):
    """What the engine lends to a task that makes its own step, so that it is fed, wrapped and timed as every other."""

    def next_batch(self) -> Any:
        """The next micro-batch of this rank; the wait for it is counted."""
        ...

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module as the point asks for it: compiled, and inside DDP if there are several ranks."""
        ...

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass in the point's precision."""
        ...

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward pass of ``loss``, then one step of ``optimizer``, whose gradients are cleared."""
        ...


@dataclass
class Task:
    """Everything that the engine needs to train: built once per process, for this rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    """Endless; each is one micro-batch of this rank, already on the device."""
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    """Scalar training loss of a model on a batch. The model may be wrapped (DDP, compiled): call it, do not reach into it."""
    facts: Facts
    clip_norm: float | None = None
    """Largest gradient norm, if gradients are clipped."""
    own_step: Callable[[StepTools], Callable[[], torch.Tensor]] | None = None
    """For tasks whose step is more than forward, backward and update: makes, once, the function that does a step and returns its loss.
    ``loss`` then only serves to validate."""
    batches_per_step: int = 1
    """Micro-batches that a step of its own consumes."""
    predict: Callable[[torch.nn.Module, Any], Any] | None = None
    """What mode `inference` computes; without it, ``loss`` without gradients."""
    validation: Callable[[], Iterable[Any]] | None = None
    """The held-out batches, gone through once after training; ``None`` where the data has no such part."""
    close: Callable[[], None] = field(default=lambda: None)
    """Ends loader workers and whatever else the task holds."""


@dataclass(frozen=True)
class Workload(Generic[P]):
    """A name for the catalogue, the parameters it takes, and how to build it."""

    title: str
    params: type[P]
    build: Callable[[BuildContext[P]], Task]
    packages: tuple[str, ...] = ()
    """Names of packages that must be importable besides those that CARAML always brings."""
    device: Callable[[P], Any] | None = None
    """Makes a device of known speed and known peak in place of the machine's (or returns ``None`` to keep that): for proving the ruler."""
