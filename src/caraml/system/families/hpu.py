"""Intel Gaudi accelerators (``hpu``, collectives by HCCL), which torch drives by a plug-in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from caraml.system.families.family import Family, Shown, pci_devices

_MODULE = "habana_frameworks"


def by_kernel(root: Path) -> Shown:
    """What the habanalabs driver shows."""
    shown = pci_devices(
        root, "accel/accel[0-9]*", "0x1da3", lambda folder: root / "dev/accel" / folder.parent.name, unnamed="Intel Gaudi", kind="hpu"
    )
    return replace(shown, loaded="/sys/module/habanalabs" if (root / "sys/module/habanalabs").exists() else None)


FAMILY = Family(
    kind="hpu",
    torch_type="hpu",
    title="Intel Gaudi",
    fix="install the torch of the Gaudi software with habana-torch-plugin (https://docs.habana.ai)",
    by_driver=by_kernel,
    driven=lambda build: any(module.startswith(_MODULE) for module in build.plugins),
    variables=("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
)
