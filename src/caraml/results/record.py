"""What came out of a point: one self-contained, schema-versioned record.

Every time in a record is in seconds since ``started_at`` on the worker's monotonic clock; the raw files beside it use the same clock.
A record never holds NaN or infinity: what is not known is ``null`` with a reason.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from caraml import METHOD_VERSION
from caraml.base import limits
from caraml.base.errors import UNREADABLE
from caraml.metrics.energy import ENERGY_METRICS
from caraml.metrics.model import Bandwidth, Facts, FiniteModel, Metric, OwnMetric, Peak, Phase, Window
from caraml.power.model import WindowEnergy
from caraml.suite.model import OWN_LOOP, Point

SCHEMA_VERSION = 1
STOPPED, CANCELLED = "the campaign was stopped", "cancelled"
"""How the reasons begin of attempts that somebody ended before they were done."""
KILLED = "killed by "
"""So do those of loops of a user's own that a signal ended: by hand, or at a time limit, which no campaign watches."""
_BROKEN_OFF = re.compile(rf"(rank \d+: )?({KILLED}|KeyboardInterrupt)")
_OF_NO_TABLE = ("compile", "knobs", "placement", "deterministic", "seed", "mode")
"""Fields of a point that no imported table says in a column of its own."""

Status = Literal["ok", "oom", "timeout", "failed", "invalid", "skipped", "lost"]
STATUSES: dict[Status, str] = {
    "ok": "the point has a result",
    "oom": "the work does not fit into the memory of a device or of the host",
    "timeout": "the point took longer than `measure.timeout_seconds` or its job's time limit",
    "failed": "the work ended with an error; `reason` and `traceback` say which",
    "invalid": "the work ended, and its numbers cannot be used: the loss became NaN, a program's metric was not "
    "found, or its record is damaged or newer than this CARAML",
    "skipped": "the point cannot run on this machine, and was not started",
    "lost": "the job is gone and left no record: a node failed, or somebody ended it",
}
FINAL: frozenset[Status] = frozenset({"ok", "oom", "timeout", "invalid", "skipped"})
"""Statuses that a campaign does not try again on its own."""

FLAGS: dict[str, str] = {
    "imprecise": "the window ended, by its time budget, its fixed length or what the first of several ranks had seen, before the "
    "confidence interval was as narrow as asked, or before it held 30 independent steps",
    "not_steady": "step times were still moving: they drift over warm-up and window, or the window began before they had settled",
    "nan_loss": "the training loss became NaN or infinite",
    "short_window": "the marked window is shorter than 0.1 s, and lines that a program prints are seen with a delay of milliseconds",
    "busy_machine": "other work used the machine while the window was open",
    "stopped": "a process of the point was stopped inside the window, as when Slurm suspends a job",
    "truncated": "the batch system was about to end the job, so the window ended early",
    "input_bound": "more than a tenth of the window was spent waiting for batches",
    "damaged_input": "damaged input files were met and skipped; facts.data names them",
    "mixed_nodes": "the nodes of this point differ in device or software; `nodes` says in what",
    "idle_devices": "energy and power are of more accelerators than the point has: a program's are those of all that CARAML sees",
    "target_missed": "the last epoch ended before the loss or accuracy that was asked for",
    "disturbed_probe": "a limit of the device was measured while others used the machine, or is far below what was measured here before; "
    "the better of both counts",
    "limit_too_low": "a rate is above a limit that was measured or printed in a data sheet: that limit is not one",
    "throttled": "the device reported that it held its clock down for heat, or for its board's own protection, during the window",
}


class Fingerprint(FiniteModel):
    """The loss of one early step, to the last bit: equal work on equal devices and software must agree, or a device corrupts silently."""

    step: int = Field(description="counted from 1, the first step included")
    losses: list[str] = Field(description="loss of each rank in rank order, as hexadecimal floating point")


class Node(FiniteModel):
    """One of several nodes: what its sensors said and what it is. On the record's clock every node's window begins at one instant."""

    name: str = Field(description="host name; with the boot id where that is not enough")
    ranks: list[int] = Field([], description="those that ran there")
    device: str = Field(description="what computes there, in a few words")
    cpu: str | None = Field(description="model of its processor")
    differs: list[str] = Field([], description="in what device and software differ from the first node's")
    energy: WindowEnergy | None = Field(None, description="of this node; its channels stand in the record's energy, after the node's name")
    idle: WindowEnergy | None = Field(None, description="energy of its idle baseline")
    other_cpu_share: float | None = Field(None, description="share of its CPU time that others used in the window")
    throttled: dict[str, dict[str, float]] = Field({}, description="share of the window for which each GPU was held back, by reason")
    versions: dict[str, str | None] = Field({}, description="of the software there")
    state: dict[str, JsonValue] = Field({}, description="clocks and settings of its CPU and GPUs")


class Costly(FiniteModel):
    """A kernel or an operator of a trace."""

    name: str = Field(max_length=200, description="as torch's profiler calls it")
    calls: int = Field(description="how often it ran in the traced steps")
    seconds: float = Field(description="in it alone, without what it called; of all calls")
    share: float = Field(description="of the time of all kernels, or operators")


class Profile(FiniteModel):
    """What the trace of a few steps after the window shows, on rank 0."""

    of: Literal["kernels", "operators"] = Field(
        "operators", description="kernels of the device, or torch's operators by the host's time where there are none to see"
    )
    steps: int = Field(0, description="traced steps; the last may be traced in part")
    micro_batches: int = Field(0, description="traced micro-batches")
    seconds: float | None = Field(None, description="from the first traced step to the end of the trace; longer than unobserved steps")
    costliest: list[Costly] = Field([], max_length=10, description="the ten that took longest")
    reason: str | None = Field(None, description="why there is no trace, or not all of it")


class Record(FiniteModel):
    """Everything about one attempt at a point."""

    schema_version: int = Field(SCHEMA_VERSION, description="version of this layout")
    method_version: int = Field(METHOD_VERSION, description="version of the way of measuring; numbers of different methods do not compare")
    key: str = Field(pattern=r"^[^/]+$", description="hash of everything in `point` that decides the result")
    attempt: int = Field(ge=0, le=limits.NUMBER, description="number of this try at the point, from 1")
    point: Point = Field(description="the work that was asked for")
    status: Status = Field(description="how it ended")
    reason: str | None = Field(None, description="why it did not end `ok`, or what is known of it is not all")
    traceback: str | None = Field(None, description="where a failed worker stopped, on the rank that failed first")
    flags: list[str] = Field([], max_length=limits.FLAGS, fail_fast=True, description="what limits the use of the numbers")
    started_at: str = Field(description="wall-clock anchor of the record's times, ISO 8601 with offset")
    phases: list[Phase] = Field([], max_length=limits.PHASES, fail_fast=True, description="parts of the worker's life")
    window: Window | None = Field(None, description="the window of rate, time and energy")
    fingerprint: Fingerprint | None = Field(None, description="comparable between points with `deterministic = true`")
    facts: Facts | None = Field(None, description="what is known of the work before it runs")
    metrics: dict[str, Metric] = Field({}, max_length=limits.METRICS, description="every number, by name")
    definitions: dict[str, OwnMetric] = Field(
        {}, max_length=limits.METRICS, description="of those that CARAML does not define, as suite or plug-in said at the time of the run"
    )
    peak_datasheet: Peak | None = Field(None, description="peak of one device by its data sheet")
    peak_measured: Peak | None = Field(None, description="what the best kernel of any library reached on the same device")
    bandwidth_measured: Bandwidth | None = Field(None, description="best memory stream on the same device")
    cache_measured: Bandwidth | None = Field(None, description="the same within the last-level cache of a CPU")
    energy: WindowEnergy | None = Field(
        None, description="energy of the window by channel and boundary, of all nodes together; no number if a node has none"
    )
    idle: WindowEnergy | None = Field(
        None, description="energy of the idle baseline: the mean power before the work and after it, over the time before"
    )
    nodes: list[Node] = Field([], fail_fast=True, description="of a point on several nodes, each by itself")
    system: dict[str, JsonValue] = Field({}, description="the machine, as `caraml system detect --json` describes it")
    environment: dict[str, JsonValue] = Field(
        {}, description="versions, clocks, container, Slurm job, variables, state of the checkout, who multiplies"
    )
    profile: Profile | None = Field(None, description="where a few steps after the window spent their time; only with `profile = true`")
    files: dict[str, str] = Field(
        {},
        description="raw files beside the record: `steps` (rank x step), `power` (raw readings); of a profile `trace` and `memory`",
    )

    @model_validator(mode="before")
    @classmethod
    def _bounds_were_intervals(cls, data: Any) -> Any:
        """Records of version 0.1.0 have the bound of an energy as the ends of its interval."""
        metrics = data.get("metrics") if isinstance(data, dict) else None
        if not isinstance(metrics, dict):
            return data
        found = {name: metric for name in ENERGY_METRICS if isinstance(metric := metrics.get(name), dict) and "bound" not in metric}
        for name, metric in found.items():
            low, high = metric.get("low"), metric.get("high")
            if low is not None and high is not None:
                found[name] = {**metric, "low": None, "high": None, "bound": (high - low) / 2}
        return {**data, "metrics": {**metrics, **found}} if found else data

    @property
    def unstated(self) -> tuple[str, ...]:
        """Fields of its point that nobody stated: of a table that was imported or published, of a loop that is not CARAML's."""
        missing = self.environment.get("missing")
        names = [name[6:] for name in missing if name.startswith("point.")] if isinstance(missing, dict) else []
        return tuple(dict.fromkeys([*names, *(_OF_NO_TABLE if "imported_from" in self.environment else ())]))

    @property
    def item(self) -> str:
        """What is counted: ``token``, ``image`` ...; ``item`` when the work was never built."""
        return self.facts.item if self.facts else "item"

    @property
    def ended_by_hand(self) -> bool:
        """Whether somebody ended it before it was done: that says nothing about the machine."""
        why = self.reason or ""
        broken_off = self.point.workload == OWN_LOOP and _BROKEN_OFF.match(why) is not None
        return self.status == "failed" and (broken_off or why.startswith((STOPPED, CANCELLED)))

    @property
    def unreadable(self) -> bool:
        """Whether it only stands for a record that this CARAML cannot read."""
        return self.status == "invalid" and (self.reason or "").startswith(UNREADABLE)

    def value(self, metric: str) -> float | None:
        """Value of a metric, or ``None`` if it is missing or unknown."""
        found = self.metrics.get(metric)
        return found.value if found else None
