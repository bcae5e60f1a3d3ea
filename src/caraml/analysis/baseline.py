"""What a user accepts as reference: which work on which machine, with the numbers of all its runs and their interval, in one small file,
``ROOT/baselines/NAME.json``.

Points are known by their work and not by their key, which changes with every version of the software. The file is text that anybody may
have written: its size, its counts and its numbers are limited, and nothing in it is ever run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from caraml import METHOD_VERSION
from caraml.analysis.estimate import UNKNOWN, started, time_of, values
from caraml.analysis.grouping import axes, facts, grouped, valid, why_not, without
from caraml.analysis.run_variation import estimates_of
from caraml.base.errors import NEWER, InputError, in_a_line, unknown_name
from caraml.base.files import make_folder, who_else, write_file
from caraml.base.format import some
from caraml.base.limits import FLAGS, LARGEST, LISTING, METRICS, NAME, POINTS, counted, read_json
from caraml.results.record import Record
from caraml.results.selector import Selection
from caraml.results.store import Store
from caraml.suite.expand import PlannedPoint
from caraml.suite.model import OF_EPOCHS, Point
from caraml.system.model import System

SCHEMA_VERSION = 1
FOLDER = "baselines"
NAMES = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""What a baseline may be called."""

Text = Annotated[str, Field(max_length=NAME)]
Positive = Annotated[float, Field(gt=1 / LARGEST, lt=LARGEST)]
Share = Annotated[float, Field(ge=0, le=100)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class AcceptedRun(_Part):
    """One number of one accepted run."""

    value: Positive
    error: Share | None = Field(None, description="relative standard error by the record's own interval")
    bound: Share = Field(0.0, description="how far the logarithm may be off because of the sensor")
    accuracy: Share = Field(0.0, description="systematic relative error of the sensor")
    sensors: Text | None = None
    host: Text = ""
    time: Text | None = Field(None, description="when the run started, ISO 8601 with offset")


class AcceptedMetric(_Part):
    """One number of one point."""

    unit: Text
    scope: Text | None = Field(None, description="energy boundary")
    mean: Positive | None = Field(None, description="geometric mean of the runs")
    low: Positive | None = Field(None, description="lower end of the mean's 95 % interval by what the runs vary")
    high: Positive | None = Field(None, description="upper end")
    runs: list[AcceptedRun] = Field(max_length=POINTS, fail_fast=True)


class AcceptedPoint(_Part):
    """All repeats of one piece of work."""

    work: str = Field(pattern=r"^[0-9a-f]{16}$", description="hash of everything that decides the work; neither machine nor software")
    label: Text
    reason: Text | None = Field(None, description="why there was no result, where there was none")
    flags: list[Text] = Field([], max_length=FLAGS, fail_fast=True, description="flags that accepted runs have")
    metrics: dict[Text, AcceptedMetric] = Field({}, max_length=METRICS)


class Baseline(_Part):
    """An accepted campaign."""

    schema_version: int = SCHEMA_VERSION
    method_version: int = Field(description="of the measurement: numbers of different methods do not compare")
    name: str = Field(pattern=f"^{NAMES}$")
    suite: Text
    accepted_at: Text
    newest_run: Text = Field(description="when the newest accepted run started")
    machine: dict[Text, Text] = Field(max_length=METRICS, description="what makes a machine another one")
    facts: dict[Text, Text] = Field({}, max_length=METRICS, description="versions, driver, settings: what may have changed since")
    points: list[AcceptedPoint] = Field(min_length=1, max_length=POINTS, fail_fast=True)


def place(root: Path, name: str) -> Path:
    """The file of a baseline."""
    return root / FOLDER / f"{name}.json"


def write_baseline(root: Path, baseline: Baseline) -> Path:
    """Keep a baseline, whole or not at all. Raises ``InputError`` where it is too large to be read again."""
    path = place(root, baseline.name)
    content = baseline.model_dump_json(indent=1, exclude_none=True)
    counted(content.encode(), path)
    make_folder(path.parent)
    write_file(path, content)
    return path


def read_baseline(path: Path) -> Baseline:
    """Read a baseline. Raises ``InputError`` for a file that is none, or one written by a newer CARAML."""
    content = read_json(path, LISTING)
    try:
        found = _Version.model_validate_json(content).schema_version
        if found > SCHEMA_VERSION:
            raise InputError(f"{path}: schema version {found}, this CARAML reads up to {SCHEMA_VERSION}", NEWER)
        return Baseline.model_validate_json(content)
    except (ValidationError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a baseline: {in_a_line(error)}", "caraml accept CAMPAIGN --as NAME --replace") from error


def who_wrote(root: Path, name: str) -> tuple[str, ...]:
    """What to know about who may have written a baseline; nothing where only this user can have."""
    path = place(root, name)
    who = who_else(str(path), path.stat()) or who_else(str(path.parent), path.parent.stat())
    return (f"{path}: {who}: the reference may be theirs",) if who else ()


class _Version(_Part):
    schema_version: int = SCHEMA_VERSION


def find_baseline(root: Path, name: str) -> Baseline:
    """The baseline of a name, which its file has: a copy under another name is none.

    Raises:
        InputError: there is none of that name, or its file is wrong or says that it is another.
    """
    path = place(root, name)
    if not re.fullmatch(NAMES, name) or not path.exists():
        error = unknown_name("baseline", name, (one.stem for one in path.parent.glob("*.json")))
        error.hint = error.hint or f"caraml accept SUITE --as {name}"
        raise error
    baseline = read_baseline(path)
    if baseline.name != name:
        raise InputError(f"{path}: found name {baseline.name!r}, expected {name!r}: a copy, or renamed", f"--baseline {baseline.name}")
    return baseline


METRICS_KEPT = ("throughput", "energy_per_item", "step_time_mean")
"""What a baseline keeps of every run."""
_ELSEWHERE = ("software", "system", "device", "device_class", *(f"measure.{name}" for name in OF_EPOCHS))
"""Axes that are no work: what a check is about, and the machine, which is compared by itself; and how long is trained, which does not
change the rates that a check looks at."""


# -- what is the same work on the same machine ---------------------------------------------------------------------------------------------


def work_of(point: Point) -> str:
    """Hash of everything that decides a point's work; neither the machine nor the software nor the number of the repeat."""
    return hashlib.sha256(json.dumps(without(axes(point), _ELSEWHERE)).encode()).hexdigest()[:16]


def machine_of_record(record: Record) -> dict[str, str]:
    """What makes the machine of a record another one. Nodes of a named system take turns: only a detected machine has a host."""
    point, system = record.point, record.system
    cpu = system.get("cpu")
    model = str(cpu.get("model")) if isinstance(cpu, dict) else ""
    return _machine(point.system, point.device, str(system.get("hostname") or ""), model)


def machine_of_system(system: System) -> dict[str, str]:
    """The same of a machine before anything runs."""
    return _machine(system.name, system.identity, system.hostname or "", system.cpu.model)


def _machine(system: str, device: str, host: str, cpu: str) -> dict[str, str]:
    found = {"system": system, "device": device} | ({"host": host, "cpu": cpu} if system == "local" else {})
    return {name: value for name, value in found.items() if value}


def refuse_other_machine(baseline: Baseline, machine: Mapping[str, str]) -> None:
    """Raise ``InputError`` where the baseline was measured on another machine or by another method, with what differs."""
    then = baseline.machine
    apart = [
        f"{name}: {then.get(name, 'not known')!r} then, {machine.get(name, 'not known')!r} now"
        for name in dict.fromkeys((*then, *machine))
        if then.get(name) != machine.get(name)
    ]
    if apart:
        raise InputError(
            f"baseline {baseline.name!r} is of another machine: {'; '.join(apart)}",
            "caraml accept a campaign of this machine; caraml compare sets two machines against each other",
        )
    if baseline.method_version != METHOD_VERSION:
        raise InputError(
            f"baseline {baseline.name!r} was measured by method {baseline.method_version}, this CARAML measures by {METHOD_VERSION}",
            "measure and accept it anew",
        )


SEVERAL = "several values"
"""Of a fact that is not the same in all runs."""


# -- accept --------------------------------------------------------------------------------------------------------------------------------


def runs_of(found: Selection, rounds: int) -> tuple[str, list[Record]]:
    """The suite of a campaign, and the newest ``rounds`` attempts at every point of it: of a round those up to its own, of a suite's name
    those of the suite as it is written.

    Raises:
        InputError: the name stands for points, or for several campaigns.
    """
    listings = [one for one in found.listings if not one.settings] or list(found.listings)
    if len(listings) != 1:
        what = f"{len(listings)} campaigns: {', '.join(f'{one.campaign}@{one.round}' for one in listings)}" if listings else "no campaign"
        raise InputError(f"{found.name!r} stands for {what}", "caraml accept SUITE, SUITE+SETTING or SUITE@ROUND; caraml status lists them")
    keys = {key for key, _ in listings[0].points}
    points = [point for point in found.points if point.key in keys and point.attempt != 0]
    return listings[0].name, [record for point in points for record in found.store.newest(point.key, rounds, point.attempt)]


def accept(records: Sequence[Record], suite: str, name: str) -> Baseline:
    """A baseline of the runs of a campaign. Raises ``InputError`` where nothing has a result, or several machines have, and for a point of
    which no record can be read: one that is accepted without a result is not judged any more."""
    good = valid(records)
    if not good:
        raise InputError(f"suite {suite} has no result to accept", f"caraml status {suite} says why")
    machines = {json.dumps(machine_of_record(record)): machine_of_record(record) for record in good}
    if len(machines) > 1:
        listed = "; ".join(", ".join(one.values()) for one in machines.values())
        raise InputError(f"suite {suite} has results of {len(machines)} machines: {listed}", "accept a folder with results of one")
    if {record.method_version for record in good} != {METHOD_VERSION}:
        raise InputError(f"suite {suite} was measured by another method than this CARAML's", f"caraml retry {suite}")
    groups = {work_of(group[0].point): _without_unusual(group) for group in grouped(records, lambda record: work_of(record.point))}
    if lost := [record for group in groups.values() if not valid(group) for record in group if record.unreadable]:
        raise InputError(f"{label_of(lost[0].point)} has a result that nobody knows: {lost[0].reason}")
    kept = {metric: _accepted_metric(metric, groups) for metric in METRICS_KEPT}
    points = [
        AcceptedPoint(
            work=work,
            label=label_of(group[0].point),
            reason=None if any(record.status == "ok" for record in group) else why_not(group[0]),
            flags=sorted({flag for record in group if record.status == "ok" for flag in record.flags}),
            metrics={metric: found for metric in METRICS_KEPT if (found := kept[metric].get(work)) is not None},
        )
        for work, group in groups.items()
    ]
    return Baseline(
        method_version=METHOD_VERSION,
        name=name,
        suite=suite,
        accepted_at=datetime.now(UTC).isoformat(timespec="seconds"),
        newest_run=max(good, key=started).started_at,
        machine=machine_of_record(good[0]),
        facts=surroundings(good),
        points=points,
    )


def _without_unusual(group: Sequence[Record]) -> list[Record]:
    """Repeats without those that have a flag which most do not have: something disturbed them."""
    counts = Counter(flag for record in valid(group) for flag in set(record.flags))
    unusual = {flag for flag, count in counts.items() if 2 * count < len(valid(group))}
    return [record for record in group if not unusual & set(record.flags)] or list(group)


def _accepted_metric(metric: str, groups: Mapping[str, Sequence[Record]]) -> dict[str, AcceptedMetric]:
    """One metric of every piece of work that has it: of the runs with the most frequent unit and energy boundary."""
    having = {work: found for work, group in groups.items() if (found := [one for one in valid(group) if values([one], metric)])}
    kinds = {work: Counter(_kind(one, metric) for one in found).most_common(1)[0][0] for work, found in having.items()}
    alike = {work: values((one for one in found if _kind(one, metric) == kinds[work]), metric) for work, found in having.items()}
    means, _ = estimates_of(list(alike.values()), metric) if alike else ([], "")
    kept = {}
    for (work, runs), mean in zip(alike.items(), means, strict=True):
        unit, scope = kinds[work]
        ends = (mean.value, mean.low, mean.high) if mean is not None else (None, None, None)
        accepted = [AcceptedRun(**{**vars(one), "time": None if one.time == UNKNOWN else one.time.isoformat()}) for one in runs]
        kept[work] = AcceptedMetric(unit=unit, scope=scope, mean=ends[0], low=ends[1], high=ends[2], runs=accepted)
    return kept


def _kind(record: Record, metric: str) -> tuple[str, str | None]:
    return record.metrics[metric].unit, record.metrics[metric].scope


def surroundings(records: Sequence[Record]) -> dict[str, str]:
    """Facts that are no part of the work: driver, versions, settings; ``SEVERAL`` of one in which the records do not agree."""
    found = [facts(record) for record in records]
    own = {name for record in records for name in axes(record.point)} - {"software"}
    every = dict.fromkeys(name for one in found for name in one if name not in own)
    told = {name: {one.get(name) for one in found} for name in every}
    return {name: str(values.pop()) if len(values) == 1 else SEVERAL for name, values in told.items()}


def failed_repeats(records: Iterable[Record]) -> list[str]:
    """Of each piece of work with a result, how many of its runs have none, and why: ``LABEL: 2 of 5 runs have no result: failed: ...``."""
    told = []
    for group in grouped(records, lambda record: work_of(record.point)):
        reasons = Counter(why_not(record) for record in group if record.status != "ok")
        if 0 < (failed := reasons.total()) < len(group):
            why = "; ".join(f"{count} x {reason}" if len(reasons) > 1 else reason for reason, count in reasons.most_common())
            told.append(f"{label_of(group[0].point)}: {failed} of {len(group)} runs have no result: {why}")
    return told


def label_of(point: Point) -> str:
    """The label of all repeats of a point."""
    return point.model_copy(update={"repeat": 0}).label


_MOST_ATTEMPTS = 50
"""Attempts at a point that are read to find the last nights."""


@dataclass
class WorkRuns:
    """The runs of one piece of work."""

    label: str
    keys: frozenset[str]
    accepted: AcceptedPoint
    newest: list[Record] = field(default_factory=list)
    earlier: list[Record] = field(default_factory=list)
    """By time, since the baseline."""


def works_of(points: Sequence[PlannedPoint], baseline: Baseline) -> tuple[list[WorkRuns], tuple[str, ...]]:
    """The suite's work with its place in the baseline, and what to know about the rest.

    Raises ``InputError`` for work that the baseline does not have.
    """
    known = {point.work: point for point in baseline.points}
    keys: dict[str, set[str]] = {}
    labels: dict[str, str] = {}
    for planned in points:
        work = work_of(planned.point)
        if planned.skip is None or work in known:
            keys.setdefault(work, set()).add(planned.key or planned.point.key)
            labels.setdefault(work, label_of(planned.point))
    lacking = [labels[work] for work in keys if work not in known]
    if lacking:
        raise InputError(
            f"baseline {baseline.name!r} lacks {len(lacking)} of {len(keys)} points of the suite: {some(lacking, 5)}",
            f"run the suite and accept it: caraml accept {baseline.suite} --as {baseline.name} --replace",
        )
    gone = [point.label for point in baseline.points if point.work not in keys]
    notes = (f"the suite lacks {len(gone)} of {len(known)} points of the baseline: {', '.join(gone[:5])}",) if gone else ()
    return [WorkRuns(labels[work], frozenset(found), known[work]) for work, found in keys.items()], notes


def accepted_until(baseline: Baseline) -> datetime:
    """When the newest accepted run started. Raises ``InputError`` where the baseline does not say it."""
    found, accepted = time_of(baseline.newest_run), time_of(baseline.accepted_at)
    if found == UNKNOWN:
        raise InputError(f"baseline {baseline.name!r}: newest_run: found {baseline.newest_run:.40}, expected a time", "accept it anew")
    if accepted != UNKNOWN and found - accepted > timedelta(hours=1):  # its clock was ahead, and no night would come after it
        return accepted
    return found


def add_history(works: Sequence[WorkRuns], store: Store, since: datetime) -> list[Record]:
    """Give every piece of work its attempts since the baseline that are on disk, the newest of each key left out as ``newest``; returns
    those that cannot be read. A loss that lasts may be in them."""
    unread = list[Record]()
    for work in works:
        new = {(record.key, record.attempt) for record in work.newest}
        found = [record for key in sorted(work.keys) for record in store.newest(key, _MOST_ATTEMPTS)]
        kept = [one for one in found if (one.key, one.attempt) not in new and started(one) > since]
        work.earlier = sorted(valid(kept), key=started)
        unread += [one for one in kept if one.unreadable]
    return unread
