"""Huawei Ascend accelerators (``npu``, collectives by HCCL), which torch drives by a plug-in."""

from __future__ import annotations

import os
from pathlib import Path

from caraml.system.families.family import Family, Shown
from caraml.system.files import listing
from caraml.system.model import DeviceModel


def by_kernel(root: Path) -> Shown:
    """What the davinci driver shows: device files, and nothing of what stands behind them."""
    files = [path for path in listing(root / "dev", "davinci[0-9]*") if path.name[7:].isdigit()]
    open_here = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    devices = tuple(DeviceModel(model="Huawei Ascend", kind="npu", index=int(path.name[7:])) for path in open_here)
    loaded = "/dev/davinci_manager" if (root / "dev/davinci_manager").exists() else None
    return Shown(devices, tuple(f"/dev/{path.name}" for path in files if path not in open_here), loaded)


FAMILY = Family(
    kind="npu",
    torch_type="npu",
    title="Huawei Ascend",
    fix="pip install torch-npu, of the version of torch and of the CANN software",
    by_driver=by_kernel,
    driven=lambda build: any(module.startswith("torch_npu") for module in build.plugins),
    variables=("ASCEND_RT_VISIBLE_DEVICES",),
    arithmetic=frozenset({"fp32", "fp16", "bf16"}),
)
