"""NVIDIA GPUs through NVML (package ``nvidia-ml-py``): the energy counter, and power for cross-check and trace.

Units and meanings are those of the NVML API reference: ``nvmlDeviceGetTotalEnergyConsumption`` mJ since the driver was
loaded (Volta and newer), field 186 instantaneous and field 185 averaged power in mW, ``nvmlDeviceGetPowerUsage`` mW,
which is a mean over one second on Ampere and newer except GA100. On Grace-Hopper the counter covers the whole module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caraml.power.model import Boundary, Channel, Kind
from caraml.power.source import AskedSensors, SensorError, SourceUnavailable
from caraml.system.files import CUDA
from caraml.system.nvml import Nvml

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
MARKERS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class NvmlSource(AskedSensors):
    """All GPUs of this process's mask; the parents of MIG slices once each."""

    name = "nvml"
    _nvml: Any = None

    def open(self) -> None:
        """Load the library, find the GPUs and probe once what each of them can tell."""
        self.expect_driver("NVIDIA", *MARKERS)
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise SourceUnavailable(f"the library pynvml is missing ({error})", "pip install nvidia-ml-py") from error
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise SourceUnavailable(f"NVML does not start: {error}", "check that nvidia-smi works on this node") from error
        self._nvml, self.failures = nvml, (nvml.NVMLError, SensorError, AttributeError)
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
        for index in range(self._nvml.nvmlDeviceGetCount()):
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
        return {uuid: present[uuid] for uuid in self.choose(list(present), aliases, CUDA, closed=self.left_out)}

    def _probe(self, uuid: str, name: str, handle: Any, slices: tuple[str, ...]) -> None:
        """Add the counter and the best power reading of one GPU, as far as they answer."""
        nvml = self._nvml
        limit = self.or_none(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) * MILLI)
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
                flags=own,
                users=slices,
                **known,
            )

        duty = next((share for model, share in PART_TIME.items() if model in name), 1.0)
        self.try_to_add(channel("energy", module), lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) * MILLI)
        scopes: list[tuple[int, Boundary]] = [(SCOPE_GPU, "device"), *([(SCOPE_MODULE, module)] if superchip else [])]
        for scope, boundary in scopes:
            instant = self.try_to_add(channel("power_instant", boundary, duty=duty), self._field(handle, FIELD_INSTANT, scope))
            if not instant:
                mean = channel("power_mean", boundary, mean_window_s=MEAN_WINDOW_S)
                if not self.try_to_add(mean, self._field(handle, FIELD_AVERAGE, scope)) and not superchip:
                    self.try_to_add(mean, lambda: nvml.nvmlDeviceGetPowerUsage(handle) * MILLI)

    def _field(self, handle: Any, field: int, scope: int) -> Callable[[], float]:
        """A question for one field value in W; the error code of the item is checked."""

        def ask() -> float:
            item = self._nvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])[0]
            if item.nvmlReturn != 0:
                raise SensorError(f"field {field} scope {scope}: NVML error {item.nvmlReturn}")
            return float(item.value.uiVal) * MILLI

        return ask

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None
