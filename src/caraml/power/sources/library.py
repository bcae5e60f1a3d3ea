"""Accelerators of which the vendor tells power only: Intel Gaudi (pyhlml), Graphcore IPU (gcipuinfo) and Huawei Ascend (npu-smi)."""

from __future__ import annotations

import importlib
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from caraml.power.model import Channel
from caraml.power.source import AskedSensors, SensorError, SensorGroup, SourceUnavailable, output_of, select
from caraml.system.visible import ASCEND, GAUDI

MILLI = 1e-3
NPU_SMI = ("npu-smi", "info")
NPU_SMI_SECONDS = 10.0
"""Longest wait for an answer; a node of eight takes one to two seconds."""
PCI = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
WATTS = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*W?\s*$")


def _load(name: str, fix: str) -> Any:
    """The vendor's module, imported late."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise SourceUnavailable(f"the library {name} cannot be loaded ({error})", fix) from error


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
        """Ask once, and find the chips."""
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
        """All chips by one run of the command."""
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
