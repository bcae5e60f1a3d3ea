"""Which placements of a model fit the devices of a machine, by their memory plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from caraml.engine.memory import MemoryPlan, is_planned, memory_plan
from caraml.suite.model import Point
from caraml.suite.placement import ModelShape, Placement, impossible
from caraml.system.model import System
from caraml.workloads.gpt import Params

USABLE = 0.9
"""Share of a device's memory that a plan may fill; the rest is left to the driver, the libraries' buffers and fragmentation."""
MOST_DEVICES = 4096


@dataclass(frozen=True)
class Planned:
    """A point and what it needs of each device."""

    point: Point
    plan: MemoryPlan

    def fits(self, memory: float) -> bool:
        """Whether it fits devices of ``memory`` bytes."""
        return self.plan.peak <= USABLE * memory


def planned_of(points: Iterable[Point]) -> list[Planned]:
    """The plans of those points whose memory can be planned and whose placement can be."""
    return [Planned(point, memory_plan(point)) for point in points if is_planned(point) and _possible(point)]


def _possible(point: Point) -> bool:
    shape = Params.model_validate(point.params).model_shape()
    return shape is not None and impossible(point, shape) is None


def room(system: System, point: Point) -> float | None:
    """Bytes that a process of ``point`` has for itself; ``None`` if the system does not say. Processes on a CPU share its memory."""
    memory = system.devices[0].memory_bytes
    return memory if memory is None or system.device_class != "cpu" else memory / point.devices


def smallest_that_fit(point: Point, shape: ModelShape, memory: float, devices_per_node: int) -> list[Planned]:
    """The placements on the fewest devices (a power of two) of ``memory`` bytes that fit, the emptiest device first; the point gives
    everything but placement, devices and batch. Nothing up to ``MOST_DEVICES`` fits: an empty list."""
    world = 1
    while world <= MOST_DEVICES:
        planned = [Planned(one, memory_plan(one)) for one in _on(point, shape, world, devices_per_node)]
        fitting = [one for one in planned if one.fits(memory)]
        if fitting:
            return sorted(fitting, key=lambda one: one.plan.peak)
        world *= 2
    return []


def _on(point: Point, shape: ModelShape, world: int, devices_per_node: int) -> Iterator[Point]:
    """Points on ``world`` devices in every placement that can be. Tensor parallelism stays inside a node and takes the sequence too."""
    devices = min(world, devices_per_node)
    powers = [2**power for power in range(world.bit_length()) if world % 2**power == 0]
    for tp, pp in itertools.product((n for n in powers if n <= devices_per_node), powers):
        if world % (tp * pp) or world % devices:
            continue
        dp = world // (tp * pp)
        for sharing in ({}, {"distributed_optimizer": True}, {"fsdp": dp}) if dp > 1 else ({},):
            placement = Placement.of({"tp": tp, "pp": pp, "sp": tp > 1, **sharing})
            batch = max(point.accumulation, pp) * point.micro_batch * dp
            values = {"nodes": world // devices, "devices": devices, "placement": placement, "global_batch": batch}
            candidate = point.model_copy(update=values)
            if impossible(candidate, shape) is None:
                yield candidate
