"""The command line: one short function per verb, one file per group of verbs. What a verb needs is imported inside it, so that help is
instant."""

from __future__ import annotations

import sys

import typer

# Files register their verbs when they are imported; help shows them in this order.
# isort: off
from caraml.cli import run, results, machine, data  # noqa: F401

# isort: on
from caraml.cli.app import app
from caraml.errors import CaramlError


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
