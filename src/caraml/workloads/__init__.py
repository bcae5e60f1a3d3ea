"""What is trained: one file per workload. A new workload is a file here and a line in :data:`WORKLOADS`."""

from __future__ import annotations

import importlib

from pydantic import BaseModel

from caraml.errors import unknown_name
from caraml.workloads.base import Workload

WORKLOADS: dict[str, str] = {
    "gpt": "decoder-only GPT, next-token prediction on text (CARAML's LLM training)",
    "image_classification": "any timm network, ImageNet-like images (CARAML's ResNet-50)",
}


def load_workload(name: str) -> Workload:
    """The workload of this name. Raises ``InputError`` for an unknown one."""
    if name not in WORKLOADS:
        raise unknown_name("workload", name, WORKLOADS)
    return importlib.import_module(f"caraml.workloads.{name}").WORKLOAD


def params_of(name: str) -> type[BaseModel]:
    """The parameter model of a workload; needs no torch. Raises ``InputError`` for an unknown workload."""
    return load_workload(name).params
