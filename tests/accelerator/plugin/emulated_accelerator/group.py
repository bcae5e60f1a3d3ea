"""Collectives of the accelerator for tests: copied to the host, exchanged by gloo, copied back."""

# ruff: noqa: N802 -- torch calls methods by the names of its own

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

Tensors = list[torch.Tensor]


class Done(dist.Work):
    """Work that has ended when it is handed out."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


class Received(dist.Work):
    """Work that ends when somebody waits for it."""

    def __init__(self, work: dist.Work, tensors: Tensors, hosts: Tensors) -> None:
        super().__init__()
        self._work, self._tensors, self._hosts = work, tensors, hosts

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._work.wait()
        _back(self._tensors, self._hosts)
        return True


def _hosts(tensors: Tensors) -> Tensors:
    return [tensor.detach().cpu() for tensor in tensors]


def _back(tensors: Tensors, hosts: Tensors) -> None:
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.detach().copy_(host)


class Staged(dist.ProcessGroup):
    """A process group of the accelerator; tensors of the host pass through as they are."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo, self._name, self._description = dist.ProcessGroupGloo(store, rank, size, timeout), "", ""

    def getBackendName(self) -> str:
        return "emccl"

    def _get_backend(self, device: torch.device) -> Staged:
        return self  # torch 2.14 asks every group for one, also a group that has none beside itself

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def _inout(self, operation: Any, tensors: Tensors, *arguments: Any) -> Done:
        hosts = _hosts(tensors)
        operation(hosts, *arguments).wait()
        _back(tensors, hosts)
        return Done(tensors)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Done:
        return self._inout(self._gloo.allreduce, tensors, opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Done:
        one = dist.AllreduceOptions()
        one.reduceOp = opts.reduceOp
        for tensor in tensors:
            self.allreduce([tensor], one)
        return Done(tensors)

    def broadcast(self, tensors: Tensors, opts: Any) -> Done:
        return self._inout(self._gloo.broadcast, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Done:
        return self._inout(self._gloo.reduce, tensors, opts)

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done([])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> Done:
        hosts = [_hosts(parts) for parts in outputs]
        self._gloo.allgather(hosts, _hosts(inputs)).wait()
        for parts, back in zip(outputs, hosts, strict=True):
            _back(parts, back)
        return Done(outputs)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Done:
        parts = [torch.empty_like(input, device="cpu") for _ in range(self.size())]
        self._gloo.allgather([parts], _hosts([input])).wait()
        output.detach().copy_(torch.cat([part.flatten() for part in parts]).view(output.shape))
        return Done(output)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            self._allgather_base(output, own)
        return Done(outputs)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> Done:
        one, mean = dist.AllreduceOptions(), opts.reduceOp == dist.ReduceOp.AVG  # gloo has no mean
        one.reduceOp = dist.ReduceOp.SUM if mean else opts.reduceOp
        (whole,) = _hosts([input])
        self._gloo.allreduce([whole], one).wait()
        mine = whole.flatten().chunk(self.size())[self.rank()].view(output.shape)
        output.detach().copy_(mine / self.size() if mean else mine)
        return Done(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> Done:
        for output, own in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, own, opts)
        return Done(outputs)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Done:
        for output, parts in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, torch.stack(parts), opts)
        return Done(outputs)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Done:
        return self._inout(lambda hosts: self._gloo.scatter(hosts, [_hosts(parts) for parts in inputs], opts), outputs)

    def alltoall_base(self, output: torch.Tensor, input: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any) -> Done:
        (host,) = _hosts([output])
        self._gloo.alltoall_base(host, *_hosts([input]), out_sizes, in_sizes).wait()
        output.detach().copy_(host)
        return Done(output)

    def send(self, tensors: Tensors, to: int, tag: int) -> dist.Work:
        return Received(self._gloo.send(hosts := _hosts(tensors), to, tag), [], hosts[:0])

    def recv(self, tensors: Tensors, source: int, tag: int) -> dist.Work:
        return Received(self._gloo.recv(hosts := _hosts(tensors), source, tag), tensors, hosts)
