"""Metrics of a whole run rather than of its window: what the MAELSTROM report (deliverable D3.7, section 3) lists for an application."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, stdev

from caraml.power.model import HEADLINES, WindowEnergy
from caraml.results.measured import Measured, steps_per_epoch
from caraml.results.metrics import NOT_TOLD, joules, scaled
from caraml.results.record import Metric, Phase
from caraml.stats import t_critical
from caraml.suite.model import Point
from caraml.units import unit_of

TRAINING_PHASES = ("first_step", "warm_up", "measure", "after")
INPUT_BOUND_SHARE = 0.1
"""Share of the window spent waiting for batches above which a run is input-bound: without the wait it would be 11 % faster or more."""
_NODE_BOUNDARIES = ("node_dc", "node_ac")


def run_metrics(run: Measured, energy: WindowEnergy | None) -> dict[str, Metric]:
    """All metrics of a run; ``energy`` is the window's."""
    training = _total(run.phases, TRAINING_PHASES)
    saving = _total(run.phases, ("save_model",)) or None
    validation = Metric(value=run.validation_loss, unit="1", reason=run.no_validation if run.validation_loss is None else None)
    wait, shares = run.whole_data_wait, ("loading_share", "training_share", "rest_share")
    if wait is None:
        loads = {name: Metric(value=None, unit=unit_of(name), reason=NOT_TOLD) for name in ("loading_time", *shares)}
    else:
        loading, computing = _total(run.phases, ("data",)) + wait, training - wait
        parts = (loading, computing, run.runtime - loading - computing)
        loads = {name: Metric(value=part / run.runtime, unit="1") for name, part in zip(shares, parts, strict=True)}
        loads["loading_time"] = Metric(value=loading, unit="s")
    return {
        "runtime": Metric(value=run.runtime, unit="s"),
        "training_time": Metric(value=training, unit="s"),
        "staging_time": _staging(run),
        "saving_time": Metric(value=saving, unit="s", reason=run.no_validation if saving is None else None),
        **loads,
        **_epochs(run),
        "loss_validation": validation,
        "peak_host_memory": Metric(value=run.host_memory, unit="B", reason=None if run.host_memory is not None else "not known"),
        **_powers(energy),
        **rank_metrics(run.rank_steps),
    }


def whole_run(run: WindowEnergy | None) -> dict[str, Metric]:
    """Time and energy of all that an application would do, and their product with the node's energy: D3.7's Action, section 3.

    ``run`` goes from the first data until the model is saved. The interpreter's start, the idle baseline and the probes are not in it.
    """
    if run is None:
        names = ("run_time", "run_energy", "run_node_energy", "action")
        return {name: Metric(value=None, unit=unit_of(name), reason="energy was not measured") for name in names}
    node = joules(run, *_NODE_BOUNDARIES)
    return {
        "run_time": Metric(value=run.duration_s, unit="s"),
        "run_energy": joules(run, *HEADLINES),
        "run_node_energy": node,
        "action": scaled(node, run.duration_s, "J s"),
    }


def rank_metrics(mean_steps: Sequence[float]) -> dict[str, Metric]:
    """The slowest of several ranks and by how much, from each rank's mean step in the window."""
    if len(mean_steps) < 2:
        return {name: Metric(value=None, unit="1", reason="there is only one rank") for name in ("slowest_rank", "rank_imbalance")}
    longest = max(mean_steps)
    return {
        "slowest_rank": Metric(value=mean_steps.index(longest), unit="1"),
        "rank_imbalance": Metric(value=longest / median(mean_steps) - 1, unit="1", n=len(mean_steps)),
    }


def _total(phases: Iterable[Phase], names: Sequence[str]) -> float:
    return sum(phase.end - phase.start for phase in phases if phase.name in names)


def _staging(run: Measured) -> Metric:
    """What bringing the data to this node took: now, or when it was done if it was there already."""
    data = run.facts.data
    took, before = data.get("staging_seconds"), data.get("staged_before")
    if not isinstance(took, int | float):
        return Metric(value=None, unit="s", reason="no data was staged")
    return Metric(value=took, unit="s", reason="staged by an earlier point and used again" if before else None)


def is_input_bound(point: Point, metrics: Mapping[str, Metric]) -> bool:
    """Whether faster input would have made this run faster: waits for batches took more than :data:`INPUT_BOUND_SHARE` of the window."""
    wait = metrics["data_wait_share"].value
    return point.mode == "train" and wait is not None and wait > INPUT_BOUND_SHARE


def without_wait(throughput: Metric, wait: float | None, trained: bool) -> Metric:
    """Throughput of the same steps without the waits for batches, and what that says of the run."""
    if throughput.value is None or wait is None or not trained or wait >= 1:
        return Metric(value=None, unit=throughput.unit, reason="only mode train both waits and computes")
    kind = "input-bound" if wait > INPUT_BOUND_SHARE else "compute-bound"
    value = throughput.value / (1 - wait)
    return Metric(value=value, unit=throughput.unit, reason=f"{kind}: {100 * wait:.2g} % of the window was spent waiting for batches")


def _epochs(run: Measured) -> dict[str, Metric]:
    """Times of the whole epochs since the first step; of a run that is shorter than one, the mean is projected from the window."""
    names = ("epoch_time_mean", "epoch_time_min", "epoch_time_max", "epoch_time_first")
    steps = steps_per_epoch(run.facts, run.point)
    if steps is None:
        return {name: Metric(value=None, unit="s", reason="the workload has no epochs") for name in names}
    whole = len(run.steps) // steps
    if not whole:
        reason = f"the run had {len(run.steps)} of the {steps} steps of an epoch"
        projected = Metric(value=steps * run.window.seconds / run.window.steps, unit="s", reason=f"projected from the window: {reason}")
        return {"epoch_time_mean": projected} | {name: Metric(value=None, unit="s", reason=reason) for name in names[1:]}
    times = [sum(run.steps[index * steps : (index + 1) * steps]) for index in range(whole)]
    values = (sum(times) / whole, min(times), max(times), times[0])
    found = {name: Metric(value=value, unit="s", n=whole) for name, value in zip(names, values, strict=True)}
    if whole > 1:
        half = t_critical(0.975, whole - 1) * stdev(times) / math.sqrt(whole)
        ends = {"low": max(values[0] - half, 0.0), "high": values[0] + half}
        found["epoch_time_mean"] = found["epoch_time_mean"].model_copy(update=ends)
    return found


def _powers(energy: WindowEnergy | None) -> dict[str, Metric]:
    """Highest power of one device and of all together, and the energies of devices and node, side by side."""
    devices, node = joules(energy, "device"), joules(energy, *_NODE_BOUNDARIES)
    if energy is None or devices.value is None:
        unknown = {"scope": "device", "reason": devices.reason}
        names = ("max_device_power", "max_aggregate_power", "aggregate_power")
        powers = {name: Metric(value=None, unit="W", **unknown) for name in names}
    else:
        device = energy.boundaries["device"]
        peaks = [channel.peak_w for channel in energy.channels if channel.boundary == "device" and channel.peak_w is not None]
        reason = "the sensors show no peaks"
        powers = {
            "max_device_power": _maybe(max(peaks, default=None), "max_device_power", "device", reason),
            "max_aggregate_power": _maybe(device.peak_w, "max_aggregate_power", "device", reason),
            "aggregate_power": _maybe(device.mean_w, "aggregate_power", "device", reason),
        }
    return {**powers, "device_energy": devices, "node_energy": node}


def _maybe(value: float | None, name: str, scope: str, reason: str) -> Metric:
    return Metric(value=value, unit=unit_of(name), scope=scope, reason=reason if value is None else None)
