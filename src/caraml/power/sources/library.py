"""Accelerators of which the vendor tells power only: Intel Gaudi (pyhlml), Graphcore IPU (gcipuinfo) and Huawei Ascend (npu-smi)."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from caraml.power.model import Channel, Reading
from caraml.power.source import SourceUnavailable
from caraml.power.sources.visible import select
from caraml.system.visible import ASCEND, GAUDI

MILLI = 1e-3
GAUDI_MARKERS = (Path("/dev/accel/accel0"), Path("/dev/hl0"))
IPU_MARKERS = (Path("/dev/ipu0"), Path("/opt/poplar"))
NPU_MARKERS = (Path("/dev/davinci_manager"),)
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


class GaudiSource:
    """Intel Gaudi through HLML: power in mW, no energy counter."""

    name = "gaudi"
    min_interval_s = 0.0

    def __init__(self, devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        self._wanted, self._automatic = devices, automatic
        self._hlml: Any = None
        self._handles: dict[str, Any] = {}
        self._channels: list[Channel] = []

    def open(self) -> None:
        """Load the library and find the cards."""
        if self._automatic and not any(marker.exists() for marker in GAUDI_MARKERS):
            raise SourceUnavailable("no Gaudi driver: none of " + ", ".join(map(str, GAUDI_MARKERS)) + " exists")
        hlml = _load("pyhlml", "pip install pyhlml")
        hlml.hlmlInit()
        self._hlml = hlml
        found: dict[str, Any] = {}
        for index in range(hlml.hlmlDeviceGetCount()):
            handle = hlml.hlmlDeviceGetHandleByIndex(index)
            uuid = hlml.hlmlDeviceGetUUID(handle)
            found[uuid.decode() if isinstance(uuid, bytes) else str(uuid)] = handle
        chosen = select(list(found), {}, self._wanted, GAUDI, self.name)
        if not chosen:
            raise SourceUnavailable("no Gaudi card is visible to this process", "check HABANA_VISIBLE_DEVICES")
        self._handles = {f"gaudi:{uuid}:power": found[uuid] for uuid in chosen}
        self._channels = [_channel(self.name, uuid, "Gaudi", MILLI) for uuid in chosen]

    def channels(self) -> list[Channel]:
        """One power channel per card."""
        return self._channels

    def read(self) -> list[Reading]:
        """Ask every card. Some releases answer 0 instead of raising, so 0 is a failure: no card that runs draws nothing."""
        readings = []
        for name, handle in self._handles.items():
            before, value, error = time.monotonic(), None, None
            try:
                milliwatts = self._hlml.hlmlDeviceGetPowerUsage(handle)
                value, error = (milliwatts * MILLI, None) if milliwatts > 0 else (None, "the card answered 0 W")
            except (self._hlml.HLMLError, TypeError) as cause:
                error = f"{type(cause).__name__}: {cause}"
            readings.append(Reading(name, before, time.monotonic(), value, error))
        return readings

    def close(self) -> None:
        """Shut the library down."""
        if self._hlml is not None:
            self._hlml.hlmlShutdown()
            self._hlml = None


class GraphcoreSource:
    """Graphcore IPUs: power as text, one entry per device; some boards answer N/A and stay in their place."""

    name = "graphcore"
    min_interval_s = 0.0

    def __init__(self, devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        self._wanted, self._automatic = devices, automatic
        self._chosen: set[str] = set()
        self._library: Any = None
        self._inventory: Any = None
        self._channels: list[Channel] = []

    def open(self) -> None:
        """Load the library and list the devices."""
        if self._automatic and not any(marker.exists() for marker in IPU_MARKERS):
            raise SourceUnavailable("no Graphcore driver: none of " + ", ".join(map(str, IPU_MARKERS)) + " exists")
        self._library = _load("gcipuinfo", "source the enable.sh of the Poplar SDK")
        self._inventory = self._library.gcipuinfo()
        devices = self._inventory.getDevices()
        if not devices:
            raise SourceUnavailable("no IPU is visible to this process")
        names = [f"ipu:{i}" for i in range(len(devices))]
        self._chosen = set(select(names, {}, self._wanted))
        self._channels = [_channel(self.name, name, "Graphcore IPU", 0.01) for name in names]
        if all(reading.value is None for reading in self.read()):
            raise SourceUnavailable("no IPU of this machine reports its power (all answer N/A)")

    def channels(self) -> list[Channel]:
        """One power channel per IPU that was asked for."""
        return [channel for channel in self._channels if channel.domain in self._chosen]

    def read(self) -> list[Reading]:
        """Ask for all powers at once. Entries keep their position, also those that are N/A."""
        before = time.monotonic()
        try:
            texts = list(self._inventory.getNamedAttributeForAll(self._library.IpuPower))
        except RuntimeError as cause:
            texts = [f"{type(cause).__name__}: {cause}"] * len(self._channels)
        after = time.monotonic()
        if len(texts) != len(self._channels):
            texts = [f"{len(texts)} answers for {len(self._channels)} devices"] * len(self._channels)
        readings = []
        for channel, text in zip(self._channels, texts, strict=True):
            if channel.domain not in self._chosen:
                continue
            match = WATTS.match(str(text))
            readings.append(Reading(channel.id, before, after, float(match[1]) if match else None, None if match else str(text)))
        return readings

    def close(self) -> None:
        """The library has nothing to release."""


class AscendError(Exception):
    """npu-smi gave no answer."""


class AscendSource:
    """Huawei Ascend through ``npu-smi info``, whose table has two lines for each chip: NPU, name, health, power; chip and PCI address."""

    name = "ascend"
    min_interval_s = 2.0

    def __init__(self, devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        self._wanted, self._automatic = devices, automatic
        self._channels: list[Channel] = []

    def open(self) -> None:
        """Ask once, and find the chips."""
        if self._automatic and not any(marker.exists() for marker in NPU_MARKERS):
            raise SourceUnavailable("no Ascend driver: none of " + ", ".join(map(str, NPU_MARKERS)) + " exists")
        if shutil.which(NPU_SMI[0]) is None:
            raise SourceUnavailable("the command npu-smi is missing", "it comes with the driver, in /usr/local/sbin: add that to PATH")
        try:
            found = self._ask()
        except (AscendError, OSError, subprocess.SubprocessError) as error:
            raise SourceUnavailable(
                f"{' '.join(NPU_SMI)} fails: {error}", "be root or in the group HwHiAiUser", kind="unreadable"
            ) from error
        chosen = select(list(found), {}, self._wanted, ASCEND)
        if not any(isinstance(found[address][1], float) for address in chosen):
            raise SourceUnavailable("no Ascend chip that is visible to this process tells its power")
        self._channels = [_channel(self.name, address, f"Ascend {found[address][0]}", 0.1) for address in chosen]

    def _ask(self) -> dict[str, tuple[str, float | str]]:
        """By PCI address, in npu-smi's order, the name of each chip and its power [W], or what stands in its place."""
        done = subprocess.run(NPU_SMI, capture_output=True, text=True, timeout=NPU_SMI_SECONDS, check=False, stdin=subprocess.DEVNULL)  # noqa: S603 -- constant arguments
        if done.returncode != 0:
            raise AscendError((done.stderr or done.stdout).strip() or f"exit code {done.returncode}")
        found: dict[str, tuple[str, float | str]] = {}
        above: tuple[str, str] | None = None
        for line in done.stdout.splitlines():
            cells = [cell.split() for cell in line.strip().strip("|").split("|")]
            if len(cells) != 3 or not all(cells):
                continue
            if (address := PCI.fullmatch(cells[1][0])) is not None and above is not None:
                found[address[0].lower()] = (above[0], float(above[1]) if WATTS.match(above[1]) else above[1])
            above = (cells[0][1], cells[2][0]) if len(cells[0]) > 1 and cells[0][0].isdigit() and address is None else None
        if not found:
            raise AscendError("its answer names no chip")
        return found

    def channels(self) -> list[Channel]:
        """One power channel per chip."""
        return self._channels

    def read(self) -> list[Reading]:
        """Run the command once for all chips."""
        before = time.monotonic()
        try:
            found: dict[str, tuple[str, float | str]] = self._ask()
            missing = "npu-smi no longer names it"
        except (AscendError, OSError, subprocess.SubprocessError) as cause:
            found, missing = {}, f"{type(cause).__name__}: {cause}"
        after, readings = time.monotonic(), []
        for channel in self._channels:
            told = found.get(channel.domain, ("", missing))[1]
            value, error = (told, None) if isinstance(told, float) else (None, told)
            readings.append(Reading(channel.id, before, after, value, error))
        return readings

    def close(self) -> None:
        """Nothing to release."""


def create_gaudi(argument: str, devices: Sequence[str] | None, automatic: bool) -> GaudiSource:
    """``gaudi``."""
    return GaudiSource(devices, automatic)


def create_graphcore(argument: str, devices: Sequence[str] | None, automatic: bool) -> GraphcoreSource:
    """``graphcore``."""
    return GraphcoreSource(devices, automatic)


def create_ascend(argument: str, devices: Sequence[str] | None, automatic: bool) -> AscendSource:
    """``ascend``."""
    return AscendSource(devices, automatic)
