"""Accelerators through their vendors' libraries and programs: NVIDIA (NVML), AMD (amdsmi), Intel Gaudi (pyhlml), Graphcore IPU (gcipuinfo)
and Huawei Ascend (npu-smi). The last three tell power only.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from caraml.power.counter import AVERAGED_LAG_S, UNKNOWN_LAG_S
from caraml.power.model import Boundary, Channel, Kind
from caraml.power.source import AskedSensors, SensorError, SensorGroup, SourceUnavailable, output_of, select
from caraml.power.sources.files import DUAL_DIE, MICRO
from caraml.system.files import APUS, ASCEND, CUDA, GAUDI, ROCM
from caraml.system.nvml import Nvml

NVML_UPDATE_PERIOD_S = 0.1
"""Counter and power are refreshed about every 100 ms (measured on an H200, by others on A100 and H100); the true period is shorter on some
drivers, so this is the cautious value."""
NVML_MEAN_WINDOW_S = 1.0
"""Averaging of ``nvmlDeviceGetPowerUsage`` and field 185 on Ampere and newer [s]."""
FIELD_AVERAGE, FIELD_INSTANT = 185, 186
SCOPE_GPU, SCOPE_MODULE = 0, 1
PROMPT = ("NVIDIA H200",)
"""Models whose sensors are not late: an H200's, measured, show a step of power within 10 (counter) or 40 ms beside their update period."""
PART_TIME = {"A100": 0.25, "H100": 0.25, "NVIDIA H200": 0.25}
"""Share of time that the power sensor observes, by model (Yang et al., SC24, arXiv:2312.02741). An H200, measured,
has a new value every 100 ms, which shows a step in full after 40 ms and misses most of a load of 50 ms. Of GH200 it is not known."""
AMD_UPDATE_PERIOD_S = 0.01
AMD_MEAN_WINDOW_S = 1.0
"""Averaging time of ``average_socket_power``; not published, so this is the cautious value [s]."""
INVALID = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
"""What AMD's firmware leaves in a field of 16, 32 or 64 bits that it does not fill."""
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


class _Library(AskedSensors):
    """Base of sources whose sensors a library answers for while it is open."""

    library: Any = None
    end = ""
    """The library's function that closes it."""

    def close(self) -> None:
        if self.library is not None:
            getattr(self.library, self.end)()
            self.library = None


class NvmlSource(_Library):
    """NVIDIA GPUs: the energy counter, and power for cross-check and trace. All of the mask; the parents of MIG slices once each.

    Units and meanings are those of the NVML API reference: ``nvmlDeviceGetTotalEnergyConsumption`` mJ since the driver was loaded (Volta
    and newer), field 186 instantaneous and field 185 averaged power in mW, ``nvmlDeviceGetPowerUsage`` mW, which is a mean over one second
    on Ampere and newer except GA100. On Grace-Hopper the counter covers the whole module. A Grace-Blackwell module has two GPUs, and each
    of them shows the power of all of it: only that of the GPU itself is read, and no counter, of which nobody says what it covers there.
    """

    name = "nvml"
    end = "nvmlShutdown"

    def open(self) -> None:
        """Load the library, find the GPUs and probe once what each of them can tell."""
        self.expect_driver("NVIDIA", Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise SourceUnavailable(f"the library pynvml is missing ({error})", "pip install nvidia-ml-py") from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SourceUnavailable(f"NVML does not start: {error}", "check that nvidia-smi works on this node") from error
        self.library, self.failures = nvml, (nvml.NVMLError, SensorError, AttributeError)
        handles = self._handles(Nvml(nvml))
        if not handles:
            raise SourceUnavailable("no NVIDIA GPU is visible to this process", "check CUDA_VISIBLE_DEVICES")
        for uuid, (name, handle, slices) in handles.items():
            self._probe(uuid, name, handle, slices)
        if not self.listed:
            raise SourceUnavailable("the GPUs offer neither an energy counter nor power")

    def _handles(self, nv: Nvml) -> dict[str, tuple[str, Any, tuple[str, ...]]]:
        """Physical GPUs by UUID: name, handle, and the UUIDs of the MIG slices into which each is partitioned."""
        present: dict[str, tuple[str, Any, tuple[str, ...]]] = {}
        aliases = {}
        for index in range(self.library.nvmlDeviceGetCount()):
            handle = nv.ask(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
            uuid = None if handle is None else nv.ask(f"GPU {index}", "nvmlDeviceGetUUID", handle)
            if uuid is None:  # lost or closed: the others are measured
                self.left_out.append(f"GPU {index} does not open: {nv.missing[f'GPU {index}']}")
                continue
            slices = [nv.quietly("nvmlDeviceGetUUID", each) for each in nv.mig_instances(index, handle)]
            aliases[uuid] = [nv.pci_bus_id(handle) or "", *filter(None, slices)]
            present[uuid] = (nv.quietly("nvmlDeviceGetName", handle) or "NVIDIA GPU", handle, tuple(aliases[uuid][1:]))
        if self.left_out and present:  # nvidia-smi counts them, torch does not
            self.left_out[-1] += "; numbers count those that open"
        chosen = self.choose(list(present), aliases, CUDA, closed=self.left_out)
        numbers = self.devices is None and re.match(r"\s*\d", os.environ.get(CUDA[0][0], ""))
        by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        if numbers and not by_bus and len(chosen) < len(present) and len({name for name, _, _ in present.values()}) > 1:
            raise SourceUnavailable(
                f"{CUDA[0][0]} has numbers, in which CUDA counts the fastest of these different GPUs first, and their sensors do not",
                f"export CUDA_DEVICE_ORDER=PCI_BUS_ID, or have UUIDs in {CUDA[0][0]}",
            )
        return {uuid: present[uuid] for uuid in chosen}

    def _probe(self, uuid: str, name: str, handle: Any, slices: tuple[str, ...]) -> None:
        """Add the counter and the best power reading of one GPU, as far as they answer."""
        nvml = self.library
        limit = self.or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * MILLI)
        late = 0.0 if any(model in name for model in PROMPT) else UNKNOWN_LAG_S
        superchip, halves = "GH200" in name, any(word in name for word in ("GB200", "GB300"))
        module: Boundary = "module" if superchip else "device"
        flags = ("mig_parent", "shared_device") if slices else ()

        def channel(kind: Kind, boundary: Boundary, **known: Any) -> Channel:
            return Channel(
                id=f"nvml:{uuid}:{boundary}:{kind}",
                source=self.name,
                kind=kind,
                boundary=boundary,
                label=name,
                domain=f"{uuid}:module" if boundary == "module" else uuid,
                hardware="nvidia",
                resolution=MILLI,
                update_period_s=NVML_UPDATE_PERIOD_S,
                lag_s=late,
                # The limit governs an average; short peaks go beyond it.
                max_power_w=2 * limit if limit else None,
                parent=f"{uuid}:module" if superchip and boundary == "device" else None,
                flags=(*flags, "module_scope") if boundary == "module" else flags,
                users=slices,
                **known,
            )

        # The counter first: asked for it, the driver fetches all sensors of the GPU (3 to 4 ms, up to 30 under load), and power is at hand.
        duty = next((share for model, share in PART_TIME.items() if model in name), 1.0)
        if halves:
            self.left_out.append(f"{uuid}: neither the module's power nor the counter is read, as each of the two GPUs shows the module's")
        else:
            self.try_to_add(channel("energy", module), lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI)
        scopes: list[tuple[int, Boundary]] = [(SCOPE_GPU, "device"), *([(SCOPE_MODULE, module)] if superchip else [])]
        for scope, boundary in scopes:
            if not self.try_to_add(channel("power_instant", boundary, duty=duty), partial(self._field, handle, FIELD_INSTANT, scope)):
                mean = channel("power_mean", boundary, mean_window_s=NVML_MEAN_WINDOW_S)
                if not self.try_to_add(mean, partial(self._field, handle, FIELD_AVERAGE, scope)) and not superchip:
                    self.try_to_add(mean, lambda: nvml.nvmlDeviceGetPowerUsage(handle) * MILLI)

    def _field(self, handle: Any, field: int, scope: int) -> float:
        """The value of a field [W]."""
        item = self.library.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
        if item.nvmlReturn != 0:
            raise SensorError(f"field {field} scope {scope}: NVML error {item.nvmlReturn}")
        return float(item.value.uiVal) * MILLI


@dataclass(slots=True)
class _Die:
    handle: Any
    id: str
    pci: str
    name: str
    number: int
    """In the runtime's order, in which masks count."""
    aliases: list[str]
    partners: list[str] = field(default_factory=list)


class AmdSmiSource(_Library):
    """AMD accelerators, one channel pair per package.

    Units as in the AMD SMI reference: ``energy_accumulator x counter_resolution`` µJ; power in whole W, ``N/A`` where a die does not know.
    An MI250(X) is two devices of which the first knows the package's power; the partitions of an MI300 all repeat their socket's. Either
    way one package is one channel here and its devices are the channel's users. The socket of an MI300A has processor cores.
    """

    name = "amdsmi"
    end = "amdsmi_shut_down"

    def open(self) -> None:
        """Load the library, find the packages and probe once what each can tell."""
        self.expect_driver("AMD compute", Path("/dev/kfd"))
        # The library prints advice on import, which would land in the middle of a user's output. Sources open at the same time, in threads
        # of one process: were another one's output held back as well, the two could put it back in the wrong order.
        with contextlib.redirect_stdout(io.StringIO()):
            smi = _load("amdsmi", "install the amdsmi package of this machine's ROCm (in /opt/rocm/share/amd_smi)")
        try:
            smi.amdsmi_init()
            self.library, self.failures = smi, (smi.AmdSmiException, SensorError, KeyError, AttributeError, ValueError, TypeError)
            dies = [self._die(i, handle) for i, handle in enumerate(smi.amdsmi_get_processor_handles())]
        except smi.AmdSmiException as error:
            raise SourceUnavailable(f"amdsmi does not start: {error}", "check that amd-smi list works on this node") from error
        for die in self._packages(dies):
            self._probe(die)
        if not self.listed:
            raise SourceUnavailable("no AMD accelerator that is visible to this process offers energy or power")

    def _die(self, position: int, handle: Any) -> _Die:
        smi = self.library
        pci = str(smi.amdsmi_get_gpu_device_bdf(handle))
        uuid = self.or_none(lambda: str(smi.amdsmi_get_gpu_device_uuid(handle))) or pci
        name = self.or_none(lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"])) or "AMD GPU"
        info = self.or_none(lambda: smi.amdsmi_get_gpu_enumeration_info(handle)) or {}
        number = info.get("hip_id")
        return _Die(handle, uuid, pci, name, number if isinstance(number, int) else position, [pci, uuid, str(info.get("hip_uuid", uuid))])

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
        limit = self.or_none(lambda: float(self.library.amdsmi_get_power_info(die.handle)["power_limit"]) * MICRO)
        apu = any(name in die.name for name in APUS.values())
        flags = ("dual_die_parent",) if dual else ("shared_device",) if die.partners else ()
        common: dict[str, Any] = {
            "source": self.name,
            "boundary": "module" if apu else "device",
            "label": die.name,
            "domain": die.id,
            "hardware": "amd",
            "update_period_s": AMD_UPDATE_PERIOD_S,
            "lag_s": UNKNOWN_LAG_S,
            "max_power_w": 2 * limit if limit and limit > 1 else None,
            "flags": (*flags, "module_scope") if apu else flags,
            "users": (die.id, *die.partners) if die.partners else (),
        }
        energy = Channel(id=f"amdsmi:{die.id}:energy", kind="energy", resolution=16 * MICRO, **common)
        self.try_to_add(energy, lambda: self._energy(die.handle))
        if self.or_none(lambda: self._power(die.handle)) is not None:
            instant = _number(self.library.amdsmi_get_power_info(die.handle).get("current_socket_power")) is not None
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
        answer = self.library.amdsmi_get_energy_count(handle)
        count = _number(answer.get("energy_accumulator", answer.get("power")))
        if count is None or count == 0:
            raise SensorError(f"energy counter says {count}")
        return count * float(answer["counter_resolution"]) * MICRO

    def _power(self, handle: Any) -> float:
        """Socket power [W]: current where it is known, else averaged."""
        answer = self.library.amdsmi_get_power_info(handle)
        for key in ("current_socket_power", "average_socket_power", "socket_power"):
            power = _number(answer.get(key))
            if power is not None:
                return power
        raise SensorError("socket power is N/A")


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
        period_guessed=True,
        lag_s=AVERAGED_LAG_S,
        max_power_w=max_power,
    )


class GaudiSource(_Library):
    """Intel Gaudi through HLML: power in mW, no energy counter."""

    name = "gaudi"
    end = "hlmlShutdown"

    def open(self) -> None:
        self.expect_driver("Gaudi", Path("/dev/accel/accel0"), Path("/dev/hl0"))
        hlml = _load("pyhlml", "pip install pyhlml")
        hlml.hlmlInit()
        self.library, self.failures = hlml, (hlml.HLMLError, TypeError, SensorError)
        handles = [hlml.hlmlDeviceGetHandleByIndex(index) for index in range(hlml.hlmlDeviceGetCount())]
        uuids = map(hlml.hlmlDeviceGetUUID, handles)
        found = {uuid.decode() if isinstance(uuid, bytes) else str(uuid): handle for uuid, handle in zip(uuids, handles, strict=True)}
        for uuid in select(list(found), {}, self.devices, GAUDI, self.name):
            self.add(_channel(self.name, uuid, "Gaudi", MILLI), partial(self._watts, found[uuid]))
        if not self.listed:
            raise SourceUnavailable("no Gaudi card is visible to this process", "check HABANA_VISIBLE_DEVICES")

    def _watts(self, handle: Any) -> float:
        """Some releases answer 0 instead of raising, so 0 is a failure: no card that runs draws nothing."""
        milliwatts: float = self.library.hlmlDeviceGetPowerUsage(handle)
        if not milliwatts > 0:
            raise SensorError("the card answered 0 W")
        return milliwatts * MILLI


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
            raise SourceUnavailable(f"{' '.join(NPU_SMI)} fails: {error}", "be root or in the group HwHiAiUser", "unreadable") from error
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
