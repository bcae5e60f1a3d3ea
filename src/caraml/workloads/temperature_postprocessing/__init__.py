"""Temperature post-processing, MAELSTROM's first application: a U-Net predicts quantiles of the forecast's error."""

from __future__ import annotations

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams, check_files


class Params(WeatherParams):
    """Parameters of the `temperature_postprocessing` workload (`ap1`)."""

    patch: int = Field(256, ge=32, multiple_of=32, description="height and width of a sample in grid points")
    learning_rate: float = Field(1e-3, gt=0, description="of the optimizer")


WORKLOAD = Workload(
    title="temperature post-processing, U-Net",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=check_files,
)
