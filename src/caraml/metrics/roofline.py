"""How far a run is from what its device could do: the roofline of Williams, Waterman and Patterson (2009), CACM 52 (4).

A device computes at most as fast as its fastest kernel, and at most as fast as it is fed: bandwidth times the FLOPs done per byte moved.
All limits are measured (:mod:`caraml.system.limits`). The bytes are an estimate (:mod:`caraml.workloads.flops`), so the share is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from caraml.base.format import human
from caraml.metrics.model import Bandwidth, DescribedRun, Facts, Measured, Metric, MetricDefinition, Peak, Window, scaled, unknown
from caraml.system.model import DType

if TYPE_CHECKING:
    from caraml.base.stats import Interval
    from caraml.system.limits import Look

LIMIT_METRICS = ("memory_traffic", "arithmetic_intensity", "share_of_limit")
SHARES = ("mfu", "mfu_measured", "hfu", "share_of_limit")
"""Metrics that are parts of a limit."""
_HALVES = ("bf16", "fp16", "fp8")
Level = Literal["memory", "cache"]


def _flops_source(run: DescribedRun) -> str:
    facts = run.facts
    if facts is None or facts.flops_per_item is None:
        return "the workload gives no FLOPs"
    return f"{human(facts.flops_per_item, 'FLOP', 4)} per {facts.item} ({facts.flops_formula}) × throughput per device"


def _hardware(run: DescribedRun) -> str:
    flops = run.facts.hardware_flops_per_item if run.facts else None
    return f"{human(flops, 'FLOP', 4)} per {run.item}" if flops is not None else "not given"


def _peak(peak: Peak | None) -> str:
    if peak is None or peak.value is None:
        return f"no peak: {peak.reason if peak and peak.reason else 'unknown'}"
    kinds = "".join(f"; {kernel} {human(rate, 'FLOP/s')}" for kernel, rate in list(peak.by_kernel.items())[1:])
    return f"FLOP/s per device / {human(peak.value, 'FLOP/s')} for {peak.dtype} ({peak.source or 'source not recorded'}{kinds})"


def _stream(run: DescribedRun) -> str:
    found = run.bandwidth_measured
    if found is None or found.value is None:
        return f"no bandwidth: {found.reason if found and found.reason else 'not measured'}"
    text = f"bandwidth {human(found.value, 'B/s')} ({found.source or 'source not recorded'})"
    cache, share = run.cache_measured, run.facts.cached_traffic_share if run.facts else None
    if cache is None or cache.value is None or not share:
        return text
    return f"{text}; {human(cache.value, 'B/s')} for the {share:.0%} of it that the cache can hold ({cache.source})"


def _traffic(run: DescribedRun) -> str:
    facts = run.facts
    if facts is None or facts.traffic_per_item is None:
        return "the workload does not estimate its bytes"
    rest = f" and {human(facts.traffic_per_step, 'B')} per step" if facts.traffic_per_step else ""
    return f"estimated {facts.traffic_per_item:,.0f} B per {facts.item}{rest}: each kernel reads and writes once, 4 bytes a number"


DEFINITIONS: dict[str, MetricDefinition] = {
    "achieved_flops_per_device": MetricDefinition(
        "FLOP/s per device",
        "FLOP/s",
        "higher",
        "Analytic FLOPs per item times throughput per device; recomputation is not counted.",
        source=_flops_source,
    ),
    "mfu": MetricDefinition(
        "MFU, data sheet",
        "1",
        "higher",
        "Model FLOPs utilisation: FLOP/s per device over the vendor's dense peak for the arithmetic used.",
        source=lambda run: _peak(run.peak_datasheet),
        shown="percent",
    ),
    "mfu_measured": MetricDefinition(
        "MFU, measured peak",
        "1",
        "higher",
        "FLOP/s per device over the fastest kernel measured on this device, of any library.",
        source=lambda run: _peak(run.peak_measured),
        shown="percent",
    ),
    "hfu": MetricDefinition(
        "HFU, data sheet",
        "1",
        "higher",
        "Hardware FLOPs utilisation: as MFU, with the forward passes that are computed again to save memory counted as work.",
        source=lambda run: f"FLOP/s per device with what is computed again ({_hardware(run)}); {_peak(run.peak_datasheet)}",
        shown="percent",
    ),
    "memory_traffic": MetricDefinition(
        "Memory traffic",
        "B/s",
        "neither",
        "Estimated bytes that one device moves between memory and arithmetic per second; no sensor reads this.",
        source=lambda run: f"{_traffic(run)}; times the rates of items and steps per device",
    ),
    "arithmetic_intensity": MetricDefinition(
        "Intensity",
        "FLOP/B",
        "neither",
        "FLOPs of a step over the estimated bytes that it moves between memory and arithmetic.",
        source=lambda run: f"FLOPs per item / bytes per item; {_traffic(run)}",
    ),
    "share_of_limit": MetricDefinition(
        "Share of the limit",
        "1",
        "higher",
        "FLOP/s per device over the lower of two limits measured on this device: its fastest kernel, and the bandwidth of memory and cache "
        "times the estimated intensity (roofline). The scope names the limit that binds.",
        source=lambda run: f"{_peak(run.peak_measured)}; {_stream(run)}; {_traffic(run)}",
        shown="percent",
    ),
    "peak_memory": MetricDefinition(
        "Peak memory",
        "B",
        "lower",
        "GPU: highest number of bytes that tensors held on one device. CPU: highest resident set of one rank from the model's building on.",
    ),
}


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
    if memory is None or not memory.value:
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
        return unknown(DEFINITIONS, LIMIT_METRICS, "the workload does not estimate the bytes that it moves in this mode")
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


def utilisation(measured: Measured, interval: Interval, datasheet: Peak, probed: Peak) -> dict[str, Metric]:
    """FLOP/s per device over its peaks, and its memory. ``interval``: that of the mean step time."""
    facts, window = measured.facts, measured.window
    memory = measured.device_memory
    metrics = {"peak_memory": Metric(value=memory, unit="B", reason=None if memory is not None else "the device reports no peak")}
    if facts.flops_per_item is None:
        reason = "no arithmetic is counted in this mode or for this workload"
        return metrics | unknown(DEFINITIONS, ("achieved_flops_per_device", "mfu", "mfu_measured", "hfu"), reason)
    per_device = facts.flops_per_item * window.items / measured.point.world
    achieved = rate_of(per_device, window.seconds, "FLOP/s", interval.relative, interval.n)
    metrics["achieved_flops_per_device"] = achieved
    metrics |= {"mfu": _share_of_peak(achieved, datasheet), "mfu_measured": _share_of_peak(achieved, probed)}
    if facts.hardware_flops_per_item is None or not facts.flops_per_item:
        metrics["hfu"] = Metric(value=None, unit="1", reason="the workload does not say what it computes again")
    else:
        busy = scaled(achieved, facts.hardware_flops_per_item / facts.flops_per_item, achieved.unit)
        metrics["hfu"] = _share_of_peak(busy, datasheet)
    return metrics


def _share_of_peak(achieved: Metric, peak: Peak) -> Metric:
    """Achieved over peak; no number where the peak is not known. One above 1 says that the peak is none: the record is flagged."""
    if peak.value is None:
        return Metric(value=None, unit="1", reason=peak.reason)
    return over(achieved, peak.value, peak)
