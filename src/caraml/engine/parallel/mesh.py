"""The processes of a point as one grid, from outside to inside: pipeline stages, parameter copies, shards, tensor parallelism.

Ranks that talk most are neighbours: those of one tensor-parallel group sit on one node as long as it has devices enough.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from caraml.suite.model import Point
from caraml.suite.placement import Placement

AXES = ("pp", "replicate", "shard", "tp")


class Mesh:
    """The grid, and this process's place on it."""

    def __init__(self, point: Point, device: torch.device) -> None:
        self.placement: Placement = point.placement
        shards = self.placement.shards(point.dp)
        sizes = (self.placement.pp, point.dp // shards, shards, self.placement.tp)
        self._grid = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
        self._dp = self._grid["replicate", "shard"]._flatten("dp")

    @property
    def tp(self) -> DeviceMesh:
        """The devices that share a layer with this one."""
        return self._grid["tp"]

    @property
    def pp(self) -> DeviceMesh:
        """The devices that hold the other stages of this copy."""
        return self._grid["pp"]

    @property
    def dp(self) -> DeviceMesh:
        """The devices that hold the same part of the other copies."""
        return self._dp

    @property
    def sharing(self) -> DeviceMesh:
        """What ``fully_shard`` works on: shards alone, or copies of shards."""
        return self._grid["shard"] if self._grid["replicate"].size() == 1 else self._grid["replicate", "shard"]

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """The group of the pipeline."""
        return self.pp.get_group()

    @property
    def copy(self) -> int:
        """Which copy of the model this process works for."""
        return self._dp.get_local_rank()
