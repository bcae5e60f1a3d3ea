"""Image classification with any timm network: ResNet-50 by default, as in CARAML's vision benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from caraml.errors import unknown_name
from caraml.results.record import Facts
from caraml.workloads.base import BuildContext, Task, Workload
from caraml.workloads.source import open_source

if TYPE_CHECKING:
    import torch

    from caraml.data.loader import MapDataset


class Params(BaseModel):
    """Parameters of the `image_classification` workload."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field("resnet50", description="a network's name in timm; resnet50 is version 1.5")
    image_size: int = Field(224, ge=32)
    classes: int = Field(1000, ge=2)
    data: Literal["images", "synthetic", "synthetic-device"] = Field(
        "images", description="JPEG files, random images made on the host by the loader, or random images already on the device"
    )
    folder: str | None = Field(None, description="ROOT/CLASS/IMAGE; without it, a small set that is drawn on first use")
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")
    learning_rate: float = Field(0.1, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(5e-5, ge=0)


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network (channels last), SGD with momentum (fused), and the stream of ``[uint8 (B, 3, S, S), int64 (B,)]``."""
    import torch
    from torch.nn import functional as F

    from caraml.data.images import normalize_images

    params = ctx.params
    with ctx.phase("data"):
        source = open_source(_dataset(params, ctx.seed), ctx, workers=params.workers, resident=params.data == "synthetic-device")
    torch.manual_seed(ctx.seed)
    model = _network(params).to(ctx.device)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations
    optimizer = torch.optim.SGD(
        model.parameters(), lr=params.learning_rate, momentum=params.momentum, weight_decay=params.weight_decay, nesterov=True, fused=True
    )
    facts = Facts(
        item="image",
        items_per_sample=1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        flops_per_item=flops_per_image(params),
        flops_formula="torch's FlopCounterMode over one forward and backward pass: 2 FLOPs per multiply-add of products and convolutions",
        bytes_per_sample=3 * params.image_size**2,
        forward_flops_per_item=flops_per_image(params, backward=False),
        samples_per_epoch=source.samples,
        data=source.description,
    )

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(net(normalize_images(images)), labels)

    return Task(model=model, optimizer=optimizer, batches=source.batches, loss=loss, facts=facts, close=source.close)


def flops_per_image(params: Params, *, backward: bool = True) -> float:
    """FLOPs of one image, forward and unless told otherwise backward, counted on torch's meta device: nothing is computed or allocated."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"):
        model = _network(params)
        image = torch.empty(1, 3, params.image_size, params.image_size)
    model.eval()  # normalisation layers with one value per channel refuse to train on one image; the FLOPs are the same
    counter = FlopCounterMode(display=False)
    with counter:
        scores = model(image)
        if backward:
            scores.sum().backward()
    return float(counter.get_total_flops())


def _network(params: Params) -> torch.nn.Module:
    from caraml.compat import make_torchvision_importable

    make_torchvision_importable()
    import timm

    if not timm.is_model(params.model):
        raise unknown_name("timm model", params.model, timm.list_models())
    return timm.create_model(params.model, num_classes=params.classes, pretrained=False)


def _dataset(params: Params, seed: int) -> MapDataset:
    from caraml.data.images import default_image_folder, image_folder_dataset
    from caraml.data.synthetic import synthetic_images

    if params.data != "images":
        return synthetic_images(params.classes, params.image_size, seed=seed)
    return image_folder_dataset(Path(params.folder) if params.folder else default_image_folder(), params.image_size)


WORKLOAD = Workload(title="image classification", params=Params, build=build)
