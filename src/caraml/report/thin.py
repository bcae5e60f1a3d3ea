"""Long series made short enough to draw, without losing their extremes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LIMIT = 600
"""Most points of a drawn series: two for each pixel of a chart."""
QUANTILES = 200
"""Most points of a drawn distribution."""

DRAWN = 100_000
"""Points of a series that are looked at one by one."""

Points = list[tuple[float, float]]


def thinned(points: Points, limit: int = LIMIT) -> Points:
    """At most ``limit`` of the points: the lowest and the highest of each of ``limit / 2`` equal bins, in their order."""
    if len(points) <= limit:
        return points
    bins = limit // 2
    kept: Points = []
    for index in range(bins):
        part = points[index * len(points) // bins : (index + 1) * len(points) // bins]
        low, high = min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])
        kept += [low] if low == high else sorted((low, high))
    return kept


def paired(xs: Sequence[float], ys: Sequence[float], most: int = DRAWN) -> Points:
    """The points of two columns; of more than ``most``, the lowest and the highest of each of ``most / 2`` equal bins, in their order."""
    if len(xs) <= most:
        return list(zip(xs, ys, strict=True))
    width = -(-2 * len(ys) // most)
    whole = np.asarray(ys)[: len(ys) // width * width].reshape(-1, width)
    first = np.arange(len(whole)) * width
    kept = np.unique(np.concatenate((first + whole.argmin(1), first + whole.argmax(1), np.arange(whole.size, len(ys)))))
    return [(xs[index], ys[index]) for index in kept.tolist()]


def distribution(values: Sequence[float], limit: int = QUANTILES) -> Points:
    """The empirical distribution: (value, share of values at or below it), at most ``limit`` + 1 points, both ends kept."""
    ordered = sorted(values)
    n = len(ordered)
    ranks = sorted({0, *(round(index * (n - 1) / limit) for index in range(limit + 1))}) if n > limit else range(n)
    return [(ordered[rank], (rank + 1) / n) for rank in ranks]


def sampled(points: Points, limit: int = 12) -> Points:
    """About ``limit`` evenly spaced points, for a table beside the drawing."""
    if len(points) <= limit:
        return points
    return [points[round(index * (len(points) - 1) / (limit - 1))] for index in range(limit)]
