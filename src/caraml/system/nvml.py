"""NVIDIA GPUs through NVML (the driver's own library): works without torch and without root rights.

``session`` opens the library; every question goes through ``Nvml.ask``, which turns a refusal into ``None`` and a reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from caraml.system.files import clean
from caraml.system.model import DeviceModel


@dataclass
class Nvml:
    """The open library, and why questions stayed without an answer (by key)."""

    library: Any
    missing: dict[str, str] = field(default_factory=dict)

    def ask(self, key: str, function: str, *arguments: Any) -> Any:
        """The answer of one NVML function; ``None`` and an entry under ``key`` if the driver, the GPU or the rights lack it."""
        call = getattr(self.library, function, None)
        if call is None:
            self.missing[key] = f"this version of nvidia-ml-py has no {function}"
            return None
        try:
            answer = call(*arguments)
        except (self.library.NVMLError, UnicodeDecodeError) as error:
            self.missing[key] = f"NVML: {error}"
            return None
        return _text(answer) if isinstance(answer, str | bytes) else answer

    def driver(self) -> str | None:
        """The version of the NVIDIA driver."""
        answer: str | None = self.ask("driver", "nvmlSystemGetDriverVersion")
        return answer

    def gpus(self) -> list[tuple[int, Any]]:
        """Index and handle of every GPU that this process may open, in the order of PCI addresses."""
        count = self.ask("devices", "nvmlDeviceGetCount") or 0
        handles = ((i, self.ask(f"devices[{i}]", "nvmlDeviceGetHandleByIndex", i)) for i in range(count))
        return [(i, handle) for i, handle in handles if handle is not None]

    def units(self) -> list[tuple[int, Any]]:
        """Like ``gpus``, but a GPU in MIG mode is replaced by its instances: those are what a process computes on."""
        found = []
        for index, handle in self.gpus():
            instances = self._mig_instances(index, handle)
            found += [(index, instance) for instance in instances] or [(index, handle)]
        return found

    def _mig_instances(self, index: int, handle: Any) -> list[Any]:
        mode = self.quietly("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return []
        slots = self.ask(f"devices[{index}].mig", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        handles = (self.quietly("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in range(slots))
        return [instance for instance in handles if instance is not None]

    def quietly(self, function: str, *arguments: Any) -> Any:
        """Like ``ask`` for questions where "no" is an ordinary answer: an empty slot, a GPU without the feature."""
        call = getattr(self.library, function, None)
        try:
            return call(*arguments) if call else None
        except self.library.NVMLError:
            return None

    def device(self, index: int, handle: Any) -> DeviceModel:
        """One GPU or MIG instance as a ``Device``; what NVML does not tell is ``None`` and named in ``missing``."""
        key = f"devices[{index}]"
        pci = self.ask(f"{key}.pci_bus_id", "nvmlDeviceGetPciInfo", handle)
        memory = self.ask(f"{key}.memory_bytes", "nvmlDeviceGetMemoryInfo", handle)
        tdp_mw = self.ask(f"{key}.tdp_w", "nvmlDeviceGetPowerManagementDefaultLimit", handle)
        limit_mw = self.ask(f"{key}.power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle)
        capability = self.ask(f"{key}.compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
        bus = getattr(pci, "busId", None)
        return DeviceModel(
            model=self.ask(f"{key}.model", "nvmlDeviceGetName", handle) or "unknown NVIDIA GPU",
            kind="cuda",
            index=index,
            uuid=self.ask(f"{key}.uuid", "nvmlDeviceGetUUID", handle),
            pci_bus_id=_text(bus) if bus else None,
            memory_bytes=int(memory.total) if memory is not None else None,
            tdp_w=tdp_mw / 1000 if tdp_mw else None,
            power_limit_w=limit_mw / 1000 if limit_mw else None,
            compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        )


@contextmanager
def session() -> Iterator[Nvml | str]:
    """NVML, open for the length of a ``with`` block; or, where that is impossible, a sentence that says why."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        yield "the Python package nvidia-ml-py is not installed"
        return
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        yield f"NVML: {error}"
        return
    try:
        yield Nvml(library)
    finally:
        # An already lost driver must not hide what was read before.
        Nvml(library).quietly("nvmlShutdown")


def _text(answer: str | bytes) -> str:
    """Older versions of nvidia-ml-py answer in bytes."""
    return clean(answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer)
