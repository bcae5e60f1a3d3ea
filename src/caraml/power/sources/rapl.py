"""Processor energy from the kernel's powercap tree (RAPL on Intel, the same tree on AMD Zen).

Layout: ``/sys/class/powercap/intel-rapl:<p>/{name,energy_uj,max_energy_range_uj}`` and children ``intel-rapl:<p>:<c>``;
energies in µJ (Linux documentation, power/powercap/powercap.rst). A package contains its core and uncore domains and
not its memory; psys, where there is one, contains everything on the platform. Twins below ``intel-rapl-mmio`` show the
same packages through another register and are left out. Since CVE-2020-8694 the counters are readable by root only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from caraml.power.counter import DEFAULT_MAX_POWER_W
from caraml.power.model import Boundary, Channel
from caraml.power.source import SourceUnavailable
from caraml.power.sources.files import MICRO, FileSource, SensorFile, read_number
from caraml.system.files import read

UPDATE_PERIOD_S = 0.001
"""RAPL counters are refreshed about every millisecond (Intel SDM vol. 3, section on RAPL interfaces)."""
RESOLUTION_J = 61e-6
"""Energy unit of most registers, 2^-14 J, where the kernel does not tell."""
HIGHEST_COUNT, COARSEST_J = 2**32 - 1, 1.0
"""The registers count this many units, and ``max_energy_range_uj`` is that many (Linux, drivers/powercap/intel_rapl_common.c). The
platform's unit is 1 J on servers since Sapphire Rapids."""
LEAST_MAX_POWER_W = 150.0
"""What a processor may draw for moments, however small its limits are: those of mobile ones are a fraction of it."""


class RaplSource(FileSource):
    """All RAPL domains of the node, each counted once and nested as the hardware nests them: ``rapl``, or ``rapl:/path``."""

    name = "rapl"
    root = Path("/sys/class/powercap")
    fix = "sudo chmod -R a+r /sys/class/powercap/intel-rapl*/ (holds until the machine restarts)"

    def open(self) -> None:
        """Find the domains, without those that show exactly 0: the processor lists them but does not fill them. So may not a whole package
        beside others that count: it has no number then, and no sum is made without it."""
        super().open()
        empty = {c.id for c in self.listed if self.or_none(self.questions[c.id]) == 0}
        packages = {c.id for c in self.listed if c.boundary == "cpu" and c.domain == f"cpu:{c.label}" and "-die-" not in c.label}
        for channel in [c for c in self.listed if c.id in (empty - packages if packages - empty else empty)]:
            self.drop(channel)
        if not self.listed:
            raise SourceUnavailable(f"all RAPL counters below {self.root} show 0: they do not work on this machine")
        self._merge_mirrors()

    def find(self) -> Iterator[SensorFile]:
        """Packages and the domains inside them, without twins, in the order of their numbers."""
        zones = {d.name: d for d in self.root.glob("intel-rapl:*")}
        for package in list(zones.values()):
            zones.update({d.name: d for d in package.glob("intel-rapl:*:*")})
        found = [d for d in zones.values() if (d / "energy_uj").exists()]
        if not found:
            raise self._why_absent()
        for zone in sorted(found, key=lambda d: [int(number) for number in d.name.split(":")[1:]]):
            yield SensorFile(self._channel(zone), zone / "energy_uj")

    def _why_absent(self) -> SourceUnavailable:
        if not self.root.exists():
            return SourceUnavailable(f"{self.root} does not exist: no RAPL here, or a virtual machine that hides it")
        if any(self.root.glob("intel-rapl*")):
            fix = "start the container with -v /sys/devices/virtual/powercap:/sys/devices/virtual/powercap:ro"
            return SourceUnavailable(f"{self.root} lists RAPL but shows no counters: masked in this container", fix, kind="masked")
        return SourceUnavailable(f"{self.root} is empty: the RAPL driver is not loaded", "sudo modprobe intel_rapl_msr")

    def _channel(self, zone: Path) -> Channel:
        label = read(zone / "name") or zone.name
        numbers = zone.name.split(":")[1:]
        package = read(self.root / f"intel-rapl:{numbers[0]}" / "name") or f"zone-{numbers[0]}"
        inner = len(numbers) > 1
        boundary: Boundary = "node_dc" if label == "psys" or label.startswith("psys-") else "cpu"
        limits = (read_number(file, MICRO) for word in ("max_power", "power_limit") for file in zone.glob(f"constraint_*_{word}_uw"))
        limit, wrap = max(filter(None, limits), default=None), read_number(zone / "max_energy_range_uj", MICRO)
        return Channel(
            id=f"rapl:{':'.join(numbers)}:{label}",
            source=self.name,
            kind="energy",
            boundary=boundary,
            label=f"{package} {label}" if inner else label,
            domain=f"cpu:{package}:{label}" if inner else f"cpu:{label}",
            hardware="node" if boundary == "node_dc" else "cpu",
            resolution=min(wrap / HIGHEST_COUNT, COARSEST_J) if wrap else RESOLUTION_J,
            update_period_s=UPDATE_PERIOD_S,
            wrap_j=wrap,
            # A limit is an average, and short peaks go beyond it; where a board sets none, its register holds thousands of watts.
            max_power_w=min(max(2 * limit, LEAST_MAX_POWER_W), DEFAULT_MAX_POWER_W[boundary]) if limit else None,
            # Memory hangs below its package in the tree, but the package's counter does not include it.
            parent=f"cpu:{package}" if inner and label != "dram" else None,
        )

    def _merge_mirrors(self) -> None:
        """Dies of one package, or packages of one platform, that all show one counter: keep the first and name the others as its users.

        Two counters that run for themselves are never equal to the microjoule; a mirror is, in one of two looks.
        """
        for channel in list(self.listed):
            before = self.listed[: self.listed.index(channel)]
            twin = next((c for c in before if _of_one(c, channel) and self._equal(c, channel)), None)
            if twin is not None:
                self.drop(channel)
                users = (*(twin.users or (twin.label,)), channel.label)
                flags = () if twin.boundary == "node_dc" else ("shared_device",)
                self.listed[self.listed.index(twin)] = replace(twin, users=users, flags=flags)

    def _equal(self, first: Channel, second: Channel) -> bool:
        """Do the two counters show one value, or does a refresh between the two looks explain the difference?"""
        one, other = (partial(self.or_none, self.questions[channel.id]) for channel in (first, second))
        return any(one() == other() is not None for _ in range(3))


def _of_one(first: Channel, second: Channel) -> bool:
    """Are these two dies of one package, or both the platform?"""
    if first.boundary == second.boundary == "node_dc":
        return True
    return "-die-" in first.label and first.parent == second.parent and first.label.split("-die-")[0] == second.label.split("-die-")[0]
