"""NVIDIA GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from caraml.system.families.family import PLAIN, Family, Shown
from caraml.system.files import fields, listing, read
from caraml.system.model import DeviceModel


def by_kernel(root: Path) -> Shown:
    """The GPUs that the NVIDIA kernel module lists."""
    devices, closed = [], []
    for path in listing(root / "proc/driver/nvidia/gpus", "*/information"):
        info = fields(read(path))
        node = root / f"dev/nvidia{info.get('Device Minor', '')}"
        if info.get("Model") and os.access(node, os.R_OK | os.W_OK):
            bus = info.get("Bus Location")
            devices.append(DeviceModel(model=info["Model"], kind="cuda", uuid=info.get("GPU UUID"), pci_bus_id=bus))
        elif info.get("Model"):
            closed.append(f"/dev/{node.name}")
    loaded = "/proc/driver/nvidia/version" if read(root / "proc/driver/nvidia/version") is not None else None
    return Shown(tuple(sorted(devices, key=lambda device: device.pci_bus_id or "")), tuple(closed), loaded)


FAMILY = Family(
    kind="cuda",
    torch_type="cuda",
    title="NVIDIA GPU",
    fix="pip install torch --index-url https://download.pytorch.org/whl/cu130, or the index that https://pytorch.org names",
    by_driver=by_kernel,
    driven=lambda build: build.cuda is not None,
    variables=("CUDA_VISIBLE_DEVICES",),
    arithmetic=PLAIN | {"tf32", "fp8"},
    compiled=True,
)
