"""Which accelerators are this process's: those of the node, narrowed by the variables that CUDA, ROCm and schedulers obey.

Sensors ask as well as detection, so nothing here imports pydantic or torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from caraml.system.files import names_device

Masks: TypeAlias = tuple[tuple[str, ...], ...]
"""Variables, layer by layer: of a layer the first that is set counts, and a layer sees what the one before it let through."""

CUDA: Masks = (("CUDA_VISIBLE_DEVICES",),)
ROCM: Masks = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
"""ROCm's runtime narrows first; HIP counts what is left, and takes CUDA's variable where its own is not set."""
GAUDI: Masks = (("HABANA_VISIBLE_DEVICES",),)
ASCEND: Masks = (("ASCEND_RT_VISIBLE_DEVICES",),)
UNTOLD = {"intel": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"), "gaudi": ("HABANA_VISIBLE_MODULES",)}
"""Variables that hide devices by numbers which sensors do not have: of tiles or cards as another variable says, or of modules."""


def let_through(devices: Sequence[Iterable[str]], masks: Masks, environ: Mapping[str, str] = os.environ) -> list[int]:
    """The places of the devices that the environment lets through, in its order; all where no variable is set.

    A mask lists numbers, PCI addresses and (beginnings of) UUIDs. As in the runtimes, it ends at the first entry that names no device, so
    that ``-1`` and the empty string hide all, and numbers count in the library's order, which is the runtime's where all are alike.
    ``devices`` are the names that each has besides its number.
    """
    left = list(range(len(devices)))
    for variables in masks:
        mask = next((environ[name] for name in variables if name in environ), None)
        if mask is None or (variables in GAUDI and mask.strip().lower() == "all"):  # as Gaudi's containers set it
            continue
        names = {place: (str(number), *devices[place]) for number, place in enumerate(left)}
        chosen: dict[int, None] = {}
        for word in mask.split(","):
            place = named(word.strip(), names)
            if place is None:
                break
            chosen[place] = None
        left = list(chosen)
    return left


def named(word: str, devices: Mapping[int, Sequence[str]]) -> int | None:
    """The device that ``word`` names: exactly, by PCI address in any spelling, or as the beginning of one UUID only."""
    low = word.lower()
    for place, names in devices.items():
        if names_device(word, *names):
            return place
    if low.startswith(("gpu-", "mig-")) and len(low) > 4:
        found = [place for place, names in devices.items() if any(name.lower().startswith(low) for name in names)]
        return found[0] if len(found) == 1 else None
    return None
