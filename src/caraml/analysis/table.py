"""Records as flat tables: one row per record, one column per number, and SQL over them.

Column names are the names of metrics; ``NAME_low`` and ``NAME_high`` are the ends of the interval. Numbers are in the
units of :func:`units`, unscaled. The columns are the same for every set of records, so a query never depends on what was measured.
"""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.analysis.raw import raw_files
from caraml.base.database import database, reading, table
from caraml.base.errors import InputError
from caraml.base.limits import ROWS
from caraml.metrics.definitions import unit_of
from caraml.reference import FIELDS, paths
from caraml.results.rows import COLUMNS, NUMBERS, Scalar, fill, fill_from_parquet, row_of
from caraml.results.store import Store

if TYPE_CHECKING:
    import duckdb

    from caraml.results.record import Record

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
    return [_row(record) for record in records]


def _row(record: Record) -> dict[str, Scalar]:
    return {**dict.fromkeys(COLUMNS), **row_of(record)}


def units(records: Sequence[Record]) -> dict[str, str]:
    """Unit of every number column. Where the records count different things, the item is called ``item``; the column `item` says which."""
    return units_of_items({record.item for record in records})


def units_of_items(items: set[str]) -> dict[str, str]:
    """As :func:`units`, for records that count these things."""
    item = next(iter(items)) if len(items) == 1 else "item"
    return {name: unit_of(name.removesuffix("_low").removesuffix("_high").removesuffix("_bound"), item) for name in NUMBERS}


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
                raise InputError(f"expected one SELECT, found {len(statements)} statements or another kind: {sql}", _COLUMNS_OF)
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
        records = store.records() if re.search(r"\b(steps|power)\b", sql, re.IGNORECASE) else []
    for name, columns in RAW.items():
        connection.execute(f"CREATE TABLE {name} ({_columns({'key': 'VARCHAR', 'attempt': 'BIGINT', **columns})})")
        if re.search(rf"\b{name}\b", sql, re.IGNORECASE):
            for record in records:
                for node, path in raw_files(store, record, name):
                    insert_raw(connection, name, record, path, node)
    connection.execute(f"CREATE TABLE reference ({_columns(REFERENCE)})")
    if re.search(r"\breference\b", sql, re.IGNORECASE):
        connection.execute("INSERT INTO reference SELECT * FROM read_csv(?, header = true, columns = ?)", [paths(), REFERENCE])


def insert_raw(connection: duckdb.DuckDBPyConnection, name: str, record: Record, path: Path, node: str = "") -> None:
    """Add a raw file of a record to the table ``name`` of :data:`RAW`, with ``node`` before the names of channels.

    Raises ``InputError`` for a file that is not such a table.
    """
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
    writer.writerow(f"{name} [{known[name]}]" if name in known else name for name in columns)
    writer.writerows(lines)
    return text.getvalue()


def to_json(columns: Sequence[str], lines: Sequence[Sequence[Any]], column_units: Mapping[str, str] | None = None) -> str:
    """A table as JSON: ``{"units": {column: unit}, "rows": [{column: value}]}``."""
    # A row a line: indented, ten thousand records would take the slow way through Python's encoder.
    rows = (json.dumps(dict(zip(columns, line, strict=True)), ensure_ascii=False, default=str) for line in lines)
    unit_line = json.dumps(dict(column_units or {}), ensure_ascii=False)
    return '{"units": ' + unit_line + ',\n"rows": [\n' + ",\n".join(rows) + "\n]}\n"
