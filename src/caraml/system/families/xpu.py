"""Intel GPUs (torch's ``xpu``, collectives by oneCCL as ``xccl``)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from caraml.system.families.family import Family, Shown, pci_devices
from caraml.system.files import listing

INTEGRATED = "Intel integrated graphics"
_OF_THE_PROCESSOR = "0000:00:02.0"
"""PCI address of the graphics inside an Intel processor."""


def by_kernel(root: Path) -> Shown:
    """What the i915 and xe drivers show, graphics inside of processors among it."""

    def node(folder: Path) -> Path | None:
        return next((root / "dev/dri" / path.name for path in listing(folder / "drm", "renderD[0-9]*")), None)

    shown = pci_devices(root, "drm/card[0-9]*", "0x8086", node, unnamed="Intel GPU", kind="xpu")
    named = (d.model_copy(update={"model": INTEGRATED}) if d.pci_bus_id == _OF_THE_PROCESSOR else d for d in shown.devices)
    loaded = next((f"/sys/module/{name}" for name in ("xe", "i915") if (root / "sys/module" / name).exists()), None)
    return replace(shown, devices=tuple(named), loaded=loaded)


FAMILY = Family(
    kind="xpu",
    torch_type="xpu",
    title="Intel GPU",
    fix="pip install torch --index-url https://download.pytorch.org/whl/xpu",
    by_driver=by_kernel,
    driven=lambda build: build.xpu is not None,
    variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
    compiled=True,
)
