"""The input of a task: a data set brought to this rank's device, the same way for every workload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from caraml.data.loader import MapDataset
    from caraml.workloads.base import BuildContext


@dataclass(frozen=True)
class Source:
    """Endless batches on the device, where they come from, and how to end their workers."""

    batches: Iterator[Any]
    description: dict[str, Any]
    close: Callable[[], None]
    samples: int
    """In an epoch, over all ranks."""


def open_source(dataset: MapDataset, ctx: BuildContext[Any], *, workers: int | None, resident: bool) -> Source:
    """Stream ``dataset`` in micro-batches of this rank through the loader or, if ``resident``, repeat a few batches kept on the device.

    ``workers`` of ``None`` lets the loader choose by device and cores.
    """
    from caraml.data.loader import stream, to_device
    from caraml.data.synthetic import device_batches

    description = {**cast(Any, dataset).describe(), "resident": resident}
    if resident:
        return Source(device_batches(dataset, ctx.micro_batch, ctx.device, rank=ctx.rank), description, lambda: None, len(dataset))
    count = loader_workers(ctx, workers)
    batches = stream(
        dataset,
        ctx.micro_batch,
        workers=count,
        pin_memory=ctx.device.type == "cuda",
        seed=ctx.seed,
        rank=ctx.rank,
        world_size=ctx.world,
        batches_per_step=ctx.accumulation,
    )
    return Source(to_device(batches, ctx.device), {**description, "loader_workers": count}, batches.close, len(dataset))


def loader_workers(ctx: BuildContext[Any], asked: int | None) -> int:
    """The number of loader processes of this rank: as asked, else by device and cores."""
    from caraml.data.loader import default_workers

    return default_workers(ctx.device.type, ctx.processes_on_node) if asked is None else asked
