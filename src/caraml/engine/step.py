"""One optimizer step: fetch, forward, backward, update. Nothing in it waits for the device, but steps that `auto` times for a graph."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from caraml.base.errors import InputError
from caraml.base.format import human
from caraml.engine.device import CudaGraph, Device
from caraml.engine.precision import autocast, freeze
from caraml.engine.ranks import copies, exchange_copies
from caraml.engine.replacement import WORTH
from caraml.engine.steps import Batches, Step, StepOutcome, rates
from caraml.suite.model import Point
from caraml.workloads.base import Task

if TYPE_CHECKING:
    from caraml.engine.parallel.divide import Divided


Watch = Callable[[Iterator[Any]], Iterator[Any]]
"""Gives back the same batches, and notes that they are taken."""
RESIDENT_BATCHES = 4
"""Batches that mode `compute` keeps on the device and repeats."""
ASIDE = 3
"""Steps on another stream before a capture, as torch asks for: libraries and the optimizer then have what they allocate once."""
TRIALS = 10
"""Steps of either way that `auto` times."""
LONG = 0.1
"""Seconds of a step that no launching takes: `auto` does not try for so long what is clear."""
LAUNCHING = 0.8
"""Share of a step's time that launching it takes from which on the device is taken to wait for the host."""

Passes = Callable[[Iterator[Any]], torch.Tensor]
"""Forward and backward passes over micro-batches, and the update; the mean loss. Launches everything, and waits for nothing."""


def make_step(
    task: Task,
    point: Point,
    device: torch.device,
    divided: Divided | None = None,
    watch: Watch = iter,
    *,
    clock: Device | None = None,
    told: dict[str, Any] | None = None,
) -> Step:
    """The step of a point's mode; ``divided`` is this process's part of a model that the point divides.

    ``watch`` sees every micro-batch that a step takes: in mode `compute` too, where the loader gives four and no more. ``clock`` tells, if
    it can, what it costs the device to wait for them. ``told`` gets what a record says of how the step is made.
    """
    told = {} if told is None else told
    source = task.batches
    if point.mode == "compute":
        source = itertools.cycle([next(task.batches) for _ in range(RESIDENT_BATCHES)])
    source = watch(source)
    if point.mode == "data":
        return partial(_read, Batches(source), point.accumulation * task.batches_per_step)
    if divided is not None and divided.part is not None:
        source = divided.part.cut(source)
    tells = clock is not None and clock.behind and point.mode != "compute"
    batches = Batches(source, clock if tells else None)
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
    return batches.outcome(None)


class TrainStep:
    """Forward, backward and update over ``accumulation`` micro-batches; gradients are exchanged in the last one only.

    ``graph`` makes what captures the step, where one is to be captured; ``told`` gets what a record says of that.
    """

    def __init__(
        self,
        task: Task,
        batches: Batches,
        point: Point,
        device: torch.device,
        *,
        graph: Callable[[], CudaGraph] | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:
        self._task, self._point, self._device = task, point, device
        self._batches = batches
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
        if self._point.cuda_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        total = self._run(self._batches.take() for _ in range(self._point.accumulation))
        for rate in self._rates:
            rate.step()
        scale = torch.as_tensor(self._scaler.scale(self._one)).clone() if self._scaler.is_enabled() else None
        return self._batches.outcome(total, scale, isinstance(self._run, GraphedPasses) and self._run.undecided)

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

    def __init__(self, task: Task, batches: Batches, point: Point, device: torch.device, told: dict[str, Any]) -> None:
        self._batches, self._point, self._device = batches, point, device
        self._model, self._predict = task.model.eval(), task.predict or task.loss
        if point.knobs.frozen_weights:
            self._model, told["frozen_weights"] = freeze(self._model, point.precision)
        if point.compile != "off":
            self._model.compile(mode=None if point.compile == "default" else point.compile)

    def __call__(self) -> StepOutcome:
        for _ in range(self._point.accumulation):
            batch = self._batches.take()
            with torch.inference_mode(), autocast(self._point.precision, self._device):
                self._predict(self._model, batch)
        return self._batches.outcome(None)


class OwnStep:
    """The step of a task that makes its own, with the tools it is lent (:class:`caraml.workloads.base.StepTools`)."""

    def __init__(self, task: Task, batches: Batches, point: Point, device: torch.device) -> None:
        assert task.own_step is not None
        if point.accumulation > 1:
            found = f"micro_batch: found {point.micro_batch}; workload {point.workload!r} makes its own step over the whole batch"
            raise InputError(f"{found}, expected global_batch / devices = {point.global_batch // point.world}")
        if point.cuda_graphs:
            found = f"compile: found {point.compile!r}, which replays CUDA graphs; workload {point.workload!r} makes its own step"
            raise InputError(f"{found} of several passes, expected 'default' or 'max-autotune-no-cudagraphs'")
        self._batches, self._point, self._device = batches, point, device
        self._scaler = torch.amp.GradScaler(device.type, enabled=point.precision == "fp16")
        self._one = torch.ones((), device=device)
        self._step = task.own_step(self)

    def __call__(self) -> StepOutcome:
        loss = self._step()
        scale = torch.as_tensor(self._scaler.scale(self._one)).clone() if self._scaler.is_enabled() else None
        return self._batches.outcome(loss.detach(), scale)

    def next_batch(self) -> Any:
        return self._batches.take()

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        return _wrapped(module, self._point, self._device)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self._point.precision, self._device)

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
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


# -- by one graph ------------------------------------------------------------------------------------------------------


def refusal(task: Task, point: Point, device: torch.device) -> str | None:
    """Why a training step is not captured, or ``None`` if it can be."""
    fused = all(group.get("fused") for group in task.optimizer.param_groups)
    reasons = {
        "not asked for": point.knobs.step_graph == "off",
        f"torch captures no graphs of {device.type} devices here": device.type != "cuda",
        "several ranks: they exchange gradients within the step": point.world > 1,
        "the workload makes its own step": task.own_step is not None,
        f"compile = {point.compile!r} replays graphs of its own": point.cuda_graphs,
        "fp16: the loss scaler decides about each update": point.precision == "fp16",
        "the optimizer is not fused, and may keep its count of steps on the host": not fused,
        "deterministic: a choice by time may differ between runs": point.knobs.step_graph == "auto" and point.deterministic,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Make learning rates tensors, which a captured update reads anew in each replay. Before schedules are made."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), device=device)


class GraphedPasses:
    """The passes of a step, by one graph of the device once it has been captured: the host launches it at once, not kernel by kernel.

    Forward and backward passes of all micro-batches, clipping and the update are captured once, after the first steps, and then replayed on
    buffers that keep their places: every batch is copied into them, and a learning rate that changes is a tensor. torch.compile's own
    graphs (`compile = "reduce-overhead"`) hold a pass each, leave the update out and take no accumulation; these hold compiled passes as
    well. CUDA's interface is used, for NVIDIA's and AMD's GPUs, because torch has no such one for all accelerators in its oldest release
    here. ``told`` is kept as a record has it.

    Called with the micro-batches of a step. The first call, and ``ASIDE`` more, run as usual; `auto` then times as many steps as
    ``TRIALS`` and captures only if launching them is what takes their time, and keeps the graph only if it is faster. Steps that take
    ``LONG`` are not tried. A step whose batches have other shapes runs as usual.
    """

    def __init__(self, passes: Passes, optimizer: torch.optim.Optimizer, asked: str, graph: CudaGraph, told: dict[str, Any]) -> None:
        self._passes, self._optimizer, self._asked, self._graph, self.told = passes, optimizer, asked, graph, told
        self._static: list[Any] = []
        self._loss = torch.zeros(())
        self._usual_seconds = 0.0
        self._act: Passes = self._first
        self._calls = 0
        self._begin = 0.0
        self.told |= {"asked": asked, "used": False, "why": "too few steps to decide", "left": 0}

    def __call__(self, batches: Iterator[Any]) -> torch.Tensor:
        """Launch the passes of one step; the mean loss, which nothing overwrites."""
        return self._act(batches)

    @property
    def undecided(self) -> bool:
        """Whether the steps to come may run in another way than the last one."""
        return self._act not in (self._passes, self._replayed)

    # -- before the capture --------------------------------------------------------------------------------------------

    def _first(self, batches: Iterator[Any]) -> torch.Tensor:
        self._calls += 1
        if self._calls == 1:
            return self._passes(batches)
        if self._calls == 1 + ASIDE:
            self._calls, self._act = 0, self._captured if self._asked == "on" else self._weighed
        return self._graph.aside(lambda: self._passes(batches))

    def _weighed(self, batches: Iterator[Any]) -> torch.Tensor:
        """A usual step by itself: whether it is short enough to be worth ``TRIALS``."""
        self._graph.synchronize()
        begin = time.perf_counter()
        loss = self._passes(batches)
        self._graph.synchronize()
        seconds = time.perf_counter() - begin
        if seconds < LONG:
            self._act = self._timed
        else:
            self._leave(f"a step takes {human(seconds, 's')}, which no launching does")
        return loss

    def _timed(self, batches: Iterator[Any]) -> torch.Tensor:
        """A usual step; after ``TRIALS`` of them, whether a graph is worth a trial."""
        loss, seconds = self._trial(self._passes, batches)
        if seconds is not None:
            launched, self._usual_seconds = seconds
            self.told |= {"usual_seconds": self._usual_seconds, "launching_seconds": launched}
            if launched < LAUNCHING * self._usual_seconds:
                self._leave(f"the device is busy: launching takes {human(launched, 's')} of {human(self._usual_seconds, 's')}")
            else:
                self._act = self._captured
        return loss

    def _trial(self, passes: Passes, batches: Iterator[Any]) -> tuple[torch.Tensor, tuple[float, float] | None]:
        """One of ``TRIALS`` steps; with the last, how long launching one took, and all of it [s]. Waiting for input counts for both."""
        if not self._calls:
            self._graph.synchronize()
            self._begin = time.perf_counter()
        loss = passes(batches)
        self._calls += 1
        if self._calls < TRIALS:
            return loss, None
        launched = time.perf_counter() - self._begin
        self._graph.synchronize()
        self._calls = 0
        return loss, (launched / TRIALS, (time.perf_counter() - self._begin) / TRIALS)

    # -- with the graph ------------------------------------------------------------------------------------------------

    def _captured(self, batches: Iterator[Any]) -> torch.Tensor:
        """Capture the passes over copies of these batches, and replay them once."""
        self._static = [pytree.tree_map_only(torch.Tensor, _like, batch) for batch in batches]
        groups = [group for group in self._optimizer.param_groups if "capturable" in group]
        try:
            for group in groups:  # torch asks for it; a fused update is the same with and without
                group["capturable"] = True
            self._loss = self._graph.capture(lambda: self._passes(iter(self._static)))
        except RuntimeError as error:
            self._optimizer.zero_grad(set_to_none=True)  # what the capture left there was never computed
            self._graph.drop()
            self._leave(f"capture failed: {error}".splitlines()[0][:300])
            static, self._static = self._static, []
            return self._passes(iter(static))
        finally:
            for group in groups:
                group["capturable"] = False
        leaves = pytree.tree_leaves(self._static)
        inputs = sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
        self.told |= {"used": True, "why": "asked for by name", "input_bytes": inputs}
        self._act = self._replayed if self._asked == "on" else self._tried
        self._graph.replay()
        return self._loss.clone()

    def _tried(self, batches: Iterator[Any]) -> torch.Tensor:
        """A replay; after ``TRIALS`` of them, which way is kept."""
        loss, times = self._trial(self._replayed, batches)
        if times is not None:
            seconds = times[1]
            self.told |= {"graph_seconds": seconds, "why": f"{human(seconds, 's')} instead of {human(self._usual_seconds, 's')}"}
            if seconds < WORTH * self._usual_seconds:
                self._act = self._replayed
            else:
                self._leave(f"no faster: {self.told['why']}")
                self._graph.drop()
                self._static = []
        return loss

    def _replayed(self, batches: Iterator[Any]) -> torch.Tensor:
        found = list[Any]()
        for static, batch in zip(self._static, batches, strict=True):
            if found or not _copied(static, batch):
                found.append(batch)
        if found:  # those before the first that does not fit lie in the buffers
            self.told["left"] += 1
            return self._passes(iter([*self._static[: len(self._static) - len(found)], *found]))
        self._graph.replay()
        return self._loss.clone()

    def _leave(self, why: str) -> None:
        self._act = self._passes
        self.told |= {"used": False, "why": why}


def _like(values: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, which ``clone`` does not keep of a part of a tensor: a compiled model would be compiled anew for
    others, within the capture."""
    if values.layout != torch.strided:
        return values.clone()  # sparse and ragged ones have no strides
    if any(stride == 0 and size > 1 for size, stride in zip(values.shape, values.stride(), strict=True)):
        return values.clone()  # several numbers in one place: nothing is copied into that
    kept = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=values.device)
    return kept.copy_(values, non_blocking=True)


def _copied(static: Any, batch: Any) -> bool:
    """Copy a batch into the buffers of an earlier one; False, and nothing is copied, if it is not alike in all but the tensors' values."""
    (into, form), (given, found) = pytree.tree_flatten(static), pytree.tree_flatten(batch)
    if form != found or not all(map(_alike, into, given)):
        return False
    for buffer, values in zip(into, given, strict=True):
        if isinstance(buffer, torch.Tensor):
            buffer.copy_(values, non_blocking=True)
    return True


def _alike(buffer: Any, values: Any) -> bool:
    if not isinstance(buffer, torch.Tensor) or not isinstance(values, torch.Tensor):
        return type(buffer) is type(values) and bool(buffer == values)
    kept = buffer.layout == torch.strided  # what is copied into others takes places of its own, which no graph has seen
    return kept and (buffer.shape, buffer.dtype, buffer.device) == (values.shape, values.dtype, values.device)
