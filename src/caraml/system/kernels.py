"""Work by which the limits of a device are measured (dense kernels of every library that torch has for it, and streams of memory), and the
search for the fastest of it.

Operands hold random numbers: zeros would draw less power and run faster than any training does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import inf, prod
from statistics import median
from typing import Literal

import torch
from torch.nn import functional as F

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.stats import mean_interval
from caraml.system import host
from caraml.system.model import DType

Kind = Literal["arithmetic", "memory", "cache"]
"""FLOP/s of dense kernels; bytes/s of streams over arrays far larger than any cache, and over arrays that lie in the last one."""
DTYPES = {"fp64": "float64", "fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}

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
    number = getattr(torch, DTYPES[dtype])

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


def _random(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal random numbers from a generator of our own: the program's random state stays as it is. A million of them, over and over:
    drawing as many as a large matrix has takes a CPU longer than multiplying it."""
    count = prod(shape)
    drawn = torch.randn(min(count, 2**20), device=device, generator=torch.Generator(device).manual_seed(0)).to(dtype)
    return drawn.repeat(-(-count // len(drawn)))[:count].view(shape)


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


_CONFIRMING = 0.4
"""Share of the time that goes to measuring the best kernels again: the luck by which one was chosen must not count."""
_FINALISTS, _CLOSE = 3, 0.8
"""How many are measured again, and from which share of the best on."""
_ROUNDS = 2
_MOST_LUCK = 0.02
"""What the best of many medians may owe to luck, relative."""
_GROWTH = 8.0
"""Factor by which a kernel's rate may grow from its smallest shape to the next."""
_WINOGRAD, _OVER_PRODUCT = ("cuDNN", "MIOpen"), 1.2
"""Libraries whose convolutions may do fewer FLOPs than they are counted with (Winograd's algorithm): one that beats matrix products by more
than this factor does."""


@dataclass(frozen=True)
class Timing:
    """A kernel's repetitions. Times in seconds."""

    seconds: float
    """Median."""
    relative: float | None
    """Half-width of its 95 % interval, relative; ``None`` for fewer than four, or where they differ too much for one."""
    fastest: float
    uneven: float
    """Median over the fastest tenth."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Of each repetition's time."""
        relative, middle, ordered = mean_interval(seconds).relative, median(seconds), sorted(seconds)
        fast = ordered[len(ordered) // 10]
        return cls(middle, relative if relative < 1 else None, ordered[0], middle / fast)


@dataclass(frozen=True)
class _Tried:
    kernel: Kernel
    timing: Timing | None
    skipped: str | None = None

    @property
    def fastest(self) -> float:
        """Rate of the fastest repetition, which others on the machine disturb least."""
        return self.kernel.amount / self.timing.fastest if self.timing is not None else 0.0

    @property
    def rate(self) -> float:
        """Rate of the median repetition."""
        return self.kernel.amount / self.timing.seconds if self.timing is not None else 0.0


@dataclass(frozen=True)
class Search:
    """What a search found."""

    kernel: Kernel
    """The fastest."""
    timing: Timing
    """By repetitions that did not choose it."""
    tried: Sequence[_Tried]
    """Every kernel, in the order in which they were tried."""
    counted: Sequence[_Tried]
    """Those that ran and do as many FLOPs as they are counted with; and the fastest as it was measured last."""

    @property
    def rate(self) -> float:
        """Of the fastest."""
        return self.kernel.amount / self.timing.seconds

    @property
    def best(self) -> tuple[Kernel, Timing]:
        """That whose interval begins at the highest rate, of the choice and of the fastest as measured last: a few lucky repetitions among
        those of many kernels do not win, nor do those without an interval. Wide intervals are of others' turns, which are no luck."""

        def surely(one: _Tried) -> float:
            relative = one.timing.relative if one.timing is not None else None
            return one.rate / (1 + min(relative, _MOST_LUCK)) if relative is not None else one.rate if one is self.counted[-1] else 0.0

        best = max(self.counted, key=surely)
        assert best.timing is not None
        return best.kernel, best.timing

    @property
    def quickest(self) -> _Tried:
        """Whose fastest repetition is the fastest of all."""
        return max(self.counted, key=lambda one: one.fastest)


def search(kernels: Iterable[Kernel], watch: Stopwatch, budget_s: float) -> Search:
    """The fastest of many kernels. Raises ``EnvironmentUnfitError`` where none of them runs."""
    todo = sorted(kernels, key=lambda kernel: kernel.amount)
    absent = _absent(todo, watch)
    deadline = watch.now() + budget_s * (1 - _CONFIRMING)
    tried: list[_Tried] = []
    for position, kernel in enumerate(todo):
        left = max(deadline - watch.now(), 0.0)
        share = left / (len(todo) - position)
        needed = _expected_s(kernel, tried)
        if kernel.family in absent:
            tried.append(_Tried(kernel, None, absent[kernel.family]))
        elif needed > max(share, left / 2):
            tried.append(_Tried(kernel, None, f"would take {needed:.2g} s of the {left:.2g} s left for all"))
        else:
            tried.append(_try(kernel, watch, share))
    counted = _counted(tried)
    if not counted:
        raise EnvironmentUnfitError(f"nothing can be measured: {tried[0].skipped if tried else 'this torch does not have the kernel'}")
    best, timing = _confirmed(_finalists(counted), watch, budget_s * _CONFIRMING)
    return Search(best, timing, tried, [*counted, _Tried(best, timing)])


def _expected_s(kernel: Kernel, tried: Sequence[_Tried]) -> float:
    """Seconds of two calls, one that warms up and one that counts, at the rate that smaller shapes let expect.

    What each call costs besides arithmetic (starting threads, waiting for a core that others use) makes the small shapes slow. The rate
    is therefore taken to grow once more by the factor by which it grew last.
    """
    rates = [one.fastest for one in tried if one.kernel.family == kernel.family and one.timing is not None]
    if not rates:
        return 0.0
    growth = min(max(rates[-1] / rates[-2], 1.0), _GROWTH) if len(rates) > 1 else _GROWTH
    return 2 * kernel.amount / (max(rates) * growth)


def _absent(kernels: Sequence[Kernel], watch: Stopwatch) -> dict[str, str]:
    """Why families do not run. The smallest kernel of each runs once, so that no library is loaded while time counts."""
    smallest = {kernel.family: kernel for kernel in reversed(kernels)}
    absent = {}
    for family, kernel in smallest.items():
        try:
            kernel.make()()
            watch.wait()
        except RuntimeError as error:  # torch's word for "out of memory" and "not implemented for this dtype"
            absent[family] = _first_line(error)
    return absent


def _try(kernel: Kernel, watch: Stopwatch, share_s: float) -> _Tried:
    try:
        work = kernel.make()
        work()
        return _Tried(kernel, Timing.of(watch.during(work, share_s)))
    except RuntimeError as error:
        return _Tried(kernel, None, _first_line(error))


def _counted(tried: Sequence[_Tried]) -> list[_Tried]:
    """Those that ran and do as many FLOPs as they are counted with. A convolution by itself, of a limit that is kept, did."""
    product = max((one.fastest for one in tried if one.kernel.name != CONVOLUTION), default=inf)
    return [one for one in tried if one.timing and (one.kernel.library not in _WINOGRAD or one.fastest <= _OVER_PRODUCT * product)]


def _finalists(tried: Sequence[_Tried]) -> list[Kernel]:
    """Those that may be the fastest, best first."""
    ranked = sorted(tried, key=lambda one: -one.fastest)
    return [one.kernel for one in ranked[:_FINALISTS] if one.fastest >= _CLOSE * ranked[0].fastest]


def _confirmed(finalists: Sequence[Kernel], watch: Stopwatch, budget_s: float) -> tuple[Kernel, Timing]:
    """The best of the finalists by new repetitions, taken in turns."""
    found: list[list[float]] = [[] for _ in finalists]
    for _ in range(_ROUNDS):
        for kernel, repetitions in zip(finalists, found, strict=True):
            work = kernel.make()  # anew in each turn: the operands of one kernel fit into memory, those of all need not
            work()
            repetitions.extend(watch.during(work, budget_s / (_ROUNDS * len(finalists))))
    timings = zip(finalists, map(Timing.of, found), strict=True)
    return max(timings, key=lambda one: one[0].amount / one[1].seconds)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
