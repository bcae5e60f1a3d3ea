"""What is asked: suite files (TOML) and the points that they expand to.

A suite is a list of benchmarks; a benchmark is a workload with values, any of which may be a list, and lists are swept. A point is one
combination: frozen, normalised, and named by the hash of everything that decides its result.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator

from caraml.system.model import DeviceClass

METHOD_VERSION = 1
"""Raised when the way of measuring changes; results of different methods are never taken for the same work."""

Mode = Literal["train", "compute", "data", "inference"]
"""``train``: real input pipeline. ``compute``: batches already on the device. ``data``: the input pipeline alone. ``inference``: real
input, forward passes only."""
Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Compile = Literal["off", "default", "reduce-overhead", "max-autotune"]

WORKLOAD_ALIASES = {
    "ap1": "temperature_postprocessing",
    "ap2": "tweet_rain_classification",
    "ap3": "radiation_emulation",
    "ap4": "ensemble_postprocessing",
    "ap5": "downscaling_gan",
    "ap6": "regime_clustering",
}
"""Short names by which a suite may ask for a workload; points carry the full name, so that the same work has the same key."""

T = TypeVar("T")
Count = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Measure(_Model):
    """When a measurement starts and stops. Times in seconds."""

    target: float = Field(0.01, gt=0, lt=1, description="stop when the 95 % interval's relative half-width is below this")
    min_seconds: float = Field(5.0, ge=0, description="shortest window")
    max_seconds: float = Field(60.0, gt=0, description="longest window; a wider interval is then flagged `imprecise`")
    min_steps: int = Field(10, ge=4, description="fewest steps in the window")
    max_steps: int | None = Field(None, ge=4, description="most steps in the window")
    warm_up_steps: int = Field(3, ge=3, description="fewest steps before the window, the first step not counted")
    warm_up_max_seconds: float = Field(60.0, gt=0, description="longest warm-up; a series still moving is then flagged `not_steady`")
    idle_seconds: float = Field(2.0, ge=0, description="length of the idle power baseline; skipped where there is no sensor")
    timeout_seconds: float = Field(1800.0, gt=0, description="wall time after which the point is stopped with status `timeout`")

    @model_validator(mode="after")
    def _ordered(self) -> Measure:
        if self.max_seconds < self.min_seconds:
            raise ValueError(f"max_seconds ({self.max_seconds:g}) is below min_seconds ({self.min_seconds:g})")
        if self.max_steps is not None and self.max_steps < self.min_steps:
            raise ValueError(f"max_steps ({self.max_steps}) is below min_steps ({self.min_steps})")
        return self


class Point(_Model):
    """One piece of work, fully decided."""

    suite: str
    benchmark: str
    workload: str
    params: dict[str, JsonValue]
    system: str = Field(description="name in the catalogue, or `local`")
    device: str = Field(description="what the machine's compute device is, e.g. `NVIDIA H200 x1`")
    device_class: DeviceClass
    software: str = Field(description="what computes, with its version, e.g. `caraml 0.1.0, torch 2.13.0+cpu`")
    nodes: Count = 1
    devices: Count = Field(1, description="devices per node")
    mode: Mode = "train"
    precision: Precision = "fp32"
    compile: Compile = "off"
    global_batch: Count
    micro_batch: Count = Field(description="samples per device and forward pass")
    seed: int = 0
    deterministic: bool = Field(False, description="only algorithms that give the same bits every time; slower on GPUs")
    repeat: int = 0
    measure: Measure = Measure()

    @property
    def world(self) -> int:
        """Number of devices over all nodes; one process each."""
        return self.nodes * self.devices

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step and device."""
        return self.global_batch // (self.micro_batch * self.world)

    @property
    def key(self) -> str:
        """Hash of everything that decides the result; the names of suite and benchmark do not."""
        content = self.model_dump(mode="json", exclude={"suite", "benchmark"})
        canonical = json.dumps({"method": METHOD_VERSION, **content}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Short name for people: benchmark, batch, devices, and whatever is not the default."""
        parts = [self.benchmark, f"b{self.global_batch}"]
        if self.world > 1:
            parts.append(f"{self.nodes}x{self.devices}")
        parts.append(self.precision)
        if self.compile != "off":
            parts.append(self.compile if self.compile != "default" else "compiled")
        if self.mode != "train":
            parts.append(self.mode)
        if self.deterministic:
            parts.append("deterministic")
        if self.repeat:
            parts.append(f"#{self.repeat + 1}")
        return " ".join(parts)


class _Asked(_Model):
    """The values of a benchmark that an override may replace. A list is swept."""

    params: dict[str, JsonValue] | None = None
    nodes: Count | list[Count] | None = None
    devices: Count | Literal["all"] | list[Count | Literal["all"]] | None = None
    mode: Mode | list[Mode] | None = None
    precision: Precision | list[Precision] | None = None
    compile: Compile | list[Compile] | None = None
    global_batch: Count | list[Count] | None = None
    micro_batch: Count | list[Count] | None = None
    seed: int | list[int] | None = None
    deterministic: bool | list[bool] | None = None
    repeats: Count | None = None
    measure: Measure | None = None


class Override(_Asked):
    """Values that replace the benchmark's own on one class of device."""


class Benchmark(_Asked):
    """One `[[benchmark]]` table: a workload and what to sweep."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+-]*$")
    workload: Annotated[str, AfterValidator(lambda name: WORKLOAD_ALIASES.get(name, name))]
    sweep: Literal["product", "zip"] = "product"
    where: list[str] = []
    on: dict[DeviceClass, Override] = {}

    def asked(self, device_class: DeviceClass) -> dict[str, Any]:
        """The values in force on this class of device; ``params`` and ``measure`` are merged key by key."""
        values = {name: getattr(self, name) for name in _Asked.model_fields}
        override = self.on.get(device_class)
        if override is not None:
            for name in override.model_fields_set:
                ours, theirs = values[name], getattr(override, name)
                if name == "params":
                    values[name] = {**(ours or {}), **theirs}
                elif name == "measure":
                    base = ours.model_dump(exclude_unset=True) if ours else {}
                    values[name] = Measure(**{**base, **theirs.model_dump(exclude_unset=True)})
                else:
                    values[name] = theirs
        return values


class Suite(_Model):
    """A suite file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    description: str = ""
    benchmark: list[Benchmark] = Field(min_length=1)
