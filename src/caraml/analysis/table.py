"""Records as flat tables: one row per record, one column per number, SQL over them, and the raw files beside them as plain series.

Column names are the names of metrics; ``NAME_low`` and ``NAME_high`` are the ends of the interval. Numbers are in the
units of :func:`units`, unscaled. The columns are the same for every set of records, so a query never depends on what was measured.

Of the raw files, ``steps`` has one row per rank and step, ``power`` one row per reading; both are Parquet, or CSV where the worker had no
DuckDB.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caraml.base.errors import InputError
from caraml.base.format import count, printable
from caraml.base.limits import CHANNEL_NAME, CHANNELS, FLAGS, RANK_ROWS, ROWS, ROWS_SCANNED, STEPS, database, reading, table, too_large
from caraml.metrics.model import steps_per_epoch, unit_of
from caraml.reference import FIELDS, paths
from caraml.results.rows import COLUMNS, NUMBERS, Scalar, fill, fill_from_parquet, row_of
from caraml.results.store import Store

if TYPE_CHECKING:
    import duckdb
    import numpy.typing as npt

    from caraml.results.record import Record

SLOPE_SECONDS, SLOW_SLOPE_SECONDS = 0.15, 1.0
"""Shortest time over which the slope of a counter is taken, and of one that is not faster than its readings, if there are four such."""
_UNCHANGED = 0.02
"""Share of the readings that find such a counter as the one before did, at least."""
_AT_ONCE = 10_000
_STEPS_AT_ONCE = 250_000
_READINGS_AT_ONCE = 2_000_000
_COLUMNS = "is not a table of the expected columns"


@dataclass(frozen=True)
class Steps:
    """One value per step, in the order of the steps."""

    step: npt.NDArray[np.int64]
    phases: Sequence[str]
    """The names of the phases; "" is of steps without one."""
    phase: npt.NDArray[np.int16]
    """Each step's place in ``phases``."""
    seconds: npt.NDArray[np.float64]
    """The slowest rank's time [s]; NaN where none is known."""
    loss: npt.NDArray[np.float64]
    """Mean over the ranks that reported a finite loss; NaN where none did."""

    def within(self, phase: str) -> npt.NDArray[np.bool_]:
        """Which steps are of this phase."""
        known: npt.NDArray[np.bool_] = self.phase == (self.phases.index(phase) if phase in self.phases else -1)
        return known

    def measured(self) -> list[float]:
        """Step times inside the window [s]."""
        times = self.seconds[self.within("measure")]
        return list(times[~np.isnan(times)].tolist())


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


def read_steps(path: Path, *, in_step: bool = True) -> Steps:
    """The steps of one record; over ranks the longest time and the mean loss, or of ranks that are not ``in_step`` those of the slowest.
    Raises ``InputError`` for a broken file."""
    columns = """step::BIGINT AS step, list_position(?::VARCHAR[], any_value(left(phase::VARCHAR, 100))) AS phase,
        coalesce(max(seconds::DOUBLE) FILTER (isfinite(seconds::DOUBLE)), 'nan'::DOUBLE) AS seconds,
        coalesce(avg(loss::DOUBLE) FILTER (isfinite(loss::DOUBLE)), 'nan'::DOUBLE) AS loss"""
    with database() as connection, reading(connection, path, _COLUMNS):
        source = table(connection, path, ROWS_SCANNED)
        named = f"SELECT DISTINCT left(phase::VARCHAR, 100) FROM {source} WHERE phase IS NOT NULL LIMIT {FLAGS}"  # noqa: S608 -- names of ours; the path is a parameter
        phases = [phase for (phase,) in connection.execute(named, [str(path)]).fetchall()]
        ends = connection.execute(f"SELECT min(step::BIGINT), max(step::BIGINT) FROM {source}", [str(path)]).fetchone()  # noqa: S608 -- as above
        first, last = ends if ends and ends[0] is not None else (0, -1)
        asked, which = list[Any](), ""
        if not in_step:
            total = "sum(seconds::DOUBLE) FILTER (phase = 'measure' AND isfinite(seconds::DOUBLE))"
            slowest = f"SELECT rank FROM {source} GROUP BY rank ORDER BY {total} DESC NULLS LAST, rank LIMIT 1"  # noqa: S608 -- as above
            asked, which = [str(path)], f"AND rank = ({slowest})"
        if (most := last - first + 1) > STEPS:
            raise too_large(path, most, STEPS, "steps")
        # Of the size that they need at most: what is never written takes no memory, and nothing is copied as they grow.
        step, phase = np.empty(most, np.int64), np.empty(most, np.int16)
        seconds, loss, known = np.empty(most), np.empty(most), 0
        for begin in range(first, last + 1, _STEPS_AT_ONCE):
            query = f"SELECT {columns} FROM {source} WHERE step BETWEEN ? AND ? {which} GROUP BY ALL ORDER BY step"  # noqa: S608 -- as above
            part = connection.execute(query, [phases, str(path), begin, begin + _STEPS_AT_ONCE - 1, *asked]).fetchnumpy()
            those = slice(known, known := known + len(part["step"]))
            for name, numbers in (("step", step), ("seconds", seconds), ("loss", loss)):
                numbers[those] = np.ma.getdata(part[name])
            phase[those] = np.ma.filled(part["phase"], 0)
    return Steps(step[:known], ["", *phases], phase[:known], seconds[:known], loss[:known])


def batches(record: Record, steps: Steps) -> list[float]:
    """Step times of the window [s] without the first and last step of each epoch (EPICURE, section 5.2), where there are epochs."""
    epoch = (steps_per_epoch(record.facts, record.point) if record.facts else None) or 0
    chosen = steps.within("measure") & (steps.seconds > 0)  # which no NaN is
    if epoch >= 3:  # or nothing would be left
        chosen &= ~np.isin(steps.step % epoch, (0, epoch - 1))
    return list(steps.seconds[chosen].tolist())


def read_ranks(path: Path) -> RankSteps:
    """Every rank's steps of the window; steps that not all ranks have are left out. Raises ``InputError`` for a broken file."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    with database() as connection, reading(connection, path, _COLUMNS):
        source = table(connection, path, RANK_ROWS)
        query = f"""SELECT rank, seconds::DOUBLE, coalesce(data_wait::DOUBLE, 0) FROM (
            SELECT *, count(*) OVER (PARTITION BY step) AS together FROM {source} WHERE phase = 'measure' AND isfinite(seconds::DOUBLE)
        ) WHERE together = (SELECT count(DISTINCT rank) FROM {source}) ORDER BY rank, step LIMIT {RANK_ROWS + 1}"""  # noqa: S608 -- a number of ours; the path is a parameter
        answer, taken = connection.execute(query, [str(path), str(path)]), 0
        while rows := answer.fetchmany(_AT_ONCE):
            taken += len(rows)
            if taken > RANK_ROWS:
                raise too_large(path, taken, RANK_ROWS, "steps")
            for rank, seconds, wait in rows:
                times, waits = found.setdefault(rank, ([], []))
                times.append(seconds)
                waits.append(wait)
    return RankSteps([times for times, _ in found.values()], [waits for _, waits in found.values()])


def power_readings(source: str, row: str = "0") -> str:
    """SQL for the readings of power and energy in a table, with the number of each ``row``."""
    return f"""SELECT {row} AS row, left(channel::VARCHAR, {CHANNEL_NAME}) AS channel, left(kind::VARCHAR, 100) AS kind,
        (t_before + t_after) / 2 AS t, value::DOUBLE AS value FROM {source}
        WHERE isfinite(value::DOUBLE) AND isfinite(t_before + t_after) AND kind IS DISTINCT FROM 'apparent_va'"""  # noqa: S608 -- names and numbers of ours; the path is a parameter


def read_power(path: Path) -> list[Trace]:
    """Power over time of every channel, in watts; apparent power, in VA, is left out. Raises ``InputError`` for a broken file."""
    traces = []
    with database() as connection, reading(connection, path, _COLUMNS):
        numbered = table(connection, path, ROWS_SCANNED, numbered=True)
        source, name = power_readings(numbered, "file_row_number" if path.suffix == ".parquet" else "0"), [str(path)]
        listed = f"SELECT channel, kind, count(*), min(row), max(row) FROM ({source}) GROUP BY ALL ORDER BY ALL LIMIT {CHANNELS + 1}"  # noqa: S608 -- names of ours; the path is a parameter
        found = connection.execute(listed, name).fetchall()
        if len(found) > CHANNELS:
            raise too_large(path, len(found), CHANNELS, "channels")
        if (total := sum(count for _, _, count, _, _ in found)) > ROWS:
            raise too_large(path, total, ROWS, "readings")
        part = f"""SELECT t, value FROM ({source})
            WHERE channel IS NOT DISTINCT FROM ? AND kind IS NOT DISTINCT FROM ? AND row BETWEEN ? AND ?"""  # noqa: S608 -- as above
        for channel, kind, _, low, high in found:
            times, values = array("d"), array("d")
            for first in range(low, high + 1, _READINGS_AT_ONCE):  # an answer lies in memory twice, beside the arrays made of it
                columns = connection.execute(part, [*name, channel, kind, first, first + _READINGS_AT_ONCE - 1]).fetchnumpy()
                times.frombytes(_plain(columns.pop("t")))
                values.frombytes(_plain(columns.pop("value")))
            traces.append(_trace(channel, kind, *_in_order(times, values)))
    return traces


def _plain(column: npt.NDArray[np.float64]) -> memoryview:
    return np.ascontiguousarray(np.ma.getdata(column), dtype=np.float64).data.cast("B")


def _in_order(times: array[float], values: array[float]) -> tuple[array[float], array[float]]:
    """Both by time. Arrays of 8 bytes a number; lists take four times as much."""
    seconds = np.frombuffer(times)
    if np.all(seconds[1:] >= seconds[:-1]):  # as in a file of ours
        return times, values
    order = np.argsort(seconds, kind="stable")
    return array("d", seconds[order].tobytes()), array("d", np.frombuffer(values)[order].tobytes())


def _trace(channel: str, kind: str, seconds: array[float], values: array[float]) -> Trace:
    """A counter (``energy``) becomes its slope between changes; a power channel stays as it is."""
    if kind != "energy":
        return Trace(channel, seconds, values, counter=False)
    times, watts = array("d"), array("d")
    for index, since, power in slopes(seconds, values):
        times.append((seconds[index] + since) / 2)
        watts.append(power)
    return Trace(channel, times, watts, counter=True)


def slopes(seconds: Sequence[float], joules: Sequence[float]) -> Iterator[tuple[int, float, float]]:
    """Index of a reading of a counter that finds a new value, time of the earlier one that it is set against, and the power between [W].

    Over times long enough to show the power and not the jitter of readings, which a slope over one update would: an H200's counter has a
    new value every 100 ms, is read as often and seen with it 65 to 135 ms after the last; 700 W then look like 400 to 1,000.
    """
    last_time, last = seconds[0], joules[0]
    before = last
    unchanged = np.count_nonzero(np.diff(np.asarray(joules)) == 0)
    slow = unchanged > _UNCHANGED * len(joules)
    shortest = max(SLOPE_SECONDS, min(SLOW_SLOPE_SECONDS, (seconds[-1] - seconds[0]) / 4)) if slow else SLOPE_SECONDS
    for index, (time, value) in enumerate(zip(seconds, joules, strict=True)):
        slope = value > max(last, before) and time - last_time >= shortest
        if slope:
            yield index, last_time, (value - last) / (time - last_time)
        if slope or value < last:  # wrapped or restarted
            last_time, last = time, value
        before = value


RAW: dict[str, dict[str, str]] = {
    "steps": {
        "step": "BIGINT",
        "rank": "BIGINT",
        "phase": "VARCHAR",
        "start": "DOUBLE",
        "seconds": "DOUBLE",
        "data_wait": "DOUBLE",
        "loss": "DOUBLE",
    },
    "power": {"channel": "VARCHAR", "kind": "VARCHAR", "t_before": "DOUBLE", "t_after": "DOUBLE", "value": "DOUBLE"},
}
"""Columns of the raw tables; a query sees them with the record's ``key`` and ``attempt`` in front."""

REFERENCE = dict.fromkeys(FIELDS, "VARCHAR") | {"run": "BIGINT", "devices": "BIGINT", "nodes": "BIGINT", "value": "DOUBLE"}
"""Columns of published numbers; ``parameters`` is JSON."""

_LOCKS = (
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def rows(records: Sequence[Record]) -> list[dict[str, Scalar]]:
    """One row per record; every row has all of ``COLUMNS``, with ``None`` for what is not known."""
    return [{**dict.fromkeys(COLUMNS), **row_of(record)} for record in records]


def units(items: set[str]) -> dict[str, str]:
    """Unit of every number column, for records that count these things. Of different ones the item is called ``item``; the column `item`
    says which."""
    item = next(iter(items)) if len(items) == 1 else "item"
    return {name: unit_of(name.removesuffix("_low").removesuffix("_high").removesuffix("_bound"), item) for name in NUMBERS}


def flat_table(found: Sequence[Mapping[str, Scalar]]) -> tuple[list[str], list[list[Scalar]], dict[str, str]]:
    """Columns, lines and units of rows, as CSV and JSON have them: ``COLUMNS``, and for each metric that CARAML does not define a column
    ``own.NAME``; where it has several units, one of each, so that no column has two."""
    values, told = ([_object(row.get(name)) for row in found] for name in ("own_metrics", "own_units"))
    kinds = dict.fromkeys((name, printable(str(units.get(name, "")))) for own, units in zip(values, told, strict=True) for name in own)
    often = Counter(name for name, _ in kinds)
    titles = {(name, unit): printable(f"own.{name}" + (f" [{unit}]" if often[name] > 1 else "")) for name, unit in kinds}
    lines = [
        [*map(row.get, COLUMNS), *(own.get(name) if printable(str(units.get(name, ""))) == unit else None for name, unit in kinds)]
        for row, own, units in zip(found, values, told, strict=True)
    ]
    known = units({str(row["item"]) for row in found}) | {title: unit for (_, unit), title in titles.items() if unit}
    return [*COLUMNS, *titles.values()], lines, known


def _object(text: Scalar) -> dict[str, Any]:
    """A JSON object, empty for anything else: an index may be somebody else's."""
    with suppress(ValueError, RecursionError):
        found = json.loads(str(text or "{}"))
        return found if isinstance(found, dict) else {}
    return {}


_COLUMNS_OF = f"""tables are records, {", ".join(RAW)} and reference; the columns of one: caraml results --sql "describe records\""""


def query(store: Store, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of one SELECT over the tables `records`, `steps` and `power` of a store, and `reference`, what others published.

    Only these tables can be reached: no file, no network, no setting. Raises ``InputError`` with DuckDB's words, the
    nearest names among them, when the query is wrong.
    """
    import duckdb

    with tempfile.TemporaryDirectory(prefix="caraml-sql-") as scratch, database(spill=Path(scratch)) as connection:
        _load(connection, store, sql, Path(scratch))
        # Of all files only the archive's own table stays within reach.
        connection.execute("SET allowed_directories = [?]", [scratch]) if store.root.is_file() else None
        for lock in _LOCKS:
            connection.execute(lock)
        try:
            statements = connection.extract_statements(sql)
            allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
            if len(statements) != 1 or statements[0].type not in allowed:
                raise InputError(f"expected one SELECT, found {count(len(statements), 'statement')} or another kind: {sql}", _COLUMNS_OF)
            found = connection.execute(statements[0])
            return [column[0] for column in found.description or []], found.fetchall()
        except duckdb.Error as error:
            raise InputError(f"the query is wrong: {error}", _COLUMNS_OF) from error


def _load(connection: duckdb.DuckDBPyConnection, store: Store, sql: str, scratch: Path) -> None:
    """Make the tables; the raw ones are filled only when the query speaks of them, because there may be thousands of files."""
    if store.root.is_file():
        from caraml.results.archive import rows_file

        fill_from_parquet(connection, "records", rows_file(store.root, scratch))
        records: list[Record] = []
    else:
        fill(connection, "records", store.rows())
        records = store.records() if named_in(sql) else []
    fill_raw(connection, [(store, record) for record in records], named_in(sql))
    connection.execute(f"CREATE TABLE reference ({_columns(REFERENCE)})")
    if re.search(r"\breference\b", sql, re.IGNORECASE):
        connection.execute("INSERT INTO reference SELECT * FROM read_csv(?, header = true, columns = ?)", [paths(), REFERENCE])


def named_in(sql: str) -> list[str]:
    """The raw tables that a query speaks of."""
    return [name for name in RAW if re.search(rf"\b{name}\b", sql, re.IGNORECASE)]


def fill_raw(connection: duckdb.DuckDBPyConnection, records: Sequence[tuple[Store, Record]], wanted: Collection[str]) -> None:
    """Make the tables of :data:`RAW`, the ``wanted`` ones with the raw files of the records, the others empty.

    Raises ``InputError`` for a file that is not such a table, or larger than is read.
    """
    for name, columns in RAW.items():
        connection.execute(f"CREATE TABLE {name} ({_columns({'key': 'VARCHAR', 'attempt': 'BIGINT', **columns})})")
        for store, record in records if name in wanted else ():
            for node, path in raw_files(store, record, name):
                _insert_raw(connection, name, record, path, node)


def _insert_raw(connection: duckdb.DuckDBPyConnection, name: str, record: Record, path: Path, node: str) -> None:
    """Add a raw file of a record to a table, with ``node`` before the names of channels."""
    columns = ", ".join(f'left("{column}"::VARCHAR, 100)' if kind == "VARCHAR" else f'"{column}"' for column, kind in RAW[name].items())
    columns = columns.replace('"channel"', '? || "channel"')
    named = [node] * columns.count("?")
    with reading(connection, path, f"is not a table of {name}"):
        source = table(connection, path, ROWS)
        values = [record.key, record.attempt, *named, str(path)]
        connection.execute(f"INSERT INTO {name} SELECT ?, ?, {columns} FROM {source}", values)  # noqa: S608 -- names of ours; the path is a parameter


def _columns(types: Mapping[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in types.items())


def to_csv(columns: Sequence[str], lines: Sequence[Sequence[Any]], column_units: Mapping[str, str] | None = None) -> str:
    """A table as CSV. With units the heading of a number is ``name [unit]``; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = column_units or {}
    has = {name: f" [{unit}]" for name, unit in known.items()}  # a column of one of several units has it in its name
    writer.writerow(name if name.endswith(has.get(name, "")) else name + has[name] for name in columns)
    writer.writerows(lines)
    return text.getvalue()


def to_json(columns: Sequence[str], lines: Sequence[Sequence[Any]], column_units: Mapping[str, str] | None = None) -> str:
    """A table as JSON: ``{"units": {column: unit}, "rows": [{column: value}]}``."""
    # A row a line: indented, ten thousand records would take the slow way through Python's encoder.
    rows = (json.dumps(dict(zip(columns, line, strict=True)), ensure_ascii=False, default=str) for line in lines)
    unit_line = json.dumps(dict(column_units or {}), ensure_ascii=False)
    return '{"units": ' + unit_line + ',\n"rows": [\n' + ",\n".join(rows) + "\n]}\n"
