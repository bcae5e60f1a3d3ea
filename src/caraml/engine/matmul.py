"""fp32 matrix products of CPUs by the faster of torch's two libraries, in every pass of every model.

Torch takes such products from its BLAS (MKL on x86), and from oneDNN only convolutions and formats of 16 bits; on some CPUs oneDNN
multiplies more than twice as fast. Here the CPU's kernels of the operators `mm` and `addmm` are replaced, below autograd and everything
else of torch: whoever calls them, forward or backward, eager or compiled, under autocast, DDP, FSDP, tensor parallelism or recomputation,
calls the same operators on the same parameters as before. Products of batches (`bmm`) and those inside attention stay as they are.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.format import human
from caraml.engine.ranks import Ranks
from caraml.engine.steps import Step, StepOutcome
from caraml.suite.model import Point
from caraml.system.kernels import blas

Key = tuple[Any, ...]
"""What a product's time depends on: both shapes, whether each operand is contiguous (else it is a transpose), whether a bias is added, and
whether the result goes into memory that is there already."""
Seconds = tuple[float, float]
"""Of one product by torch's BLAS, and by oneDNN."""

OVERHEAD = 5e-6
"""Seconds that the detour through Python adds to every call [measured on two CPUs: 4.2 to 4.6 µs]."""
_TRIALS = 4
_ENOUGH = 2e9
"""FLOPs per thread of a product that is timed: of a larger one the longest side is cut, which changes both libraries' rates little."""
_WORTH = 0.98
"""Share of the BLAS's time below which a product is oneDNN's: of libraries that are as fast as each other, torch's own is kept."""
_COPIED = 2**23
"""Numbers of a transposed left operand that are copied at a time: oneDNN's layer takes no transpose there, and a copy of the slopes of all
logits would be the largest array of a step."""
_MOST_TOLD = 24
_OPERATORS = ("mm", "addmm", "mm.out", "addmm.out")


class Products:
    """Who computes the fp32 products of this process. ``told`` is what a record says of it."""

    def __init__(self, point: Point, ranks: Ranks) -> None:
        self._asked, self._ranks, self._point = point.knobs.matmul, ranks, point
        self._library: torch.library.Library | None = None
        self._calls: dict[Key, int] = {}
        self.told: dict[str, Any] = {"asked": self._asked, "library": blas(), "why": "asked for by name"}
        if self._asked == "onednn" and not _has_onednn():
            raise EnvironmentUnfitError("matmul: found 'onednn', and this build of torch has none of its linear layers", 'matmul = "mkl"')

    def around(self, step: Step, phase: Callable[[str], AbstractContextManager[None]]) -> Step:
        """The same step with its products as asked: `auto` notes them in the first step, and then times both libraries in ``phase``."""
        if self._asked == "onednn":
            self._install(_valid)
            self.told["library"] = "oneDNN"
        if self._asked != "auto":
            return step
        settled = self._settled()
        if settled is not None:
            self.told["why"] = settled
            return step
        self._install(self._note)
        todo = [phase]

        def first_then_chosen() -> StepOutcome:
            outcome = step()
            if todo:
                with todo.pop()("matmul"):
                    self._choose()
            return outcome

        return first_then_chosen

    def _settled(self) -> str | None:
        """Why `auto` is the BLAS without a look at the clock, or ``None``."""
        if not _has_onednn():
            return "this build of torch has none of oneDNN's linear layers"
        if self._point.deterministic:
            return "deterministic: a choice by time may differ between runs"
        return "mode data multiplies nothing" if self._point.mode == "data" else None

    def close(self) -> None:
        """Give the operators back to torch."""
        self._library = None  # torch withdraws kernels with the object that brought them

    def _note(self, key: Key) -> bool:
        if _valid(key):
            self._calls[key] = self._calls.get(key, 0) + 1
        return False

    def _choose(self) -> None:
        """Time every product that was noted, and install those that oneDNN computes faster. Collective: all ranks choose alike."""
        self.close()
        found = self._ranks.gather({json.dumps(key): [calls, *seconds_of(key)] for key, calls in self._calls.items()})
        calls, times = dict[Key, int](), dict[Key, Seconds]()
        for text in dict.fromkeys(text for theirs in found for text in theirs):
            numbers = [theirs[text] for theirs in found if text in theirs]
            count, own, other = (sum(column) for column in zip(*numbers, strict=True))
            key = _from_json(text)
            calls[key], times[key] = count, (own / len(numbers), other / len(numbers))
        chosen, why = choice(times, calls)
        if chosen:
            self._install(chosen.__contains__)
        took = blas() if not chosen else "oneDNN" if len(chosen) == len(times) else f"oneDNN and {blas()}"
        self.told |= {"library": took, "why": why, "products": _in_words(times, calls, chosen)}

    def _install(self, takes: Callable[[Key], bool]) -> None:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a kernel is replaced
            for name in _OPERATORS:
                kernel = _kernel(name, takes)
                if (
                    self._point.compile != "off"
                ):  # the compiler takes the Python of a kernel for a part of the model where that runs eagerly
                    kernel = torch.compiler.disable(kernel)
                library.impl(name, kernel, "CPU", with_keyset=True)
        self._library = library


def choice(times: Mapping[Key, Seconds], calls: Mapping[Key, int]) -> tuple[frozenset[Key], str]:
    """The products that oneDNN shall compute, by the seconds of each and how often a step calls it; and why, in words."""
    if not times:
        return frozenset(), "the first step multiplied no fp32 matrices"
    faster = frozenset(key for key, (own, other) in times.items() if other < _WORTH * own)
    before, after = (sum(calls[key] * seconds[key in faster if new else 0] for key, seconds in times.items()) for new in (False, True))
    detours = OVERHEAD * sum(calls.values())
    kinds = f"{len(faster)} of {len(times)} kinds"
    ratio = f"the products of a step, of all ranks, take {human(before, 's')} by {blas()} and {human(after, 's')} with oneDNN for {kinds}"
    if before - after <= detours:
        return frozenset(), f"{ratio}, which does not outweigh {human(detours, 's')} of detours"
    return faster, ratio


def seconds_of(key: Key) -> Seconds:
    """Seconds of a product of this kind by the BLAS and by oneDNN: the fastest of a few turns, which others disturb least."""
    own, other = _operation(key, by_onednn=False), _operation(key, by_onednn=True)
    turns: list[Seconds] = []
    for _ in range(_TRIALS + 1):
        turns.append((_once(own), _once(other)))
    scale = _flops(key) / _flops(_cut(key))
    return scale * min(turn[0] for turn in turns[1:]), scale * min(turn[1] for turn in turns[1:])


def _once(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _operation(key: Key, by_onednn: bool) -> Callable[[], object]:
    left, right, left_straight, right_straight, biased, into = _cut(key)
    a, b = _operand(left, left_straight), _operand(right, right_straight)
    bias = torch.randn(right[1]) if biased else None
    out = torch.empty(left[0], right[1]) if into else None
    if by_onednn:
        return lambda: _by_onednn(a, b, bias) if out is None else out.copy_(_by_onednn(a, b, bias))
    return lambda: torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


def _operand(shape: tuple[int, int], straight: bool) -> torch.Tensor:
    return torch.randn(shape) if straight else torch.randn(shape[::-1]).t()


def _cut(key: Key) -> Key:
    """The same with its longest side halved until it is small enough."""
    (m, k), (_, n), *rest = key
    while 2.0 * m * k * n > _ENOUGH * torch.get_num_threads():
        longest = max(m, k, n)
        m, k, n = ((side + 1) // 2 if side == longest else side for side in (m, k, n))
    return (m, k), (k, n), *rest


def _flops(key: Key) -> float:
    return 2.0 * key[0][0] * key[0][1] * key[1][1]


def _in_words(times: Mapping[Key, Seconds], calls: Mapping[Key, int], chosen: frozenset[Key]) -> list[dict[str, Any]]:
    """The products that take longest, for a record."""
    longest = sorted(times, key=lambda key: -calls[key] * times[key][0])
    return [
        {
            "product": f"{key[0][0]} x {key[0][1]} x {key[1][1]}",
            "calls": calls[key],
            "library": "oneDNN" if key in chosen else blas(),
            "blas_seconds": times[key][0],
            "onednn_seconds": times[key][1],
        }
        for key in longest[:_MOST_TOLD]
    ]


def _from_json(text: str) -> Key:
    return tuple(tuple(part) if isinstance(part, list) else part for part in json.loads(text))


# -- the kernels -------------------------------------------------------------------------------------------------------


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _valid(key: Key) -> bool:
    """Whether these are matrices that fit and have more than one row and column: vectors are not worth a library's preparations."""
    left, right = key[0], key[1]
    return len(left) == len(right) == 2 and left[1] == right[0] and min(*left, *right) > 1


def _by_onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows, columns = b.stride()
    if not ((columns == 1 and rows >= b.shape[1]) or (rows == 1 and columns >= b.shape[0])):
        b = b.contiguous()  # an expanded operand, say, whose strides are 0
    linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
    if a.is_contiguous() or a.numel() <= _COPIED:
        return linear(a, b.t(), bias, "none", [], "")
    out = a.new_empty((a.shape[0], b.shape[1]))
    rows = max(1, _COPIED // a.shape[1])
    for start in range(0, len(out), rows):
        out[start : start + rows] = linear(a[start : start + rows], b.t(), bias, "none", [], "")
    return out


def _kernel(name: str, takes: Callable[[Key], bool]) -> Callable[..., torch.Tensor]:
    """An operator's kernel that gives oneDNN the fp32 products that it ``takes``, and torch's own kernel all others."""
    own: Any = torch.library.get_kernel(f"aten::{name}", "CPU")
    single = torch.float32

    def product(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is single and b.dtype is single and takes((a.shape, b.shape, a.is_contiguous(), b.is_contiguous(), False, False)):
            return _by_onednn(a, b, None)
        return own.call_boxed(keys, a, b)

    def product_into(keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        fits = a.dtype is single and b.dtype is single and out.dtype is single and out.shape == (*a.shape[:1], *b.shape[1:])
        if fits and takes((a.shape, b.shape, a.is_contiguous(), b.is_contiguous(), False, True)):
            return out.copy_(_by_onednn(a, b, None))
        return own.call_boxed(keys, a, b, out=out)

    def biased(keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        if (
            _is_bias(bias, b, beta, alpha)
            and a.dtype is single
            and b.dtype is single
            and takes((a.shape, b.shape, a.is_contiguous(), b.is_contiguous(), True, False))
        ):
            return _by_onednn(a, b, bias)
        return own.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    def biased_into(
        keys: Any, bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1, out: torch.Tensor
    ) -> torch.Tensor:
        fits = a.dtype is single and b.dtype is single and out.dtype is single and out.shape == (*a.shape[:1], *b.shape[1:])
        straight = a.is_contiguous(), b.is_contiguous()
        if fits and _is_bias(bias, b, beta, alpha) and takes((a.shape, b.shape, *straight, True, True)):
            return out.copy_(_by_onednn(a, b, bias))
        return own.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha, out=out)

    kernels: dict[str, Callable[..., torch.Tensor]] = {"mm": product, "mm.out": product_into, "addmm": biased, "addmm.out": biased_into}
    return kernels[name]


def _is_bias(bias: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> bool:
    """Whether what is added is one number per column."""
    return bias.dim() == 1 and b.dim() == 2 and len(bias) == b.shape[1] and bias.dtype is torch.float32 and beta == 1 and alpha == 1
