"""How often `caraml compare`, `advise`, `scaling` and `history` are wrong: simulated results of known truth through the real code.

    python bench/analysis/noise.py --verdicts            # every table of docs/compare.md, about five minutes
    python bench/analysis/noise.py --verdicts 0.1        # with a tenth of the simulations

What changes between runs is a factor on the whole run, drawn by :data:`MODELS` and the shapes of :mod:`noise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np
from noise import Array, Shape, ar1, fgn, lognormal, outliers, student, white

from caraml.analysis.compare import FAMILIES, MARGIN, family
from caraml.analysis.estimate import TYPICAL_SD, Estimate, Value, differs, pairs_of
from caraml.analysis.history import FIRM, change_points
from caraml.analysis.laws import Law, fit
from caraml.analysis.run_variation import estimates_of, ratios
from caraml.base.stats import holm, t_tail

START = datetime(2026, 1, 1, tzinfo=UTC)
RUN = timedelta(minutes=10)
OWN = 1e-4
"""Relative error of a run by its own interval: small, so that only what changes between runs counts."""
FAR = 100.0
"""Largest logarithm that is drawn: the published distribution has no mean."""
SLOWER = 0.05
METRICS = ("throughput", *["energy_per_item"] * 3, *["loss_last"] * 20)
"""Twenty-four numbers of each work: a rate, three energies, twenty of which nothing is published."""

PUBLISHED = "the published sets themselves"
PUBLISHED_SDS = (
    *(0.07, 0.11, 0.11, 0.12, 0.14, 0.25, 0.34, 0.38, 0.51, 0.53, 0.70, 0.72, 0.77, 0.83),
    *(0.93, 0.97, 1.32, 1.42, 1.56, 1.98, 2.55, 2.78, 2.91, 3.49, 4.26, 4.80, 4.91),
)
"""Standard deviations of the 27 sets of published repeats [%]; the model "as published" is the distribution fitted to them."""

MODELS: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "all 0.2 %": lambda rng, works: np.full(works, 0.002),
    "all 1 %": lambda rng, works: np.full(works, 0.01),
    "all 3 %": lambda rng, works: np.full(works, 0.03),
    "as published": lambda rng, works: TYPICAL_SD / np.sqrt(rng.chisquare(1, works)),
    PUBLISHED: lambda rng, works: rng.choice(PUBLISHED_SDS, works) / 100,
    "lognormal about 0.5 %": lambda rng, works: 0.005 * np.exp(rng.standard_normal(works)),
    "one in four 3 %, others 0.2 %": lambda rng, works: np.where(np.arange(works) % 4 == 3, 0.03, 0.002),
}
"""Run-to-run standard deviation of each work."""


def runs(logs: Iterable[float], day: int = 0, sensors: str | None = None, accuracy: float = 0.0) -> list[Value]:
    """Runs one after the other on one machine, from their logarithms."""
    begin = START + timedelta(days=day)
    return [
        Value(math.exp(min(max(log, -FAR), FAR)), OWN, accuracy=accuracy, sensors=sensors, host="node", time=begin + number * RUN)
        for number, log in enumerate(logs)
    ]


def holds(one: Estimate, truth: float, *, bound: bool = False) -> bool:
    """Whether the 95 % interval, with the bound if asked, holds the truth."""
    return abs(math.log(one.value / truth)) <= one.reach + one.bound * bound


# -- comparisons -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A kind of comparison: B is slower by ``change`` and varies ``noisier`` times as much."""

    model: str
    works: int
    runs: tuple[int, int]
    change: float = 0.0
    noisier: float = 1.0
    shape: Shape = white
    metrics: Sequence[str] = ("throughput",)


@dataclass(frozen=True)
class Found:
    """Shares of simulated comparisons."""

    worse: float
    """At least one "worse"."""
    slower: float
    """Of all rates, those found "worse"."""
    held: float
    """Of all intervals, those that hold the truth."""
    best: float
    """As ``slower``, by the moderated t test that knows how the variances of the works are distributed."""


def comparisons(case: Case, count: int, seed: int = 0) -> Found:
    """Many comparisons of the same two truths."""
    rng = np.random.default_rng(seed)
    truth = math.log1p(-case.change)
    anywhere, slower, held, best = 0, [], [], []
    for _ in range(count):
        tests: dict[str, list[tuple[float, bool]]] = {name: [] for name in FAMILIES}
        for metric in case.metrics:
            sds = MODELS[case.model](rng, case.works)
            logs = [(sd * case.shape(rng, case.runs[0]), truth + case.noisier * sd * case.shape(rng, case.runs[1])) for sd in sds]
            found = [ratio for _, _, ratio in ratios([(runs(a), runs(b)) for a, b in logs], metric)[0] if ratio is not None]
            tests[family(metric)] += [(one.p_beyond(), one.value < 1) for one in found]
            held += [holds(one, math.exp(truth)) for one in found]
            best += best_known(case.model, logs) if metric == "throughput" else []
        worse = {
            name: [p < alpha and low for p, (_, low) in zip(holm([p for p, _ in tests[name]]), tests[name], strict=True)]
            for name, alpha in FAMILIES.items()
        }
        anywhere += any(any(found) for found in worse.values())
        slower += worse["throughput"]
    return Found(anywhere / count, float(np.mean(slower)), float(np.mean(held)), float(np.mean(best)))


def best_known(model: str, logs: Sequence[tuple[Array, Array]]) -> list[bool]:
    """Whether each second side is found slower by a t test, moderated (Smyth 2004) with the true distribution of the variances: one degree
    of freedom about the published spread, infinitely many where all works vary alike; Student's for one work. NaN for other models."""
    alike = 1e6 if len(logs) > 1 else 0.0
    known = {"all 0.2 %": (0.002, alike), "all 1 %": (0.01, alike), "all 3 %": (0.03, alike), "as published": (TYPICAL_SD, 1.0)}
    if model not in known or len(logs[0][0]) + len(logs[0][1]) + known[model][1] < 3:
        return [math.nan]  # type: ignore[list-item]
    sd, prior = known[model]
    p_values = []
    for a, b in logs:
        dof = max(len(a) + len(b) - 2, 0)
        squares = float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum())
        error = math.sqrt((prior * sd**2 + squares) / (prior + dof) * (1 / len(a) + 1 / len(b)))
        p_values.append(t_tail((b.mean() - a.mean()) / error, prior + dof))
    return [p < FAMILIES["throughput"] and b.mean() < a.mean() for p, (a, b) in zip(holm(p_values), logs, strict=True)]


def same_within(sd: float, repeats: int, change: float, count: int, seed: int = 0) -> float:
    """Share of single comparisons that say "the same within 1 %" of sides that differ by ``change``."""
    rng = np.random.default_rng(seed)
    said = 0
    for _ in range(count):
        a, b = sd * rng.standard_normal(repeats), math.log1p(change) + sd * rng.standard_normal(repeats)
        ((_, _, ratio),) = ratios([(runs(a), runs(b))], "throughput")[0]
        assert ratio is not None
        said += ratio.p_beyond() >= FAMILIES["throughput"] and ratio.is_within(MARGIN)
    return said / count


def of_sessions(
    sessions: int, count: int, works: int = 1, *, shift: float = 0.01, seed: int = 0, of_b: int | None = None
) -> tuple[float, float]:
    """False "worse" and coverage where all repeats and works of a side share a ``shift`` in each session, and vary by 0.3 % in it.

    ``of_b``: sessions of B if it has fewer or more.
    """
    rng = np.random.default_rng(seed)
    worse, held = 0, []
    for _ in range(count):
        pairs: list[tuple[list[Value], list[Value]]] = [([], []) for _ in range(works)]
        for side in (0, 1):
            for day in range(sessions if side == 0 or of_b is None else of_b):
                shared = shift * rng.standard_normal()
                for pair in pairs:
                    pair[side].extend(runs(shared + 0.003 * rng.standard_normal(3), day * 2 + side))
        found = [ratio for _, _, ratio in ratios(pairs, "throughput")[0] if ratio is not None]
        adjusted = holm([one.p_beyond() for one in found])
        worse += any(p < FAMILIES["throughput"] and one.value < 1 for p, one in zip(adjusted, found, strict=True))
        held += [holds(one, 1.0) for one in found]
    return worse / count, float(np.mean(held))


def of_hours(hours: int, count: int, shift: float = 0.01, kept: float = 6.0, seed: int = 0) -> tuple[float, float]:
    """False "worse" and coverage where A is measured every hour for some hours, and B after it; the machine's state, which varies by
    ``shift``, resembles that of the hour before, with a time constant of ``kept`` hours, and runs vary by 0.3 % besides."""
    rng = np.random.default_rng(seed)
    worse, held = 0, 0
    for _ in range(count):
        logs = shift * ar1(math.exp(-1 / kept))(rng, 2 * hours) + 0.003 * rng.standard_normal(2 * hours)
        every = [replace(one, time=START + timedelta(hours=hour)) for hour, one in enumerate(runs(logs))]
        ((_, _, ratio),) = ratios([(every[:hours], every[hours:])], "throughput")[0]
        assert ratio is not None
        worse += ratio.p_beyond() < FAMILIES["throughput"] and ratio.value < 1
        held += holds(ratio, 1.0)
    return worse / count, held / count


def of_machines(machines: int, sessions: int, count: int, shift: float = 0.023, seed: int = 0) -> tuple[float, float]:
    """False "worse" and coverage where each side has machines of its own, which differ by ``shift``; sessions and runs vary by 0.3 %."""
    rng = np.random.default_rng(seed)
    worse, held = 0, 0
    for _ in range(count):
        sides: tuple[list[Value], list[Value]] = ([], [])
        for number, side in enumerate(sides):
            for machine in range(machines):
                own = shift * rng.standard_normal()
                for day in range(sessions):
                    logs = own + 0.003 * (rng.standard_normal() + rng.standard_normal(3))
                    side += [replace(one, host=f"node{number}-{machine}") for one in runs(logs, day)]
        ((_, _, ratio),) = ratios([sides], "throughput")[0]
        assert ratio is not None
        worse += ratio.p_beyond() < FAMILIES["throughput"] and ratio.value < 1
        held += holds(ratio, 1.0)
    return worse / count, held / count


def of_nights(a: str, b: str, count: int, shift: float = 0.023, seed: int = 0) -> tuple[float, float]:
    """False "worse" and coverage of nights on the machines that each side names by letters; these differ by ``shift``, nights by 0.4 %."""
    rng = np.random.default_rng(seed)
    worse, held = 0, 0
    for _ in range(count):
        own = {machine: shift * rng.standard_normal() for machine in sorted({*a, *b})}
        logs = [own[machine] + 0.004 * rng.standard_normal() for machine in a + b]
        every = [replace(runs([log], day)[0], host=machine) for day, (log, machine) in enumerate(zip(logs, a + b, strict=True))]
        ((_, _, ratio),) = ratios([(every[: len(a)], every[len(a) :])], "throughput")[0]
        assert ratio is not None
        worse += ratio.p_beyond() < FAMILIES["throughput"] and ratio.value < 1
        held += holds(ratio, 1.0)
    return worse / count, held / count


def of_sensors(count: int, seed: int = 0) -> tuple[float, float]:
    """False "worse" and coverage of energies on two devices whose sensors are off by up to 5 %, with runs that vary by 0.5 %."""
    rng = np.random.default_rng(seed)
    worse, held = 0, 0
    for _ in range(count):
        sides = [runs(math.log1p(rng.uniform(-0.05, 0.05)) + 0.005 * rng.standard_normal(3), 0, name, 0.05) for name in "ab"]
        ((_, _, ratio),) = ratios([(sides[0], sides[1])], "energy_per_item")[0]
        assert ratio is not None
        worse += ratio.p_beyond() < FAMILIES["energy"] and ratio.value > 1
        held += holds(ratio, 1.0, bound=True)
    return worse / count, held / count


# -- advice and scaling ------------------------------------------------------------------------------------------------


def advice(model: str, choices: int, repeats: int, count: int, seed: int = 0) -> tuple[float, float, float]:
    """Of equally good choices: how often one is called worse than the best; how often the interval shown for the best holds the truth;
    and its own interval, as it would be had it not been picked."""
    rng = np.random.default_rng(seed)
    worse, shown, own = 0, 0, 0
    for _ in range(count):
        groups = [runs(sd * rng.standard_normal(repeats)) for sd in MODELS[model](rng, choices)]
        found = sorted((one for one in estimates_of(groups, "throughput")[0] if one is not None), key=lambda one: -one.value)
        worse += any(differs(found[0].over(one), pairs_of(choices)) for one in found[1:])
        shown += holds(found[0].for_all_of(choices), 1.0)
        own += holds(found[0], 1.0)
    return worse / count, shown / count, own / count


def laws(model: str, worlds: Sequence[int], repeats: int, count: int, seed: int = 0) -> tuple[float, float]:
    """Rates that follow Amdahl's law with 5 % serial work: how often it is said not to describe them, and the serial share is covered."""
    rng = np.random.default_rng(seed)
    true = np.log([1 / (0.05 + 0.95 / world) for world in worlds])
    refused, held = 0, 0
    for _ in range(count):
        sds = MODELS[model](rng, len(worlds))
        groups = [runs(log + sd * rng.standard_normal(repeats)) for log, sd in zip(true, sds, strict=True)]
        law: Law = fit("Amdahl", worlds, [one for one in estimates_of(groups, "throughput")[0] if one is not None], 0.8)
        assert law.misfit is not None and law.serial_low is not None and law.serial_high is not None
        refused += law.misfit < 0.05
        held += law.serial_low <= 0.05 <= law.serial_high
    return refused / count, held / count


# -- history -----------------------------------------------------------------------------------------------------------

NIGHTS: dict[str, Shape] = {
    "independent": white,
    "heavy tails": student(3),
    "skewed": lognormal(0.5),
    "5 % off by 10 deviations": outliers(0.05, 10),
    "AR(1) 0.3": ar1(0.3),
    "AR(1) 0.7": ar1(0.7),
    "AR(1) 0.7, 2 % off by 10 deviations": outliers(0.02, 10, ar1(0.7)),
    "1/f, H = 0.8": fgn(0.8),
    "two levels, one night in four 3 deviations higher": lambda rng, n: 3.0 * (rng.random(n) < 0.25) + 0.05 * white(rng, n),
    "weekends 3 deviations higher": lambda rng, n: white(rng, n) + 3 * (np.arange(n) % 7 >= 5),
}
SD = 0.01


def false_alarms(noise: str, nights: int, count: int, seed: int = 3) -> float:
    """Share of unchanged series in which any change is seen at the end."""
    rng = np.random.default_rng(seed)
    return sum(bool(change_points(SD * NIGHTS[noise](rng, nights))) for _ in range(count)) / count


def alarms_a_year(noise: str, years: int, seed: int = 4) -> float:
    """Firm changes that somebody who looks every night sees in a year in which nothing changes, after two months that are there."""
    rng = np.random.default_rng(seed)
    count = 0
    for _ in range(years):
        series = SD * NIGHTS[noise](rng, 425)
        seen: list[int] = []
        for night in range(60, 425):
            seen += [one for one in firm(series[:night]) if all(abs(one - known) > 5 for known in seen)]
        count += len(seen)
    return count / years


def nights_until_seen(noise: str, count: int, change: float = 0.02, seed: int = 5) -> Array:
    """Nights until a lasting step is a firm change, for each series; infinite where it is not seen in two months."""
    rng = np.random.default_rng(seed)
    waits = []
    for _ in range(count):
        series = SD * NIGHTS[noise](rng, 140)
        series[80:] += math.log1p(-change)
        seen = (night - 80 for night in range(82, 141) if any(abs(one - 80) <= 5 for one in firm(series[:night])))
        waits.append(float(next(seen, math.inf)))
    return np.array(waits)


def found_after(nights: int, later: Sequence[int], count: int, change: float = 0.05, seed: int = 6) -> list[float]:
    """Share of falls after 40 independent nights, taken back after as many ``nights``, that history shows so many nights ``later``."""
    rng = np.random.default_rng(seed)
    found = np.zeros(len(later))
    for _ in range(count):
        series = SD * white(rng, 40 + nights + max(later))
        series[40 : 40 + nights] += math.log1p(-change)
        found += [any(abs(one - 40) <= 3 for one in firm(series[: 40 + nights + more])) for more in later]
    return list(found / count)


def firm(series: Array) -> list[int]:
    """Changes that are not provisional."""
    return [one for one in change_points(series) if len(series) - one >= FIRM]


# -- tables ------------------------------------------------------------------------------------------------------------


def tables(share: float = 1.0) -> None:
    """Print all of them, with a share of the simulations."""
    for table in (of_comparisons, of_equivalence, of_shifts, of_advice, of_laws, of_history, of_reverts):
        for row in table(lambda count: max(int(share * count), 4)):
            print(f"| {' | '.join(row)} |", flush=True)
        print()


Rows = Iterator[Sequence[str]]
Count = Callable[[int], int]


def _head(*titles: str) -> Rows:
    yield titles
    yield ["---"] * len(titles)


def of_comparisons(so_many: Count) -> Rows:
    """How often nothing is called worse, and a fall is found."""
    yield from _head(
        "runs of one work vary by", "works", "runs of A, B", "false worse", "holds the truth", "-5 % found", "by the best test"
    )
    for case, count in cases():
        same, slower = comparisons(case, so_many(count)), comparisons(_slower(case), so_many(count // 4), seed=1)
        varies = case.model + (f", B {case.noisier:g} times as much" if case.noisier != 1 else "")
        varies += "" if case.shape is white else ", Student t with 3 degrees"
        best = "" if math.isnan(slower.best) or case.noisier != 1 else f"{slower.best:.0%}"
        works = f"{case.works}" + (f" x {len(case.metrics)} metrics" if len(case.metrics) > 1 else "")
        yield varies, works, f"{case.runs[0]}, {case.runs[1]}", f"{same.worse:.1%}", f"{same.held:.1%}", f"{slower.slower:.0%}", best


def of_equivalence(so_many: Count) -> Rows:
    """How often sides are said to be the same."""
    yield from _head("runs vary by", "runs per side", "said of equal sides", "said of sides 1 % apart")
    for sd, repeats in ((0.001, 2), (0.001, 3), (0.003, 3), (0.003, 5), (0.01, 5), (0.01, 20)):
        said = [same_within(sd, repeats, change, so_many(1000)) for change in (0.0, MARGIN)]
        yield f"{sd:.1%}", f"{repeats}", f"{said[0]:.1%}", f"{said[1]:.1%}"


def of_shifts(so_many: Count) -> Rows:
    """What all repeats of a side share."""
    yield from _head("three repeats a session", "false worse", "holds the truth")
    for title, (worse, held) in {
        "sessions vary by 1 %, runs in one by 0.3 %: one session each": of_sessions(1, so_many(1000)),
        "the same, three sessions each": of_sessions(3, so_many(1000)),
        "one session each, sessions vary by 2 %": of_sessions(1, so_many(1000), shift=0.02),
        "twenty works in the same two sessions a side, which vary by 1 %": of_sessions(2, so_many(300), works=20),
        "twenty works in the same three sessions a side": of_sessions(3, so_many(300), works=20),
        "twenty works in the same two sessions of A and one of B": of_sessions(2, so_many(300), works=20, of_b=1),
        "the same of one work": of_sessions(2, so_many(1000), of_b=1),
        "five works in the same three sessions of A and one of B": of_sessions(3, so_many(700), works=5, of_b=1, seed=11),
        "five works in the same five sessions of A and one of B": of_sessions(5, so_many(700), works=5, of_b=1, seed=11),
        "a run an hour, five of A and then five of B, of a state kept for six hours that varies by 1 %": of_hours(5, so_many(1000)),
        "two machines that differ by 2.3 %, one session each": of_machines(1, 1, so_many(1000)),
        "two such machines, three sessions each": of_machines(1, 3, so_many(1000)),
        "three such machines a side, three sessions each": of_machines(3, 3, so_many(1000)),
        "nine nights on one such machine and one on another, against one on the latter": of_nights("a" * 9 + "b", "b", so_many(1000)),
        "five nights on each of two such machines, against three on one of them": of_nights("aaaaabbbbb", "bbb", so_many(1000)),
        "energy by two sensors off by up to 5 % (with the bound)": of_sensors(so_many(1000)),
    }.items():
        yield title, f"{worse:.1%}", f"{held:.1%}"


def of_advice(so_many: Count) -> Rows:
    """What is said of equal choices."""
    yield from _head("20 equal choices, 3 runs each", "one called worse", "the best: interval shown holds", "its own would hold")
    for model in ("all 0.2 %", "all 1 %", "as published", "lognormal about 0.5 %"):
        yield model, *(f"{one:.1%}" for one in advice(model, 20, 3, so_many(600)))


def of_laws(so_many: Count) -> Rows:
    """What is said of rates that follow Amdahl's law."""
    yield from _head("runs vary by", "sizes", "runs each", "law said not to describe them", "serial share held")
    for model in ("all 1 %", "as published"):
        for worlds in ((1, 2, 4), (1, 2, 4, 8, 16)):
            for repeats in (2, 3, 5):
                yield model, f"{len(worlds)}", f"{repeats}", *(f"{one:.1%}" for one in laws(model, worlds, repeats, so_many(400)))


def of_history(so_many: Count) -> Rows:
    """What is seen in nightly results."""
    titles = ("changes seen in 10 nights", "50", "200", "firm alarms a year", "-2 % firm after: median", "90 %")
    yield from _head("nightly results vary by 1 %", *titles)
    for noise in NIGHTS:
        alarms = [f"{false_alarms(noise, nights, so_many(count)):.1%}" for nights, count in ((10, 1000), (50, 400), (200, 200))]
        waits = np.quantile(nights_until_seen(noise, so_many(40)), [0.5, 0.9], method="higher")
        seen = [f"{one:.0f}" if math.isfinite(one) else "over 60" for one in waits]
        yield noise, *alarms, f"{alarms_a_year(noise, so_many(4)):.1f}", *seen


def of_reverts(so_many: Count) -> Rows:
    """What is left of a fall that is over."""
    later = (0, 14, 40, 100)
    yield from _head("a fall by 5 deviations is taken back after", "found then", *(f"{nights} nights later" for nights in later[1:]))
    for nights in (5, 10, 20, 40):
        yield f"{nights} nights", *(f"{one:.0%}" for one in found_after(nights, later, so_many(200)))


def cases() -> list[tuple[Case, int]]:
    """Kinds of comparison, and how many of each."""
    found = [
        (Case(model, works, (n, n)), 1000 if works == 1 else 60)
        for model in MODELS
        if model != PUBLISHED
        for works in (1, 50)
        for n in (2, 3, 5)
    ]
    found += [(Case("all 1 %", 1, (1, 1)), 1000)]
    found += [(Case(model, 50, (1, 1)), 200) for model in ("all 1 %", PUBLISHED, "as published", "lognormal about 0.5 %")]
    found += [
        (Case("all 1 %", works, sides, noisier=noisier), 1000 if works == 1 else 60)
        for works in (1, 50)
        for sides, noisier in (((2, 2), 10.0), ((5, 5), 10.0), ((20, 2), 10.0), ((20, 2), 3.0), ((20, 2), 1.0), ((20, 2), 0.1))
    ]
    found += [(Case("all 1 %", 50, (n, n), shape=student(3)), 60) for n in (2, 3, 5)]
    found += [(Case(model, 50, (3, 3), metrics=METRICS), 30) for model in ("all 1 %", "as published", "lognormal about 0.5 %")]
    return found


def _slower(case: Case) -> Case:
    return Case(case.model, case.works, case.runs, SLOWER, case.noisier, case.shape)
