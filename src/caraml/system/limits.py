"""The limits of this machine: searched for once, kept with their date in the user's cache folder, and looked at in short at every run.

Each library has a limit of its own: on some CPUs one multiplies matrices more than twice as fast as the other, and a network uses both.
The limit is the best of them. Threads, clocks and power limits are taken as they are.

One process can be disturbed while it measures; what was measured before then stands in. A limit is kept per device model, release of torch,
number of threads and of processes, on AMD's GPUs per number of compute units, and on CPUs per number of cores and sockets and time quota:
what changes it otherwise, such as another clock or power limit, is seen by the look in short. Machines that share a home share it, so that
one that is slower than its like is seen.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path

import torch
from pydantic import ValidationError

from caraml.base.errors import CaramlError, EnvironmentUnfitError, InputError, unknown_name
from caraml.base.files import cache_home, make_folder, write_file
from caraml.base.toml import FrozenModel
from caraml.system import host
from caraml.system.families import family_of
from caraml.system.kernels import DTYPES, Kernel, Kind, Search, Shape, Stopwatch, Timing, array_bytes, dense, search, streams
from caraml.system.model import DType
from caraml.system.variables import PROBE, seconds_asked

METHOD_VERSION = 6
"""Raised when kernels, data or statistics of a search change, or what is kept of it, so that kept limits are not mixed."""

SEARCH_SECONDS: dict[Kind, float] = {"arithmetic": 3.0, "memory": 0.6, "cache": 0.3}
LOOK_SECONDS: dict[Kind, float] = {"arithmetic": 0.6, "memory": 0.3, "cache": 0.15}
_KEPT_DAYS = 30
"""After that a limit is searched for again: firmware, kernels of the system and the machine's settings change."""
_TOO_LOW = 0.9
"""Share of the kept limit below which a look in short says that the machine was disturbed."""
_LUCK = 1.1
"""Factor by which a kernel may have been faster when it was tried than the best is in the end; above that it is no luck of the choice."""
_OTHERS, _UNEVEN = 0.1, 1.25
"""Share of the CPUs that others may use, and how much longer than the fastest tenth of the repetitions the median may be, before a
measurement is said to be disturbed."""


class Limit(FrozenModel):
    """The best rate of a device in FLOP/s or bytes/s: the median of one kernel's repetitions with its 95 % interval.

    Of a measurement that was disturbed it is the fastest repetition of any kernel, without an interval: so much the device can do at least.
    Of an accelerator it is the best that any kernel did beyond luck, before heat and the power limit brought the clock down.
    """

    kind: Kind
    rate: float
    low: float | None
    high: float | None
    disturbed: str | None = None
    """Who disturbed the measurement."""
    sustained: float | None = None
    """Of an accelerator: what the fastest kernels did later on, one after the other without a pause."""
    library: str
    kernel: str
    shape: Shape
    dtype: DType
    device: str
    measured_at: str
    host: str
    """Name of the machine."""
    by_library: dict[str, float]
    """The best rate of each library's kernels in the search; the limit's own kernel first, as it was measured last. Convolutions that do
    fewer FLOPs than they are counted with are none."""

    @property
    def size(self) -> str:
        """The shape in words."""
        return f"{self.shape[0] / 2**20:.3g} MiB arrays" if self.kind != "arithmetic" else " x ".join(map(str, self.shape))


@dataclass(frozen=True)
class Look:
    """A limit as a run knows it."""

    best: Limit
    """The better of what is kept and what was measured now."""
    now: Limit

    @property
    def disturbed(self) -> str | None:
        """Why what was measured now is in doubt, or ``None``. An accelerator that worked just before is as fast as without a pause."""
        if self.now.rate < _TOO_LOW * min(self.best.rate, self.best.sustained or self.best.rate):
            where = "" if self.best.host == self.now.host else f" on {self.best.host or 'another machine'}"
            return f"in this process {self.now.rate / self.best.rate:.0%} of it; the limit is that of {self.best.measured_at[:16]}{where}"
        return self.now.disturbed


def look(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1, keep: bool = True) -> Look:
    """The limit of ``device``: searched for where none is kept, else its kernel measured again.

    So many ``processes`` measure at the same time on this node, each its own part of it; one that keeps what is found is enough.

    Raises:
        EnvironmentUnfitError: the device cannot do that at all, or nothing is to be looked for.
        InputError: how long is to be looked for is no number.
    """
    if _share() <= 0:
        raise EnvironmentUnfitError(f"{PROBE} is 0: no limit is looked for")
    kept, now = known(kind, device, dtype, processes=processes), None
    if kept is not None and kept.disturbed is None:
        now = measure(kind, device, dtype, budget_s=_share() * LOOK_SECONDS[kind], processes=processes, kept=kept)
        if now.low is None or now.low <= kept.rate:
            return Look(kept, now)
    found = measure(kind, device, dtype, budget_s=_share() * SEARCH_SECONDS[kind], processes=processes)
    best = found if kept is None or (found.disturbed is None, found.rate) >= (kept.disturbed is None, kept.rate) else kept
    if now is not None and now.rate > best.rate and device.type != "cpu":  # the clock came down before the search reached that kernel
        others = {family: rate for family, rate in found.by_library.items() if family not in now.by_library}
        best = now.model_copy(update={"sustained": found.sustained, "by_library": now.by_library | others})
    if keep and best is not kept:
        path = _path(kind, device, dtype, processes)
        with suppress(OSError, InputError):  # a search at every run, then; `caraml doctor` says that the folder cannot be written
            make_folder(path.parent)
            write_file(path, best.model_dump_json(indent=1), sync="none")
    return Look(best, found)


def looks(
    kinds: Sequence[Kind], device: torch.device, dtype: DType = "fp32", *, processes: int = 1, keep: bool = True
) -> dict[Kind, Look | str]:
    """The limits of several kinds; in words why there is none. Raises ``InputError`` where how long is to be looked for is no number."""
    found: dict[Kind, Look | str] = {}
    _share()
    for kind in kinds:
        try:
            found[kind] = look(kind, device, dtype if kind == "arithmetic" else "fp32", processes=processes, keep=keep)
        except CaramlError as error:
            found[kind] = error.line
    return found


def known(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1) -> Limit | None:
    """The limit that is kept, unless it is too old."""
    try:
        limit = Limit.model_validate_json(_path(kind, device, dtype, processes).read_text(encoding="utf-8"))
        recent = datetime.now(UTC) - datetime.fromisoformat(limit.measured_at) < timedelta(days=_KEPT_DAYS)
    except (OSError, ValidationError, ValueError, TypeError):
        return None
    return limit if recent else None


def must_search(kind: Kind, device: torch.device, dtype: DType = "fp32", *, processes: int = 1) -> bool:
    """Whether a limit is worth the time of a search: none is kept, or it was measured beside others."""
    kept = known(kind, device, dtype, processes=processes)
    return kept is None or kept.disturbed is not None


def _share() -> float:
    """How long searches and looks take, as a share of what is usual. Raises ``InputError`` where the variable has no such number."""
    usual = SEARCH_SECONDS["arithmetic"]
    return seconds_asked(PROBE, usual) / usual


def _path(kind: Kind, device: torch.device, dtype: DType, processes: int) -> Path:
    on_cpus = (torch.get_num_threads(), processes, *_share_of_host(host.mask())) if device.type == "cpu" else ()
    # Partitions of an AMD GPU have the name of the whole.
    units = (torch.cuda.get_device_properties(device).multi_processor_count,) if device.type == "cuda" and torch.version.hip else ()
    decisive = (METHOD_VERSION, kind, dtype, _device_name(device), torch.__version__, *on_cpus, *units)
    return cache_home() / "limits" / f"{kind}-{dtype}-{hashlib.sha256(repr(decisive).encode()).hexdigest()[:16]}.json"


@lru_cache
def _share_of_host(cpus: frozenset[int]) -> tuple[float | None, ...]:
    """Cores and sockets behind some logical CPUs, and their time quota: a home of many machines has CPUs of one model in several places."""
    found = host.cores(cpus)
    return len(found), len({core.socket for core in found}), host.cgroup_cpus()


def measure(
    kind: Kind, device: torch.device | str, dtype: DType = "fp32", *, budget_s: float, processes: int = 1, kept: Limit | None = None
) -> Limit:
    """The limit of ``device``, found among the kernels of every library within about ``budget_s`` seconds, loading them not counted.

    Small kernels come first; one that the rate so far predicts to be too slow is skipped, so that formats which a device only emulates
    end in time. Of a limit that is ``kept`` only its kernel is measured.

    Raises:
        EnvironmentUnfitError: the device has no such format, not enough memory for the smallest kernel, or this torch no such kernel.
    """
    device = torch.device(device)
    _check(device, dtype)
    try:
        with torch.inference_mode(), _precision(device, dtype):
            return _measured(kind, device, dtype, budget_s=budget_s, processes=processes, kept=kept)
    finally:
        if device.type != "cpu":  # a training in the same process shall find the device as it was
            (torch.cuda if device.type == "cuda" else torch.accelerator).empty_cache()


def _measured(kind: Kind, device: torch.device, dtype: DType, *, budget_s: float, processes: int, kept: Limit | None) -> Limit:
    """As :func:`measure`. What the kernels work on goes with the return."""
    watch = Stopwatch(device)
    todo = _kernels(kind, watch, dtype, kept)
    load = CpuLoad() if device.type == "cpu" and processes == 1 else None
    found = search(todo, watch, budget_s)
    kernel, timing = (found.kernel, found.timing) if device.type == "cpu" else found.best
    disturbed = _disturbed(found, timing, load.others() if load is not None else None, clocked=device.type != "cpu")
    rate, relative = kernel.amount / timing.seconds, timing.relative
    if disturbed is not None:
        kernel, rate, relative = found.quickest.kernel, found.quickest.fastest, None
    return Limit(
        kind=kind,
        rate=rate,
        low=rate / (1 + relative) if relative is not None else None,
        high=rate / (1 - relative) if relative is not None else None,
        disturbed=disturbed,
        sustained=found.rate if device.type != "cpu" else None,
        library=kernel.library,
        kernel=kernel.name,
        shape=kernel.shape,
        dtype=dtype,
        device=_device_name(device),
        measured_at=datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
        host=platform.node(),
        by_library=_by_library(found, kernel.family, rate),
    )


def _by_library(found: Search, own: str, rate: float) -> dict[str, float]:
    """The best rate of each library's kernels, ``own`` first, at the ``rate`` that was measured last."""
    rates = {own: rate}
    for one in sorted(found.counted, key=lambda one: -one.rate):
        rates.setdefault(one.kernel.family, one.rate)
    return rates


def _disturbed(found: Search, timing: Timing, others: float | None, *, clocked: bool) -> str | None:
    """Why a measurement is in doubt. A ``clocked`` device is slower after a while by itself: its power limit brings the clock down."""
    if others is not None and others > _OTHERS:
        return f"others used {others:.0%} of the CPUs meanwhile"
    if timing.uneven > _UNEVEN:
        return f"half of its repetitions took {timing.uneven:.2g} times as long as the fastest tenth, or longer"
    before = max(one.rate for one in found.counted)
    if not clocked and before > _LUCK * found.rate:
        return f"the device was {before / found.rate:.2g} times as fast a moment before"
    return None


def _kernels(kind: Kind, watch: Stopwatch, dtype: DType, kept: Limit | None) -> list[Kernel]:
    if kind == "arithmetic":
        todo = list(dense(watch.device, dtype))
    else:
        size = kept.shape[0] if kept is not None else array_bytes(kind, watch.device, lambda work: watch.during(work, 0.0)[-1])
        todo = list(streams(watch.device, size))
    if kept is None:
        return todo
    return [kernel for kernel in todo if (kernel.library, kernel.name, kernel.shape) == (kept.library, kept.kernel, kept.shape)]


def _check(device: torch.device, dtype: DType) -> None:
    """Raise what is wrong with asking this device for this format: ``InputError`` or ``EnvironmentUnfitError``."""
    if dtype not in DTYPES:
        raise unknown_name("dtype of the matrix probe", dtype, DTYPES)
    family = family_of(device.type)
    if dtype in ("tf32", "fp8") and (device.type == "cpu" or dtype not in family.arithmetic):
        raise EnvironmentUnfitError(f"{dtype} exists on NVIDIA and AMD GPUs only, not on {device}", "ask for fp32")
    if device.type != "cpu" and dtype not in family.arithmetic:
        raise EnvironmentUnfitError(f"{family.title}s have no {dtype}", "ask for fp32")


@contextmanager
def _precision(device: torch.device, dtype: DType) -> Iterator[None]:
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


def _device_name(device: torch.device) -> str:
    """The device's name as torch reports it; for CPUs, ours."""
    if device.type == "cpu":
        return host.cpu().model
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named is not None else str(device)


class CpuLoad:
    """What others use of the CPUs that this process may run on."""

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
