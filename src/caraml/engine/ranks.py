"""The processes of one point: who is who, and how they agree.

Everything here goes through a gloo group of the hosts, also on GPUs, so that agreeing never puts work into a device's queue.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from caraml.system.model import DeviceClass

_AGREEMENT_TIMEOUT = timedelta(minutes=10)


class Ranks:
    """This process among the point's processes. One process alone needs no group."""

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0, hosts: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self.local_rank, self._hosts = rank, world, local_rank, hosts

    @classmethod
    def from_environment(cls, device_class: DeviceClass) -> Ranks:
        """Join the group that torchrun's environment variables describe, or stand alone."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls()
        dist.init_process_group("nccl" if device_class == "gpu" else "gloo", timeout=_AGREEMENT_TIMEOUT)
        hosts = dist.new_group(backend="gloo", timeout=_AGREEMENT_TIMEOUT)
        return cls(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")), hosts)

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return int(value)
        shared = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self._hosts)
        return int(shared.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small results after a measurement, not inside one."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._hosts)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self._hosts)

    def own_store(self) -> Any:
        """A connection of its own to the group's key-value store, for another thread; ``None`` for a process that is alone."""
        return None if self.world == 1 else dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Leave the group."""
        if self.world > 1:
            dist.destroy_process_group()
