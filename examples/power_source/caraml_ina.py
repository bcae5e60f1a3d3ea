"""A power source in a package of its own: the INA power monitors that many boards have on their supply. Copy it, rename it, replace it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from caraml.power import Channel, Reading, SourceEntry, SourceUnavailable
from caraml.power.source import timed


class Ina:
    """Files ``hwmonN/power1_input`` of the kernel, in µW (Linux documentation, hwmon/ina2xx.rst)."""

    name = "ina"
    min_interval_s = 0.0  # reading is cheap

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, Path] = {}

    def open(self) -> None:
        chips = [name.parent for name in sorted(self._root.glob("hwmon*/name")) if name.read_text().startswith("ina2")]
        self._files = {f"ina:{chip.resolve().parent.name}": chip / "power1_input" for chip in chips}
        if not self._files:
            raise SourceUnavailable(f"no INA power monitor below {self._root}")

    def channels(self) -> list[Channel]:
        return [
            Channel(name, self.name, "power_instant", "node_dc", "supply of the board", domain=name, hardware="node", update_period_s=0.002)
            for name in self._files
        ]

    def read(self) -> list[Reading]:
        return [timed(name, partial(watts, file), (OSError, ValueError)) for name, file in self._files.items()]

    def close(self) -> None:
        pass


def watts(file: Path) -> float:
    return int(file.read_text()) * 1e-6


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> Ina:
    return Ina(Path(argument or "/sys/class/hwmon"))


SOURCE = SourceEntry("ina", __name__, "INA power monitors of a board")
