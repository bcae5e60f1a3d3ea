"""Long series, and names, made short enough to draw without losing their extremes; and the power of many points over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caraml.analysis.table import power_readings, raw_files, slopes
from caraml.base.chart import Axis, Line, Points, curves
from caraml.base.errors import InputError
from caraml.base.format import count, printable
from caraml.base.limits import CHANNEL_NAME, database, reading, table
from caraml.report.grouping import MOST_SERIES, keys
from caraml.report.section import ReportFigure, plain
from caraml.results.record import Record
from caraml.results.store import Store

if TYPE_CHECKING:
    import duckdb
    import numpy.typing as npt

    Values = Sequence[float] | npt.NDArray[Any]

LIMIT = 600
"""Most points of a drawn series: two for each pixel of a chart."""
QUANTILES = 200
"""Most points of a drawn distribution."""
SAMPLES = 12
"""Points of a series in the table beside its drawing."""


def downsampled(xs: Values, ys: Values, limit: int = LIMIT) -> Points:
    """At most ``limit`` points of a series: the lowest and the highest of each of ``limit / 2`` equal bins, in their order."""
    kept, begin = [], 0
    for part in np.array_split(np.asarray(ys), limit // 2) if len(ys) > limit else ():
        kept += sorted({begin + int(part.argmin()), begin + int(part.argmax())})
        begin += len(part)
    return [(float(xs[index]), float(ys[index])) for index in kept or range(len(ys))]


def sampled(xs: Values, ys: Values) -> Points:
    """About ``SAMPLES`` evenly spaced points, for a table beside the drawing."""
    chosen = np.unique(np.linspace(0, len(xs) - 1, min(SAMPLES, len(xs))).round().astype(int)).tolist()
    return [(float(xs[index]), float(ys[index])) for index in chosen]


def points_per_line(lines: int) -> int:
    """Most points of each of several drawn lines, so that many lines make no larger a drawing than a few."""
    return max(LIMIT // 5, min(LIMIT, 4 * LIMIT // max(lines, 1)))


def downsampling_note(lines: Sequence[Line], most: int) -> str:
    """What was drawn of the longest line, where not all of it was."""
    if (longest := max(line.total for line in lines)) <= most:
        return ""
    return f" Drawn from the lowest and highest value of {most // 2} bins; the longest series has {count(longest, 'value')}."


def distribution(values: Sequence[float]) -> Points:
    """The empirical distribution: (value, share of values at or below it), at most ``QUANTILES`` + 1 points, both ends kept."""
    ordered = sorted(values)
    n = len(ordered)
    ranks = sorted({0, *(round(index * (n - 1) / QUANTILES) for index in range(QUANTILES + 1))}) if n > QUANTILES else range(n)
    return [(ordered[rank], (rank + 1) / n) for rank in ranks]


def clipped(texts: Sequence[str], limit: int) -> list[str]:
    """Each text in ``limit`` characters: one that is longer loses the words that all of them have, then its end, or its middle where
    texts would become alike."""
    words = [text.split() for text in texts]
    shared = set(words[0]).intersection(*words[1:]) if len(words) > 1 else set()
    telling = [[word for word in own if word not in shared] for own in words]
    tell = len({tuple(own) for own in telling}) == len(set(texts))  # words in another order tell, too
    found = [_clipped(text, own if shared and tell else [], limit) for text, own in zip(texts, telling, strict=True)]
    if len({*found}) == len({*texts}):
        return found
    return [text if len(text) <= limit else f"{text[: limit // 2]}…{text[limit // 2 + 1 - limit :]}" for text in texts]


def _clipped(text: str, telling: Sequence[str], limit: int) -> str:
    if len(text) <= limit:
        return text
    brief = " ".join(["…", *telling]) if telling else text
    return brief if len(brief) <= limit else f"{brief[: limit - 1]}…"


_LONGEST_NAME = 100
"""Characters of a channel's name as it is drawn."""
MOST_BINS, FEWEST_BINS = 1500, 60
"""Spans of one channel: few where a page has many channels, so that it stays small."""
BUDGET = 60_000
"""Spans of all channels of a page."""
LEVELS = 500
"""A value is kept as a whole number of 500ths of its channel's highest: finer than a pixel."""

Bins = list[tuple[int, float, float, float, float]]
"""Of one channel: number of the span, lowest and highest value, time of the last reading, last value."""


@dataclass(frozen=True)
class PowerSpans:
    """Power of one channel: lowest and highest value [W] of each span of time; of a counter, the slope from one span to the next."""

    name: str
    kind: str
    spans: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]

    def packed(self) -> dict[str, Any]:
        """As the page's script reads it: name, kind, watts of a level, spans (the first, if none is missing), levels."""
        level = (max(map(abs, [*self.low, *self.high])) or 1.0) / LEVELS
        lows, highs = ([round(value / level) for value in values] for values in (self.low, self.high))
        whole = list(self.spans) == list(range(self.spans[0], self.spans[0] + len(self.spans)))
        return {
            "n": self.name,
            "k": self.kind,
            "q": float(f"{level:.4g}"),
            "b": self.spans[0] if whole else list(self.spans),
            "l": lows,
            "h": [high - low for low, high in zip(lows, highs, strict=True)],
        }


@dataclass(frozen=True)
class PowerTrace:
    """Power of one point's channels over equal spans of time on the worker's clock [s]."""

    start: float
    length: float
    channels: list[PowerSpans]
    nodes: int = 1
    """How many nodes' readings were kept."""
    whole: bool = True
    """Whether these are all channels of all of them."""

    def packed(self) -> dict[str, Any]:
        """As the page's script reads it: ``{"t": [start, length of a span], "c": channels}``."""
        return {"t": [round(self.start, 4), round(self.length, 6)], "c": [channel.packed() for channel in self.channels]}


def read_traces(store: Store, records: Sequence[Record]) -> tuple[dict[str, PowerTrace], list[str]]:
    """The power of each record that has any, by key, and the files that could not be read."""
    files = {record.key: parts for record in records if (parts := raw_files(store, record, "power"))}
    found, faults = {}, []
    with database() as connection:
        bins = max(FEWEST_BINS, min(MOST_BINS, BUDGET // max(1, _channels(connection, list(files.values())))))
        for key, parts in files.items():
            trace, broken = _trace(connection, parts, bins)
            faults += [f"cannot be drawn: {first_line(store, error)}" for error in broken.values()]
            if trace is not None:
                found[key] = trace
    return found, faults


def first_line(store: Store, error: Exception) -> str:
    """An error in one line, without the folder of the results: a page may be shown to others."""
    return printable(str(error).splitlines()[0].replace(f"{store.root}/", ""))


def _channels(connection: duckdb.DuckDBPyConnection, files: Sequence[Sequence[tuple[str, Path]]]) -> int:
    """About how many channels are drawn: those of the first file that can be read, for every file of every point."""
    for _, path in (part for parts in files for part in parts):
        try:
            with reading(connection, path):
                names = f"left(channel::VARCHAR, {CHANNEL_NAME}), left(kind::VARCHAR, 100)"
                drawn = f"{table(connection, path)} WHERE kind IS DISTINCT FROM 'apparent_va'"
                listed = f"SELECT count(DISTINCT ({names})) FROM {drawn}"  # noqa: S608 -- names of ours; the path is a parameter
                row = connection.execute(listed, [str(path)]).fetchone()
        except InputError:
            continue  # the same file is named as a fault when its own trace is read
        return sum(min(len(parts) * (row[0] if row else 1), MOST_SERIES) for parts in files)
    return 1


def _trace(
    connection: duckdb.DuckDBPyConnection, parts: Sequence[tuple[str, Path]], bins: int
) -> tuple[PowerTrace | None, dict[Path, InputError]]:
    """The power of a point's nodes over the same spans, of each node as many channels, and the files that could not be read."""
    most, whole, found = max(1, MOST_SERIES // len(parts)), len(parts) <= MOST_SERIES, []
    span, broken = _span(connection, parts) if len(parts) > 1 else ((None, None), {})
    start = length = 0.0
    for node, path in parts[:MOST_SERIES]:
        try:
            with reading(connection, path):
                values = [str(path), *span, span[0]]
                rows = connection.execute(_query(table(connection, path), bins, most), values).fetchall()
        except InputError as error:
            broken[path] = error
            continue
        channels: dict[tuple[str, str], Bins] = {}
        for channel, kind, *numbers, _, _ in rows:
            channels.setdefault((str(channel), str(kind)), []).append(tuple(numbers))
        start, length = rows[0][-2:] if rows else (start, length)
        whole &= len(channels) <= most
        found += [drawn for name, spans in list(channels.items())[:most] if (drawn := _spans(printable(node), *name, spans)) is not None]
    return (PowerTrace(start, length, found, len(parts), whole and not broken) if length else None), broken


def _span(
    connection: duckdb.DuckDBPyConnection, parts: Sequence[tuple[str, Path]]
) -> tuple[tuple[float | None, float | None], dict[Path, InputError]]:
    """From when to when the readings of several files go [s], and the files that cannot be read."""
    ends: list[float] = []
    broken = {}
    for _, path in parts:
        try:
            with reading(connection, path):
                asked = f"SELECT min(t), max(t) FROM ({power_readings(table(connection, path))})"  # noqa: S608 -- as below
                row = connection.execute(asked, [str(path)]).fetchone()
            ends += [end for end in row or () if end is not None]
        except InputError as error:
            broken[path] = error
    return (min(ends, default=None), max(ends, default=None)), broken


def _spans(node: str, channel: str, kind: str, spans: Bins) -> PowerSpans | None:
    """One channel as it is drawn; ``None`` for a counter that does not count."""
    values = [(span, low, high) for span, low, high, _, _ in spans]
    if kind == "energy":
        values = [(spans[index][0], watts, watts) for index, _, watts in slopes([one[3] for one in spans], [one[4] for one in spans])]
    name = printable(channel)
    if len(name) > _LONGEST_NAME:  # of a long path, what tells meters apart is rather at its end
        name = f"…{name[1 - _LONGEST_NAME :]}"
    name = f"{node[:_LONGEST_NAME]}{name}"
    return PowerSpans(name, "slope of the counter" if kind == "energy" else "power", *zip(*values, strict=True)) if values else None


def _query(source: str, bins: int, most: int) -> str:
    """SQL for the spans of the first ``most`` channels of a table, and of one more; begin, end and begin of all spans are parameters, or
    null for the table's own."""
    return f"""
        WITH readings AS ({power_readings(source)}),
             span AS (SELECT coalesce(?::DOUBLE, min(t)) AS start,
                             greatest(coalesce(?::DOUBLE, max(t)) - coalesce(?::DOUBLE, min(t)), 1e-9) / {bins} AS length FROM readings)
        SELECT channel, kind, least(floor((t - start) / length), {bins - 1})::INT AS bin,
               min(value), max(value), max(t), arg_max(value, t), any_value(start), any_value(length)
        FROM readings, span GROUP BY channel, kind, bin ORDER BY channel, kind, bin LIMIT {(most + 1) * bins}
    """  # noqa: S608 -- names and numbers of ours; the path is a parameter


def power_figure(record: Record, label: str, trace: PowerTrace) -> ReportFigure | None:
    """Power over time of one point's channels, with the window shaded."""
    lines, rows, most = [], [], points_per_line(len(trace.channels))
    for channel in trace.channels:
        name = f"{channel.name} ({channel.kind})"
        times = [trace.start + (span + 0.5) * trace.length for span in channel.spans]
        # Both ends of each span, one after the other: downsampling keeps the lowest and the highest of several.
        both = [(time, end) for time, *ends in zip(times, channel.low, channel.high, strict=True) for end in dict.fromkeys(ends)]
        xs, ys = zip(*both, strict=True)
        summary = f"{name}: {plain('', min(ys), 'W')} to {plain('', max(ys), 'W')}"
        lines.append(Line(name, downsampled(xs, ys, most), summary, len(ys), keys([record])))
        for (time, low), (_, high) in zip(sampled(times, channel.low), sampled(times, channel.high), strict=True):
            rows.append([name, f"{time:,.2f} s", plain("", low, "W"), plain("", high, "W")])
    if not lines:
        return None
    title = f"Power: {label}"
    shade = (record.window.start, record.window.end) if record.window else None
    drawing = curves(lines, Axis("seconds since the start of the worker"), Axis("power [W]", zero=True), title, shade=shade)
    note = "The shaded span is the window of rate and energy." if shade else ""
    note += f" Of {trace.nodes} of {len(record.nodes)} nodes: no others' readings were kept." if trace.nodes < len(record.nodes) else ""
    note += "" if trace.whole else " Not all channels are drawn; `result.power` has all that can be read."
    columns = ["channel", "time", "lowest", "highest"]
    return ReportFigure(title, [drawing], [line.name for line in lines], "line", columns, rows, note + downsampling_note(lines, most))
