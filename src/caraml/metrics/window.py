"""The metrics of a window: rates, step times, waits, losses.

Rates are totals over the window divided by the window's time, never means of rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caraml.base.stats import Interval, mean_interval, quantile_interval
from caraml.metrics.energy import energies
from caraml.metrics.model import Bandwidth, DescribedRun, Measured, Metric, MetricDefinition, Peak, scaled, step_table, unknown
from caraml.metrics.roofline import limits, rate_of, utilisation
from caraml.power.model import WindowEnergy

_QUANTILES = {"step_time_median": 0.5, "step_time_p5": 0.05, "step_time_p95": 0.95}
NOT_TOLD = "the loop does not say how long it waited for its input"


def _rate_source(run: DescribedRun) -> str:
    assert run.window is not None
    amount = f"{run.window.items:,} {run.item}s / {run.window.seconds:,.3f} s"
    if run.point.workload == "command":
        return f"{amount}, of one run of the program"
    return f"{amount}; the interval is that of the mean step time ({_interval_source(run)})"


def _interval_source(run: DescribedRun) -> str:
    """Where the interval of the mean step time comes from; records that do not say what they could see are older."""
    older = run.window is None or run.window.longest_seen is None
    return "the wider of batch means and AR(1)" if older else "from the slowest changes of the steps"


def _step_time(title: str, definition: str) -> MetricDefinition:
    return MetricDefinition(title, "s", "lower", definition, step_table)


DEFINITIONS: dict[str, MetricDefinition] = {
    "throughput": MetricDefinition(
        "Throughput",
        "{item}/s",
        "higher",
        "Items trained in the window, over all devices, divided by the window's wall time.",
        _rate_source,
    ),
    "throughput_per_device": MetricDefinition(
        "Throughput per device", "{item}/s", "higher", "Throughput divided by the number of devices."
    ),
    "window_time": MetricDefinition(
        "Window",
        "s",
        "neither",
        "Wall time of the window: from one device synchronisation to the next; of a command, its run, or what marks enclose.",
    ),
    "steps": MetricDefinition("Steps", "1", "neither", "Optimizer steps inside the window.", shown="count"),
    "step_time_mean": MetricDefinition(
        "Mean step",
        "s",
        "lower",
        "Window time divided by steps, with its 95 % confidence interval.",
        lambda run: f"window time / steps; interval: {_interval_source(run)}",
    ),
    "step_time_median": _step_time("Median step", "Median over the window's steps of the slowest rank's step time."),
    "step_time_p5": _step_time("5 % step", "5th percentile of the step times in the window."),
    "step_time_p95": _step_time("95 % step", "95th percentile of the step times in the window."),
    "step_time_min": _step_time("Shortest step", "Shortest step in the window."),
    "step_time_max": _step_time("Longest step", "Longest step in the window."),
    "first_step_time": MetricDefinition(
        "First step", "s", "lower", "Wall time of the first step: lazy initialisation and compilation, outside the window."
    ),
    "time_to_first_step": MetricDefinition(
        "Time to first step", "s", "lower", "From the start of the worker to the end of the first step."
    ),
    "data_wait_share": MetricDefinition(
        "Data wait",
        "1",
        "lower",
        "Share of the window that the host spent waiting for the next batch; the largest over ranks.",
        shown="percent",
    ),
    "input_bandwidth": MetricDefinition("Input", "B/s", "neither", "Bytes of input batches consumed per second, over all devices."),
    "other_cpu_share": MetricDefinition(
        "CPU of others",
        "1",
        "lower",
        "Share of the host's CPU time in the window that went to processes outside this point.",
        shown="percent",
    ),
    "loss_first": MetricDefinition("First loss", "1", "neither", "Training loss of the first step."),
    "loss_last": MetricDefinition(
        "Last loss", "1", "lower", "Mean training loss over the last tenth of all steps, warm-up included (at least three)."
    ),
}


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
    interval = of_rate = mean_interval(measured.window_steps, before=measured.before)
    facts, window, world = measured.facts, measured.window, measured.point.world
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
            reason=NOT_TOLD if measured.data_wait is None else None,
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
        **{name: _quantile(np.sort(steps), share, interval) for name, share in _QUANTILES.items()},
        "step_time_min": seconds(min(steps)),
        "step_time_max": seconds(max(steps)),
        "first_step_time": seconds(measured.first_step_time).model_copy(update={"n": 1}),
        "time_to_first_step": seconds(measured.time_to_first_step).model_copy(update={"n": 1}),
    }


def _quantile(ordered: NDArray[np.float64], share: float, interval: Interval) -> Metric:
    """A quantile of the step times. The interval of their mean says how many independent steps the window is worth."""
    if ordered.size * min(share, 1 - share) < 1:
        return Metric(value=None, unit="s", n=interval.n, reason=f"{ordered.size} steps have no {100 * share:.0f}th percentile")
    value = float(np.quantile(ordered, share))
    found = Metric(value=value, unit="s", n=interval.n)
    ends = quantile_interval(ordered, share, interval.effective_n)
    if ends is None:
        return found.model_copy(update={"reason": "too few independent steps for an interval"})
    return found.model_copy(update={"low": min(ends[0], value), "high": max(ends[1], value)})


def _losses(losses: Sequence[float]) -> dict[str, Metric]:
    if not losses or not all(math.isfinite(loss) for loss in losses):
        reason = "this mode trains nothing" if not losses else "the loss became NaN or infinite"
        return unknown(DEFINITIONS, ("loss_first", "loss_last"), reason)
    tail = losses[-max(3, len(losses) // 10) :]
    return {"loss_first": Metric(value=losses[0], unit="1"), "loss_last": Metric(value=float(np.mean(tail)), unit="1", n=len(tail))}
