"""Apple GPUs: one per machine, whose memory is the processor's."""

from __future__ import annotations

import platform
from pathlib import Path

from caraml.system.families.family import Family, Shown
from caraml.system.model import DeviceModel


def by_system(root: Path) -> Shown:
    """Every Mac with a processor of Apple's own has one."""
    if root != Path("/") or (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return Shown()
    return Shown((DeviceModel(model="Apple GPU", kind="mps"),), loaded="/System/Library/Frameworks/Metal.framework")


FAMILY = Family(
    kind="mps",
    torch_type="mps",
    title="Apple GPU",
    fix="install a torch built for macOS on arm64, in an arm64 Python of macOS 14 or later",
    by_driver=by_system,
    driven=lambda build: True,  # every build for these machines does
    arithmetic=frozenset({"fp32", "fp16", "bf16"}),
    streams=False,
)
