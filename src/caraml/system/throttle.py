"""How long GPUs were held below the clock that they asked for: counters of the driver, so that a stretch is a difference of two readings.

A reading of the reasons of the moment misses what happened between two looks; the counters do not.
"""

from __future__ import annotations

from caraml.system import nvml

Throttled = dict[str, dict[str, float]]
"""Seconds since the driver was loaded, by GPU (UUID) and reason (``power``, ``thermal``)."""

_POLICIES = {"power": 0, "thermal": 1}
"""NVML_PERF_POLICY_POWER and NVML_PERF_POLICY_THERMAL."""


def throttled() -> Throttled:
    """The counters of every NVIDIA GPU that has them; empty without NVML. GPUs in MIG mode and consumer cards may have none."""
    with nvml.session() as nv:
        return {} if isinstance(nv, str) else dict(_counters(nv))


def shares(begin: Throttled, end: Throttled, seconds: float) -> Throttled:
    """Share of a stretch of ``seconds`` for which each GPU was held back, by reason; only what both readings have."""
    return {
        uuid: {reason: max(after - begin[uuid][reason], 0.0) / seconds for reason, after in reasons.items() if reason in begin[uuid]}
        for uuid, reasons in end.items()
        if uuid in begin
    }


def _counters(nv: nvml.Nvml) -> list[tuple[str, dict[str, float]]]:
    found = []
    for _, handle in nv.gpus():
        uuid = nv.quietly("nvmlDeviceGetUUID", handle)
        answers = {reason: nv.quietly("nvmlDeviceGetViolationStatus", handle, policy) for reason, policy in _POLICIES.items()}
        seconds = {reason: answer.violationTime / 1e9 for reason, answer in answers.items() if answer is not None}
        if uuid and seconds:
            found.append((uuid if isinstance(uuid, str) else uuid.decode(), seconds))
    return found
