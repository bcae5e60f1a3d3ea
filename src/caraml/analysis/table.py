"""Records as flat tables: one row per record, one column per number, and SQL over them.

Column names are the metric names of :mod:`caraml.units`; ``NAME_low`` and ``NAME_high`` are the ends of the interval. Numbers are in the
units of :func:`units`, unscaled. The columns are the same for every set of records, so a query never depends on what was measured.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from caraml.analysis.raw import raw_file, relation
from caraml.errors import InputError
from caraml.results.record import Record
from caraml.results.store import Store
from caraml.units import METRICS, unit_of

if TYPE_CHECKING:
    import duckdb

Scalar: TypeAlias = str | int | float | None

TEXT = (
    *("key", "suite", "benchmark", "workload", "label", "status", "reason", "flags"),
    *("system", "device", "device_class", "software", "started_at", "mode", "precision", "compile", "item"),
    *("energy_scope", "energy_reason", "mfu_reason"),
)
INTEGERS = (
    *("attempt", "nodes", "devices", "world", "global_batch", "micro_batch", "accumulation", "seed", "repeat"),
    *("schema_version", "method_version"),
)
NUMBERS = tuple(f"{name}{end}" for name in METRICS for end in ("", "_low", "_high"))
COLUMNS = TEXT + INTEGERS + NUMBERS

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

_LOCKS = (
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET temp_directory = ''",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


def rows(records: Sequence[Record]) -> list[dict[str, Scalar]]:
    """One row per record; every row has all of ``COLUMNS``, with ``None`` for what is not known."""
    return [_row(record) for record in records]


def _row(record: Record) -> dict[str, Scalar]:
    point, energy, mfu = record.point, record.metrics.get("energy"), record.metrics.get("mfu")
    row: dict[str, Scalar] = dict.fromkeys(COLUMNS)
    row |= {name: getattr(point, name) for name in COLUMNS if hasattr(point, name)}
    row |= {
        "key": record.key,
        "attempt": record.attempt,
        "status": record.status,
        "reason": record.reason,
        "flags": ",".join(record.flags),
        "item": record.item,
        "started_at": record.started_at,
        "schema_version": record.schema_version,
        "method_version": record.method_version,
        "energy_scope": energy.scope if energy else None,
        "energy_reason": energy.reason if energy else None,
        "mfu_reason": mfu.reason if mfu else None,
    }
    for name in METRICS:
        metric = record.metrics.get(name)
        if metric is not None:
            row |= {name: metric.value, f"{name}_low": metric.low, f"{name}_high": metric.high}
    return row


def units(records: Sequence[Record]) -> dict[str, str]:
    """Unit of every number column. Where the records count different things, the item is called ``item``; the column `item` says which."""
    items = {record.item for record in records}
    item = items.pop() if len(items) == 1 else "item"
    return {f"{name}{end}": unit_of(name, item) for name in METRICS for end in ("", "_low", "_high")}


def query(store: Store, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Columns and rows of one SELECT over the tables `records`, `steps` and `power` of a store.

    Only the store's own tables can be reached: no file, no network, no setting. Raises ``InputError`` with DuckDB's words and the
    names of all columns when the query is wrong.
    """
    import duckdb

    with duckdb.connect() as connection:
        _load(connection, store, sql)
        for lock in _LOCKS:
            connection.execute(lock)
        try:
            statements = connection.extract_statements(sql)
            allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
            if len(statements) != 1 or statements[0].type not in allowed:
                raise InputError(f"expected one SELECT, found {len(statements)} statements or another kind: {sql}", _tables())
            found = connection.execute(statements[0])
            return [column[0] for column in found.description or []], found.fetchall()
        except duckdb.Error as error:
            raise InputError(f"the query is wrong: {error}", _tables()) from error


def _load(connection: duckdb.DuckDBPyConnection, store: Store, sql: str) -> None:
    """Make the tables; the raw ones are filled only when the query speaks of them, because there may be thousands of files."""
    types = {**dict.fromkeys(TEXT, "VARCHAR"), **dict.fromkeys(INTEGERS, "BIGINT"), **dict.fromkeys(NUMBERS, "DOUBLE")}
    connection.execute(f"CREATE TABLE records ({_columns(types)})")
    records = store.records()
    if records:
        holes = ", ".join("?" * len(COLUMNS))
        connection.executemany(f"INSERT INTO records VALUES ({holes})", [[row[name] for name in COLUMNS] for row in rows(records)])
    for table, columns in RAW.items():
        connection.execute(f"CREATE TABLE {table} ({_columns({'key': 'VARCHAR', 'attempt': 'BIGINT', **columns})})")
        if re.search(rf"\b{table}\b", sql, re.IGNORECASE):
            for record in records:
                path = raw_file(store, record, table)
                if path is not None:
                    _insert(connection, table, columns, record, path)


def _insert(connection: duckdb.DuckDBPyConnection, table: str, columns: Mapping[str, str], record: Record, path: Path) -> None:
    import duckdb

    source = relation(connection, path)
    names = ", ".join(f'"{name}"' for name in columns)
    try:
        connection.execute(f"INSERT INTO {table} SELECT ?, ?, {names} FROM ({source.sql_query()})", [record.key, record.attempt])
    except duckdb.Error as error:
        raise InputError(f"{path} is not a table of {table}: {error}") from error


def _columns(types: Mapping[str, str]) -> str:
    return ", ".join(f'"{name}" {kind}' for name, kind in types.items())


def _tables() -> str:
    """What a query can use, for the error's next step."""
    lines = [f"records({', '.join(TEXT + INTEGERS)}, and NAME, NAME_low, NAME_high for each of: {', '.join(METRICS)})"]
    lines += [f"{table}(key, attempt, {', '.join(columns)})" for table, columns in RAW.items()]
    return "use these tables and columns:\n  " + "\n  ".join(lines)


def to_csv(columns: Sequence[str], lines: Sequence[Sequence[Any]], column_units: Mapping[str, str] | None = None) -> str:
    """A table as CSV. With units the heading of a number is ``name [unit]``; an unknown value is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    known = column_units or {}
    writer.writerow(f"{name} [{known[name]}]" if name in known else name for name in columns)
    writer.writerows(lines)
    return text.getvalue()


def to_json(columns: Sequence[str], lines: Sequence[Sequence[Any]], column_units: Mapping[str, str] | None = None) -> str:
    """A table as JSON: ``{"units": {column: unit}, "rows": [{column: value}]}``."""
    content = {"units": dict(column_units or {}), "rows": [dict(zip(columns, line, strict=True)) for line in lines]}
    return json.dumps(content, indent=1, ensure_ascii=False, default=str)
