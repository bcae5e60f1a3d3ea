"""Ensemble post-processing, MAELSTROM's fourth application: a U-Net corrects mean and spread of the 500 hPa geopotential."""

from __future__ import annotations

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams


class Params(WeatherParams):
    """Parameters of the `ensemble_postprocessing` workload (`ap4`)."""

    rows: int | None = Field(None, ge=4, description="rows of the grid, which files must have; random data have 361 if absent")
    columns: int | None = Field(None, ge=4, description="columns of the grid, which files must have; random data have 720 if absent")
    learning_rate: float = Field(1e-2, gt=0, description="of the optimizer")


WORKLOAD = Workload(
    title="ensemble post-processing, U-Net",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=later(f"{__name__}.training", "check"),
)
