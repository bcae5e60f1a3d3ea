"""Verbs that make container images: container build, pull."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from caraml.cli.app import app, say
from caraml.errors import EnvironmentUnfitError

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
