"""GPUs whose kernel driver shows power or energy: amdgpu (AMD), xe and i915 (Intel). No vendor library is needed.

``/sys/class/drm/card<n>/device/hwmon/hwmon<m>/``: amdgpu ``power1_average`` (mean) or ``power1_input`` (instantaneous) in
µW; xe ``energy1_input`` (card) and ``energy2_input`` (package, part of the card) in µJ; i915 ``energy1_input`` in µJ
(Linux documentation, hwmon/sysfs-interface and the drivers' ABI files). Integrated graphics have none of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from caraml.power.model import Channel, Kind
from caraml.power.sources.files import MICRO, FileSource, SensorFile, numbered, read_number, read_text
from caraml.power.sources.visible import select
from caraml.system.visible import ROCM

ROOT = Path("/sys/class/drm")
AMD_WINDOW_S = 1.0
"""Averaging time of ``power1_average``; the driver does not say, so this is the cautious value."""
AMD_PERIOD_S = 0.01
INTEL_PERIOD_S = 0.01


class DrmSource(FileSource):
    """Cards of one vendor, found through their kernel driver."""

    def __init__(self, name: str, drivers: tuple[str, ...], devices: Sequence[str] | None, root: Path) -> None:
        super().__init__()
        self.name = name
        self._drivers, self._devices, self._root = drivers, devices, root

    def find(self) -> Iterator[SensorFile]:
        """The sensors of every card that is visible to this process, by PCI address."""
        cards: dict[str, Path] = {}
        for card in sorted(self._root.glob("card*"), key=lambda d: numbered(d.name)):
            for hwmon in (card / "device" / "hwmon").glob("hwmon*"):
                if read_text(hwmon / "name") in self._drivers:
                    cards[os.path.basename(os.path.realpath(card / "device"))] = hwmon  # noqa: PTH119
        if not cards:
            return
        for pci in select(list(cards), {}, self._devices, ROCM if self.name == "amdgpu" else (), self.name):
            yield from self._intel(pci, cards[pci]) if self.name == "intel" else self._amd(pci, cards[pci])

    def _amd(self, pci: str, hwmon: Path) -> Iterator[SensorFile]:
        # The second die of a dual-die card has a device but no power file: its package is the first die's.
        options: dict[str, tuple[Kind, float]] = {"power1_input": ("power_instant", 0.0), "power1_average": ("power_mean", AMD_WINDOW_S)}
        for file, (kind, window) in options.items():
            if read_number(hwmon / file) is not None:
                cap = read_number(hwmon / "power1_cap_max", MICRO)
                yield SensorFile(self._channel(pci, pci, kind, window=window, period=AMD_PERIOD_S, max_power=cap), hwmon / file)
                return

    def _intel(self, pci: str, hwmon: Path) -> Iterator[SensorFile]:
        card, package = hwmon / "energy1_input", hwmon / "energy2_input"
        limit = read_number(hwmon / "power1_max", MICRO) or read_number(hwmon / "power1_rated_max", MICRO)
        if card.exists():
            yield SensorFile(self._channel(pci, pci, "energy", period=INTEL_PERIOD_S, max_power=limit), card)
        if package.exists():
            inner = self._channel(pci, f"{pci}:package", "energy", period=INTEL_PERIOD_S, max_power=limit, parent=pci)
            yield SensorFile(inner, package)

    def _channel(
        self,
        pci: str,
        domain: str,
        kind: Kind,
        *,
        period: float,
        max_power: float | None,
        window: float = 0.0,
        parent: str | None = None,
    ) -> Channel:
        return Channel(
            id=f"{self.name}:{domain}:{kind}",
            source=self.name,
            kind=kind,
            boundary="device",
            label=f"{'AMD' if self.name == 'amdgpu' else 'Intel'} GPU {pci}",
            domain=domain,
            hardware="amd" if self.name == "amdgpu" else "intel",
            resolution=MICRO,
            update_period_s=period,
            mean_window_s=window,
            max_power_w=2 * max_power if max_power else None,
            parent=parent,
        )

    def absence(self) -> str:
        """The reason if no card was found."""
        return f"no card of the drivers {', '.join(self._drivers)} with a power sensor below {self._root}"


def create_amd(argument: str, devices: Sequence[str] | None, automatic: bool) -> DrmSource:
    """``amdgpu``, or ``amdgpu:/path`` for a tree elsewhere."""
    return DrmSource("amdgpu", ("amdgpu",), devices, Path(argument) if argument else ROOT)


def create_intel(argument: str, devices: Sequence[str] | None, automatic: bool) -> DrmSource:
    """``intel``, or ``intel:/path`` for a tree elsewhere."""
    return DrmSource("intel", ("xe", "i915"), devices, Path(argument) if argument else ROOT)
