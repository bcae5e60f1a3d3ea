"""What to choose: batch size, precision, knobs and device count for time, for energy, and for Action.

Advice is given only where runs can tell: choices whose difference from the best may be chance are named together, as indistinguishable. As
the best is not known beforehand but picked, every pair of choices counts as a test (Bonferroni, 5 % together, as Tukey's studentised range
to within some per cent): a choice that is as good as the best is called worse in at most 5 % of all advice. The best of many is also the
luckiest, so its interval is one that holds for all choices at once.

Energies of different boundaries (of devices, of whole nodes) do not compare: each boundary has its own best and its own Pareto front.
Those of different sensors, as of one device and of four, differ only where they do by more than these may be off.

Runs that something disturbed do not count where the same choice has others; a choice without others is left out as long as two are left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from caraml.analysis.bottleneck import SHARED_OUT, Diagnosis, Partners, bottleneck
from caraml.analysis.estimate import Estimate, differs, pairs_of
from caraml.analysis.grouping import (
    axes,
    axes_of,
    counting,
    disturbances,
    grouped,
    same_work,
    short,
    told_apart,
    unstated_size,
    valid,
    varying,
    why_not,
    without,
)
from caraml.analysis.run_variation import estimates, item_energies, mean_metric
from caraml.analysis.scaling import left_out, scaling
from caraml.metrics.model import Metric
from caraml.results.record import Record
from caraml.suite.model import NOT_STATED, Point

Goal = Literal["time", "energy", "Action"]
GOALS: tuple[Goal, ...] = ("time", "energy", "Action")
WITHIN = 0.05
"""Share of the best rate that a saturated batch may be below it."""

_CHOSEN = ("precision", "compile", "global_batch", "micro_batch", "nodes", "devices", "knobs")
"""What a user can choose for given work."""


@dataclass(frozen=True)
class Choice:
    """One way of doing the work: what a user can choose, and what it costs per item."""

    name: str
    """Short and unique within its advice, such as ``b64 bf16 1x4``."""
    keys: tuple[str, ...]
    point: Point
    """Of its first run."""
    time: Estimate
    """Wall time per item over all devices [s/item]."""
    energy: Estimate | None
    """[J/item]; ``None`` without a sensor, and where runs of it have several boundaries."""
    action: Estimate | None
    """Energy times time, both per item [J s/item²]: proportional to the Action of any fixed amount of work."""
    bottleneck: Diagnosis
    """Where its time goes."""
    rate: Metric | None
    joules: Metric | None
    """Its rate and energy per item by themselves, as every table shows them; ``time`` and ``energy`` have what all runs together say
    of one choice against another."""

    @property
    def boundary(self) -> str:
        """Of its energy; empty without one."""
        return "" if self.energy is None or self.joules is None else self.joules.scope or NOT_STATED

    def cost(self, goal: Goal) -> Estimate | None:
        """What the goal wants small."""
        return {"time": self.time, "energy": self.energy, "Action": self.action}[goal]


@dataclass(frozen=True)
class Best:
    """The best choice for one goal, of those whose energies have one boundary."""

    goal: Goal
    choice: Choice
    ties: tuple[Choice, ...]
    """Choices that may be as good: indistinguishable from ``choice``."""
    cost: Estimate
    """Of ``choice``."""
    lead: Estimate | None
    """Cost of the next choice that is distinguishable over that of ``choice``; ``None`` if there is none. Both are picked, so its interval
    holds for every pair of choices at once."""


@dataclass(frozen=True)
class Saturation:
    """Where more batch brings no more rate, for one precision, compile mode, set of knobs and device count."""

    name: str
    best_batch: int
    within: float
    batch: int
    """Smallest batch from which on to the best the estimated rates are within ``within`` of that."""
    low: int
    high: int
    """Batches between which it lies: the last below ``low`` is proven slower, from ``high`` on each to the best is proven as fast."""
    largest: int
    """Largest batch with a result. Where ``batch`` is this one, the rate was still growing."""
    falls: int | None
    """Smallest batch above the best whose rate is below that again; ``None`` without any."""


@dataclass(frozen=True)
class Step:
    """From one number of devices to the next larger one."""

    name: str
    before: int
    after: int
    time: Estimate
    """Time per item after over before."""
    energy: Estimate | None
    """Energy per item after over before."""
    device_time: Estimate
    """Device-seconds per item after over before: the cost where energy is not known."""


@dataclass(frozen=True)
class Advice:
    """Advice for one workload with one set of parameters on one machine."""

    name: str
    device: str
    item: str
    choices: tuple[Choice, ...]
    best: tuple[Best, ...]
    front: tuple[Choice, ...]
    """Pareto front of time and energy, fastest first, those of several boundaries one after the other; empty without energy."""
    saturation: tuple[Saturation, ...]
    steps: tuple[Step, ...]
    no_energy: str | None
    """Why there is no advice for energy and Action."""
    failed: tuple[tuple[str, str], ...]
    """Choices without a result, with the reason."""
    variation: str
    """Where the run-to-run variation comes from, as a sentence."""
    left_out: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Choices of which every run was disturbed, with the flags: enough others are left."""
    rests_on: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """The same where there are not enough others, so that the advice rests on them."""
    unstated: str = ""
    """How many results are no choice, as nobody stated a size in which the choices differ."""


def advise(records: Sequence[Record], within: float = WITHIN) -> list[Advice]:
    """Advice for every work among ``records`` of which there are two or more choices with a result."""
    partners = Partners(records)
    works = grouped(records, lambda record: without(axes_of(record), _CHOSEN))
    points = [work[0].point for work in works]
    bases = [point.benchmark if point.mode == "train" else f"{point.benchmark} {point.mode}" for point in points]
    names = told_apart(bases, [dict(without(axes_of(work[0]), (*_CHOSEN, "mode"))) for work in works])
    return [found for name, work in zip(names, works, strict=True) if (found := _advice(name, work, partners, within)) is not None]


def _advice(name: str, work: Sequence[Record], partners: Partners, within: float) -> Advice | None:
    measured = [[one for one in counting(repeats) if (one.value("throughput") or 0) > 0] for repeats in same_work(valid(work))]
    groups = [group for group in measured if group]
    differing = varying([group[0] for group in groups])
    unstated = left_out([record for group in groups for record in group], differing)
    groups = [group for group in groups if unstated_size(group[0]).isdisjoint(differing)]
    if len(groups) < 2:
        return None
    sound = [group for group in groups if not disturbances(group)]
    named = [name for name in varying([group[0] for group in groups]) if name in _CHOSEN]
    flagged = tuple((short(group[0].point, named), flags) for group in groups if (flags := disturbances(group)))
    if len(sound) > 1:
        groups = sound
    choices, sentence = _choices(groups, partners)
    comparable = by_boundary(choices)
    asked: list[tuple[Goal, Sequence[Choice]]] = [("time", choices), *((goal, part) for goal in GOALS[1:] for part in comparable)]
    best = tuple(found for goal, part in asked if (found := _best(part, goal)) is not None)
    missing = [choice for choice in choices if choice.energy is None]
    no_energy = None
    if missing:
        who = "no choice has energy" if not comparable else f"without energy: {', '.join(choice.name for choice in missing)}"
        why = (one.joules.reason or "none above zero was measured" for one in missing if one.joules)
        no_energy = f"{who}: {next(why, 'it was not measured')}"
    failed = [record for record in work if record.status != "ok"]
    reasons = tuple((short(record.point, _CHOSEN), why_not(record)) for record in failed)
    first = groups[0][0]
    return Advice(
        name,
        first.point.device,
        first.item,
        tuple(choices),
        best,
        tuple(choice for part in comparable for choice in pareto(part)),
        tuple(_saturations(choices, within)),
        tuple(_steps([record for group in groups for record in group])),
        no_energy,
        reasons,
        sentence,
        flagged if len(sound) > 1 else (),
        flagged if len(sound) < 2 else (),
        unstated,
    )


def _choices(groups: Sequence[Sequence[Record]], partners: Partners) -> tuple[list[Choice], str]:
    named = [name for name in varying([group[0] for group in groups]) if name in _CHOSEN]
    rates, sentence = estimates(groups, "throughput")
    found = []
    for group, rate, (energy, _) in zip(groups, rates, item_energies(groups), strict=True):
        assert rate is not None
        point, time = group[0].point, rate.inverse()
        keys = tuple(record.key for record in group)
        name = short(point, named)
        limit = bottleneck(_mean_record(group), partners)
        action = None if energy is None else _action(energy, time)
        numbers = mean_metric(group, "throughput"), mean_metric(group, "energy_per_item")
        found.append(Choice(name, keys, point, time, energy, action, limit, *numbers))
    return found, sentence


def _mean_record(group: Sequence[Record]) -> Record:
    """The first of some repeats with the means of all: what is said of a choice is said of all its runs."""
    means = {name: mean for name in group[0].metrics if name in SHARED_OUT and (mean := mean_metric(group, name)) is not None}
    return group[0].model_copy(update={"metrics": group[0].metrics | means})


def by_boundary(choices: Sequence[Choice]) -> list[list[Choice]]:
    """The choices that have energy, those of one boundary together."""
    return grouped([choice for choice in choices if choice.energy is not None], lambda choice: choice.boundary)


def _action(energy: Estimate, time: Estimate) -> Estimate:
    """Energy times time. A slow run also takes more energy, so the errors are added as if they were the same."""
    sd = None if energy.sd is None or time.sd is None else energy.sd + time.sd
    return replace(energy, value=energy.value * time.value, sd=sd, dof=min(energy.dof, time.dof))


def _best(choices: Sequence[Choice], goal: Goal) -> Best | None:
    """The cheapest choice, the choices that may be as cheap, and its lead over the next; ``None`` if fewer than two have the cost."""
    costs = [(choice, cost) for choice in choices if (cost := choice.cost(goal)) is not None]
    if len(costs) < 2:
        return None
    costs.sort(key=lambda pair: pair[1].value)
    (best, cheapest), others = costs[0], costs[1:]
    ratios = [cost.over(cheapest) for _, cost in others]
    apart = [differs(ratio, pairs_of(len(costs))) for ratio in ratios]
    ties = tuple(choice for (choice, _), told in zip(others, apart, strict=True) if not told)
    leads = [ratio.for_all_of(pairs_of(len(costs))) for ratio, told in zip(ratios, apart, strict=True) if told]
    return Best(goal, best, ties, cheapest, leads[0] if leads else None)


def pareto(choices: Sequence[Choice]) -> list[Choice]:
    """Choices that no other one beats in time and energy, fastest first. One is beaten by a choice that costs no more in either and is
    distinguishably cheaper in at least one."""

    def beats(one: Choice, other: Choice) -> bool:
        assert one.energy is not None and other.energy is not None
        ratios = (other.time.over(one.time), other.energy.over(one.energy))
        return all(ratio.value >= 1 for ratio in ratios) and any(differs(ratio, pairs_of(len(known))) for ratio in ratios)

    known = [choice for choice in choices if choice.energy is not None]
    front = [choice for choice in known if not any(beats(other, choice) for other in known if other is not choice)]
    return sorted(front, key=lambda choice: choice.time.value)


def _saturations(choices: Sequence[Choice], within: float) -> list[Saturation]:
    found = []
    for sweep in grouped(choices, lambda choice: without(axes(choice.point), ("global_batch", "micro_batch"))):
        point = sweep[0].point
        by_time = sorted(sweep, key=lambda choice: -choice.time.value)
        fastest = {choice.point.global_batch: choice for choice in by_time}
        if len(fastest) < 3:
            continue
        best = min(fastest.values(), key=lambda choice: choice.time.value)
        tests = pairs_of(len(fastest))
        rates = {
            batch: Estimate(1.0, 0.0) if one is best else best.time.over(one.time).for_all_of(tests)
            for batch, one in sorted(fastest.items())
        }
        least, most = 1 - within, best.point.global_batch
        rising = {batch: rate for batch, rate in rates.items() if batch <= most}
        batch = _from_on({batch: rate.value < least for batch, rate in rising.items()})
        low = _from_on({batch: rate.high is not None and rate.high < least for batch, rate in rising.items()})
        high = _from_on({batch: rate.low is None or rate.low < least for batch, rate in rising.items()})
        falls = next((batch for batch, rate in rates.items() if batch > most and rate.value < least), None)
        devices = f"{point.nodes}x{point.devices}" if point.world > 1 else ""
        words = [point.arithmetic, "" if point.compile == "off" else point.compile, point.knobs.label, devices]
        found.append(Saturation(" ".join(filter(None, words)), most, within, batch, low, high, max(fastest), falls))
    return found


def _from_on(slower: Mapping[int, bool]) -> int:
    """The smallest batch above all that are slower."""
    last = max((batch for batch, one in slower.items() if one), default=0)
    return min(batch for batch in slower if batch > last)


def _steps(records: Sequence[Record]) -> list[Step]:
    """What each growth of the number of devices did to time and energy, for every family of scaling."""
    found = []
    for family in scaling(records, efficiency=None):
        curve = family.curve("training")
        if curve is None:
            continue
        by_size = [[record for record in family.records if record.key in size.keys] for size in curve.sizes]
        for (before, (first, of)), (after, (second, other)) in pairwise(zip(curve.sizes, item_energies(by_size), strict=True)):
            time = before.rate.over(after.rate)
            energy = None if first is None or second is None or of != other else second.over(first)
            device_time = time.scaled(after.world / before.world)
            found.append(Step(family.name, before.world, after.world, time, energy, device_time))
    return found
