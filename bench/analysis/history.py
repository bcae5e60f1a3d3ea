"""How often `caraml history` sees a change where there is none, and how often it finds one: simulated series of results.

    python bench/analysis/history.py [--series 1000]

Results of one work vary by 1 % (normal, heavy-tailed, skewed, or each resembling the one before); in half of the series the last third, or
the last result alone, is lower by a known amount. docs/compare.md has the table; it is also where the penalty in
`caraml/analysis/changepoint.py` comes from: run this with other values to see why.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caraml.analysis.changepoint import change_points

Array = NDArray[np.float64]
SD = 0.01


def resembling(rng: np.random.Generator, n: int) -> Array:
    series = rng.standard_normal(n)
    for i in range(1, n):
        series[i] = 0.3 * series[i - 1] + math.sqrt(1 - 0.3**2) * series[i]
    return series


def skewed(rng: np.random.Generator, n: int) -> Array:
    return -(np.exp(0.5 * rng.standard_normal(n)) - math.exp(0.125)) / 0.604


NOISES: dict[str, Callable[[np.random.Generator, int], Array]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "heavy tails": lambda rng, n: rng.standard_t(3, n) / math.sqrt(3),
    "skewed": skewed,
    "AR(1) 0.3": resembling,
}


def false_alarms(noise: str, n: int, series: int) -> float:
    """Share of unchanged series in which any change is seen."""
    rng = np.random.default_rng(3)
    return sum(bool(change_points(SD * NOISES[noise](rng, n))) for _ in range(series)) / series


def found(change: float, n: int, changed: int, series: int) -> float:
    """Share of series whose last ``changed`` results are lower by ``change`` in which that is seen, within one result of the place."""
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(series):
        values = SD * rng.standard_normal(n)
        values[-changed:] += math.log1p(-change)
        hits += any(abs(index - (n - changed)) <= 1 for index in change_points(values))
    return hits / series


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=1000)
    series = parser.parse_args().series
    changes = ((0.03, 3), (0.05, 3), (0.1, 3), (0.05, 0), (0.1, 0), (0.67, 0))
    names = [f"-{change:.0%}, {'last third' if share else 'last only'}" for change, share in changes]
    print(f"| results | {' | '.join(f'false: {noise}' for noise in NOISES)} | {' | '.join(names)} |")
    print("|---" * (1 + len(NOISES) + len(names)) + "|")
    for n in (4, 6, 10, 20, 50, 100):
        cells = [f"{false_alarms(noise, n, series):.1%}" for noise in NOISES]
        cells += [f"{found(change, n, max(n // share, 1) if share else 1, series):.0%}" for change, share in changes]
        print(f"| {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
