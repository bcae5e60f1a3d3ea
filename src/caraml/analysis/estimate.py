"""Numbers of runs, those derived from them with 95 % intervals, and how intervals travel through products and quotients.

Everything that is derived from several runs is positive (times, rates, energies), so errors are kept relative: a number is a normal
distribution of its logarithm, with a standard deviation and the degrees of freedom that this was estimated with. Independent numbers
multiply by adding logarithms, and their variances add. The degrees of freedom of the sum are the smaller ones: the errors of several
runs often rest on what is learnt from all of them, so they cannot be added.

What counts as one independent observation is a run, or a session of runs on one machine. What a sensor may be off by is no chance: it is a
bound, kept apart from the interval, and bounds add.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import combinations
from statistics import fmean, variance

import numpy as np

from caraml.base.stats import SMALLEST_SD, t_critical, t_tail
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
SESSION_SD = 0.01
SESSION_PAUSE = timedelta(hours=6)
"""Time between the starts of two runs on one machine from which on they are of different sessions."""
SENSOR_ACCURACY = 0.05
"""Systematic relative error of a power sensor whose record does not say it."""
Z95 = 1.959964


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


@dataclass(frozen=True)
class Observations:
    """The independent observations of one group of repeats: logarithms of runs, or of means of sessions or machines."""

    logs: tuple[float, ...]
    mean: float
    """Of all; a machine counts as often as it has sessions."""
    share: float
    """Variance of the mean over that of one observation."""
    within: float
    """Variance of the mean by the records' own intervals; the least that it can be."""
    known: bool
    """Whether every run has an interval of its own."""
    sessions: float
    """Variance of the mean that is assumed for the state of its only session, or for its only machine; 0 where several show it, or where it
    cancels."""
    nights: tuple[int | str, ...]
    """Of each observation, the session of the whole comparison in which it was made, or its machine."""
    machines: bool = False
    """Whether these are means of machines."""
    most: float = math.inf
    """Degrees of freedom that all groups together have, where what their sessions have in common was taken out."""
    rounding: float = 0.0
    """Variance of one observation that rounding to printed digits makes, or hides: a uniform error of each."""

    @property
    def dof(self) -> int:
        return len(self.logs) - 1

    @cached_property
    def square(self) -> float:
        """Variance of one observation, at least what rounding makes."""
        return max(variance(self.logs), SMALLEST_SD**2, self.rounding) if self.dof else 0.0


def sessions_of(found: Iterable[Value], *, anywhere: bool = False) -> dict[int, int]:
    """A number of the session of every value, by its ``id``; ``anywhere``: whatever the machine, so that numbers grow with time."""
    ordered = sorted(found, key=lambda one: (one.time == UNKNOWN, "" if anywhere else one.host, one.time))
    numbers: dict[int, int] = {}
    last: Value | None = None
    number = 0
    for one in ordered:
        timed = last is not None and (anywhere or last.host == one.host) and UNKNOWN not in (last.time, one.time)
        number += last is None or not timed or one.time - last.time >= SESSION_PAUSE
        numbers[id(one)], last = number, one
    return numbers


def _by_session(groups: Sequence[Sequence[Value]]) -> list[dict[int, list[Value]]]:
    """The values of each group by the number of their session, which all groups have together."""
    number = sessions_of(one for group in groups for one in group)
    found: list[dict[int, list[Value]]] = [{} for _ in groups]
    for sessions, group in zip(found, groups, strict=True):
        for one in group:
            sessions.setdefault(number[id(one)], []).append(one)
    return found


def _own_machines(groups: Sequence[Mapping[int, Sequence[Value]]]) -> bool:
    """Whether there are several groups with sessions, each of which was measured on machines of its own: what these add to the difference
    of any two means is at least as much as if no two sessions had been on the same one."""
    sides = [Counter(session[0].host for session in group.values()) for group in groups if group]
    return len(sides) > 1 and "" not in set().union(*sides) and all(_unlike(one, other) for one, other in combinations(sides, 2))


def _unlike(one: Counter[str], other: Counter[str]) -> bool:
    """Whether that is so of two groups, by the number of their sessions on each machine; variances are in units of that of machines."""
    added = sum((one[host] / one.total() - other[host] / other.total()) ** 2 for host in one | other)
    return added > 0.999 * (1 / one.total() + 1 / other.total())


def _one_after_the_other(groups: Sequence[Sequence[Value]]) -> bool:
    """Whether two of the groups were on the whole measured as far apart in time as two that fill a session, of the length of a pause, in
    turn."""
    times = [fmean(one.time.timestamp() for one in group) for group in groups if group]
    return bool(times) and max(times) - min(times) >= SESSION_PAUSE.total_seconds() / 2


def observations(
    groups: Sequence[Sequence[Value]], known: bool, nights: Mapping[int, int], *, apart: bool = False
) -> list[Observations | None]:
    """The observations of groups; ``None`` for an empty one.

    ``known``: of a kind that the state of a machine changes. Memory and losses are not. ``apart``: the groups are set against each other,
    so that all runs on a machine are one observation where each group has machines of its own, whenever they were: what tells a machine
    from others is the same in all of them.
    """
    by_session = _by_session(groups)
    hosts = {one.host for group in groups for one in group}
    own = known and apart and _own_machines(by_session)
    machines = own and any(len({one.host for one in group}) > 1 for group in groups)
    several = any(len(sessions) > 1 for sessions in by_session)
    one_state = len(set().union(*by_session)) < 2 and not (apart and _one_after_the_other(groups))
    state = SESSION_SD if len(hosts) == 1 else SINGLE_RUN_SD
    assumed = state**2 if known and not machines and (own or (not several and not one_state)) else 0.0
    cells: list[Observations | None] = []
    for group, sessions in zip(groups, by_session, strict=True):
        parts = list(sessions.values()) if several else [[one] for one in group]
        cells.append(_observed(parts, assumed, nights, machines) if group else None)
    return cells


def machine_observations(groups: Sequence[Sequence[Value]], nights: Mapping[int, int]) -> list[Observations | None]:
    """As :func:`observations`, where all runs on a machine are one in any case."""
    return [_observed(list(sessions.values()), 0.0, nights, True) if sessions else None for sessions in _by_session(groups)]


def _observed(parts: Sequence[Sequence[Value]], assumed: float, nights: Mapping[int, int], machines: bool) -> Observations:
    """The observations of a group from its sessions, or runs; ``machines``: those of one machine are one."""
    group = [one for part in parts for one in part]
    errors = [one.error for one in group if one.error is not None]
    within = fmean(error**2 for error in errors) / len(group) if errors else 0.0
    each: dict[object, list[Sequence[Value]]] = {}
    for part in parts:
        each.setdefault(part[0].host if machines else len(each), []).append(part)
    logs = [fmean(fmean(math.log(one.value) for one in part) for part in some) for some in each.values()]
    counts = [len(some) for some in each.values()]
    return Observations(
        tuple(logs),
        fmean(logs, counts),
        sum(count**2 for count in counts) / sum(counts) ** 2,
        within,
        len(errors) == len(group),
        assumed,
        tuple(some[0][0].host if machines else nights[id(some[0][0])] for some in each.values()),
        machines,
        rounding=fmean(one.rounding**2 for one in group) / 3,
    )


def without_common(cells: list[Observations | None]) -> list[Observations | None]:
    """Observations without what their sessions did to all groups, if every group has one of each of several; their means stay.

    That is the analysis of variance of two ways, group and session: what is left of ``g`` groups in ``s`` sessions has ``(g - 1)(s - 1)``
    degrees of freedom, and is enlarged to the variance of one observation.
    """
    known = [dict(zip(cell.nights, cell.logs, strict=True)) for cell in cells if cell is not None and not cell.machines]
    if len(known) < 2 or len(known[0]) < 2 or any(one.keys() != known[0].keys() for one in known):
        return cells
    common = {night: fmean(one[night] for one in known) for night in known[0]}
    grand, scale = fmean(common.values()), math.sqrt(len(known) / (len(known) - 1))
    most = (len(known) - 1) * (len(common) - 1)

    def left(cell: Observations) -> tuple[float, ...]:
        return tuple(
            cell.mean + scale * (log - cell.mean - common[night] + grand) for night, log in zip(cell.nights, cell.logs, strict=True)
        )

    return [None if cell is None else replace(cell, logs=left(cell), most=most) for cell in cells]


def most_dof(cells: Iterable[Observations | None]) -> float:
    """Degrees of freedom that all works together have at most: what a session does to all works alike is seen once, not once for each.

    An analysis of variance tells the share of it; degrees of freedom by Satterthwaite (1946). Infinite where it cannot tell.
    """
    repeated = [cell for cell in cells if cell is not None and cell.dof]
    if any(math.isfinite(cell.most) for cell in repeated):
        return min(cell.most for cell in repeated)
    by_night = _by_night(repeated)
    between = len(by_night) - _parts(repeated)
    within = sum(cell.dof for cell in repeated) - between
    if between <= 0 or within <= 0:
        return math.inf
    shared = sum(len(night) * fmean(night) ** 2 for night in by_night.values())
    rest = sum(log**2 for night in by_night.values() for log in night) - shared
    own = rest / within
    each = max(shared / between - own, 0.0) * len(by_night) / sum(map(len, by_night.values()))
    share = each / (each + own) if each else 0.0
    return 1 / (share**2 / between + (1 - share) ** 2 / (between + within))


def in_common(sides: Sequence[Sequence[Observations | None]]) -> list[Observations | None] | None:
    """Of each side what every session did to its works on average, as the observations of one work; ``None`` where works were not repeated
    in sessions that link all of a side, or what these have in common was taken out."""
    found: list[Observations | None] = []
    for cells in ([cell for cell in side if cell is not None] for side in sides):
        repeated = [cell for cell in cells if cell.dof]
        if any(math.isfinite(cell.most) for cell in repeated) or _parts(repeated) > 1:
            return None
        logs = [fmean(night) for night in _by_night(repeated).values()]
        found.append(replace(cells[0], logs=tuple(logs or cells[0].logs[:1])) if cells else None)
    return found if any(cell is not None and cell.dof for cell in found) else None


def _parts(cells: Iterable[Observations]) -> int:
    """How many groups of sessions there are that no works link: each has a mean of its own."""
    parts: list[set[int | str]] = []
    for cell in cells:
        linked = [part for part in parts if part & set(cell.nights)]
        parts = [part for part in parts if part not in linked] + [set(cell.nights).union(*linked)]
    return len(parts)


def _by_night(cells: Iterable[Observations]) -> dict[int | str, list[float]]:
    """By session how far works were off their means."""
    found: dict[int | str, list[float]] = {}
    for cell in cells:
        mean = fmean(cell.logs)
        for night, log in zip(cell.nights, cell.logs, strict=True):
            found.setdefault(night, []).append(log - mean)
    return found
