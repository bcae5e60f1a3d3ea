"""Results in Python: ``caraml.load("caraml-results")`` gives records as typed objects, and all of them as a table.

    results = caraml.load("caraml-results")
    for result in results.where(status="ok", workload="gpt"):
        print(result.record.point.label, result.value("throughput"), result.folder)
    table = results.to_pandas()
    rows = results.sql("SELECT label, throughput FROM records ORDER BY throughput DESC")

Nothing heavy is loaded before it is needed: DuckDB with the first query, pandas or polars when they are asked for, and never torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from caraml.analysis.estimate import time_of
from caraml.analysis.table import COLUMNS, Scalar, Steps, Trace, fill_raw, named_in, raw_files, read_power, read_steps, rows, units
from caraml.base.errors import EnvironmentUnfitError, InputError, unknown_name
from caraml.metrics.model import METRICS, Metric, own_names
from caraml.power.result import energy_frame, need_tables, power_frame, write_hdf5
from caraml.results.record import Record
from caraml.results.selector import Selection, select
from caraml.results.store import Store
from caraml.suite.model import Point

if TYPE_CHECKING:
    import duckdb
    import pandas
    import polars


@dataclass(frozen=True)
class Result:
    """One record, and where it lies."""

    record: Record
    store: Store
    others: frozenset[str] = frozenset()
    """Metrics that only programs and plug-ins have, of all results that were loaded with this one."""

    @property
    def point(self) -> Point:
        """What was measured."""
        return self.record.point

    @property
    def folder(self) -> Path:
        """Where the record and its raw files lie."""
        return self.store.folder(self.record)

    def value(self, metric: str) -> float | None:
        """Value of a metric in the unit of :mod:`caraml.metrics.model`, or ``None`` if it is missing or unknown. Raises
        ``InputError`` for a name that no metric and no program's number in the results loaded with it has."""
        asked = self.point.params.get("metrics")
        known = {*METRICS, *self.record.metrics, *self.others, *(asked if isinstance(asked, dict) else ())}
        if metric not in known:
            raise unknown_name("metric", metric, known)
        return self.record.value(metric)

    def metric(self, name: str) -> Metric:
        """A metric with its interval, unit and reason. Raises ``InputError`` for one that the record does not have."""
        if name not in self.record.metrics:
            raise unknown_name("metric of this record", name, self.record.metrics)
        return self.record.metrics[name]

    @property
    def steps(self) -> Steps:
        """Every step: phase, the slowest rank's time [s], loss. Raises ``InputError`` if there is no such file."""
        return read_steps(self._raw("steps")[0][1], in_step=self.point.in_step)

    @property
    def power(self) -> list[Trace]:
        """Power of every channel over time [W over s]; of several nodes a name begins with ``NODE/``. Raises as :attr:`steps`."""
        found = [(node, read_power(path)) for node, path in self._raw("power")]
        return [replace(trace, channel=f"{node}{trace.channel}") for node, traces in found for trace in traces]

    def power_frame(self) -> pandas.DataFrame:
        """Power as a table of the form that jpwr's has: ``timestamps`` (seconds since 1970) and a column [W] of each domain.

        Raises ``InputError`` if there is no such file, and ``EnvironmentUnfitError`` where pandas is not installed.
        """
        energy = self.record.energy
        domains = [] if energy is None else [channel.id for channel in energy.channels]
        columns: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
        for trace in sorted(self.power, key=lambda one: one.counter):  # power shows a domain better than the slope of its counter
            stem = re.sub(r"[:_](energy|power\w*)$", "", trace.channel)
            node = next((f"{one.name}/" for one in self.record.nodes if trace.channel.startswith(f"{one.name}/")), "")
            own = [name for name in domains if name.startswith(node) and name.removeprefix(node) in trace.channel]
            columns.setdefault(max(own, key=len, default=stem), (trace.seconds, trace.watts))
        if energy is not None and energy.start_unix is not None:
            return power_frame(columns, energy.start_unix - energy.start)
        return power_frame(columns, datetime.fromisoformat(self.record.started_at).timestamp())

    def energy_frame(self) -> pandas.Series[float]:
        """Energy of every domain in the window [Wh]; NaN where it is not known. Raises ``EnvironmentUnfitError`` without pandas."""
        return energy_frame(self.record.energy)

    def to_hdf5(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write both as ``power.KEY.h5`` and ``energy.KEY.h5`` with the key ``jpwr``, and return the files.

        Raises as :meth:`power_frame`, and ``InputError`` if there is such a file already.
        """
        return write_hdf5(Path(folder), self.power_frame(), self.energy_frame(), self.record.key)

    def _raw(self, name: str) -> list[tuple[str, Path]]:
        found = raw_files(self.store, self.record, name)
        if not found:
            raise InputError(f"{self.folder} has no {name} table", "result.record.files names the raw files of a record")
        return found


class Results(Sequence[Result]):
    """Results in their order: a sequence, and a table."""

    def __init__(self, results: Sequence[Result]) -> None:
        self._results = tuple(results)

    @overload
    def __getitem__(self, index: int) -> Result: ...

    @overload
    def __getitem__(self, index: slice) -> Results: ...

    def __getitem__(self, index: int | slice) -> Result | Results:
        return Results(self._results[index]) if isinstance(index, slice) else self._results[index]

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        statuses = [result.record.status for result in self]
        return f"<Results: {', '.join(f'{statuses.count(status)} {status}' for status in dict.fromkeys(statuses)) or 'none'}>"

    @property
    def records(self) -> list[Record]:
        """The records."""
        return [result.record for result in self]

    @property
    def points(self) -> list[Point]:
        """What was measured."""
        return [result.point for result in self]

    def where(self, **conditions: object) -> Results:
        """Those whose columns have these values; several values as a list or set, any other condition as a function of the value.

        The columns are those of :meth:`rows`. Raises ``InputError`` for an unknown one.
        """
        for name in conditions:
            if name not in COLUMNS:
                raise unknown_name("column", name, COLUMNS)
        tests = {name: _test(wanted) for name, wanted in conditions.items()}
        pairs = zip(self._results, self.rows, strict=True)
        return Results([result for result, row in pairs if all(test(row[name]) for name, test in tests.items())])

    @cached_property
    def rows(self) -> list[dict[str, Scalar]]:
        """One flat row per record, every metric with its ends; ``None`` for what is not known."""
        return rows(self.records)

    @property
    def units(self) -> dict[str, str]:
        """Unit of every number column."""
        return units({record.item for record in self.records})

    def to_duckdb(self, raw: Collection[str] = ("steps", "power")) -> duckdb.DuckDBPyConnection:
        """A database in memory with the tables ``records``, and ``steps`` and ``power`` of those results that have them.

        It takes 256 MiB of memory (``SET memory_limit`` gives it more), and what does not fit lies in a temporary folder that goes with it.
        Raises ``InputError`` for a raw file that is no such table or larger than is read.
        """
        from caraml.base.limits import database
        from caraml.results.rows import fill

        scratch = tempfile.TemporaryDirectory(prefix="caraml-sql-")
        connection = database(Path(scratch.name))
        weakref.finalize(connection, scratch.cleanup)
        fill(connection, "records", self.rows)
        fill_raw(connection, [(result.store, result.record) for result in self], raw)
        return connection

    def sql(self, query: str) -> list[dict[str, Any]]:
        """The rows that a DuckDB query over ``records``, ``steps`` and ``power`` gives. Raises ``InputError`` if it is wrong."""
        import duckdb

        with self.to_duckdb(named_in(query)) as connection:
            try:
                if not connection.extract_statements(query):
                    raise InputError("the query is empty", "for example SELECT label, throughput FROM records")
                found = connection.execute(query)
                names = [column[0] for column in found.description or []]
                return [dict(zip(names, line, strict=True)) for line in found.fetchall()]
            except duckdb.Error as error:
                raise InputError(f"the query is wrong: {error}", "columns of records: results.rows[0].keys()") from error

    def to_pandas(self) -> pandas.DataFrame:
        """The rows as a pandas table; NaN for an unknown number. Raises ``EnvironmentUnfitError`` where pandas is not installed."""
        need_tables("pandas")
        import pandas

        from caraml.results.rows import TYPES

        frame = pandas.DataFrame(self.rows, columns=list(COLUMNS))
        return frame.astype({name: float for name in COLUMNS if TYPES[name] == "DOUBLE"})  # also where no result has a number

    def to_polars(self) -> polars.DataFrame:
        """The rows as a polars table. Raises ``EnvironmentUnfitError`` where polars is not installed."""
        if importlib.util.find_spec("polars") is None:
            raise EnvironmentUnfitError("polars is not installed", "pip install polars; or results.to_duckdb(), which needs nothing more")
        import polars

        from caraml.results.rows import TYPES

        kinds = {"VARCHAR": polars.String, "BIGINT": polars.Int64, "DOUBLE": polars.Float64}
        return polars.DataFrame(self.rows, schema={name: kinds[TYPES[name]] for name in COLUMNS})


def load(*paths: str | os.PathLike[str], suite: str | None = None, every_attempt: bool = False) -> Results:
    """Results below one or several folders.

    Args:
        paths: results folders (what ``--out`` of ``caraml run`` named), or folders that hold several of them.
        suite: only what this name stands for: a suite, ``SUITE@ROUND``, a tag, a point ... (``docs/names.md``).
        every_attempt: every attempt at a point and not the newest alone, by time: for histories.

    Raises:
        InputError: a path does not exist, or has no results. A record that cannot be read is ``invalid``, with the reason.
    """
    found = [result for path in paths or ("caraml-results",) for result in _load(Path(path), suite, every_attempt)]
    others = frozenset(own_names(result.record for result in found))
    found = [replace(result, others=others) for result in found]
    if every_attempt:
        found.sort(key=lambda result: time_of(result.record.started_at))  # of machines in several time zones
    return Results(found)


def _load(path: Path, suite: str | None, every_attempt: bool) -> Iterator[Result]:
    from caraml.report.server import results_below

    stores = [Store(folder) for folder in results_below(path)] if path.is_dir() else []
    found = [_selected(store, suite) for store in stores]
    selections = [one for one in found if one is not None]
    if not selections:
        what = f"no results{f' of {suite!r}' if suite else ''} below {path}" if path.exists() else f"{path} does not exist"
        named = f"paths are results folders; caraml.load(suite={str(path)!r}) takes the name of a suite, a tag or a point"
        made, default = "caraml run quick makes caraml-results", path == Path("caraml-results")
        hint = f"caraml import {path} reads an archive into a folder" if path.is_file() else named
        hint = made if path.is_dir() or suite or default else hint
        raise InputError(what, hint)
    for selection in selections:
        records = selection.every_attempt() if every_attempt else selection.records()
        yield from (Result(record, selection.store) for record in records)


def _selected(store: Store, name: str | None) -> Selection | None:
    """What a name stands for in a store; ``None`` where it stands for nothing."""
    try:
        return select(name, store.root)
    except InputError:
        if name is None:
            raise
        return None


def _test(wanted: object) -> Callable[[Scalar], bool]:
    if callable(wanted):
        return lambda value: bool(wanted(value))
    if isinstance(wanted, Collection) and not isinstance(wanted, str):
        return lambda value: value in wanted
    return lambda value: value == wanted
