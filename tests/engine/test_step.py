"""One optimizer step against arithmetic done by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from caraml.engine.step import make_step
from caraml.metrics.model import Facts
from caraml.workloads.base import Task
from tests.conftest import MakePoint

FACTS = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="none")
CPU = torch.device("cpu")


def task(batches: Iterator[torch.Tensor]) -> Task:
    """One weight, which starts at 0 and learns the mean of what it is shown by the loss ``(w - x)^2 / 2``."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Task(model, optimizer, batches, lambda net, x: ((net(torch.ones_like(x)) - x) ** 2).mean() / 2, FACTS)


def test_micro_batches_together_are_the_whole_batch(make_point: MakePoint) -> None:
    """With rate 1 the weight becomes the mean of the batch: 2.5 for 1, 2, 3, 4, whether it comes at once or in two halves."""
    whole = task(iter([torch.tensor([[1.0], [2.0], [3.0], [4.0]])]))
    halves = task(iter([torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]))
    at_once = make_step(whole, make_point(), CPU)()
    in_two = make_step(halves, make_point(micro_batch=2), CPU)()
    for trained in (whole, halves):
        assert trained.model.weight.item() == pytest.approx(2.5)  # type: ignore[operator, union-attr]
    truth = (1 + 4 + 9 + 16) / 4 / 2
    assert at_once.loss is not None and in_two.loss is not None
    assert (at_once.loss.item(), in_two.loss.item()) == (pytest.approx(truth), pytest.approx(truth))


def test_waiting_for_batches_is_counted(make_point: MakePoint) -> None:
    def slow() -> Iterator[torch.Tensor]:
        while True:
            time.sleep(0.02)
            yield torch.ones(2, 1)

    outcome = make_step(task(slow()), make_point(micro_batch=2), CPU)()
    assert outcome.data_wait >= 0.04
