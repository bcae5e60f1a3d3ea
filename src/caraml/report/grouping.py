"""Which records belong together in a figure, what they are called there, and the numbers that are shown of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from pydantic import JsonValue

from caraml.analysis.grouping import NONE, counting, disturbances, grouped, told_apart, valid, why_not, work_of
from caraml.analysis.run_variation import mean_metric
from caraml.base.format import count, printable
from caraml.metrics.energy import NO_ENERGY
from caraml.metrics.model import Metric, scaled
from caraml.report.section import ReportFigure, energy_reason, written
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED, OF_EPOCHS, Point

MOST_SERIES = 14
"""Lines that one figure can hold and a reader can still tell apart."""
MOST_ROWS = 40
"""Bars that one figure can hold."""
MOST_FIGURES = 16
"""Figures of one kind; the tables have the rest."""

LABEL = 46
"""Longest label above a bar, in characters; the table beside the figure has all of it."""

KEY = 8
"""Characters of a key by which a mark is found: of thousands of points hardly two have the same."""

SHARES = frozenset({"training_share", "loading_share", "rest_share"})
"""Parts of a whole: only their arithmetic means over some runs add up to one, as those of each run do."""

T = TypeVar("T")


@dataclass(frozen=True)
class Repeats:
    """The runs of one work, as one line of a table."""

    runs: tuple[Record, ...]
    mean: Record
    """The first run that counts, with the mean numbers and the flags of all that do; the first run if none has a result."""

    @property
    def good(self) -> list[Record]:
        """The runs of which the mean is."""
        return counting(self.runs)

    @property
    def count(self) -> str:
        """``3``, or ``2/3`` where a run has no result, or was disturbed."""
        good = len(self.good)
        return str(good) if good == len(self.runs) else f"{good}/{len(self.runs)}"

    @property
    def key(self) -> str:
        """Its address: the run's key, or another one where there are several runs."""
        return self.mean.key if len(self.runs) == 1 else f"mean-{self.mean.key}"

    @property
    def lost(self) -> str:
        """What became of the runs that are not in the mean of others; else empty."""
        bad, good = [record for record in self.runs if record.status != "ok"], valid(self.runs)
        told = []
        if good and bad:
            told = [f"{len(bad)} of {len(self.runs)} runs without a result: {why_not(bad[-1])}"]
        if left_out := len(good) - len(self.good):
            told.append(f"{left_out} of {len(self.runs)} runs left out, as something disturbed them: {', '.join(disturbances(good))}")
        return "; ".join(told)

    def flagged(self, flag: str) -> str:
        """How many of several runs have a flag, as ``(2 of 3 runs)``; empty where all have it."""
        return of_runs(sum(flag in record.flags for record in self.good), len(self.good))


def of_runs(having: int, runs: int) -> str:
    """Of how many of several runs something is true, as `` (2 of 3 runs)``; empty where it is of none or of all."""
    return f" ({having} of {runs} runs)" if 0 < having < runs else ""


def repeated(records: Sequence[Record], names: Iterable[str] | None = None) -> list[Repeats]:
    """Records with repeats together, in the order of the first of each. Benchmarks of different names stay apart.

    ``names``: the metrics that are wanted, where it is not all: a mean takes 0.2 ms.
    """
    wanted = None if names is None else frozenset(names)
    groups = grouped(records, lambda record: (record.point.benchmark, work_of(record)))
    return [_repeats(group, wanted) for group in groups]


def single(records: Sequence[Record]) -> list[Repeats]:
    """Every record by itself, with the interval of its own window."""
    return [Repeats((record,), record) for record in records]


def _repeats(group: Sequence[Record], wanted: Collection[str] | None) -> Repeats:
    good = counting(group)
    first = (good or group)[0]
    point = first.point.model_copy(update={"repeat": 0})
    names = dict.fromkeys(name for record in good for name in record.metrics if wanted is None or name in wanted)
    means = {name: found for name in names if (found := _mean(good, name)) is not None}
    seen = list(dict.fromkeys(flag for record in good for flag in record.flags)) if good else first.flags
    return Repeats(tuple(group), first.model_copy(update={"point": point, "metrics": means or first.metrics, "flags": seen}))


def _mean(runs: Sequence[Record], name: str, of: Callable[[Record], Metric | None] | None = None) -> Metric | None:
    """As :func:`mean_metric`; of ``SHARES`` the arithmetic mean, its interval scaled to it and at most 1. Ranks have no mean."""
    found = mean_metric(runs, name, of)
    values = [value for one in runs if (value := one.value(name)) is not None]
    if found is None or found.value is None or len(values) < 2:
        return found
    if name == "slowest_rank" and len(set(values)) > 1:
        ranks = ", ".join(f"{value:.0f}" for value in values)
        return Metric(value=None, unit=found.unit, reason=f"not the same in every run: {ranks}")
    if name not in SHARES or not found.value:
        return found
    mean = scaled(found, fmean(values) / found.value, found.unit)
    return mean if mean.high is None else mean.model_copy(update={"high": min(mean.high, 1.0)})


def labels_and_statuses(records: Sequence[Record]) -> dict[str, str]:
    """As :func:`labels`, with the status of every run without a result."""
    named = labels(records)
    return {one.key: named[one.key] if one.status == "ok" else f"{named[one.key]} ({one.status})" for one in records}


def labels(records: Sequence[Record]) -> dict[str, str]:
    """A label for each key. Points that would share one get values in which they differ; of how they are measured, if in nothing else."""
    keys, named = [record.key for record in records], [record.point.label for record in records]
    for values in (_values, _rest):
        sharing = Counter(dict(zip(keys, named, strict=True)).values())
        details = [values(record) if sharing[name] > 1 else {} for record, name in zip(records, named, strict=True)]
        texts = [{name: NONE if value is None else str(value) for name, value in sorted(one.items())} for one in details]
        named = told_apart(named, texts, PLAIN)
    return {key: printable(name) for key, name in zip(keys, named, strict=True)}


def machine(point: Point) -> str:
    """The machine's name for people: that of the catalogue, or what computes in a machine that is not in it."""
    return point.system if point.system != "local" else point.device.rpartition(" x")[0] or point.device


def _values(record: Record) -> dict[str, JsonValue]:
    point = record.point
    own: dict[str, JsonValue] = {"device": point.device, "seed": point.seed, "software": point.software, "micro_batch": point.micro_batch}
    own |= {name: word(record) for name, word in PLAIN.items()}
    return {f"params.{name}": value for name, value in point.deciding_params.items()} | own


def _rest(record: Record) -> dict[str, JsonValue]:
    """What is told only of points that nothing else tells apart."""
    fields = record.point.model_dump(mode="json", exclude={"params", "measure", "repeat"})
    stated = {name: NOT_STATED if name in record.unstated else value for name, value in fields.items()}
    return record.point.measure.model_dump(exclude=set(OF_EPOCHS)) | stated


def placement(point: Point) -> str:
    """Nodes and devices per node: ``1x4``."""
    return f"{point.nodes}x{point.devices}"


FIELDS: dict[str, Callable[[Record], str]] = {
    "machine": lambda one: machine(one.point),
    "device": lambda one: one.point.device,
    "placement": lambda one: placement(one.point) if "devices" not in one.unstated else f"devices {NOT_STATED}",
    "division": lambda one: one.point.placement.label(1) or "whole copies",
    "batch": lambda one: f"b{one.point.global_batch}" if "global_batch" not in one.unstated else f"batch {NOT_STATED}",
    "micro batch": lambda one: f"micro batch {one.point.micro_batch}",
    "precision": lambda one: one.point.arithmetic,
    "compile": lambda one: f"compile {one.point.compile}",
    "knobs": lambda one: one.point.knobs.label or "knobs as they are",
    "deterministic": lambda one: "deterministic" if one.point.deterministic else "not deterministic",
    "training": lambda one: one.point.measure.trained or "a window",
    "software": lambda one: one.point.software,
}
"""What can differ between records of one work, in the order in which a name says it."""
PLAIN: dict[str, Callable[[Record], str]] = {"mode": lambda one: one.point.mode} | {
    name: FIELDS[name]
    for name in ("machine", "placement", "division", "batch", "precision", "compile", "knobs", "deterministic", "training")
}
"""Of what can differ between points of one label, that whose value says what it is of."""


def families(records: Sequence[Record], along: Sequence[str]) -> dict[str, list[Record]]:
    """Records of one work by everything in which they differ but ``along`` (names of ``FIELDS``), in their order.

    Two records at one place of a family are repeats; seeds are repeats as well. Along devices and batch the batch of a device stays.
    """
    fields = [name for name in FIELDS if name not in along]
    if "micro batch" in fields and not {"placement", "batch"} <= {*along} and not _colliding(records, [*fields, *along]):
        fields.remove("micro batch")  # the batch says it
    told = [name for name in fields if len({FIELDS[name](record) for record in records}) > 1]
    if "machine" in told and len({(machine(record.point), placement(record.point)) for record in records}) == len(
        {(machine(record.point), placement(record.point), record.point.device) for record in records}
    ):
        told = [name for name in told if name != "device"]  # the machine and the number of devices say it
    found: dict[str, list[Record]] = {}
    for record in records:
        name = " ".join(FIELDS[field](record) for field in told) or machine(record.point)
        found.setdefault(printable(name), []).append(record)
    return found


def _colliding(records: Sequence[Record], fields: Sequence[str]) -> bool:
    """True if two records agree in all ``fields`` but the micro batch: also if they are different repeats, as others have failed."""
    others = [name for name in fields if name != "micro batch"]
    places = {(record.point.micro_batch, *(FIELDS[name](record) for name in others)) for record in records}
    return len({place[1:] for place in places}) < len(places)


def first(found: Sequence[T], limit: int, noun: str, table: str = "the table of results") -> tuple[Sequence[T], str]:
    """The first ``limit``, and a sentence about those left out, which ``table`` has; empty if there are none."""
    if len(found) <= limit:
        return found, ""
    return found[:limit], f" {count(len(found) - limit, f'further {noun}')} not drawn; {table} has them."


def first_figures(figures: list[ReportFigure]) -> tuple[list[ReportFigure], list[str]]:
    """As many figures of one kind as a page shows, and a note about the others."""
    shown, more = first(figures, MOST_FIGURES, "figure")
    return list(shown), [more.strip()] if more else []


@dataclass(frozen=True)
class Quantity:
    """Something that a figure shows of every record."""

    name: str
    """The metric as which it is written, and as which it varies from run to run."""
    title: str
    unit: str
    """``{item}`` stands for what is counted."""
    metric: Callable[[Record], Metric | None]

    def of(self, records: Iterable[Record]) -> Metric | None:
        """The mean over the repeats that count and have this number, as in tables, with its interval between runs.

        ``None`` if none has it, or they measured different things.
        """
        mean = self._mean(records)
        return mean if mean is not None and mean.value is not None else None

    def _mean(self, records: Iterable[Record]) -> Metric | None:
        return _mean(counting(records), self.name, self.metric)

    def reason(self, records: Iterable[Record]) -> str:
        """Why the mean over repeats is not known; empty where it is."""
        mean = self._mean(records)
        if mean is None:
            return "not measured"
        return printable(mean.reason or "no reason recorded") if mean.value is None else ""

    def told(self, records: Sequence[Record]) -> str:
        """The mean over repeats as people read it, and of how many of them it is where that is not all; or why there is none."""
        mean = self.of(records)
        if mean is None:
            return f"not known: {self.reason(records)}"
        having = sum(metric is not None and metric.value is not None for metric in map(self.metric, counting(records)))
        return self.text(mean) + of_runs(having, len(records))

    def boundary(self, records: Sequence[Record]) -> str:
        """Of what the mean is the energy; empty for what is none, and where nobody stated it."""
        mean = self.of(records)
        return printable(mean.scope or "") if mean is not None else ""

    def value(self, records: Sequence[Record]) -> float:
        """The number of records that have one."""
        return known(self.of(records))

    def text(self, metric: Metric | None) -> str:
        return written(self.name, metric)


def known(metric: Metric | None) -> float:
    """The value of a metric that has one: only such are drawn."""
    assert metric is not None and metric.value is not None
    return metric.value


def ends(metric: Metric, factor: float = 1.0) -> tuple[float, float]:
    """Both ends of a metric's interval over ``factor``; its value where it has none."""
    low, high = (known(metric) if end is None else end for end in (metric.low, metric.high))
    return low / factor, high / factor


def keys(records: Iterable[Record | str]) -> str:
    """By what the page finds the marks of records (or of keys): the beginning of each key."""
    return " ".join((one if isinstance(one, str) else one.key)[:KEY] for one in records)


def marker(x: float, metric: Metric, factor: float, spoken: str, of: str = "") -> dict[str, Any]:
    """A metric as a mark of :func:`caraml.base.chart.marks`."""
    low, high = ends(metric, factor)
    return {"x": x, "y": known(metric) / factor, "low": low, "high": high, "d": spoken, "of": of}


def metric(name: str, title: str = "", unit: str = "") -> Quantity:
    """A metric of the records as it is."""
    return Quantity(name, title, unit, lambda record: record.metrics.get(name))


def _scaled(found: Metric | None, factor: float, unit: str) -> Metric | None:
    """A metric times an exact factor; it stays one of the same boundary."""
    return None if found is None else scaled(found, factor, unit)


def _per_item(name: str) -> Callable[[Record], Metric | None]:
    """An energy of the window over the items of the window [J/item]."""

    def value(record: Record) -> Metric | None:
        found, unit = record.metrics.get(name), f"J/{record.item}"
        if found is not None and found.value is not None and not (record.window and record.window.items):
            return Metric(value=None, unit=unit, reason="the record does not say how many items the energy was for: it has no window")
        return _scaled(found, 1 / record.window.items, unit) if record.window and record.window.items else None

    return value


def _hour(record: Record) -> Metric | None:
    """Energy that a device's share takes in an hour [Wh]: watts are watt-hours per hour."""
    if "devices" in record.unstated:
        return Metric(value=None, unit="Wh", reason="the number of devices is not stated")
    return _scaled(record.metrics.get("mean_power"), 1 / record.point.world, "Wh")


def _time(record: Record) -> Metric | None:
    """Wall time of ``AMOUNT`` items at the throughput of the window [s]."""
    rate = record.metrics.get("throughput")
    if rate is None or rate.value is None:
        return None
    if rate.value <= 0:
        return Metric(value=None, unit="s", reason="the throughput is not above zero")
    low, high = (AMOUNT / end if end else None for end in (rate.high, rate.low))
    return Metric(value=AMOUNT / rate.value, unit="s", low=low, high=high)


def _energy(record: Record) -> Metric | None:
    """Energy of ``AMOUNT`` items [J]."""
    return _scaled(record.metrics.get("energy_per_item"), AMOUNT, "J")


def _action(record: Record) -> Metric | None:
    """Energy times time of ``AMOUNT`` items [J s]; its interval joins the ends of both."""
    time, energy = _time(record), _energy(record)
    if time is None or energy is None or time.value is None or energy.value is None:
        return Metric(value=None, unit="J s", reason=next((one.reason for one in (time, energy) if one and one.reason), None))
    known = None not in (time.low, time.high, energy.low, energy.high)
    low, high = (time.low * energy.low, time.high * energy.high) if known else (None, None)  # type: ignore[operator]
    bound = None if energy.bound is None else time.value * energy.bound
    return Metric(value=time.value * energy.value, unit="J s", low=low, high=high, bound=bound, scope=energy.scope)


AMOUNT = 1e6
"""Items whose time and energy are compared: a fixed amount of work, whatever the window was."""
RATE = metric("throughput_per_device", "Rate per device", "{item}/s")
TOTAL = metric("throughput", "Throughput", "{item}/s")
EFFICIENCY = metric("items_per_watt_hour", "Efficiency", "{item}/Wh")
COST = metric("energy_per_item", "Energy", "J/{item}")
HOUR = Quantity("energy", "Energy of an hour per device", "Wh", _hour)
NODE = Quantity("energy_per_item", "Node energy", "J/{item}", _per_item("node_energy"))
DEVICES = Quantity("energy_per_item", "Device energy", "J/{item}", _per_item("device_energy"))
TIME = Quantity("runtime", "Time", "s", _time)
ENERGY = Quantity("energy", "Energy", "J", _energy)
ACTION = Quantity("energy_time_product", "Action", "J s", _action)


def several_boundaries(records: Iterable[Record]) -> bool:
    """Whether known energies of some records have different boundaries, so that they do not compare."""
    return len({metric.scope for one in records if (metric := one.metrics.get(COST.name)) is not None and metric.value is not None}) > 1


def unknown_energy(record: Record, runs: Sequence[Record]) -> tuple[str, str] | None:
    """What stands for the energy of devices or processors where it is not known, that of whole nodes if a sensor sees it, and a note why.

    ``None`` where it is known, or nothing was measured.

    Args:
        record: the mean of the runs.
        runs: those with a result.
    """
    reason = energy_reason(record)
    if reason is None:
        return None
    runs = runs or [record]
    metric = NODE.of(runs) if len(runs) > 1 else NODE.metric(runs[0])
    if metric is None or metric.value is None:
        if reason == NO_ENERGY:
            return "not asked", f"no energy: {reason}"
        fix = "run caraml doctor: it names the sensors of this machine, what is missing and the command that would fix it"
        return "no sensor", f"no energy: {reason}; {fix}"
    return f"{NODE.text(metric)} (node)", f"energy of the whole node; of its devices or processors none: {reason}"
