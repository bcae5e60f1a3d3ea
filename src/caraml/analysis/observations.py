"""What counts as one independent observation of a number: a run, a session of runs on one machine, or a machine; and what the same sessions
did to several works."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from itertools import combinations
from statistics import fmean, variance

from caraml.analysis.estimate import SINGLE_RUN_SD, UNKNOWN, Value
from caraml.base.stats import SMALLEST_SD

SESSION_SD = 0.01
SESSION_PAUSE = timedelta(hours=6)
"""Time between the starts of two runs on one machine from which on they are of different sessions."""


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
