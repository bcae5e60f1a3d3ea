"""Verbs that measure: plan, run, verify, power."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from caraml.cli.app import RESULTS, Out, app, console, say
from caraml.errors import ExitCode

SuiteName = Annotated[str, typer.Argument(help="Name of a suite (see `caraml list suites`) or path of a suite file.")]
SystemName = Annotated[str, typer.Option("--system", help="Machine that the points run on (`caraml list systems`), or path of its file.")]
LauncherName = Annotated[str | None, typer.Option("--launcher", help="local, slurm or print; default: slurm where the system has it.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="key=value that replaces the suite's: global_batch=8, params.preset=4M.")]
Again = Annotated[bool, typer.Option("--again", help="Measure also what has a result; earlier results are kept.")]
OneAtATime = Annotated[bool, typer.Option("--one-at-a-time", help="Slurm: never two jobs of the campaign at the same time.")]
Pack = Annotated[int, typer.Option("--pack", min=1, help="Slurm: most points that share one job and run in it one after another.")]
Throttle = Annotated[int | None, typer.Option("--throttle", min=1, help="Slurm: most tasks of an array at the same time.")]


@app.command()
def plan(  # noqa: PLR0917 -- options, which nobody gives by position
    suite: SuiteName,
    out: Out = RESULTS,
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    again: Again = False,
    scripts: Annotated[bool, typer.Option("--scripts", help="Print one script of each kind in full.")] = False,
) -> None:
    """Say what a run would do: points, time, energy, disk, scripts, and what will be refused. Nothing runs."""
    from caraml.campaign.preview import preview
    from caraml.cli.asked import Asked
    from caraml.report.live import LogLines
    from caraml.report.preview import preview_view

    campaign = Asked(suite, out, system, launcher, tuple(settings or ()), again).campaign(LogLines(sys.stdout), say)
    found = preview(campaign)
    console().print(preview_view(found, campaign.system, campaign.options.launcher, scripts))
    raise typer.Exit(ExitCode.WRONG_INPUT if found.objections else ExitCode.OK)


@app.command()
def run(  # noqa: PLR0917 -- options, which nobody gives by position
    suite: SuiteName,
    out: Out = RESULTS,
    again: Again = False,
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; `caraml status` and the same command find the jobs.")] = False,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="A word to find the campaign by; may be given several times.")] = None,
    comment: Annotated[str, typer.Option("--comment", help="A sentence to remember the campaign by.")] = "",
    one_at_a_time: OneAtATime = False,
    pack: Pack = 1,
    throttle: Throttle = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Show the table and write the page at the end.")] = True,
) -> None:
    """Run a suite: every point that has no result yet, and those whose jobs still run. Prints a table and writes a page."""
    from caraml.cli.asked import Asked
    from caraml.launch.batch import SlurmOptions

    slurm = SlurmOptions(throttle, one_at_a_time, pack)
    asked = Asked(suite, out, system, launcher, tuple(settings or ()), again, detach, tuple(tag or ()), comment, slurm)
    raise typer.Exit(asked.run(report))


@app.command()
def verify(
    out: Out = RESULTS,
    system: SystemName = "local",
    launcher: LauncherName = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Also check work over so many nodes.")] = 1,
) -> None:
    """Check the measurement: measure work of known truth, here or through a scheduler, and compare every number with the truth."""
    from caraml.cli.asked import place_of
    from caraml.report.live import LiveTable, LogLines
    from caraml.verify.finding import table
    from caraml.verify.proof import FILE, prove, right

    place = place_of(system, launcher, nodes)
    screen = console()
    with LiveTable(screen) if screen.is_terminal else LogLines(sys.stdout) as watcher:
        findings = prove(out, watcher, place)
    screen.print(table(findings))
    verdicts = [finding.verdict for finding in findings]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("right", "wrong", "note", "not here"))
    say(f"{counts}; written to {out / FILE}")
    raise typer.Exit(ExitCode.OK if right(findings) else ExitCode.POINTS_FAILED)


@app.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def power(context: typer.Context) -> None:
    """Measure the energy of any command: `caraml power -- COMMAND`; also `watch`, `sources`, `merge`."""
    from caraml.power.__main__ import main as measure

    raise typer.Exit(measure(context.args))
