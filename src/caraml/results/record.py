"""What came out of a point: one self-contained, schema-versioned record.

Every time in a record is in seconds since ``started_at`` on the worker's monotonic clock; the raw files beside it use the same clock.
A record never holds NaN or infinity: what is not known is ``null`` with a reason.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from caraml.base import limits
from caraml.power.model import METHOD_VERSION, WindowEnergy
from caraml.suite.model import Mode, Point
from caraml.units import ENERGY_METRICS

SCHEMA_VERSION = 1

Status = Literal["ok", "oom", "timeout", "failed", "invalid", "skipped", "lost"]
STATUSES: dict[Status, str] = {
    "ok": "the point has a result",
    "oom": "the work does not fit into the memory of a device or of the host",
    "timeout": "the point took longer than `measure.timeout_seconds` or its job's time limit",
    "failed": "the work ended with an error; `reason` and `traceback` say which",
    "invalid": "the work ended, and its numbers cannot be used: the loss became NaN, or a program's metric was not found",
    "skipped": "the point cannot run on this machine, and was not started",
    "lost": "the job is gone and left no record: a node failed, or somebody ended it",
}
FINAL: frozenset[Status] = frozenset({"ok", "oom", "timeout", "invalid", "skipped"})
"""Statuses that a campaign does not try again on its own."""

FLAGS: dict[str, str] = {
    "imprecise": "the window ended, by its time budget or its fixed length, before the confidence interval was as narrow as asked, "
    "or before it held 30 independent steps",
    "not_steady": "step times were still moving: they drift over warm-up and window, or the window began before they had settled",
    "nan_loss": "the training loss became NaN or infinite",
    "short_window": "the marked window is shorter than 0.1 s, and lines that a program prints are seen with a delay of milliseconds",
    "busy_machine": "other work used the machine while the window was open",
    "truncated": "the batch system was about to end the job, so the window ended early",
    "input_bound": "more than a tenth of the window was spent waiting for batches: faster input would have trained faster",
    "damaged_input": "damaged input files were met and skipped; facts.data names them",
    "mixed_nodes": "the nodes of this point differ in device or software; `nodes` says in what",
    "target_missed": "the last epoch ended before the loss or accuracy that was asked for",
    "disturbed_probe": "a limit of the device was measured while others used the machine, or is far below what was measured here before; "
    "the better of both counts",
    "limit_too_low": "a rate is above a limit that was measured or printed in a data sheet: that limit is not one",
    "throttled": "the device reported that it held its clock down for heat, or for its board's own protection, during the window",
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Metric(_Model):
    """One number: value, unit, 95 % interval, bound, and where it holds. ``value`` is null only with a ``reason``."""

    value: float | None = Field(description="the number; null with a `reason` where it is not known")
    unit: str = Field(description="`1` for shares and counts")
    low: float | None = Field(None, description="lower end of the 95 % confidence interval: what chance does to the number")
    high: float | None = Field(None, description="upper end")
    bound: float | None = Field(
        None, description="the number may be off by at most this besides, because its sensor is: no chance, so no repeats make it smaller"
    )
    n: int | None = Field(None, description="number of observations behind the interval")
    scope: str | None = Field(None, description="energy boundary or device that the number speaks of")
    reason: str | None = Field(None, description="why the value, or its interval, is not known")


class Phase(_Model):
    """A named interval of the worker's life."""

    name: str = Field(description="`build`, `data`, `first_step`, `warm_up`, `measure`, ...")
    start: float = Field(description="[s]")
    end: float = Field(description="[s]")


class Window(_Model):
    """The one window over which rate, time and energy are measured."""

    start: float = Field(description="[s]")
    end: float = Field(description="[s]")
    steps: int = Field(description="optimizer steps")
    samples: int = Field(description="samples over all devices")
    items: int = Field(description="items over all devices; what one item is stands in the workload's facts")
    first_step: int = Field(description="index of the window's first step in `steps`")
    shortest_seen: float | None = Field(None, description="shortest time constant of changes that the interval speaks of: a step")
    longest_seen: float | None = Field(None, description="longest: a twentieth of the window; slower changes are not in the interval")
    opened_within: float | None = Field(None, description="how far apart the ranks opened it [s]; over several nodes at most so far")
    closed_within: float | None = Field(None, description="how far apart the ranks closed it [s]; over several nodes at most so far")

    @property
    def seconds(self) -> float:
        """Wall time of the window."""
        return self.end - self.start


class Facts(_Model):
    """What is known of the work before it runs."""

    item: str = Field(description="what is counted: `token`, `image`, `sample`, ...")
    items_per_sample: int = Field(description="items in one sample of a batch")
    parameters: int | None = Field(description="weights of the model; null where nobody knows, as of a command")
    flops_per_item: float | None = Field(description="analytic forward + backward FLOPs per item, without recomputation")
    flops_formula: str = Field(description="how the FLOPs were counted")
    forward_flops_per_item: float | None = Field(None, description="FLOPs of the forward pass alone, what mode `inference` does")
    causal_flops_per_item: float | None = Field(None, description="flops_per_item with only what a causal mask leaves of attention")
    hardware_flops_per_item: float | None = Field(None, description="flops_per_item and what is computed again to save memory")
    traffic_per_item: float | None = Field(None, description="estimated bytes that forward and backward move per item, at 4 bytes a number")
    traffic_per_step: float | None = Field(None, description="bytes that a step moves besides, whatever its batch: weights and optimizer")
    cached_traffic_share: float | None = Field(None, description="share of that traffic which the last-level cache can serve at best")
    bytes_per_sample: int | None = Field(None, description="bytes of one sample as it comes to the device")
    samples_per_epoch: int | None = Field(None, description="samples of the data set over all ranks; an epoch is one pass over them")
    epoch_items: int | None = Field(
        None, description="items of the nominal epoch that energies are scaled to, such as ImageNet's 1,281,167"
    )
    data: dict[str, JsonValue] = Field({}, description="provenance of the input: kind, path, number of items, hash")

    def in_mode(self, mode: Mode) -> Facts:
        """What is known of the work in a mode: inference goes forward only and reading computes nothing, so neither may count more."""
        if mode in ("train", "compute"):
            return self
        flops = self.forward_flops_per_item if mode == "inference" else None
        seen = self.causal_flops_per_item
        causal = None if flops is None or seen is None or not self.flops_per_item else seen * flops / self.flops_per_item
        none = dict.fromkeys(("hardware_flops_per_item", "traffic_per_item", "traffic_per_step", "cached_traffic_share"))
        return self.model_copy(update={**none, "flops_per_item": flops, "causal_flops_per_item": causal})


class _Limit(_Model):
    """What one device can do at most."""

    value: float | None = Field(description="[FLOP/s], dense; of a stream [B/s]")
    source: str | None = Field(None, description="document, or how it was measured")
    low: float | None = Field(None, description="lower end of the interval of what was measured")
    high: float | None = Field(None, description="upper end")
    reason: str | None = Field(None, description="why it is not known")
    kernel: str | None = Field(None, description="library and kernel that reached it, where it was measured")
    shape: list[int] = Field([], description="of the kernel's operands; of a stream, the bytes of one array")
    measured_at: str | None = Field(None, description="ISO 8601; before the run where its own look was disturbed or in short")
    disturbed: str | None = Field(None, description="why what this run measured of it is in doubt")


class Peak(_Limit):
    """A device's peak arithmetic rate in FLOP/s, for one device."""

    dtype: str = Field(description="arithmetic that it holds for")
    by_kernel: dict[str, float] = Field({}, description="FLOP/s of the best kernel of each library")


class Bandwidth(_Limit):
    """A device's bandwidth in bytes/s, read plus written, for one device."""

    level: Literal["memory", "cache"] = Field("memory", description="where the data lie: in memory, or in the last-level cache")


class Fingerprint(_Model):
    """The loss of one early step, to the last bit: equal work on equal devices and software must agree, or a device corrupts silently."""

    step: int = Field(description="counted from 1, the first step included")
    losses: list[str] = Field(description="loss of each rank in rank order, as hexadecimal floating point")


class Node(_Model):
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


class Record(_Model):
    """Everything about one attempt at a point."""

    schema_version: int = Field(SCHEMA_VERSION, description="version of this layout")
    method_version: int = Field(METHOD_VERSION, description="version of the way of measuring; numbers of different methods do not compare")
    key: str = Field(pattern=r"^[^/]+$", description="hash of everything in `point` that decides the result")
    attempt: int = Field(ge=0, le=limits.NUMBER, description="number of this try at the point, from 1")
    point: Point = Field(description="the work that was asked for")
    status: Status = Field(description="how it ended")
    reason: str | None = Field(None, description="why it did not end `ok`")
    traceback: str | None = Field(None, description="where a failed worker stopped, on the rank that failed first")
    flags: list[str] = Field([], max_length=limits.FLAGS, fail_fast=True, description="what limits the use of the numbers")
    started_at: str = Field(description="wall-clock anchor of the record's times, ISO 8601 with offset")
    phases: list[Phase] = Field([], max_length=limits.PHASES, fail_fast=True, description="parts of the worker's life")
    window: Window | None = Field(None, description="the window of rate, time and energy")
    fingerprint: Fingerprint | None = Field(None, description="comparable between points with `deterministic = true`")
    facts: Facts | None = Field(None, description="what is known of the work before it runs")
    metrics: dict[str, Metric] = Field({}, max_length=limits.METRICS, description="every number, by name")
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
    environment: dict[str, JsonValue] = Field({}, description="versions, clocks, container, Slurm job, variables, state of the checkout")
    files: dict[str, str] = Field({}, description="raw files beside the record: `steps` (rank x step), `power` (raw readings)")

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
    def item(self) -> str:
        """What is counted: ``token``, ``image`` ...; ``item`` when the work was never built."""
        return self.facts.item if self.facts else "item"

    def value(self, metric: str) -> float | None:
        """Value of a metric, or ``None`` if it is missing or unknown."""
        found = self.metrics.get(metric)
        return found.value if found else None
