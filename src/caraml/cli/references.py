"""The verb that shows what others published: references."""

from __future__ import annotations

from typing import Annotated

import typer

from caraml.cli.app import app, say


@app.command()
def references(
    *,
    source: Annotated[str | None, typer.Option(help="caraml, maelstrom, pearc or epicure.")] = None,
    table: Annotated[str | None, typer.Option(help='Table of the source: 17, or a name such as "text 4.3.1".')] = None,
    system: Annotated[str | None, typer.Option(help="Machine, for example jureca-a100.")] = None,
    workload: Annotated[str | None, typer.Option(help="Workload, for example radiation_emulation.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric, for example throughput.")] = None,
    mode: Annotated[str | None, typer.Option(help="train, compute, data or inference.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="List where the sources disagree with their own numbers.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values, every column.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, every column.")] = False,
) -> None:
    """Print published results, or where they contradict themselves. Without a filter: which tables there are."""
    from caraml.analysis.table import to_csv, to_json
    from caraml.reference import load, select
    from caraml.reference.listing import audit_lines, audit_text, full_lines, overview, rows_text

    wanted = {"source": source, "table": table, "system": system, "workload": workload, "metric": metric, "mode": mode}
    rows = select(load(), **wanted)
    if csv or json:
        columns, lines = audit_lines(rows) if audit else full_lines(rows)
        say((to_csv if csv else to_json)(columns, lines), nl=False)
    elif audit:
        say(audit_text(rows))
    elif any(wanted.values()):
        say(rows_text(rows))
    else:
        say(overview(rows))
