"""How far a run is from what its device could do: the roofline of Williams, Waterman and Patterson (2009), CACM 52 (4).

A device computes at most as fast as its best matrix product, and at most as fast as its memory feeds it: bandwidth times the FLOPs done per
byte moved. Both limits are measured in the process that trains. The bytes are an estimate (``caraml.models.traffic``), so the share is one.
"""

from __future__ import annotations

from caraml.results.record import Bandwidth, Facts, Metric, Peak, Window
from caraml.units import unit_of

LIMIT_METRICS = ("memory_traffic", "arithmetic_intensity", "share_of_limit")
_HALVES = ("bf16", "fp16")


def limits(facts: Facts, window: Window, world: int, probed: Peak, bandwidth: Bandwidth | None) -> dict[str, Metric]:
    """Traffic [B/s] and intensity [FLOP/B] of one device, and its rate over the lower of its two limits; ``scope`` names that limit."""
    if facts.traffic_per_item is None or facts.flops_per_item is None:
        return _unknown("the workload does not estimate the bytes that it moves in this mode")
    width = 0.5 if probed.dtype in _HALVES else 1.0
    moved = width * facts.traffic_per_item * window.items / world + (facts.traffic_per_step or 0.0) * window.steps
    flops = facts.flops_per_item * window.items / world
    metrics = {
        "memory_traffic": Metric(value=moved / window.seconds, unit="B/s"),
        "arithmetic_intensity": Metric(value=flops / moved, unit="FLOP/B"),
    }
    return metrics | {"share_of_limit": _share(flops / window.seconds, flops / moved, probed, bandwidth)}


def _share(rate: float, intensity: float, probed: Peak, bandwidth: Bandwidth | None) -> Metric:
    if probed.value is None or bandwidth is None or bandwidth.value is None:
        found = probed.reason if probed.value is None else bandwidth.reason if bandwidth is not None else None
        return Metric(value=None, unit="1", reason=found or "the memory bandwidth was not measured")
    fed = bandwidth.value * intensity
    limit, scope = (fed, "memory") if fed < probed.value else (probed.value, "arithmetic")
    if rate > limit:
        reason = f"training was faster than the limit by {scope}: fewer bytes were moved than estimated, or a probe was disturbed"
        return Metric(value=None, unit="1", scope=scope, reason=reason)
    return Metric(value=rate / limit, unit="1", scope=scope)


def _unknown(reason: str) -> dict[str, Metric]:
    return {name: Metric(value=None, unit=unit_of(name), reason=reason) for name in LIMIT_METRICS}
