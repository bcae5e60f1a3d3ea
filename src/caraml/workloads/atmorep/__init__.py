"""AtmoRep-style training: a transformer over temperature and wind fills in masked tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams, check_files


class Params(WeatherParams):
    """Parameters of the `atmorep` workload."""

    preset: Literal["384M", "tiny"] = Field("384M", description="the public three-field setting of 2024, or one for CPUs")
    learning_rate: float = Field(1e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.025, ge=0, description="of the optimizer")


WORKLOAD = Workload(
    title="AtmoRep-style multi-field transformer",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=check_files,
)
