"""NVIDIA Grace and Grace-Hopper power rails, from the kernel's ACPI power meter driver.

``/sys/class/hwmon/hwmon<i>/device/{power1_average,power1_average_interval,power1_oem_info}`` in µW and ms; always a
mean. The rail's name says what it is: ``Module Power Socket 0`` contains the GPU, its memory and the regulators' loss
besides ``Grace Power Socket 0``, which contains ``CPU`` and ``SysIO`` (NVIDIA Grace Performance Tuning Guide).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from caraml.power.model import Boundary, Channel
from caraml.power.sources.files import FileSource, SensorFile, numbered, read_number, read_text

ROOT = Path("/sys/class/hwmon")
DEFAULT_INTERVAL_S = 0.05
RAIL = re.compile(r"^(Module|Grace|CPU|SysIO)\s+Power\s+Socket\s+(\d+)$")
PARENT = {"Grace": "Module", "CPU": "Grace", "SysIO": "Grace"}


class GraceSource(FileSource):
    """The rails of every socket, nested as the board nests them."""

    name = "grace"

    def __init__(self, root: Path = ROOT) -> None:
        super().__init__()
        self._root = root

    def find(self) -> Iterator[SensorFile]:
        """One power channel per rail."""
        rails: dict[tuple[str, str], Path] = {}
        for hwmon in sorted(self._root.glob("hwmon*"), key=lambda d: numbered(d.name)):
            match = RAIL.match(read_text(hwmon / "device" / "power1_oem_info") or "")
            if match and (hwmon / "device" / "power1_average").exists():
                rails[match[1], match[2]] = hwmon / "device"
        for (rail, socket), device in rails.items():
            yield SensorFile(self._channel(rail, socket, device, rails), device / "power1_average")

    def _channel(self, rail: str, socket: str, device: Path, rails: dict[tuple[str, str], Path]) -> Channel:
        window = read_number(device / "power1_average_interval", 1e-3) or DEFAULT_INTERVAL_S
        parent = PARENT.get(rail)
        while parent and (parent, socket) not in rails:
            parent = PARENT.get(parent)
        boundary: Boundary = "module" if rail == "Module" else "cpu"
        return Channel(
            id=f"grace:{socket}:{rail}",
            source=self.name,
            kind="power_mean",
            boundary=boundary,
            label=f"{rail} socket {socket}",
            domain=f"grace:{socket}:{rail}",
            # The module is what NVML's module scope sees too: the two are alternatives.
            hardware="nvidia" if boundary == "module" else "cpu",
            resolution=1e-6,
            update_period_s=window,
            mean_window_s=window,
            parent=f"grace:{socket}:{parent}" if parent else None,
            flags=("module_scope",) if boundary == "module" else (),
        )

    def absence(self) -> str:
        """The reason if no rail was found."""
        return f"no Grace power rail below {self._root}"


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> GraceSource:
    """``grace``, or ``grace:/path`` for a tree elsewhere."""
    return GraceSource(Path(argument) if argument else ROOT)
