"""Temperature post-processing, MAELSTROM's first application: a U-Net predicts quantiles of the forecast's error."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import Field

from caraml.workloads.base import BuildContext, Task, Workload, counted_facts
from caraml.workloads.weather import WeatherParams, check_files, open_input

SAMPLES_WITHOUT_FILES = 8192
"""Samples in an epoch of random data: the report's 34 GiB."""


class Params(WeatherParams):
    """Parameters of the `temperature_postprocessing` workload (`ap1`)."""

    patch: int = Field(256, ge=32, multiple_of=32, description="height and width of a sample in grid points")
    learning_rate: float = Field(1e-3, gt=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, Adam, and the stream of ``[fields (B, 17, P, P), target (B, 1, P, P)]``."""
    import torch

    from caraml.workloads.temperature_postprocessing.data import TemperatureSamples, synthetic_patch
    from caraml.workloads.temperature_postprocessing.model import PREDICTORS, TemperatureUNet, pinball_loss
    from caraml.workloads.weather.samples import SyntheticSamples

    params = ctx.params
    with ctx.phase("data"):
        given = open_input(
            ctx,
            "ap1",
            lambda folder, split: TemperatureSamples(folder, params.patch, split),
            lambda: SyntheticSamples("ap1", partial(synthetic_patch, patch=params.patch), SAMPLES_WITHOUT_FILES, ctx.seed),
        )
    torch.manual_seed(ctx.seed)
    model = TemperatureUNet().to(ctx.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    facts = counted_facts("patch", model, given, _flops(params), bytes_per_sample=4 * PREDICTORS * params.patch**2)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        fields, target = batch
        return pinball_loss(net(fields).float(), target)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: net(batch[0]))


def _flops(params: Params) -> tuple[float, float]:
    """FLOPs of one patch: forward, and forward with backward."""
    import torch

    from caraml.workloads.flops import forward_and_training_flops
    from caraml.workloads.temperature_postprocessing.model import PREDICTORS, TemperatureUNet, pinball_loss

    with torch.device("meta"):
        model = TemperatureUNet()
        fields, target = torch.empty(2, PREDICTORS, params.patch, params.patch), torch.empty(2, 1, params.patch, params.patch)
        return forward_and_training_flops(lambda: pinball_loss(model(fields), target), 2)


WORKLOAD = Workload(
    title="temperature post-processing, U-Net", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check_files
)
