"""What came out of a point: one self-contained, schema-versioned record.

Every time in a record is in seconds since ``started_at`` on the worker's monotonic clock; the raw files beside it use the same clock.
A record never holds NaN or infinity: what is not known is ``null`` with a reason.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from caraml.power.model import WindowEnergy
from caraml.suite.model import METHOD_VERSION, Point

SCHEMA_VERSION = 1

Status = Literal["ok", "oom", "timeout", "failed", "invalid", "skipped", "lost"]
FINAL: frozenset[Status] = frozenset({"ok", "oom", "timeout", "invalid", "skipped"})
"""Statuses that a campaign does not try again on its own."""

FLAGS: dict[str, str] = {
    "imprecise": "the window ended, by its time budget or its fixed length, before the confidence interval was as narrow as asked",
    "not_steady": "step times were still moving when warm-up had to end, or moved from one end of the window to the other",
    "nan_loss": "the training loss became NaN or infinite",
    "short_window": "the marked window is shorter than 0.1 s, and lines that a program prints are seen with a delay of milliseconds",
    "busy_machine": "other work used the machine while the window was open",
    "truncated": "the batch system was about to end the job, so the window ended early",
    "input_bound": "more than a tenth of the window was spent waiting for batches: faster input would have trained faster",
    "damaged_input": "damaged input files were met and skipped; facts.data names them",
    "target_missed": "the last epoch ended before the loss or accuracy that was asked for",
    "throttled": "the device reported that it held its clock down for heat or power during the window",
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Metric(_Model):
    """One number: value, unit, 95 % interval or bound, and where it holds. ``value`` is null only with a ``reason``."""

    value: float | None
    unit: str
    low: float | None = None
    high: float | None = None
    n: int | None = None
    scope: str | None = Field(None, description="energy boundary or device that the number speaks of")
    reason: str | None = None


class Phase(_Model):
    """A named interval of the worker's life."""

    name: str
    start: float
    end: float


class Window(_Model):
    """The one window over which rate, time and energy are measured."""

    start: float
    end: float
    steps: int
    samples: int = Field(description="samples over all devices")
    items: int = Field(description="items over all devices; what one item is stands in the workload's facts")
    first_step: int = Field(description="index of the window's first step in `steps`")

    @property
    def seconds(self) -> float:
        """Wall time of the window."""
        return self.end - self.start


class Facts(_Model):
    """What is known of the work before it runs."""

    item: str
    items_per_sample: int
    parameters: int | None = Field(description="weights of the model; null where nobody knows, as of a command")
    flops_per_item: float | None = Field(description="analytic forward + backward FLOPs per item, without recomputation")
    flops_formula: str
    forward_flops_per_item: float | None = Field(None, description="FLOPs of the forward pass alone, what mode `inference` does")
    causal_flops_per_item: float | None = Field(None, description="flops_per_item with only what a causal mask leaves of attention")
    hardware_flops_per_item: float | None = Field(None, description="flops_per_item and what is computed again to save memory")
    traffic_per_item: float | None = Field(None, description="estimated bytes that forward and backward move per item, at 4 bytes a number")
    traffic_per_step: float | None = Field(None, description="bytes that a step moves besides, whatever its batch: weights and optimizer")
    bytes_per_sample: int | None = None
    samples_per_epoch: int | None = Field(None, description="samples of the data set over all ranks; an epoch is one pass over them")
    epoch_items: int | None = Field(
        None, description="items of the nominal epoch that energies are scaled to, such as ImageNet's 1,281,167"
    )
    data: dict[str, JsonValue] = {}


class Peak(_Model):
    """A device's peak arithmetic rate in FLOP/s, for one device."""

    value: float | None
    dtype: str
    source: str | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


class Bandwidth(_Model):
    """A device's memory bandwidth in bytes/s, read plus written, for one device."""

    value: float | None
    source: str | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = None


class Fingerprint(_Model):
    """The loss of one early step, to the last bit: equal work on equal devices and software must agree, or a device corrupts silently."""

    step: int = Field(description="counted from 1, the first step included")
    losses: list[str] = Field(description="loss of each rank in rank order, as hexadecimal floating point")


class Record(_Model):
    """Everything about one attempt at a point."""

    schema_version: int = SCHEMA_VERSION
    method_version: int = METHOD_VERSION
    key: str
    attempt: int
    point: Point
    status: Status
    reason: str | None = None
    traceback: str | None = Field(None, description="where a failed worker stopped, on the rank that failed first")
    flags: list[str] = []
    started_at: str = Field(description="wall-clock anchor of the record's times, ISO 8601 with offset")
    phases: list[Phase] = []
    window: Window | None = None
    fingerprint: Fingerprint | None = Field(None, description="comparable between points with `deterministic = true`")
    facts: Facts | None = None
    metrics: dict[str, Metric] = {}
    peak_datasheet: Peak | None = None
    peak_measured: Peak | None = None
    bandwidth_measured: Bandwidth | None = None
    energy: WindowEnergy | None = None
    idle: WindowEnergy | None = None
    system: dict[str, JsonValue] = {}
    environment: dict[str, JsonValue] = {}
    files: dict[str, str] = Field({}, description="raw files beside the record: `steps` (rank x step), `power` (raw readings)")

    @property
    def item(self) -> str:
        """What is counted: ``token``, ``image`` ...; ``item`` when the work was never built."""
        return self.facts.item if self.facts else "item"

    def value(self, metric: str) -> float | None:
        """Value of a metric, or ``None`` if it is missing or unknown."""
        found = self.metrics.get(metric)
        return found.value if found else None
