"""What a device can do by measurement: the best matrix product and the best memory stream that torch reaches on it.

The numbers are lower bounds of what the hardware could do and upper bounds of what a training step can hope for. Threads, clocks and
power limits are taken as they are. Torch is imported when a probe runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from caraml.errors import EnvironmentUnfitError, unknown_name
from caraml.system.model import DType

if TYPE_CHECKING:
    import torch

METHOD_VERSION = 1
"""Raised when shapes, data or statistics of a probe change, so that cached results are not mixed."""

_DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}

Kernel = Literal["copy", "triad"]

Shape = tuple[int, int, int]
"""(m, k, n): an m x k matrix times a k x n matrix, 2 m k n floating point operations."""

_SHAPES: dict[str, tuple[Shape, ...]] = {
    # One tall shape each, as the linear layers of a transformer are: tokens x hidden x 4 hidden.
    "cpu": ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 768, 3072), (4096, 4096, 4096)),
    "gpu": ((1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3, (16384, 4096, 16384), (16384,) * 3),
}
_FEWEST, _MOST = 3, 200
"""Repetitions per shape."""


class Trial(BaseModel):
    """One shape of a GEMM probe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: tuple[int, int, int]
    repetitions: int
    flops_per_s: float | None
    skipped: str | None = None


class ProbeResult(BaseModel):
    """The best matrix product of a device: median rate of the best shape; ``low`` and ``high`` are its 10 % and 90 % quantiles."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    flops_per_s: float
    low: float
    high: float
    shape: tuple[int, int, int]
    dtype: DType
    device: str
    threads: int
    torch_version: str
    seconds: float
    method_version: int = METHOD_VERSION
    trials: tuple[Trial, ...]


class BandwidthResult(BaseModel):
    """The best memory stream of a device [bytes/s], bytes read plus bytes written; quantiles as in ``ProbeResult``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes_per_s: float
    low: float
    high: float
    kernel: Kernel
    array_bytes: int
    device: str
    threads: int
    torch_version: str
    seconds: float
    method_version: int = METHOD_VERSION


def measured_peak(device: torch.device | str, dtype: DType, *, budget_s: float = 3.0) -> ProbeResult:
    """The best FLOP/s of dense matrix products of ``dtype`` on ``device``, found within about ``budget_s`` seconds.

    Matrices hold random numbers: zeros would draw less power and run faster than any training does. Every shape is warmed up; its rate
    is the median over its repetitions. A shape that the rate so far predicts to be too slow for the budget is skipped, so that formats
    which a CPU only emulates end in time.

    Raises:
        EnvironmentUnfitError: the device has no such format, or not enough memory for the smallest shape.
    """
    import torch

    device = torch.device(device)
    torch_dtype = _torch_dtype(device, dtype)
    begin = time.monotonic()
    deadline = begin + budget_s
    shapes = _SHAPES["cpu" if device.type == "cpu" else "gpu"]
    trials: list[Trial] = []
    best_rates: list[float] = []
    best_shape = shapes[0]
    with torch.inference_mode(), _matmul_precision(device, dtype):
        for position, shape in enumerate(shapes):
            share = max(0.0, deadline - time.monotonic()) / (len(shapes) - position)
            rates = _gemm_rates(device, torch_dtype, shape, share, median(best_rates) if best_rates else None)
            if isinstance(rates, str):
                trials.append(Trial(shape=shape, repetitions=0, flops_per_s=None, skipped=rates))
                continue
            trials.append(Trial(shape=shape, repetitions=len(rates), flops_per_s=median(rates)))
            if not best_rates or median(rates) > median(best_rates):
                best_rates, best_shape = rates, shape
    _give_back(device)
    if not best_rates:
        raise EnvironmentUnfitError(f"no {dtype} matrix product runs on {device}: {trials[0].skipped}")
    low, high = _spread(best_rates)
    return ProbeResult(
        flops_per_s=median(best_rates),
        low=low,
        high=high,
        shape=best_shape,
        dtype=dtype,
        device=_name(device),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        seconds=time.monotonic() - begin,
        trials=tuple(trials),
    )


def measured_bandwidth(device: torch.device | str, *, budget_s: float = 2.0, array_bytes: int | None = None) -> BandwidthResult:
    """The best bytes/s of a copy and of a triad ``a = b + s c`` over fp32 arrays of ``array_bytes``, far larger than any cache by default.

    Bytes that the program reads plus bytes that it writes are counted; what a CPU reads in addition before it writes is not.

    Raises:
        EnvironmentUnfitError: the arrays do not fit into the device's memory.
    """
    import torch

    device = torch.device(device)
    begin = time.monotonic()
    if array_bytes is None:
        array_bytes = (128 if device.type == "cpu" else 1024) * 2**20
    try:
        rates, kernel = _best_stream(device, array_bytes, budget_s)
    except RuntimeError as error:  # torch's word for "out of memory"
        raise EnvironmentUnfitError(f"three arrays of {array_bytes >> 20} MiB do not fit on {device}: {_first_line(error)}") from error
    _give_back(device)
    low, high = _spread(rates)
    return BandwidthResult(
        bytes_per_s=median(rates),
        low=low,
        high=high,
        kernel=kernel,
        array_bytes=array_bytes,
        device=_name(device),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        seconds=time.monotonic() - begin,
    )


def _best_stream(device: torch.device, array_bytes: int, budget_s: float) -> tuple[list[float], Kernel]:
    """Bytes/s of each repetition of the faster kernel, and which that is."""
    import torch

    with torch.inference_mode():
        # Drawing so many numbers takes a CPU longer than streaming them a dozen times: the arrays differ by a factor.
        a = _random((array_bytes // 4,), torch.float32, device)
        b, c = a * 2, a * 3

        def copy() -> None:
            a.copy_(b)

        def triad() -> None:
            torch.add(b, c, alpha=3.0, out=a)

        copies = [2 * array_bytes / seconds for seconds in _repeat(device, copy, budget_s / 2)]
        triads = [3 * array_bytes / seconds for seconds in _repeat(device, triad, budget_s / 2)]
    return (copies, "copy") if median(copies) > median(triads) else (triads, "triad")


def _torch_dtype(device: torch.device, dtype: str) -> torch.dtype:
    import torch

    if dtype not in _DTYPES:
        raise unknown_name("dtype of the matrix probe", dtype, _DTYPES)
    if dtype == "tf32" and device.type != "cuda":
        raise EnvironmentUnfitError(f"tf32 exists on NVIDIA and AMD GPUs only, not on {device}", "ask for fp32")
    if dtype == "fp64" and device.type == "mps":
        raise EnvironmentUnfitError("Apple GPUs have no fp64", "ask for fp32")
    found = getattr(torch, _DTYPES[dtype])
    assert isinstance(found, torch.dtype)
    return found


@contextmanager
def _matmul_precision(device: torch.device, dtype: str) -> Iterator[None]:
    """fp32 products in full precision or as tf32, as asked; put back afterwards."""
    import torch

    if device.type != "cuda" or dtype not in ("fp32", "tf32"):
        yield
        return
    # Torch refuses a mix of this switch and the newer one per backend; training sets this one.
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _gemm_rates(device: torch.device, dtype: torch.dtype, shape: Shape, share_s: float, expected: float | None) -> list[float] | str:
    """FLOP/s of each repetition of one shape within ``share_s`` seconds, or why there is none; ``expected`` is the rate so far."""
    import torch

    m, k, n = shape
    flops = 2.0 * m * k * n
    # Warm-up and trial, then the repetitions; a slow format would otherwise take minutes on the larger shapes.
    if expected is not None and (_FEWEST + 2) * flops / expected > share_s:
        return f"would take {(_FEWEST + 2) * flops / expected:.1f} s of {share_s:.1f} s left for it"
    try:
        a, b = _random((m, k), dtype, device), _random((k, n), dtype, device)
        out = torch.empty((m, n), dtype=dtype, device=device)

        def work() -> None:
            torch.mm(a, b, out=out)

        return [flops / seconds for seconds in _repeat(device, work, share_s)]
    except RuntimeError as error:  # torch's word for "out of memory" and for "not implemented for this dtype"
        return _first_line(error)


def _repeat(device: torch.device, work: Callable[[], None], share_s: float) -> list[float]:
    """Seconds of each repetition of ``work``, warmed up, for about ``share_s`` seconds and at least three times."""
    begin = time.monotonic()
    _times(device, work, 1)
    trial_s = _times(device, work, 1)[0]
    left = share_s - (time.monotonic() - begin)
    return _times(device, work, max(_FEWEST, min(_MOST, int(left / max(trial_s, 1e-7)))))


def _times(device: torch.device, work: Callable[[], None], repetitions: int) -> list[float]:
    """Seconds of each repetition: by a chain of device events on CUDA and ROCm, else by the monotonic clock."""
    import torch

    if device.type == "cuda":
        with torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
            torch.cuda.synchronize()
            events[0].record()
            for event in events[1:]:
                work()
                event.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
    seconds = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers from a generator of our own: the program's random state stays as it is."""
    import torch

    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def _give_back(device: torch.device) -> None:
    """Memory that torch keeps for later, to the driver: a training in the same process shall find the device as it was."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()


def _spread(rates: list[float]) -> tuple[float, float]:
    deciles = quantiles(rates, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _name(device: torch.device) -> str:
    """The device's name as torch reports it; for CPUs, ours."""
    import torch

    from caraml.system import host

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return host.cpu().model if device.type == "cpu" else str(device)
