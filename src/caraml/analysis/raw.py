"""The raw files beside a record, read into plain series.

``steps`` has one row per rank and step, ``power`` one row per reading; both are Parquet, or CSV where the worker had no DuckDB.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caraml.base.database import database, reading, table
from caraml.base.limits import CHANNELS, FLAGS, RANK_ROWS, ROWS, ROWS_SCANNED, STEPS, too_large
from caraml.results.store import Store

if TYPE_CHECKING:
    import numpy.typing as npt

    from caraml.results.record import Record

SLOPE_SECONDS = 0.15
"""Shortest time over which the slope of a counter is taken."""
_AT_ONCE = 10_000
_STEPS_AT_ONCE = 250_000
_COLUMNS = "is not a table of the expected columns"


@dataclass(frozen=True)
class Steps:
    """One value per step, in the order of the steps."""

    step: array[int]
    phase: list[str]
    seconds: array[float]
    """The slowest rank's time [s]; NaN where none is known."""
    loss: array[float]
    """Mean over the ranks that reported a finite loss; NaN where none did."""

    def measured(self) -> list[float]:
        """Step times inside the window [s]."""
        return [time for phase, time in zip(self.phase, self.seconds, strict=True) if phase == "measure" and not isnan(time)]


@dataclass(frozen=True)
class RankSteps:
    """The steps of the window, rank by rank: ``seconds[rank][step]`` and ``waits[rank][step]``, the wait for input within [s]."""

    seconds: list[list[float]]
    waits: list[list[float]]


@dataclass(frozen=True)
class Trace:
    """Power of one channel over time on the record's clock."""

    channel: str
    seconds: Sequence[float]
    watts: Sequence[float]
    counter: bool
    """True where the power is the slope between two values of an energy counter."""


def raw_file(store: Store, record: Record, name: str) -> Path | None:
    """The raw file ``name`` of a record, or ``None`` if there is none. A record cannot point outside its own folder."""
    file = record.files.get(name)
    if not file or Path(file).name != file or Path(file).suffix not in ({".gz"} if name in ("trace", "memory") else {".parquet", ".csv"}):
        return None
    path = store.folder(record) / file
    return path if path.is_file() and not path.is_symlink() else None


def raw_files(store: Store, record: Record, name: str) -> list[tuple[str, Path]]:
    """The raw files of a kind, each with what stands before the names in it: of several nodes ``NODE/``, as in the record's energies."""
    parts = record.nodes if name == "power" else []
    files = {f"{node.name}/": f"{name}-{index}" if index else name for index, node in enumerate(parts)} or {"": name}
    return [(node, path) for node, file in files.items() if (path := raw_file(store, record, file)) is not None]


def read_steps(path: Path) -> Steps:
    """The steps of one record; over ranks the longest time and the mean loss. Raises ``InputError`` for a broken file."""
    columns = """step::BIGINT AS step, list_position(?::VARCHAR[], any_value(left(phase::VARCHAR, 100))) AS phase,
        coalesce(max(seconds::DOUBLE) FILTER (isfinite(seconds::DOUBLE)), 'nan'::DOUBLE) AS seconds,
        coalesce(avg(loss::DOUBLE) FILTER (isfinite(loss::DOUBLE)), 'nan'::DOUBLE) AS loss"""
    found = Steps(array("q"), [], array("d"), array("d"))
    with database() as connection, reading(connection, path, _COLUMNS):
        source = table(connection, path, ROWS_SCANNED)
        named = f"SELECT DISTINCT left(phase::VARCHAR, 100) FROM {source} WHERE phase IS NOT NULL LIMIT {FLAGS}"  # noqa: S608 -- names of ours; the path is a parameter
        phases = [phase for (phase,) in connection.execute(named, [str(path)]).fetchall()]
        ends = connection.execute(f"SELECT min(step::BIGINT), max(step::BIGINT) FROM {source}", [str(path)]).fetchone()  # noqa: S608 -- as above
        first, last = ends if ends and ends[0] is not None else (0, -1)
        if last - first >= STEPS:
            raise too_large(path, last - first + 1, STEPS, "steps")
        for begin in range(first, last + 1, _STEPS_AT_ONCE):
            query = f"SELECT {columns} FROM {source} WHERE step BETWEEN ? AND ? GROUP BY ALL ORDER BY step"  # noqa: S608 -- as above
            part = connection.execute(query, [phases, str(path), begin, begin + _STEPS_AT_ONCE - 1]).fetchnumpy()
            for name, numbers in (("step", found.step), ("seconds", found.seconds), ("loss", found.loss)):
                numbers.frombytes(np.ascontiguousarray(np.ma.getdata(part[name])).data.cast("B"))
            codes = np.ma.filled(part["phase"], 0).astype(int).tolist()
            found.phase.extend(map(["", *phases].__getitem__, codes))
    return found


def read_ranks(path: Path) -> RankSteps:
    """Every rank's steps of the window; steps that not all ranks have are left out. Raises ``InputError`` for a broken file."""
    query = """SELECT rank, seconds::DOUBLE, coalesce(data_wait::DOUBLE, 0) FROM (
        SELECT *, count(*) OVER (PARTITION BY step) AS together FROM {} WHERE phase = 'measure' AND isfinite(seconds::DOUBLE)
    ) WHERE together = (SELECT count(DISTINCT rank) FROM {}) ORDER BY rank, step"""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for rank, seconds, wait in _rows(path, RANK_ROWS, RANK_ROWS, query):
        times, waits = found.setdefault(rank, ([], []))
        times.append(seconds)
        waits.append(wait)
    return RankSteps([times for times, _ in found.values()], [waits for _, waits in found.values()])


def read_power(path: Path) -> list[Trace]:
    """Power over time of every channel, in watts; apparent power, in VA, is left out. Raises ``InputError`` for a broken file."""
    readings = """SELECT left(channel::VARCHAR, 100) AS channel, left(kind::VARCHAR, 100) AS kind, (t_before + t_after) / 2 AS t,
        value::DOUBLE AS value FROM {}
        WHERE isfinite(value::DOUBLE) AND isfinite(t_before + t_after) AND kind IS DISTINCT FROM 'apparent_va'"""
    traces = []
    with database() as connection, reading(connection, path, _COLUMNS):
        source, name = readings.format(table(connection, path, ROWS_SCANNED)), [str(path)]
        listed = f"SELECT channel, kind, count(*) FROM ({source}) GROUP BY ALL ORDER BY ALL LIMIT {CHANNELS + 1}"  # noqa: S608 -- names of ours; the path is a parameter
        found = connection.execute(listed, name).fetchall()
        if len(found) > CHANNELS:
            raise too_large(path, len(found), CHANNELS, "channels")
        if (total := sum(count for _, _, count in found)) > ROWS:
            raise too_large(path, total, ROWS, "readings")
        for channel, kind, _ in found:
            one = f"SELECT t, value FROM ({source}) WHERE channel IS NOT DISTINCT FROM ? AND kind IS NOT DISTINCT FROM ?"  # noqa: S608 -- as above
            columns = connection.execute(one, [*name, channel, kind]).fetchnumpy()
            times, values = (np.ma.getdata(columns.pop(column)).astype(np.float64, copy=False) for column in ("t", "value"))
            if np.any(times[1:] < times[:-1]):  # a file of ours is in order
                order = np.argsort(times, kind="stable")
                times, values = times[order], values[order]
            traces.append(_trace(channel, kind, _plain(times), _plain(values)))
    return traces


def _rows(path: Path, scanned: int, most: int, query: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a query over one raw file of at most ``scanned`` rows, which stands where ``{}`` does; at most ``most`` of them."""
    with database() as connection, reading(connection, path, _COLUMNS):
        source = table(connection, path, scanned)
        answer = connection.execute(f"{query.format(*[source] * query.count('{}'))} LIMIT {most + 1}", [str(path)] * query.count("{}"))
        taken = 0
        while rows := answer.fetchmany(_AT_ONCE):
            taken += len(rows)
            if taken > most:
                raise too_large(path, taken, most, "steps")
            yield from rows


def _plain(column: npt.NDArray[np.float64]) -> array[float]:
    """Numbers of 8 bytes each; a list of them takes four times as much."""
    found = array("d")
    found.frombytes(np.ascontiguousarray(column).data.cast("B"))
    return found


def _trace(channel: str, kind: str, seconds: array[float], values: array[float]) -> Trace:
    """A counter (``energy``) becomes its slope between changes; a power channel stays as it is."""
    if kind != "energy":
        return Trace(channel, seconds, values, counter=False)
    # A slope over one update would show the sensor's time jitter, not the power.
    times, watts = array("d"), array("d")
    last_time, last = seconds[0], values[0]
    for time, value in zip(seconds, values, strict=True):
        if value < last:  # wrapped or restarted
            last_time, last = time, value
        elif value > last and time - last_time >= SLOPE_SECONDS:
            times.append((time + last_time) / 2)
            watts.append((value - last) / (time - last_time))
            last_time, last = time, value
    return Trace(channel, times, watts, counter=True)
