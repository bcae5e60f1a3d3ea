"""Verbs that show what was measured: show, results, report; side by side: compare, scaling, history, advise, references."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from caraml.base.errors import ExitCode, InputError
from caraml.base.files import owned, writable
from caraml.cli import NAMES, RESULTS, Out, What, app, chosen, console, one_of, say, tell_unreadable, told

if TYPE_CHECKING:
    from caraml.report.section import Section

Format = Literal["html", "md", "csv", "pdf", "png", "svg"]


@app.command()
def show(what: Annotated[str, typer.Argument(help=f"One run, or the repeats of one work: {NAMES}.")], out: Out = RESULTS) -> None:
    """Show one record in full: every number with its window, uncertainty, definition and source; of repeats the means."""
    from caraml.report.grouping import repeated
    from caraml.report.terminal import record_view, repeats_view

    found = chosen(what, out)
    records = told(found.records())
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
    from caraml.analysis.table import flat_table, query, to_csv, to_json
    from caraml.report.document import safe_cells
    from caraml.report.progress import MANY, rows_text
    from caraml.report.tables import plain_table
    from caraml.results.rows import unreadable
    from caraml.results.store import Store

    lines: Sequence[Sequence[Any]]
    column_units: dict[str, str] | None = None
    if csv and json:
        raise InputError("--csv and --json do not go together", "give one of them")
    if sql is not None:
        if what is not None:
            raise InputError("a name and --sql do not go together", "select by suite in the query: where suite = '...'")
        store = Store(out)
        columns, lines = query(store, sql)
        rows = [entry.row for entry in store.index.entries.values()]
    else:
        found = chosen(what, out)
        rows = found.rows()
    tell_unreadable([str(row["reason"]) for row in rows if unreadable(row)])
    if sql is None:
        if not csv and not json:
            if len(rows) > MANY:
                say(rows_text(rows), nl=False)
                return
            from caraml.report.terminal import results_table

            console().print(results_table(found.records(), runs))
            return
        columns, lines, column_units = flat_table(rows)
    if csv:
        lines = [safe_cells(line) for line in lines]
    if csv or json:
        say((to_csv if csv else to_json)(columns, lines, column_units), nl=False)
    else:
        console().print(plain_table(columns, (["–" if value is None else str(value) for value in line] for line in lines)))


@app.command()
def report(
    what: What = None,
    out: Out = RESULTS,
    *,
    format: Annotated[Format, one_of(Format, "--format", "html: one page. md, csv: text. pdf, png, svg: a file for each figure.")] = "html",
    to: Annotated[
        Path | None, typer.Option("--to", help="File, or folder of figures; default: beside the results if they are yours.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Browse all campaigns below the folder, on this machine only.")] = False,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Port of --serve; 0: any free one. Default: 8642.")] = None,
) -> None:
    """Write the report: an HTML page that opens without a network, text, or figures; or serve the pages of many campaigns."""
    if serve:
        if what is not None or to is not None or format != "html":
            raise InputError("--serve shows every campaign as a page", "leave out the name, --format and --to")
        _serve(out, port)
        return
    if port is not None:
        raise InputError("--port is for --serve", "caraml report --serve --port 8000")
    found = chosen(what, out)
    store, records, title, name = found.store, told(found.records()), found.title, found.slug
    figures = format in ("pdf", "png", "svg")
    place = to or _place(out, f"{name}-figures" if figures else f"{name}.{format}")
    if figures:
        from caraml.base.format import count
        from caraml.report.document import write_figures

        written = write_figures(store, records, place, format)
        say(f"{count(len(written), 'figure')} in {written[0].parent}")
        return
    from caraml.base.files import make_folder, write_file
    from caraml.report.document import csv_text, markdown
    from caraml.report.page import page

    make_folder(place.parent)
    texts = {"html": partial(page, store, records, title), "md": partial(markdown, store, records, title)}
    write_file(place, texts.get(format, partial(csv_text, records))())
    say(place)


def _place(out: Path, name: str) -> Path:
    """Place of a report that nobody gave one: among the results, or here where they are somebody else's or cannot be written. Raises
    ``InputError`` where there is one of its name here: it need not be CARAML's."""
    here = Path()
    if (why := _closed(out)) is None:
        return out / name
    if also := f"has {name} already" if Path(name).exists() else _closed(here):
        raise InputError(f"{out} {why}, and this folder {also}: nothing is written unasked", f"caraml report --to {shlex.quote(name)}")
    say(f"{out} {why}: the report goes into {here.absolute()}", err=True)
    return here / name


def _closed(folder: Path) -> str | None:
    """Why a folder is no place for a report that nobody gave one, if it is none."""
    if not owned(folder):
        return f"belongs to user {folder.stat().st_uid}"
    return None if writable(folder) else "cannot be written"


def _serve(out: Path, port: int | None) -> None:
    from caraml.report.server import PORT, ResultsTree, Server

    with Server(ResultsTree(out), PORT if port is None else port) as server:
        say(f"{server.url}\nOnly this machine can open it, and only with this address. Ctrl+C ends it.")
        with suppress(KeyboardInterrupt):
            server.serve_forever()


AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


@app.command()
def compare(  # noqa: PLR0917  -- typer reads the signature
    a: Annotated[str, typer.Argument(help=f"What: {NAMES}, or reference:SOURCE/TABLE/RUN.")],
    b: Annotated[str | None, typer.Argument(help="The same, to be judged against A. Without: the last two rounds of suite A.")] = None,
    out: Out = RESULTS,
    metric: Annotated[list[str] | None, typer.Option("--metric", help="Compare this metric; may be repeated.")] = None,
    fail_if: Annotated[str | None, typer.Option("--fail-if", help="worse, or worse:5%: exit with 1 if B is.")] = None,
    same_within: Annotated[float, typer.Option("--same-within", min=0.01, max=50, help="What counts as the same [%].")] = 1,
    everything: Annotated[bool, typer.Option("--all", help="List every number, however many there are.")] = False,
    markdown: AsMarkdown = False,
) -> None:
    """Say what differs between two results and which numbers changed beyond chance."""
    from caraml.analysis.compare import compare as compared
    from caraml.analysis.compare import parse_gate
    from caraml.reference import sides
    from caraml.report.comparison import comparison_sections, gate_lines

    gate = parse_gate(fail_if) if fail_if is not None else None
    both = sides(a, b, out)
    unread = list(dict.fromkeys(str(record.reason) for side in both for record in side.records if record.unreadable))
    tell_unreadable(unread)
    found = compared(*both, metric or (), same_within / 100)
    _print(comparison_sections(found, everything), markdown)
    if gate is not None:
        lines, failed = gate_lines(gate, found, unread)
        for line in lines:
            say(line)
        raise typer.Exit(ExitCode.POINTS_FAILED if failed else ExitCode.OK)


@app.command()
def scaling(
    what: What = None,
    out: Out = RESULTS,
    efficiency: Annotated[float, typer.Option("--efficiency", min=1, max=99, help="Find the device count of this efficiency [%].")] = 80,
    markdown: AsMarkdown = False,
) -> None:
    """Show speed-up and efficiency over the number of devices, with the laws of Amdahl and Gustafson, slow steps and slow ranks."""
    from caraml.analysis.scaling import left_out, solutions_of, step_views
    from caraml.analysis.scaling import scaling as scaled
    from caraml.report.scaling import scaling_sections

    found = chosen(what, out)
    store, records = found.store, told(found.records())
    families = scaled(records, store, efficiency / 100)
    missing = left_out(records)
    if not families:
        without = f"; {missing}" if missing else ""
        raise InputError(f"no two results differ in the number of devices only{without}", "sweep it in the suite: devices = [1, 2, 4]")
    used = {record.key: record for family in families for record in family.records}
    _print(scaling_sections(families, solutions_of(records), step_views(used.values(), store), missing), markdown)


@app.command()
def history(
    what: Annotated[list[str] | None, typer.Argument(metavar="[WHAT]...", help=f"What: {NAMES}; may be several.")] = None,
    out: Out = RESULTS,
    metric: Annotated[str, typer.Option("--metric", help="Which number to follow.")] = "throughput",
    markdown: AsMarkdown = False,
) -> None:
    """Show a number over time, every attempt counted: where its level changed, and what changed with it."""
    from caraml.analysis.history import history as followed
    from caraml.analysis.history import not_above_zero
    from caraml.report.scaling import history_sections

    named = [chosen(name, out) for name in what] if what else [chosen(None, out)]
    records = {(found.store.root.resolve(), one.key, one.attempt): one for found in named for one in found.every_attempt()}
    series = followed(told(list(records.values())), metric)
    dropped = not_above_zero(list(records.values()), metric)
    if not series:
        above = " above zero, and levels are compared by their ratio" if dropped else ""
        raise InputError(f"no result has a value for {metric}{above}", "caraml results --csv shows which numbers there are")
    _print(history_sections(series, dropped), markdown)


@app.command()
def advise(
    what: What = None,
    out: Out = RESULTS,
    within: Annotated[float, typer.Option("--within", min=0.1, max=50, help="How far a saturated rate may be below the best [%].")] = 5,
    markdown: AsMarkdown = False,
) -> None:
    """Say which batch, precision and number of devices is best for time, energy and Action, and what limits the rate."""
    from caraml.analysis.advise import advise as advised
    from caraml.report.comparison import advice_sections

    found = advised(told(chosen(what, out).records()), within / 100)
    if not found:
        raise InputError("no work was run in two ways, so there is nothing to choose", "sweep it in the suite: global_batch = [8, 16, 32]")
    _print(advice_sections(found), markdown)


def _print(sections: Sequence[Section], markdown: bool) -> None:
    from caraml.report.section import markdown as as_markdown
    from caraml.report.section import terminal

    if markdown:
        say(as_markdown(sections))
    else:
        console().print(terminal(sections))


@app.command()
def references(
    *,
    source: Annotated[str | None, typer.Option(help="caraml, maelstrom, pearc or epicure.")] = None,
    table: Annotated[str | None, typer.Option(help='Table of the source: 17, or a name such as "text 4.3.1".')] = None,
    system: Annotated[str | None, typer.Option(help="Machine, for example jureca-a100.")] = None,
    workload: Annotated[str | None, typer.Option(help="Workload, for example radiation_emulation or ap3.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric, for example throughput.")] = None,
    mode: Annotated[str | None, typer.Option(help="train, compute, data or inference.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, every column.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, every column.")] = False,
) -> None:
    """Print published results. Without a filter: which tables there are."""
    from caraml.analysis.table import to_csv, to_json
    from caraml.reference import full_lines, load, select
    from caraml.report.tables import references_overview, references_text

    if csv and json:
        raise InputError("--csv and --json do not go together", "give one of them")
    wanted = {"source": source, "table": table, "system": system, "workload": workload, "metric": metric, "mode": mode}
    every = load()
    if system is not None and system not in {row.system for row in every}:  # another name of the same machine
        from caraml.system.catalogue import list_systems

        machines = [one for one in list_systems() if system.casefold() in {word.casefold() for word in (one.name, *one.aliases)}]
        words = {word for one in machines for word in (one.name, *one.aliases, *(alias.casefold() for alias in one.aliases))}
        wanted["system"] = next((row.system for row in every if row.system in words), None if machines else system)
        if wanted["system"] is None:
            raise InputError(f"no source has a number of {machines[0].name}", "caraml references says which tables there are")
    rows = select(every, **wanted)
    if not rows:  # each of these is the value of some row
        asked = " ".join(f"--{name} '{value}'" for name, value in wanted.items() if value is not None)
        raise InputError(f"no published number has all of {asked}", "caraml references says which tables each source has")
    if csv or json:
        columns, lines = full_lines(rows)
        say((to_csv if csv else to_json)(columns, lines), nl=False)
    elif any(wanted.values()):
        say(references_text(rows))
    else:
        say(references_overview(rows))
