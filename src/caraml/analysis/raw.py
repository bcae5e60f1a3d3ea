"""The raw files beside a record, read into plain series.

``steps`` has one row per rank and step, ``power`` one row per reading; both are Parquet, or CSV where the worker had no DuckDB.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.errors import InputError
from caraml.results.store import Store

if TYPE_CHECKING:
    import duckdb

    from caraml.results.record import Record

SLOPE_SECONDS = 0.15
"""Shortest time over which the slope of a counter is taken."""


@dataclass(frozen=True)
class Steps:
    """One value per step, in the order of the steps."""

    step: list[int]
    phase: list[str]
    seconds: list[float | None]
    """The slowest rank's time [s]."""
    loss: list[float | None]
    """Mean over the ranks that reported a finite loss."""

    def measured(self) -> list[float]:
        """Step times inside the window [s]."""
        return [time for phase, time in zip(self.phase, self.seconds, strict=True) if phase == "measure" and time is not None]


@dataclass(frozen=True)
class RankSteps:
    """The steps of the window, rank by rank: ``seconds[rank][step]`` and ``waits[rank][step]``, the wait for input within [s]."""

    seconds: list[list[float]]
    waits: list[list[float]]


@dataclass(frozen=True)
class Trace:
    """Power of one channel over time on the record's clock."""

    channel: str
    seconds: list[float]
    watts: list[float]
    counter: bool
    """True where the power is the slope between two values of an energy counter."""


def raw_file(store: Store, record: Record, name: str) -> Path | None:
    """The raw file ``name`` of a record, or ``None`` if there is none. A record cannot point outside its own folder."""
    file = record.files.get(name)
    if not file or Path(file).name != file or Path(file).suffix not in {".parquet", ".csv"}:
        return None
    path = store.folder(record) / file
    return path if path.is_file() and not path.is_symlink() else None


def relation(connection: duckdb.DuckDBPyConnection, path: Path) -> duckdb.DuckDBPyRelation:
    """The table in a raw file. Raises ``InputError`` for a file that is not one."""
    import duckdb

    try:
        if path.suffix == ".parquet":
            return connection.read_parquet(str(path))
        return connection.read_csv(str(path), header=True, sample_size=-1)
    except duckdb.Error as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read_steps(path: Path) -> Steps:
    """The steps of one record; over ranks the longest time and the mean loss. Raises ``InputError`` for a broken file."""
    rows = _select(
        path,
        "step, any_value(phase), max(seconds) FILTER (isfinite(seconds::DOUBLE)), avg(loss::DOUBLE) FILTER (isfinite(loss::DOUBLE))",
        "GROUP BY step ORDER BY step",
    )
    step, phase, seconds, loss = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    return Steps(step, phase, seconds, loss)


def read_ranks(path: Path) -> RankSteps:
    """Every rank's steps of the window; steps that not all ranks have are left out. Raises ``InputError`` for a broken file."""
    columns = "rank, step, seconds::DOUBLE, data_wait::DOUBLE"
    rows = _select(path, columns, "WHERE phase = 'measure' AND isfinite(seconds::DOUBLE) ORDER BY rank, step")
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for rank, step, seconds, wait in rows:
        found.setdefault(rank, {})[step] = (seconds, wait or 0.0)
    whole = sorted(set.intersection(*map(set, found.values()))) if found else []
    series = [[steps[step] for step in whole] for steps in found.values()]
    return RankSteps([[seconds for seconds, _ in rank] for rank in series], [[wait for _, wait in rank] for rank in series])


def read_power(path: Path) -> list[Trace]:
    """Power over time of every channel, in watts. Raises ``InputError`` for a broken file."""
    columns = "channel, kind, (t_before + t_after) / 2 AS t, value::DOUBLE"
    rows = _select(path, columns, "WHERE isfinite(value::DOUBLE) ORDER BY channel, t")
    channels: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for channel, kind, time, value in rows:
        channels.setdefault((str(channel), str(kind)), []).append((time, value))
    return [_trace(channel, kind, readings) for (channel, kind), readings in channels.items()]


def _select(path: Path, columns: str, clauses: str) -> list[tuple[Any, ...]]:
    import duckdb

    with duckdb.connect() as connection:
        table = relation(connection, path)
        try:
            return connection.execute(f"SELECT {columns} FROM ({table.sql_query()}) {clauses}").fetchall()
        except duckdb.Error as error:
            raise InputError(f"{path} is not a table of the expected columns: {error}") from error


def _trace(channel: str, kind: str, readings: list[tuple[float, float]]) -> Trace:
    """A counter (``energy``) becomes its slope between changes; a power channel stays as it is."""
    if kind != "energy":
        return Trace(channel, [time for time, _ in readings], [value for _, value in readings], counter=False)
    # A slope over one update would show the sensor's time jitter, not the power.
    times: list[float] = []
    watts: list[float] = []
    last_time, last = readings[0]
    for time, value in readings[1:]:
        if value < last:  # wrapped or restarted
            last_time, last = time, value
        elif value > last and time - last_time >= SLOPE_SECONDS:
            times.append((time + last_time) / 2)
            watts.append((value - last) / (time - last_time))
            last_time, last = time, value
    return Trace(channel, times, watts, counter=True)
