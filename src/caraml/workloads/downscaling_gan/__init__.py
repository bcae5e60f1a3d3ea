"""Downscaling of temperature, MAELSTROM's fifth application: a Wasserstein GAN with gradient penalty."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from caraml.workloads.base import Workload, later
from caraml.workloads.weather import WeatherParams, check_files


class Params(WeatherParams):
    """Parameters of the `downscaling_gan` workload (`ap5`)."""

    own_step: ClassVar[bool] = True
    uncompiled: ClassVar[str] = "the gradient penalty is differentiated twice, which torch's compiled graphs cannot be"

    rows: int = Field(96, ge=16, multiple_of=8, description="rows of random data; files have their own")
    columns: int = Field(120, ge=16, multiple_of=8, description="columns of random data; files have their own")
    learning_rate: float = Field(5e-5, gt=0, description="of the generator")
    critic_learning_rate: float = Field(1e-6, gt=0, description="of the critic")


WORKLOAD = Workload(
    title="downscaling, WGAN-GP",
    params=Params,
    build=later(f"{__name__}.training", "build"),
    packages=("h5netcdf", "h5py"),
    check=check_files,
)
