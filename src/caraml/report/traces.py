"""Power over time of many points at once, as the lowest and highest value of equal spans of time, for a page that can zoom into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.analysis.raw import SLOPE_SECONDS, raw_file
from caraml.base.database import database, reading, table
from caraml.base.text import printable
from caraml.errors import InputError
from caraml.report.groups import MOST_SERIES
from caraml.results.record import Record
from caraml.results.store import Store

if TYPE_CHECKING:
    import duckdb

MOST_BINS, FEWEST_BINS = 1500, 60
"""Spans of one channel: few where a page has many channels, so that it stays small."""
BUDGET = 60_000
"""Spans of all channels of a page."""
LEVELS = 500
"""A value is kept as a whole number of 500ths of its channel's highest: finer than a pixel."""

Bins = list[tuple[int, float, float, float, float]]
"""Of one channel: number of the span, lowest and highest value, time of the last reading, last value."""


def read_traces(store: Store, records: Sequence[Record]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """What the page draws of each record that has power, by key, and the files that could not be read.

    ``{"t": [start, length of a span], "c": [{"n": channel, "k": kind, "q": watts of a level, "b": spans, "l": lowest, "h": highest}]}``.
    """
    paths = {record.key: path for record in records if (path := raw_file(store, record, "power")) is not None}
    found, faults = {}, []
    with database() as connection:
        bins = max(FEWEST_BINS, min(MOST_BINS, BUDGET // max(1, _channels(connection, paths))))
        for key, path in paths.items():
            try:
                trace = _trace(connection, path, bins)
            except InputError as error:
                faults.append(f"cannot be drawn: {_first_line(error).replace(f'{store.root}/', '')}")
                continue
            if trace is not None:
                found[key] = trace
    return found, faults


def _first_line(error: Exception) -> str:
    return printable(str(error).splitlines()[0])[:200]


def _channels(connection: duckdb.DuckDBPyConnection, paths: dict[str, Path]) -> int:
    """About how many channels there are: those of the first file that can be read, for every file."""
    for path in paths.values():
        try:
            with reading(connection, path):
                row = connection.execute(
                    f"SELECT count(DISTINCT (left(channel::VARCHAR, 100), left(kind::VARCHAR, 100))) FROM {table(connection, path)}",  # noqa: S608 -- names and numbers of ours; the path is a parameter
                    [str(path)],
                ).fetchone()
        except InputError:
            continue  # the same file is named as a fault when its own trace is read
        return len(paths) * min(row[0] if row else 1, MOST_SERIES)
    return 1


def _trace(connection: duckdb.DuckDBPyConnection, path: Path, bins: int) -> dict[str, Any] | None:
    with reading(connection, path):
        rows = connection.execute(_query(table(connection, path), bins), [str(path)]).fetchall()
    if not rows:
        return None
    channels: dict[tuple[str, str], Bins] = {}
    for channel, kind, *values, _, _ in rows:
        channels.setdefault((str(channel), str(kind)), []).append(tuple(values))
    drawn = (_channel(name, kind, spans) for (name, kind), spans in list(channels.items())[:MOST_SERIES])
    start, length = rows[0][-2:]
    return {"t": [round(start, 4), round(length, 6)], "c": [channel for channel in drawn if channel is not None]}


def _query(source: str, bins: int) -> str:
    """SQL for the spans of the first channels of a table."""
    return f"""
        WITH readings AS (SELECT left(channel::VARCHAR, 100) AS channel, left(kind::VARCHAR, 100) AS kind,
                                 (t_before + t_after) / 2 AS t, value::DOUBLE AS value FROM {source}
                          WHERE isfinite(value::DOUBLE) AND isfinite(t_before + t_after)),
             span AS (SELECT min(t) AS start, greatest(max(t) - min(t), 1e-9) / {bins} AS length FROM readings)
        SELECT channel, kind, least(floor((t - start) / length), {bins - 1})::INT AS bin,
               min(value), max(value), max(t), arg_max(value, t), any_value(start), any_value(length)
        FROM readings, span GROUP BY channel, kind, bin ORDER BY channel, kind, bin LIMIT {(MOST_SERIES + 1) * bins}
    """  # noqa: S608 -- names and numbers of ours; the path is a parameter


def _channel(name: str, kind: str, spans: Bins) -> dict[str, Any] | None:
    """A channel's spans; those of an energy counter as the slope from one span to the next."""
    values = _slopes(spans) if kind == "energy" else [(span, low, high) for span, low, high, _, _ in spans]
    if not values:
        return None
    level = (max(abs(end) for _, *ends in values for end in ends) or 1.0) / LEVELS
    steps = [span for span, _, _ in values]
    whole = steps == list(range(steps[0], steps[0] + len(steps)))
    lows, highs = ([round(value[end] / level) for value in values] for end in (1, 2))
    return {
        "n": printable(name),
        "k": "slope of the counter" if kind == "energy" else "power",
        "q": float(f"{level:.4g}"),
        "b": steps[0] if whole else steps,
        "l": lows,
        "h": [high - low for low, high in zip(lows, highs, strict=True)],
    }


def _slopes(spans: Bins) -> list[tuple[int, float, float]]:
    """Power between the last values of spans, over times long enough to show the power and not the sensor's time jitter."""
    found = []
    _, _, _, last_time, last = spans[0]
    for span, _, _, time, value in spans[1:]:
        if value < last:  # wrapped or restarted
            last_time, last = time, value
        elif value > last and time - last_time >= SLOPE_SECONDS:
            watts = (value - last) / (time - last_time)
            found.append((span, watts, watts))
            last_time, last = time, value
    return found
