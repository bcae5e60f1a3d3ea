"""The command line: one short function per verb. What a verb needs is imported inside it, so that help is instant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caraml import __version__
from caraml.errors import CaramlError, ExitCode, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from caraml.results.record import Record
    from caraml.results.store import Store

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
list_app = typer.Typer(no_args_is_help=True, help="List what CARAML knows.")
system_app = typer.Typer(no_args_is_help=True, help="What a machine is.")
data_app = typer.Typer(no_args_is_help=True, help="Prepare input data.")
prepare_app = typer.Typer(no_args_is_help=True, help="Write data sets that workloads read.")
app.add_typer(list_app, name="list")
app.add_typer(system_app, name="system")
app.add_typer(data_app, name="data")
data_app.add_typer(prepare_app, name="prepare")

Out = Annotated[Path, typer.Option("--out", envvar="CARAML_RESULTS", help="Folder of the results.")]
RESULTS = Path("caraml-results")


@app.callback(invoke_without_command=True)
def caraml(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """CARAML: how fast a machine trains a model, what that costs in energy, and how far it is from the limit."""
    if version:
        typer.echo(f"caraml {__version__}")
        raise typer.Exit


@app.command()
def run(
    suite: Annotated[str, typer.Argument(help="Name of a suite (see `caraml list suites`) or path of a suite file.")],
    out: Out = RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Measure also what has a result; earlier results are kept.")] = False,
) -> None:
    """Run a suite: every point that has no result yet. Prints a table and writes a page."""
    from caraml.campaign import Campaign, exit_code
    from caraml.launch.local import LocalLauncher
    from caraml.report.live import LiveTable, LogLines
    from caraml.results.store import Store
    from caraml.suite.load import load_suite
    from caraml.system.detect import detect

    file, store, console = load_suite(suite), Store(out), _console()
    with LiveTable(console) if console.is_terminal else LogLines(sys.stdout) as watcher:
        records = Campaign(file, detect(), store, LocalLauncher(), watcher, again).run()
    _show_results(store, records, out / f"{file.suite.name}.html", file.suite.title)
    raise typer.Exit(exit_code(records))


@app.command()
def show(key: Annotated[str, typer.Argument(help="Key or label of a point, or its first characters.")], out: Out = RESULTS) -> None:
    """Show one record in full: every number with its window, uncertainty, definition and source."""
    from caraml.report.terminal import record_view
    from caraml.results.store import Store

    store = Store(out)
    record = store.find(key)
    _console().print(record_view(record, str(store.folder(record))))


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
        records = _records(store, suite)
        if not csv and not json:
            _console().print(results_table(records))
            return
        columns, lines, column_units = list(COLUMNS), [tuple(row.values()) for row in rows(records)], units(records)
    if csv or json:
        typer.echo((to_csv if csv else to_json)(columns, lines, column_units), nl=False)
    else:
        _console().print(query_table(columns, lines))


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
    records = _records(store, suite)
    path = write_report(store, records, page or out / f"{suite or 'all'}.html", suite or "All results")
    typer.echo(path)


@list_app.command("suites")
def list_suites() -> None:
    """Suites that come with CARAML."""
    from caraml.suite.load import catalog_suites, load_suite

    _two_columns({name: load_suite(name).suite.title for name in catalog_suites()})


@list_app.command("workloads")
def list_workloads() -> None:
    """What can be trained."""
    from caraml.workloads import WORKLOADS

    _two_columns(WORKLOADS)


@list_app.command("systems")
def list_systems() -> None:
    """Machines of the catalogue."""
    from caraml.system.catalogue import list_systems as systems

    catalogue = {system.name: f"{system.title} ({', '.join(system.aliases)})" for system in systems()}
    _two_columns({"local": "this machine, detected when it is used", **catalogue})


@system_app.command("detect")
def system_detect() -> None:
    """Print what this machine is."""
    from caraml.system.detect import detect

    typer.echo(detect().model_dump_json(indent=2))


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def power(context: typer.Context) -> None:
    """Measure the energy of any command: `caraml power -- COMMAND`; also `watch`, `sources`, `merge`."""
    from caraml.power.__main__ import main as measure

    raise typer.Exit(measure(context.args))


@app.command()
def doctor(out: Out = RESULTS) -> None:
    """Say what this machine can measure, what is missing, and the command that would mend it."""
    from caraml.doctor import checks
    from caraml.report.tables import checks_table

    found = checks(out)
    _console().print(checks_table(found))
    raise typer.Exit(ExitCode.ENVIRONMENT_UNFIT if any(check.status == "missing" for check in found) else ExitCode.OK)


@app.command()
def verify(out: Out = RESULTS) -> None:
    """Prove the ruler on this machine: measure work of known truth and compare every number with it."""
    from caraml.report.live import LiveTable, LogLines
    from caraml.verify.finding import table
    from caraml.verify.proof import FILE, prove, right

    console = _console()
    with LiveTable(console) if console.is_terminal else LogLines(sys.stdout) as watcher:
        findings = prove(out, watcher)
    console.print(table(findings))
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("right", "wrong", "note", "not here"))
    typer.echo(f"{counts}; written to {out / FILE}")
    raise typer.Exit(ExitCode.OK if right(findings) else ExitCode.POINTS_FAILED)


@prepare_app.command("text")
def prepare_text(
    inputs: Annotated[list[Path], typer.Argument(help="Files or folders: JSONL (.xz, .gz, .zst), Parquet, plain text.")],
    out: Annotated[Path, typer.Option("--out", help="Prefix of the .bin and .idx files.")],
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, or folder with vocab.json and merges.txt.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Words of the tokenizer that is trained when none is given.")] = 8192,
    text_key: Annotated[str, typer.Option(help="Field that holds a document's text.")] = "text",
) -> None:
    """Tokenise documents into Megatron's indexed format."""
    from caraml.data.text import prepare_text as prepare

    done = prepare(inputs, out, tokenizer=tokenizer, vocab_size=vocab_size, text_key=text_key)
    typer.echo(f"{done.prefix}: {done.documents:,} documents, {done.tokens:,} tokens, vocabulary {done.vocab_size:,}")


@prepare_app.command("images")
def prepare_images(
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must not exist.")],
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 10,
    per_class: Annotated[int, typer.Option(min=1, help="Images per class.")] = 100,
    seed: Annotated[int, typer.Option(help="Same seed, same images.")] = 0,
) -> None:
    """Draw a small image folder with ImageNet's distribution of sizes."""
    from caraml.data.images import generate_image_folder

    done = generate_image_folder(out, classes, per_class, seed)
    typer.echo(f"{out}: {done.images:,} images in {done.classes:,} classes, {done.bytes:,} bytes")


@prepare_app.command("weather")
def prepare_weather(
    application: Annotated[str, typer.Argument(help="ap1 ... ap6, or atmorep.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; it must be new or empty.")],
    size: Annotated[str, typer.Option(help="tiny: for tests. small: samples of the published size.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Same seed, same files.")] = 0,
) -> None:
    """Write look-alike NetCDF files of a weather and climate application."""
    from caraml.data.weather import prepare_weather as prepare

    done = prepare(application, out, size, seed)
    typer.echo(f"{out}: {done.files:,} files, {done.bytes:,} bytes")


def _two_columns(lines: dict[str, str]) -> None:
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        typer.echo(f"{name:<{width}}{text}")


def _console() -> Console:
    from rich.console import Console

    return Console()


def _records(store: Store, suite: str | None) -> list[Record]:
    """Every record asked for; none at all is an error, since an empty table explains nothing."""
    records = store.records(suite)
    if not records:
        raise InputError(f"no results below {store.root}", "caraml run quick, or --out FOLDER for results elsewhere")
    return records


def _show_results(store: Store, records: list[Record], path: Path, title: str) -> None:
    """The end of a run: the table, and the page."""
    from caraml.report.page import write_report
    from caraml.report.terminal import results_table

    _console().print(results_table(records))
    typer.echo(f"report: {write_report(store, records, path, title)}")


def main() -> None:
    """Turn errors that users can mend into a sentence and an exit code."""
    try:
        app(standalone_mode=True)
    except CaramlError as error:
        typer.echo(f"caraml: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.echo("caraml: stopped; run the same command again to go on", err=True)
        sys.exit(130)
