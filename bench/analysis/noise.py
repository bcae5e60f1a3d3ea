"""Step times as real machines make them, with a known truth: what every claim about rates and comparisons is tried on.

    python bench/analysis/noise.py                       # the machines of the bench, and what a minute of each looks like
    python bench/analysis/noise.py RESULTS [RESULTS ...] # the same figures of recorded runs: folders of results
    python bench/analysis/noise.py --rates [20]          # the tables of docs/measuring.md, with 20 runs of each machine
    python bench/analysis/noise.py --verdicts [0.1]      # the tables of docs/compare.md, with a tenth of the simulations

A :class:`Machine` is a step time and a list of *layers*. A layer gets a generator and the time of each step [s] and returns what it adds to
each step, in nominal steps, with a long-run mean of zero (or an end at zero, where it settles): the true step time is the nominal one. One
seed gives one series.

:func:`white`, :func:`ar1`, :func:`fgn` and the other *shapes* are series of mean 0 and spread 1 without a unit of time; they also serve as
models of what changes from run to run or from night to night.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Shape = Callable[[np.random.Generator, int], Array]
Layer = Callable[[np.random.Generator, Array], Array]

SHORTEST = 0.05
"""Least a step may take, in nominal steps."""
OWN = 0.03
"""Spread of the work of synchronous ranks, in nominal steps: a step is over when the slowest rank's is."""
JITTER = 0.002
"""Spread of the marks that end a step, in nominal steps: what synchronous ranks differ by, although they step together."""


# -- shapes: series of mean 0 and spread 1 -----------------------------------------------------------------------------


def white(rng: np.random.Generator, n: int) -> Array:
    """Independent and normal."""
    return rng.standard_normal(n)


def ar1(rho: float) -> Shape:
    """Autoregressive: each value resembles the one before by ``rho``."""
    return _gaussian(lambda lags: rho**lags)


def fgn(hurst: float) -> Shape:
    """Fractional Gaussian noise, 1/f noise for ``hurst`` > 0.5: the mean of n values has a spread of n^(hurst - 1)."""
    power = 2 * hurst
    return _gaussian(lambda lags: ((lags + 1) ** power - 2 * lags**power + np.abs(lags - 1) ** power) / 2)


def student(dof: float) -> Shape:
    """Heavy tails; ``dof`` > 2."""
    return lambda rng, n: rng.standard_t(dof, n) / math.sqrt(dof / (dof - 2))


def lognormal(sigma: float) -> Shape:
    """Skewed: many short, few long."""
    mean, spread = math.exp(sigma**2 / 2), math.exp(sigma**2 / 2) * math.sqrt(math.expm1(sigma**2))
    return lambda rng, n: (rng.lognormal(0, sigma, n) - mean) / spread


def two_kinds(rng: np.random.Generator, n: int) -> Array:
    """Short steps, and three in ten that take longer."""
    return (np.where(rng.random(n) < 0.3, 3.5, -1.5) + 0.3 * rng.standard_normal(n)) / math.sqrt(0.21 * 25 + 0.09)


def outliers(share: float, size: float, shape: Shape = white) -> Shape:
    """``shape`` with a ``share`` of values off by ``size`` spreads to either side. The spread is that of the rest."""

    def draw(rng: np.random.Generator, n: int) -> Array:
        hit = rng.random(n) < share
        return shape(rng, n) + np.where(hit, size * rng.choice([-1.0, 1.0], n), 0.0)

    return draw


def _gaussian(autocovariance: Callable[[Array], Array]) -> Shape:
    """A stationary normal series by circulant embedding (Davies and Harte 1987): exact, in the time of two FFTs."""
    known: dict[int, Array] = {}

    def draw(rng: np.random.Generator, n: int) -> Array:
        size = 1 << max(n - 1, 1).bit_length()
        if size not in known:
            column = autocovariance(np.arange(size + 1, dtype=np.float64))
            known[size] = np.sqrt(np.maximum(np.fft.rfft(np.concatenate([column, column[-2:0:-1]])).real, 0.0))
        spectrum = np.fft.rfft(rng.standard_normal(2 * size)) * known[size]
        return np.fft.irfft(spectrum)[:n]

    return draw


# -- layers: what happens to the steps of one run ----------------------------------------------------------------------


def steps(spread: float, shape: Shape = white) -> Layer:
    """What differs from step to step."""
    return lambda rng, times: spread * shape(rng, times.size)


def clocks(amplitude: float, dwell: float) -> Layer:
    """Two states apart by ``amplitude``, each kept for an exponential time of mean ``dwell`` [s]."""

    def draw(rng: np.random.Generator, times: Array) -> Array:
        changes = _arrivals(rng, dwell, times[-1])
        state = (np.searchsorted(changes, times) + rng.integers(2)) % 2
        return np.asarray(amplitude * (state - 0.5))

    return draw


def settling(amplitude: float, tau: float) -> Layer:
    """Steps begin longer by ``amplitude`` (shorter, if negative) and approach their level with time constant ``tau`` [s]."""
    return lambda rng, times: np.asarray(amplitude * np.exp(-times / tau))


def throttling(amplitude: float, begin: float, lasts: float) -> Layer:
    """Steps are shorter by ``amplitude`` until ``begin`` [s], then grow to their level over ``lasts`` [s]."""
    return lambda rng, times: -amplitude * np.clip(1 - (times - begin) / lasts, 0.0, 1.0)


def pauses(length: float, gap: float, *, periodic: bool = False) -> Layer:
    """Pauses of ``length`` every ``gap`` [s] on average: at random, or in time with each other from a random beginning."""

    def draw(rng: np.random.Generator, times: Array) -> Array:
        step = _step(times)
        begins = np.arange(rng.random() * gap, times[-1], gap) if periodic else _arrivals(rng, gap, times[-1])
        hit = np.bincount(np.searchsorted(times, begins, side="right") - 1, minlength=times.size)
        return np.asarray(hit * length / step - length / gap)

    return draw


def waves(amplitude: float, period: float) -> Layer:
    """A sine of ``period`` [s] from a random phase, as of fans or of a room's temperature."""
    return lambda rng, times: amplitude * np.sin(2 * math.pi * (times / period + rng.random()))


def drift(per_minute: float) -> Layer:
    """Steps that grow by ``per_minute`` for ever: there is no level."""
    return lambda rng, times: per_minute * times / 60


def _arrivals(rng: np.random.Generator, gap: float, until: float) -> Array:
    """Times of a Poisson process before ``until``."""
    count = int(until / gap + 6 * math.sqrt(until / gap) + 10)
    times = np.cumsum(rng.exponential(gap, count))
    return times[times < until]


def _step(times: Array) -> float:
    return float(times[1] - times[0])


# -- machines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """A machine that does one kind of work."""

    name: str
    layers: tuple[Layer, ...]
    step: float = 0.05
    """True step time of a rank [s]: that of a long run, or the level that it settles to."""
    slowest: float = 0.0
    """Longest time constant [s]: correlation time, dwell, tau, gap between pauses; 0 for steps that know nothing of each other, infinite
    where there is memory on all scales."""
    level: bool = True
    """Whether there is a true step time."""
    ranks: int = 1
    together: bool = True
    """Whether every step waits for all ranks, who share the layers and differ by ``OWN``; or ranks wait for nobody, and each has layers
    of its own."""

    def rank_series(self, rng: np.random.Generator, seconds: float) -> Array:
        """Step times of every rank [s] for about so many nominal seconds: ranks x steps."""
        times = self.step * np.arange(max(int(seconds / self.step), 4), dtype=np.float64)
        if self.ranks == 1:
            return self._series(rng, times)[np.newaxis]
        if not self.together:
            return np.stack([self._series(rng, times) for _ in range(self.ranks)])
        slowest = OWN * rng.standard_normal((self.ranks, times.size)).max(axis=0)
        marks = JITTER * rng.standard_normal((self.ranks, times.size + 1))
        return self._series(rng, times) + self.step * (slowest + np.diff(marks, axis=1))

    def series(self, rng: np.random.Generator, seconds: float) -> Array:
        """Step times as a record takes them [s]."""
        return self.counted(found := self.rank_series(rng, seconds), found)

    def counted(self, rank_series: Array, window: Array) -> Array:
        """Of some steps those of the slowest rank: in each step, or of free ranks in the ``window``."""
        return rank_series.max(axis=0) if self.together else rank_series[int(window.sum(axis=1).argmax())]

    def wall(self, rank_series: Array) -> float:
        """Time of a window of these steps [s]: the slowest rank's."""
        return float(rank_series.sum(axis=1).max())

    def truth(self, seed: int = 0, seconds: float = 20_000.0) -> float:
        """True time per step [s]; of ranks that wait for each other from one long run."""
        if self.ranks == 1 or not self.together:
            return self.step
        long = self.rank_series(np.random.default_rng(seed), min(seconds, 2e7 * self.step / self.ranks))
        return self.wall(long) / long.shape[1]

    def _series(self, rng: np.random.Generator, times: Array) -> Array:
        return self.step * np.maximum(1 + sum(layer(rng, times) for layer in self.layers), SHORTEST)


def with_ranks(machine: Machine, ranks: int, *, together: bool) -> Machine:
    """The same machine with several ranks."""
    return replace(machine, name=f"{machine.name}, {ranks} {'synchronous' if together else 'free'} ranks", ranks=ranks, together=together)


def bench() -> list[Machine]:
    """All machines, by kind of noise."""
    quiet = steps(0.02)
    found = [
        Machine("white, 2 %", (quiet,)),
        Machine("white, 10 %", (steps(0.10),)),
        Machine("AR(1) 0.5, 5 %", (steps(0.05, ar1(0.5)),), slowest=0.15),
        Machine("AR(1) 0.9, 5 %", (steps(0.05, ar1(0.9)),), slowest=0.95),
        Machine("Student t, 3 degrees, 5 %", (steps(0.05, student(3)),)),
        Machine("lognormal 0.3", (steps(0.3, lognormal(0.3)),)),
        Machine("two kinds of step, 5 %", (steps(0.05, two_kinds),)),
    ]
    found += [Machine(f"1/f, H = {hurst}, 5 %", (steps(0.05, fgn(hurst)),), slowest=math.inf) for hurst in (0.6, 0.7, 0.8, 0.9)]
    found += [
        Machine(f"two clocks, {amplitude:.0%}, dwell {dwell:g} s", (quiet, clocks(amplitude, dwell)), slowest=dwell)
        for amplitude, dwell in ((0.05, 1.0), (0.03, 10.0), (0.05, 30.0), (0.05, 120.0), (0.05, 600.0))
    ]
    found += [
        Machine(f"settling {amplitude:+.0%}, tau {tau:g} s", (quiet, settling(amplitude, tau)), slowest=tau)
        for amplitude in (0.10, -0.05)
        for tau in (5.0, 30.0, 60.0, 200.0, 300.0)
    ]
    found += [
        Machine("throttling by 5 % after 20 s over 10 s", (quiet, throttling(0.05, 20, 10)), slowest=30.0),
        Machine("throttling by 10 % after 10 s over 60 s", (quiet, throttling(0.10, 10, 60)), slowest=70.0),
        Machine("pauses of 0.2 s every 1 s at random", (quiet, pauses(0.2, 1)), slowest=1.0),
        Machine("pauses of 0.3 s every 5 s, regular", (quiet, pauses(0.3, 5, periodic=True)), slowest=5.0),
        Machine("pauses of 1 s every 30 s at random", (quiet, pauses(1, 30)), slowest=30.0),
        Machine("pauses of 1 s every 30 s, regular", (quiet, pauses(1, 30, periodic=True)), slowest=30.0),
        Machine("pauses of 10 s every 300 s at random", (quiet, pauses(10, 300)), slowest=300.0),
        Machine("drift of 3 % a minute", (quiet, drift(0.03)), slowest=math.inf, level=False),
        Machine("drift of 0.3 % a minute at 0.1 % noise", (steps(0.001), drift(0.003)), slowest=math.inf, level=False),
        Machine("waves of 1 %, 2 minutes long", (quiet, waves(0.01, 120)), slowest=120.0),
        Machine("steps of 5 s, normal 0.3 %", (steps(0.003),), step=5.0),
        Machine("steps of 5 s, normal 2 %", (quiet,), step=5.0),
        Machine("steps of 5 s, lognormal 0.3", (steps(0.3, lognormal(0.3)),), step=5.0),
    ]
    base = Machine("white, 5 %", (steps(0.05),))
    found += [with_ranks(base, ranks, together=together) for ranks in (2, 8, 64) for together in (True, False)]
    return found


# -- what a series looks like, made or recorded ------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """Figures of a series of step times by which a made one and a recorded one can be compared."""

    steps: int
    mean: float
    """[s]"""
    spread: float
    """Relative: 1.4826 times the median absolute deviation from the median, over the median."""
    memory: float
    """Autocorrelation of neighbouring steps, of ranks, so that single long steps do not hide it."""
    hurst: float
    """From the growth of the variance of block means, blocks of 1 to a sixteenth of the series."""
    long_share: float
    """Share of steps that take more than 1.5 medians."""
    long_cost: float
    """Share of the time that those take beyond the median."""
    slow_range: float
    """Highest over lowest of eight consecutive medians, minus 1."""


def look(series: Sequence[float] | Array) -> Look:
    """The figures of one series; 64 steps or more."""
    x = np.asarray(series, dtype=np.float64)
    median = float(np.median(x))
    ranks = np.argsort(np.argsort(x)).astype(np.float64)
    medians = [float(np.median(part)) for part in np.array_split(x, 8)]
    beyond = x[x > 1.5 * median]
    return Look(
        steps=x.size,
        mean=float(x.mean()),
        spread=1.4826 * float(np.median(np.abs(x - median))) / median,
        memory=float(np.corrcoef(ranks[:-1], ranks[1:])[0, 1]),
        hurst=_hurst(ranks),
        long_share=beyond.size / x.size,
        long_cost=float((beyond - median).sum() / x.sum()),
        slow_range=max(medians) / min(medians) - 1,
    )


def _hurst(x: Array) -> float:
    """Aggregated variance: block means of size m vary as m^(2 H - 2)."""
    sizes = [2**power for power in range(int(math.log2(x.size)) - 3)]
    variances = [x[: x.size // size * size].reshape(-1, size).mean(axis=1).var(ddof=1) for size in sizes]
    slope = np.polyfit(np.log(sizes), np.log(variances), 1)[0]
    return float(1 + slope / 2)


def recorded(folders: Sequence[Path]) -> list[tuple[str, Array]]:
    """Window steps of every record in these folders, slowest rank of each step."""
    import duckdb

    import caraml

    found = []
    for folder in folders:
        for result in caraml.load(folder).where(status="ok"):
            query = "select max(seconds) from read_parquet(?) where phase = 'measure' group by step order by step"
            rows = duckdb.execute(query, [str(result.folder / "steps.parquet")]).fetchall()
            found.append((result.point.label, np.array(rows)[:, 0]))
    return found


def main() -> None:
    if sys.argv[1:2] == ["--verdicts"]:
        import verdicts

        verdicts.tables(*map(float, sys.argv[2:]))
        return
    if sys.argv[1:2] == ["--rates"]:
        import rate

        rate.tables(*map(float, sys.argv[2:]))
        return
    folders = [Path(name) for name in sys.argv[1:]]
    rng = np.random.default_rng(0)
    shown = recorded(folders) if folders else [(machine.name, machine.series(rng, 120)) for machine in bench() if machine.step < 1]
    print(
        "| series | steps | mean step | spread | memory | H | long steps | their cost | slow range |\n|---|---|---|---|---|---|---|---|---|"
    )
    for name, series in shown:
        one = look(series)
        cells = [f"{one.steps}", f"{one.mean * 1e3:.1f} ms", f"{one.spread:.1%}", f"{one.memory:.2f}", f"{one.hurst:.2f}"]
        cells += [f"{one.long_share:.2%}", f"{one.long_cost:.1%}", f"{one.slow_range:.1%}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
