"""How far a run is from what its device could do: the roofline of Williams, Waterman and Patterson (2009), CACM 52 (4).

A device computes at most as fast as its fastest kernel, and at most as fast as it is fed: bandwidth times the FLOPs done per byte moved.
All limits are measured (:mod:`caraml.system.limits`). The bytes are an estimate (:mod:`caraml.models.traffic`), so the share is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from caraml.results.record import Bandwidth, Facts, Metric, Peak, Window
from caraml.system.model import DType
from caraml.units import unit_of

if TYPE_CHECKING:
    from caraml.system.limits import Look

LIMIT_METRICS = ("memory_traffic", "arithmetic_intensity", "share_of_limit")
SHARES = ("mfu", "mfu_measured", "hfu", "share_of_limit")
"""Metrics that are parts of a limit."""
_HALVES = ("bf16", "fp16")
Level = Literal["memory", "cache"]


def peak_of(found: Look | str, dtype: DType) -> Peak:
    """The limit of arithmetic, as a record has it; in words why there is none."""
    if isinstance(found, str):
        return Peak(value=None, dtype=dtype, reason=found)
    best = found.best
    source = f"{best.library} {best.kernel} {best.size}, the fastest of {len(best.by_library)} kinds of kernel, on {best.measured_at[:10]}"
    return Peak(dtype=dtype, by_kernel=best.by_library, source=source, **_told(found))


def bandwidth_of(found: Look | str, level: Level) -> Bandwidth:
    """A limit of memory or cache, as a record has it; in words why there is none."""
    if isinstance(found, str):
        return Bandwidth(value=None, level=level, reason=found)
    best = found.best
    where = "in the last-level cache" if level == "cache" else "in memory"
    source = f"{best.kernel} of {best.size} {where}, read + written, on {best.measured_at[:10]}"
    return Bandwidth(level=level, source=source, **_told(found))


def _told(found: Look) -> dict[str, Any]:
    best = found.best
    return {
        "value": best.rate,
        "low": best.low,
        "high": best.high,
        "kernel": f"{best.library} {best.kernel}",
        "shape": list(best.shape),
        "measured_at": best.measured_at,
        "disturbed": found.disturbed,
    }


def fed_bandwidth(facts: Facts, memory: Bandwidth | None, cache: Bandwidth | None) -> tuple[float | None, Level]:
    """Bytes/s at which a run can be fed at best, and which of memory and cache takes the longer to do it.

    What the last-level cache can serve comes at its bandwidth, the rest at the memory's: the harmonic mean of both by their shares.
    """
    if memory is None or memory.value is None:
        return None, "memory"
    share = facts.cached_traffic_share or 0.0
    fast = max(cache.value, memory.value) if cache is not None and cache.value is not None else memory.value
    slow_s, fast_s = (1 - share) / memory.value, share / fast
    return 1 / (slow_s + fast_s), "cache" if fast_s > slow_s else "memory"


def rate_of(amount: float, seconds: float, unit: str, relative: float, steps: int) -> Metric:
    """``amount / seconds``, with the relative interval of the mean step time turned into one of the rate."""
    value = amount / seconds
    if not relative < 1:
        reason = "step times vary too much for an interval" if math.isfinite(relative) else "too few steps for an interval"
        return Metric(value=value, unit=unit, n=steps, reason=reason)
    return Metric(value=value, unit=unit, low=value / (1 + relative), high=value / (1 - relative), n=steps)


def over(rate: Metric, limit: float, *measured: Peak | Bandwidth | None) -> Metric:
    """Share of a limit. Its interval is that of the rate and of the ``measured`` on which the limit rests: independent relative errors."""
    assert rate.value is not None
    value, downs, ups = rate.value / limit, [0.0], [0.0]
    for one in measured:
        if one is not None and one.value and one.low and one.high:
            downs.append(math.log(one.high / one.value))
            ups.append(math.log(one.value / one.low))
    if rate.low is None or rate.high is None or rate.low <= 0:
        return Metric(value=value, unit="1", n=rate.n, reason=rate.reason)
    down, up = (math.hypot(math.log(end / rate.value), max(errors)) for end, errors in ((rate.low, downs), (rate.high, ups)))
    return Metric(value=value, unit="1", low=value * math.exp(-down), high=value * math.exp(up), n=rate.n)


def limits(
    facts: Facts,
    window: Window,
    world: int,
    *,
    probed: Peak,
    memory: Bandwidth | None,
    cache: Bandwidth | None = None,
    relative: float = math.inf,
) -> dict[str, Metric]:
    """Traffic [B/s] and intensity [FLOP/B] of one device, and its rate over the lowest of its limits; ``scope`` names that limit.

    ``relative``: half-width of the interval of the mean step time.
    """
    if facts.traffic_per_item is None or facts.flops_per_item is None:
        return _unknown("the workload does not estimate the bytes that it moves in this mode")
    width = 0.5 if probed.dtype in _HALVES else 1.0
    moved = width * facts.traffic_per_item * window.items / world + (facts.traffic_per_step or 0.0) * window.steps
    flops = facts.flops_per_item * window.items / world
    metrics = {
        "memory_traffic": Metric(value=moved / window.seconds, unit="B/s"),
        "arithmetic_intensity": Metric(value=flops / moved, unit="FLOP/B"),
    }
    bandwidth, level = fed_bandwidth(facts, memory, cache)
    if probed.value is None or bandwidth is None:
        missing = probed.reason if probed.value is None else memory.reason if memory is not None else None
        share = Metric(value=None, unit="1", reason=missing or "the memory bandwidth was not measured")
    else:
        fed = bandwidth * flops / moved
        limit, scope = (fed, level) if fed < probed.value else (probed.value, "arithmetic")
        behind = (probed,) if scope == "arithmetic" else (memory, cache if scope == "cache" else None)
        share = over(rate_of(flops, window.seconds, "FLOP/s", relative, window.steps), limit, *behind).model_copy(update={"scope": scope})
    return metrics | {"share_of_limit": share}


def limit_flags(metrics: Mapping[str, Metric], measured: tuple[Peak | Bandwidth | None, ...]) -> list[str]:
    """What is wrong with the limits of a run."""
    disturbed = any(limit is not None and limit.disturbed for limit in measured)
    beyond = any((metrics[name].value or 0.0) > 1 for name in SHARES if name in metrics)
    return [*["disturbed_probe"] * disturbed, *["limit_too_low"] * beyond]


def _unknown(reason: str) -> dict[str, Metric]:
    return {name: Metric(value=None, unit=unit_of(name), reason=reason) for name in LIMIT_METRICS}
