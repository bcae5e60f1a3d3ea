"""Sensors that are files of the kernel, kept open and read from their start: a base class, GPUs, Grace and Cray nodes.

- ``amdgpu``, ``intel``: GPUs whose driver shows power or energy, in ``/sys/class/drm/card<n>/device/hwmon/hwmon<m>/``: amdgpu
  ``power1_average`` (mean) or ``power1_input`` (instantaneous) in µW; xe ``energy1_input`` (card) and ``energy2_input`` (package, part of
  the card) in µJ; i915 ``energy1_input`` in µJ (Linux documentation, hwmon/sysfs-interface and the drivers' ABI files). Intel's integrated
  graphics have none of them; AMD's show their whole processor's power, and ``power1_cap`` on Van Gogh only.
- ``grace``: power rails of NVIDIA Grace and Grace-Hopper, from the kernel's ACPI power meter driver, in
  ``/sys/class/hwmon/hwmon<i>/device/{power1_average,power1_average_interval,power1_oem_info}`` in µW and ms; always a mean. The rail's name
  says what it is: ``Module Power Socket 0`` contains the GPU, its memory and the regulators' loss besides ``Grace Power Socket 0``, which
  contains ``CPU`` and ``SysIO`` (NVIDIA Grace Performance Tuning Guide).
- ``cray``: an HPE Cray EX node's ``/sys/cray/pm_counters``, 10 Hz, readable by every user. Lines are ``<int> J <time> us`` and
  ``<int> W <time> us``. The node's counter includes the others and more than them. A set of values belongs together if ``freshness`` is the
  same before and after reading it. ``startup`` changes when the node controller restarts and the counters with it. (HPE Cray EX
  documentation, "pm_counters"; field list as on LUMI.)
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from caraml.power.counter import UNKNOWN_LAG_S
from caraml.power.model import SOME, Boundary, Channel, Kind, Reading
from caraml.power.source import AskedSensors, SourceUnavailable
from caraml.system.files import APUS, ROCM, Masks, is_processor_graphics, listing, opens, partition_of, read, rocm_devices

MICRO = 1e-6
"""The kernel counts power and energy in µW and µJ."""


@dataclass(frozen=True, slots=True)
class SensorFile:
    """A sensor file, what it measures, and the factor from its unit to J or W."""

    channel: Channel
    path: Path
    scale: float = MICRO


class FileSource(AskedSensors):
    """Base of the sources whose sensors are files: they say what they find, the rest is common."""

    root = Path()
    """Where the files are, unless the source's argument says where else."""
    fix: str | None = None
    """Command that opens files which only root may read."""
    failures = (OSError, ValueError, IndexError)
    """What reading a kernel file can raise: the device is gone, or the text is not a number."""

    def __init__(self, argument: str | Path = "", devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        super().__init__(argument, devices, automatic)
        self.root = Path(argument) if argument else self.root
        self._opened: dict[str, int] = {}
        """By channel the descriptor of its file."""

    def find(self) -> Iterator[SensorFile]:
        """All sensors of this family, readable or not. Raises ``SourceUnavailable`` if there can be none."""
        raise NotImplementedError

    def open(self) -> None:
        """Open every sensor; fail if none may be read. One that may not, beside others, has no readings, and leaves no sum without it."""
        closed: list[SensorFile] = []
        for found in self.find():
            try:
                descriptor = self._opened[found.channel.id] = os.open(found.path, os.O_RDONLY)
            except PermissionError:
                closed.append(found)
                continue
            self.add(found.channel, partial(_first_number, descriptor, found.scale))
        if not self.listed:
            if closed:
                raise SourceUnavailable(_refusal(closed[0]), self.fix, kind="unreadable")
            raise SourceUnavailable("; ".join(self.left_out) or self.absence())
        for found in closed:
            self.add(found.channel, partial(_refuse, f"{_refusal(found)}; fix: {self.fix}" if self.fix else _refusal(found)))

    def absence(self) -> str:
        """The reason if there is nothing."""
        return "no such sensor on this machine"

    def drop(self, channel: Channel) -> None:
        """Leave a channel out that was opened."""
        self.listed.remove(channel)
        del self.questions[channel.id]
        if channel.id in self._opened:
            os.close(self._opened.pop(channel.id))

    def close(self) -> None:
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()


def _refusal(found: SensorFile) -> str:
    return f"{found.path} exists, but only root may read it"


def _refuse(why: str) -> float:
    raise PermissionError(why)


def _first_number(descriptor: int, scale: float) -> float:
    """In an open file, read from its start by one system call, in the unit that ``scale`` makes of it."""
    return int(os.pread(descriptor, 4096, 0).split()[0]) * scale


def read_number(path: Path, scale: float = 1.0) -> float | None:
    """The first number in a small file, or ``None``."""
    text = read(path)
    try:
        return float(text.split()[0]) * scale if text else None
    except ValueError:
        return None


class _DrmSource(FileSource):
    """GPUs of one vendor, found through their kernel driver."""

    root = Path("/sys/class/drm")
    nodes = Path("/dev/dri")
    drivers: tuple[str, ...]
    masks: Masks = ()
    vendor: str

    def find(self) -> Iterator[SensorFile]:
        cards: dict[str, Path] = {}
        for card in listing(self.root, "card*"):
            for hwmon in (card / "device" / "hwmon").glob("hwmon*"):
                if read(hwmon / "name") in self.drivers:
                    cards[(card / "device").resolve().name] = hwmon
        devices = {pci: hwmon.parents[1] for pci, hwmon in cards.items()}
        nodes = {pci: self.render_nodes(device) for pci, device in devices.items()}
        # As where a job has some of the node's cards.
        closed = {pci: f"{pci}: {files[0]} does not open" for pci, files in nodes.items() if files and not any(map(opens, files))}
        present = {name: pci for pci in self.ordered(cards) if pci not in closed for name in self.counted(pci, devices[pci], nodes[pci])}
        aliases = {name: [pci, *self.aliases(devices[pci])] for name, pci in present.items()}
        if closed and not present and self.devices is None:
            raise SourceUnavailable("; ".join(closed.values()))
        asked = [why for pci, why in closed.items() if {pci, *self.aliases(devices[pci])} & {*(self.devices or ())}]
        chosen = self.choose(list(present), aliases, self.masks, self.name, asked) if cards else ()
        heads = self.heads(cards)
        for head in dict.fromkeys(heads[present[name]] for name in chosen):
            dies = tuple(pci for pci in self.ordered(cards) if heads[pci] == head)
            users, flags = (dies, ("dual_die_parent",)) if len(dies) > 1 else ((), ())
            if partition_of(devices[head]):
                users, flags = tuple(name for name, pci in present.items() if pci == head), ("shared_device",)
            for sensor in self.sensors(head, cards[head]):
                yield replace(sensor, channel=replace(sensor.channel, users=users, flags=(*flags, *sensor.channel.flags)))

    def render_nodes(self, device: Path) -> list[Path]:
        """The device files by which a card is computed on."""
        return [self.nodes / node.name for node in listing(device / "drm", "renderD*")]

    def counted(self, pci: str, device: Path, nodes: Sequence[Path]) -> list[str]:
        """The devices that the vendor's runtime counts a card as, by names of their own where they are several."""
        return [pci]

    def heads(self, cards: Mapping[str, Path]) -> dict[str, str]:
        """Of each card the one that speaks for its package."""
        return {pci: pci for pci in cards}

    def ordered(self, cards: Iterable[str]) -> list[str]:
        """Cards in the order of the vendor's runtime, in which masks count."""
        return list(cards)

    def aliases(self, device: Path) -> list[str]:
        return []

    def sensors(self, pci: str, hwmon: Path) -> Iterator[SensorFile]:
        """Those of one card."""
        raise NotImplementedError

    def channel(self, pci: str, kind: Kind, limit: float | None, window: float = 0.0, part: str = "") -> Channel:
        """Of a card, or of a ``part`` of it."""
        domain = f"{pci}:{part}" if part else pci
        return Channel(
            id=f"{self.name}:{domain}:{kind}",
            source=self.name,
            kind=kind,
            boundary="device",
            label=f"{self.vendor} GPU {pci}",
            domain=domain,
            hardware=self.vendor.lower(),
            resolution=MICRO,
            update_period_s=0.01,
            lag_s=UNKNOWN_LAG_S,
            mean_window_s=window,
            max_power_w=2 * limit if limit else None,
            parent=pci if part else None,
        )

    def absence(self) -> str:
        return f"no card of the drivers {', '.join(self.drivers)} with a power sensor below {self.root}"


DUAL_DIE = {"0x7408": "MI250X", "0x740c": "MI250"}
"""AMD's packages of which each die is a device: PCI number and name. The kernel tells the one, AMD's library the other."""


class AmdGpuSource(_DrmSource):
    """AMD GPUs: ``amdgpu``, or ``amdgpu:/path`` for a tree elsewhere."""

    name, drivers, masks, vendor = "amdgpu", ("amdgpu",), ROCM, "AMD"

    def ordered(self, cards: Iterable[str]) -> list[str]:
        return sorted(cards)

    def render_nodes(self, device: Path) -> list[Path]:
        parts = self._parts(device)
        return [self.nodes / f"renderD{part['drm_render_minor']}" for part in parts] if parts else super().render_nodes(device)

    def counted(self, pci: str, device: Path, nodes: Sequence[Path]) -> list[str]:
        parts = self._parts(device)
        return [f"{pci}/{n}" for n in range(sum(map(opens, nodes)))] if parts else [pci]

    def _parts(self, device: Path) -> list[dict[str, int]]:
        """What the compute driver says of the parts of a card that is divided; none of a whole one, or where it tells nothing."""
        if not partition_of(device):
            return []
        parts = rocm_devices(self.root / "../kfd/kfd/topology/nodes").get(device.resolve().name.rpartition(".")[0], [])
        return [part for part in parts if "drm_render_minor" in part]

    def aliases(self, device: Path) -> list[str]:
        unique = read(device / "unique_id")
        return [f"GPU-{unique}", unique] if unique else []

    def heads(self, cards: Mapping[str, Path]) -> dict[str, str]:
        """The second die of a dual-die card has no power, or 0: its package's is that of the die before it."""
        found: dict[str, str] = {}
        last: dict[str, str] = {}
        for pci in self.ordered(cards):
            model = read(cards[pci].parents[1] / "device") or ""
            silent = not any(read_number(cards[pci] / file) for file in ("power1_input", "power1_average"))
            found[pci] = last[model] if silent and model in DUAL_DIE and model in last else pci
            last[model] = found[pci]
        return found

    def sensors(self, pci: str, hwmon: Path) -> Iterator[SensorFile]:
        """Instantaneous power, else its mean over a time that the driver does not say, for which 1 s is the cautious value."""
        options: tuple[tuple[str, Kind, float], ...] = (("power1_input", "power_instant", 0.0), ("power1_average", "power_mean", 1.0))
        for file, kind, window in options:
            if read_number(hwmon / file) is not None:
                package = read(hwmon.parents[1] / "device") in APUS
                limited = package or any(hwmon.glob("power1_cap*"))
                why = "is" if is_processor_graphics(hwmon) else "" if limited else "has no limit of its power:"
                if why:
                    self.left_out.append(f"{pci} {why} a processor's graphics, with the power of all of it")
                    return
                channel = self.channel(pci, kind, read_number(hwmon / "power1_cap_max", MICRO), window)
                if package:
                    channel = replace(channel, boundary="module", flags=("module_scope",))
                yield SensorFile(channel, hwmon / file)
                return


class IntelSource(_DrmSource):
    """Intel GPUs: ``intel``, or ``intel:/path`` for a tree elsewhere."""

    name, drivers, vendor = "intel", ("xe", "i915"), "Intel"

    def sensors(self, pci: str, hwmon: Path) -> Iterator[SensorFile]:
        limit = read_number(hwmon / "power1_max", MICRO) or read_number(hwmon / "power1_rated_max", MICRO)
        for file, part in (("energy1_input", ""), ("energy2_input", "package")):
            if (hwmon / file).exists():
                yield SensorFile(self.channel(pci, "energy", limit, part=part), hwmon / file)


DEFAULT_INTERVAL_S = 0.05
RAIL = re.compile(r"^(Module|Grace|CPU|SysIO)\s+Power\s+Socket\s+(\d+)$")
PARENT = {"Grace": "Module", "CPU": "Grace", "SysIO": "Grace"}


class GraceSource(FileSource):
    """The rails of every socket, nested as the board nests them: ``grace``, or ``grace:/path`` for a tree elsewhere."""

    name = "grace"
    root = Path("/sys/class/hwmon")

    def find(self) -> Iterator[SensorFile]:
        rails: dict[tuple[str, str], Path] = {}
        for hwmon in listing(self.root, "hwmon*"):
            match = RAIL.match(read(hwmon / "device" / "power1_oem_info") or "")
            if match and (hwmon / "device" / "power1_average").exists():
                rails[match[1], match[2]] = hwmon / "device"
        gpus = self._gpus()
        if gpus and self.uses_no_accelerator:  # on modules without a GPU all is the processor's
            whole = [key for key in rails if key[0] == "Module"]
            self.left_out += [f"{rail} Power Socket {socket} includes a GPU, which is not used" for rail, socket in whole]
            rails = {key: device for key, device in rails.items() if key not in whole}
            if whole and not rails:
                raise SourceUnavailable("; ".join(self.left_out), kind="unused")
        for (rail, socket), device in rails.items():
            yield SensorFile(self._channel(rail, socket, device, rails, gpus), device / "power1_average")

    def _gpus(self) -> dict[str, str | None]:
        """PCI addresses of the machine's NVIDIA GPUs, each on one of the modules, and of each the socket where that is told."""
        devices = listing(self.root / "../../bus/pci/devices", "*")
        gpus = (d for d in devices if read(d / "vendor") == "0x10de" and (read(d / "class") or "").startswith("0x03"))
        nodes = {gpu.name: read(gpu / "numa_node") for gpu in gpus}  # -1 where the firmware does not tell
        return {gpu: node if node and node.isdigit() else None for gpu, node in nodes.items()}

    def _channel(self, rail: str, socket: str, device: Path, rails: dict[tuple[str, str], Path], gpus: Mapping[str, str | None]) -> Channel:
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
            lag_s=UNKNOWN_LAG_S,
            mean_window_s=window,
            parent=f"grace:{socket}:{parent}" if parent else None,
            flags=("module_scope",) if boundary == "module" else (),
            users=tuple(gpu for gpu, home in gpus.items() if home in (None, socket)) if boundary == "module" else (),
        )

    def absence(self) -> str:
        return f"no Grace power rail below {self.root}"


CRAY_PERIOD_S = 0.1
CRAY_RETRIES = 3
CRAY_FILE = re.compile(r"^(?:(cpu|memory|accel)(\d*)_)?(energy|power)$")
VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}


class CraySource(FileSource):
    """Node, processors, memory and accelerator modules of a Cray EX node: ``cray``, or ``cray:/path`` for a tree elsewhere."""

    name = "cray"
    root = Path("/sys/cray/pm_counters")
    drm = Path("/sys/class/drm")
    startup: str | None = None

    def find(self) -> Iterator[SensorFile]:
        if not self.root.exists():
            raise SourceUnavailable(f"{self.root} does not exist: not an HPE Cray EX node")
        self.startup = read(self.root / "startup")
        files = {p.name: p for p in self.root.iterdir() if CRAY_FILE.match(p.name)}
        idle = self.uses_no_accelerator and not any(read(card / "device/device") in APUS for card in self.drm.glob("card[0-9]*"))
        for name in sorted(files):
            if not (idle and name.startswith("accel")):  # processor cores in an accelerator's package have no other counter
                yield SensorFile(self._channel(name, set(files)), files[name], scale=1.0)

    def _channel(self, name: str, present: set[str]) -> Channel:
        match = CRAY_FILE.match(name)
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
            update_period_s=CRAY_PERIOD_S,
            lag_s=UNKNOWN_LAG_S,
            parent=None if part == "node" else parent,
            flags=("module_scope",) if part == "accel" else (),
            users=(SOME,) if part == "accel" and self.devices is not None and list(self.devices) == [SOME] else (),
        )

    def _accelerator(self) -> str:
        """Vendor of the node's accelerators, so that their own counters and these are known as alternatives."""
        vendors = (read(card / "device" / "vendor") for card in self.drm.glob("card[0-9]*"))
        return next((VENDORS[v] for v in vendors if v in VENDORS), "accelerator")

    def read(self) -> list[Reading]:
        """One consistent set of values. A restarted controller ends the series: its counters begin anew."""
        for _ in range(CRAY_RETRIES):
            before = read(self.root / "freshness")
            readings = super().read()
            if read(self.root / "freshness") == before:
                break
        if read(self.root / "startup") != self.startup:
            return [replace(r, value=None, error="the node controller restarted, and its counters with it") for r in readings]
        return readings
