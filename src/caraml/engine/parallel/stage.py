"""Stages of a pipeline whose memory does not grow with the number of micro-batches in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

_META = torch.device("meta")


class LeanStage(PipelineStage):
    """Torch's stage with receive buffers that exist from the posting of a receive to the end of the pass that reads them.

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
        """Receives of a micro-batch's hidden states, with their buffers."""
        _move(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """Forward pass of a micro-batch."""
        output = super().forward_one_chunk(fwd_chunk_id, *arguments, **named)
        _move(self.args_recv_info[fwd_chunk_id], _META)  # the input itself is kept for the backward pass by torch, until that
        return output

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradients of what a micro-batch sent, with their buffers."""
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
