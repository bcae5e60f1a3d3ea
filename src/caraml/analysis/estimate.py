"""A derived number with its 95 % interval, and how intervals travel through products and quotients.

Everything that is derived from several runs is positive (times, rates, energies), so errors are kept relative: a number is a normal
distribution of its logarithm, with a standard deviation and the degrees of freedom that this was estimated with. Independent numbers
multiply by adding logarithms, and their variances add. The degrees of freedom of the sum are the smaller ones: the errors of several
runs often rest on one pooled variance, so they cannot be added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from caraml.stats import t_critical

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A positive number known up to a relative error."""

    value: float
    """In the unit that its owner states."""
    sd: float | None
    """Standard deviation of its natural logarithm; ``None`` where nothing is known about it."""
    dof: float = math.inf
    """Degrees of freedom behind ``sd``; infinite for one that is assumed."""

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval, in the unit of ``value``."""
        return None if self.sd is None else self.value * math.exp(-self._reach)

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval, in the unit of ``value``."""
        return None if self.sd is None else self.value * math.exp(self._reach)

    @property
    def _reach(self) -> float:
        assert self.sd is not None
        return t_critical((1 + CONFIDENCE) / 2, self.dof) * self.sd if self.sd else 0.0

    def times(self, other: Estimate) -> Estimate:
        """The product with an independent estimate."""
        return Estimate(self.value * other.value, *_added(self, other))

    def over(self, other: Estimate) -> Estimate:
        """The quotient by an independent estimate."""
        return Estimate(self.value / other.value, *_added(self, other))

    def scaled(self, factor: float) -> Estimate:
        """The estimate times an exactly known positive factor."""
        return Estimate(self.value * factor, self.sd, self.dof)

    def inverse(self) -> Estimate:
        """One over the estimate."""
        return Estimate(1 / self.value, self.sd, self.dof)


def _added(one: Estimate, other: Estimate) -> tuple[float | None, float]:
    """Standard deviation and degrees of freedom of the sum of two independent logarithms."""
    if one.sd is None or other.sd is None:
        return None, math.inf
    return math.hypot(one.sd, other.sd), min(one.dof, other.dof)
