"""Metrics of epochs: EPICURE's three times (section 5.2), PEARC '22's first and later epochs (Table 1), time and energy to a quality."""

from __future__ import annotations

import math
from statistics import median, stdev

from caraml.base.format import count
from caraml.base.stats import t_critical
from caraml.metrics.model import Epoch, Measured, Metric, MetricDefinition, step_table, steps_per_epoch, unknown

_WHOLE_EPOCHS = "steps of an epoch, from steps.parquet; projected from the window's mean step where no epoch was whole"

DEFINITIONS: dict[str, MetricDefinition] = {
    "epoch_time_mean": MetricDefinition(
        "Mean epoch",
        "s",
        "lower",
        "Mean over the run's whole epochs; projected from the window if there was none, then said so.",
        source=_WHOLE_EPOCHS,
    ),
    "epoch_time_min": MetricDefinition("Shortest epoch", "s", "lower", "Shortest of the run's whole epochs.", source=_WHOLE_EPOCHS),
    "epoch_time_max": MetricDefinition("Longest epoch", "s", "lower", "Longest of the run's whole epochs.", source=_WHOLE_EPOCHS),
    "epoch_time_first": MetricDefinition(
        "First epoch", "s", "lower", "First epoch, with the first step and warm-up in it.", source=_WHOLE_EPOCHS
    ),
    "epoch_time": MetricDefinition(
        "Epoch",
        "s",
        "lower",
        "The epoch that counts: training part and validation, the slowest rank's.",
        source="training part and validation of the counted epoch, ranks synchronised at both ends",
    ),
    "epoch_training_time": MetricDefinition(
        "Epoch, training",
        "s",
        "lower",
        "Training part of the epoch that counts, the slowest rank's.",
        source="training part of the counted epoch, ranks synchronised at both ends",
    ),
    "epoch_validation_time": MetricDefinition(
        "Epoch, validation", "s", "lower", "Validation pass of the epoch that counts.", source="epoch − its training part"
    ),
    "batch_time_median": MetricDefinition(
        "Median batch",
        "s",
        "lower",
        "Median batch of the epoch that counts, without its first and its last batch.",
        source=lambda run: f"{step_table(run)}, first and last batch of the epoch left out",
    ),
    "throughput_first_epoch": MetricDefinition(
        "Rate of first epoch",
        "{item}/s",
        "higher",
        "Items over time of the first epoch's training part, with compilation and start-up.",
        source="items of the epoch / its training part",
    ),
    "throughput_later_epochs": MetricDefinition(
        "Rate of later epochs",
        "{item}/s",
        "higher",
        "Items over time of the training parts of all epochs after the first.",
        source="items of the epochs / their training parts",
    ),
    "accuracy_validation": MetricDefinition(
        "Accuracy",
        "1",
        "higher",
        "Share of held-out samples answered right after the last epoch.",
        source="counted over all held-out samples on all ranks, after the last epoch",
    ),
    "time_to_solution": MetricDefinition(
        "Time to solution",
        "s",
        "lower",
        "From the first step to the end of the last validation: of the epochs asked for, or until the quality asked for was reached.",
        source="monotonic clock, from before the first step until after the last validation; the slowest rank's",
    ),
    "energy_to_solution": MetricDefinition(
        "Energy to solution",
        "J",
        "lower",
        "Energy within the time to solution.",
        source="energy between the two time stamps of the time to solution",
        sensor=True,
    ),
}


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
    per_step, unit = run.items_per_step, f"{run.facts.item}/s"
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
