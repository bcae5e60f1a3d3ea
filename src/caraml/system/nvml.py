"""NVIDIA GPUs through NVML (the driver's own library): works without torch and without root rights.

``session`` opens the library; every question goes through ``Nvml.ask``, which turns a refusal into ``None`` and a reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from caraml.system.files import clean, names_device


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
        return clean(answer) if isinstance(answer, str) else answer

    def quietly(self, function: str, *arguments: Any) -> Any:
        """Like ``ask`` for questions where "no" is an ordinary answer: an empty slot, a GPU without the feature."""
        return Nvml(self.library).ask("", function, *arguments)

    def driver(self) -> str | None:
        """The version of the NVIDIA driver."""
        return cast("str | None", self.ask("driver", "nvmlSystemGetDriverVersion"))

    def gpus(self) -> list[tuple[int, Any]]:
        """Index and handle of every GPU that this process may open, in the order of PCI addresses."""
        count = self.ask("devices", "nvmlDeviceGetCount") or 0
        handles = ((i, self.ask(f"devices[{i}]", "nvmlDeviceGetHandleByIndex", i)) for i in range(count))
        return [(i, handle) for i, handle in handles if handle is not None]

    def units(self) -> list[tuple[int, Any]]:
        """Like ``gpus``, but a GPU in MIG mode is replaced by its instances: those are what a process computes on."""
        found = []
        for index, handle in self.gpus():
            instances = self.mig_instances(index, handle)
            found += [(index, instance) for instance in instances] or [(index, handle)]
        return found

    def mig_instances(self, index: int, handle: Any) -> list[Any]:
        """The slices into which a GPU is partitioned; none where it is not."""
        mode = self.quietly("nvmlDeviceGetMigMode", handle)
        if mode is None or not mode[0]:
            return []
        slots = self.ask(f"devices[{index}].mig", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        handles = (self.quietly("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot) for slot in range(slots))
        return [instance for instance in handles if instance is not None]

    def pci_bus_id(self, handle: Any, key: str = "") -> str | None:
        """The PCI address of a GPU."""
        bus = getattr(self.ask(key, "nvmlDeviceGetPciInfo", handle), "busId", None)
        return clean(bus) if bus else None


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


Throttled = dict[str, dict[str, float]]
"""Seconds since the driver was loaded for which GPUs were held below the clock that they asked for, by GPU (UUID) and reason (``power``,
``thermal``, ``board``). A stretch is a difference of two readings; the reasons of the moment would miss what happens between two looks."""

_POLICIES = {"power": 0, "thermal": 1, "board": 3}
"""NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL and NVML_PERF_POLICY_BOARD_LIMIT."""
_SLOWDOWNS = ("thermal", "board")
"""Reasons that say something is wrong. At its power limit is where a GPU that is busy belongs: that share is noted and no fault."""
SLOWED_SHARE = 0.01
"""Share of a window above which a slowdown is worth a flag."""


def throttled(devices: Collection[str] | None = None) -> Throttled:
    """The counters of the GPUs with these UUIDs or PCI addresses (``None``: of all NVIDIA GPUs); empty without NVML.

    GPUs in MIG mode and consumer cards may have none.
    """
    found: Throttled = {}
    with session() as nv:
        if isinstance(nv, str):
            return {}
        for _, handle in nv.gpus():
            uuid = nv.quietly("nvmlDeviceGetUUID", handle)
            names = [name for name in (uuid, nv.pci_bus_id(handle)) if name]
            if devices is not None and not any(names_device(word, *names) for word in devices):
                continue
            answers = {reason: nv.quietly("nvmlDeviceGetViolationStatus", handle, policy) for reason, policy in _POLICIES.items()}
            seconds = {reason: answer.violationTime / 1e9 for reason, answer in answers.items() if answer is not None}
            if uuid and seconds:
                found[uuid] = seconds
    return found


def slowed_down(held_back: Throttled) -> bool:
    """Whether shares of a window (see :func:`shares`) tell of heat or of the board's own protection; power capping does not count."""
    return any(share > SLOWED_SHARE for reasons in held_back.values() for reason, share in reasons.items() if reason in _SLOWDOWNS)


def shares(begin: Throttled, end: Throttled, seconds: float) -> Throttled:
    """Share of a stretch of ``seconds`` for which each GPU was held back, by reason; only what both readings have."""
    return {
        uuid: {reason: max(after - begin[uuid][reason], 0.0) / seconds for reason, after in reasons.items() if reason in begin[uuid]}
        for uuid, reasons in end.items()
        if uuid in begin
    }
