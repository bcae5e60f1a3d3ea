"""Image classification with any timm network: ResNet-50 by default, as in CARAML's vision benchmark and EPICURE's."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, ValidatorFunctionWrapHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError

from caraml.base.errors import nearest
from caraml.base.toml import FrozenModel
from caraml.workloads.base import Workload, given_path, later

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
        timm = timm_here()
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


def timm_here() -> Any:
    """The package timm, imported where torchvision may be broken."""
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    import timm

    return timm


_FORMS = {".lmdb": "lmdb", **dict.fromkeys((".tar", ".zip", ".sqsh", ".squashfs"), "archive")}
_PARTS = ("train", "val")
"""Folders, or beginnings of names, of the two parts of a set: TinyImageNet's, and EPICURE's."""


def parts_of(path: str) -> tuple[str, str | None]:
    """Training and held-out images of a set that is named as a whole: ``PATH/train`` and ``PATH/val``, or else all of it and nothing."""
    train, held_out = (given_path(path) / part for part in _PARTS)
    return (str(train), str(held_out)) if train.is_dir() and held_out.is_dir() else (path, None)


def check(params: Params, folder: Path) -> None:
    """See that LMDBs and folders are of images, and that the network tells their classes apart. What is closed to us is not looked at."""
    if params.data in ("lmdb", "images") and params.path is not None:
        from caraml.workloads.image_classification.packed import LmdbStore
        from caraml.workloads.image_classification.store import FolderStore, refuse_classes

        (path, held_out), trained = parts_of(str(folder / params.path)), None
        for where in (folder / name for name in (path, params.validation or held_out) if name):
            if params.data == "images" and not os.access(where, os.R_OK | os.X_OK):
                return
            classes = LmdbStore.check(where) if params.data == "lmdb" else FolderStore.check(where)[0]
            refuse_classes(classes, where, params.classes, trained)
            trained = classes


WORKLOAD = Workload(title="image classification", params=Params, build=later(f"{__name__}.training", "build"), check=check)
