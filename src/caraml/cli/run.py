"""Verbs that measure, or say what a measurement needs: plan, run, verify, power, memory; and those about campaigns that were started:
status, cancel, logs, retry, archive, import."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated

import typer

from caraml.base.errors import ExitCode, InputError, UnknownNameError, unknown_name
from caraml.base.format import count
from caraml.cli import NAMES, RESULTS, MoreTags, Out, What, app, console, say, tell_unreadable

if TYPE_CHECKING:
    from caraml.engine.memory import Planned
    from caraml.suite.load import SuiteFile
    from caraml.suite.model import Point
    from caraml.system.model import System

SuiteName = Annotated[str, typer.Argument(help="Name of a suite (see `caraml list suites`) or path of a suite file.")]
SystemName = Annotated[str, typer.Option("--system", help="Machine that the points run on (`caraml list systems`), or path of its file.")]
LauncherName = Annotated[
    str | None, typer.Option("--launcher", help="local, slurm, print, a plug-in's; default: slurm if the system has it.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", help="key=value that replaces the suite's: global_batch=8, params.preset=4M.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="A benchmark of the suite, or a word of its name: 800M. Repeatable.")]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Only points that meet this condition: 'global_batch <= 256'. Repeatable.")
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", help="800M, A100, synthetic: what to run, and where. Else a word to find the campaign by. Repeatable."),
]
Again = Annotated[bool, typer.Option("--again", help="Measure also what has a result; earlier results are kept.")]
OneAtATime = Annotated[bool, typer.Option("--one-at-a-time", help="Slurm: never two jobs of the campaign at the same time.")]
Pack = Annotated[int, typer.Option("--pack", min=1, help="Slurm: most points that share one job and run in it one after another.")]
Here = Annotated[bool, typer.Option("--here", help="Measure on this host although it looks like a login node.")]
TooLarge = Annotated[bool, typer.Option("--even-if-too-large", help="Run also points whose memory plan does not fit.")]
Remote = Annotated[Path | None, typer.Option("--remote", help="Print: folder of the results on the machine that starts the scripts.")]
Throttle = Annotated[int | None, typer.Option("--throttle", min=1, help="Slurm: most tasks of an array at the same time.")]


@app.command()
def plan(  # noqa: PLR0917 -- options, which nobody gives by position
    suite: SuiteName,
    more_tags: MoreTags = None,
    out: Out = RESULTS,
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    only: Only = None,
    where: Where = None,
    tag: Tags = None,
    again: Again = False,
    scripts: Annotated[bool, typer.Option("--scripts", help="Print one script of each kind in full.")] = False,
    too_large: TooLarge = False,
    remote: Remote = None,
) -> None:
    """Say what a run would do: points, time, energy, disk, scripts, and what will be refused. Nothing runs."""
    from caraml.campaign import Options
    from caraml.campaign.preview import preview
    from caraml.cli.asked import Asked, by_tags
    from caraml.report.progress import LogLines
    from caraml.report.tables import preview_view
    from caraml.suite.choice import SuitePart

    options = Options(settings=tuple(settings or ()), part=SuitePart(only or (), where or ()), too_large=too_large)
    asked = Asked(suite, out, system, launcher, again, options, remote=remote)
    campaign = by_tags(asked, tag, more_tags).campaign(LogLines(sys.stdout), say)
    found = preview(campaign)
    console().print(preview_view(found, campaign.system, campaign.options.launcher, scripts))
    raise typer.Exit(ExitCode.WRONG_INPUT if found.objections else ExitCode.OK)


@app.command()
def run(  # noqa: PLR0917 -- options, which nobody gives by position
    suite: SuiteName,
    more_tags: MoreTags = None,
    out: Out = RESULTS,
    again: Again = False,
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    only: Only = None,
    where: Where = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; `caraml status` and the same command find the jobs.")] = False,
    tag: Tags = None,
    comment: Annotated[str, typer.Option("--comment", help="A sentence to remember the campaign by.")] = "",
    one_at_a_time: OneAtATime = False,
    pack: Pack = 1,
    throttle: Throttle = None,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Show the table and write the page at the end.")] = True,
    here: Here = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="End if another campaign uses this machine's device.")] = False,
    bell: Annotated[bool, typer.Option("--bell", help="Ring the terminal's bell at the end.")] = False,
    too_large: TooLarge = False,
    remote: Remote = None,
) -> None:
    """Run a suite: every point that has no result yet, and those whose jobs still run. Prints a table and writes a page."""
    from caraml.campaign import Options
    from caraml.cli.asked import Asked, by_tags
    from caraml.launch.batch import SlurmOptions
    from caraml.suite.choice import SuitePart

    options = Options(settings=tuple(settings or ()), part=SuitePart(only or (), where or ()), comment=comment, detach=detach)
    options = replace(options, too_large=too_large, no_wait=no_wait, here=here)
    asked = Asked(suite, out, system, launcher, again, options, SlurmOptions(throttle, one_at_a_time, pack), bell=bell, remote=remote)
    raise typer.Exit(by_tags(asked, tag, more_tags).run(report))


@app.command()
def verify(
    out: Out = RESULTS,
    system: SystemName = "local",
    launcher: LauncherName = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Also check work over so many nodes.")] = 1,
) -> None:
    """Check the measurement: measure work of known truth, here or through a scheduler, and compare every number with the truth."""
    from caraml.cli.asked import place_of
    from caraml.report.progress import LiveTable, LogLines
    from caraml.verify.finding import table
    from caraml.verify.proof import FILE, prove, right

    place = place_of(system, launcher, nodes)
    screen = console()
    with LiveTable(screen) if screen.is_terminal else LogLines(sys.stdout) as watcher:
        findings = prove(out, watcher, place, watcher.note)
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


@app.command()
def memory(
    name: Annotated[str, typer.Argument(help="Suite whose points are planned, or workload whose placements are tried: gpt.")],
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    only: Only = None,
) -> None:
    """Say what each device's memory will hold before anything runs, and which placements fit."""
    from caraml.campaign.machine import machine_of
    from caraml.cli.asked import Asked
    from caraml.engine.memory import planned_of
    from caraml.report.tables import memory_table
    from caraml.suite.choice import SuitePart, with_settings
    from caraml.suite.expand import expand
    from caraml.suite.load import load_suite
    from caraml.workloads import WORKLOADS, params_of

    asked, of_suite = Asked(name, RESULTS, system, launcher), name not in WORKLOADS
    machine = asked.machine()
    known = machine_of(machine, asked.launcher_name(machine))
    if known.only_programs is not None:
        raise InputError(f"nothing to plan on {machine.name}: {known.only_programs}", "name another --system (caraml list systems)")
    if only and not of_suite:
        raise InputError(f"--only {only[0]}: {name} is a workload; expected a suite, whose benchmarks are chosen", f"caraml memory {name}")
    precision = "fp32" if "bf16" in known.emulates else "bf16"
    try:
        file, part = load_suite(name) if of_suite else _one_point(name, machine, precision), SuitePart(only or ())
    except UnknownNameError as error:
        error.hint = error.hint or unknown_name("workload", name, ["gpt"]).hint
        raise
    chosen = part.benchmarks(file)
    file = with_settings(file, settings or [], params_of, chosen)
    whole = expand(file, known, params_of, chosen=chosen)
    keys = part.keys(file, whole, known, params_of)
    points = [one.point for one in whole.points if keys is None or one.key in keys]  # also those for which it has too few nodes
    found = planned_of(points) if of_suite else _fitting(points[0], machine)
    if not found:
        what = " ".join([f"suite {name!r}", *(f"--only {word}" for word in only or ())])
        raise InputError(f"{what} has no point of workload 'gpt', backend 'torch', to place", "caraml memory gpt --system SYSTEM")
    console().print(memory_table(found, machine))


def _one_point(name: str, machine: System, precision: str) -> SuiteFile:
    """A suite of one point of a workload. Raises ``InputError`` where its memory cannot be planned."""
    from caraml.base.toml import parse_toml
    from caraml.suite.load import suite_of

    if name != "gpt":
        raise InputError(f"memory is planned for workload 'gpt', not for {name!r}", f"caraml memory gpt --system {machine.name}")
    if machine.devices[0].memory_bytes is None:
        raise InputError(
            f"{machine.name} does not say how much memory a device has",
            "write memory_bytes = 80_000_000_000, say, below [[devices]] in its file",
        )
    values = f'accumulation = 1\nmicro_batch = 1\nprecision = "{precision}"\nparams = {{ data = "synthetic-device" }}\n'
    return suite_of(parse_toml(f'name = "{name}"\ntitle = "-"\n[[benchmark]]\nname = "{name}"\nworkload = "{name}"\n{values}', "memory"))


def _fitting(point: Point, machine: System) -> list[Planned]:
    """The placements of a point on the fewest devices of a machine. Raises ``InputError`` where there are none."""
    from caraml.engine.memory import MOST_DEVICES, smallest_that_fit
    from caraml.workloads import params_of

    shape = params_of(point.workload).model_validate(point.params).model_shape()  # type: ignore[attr-defined]
    room = machine.devices[0].memory_bytes or 0
    found = smallest_that_fit(point.model_copy(update={"suite": ""}), shape, room, machine.devices_per_node)
    if not found:
        less = "params.sequence_length=LESS" if point.params.get("recompute") == "full" else "params.recompute=full"
        raise InputError(f"no placement on up to {MOST_DEVICES} devices of {machine.name} fits", f"--set {less}")
    return found


@app.command()
def status(
    what: What = None,
    out: Out = RESULTS,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every few seconds until everything is done.")] = False,
) -> None:
    """Say where the points of campaigns stand; looks at files, so it works from any host and after any crash."""
    from caraml.report.progress import listings, status_text, watch_status
    from caraml.results.status import UNHAPPY

    found = listings(out, what)
    if watch:
        watch_status(out, what)
        found = listings(out, what)
    else:
        say(status_text(found), nl=False)
    raise typer.Exit(ExitCode.POINTS_FAILED if any(one.state in UNHAPPY for _, points in found for one in points) else ExitCode.OK)


@app.command()
def cancel(
    what: Annotated[str, typer.Argument(help=f"What: {NAMES}.")],
    out: Out = RESULTS,
) -> None:
    """End the jobs of a campaign, or of one point, and the runner that would start more."""
    from caraml.campaign import cancel as end

    for sentence in end(out, what):
        say(sentence)


@app.command()
def logs(
    point: Annotated[str, typer.Argument(help=f"One point: {NAMES}.")],
    out: Out = RESULTS,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Last lines of each file.")] = 40,
) -> None:
    """Print what the newest attempt at a point said, and where its files are."""
    from caraml.results.selector import select

    for name, text in select(point, out).logs(lines):
        say(f"==> {name}\n{text}")


@app.command()
def retry(  # noqa: PLR0917 -- options, which nobody gives by position
    points: Annotated[list[str] | None, typer.Argument(help=f"What: {NAMES}; may be several.")] = None,
    out: Out = RESULTS,
    failed: Annotated[bool, typer.Option("--failed", help="Every point that failed, was lost, timed out or was invalid.")] = False,
    oom: Annotated[bool, typer.Option("--oom", help="Every point that ran out of memory.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Run what somebody else's suite says without asking.")] = False,
    one_at_a_time: OneAtATime = False,
    pack: Pack = 1,
    throttle: Throttle = None,
    here: Here = False,
) -> None:
    """Measure points again whose result you do not accept; the earlier attempts are kept. Of an imported suite it says what would run, and
    asks."""
    from caraml.campaign import Options
    from caraml.cli.asked import Asked
    from caraml.launch.batch import SlurmOptions
    from caraml.results.selector import to_retry

    codes, slurm = [], SlurmOptions(throttle, one_at_a_time, pack)
    for listing, keys in to_retry(out, tuple(points or ()), failed, oom):
        taken = frozenset(keys)
        options = Options(
            settings=tuple(listing.settings),
            tags=tuple(listing.tags),
            comment=listing.comment,
            only=taken,
            labels=frozenset(label for key, label in listing.points if key in taken),
            imported=listing.stranger(),
            here=here,
        )
        system = listing.system if listing.stranger() else listing.system_file or listing.system  # no file that others name
        asked = Asked(listing.file, out, system, listing.launcher, options=options, slurm=slurm, text=listing.text or None, trust=trust)
        codes.append(asked.run())
    if not codes:
        say("nothing to try again")
    raise typer.Exit(max(codes, default=0))


@app.command()
def archive(
    suite: Annotated[str, typer.Argument(help="A suite that was run, SUITE@ROUND, or a tag.")],
    file: Annotated[Path, typer.Argument(help="Archive to write, e.g. suite.caraml.zip; it must not exist.")],
    out: Out = RESULTS,
) -> None:
    """Pack a campaign into one file: records, raw samples, scripts, logs, and a table of all records, each with its hash."""
    from caraml.results.archive import pack

    done = pack(out, suite, file)
    say(f"{file}: {count(done.records, 'record')}, {count(done.files, 'file')}, {count(done.bytes, 'byte')}")
    if done.left_out:
        tell_unreadable(done.left_out, "not in the archive")
        raise typer.Exit(ExitCode.POINTS_FAILED)


_TABLES = (".csv", ".tsv", ".dat", ".txt", ".md")


@app.command("import")
def import_(  # noqa: PLR0917 -- options, which nobody gives by position
    file: Annotated[Path, typer.Argument(help="An archive, a result table of JUBE (.csv, .dat, .md) or, with --jube, a script of JUBE.")],
    more_tags: MoreTags = None,
    out: Out = RESULTS,
    suite: Annotated[str | None, typer.Option("--suite", help="Name for the records of a table, or for the suite of a script.")] = None,
    jube: Annotated[bool, typer.Option("--jube", help="Print the suite that a JUBE script (YAML, XML) of CARAML's asks for.")] = False,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="With --jube: a tag of the script, as of `jube run`; may be several.")
    ] = None,
    result: Annotated[list[str] | None, typer.Option("--result", help="Take this column of a table for a result; may be repeated.")] = None,
    parameter: Annotated[list[str] | None, typer.Option("--parameter", help="Take it for a parameter; may be repeated.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken from a table, and as what.")] = False,
) -> None:
    """Read an archive back, or a JUBE table as records with what it knows; what is there already is kept. A JUBE script becomes a suite."""
    if not file.exists():
        raise InputError(f"{file}: no such file")
    tags = [*(tag or ()), *(more_tags or ())]
    if more_tags and not tag:
        given = " ".join(more_tags)
        raise InputError(f"found {given!r} after the file, expected options", f"caraml import --jube {file} --tag {given}")
    if tags and not jube:
        raise InputError("--tag is of --jube: it chooses in a script of JUBE", f"caraml import --jube {file} --tag {' '.join(tags)}")
    if (result or parameter or dry_run) and (jube or file.suffix not in _TABLES):
        raise InputError(f"{file}: --result, --parameter and --dry-run are of a table of results ({', '.join(_TABLES)})")
    if jube:
        from caraml.suite.jube import suite_from_script

        say(suite_from_script(file, tags, suite), nl=False)
        return
    if file.suffix in _TABLES:
        from caraml.results.jube import read_table

        done = read_table(file, out, suite, results=result or (), parameters=parameter or (), add=not dry_run)
        for kind, titles in done.columns.items():
            say(fill(f"{kind}: {', '.join(titles)}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    elif file.suffix in {".yaml", ".yml", ".xml"}:
        raise InputError(
            f"{file}: an archive or a table is expected", "caraml import --jube FILE prints the suite that a JUBE script asks for"
        )
    else:
        from caraml.results.archive import unpack

        done = unpack(file, out)
    say(f"{out}: {count(done.records, 'record')} {'would be ' * dry_run}added, {done.known:,} known already")
    if done.ahead:
        say(f"{done.ahead:,} of them are now the newest attempts at points that were there; suites and last rounds show them, whenever run")
