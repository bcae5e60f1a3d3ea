"""Emulation of shortwave radiation, MAELSTROM's third application: a 1-D network maps a column's state to fluxes and heating rates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from caraml.workloads.base import BuildContext, Task, Workload, counted_facts
from caraml.workloads.weather import WeatherParams, check_files, open_input

if TYPE_CHECKING:
    import torch

SAMPLES_WITHOUT_FILES = 251_392
"""Columns in an epoch of random data: 491 steps of 512, the report's 4091 MiB."""
INPUT_BYTES = 4 * (17 + 137 * 27 + 138 * 2 + 136 + 138)
"""Of one column, targets not counted: 512 columns are the report's 8.33 MiB."""


class Params(WeatherParams):
    """Parameters of the `radiation_emulation` workload (`ap3`)."""

    cache: bool = Field(True, description="keep samples in memory after they are first read; false is the report's --nocache")
    learning_rate: float | None = Field(None, gt=0, description="1e-4 x global batch / 256 if absent")
    heating_weight: float = Field(1e3, ge=0, description="weight of the heating rates' squared error; the fluxes' is 1")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, Adam, and the stream of the seven tensors of :class:`~.data.RadiationSamples`."""
    import torch

    from caraml.workloads.radiation_emulation.data import RadiationSamples, synthetic_column
    from caraml.workloads.radiation_emulation.model import RadiationColumn
    from caraml.workloads.weather.samples import Cached, SyntheticSamples

    params, maxima = ctx.params, None

    def files(folder: Path, split: Any) -> Any:
        nonlocal maxima
        samples = RadiationSamples(folder, split)
        if split == "validation":
            return samples
        maxima = samples.maxima()
        return Cached(samples, shared=params.workers != 0) if params.cache else samples

    with ctx.phase("data"):
        given = open_input(ctx, "ap3", files, lambda: SyntheticSamples("ap3", synthetic_column, SAMPLES_WITHOUT_FILES, ctx.seed))
    torch.manual_seed(ctx.seed)
    model = RadiationColumn(maxima).to(ctx.device)
    rate = params.learning_rate or 1e-4 * ctx.micro_batch * ctx.world / 256
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=ctx.fused)
    facts = counted_facts("column", model, given, _flops(params), bytes_per_sample=INPUT_BYTES)
    return given.task(
        model,
        optimizer,
        lambda net, batch: radiation_loss(net(*batch[:5]), batch[5:], params.heating_weight),
        facts,
        predict=lambda net, batch: net(*batch[:5]),
    )


def radiation_loss(predicted: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, ...], heating_weight: float) -> torch.Tensor:
    """``heating_weight * MSE(heating rates) + MSE(fluxes)``; heating (B, 137, 1) [K/day], fluxes (B, 3) [W/m²]."""
    from torch.nn import functional as F

    return heating_weight * F.mse_loss(predicted[0], truth[0]) + F.mse_loss(predicted[1], truth[1])


def _flops(params: Params) -> tuple[float, float]:
    """FLOPs of one column: forward, and forward with backward."""
    import torch

    from caraml.workloads.flops import forward_and_training_flops
    from caraml.workloads.radiation_emulation.model import HALF_LEVELS, INPUT_SHAPES, RadiationColumn

    with torch.device("meta"):
        model = RadiationColumn()
        inputs = [torch.empty(2, *shape) for shape in (*INPUT_SHAPES.values(), (HALF_LEVELS, 1))]
        truth = (torch.empty(2, 137, 1), torch.empty(2, 3))
        return forward_and_training_flops(lambda: radiation_loss(model(*inputs), truth, params.heating_weight), 2)


WORKLOAD = Workload(title="radiation emulation, 1-D CNN", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check_files)
