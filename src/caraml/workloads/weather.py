"""What the weather applications share: parameters of their input, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from caraml.workloads.base import VALIDATION_BATCHES, BuildContext
from caraml.workloads.source import Source, open_source

if TYPE_CHECKING:
    import torch

    from caraml.data.loader import MapDataset

FLOPS_FORMULA = (
    "torch's FLOP formulas summed over one forward and backward pass on the meta device: "
    "2 FLOPs per multiply-add of matrix products, convolutions and attention"
)


class WeatherParams(BaseModel):
    """Parameters that every weather application has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Literal["files", "synthetic", "synthetic-device"] = Field(
        "files", description="NetCDF files, random samples made on the host by the loader, or random samples already on the device"
    )
    folder: str | None = Field(None, description="folder of the files; without it, look-alikes that are made on first use")
    lookalike: Literal["tiny", "small"] = Field(
        "small", description="look-alikes used without a folder: samples of the published size, or tiny ones (AP1: patch = 32)"
    )
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")


@dataclass(frozen=True)
class Input:
    """The training batches of a task, and the held-out ones if there are any."""

    source: Source
    validation: Callable[[], Iterator[Any]] | None
    samples: int
    """Training samples in an epoch, over all ranks."""


def open_input(
    ctx: BuildContext[Any],
    application: str,
    files: Callable[[Path, Literal["train", "validation"]], MapDataset],
    synthetic: Callable[[], MapDataset],
) -> Input:
    """Open the input that the parameters ask for.

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
        return Input(open_source(made, ctx, workers=params.workers, resident=resident), None, len(made))
    from caraml.data.weather import default_weather_folder

    folder = Path(params.folder) if params.folder else default_weather_folder(application, params.lookalike)
    training = files(folder, "train")
    source = open_source(training, ctx, workers=params.workers, resident=False)
    return Input(source, lambda: _once(files(folder, "validation"), ctx.micro_batch, ctx.device), len(training))


def _once(samples: MapDataset, batch_size: int, device: torch.device) -> Iterator[Any]:
    """The first batches of a data set in order, the last of them perhaps smaller."""
    from torch.utils.data import default_collate

    from caraml.data.loader import to_device

    last = min(len(samples), VALIDATION_BATCHES * batch_size)
    for start in range(0, last, batch_size):
        batch = default_collate([samples[position] for position in range(start, min(start + batch_size, last))])
        yield next(to_device(iter([batch]), device))


def parameters_of(*models: torch.nn.Module) -> int:
    """The number of trainable values, frozen ones included."""
    return sum(parameter.numel() for model in models for parameter in model.parameters())
