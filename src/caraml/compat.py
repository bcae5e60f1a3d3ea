"""Repairs of other people's packages: one function per repair, with the reason, and nothing else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []
"""The library that holds our schemas. Torch withdraws them when the object dies, so it lives as long as the process."""


def make_torchvision_importable() -> None:
    """Let ``import torchvision`` succeed where its compiled operators cannot be loaded.

    The torchvision wheel of the public index is built for CUDA. Beside a torch built for the CPU its shared library
    does not load, and ``import torchvision`` then fails on the two operators that it describes to the compiler by
    name, ``nms`` and ``qnms``: "operator torchvision::nms does not exist". A torchvision that is installed but broken
    takes ``timm`` and the models of ``transformers`` down with it. Declaring the two schemas, without kernels, is
    enough for models, transforms and datasets; the box operators themselves still raise when they are called.

    Does nothing where torch has a GPU build, where torchvision is not installed, where torchvision's own library loads,
    or when called again. Call it before the first import of torchvision, timm or transformers.
    """
    import torch

    has_gpu_build = torch.version.cuda is not None or torch.version.hip is not None
    if has_gpu_build or _declared or not _torchvision_operators_missing():
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _declared.append(library)


def _torchvision_operators_missing() -> bool:
    """Whether torchvision is installed and its operators exist neither now nor after loading its own library."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    # Declaring a schema that the library brings itself would make the later import fail: try the library first.
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(library)
        except OSError:
            continue
    return not hasattr(torch.ops.torchvision, "nms")
