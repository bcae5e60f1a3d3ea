"""AMD GPUs by what the amdgpu kernel driver shows in /sys: no ROCm library needed."""

from __future__ import annotations

from pathlib import Path

from caraml.system.files import listing, read, read_int
from caraml.system.model import DeviceModel

ROOT = Path("/")
_AMD = "0x1002"


def present(root: Path = ROOT) -> bool:
    """Whether the compute interface of the amdgpu driver is there: without it AMD graphics cannot be computed on."""
    return (root / "dev/kfd").exists()


def gpus(root: Path = ROOT) -> list[DeviceModel]:
    """Every AMD GPU (on dual-die packages: every die, as ROCm counts them), in the order of PCI addresses."""
    if not present(root):
        return []
    folders = [card / "device" for card in listing(root / "sys/class/drm", "card[0-9]*") if "-" not in card.name]
    amd = [folder for folder in folders if read(folder / "vendor") == _AMD and read_int(folder / "mem_info_vram_total")]
    return [_gpu(index, folder) for index, folder in enumerate(sorted(amd, key=_slot))]


def driver(root: Path = ROOT) -> str | None:
    """The version of the amdgpu module; ``None`` for the one that is part of the kernel."""
    return read(root / "sys/module/amdgpu/version")


def _slot(folder: Path) -> str:
    """The PCI address, from lines like ``PCI_SLOT_NAME=0000:c1:00.0``."""
    lines = (read(folder / "uevent") or "").splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("PCI_SLOT_NAME=")), "")


def _gpu(index: int, folder: Path) -> DeviceModel:
    hwmon = next(iter(listing(folder / "hwmon", "hwmon[0-9]*")), folder / "hwmon")
    cap_uw, default_uw = read_int(hwmon / "power1_cap"), read_int(hwmon / "power1_cap_default")
    return DeviceModel(
        model=read(folder / "product_name") or f"unknown AMD GPU {read(folder / 'device') or ''}".strip(),
        kind="rocm",
        index=index,
        uuid=read(folder / "unique_id"),
        pci_bus_id=_slot(folder) or None,
        memory_bytes=read_int(folder / "mem_info_vram_total"),
        tdp_w=default_uw / 1e6 if default_uw else None,
        power_limit_w=cap_uw / 1e6 if cap_uw else None,
    )
