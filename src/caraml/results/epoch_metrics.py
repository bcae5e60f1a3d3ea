"""Metrics of epochs: EPICURE's three times (section 5.2), PEARC '22's first and later epochs (Table 1), time and energy to a quality.

Also what follows for a nominal epoch, so that energies of runs of any length can be compared: the CARAML slides scale to ImageNet's
1,281,167 images, or to 10^6.
"""

from __future__ import annotations

from statistics import median

from caraml.results.measured import Epoch, Measured
from caraml.results.metrics import scaled
from caraml.results.record import Metric
from caraml.units import JOULES_PER_WATT_HOUR, unit_of


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
        return {name: Metric(value=None, unit="s", reason=_cut_short(row)) for name in known}
    found = {name: Metric(value=value, unit="s", reason=which) for name, value in known.items()}
    if row.loss is None:
        found["epoch_validation_time"] = Metric(value=None, unit="s", reason="the workload has no held-out data")
    return found


def _cut_short(row: Epoch) -> str:
    return f"the batch system was about to end the job: epoch {row.number} has {len(row.batches)} batches and no validation"


def _median(row: Epoch, which: str) -> Metric:
    """The first batch of an epoch waits for the loader, and the last may be odd: EPICURE leaves both out."""
    inner = row.batches[1:-1]
    if not inner:
        return Metric(value=None, unit="s", reason=f"the epoch has {len(row.batches)} batches; the first and the last do not count")
    return Metric(value=median(inner), unit="s", n=len(inner), reason=which)


def _first_and_later(run: Measured) -> dict[str, Metric]:
    """Rates of the training parts: the first, with compilation and all that happens once in it, and those after."""
    first, later = run.epochs[0], run.epochs[1:]
    per_step, unit = run.items_per_step, unit_of("throughput", run.facts.item)
    rates = {"throughput_first_epoch": Metric(value=per_step * len(first.batches) / first.training, unit=unit, n=1)}
    if later:
        items, seconds = per_step * sum(len(row.batches) for row in later), sum(row.training for row in later)
        rates["throughput_later_epochs"] = Metric(value=items / seconds, unit=unit, n=len(later))
    else:
        rates["throughput_later_epochs"] = Metric(value=None, unit=unit, reason="there was one epoch")
    return rates


def _to_solution(run: Measured, energy: Metric) -> dict[str, Metric]:
    """From the first step to the end of the last validation: of as many epochs as were asked for, or as it took to reach a quality."""
    last, count, reason = run.epochs[-1], len(run.epochs), None
    if "target_missed" in run.flags:
        found = [
            f"loss {last.loss:.4g}" if last.loss is not None else "",
            f"accuracy {last.accuracy:.4g}" if last.accuracy is not None else "",
        ]
        reason = f"not reached in {count} epochs: {', '.join(filter(None, found)) or 'nothing to judge by'}"
    elif not last.entire:
        reason = _cut_short(last)
    if reason is not None or run.epochs_seconds is None:
        known = {"value": None, "reason": reason or "not measured"}
        return {"time_to_solution": Metric(unit="s", **known), "energy_to_solution": Metric(unit="J", **known)}
    asked = None if run.point.measure.to_target else f"{count} epochs, as many as were asked for"
    return {"time_to_solution": Metric(value=run.epochs_seconds, unit="s", n=count, reason=asked), "energy_to_solution": energy}


def nominal_epoch(energy_per_item: Metric, items: int, world: int) -> dict[str, Metric]:
    """Energy of an epoch of ``items`` at the window's energy per item, in all and per device."""
    total = items / JOULES_PER_WATT_HOUR
    return {
        "energy_per_epoch": scaled(energy_per_item, total, "Wh"),
        "energy_per_epoch_per_device": scaled(energy_per_item, total / world, "Wh"),
    }
