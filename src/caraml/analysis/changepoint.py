"""At which places a series of few results changed its level.

Optimal partitioning (Jackson et al. 2005; the optimum that PELT, Killick et al. 2012, finds faster): the segmentation with the least sum of
squared deviations from the segments' means, in units of the noise, plus a penalty for each change. The noise comes from the differences
of neighbours (their median absolute value), which changes of level and single outliers hardly touch. A level needs two results; only
the newest may stand alone, because a fall by a factor must be seen on the day it happens.

The penalty was found by simulation (``bench/analysis/history.py``): usual for normal noise would be about 12, but runs have heavy tails and
resemble their neighbours, and a false alarm costs somebody a day.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

FEWEST = 4
"""Results below which no change can be told from noise."""
_TO_SIGMA = 1.4826 / math.sqrt(2)
"""Median absolute difference of neighbours to standard deviation of one, for normal noise."""


def penalty(n: int) -> float:
    """Price of a change in a series of ``n`` results, in squared standard deviations."""
    return 15 + 5.5 * math.log(n) + 40 / n


def change_points(series: Sequence[float], floor: float = 0.0) -> list[int]:
    """Indices at which a new level begins; empty below ``FEWEST`` values. ``floor``: least standard deviation of the noise."""
    x = np.asarray(series, dtype=np.float64)
    n = x.size
    if n < FEWEST:
        return []
    x = x - x.mean()
    sigma = max(_TO_SIGMA * float(np.median(np.abs(np.diff(x)))), floor, 1e-12)
    sums, squares = np.concatenate([[0.0], np.cumsum(x)]), np.concatenate([[0.0], np.cumsum(x * x)])
    price = penalty(n)
    best, begin = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=int)
    best[0] = -price
    for end in range(1, n + 1):
        starts = np.arange(end)
        length = end - starts
        deviation = squares[end] - squares[:end] - (sums[end] - sums[:end]) ** 2 / length
        total = best[:end] + deviation / sigma**2 + price
        total[length < (1 if end == n else 2)] = np.inf
        begin[end] = int(total.argmin())
        best[end] = total[begin[end]]
    found, end = [], n
    while begin[end] > 0:
        end = int(begin[end])
        found.append(end)
    return found[::-1]
