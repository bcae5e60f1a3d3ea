"""The optimizer step of a divided model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from caraml.engine.outcome import StepOutcome
from caraml.engine.parallel import data_parallel, fsdp
from caraml.engine.parallel.divide import Divided
from caraml.engine.parallel.gradients import DividedScaler, clip
from caraml.engine.parallel.pipeline import Pipeline
from caraml.engine.parallel.tensor import around_step
from caraml.engine.precision import autocast
from caraml.engine.rate import rates
from caraml.suite.model import Point
from caraml.workloads.base import Task


class DividedStep:
    """Forward, backward and update of this process's part over ``accumulation`` micro-batches."""

    def __init__(self, task: Task, divided: Divided, batches: Iterator[Any], point: Point, device: torch.device) -> None:
        assert task.division is not None
        self._task, self._divided, self._batches, self._point, self._device = task, divided, batches, point, device
        self._scaler = DividedScaler(device.type, enabled=point.precision == "fp16")
        self._one = torch.ones((), device=device)
        self._scaler.scale(self._one)  # makes the scale also where no loss is ever scaled
        self._rates = rates(divided.optimizers, task.rate)
        self._pipeline = None
        if point.placement.pp > 1:
            self._pipeline = Pipeline(divided.stages, task.division, point, divided.mesh, device=device, loss=self._scaled)

    def __call__(self) -> StepOutcome:
        """Launch one step."""
        loss: torch.Tensor | None
        begin = time.monotonic()
        with around_step(self._point.placement.tp):
            if self._pipeline is None:
                loss, wait = self._passes()
            else:
                micro_batches = [next(self._batches) for _ in range(self._point.accumulation)]
                wait = time.monotonic() - begin
                loss = self._flow(self._pipeline, micro_batches)
        return StepOutcome(loss, wait, self._update())

    def _scaled(self, loss: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss that the last stage has computed from the targets itself."""
        return torch.as_tensor(self._scaler.scale(loss))

    def _passes(self) -> tuple[torch.Tensor, float]:
        """One micro-batch after the other."""
        (model,), count, placement = self._divided.stages, self._point.accumulation, self._point.placement
        total, wait = torch.zeros((), device=self._device), 0.0
        for index in range(count):
            begin = time.monotonic()
            batch = next(self._batches)
            wait += time.monotonic() - begin
            last = index == count - 1
            fsdp.exchange(model, last, placement.distributed_optimizer, save_memory=placement.fsdp > 1)
            with data_parallel.exchange(model, last):
                with autocast(self._point.precision, self._device):
                    loss = self._task.loss(model, batch) / count
                torch.as_tensor(self._scaler.scale(loss)).backward()
            total += loss.detach()
        return total, wait

    def _flow(self, pipeline: Pipeline, micro_batches: list[Any]) -> torch.Tensor | None:
        """All micro-batches through the pipeline; the mean loss where the last stage is."""
        inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        losses = pipeline.step(inputs, targets)
        if not losses:
            return None
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        return mean / torch.as_tensor(self._scaler.scale(self._one)) if self._scaler.is_enabled() else mean

    def _update(self) -> torch.Tensor | None:
        divided, scaler = self._divided, self._scaler
        scaler.unscale_all(divided.optimizers)
        if self._task.clip_norm is not None:
            clip(divided.stages, self._task.clip_norm, divided.mesh)
        for optimizer in divided.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()
        for rate in self._rates:
            rate.step()
        return torch.as_tensor(scaler.scale(self._one)).clone() if scaler.is_enabled() else None
