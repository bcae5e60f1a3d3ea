"""Fake trees of kernel files, as the drivers lay them out."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, object]) -> None:
    """Create files below ``root``."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def rapl_zone(root: Path, zone: str, name: str, energy_uj: int, **known: object) -> Path:
    """One powercap zone; children are given as ``intel-rapl:0/intel-rapl:0:1``."""
    write(root, {f"{zone}/name": name, f"{zone}/energy_uj": energy_uj, f"{zone}/max_energy_range_uj": 262143328850})
    write(root, {f"{zone}/{key}": value for key, value in known.items()})
    return root / zone


def grace_rail(root: Path, number: int, rail: str, socket: int, watts: float) -> Path:
    """One rail of the ACPI power meter driver."""
    device = f"hwmon{number}/device"
    write(
        root,
        {
            f"{device}/power1_average": int(watts * 1e6),
            f"{device}/power1_average_interval": 50,
            f"{device}/power1_oem_info": f"{rail} Power Socket {socket}",
            f"hwmon{number}/name": "power_meter",
        },
    )
    return root / device


def pm_counters(root: Path, joules: dict[str, int], watts: dict[str, int]) -> None:
    """Cray's files: ``joules`` and ``watts`` by part (``""`` for the node)."""
    for quantity, unit, values in (("energy", "J", joules), ("power", "W", watts)):
        write(root, {f"{part}_{quantity}" if part else quantity: f"{value} {unit} 1700000000000000 us" for part, value in values.items()})
    write(root, {"freshness": 100, "generation": 7, "startup": 1700000000, "version": 2, "raw_scan_hz": 10, "power_cap": "0 W 0 us"})


def drm_card(root: Path, number: int, pci: str, driver: str, files: dict[str, object], **known: object) -> Path:
    """A graphics card: ``card<n>/device`` is a link to the PCI device, as in the kernel's tree; ``known`` are files of that device."""
    device = root / "devices" / pci
    write(device, known)
    write(device, {f"hwmon/hwmon{number}/{name}": value for name, value in files.items()})
    write(device, {f"hwmon/hwmon{number}/name": driver, "vendor": {"amdgpu": "0x1002"}.get(driver, "0x8086")})
    card = root / f"card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(device)
    return device / "hwmon" / f"hwmon{number}"
