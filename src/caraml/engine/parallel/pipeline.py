"""Pipeline parallelism: stages on different devices, micro-batches flowing through them in one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule

from caraml.engine.parallel.divide import Mesh
from caraml.engine.precision import HALF, autocast
from caraml.suite.model import Point
from caraml.workloads.base import Division

LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pipeline:
    """The stages of this process in their schedule."""

    def __init__(self, stages: Sequence[nn.Module], division: Division, point: Point, mesh: Mesh, *, device: torch.device, loss: LossOf):
        placement = point.placement
        indices = placement.stages_of(mesh.pp.get_local_rank())
        self.first, self.last = 0 in indices, placement.stages - 1 in indices
        tokens, *inner_shape = division.hidden
        states = (tokens // placement.tp if placement.sp else tokens, *inner_shape)
        parts = []
        for index, stage in zip(indices, stages, strict=True):
            inner = getattr(stage, "module", stage)  # of DDP: autocast belongs around the forward pass only, the schedule mixes passes
            inner.forward = _in_precision(inner.forward, point, device)
            # Shapes are given, so that the first step asks nothing of the other stages.
            given = torch.empty(point.micro_batch, tokens, dtype=torch.int64, device="meta")
            half = HALF.get(point.precision) if point.knobs.half_residual else None
            between = torch.empty(point.micro_batch, *states, device="meta", requires_grad=True, dtype=half)
            result = torch.empty((), device="meta") if index == placement.stages - 1 else between
            parts.append(
                PipelineStage(
                    stage,
                    index,
                    placement.stages,
                    device,
                    input_args=(given if index == 0 else between,),
                    output_args=(result,),
                    group=mesh.pipeline,
                )
            )
        self._schedule = _schedule(parts, point, loss)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        """Forward and backward passes of all micro-batches, (accumulation x micro-batch, T) each; the losses, where the last stage is."""
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if self.first else ()
        named: dict[str, Any] = {"targets": targets} if self.last else {}  # of the stage's forward pass, which computes the loss
        self._schedule.step(*arguments, target=targets if self.last else None, losses=losses, return_outputs=False, **named)
        return losses


def _schedule(parts: list[PipelineStage], point: Point, loss: LossOf) -> _PipelineSchedule:
    match point.placement.schedule:
        case "gpipe":
            return ScheduleGPipe(parts[0], point.accumulation, loss_fn=loss)
        case "1f1b":
            return Schedule1F1B(parts[0], point.accumulation, loss_fn=loss)
        case "interleaved":
            return ScheduleInterleaved1F1B(list(parts), point.accumulation, loss_fn=loss)


def _in_precision(forward: Callable[..., torch.Tensor], point: Point, device: torch.device) -> Callable[..., torch.Tensor]:
    def run(*arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        with autocast(point.precision, device):
            return forward(*arguments, **named)

    return run
