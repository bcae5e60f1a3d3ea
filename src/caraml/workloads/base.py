"""The contract between a workload and the engine.

A workload says what is trained; the engine does everything else, the same for all. Torch is imported by a workload's ``build`` only, so
that suites can be checked without it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from pydantic import BaseModel

from caraml.base.errors import InputError
from caraml.base.limits import LARGEST, is_measurable
from caraml.metrics.model import METRICS, QUALITY, Facts, Metric, StatedMetric, check_stated
from caraml.suite.model import Knobs

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor.parallel import ParallelStyle

    from caraml.data.loader import MapDataset

P = TypeVar("P", bound=BaseModel)

SUITE_FOLDER = "CARAML_SUITE_FOLDER"
"""Environment variable: the folder of the suite's file, or that in which `caraml` was called for a suite of the catalogue."""
INPUTS = ("path", "validation", "folder", "corpus", "weights", "file", "vocabulary")
"""Names of parameters that name files or folders of input, a corpus by what its files begin with."""
VALIDATION_BATCHES = 16
"""Held-out batches, at most, that the validation loss after a window is the mean of: it tells that training works, at a bounded cost."""


def given_path(text: str) -> Path:
    """A file or folder of input that a suite names; a relative one is meant from the suite's file on."""
    return Path(os.environ.get(SUITE_FOLDER, "")) / text


@dataclass(frozen=True)
class BuildContext(Generic[P]):
    """What a workload may know when it builds its task."""

    params: P
    device: torch.device
    rank: int
    """Which copy of the model this process works for: ranks of one copy read the same samples."""
    world: int
    """Copies of the model."""
    processes_on_node: int
    micro_batch: int
    seed: int
    phase: Callable[[str], AbstractContextManager[None]]
    """Opens a named phase of the record, e.g. ``with ctx.phase("data"):`` around the preparation of input."""
    own_device: Any = None
    """The device that the workload brought itself."""
    divided: bool = False
    """Whether the engine will divide the model among devices: then it is built on the meta device, and the task says how to divide it."""
    tp: int = 1
    """Devices that share every layer of a divided model."""
    accumulation: int = 1
    """Micro-batches of this rank per optimizer step."""
    knobs: Knobs = field(default_factory=Knobs)

    @property
    def fused(self) -> bool | None:
        """What optimizers are told of fusing: ``None`` leaves the choice to torch."""
        return True if self.knobs.fused_optimizer else None

    @property
    def memory_format(self) -> torch.memory_format:
        """Memory order of images and of the weights of convolutions over them."""
        import torch

        return torch.channels_last if self.knobs.channels_last else torch.contiguous_format

    def placed(self, network: torch.nn.Module) -> torch.nn.Module:
        """A network of convolutions on the device, in :attr:`memory_format`.

        On CPUs without AVX-512, oneDNN writes outside its buffers in the backward pass of a 1 x 1 convolution with a stride over fewer than
        eight channels that are ordered last (torch 2.13; uxlfoundation/oneDNN issue 6035). Those alone get their input contiguous.
        """
        import torch

        network = network.to(self.device, memory_format=self.memory_format)  # type: ignore[call-overload]  # missing in torch's annotations
        if self.device.type == "cpu" and self.knobs.channels_last:
            for module in network.modules():
                if (
                    isinstance(module, torch.nn.Conv2d)
                    and module.kernel_size == (1, 1) != module.stride
                    and module.in_channels < 8 * module.groups
                ):
                    module.weight.data = module.weight.data.clone(memory_format=torch.contiguous_format)
                    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        return network

    @property
    def cache_bytes(self) -> int:
        """Last-level cache of this process's CPUs; 0 where that is not known, and on accelerators, whose tensors are far larger."""
        from caraml.system.host import cache_bytes

        return (cache_bytes() or 0) if self.device.type == "cpu" else 0

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.world


class StepTools(Protocol):
    """What the engine lends to a task that makes its own step, so that it is fed, wrapped and timed as every other."""

    def next_batch(self) -> Any:
        """The next micro-batch of this rank; the wait for it is counted."""

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """The module as the point asks for it: compiled, and inside DDP if there are several ranks."""

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward pass in the point's precision."""

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward pass of ``loss``, then one step of ``optimizer``, whose gradients are cleared."""


Attend = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""Causal attention: queries, keys and values, each (B, H, T, D) -> (B, H, T, D)."""


@dataclass(frozen=True)
class Division:
    """How a task's model can be divided among devices, for the engine to do. Its batches are pairs (inputs, targets).

    A module here is a stage: called with inputs or the hidden states before it and, if it is the last, the targets; it returns hidden
    states or, if it is the last, the loss. The last one's ``loss`` attribute takes head, hidden states and targets, and can be replaced.
    """

    stage: Callable[[int, int], torch.nn.Module]
    """Stage i of n on the meta device, parameters named as in the whole model; without a tensor plan on its device, with its own names."""
    layers: Callable[[Any], dict[str, torch.nn.Module]]
    """Layers of a stage by name: what is gathered, and compiled, at a time."""
    tensor_plan: Callable[[Any, bool], dict[str, ParallelStyle]] | None
    """What ``parallelize_module`` does to a stage, without and with sequence parallelism; ``None`` where stages are made divided, in plain
    tensors, of which those that are parts have ``tensor_model_parallel = True``."""
    complete: Callable[[Any], None]
    """Mends what moving a stage to a device, or dividing its parameters, breaks: shared parameters, tables."""
    initial_value: Callable[[str, Sequence[int], torch.device], torch.Tensor]
    """Where a parameter starts from, by its name and whole shape."""
    optimizer: Callable[[list[list[torch.nn.Parameter]]], torch.optim.Optimizer]
    """For the parameters of a stage, in lists that one fused update can take."""
    hidden: tuple[int, ...]
    """Shape of one sample's hidden states between two stages."""
    share_sequence: Callable[[Any, torch.Tensor, Attend], None] | None = None
    """Makes a stage that works on some tokens of every sequence, whose places are given, with an attention that knows of the others."""


@dataclass(frozen=True)
class Quality:
    """What a task can say of the model's quality besides the loss."""

    names: tuple[str, ...]
    """Of the metrics."""
    measure: Callable[[int | None], dict[str, Metric]]
    """On held-out data, at most so many batches or all of it; the model is in evaluation mode and nothing has a gradient."""
    own: Mapping[str, StatedMetric] = field(default_factory=dict)
    """What those metrics are that CARAML does not define itself."""

    def unknown(self, reason: str | None) -> dict[str, Metric]:
        """The metrics without a number, and why. Raises ``InputError`` for one that is not defined, or that CARAML measures itself."""
        try:
            check_stated(self.own)
        except ValueError as error:
            raise InputError(f"quality: expected {error}") from error
        for name in self.names:
            if name in METRICS and name not in QUALITY:
                raise InputError(f"quality {name!r}: CARAML measures the metric of this name itself", "give it another name")
            if name not in METRICS and name not in self.own:
                example = f"own={{{name!r}: StatedMetric(unit='1', better='higher')}}"
                raise InputError(f"quality {name!r}: CARAML has no metric of this name, and it has no unit", example)
        return {name: Metric(value=None, unit=(self.own.get(name) or METRICS[name]).unit, reason=reason) for name in self.names}

    def measured(self, most: int | None) -> dict[str, Metric]:
        """The metrics on at most so many batches. Raises ``InputError`` for one of another name or unit than was said."""
        found = self.measure(most)
        announced = self.unknown("the workload's quality.measure gave no number for it")
        if not isinstance(found, Mapping):
            raise InputError(f"quality: measure gave {type(found).__name__}, expected a Metric by name")
        for name, one in found.items():
            if not isinstance(one, Metric):
                raise InputError(f"quality: found {type(one).__name__} for {name!r}, expected a caraml.metrics.model.Metric")
            if name not in announced or one.unit != announced[name].unit:
                raise InputError(f"quality: found {name!r} in {one.unit!r}, which is none of the workload's names and units")
            if one.value is not None and not is_measurable(one.value):
                raise InputError(f"quality: found {one.value:g} for {name!r}, expected 0 or a size between {1 / LARGEST:g} and {LARGEST:g}")
        return {**announced, **found}


@dataclass
class Task:
    """Everything that the engine needs to train: built once per process, for this rank."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[Any]
    """Endless; each is one micro-batch of this rank, already on the device."""
    loss: Callable[[torch.nn.Module, Any], torch.Tensor]
    """Scalar training loss of a model on a batch. The model may be wrapped (DDP, compiled): call it, do not reach into it."""
    facts: Facts
    clip_norm: float | None = None
    """Largest gradient norm, if gradients are clipped."""
    own_step: Callable[[StepTools], Callable[[], torch.Tensor]] | None = None
    """For tasks whose step is more than forward, backward and update: makes, once, the function that does a step and returns its loss.
    ``loss`` then only serves to validate."""
    batches_per_step: int = 1
    """Micro-batches that a step of its own consumes."""
    samples_in: Callable[[Any], int] | None = None
    """Samples of a batch; without it the first dimension of its tensors, where that is the same for all. A rate counts ``micro_batch`` for
    each batch, so one of another size ends the point, unless the task makes its own step. A validation's mean counts them, or else the
    length of a batch's first tensor."""
    predict: Callable[[torch.nn.Module, Any], Any] | None = None
    """What mode `inference` computes; without it, ``loss`` without gradients."""
    validation: Callable[[], Iterable[Any]] | None = None
    """The held-out batches, gone through once after training; ``None`` where the data has no such part. What it returns may have a length
    and a method ``share(rank, world)``, the part of one rank; else every rank takes every ``world``-th batch."""
    judge: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    """Of a held-out batch: ``[sum of losses, number answered right, number of samples]``, shape (3,). Without it there is only a loss."""
    quality: Quality | None = None
    """Measured once, after the last step, on rank 0; ``None`` where there is no such metric or no held-out data."""
    damaged: Callable[[], dict[str, str]] | None = None
    """The damaged input files that this rank met and skipped, each with its reason."""
    attention: tuple[int, int, int] | None = None
    """Heads, tokens and width of a head of the causal attention in every layer; ``None`` where there is no one kind of it."""
    division: Division | None = None
    """How to divide the model; ``None`` if it only comes whole."""
    rate: Callable[[int], float] | None = None
    """Factor of the learning rate at a step, counted from 0; ``None`` for a constant rate."""
    start_from: str | None = None
    """Folder of a checkpoint to start from, taken at any placement."""
    save_to: str | None = None
    """Folder for a checkpoint of model and optimizer after the last step."""
    close: Callable[[], None] = field(default=lambda: None)
    """Ends loader workers and whatever else the task holds."""


def checked(task: object, name: str) -> Task:
    """What ``build`` of the workload ``name`` returned. Raises ``InputError`` if it is no task, or its facts would make numbers false."""
    for place, found, kind in (("", task, Task), ("facts: ", getattr(task, "facts", None), Facts)):
        if not isinstance(found, kind):
            fault = f"{place}found {type(found).__name__}, expected a {kind.__module__}.{kind.__name__}"
            raise InputError(f"workload {name!r}: build: {fault}", "repair the workload: docs/extend/workload.md")
    assert isinstance(task, Task)
    for key, number in task.facts.model_dump(exclude={"data"}).items():
        least = 1 if key == "items_per_sample" else 0
        if isinstance(number, int | float) and number < least:
            fault = f"{key}: found {number:g}, expected {least} or more"
            raise InputError(f"workload {name!r}: build: facts: {fault}", "repair the workload: docs/extend/workload.md")
    return task


@dataclass(frozen=True)
class Workload(Generic[P]):
    """A name for the catalogue, the parameters it takes, and how to build it."""

    title: str
    params: type[P]
    build: Callable[[BuildContext[P]], Task]
    packages: tuple[str, ...] = ()
    """Names of packages that must be importable besides those that CARAML always brings."""
    check: Callable[[P, Path], None] | None = None
    """Looks at the input that is there before anything runs, from a suite's folder on, without reading all of it. Raises ``InputError`` for
    that of another kind, ``EnvironmentUnfitError`` for a package that these parameters need and that is not installed."""
    device: Callable[[P], Any] | None = None
    """Makes a device of known speed and known peak in place of the machine's (or returns ``None`` to keep that): for proving the ruler."""


def later(module: str, function: str) -> Callable[..., Any]:
    """A function whose module is imported when it is called: to check a suite needs no torch."""

    def imported(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*arguments)

    return imported


@dataclass(frozen=True)
class BatchSource:
    """Endless batches on the device, where they come from, and how to end their workers."""

    batches: Iterator[Any]
    description: dict[str, Any]
    close: Callable[[], None]
    samples: int
    """In an epoch, over all ranks."""
    validation: Callable[[], Iterable[Any]] | None = None
    """The held-out batches, if there are any."""
    dataset: MapDataset | None = None
    """Whose samples they are; ``None`` where batches come whole."""

    def task(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        facts: Facts,
        **further: Any,
    ) -> Task:
        """The task on these batches, validated on those held out; ``further`` are other fields of it."""
        return Task(model, optimizer, self.batches, loss, facts, validation=self.validation, close=self.close, **further)


def open_source(dataset: MapDataset, ctx: BuildContext[Any], *, workers: int | None, resident: bool) -> BatchSource:
    """Stream ``dataset`` in micro-batches of this rank through the loader or, if ``resident``, repeat a few batches kept on the device.

    ``workers`` of ``None`` lets the loader choose by device and cores.
    """
    from caraml.data.loader import device_batches, stream, to_device
    from caraml.system.families import pins

    description = {**cast(Any, dataset).describe(), "resident": resident}
    if resident:
        kept = device_batches(dataset, ctx.micro_batch, ctx.device, rank=ctx.rank)
        return BatchSource(kept, description, lambda: None, len(dataset), dataset=dataset)
    count = loader_workers(ctx, workers)
    batches = stream(
        dataset,
        ctx.micro_batch,
        workers=count,
        pin_memory=pins(ctx.device),
        seed=ctx.seed,
        rank=ctx.rank,
        world_size=ctx.world,
        batches_per_step=ctx.accumulation,
    )
    samples = getattr(dataset, "samples_per_epoch", len(dataset))
    return BatchSource(to_device(batches, ctx.device), {**description, "loader_workers": count}, batches.close, samples, dataset=dataset)


def loader_workers(ctx: BuildContext[Any], asked: int | None) -> int:
    """The number of loader processes of this rank: as asked, else by device and cores."""
    from caraml.data.loader import default_workers

    return default_workers(ctx.device.type, ctx.processes_on_node) if asked is None else asked


COUNTED = (
    "torch's FLOP formulas summed over one forward and backward pass on the meta device: "
    "2 FLOPs per multiply-add of matrix products, convolutions and attention"
)


def counted_facts(
    item: str,
    model: torch.nn.Module,
    source: BatchSource,
    flops: tuple[float, float],
    *,
    bytes_per_sample: int,
    formula: str = COUNTED,
    **further: Any,
) -> Facts:
    """The facts of a workload that counts one ``item`` per sample: with all parameters of the model, frozen ones included, FLOPs forward
    and in training by :func:`caraml.workloads.flops.forward_and_training_flops`, bytes of a sample as it comes to the device, and
    ``further`` fields."""
    return Facts(
        item=item,
        items_per_sample=1,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        forward_flops_per_item=flops[0],
        flops_per_item=flops[1],
        flops_formula=formula,
        bytes_per_sample=bytes_per_sample,
        samples_per_epoch=source.samples,
        data=source.description,
        **further,
    )
