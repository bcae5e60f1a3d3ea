"""How far a record's rate and its interval can be trusted: the machines of noise.py through the real warm-up, stop rule and flags.

Every run ends where a real measurement would. `python bench/analysis/noise.py --rates` prints the tables of docs/measuring.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from noise import Array, Machine, Shape, ar1, bench, lognormal, student, white

from caraml.base.stats import corrected, independent_steps, mean_interval, quantile_interval
from caraml.engine.control import judge, look, seen, steps_until_next_look, warm_up_over
from caraml.engine.device import CudaDevice
from caraml.metrics.model import Metric, Peak
from caraml.metrics.window import over
from caraml.suite.model import Policy

DEFAULT = Policy()
"""The default policy."""
SETTLE, WINDOW = CudaDevice.settle_seconds, CudaDevice.window_seconds
"""Shortest warm-up and shortest window of an accelerator [s]."""


@dataclass(frozen=True)
class Run:
    """One measured run. Times in seconds."""

    error: float
    """Of the rate, relative to the truth; NaN where there is none."""
    half: float
    """Relative half-width of the interval."""
    flags: tuple[str, ...]
    window: float
    longest: float
    """Longest time constant that the record says its interval speaks of."""

    @property
    def holds(self) -> bool:
        """Whether the interval holds the truth."""
        return abs(self.error) <= self.half


def measured(machine: Machine, rng: np.random.Generator, policy: Policy, truth: float, at_least: float = SETTLE) -> Run:
    """One run of a machine whose true step time is ``truth`` [s]; rank 0 decides when to stop, and the slowest is judged."""
    series = machine.rank_series(rng, 1.1 * (policy.warm_up_max_seconds + policy.max_seconds) + 30 * machine.step + 5)
    warm = _launched(series[0], (), lambda own, elapsed: warm_up_over(own, elapsed, policy, at_least))
    before, rest, paces = series[:, :warm], series[:, warm:], 1 if machine.together else machine.ranks
    count = _launched(
        rest[0], before[0], lambda own, elapsed: look(before[0], own, own.size, elapsed, policy, at_least=WINDOW, paces=paces).stop
    )
    window = rest[:, :count]
    warm_up, slowest, wall = machine.counted(before, window), machine.counted(window, window), machine.wall(window)
    flags = judge(warm_up, slowest, policy, paces)
    error = truth * count / wall - 1 if machine.level else math.nan
    return Run(error, mean_interval(slowest, corrected(paces), before=warm_up).relative, tuple(flags), wall, seen(slowest)[1])


def _launched(series: Array, earlier: Array | tuple[()], over: Callable[[Array, float], bool]) -> int:
    """Steps that a loop launches until a look says that it is over."""
    elapsed, count = np.cumsum(series), 0
    while True:
        count += steps_until_next_look(series[max(count - 20, 0) : count] if count else earlier, count)
        if count > series.size:
            raise ValueError(f"{elapsed[-1]:.1f} s of steps were not enough")
        if over(series[:count], float(elapsed[count - 1])):
            return count


@dataclass(frozen=True)
class Row:
    """What came out of many runs of one machine."""

    machine: Machine
    runs: list[Run]

    HEAD = "noise of the steps | window | error of the rate | interval | holds | `not_steady` | `imprecise` | no flag, yet wrong"

    def cells(self) -> list[str]:
        """As text: medians of window and half-width, mean (spread) of the error, shares of the runs."""
        runs, level = self.runs, self.machine.level
        errors = np.array([run.error for run in runs])
        return [
            self.machine.name,
            f"{np.median([run.window for run in runs]):.3g} s",
            f"{errors.mean():+.2%} ({errors.std():.2%})" if level else "no level",
            f"± {np.median([run.half for run in runs]):.2%}",
            share(run.holds for run in runs) if level else "",
            share("not_steady" in run.flags for run in runs),
            share("imprecise" in run.flags for run in runs),
            share(not run.flags and not run.holds for run in runs) if level else "",
        ]


def share(found: Iterable[bool]) -> str:
    """Of how many it is true, in percent."""
    values = list(found)
    return f"{100 * sum(values) / len(values):.0f} %"


def row(machine: Machine, policy: Policy, runs: int, seed: int = 1, at_least: float = SETTLE) -> Row:
    """Many runs of one machine under one policy."""
    rng, truth = np.random.default_rng(seed), machine.truth()
    return Row(machine, [measured(machine, rng, policy, truth, at_least) for _ in range(runs)])


def long_enough(machine: Machine) -> Policy:
    """A policy whose window holds twenty time constants of the machine."""
    window = max(5.0, 20 * machine.slowest)
    return Policy(warm_up_max_seconds=60 + 10 * machine.slowest, min_seconds=window, max_seconds=max(60.0, 2 * window))


def stopped(machine: Machine, target: float, runs: int) -> str:
    """What comes of a policy that goes on until it has its target."""
    policy = DEFAULT.model_copy(update={"target": target, "max_seconds": 600.0})
    found = row(machine, policy, runs).runs
    window, bias = np.median([run.window for run in found]), np.mean([run.error for run in found])
    clean = [run.holds for run in found if not run.flags]
    return f"{window:.3g} s, {bias:+.2%}, {share(clean) if clean else 'all flagged'}"


TARGETS = (0.005, 0.01, 0.02)


def tables(runs: float = 200) -> None:
    """Print all tables."""
    machines, few = bench(), max(int(runs) // 4, 1)
    print("Default policy on an accelerator\n")
    _print(Row.HEAD, (row(machine, DEFAULT, int(runs)).cells() for machine in machines))
    print("\nWindows of twenty time constants\n")
    known = [machine for machine in machines if 0 < machine.slowest <= 30]
    at_least = [max(SETTLE, 5 * machine.slowest) for machine in known]
    _print(Row.HEAD, (row(one, long_enough(one), few, at_least=least).cells() for one, least in zip(known, at_least, strict=True)))
    print("\nAt other targets, windows of at most 600 s\n")
    names = ("white, 10 %", "AR(1) 0.5, 5 %", "AR(1) 0.9, 5 %", "two clocks, 5%, dwell 1 s", "1/f, H = 0.7, 5 %")
    head = "noise of the steps: window, error of the rate, unflagged intervals that hold | " + " | ".join(f"{one:.1%}" for one in TARGETS)
    asked = [machine for machine in machines if machine.name in names]
    _print(head, ([machine.name, *(stopped(machine, target, few) for target in TARGETS)] for machine in asked))

    print("\nQuantiles of the steps, order statistics\n")
    _print(
        "steps | number | median holds | 95th percentile holds",
        ([name, str(n), *(quantile(shape, n, at, 5 * int(runs)) for at in (0.5, 0.95))] for name, shape in SHAPES for n in (100, 1000)),
    )
    print("\nShare of a measured peak: the rate varies by 0.2 %, the probe by 1 %\n")
    _print("interval of the rate alone holds | with the probe's", [utilisation(5 * int(runs))])


AR9 = ar1(0.9)
SHAPES: tuple[tuple[str, Shape], ...] = (
    ("independent", white),
    ("lognormal 0.3", lognormal(0.3)),
    ("Student t, 3 degrees", student(3)),
    ("AR(1) 0.5", ar1(0.5)),
    ("AR(1) 0.9", AR9),
    ("AR(1) 0.9, one step in fifty long", lambda rng, n: AR9(rng, n) + 100.0 * (rng.random(n) < 0.02)),
)


def quantile(shape: Shape, n: int, at: float, runs: int) -> str:
    """How often the interval of a quantile of n steps of 5 % spread holds that of very many."""
    rng = np.random.default_rng(6)
    truth, held = float(np.quantile(shape(rng, 1_000_000), at)), []
    for _ in range(runs):
        x = 1 + 0.05 * shape(rng, n)
        ends = quantile_interval(np.sort(x), at, independent_steps(x, float(np.quantile(x, at))))
        held += [] if ends is None else [ends[0] <= 1 + 0.05 * truth <= ends[1]]
    return share(held) if len(held) > runs / 2 else "too few"


def utilisation(runs: int) -> list[str]:
    """How often the interval of a share of a peak holds it, without and with the error of the probe."""
    rng, alone, together = np.random.default_rng(7), [], []
    for rate, probe in np.exp(np.array([0.002, 0.01]) * rng.standard_normal((runs, 2))):
        metric = Metric(value=rate, unit="FLOP/s", low=rate * 0.9961, high=rate * 1.0039)
        for held, limit in ((alone, ()), (together, (Peak(value=probe, low=probe * 0.9804, high=probe * 1.0196, dtype="fp32"),))):
            found = over(metric, float(probe), *limit)
            held.append(found.low is not None and found.high is not None and found.low <= 1 <= found.high)
    return [share(alone), share(together)]


def _print(head: str, rows: Iterable[Sequence[str]]) -> None:
    print(f"| {head} |\n{'|---' * (head.count('|') + 1)}|")
    for cells in rows:
        print(f"| {' | '.join(cells)} |", flush=True)
