"""Work by which the limits of a device are measured: dense kernels of every library that torch has for it, and streams of memory.

Operands hold random numbers: zeros would draw less power and run faster than any training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch.nn import functional as F

from caraml.base.errors import EnvironmentUnfitError, unknown_name
from caraml.system import host
from caraml.system.families import family_of
from caraml.system.model import DType

Kind = Literal["arithmetic", "memory", "cache"]
"""FLOP/s of dense kernels; bytes/s of streams over arrays far larger than any cache, and over arrays that lie in the last one."""
_DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

Shape = tuple[int, ...]
_PRODUCTS: dict[str, tuple[Shape, ...]] = {
    # (m, k, n): an m x k matrix times a k x n matrix. One tall shape each, as a transformer's layers are: tokens x hidden x 4 hidden.
    "cpu": ((128,) * 3, (256,) * 3, (512,) * 3, (1024,) * 3, (2048,) * 3, (4096, 768, 3072), (4096,) * 3),
    "gpu": ((1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3, (16384, 4096, 16384), (16384,) * 3),
}
_CONVOLUTIONS: dict[str, tuple[Shape, ...]] = {
    # (images, channels, height and width): those of ResNets, as many channels out as in.
    "cpu": ((1, 32, 14), (8, 64, 56), (8, 128, 28), (16, 256, 14)),
    "gpu": ((8, 64, 14), (256, 64, 56), (256, 128, 28), (256, 256, 14)),
}
CONVOLUTION = "3x3 convolution"
_MOST_ARRAY = 2**29
"""Bytes of an array on a device that does not say how much memory is free."""
_LONG_PASS = 5e-4
"""Seconds that a pass over a GPU's arrays takes at least: they are then larger than any cache of a GPU, and the clock is fine enough."""


@dataclass(frozen=True)
class Kernel:
    """Work that can be timed."""

    library: str
    name: str
    shape: Shape
    amount: float
    """FLOPs, or bytes read and written, of one call."""
    make: Callable[[], Callable[[], object]]
    """Fills the operands and gives the call."""

    @property
    def family(self) -> str:
        """Library and name, which kernels of several shapes share."""
        return f"{self.library} {self.name}"


def dense(device: torch.device, dtype: DType) -> Iterator[Kernel]:
    """Matrix products, linear layers and convolutions, by every library that torch has for this device."""
    number = getattr(torch, _DTYPES[dtype])

    def operand(*shape: int) -> torch.Tensor:
        return _random(shape, number, device)

    def product(m: int, k: int, n: int) -> Callable[[], object]:
        a, b, out = operand(m, k), operand(k, n), torch.empty((m, n), dtype=number, device=device)
        return lambda: torch.mm(a, b, out=out)

    def linear(m: int, k: int, n: int) -> Callable[[], object]:
        x, weight, bias = operand(m, k), operand(n, k), operand(n)
        if device.type != "cpu":
            return lambda: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, m)
        return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def convolution(images: int, channels: int, side: int) -> Callable[[], object]:
        x, weight = operand(images, channels, side, side), operand(channels, channels, 3, 3)
        x, weight = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, weight))
        return lambda: F.conv2d(x, weight, padding=1)

    products, layers, convolutions = _libraries(device, dtype)
    if dtype == "fp8":
        for shape in _PRODUCTS["gpu"]:
            yield Kernel(products, "matrix product", shape, 2.0 * prod(shape), partial(_fp8_product, device, *shape))
        return
    kind = "cpu" if device.type == "cpu" else "gpu"
    for shape in _PRODUCTS[kind]:
        yield Kernel(products, "matrix product", shape, 2.0 * prod(shape), partial(product, *shape))
        if layers is not None:
            yield Kernel(layers, "linear layer", shape, 2.0 * prod(shape), partial(linear, *shape))
    for images, channels, side in _CONVOLUTIONS[kind]:
        flops = 2.0 * 9 * images * channels**2 * side**2
        yield Kernel(convolutions, CONVOLUTION, (images, channels, side), flops, partial(convolution, images, channels, side))


def _fp8_product(device: torch.device, m: int, k: int, n: int) -> Callable[[], object]:
    """A product of fp8 numbers, scaled as a whole, into bf16. AMD's MI300 has a format of its own."""
    own = device.type == "cuda" and getattr(torch.cuda.get_device_properties(device), "gcnArchName", "").startswith("gfx94")
    number = torch.float8_e4m3fnuz if own else torch.float8_e4m3fn
    a, b, one = _random((m, k), number, device), _random((n, k), number, device), torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _libraries(device: torch.device, dtype: DType) -> tuple[str, str | None, str]:
    """Who multiplies matrices, who computes linear layers if that is somebody else, and who convolutions."""
    if device.type == "cuda":
        return ("hipBLAS", "hipBLASLt", "MIOpen") if torch.version.hip else ("cuBLAS", "cuBLASLt", "cuDNN")
    if device.type != "cpu":
        return "torch", None, "torch"
    if not torch.backends.mkldnn.is_available():
        return blas(), None, "torch"
    # Which library multiplies numbers of 16 bits torch decides by the CPU's instructions.
    return "torch" if dtype in ("bf16", "fp16") else blas(), "oneDNN" if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None, "oneDNN"


def blas() -> str:
    """The library that torch takes fp32 and fp64 matrix products of CPUs from."""
    return "MKL" if torch.backends.mkl.is_available() else "OpenBLAS" if "BLAS_INFO=open" in torch.__config__.show() else "BLAS"


def streams(device: torch.device, array_bytes: int) -> Iterator[Kernel]:
    """A sum, a copy and a triad ``a = b + s c`` over fp32 arrays of ``array_bytes``.

    Bytes that the program reads plus bytes that it writes are counted; what a CPU reads in addition before it writes is not.
    """

    @cache
    def array(number: int) -> torch.Tensor:  # shared by all kernels: to fill one takes longer than a pass over it
        return _random((array_bytes // 4,), torch.float32, device)

    makes: dict[str, Callable[[], Callable[[], object]]] = {
        "sum": lambda: partial(torch.sum, array(0)),
        "copy": lambda: partial(array(0).copy_, array(1)),
        "triad": lambda: partial(torch.add, array(1), array(2), alpha=3.0, out=array(0)),
    }
    for passes, (name, make) in enumerate(makes.items(), start=1):
        yield Kernel("torch", name, (array_bytes,), float(passes * array_bytes), make)


def array_bytes(kind: Kind, device: torch.device, seconds_of: Callable[[Callable[[], object]], float]) -> int:
    """Size of an array so that three of them are in the memory or in the last-level cache, and nowhere else.

    On a GPU it is found by time, ``seconds_of`` work: they differ by a factor of fifty, and not all tell of their caches. Raises
    ``EnvironmentUnfitError`` where nobody knows how large the cache is.
    """
    if device.type == "cpu":
        cache = host.cache_bytes()
        if kind == "memory":
            return max(min(4 * (cache or 2**25) // 3, (host.memory_bytes() or 2**34) // 16), 2**24)
        if not cache:
            raise EnvironmentUnfitError("the size of the last-level cache is not known")
        return cache // 8
    if kind == "cache":
        raise EnvironmentUnfitError("the caches of a GPU are not measured")
    size, most = 2**26, (_free_bytes(device) or 8 * _MOST_ARRAY) // 8
    while 2 * size <= most:
        array = torch.empty(size, dtype=torch.uint8, device=device)
        if seconds_of(partial(array.copy_, torch.empty_like(array))) >= _LONG_PASS:
            break
        size *= 2
    return size


def _free_bytes(device: torch.device) -> int | None:
    """Free memory of an accelerator; ``None`` where torch does not know."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except (RuntimeError, AttributeError):
        return None


def check(device: torch.device, dtype: DType) -> None:
    """Raise what is wrong with asking this device for this format: ``InputError`` or ``EnvironmentUnfitError``."""
    if dtype not in _DTYPES:
        raise unknown_name("dtype of the matrix probe", dtype, _DTYPES)
    family = family_of(device.type)
    if dtype in ("tf32", "fp8") and (device.type == "cpu" or dtype not in family.arithmetic):
        raise EnvironmentUnfitError(f"{dtype} exists on NVIDIA and AMD GPUs only, not on {device}", "ask for fp32")
    if device.type != "cpu" and dtype not in family.arithmetic:
        raise EnvironmentUnfitError(f"{family.title}s have no {dtype}", "ask for fp32")


@contextmanager
def precision(device: torch.device, dtype: DType) -> Iterator[None]:
    """fp32 in full precision or as tf32, as asked; put back afterwards."""
    # Torch refuses a mix of this switch and the newer one per backend; training sets this one.
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _random(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers from a generator of our own: the program's random state stays as it is. A million of them, over and over:
    drawing as many as a large matrix has takes a CPU longer than multiplying it."""
    count = prod(shape)
    drawn = torch.randn(min(count, 2**20), device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
    return drawn.repeat(-(-count // len(drawn)))[:count].view(shape)


def device_name(device: torch.device) -> str:
    """The device's name as torch reports it; for CPUs, ours."""
    if device.type == "cpu":
        return host.cpu().model
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else str(device)


_FEWEST, _MOST = 3, 200
"""Repetitions of a kernel."""


class Stopwatch:
    """Times work on a device: by a chain of device events on CUDA and ROCm, else by the monotonic clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def wait(self) -> None:
        """Until the device has done its work."""
        if self.device.type != "cpu":  # beside a plug-in, CUDA is not torch's current accelerator
            (torch.cuda if self.device.type == "cuda" else torch.accelerator).synchronize(self.device)

    def during(self, work: Callable[[], object], seconds: float) -> list[float]:
        """Seconds of each repetition within about ``seconds``, at least three unless others take the time."""
        if self.device.type == "cuda":
            (once,) = self._chain(work, 1)
            return self._chain(work, max(_FEWEST, min(_MOST, int(seconds / max(once, 1e-7)))))
        end, found = self.now() + seconds, list[float]()
        while len(found) < _MOST and (self.now() < end or (len(found) < _FEWEST and self.now() < end + seconds) or not found):
            found.append(self._one(work))
        return found

    def _one(self, work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin

    def _chain(self, work: Callable[[], object], repetitions: int) -> list[float]:
        with torch.cuda.device(self.device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repetitions + 1)]
            torch.cuda.synchronize()
            events[0].record()
            for event in events[1:]:
                work()
                event.record()
            torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]
