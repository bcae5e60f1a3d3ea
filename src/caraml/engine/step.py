"""One optimizer step: fetch, forward, backward, update. Nothing in it waits for the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from caraml.base.errors import InputError
from caraml.engine.device import CudaGraph
from caraml.engine.graph import GraphedPasses, Passes, rates_on_device, refusal
from caraml.engine.precision import autocast, freeze
from caraml.engine.ranks import copies, exchange_copies
from caraml.engine.steps import Batches, Step, StepOutcome, rates
from caraml.suite.model import Point
from caraml.workloads.base import Task

if TYPE_CHECKING:
    from caraml.engine.parallel.divide import Divided


Watch = Callable[[Iterator[Any]], Iterator[Any]]
"""Gives back the same batches, and notes that they are taken."""
RESIDENT_BATCHES = 4
"""Batches that mode `compute` keeps on the device and repeats."""


def make_step(
    task: Task,
    point: Point,
    device: torch.device,
    divided: Divided | None = None,
    watch: Watch = iter,
    *,
    told: dict[str, Any] | None = None,
) -> Step:
    """The step of a point's mode; ``divided`` is this process's part of a model that the point divides.

    ``watch`` sees every micro-batch that a step takes: in mode `compute` too, where the loader gives four and no more. ``told`` gets what
    a record says of how the step is made.
    """
    told = {} if told is None else told
    batches = task.batches
    if point.mode == "compute":
        batches = itertools.cycle([next(task.batches) for _ in range(RESIDENT_BATCHES)])
    batches = watch(batches)
    if point.mode == "data":
        return partial(_read, Batches(batches), point.accumulation * task.batches_per_step)
    if divided is not None:
        from caraml.engine.parallel.step import DividedStep

        return DividedStep(task, divided, batches, point, device)
    if point.mode == "inference":
        return InferenceStep(task, batches, point, device, told)
    if task.own_step is not None:
        return OwnStep(task, batches, point, device)
    refused = refusal(task, point, device)
    told["step_graph"] = {"asked": point.knobs.step_graph, "used": False, "why": refused}
    return TrainStep(task, batches, point, device, graph=None if refused else lambda: CudaGraph(device), told=told["step_graph"])


def _read(batches: Batches, count: int) -> StepOutcome:
    for _ in range(count):
        batches.take()
    return StepOutcome(None, batches.waited())


class TrainStep:
    """Forward, backward and update over ``accumulation`` micro-batches; gradients are exchanged in the last one only.

    ``graph`` makes what captures the step, where one is to be captured; ``told`` gets what a record says of that.
    """

    def __init__(
        self,
        task: Task,
        batches: Iterator[Any],
        point: Point,
        device: torch.device,
        *,
        graph: Callable[[], CudaGraph] | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:
        self._task, self._point, self._device = task, point, device
        self._batches = Batches(batches)
        self._scaler = torch.amp.GradScaler(device.type, enabled=point.precision == "fp16")
        self._model = _wrapped(task.model, point, device)
        self._one = torch.ones((), device=device)
        self._run: Passes = self._passes
        if graph is not None:
            if task.rate is not None:
                rates_on_device(task.optimizer, device)
            self._run = GraphedPasses(self._passes, task.optimizer, point.knobs.step_graph, graph(), {} if told is None else told)
        self._rates = rates([task.optimizer], task.rate)

    def __call__(self) -> StepOutcome:
        """Launch one step."""
        if self._point.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        total = self._run(self._batches.take() for _ in range(self._point.accumulation))
        for rate in self._rates:
            rate.step()
        scale = torch.as_tensor(self._scaler.scale(self._one)).clone() if self._scaler.is_enabled() else None
        return StepOutcome(total, self._batches.waited(), scale, isinstance(self._run, GraphedPasses) and self._run.undecided)

    def _passes(self, batches: Iterator[Any]) -> torch.Tensor:
        """Mean loss of the micro-batches, by which the weights have been updated."""
        total, count = torch.zeros((), device=self._device), self._point.accumulation
        for index, batch in enumerate(batches):
            with exchange_copies(self._model, last=index == count - 1):
                with autocast(self._point.precision, self._device):
                    loss = self._task.loss(self._model, batch) / count
                torch.as_tensor(self._scaler.scale(loss)).backward()
            total += loss.detach()  # a copy: a graph replay overwrites the loss itself
        self._update()
        return total

    def _update(self) -> None:
        optimizer, clip = self._task.optimizer, self._task.clip_norm
        if clip is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self._task.model.parameters(), clip)
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)


class InferenceStep:
    """Forward passes over ``accumulation`` micro-batches, without gradients. Ranks do not meet."""

    def __init__(self, task: Task, batches: Iterator[Any], point: Point, device: torch.device, told: dict[str, Any]) -> None:
        self._batches, self._point, self._device = Batches(batches), point, device
        self._model, self._predict = task.model.eval(), task.predict or task.loss
        if point.knobs.frozen_weights:
            self._model, told["frozen_weights"] = freeze(self._model, point.precision)
        if point.compile != "off":
            self._model.compile(mode=None if point.compile == "default" else point.compile)

    def __call__(self) -> StepOutcome:
        """Launch one step."""
        for _ in range(self._point.accumulation):
            batch = self._batches.take()
            with torch.inference_mode(), autocast(self._point.precision, self._device):
                self._predict(self._model, batch)
        return StepOutcome(None, self._batches.waited())


class OwnStep:
    """The step of a task that makes its own, with the tools it is lent (:class:`caraml.workloads.base.StepTools`)."""

    def __init__(self, task: Task, batches: Iterator[Any], point: Point, device: torch.device) -> None:
        assert task.own_step is not None
        if point.accumulation > 1:
            raise InputError(
                f"micro_batch: found {point.micro_batch}; workload {point.workload!r} makes its own step over the whole batch, "
                f"expected global_batch / devices = {point.global_batch // point.world}"
            )
        if point.cuda_graphs:
            raise InputError(
                f"compile: found {point.compile!r}, which replays CUDA graphs; workload {point.workload!r} makes its own step of several "
                "passes, expected 'default' or 'max-autotune-no-cudagraphs'"
            )
        self._batches, self._point, self._device = Batches(batches), point, device
        self._scaler = torch.amp.GradScaler(device.type, enabled=point.precision == "fp16")
        self._one = torch.ones((), device=device)
        self._step = task.own_step(self)

    def __call__(self) -> StepOutcome:
        """Launch one step."""
        loss = self._step()
        scale = torch.as_tensor(self._scaler.scale(self._one)).clone() if self._scaler.is_enabled() else None
        return StepOutcome(loss.detach(), self._batches.waited(), scale)

    def next_batch(self) -> Any:
        """The next micro-batch of this rank; the wait for it is counted."""
        return self._batches.take()

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module compiled if the point asks for it, and inside DDP if there are several ranks."""
        return _wrapped(module, self._point, self._device)

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass in the point's precision."""
        return autocast(self._point.precision, self._device)

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward pass of ``loss``, then one step of ``optimizer``, whose gradients are cleared."""
        torch.as_tensor(self._scaler.scale(loss)).backward()
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad(set_to_none=True)


def _wrapped(model: torch.nn.Module, point: Point, device: torch.device) -> torch.nn.Module:
    """The model as the step calls it: compiled if asked, inside DDP if there are several ranks."""
    if point.compile != "off":
        # The module itself is compiled in place, so that DDP stays outermost and its no_sync() is at hand.
        model.compile(mode=None if point.compile == "default" else point.compile)
    return copies(model, device) if point.world > 1 else model
