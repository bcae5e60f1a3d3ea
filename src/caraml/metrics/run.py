"""Metrics of a whole run rather than of its window, as the MAELSTROM report (deliverable D3.7, section 3) lists them for an application;
and of its epochs: EPICURE's three times (section 5.2), PEARC '22's first and later epochs (Table 1), time and energy to a quality."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median, stdev

from caraml.base.format import count
from caraml.base.stats import t_critical
from caraml.metrics.energy import NODE, joules, powers
from caraml.metrics.model import Epoch, Measured, Metric, MetricDefinition, Phase, scaled, step_table, steps_per_epoch, unknown
from caraml.metrics.window import NOT_TOLD
from caraml.power.model import HEADLINES, WindowEnergy
from caraml.suite.model import Point

TRAINING_PHASES = ("first_step", "warm_up", "measure", "after")
INPUT_BOUND_SHARE = 0.1
"""Share of the window spent waiting for batches above which a run is input-bound: without the wait it would be 11 % faster or more."""

DEFINITIONS: dict[str, MetricDefinition] = {
    "runtime": MetricDefinition(
        "Total runtime",
        "s",
        "neither",
        "From the start of the worker until its model is saved, without idle baseline and probes; of a loop of your own, the loop; "
        "of a command, the program's run.",
    ),
    "training_time": MetricDefinition("Training", "s", "neither", "All steps: the first one, warm-up and window."),
    "loading_time": MetricDefinition(
        "Loading", "s", "lower", "Preparing the input, and waiting for batches in all steps; the longest wait over ranks."
    ),
    "saving_time": MetricDefinition("Saving", "s", "lower", "Writing the model's weights until they are on the disk."),
    "loading_share": MetricDefinition("Runtime loading", "1", "lower", "Loading time over total runtime.", shown="percent"),
    "training_share": MetricDefinition(
        "Runtime training", "1", "higher", "Training time less waits for batches, over total runtime.", shown="percent"
    ),
    "rest_share": MetricDefinition(
        "Runtime rest", "1", "lower", "What is neither loading nor training, over total runtime.", shown="percent"
    ),
    "throughput_without_wait": MetricDefinition(
        "Without input wait",
        "{item}/s",
        "higher",
        "What the throughput would have been without waiting for batches; the run is input-bound where the wait is above 10 %.",
        "throughput / (1 - data wait)",
    ),
    "staging_time": MetricDefinition("Staging", "s", "lower", "Bringing the data to storage of the node, before anything was timed."),
    "loss_validation": MetricDefinition(
        "Validation loss",
        "1",
        "lower",
        "Mean loss per held-out sample, after the last step.",
        "16 held-out batches at most; all of them in a run by epochs",
    ),
    "peak_host_memory": MetricDefinition(
        "Peak host memory",
        "B",
        "lower",
        "Highest resident set of one rank's process; on CPUs from the building of the model on, on GPUs of its whole life.",
    ),
    "slowest_rank": MetricDefinition("Slowest rank", "1", "neither", "The rank with the longest mean step in the window."),
    "rank_imbalance": MetricDefinition(
        "Rank imbalance",
        "1",
        "lower",
        "By how much the slowest rank's mean step in the window is longer than that of the median rank. Ranks that wait for each other in "
        "every step differ little.",
        shown="percent",
    ),
    "run_time": MetricDefinition(
        "Run",
        "s",
        "lower",
        "From the first data until the model is saved, without idle baseline and probes; of a command, the program's run.",
    ),
    "run_energy": MetricDefinition("Run energy", "J", "lower", "Energy within the time of the run, of all nodes.", sensor=True),
    "run_node_energy": MetricDefinition(
        "Run energy, nodes", "J", "lower", "Energy of whole nodes within the time of the run.", sensor=True
    ),
    "action": MetricDefinition(
        "Action", "J s", "lower", "Energy of whole nodes within the time of the run, times that time (D3.7).", sensor=True
    ),
    "epoch_time_mean": MetricDefinition(
        "Mean epoch", "s", "lower", "Mean over the run's whole epochs; projected from the window if there was none, then said so."
    ),
    "epoch_time_min": MetricDefinition("Shortest epoch", "s", "lower", "Shortest of the run's whole epochs."),
    "epoch_time_max": MetricDefinition("Longest epoch", "s", "lower", "Longest of the run's whole epochs."),
    "epoch_time_first": MetricDefinition("First epoch", "s", "lower", "First epoch, with the first step and warm-up in it."),
    "epoch_time": MetricDefinition("Epoch", "s", "lower", "The epoch that counts: training part and validation, the slowest rank's."),
    "epoch_training_time": MetricDefinition("Epoch, training", "s", "lower", "Training part of the epoch that counts, the slowest rank's."),
    "epoch_validation_time": MetricDefinition("Epoch, validation", "s", "lower", "Validation pass of the epoch that counts."),
    "batch_time_median": MetricDefinition(
        "Median batch", "s", "lower", "Median batch of the epoch that counts, without its first and its last batch.", step_table
    ),
    "throughput_first_epoch": MetricDefinition(
        "Rate of first epoch", "{item}/s", "higher", "Items over time of the first epoch's training part, with compilation and start-up."
    ),
    "throughput_later_epochs": MetricDefinition(
        "Rate of later epochs", "{item}/s", "higher", "Items over time of the training parts of all epochs after the first."
    ),
    "accuracy_validation": MetricDefinition(
        "Accuracy", "1", "higher", "Share of all held-out samples answered right after the last epoch."
    ),
    "time_to_solution": MetricDefinition(
        "Time to solution",
        "s",
        "lower",
        "From the first step to the end of the last validation: of the epochs asked for, or until the quality asked for was reached.",
    ),
    "energy_to_solution": MetricDefinition("Energy to solution", "J", "lower", "Energy within the time to solution.", sensor=True),
}


def run_metrics(run: Measured, energy: WindowEnergy | None) -> dict[str, Metric]:
    """All metrics of a run; ``energy`` is the window's."""
    training = _total(run.phases, TRAINING_PHASES)
    saving = _total(run.phases, ("save_model",)) or None
    validation = Metric(value=run.validation_loss, unit="1", reason=run.no_validation if run.validation_loss is None else None)
    wait, shares = run.whole_data_wait, ("loading_share", "training_share", "rest_share")
    if wait is None:
        loads = unknown(DEFINITIONS, ("loading_time", *shares), NOT_TOLD)
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
        **whole_epochs(run),
        "loss_validation": validation,
        "peak_host_memory": Metric(value=run.host_memory, unit="B", reason=None if run.host_memory is not None else "not known"),
        **powers(energy),
        **rank_metrics(run.rank_steps),
    }


def whole_run(run: WindowEnergy | None) -> dict[str, Metric]:
    """Time and energy of all that an application would do, and their product with the node's energy: D3.7's Action, section 3.

    ``run`` goes from the first data until the model is saved. The interpreter's start, the idle baseline and the probes are not in it.
    """
    if run is None:
        return unknown(DEFINITIONS, ("run_time", "run_energy", "run_node_energy", "action"), "energy was not measured")
    node = joules(run, *NODE)
    return {
        "run_time": Metric(value=run.duration_s, unit="s"),
        "run_energy": joules(run, *HEADLINES),
        "run_node_energy": node,
        "action": scaled(node, run.duration_s, "J s"),
    }


def rank_metrics(mean_steps: Sequence[float]) -> dict[str, Metric]:
    """The slowest of several ranks and by how much, from each rank's mean step in the window."""
    if len(mean_steps) < 2:
        return unknown(DEFINITIONS, ("slowest_rank", "rank_imbalance"), "there is only one rank")
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


# -- epochs ------------------------------------------------------------------------------------------------------------


def whole_epochs(run: Measured) -> dict[str, Metric]:
    """Times of the whole epochs since the first step; of a run that is shorter than one, the mean is projected from the window."""
    names = ("epoch_time_mean", "epoch_time_min", "epoch_time_max", "epoch_time_first")
    steps = steps_per_epoch(run.facts, run.point)
    if steps is None:
        return unknown(DEFINITIONS, names, "the workload has no epochs")
    whole = len(run.steps) // steps
    if not whole:
        reason = f"the run had {len(run.steps)} of the {steps} steps of an epoch"
        projected = Metric(value=steps * run.window.seconds / run.window.steps, unit="s", reason=f"projected from the window: {reason}")
        return {"epoch_time_mean": projected} | unknown(DEFINITIONS, names[1:], reason)
    times = [sum(run.steps[index * steps : (index + 1) * steps]) for index in range(whole)]
    values = (sum(times) / whole, min(times), max(times), times[0])
    found = {name: Metric(value=value, unit="s", n=whole) for name, value in zip(names, values, strict=True)}
    if whole > 1:
        half = t_critical(0.975, whole - 1) * stdev(times) / math.sqrt(whole)
        ends = {"low": max(values[0] - half, 0.0), "high": values[0] + half}
        found["epoch_time_mean"] = found["epoch_time_mean"].model_copy(update=ends)
    return found


def epoch_metrics(run: Measured, energy: Metric) -> dict[str, Metric]:
    """The metrics of a run by epochs, none of one that had no such; ``energy`` is that of all its epochs, validation included."""
    counted = run.point.measure.counted_epoch
    if counted is None:
        return {}
    row = next((row for row in run.epochs if row.number == counted), run.epochs[-1])
    which = f"epoch {row.number} of {len(run.epochs)} counts"
    last = run.epochs[-1]
    no_accuracy = "the workload counts no right answers" if last.entire else _cut_short(last)
    return {
        **_times(row, which),
        "batch_time_median": _median(row, which),
        **_first_and_later(run),
        "accuracy_validation": Metric(value=last.accuracy, unit="1", reason=no_accuracy if last.accuracy is None else None),
        **_to_solution(run, energy),
    }


def _times(row: Epoch, which: str) -> dict[str, Metric]:
    """EPICURE's times of an epoch; unknown for one that was cut short, since its part is the time of nothing."""
    known = {"epoch_time": row.whole, "epoch_training_time": row.training, "epoch_validation_time": row.whole - row.training}
    if not row.entire:
        return unknown(DEFINITIONS, known, _cut_short(row))
    found = {name: Metric(value=value, unit="s", reason=which) for name, value in known.items()}
    if row.loss is None:
        found["epoch_validation_time"] = Metric(value=None, unit="s", reason="the workload has no held-out data")
    return found


def _cut_short(row: Epoch) -> str:
    return f"the batch system was about to end the job: epoch {row.number} has {count(len(row.batches), 'batch')} and no validation"


def _median(row: Epoch, which: str) -> Metric:
    """The first batch of an epoch waits for the loader, and the last may be odd: EPICURE leaves both out."""
    inner = row.batches[1:-1]
    if not inner:
        return Metric(value=None, unit="s", reason=f"the epoch has {count(len(row.batches), 'batch')}; the first and the last do not count")
    return Metric(value=median(inner), unit="s", n=len(inner), reason=which)


def _first_and_later(run: Measured) -> dict[str, Metric]:
    """Rates of the training parts: the first, with compilation and all that happens once in it, and those after."""
    first, later = run.epochs[0], run.epochs[1:]
    per_step, unit = run.point.global_batch * run.facts.items_per_sample, f"{run.facts.item}/s"
    rates = {"throughput_first_epoch": Metric(value=per_step * len(first.batches) / first.training, unit=unit, n=1)}
    if later:
        items, seconds = per_step * sum(len(row.batches) for row in later), sum(row.training for row in later)
        rates["throughput_later_epochs"] = Metric(value=items / seconds, unit=unit, n=len(later))
    else:
        rates["throughput_later_epochs"] = Metric(value=None, unit=unit, reason="there was one epoch")
    return rates


def _to_solution(run: Measured, energy: Metric) -> dict[str, Metric]:
    """From the first step to the end of the last validation: of as many epochs as were asked for, or as it took to reach a quality."""
    last, epochs, reason = run.epochs[-1], len(run.epochs), None
    if "target_missed" in run.flags:
        found = [
            f"loss {last.loss:.4g}" if last.loss is not None else "",
            f"accuracy {last.accuracy:.4g}" if last.accuracy is not None else "",
        ]
        reason = f"not reached in {count(epochs, 'epoch')}: {', '.join(filter(None, found)) or 'nothing to judge by'}"
    elif not last.entire:
        reason = _cut_short(last)
    if reason is not None or run.epochs_seconds is None:
        known = {"value": None, "reason": reason or "not measured"}
        return {"time_to_solution": Metric(unit="s", **known), "energy_to_solution": Metric(unit="J", **known)}
    asked = None if run.point.measure.to_target else f"{count(epochs, 'epoch')}, as many as were asked for"
    return {"time_to_solution": Metric(value=run.epochs_seconds, unit="s", n=epochs, reason=asked), "energy_to_solution": energy}
