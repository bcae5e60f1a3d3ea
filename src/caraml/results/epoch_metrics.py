"""Metrics of epochs: EPICURE's three times (section 5.2), PEARC '22's first and later epochs (Table 1), time and energy to a quality.

Also what follows for a nominal epoch, so that energies of runs of any length can be compared: the CARAML slides scale to ImageNet's
1,281,167 images, or to 10^6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from caraml.results.record import Metric
from caraml.units import JOULES_PER_WATT_HOUR


@dataclass(frozen=True)
class Epoch:
    """One epoch. Times in seconds, of the slowest rank."""

    number: int
    whole: float
    """Training part and validation: EPICURE's t_epoch."""
    training: float
    """EPICURE's t_train."""
    batches: Sequence[float]
    """Time of each batch."""
    entire: bool
    """Whether every batch was trained and the epoch validated: not so where the batch system was about to end the job."""
    loss: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Epochs:
    """All epochs of a run, and which of them counts."""

    rows: Sequence[Epoch]
    counted: int
    items_per_step: int
    to_target: bool
    """Whether training went on until a quality was reached."""
    reached: bool


def epoch_metrics(epochs: Epochs, window_seconds: float, energy: Metric) -> dict[str, Metric]:
    """The metrics of a run by epochs; ``energy`` is that of the window."""
    row = next((row for row in epochs.rows if row.number == epochs.counted), epochs.rows[-1])
    which = f"epoch {row.number} of {len(epochs.rows)} counts"
    last = epochs.rows[-1]
    no_accuracy = "the workload counts no right answers" if last.entire else _cut_short(last)
    return {
        **_times(row, which),
        "batch_time_median": _median(row, which),
        **_first_and_later(epochs),
        "accuracy_validation": Metric(value=last.accuracy, unit="1", reason=no_accuracy if last.accuracy is None else None),
        **_to_target(epochs, window_seconds, energy),
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


def _first_and_later(epochs: Epochs) -> dict[str, Metric]:
    """Rates of the training parts: the first, with compilation and all that happens once in it, and those after."""
    first, later = epochs.rows[0], epochs.rows[1:]
    per_step = epochs.items_per_step
    rates = {"throughput_first_epoch": Metric(value=per_step * len(first.batches) / first.training, unit="", n=1)}
    if later:
        items, seconds = per_step * sum(len(row.batches) for row in later), sum(row.training for row in later)
        rates["throughput_later_epochs"] = Metric(value=items / seconds, unit="", n=len(later))
    else:
        rates["throughput_later_epochs"] = Metric(value=None, unit="", reason="there was one epoch")
    return rates


def _to_target(epochs: Epochs, window_seconds: float, energy: Metric) -> dict[str, Metric]:
    if not epochs.to_target:
        return {}
    if not epochs.reached:
        last = epochs.rows[-1]
        found = [
            f"loss {last.loss:.4g}" if last.loss is not None else "",
            f"accuracy {last.accuracy:.4g}" if last.accuracy is not None else "",
        ]
        reason = f"not reached in {len(epochs.rows)} epochs: {', '.join(filter(None, found)) or 'nothing to judge by'}"
        return {
            "time_to_solution": Metric(value=None, unit="s", reason=reason),
            "energy_to_solution": Metric(value=None, unit="J", reason=reason),
        }
    return {"time_to_solution": Metric(value=window_seconds, unit="s", n=len(epochs.rows)), "energy_to_solution": energy}


def nominal_epoch(energy_per_item: Metric, items: int, world: int) -> dict[str, Metric]:
    """Energy of an epoch of ``items`` at the window's energy per item, in all and per device."""

    def scaled(factor: float) -> Metric:
        low, high = (None if bound is None else bound * factor for bound in (energy_per_item.low, energy_per_item.high))
        value = None if energy_per_item.value is None else energy_per_item.value * factor
        return energy_per_item.model_copy(update={"value": value, "unit": "Wh", "low": low, "high": high})

    total = items / JOULES_PER_WATT_HOUR
    return {"energy_per_epoch": scaled(total), "energy_per_epoch_per_device": scaled(total / world)}
