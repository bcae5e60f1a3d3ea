"""Verbs about machines and about what CARAML knows: list, system show|validate|detect, doctor, container build."""

from __future__ import annotations

import shlex
import subprocess
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from caraml.base.errors import EnvironmentUnfitError, ExitCode
from caraml.cli.app import RESULTS, Out, app, console, list_app, say, system_app, two_columns

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@list_app.command("suites")
def list_suites() -> None:
    """Suites that come with CARAML."""
    from caraml.suite.load import catalog_suites, load_suite

    two_columns({name: load_suite(name).suite.title for name in catalog_suites()})


@list_app.command("workloads")
def list_workloads() -> None:
    """What can be trained."""
    from caraml.workloads import titles

    two_columns(titles())


@list_app.command("systems")
def list_systems() -> None:
    """Machines that have a description: those that come with CARAML and your own."""
    from caraml.report.tables import systems_table
    from caraml.system.catalogue import list_systems as systems

    console().print(systems_table(systems()))


@system_app.command("show")
def system_show(
    name: Annotated[str, typer.Argument(help="A name or alias of `caraml list systems`, `local`, or a TOML file.")], json: Json = False
) -> None:
    """Show what is known about a machine, each figure with its source."""
    from caraml.report.tables import rows_table
    from caraml.system.catalogue import load_system
    from caraml.system.describe import rows

    system = load_system(name)
    if json:
        say(system.model_dump_json(indent=2))
        return
    aliases = f" ({', '.join(system.aliases)})" if system.aliases else ""
    console().print(f"{system.name}{aliases}: {system.title}", markup=False, highlight=False)
    console().print(rows_table(rows(system)))
    for note in system.notes:
        console().print(f"* {note}", markup=False, highlight=False)


@system_app.command("validate")
def system_validate(file: Annotated[Path, typer.Argument(help="A TOML file that describes a machine.")]) -> None:
    """Check the description of a machine: every fault with its line, figures without a source among them."""
    from caraml.system.catalogue import described

    found = described(file)
    over = f", over {' and '.join(str(path) for path in found.files[:-1])}" if len(found.files) > 1 else ""
    say(f"{file}: describes {found.system.name}, {found.system.title}{over}")


@system_app.command("detect")
def system_detect(json: Json = False) -> None:
    """Describe this machine as a TOML file that `caraml system validate` accepts: `caraml system detect > my.toml`."""
    from caraml.system.describe import as_toml
    from caraml.system.detect import detect

    system = detect()
    say(system.model_dump_json(indent=2) if json else as_toml(system), nl=json)


@app.command()
def doctor(
    out: Out = RESULTS,
    json: Json = False,
    names: Annotated[bool, typer.Option("--names", help="With --json: keep names of host and user, device ids, Slurm job.")] = False,
) -> None:
    """Say what this machine can measure, what is missing, and the command that would mend it."""
    from caraml.doctor import checks, report
    from caraml.report.tables import checks_table

    found = checks(out)
    if json:
        say(dumps(report(found, names), indent=2))
    else:
        console().print(checks_table(found))
    raise typer.Exit(ExitCode.ENVIRONMENT_UNFIT if any(check.status == "missing" for check in found) else ExitCode.OK)


container_app = typer.Typer(no_args_is_help=True, help="Make images that points run in.")
app.add_typer(container_app, name="container")

Runtime = Annotated[str, typer.Option("--runtime", help="apptainer, singularity, podman or charliecloud.")]


@container_app.command("build")
def container_build(
    definition: Annotated[Path, typer.Argument(help="Apptainer definition file, e.g. containers/cuda.def.")],
    image: Annotated[Path, typer.Argument(help="Image file to write.")],
    runtime: Runtime = "apptainer",
) -> None:
    """Build an image from a definition file; prints the command and runs it."""
    from caraml.launch.container import build_command, runtime_called

    _run(build_command(runtime_called(runtime), definition, image))


@container_app.command("pull")
def container_pull(
    image: Annotated[str, typer.Argument(help="Name in a registry, e.g. docker://python:3.12.")],
    file: Annotated[Path | None, typer.Argument(help="Image file to write; Podman and Charliecloud keep images themselves.")] = None,
    runtime: Runtime = "apptainer",
) -> None:
    """Fetch an image from a registry; prints the command and runs it."""
    from caraml.launch.container import pull_command, runtime_called

    _run(pull_command(runtime_called(runtime), image, file))


def _run(command: list[str]) -> None:
    say(f"$ {shlex.join(command)}")
    code = subprocess.run(command, check=False).returncode  # noqa: S603 -- made by caraml.launch.container of the user's own words; no shell
    if code:
        raise EnvironmentUnfitError(f"{command[0]} ended with exit status {code}")
