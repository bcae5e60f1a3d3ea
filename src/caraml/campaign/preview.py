"""What a campaign would do: points, time, energy, disk, scripts. Nothing is run and nothing is written below the results.

Time is told from what is certain: the shortest a point's policy allows, the time-out that ends it, and, where points of the same workload
have run before, what those took. Energy is the devices' rated power over that time, and called that: no limit.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.format import count
from caraml.campaign import Campaign
from caraml.campaign.attempt import accepted, files_of, lacking
from caraml.campaign.machine import machine_of, shortest, time_taken
from caraml.launch import queue
from caraml.launch.launchers import beforehand
from caraml.launch.script import SCRIPT
from caraml.launch.slurm import SlurmLauncher
from caraml.results.claim import launcher_plugins
from caraml.results.store import latest_in
from caraml.suite.model import Point
from caraml.system.model import System
from caraml.workloads import load_workload
from caraml.workloads.base import INPUTS
from caraml.workloads.command import Params, filled, filled_command, names_of, references

if TYPE_CHECKING:
    from caraml.engine.memory import Planned

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class PointPlan:
    """One point and what will become of it."""

    point: Point
    key: str
    action: str
    """``known``, ``skip`` or ``run``."""
    reason: str | None
    shortest: float
    """Seconds that its policy takes at least; 0 for a command."""
    expected: float | None
    """Seconds that points of its workload took before [s]; ``None`` when there were none."""


@dataclass(frozen=True)
class Preview:
    """The whole plan."""

    points: list[PointPlan]
    left_out: int
    not_chosen: int
    """Points of the suite that were not asked for."""
    scripts: dict[str, tuple[int, str]]
    """One script of each kind by the label of its point: how many points have this kind, and the text."""
    objections: list[str]
    """What the machine or its scheduler would refuse."""
    notes: list[str]
    """What is executed beside the points, and what could not be checked."""
    memory: list[Planned]
    """What the points that can be planned need of each device, those included that are not to run; none where none can be."""
    disk: float | None
    """Bytes that the points to run will take; ``None`` when nothing like them has run."""

    def seconds(self, kind: str) -> list[tuple[Point, float]] | None:
        """The points to run, each with what it takes [s]: ``shortest``, ``expected`` or ``timeout``; ``None`` if one is not known."""
        each = [(one.point, one.point.measure.timeout_seconds if kind == "timeout" else getattr(one, kind)) for one in self.to_run]
        return None if any(seconds is None for _, seconds in each) else each

    @property
    def to_run(self) -> list[PointPlan]:
        return [one for one in self.points if one.action == "run"]


def preview(campaign: Campaign) -> Preview:
    """Look at what ``run_campaign`` would do. Raises ``InputError`` with every fault of the suite."""
    plan = campaign.plan()
    chosen = campaign.chosen(plan)
    known = {planned.key: latest_in(campaign.store.points / planned.point.folder_name) for planned in chosen}
    runtimes, sizes = _earlier(campaign, {planned.point.workload for planned in chosen})
    points = []
    for planned in chosen:
        record, point = known[planned.key], planned.point
        reason: str | None
        if planned.skip is not None:
            action, reason = "skip", planned.skip
        elif record is not None and not campaign.again and accepted(record, planned):
            action, reason = "known", str(record.reason) if record.unreadable else f"{record.status}, attempt {record.attempt}"
        else:
            action, reason = "run", None if record is None else f"again: {record.status}"
        points.append(PointPlan(point, planned.key, action, reason, shortest(point), runtimes.get(point.workload)))
    to_run = [one.point for one in points if one.action == "run"]
    scripts, refused, silent = _scripts(campaign, to_run)
    disk = sum(sizes[point.workload] for point in to_run) if all(point.workload in sizes for point in to_run) else None
    unknown = dict.fromkeys(sentence for planned in chosen for sentence in lacking(campaign, planned))
    site, options = campaign.system.site, campaign.options
    absent, unlike = _inputs(campaign, to_run)
    unfit = campaign.store.unfit()
    objections = [*([unfit] if unfit is not None else []), *unknown, *unlike, *refused]
    notes = beforehand(site, options.launcher) if to_run else []
    notes += absent
    notes += [f"includes {path}" for path in campaign.suite.included]
    notes += [f"not checked by Slurm: {silent}"] if silent is not None else []
    if disk and unfit is None and (free := campaign.store.free()) is not None and free < disk:
        notes.append(f"disk: {disk:,.0f} bytes are expected, and {free:,} are free")
    if campaign.system.nodes is None and any(point.nodes > 1 for point in to_run) and options.launcher != "local":
        most = max(point.nodes for point in to_run)
        notes.append(f"nodes: up to {most:,} are asked for; how many {campaign.system.name} has is not known")
    memory = []
    has_plans = any(one.point.workload == "gpt" for one in points) and machine_of(campaign.system).only_programs is None
    if has_plans and find_spec("torch") is None:
        notes.append("memory: not planned, which needs torch here; points that do not fit their devices will end as oom")
    elif has_plans:
        from caraml.engine.memory import planned_of  # which needs torch

        memory = planned_of(one.point for one in points)
    return Preview(points, plan.left_out, len(plan.points) - len(chosen), scripts, objections, notes, memory, disk)


def estimated_kwh(system: System, point_seconds: Sequence[tuple[Point, float]]) -> float | None:
    """Rated power of the devices that points use, over seconds; ``None`` where the power is not known."""
    tdp = system.devices[0].tdp_w
    if tdp is None:
        return None
    cpu = system.device_class == "cpu"  # several processes share the one CPU device of a node
    return sum(tdp * point.nodes * (1 if cpu else point.devices) * seconds for point, seconds in point_seconds) / JOULES_PER_KWH


def _earlier(campaign: Campaign, workloads: set[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Median time [s] and size [B] of earlier attempts on the same device, by workload."""
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    for row in campaign.store.rows():
        workload = str(row["workload"])
        if workload in workloads and row.get("device") == campaign.system.identity and (took := time_taken(row)) is not None:
            seconds.setdefault(workload, []).append(took)
            if len(sizes.get(workload, ())) < 20:  # enough for a median
                folder = campaign.store.points / f"{workload}-{row['key']}" / str(row["attempt"])
                sizes.setdefault(workload, []).append(sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()))
    runtimes = {name: statistics.median(some) for name, some in seconds.items()}
    return runtimes, {name: statistics.median(some) for name, some in sizes.items()}


def _scripts(campaign: Campaign, points: Sequence[Point]) -> tuple[dict[str, tuple[int, str]], list[str], str | None]:
    """One script of each kind, what the scheduler says to it, and why it is not asked."""
    silent = queue.silence() if points and isinstance(campaign.launcher, SlurmLauncher) else None
    kinds: dict[tuple[object, ...], list[Point]] = {}
    for point in points:
        kinds.setdefault((point.workload, point.nodes, point.devices, point.measure.timeout_seconds), []).append(point)
    found: dict[str, tuple[int, str]] = {}
    objections = []
    for alike in kinds.values():
        point = alike[0]
        try:
            text = files_of(campaign, point, campaign.store.points.absolute() / point.folder_name / "1")[SCRIPT]
        except InputError as error:
            objections.append(f"{point.label}: {error.line}")
            continue
        found[point.label] = (len(alike), text)
        if isinstance(campaign.launcher, SlurmLauncher) and silent is None:
            objection = campaign.launcher.check(text)
            objections += [f"{point.label}: {objection}"] if objection is not None else []
    return found, list(dict.fromkeys(objections)), silent


def _inputs(campaign: Campaign, points: Sequence[Point]) -> tuple[list[str], list[str]]:
    """What points name that is not here, which the machine that runs them may have, and what is here and of another kind."""
    absent: dict[str, None] = {}
    unlike: dict[str, None] = {}
    folder, seen = Path(campaign.suite_folder), set[str]()
    trained = [] if campaign.options.elsewhere is not None else [point for point in points if point.workload != "command"]
    for point in trained:
        if (text := json.dumps([point.workload, point.params], sort_keys=True)) in seen:
            continue
        seen.add(text)
        named = {name: folder / path for name in INPUTS if isinstance(path := point.params.get(name), str)}
        workload = load_workload(point.workload)
        try:
            gone = {name: path for name, path in named.items() if not (path.exists() or path.with_name(f"{path.name}.idx").exists())}
            absent |= {f"params.{name}: {path} is not here, and is needed where the points run": None for name, path in gone.items()}
            if workload.check is not None and not gone:
                workload.check(workload.params.model_validate(point.params), folder)
        except EnvironmentUnfitError as error:
            absent[error.line] = None  # an image, or the nodes, may have it
        except ModuleNotFoundError as error:
            absent[f"input of {point.workload} is not looked into, which needs {error.name} here"] = None
        except InputError as error:
            unlike[error.line] = None
        except OSError as error:  # a name too long, a folder that is closed to us
            unlike[f"{error.filename}: {error.strerror}" if error.filename else str(error)] = None
    return list(absent), list(unlike)


def programs(campaign: Campaign, keys: Collection[str]) -> list[str]:
    """What runs as this user when these points are measured, a line each: every distinct command line with its folder, its variables and
    the files that its numbers come from, what CARAML's own workloads are told in words (data, checkpoints), and all that the site says."""
    points = [planned.point for planned in campaign.plan().points if planned.key in keys and planned.skip is None]
    lines = Counter(_program(campaign, point) if point.workload == "command" else _training(point) for point in points)
    site = campaign.system.site
    told = site.model_dump(exclude_defaults=True)
    if site.software.variables:
        told["software"] |= {"variables": [f"{name}={text}" for name, text in site.software.variables.items()]}
    own = launcher_plugins().get(campaign.options.launcher)
    return [
        *([f"launcher {own.name} of plug-in {own.package}"] if own is not None else []),
        *(f"{count} x {line}" if line.startswith("workload ") else line for line, count in lines.items()),
        *(
            f"{part}.{key} of system {campaign.system.name}: {text}"
            for part, values in told.items()
            for key, value in values.items()
            for text in (value if isinstance(value, list | tuple) else [value])
        ),
    ]


def _program(campaign: Campaign, point: Point) -> str:
    params, values = Params.model_validate(point.params), campaign.suite.values
    names = names_of(point, params, "ATTEMPT", campaign.suite_folder)
    argv, shown, cwd = filled_command(params, names)
    # The values of a suite that somebody else wrote are no secrets of this user's; what comes from the caller's environment may be one.
    variables = shown | {
        name: filled(values[text], names) if text in values else text for name in references(params) if (text := params.env[name])
    }
    files = [filled(spec.file, names) for spec in params.metrics.values() if spec.file is not None]
    told = [f"in {cwd}", *(f"{name}={shlex.quote(text)}" for name, text in variables.items()), *(f"reads {file}" for file in files)]
    return f"{shlex.join(argv)}  ({', '.join(told)})"


def _training(point: Point) -> str:
    words = {name: value for name, value in point.params.items() if isinstance(value, str | list | dict)}
    return f"workload {point.workload}{', '.join(f' {name}={value}' for name, value in words.items())}"


def planned_counts(points: Sequence[PointPlan]) -> str:
    """``12 points: 9 to run, 2 known, 1 skipped``."""
    counts = Counter(one.action for one in points)
    words = {"run": "to run", "known": "known", "skip": "skipped"}
    parts = ", ".join(f"{counts[action]:,} {word}" for action, word in words.items() if counts[action])
    return f"{count(len(points), 'point')}: {parts or 'none'}"
