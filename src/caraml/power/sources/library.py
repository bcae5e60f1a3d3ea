"""Accelerators through their vendors' libraries and programs: AMD (amdsmi), Intel Gaudi (pyhlml), Graphcore IPU (gcipuinfo) and Huawei
Ascend (npu-smi). The last three tell power only.

Units of AMD's as in the AMD SMI reference: ``energy_accumulator x counter_resolution`` µJ; power in whole W, ``N/A`` where a die
does not know. An MI250(X) is two devices of which the first knows the package's power; the partitions of an MI300 all
repeat their socket's. Either way one package is one channel here and its devices are the channel's users. The socket of an MI300A has
processor cores.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from caraml.power.model import Channel
from caraml.power.source import AskedSensors, SensorError, SensorGroup, SourceUnavailable, output_of, select
from caraml.power.sources.files import DUAL_DIE, MICRO
from caraml.system.files import APUS, ASCEND, GAUDI, ROCM

AMD_UPDATE_PERIOD_S = 0.01
AMD_MEAN_WINDOW_S = 1.0
"""Averaging time of ``average_socket_power``; not published, so this is the cautious value [s]."""
INVALID = (0xFFFF, 0xFFFFFFFF)
MILLI = 1e-3
NPU_SMI = ("npu-smi", "info")
NPU_SMI_SECONDS = 10.0
"""Longest wait for an answer; a node of eight takes one to two seconds."""
PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
WATTS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*W?\s*$")


def _load(name: str, fix: str) -> Any:
    """The vendor's module, imported late. AMD's raises any of these errors where ROCm is missing or does not fit."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, KeyError, AttributeError) as error:
        raise SourceUnavailable(f"the library {name} cannot be loaded ({type(error).__name__}: {error})", fix) from error


@dataclass(slots=True)
class _Die:
    """One device of the library."""

    handle: Any
    id: str
    pci: str
    name: str
    number: int
    """In the runtime's order, in which masks count."""
    aliases: list[str]
    partners: list[str] = field(default_factory=list)


class AmdSmiSource(AskedSensors):
    """AMD accelerators, one channel pair per package."""

    name = "amdsmi"
    _smi: Any = None

    def open(self) -> None:
        """Load the library, find the packages and probe once what each can tell."""
        self.expect_driver("AMD compute", Path("/dev/kfd"))
        # The library prints advice on import, which would land in the middle of a user's output. Sources open at the same time, in threads
        # of one process: were another one's output held back as well, the two could put it back in the wrong order.
        with contextlib.redirect_stdout(io.StringIO()):
            smi = _load("amdsmi", "install the amdsmi package of this machine's ROCm (in /opt/rocm/share/amd_smi)")
        try:
            smi.amdsmi_init()
            self._smi, self.failures = smi, (smi.AmdSmiException, SensorError, KeyError, AttributeError, ValueError, TypeError)
            dies = [self._die(i, handle) for i, handle in enumerate(smi.amdsmi_get_processor_handles())]
        except smi.AmdSmiException as error:
            raise SourceUnavailable(f"amdsmi does not start: {error}", "check that amd-smi list works on this node") from error
        for die in self._packages(dies):
            self._probe(die)
        if not self.listed:
            raise SourceUnavailable("no AMD accelerator that is visible to this process offers energy or power")

    def _die(self, position: int, handle: Any) -> _Die:
        smi = self._smi
        pci = str(smi.amdsmi_get_gpu_device_bdf(handle))
        uuid = self.or_none(lambda: str(smi.amdsmi_get_gpu_device_uuid(handle))) or pci
        name = self.or_none(lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])) or "AMD GPU"
        info = self.or_none(lambda: smi.amdsmi_get_gpu_enumeration_info(handle)) or {}
        number = info.get("hip_id")
        aliases = [pci, uuid, str(info.get("hip_uuid", uuid))]
        return _Die(handle, uuid, pci, name, number if isinstance(number, int) else position, aliases)

    def _packages(self, dies: list[_Die]) -> list[_Die]:
        """One die for every package of which a visible device is part."""
        ordered = sorted(dies, key=lambda d: d.number)
        chosen = set(select([d.id for d in ordered], {d.id: d.aliases for d in ordered}, self.devices, ROCM))
        heads: list[_Die] = []
        members: dict[str, list[str]] = {}
        for die in sorted(dies, key=lambda d: d.pci):
            head = self._head(die, heads)
            if head is die:
                heads.append(die)
            members.setdefault(head.id, []).append(die.id)
        for head in heads:
            head.partners = [m for m in members[head.id] if m != head.id]
        return [head for head in heads if chosen & set(members[head.id])]

    def _head(self, die: _Die, heads: list[_Die]) -> _Die:
        """The device that speaks for the package of ``die``: itself, unless it is a second die or a partition."""
        slot = die.pci.rpartition(".")[0]
        for head in heads:
            if slot and head.pci.rpartition(".")[0] == slot:
                return head
        second = any(model in die.name for model in DUAL_DIE.values()) and self.or_none(lambda: self._power(die.handle)) in (None, 0.0)
        return heads[-1] if second and heads and heads[-1].name == die.name else die

    def _probe(self, die: _Die) -> None:
        """Add counter and power of one package, as far as they answer."""
        dual = any(model in die.name for model in DUAL_DIE.values()) and bool(die.partners)
        limit = self.or_none(lambda: float(self._smi.amdsmi_get_power_info(die.handle)["power_limit"]) * MICRO)
        apu = any(name in die.name for name in APUS.values())
        flags = ("dual_die_parent",) if dual else ("shared_device",) if die.partners else ()
        common: dict[str, Any] = {
            "source": self.name,
            "boundary": "module" if apu else "device",
            "label": die.name,
            "domain": die.id,
            "hardware": "amd",
            "update_period_s": AMD_UPDATE_PERIOD_S,
            "max_power_w": 2 * limit if limit and limit > 1 else None,
            "flags": (*flags, "module_scope") if apu else flags,
            "users": (die.id, *die.partners) if die.partners else (),
        }
        energy = Channel(id=f"amdsmi:{die.id}:energy", kind="energy", resolution=16 * MICRO, **common)
        self.try_to_add(energy, lambda: self._energy(die.handle))
        if self.or_none(lambda: self._power(die.handle)) is not None:
            instant = _number(self._smi.amdsmi_get_power_info(die.handle).get("current_socket_power")) is not None
            power = Channel(
                id=f"amdsmi:{die.id}:power",
                kind="power_instant" if instant else "power_mean",
                mean_window_s=0.0 if instant else AMD_MEAN_WINDOW_S,
                resolution=1.0,
                **common,
            )
            self.add(power, lambda: self._power(die.handle))

    def _energy(self, handle: Any) -> float:
        """Counter [J]."""
        answer = self._smi.amdsmi_get_energy_count(handle)
        count = _number(answer.get("energy_accumulator", answer.get("power")))
        if count is None or count == 0:
            raise SensorError(f"energy counter says {count}")
        return count * float(answer["counter_resolution"]) * MICRO

    def _power(self, handle: Any) -> float:
        """Socket power [W]: current where it is known, else averaged."""
        answer = self._smi.amdsmi_get_power_info(handle)
        for key in ("current_socket_power", "average_socket_power", "socket_power"):
            power = _number(answer.get(key))
            if power is not None:
                return power
        raise SensorError("socket power is N/A")

    def close(self) -> None:
        if self._smi is not None:
            self._smi.amdsmi_shut_down()
            self._smi = None


def _number(value: Any) -> float | None:
    """A number out of an answer in which ``"N/A"`` and all-ones mean that there is none."""
    return float(value) if isinstance(value, int | float) and value not in INVALID else None


def _channel(source: str, device: str, label: str, resolution: float, max_power: float | None = None) -> Channel:
    """A power channel of one accelerator. How often these sensors refresh is not published."""
    return Channel(
        id=f"{source}:{device}:power",
        source=source,
        kind="power_instant",
        boundary="device",
        label=label,
        domain=device,
        hardware=source,
        resolution=resolution,
        update_period_s=0.1,
        max_power_w=max_power,
    )


class GaudiSource(AskedSensors):
    """Intel Gaudi through HLML: power in mW, no energy counter."""

    name = "gaudi"
    _hlml: Any = None

    def open(self) -> None:
        self.expect_driver("Gaudi", Path("/dev/accel/accel0"), Path("/dev/hl0"))
        hlml = _load("pyhlml", "pip install pyhlml")
        hlml.hlmlInit()
        self._hlml, self.failures = hlml, (hlml.HLMLError, TypeError, SensorError)
        found: dict[str, Any] = {}
        for index in range(hlml.hlmlDeviceGetCount()):
            handle = hlml.hlmlDeviceGetHandleByIndex(index)
            uuid = hlml.hlmlDeviceGetUUID(handle)
            found[uuid.decode() if isinstance(uuid, bytes) else str(uuid)] = handle
        for uuid in select(list(found), {}, self.devices, GAUDI, self.name):
            self.add(_channel(self.name, uuid, "Gaudi", MILLI), partial(self._watts, found[uuid]))
        if not self.listed:
            raise SourceUnavailable("no Gaudi card is visible to this process", "check HABANA_VISIBLE_DEVICES")

    def _watts(self, handle: Any) -> float:
        """Some releases answer 0 instead of raising, so 0 is a failure: no card that runs draws nothing."""
        milliwatts: float = self._hlml.hlmlDeviceGetPowerUsage(handle)
        if not milliwatts > 0:
            raise SensorError("the card answered 0 W")
        return milliwatts * MILLI

    def close(self) -> None:
        if self._hlml is not None:
            self._hlml.hlmlShutdown()
            self._hlml = None


class GraphcoreSource(SensorGroup):
    """Graphcore IPUs: power as text, one entry per device; some boards answer N/A and stay in their place."""

    name = "graphcore"
    failures = (RuntimeError, SensorError)

    def open(self) -> None:
        self.expect_driver("Graphcore", Path("/dev/ipu0"), Path("/opt/poplar"))
        self._library = _load("gcipuinfo", "source the enable.sh of the Poplar SDK")
        self._inventory = self._library.gcipuinfo()
        self._names = [f"ipu:{i}" for i in range(len(self._inventory.getDevices() or ()))]
        if not self._names:
            raise SourceUnavailable("no IPU is visible to this process")
        chosen = set(select(self._names, {}, self.devices))
        self.listed = [_channel(self.name, name, "Graphcore IPU", 0.01) for name in self._names if name in chosen]
        if all(reading.value is None for reading in self.read()):
            raise SourceUnavailable("no IPU of this machine reports its power (all answer N/A)")

    def answers(self) -> dict[str, float | str]:
        """All powers at once. Entries keep their position, also those that are N/A."""
        texts = [str(text) for text in self._inventory.getNamedAttributeForAll(self._library.IpuPower)]
        if len(texts) != len(self._names):
            raise SensorError(f"{len(texts)} answers for {len(self._names)} devices")
        return {f"graphcore:{name}:power": _watts(text) for name, text in zip(self._names, texts, strict=True)}


class AscendSource(SensorGroup):
    """Huawei Ascend through ``npu-smi info``, whose table has two lines for each chip: NPU, name, health, power; chip and PCI address."""

    name = "ascend"
    min_interval_s = 2.0

    def open(self) -> None:
        self.expect_driver("Ascend", Path("/dev/davinci_manager"))
        if shutil.which(NPU_SMI[0]) is None:
            raise SourceUnavailable("the command npu-smi is missing", "it comes with the driver, in /usr/local/sbin: add that to PATH")
        try:
            found = _chips()
        except self.failures as error:
            fix = "be root or in the group HwHiAiUser"
            raise SourceUnavailable(f"{' '.join(NPU_SMI)} fails: {error}", fix, kind="unreadable") from error
        chosen = select(list(found), {}, self.devices, ASCEND)
        if not any(isinstance(found[address][1], float) for address in chosen):
            raise SourceUnavailable("no Ascend chip that is visible to this process tells its power")
        self.listed = [_channel(self.name, address, f"Ascend {found[address][0]}", 0.1) for address in chosen]

    def answers(self) -> dict[str, float | str]:
        return {f"ascend:{address}:power": told for address, (_, told) in _chips().items()}


def _chips() -> dict[str, tuple[str, float | str]]:
    """By PCI address, in npu-smi's order, the name of each chip and its power [W], or what stands in its place."""
    found: dict[str, tuple[str, float | str]] = {}
    above: tuple[str, str] | None = None
    for line in output_of(NPU_SMI, NPU_SMI_SECONDS).splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not all(cells):
            continue
        if (address := PCI.fullmatch(cells[1][0])) is not None and above is not None:
            found[address[0].lower()] = (above[0], _watts(above[1]))
        above = (cells[0][1], cells[2][0]) if len(cells[0]) > 1 and cells[0][0].isdigit() and address is None else None
    if not found:
        raise SensorError("its answer names no chip")
    return found


def _watts(text: str) -> float | str:
    """A power as text [W]; the text itself where it is none."""
    match = WATTS.match(text)
    return float(match[1]) if match else text
