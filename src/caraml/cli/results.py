"""Verbs that show what was measured: show, results, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caraml.cli.app import RESULTS, Out, app, console, records_of
from caraml.errors import InputError


@app.command()
def show(key: Annotated[str, typer.Argument(help="Key or label of a point, or its first characters.")], out: Out = RESULTS) -> None:
    """Show one record in full: every number with its window, uncertainty, definition and source."""
    from caraml.report.terminal import record_view
    from caraml.results.store import Store

    store = Store(out)
    record = store.find(key)
    console().print(record_view(record, str(store.folder(record))))


@app.command()
def results(
    suite: Annotated[str | None, typer.Argument(help="Only the points of this suite.")] = None,
    out: Out = RESULTS,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, every metric.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, every metric.")] = False,
    sql: Annotated[str | None, typer.Option("--sql", help="Query the tables records, steps and power with DuckDB.")] = None,
) -> None:
    """Print results: a table, CSV, JSON, or the answer to an SQL query."""
    from caraml.analysis.table import COLUMNS, query, rows, to_csv, to_json, units
    from caraml.report.tables import query_table
    from caraml.report.terminal import results_table
    from caraml.results.store import Store

    store = Store(out)
    if sql is not None:
        if suite is not None:
            raise InputError("a suite's name and --sql do not go together", "select by suite in the query: where suite = '...'")
        columns, lines = query(store, sql)
        column_units: dict[str, str] | None = None
    else:
        records = records_of(store, suite)
        if not csv and not json:
            console().print(results_table(records))
            return
        columns, lines, column_units = list(COLUMNS), [tuple(row.values()) for row in rows(records)], units(records)
    if csv or json:
        typer.echo((to_csv if csv else to_json)(columns, lines, column_units), nl=False)
    else:
        console().print(query_table(columns, lines))


@app.command()
def report(
    suite: Annotated[str | None, typer.Argument(help="Only the points of this suite.")] = None,
    out: Out = RESULTS,
    page: Annotated[Path | None, typer.Option("--page", help="Path of the page; default: beside the results.")] = None,
) -> None:
    """Write the HTML page: one file that opens without a network."""
    from caraml.report.page import write_report
    from caraml.results.store import Store

    store = Store(out)
    records = records_of(store, suite)
    path = write_report(store, records, page or out / f"{suite or 'all'}.html", suite or "All results")
    typer.echo(path)
