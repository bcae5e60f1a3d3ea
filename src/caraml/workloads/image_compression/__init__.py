"""Image compression: the residual autoencoder of the PEARC '22 accelerator study, reconstructing digits (its Table 4)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from caraml.base.toml import FrozenModel
from caraml.workloads.base import Workload, later

PEARC_IMAGES = 70_000
"""Images that the study scales its epochs to: all of MNIST."""


class Params(FrozenModel):
    """Parameters of the `image_compression` workload."""

    width: int = Field(64, ge=4, description="channels at 28 x 28 pixels; twice and four times as many further in")
    bottleneck: int = Field(4, ge=1, description="channels of 7 x 7 that an image is compressed to; 16 are no compression")
    data: Literal["digits", "resident"] = Field("digits", description="digits through the loader, or a few batches kept on the device")
    folder: str | None = Field(None, description="folder with MNIST's train- and t10k-images-idx3-ubyte, or .gz; else drawn")
    images: int = Field(60_000, ge=16, description="drawn digits in an epoch")
    held_out: int = Field(10_000, ge=1, description="drawn digits to validate with")
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")
    learning_rate: float = Field(1e-3, gt=0, description="of the optimizer")
    epoch_images: int = Field(PEARC_IMAGES, ge=1, description="images of the epoch that `energy_per_epoch` speaks of")


WORKLOAD = Workload(title="image compression", params=Params, build=later(f"{__name__}.training", "build"))
