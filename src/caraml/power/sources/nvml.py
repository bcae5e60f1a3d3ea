"""NVIDIA GPUs through NVML (package ``nvidia-ml-py``): the energy counter, and power for cross-check and trace.

Units and meanings are those of the NVML API reference: ``nvmlDeviceGetTotalEnergyConsumption`` mJ since the driver was
loaded (Volta and newer), field 186 instantaneous and field 185 averaged power in mW, ``nvmlDeviceGetPowerUsage`` mW,
which is a mean over one second on Ampere and newer except GA100. On Grace-Hopper the counter covers the whole module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraml.power.model import Boundary, Channel, Kind, Reading
from caraml.power.source import SourceUnavailable, timed
from caraml.power.sources.visible import select
from caraml.system.visible import CUDA

MILLI = 1e-3
UPDATE_PERIOD_S = 0.1
"""Counter and power are refreshed about every 100 ms (measured by others on A100 and H100); the true period is shorter on
some drivers, so this is the cautious value."""
MEAN_WINDOW_S = 1.0
"""Averaging of ``nvmlDeviceGetPowerUsage`` and field 185 on Ampere and newer [s]."""
FIELD_AVERAGE, FIELD_INSTANT = 185, 186
SCOPE_GPU, SCOPE_MODULE = 0, 1
PART_TIME = {"A100": 0.25, "H100": 0.25}
"""Share of time that the power sensor observes, by model (Yang et al., SC24, arXiv:2312.02741)."""
ACCURACY = 0.05
MARKERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class NvmlReadError(Exception):
    """A field value came back with an error code instead of a value."""


@dataclass(slots=True)
class _Sensor:
    channel: Channel
    ask: Callable[[], float]


class NvmlSource:
    """All GPUs of this process's mask; the parents of MIG slices once each."""

    name = "nvml"
    min_interval_s = 0.0

    def __init__(self, devices: Sequence[str] | None = None, automatic: bool = False) -> None:
        self._wanted = devices
        self._automatic = automatic
        self._nvml: Any = None
        self._sensors: list[_Sensor] = []

    def open(self) -> None:
        """Load the library, find the GPUs and probe once what each of them can tell."""
        if self._automatic and not any(marker.exists() for marker in MARKERS):
            raise SourceUnavailable("no NVIDIA driver: none of " + ", ".join(map(str, MARKERS)) + " exists")
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise SourceUnavailable(f"the library pynvml is missing ({error})", "pip install nvidia-ml-py") from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SourceUnavailable(f"NVML does not start: {error}", "check that nvidia-smi works on this node") from error
        self._nvml = nvml
        handles = self._handles()
        if not handles:
            raise SourceUnavailable("no NVIDIA GPU is visible to this process", "check CUDA_VISIBLE_DEVICES")
        for uuid, (handle, slices) in handles.items():
            self._probe(uuid, handle, slices)
        if not self._sensors:
            raise SourceUnavailable("the GPUs offer neither an energy counter nor power")

    def _handles(self) -> dict[str, tuple[Any, tuple[str, ...]]]:
        """Physical GPUs by UUID, with the MIG slices of them that were asked for."""
        nvml = self._nvml
        present, slices_of = {}, {}
        order = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
            present[uuid] = handle
            slices_of[uuid] = self._slices(handle)
            order.append(uuid)
        aliases = {uuid: [self._pci(present[uuid]), *slices_of[uuid]] for uuid in order}
        chosen = select(order, aliases, self._wanted, CUDA)
        return {uuid: (present[uuid], slices_of[uuid]) for uuid in chosen}

    def _slices(self, handle: Any) -> tuple[str, ...]:
        """UUIDs of the MIG slices of a GPU; none if it is not partitioned or does not say."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(handle)[0] != 1:
                return ()
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:
            return ()
        found = []
        for index in range(count):
            try:
                found.append(_text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
            except nvml.NVMLError:
                continue  # a position without a slice
        return tuple(found)

    def _pci(self, handle: Any) -> str:
        try:
            return _text(self._nvml.nvmlDeviceGetPciInfo(handle).busId)
        except self._nvml.NVMLError:
            return ""

    def _probe(self, uuid: str, handle: Any, slices: tuple[str, ...]) -> None:
        """Add the counter and the best power reading of one GPU, as far as they answer."""
        nvml = self._nvml
        name = self._or_none(lambda: _text(nvml.nvmlDeviceGetName(handle))) or "NVIDIA GPU"
        limit = self._or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * MILLI)
        superchip = any(word in name for word in ("GH200", "GB200", "GB300"))
        module: Boundary = "module" if superchip else "device"
        flags = ("mig_parent", "shared_device") if slices else ()

        def channel(kind: Kind, boundary: Boundary, **known: Any) -> Channel:
            own = (*flags, "module_scope") if boundary == "module" else flags
            return Channel(
                id=f"nvml:{uuid}:{boundary}:{kind}",
                source=self.name,
                kind=kind,
                boundary=boundary,
                label=name,
                domain=f"{uuid}:module" if boundary == "module" else uuid,
                hardware="nvidia",
                resolution=MILLI,
                update_period_s=UPDATE_PERIOD_S,
                # The limit governs an average; short peaks go beyond it.
                max_power_w=2 * limit if limit else None,
                parent=f"{uuid}:module" if superchip and boundary == "device" else None,
                accuracy=ACCURACY,
                flags=own,
                users=slices,
                **known,
            )

        duty = next((share for model, share in PART_TIME.items() if model in name), 1.0)
        self._try(channel("energy", module), lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI)
        scopes: list[tuple[int, Boundary]] = [(SCOPE_GPU, "device"), *([(SCOPE_MODULE, module)] if superchip else [])]
        for scope, boundary in scopes:
            instant = self._try(channel("power_instant", boundary, duty=duty), self._field(handle, FIELD_INSTANT, scope))
            if not instant:
                mean = channel("power_mean", boundary, mean_window_s=MEAN_WINDOW_S)
                if not self._try(mean, self._field(handle, FIELD_AVERAGE, scope)) and not superchip:
                    self._try(mean, lambda: nvml.nvmlDeviceGetPowerUsage(handle) * MILLI)

    def _field(self, handle: Any, field: int, scope: int) -> Callable[[], float]:
        """A question for one field value in W; the error code of the item is checked."""

        def ask() -> float:
            item = self._nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
            if item.nvmlReturn != 0:
                raise NvmlReadError(f"field {field} scope {scope}: NVML error {item.nvmlReturn}")
            return float(item.value.uiVal) * MILLI

        return ask

    def _failures(self) -> tuple[type[Exception], ...]:
        return (self._nvml.NVMLError, NvmlReadError, AttributeError)

    def _or_none(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._failures():
            return None

    def _try(self, channel: Channel, ask: Callable[[], float]) -> bool:
        """Keep the sensor if it answers once."""
        works = self._or_none(ask) is not None
        if works:
            self._sensors.append(_Sensor(channel, ask))
        return works

    def channels(self) -> list[Channel]:
        """Per GPU a counter and a power channel, as far as they exist."""
        return [sensor.channel for sensor in self._sensors]

    def read(self) -> list[Reading]:
        """Ask every GPU for counter [J] and power [W]."""
        failures = self._failures()
        return [timed(sensor.channel.id, sensor.ask, failures) for sensor in self._sensors]

    def close(self) -> None:
        """Shut the library down."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None


def _text(value: str | bytes) -> str:
    """Old versions of the library answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value


def create(argument: str, devices: Sequence[str] | None, automatic: bool) -> NvmlSource:
    """``nvml``."""
    return NvmlSource(devices, automatic)
