"""The numbers of runs, and what of them counts as an independent observation: a run, or a session of runs on one machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from statistics import fmean, variance

from caraml.metrics.model import Metric
from caraml.results.record import Record

TYPICAL_SD = 0.0056
SINGLE_RUN_SD = 0.023
SINGLE_RUN_DOF = 4.0
"""Tails of single runs: some works vary by much more than 2.3 %. Student's t with so many degrees, and the same
95 % interval. With normal tails 28 % of comparisons of 50 works with the published variances had a false "worse", with these 1 %."""
SESSION_SD = 0.01
SESSION_PAUSE = timedelta(hours=6)
"""Time between the starts of two runs on one machine from which on they are of different sessions."""
SMALLEST_SD = 5e-4
"""Relative spread below which repeats count as equal: what is left is rounding."""
SENSOR_ACCURACY = 0.05
"""Systematic relative error of a power sensor whose record does not say it."""
Z95 = 1.959964

_ENERGIES = ("energy", "device_energy", "node_energy", "run_energy", "run_node_energy", "items_per_watt_hour", "mean_power")
_TIMES = ("step_time_mean", "epoch_time_mean", "window_time", "run_time", "runtime")
_RATES = ("throughput", *_TIMES, "achieved_flops", "mfu", "input_bandwidth", *_ENERGIES)


def is_known_kind(metric: str) -> bool:
    """True for rates, their times and energies: the kinds of number that the published repeats speak of."""
    return metric.startswith(_RATES)


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
    time: datetime | None = None
    """When the run started; a run of unknown time is a session of its own."""


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
        accuracy, sensors = _sensors(record, one.scope) if metric.startswith(_ENERGIES) else (0.0, None)
        host = str(record.system.get("hostname") or record.system.get("host") or "")
        found.append(Value(one.value, error, -math.log1p(-share), accuracy, sensors, host, _started(record)))
    return found


def _sensors(record: Record, scope: str | None) -> tuple[float, str | None]:
    """Accuracy and identity of the sensors that a record's energy was read from."""
    boundary = record.energy.boundaries.get(scope or "") if record.energy is not None else None
    if boundary is None:
        return SENSOR_ACCURACY, None
    host = record.system.get("hostname") or record.system.get("host")
    accuracy = SENSOR_ACCURACY if boundary.accuracy is None else boundary.accuracy
    return accuracy, f"{host}: {', '.join(sorted(boundary.channels))}" if host else None


def _started(record: Record) -> datetime | None:
    if "published" in record.environment:
        return None
    try:
        return datetime.fromisoformat(record.started_at).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Observations:
    """The independent observations of one group of repeats: logarithms of runs, or of means of sessions."""

    logs: tuple[float, ...]
    within: float
    """Variance of the mean by the records' own intervals; the least that it can be."""
    known: bool
    """Whether every run has an interval of its own."""
    sessions: float
    """Variance of the mean that is assumed for the state of its only session; 0 where several show it, or where it cancels."""
    nights: tuple[int, ...]
    """Of each observation, the session of the whole comparison in which it was made."""

    @cached_property
    def mean(self) -> float:
        return fmean(self.logs)

    @property
    def dof(self) -> int:
        return len(self.logs) - 1

    @cached_property
    def square(self) -> float:
        """Variance of one observation, at least what rounding makes."""
        return max(variance(self.logs), SMALLEST_SD**2) if self.dof else 0.0


def sessions_of(found: Iterable[Value]) -> dict[int, int]:
    """A number of the session of every value, by its ``id``."""
    ordered = sorted(found, key=lambda one: (one.time is None, one.host, one.time.timestamp() if one.time else 0.0))
    numbers: dict[int, int] = {}
    last: Value | None = None
    number = 0
    for one in ordered:
        follows = last is not None and last.host == one.host and last.time is not None and one.time is not None
        number += not (follows and one.time - last.time < SESSION_PAUSE)  # type: ignore[operator, union-attr]
        numbers[id(one)], last = number, one
    return numbers


def observations(groups: Sequence[Sequence[Value]], known: bool, nights: Mapping[int, int]) -> list[Observations | None]:
    """The observations of groups that are set against each other; ``None`` for an empty one.

    ``known``: of a kind that the state of a machine changes. Memory and losses are not.
    """
    number = sessions_of(one for group in groups for one in group)
    by_session: list[dict[int, list[Value]]] = []
    for group in groups:
        sessions: dict[int, list[Value]] = {}
        for one in group:
            sessions.setdefault(number[id(one)], []).append(one)
        by_session.append(sessions)
    everywhere = {session for sessions in by_session for session in sessions}
    several = any(len(sessions) > 1 for sessions in by_session)
    hosts = {one.host for group in groups for one in group}
    assumed = (SESSION_SD if len(hosts) == 1 else SINGLE_RUN_SD) ** 2 if known and not several and len(everywhere) > 1 else 0.0
    cells: list[Observations | None] = []
    for group, sessions in zip(groups, by_session, strict=True):
        if not group:
            cells.append(None)
            continue
        errors = [one.error for one in group if one.error is not None]
        within = fmean(error**2 for error in errors) / len(group) if errors else 0.0
        if several:
            logs = tuple(fmean(math.log(one.value) for one in session) for session in sessions.values())
            first = [session[0] for session in sessions.values()]
        else:
            logs, first = tuple(math.log(one.value) for one in group), list(group)
        cells.append(Observations(logs, within, len(errors) == len(group), assumed, tuple(nights[id(one)] for one in first)))
    return cells


def most_dof(cells: Iterable[Observations | None]) -> float:
    """Degrees of freedom that all works together have at most: what a session does to all works alike is seen once, not once for each.

    An analysis of variance tells the share of it; degrees of freedom by Satterthwaite (1946). Infinite where it cannot tell.
    """
    repeated = [cell for cell in cells if cell is not None and cell.dof]
    parts: list[set[int]] = []  # sessions that works link with each other have a common mean
    for cell in repeated:
        linked = [part for part in parts if part & set(cell.nights)]
        parts = [part for part in parts if part not in linked] + [set(cell.nights).union(*linked)]
    by_night: dict[int, list[float]] = {}
    for cell in repeated:
        for night, log in zip(cell.nights, cell.logs, strict=True):
            by_night.setdefault(night, []).append(log - cell.mean)
    between = len(by_night) - len(parts)
    within = sum(cell.dof for cell in repeated) - between
    if between <= 0 or within <= 0:
        return math.inf
    shared = sum(len(night) * fmean(night) ** 2 for night in by_night.values())
    rest = sum(log**2 for night in by_night.values() for log in night) - shared
    own = rest / within
    each = max(shared / between - own, 0.0) * len(by_night) / sum(map(len, by_night.values()))
    share = each / (each + own) if each else 0.0
    return 1 / (share**2 / between + (1 - share) ** 2 / (between + within))
