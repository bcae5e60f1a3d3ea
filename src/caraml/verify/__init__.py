"""The check of the measurement: work whose every number is known before it is measured (the workload ``known``), and its device."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from caraml.base.toml import FrozenModel
from caraml.metrics.model import Facts, Peak
from caraml.system.model import DType
from caraml.workloads.base import BuildContext, Task, Workload

if TYPE_CHECKING:
    import torch


PEAK_MEMORY = 3 * 2**30
"""Bytes that the device says it held at most."""
PEAK_FLOPS: dict[DType, float] = {"fp32": 1e13, "tf32": 2e13, "bf16": 4e13, "fp16": 4e13}
"""Peak rate of the device in FLOP/s."""


class Clock:
    """The host's monotonic clock, in seconds."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, instant: float) -> None:
        """Return when it is at least ``instant``."""
        time.sleep(max(instant - time.monotonic(), 0.0))


class VirtualClock(Clock):
    """A clock that only moves when somebody waits, so that minutes of work take no time and nothing disturbs them."""

    def __init__(self, start: float) -> None:
        self.time = start

    def now(self) -> float:
        return self.time

    def wait_until(self, instant: float) -> None:
        self.time = max(self.time, instant)


class KnownDevice:
    """A device whose every launch takes the time it is told. The host runs ahead of it by up to ``queue`` seconds."""

    settle_seconds = window_seconds = 0.0
    behind = True

    def __init__(self, clock: Clock, launch_cost: float = 0.0, queue: float = 0.25) -> None:
        import torch  # not above: who plans a suite does not need it

        self.torch_device = torch.device("cpu")
        self.clock, self.launch_cost, self.queue = clock, launch_cost, queue
        self.free_at = clock.now()
        self.synchronised = 0
        """How often the host waited for the device."""

    def launch(self, seconds: float) -> None:
        """Put work of this length into the queue; blocks while the queue is full, as drivers do."""
        self.clock.wait_until(self.clock.now() + self.launch_cost)
        self.free_at = max(self.free_at, self.clock.now()) + seconds
        self.clock.wait_until(self.free_at - self.queue)

    def now(self) -> float:
        return self.clock.now()

    def synchronize(self) -> None:
        self.synchronised += 1
        self.clock.wait_until(self.free_at)

    def mark(self) -> float:
        """When everything launched so far will have finished."""
        self.free_at = max(self.free_at, self.clock.now())
        return self.free_at

    def between(self, first: float, last: float) -> float | None:
        return last - first if last <= self.clock.now() else None

    def wait(self, mark: float) -> None:
        self.clock.wait_until(mark)

    def forget_peak_memory(self) -> None:
        """The peak is a constant."""

    def peak_memory(self) -> int:
        return PEAK_MEMORY

    def peak(self, dtype: DType) -> Peak:
        """The known peak, in place of a data sheet and a probe."""
        return Peak(value=PEAK_FLOPS[dtype], dtype=dtype, source="known")


ITEMS_PER_SAMPLE = 7
FLOPS_PER_ITEM = 2e9
BYTES_PER_SAMPLE = 11
GIB_PER_SAMPLE = 1
"""What a sample is said to need, for the message of a device that is full."""


class Params(FrozenModel):
    """What is known of the work. Times in seconds; counts are of micro-batches from 0, on every rank."""

    uncompiled: ClassVar[str] = "work of known length is launched, not computed"

    device: Literal["virtual", "asynchronous", "real"] = Field(
        "virtual", description="a device of known speed on a clock of its own or on the host's, or this machine's kept busy by the clock"
    )
    step_seconds: float = 0.05
    slow_rank_extra: float = Field(0.0, description="by how much the last rank is slower")
    warm_up_extra: float = Field(0.0, description="by how much the first is longer; halves with each after it")
    slope: float = Field(0.0, description="by how much each is longer than the one before")
    slower_from: int | None = Field(None, description="from here on each takes `slower_by` times as long, as on a device that got too hot")
    slower_by: float = 1.5
    data_seconds: float = Field(0.0, description="what fetching one takes")
    slow_rank_data_extra: float = Field(0.0, description="by how much fetching takes longer on the last rank")
    overflow_every: int | None = Field(None, description="the gradients of every so-many-th overflow; needs precision fp16")
    memory_samples: int | None = Field(None, description="largest micro-batch that fits into the device's memory")
    oom_at: int | None = None
    nan_at: int | None = None
    crash_at: int | None = None
    crash_on: int | None = Field(None, description="the only rank that crashes; absent: every rank")
    hang_at: int | None = Field(None, description="fetching this one never ends on the last rank")


def device(params: Params) -> KnownDevice | None:
    """The device of known speed, or ``None`` where the machine's own is asked for."""
    if params.device == "asynchronous":  # for energy and waiting, which take real time
        return KnownDevice(Clock())
    if params.device == "virtual":  # its clock starts now, so that its times fit those of the host
        return KnownDevice(VirtualClock(time.monotonic()), launch_cost=0.001, queue=1.0)
    return None


def build(ctx: BuildContext[Params]) -> Task:
    """A linear model whose loss launches work of known length."""
    import torch

    params = ctx.params
    model = torch.nn.Linear(1, 1).to(ctx.device)
    launch = _real_work(ctx.device, params.step_seconds) if ctx.own_device is None else ctx.own_device.launch
    counter, now = itertools.count(), [0]

    def overflow(gradient: torch.Tensor) -> torch.Tensor:
        due = params.overflow_every is not None and now[0] % params.overflow_every == 0
        return gradient * torch.inf if due else gradient

    model.weight.register_hook(overflow)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        now[0] = index = next(counter)
        _fail_where_told(params, index, ctx)
        launch(_seconds(params, index, last=ctx.rank == ctx.world - 1))
        value: torch.Tensor = net(batch).sum()
        return value * torch.nan if index == params.nan_at else value

    facts = Facts(
        item="thing",
        items_per_sample=ITEMS_PER_SAMPLE,
        parameters=2,
        flops_per_item=FLOPS_PER_ITEM,
        flops_formula="known",
        bytes_per_sample=BYTES_PER_SAMPLE,
        data={"kind": "known"},
    )
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.0), _batches(ctx), loss, facts)


def _seconds(params: Params, index: int, last: bool) -> float:
    seconds = params.step_seconds + params.warm_up_extra * 0.5**index + params.slope * index
    if last:
        seconds += params.slow_rank_extra
    return seconds * (params.slower_by if params.slower_from is not None and index >= params.slower_from else 1.0)


def _fail_where_told(params: Params, index: int, ctx: BuildContext[Params]) -> None:
    import torch

    full = params.memory_samples is not None and ctx.micro_batch > params.memory_samples
    if full or index == params.oom_at:
        raise torch.OutOfMemoryError(f"tried to allocate {ctx.micro_batch * GIB_PER_SAMPLE}.00 GiB")
    if index == params.crash_at and params.crash_on in (None, ctx.rank):
        raise ValueError("the model is broken")


def _batches(ctx: BuildContext[Params]) -> Iterator[Any]:
    """Always the same batch, after the time that fetching it is known to take."""
    import torch

    batch, params = torch.ones(ctx.micro_batch, 1, device=ctx.device), ctx.params
    last = ctx.rank == ctx.world - 1
    wait = params.data_seconds + (params.slow_rank_data_extra if last else 0.0)
    for index in itertools.count():
        while last and index == params.hang_at:
            time.sleep(1.0)
        if wait:
            time.sleep(wait)
        yield batch


def _real_work(device: torch.device, calibrated: float) -> Callable[[float], None]:
    """Keeps the machine's own device busy for the seconds it is given, ``calibrated`` being the usual number of them."""
    if device.type == "cuda":
        return _sleeping_kernel(calibrated)
    ends = [time.monotonic()]

    def spin(seconds: float) -> None:
        # By the timetable of the steps before: what a step takes beside the spinning does not make it longer. A pause starts a new one.
        now = time.monotonic()
        ends[0] = (ends[0] if now - ends[0] < seconds else now) + seconds
        while time.monotonic() < ends[0]:
            pass

    return spin


def _sleeping_kernel(calibrated: float) -> Callable[[float], None]:
    """A kernel that only counts clock cycles; how many of them are a second is measured with the device's own events."""
    import torch

    def milliseconds(cycles: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    per_second = 1e9
    for _ in range(10):  # clocks rise with the first work; the last trials are as long as a step
        cycles = int(per_second * calibrated)
        per_second = cycles / milliseconds(cycles) * 1e3
    return lambda seconds: torch.cuda._sleep(int(seconds * per_second))


WORKLOAD = Workload(title="work of known truth", params=Params, build=build, device=device)
