"""Ensemble post-processing, MAELSTROM's fourth application: a U-Net corrects mean and spread of the 500 hPa geopotential."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from caraml.workloads.base import BuildContext, Task, Workload, counted_facts
from caraml.workloads.weather import WeatherParams, open_input

SAMPLES_WITHOUT_FILES = 1889
"""Samples in an epoch of random data: as many as the report's training set has."""


class Params(WeatherParams):
    """Parameters of the `ensemble_postprocessing` workload (`ap4`)."""

    rows: int | None = Field(None, ge=4, description="rows of the grid, which files must have; random data have 361 if absent")
    columns: int | None = Field(None, ge=4, description="columns of the grid, which files must have; random data have 720 if absent")
    learning_rate: float = Field(1e-2, gt=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, Adam, and the stream of ``[fields (B, 14, H, W), mean, spread, analysis (B, H, W)]``."""
    import torch

    from caraml.workloads.ensemble_postprocessing.data import GRID, EnsembleSamples, synthetic_forecast
    from caraml.workloads.ensemble_postprocessing.model import CHANNELS, EnsembleUNet, corrected, gaussian_crps
    from caraml.workloads.weather.samples import SyntheticSamples

    params = ctx.params
    grid = (params.rows or GRID[0], params.columns or GRID[1])

    def files(folder: Any, split: Any) -> EnsembleSamples:
        nonlocal grid
        samples = EnsembleSamples(folder, split, grid if params.rows and params.columns else None)
        grid = samples.grid
        return samples

    with ctx.phase("data"):
        given = open_input(
            ctx, "ap4", files, lambda: SyntheticSamples("ap4", partial(synthetic_forecast, grid=grid), SAMPLES_WITHOUT_FILES, ctx.seed)
        )
    torch.manual_seed(ctx.seed)
    model = EnsembleUNet().to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    facts = counted_facts("forecast", model, given, _flops(grid), bytes_per_sample=4 * CHANNELS * grid[0] * grid[1])

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        fields, mean, spread, analysis = batch
        return gaussian_crps(*corrected(net(fields), mean, spread), analysis)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: corrected(net(batch[0]), *batch[1:3]))


def _flops(grid: tuple[int, int]) -> tuple[float, float]:
    """FLOPs of one forecast: forward, and forward with backward."""
    import torch

    from caraml.workloads.ensemble_postprocessing.model import CHANNELS, EnsembleUNet
    from caraml.workloads.flops import forward_and_training_flops

    with torch.device("meta"):
        model, fields = EnsembleUNet(), torch.empty(1, CHANNELS, *grid)
        return forward_and_training_flops(lambda: model(fields).sum(), 1)


def check(params: Params, folder: Path) -> None:
    """See that the five files are there, with their variables."""
    from caraml.workloads.ensemble_postprocessing.data import EnsembleSamples

    if params.data == "files" and params.folder is not None:
        EnsembleSamples(folder / params.folder)


WORKLOAD = Workload(title="ensemble post-processing, U-Net", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check)
