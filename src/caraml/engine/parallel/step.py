"""The optimizer step of a divided model, whose stages may form a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from caraml.engine.parallel.divide import Divided, Mesh, around_step, exchange_shards, is_part, together
from caraml.engine.precision import HALF, autocast
from caraml.engine.ranks import exchange_copies
from caraml.engine.steps import Batches, StepOutcome, rates
from caraml.suite.model import Point
from caraml.workloads.base import Division, Task

_META = torch.device("meta")


class LeanStage(PipelineStage):
    """Torch's stage with receive buffers that exist from the posting of a receive to the end of the pass that reads them: its memory does
    not grow with the number of micro-batches in a step.

    Torch's own (2.13) makes two for every micro-batch of a step, of hidden states and of gradients, and keeps them for good. Here a
    buffer rests as a tensor on the meta device. What autograd still needs of it, autograd holds. Memory is given out, read and freed in
    the order of the compute stream, which waits for a receive before it reads; until then the buffer is held here.

    With ``sends``, what is sent is posted and waited for here: the schedule of several stages per process keeps its sends until a step
    ends, and gloo their tensors with them.
    """

    def __init__(self, *arguments: Any, sends: bool = False, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._sends = sends
        self._states_sent: dict[int, list[dist.Work]] = {}
        self._gradients_sent: list[dist.Work] = []

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Buffers that torch makes inside have no memory."""
        device, self.device = self.device, _META
        try:
            yield
        finally:
            self.device = device

    def _prepare_forward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._on_meta():
            return super()._prepare_forward_infra(*arguments, **named)

    def _prepare_backward_infra(self, *arguments: Any, **named: Any) -> Any:
        with self._on_meta():
            return super()._prepare_backward_infra(*arguments, **named)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **named)
        _move(self.args_recv_info[fwd_chunk_id], _META)  # the input itself is kept for the backward pass by torch, until that
        return output

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: torch.Tensor | None = None, *arguments: Any, **named: Any) -> None:
        """Backward pass of a micro-batch. The schedule keeps its loss until the step ends: without what it was made from."""
        _wait(self._states_sent.pop(bwd_chunk_id, ()))  # they have arrived: their gradients are here
        super().backward_one_chunk(bwd_chunk_id, loss, *arguments, **named)
        if loss is not None and not loss._is_view():
            loss.detach_()
        _move(self.grad_recv_info.get(bwd_chunk_id, ()), _META)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of a micro-batch's hidden states that are left to the schedule."""
        operations = super().get_fwd_send_ops(fwd_chunk_id)
        if not self._sends:
            return operations
        self._states_sent[fwd_chunk_id] = _post(operations)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends of the gradients of a micro-batch's input that are left to the schedule.

        Those of the micro-batch before are waited for, which cannot hang: torch's order of actions has a receive where its send is, so that
        nothing which the other process does before it needs anything that is sent after.
        """
        operations = super().get_bwd_send_ops(bwd_chunk_id)
        if not self._sends:
            return operations
        self.finish()
        self._gradients_sent = _post(operations)
        return []

    def finish(self) -> None:
        """Wait for the last gradients sent."""
        _wait(self._gradients_sent)
        self._gradients_sent = []


def _move(buffers: Iterable[Any], device: torch.device) -> None:
    """Give receive buffers new memory on a device, or on the meta device none."""
    for info in buffers:
        buffer = getattr(info, "buffer", None)  # none for the model's own input and for what has no gradient
        if buffer is not None and buffer.device != device:
            info.buffer = torch.empty_like(buffer, device=device, requires_grad=buffer.requires_grad)


def _post(operations: list[dist.P2POp]) -> list[dist.Work]:
    works = [dist.isend(one.tensor, group=one.group, tag=one.tag, group_dst=one.group_peer) for one in operations]
    return [work for work in works if work is not None]


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


_METHODS = [name for name, value in vars(LeanStage).items() if callable(value) and name not in ("__init__", "_on_meta", "finish")]
_ATTRIBUTES = {"device", "args_recv_info", "grad_recv_info"}


def is_lean() -> bool:
    """Whether torch's stage is made as :class:`LeanStage` expects. If not, pipelines use torch's own, and plans count its buffers."""
    makers = [vars(kind)["__init__"].__code__ for kind in PipelineStage.__mro__[:-1] if "__init__" in vars(kind)]
    return all(hasattr(PipelineStage, name) for name in _METHODS) and {name for code in makers for name in code.co_names} >= _ATTRIBUTES


LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Pipeline:
    """The stages of this process in their schedule."""

    def __init__(self, stages: Sequence[nn.Module], division: Division, point: Point, mesh: Mesh, *, device: torch.device, loss: LossOf):
        placement = point.placement
        indices = placement.stages_of(mesh.pp.get_local_rank())
        tokens, *inner_shape = division.hidden
        tokens //= placement.cp
        self._count = point.accumulation
        whole = partial(torch.empty, self._count, point.micro_batch, tokens, dtype=torch.int64, device=device)
        self._inputs = whole() if 0 in indices else None
        self._targets = whole() if placement.stages - 1 in indices else None
        states = (tokens // placement.tp if placement.sp else tokens, *inner_shape)
        make: Any = partial(LeanStage, sends=placement.schedule == "interleaved") if is_lean() else PipelineStage
        self._parts: list[PipelineStage] = []
        for index, stage in zip(indices, stages, strict=True):
            inner = getattr(stage, "module", stage)  # of DDP: autocast belongs around the forward pass only, the schedule mixes passes
            if point.precision in HALF:
                inner.forward = torch.autocast(device.type, dtype=HALF[point.precision])(inner.forward)
            # Shapes are given, so that the first step asks nothing of the other stages.
            given = torch.empty(point.micro_batch, tokens, dtype=torch.int64, device="meta")
            half = HALF.get(point.precision) if point.knobs.half_residual else None
            between = torch.empty(point.micro_batch, *states, device="meta", requires_grad=True, dtype=half)
            result = torch.empty((), device="meta") if index == placement.stages - 1 else between
            shapes = {"input_args": (given if index == 0 else between,), "output_args": (result,)}
            self._parts.append(make(stage, index, placement.stages, device, group=mesh.pp.get_group(), **shapes))
        self._schedule = _schedule(self._parts, point, loss)

    def step(self, batches: Batches) -> list[torch.Tensor]:
        """Forward and backward passes of a step's micro-batches; the losses, where the last stage is.

        Of the micro-batches only what this process's stages need is kept: inputs in the first, targets in the last.
        """
        for index in range(self._count):
            for place, tokens in zip((self._inputs, self._targets), batches.take(), strict=True):
                if place is not None:
                    place[index] = tokens
        losses: list[torch.Tensor] = []
        arguments = () if self._inputs is None else (self._inputs.flatten(0, 1),)
        targets = None if self._targets is None else self._targets.flatten(0, 1)
        named: dict[str, Any] = {} if targets is None else {"targets": targets}  # of the stage's forward pass, which computes the loss
        self._schedule.step(*arguments, target=targets, losses=losses, return_outputs=False, **named)
        for part in self._parts:
            if isinstance(part, LeanStage):
                part.finish()
        return losses


def _schedule(parts: Sequence[PipelineStage], point: Point, loss: LossOf) -> _PipelineSchedule:
    match point.placement.schedule:
        case "gpipe":
            return ScheduleGPipe(parts[0], point.accumulation, loss_fn=loss)
        case "1f1b":
            return Schedule1F1B(parts[0], point.accumulation, loss_fn=loss)
        case "interleaved":
            return ScheduleInterleaved1F1B(list(parts), point.accumulation, loss_fn=loss)


class DividedStep:
    """Forward, backward and update of this process's part over ``accumulation`` micro-batches."""

    def __init__(self, task: Task, divided: Divided, batches: Batches, point: Point, device: torch.device) -> None:
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
        with around_step(self._point.placement.tp):
            loss = self._passes() if self._pipeline is None else self._flow(self._pipeline)
        return self._batches.outcome(loss, self._update())

    def _scaled(self, loss: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss that the last stage has computed from the targets itself."""
        return torch.as_tensor(self._scaler.scale(loss))

    def _passes(self) -> torch.Tensor:
        """One micro-batch after the other."""
        (model,), count, placement = self._divided.stages, self._point.accumulation, self._point.placement
        total = torch.zeros((), device=self._device)
        for index in range(count):
            batch, last = self._batches.take(), index == count - 1
            exchange_shards(model, last, placement.distributed_optimizer, save_memory=placement.fsdp > 1)
            with exchange_copies(model, last):
                with autocast(self._point.precision, self._device):
                    loss = self._task.loss(model, batch) / count
                torch.as_tensor(self._scaler.scale(loss)).backward()
            total += loss.detach()
        return total

    def _flow(self, pipeline: Pipeline) -> torch.Tensor | None:
        """All micro-batches through the pipeline; the mean loss where the last stage is."""
        losses = pipeline.step(self._batches)
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


def clip(stages: Sequence[nn.Module], largest: float, mesh: Mesh) -> None:
    """Scale all gradients so that their norm over the whole model is at most ``largest``. Collective.

    Parameters that tensor parallelism leaves whole have the same gradient on all its devices and count once.
    """
    groups = together(parameter for stage in stages for parameter in stage.parameters())
    squares = torch.stack([_squared_norm(group, mesh) for group in groups]).sum()
    if mesh.placement.pp > 1:
        dist.all_reduce(squares, group=mesh.pp.get_group())
    here = [SimpleNamespace(grad=_local(parameter.grad)) for group in groups for parameter in group]  # else torch plans each product
    clip_grads_with_norm_(here, largest, squares.sqrt())  # type: ignore[arg-type]


def _squared_norm(group: Sequence[nn.Parameter], mesh: Mesh) -> torch.Tensor:
    norm = get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
    square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
    if is_part(group[0]):
        dist.all_reduce(square, group=mesh.tp.get_group())
    return square


class DividedScaler(ShardedGradScaler):
    """Torch's scaler for sharded gradients, shown the part of each that lies here; one overflow anywhere skips the update everywhere."""

    def _unscale_grads_(self, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        here = [SimpleNamespace(grad=_local(parameter.grad)) for group in optimizer.param_groups for parameter in group["params"]]
        return super()._unscale_grads_(SimpleNamespace(param_groups=[{"params": here}]), *arguments, **named)  # type: ignore[arg-type]

    def unscale_all(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Unscale the gradients of every stage here, and agree on overflow: an update is made by all stages or by none. Collective."""
        if not self.is_enabled():
            return
        for optimizer in optimizers:
            self.unscale_(optimizer)
        states = [self._per_optimizer_states[id(optimizer)] for optimizer in optimizers]
        found = torch.stack([verdict.sum() for state in states for verdict in state["found_inf_per_device"].values()]).sum().clamp(max=1)
        for state in states:  # a fused optimizer takes the verdict as a scalar, and skips at 1, not at the number of devices that found one
            state["found_inf_per_device"] = {found.device: found}


def _local(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
