"""Verbs over several results: compare, scaling, history, advise, references."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from caraml.base.errors import ExitCode, InputError
from caraml.cli.app import NAMES, RESULTS, Out, What, app, chosen, console, say

if TYPE_CHECKING:
    from caraml.report.section import Section


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
    from caraml.analysis.select import sides
    from caraml.report.comparison import comparison_sections, gate_lines

    gate = parse_gate(fail_if) if fail_if is not None else None
    found = compared(*sides(a, b, out), metric or (), same_within / 100)
    _print(comparison_sections(found, everything), markdown)
    if gate is not None:
        lines, failed = gate_lines(gate, found)
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
    from caraml.analysis.scaling import matrix, solutions_of, step_views
    from caraml.analysis.scaling import scaling as scaled
    from caraml.report.comparison import scaling_sections

    found = chosen(what, out)
    store, records = found.store, found.records()
    families = scaled(records, store, efficiency / 100)
    if not families:
        raise InputError("no two results differ in the number of devices only", "sweep it in the suite: devices = [1, 2, 4]")
    solutions = solutions_of(records)
    cells = [
        ("Time to solution: best number of devices over smallest", matrix(solutions, "time")),
        ("Energy to solution: best number of devices over smallest", matrix(solutions, "energy")),
        ("Energy at the number of devices with the best time", matrix(solutions, "energy", "time")),
    ]
    used = {record.key: record for family in families for record in family.records}
    _print(scaling_sections(families, cells, step_views(used.values(), store)), markdown)


@app.command()
def history(
    what: Annotated[list[str] | None, typer.Argument(metavar="[WHAT]...", help=f"What: {NAMES}; may be several.")] = None,
    out: Out = RESULTS,
    metric: Annotated[str, typer.Option("--metric", help="Which number to follow.")] = "throughput",
    markdown: AsMarkdown = False,
) -> None:
    """Show a number over time, every attempt counted: where its level changed, and what changed with it."""
    from caraml.analysis.history import history as followed
    from caraml.report.comparison import history_sections

    named = [chosen(name, out) for name in what] if what else [chosen(None, out)]
    records = {(found.store.root.resolve(), one.key, one.attempt): one for found in named for one in found.every_attempt()}
    series = followed(list(records.values()), metric)
    if not series:
        raise InputError(f"no result has a value for {metric}", "caraml results --csv shows which numbers there are")
    _print(history_sections(series), markdown)


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

    found = advised(chosen(what, out).records(), within / 100)
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
    workload: Annotated[str | None, typer.Option(help="Workload, for example radiation_emulation.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric, for example throughput.")] = None,
    mode: Annotated[str | None, typer.Option(help="train, compute, data or inference.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, every column.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, every column.")] = False,
) -> None:
    """Print published results. Without a filter: which tables there are."""
    from caraml.analysis.table import to_csv, to_json
    from caraml.reference import load, select
    from caraml.reference.listing import full_lines, overview, rows_text

    wanted = {"source": source, "table": table, "system": system, "workload": workload, "metric": metric, "mode": mode}
    every = load()
    if system is not None and system not in {row.system for row in every}:  # another name of the same machine
        from caraml.system.catalogue import list_systems

        machines = (one for one in list_systems() if system.casefold() in {word.casefold() for word in (one.name, *one.aliases)})
        words = {word for one in machines for word in (one.name, *one.aliases, *(alias.casefold() for alias in one.aliases))}
        wanted["system"] = next((row.system for row in every if row.system in words), system)
    rows = select(every, **wanted)
    if csv or json:
        columns, lines = full_lines(rows)
        say((to_csv if csv else to_json)(columns, lines), nl=False)
    elif any(wanted.values()):
        say(rows_text(rows))
    else:
        say(overview(rows))
