"""What a device can do by measurement: the fastest kernel of each library that torch has for it, and its streams from memory and cache.

Each library has a limit of its own: on some CPUs one multiplies matrices more than twice as fast as the other, and a network uses both.
The limit is the best of them. Threads, clocks and power limits are taken as they are.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.stats import mean_interval
from caraml.base.toml import FrozenModel
from caraml.system import host
from caraml.system.kernels import CONVOLUTION, Kernel, Kind, Shape, Stopwatch, array_bytes, check, dense, device_name, precision, streams
from caraml.system.model import DType

METHOD_VERSION = 3
"""Raised when kernels, data or statistics of a probe change, so that stored results are not mixed."""

_CONFIRMING = 0.4
"""Share of the time that goes to measuring the best kernels again: the luck by which one was chosen must not count."""
_FINALISTS, _CLOSE = 3, 0.8
"""How many are measured again, and from which share of the best on."""
_ROUNDS = 2
_LUCK = 1.1
"""Factor by which a kernel may have been faster when it was tried than the best is in the end; above that it is no luck of the choice."""
_OTHERS, _UNEVEN = 0.1, 1.25
"""Share of the CPUs that others may use, and how much longer than the fastest tenth of the repetitions the median may be, before a
measurement is said to be disturbed."""
_GROWTH = 8.0
"""Factor by which a kernel's rate may grow from its smallest shape to the next."""
_WINOGRAD, _OVER_PRODUCT = ("cuDNN", "MIOpen"), 1.2
"""Libraries whose convolutions may do fewer FLOPs than they are counted with (Winograd's algorithm): one that beats matrix products by more
than this factor does."""


class Trial(FrozenModel):
    """One kernel of a search. ``rate`` is FLOP/s or bytes/s."""

    library: str
    kernel: str
    shape: Shape
    rate: float | None
    skipped: str | None = None


class Limit(FrozenModel):
    """The best rate of a device in FLOP/s or bytes/s: the median of one kernel's repetitions with its 95 % interval.

    Of a measurement that was disturbed it is the fastest repetition of any kernel, without an interval: so much the device can do at least.
    """

    kind: Kind
    rate: float
    low: float | None
    high: float | None
    repetitions: int
    others: float | None
    """Share of the CPUs that other processes used meanwhile; ``None`` where nobody can tell."""
    disturbed: str | None = None
    """Who disturbed the measurement."""
    library: str
    kernel: str
    shape: Shape
    dtype: DType
    device: str
    threads: int
    processes: int
    """That were measured at the same time on the node, each on its part of it."""
    torch_version: str
    seconds: float
    measured_at: str
    host: str | None = None
    """Name of the machine; ``None`` in what earlier versions kept."""
    method_version: int = METHOD_VERSION
    trials: tuple[Trial, ...] = ()
    """Of the search; none where one kernel alone was measured again."""

    @property
    def by_library(self) -> dict[str, float]:
        """The best rate of each library's kernels in the search; the limit's own kernel as it was measured last."""
        found = {f"{self.library} {self.kernel}": self.rate}
        for trial in sorted(self.trials, key=lambda trial: -(trial.rate or 0.0)):
            if trial.rate is not None:
                found.setdefault(f"{trial.library} {trial.kernel}", trial.rate)
        return found

    @property
    def size(self) -> str:
        """The shape in words."""
        return f"{self.shape[0] / 2**20:.3g} MiB arrays" if self.kind != "arithmetic" else " x ".join(map(str, self.shape))


def measure(
    kind: Kind, device: torch.device | str, dtype: DType = "fp32", *, budget_s: float, processes: int = 1, known: Limit | None = None
) -> Limit:
    """The limit of ``device``, found among the kernels of every library within about ``budget_s`` seconds, loading them not counted.

    Small kernels come first; one that the rate so far predicts to be too slow is skipped, so that formats which a device only emulates
    end in time. Of a ``known`` limit only its kernel is measured.

    Raises:
        EnvironmentUnfitError: the device has no such format, not enough memory for the smallest kernel, or this torch no such kernel.
    """
    device = torch.device(device)
    check(device, dtype)
    try:
        with torch.inference_mode(), precision(device, dtype):
            return _measured(kind, device, dtype, budget_s=budget_s, processes=processes, known=known)
    finally:
        if device.type != "cpu":  # a training in the same process shall find the device as it was
            (torch.cuda if device.type == "cuda" else torch.accelerator).empty_cache()


def _measured(kind: Kind, device: torch.device, dtype: DType, *, budget_s: float, processes: int, known: Limit | None) -> Limit:
    """As :func:`measure`. What the kernels work on goes with the return."""
    watch = Stopwatch(device)
    todo = _kernels(kind, watch, dtype, known)
    load = CpuLoad() if device.type == "cpu" and processes == 1 else None
    begin = watch.now()
    found = search(todo, watch, budget_s)
    others = load.others() if load is not None else None
    seconds, rate = watch.now() - begin, found.rate
    kernel, relative, disturbed = found.kernel, found.timing.relative, _disturbed(found, others)
    if disturbed is not None:
        kernel, rate, relative = found.quickest.kernel, found.quickest.fastest, None
    return Limit(
        kind=kind,
        rate=rate,
        low=rate / (1 + relative) if relative is not None else None,
        high=rate / (1 - relative) if relative is not None else None,
        repetitions=found.timing.repetitions,
        others=others,
        disturbed=disturbed,
        library=kernel.library,
        kernel=kernel.name,
        shape=kernel.shape,
        dtype=dtype,
        device=device_name(device),
        threads=torch.get_num_threads(),
        processes=processes,
        torch_version=torch.__version__,
        seconds=seconds,
        measured_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        host=platform.node(),
        trials=() if known is not None else tuple(one.told() for one in found.tried),
    )


def measure_again(known: Limit, device: torch.device | str, *, budget_s: float) -> Limit:
    """The same kernel as ``known`` has, measured now. Errors as of :func:`measure`."""
    return measure(known.kind, device, known.dtype, budget_s=budget_s, processes=known.processes, known=known)


def _disturbed(found: Search, others: float | None) -> str | None:
    if others is not None and others > _OTHERS:
        return f"other processes used {others:.0%} of the CPUs meanwhile"
    if found.timing.uneven > _UNEVEN:
        return f"half of its repetitions took {found.timing.uneven:.2g} times as long as the fastest tenth, or longer"
    before = max(one.rate for one in found.counted)
    if before > _LUCK * found.rate:
        return f"the device was {before / found.rate:.2g} times as fast a moment before"
    return None


def _kernels(kind: Kind, watch: Stopwatch, dtype: DType, known: Limit | None) -> list[Kernel]:
    if kind == "arithmetic":
        todo = list(dense(watch.device, dtype))
    else:
        size = known.shape[0] if known is not None else array_bytes(kind, watch.device, lambda work: watch.during(work, 0.0)[-1])
        todo = list(streams(watch.device, size))
    if known is None:
        return todo
    return [kernel for kernel in todo if (kernel.library, kernel.name, kernel.shape) == (known.library, known.kernel, known.shape)]


# -- the search --------------------------------------------------------------------------------------------------------


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
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Of each repetition's time."""
        relative, middle, ordered = mean_interval(seconds).relative, median(seconds), sorted(seconds)
        fast = ordered[len(ordered) // 10]
        return cls(middle, relative if relative < 1 else None, ordered[0], middle / fast, len(ordered))


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

    def told(self) -> Trial:
        kernel = self.kernel
        return Trial(library=kernel.library, kernel=kernel.name, shape=kernel.shape, rate=self.rate or None, skipped=self.skipped)


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
    """Those that ran and do as many FLOPs as they are counted with."""
    product = max((one.fastest for one in tried if one.kernel.name != CONVOLUTION), default=0.0)
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


# -- the clock ---------------------------------------------------------------------------------------------------------


class CpuLoad:
    """What other processes use of the CPUs that this one may run on."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float | None, float]:
        return time.monotonic(), host.busy_seconds(host.mask()), time.process_time()

    def others(self) -> float | None:
        """Share of the CPUs since this was made; ``None`` where the kernel does not tell."""
        (then, busy, own), (now, busy_now, own_now) = self._before, self._now()
        if busy is None or busy_now is None or now <= then:
            return None
        return max((busy_now - busy) - (own_now - own), 0.0) / ((now - then) * max(len(host.mask()), 1))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
