"""Emulation of shortwave radiation, MAELSTROM's third application: a 1-D network maps a column's state to fluxes and heating rates."""

from __future__ import annotations

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams, check_files


class Params(WeatherParams):
    """Parameters of the `radiation_emulation` workload (`ap3`)."""

    cache: bool = Field(True, description="keep samples in memory after they are first read; false is the report's --nocache")
    learning_rate: float | None = Field(None, gt=0, description="1e-4 x global batch / 256 if absent")
    heating_weight: float = Field(1e3, ge=0, description="weight of the heating rates' squared error; the fluxes' is 1")


WORKLOAD = Workload(
    title="radiation emulation, 1-D CNN",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=check_files,
)
