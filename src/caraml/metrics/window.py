"""The metrics of a window: rates, step times, waits, losses; and how far a run is from what its device could do.

Rates are totals over the window divided by the window's time, never means of rates.

The distance is that to the roofline of Williams, Waterman and Patterson (2009), CACM 52 (4): a device computes at most as fast as its
fastest kernel, and at most as fast as it is fed: bandwidth times the FLOPs done per byte moved. All limits are measured
(:mod:`caraml.system.limits`). The bytes are an estimate (:mod:`caraml.workloads.flops`), so the share is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from caraml.base.stats import Interval, corrected, independent_steps, mean_interval, quantile_interval
from caraml.metrics.energy import energies
from caraml.metrics.model import Bandwidth, Facts, Measured, Metric, Peak, Window, scaled, unknown
from caraml.power.model import WindowEnergy
from caraml.system.model import DType

if TYPE_CHECKING:
    from caraml.system.limits import Look

_QUANTILES = {"step_time_median": 0.5, "step_time_p5": 0.05, "step_time_p95": 0.95}
LIMIT_METRICS = ("memory_traffic", "arithmetic_intensity", "share_of_limit")
SHARES = ("mfu", "mfu_measured", "hfu", "share_of_limit")
"""Metrics that are parts of a limit."""
_HALVES = ("bf16", "fp16", "fp8")
Level = Literal["memory", "cache"]


def derive(
    measured: Measured,
    energy: WindowEnergy | None,
    idle: WindowEnergy | None,
    datasheet: Peak,
    probed: Peak,
    *,
    bandwidth: Bandwidth | None = None,
    cache: Bandwidth | None = None,
) -> dict[str, Metric]:
    """All metrics of one measured window."""
    facts, window, world = measured.facts, measured.window, measured.point.world
    interval = of_rate = mean_interval(measured.window_steps, corrected(measured.point.paces), before=measured.before)
    if even := measured.even_steps:
        first = window.first_step
        of_rate = mean_interval(even[first : first + window.steps], before=even[1:first])
    return {
        **_rates(measured, of_rate),
        **_step_times(measured, interval),
        **utilisation(measured, of_rate, datasheet, probed),
        **limits(facts, window, world, probed=probed, memory=bandwidth, cache=cache, relative=of_rate.relative),
        **energies(window, facts.item, energy, idle, of_rate),
        **_losses(measured.losses),
    }


def at_mean_items(seconds: Sequence[float], items: Sequence[int], window: slice) -> list[float]:
    """What steps would have taken with the window's mean number of items: their mean varies as the window's time per item does.

    The residuals of the ratio estimator (Cochran 1977, Sampling Techniques, 6.3).
    """
    times, counts = np.asarray(seconds, dtype=np.float64), np.asarray(items, dtype=np.float64)
    each = float(times[window].sum() / counts[window].sum())
    even: list[float] = (times - each * (counts - counts[window].mean())).tolist()
    return even


def _rates(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window, facts = measured.window, measured.facts
    throughput = rate_of(window.items, window.seconds, f"{facts.item}/s", interval.relative, interval.n)
    metrics = {
        "throughput": throughput,
        "throughput_per_device": scaled(throughput, 1 / measured.point.world, throughput.unit),
        "data_wait_share": Metric(
            value=None if measured.data_wait is None else measured.data_wait / window.seconds,
            unit="1",
            reason=measured.no_wait if measured.data_wait is None else None,
        ),
    }
    if facts.bytes_per_sample is not None:
        taken = window.samples * facts.bytes_per_sample
        metrics["input_bandwidth"] = rate_of(taken, window.seconds, "B/s", interval.relative, interval.n)
    return metrics


def _step_times(measured: Measured, interval: Interval) -> dict[str, Metric]:
    window, steps = measured.window, measured.window_steps
    mean, half = window.seconds / window.steps, interval.half_width
    low, high = (mean - half, mean + half) if math.isfinite(half) else (None, None)

    def seconds(value: float) -> Metric:
        return Metric(value=float(value), unit="s", n=interval.n)

    return {
        "window_time": seconds(window.seconds),
        "steps": Metric(value=window.steps, unit="1"),
        "step_time_mean": Metric(value=mean, unit="s", low=low, high=high, n=interval.n),
        **{name: _quantile(measured, share) for name, share in _QUANTILES.items()},
        "step_time_min": seconds(min(steps)),
        "step_time_max": seconds(max(steps)),
        "first_step_time": seconds(measured.first_step_time).model_copy(update={"n": 1}),
        "time_to_first_step": seconds(measured.time_to_first_step).model_copy(update={"n": 1}),
    }


def _quantile(measured: Measured, share: float) -> Metric:
    """A quantile of the step times, with an interval for as many independent steps as the window is worth to it."""
    steps = np.asarray(measured.window_steps, dtype=np.float64)
    if steps.size * min(share, 1 - share) < 1:
        return Metric(value=None, unit="s", n=steps.size, reason=f"{steps.size} steps have no {100 * share:.0f}th percentile")
    value = float(np.quantile(steps, share))
    found = Metric(value=value, unit="s", n=steps.size)
    ends = quantile_interval(np.sort(steps), share, independent_steps(steps, value, measured.before))
    if ends is None:
        return found.model_copy(update={"reason": "too few independent steps for an interval"})
    return found.model_copy(update={"low": min(ends[0], value), "high": max(ends[1], value)})


def _losses(losses: Sequence[float]) -> dict[str, Metric]:
    if not losses or not all(math.isfinite(loss) for loss in losses):
        reason = "this mode trains nothing" if not losses else "the loss became NaN or infinite"
        return unknown(("loss_first", "loss_last"), reason)
    tail = losses[-max(3, len(losses) // 10) :]
    return {"loss_first": Metric(value=losses[0], unit="1"), "loss_last": Metric(value=float(np.mean(tail)), unit="1", n=len(tail))}


# -- roofline ----------------------------------------------------------------------------------------------------------


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
        return unknown(LIMIT_METRICS, "the workload does not estimate the bytes that it moves in this mode")
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
        return metrics | unknown(("achieved_flops_per_device", "mfu", "mfu_measured", "hfu"), reason)
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
