"""Who computes the fp32 matrix products on CPUs.

torch takes them from its BLAS (MKL on x86), and from oneDNN only convolutions and formats of 16 bits; on some CPUs oneDNN multiplies more
than twice as fast, and long products faster still in parts of the inner dimension, whose results are added.

Products of batches of matrices (`bmm`) stay as they are, but for points in bf16: where scores are dropped out torch computes attention in
fp32, from operands that were cast to bf16 before, at a third of the rate of the CPU's bf16 units.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.format import human
from caraml.engine.ranks import Ranks
from caraml.engine.replacement import WORTH, Masks, Replacement, Seconds, times_of
from caraml.suite.model import Point
from caraml.system import host
from caraml.system.kernels import blas

Key = tuple[Any, ...]
"""What a product's time depends on: both shapes, how each operand lies in memory (:func:`_straight`), whether a bias is added, and whether
the result goes into memory that is there already."""
OVERHEAD = 5e-6
"""Seconds that the detour through Python adds to every call [measured on two CPUs: 4.2 to 4.6 µs]."""
_ENOUGH, _ENOUGH_IN_PARTS = 2e9, 40e9
"""FLOPs per thread of a product that is timed, and of one that is timed in parts, too. Of a larger one the longest side is cut: this
changes both libraries' rates little, but what parts gain depends on all three sides, and on smaller ones they lose."""
_HOPEFUL = 1.5
"""Multiple of the BLAS's time up to which oneDNN is timed in parts, too, which gain less [1.4 on Zen 5]."""
_PATIENCE = 30.0
"""Seconds of timing after which nothing is timed in parts any more: slow machines would do so for minutes, while others wait."""
_INNER = 768
"""About the inner dimension of a part: with a right operand of 50,000 rows that is no transpose, oneDNN's layer does two thirds of its
best rate [Zen 5]."""
_COPIED = 2**23
"""Numbers of a left operand that are copied at a time, and of a part's product: oneDNN's layer takes no transpose or columns there, and a
copy of the slopes of all logits would be the largest array of a step."""
_APART = 16
"""Numbers between the rows of an operand that is timed as columns of a wider matrix."""
_MOST_TOLD = 24
_OPERATORS = ("mm", "addmm", "mm.out", "addmm.out")


class Products(Replacement):
    """Who computes the fp32 products of this process."""

    knob, other = "matmul", "onednn"

    def __init__(self, point: Point, ranks: Ranks) -> None:
        super().__init__(point, ranks, own=blas(), other="oneDNN")
        if self._asked == "onednn" and not _has_onednn():
            raise EnvironmentUnfitError("matmul: found 'onednn', and this build of torch has none of its linear layers", 'matmul = "mkl"')

    def settled(self) -> str | None:
        """Nothing to choose without oneDNN, or where nothing is multiplied."""
        if not _has_onednn():
            return "this build of torch has none of oneDNN's linear layers"
        return super().settled() or _nothing_in(self._point)

    def able(self, key: Key) -> bool:
        """Whether these are matrices that fit and have more than one row and column: vectors are not worth a library's preparations."""
        left, right = key[0], key[1]
        return len(left) == len(right) == 2 and left[1] == right[0] and min(*left, *right) > 1

    def kernels(self, takes: Callable[[Key], int]) -> dict[str, Callable[..., torch.Tensor]]:
        """Of fp32 products, with or without a bias, and into memory that is there already."""
        return {name: _kernel(name, takes) for name in _OPERATORS}

    def choose(self) -> None:
        """Each kind by the faster library, if all together outweigh the detours."""
        end = time.perf_counter() + _PATIENCE
        mine = {key: product_seconds(key, in_parts=time.perf_counter() < end) for key in self._calls}
        found = self._ranks.gather({json.dumps(key): [self._calls[key], *seconds] for key, seconds in mine.items()})
        calls, times = dict[Key, int](), dict[Key, Seconds]()
        for text in dict.fromkeys(text for theirs in found for text in theirs):
            numbers = [theirs[text] for theirs in found if text in theirs]
            count, *seconds = (sum(column) for column in zip(*numbers, strict=True))
            key = tuple(tuple(part) if isinstance(part, list) else part for part in json.loads(text))
            calls[key], times[key] = count, tuple(one / len(numbers) for one in seconds)
        chosen, why = choice(times, calls)
        if chosen:
            self.install(lambda key: chosen.get(key, 0))
        took = blas() if not chosen else "oneDNN" if len(chosen) == len(times) else f"oneDNN and {blas()}"
        self.told |= {"library": took, "why": why, "products": _in_words(times, calls, chosen)}


class BatchedProducts(Replacement):
    """Who computes the fp32 products of batches in attention, of a process whose point is in bf16; a call's key is both shapes.

    oneDNN rounds the operands to bf16 and adds up in fp32, as torch's own kernels of attention in bf16 do. Only products of the shapes that
    attention has are its: a network may have left autocast for others.
    """

    knob, other, name = "matmul", "onednn", "batched_matmul"
    work, few = "attention's products", "multiplied no batches of fp32 matrices in attention"

    def __init__(self, point: Point, ranks: Ranks) -> None:
        super().__init__(point, ranks, own=blas(), other="oneDNN, operands rounded to bf16")
        self._attention, self._by_name = _Attention(), self._asked == self.other
        if self._by_name:
            self._asked = "auto"  # its shapes are known after the first step

    def settled(self) -> str | None:
        """Nothing to choose where nothing is multiplied, or the compiler's kernels do it."""
        compiled = "compiled: the compiler multiplies batches by kernels of its own" if self._point.compile != "off" else None
        return compiled or super().settled() or _nothing_in(self._point)

    def noting(self) -> AbstractContextManager[object]:
        """The first step tells which shapes are attention's."""
        return self._attention

    def _noted(self, key: Key) -> bool:
        if self._attention.inside:
            (batch, rows, inner), (*_, columns) = key
            by_left, by_right = ((batch, rows, columns), (batch, columns, inner)), ((batch, inner, rows), (batch, rows, columns))
            for one in (key, by_left, by_right):  # also what its operands' slopes are multiplied of
                self._calls[one] = self._calls.get(one, 0) + 1
        return False

    def able(self, key: Key) -> bool:
        """Whether the first step's attention had such a product."""
        return key in self._calls

    def choose(self) -> None:
        """One way for all, by time or by name."""
        if not self._by_name:
            super().choose()
        elif self._calls:
            self.install(self.able)
            self.told["library"] = self._words

    def seconds(self, key: Key) -> Seconds:
        """Of operands in one piece each, by the BLAS and by oneDNN."""
        left, right = (torch.randn(shape, generator=torch.Generator()) for shape in key)
        return times_of(lambda: torch.bmm(left, right), lambda: _rounded(torch.bmm, left, right))

    def kernels(self, takes: Callable[[Key], int]) -> dict[str, Callable[..., torch.Tensor]]:
        """Of fp32 matrices."""
        own: Any = torch.library.get_kernel("aten::bmm", "CPU")

        def product(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            if a.dtype is b.dtype is torch.float32 and a.dim() == b.dim() == 3 and takes((tuple(a.shape), tuple(b.shape))):
                return _rounded(own.call_boxed, keys, a, b)
            done: torch.Tensor = own.call_boxed(keys, a, b)
            return done

        return {"bmm": product}


class _Attention(TorchFunctionMode):
    """Knows whether attention is being computed: ``inside``. torch leaves the mode for what a function of its own calls."""

    inside = False
    functions = (F.scaled_dot_product_attention, F.multi_head_attention_forward)

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.inside, before = self.inside or function in self.functions, self.inside
        try:
            return function(*given, **(named or {}))
        finally:
            self.inside = before


def _rounded(product: Callable[..., torch.Tensor], *operands: Any) -> torch.Tensor:
    """A product by torch's kernel while that may round fp32 operands to bf16."""
    switch: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        return product(*operands)
    finally:
        switch.fp32_precision = before


def _nothing_in(point: Point) -> str | None:
    """Why nothing is multiplied."""
    return "mode data multiplies nothing" if point.mode == "data" else None


def replacements(point: Point, ranks: Ranks) -> list[Replacement]:
    """All that there are for this point on this CPU; those of bf16 only where it is not emulated."""
    halves = point.precision == "bf16" and "bf16" not in host.cpu().emulates
    return [Products(point, ranks), *([BatchedProducts(point, ranks)] if halves else []), Masks(point, ranks)]


def choice(times: Mapping[Key, Seconds], calls: Mapping[Key, int]) -> tuple[dict[Key, int], str]:
    """In how many parts oneDNN shall compute what it is faster at, by the seconds of each and its calls in a step; and why, in words."""
    if not times:
        return {}, "the first step multiplied no fp32 matrices"
    faster = {
        key: _parts(key) if divided < WORTH * whole else 1
        for key, (own, whole, divided) in times.items()
        if min(whole, divided) < WORTH * own
    }
    before = sum(calls[key] * own for key, (own, _, _) in times.items())
    after = sum(calls[key] * (min(others) if key in faster else own) for key, (own, *others) in times.items())
    detours = OVERHEAD * sum(calls.values())
    kinds = f"{len(faster)} of {len(times)} kinds"
    ratio = f"the products of a step, of all ranks, take {human(before, 's')} by {blas()} and {human(after, 's')} with oneDNN for {kinds}"
    if before - after <= detours:
        return {}, f"{ratio}, which does not outweigh {human(detours, 's')} of detours"
    return faster, ratio


def product_seconds(key: Key, in_parts: bool = True) -> Seconds:
    """Seconds of a product of this kind by the BLAS, by oneDNN, and by oneDNN in parts: infinite where it was not timed so."""
    seconds = _seconds(key, _ENOUGH)
    if in_parts and _parts(key) > 1 and seconds[1] < _HOPEFUL * seconds[0]:
        return _seconds(key, _ENOUGH_IN_PARTS, in_parts)
    return *seconds, math.inf


def _seconds(key: Key, enough: float, in_parts: bool = False) -> Seconds:
    cut = _cut(key, enough)
    left, right, left_straight, right_straight, biased, into = cut
    # of both operands: they may be the largest of a step; by a generator of its own: the numbers of the run stay what they are
    numbers = torch.randn(max(rows * (columns + _APART) for rows, columns in (left, right)), generator=torch.Generator())
    a, b = _operand(numbers, left, left_straight), _operand(numbers, right, right_straight)
    bias = numbers[: right[1]] if biased else None
    out = torch.empty(left[0], right[1]) if into else None

    def multiply(parts: int) -> torch.Tensor:
        if not parts:
            return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
        done = _by_onednn(a, b, bias, parts)
        return done if out is None else out.copy_(done)

    ways = (0, 1, max(2, _parts(cut))) if in_parts else (0, 1)
    scale = math.prod(key[0]) * key[1][1] / (math.prod(left) * right[1])
    return tuple(scale * seconds for seconds in times_of(*(partial(multiply, parts) for parts in ways)))


def _operand(numbers: torch.Tensor, shape: tuple[int, int], straight: bool | None) -> torch.Tensor:
    if straight is False:
        return _operand(numbers, shape[::-1], True).t()
    return numbers.as_strided(shape, (shape[1] + (0 if straight else _APART), 1))


def _straight(matrix: torch.Tensor) -> bool | None:
    """Whether it is contiguous, or else a transpose; ``None`` for what is neither, such as columns of a wider matrix."""
    return matrix.is_contiguous() or (False if matrix.stride() == (1, len(matrix)) else None)


def _cut(key: Key, enough: float) -> Key:
    """The same with its longest side halved until it is small enough."""
    (m, k), (_, n), *rest = key
    while 2.0 * m * k * n > enough * torch.get_num_threads():
        longest = max(m, k, n)
        m, k, n = ((side + 1) // 2 if side == longest else side for side in (m, k, n))
    return (m, k), (k, n), *rest


def _parts(key: Key) -> int:
    """Of the inner dimension of a product by oneDNN, if in parts."""
    (_, inner), _, _, right_straight, *_ = key
    return max(1, round(inner / _INNER)) if right_straight else 1


def _in_words(times: Mapping[Key, Seconds], calls: Mapping[Key, int], chosen: Mapping[Key, int]) -> list[dict[str, Any]]:
    """The products that take longest, for a record."""
    longest = sorted(times, key=lambda key: -calls[key] * times[key][0])
    return [
        {
            "product": f"{key[0][0]} x {key[0][1]} x {key[1][1]}",
            "calls": calls[key],
            "library": "oneDNN" if key in chosen else blas(),
            "blas_seconds": times[key][0],
            "onednn_seconds": times[key][1],
            "parts": chosen.get(key, 1),
            "seconds_in_parts": times[key][2] if math.isfinite(times[key][2]) else None,
        }
        for key in longest[:_MOST_TOLD]
    ]


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _by_onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, parts: int = 1) -> torch.Tensor:
    """``a @ b``, and the bias, from products of ``parts`` of the inner dimension."""
    if _straight(b) is None:
        b = b.contiguous()  # oneDNN multiplies columns of a wider matrix a thousand times slower
    inner = -(-len(b) // parts)
    blocks = math.ceil(len(a) * (inner if parts == 1 else inner + 2 * b.shape[1]) / _COPIED)
    if blocks == 1 or (parts == 1 and a.is_contiguous()):
        return _layer(a, b, bias, inner)
    out = a.new_empty((a.shape[0], b.shape[1]))
    for rows, done in zip(a.chunk(blocks), out.chunk(blocks), strict=True):
        done.copy_(_layer(rows, b, bias, inner))
    return out


def _layer(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, inner: int) -> torch.Tensor:
    linear: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default
    if inner == len(b):
        return linear(a, b.t(), bias, "none", [], "")
    out = linear(a[:, :inner], b[:inner].t(), bias, "none", [], "")
    for start in range(inner, len(b), inner):
        out += linear(a[:, start : start + inner], b[start : start + inner].t(), None, "none", [], "")
    return out


def _kernel(name: str, takes: Callable[[Key], int]) -> Callable[..., torch.Tensor]:
    """An operator's kernel that gives oneDNN the fp32 products that it ``takes``, and torch's own kernel all others."""
    own: Any = torch.library.get_kernel(f"aten::{name}", "CPU")
    single = torch.float32

    def product(keys: Any, *operands: torch.Tensor, out: torch.Tensor | None = None, beta: float = 1, alpha: float = 1) -> torch.Tensor:
        *added, a, b = operands
        bias = added[0] if added else None
        if (
            a.dtype is single
            and b.dtype is single
            and (bias is None or (_is_bias(bias, b) and beta == 1 and alpha == 1))
            and (out is None or (out.dtype is single and out.shape == (*a.shape[:1], *b.shape[1:])))
            and (parts := takes((a.shape, b.shape, _straight(a), _straight(b), bias is not None, out is not None)))
        ):
            done = _by_onednn(a, b, bias, parts)
            return done if out is None else out.copy_(done)
        scales = {} if bias is None else {"beta": beta, "alpha": alpha}
        return own.call_boxed(keys, *operands, **scales, **({} if out is None else {"out": out}))

    return product


def _is_bias(bias: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether what is added is one number per column. oneDNN's layer takes any for contiguous."""
    return bias.dim() == 1 and b.dim() == 2 and len(bias) == b.shape[1] and bias.dtype is torch.float32 and bias.is_contiguous()
