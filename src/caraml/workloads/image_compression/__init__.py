"""Image compression: the residual autoencoder of the PEARC '22 accelerator study, reconstructing digits (its Table 4)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from caraml.base.toml import FrozenModel
from caraml.metrics.model import Metric
from caraml.metrics.quality import DEFINITIONS, image_quality
from caraml.workloads.base import BuildContext, Quality, Task, Workload, counted_facts, given_path, open_source

if TYPE_CHECKING:
    import torch

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


def build(ctx: BuildContext[Params]) -> Task:
    """Build the autoencoder, Adam, and the stream of uint8 (B, 1, 28, 28)."""
    import torch
    from torch.nn import functional as F

    from caraml.workloads.flops import forward_and_training_flops
    from caraml.workloads.image_compression.data import drawn_digits, mnist
    from caraml.workloads.image_compression.model import SIDE, CompressionAutoencoder

    params = ctx.params
    with ctx.phase("data"):
        if params.folder is not None:
            digits, unseen = (mnist(given_path(params.folder), held_out) for held_out in (False, True))
        else:
            digits, unseen = drawn_digits(params.images), drawn_digits(params.held_out, held_out=True)
        source = open_source(digits, ctx, workers=params.workers, resident=params.data == "resident")
    torch.manual_seed(ctx.seed)
    model = CompressionAutoencoder(params.width, params.bottleneck)
    ctx.placed(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)
    with torch.device("meta"):
        twin = CompressionAutoencoder(params.width, params.bottleneck)
        flops = forward_and_training_flops(lambda: twin(torch.empty(2, 1, SIDE, SIDE)).sum(), 2)
    facts = counted_facts("image", model, source, flops, bytes_per_sample=SIDE * SIDE, epoch_items=params.epoch_images)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        images = batch.float().div_(255)
        return F.mse_loss(net(images).float(), images)

    def validation() -> Any:
        size = ctx.micro_batch
        return (unseen.__getitems__(range(first, min(first + size, len(unseen)))).to(ctx.device) for first in range(0, len(unseen), size))

    def quality(most: int | None) -> dict[str, Metric]:
        """Of the reconstructions as they are, between 0 and 1 and not rounded to 256 levels; and the rate."""
        scaled = [batch.float().div_(255) for batch in itertools.islice(validation(), most)]
        stored = model.encode(scaled[0])
        bits = 8 * stored.element_size() * stored[0].numel() / scaled[0][0].numel()
        rate = Metric(value=bits, unit=DEFINITIONS["bits_per_pixel"].unit)
        return {**image_quality((model(images), images) for images in scaled), "bits_per_pixel": rate}

    return Task(
        model,
        optimizer,
        source.batches,
        loss,
        facts,
        predict=_reconstruct,
        validation=validation,
        quality=Quality(("psnr", "ssim", "ms_ssim", "bits_per_pixel"), quality),
        close=source.close,
    )


def _reconstruct(net: torch.nn.Module, batch: Any) -> torch.Tensor:
    return net(batch.float().div_(255))


WORKLOAD = Workload(title="image compression", params=Params, build=build)
