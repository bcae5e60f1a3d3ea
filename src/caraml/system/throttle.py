"""How long GPUs were held below the clock that they asked for: counters of the driver, so that a stretch is a difference of two readings.

A reading of the reasons of the moment misses what happened between two looks; the counters do not.
"""

from __future__ import annotations

from collections.abc import Collection

from caraml.system import nvml
from caraml.system.files import names_device

Throttled = dict[str, dict[str, float]]
"""Seconds since the driver was loaded, by GPU (UUID) and reason (``power``, ``thermal``, ``board``)."""

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
    with nvml.session() as nv:
        return {} if isinstance(nv, str) else dict(_counters(nv, devices))


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


def _counters(nv: nvml.Nvml, devices: Collection[str] | None) -> list[tuple[str, dict[str, float]]]:
    found = []
    for _, handle in nv.gpus():
        uuid = nv.quietly("nvmlDeviceGetUUID", handle)
        bus = getattr(nv.quietly("nvmlDeviceGetPciInfo", handle), "busId", None)
        names = [name if isinstance(name, str) else name.decode() for name in (uuid, bus) if name]
        if devices is not None and not any(names_device(word, *names) for word in devices):
            continue
        answers = {reason: nv.quietly("nvmlDeviceGetViolationStatus", handle, policy) for reason, policy in _POLICIES.items()}
        seconds = {reason: answer.violationTime / 1e9 for reason, answer in answers.items() if answer is not None}
        if uuid and seconds:
            found.append((uuid if isinstance(uuid, str) else uuid.decode(), seconds))
    return found
