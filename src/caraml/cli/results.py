"""Verbs that show what was measured: show, results, report."""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caraml.base.errors import InputError
from caraml.base.files import owned
from caraml.cli.app import NAMES, RESULTS, Out, What, app, chosen, console, say

if TYPE_CHECKING:
    from caraml.results.record import Record
    from caraml.results.store import Store


@app.command()
def show(what: Annotated[str, typer.Argument(help=f"One run, or the repeats of one work: {NAMES}.")], out: Out = RESULTS) -> None:
    """Show one record in full: every number with its window, uncertainty, definition and source; of repeats the means."""
    from caraml.report.grouping import repeated
    from caraml.report.terminal import record_view, repeats_view

    found = chosen(what, out)
    records = found.records()
    if len(records) > 1 and len(repeated(records, ())) == 1:
        console().print(repeats_view(records))
        return
    point = found.only()
    if not records:
        raise InputError(f"{point.label} ({point.key}) has no record yet", f"caraml logs {point.key}")
    console().print(record_view(records[0], str(found.store.folder(records[0]))))


@app.command()
def results(  # noqa: PLR0917 -- options, which nobody gives by position
    what: What = None,
    out: Out = RESULTS,
    runs: Annotated[bool, typer.Option("--runs", help="Every run by itself, not the mean of repeats.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, every metric of every run.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, every metric of every run.")] = False,
    sql: Annotated[str | None, typer.Option("--sql", help="Query the tables records, steps and power with DuckDB.")] = None,
) -> None:
    """Print results: a table, CSV, JSON, or the answer to an SQL query."""
    from caraml.analysis.table import COLUMNS, query, to_csv, to_json, units_of_items
    from caraml.report.document import safe_cells
    from caraml.report.progress import MANY, rows_text
    from caraml.report.tables import query_table
    from caraml.results.store import Store

    if sql is not None:
        if what is not None:
            raise InputError("a name and --sql do not go together", "select by suite in the query: where suite = '...'")
        columns, lines = query(Store(out), sql)
        column_units: dict[str, str] | None = None
    else:
        found = chosen(what, out)
        rows = found.rows()
        if not csv and not json:
            if len(rows) > MANY:
                say(rows_text(rows), nl=False)
                return
            from caraml.report.terminal import results_table

            console().print(results_table(found.records(), runs))
            return
        columns, lines = list(COLUMNS), [tuple(map(row.get, COLUMNS)) for row in rows]
        column_units = units_of_items({str(row["item"]) for row in rows})
    if csv:
        from caraml.report.document import safe_cells

        lines = [tuple(safe_cells(line)) for line in lines]
    if csv or json:
        say((to_csv if csv else to_json)(columns, lines, column_units), nl=False)
    else:
        console().print(query_table(columns, lines))


class Format(StrEnum):
    """What a report can be written as."""

    HTML = "html"
    MD = "md"
    CSV = "csv"
    PDF = "pdf"
    PNG = "png"
    SVG = "svg"


@app.command()
def report(
    what: What = None,
    out: Out = RESULTS,
    *,
    format: Annotated[
        Format, typer.Option("--format", help="html: one page. md, csv: text. pdf, png, svg: a file for each figure.")
    ] = Format.HTML,
    to: Annotated[
        Path | None, typer.Option("--to", help="File, or folder of figures; default: beside the results if they are yours.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Browse all campaigns below the folder, on this machine only.")] = False,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port of --serve; 0: any free one. Default: 8642.")] = None,
) -> None:
    """Write the report: an HTML page that opens without a network, text, or figures; or serve the pages of many campaigns."""
    if serve:
        if what is not None or to is not None or format is not Format.HTML:
            raise InputError("--serve shows every campaign as a page", "leave out the name, --format and --to")
        _serve(out, port)
        return
    if port is not None:
        raise InputError("--port is for --serve", "caraml report --serve --port 8000")
    found = chosen(what, out)
    store, records, title, name = found.store, found.records(), found.title, found.slug
    beside = to or _place(out)
    if format in (Format.PDF, Format.PNG, Format.SVG):
        from caraml.base.format import count
        from caraml.report.document import write_figures

        written = write_figures(store, records, to or beside / f"{name}-figures", format.value)
        say(f"{count(len(written), 'figure')} in {written[0].parent}")
        return
    path = to or beside / f"{name}.{format}"
    _write_text(store, records, format, path, title)
    say(path)


def _place(out: Path) -> Path:
    """Folder of a report that nobody gave a place: that of the results, or this one where they are somebody else's."""
    if owned(out):
        return out
    theirs, here = f"{out} belongs to user {out.stat().st_uid}", Path()
    if not owned(here):
        raise InputError(f"{theirs}, and this folder to user {here.stat().st_uid}: nothing is written unasked", "caraml report --to FILE")
    say(f"{theirs}: the report goes into {here.absolute()}", err=True)
    return here


def _write_text(store: Store, records: list[Record], format: Format, path: Path, title: str) -> None:
    from caraml.base.files import write_file
    from caraml.report.document import csv_text, markdown
    from caraml.report.page import page

    path.parent.mkdir(parents=True, exist_ok=True)
    text = {
        Format.HTML: lambda: page(store, records, title),
        Format.MD: lambda: markdown(store, records, title),
        Format.CSV: lambda: csv_text(records),
    }[format]()
    write_file(path, text)


def _serve(out: Path, port: int | None) -> None:
    from caraml.report.server import PORT, ResultsTree, Server

    with Server(ResultsTree(out), PORT if port is None else port) as server:
        say(f"{server.url}\nOnly this machine can open it, and only with this address. Ctrl+C ends it.")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
