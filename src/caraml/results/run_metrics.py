"""Metrics of a whole run rather than of its window: what the MAELSTROM report (deliverable D3.7, section 3) lists for an application."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from caraml.power.model import WindowEnergy
from caraml.results.record import Facts, Metric, Phase
from caraml.suite.model import Point
from caraml.units import unit_of

TRAINING_PHASES = ("first_step", "warm_up", "measure", "after")
INPUT_BOUND_SHARE = 0.1
"""Share of the window spent waiting for batches above which a run is input-bound: without the wait it would be 11 % faster or more."""
_NODE_BOUNDARIES = ("node_dc", "node_ac")


@dataclass(frozen=True)
class Run:
    """A run from its start until its model is saved. Times in seconds."""

    runtime: float
    phases: Sequence[Phase]
    """Finished phases; none overlap."""
    step_times: Sequence[float]
    """Of every step from the first on, the slowest rank's."""
    window_step: float
    """Mean step of the window."""
    data_wait: float
    """Longest wait for batches of any rank, over all steps."""
    global_batch: int
    facts: Facts
    validation_loss: float | None
    no_validation: str
    """Why there is no validation loss, or no saved model, if there is none."""
    host_memory: int | None
    """Highest resident set of a rank [B]."""


def run_metrics(run: Run, energy: WindowEnergy | None) -> dict[str, Metric]:
    """All metrics of a run; ``energy`` is the window's."""
    training = _total(run.phases, TRAINING_PHASES)
    loading = _total(run.phases, ("data",)) + run.data_wait
    computing = training - run.data_wait
    saving = _total(run.phases, ("save_model",)) or None
    validation = Metric(value=run.validation_loss, unit="1", reason=run.no_validation if run.validation_loss is None else None)
    return {
        "runtime": Metric(value=run.runtime, unit="s"),
        "training_time": Metric(value=training, unit="s"),
        "loading_time": Metric(value=loading, unit="s"),
        "staging_time": _staging(run),
        "saving_time": Metric(value=saving, unit="s", reason=run.no_validation if saving is None else None),
        "loading_share": Metric(value=loading / run.runtime, unit="1"),
        "training_share": Metric(value=computing / run.runtime, unit="1"),
        "rest_share": Metric(value=(run.runtime - loading - computing) / run.runtime, unit="1"),
        **_epochs(run),
        "loss_validation": validation,
        "peak_host_memory": Metric(value=run.host_memory, unit="B", reason=None if run.host_memory is not None else "not known"),
        **_powers(energy),
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


def _staging(run: Run) -> Metric:
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


def steps_per_epoch(facts: Facts, global_batch: int) -> int | None:
    """Optimizer steps of an epoch; ``None`` if the data has no epochs."""
    return None if facts.samples_per_epoch is None else max(facts.samples_per_epoch // global_batch, 1)


def _epochs(run: Run) -> dict[str, Metric]:
    """Times of the whole epochs since the first step; of a run that is shorter than one, the mean is projected from the window."""
    names = ("epoch_time_mean", "epoch_time_min", "epoch_time_max", "epoch_time_first")
    steps = steps_per_epoch(run.facts, run.global_batch)
    if steps is None:
        return {name: Metric(value=None, unit="s", reason="the workload has no epochs") for name in names}
    whole = len(run.step_times) // steps
    if not whole:
        reason = f"the run had {len(run.step_times)} of the {steps} steps of an epoch"
        projected = Metric(value=steps * run.window_step, unit="s", reason=f"projected from the window: {reason}")
        return {"epoch_time_mean": projected} | {name: Metric(value=None, unit="s", reason=reason) for name in names[1:]}
    times = [sum(run.step_times[index * steps : (index + 1) * steps]) for index in range(whole)]
    values = (sum(times) / whole, min(times), max(times), times[0])
    return {name: Metric(value=value, unit="s", n=whole) for name, value in zip(names, values, strict=True)}


def _powers(energy: WindowEnergy | None) -> dict[str, Metric]:
    """Highest power of one device and of all together, and the energies of devices and node, side by side."""
    found: dict[str, Metric] = {}
    reason = (energy.reason if energy is not None else None) or "no sensor of this boundary answered"
    device = energy.boundary("device") if energy is not None else None
    peaks = [channel.peak_w for channel in energy.channels if channel.boundary == "device"] if energy is not None else []
    known = [peak for peak in peaks if peak is not None]
    found["max_device_power"] = _maybe(max(known, default=None), "max_device_power", "device", reason)
    found["max_aggregate_power"] = _maybe(device.peak_w if device else None, "max_aggregate_power", "device", reason)
    found["aggregate_power"] = _maybe(device.mean_w if device else None, "aggregate_power", "device", reason)
    found["device_energy"] = _maybe(device.energy_j if device else None, "device_energy", "device", reason)
    node = energy.boundary(*_NODE_BOUNDARIES) if energy is not None else None
    scope = next((name for name in _NODE_BOUNDARIES if energy is not None and energy.boundaries.get(name) is node and node), "node")
    found["node_energy"] = _maybe(node.energy_j if node else None, "node_energy", scope, reason)
    return found


def _maybe(value: float | None, name: str, scope: str, reason: str) -> Metric:
    return Metric(value=value, unit=unit_of(name), scope=scope, reason=reason if value is None else None)
