"""Metrics of a whole run rather than of its window: what the MAELSTROM report (deliverable D3.7, section 3) lists for an application."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from caraml.metrics.energy import NODE, joules, powers
from caraml.metrics.epochs import whole_epochs
from caraml.metrics.model import DescribedRun, Measured, Metric, MetricDefinition, Phase, scaled, steps_file, unknown
from caraml.metrics.window import NOT_TOLD
from caraml.power.model import HEADLINES, WindowEnergy
from caraml.suite.model import Point

TRAINING_PHASES = ("first_step", "warm_up", "measure", "after")
INPUT_BOUND_SHARE = 0.1
"""Share of the window spent waiting for batches above which a run is input-bound: without the wait it would be 11 % faster or more."""


def _clocked(of_training: str) -> Callable[[DescribedRun], str]:
    """The source of a time whose ends, of a program, are those of its run."""
    program = "the program's start to its end"
    return lambda run: f"monotonic clock, from {program if run.point.workload == 'command' else of_training}"


DEFINITIONS: dict[str, MetricDefinition] = {
    "runtime": MetricDefinition(
        "Total runtime",
        "s",
        "neither",
        "From the start of the worker until its model is saved; of a command, the program's run.",
        source=_clocked("the start of the worker's process"),
    ),
    "training_time": MetricDefinition(
        "Training",
        "s",
        "neither",
        "All steps: the first one, warm-up and window.",
        source="sum of all step times, the slowest rank of each step",
    ),
    "loading_time": MetricDefinition(
        "Loading",
        "s",
        "lower",
        "Preparing the input, and waiting for batches in all steps; the longest wait over ranks.",
        source="phase `data`, plus host time in the loader's next call over all steps, largest over ranks",
    ),
    "saving_time": MetricDefinition(
        "Saving",
        "s",
        "lower",
        "Writing the model's weights until they are on the disk.",
        source="phase `save_model`: weights written and flushed to the disk, then removed",
    ),
    "loading_share": MetricDefinition(
        "Runtime loading", "1", "lower", "Loading time over total runtime.", source="loading time / runtime", shown="percent"
    ),
    "training_share": MetricDefinition(
        "Runtime training",
        "1",
        "higher",
        "Training time less waits for batches, over total runtime.",
        source="(training time - waits for batches) / runtime",
        shown="percent",
    ),
    "rest_share": MetricDefinition(
        "Runtime rest",
        "1",
        "lower",
        "What is neither loading nor training, over total runtime.",
        source="1 - loading share - training share",
        shown="percent",
    ),
    "throughput_without_wait": MetricDefinition(
        "Without input wait",
        "{item}/s",
        "higher",
        "What the throughput would have been without waiting for batches; the run is input-bound where the wait is above 10 %.",
        source="throughput / (1 - data wait); input-bound if the wait is above 10 % of the window",
    ),
    "staging_time": MetricDefinition(
        "Staging",
        "s",
        "lower",
        "Bringing the data to storage of the node, before anything was timed.",
        source="monotonic clock around copying or unpacking, on the process that did it",
    ),
    "loss_validation": MetricDefinition(
        "Validation loss",
        "1",
        "lower",
        "Mean loss per held-out sample, after the last step.",
        source="mean over the samples of 16 held-out batches at most, after the last step; over all of them in a run by epochs",
    ),
    "peak_host_memory": MetricDefinition(
        "Peak host memory",
        "B",
        "lower",
        "Highest resident set of one rank's process; on CPUs from the building of the model on, on GPUs of its whole life.",
        source="highest resident set, as the kernel counts it; largest over ranks",
    ),
    "slowest_rank": MetricDefinition(
        "Slowest rank",
        "1",
        "neither",
        "The rank with the longest mean step in the window.",
        source=lambda run: f"{steps_file(run)}: mean step of each rank",
    ),
    "rank_imbalance": MetricDefinition(
        "Rank imbalance",
        "1",
        "lower",
        "By how much the slowest rank's mean step in the window is longer than that of the median rank. Ranks that wait for each other in "
        "every step differ little.",
        source=lambda run: f"{steps_file(run)}: mean step of each rank",
        shown="percent",
    ),
    "run_time": MetricDefinition(
        "Run",
        "s",
        "lower",
        "From the first data until the model is saved, without idle baseline and probes; of a command, the program's run.",
        source=_clocked("the phase `build` until after `save_model`"),
    ),
    "run_energy": MetricDefinition(
        "Run energy",
        "J",
        "lower",
        "Energy within the time of the run, of all nodes.",
        source="energy between the two time stamps of the run",
        sensor=True,
    ),
    "run_node_energy": MetricDefinition(
        "Run energy, nodes",
        "J",
        "lower",
        "Energy of whole nodes within the time of the run.",
        source="sensors of whole nodes, between the two time stamps of the run",
        sensor=True,
    ),
    "action": MetricDefinition(
        "Action",
        "J s",
        "lower",
        "Energy of whole nodes within the time of the run, times that time (D3.7).",
        source="run energy of the nodes × run time",
        sensor=True,
    ),
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
