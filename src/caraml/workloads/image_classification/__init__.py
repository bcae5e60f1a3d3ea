"""Image classification with any timm network: ResNet-50 by default, as in CARAML's vision benchmark and EPICURE's."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError

from caraml.base.errors import InputError, in_a_line, nearest, unknown_name
from caraml.base.format import count
from caraml.base.toml import FrozenModel
from caraml.workloads.base import BatchSource, BuildContext, Task, Workload, counted_facts, given_path, loader_workers, open_source

if TYPE_CHECKING:
    import torch

    from caraml.workloads.flops import Traffic
    from caraml.workloads.image_classification.images import ImageSamples


IMAGENET_IMAGES = 1_281_167
"""Images of ImageNet's training set: an epoch of random ones, and the one that energies are scaled to (CARAML's slides also use 10^6)."""


class Params(FrozenModel):
    """Parameters of the `image_classification` workload."""

    model: str = Field("resnet50", description="a network's name in timm; resnet50 is version 1.5")
    image_size: int = Field(224, ge=32, description="height and width of the network's input [pixels]")
    classes: int = Field(1000, ge=2, description="number of classes that the network tells apart")
    data: Literal["images", "lmdb", "webdataset", "archive", "dali", "synthetic", "synthetic-device"] = Field(
        "images",
        description="image files, one LMDB, tar shards read in place, an archive unpacked by `stage`, image files decoded by DALI, "
        "random images made on the host by the loader, or random images already on the device; or "
        "the path of a set instead, with a / in it or an ending of theirs",
    )
    path: str | None = Field(None, description="where the data lies; without it, a small set of image files that is drawn on first use")
    validation: str | None = Field(None, description="held-out images in the same form; the drawn set has its own")
    stage: str | None = Field(None, description="folder on each node, as /dev/shm, to which the data is brought before anything is timed")
    passes: int = Field(1, ge=1, description="how often an epoch reads each image: 13 makes TinyImageNet as long as ImageNet")
    on_damaged: Literal["fail", "skip"] = Field("fail", description="a damaged image: stop and name it, or take the next one and count it")
    samples: int | None = Field(None, ge=1, description="images in an epoch of synthetic data; ImageNet's number if absent")
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")
    bn_span: int = Field(1, ge=1, description="devices over which batch normalisation is taken")
    zero_gamma: bool = Field(True, description="start residual blocks as identities (Goyal et al.); only of networks that have the choice")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of the target that is spread over all classes")
    schedule: Literal["constant", "goyal"] = Field(
        "constant", description="goyal: learning rate x global batch / 256, linear warm-up, a tenth at epochs 30, 60 and 80"
    )
    warm_up_epochs: float = Field(5.0, ge=0, description="of schedule `goyal`")
    learning_rate: float = Field(0.1, gt=0, description="of the optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizer")
    weight_decay: float = Field(5e-5, ge=0, description="of the optimizer")
    epoch_images: int = Field(IMAGENET_IMAGES, ge=1, description="images of the epoch that `energy_per_epoch` speaks of; or 1000000")

    @field_validator("model")
    @classmethod
    def _of_timm(cls, name: str, info: ValidationInfo) -> str:
        """While a suite is planned for this Python; elsewhere timm may be another, and a worker asks its own."""
        if (info.context or {}).get("packages_here") and (known := _others_than(name)):
            found = {"expected": repr(nearest(name, known) or "")}
            raise PydanticCustomError("literal_error", "a network of the timm that is installed here (timm.list_models())", found)
        return name

    @field_validator("data", mode="wrap")
    @classmethod
    def _with_paths(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """What is no form may be meant for a folder, which needs a ``/``."""
        try:
            return check(value)
        except ValidationError as error:
            forms = error.errors(include_url=False)[0]["ctx"]["expected"] if isinstance(value, str) else None
            if forms is None:
                raise
            expected = f"{forms}, or the path of a set with a / in it: ./{value[:100]} for a folder beside the suite's file"
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected}) from error

    @model_validator(mode="before")
    @classmethod
    def _path_as_data(cls, values: Any) -> Any:
        """A path in place of a form: what it is follows from its ending."""
        data = values.get("data") if isinstance(values, dict) else None
        if not isinstance(data, str) or ("/" not in data and Path(data).suffix not in _FORMS):
            return values
        if values.get("path") not in (None, data):
            raise ValueError(f"a form with `path`, or a path alone: path is {values['path']!r}")
        return {**values, "data": _FORMS.get(Path(data).suffix, "images"), "path": data}

    @model_validator(mode="after")
    def _what_dali_reads(self) -> Params:
        given = {"validation": self.validation is not None, "stage": self.stage is not None, "on_damaged": self.on_damaged == "skip"}
        unheard = ", ".join(name for name, is_so in given.items() if is_so)
        if self.data == "dali" and unheard:
            raise ValueError(f"no {unheard} with data = 'dali', which reads training images where they lie and stops at a damaged one")
        return self


@cache
def _others_than(name: str) -> list[str]:
    """The networks that timm has, where it has none of this name; empty where timm is missing or does not work."""
    # To import timm takes seconds, as it needs torch: only for a name that its files do not define, which may be one out of use.
    if not (defined := _defined()) or name.partition(".")[0] in defined:
        return []
    try:
        timm = _timm()
    except Exception:  # noqa: BLE001 -- whatever a torch that does not fit raises: the workers will tell
        return []
    return [] if timm.is_model(name) else timm.list_models()


@cache
def _defined() -> frozenset[str]:
    """The networks that timm's files define; none without timm."""
    spec = importlib.util.find_spec("timm")
    files = Path(spec.origin).parent.glob("models/[!.]*.py") if spec is not None and spec.origin is not None else ()
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    return frozenset(name for text in texts for name in re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE))


def _timm() -> Any:
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    import timm

    return timm


_FORMS = {".lmdb": "lmdb", **dict.fromkeys((".tar", ".zip", ".sqsh", ".squashfs"), "archive")}
_PARTS = ("train", "val")
"""Folders, or beginnings of names, of the two parts of a set: TinyImageNet's, and EPICURE's."""


def _parts(path: str) -> tuple[str, str | None]:
    """Training and held-out images of a set that is named as a whole: ``PATH/train`` and ``PATH/val``, or else all of it and nothing."""
    train, held_out = (given_path(path) / part for part in _PARTS)
    return (str(train), str(held_out)) if train.is_dir() and held_out.is_dir() else (path, None)


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, SGD with momentum, and the stream of ``[uint8 (B, 3, S, S), int64 (B,)]``."""
    import torch
    from torch.nn import functional as F

    from caraml.workloads.flops import SGD_MOMENTUM
    from caraml.workloads.image_classification.images import normalize_images, share_batch_norm

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
    import torch

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
    import torch

    from caraml.workloads.flops import forward_and_training_flops

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
    import torch

    from caraml.workloads.flops import traffic

    with torch.device("meta"):
        model = _network(params)
    size = params.image_size
    return traffic(model, lambda images: model(torch.empty(images, 3, size, size, device="meta")).float().mean())


def _network(params: Params) -> torch.nn.Module:
    timm = _timm()
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
    from caraml.workloads.image_classification.images import HeldOut, synthetic_images

    params = ctx.params
    if params.data in ("synthetic", "synthetic-device"):
        made = synthetic_images(params.classes, params.image_size, params.samples or IMAGENET_IMAGES, seed=ctx.seed)
        source = open_source(made, ctx, workers=params.workers, resident=params.data == "synthetic-device")
        return source, dict
    if params.data == "dali":
        return _dali_source(ctx), dict
    path, validation = (None, None) if params.path is None else _parts(params.path)
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
    from caraml.workloads.image_classification.images import Form, ImageSamples, open_store
    from caraml.workloads.image_classification.store import default_image_folder, refuse_classes

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
    from caraml.workloads.image_classification.decode import DaliBatches
    from caraml.workloads.image_classification.store import default_image_folder, refuse_classes

    params = ctx.params
    root = given_path(_parts(params.path)[0]) if params.path else default_image_folder()
    threads = loader_workers(ctx, params.workers)
    share: dict[str, int] = {"seed": ctx.seed, "rank": ctx.rank, "world": ctx.world, "passes": params.passes}
    batches = DaliBatches(root, params.image_size, ctx.micro_batch, ctx.device, threads=threads, **share)
    refuse_classes(batches.store.classes, root, params.classes, None)
    return BatchSource(batches, {**batches.describe(), "resident": False, "loader_workers": threads}, lambda: None, len(batches))


def check(params: Params, folder: Path) -> None:
    """See that LMDBs and folders are of images, and that the network tells their classes apart. What is closed to us is not looked at."""
    if params.data in ("lmdb", "images") and params.path is not None:
        from caraml.workloads.image_classification.packed import LmdbStore
        from caraml.workloads.image_classification.store import FolderStore, refuse_classes

        (path, held_out), trained = _parts(str(folder / params.path)), None
        for where in (folder / name for name in (path, params.validation or held_out) if name):
            if params.data == "images" and not os.access(where, os.R_OK | os.X_OK):
                return
            classes = LmdbStore.check(where) if params.data == "lmdb" else FolderStore.check(where)[0]
            refuse_classes(classes, where, params.classes, trained)
            trained = classes


WORKLOAD = Workload(title="image classification", params=Params, build=build, check=check)


REFERENCE_BATCH = 256
"""Batch that the unscaled learning rate is meant for."""
DECAY_EPOCHS = (30, 60, 80)
"""After each, the learning rate is a tenth of what it was; a training has 90 epochs."""


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
