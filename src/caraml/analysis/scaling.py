"""How a rate grows with the number of devices: speed-up, efficiency, and the laws of Amdahl and Gustafson fitted to them.

A family is a set of records that differ in the number of devices only: in *strong* scaling the global batch stays, in *weak* scaling the
batch per device. Efficiency is that of EPICURE's guide (section 5): ``e(n) = rate(n) / (n / n_min x rate(n_min))``, for three rates:

* ``training``: items over time of the window, every slow step included (the headline throughput); of a run by epochs, EPICURE's t_tr;
* ``median batch``: global batch over the median step, which occasional slow steps do not reach; of a run by epochs without the first and
  the last batch of the counted one, as EPICURE's;
* ``epoch``: one over the time of the counted epoch, validation included: EPICURE's t_ep. Of a run over a span of time, the mean of its
  whole epochs, the first one and its warm-up included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from caraml.analysis.estimate import Estimate, Value, differs, pairs_of, values
from caraml.analysis.grouping import (
    Axes,
    axes,
    by_way,
    counting,
    disturbances,
    grouped,
    names,
    same_work,
    told_apart,
    unstated_size,
    valid,
    without,
)
from caraml.analysis.laws import Law, Name, fit
from caraml.analysis.run_variation import estimates, estimates_of, item_energies, mean_metric, mean_of
from caraml.analysis.table import batches, raw_file, read_ranks, read_steps
from caraml.base.format import count
from caraml.base.stats import Elbow, RankTime, elbow, median_error, ranks
from caraml.metrics.model import Metric
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.suite.model import NOT_STATED, Point

Kind = Literal["strong", "weak"]
Basis = Literal["training", "median batch", "epoch"]
Quantity = Literal["time", "energy"]
BASES: tuple[Basis, ...] = ("training", "median batch", "epoch")
EFFICIENCY = 0.8
"""Efficiency whose device count is asked for unless the user says otherwise."""

PLACEMENT = ("nodes", "devices", "global_batch", "micro_batch")
KEPT: tuple[tuple[Kind, Callable[[Record], object]], ...] = (
    ("strong", lambda record: (record.point.global_batch, record.point.micro_batch)),
    ("strong", lambda record: (record.point.global_batch, record.point.accumulation)),
    ("weak", lambda record: (record.point.global_batch / record.point.world, record.point.micro_batch)),
)
"""What stays while the number of devices grows, by the kind of scaling."""
_MACHINE = ("device", "system", "device_class", "software")
_OF_SIZE = (*PLACEMENT, "placement", "needs")
"""Axes that go with the number of devices: a snapshot that is needed is of the same number."""


@dataclass(frozen=True)
class Size:
    """One number of devices on a curve."""

    world: int
    """Devices over all nodes."""
    nodes: int
    global_batch: int
    keys: tuple[str, ...]
    """Records behind it: more than one where there are repeats."""
    rate: Estimate
    """Items per second; ``median batch``: samples per second; ``epoch``: epochs per second."""
    speed_up: Estimate
    """Rate over the rate of the smallest size; exactly 1 there."""
    efficiency: Estimate
    """Speed-up over the ideal one; exactly 1 at the smallest size."""
    mean: Estimate | None
    """The rate by itself, as every table shows it; ``rate`` has what all runs together say of one size against another."""
    flops: Metric | None = None
    """Achieved FLOP/s of one device, with its interval; of the training part, where the FLOPs are known."""


@dataclass(frozen=True)
class Curve:
    """One rate of one family over the number of devices."""

    basis: Basis
    sizes: tuple[Size, ...]
    """By growing number of devices; two or more."""
    laws: tuple[Law, ...]
    """Amdahl's and Gustafson's, fitted to ``sizes``; the one that suits the kind of scaling comes first."""
    variation: str
    """Where the run-to-run variation in the intervals comes from, as a sentence."""


@dataclass(frozen=True)
class StepView:
    """The single steps of one record."""

    key: str
    name: str
    world: int
    batches: tuple[float, ...]
    """Step times of the window [s] without the first and last of each epoch."""
    elbow: Elbow | None
    ranks: tuple[RankTime, ...]
    """Slowest first; empty for a single rank."""


@dataclass(frozen=True)
class ScalingFamily:
    """Records that differ in the number of devices only."""

    name: str
    """For people: benchmark, batch, precision, and what tells it from others with these; unique among the families of one call."""
    kind: Kind
    records: tuple[Record, ...]
    """By growing number of devices, repeats together."""
    curves: tuple[Curve, ...]
    """One for each basis that two or more sizes have."""
    rests_on: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Sizes of which something disturbed every run, with the flags."""
    details: Mapping[str, str] = field(default_factory=dict)
    """What tells it from other families, by name: its axes but devices and batch, and what stays of a device's batch."""

    def curve(self, basis: Basis) -> Curve | None:
        """The curve of one rate, or ``None`` if the records do not have it."""
        return next((curve for curve in self.curves if curve.basis == basis), None)


def scaling(records: Sequence[Record], store: Store | None = None, efficiency: float | None = EFFICIENCY) -> list[ScalingFamily]:
    """Every family of two or more sizes among ``records``. With a store the median batch has an interval, from the raw steps.

    Where one number of devices was run on different numbers of nodes, the fewest nodes count. Without an ``efficiency`` no laws are fitted.
    """
    ok = [record for record in valid(records) if not unstated_size(record)]
    found = [
        (kind, sizes, _details(sizes[0][0], way) | {"batch": batch})
        for way, alike in by_way(ok, lambda record: without(axes(record.point), _OF_SIZE))
        for kind, batch, sizes in families_of(alike)
    ]
    named = told_apart([_base(sizes[0][0].point, kind) for kind, sizes, _ in found], [details for *_, details in found])
    medians: dict[int, float | None] = {}

    def median_of(record: Record) -> float | None:  # once, however many families it is in
        if id(record) not in medians:
            medians[id(record)] = _median_error(record, store)
        return medians[id(record)]

    families = []
    for (kind, sizes, details), name in zip(found, named, strict=True):
        curves = tuple(curve for basis in BASES if (curve := _curve(basis, kind, sizes, median_of, efficiency)) is not None)
        everyone = tuple(record for size in sizes for record in size)
        flagged = tuple((count(size[0].point.world, "device"), flags) for size in sizes if (flags := disturbances(size)))
        if curves:
            families.append(ScalingFamily(f"{name}, {kind}", kind, everyone, curves, flagged, details))
    return families


_SIZE = {"devices": "the number of devices", "global_batch": "the batch"}


def left_out(records: Sequence[Record], needed: Iterable[str] = _SIZE) -> str:
    """Which results are on no curve because nobody stated their size, as a sentence; empty where there are none.

    ``needed``: what has to be known; ``("devices",)`` for the matrices, ``("global_batch",)`` over the batch.
    """
    found = [lacking for record in valid(records) if (lacking := unstated_size(record) & {*needed})]
    what = " or ".join(words for name, words in _SIZE.items() if any(name in one for one in found))
    return f"left out: {count(len(found), 'result')} of which {what} is not stated" if found else ""


def _base(point: Point, kind: Kind) -> str:
    """What a family is called where nothing else is like it."""
    words = [point.benchmark, batch_of(point, kind), point.arithmetic, "" if point.compile == "off" else point.compile]
    return " ".join(filter(None, words))


def batch_of(point: Point, kind: Kind) -> str:
    """The batch that stays: ``b64``, or ``b16 per device``."""
    return f"b{point.global_batch}" if kind == "strong" else f"b{point.global_batch / point.world:g} per device"


def step_views(records: Iterable[Record], store: Store) -> list[StepView]:
    """The single steps of every record that has its raw file."""
    found = []
    chosen = list(records)
    for record, name in zip(chosen, names([[record] for record in chosen]), strict=True):
        path = raw_file(store, record, "steps")
        if path is None:
            continue
        times = batches(record, read_steps(path, in_step=record.point.in_step))
        every = read_ranks(path) if record.point.world > 1 else None
        slow = ranks(every.seconds, every.waits) if every is not None else []
        repeat = f" #{record.point.repeat + 1}" if record.point.repeat else ""
        found.append(StepView(record.key, name + repeat, record.point.world, tuple(times), elbow(times), tuple(slow)))
    return found


_Sizes: TypeAlias = tuple[Kind, str, list[list[Record]]]
"""Kind of scaling, what stays of the batch of a device, and sizes: lists of repeats."""
_Error: TypeAlias = Callable[[Record], float | None]


def families_of(alike: Sequence[Record]) -> list[_Sizes]:
    """Families among records that differ in nothing but placement and batch: of each number of devices the one on the fewest nodes."""
    found: list[_Sizes] = []
    for (kind, kept), stays in zip(KEPT, (micro_batch, _accumulation, micro_batch), strict=True):
        for group in grouped(alike, kept):
            works = sorted(map(counting, same_work(group)), key=lambda work: (work[0].point.world, work[0].point.nodes))
            sizes = list({work[0].point.world: work for work in reversed(works)}.values())[::-1]
            if len(sizes) > 1:
                found.append((kind, stays(sizes[0][0].point), sizes))
    return [one for one in found if not any(_within(one, other) for other in found)]


def micro_batch(point: Point) -> str:
    """What of a device's batch stays along a line, in words."""
    return f"micro batch {point.micro_batch}"


def _accumulation(point: Point) -> str:
    return f"accumulation {point.accumulation}"


def kind_of(records: Sequence[Record]) -> Kind | None:
    """How records on several numbers of devices scale; ``None`` where batches differ in another way."""
    kinds = (kind for kind, kept in KEPT if len({*map(kept, records)}) == 1)
    return next(kinds, None) if len({record.point.world for record in records}) > 1 else None


def _within(one: _Sizes, other: _Sizes) -> bool:
    """Whether all sizes of a family are part of another, larger family of the same kind."""
    ours, theirs = ({record.key for size in sizes for record in size} for _, _, sizes in (one, other))
    return one[0] == other[0] and ours < theirs


def _curve(basis: Basis, kind: Kind, sizes: Sequence[Sequence[Record]], error: _Error, efficiency: float | None) -> Curve | None:
    by_epochs = all(values([record], "batch_time_median") for size in sizes for record in size)
    median = "batch_time_median" if by_epochs else "step_time_median"  # one of them for all: their batches are not the same ones
    cells = [_rates(basis, size, error, median) for size in sizes]
    rates, sentence = estimates_of(cells, "throughput", only_ratios=True)
    known = [(size, rate, cell) for size, rate, cell in zip(sizes, rates, cells, strict=True) if rate is not None]
    if len(known) < 2:
        return None
    first, base, _ = known[0]
    smallest, points = first[0].point.world, []
    for size, rate, cell in known:
        point = size[0].point
        speed_up = Estimate(1.0, 0.0) if rate is base else rate.over(base)
        keys = tuple(record.key for record in size)
        relative = speed_up.scaled(smallest / point.world)
        flops = mean_metric(size, "achieved_flops_per_device") if basis == "training" else None
        achieved = flops if flops is not None and flops.value is not None else None
        mean = mean_of(cell, "throughput")
        points.append(Size(point.world, point.nodes, point.global_batch, keys, rate, speed_up, relative, mean, achieved))
    order: tuple[Name, Name] = ("Amdahl", "Gustafson") if kind == "strong" else ("Gustafson", "Amdahl")
    worlds = [one.world for one in points]
    laws = () if efficiency is None else tuple(fit(name, worlds, [one.rate for one in points], efficiency) for name in order)
    return Curve(basis, tuple(points), laws, sentence)


def _rates(basis: Basis, records: Sequence[Record], error: _Error, median: str) -> list[Value]:
    """The rate of each record; of the median batch by the metric ``median``, whose relative error is ``error``."""
    if basis == "training":
        return values(records, "throughput")
    if basis == "median batch":
        return [
            replace(one, value=record.point.global_batch / one.value, error=error(record))
            for record in records
            for one in values([record], median)
        ]
    counted = values(records, "epoch_time")
    if counted:
        return [replace(one, value=1 / one.value) for one in counted]
    # A projected epoch is the training part once more.
    whole = [record for record in records if (metric := record.metrics.get("epoch_time_mean")) and metric.value and not metric.reason]
    return [replace(one, value=1 / one.value) for one in values(whole, "epoch_time_mean")]


def _median_error(record: Record, store: Store | None) -> float | None:
    path = raw_file(store, record, "steps") if store is not None else None
    return median_error(read_steps(path, in_step=record.point.in_step).measured()) if path is not None else None


# -- the matrices of MAELSTROM's deliverable D3.7, Figs. 1 to 3: what using more devices did to time and energy to solution ---------------


OTHER_BOUNDARIES = "energies of different boundaries"


@dataclass(frozen=True)
class Solution:
    """Cost of one amount of work on a number of devices; from records or from published tables."""

    row: str
    """Application."""
    column: str
    """Device."""
    devices: int
    time: Estimate | None
    energy: Estimate | None
    key: str = ""
    """Of the first record behind it."""
    boundary: str | None = None
    """Of the energy."""

    def cost(self, quantity: Quantity) -> Estimate | None:
        return self.time if quantity == "time" else self.energy


@dataclass(frozen=True)
class Cell:
    """``0.9, 1 → 4``: the ratio of a cost at the best number of devices to that at the smallest."""

    row: str
    column: str
    ratio: Estimate | None
    """``None`` where one of the two is not known. The best is picked, so its interval holds for all that may be picked at once."""
    smallest: int
    best: int
    reason: str = ""
    """Why there is neither a ratio nor a best."""
    ties: tuple[int, ...] = ()
    """Other numbers of devices that cannot be told from the best one; none where no cost has an error."""

    @property
    def text(self) -> str:
        """The cell as the report prints it."""
        if self.reason:
            return "–"
        ratio = "–" if self.ratio is None else f"{self.ratio.value:.2g}"
        return f"{ratio}, {self.smallest} → {self.best}"


def matrix(solutions: Sequence[Solution], quantity: Quantity, best_by: Quantity | None = None) -> list[Cell]:
    """A cell for each row and column with two or more numbers of devices.

    Figs. 1a and 2a: ``time``; 1b and 2b: ``energy``; Fig. 3: ``energy`` with ``best_by="time"``. Several solutions with one number of
    devices (other batch sizes, say) count by their best. Energies of different boundaries have neither a ratio nor a best.
    """
    cells = []
    by: Quantity = best_by or quantity
    for here in grouped(solutions, lambda one: (one.row, one.column)):
        costs = [(cost, one) for one in here if (cost := one.cost(by)) is not None]
        ranked = sorted(costs, key=lambda pair: pair[0].value)
        if len({one.devices for _, one in ranked}) < 2:
            continue
        least, best = ranked[0]
        smallest = min(one.devices for _, one in ranked)
        alone = [one for _, one in ranked if one.devices == smallest]
        ours, theirs = best.cost(quantity), alone[0].cost(quantity)
        ratio = None if ours is None or theirs is None else Estimate(1.0, 0.0) if best is alone[0] else ours.over(theirs)
        known = [one for _, one in ranked] if by == "energy" else [best, alone[0]]
        boundaries = {one.boundary or NOT_STATED for one in known if one.energy is not None}
        if quantity == "energy" and len(boundaries) > 1:
            cells.append(Cell(best.row, best.column, None, smallest, best.devices, f"{OTHER_BOUNDARIES}: {', '.join(sorted(boundaries))}"))
            continue
        ratios = [(cost.over(least), one.devices) for cost, one in ranked]
        told = any(cost.sd is not None for cost, _ in ranked)
        ties = {devices for one, devices in ratios if told and not differs(one, pairs_of(len(ranked)))} - {best.devices}
        picked = None if ratio is None else ratio.for_all_of(len(alone) * (len(ranked) - len(alone)))
        cells.append(Cell(best.row, best.column, picked, smallest, best.devices, "", tuple(sorted(ties))))
    return cells


def solutions_of(records: Sequence[Record]) -> list[Solution]:
    """Time and energy per item of every record with a result: rows are of one work, columns of one system.

    Repeats that something disturbed do not count beside others; energies of different boundaries have no mean.
    """
    ok = [record for record in valid(records) if "devices" not in record.unstated]
    found: list[tuple[Record, str, Estimate, Estimate | None, str | None]] = []
    for way, alike in by_way(ok, lambda record: (record.point.benchmark, without(axes(record.point), (*_OF_SIZE, *_MACHINE)))):
        groups = [*map(counting, same_work(alike))]
        rates, _ = estimates(groups, "throughput")
        for group, rate, energy in zip(groups, rates, item_energies(groups), strict=True):
            found += [(group[0], way, rate.inverse(), *energy)] if rate is not None else []
    points = [record.point for record, *_ in found]
    rows = told_apart([f"{point.benchmark} {point.arithmetic}" for point in points], [_details(one[0], one[1], _MACHINE) for one in found])
    machines: list[Axes] = [{"device_class": point.device_class, "system": point.system, "software": point.software} for point in points]
    columns = told_apart([device_name(point.device) for point in points], machines)
    return [
        Solution(row, column, record.point.world, time, energy, record.key, boundary)
        for (record, _, time, energy, boundary), row, column in zip(found, rows, columns, strict=True)
    ]


def _details(record: Record, way: str, but: Sequence[str] = ()) -> Axes:
    """What tells a record's work from other work, whatever its number of devices and batch."""
    return dict(without(axes(record.point) | {"placement": way, "precision": record.point.arithmetic}, (*PLACEMENT, "needs", *but)))


def device_name(device: str) -> str:
    """A device without how many of them a node has."""
    return device.rpartition(" x")[0] or device
