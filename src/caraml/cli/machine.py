"""Verbs about machines and about what CARAML knows: list, system, doctor."""

from __future__ import annotations

import typer

from caraml.cli.app import RESULTS, Out, app, console, list_app, system_app, two_columns
from caraml.errors import ExitCode


@list_app.command("suites")
def list_suites() -> None:
    """Suites that come with CARAML."""
    from caraml.suite.load import catalog_suites, load_suite

    two_columns({name: load_suite(name).suite.title for name in catalog_suites()})


@list_app.command("workloads")
def list_workloads() -> None:
    """What can be trained."""
    from caraml.workloads import WORKLOADS

    two_columns(WORKLOADS)


@list_app.command("systems")
def list_systems() -> None:
    """Machines of the catalogue."""
    from caraml.system.catalogue import list_systems as systems

    catalogue = {system.name: f"{system.title} ({', '.join(system.aliases)})" for system in systems()}
    two_columns({"local": "this machine, detected when it is used", **catalogue})


@system_app.command("detect")
def system_detect() -> None:
    """Print what this machine is."""
    from caraml.system.detect import detect

    typer.echo(detect().model_dump_json(indent=2))


@app.command()
def doctor(out: Out = RESULTS) -> None:
    """Say what this machine can measure, what is missing, and the command that would mend it."""
    from caraml.doctor import checks
    from caraml.report.tables import checks_table

    found = checks(out)
    console().print(checks_table(found))
    raise typer.Exit(ExitCode.ENVIRONMENT_UNFIT if any(check.status == "missing" for check in found) else ExitCode.OK)
