"""The smallest change that a comparison can show: its power."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from caraml.stats import t_critical

POWER = 0.9
"""Share of comparisons that find the smallest change which they are said to show."""


def smallest_change(sd: float, dof: float, alpha: float = 0.05) -> float:
    """Relative change that a two-sided test at ``alpha`` finds in nine of ten comparisons.

    ``sd``: standard deviation of the logarithm of the ratio; ``dof``: degrees of freedom that it was estimated with.
    """
    return math.expm1(sd * _in_errors(dof, alpha))


@lru_cache(maxsize=1024)
def _in_errors(dof: float, alpha: float) -> float:
    """The same in standard errors: where the power of the t test, found by bisection, is ``POWER``."""
    critical = t_critical(1 - alpha / 2, dof)
    if math.isinf(dof):
        return critical + NormalDist().inv_cdf(POWER)
    ratios, weights = _errors_of_the_error(dof)
    low, high = 0.0, 2.0 * critical + 10.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        reach = (middle - critical * ratios) / math.sqrt(2)
        power = float(weights @ np.array([math.erfc(-value) / 2 for value in reach]))
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def _errors_of_the_error(dof: float) -> tuple[np.ndarray, np.ndarray]:
    """Estimated over true standard deviation, ``sqrt(chi2(dof) / dof)``: values and their probabilities."""
    ratios = np.linspace(1e-4, 1 + 6 / math.sqrt(2 * dof) + 2, 800)
    log_density = (dof - 1) * np.log(ratios) - dof * ratios**2 / 2
    density = np.exp(log_density - log_density.max())
    return ratios, density / density.sum()
