"""What a metric is and what metrics are made of: the window, the facts about the work, the limits of the device. And all metrics by name,
as tables, the HTML page, ``caraml show`` and the docs take them, so that a number reads the same everywhere.

Those that only a program or a plug-in has are defined by the records that have them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, JsonValue, TypeAdapter

from caraml.base.errors import unknown_name
from caraml.base.toml import FrozenModel
from caraml.suite.model import TRAINING, Mode, Point

ONLY_TRAINED = "only mode train validates and saves"
"""Why there is no metric of a trained model in other modes."""
Direction = Literal["higher", "lower", "neither", "unknown"]
"""Which numbers are better; unknown only of metrics that CARAML does not define, where nobody said it."""
_LONGEST_UNIT, _LONGEST_TEXT = 40, 500


class FiniteModel(FrozenModel, allow_inf_nan=False):
    """A part of a record: no unknown keys, no NaN, never changed."""


class Metric(FiniteModel):
    """One number: value, unit, 95 % interval, bound, and where it holds. ``value`` is null only with a ``reason``."""

    value: float | None = Field(description="the number; null with a `reason` where it is not known")
    unit: str = Field(description="`1` for shares and counts")
    low: float | None = Field(None, description="lower end of the 95 % confidence interval: what chance does to the number")
    high: float | None = Field(None, description="upper end")
    bound: float | None = Field(
        None,
        ge=0,
        description="the number may be off by at most this besides, because its sensor is, or as it is printed with few digits: no chance, "
        "so no repeats make it smaller",
    )
    n: int | None = Field(None, description="number of observations behind the interval")
    scope: str | None = Field(None, description="energy boundary or device that the number speaks of")
    reason: str | None = Field(None, description="why the value, or its interval, is not known")


def _shown(text: str) -> str:
    if not text.isprintable():
        raise ValueError(f"a text of one line without control characters, but found {text!r}")
    return text


class StatedMetric(FiniteModel):
    """What a suite or a plug-in says of a metric that CARAML does not define."""

    unit: Annotated[str, AfterValidator(_shown)] = Field(max_length=_LONGEST_UNIT, description="`1` for a plain number")
    better: Direction = Field("unknown", description="`higher`, `lower` or `neither`; without it nothing is called better or worse")
    definition: Annotated[str, AfterValidator(_shown)] = Field("", max_length=_LONGEST_TEXT, description="what it is, in a sentence")


class OwnMetric(StatedMetric):
    """What a record keeps of a metric that CARAML does not define: it is read where suite and plug-in need not be."""

    source: str = Field(max_length=_LONGEST_TEXT, description="who says so: the suite, or the plug-in with its version")


class Phase(FiniteModel):
    """A named interval of the worker's life."""

    name: str = Field(description="`build`, `data`, `first_step`, `warm_up`, `measure`, ...")
    start: float = Field(description="[s]")
    end: float = Field(description="[s]")


class Window(FiniteModel):
    """The one window over which rate, time and energy are measured."""

    start: float = Field(description="[s]")
    end: float = Field(description="[s]")
    steps: int = Field(description="optimizer steps")
    samples: int = Field(description="samples over all devices")
    items: int = Field(description="items over all devices; what one item is stands in the workload's facts")
    first_step: int = Field(description="index of the window's first step in `steps`")
    shortest_seen: float | None = Field(None, description="shortest time constant of changes that the interval speaks of: a step")
    longest_seen: float | None = Field(None, description="longest: a twentieth of the window; slower changes are not in the interval")
    opened_within: float | None = Field(None, description="how far apart the ranks opened it [s]; over several nodes at most so far")
    closed_within: float | None = Field(None, description="how far apart the ranks closed it [s]; over several nodes at most so far")

    @property
    def seconds(self) -> float:
        """Wall time of the window."""
        return self.end - self.start


class Facts(FiniteModel):
    """What is known of the work before it runs."""

    item: str = Field(description="what is counted: `token`, `image`, `sample`, ...")
    items_per_sample: int = Field(description="items in one sample of a batch")
    parameters: int | None = Field(description="weights of the model; null where nobody knows, as of a command")
    flops_per_item: float | None = Field(description="analytic forward + backward FLOPs per item, without recomputation")
    flops_formula: str = Field(description="how the FLOPs were counted")
    forward_flops_per_item: float | None = Field(None, description="FLOPs of the forward pass alone, what mode `inference` does")
    causal_flops_per_item: float | None = Field(None, description="flops_per_item with only what a causal mask leaves of attention")
    hardware_flops_per_item: float | None = Field(None, description="flops_per_item and what is computed again to save memory")
    traffic_per_item: float | None = Field(None, description="estimated bytes that forward and backward move per item, at 4 bytes a number")
    traffic_per_step: float | None = Field(None, description="bytes that a step moves besides, whatever its batch: weights and optimizer")
    cached_traffic_share: float | None = Field(None, description="share of that traffic which the last-level cache can serve at best")
    bytes_per_sample: int | None = Field(None, description="bytes that come to the device for a sample that is counted")
    samples_per_epoch: int | None = Field(None, description="samples of the data set over all ranks; an epoch is one pass over them")
    epoch_items: int | None = Field(
        None, description="items of the nominal epoch that energies are scaled to, such as ImageNet's 1,281,167"
    )
    data: dict[str, JsonValue] = Field({}, description="provenance of the input: kind, path, number of items, hash")

    def in_mode(self, mode: Mode, batches: int = 1) -> Facts:
        """What is known of the work in a mode: inference goes forward only and reading computes nothing, so neither may count more.

        ``batches`` are those that a step takes for each that it counts; inference takes just that one.
        """
        taken = None if self.bytes_per_sample is None else self.bytes_per_sample * (1 if mode == "inference" else batches)
        if mode in TRAINING:
            return self.model_copy(update={"bytes_per_sample": taken})
        flops = self.forward_flops_per_item if mode == "inference" else None
        seen = self.causal_flops_per_item
        causal = None if flops is None or seen is None or not self.flops_per_item else seen * flops / self.flops_per_item
        none = dict.fromkeys(("hardware_flops_per_item", "traffic_per_item", "traffic_per_step", "cached_traffic_share"))
        return self.model_copy(update={**none, "flops_per_item": flops, "causal_flops_per_item": causal, "bytes_per_sample": taken})


class _Limit(FiniteModel):
    """What one device can do at most."""

    value: float | None = Field(description="[FLOP/s], dense; of a stream [B/s]")
    source: str | None = Field(None, description="document, or how it was measured")
    low: float | None = Field(None, description="lower end of the interval of what was measured")
    high: float | None = Field(None, description="upper end")
    reason: str | None = Field(None, description="why it is not known")
    kernel: str | None = Field(None, description="library and kernel that reached it, where it was measured")
    shape: list[int] = Field([], description="of the kernel's operands; of a stream, the bytes of one array")
    measured_at: str | None = Field(None, description="ISO 8601; before the run where its own look was disturbed or in short")
    disturbed: str | None = Field(None, description="why what this run measured of it is in doubt")


class Peak(_Limit):
    """A device's peak arithmetic rate in FLOP/s, for one device."""

    dtype: str = Field(description="arithmetic that it holds for")
    by_kernel: dict[str, float] = Field({}, description="FLOP/s of the best kernel of each library")


class Bandwidth(_Limit):
    """A device's bandwidth in bytes/s, read plus written, for one device."""

    level: Literal["memory", "cache"] = Field("memory", description="where the data lie: in memory, or in the last-level cache")


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
class Measured:
    """A run from its start until its model is saved, and the window in it. Times in seconds, memory in bytes."""

    point: Point
    facts: Facts
    window: Window
    steps: Sequence[float]
    """Time of every step from the first on."""
    data_wait: float | None
    """What input cost the window; ``None`` where that is not known."""
    first_step_time: float
    time_to_first_step: float
    device_memory: int | None = None
    host_memory: int | None = None
    losses: Sequence[float] = ()
    """Every step's training loss from the first on, mean over the ranks; empty if the mode has none."""
    rank_steps: Sequence[float] = ()
    """Mean step of each rank in the window."""
    runtime: float = 0.0
    phases: Sequence[Phase] = ()
    """Finished phases; none overlap."""
    whole_data_wait: float | None = None
    """The same over all steps."""
    no_wait: str = ""
    """Why one of both is not known."""
    validation_loss: float | None = None
    no_validation: str = ONLY_TRAINED
    """Why there is no validation loss, or no saved model, if there is none."""
    epochs: Sequence[Epoch] = ()
    """Where training went by epochs."""
    epochs_seconds: float | None = None
    """From the first step to the end of the last epoch's validation."""
    flags: Sequence[str] = field(default=())
    even_steps: Sequence[float] = ()
    """Where steps have different numbers of items, what each would have taken with the mean number; else empty."""

    @property
    def window_steps(self) -> Sequence[float]:
        """Time of every step of the window."""
        return self.steps[self.window.first_step : self.window.first_step + self.window.steps]

    @property
    def before(self) -> Sequence[float]:
        """Time of every step between the first and the window."""
        return self.steps[1 : self.window.first_step]


class DescribedRun(Protocol):
    """What says of its metrics what they are: a record."""

    @property
    def metrics(self) -> Mapping[str, Metric]: ...
    @property
    def definitions(self) -> Mapping[str, OwnMetric]: ...


class MetricDefinition(FrozenModel):
    """What a metric's name means. In ``title``, ``unit`` and ``definition``, ``{item}`` stands for what the workload counts."""

    title: str
    unit: str
    better: Direction
    definition: str
    source: str = ""
    """The formula or the measurement behind the number, where the definition does not say it already."""
    spread: bool = False
    """Whether it is a rate, one of its times or an energy: the kinds of number of which published repeats tell how much they vary."""
    sensor: bool = False
    """Whether it needs a power sensor, which then is named after the ``source``."""
    shown: Literal["plain", "percent", "count"] = "plain"


_KINDS = TypeAdapter(dict[str, dict[str, MetricDefinition]]).validate_python(
    tomllib.loads((files("caraml.metrics") / "metrics.toml").read_text(encoding="utf-8"))
)
METRICS: dict[str, MetricDefinition] = {name: one for kind in _KINDS.values() for name, one in kind.items()}
QUALITY = tuple(_KINDS["quality"])
"""Those that a workload measures on held-out data, where it has them."""
_BETTER = {
    "higher": "Higher is better.",
    "lower": "Lower is better.",
    "neither": "Neither direction is better.",
    "unknown": "Direction unknown: nobody said which is better, or not everybody the same.",
}


def unit_of(metric: str, item: str = "item") -> str:
    """Unit of a metric for a workload that counts ``item``."""
    return METRICS[metric].unit.format(item=item)


def title_of(metric: str, item: str = "item") -> str:
    """Heading of a metric for a workload that counts ``item``; the name itself of one that CARAML does not define."""
    return METRICS[metric].title.format(item=item) if metric in METRICS else metric


def definition_of(name: str, records: Iterable[DescribedRun]) -> MetricDefinition:
    """What a metric's name means: in CARAML, else as the records say that have it. Where these contradict each other, its unit names
    all units, and its direction is unknown."""
    if name in METRICS:
        return METRICS[name]
    having = [record for record in records if name in record.metrics]
    said = [record.definitions[name] for record in having if name in record.definitions]
    units = list(dict.fromkeys(record.metrics[name].unit for record in having))
    directions = {one.better for one in said} - {"unknown"}
    better = directions.pop() if len(directions) == 1 else "unknown"
    words = [*dict.fromkeys(f"{one.definition.rstrip('.')}." for one in said if one.definition), _BETTER[better]]
    words += [f"It has different units, and only numbers of one unit are averaged or compared: {', '.join(units)}."] * (len(units) > 1)
    words = words if said or len(units) > 1 else ["This version of CARAML has no definition of this metric, and neither has the record."]
    source = " or ".join(dict.fromkeys(one.source for one in said)) or "not described"
    return MetricDefinition(title=name, unit=" or ".join(units), better=better, definition=" ".join(words), source=source)


def own_names(records: Iterable[DescribedRun]) -> list[str]:
    """Metrics of the records that CARAML does not define."""
    return list(dict.fromkeys(name for record in records for name in record.metrics if name not in METRICS))


def see_known(name: str, records: Iterable[DescribedRun]) -> None:
    """Raise ``InputError``, with the nearest spelling, for a metric that neither CARAML nor one of the records has."""
    if name not in METRICS and name not in (own := own_names(records)):
        raise unknown_name("metric", name, [*METRICS, *own])


def own_definitions(stated: Mapping[str, StatedMetric], source: str) -> dict[str, OwnMetric]:
    """What a record keeps of the metrics that CARAML does not define."""
    own = {name: one for name, one in stated.items() if name not in METRICS}
    return {name: OwnMetric(unit=one.unit, better=one.better, definition=one.definition, source=source) for name, one in own.items()}


def check_stated(stated: Mapping[str, StatedMetric], item: str = "item") -> None:
    """Raise ``ValueError`` for a name that is none, and for one of CARAML's own metrics with another unit, direction or definition."""
    for name, one in stated.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"names of small letters, digits and underscores, but found {name!r}")
        if name not in METRICS:
            continue
        if one.unit != unit_of(name, item):
            raise ValueError(f"unit {unit_of(name, item)!r} for the metric {name!r}, but found {one.unit!r}")
        if one.better not in ("unknown", METRICS[name].better) or one.definition:
            raise ValueError(f"another name: {name!r} is CARAML's {METRICS[name].title!r}, of which {METRICS[name].better} is better")


def steps_per_epoch(facts: Facts, point: Point) -> int | None:
    """Optimizer steps of an epoch; ``None`` if the data has no epochs."""
    return None if facts.samples_per_epoch is None else max(facts.samples_per_epoch // point.global_batch, 1)


def scaled(metric: Metric, factor: float, unit: str) -> Metric:
    """The metric times an exactly known factor."""
    if metric.value is None:
        return metric.model_copy(update={"unit": unit})
    ends = {name: None if (end := getattr(metric, name)) is None else end * factor for name in ("low", "high", "bound")}
    return metric.model_copy(update={"value": metric.value * factor, "unit": unit, **ends})


def unknown(names: Iterable[str], reason: str | None, **more: Any) -> dict[str, Metric]:
    """These metrics without a number, and why; ``more``: ``scope``, or the ``item`` of their units."""
    item = more.pop("item", "item")
    return {name: Metric(value=None, unit=unit_of(name, item), reason=reason, **more) for name in names}
