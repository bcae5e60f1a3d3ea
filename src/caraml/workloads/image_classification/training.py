"""What trains an image classifier: images, network, SGD with momentum, what a step moves, and the learning rate's schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch.nn import functional as F

from caraml.base.errors import InputError, in_a_line, unknown_name
from caraml.base.format import count
from caraml.workloads.base import BatchSource, BuildContext, Task, counted_facts, given_path, loader_workers, open_source
from caraml.workloads.flops import SGD_MOMENTUM, Traffic, forward_and_training_flops, traffic
from caraml.workloads.image_classification import IMAGENET_IMAGES, Params, parts_of, timm_here
from caraml.workloads.image_classification.decode import DaliBatches
from caraml.workloads.image_classification.images import (
    Form,
    HeldOut,
    ImageSamples,
    normalize_images,
    open_store,
    share_batch_norm,
    synthetic_images,
)
from caraml.workloads.image_classification.store import default_image_folder, refuse_classes

REFERENCE_BATCH = 256
"""Batch that the unscaled learning rate is meant for."""
DECAY_EPOCHS = (30, 60, 80)
"""After each, the learning rate is a tenth of what it was; a training has 90 epochs."""


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, SGD with momentum, and the stream of ``[uint8 (B, 3, S, S), int64 (B,)]``."""
    params = ctx.params
    if ctx.world % params.bn_span:
        raise InputError(f"bn_span: found {params.bn_span}; expected a divisor of {count(ctx.world, 'device')}")
    flops = flops_per_image(params, ctx.micro_batch)  # refuses a size before the data is opened
    with ctx.phase("data"):
        source, damaged = _open(ctx)
    torch.manual_seed(ctx.seed)
    model = ctx.placed(share_batch_norm(_network(params), params.bn_span, ctx.device))

    def normalized(images: torch.Tensor) -> torch.Tensor:
        return normalize_images(images, memory_format=ctx.memory_format)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(net(normalized(images)), labels, label_smoothing=params.label_smoothing)

    def judge(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        scores = net(normalized(images)).float()
        right = (scores.argmax(1) == labels).sum()
        return torch.stack([F.cross_entropy(scores, labels, reduction="sum"), right, right.new_tensor(len(labels))])

    update = SGD_MOMENTUM * sum(parameter.numel() for parameter in model.parameters())
    moved, size = network_traffic(params).facts(ctx, update), 3 * params.image_size**2
    facts = counted_facts("image", model, source, flops, bytes_per_sample=size, epoch_items=params.epoch_images, **moved)
    rate = None
    if params.schedule == "goyal":
        rate = goyal_rate(ctx.global_batch, params.warm_up_epochs, max(source.samples // ctx.global_batch, 1))
    return source.task(
        model,
        _optimizer(model, ctx),
        loss,
        facts,
        rate=rate,
        predict=lambda net, batch: net(normalized(batch[0])),
        judge=judge,
        damaged=damaged,
    )


def _optimizer(model: torch.nn.Module, ctx: BuildContext[Params]) -> torch.optim.Optimizer:
    params = ctx.params
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if params.schedule == "goyal":  # no decay of normalisation's factors and shifts (section 5.1)
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        groups = [{"params": matrices}, {"params": [weight for weight in model.parameters() if weight.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.SGD(
        groups, lr=params.learning_rate, momentum=params.momentum, weight_decay=params.weight_decay, nesterov=True, fused=ctx.fused
    )


def flops_per_image(params: Params, images: int = 1) -> tuple[float, float]:
    """FLOPs of one of ``images`` that go through the network together, forward, and forward with backward, counted on torch's meta device:
    nothing is computed or allocated. Some networks make products for relative positions once for all of them. Raises ``InputError`` where
    the network takes no images of this size."""
    with torch.device("meta"):
        model = _network(params)
        batch = torch.empty(images, 3, params.image_size, params.image_size)
    model.eval()  # normalisation layers with one value per channel refuse to train on one image; the FLOPs are the same
    try:
        return forward_and_training_flops(lambda: model(batch).sum(), images)
    except (AssertionError, RuntimeError, ValueError) as error:  # as layers of timm and torch say it
        own: Any = model.default_cfg  # timm's
        if params.image_size == own["input_size"][-1]:
            raise
        found = f"image_size: found {params.image_size}, which {params.model} cannot take: {in_a_line(error)}"
        raise InputError(found, f"image_size = {own['input_size'][-1]} is its own") from error


def network_traffic(params: Params) -> Traffic:
    """What forward and backward pass move; a sample is an image."""
    with torch.device("meta"):
        model = _network(params)
    size = params.image_size
    return traffic(model, lambda images: model(torch.empty(images, 3, size, size, device="meta")).float().mean())


def _network(params: Params) -> torch.nn.Module:
    timm = timm_here()
    if not timm.is_model(params.model):
        raise unknown_name("timm model", params.model, timm.list_models())
    options: dict[str, Any] = {"num_classes": params.classes, "pretrained": False}
    if "resne" in params.model and not params.zero_gamma:  # timm starts its ResNets, ResNeXts ... with zeros
        options["zero_init_last"] = False
    if params.model.startswith(("vit_", "deit")):
        options["img_size"] = params.image_size
    return timm.create_model(params.model, **options)


def _open(ctx: BuildContext[Params]) -> tuple[BatchSource, Callable[[], dict[str, str]]]:
    """Training batches with the held-out images, if there are any, and the damaged files of both, with what is wrong with them."""
    params = ctx.params
    if params.data in ("synthetic", "synthetic-device"):
        made = synthetic_images(params.classes, params.image_size, params.samples or IMAGENET_IMAGES, seed=ctx.seed)
        source = open_source(made, ctx, workers=params.workers, resident=params.data == "synthetic-device")
        return source, dict
    if params.data == "dali":
        return _dali_source(ctx), dict
    path, validation = (None, None) if params.path is None else parts_of(params.path)
    samples, staging = _samples(ctx, path)
    source = open_source(samples, ctx, workers=params.workers, resident=False)
    source.description.update(staging)
    validation = params.validation or validation
    if path is not None and validation is None:
        return source, lambda: samples.damaged
    unseen, _ = _samples(ctx, validation, held_out=samples)
    held_out = HeldOut(unseen, ctx.micro_batch, ctx.device, loader_workers(ctx, params.workers))

    def close() -> None:
        source.close()
        held_out.close()

    return replace(source, validation=lambda: held_out, close=close), lambda: {**samples.damaged, **unseen.damaged}


def _samples(
    ctx: BuildContext[Params], path: str | None, held_out: ImageSamples | None = None
) -> tuple[ImageSamples, dict[str, JsonValue]]:
    """The samples at ``path`` and how they were staged; ``held_out`` gives the classes that images to validate with must have."""
    params = ctx.params
    form: Form = params.data  # type: ignore[assignment]  # what is left after synthetic data and DALI
    where = given_path(path) if path else default_image_folder(held_out=held_out is not None) if form == "images" else None
    store, staged = open_store(form, where, Path(params.stage) if params.stage else None, ctx.phase("staging"))
    refuse_classes(store.classes, where, params.classes, None if held_out is None else held_out.store.classes)
    samples = ImageSamples(
        store,
        params.image_size,
        seed=ctx.seed,
        passes=1 if held_out is not None else params.passes,
        on_damaged=params.on_damaged,
        augmented=held_out is None,
    )
    note: dict[str, JsonValue] = {}
    if staged is not None:
        note = {"staged_from": str(where), "staged_bytes": staged.bytes, "staging_seconds": staged.seconds, "staged_before": staged.again}
    return samples, note


def _dali_source(ctx: BuildContext[Params]) -> BatchSource:
    params = ctx.params
    root = given_path(parts_of(params.path)[0]) if params.path else default_image_folder()
    threads = loader_workers(ctx, params.workers)
    share: dict[str, int] = {"seed": ctx.seed, "rank": ctx.rank, "world": ctx.world, "passes": params.passes}
    batches = DaliBatches(root, params.image_size, ctx.micro_batch, ctx.device, threads=threads, **share)
    refuse_classes(batches.store.classes, root, params.classes, None)
    return BatchSource(batches, {**batches.describe(), "resident": False, "loader_workers": threads}, lambda: None, len(batches))


def goyal_rate(global_batch: int, warm_up_epochs: float, steps_per_epoch: int) -> Callable[[int], float]:
    """Factor of the learning rate at a step, counted from 0.

    It grows linearly from 1 to ``global_batch / 256`` during the warm-up, and falls to a tenth at epochs 30, 60 and 80.
    """
    peak = global_batch / REFERENCE_BATCH

    def rate(step: int) -> float:
        epoch = step / steps_per_epoch
        if epoch < warm_up_epochs:
            return 1 + (peak - 1) * epoch / warm_up_epochs
        return peak * 0.1 ** sum(epoch >= decay for decay in DECAY_EPOCHS)

    return rate
