"""Verbs that say whether a machine is still as fast: accept, check."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from caraml.base.errors import InputError
from caraml.cli import RESULTS, Out, app, console, one_of, say
from caraml.cli.run import Here, LauncherName, Settings, SuiteName, SystemName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from caraml.analysis.baseline import Baseline, WorkRuns
    from caraml.analysis.check import SuiteCheck
    from caraml.cli.asked import Asked
    from caraml.results.record import Record

Flagged = Literal["strict", "warn", "ignore"]
_MOST_ROUNDS = 1000
_ENOUGH_RUNS, _ENOUGH_TIME = 10, timedelta(days=14)
"""From where on `accept` does not ask for more."""


@app.command()
def accept(
    campaign: Annotated[str, typer.Argument(help="A suite that was run, a variant or a round of it: quick@2 (see `caraml status`).")],
    name: Annotated[str, typer.Option("--as", help="Name of the baseline.")],
    out: Out = RESULTS,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=_MOST_ROUNDS, help="Accept the newest so many attempts at every point.")
    ] = 1,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the baseline of this name.")] = False,
) -> None:
    """Accept a campaign as reference for `caraml check`: all its repeats, with the interval between runs."""
    from caraml.analysis.baseline import NAMES, failed_repeats, place, runs_of, write_baseline
    from caraml.analysis.baseline import accept as accepted
    from caraml.analysis.estimate import started
    from caraml.base.format import count
    from caraml.results.selector import select

    suite, records = runs_of(select(campaign, out), rounds)
    if not re.fullmatch(NAMES, name):
        raise InputError(f"--as {name!r}: expected letters, digits, '.', '_' and '-', at most 64", "--as accepted-2026")
    path = place(out, name)
    if path.exists() and not replace:
        raise InputError(f"there is a baseline {name!r} already: {path}", "--replace, or another name")
    baseline = accepted(records, suite, name)
    write_baseline(out, baseline)
    runs = [len(metric.runs) for point in baseline.points for metric in list(point.metrics.values())[:1]]
    least, most = min(runs, default=0), max(runs, default=0)
    say(f"{path}: {count(len(baseline.points), 'point')}, {count(most, 'run') if least == most else f'{least} to {most} runs'} each")
    for point in baseline.points:
        if point.reason is not None:
            say(f"  {point.label}: accepted without a result: {point.reason}")
        elif point.flags:
            say(f"  {point.label}: accepted with flags: {', '.join(point.flags)}")
    for sentence in failed_repeats(records):
        say(f"  {sentence}")
    left_out = sum(record.status == "ok" for record in records) - sum(runs)
    if left_out > 0:
        say(f"  {count(left_out, 'run')} left out, flagged where most runs of the point are not")
    times = [started(record) for record in records if record.status == "ok"]
    if most < _ENOUGH_RUNS or max(times) - min(times) < _ENOUGH_TIME:
        say("  few runs, or runs of few days, tell little of how much runs vary: ten nights over some weeks, with --rounds 10, make checks")
        say("  more sensitive and false alarms rarer")


@app.command()
def check(  # noqa: PLR0917 -- options, which nobody gives by position
    suite: SuiteName,
    baseline: Annotated[str, typer.Option("--baseline", help="Name that a campaign was accepted under.")],
    out: Out = RESULTS,
    flags: Annotated[
        Flagged, one_of(Flagged, "--flags", "strict: measure flagged points again; warn: use their numbers and say so.")
    ] = "strict",
    within: Annotated[str, typer.Option("--within", help="Loss that is tolerated where it is shown to be smaller: 2%.")] = "2%",
    retries: Annotated[
        int, typer.Option("--retries", min=0, max=100, help="Measure undecided points again so often, and worse ones once.")
    ] = 1,
    nights: Annotated[int, typer.Option("--nights", min=1, max=50, help="Also judge the last so many nights together.")] = 5,
    latest: Annotated[bool, typer.Option("--latest", help="Run nothing: judge the newest results.")] = False,
    system: SystemName = "local",
    launcher: LauncherName = None,
    settings: Settings = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit's XML to this file; what it held goes at once.")] = None,
    here: Here = False,
) -> None:
    """Run a suite anew and say whether it is still as fast as accepted: exit code 0 yes, 4 worse, 5 undecided."""
    from caraml.analysis.baseline import find_baseline, machine_of_system, refuse_other_machine, who_wrote, works_of
    from caraml.analysis.check import SuiteCheck, changed_since, judged, settle
    from caraml.campaign import Options
    from caraml.cli.asked import Asked
    from caraml.report.progress import LogLines

    tolerance, began, clock = _share(within), datetime.now(UTC), time.monotonic()
    if junit is not None:
        _remove_earlier(junit)
    accepted = find_baseline(out, baseline)
    asked = Asked(suite, out, system, launcher, again=True, options=Options(settings=tuple(settings or ()), here=here))
    campaign = asked.campaign(LogLines(sys.stderr), lambda text: say(text, err=True))
    if campaign.options.launcher == "print" and not latest:
        raise InputError("launcher 'print' runs nothing, so there is nothing to judge", "--launcher slurm, or run and --latest")
    refuse_other_machine(accepted, machine_of_system(campaign.system))
    works, notes = works_of(campaign.plan().points, accepted)
    notes += (*who_wrote(out, baseline), *_give_results(works, asked, accepted, latest))
    judge = partial(judged, flags=flags, within=tolerance, nights=nights)
    found = settle(
        works, judge, lambda keys: _measured(replace(asked, options=replace(asked.options, only=keys))), 0 if latest else retries
    )
    changed = changed_since(accepted, [record for work in works for record in work.newest])
    done = SuiteCheck(campaign.suite.suite.name, accepted, tolerance, tuple(found), changed, notes)
    _tell(done, json, junit, began, time.monotonic() - clock)
    raise typer.Exit(done.exit_code)


def _tell(done: SuiteCheck, json: bool, junit: Path | None, began: datetime, seconds: float) -> None:
    """Write and print what was found; the check took ``seconds``."""
    from caraml.base.files import write_file
    from caraml.report.comparison import check_json, check_junit, check_sections, verdict_line
    from caraml.report.section import terminal

    try:
        if junit is not None:
            write_file(junit, check_junit(done, seconds, began.strftime("%Y-%m-%dT%H:%M:%S")))
    finally:  # a night was measured: a disk that is full costs the file and not the verdict
        try:
            say(check_json(done) if json else verdict_line(done))
            if not json:
                console().print(terminal(check_sections(done)))
            sys.stdout.flush()
        except (BrokenPipeError, SystemExit):  # whoever reads took the line and left, and rich would end the process: the verdict stays
            with suppress(OSError):  # what is still in the buffer goes nowhere
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _remove_earlier(junit: Path) -> None:
    """Remove what the file holds: a check that ends without a verdict must not leave that of an earlier night.

    Raises:
        InputError: it is no plain file, or its folder is not there or not to be written to.
    """
    folder = junit.absolute().parent
    if not folder.is_dir():
        raise InputError(f"--junit {junit}: there is no such folder")
    if not os.access(folder, os.W_OK):
        raise InputError(f"--junit {junit}: you may not write to {folder}", "--junit FILE in a folder of yours")
    if junit.is_symlink() or (junit.exists() and not junit.is_file()):
        raise InputError(f"--junit {junit}: found a link, a folder or a device, expected a plain file or none")
    junit.unlink(missing_ok=True)


def _share(text: str) -> float:
    """``2%`` or ``2`` as 0.02."""
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,6})?)\s*%?", text.strip())
    if match is None or not 0.01 <= float(match[1]) <= 50:
        raise InputError(f"--within {text!r}: expected a percentage from 0.01% to 50%", "--within 2%")
    return float(match[1]) / 100


def _measured(asked: Asked) -> Sequence[Record]:
    """Run, with all words to standard error: the verdict comes first on standard output."""
    from caraml.campaign.runner import run_campaign
    from caraml.report.progress import LogLines

    watcher = LogLines(sys.stderr)
    with watcher:
        return [record for record in run_campaign(asked.campaign(watcher, watcher.note)) if not record.ended_by_hand]


def _give_results(works: Sequence[WorkRuns], asked: Asked, accepted: Baseline, latest: bool) -> tuple[str, ...]:
    """Run the suite, or with ``latest`` take the newest results since the baseline, and give every piece of work its own; returns what to
    know of them. Raises ``InputError`` where there are none."""
    from caraml.analysis.baseline import accepted_until, add_history
    from caraml.analysis.estimate import started
    from caraml.base.format import count
    from caraml.results.store import Store

    store, since = Store(asked.out), accepted_until(accepted)
    notes: tuple[str, ...] = ()
    if latest:
        keys = sorted(frozenset().union(*(work.keys for work in works)))
        records: Sequence[Record] = [record for key in keys for record in store.newest(key, 1) if started(record) > since]
        if not records:
            what = f"nothing was measured since {accepted.newest_run}, the newest run of baseline {accepted.name!r}, by this version here"
            raise InputError(what, "leave out --latest")
        first, last = (f"{choose(map(started, records)):%Y-%m-%d %H:%M} UTC" for choose in (min, max))  # they may be of long ago
        to = f" to {last}" if last != first else ""
        notes = (f"nothing was run, and what is worse not measured again: results of {first}{to}",)
    else:
        records = _measured(asked)
    for work in works:
        work.newest = [record for record in records if record.key in work.keys]
    if unread := add_history(works, store, since):
        notes += (f"{count(len(unread), 'earlier record')} left out: {unread[0].reason}",)
    return notes
