"""Verbs that measure: run, verify, power."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from caraml.cli.app import RESULTS, Out, app, console
from caraml.errors import ExitCode

if TYPE_CHECKING:
    from caraml.results.record import Record
    from caraml.results.store import Store


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

    file, store, screen = load_suite(suite), Store(out), console()
    with LiveTable(screen) if screen.is_terminal else LogLines(sys.stdout) as watcher:
        records = Campaign(file, detect(), store, LocalLauncher(), watcher, again).run()
    _show_results(store, records, out / f"{file.suite.name}.html", file.suite.title)
    raise typer.Exit(exit_code(records))


@app.command()
def verify(out: Out = RESULTS) -> None:
    """Prove the ruler on this machine: measure work of known truth and compare every number with it."""
    from caraml.report.live import LiveTable, LogLines
    from caraml.verify.finding import table
    from caraml.verify.proof import FILE, prove, right

    screen = console()
    with LiveTable(screen) if screen.is_terminal else LogLines(sys.stdout) as watcher:
        findings = prove(out, watcher)
    screen.print(table(findings))
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("right", "wrong", "note", "not here"))
    typer.echo(f"{counts}; written to {out / FILE}")
    raise typer.Exit(ExitCode.OK if right(findings) else ExitCode.POINTS_FAILED)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def power(context: typer.Context) -> None:
    """Measure the energy of any command: `caraml power -- COMMAND`; also `watch`, `sources`, `merge`."""
    from caraml.power.__main__ import main as measure

    raise typer.Exit(measure(context.args))


def _show_results(store: Store, records: list[Record], path: Path, title: str) -> None:
    """The end of a run: the table, and the page."""
    from caraml.report.page import write_report
    from caraml.report.terminal import results_table

    console().print(results_table(records))
    typer.echo(f"report: {write_report(store, records, path, title)}")
