"""What the weather applications share: parameters of their input, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from caraml.base.toml import FrozenModel
from caraml.workloads.base import VALIDATION_BATCHES, BatchSource, BuildContext, given_path, open_source

if TYPE_CHECKING:
    import torch

    from caraml.data.loader import MapDataset


class WeatherParams(FrozenModel):
    """Parameters that every weather application has."""

    data: Literal["files", "synthetic", "synthetic-device"] = Field(
        "files", description="NetCDF files, random samples made on the host by the loader, or random samples already on the device"
    )
    folder: str | None = Field(None, description="folder of the files; without it, look-alikes that are made on first use")
    lookalike: Literal["tiny", "small"] = Field(
        "small", description="look-alikes used without a folder: samples of the published size, or tiny ones (AP1: patch = 32)"
    )
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")


def open_input(
    ctx: BuildContext[Any],
    application: str,
    files: Callable[[Path, Literal["train", "validation"]], MapDataset],
    synthetic: Callable[[], MapDataset],
) -> BatchSource:
    """Open the input that the parameters ask for, held-out batches included if there are any.

    Args:
        ctx: of the task that is built.
        application: name of the look-alike set, ``"ap1"`` ...
        files: opens the training or validation part of a folder.
        synthetic: makes the random data set.
    """
    params: WeatherParams = ctx.params
    resident = params.data == "synthetic-device"
    if params.data != "files":
        made = synthetic()
        return open_source(made, ctx, workers=params.workers, resident=resident)
    from caraml.workloads.weather.lookalikes import default_weather_folder

    folder = given_path(params.folder) if params.folder else default_weather_folder(application, params.lookalike)
    source = open_source(files(folder, "train"), ctx, workers=params.workers, resident=False)
    return replace(source, validation=lambda: _once(files(folder, "validation"), ctx.micro_batch, ctx.device))


def _once(samples: MapDataset, batch_size: int, device: torch.device) -> Iterator[Any]:
    """The first batches of a data set in order, the last of them perhaps smaller."""
    from torch.utils.data import default_collate

    from caraml.data.loader import to_device

    last = min(len(samples), VALIDATION_BATCHES * batch_size)
    for start in range(0, last, batch_size):
        batch = default_collate([samples[position] for position in range(start, min(start + batch_size, last))])
        yield next(to_device(iter([batch]), device))
