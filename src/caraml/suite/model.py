"""What is asked: suite files (TOML) and the points that they expand to.

A suite is a list of benchmarks; a benchmark is a workload with values, any of which may be a list, and lists are swept. A point is one
combination: frozen, normalised, and named by the hash of everything that decides its result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from caraml import METHOD_VERSION
from caraml.base.limits import COUNT
from caraml.base.toml import FrozenModel, checked
from caraml.system.model import DeviceClass

Attention = Literal["auto", "flash", "cudnn", "efficient", "math"]
Matmul = Literal["auto", "mkl", "onednn"]
DropoutMasks = Literal["auto", "torch", "words"]
Binding = Literal["auto", "compact", "spread", "none"]
StepGraph = Literal["auto", "on", "off"]

_OF_CPUS = ("keep_freed_memory", "matmul", "dropout_masks")
_OF_GPUS = ("convolution_search", "step_graph")
"""Knobs without an effect elsewhere."""

Schedule = Literal["gpipe", "1f1b", "interleaved"]
Count = Annotated[int, Field(ge=1, le=COUNT)]
INTERLEAVED_STAGES = 2
"""Stages of each pipeline rank under the interleaved schedule; the others have one."""


class Placement(FrozenModel):
    """How one copy of the model is divided, and how the copies share. The default is whole copies: plain data parallelism."""

    tp: Count = Field(1, description="devices that share every layer (tensor parallelism)")
    sp: bool = Field(False, description="tp devices also divide the sequence outside attention and MLP (sequence parallelism)")
    cp: Count = Field(1, description="devices that divide every sequence, attention included (context parallelism)")
    pp: Count = Field(1, description="pipeline ranks, each with a share of the layers")
    schedule: Schedule = Field("1f1b", description="order of the pipeline's micro-batches")
    fsdp: Count = Field(1, description="devices that share one set of parameters, gathered layer by layer; divides dp x cp")
    distributed_optimizer: bool = Field(False, description="the dp x cp devices share gradients and optimizer state, parameters stay whole")

    @classmethod
    def of(cls, values: dict[str, Any]) -> Placement:
        """From a point's swept values; what has no effect takes its default, so that the same work has the same key."""
        given = {name: values[name] for name in cls.model_fields if values.get(name) is not None}
        if given.get("tp", 1) == 1:
            given.pop("sp", None)
        if given.get("pp", 1) == 1:
            given.pop("schedule", None)
        return cls(**given)

    @property
    def split(self) -> bool:
        """Whether the model is anything but whole copies."""
        return self != _WHOLE

    @property
    def model_parallel(self) -> int:
        """Devices of one copy of the model."""
        return self.tp * self.cp * self.pp

    def copies(self, world: int) -> int:
        """Copies of the model on so many devices."""
        return max(world // self.model_parallel, 1)

    @property
    def stages(self) -> int:
        """Stages of the pipeline over all its ranks."""
        return self.pp * (INTERLEAVED_STAGES if self.schedule == "interleaved" else 1)

    def stages_of(self, rank: int) -> list[int]:
        """Stages that a pipeline rank holds: one, or every ``pp``-th under the interleaved schedule."""
        return list(range(rank, self.stages, self.pp))

    def shards(self, holders: int) -> int:
        """Devices over which one set of optimizer state is spread, of those that would hold the same parameters."""
        return holders if self.distributed_optimizer else self.fsdp

    def label(self, dp: int) -> str:
        """Short form for people: ``dp2 tp2+sp pp4 interleaved``; empty for plain data parallelism. With ``fsdp``, sets of parameters are
        counted instead of copies, unless ``cp`` shares them, too."""
        if not self.split:
            return ""
        parts = [f"dp{dp}"] if dp > 1 else []
        if self.fsdp > 1:
            sets = dp // self.fsdp if self.cp == 1 else dp
            parts = ([f"dp{sets}"] if sets > 1 else []) + [f"fsdp{self.fsdp}"]
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.tp > 1:
            parts.append(f"tp{self.tp}" + ("+sp" if self.sp else ""))
        if self.pp > 1:
            parts += [f"pp{self.pp}", self.schedule]
        if self.distributed_optimizer:
            parts.append("distributed-optimizer")
        return " ".join(parts)


_WHOLE = Placement()


class Knobs(FrozenModel):
    """Settings of a point besides `compile`. `docs/performance.md` has what each is worth."""

    channels_last: bool = Field(True, description="memory order of images and convolutions: channels innermost")
    fused_optimizer: bool = Field(True, description="one kernel for the whole update; else what torch chooses by itself")
    keep_freed_memory: bool = Field(True, description="CPUs: the C library keeps freed blocks instead of returning them to the kernel")
    attention: Attention = Field("auto", description="the only kernel that torch may take for attention; `auto`: torch's choice")
    convolution_search: bool = Field(
        True, description="NVIDIA and AMD GPUs: time the library's algorithms for each convolution and take the fastest (cudnn.benchmark)"
    )
    half_residual: bool = Field(
        False, description="GPT in bf16 or fp16: hidden states between the layers in that format, too: less to move, less exact"
    )
    matmul: Matmul = Field(
        "auto",
        description="CPUs: library of fp32 matrix products, torch's BLAS or oneDNN; in bf16 also of attention's, which oneDNN rounds; "
        "`auto`: the faster by the point's own products",
    )
    dropout_masks: DropoutMasks = Field(
        "auto",
        description="CPUs: who draws the masks of dropout, torch number by number, or CARAML from random `words`; `auto`: the faster",
    )
    frozen_weights: bool = Field(
        True,
        description="mode `inference`: before the first step, weights are cast to `precision` and batch normalisation is folded into "
        "convolutions",
    )
    step_graph: StepGraph = Field(
        "off",  # nobody has seen it on a GPU yet
        description="NVIDIA and AMD GPUs: launch a training step on one device as one graph (CUDA graph); `auto`: where launching takes "
        "longer than computing and the graph is faster",
    )
    affinity: Binding = Field(
        "auto",
        description="which cores processes and threads run on: `auto`, processes near their devices; `compact`, each in a block of "
        "neighbouring cores, threads side by side; `spread`, cores and threads dealt out over the node; `none`, where the kernel likes",
    )
    emulated: bool = Field(False, description="allow a `precision` that the device only emulates, on CPUs up to 200 times slower than fp32")

    @classmethod
    def of(cls, values: dict[str, Any], device_class: DeviceClass, emulates: Collection[str] = ()) -> Knobs:
        """From a point's swept values; what has no effect takes its default, so that the same work has the same key."""
        given = {name: values[name] for name in cls.model_fields if values.get(name) is not None}
        precision = values.get("precision")
        without_effect = {
            *(_OF_GPUS if device_class == "cpu" else _OF_CPUS),
            *(() if precision in emulates else ("emulated",)),
            *(() if precision in ("bf16", "fp16", "fp8") else ("half_residual",)),
            *(() if values.get("mode") == "inference" else ("frozen_weights",)),
        }
        given = {name: value for name, value in given.items() if name not in without_effect}
        return cls(**given)

    @property
    def changed(self) -> dict[str, Any]:
        """Those that are not as they would be by themselves."""
        return self.model_dump(mode="json", exclude_defaults=True)

    @property
    def label(self) -> str:
        """The changed ones in words: ``channels_last=false``."""
        return " ".join(f"{name}={str(value).lower()}" for name, value in self.changed.items())


Mode = Literal["train", "compute", "data", "inference"]
"""``train``: real input pipeline. ``compute``: batches already on the device. ``data``: the input pipeline alone. ``inference``: real
input, forward passes only."""
TRAINING: tuple[Mode, ...] = ("train", "compute")
"""Modes whose steps have a backward pass and an update."""
Stated = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]
Precision = Stated | Literal["not stated"]
NOT_STATED: Literal["not stated"] = "not stated"
"""Of a point that somebody else measured, or whose work is not CARAML's: nobody said."""
OWN_LOOP = "own_loop"
"""Workload of loops that ``caraml.measure`` measures."""
COUNTED = "counted"
"""Parameter of such a loop, beside its own: what its rate counts."""
IMPORTED = "imported"
"""Workload of the rows of tables, by itself or as ``imported-ITEM`` with what their rates count."""
Compile = Literal["off", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
_WITH_GRAPHS = ("reduce-overhead", "max-autotune")

WORKLOAD_ALIASES = {
    "ap1": "temperature_postprocessing",
    "ap2": "tweet_rain_classification",
    "ap3": "radiation_emulation",
    "ap4": "ensemble_postprocessing",
    "ap5": "downscaling_gan",
    "ap6": "regime_clustering",
}
"""Short names by which a suite may ask for a workload; points carry the full name, so that the same work has the same key."""

COMMAND_KEYS = ("argv", "env", "cwd", "item", "items", "metrics", "marks", "energy")
"""Parameters of the workload `command` that are not the program's own."""

Seed = Annotated[int, Field(ge=-COUNT, le=COUNT)]
LONGEST = 1e9
"""Seconds, 31 years, that a policy may say: clocks and schedulers take no more."""
OF_EPOCHS = ("epochs", "count_epoch", "until_accuracy", "until_loss")
"""Keys of `measure` that the keys of points do without where they are not used."""


class Policy(FrozenModel, allow_inf_nan=False):
    """When a measurement starts and stops. Times in seconds."""

    target: float = Field(0.01, gt=0, lt=1, description="stop when the 95 % interval's relative half-width is below this")
    min_seconds: float = Field(5.0, ge=0, le=LONGEST, description="shortest window")
    max_seconds: float = Field(60.0, gt=0, le=LONGEST, description="longest window; a wider interval is then flagged `imprecise`")
    min_steps: int = Field(10, ge=4, description="fewest steps in the window")
    max_steps: int | None = Field(None, ge=4, description="most steps in the window")
    warm_up_steps: int = Field(3, ge=3, description="fewest steps before the window, the first step not counted")
    warm_up_max_seconds: float = Field(
        60.0, gt=0, le=LONGEST, description="longest warm-up; a series still moving is then flagged `not_steady`"
    )
    idle_seconds: float = Field(
        2.0, ge=0, le=LONGEST, description="length of the idle power baseline before the work, and after it; none without a sensor"
    )
    timeout_seconds: float = Field(1800.0, gt=0, le=LONGEST, description="wall time after which the point is stopped with status `timeout`")
    epochs: int | None = Field(None, ge=1, description="train exactly so many epochs; the window is one of them instead of a span of time")
    count_epoch: int | None = Field(None, ge=1, description="the epoch that counts, from 1; the last but one if absent")
    until_accuracy: float | None = Field(None, gt=0, le=1, description="train until the held-out accuracy is this, for at most `epochs`")
    until_loss: float | None = Field(None, gt=0, description="train until the held-out loss is this or lower, for at most `epochs`")

    @model_validator(mode="after")
    def _ordered(self) -> Policy:
        if self.max_seconds < self.min_seconds:
            raise ValueError(f"expected max_seconds of at least min_seconds ({self.min_seconds:g}), not {self.max_seconds:g}")
        if self.max_steps is not None and self.max_steps < self.min_steps:
            raise ValueError(f"expected max_steps of at least min_steps ({self.min_steps}), not {self.max_steps}")
        if self.epochs is None and any(getattr(self, name) is not None for name in OF_EPOCHS[1:]):
            raise ValueError(f"expected `epochs`, the most epochs to train, which {', '.join(OF_EPOCHS[1:])} need")
        if self.epochs is not None and self.count_epoch is not None and self.count_epoch > self.epochs:
            raise ValueError(f"expected count_epoch of at most epochs ({self.epochs}), not {self.count_epoch}")
        return self

    @property
    def counted_epoch(self) -> int | None:
        """The epoch that counts, from 1: EPICURE's rule is the last but one, so that neither start nor end weighs in."""
        return None if self.epochs is None else self.count_epoch or max(self.epochs - 1, 1)

    @property
    def trained(self) -> str:
        """How long is trained, where that is decided: ``epochs=4 until_loss=0.5``."""
        return " ".join(f"{name}={found:g}" for name in OF_EPOCHS if (found := getattr(self, name)) is not None)

    @property
    def to_target(self) -> bool:
        """Whether training goes on until a quality is reached, and time and energy of all of it count."""
        return self.until_accuracy is not None or self.until_loss is not None


def policy(**keys: Any) -> Policy:
    """When a measurement starts and stops: the keys of ``measure`` in suites. Raises ``InputError`` with every fault."""
    return checked("caraml.Policy", keys, Policy)


class Point(FrozenModel):
    """One piece of work, fully decided."""

    suite: str
    benchmark: str
    variant: str = Field("", description="the parameters that the benchmark sweeps, for people")
    workload: str = Field(pattern=r"^[^/.][^/]*$")
    params: dict[str, JsonValue]
    system: str = Field(description="name in the catalogue, or `local`")
    device: str = Field(description="what the machine's compute device is, e.g. `NVIDIA H200 x1`")
    device_class: DeviceClass
    software: str = Field(description="what computes, with its version, e.g. `caraml 0.1.0, torch 2.13.0+cpu`")
    nodes: Count = 1
    devices: Count = Field(1, description="devices per node")
    placement: Placement = Placement()
    knobs: Knobs = Knobs()
    mode: Mode = "train"
    precision: Precision = "fp32"
    compile: Compile = "off"
    global_batch: Count
    micro_batch: Count = Field(description="samples per copy of the model and forward pass")
    seed: Seed = 0
    deterministic: bool = Field(False, description="only algorithms that give the same bits every time; slower on GPUs")
    repeat: int = 0
    profile: bool = Field(False, description="trace a few steps after the window")
    measure: Policy = Policy()
    needs: tuple[Annotated[str, Field(pattern=r"^[^/.][^/]*-[0-9a-f]{16}$")], ...] = Field(
        (), description="folders of points that go first"
    )

    @property
    def world(self) -> int:
        """Number of devices over all nodes; one process each."""
        return self.nodes * self.devices

    @property
    def dp(self) -> int:
        """Copies of the model; each sees samples of its own."""
        return self.placement.copies(self.world)

    @property
    def holders(self) -> int:
        """Devices that work with the same parameters and exchange their gradients: of every copy, those that divide the sequence."""
        return self.dp * self.placement.cp

    @property
    def sharded(self) -> bool:
        """Whether FSDP exchanges the gradients. It also does so for copies whose parameters tensor parallelism divides, as shards of one
        part: DDP takes plain tensors only."""
        placement = self.placement
        return placement.fsdp > 1 or (self.holders > 1 and (placement.distributed_optimizer or placement.tp > 1))

    @property
    def in_step(self) -> bool:
        """Whether its ranks wait for each other in every step. Those that only read, or infer, each go at their own pace; of a loop that
        CARAML does not run nobody knows."""
        return self.mode in TRAINING and self.workload != OWN_LOOP

    @property
    def paces(self) -> int:
        """How many ranks are known to go each at its own pace, so that the slowest of so many is measured."""
        return 1 if self.mode in TRAINING else self.world

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step and copy of the model."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def imported(self) -> bool:
        """Whether it is the row of a table."""
        return self.workload.partition("_")[0] == IMPORTED

    @property
    def arithmetic(self) -> str:
        """Its precision for people: ``bf16``, or that nobody stated it."""
        return self.precision if self.precision != NOT_STATED else f"precision {NOT_STATED}"

    @property
    def cuda_graphs(self) -> bool:
        """Whether torch replays the kernels of a compiled pass as one graph, whose tensors lie where they lay before."""
        return self.device_class == "gpu" and self.compile in _WITH_GRAPHS

    @property
    def key(self) -> str:
        """Hash of everything that decides the result; the names that people gave it do not."""
        content = self.model_dump(mode="json", exclude={"suite", "benchmark", "variant", "placement", "knobs"})
        content["params"] = self.deciding_params
        if not self.needs:
            del content["needs"]
        # A later kind of placement, or a later knob, must not change the keys of points that do without it.
        if self.placement.split:
            content["placement"] = self.placement.model_dump(mode="json", exclude_defaults=True)
        if self.knobs.changed:
            content["knobs"] = self.knobs.changed
        if not self.profile:
            del content["profile"]
        content["measure"] = {name: value for name, value in content["measure"].items() if name not in OF_EPOCHS or value is not None}
        if self.workload == OWN_LOOP:  # name and parameters say what the loop does; its steps may have different numbers of items
            del content["global_batch"], content["micro_batch"]
        if self.imported:  # a table has results already: equal work of another table is another run of it
            content["suite"] = self.suite
        canonical = json.dumps({"method": METHOD_VERSION, **content}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def deciding_params(self) -> dict[str, JsonValue]:
        """The parameters without what a suite says of a program's metrics: it decides no result, so it may be written later."""
        said = ("better", "definition")
        found = self.params.get("metrics") if self.workload == "command" else None
        if not isinstance(found, dict):
            return self.params
        specs = {name: spec if isinstance(spec, dict) else {} for name, spec in found.items()}
        return self.params | {"metrics": {name: {key: one for key, one in spec.items() if key not in said} for name, spec in specs.items()}}

    @property
    def folder_name(self) -> str:
        """Name of its folder among the results."""
        return f"{self.workload}-{self.key}"

    @property
    def label(self) -> str:
        """Short name for people: benchmark, swept parameters, batch, devices, what is not the default; of a command, its parameters."""
        where = [f"{self.nodes}x{self.devices}"] if self.world > 1 else []
        stated = [self.precision] if self.precision != NOT_STATED else []
        if self.workload == "command":
            own = [f"{name}={value}" for name, value in self.params.items() if name not in COMMAND_KEYS]
            own += [word for word in self.variant.split() if word.startswith(("micro_batch=", "seed=")) and word not in own]
            batch = [f"b{self.global_batch}"] if self.global_batch > 1 else []
            bound = [self.knobs.label] if self.knobs.affinity != "auto" else []
            return " ".join([self.benchmark, *own, *batch, *where, *bound, *([f"#{self.repeat + 1}"] if self.repeat else [])])
        if self.workload == OWN_LOOP:
            own = [f"{name}={value}" for name, value in self.params.items() if name not in ("name", COUNTED)]
            return " ".join([self.benchmark, *own, *where, *stated])
        batch = [f"b{self.global_batch}"] if self.global_batch > 1 or not self.imported else []  # 1 where a table does not say it
        parts = [self.benchmark, *([self.variant] if self.variant else []), *batch, *where]
        parts += [self.placement.label(self.dp)] if self.placement.split else []
        besides = (
            (self.compile if self.compile != "default" else "compiled", self.compile != "off"),
            (self.mode, self.mode != "train"),
            (self.knobs.label, self.knobs.changed),
            ("deterministic", self.deterministic),
            ("profile", self.profile),
            (f"#{self.repeat + 1}", self.repeat),
        )
        return " ".join([*parts, *stated, *(word for word, told in besides if told)])
