"""A power source in a package of its own: the INA power monitors that many boards have on their supply. Copy it, rename it, replace it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from caraml.power import Channel, SourceEntry, SourceUnavailable
from caraml.power.source import AskedSensors


class Ina(AskedSensors):
    """Files ``hwmonN/power1_input`` of the kernel, in µW (Linux documentation, hwmon/ina2xx.rst)."""

    name = "ina"
    min_interval_s = 0.0  # reading is cheap

    def open(self) -> None:
        root = Path(self.argument or "/sys/class/hwmon")
        for label in sorted(root.glob("hwmon*/name")):
            if label.read_text().startswith("ina2"):
                chip = f"ina:{(label.parent / 'device').resolve().name}"  # its address on the bus: the number of hwmonN may change
                channel = Channel(
                    chip, self.name, "power_instant", "node_dc", "supply of the board", domain=chip, hardware="node", update_period_s=0.002
                )
                self.add(channel, partial(watts, label.with_name("power1_input")))
        if not self.listed:
            raise SourceUnavailable(f"no INA power monitor below {root}")


def watts(file: Path) -> float:
    return int(file.read_text()) * 1e-6


SOURCE = SourceEntry("ina", __name__, "INA power monitors of a board", factory="Ina")
