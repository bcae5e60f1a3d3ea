"""The validation loss after a window: bounded, from all over the held-out data, and each sample of the same weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from caraml.engine.afterwards import validate, validation_loss
from caraml.engine.ranks import Ranks
from caraml.metrics.model import Facts
from caraml.workloads.base import VALIDATION_BATCHES, Task


class Divisible:
    """Batches that know their number: every ``world``-th from ``rank`` on."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def share(self, rank: int, world: int) -> Iterator[float]:
        return iter(self.values[rank::world])


def validated(held_out: Callable[[], Iterable[Any]]) -> tuple[float | None, list[float]]:
    """The loss of a model that answers with its input, and what it was asked."""
    asked: list[float] = []

    def loss(model: torch.nn.Module, batch: float) -> torch.Tensor:
        asked.append(batch)
        return torch.tensor(batch)

    model = torch.nn.Linear(1, 1)
    facts = Facts(item="sample", items_per_sample=1, parameters=2, flops_per_item=1.0, flops_formula="none")
    task = Task(model, torch.optim.SGD(model.parameters()), iter([]), loss, facts, validation=held_out)
    return validation_loss(task, "fp32", torch.device("cpu")), asked


def test_only_so_many_batches_are_asked_for() -> None:
    def endless() -> Iterator[float]:
        number = 0.0
        while True:
            yield number
            number += 1

    loss, asked = validated(endless)
    assert asked == [float(number) for number in range(VALIDATION_BATCHES)] and loss == (VALIDATION_BATCHES - 1) / 2


def test_they_come_from_all_over_data_that_can_be_divided() -> None:
    _, asked = validated(lambda: Divisible([float(number) for number in range(1600)]))
    assert asked == [100.0 * number for number in range(VALIDATION_BATCHES)]


def test_the_end_of_the_data_counts_too() -> None:
    """Of 31 batches in the order of classes the first 16 are those of half of the classes."""
    _, asked = validated(lambda: Divisible([float(number) for number in range(31)]))
    assert asked == [2.0 * number for number in range(VALIDATION_BATCHES)]


def test_few_batches_are_all_used() -> None:
    loss, asked = validated(lambda: Divisible([1.0, 2.0, 6.0]))
    assert asked == [1.0, 2.0, 6.0] and loss == 3.0


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: [x, x[:0]], lambda x: {"field": {"truth": x}}])
def test_a_smaller_last_batch_weighs_as_many_samples_as_it_has(wrapped: Callable[[torch.Tensor], Any]) -> None:
    """Nine samples in batches of four: the mean of 0 to 8 is 4, that of the batches' means 1.5, 5.5 and 8 would be 5."""

    def first(batch: Any) -> torch.Tensor:
        return first(next(iter(batch.values() if isinstance(batch, dict) else batch))) if not isinstance(batch, torch.Tensor) else batch

    model = torch.nn.Linear(1, 1)
    facts = Facts(item="sample", items_per_sample=1, parameters=2, flops_per_item=1.0, flops_formula="none")
    held_out = [wrapped(part) for part in torch.arange(9.0).split(4)]
    task = Task(model, torch.optim.SGD(model.parameters()), iter([]), lambda _, batch: first(batch).mean(), facts)
    task.validation = lambda: iter(held_out)
    assert validation_loss(task, "fp32", torch.device("cpu")) == 4.0
    assert validate(task, "fp32", torch.device("cpu"), Ranks()) == (4.0, None)


def test_a_task_says_how_many_samples_a_held_out_batch_has() -> None:
    """Two graphs of 3 nodes and one of 6: the mean of a graph's loss, whatever nodes it has."""
    model = torch.nn.Linear(1, 1)
    facts = Facts(item="sample", items_per_sample=1, parameters=2, flops_per_item=1.0, flops_formula="none")
    held_out = [(torch.ones(6), torch.arange(3)), (torch.full((6,), 4.0), torch.arange(2))]  # nodes, and where graphs begin and end
    task = Task(model, torch.optim.SGD(model.parameters()), iter([]), lambda _, batch: batch[0].mean(), facts)
    task.validation, task.samples_in = lambda: iter(held_out), lambda batch: len(batch[1]) - 1
    assert validation_loss(task, "fp32", torch.device("cpu")) == 2.0
    assert validate(task, "fp32", torch.device("cpu"), Ranks()) == (2.0, None)


class OfSingles(torch.Tensor):
    """On a device without numbers of 64 bits, such as Apple's, until it is brought to the host."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.double:
            raise TypeError("the framework doesn't support float64")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found


def test_a_device_without_doubles_is_validated() -> None:
    model = torch.nn.Linear(1, 1)
    facts = Facts(item="sample", items_per_sample=1, parameters=2, flops_per_item=1.0, flops_formula="none")
    task = Task(model, torch.optim.SGD(model.parameters()), iter([]), lambda _, batch: batch.mean(), facts)
    task.judge = lambda _, batch: torch.tensor([batch.sum(), 1.0, len(batch)]).as_subclass(OfSingles)
    task.validation = lambda: iter(torch.arange(9.0).split(4))
    assert validate(task, "fp32", torch.device("cpu"), Ranks()) == (4.0, 3 / 9)
