"""Numbers of runs, those derived from them with 95 % intervals, and how intervals travel through products and quotients.

Everything that is derived from several runs is positive (times, rates, energies), so errors are kept relative: a number is a normal
distribution of its logarithm, with a standard deviation and the degrees of freedom that this was estimated with. Independent numbers
multiply by adding logarithms, and their variances add. The degrees of freedom of the sum are the smaller ones: the errors of several
runs often rest on what is learnt from all of them, so they cannot be added.

What a sensor may be off by is no chance: it is a bound, kept apart from the interval, and bounds add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np

from caraml.base.stats import Z95, t_critical, t_tail
from caraml.metrics.model import METRICS, Metric
from caraml.results.record import Record

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
    accuracy: float = 0.0
    """Systematic relative error of the sensors that it was read from, which cancels in a quotient where both were read from the same."""
    sensors: frozenset[str | None] = frozenset()
    """What tells these from others; ``None`` among them: not known."""

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

    def p_beyond(self) -> float:
        """Two-sided probability of a value this far from 1 if the truth differs by at most the bound; 1 where the error is not known."""
        beyond = abs(math.log(self.value)) - self.bound
        if self.sd is None or beyond <= 0:
            return 1.0
        return t_tail(beyond / self.sd, self.dof) if self.sd else 0.0

    def is_within(self, margin: float) -> bool:
        """Whether the truth is shown to differ from 1 by less than ``margin``, the bound included: two one-sided tests of 5 %
        (Schuirmann)."""
        if self.sd is None:
            return False
        return abs(math.log(self.value)) + self.bound + self.reach_of(2 * 0.05) < math.log1p(margin)

    def for_all_of(self, count: int) -> Estimate:
        """The estimate with an interval that holds together with those of ``count - 1`` others in 95 % of cases (Bonferroni)."""
        return self if not self.sd else replace(self, sd=self.sd * self.reach_of((1 - CONFIDENCE) / count) / self.reach)

    def over(self, other: Estimate) -> Estimate:
        """The quotient by an independent estimate. What different sensors may differ by is in its bound."""
        sd, dof, bound = _added(self, other)
        same = len(self.sensors | other.sensors) == 1 and None not in self.sensors | other.sensors
        return Estimate(self.value / other.value, sd, dof, bound if same else bound + self.accuracy + other.accuracy)

    def scaled(self, factor: float) -> Estimate:
        """The estimate times an exactly known positive factor."""
        return replace(self, value=self.value * factor)

    def inverse(self) -> Estimate:
        return replace(self, value=1 / self.value)

    def metric(self, unit: str) -> Metric:
        """The estimate as a number of a record, with its interval."""
        return Metric(value=self.value, unit=unit, low=self.low, high=self.high)


def _added(one: Estimate, other: Estimate) -> tuple[float | None, float, float]:
    """Standard deviation, degrees of freedom and bound of the sum of two independent logarithms."""
    bound = one.bound + other.bound
    if one.sd is None or other.sd is None:
        return None, math.inf, bound
    known = [part.dof for part in (one, other) if part.sd]
    return math.hypot(one.sd, other.sd), min(known, default=math.inf), bound


def differs(ratio: Estimate | None, tests: int = 1) -> bool:
    """Whether a ratio is distinguishable from 1, as one of as many ``tests``."""
    return ratio is not None and ratio.p_beyond() * tests < 1 - CONFIDENCE


def pairs_of(choices: int) -> int:
    """How many comparisons of any two there are: the best is picked, so each of them may be the one that is made."""
    return choices * (choices - 1) // 2


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


TYPICAL_SD = 0.0056
SINGLE_RUN_SD = 0.023
SINGLE_RUN_DOF = 4.0
"""Tails of single runs: some works vary by much more than 2.3 %. Student's t with so many degrees, and the same
95 % interval. With normal tails 28 % of comparisons of 50 works with the published variances had a false "worse", with these 1 %."""
SENSOR_ACCURACY = 0.05
"""Systematic relative error of a power sensor whose record does not say it."""


def is_known_kind(metric: str) -> bool:
    """True for rates, their times and energies: the kinds of number that the published repeats speak of."""
    return metric in METRICS and METRICS[metric].spread


UNKNOWN = datetime.min.replace(tzinfo=UTC)
"""The time of what does not say it: before all others."""


@dataclass(frozen=True)
class Value:
    """One number of one run."""

    value: float
    error: float | None
    """Relative standard error by the record's own interval; ``None`` if it has none."""
    bound: float = 0.0
    """How far the logarithm may be off besides, at most."""
    accuracy: float = 0.0
    """Systematic relative error of its sensor: the same for all runs that ``sensors`` read."""
    sensors: str | None = None
    """What tells the sensors from others; ``None``: not known."""
    host: str = ""
    time: datetime = UNKNOWN
    """When the run started; a run of unknown time is a session of its own."""
    rounding: float = 0.0
    """How much of ``bound`` comes from few printed digits."""


def values(records: Iterable[Record], metric: str, of: Callable[[Record], Metric | None] | None = None) -> list[Value]:
    """The metric of every record that has it above zero; ``of`` gives it where it is not in the record as it is."""
    found = []
    for record in records:
        one = record.metrics.get(metric) if of is None else of(record)
        if one is None or one.value is None or one.value <= 0:
            continue
        error = None
        if one.low is not None and one.high is not None and 0 < one.low <= one.high:
            error = math.log(one.high / one.low) / 2 / Z95
        share = min((one.bound or 0.0) / one.value, 0.99)
        accuracy, sensors = _sensors(record, one.scope) if metric in METRICS and METRICS[metric].sensor else (0.0, None)
        host = str(record.system.get("hostname") or record.system.get("host") or "")
        bound = -math.log1p(-share)
        rounding = bound if "published" in record.environment else 0.0
        found.append(Value(one.value, error, bound, accuracy, sensors, host, started(record), rounding))
    return found


def _sensors(record: Record, scope: str | None) -> tuple[float, str | None]:
    """Accuracy and identity of the sensors that a record's energy was read from."""
    boundary = record.energy.boundaries.get(scope or "") if record.energy is not None else None
    if boundary is None:
        return SENSOR_ACCURACY, None
    host = record.system.get("hostname") or record.system.get("host")
    accuracy = SENSOR_ACCURACY if boundary.accuracy is None else boundary.accuracy
    return accuracy, f"{host}: {', '.join(sorted(boundary.channels))}" if host else None


def started(record: Record) -> datetime:
    """When a record was measured; ``UNKNOWN`` where it does not say so."""
    return UNKNOWN if "published" in record.environment else time_of(record.started_at)


def time_of(text: str | None) -> datetime:
    """A time as a file has it; ``UNKNOWN`` for anything else."""
    try:
        return datetime.fromisoformat(text or "").astimezone(UTC)
    except (ValueError, OverflowError):
        return UNKNOWN
