"""HPE Cray EX node energy: ``/sys/cray/pm_counters``, 10 Hz, readable by every user.

Lines are ``<int> J <time> us`` and ``<int> W <time> us``. The node's counter includes the others and more than them.
A set of values belongs together if ``freshness`` is the same before and after reading it. ``startup`` changes when the
node controller restarts and the counters with it. (HPE Cray EX documentation, "pm_counters"; field list as on LUMI.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from caraml.power.model import Boundary, Channel, Kind, Reading
from caraml.power.source import SourceUnavailable
from caraml.power.sources.files import FileSource, SensorFile, numbered, read_text

ROOT = Path("/sys/cray/pm_counters")
UPDATE_PERIOD_S = 0.1
RETRIES = 3
FILE = re.compile(r"^(?:(cpu|memory|accel)(\d*)_)?(energy|power)$")
VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


class CraySource(FileSource):
    """Node, processors, memory and accelerator modules of a Cray EX node."""

    name = "cray"

    def __init__(self, root: Path = ROOT, drm: Path = Path("/sys/class/drm")) -> None:
        super().__init__()
        self._root, self._drm = root, drm
        self._startup: str | None = None

    def find(self) -> Iterator[SensorFile]:
        """A counter and a power channel per part that the node controller measures."""
        if not self._root.exists():
            raise SourceUnavailable(f"{self._root} does not exist: not an HPE Cray EX node")
        self._startup = read_text(self._root / "startup")
        files = {p.name: p for p in self._root.iterdir() if FILE.match(p.name)}
        for name in sorted(files, key=lambda n: (numbered(n), n)):
            yield SensorFile(self._channel(name, set(files)), files[name], scale=1.0)

    def _channel(self, name: str, present: set[str]) -> Channel:
        match = FILE.match(name)
        assert match is not None, name
        part, number, quantity = match[1] or "node", match[2] or "", match[3]
        boundaries: dict[str, Boundary] = {"node": "node_dc", "cpu": "cpu", "memory": "cpu", "accel": "module"}
        kind: Kind = "energy" if quantity == "energy" else "power_instant"
        parent = "cray:node"
        if number and f"{part}_{quantity}" in present:
            parent = f"cray:{part}"
        return Channel(
            id=f"cray:{name}",
            source=self.name,
            kind=kind,
            boundary=boundaries[part],
            label=f"{part} {number}".strip(),
            domain=f"cray:{part}{number}",
            hardware={"node": "node", "accel": self._accelerator()}.get(part, "cpu"),
            resolution=1.0,
            update_period_s=UPDATE_PERIOD_S,
            parent=None if part == "node" else parent,
            flags=("module_scope",) if part == "accel" else (),
        )

    def _accelerator(self) -> str:
        """Vendor of the node's accelerators, so that their own counters and these are known as alternatives."""
        vendors = (read_text(card / "device" / "vendor") for card in self._drm.glob("card[0-9]*"))
        return next((VENDORS[v] for v in vendors if v in VENDORS), "accelerator")

    def read(self) -> list[Reading]:
        """One consistent set of values. A restarted controller ends the series: its counters begin anew."""
        for _ in range(RETRIES):
            before = read_text(self._root / "freshness")
            readings = super().read()
            if read_text(self._root / "freshness") == before:
                break
        if read_text(self._root / "startup") != self._startup:
            return [replace(r, value=None, error="the node controller restarted, and its counters with it") for r in readings]
        return readings


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> CraySource:
    """``cray``, or ``cray:/path`` for a tree elsewhere."""
    return CraySource(Path(argument)) if argument else CraySource()
