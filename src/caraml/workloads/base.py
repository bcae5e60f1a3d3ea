"""The contract between a workload and the engine.

A workload says what is trained; the engine does everything else, the same for all. Torch is imported by a workload's ``build`` only, so
that suites can be checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
    close: Callable[[], None] = field(default=lambda: None)
    """Ends loader workers and whatever else the task holds."""


@dataclass(frozen=True)
class Workload(Generic[P]):
    """A name for the catalogue, the parameters it takes, and how to build it."""

    title: str
    params: type[P]
    build: Callable[[BuildContext[P]], Task]
