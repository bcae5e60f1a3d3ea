"""Clustering of weather regimes, MAELSTROM's sixth application: DeepCluster v2 on 25 fields of ERA5."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams, check_files

SAMPLES_WITHOUT_FILES = 35_064
"""Samples in an epoch of random data: as many as the report's training set has."""


class Params(WeatherParams):
    """Parameters of the `regime_clustering` workload (`ap6`)."""

    own_step: ClassVar[bool] = True

    crop: int = Field(280, ge=32, description="height and width of a crop in grid points")
    crop_area: float | None = Field(
        None, gt=0, le=1, description="share of the field's area that each crop has before it is resized; 80 to 100 % at random if absent"
    )
    prototypes: int = Field(40, ge=2, description="clusters of each of the four heads")
    samples: int = Field(SAMPLES_WITHOUT_FILES, ge=1, description="samples in an epoch of random data; files have their own")
    learning_rate: float = Field(0.3, gt=0, description="of the optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizer")
    weight_decay: float = Field(1e-6, ge=0, description="of the optimizer")


WORKLOAD = Workload(
    title="weather-regime clustering, DeepCluster v2",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=check_files,
)
