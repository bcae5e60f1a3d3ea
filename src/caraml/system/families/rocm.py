"""AMD GPUs. Torch calls their device ``cuda``."""

from __future__ import annotations

from pathlib import Path

from caraml.system import rocm
from caraml.system.families.family import PLAIN, Family, Shown
from caraml.system.visible import ROCM


def by_kernel(root: Path) -> Shown:
    """What the amdgpu driver shows."""
    return Shown(tuple(rocm.gpus(root)), loaded="/dev/kfd" if rocm.present(root) else None)


FAMILY = Family(
    kind="rocm",
    torch_type="cuda",
    title="AMD GPU",
    fix="pip install torch --index-url https://download.pytorch.org/whl/rocm7.0, or the index that https://pytorch.org names",
    by_driver=by_kernel,
    driven=lambda build: build.hip is not None,
    variables=tuple(name for layer in ROCM for name in layer),
    arithmetic=PLAIN | {"tf32", "fp8"},
    compiled=True,
)
