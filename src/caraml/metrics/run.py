"""Metrics of a whole run rather than of its window, as the MAELSTROM report (deliverable D3.7, section 3) lists them for an application;
of its epochs: EPICURE's three times (section 5.2), PEARC '22's first and later epochs (Table 1), time and energy to a quality; and how good
its model is on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from caraml.base.format import count
from caraml.base.stats import Z95, t_critical
from caraml.metrics.energy import NODE, joules, powers
from caraml.metrics.model import METRICS, Epoch, Measured, Metric, Phase, scaled, steps_per_epoch, unit_of, unknown
from caraml.power.model import HEADLINES, WindowEnergy
from caraml.suite.model import Point

CHOICES = ("matmul", "batched_matmul", "dropout_masks")
"""Phases inside the first step that time kernels to choose among them."""
TRAINING_PHASES = ("first_step", *CHOICES, "warm_up", "measure", "after")
_SHARES = ("loading_share", "training_share", "rest_share")
_OF_APPLICATION = ("run_time", "run_energy", "run_node_energy", "action")
TO_THE_END = ("runtime", *_SHARES, *_OF_APPLICATION)
"""Metrics that are not known before the model is saved."""
INPUT_BOUND_SHARE = 0.1
"""Share of the window spent waiting for batches above which a run is input-bound: one device would be 11 % faster without, or more."""


def run_metrics(run: Measured, energy: WindowEnergy | None) -> dict[str, Metric]:
    """All metrics of a run; ``energy`` is the window's."""
    training = _total(run.phases, TRAINING_PHASES)
    saving = _total(run.phases, ("save_model",)) or None
    validation = Metric(value=run.validation_loss, unit="1", reason=run.no_validation if run.validation_loss is None else None)
    wait = run.whole_data_wait
    if wait is None:
        loads = unknown(("loading_time", *_SHARES), run.no_wait)
    else:
        loading, computing = _total(run.phases, ("data",)) + wait, training - wait
        parts = (loading, computing, run.runtime - loading - computing)
        loads = {name: Metric(value=part / run.runtime, unit="1") for name, part in zip(_SHARES, parts, strict=True)}
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


def whole_run(run: WindowEnergy | None, aside: WindowEnergy | None = None) -> dict[str, Metric]:
    """Time and energy of all that an application would do, and their product with the node's energy: D3.7's Action, section 3.

    ``run`` goes from the first data until the model is saved. The interpreter's start, the idle baseline and the probes are not in it, nor
    counts what was done ``aside`` meanwhile, which no application would do.
    """
    if run is None:
        return unknown(_OF_APPLICATION, "energy was not measured")
    seconds = run.duration_s - (aside.duration_s if aside is not None else 0.0)
    node = _without(aside, run, *NODE)
    return {
        "run_time": Metric(value=seconds, unit="s"),
        "run_energy": _without(aside, run, *HEADLINES),
        "run_node_energy": node,
        "action": scaled(node, seconds, "J s"),
    }


def _without(aside: WindowEnergy | None, run: WindowEnergy, *boundaries: str) -> Metric:
    """The run's energy less that of what was done aside, which is short: the bound is that of the whole."""
    whole = joules(run, *boundaries)
    part = joules(aside, *boundaries).value if aside is not None else None
    return whole if whole.value is None or part is None else whole.model_copy(update={"value": whole.value - part})


def rank_metrics(mean_steps: Sequence[float]) -> dict[str, Metric]:
    """The slowest of several ranks and by how much, from each rank's mean step in the window."""
    if len(mean_steps) < 2:
        return unknown(("slowest_rank", "rank_imbalance"), "there is only one rank")
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


def without_wait(throughput: Metric, wait: Metric, point: Point) -> Metric:
    """Throughput of the same steps with batches that are there at once, and what that says of the run. Of one accelerator it is the least
    that it would have been: what that waits for launches, once its batch is there, is not in the wait. Ranks whose own work differs wait
    for that, too: of several it is the most, and of several accelerators neither."""
    if point.mode != "train":
        return Metric(value=None, unit=throughput.unit, reason="only mode train both waits and computes")
    if throughput.value is None or wait.value is None or wait.value >= 1:
        return Metric(value=None, unit=throughput.unit, reason=wait.reason or "there is nothing but the wait")
    kind = "input-bound" if wait.value > INPUT_BOUND_SHARE else "compute-bound"
    gpu, several = point.device_class == "gpu", point.world > 1
    least = "at least " if gpu and not several else ""
    more = "; ranks whose own work differs wait for that, too, so this is the most without the wait" if several else ""
    if gpu and several:
        more = "; more where devices then wait for launches, less where ranks' own work differs"
    reason = f"{kind}: {least}{100 * wait.value:.2g} % of the window was spent waiting for batches{more}"
    return Metric(value=throughput.value / (1 - wait.value), unit=throughput.unit, reason=reason)


# -- epochs ------------------------------------------------------------------------------------------------------------


def whole_epochs(run: Measured) -> dict[str, Metric]:
    """Times of the whole epochs since the first step; of a run that is shorter than one, the mean is projected from the window."""
    names = ("epoch_time_mean", "epoch_time_min", "epoch_time_max", "epoch_time_first")
    steps = steps_per_epoch(run.facts, run.point)
    if steps is None:
        return unknown(names, "the workload has no epochs")
    times = [sum(run.steps[end - steps : end]) for end in range(steps, len(run.steps) + 1, steps)]
    if run.epochs:  # of which some may be cut short, so that they do not begin at every so many steps
        times = [sum(row.batches) for row in run.epochs if len(row.batches) == steps]
    whole = len(times)
    if not whole:
        longest = max((len(row.batches) for row in run.epochs), default=len(run.steps))
        reason = f"the run had {longest} of the {steps} steps of an epoch"
        projected = Metric(value=steps * run.window.seconds / run.window.steps, unit="s", reason=f"projected from the window: {reason}")
        return {"epoch_time_mean": projected} | unknown(names[1:], reason)
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
        return unknown(known, _cut_short(row))
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


# -- quality ------------------------------------------------------------------------------------------------------------


def mean(name: str, values: Sequence[float], **more: Any) -> Metric:
    """The metric ``name`` as the mean over held-out samples, with the 95 % interval of that sample: Student's, and Wilson's for a share.

    Samples that are all alike have no spread that would tell how others are: then Student's is not known.
    """
    unit = unit_of(name)
    if not values or not all(map(math.isfinite, values)):
        reason = "an image was reproduced exactly or not at all, which is no finite number" if values else "no sample was held out"
        return Metric(value=None, unit=unit, reason=reason)
    value, n = fmean(values), len(values)
    centre, half = value, t_critical(0.975, n - 1) * stdev(values) / math.sqrt(n) if n > 1 else 0.0
    if METRICS[name].shown == "percent" and set(values) <= {0.0, 1.0}:  # Wilson 1927: holds for shares near 0 and 1, too
        weight = Z95**2 / n
        centre, half = (value + weight / 2) / (1 + weight), math.sqrt(weight * (value * (1 - value) + weight / 4)) / (1 + weight)
    ends = {"low": centre - half, "high": centre + half} if half else {}
    return Metric(value=value, unit=unit, n=n, **ends, **more)
