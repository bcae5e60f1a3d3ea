"""Verbs about campaigns that were started: status, cancel, logs, retry, archive, import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from caraml.base.errors import ExitCode, InputError
from caraml.cli.app import NAMES, RESULTS, MoreTags, Out, What, app, say


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
    from caraml.campaign.stop import cancel as end

    for sentence in end(out, what):
        say(sentence)


@app.command()
def logs(
    point: Annotated[str, typer.Argument(help=f"One point: {NAMES}.")],
    out: Out = RESULTS,
    lines: Annotated[int, typer.Option("--lines", min=1, help="Last lines of each file.")] = 40,
) -> None:
    """Print what the newest attempt at a point said, and where its files are."""
    from caraml.campaign.stop import logs_of

    for name, text in logs_of(out, point, lines):
        say(f"==> {name}\n{text}")


@app.command()
def retry(  # noqa: PLR0917 -- options, which nobody gives by position
    points: Annotated[list[str] | None, typer.Argument(help=f"What: {NAMES}; may be several.")] = None,
    out: Out = RESULTS,
    failed: Annotated[bool, typer.Option("--failed", help="Every point that failed, was lost, timed out or was invalid.")] = False,
    oom: Annotated[bool, typer.Option("--oom", help="Every point that ran out of memory.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Run what somebody else's suite says without asking.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Measure on this host although it looks like a login node.")] = False,
) -> None:
    """Measure points again whose result you do not accept; the earlier attempts are kept. Of an imported suite it says what would run, and
    asks."""
    from caraml.campaign import Options
    from caraml.campaign.stop import to_retry
    from caraml.cli.asked import Asked

    codes = []
    for listing, keys in to_retry(out, tuple(points or ()), failed, oom):
        options = Options(
            settings=tuple(listing.settings),
            tags=tuple(listing.tags),
            comment=listing.comment,
            only=frozenset(keys),
            imported=listing.stranger(),
            here=here,
        )
        asked = Asked(listing.file, out, listing.system, listing.launcher, options=options, text=listing.text or None, trust=trust)
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
    say(f"{file}: {done.records:,} records, {done.files:,} files, {done.bytes:,} bytes")


@app.command("import")
def import_(  # noqa: PLR0917 -- options, which nobody gives by position
    file: Annotated[Path, typer.Argument(help="An archive, a result table of JUBE (.csv, .dat) or, with --jube, a script of JUBE.")],
    more_tags: MoreTags = None,
    out: Out = RESULTS,
    suite: Annotated[str | None, typer.Option("--suite", help="Name for the records of a table, or for the suite of a script.")] = None,
    jube: Annotated[bool, typer.Option("--jube", help="Print the suite that a JUBE script (YAML, XML) of CARAML's asks for.")] = False,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", help="With --jube: a tag of the script, as of `jube run`; may be several.")
    ] = None,
) -> None:
    """Read an archive back, or a JUBE table as records with what it knows; what is there already is kept. A JUBE script becomes a suite."""
    if not file.exists():
        raise InputError(f"{file}: no such file")
    tags = [*(tag or ()), *(more_tags or ())]
    if more_tags and not tag:
        given = " ".join(more_tags)
        raise InputError(f"found {given!r} after the file, expected options", f"caraml import --jube {file} --tag {given}")
    if tags and not jube:
        raise InputError("--tag is of --jube: it chooses in a script of JUBE")
    if jube:
        from caraml.suite.jube import suite_from_script

        say(suite_from_script(file, tags, suite), nl=False)
        return
    if file.suffix in {".csv", ".dat"}:
        from caraml.results.jube import read_table

        done = read_table(file, out, suite)
    elif file.suffix in {".yaml", ".yml", ".xml"}:
        raise InputError(
            f"{file}: an archive or a table is expected", "caraml import --jube FILE prints the suite that a JUBE script asks for"
        )
    else:
        from caraml.results.archive import unpack

        done = unpack(file, out)
    say(f"{out}: {done.records:,} records added, {done.known:,} known already")
