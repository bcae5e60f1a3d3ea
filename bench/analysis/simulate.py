"""How often `caraml compare` is wrong: simulated runs of known truth through the real stop rule and the real comparison.

    python bench/analysis/simulate.py [--comparisons 1000] [--runs 600]

Every run is a series of step times with a known mean: 50 ms, a spread of 5 %, one of several kinds of noise. It is measured under the
default policy (target 1 %, at least 5 s), so it ends where a real measurement would. What changes between runs is a factor on the whole
run. docs/compare.md has the tables.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.compare import Change, compare
from caraml.analysis.sides import Side
from caraml.engine.control import look, steps_until_next_look
from caraml.results.record import Metric, Record
from caraml.suite.model import Measure, Point

Array = NDArray[np.float64]
Draw = Callable[[np.random.Generator, int], Array]

STEP, SPREAD, LONGEST = 0.05, 0.05, 6000
ITEMS = 1000.0
CHANGE = 0.03


def white(rng: np.random.Generator, n: int) -> Array:
    return rng.standard_normal(n)


def ar1(rho: float) -> Draw:
    def draw(rng: np.random.Generator, n: int) -> Array:
        series = rng.standard_normal(n)
        series[0] /= math.sqrt(1 - rho**2)
        for i in range(1, n):
            series[i] += rho * series[i - 1]
        return series * math.sqrt(1 - rho**2)

    return draw


def heavy(rng: np.random.Generator, n: int) -> Array:
    return rng.standard_t(3, n) / math.sqrt(3)


def bimodal(rng: np.random.Generator, n: int) -> Array:
    return (np.where(rng.random(n) < 0.3, 3.5, -1.5) + 0.3 * rng.standard_normal(n)) / 2.31


NOISES: dict[str, Draw] = {"independent": white, "AR(1) 0.5": ar1(0.5), "AR(1) 0.9": ar1(0.9), "heavy tails": heavy, "two kinds": bimodal}


@dataclass(frozen=True)
class Run:
    """One measured run of true rate 1: the rate it found, and its relative half-width."""

    rate: float
    half: float


def measured(draw: Draw, rng: np.random.Generator) -> Run:
    """One run under the default policy."""
    policy = Measure()
    series = STEP * np.maximum(1 + SPREAD * draw(rng, LONGEST), 0.05)
    elapsed, n, stop = np.cumsum(series), 0, False
    while not stop:
        n += steps_until_next_look(series[max(n - 20, 0) : max(n, 20)].tolist(), n)
        verdict = look(series[:n].tolist(), n, float(elapsed[n - 1]), policy)
        stop, interval = verdict.stop, verdict.interval
    assert interval is not None
    return Run(n * STEP / float(elapsed[n - 1]), interval.relative)


def record(batch: int, repeat: int, software: str, rate: float, half: float) -> Record:
    """A record with nothing but a rate and its interval."""
    point = Point(
        suite="simulated", benchmark="work", workload="gpt", params={}, system="local", device="simulated", device_class="cpu",
        software=software, global_batch=batch, micro_batch=batch, repeat=repeat,
    )  # fmt: skip
    throughput = Metric(value=rate, unit="token/s", low=rate / (1 + half), high=rate / (1 - half), n=100)
    return Record(
        key=point.key, attempt=1, point=point, status="ok", started_at="2026-01-01T00:00:00+00:00", metrics={"throughput": throughput}
    )


def compared(pool: Sequence[Run], rng: np.random.Generator, *, repeats: int, between: Sequence[float], change: float) -> list[Change]:
    """The throughputs of two simulated campaigns; ``between``: run-to-run variation of each point; B is slower by ``change`` at all."""
    sides = []
    for software, factor in (("a", 1.0), ("b", 1 - change)):
        records = []
        for point, varies in enumerate(between):
            for repeat in range(repeats):
                run = pool[rng.integers(len(pool))]
                rate = ITEMS * factor * run.rate * math.exp(varies * rng.standard_normal())
                records.append(record(point + 1, repeat, software, rate, run.half))
        sides.append(Side(software, tuple(records)))
    return [change for _, change in compare(*sides, ["throughput"]).changes]


@dataclass(frozen=True)
class Outcome:
    """Shares of simulated comparisons."""

    worse: float
    """At least one "worse"."""
    found: float
    """Of all points, those found "worse"."""
    covered: float
    """Of all intervals, those that hold the truth."""
    smallest: float
    """Median of the smallest change that the comparison says it can show."""


def outcome(pool: Sequence[Run], *, repeats: int, between: Sequence[float], change: float, comparisons: int, seed: int = 1) -> Outcome:
    """Many comparisons of the same two truths."""
    rng = np.random.default_rng(seed)
    anywhere, found, covered, smallest = 0, [], [], []
    for _ in range(comparisons):
        changes = compared(pool, rng, repeats=repeats, between=between, change=change)
        anywhere += any(one.verdict == "worse" for one in changes)
        for one in changes:
            assert one.ratio is not None and one.ratio.low is not None and one.ratio.high is not None and one.smallest is not None
            found.append(one.verdict == "worse")
            covered.append(one.ratio.low <= 1 - change <= one.ratio.high)
            smallest.append(one.smallest)
    return Outcome(anywhere / comparisons, float(np.mean(found)), float(np.mean(covered)), float(np.median(smallest)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=600, help="measured runs of each noise that comparisons draw from")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    pools = {name: [measured(draw, rng) for _ in range(options.runs)] for name, draw in NOISES.items()}
    print("| noise of the steps | spread of a run's rate | its stated 95 % half-width (median) |\n|---|---|---|")
    for name, pool in pools.items():
        print(f"| {name} | {np.std([run.rate for run in pool]):.2%} | {np.median([run.half for run in pool]):.2%} |")
    print("\n| noise | between runs | points | runs per side | false worse | -3 % found | interval holds the truth | says it can show |")
    print("|---|---|---|---|---|---|---|---|")
    for name, between, repeats in cases():
        same = outcome(pools[name], repeats=repeats, between=between, change=0.0, comparisons=options.comparisons)
        slower = outcome(pools[name], repeats=repeats, between=between, change=CHANGE, comparisons=options.comparisons, seed=2)
        covered = (same.covered + slower.covered) / 2
        cells = [f"{same.worse:.1%}", f"{slower.found:.1%}", f"{covered:.1%}", f"{same.smallest:.1%}"]
        varies = f"{min(between):.1%}" if len(set(between)) == 1 else f"{min(between):.1%} or {max(between):.1%}"
        print(f"| {name} | {varies} | {len(between)} | {repeats} | {' | '.join(cells)} |", flush=True)


def cases() -> list[tuple[str, list[float], int]]:
    """Noise, run-to-run standard deviation of each point, runs per side."""
    found = [(name, [0.0] * points, 2) for name in NOISES for points in (1, 4)]
    found += [("AR(1) 0.5", [between] * points, 2) for between in (0.003, 0.01, 0.03) for points in (1, 4)]
    found += [("AR(1) 0.5", [0.002] * 6 + [0.03] * 2, 2)]
    found += [("AR(1) 0.5", [between], repeats) for repeats in (3, 5) for between in (0.0, 0.01, 0.03)]
    found += [("AR(1) 0.5", [between] * points, 1) for between in (0.0, 0.01, 0.03) for points in (1, 8)]
    return found


if __name__ == "__main__":
    main()
