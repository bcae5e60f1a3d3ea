"""A derived number with its 95 % interval, and how intervals travel through products and quotients.

Everything that is derived from several runs is positive (times, rates, energies), so errors are kept relative: a number is a normal
distribution of its logarithm, with a standard deviation and the degrees of freedom that this was estimated with. Independent numbers
multiply by adding logarithms, and their variances add. The degrees of freedom of the sum are the smaller ones: the errors of several
runs often rest on what is learnt from all of them, so they cannot be added.

What a sensor may be off by is no chance: it is a bound, kept apart from the interval, and bounds add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from caraml.base.stats import t_critical, t_tail

CONFIDENCE = 0.95
_LARGEST = 500.0
"""Largest half-width of a logarithm: what is beyond has no exponential."""
POWER = 0.9
"""Share of comparisons that find the smallest change which they are said to show."""


@dataclass(frozen=True)
class Estimate:
    """A positive number known up to a relative error."""

    value: float
    """In the unit that its owner states."""
    sd: float | None
    """Standard deviation of its natural logarithm; ``None`` where nothing is known about it."""
    dof: float = math.inf
    """Degrees of freedom behind ``sd``; infinite for one that is assumed."""
    bound: float = 0.0
    """How far the logarithm may be off besides, at most, because of sensors."""

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval, in the unit of ``value``."""
        return None if self.sd is None else self.value * math.exp(-self.reach)

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval, in the unit of ``value``."""
        return None if self.sd is None else self.value * math.exp(self.reach)

    @property
    def reach(self) -> float:
        """Half-width of the 95 % interval of the logarithm; 0 where nothing is known about it."""
        return self.reach_of(1 - CONFIDENCE)

    def reach_of(self, alpha: float) -> float:
        """The same of the interval that misses with probability ``alpha``."""
        return min(t_critical(1 - alpha / 2, self.dof) * self.sd, _LARGEST) if self.sd else 0.0

    def p_beyond(self, least: float = 0.0) -> float:
        """Two-sided probability of a value this far from 1 if the truth differs by at most ``least`` (of the logarithm) and the bound.

        1 where the error is not known.
        """
        beyond = abs(math.log(self.value)) - self.bound - least
        if self.sd is None or beyond <= 0:
            return 1.0
        return t_tail(beyond / self.sd, self.dof) if self.sd else 0.0

    def is_within(self, margin: float, alpha: float = 0.05) -> bool:
        """Whether the truth is shown to differ from 1 by less than ``margin``, the bound included: two one-sided tests (Schuirmann)."""
        if self.sd is None:
            return False
        return abs(math.log(self.value)) + self.bound + self.reach_of(2 * alpha) < math.log1p(margin)

    def for_all_of(self, count: int) -> Estimate:
        """The estimate with an interval that holds together with those of ``count - 1`` others in 95 % of cases (Bonferroni)."""
        return self if not self.sd else replace(self, sd=self.sd * self.reach_of((1 - CONFIDENCE) / count) / self.reach)

    def times(self, other: Estimate) -> Estimate:
        """The product with an independent estimate."""
        return Estimate(self.value * other.value, *_added(self, other))

    def over(self, other: Estimate) -> Estimate:
        """The quotient by an independent estimate."""
        return Estimate(self.value / other.value, *_added(self, other))

    def scaled(self, factor: float) -> Estimate:
        """The estimate times an exactly known positive factor."""
        return Estimate(self.value * factor, self.sd, self.dof, self.bound)

    def inverse(self) -> Estimate:
        """One over the estimate."""
        return Estimate(1 / self.value, self.sd, self.dof, self.bound)


def _added(one: Estimate, other: Estimate) -> tuple[float | None, float, float]:
    """Standard deviation, degrees of freedom and bound of the sum of two independent logarithms."""
    bound = one.bound + other.bound
    if one.sd is None or other.sd is None:
        return None, math.inf, bound
    known = [part.dof for part in (one, other) if part.sd]
    return math.hypot(one.sd, other.sd), min(known, default=math.inf), bound


def smallest_change(sd: float, dof: float, alpha: float = 0.05, bound: float = 0.0) -> float:
    """Relative change that a two-sided test at ``alpha`` finds in nine of ten comparisons like this one.

    ``sd``: standard deviation of the logarithm of the ratio; ``dof``: degrees of freedom that it was estimated with; ``bound``: how far
    sensors may be off, which hides as much and has to be ruled out besides. Like this one: with as many runs, whose own ``sd`` comes out
    differently. As ``sd`` is not known exactly, neither is the change, and what is stated is large enough on average.
    """
    # Degrees of freedom are rounded down, so that few values are computed; the search takes milliseconds.
    steps = 1.05 ** math.floor(math.log(max(dof, 1.0), 1.05)) if math.isfinite(dof) and dof < 500 else math.inf
    change = 2 * bound + sd * _in_errors(steps, alpha)
    return math.expm1(change) if change < 20 else math.inf


@lru_cache(maxsize=1024)
def _in_errors(dof: float, alpha: float) -> float:
    """The same in estimated standard errors: the power of the t test, averaged over what the estimate may have been, is ``POWER``."""
    from scipy.optimize import brentq
    from scipy.special import chdtri, nctdtr, ndtri

    critical = t_critical(1 - alpha / 2, dof)
    if math.isinf(dof):
        return critical + float(ndtri(POWER))
    shares = (np.arange(100) + 0.5) / 100
    estimated = np.sqrt(chdtri(dof, shares) / dof)  # over true standard deviation

    def lacking(errors: float) -> float:
        return POWER - float(np.mean(1 - nctdtr(dof, errors * estimated, critical)))

    high = 2 * critical
    while lacking(high) > 0:
        high *= 2
    return float(brentq(lacking, 0.0, high, rtol=1e-3))
