"""FLOPs of any piece of torch work, by torch's own formulas, and the bytes that it moves between memory and arithmetic.

Torch's own formula takes the gradient of the weights of a grouped convolution for that of an ungrouped one: 35 times too many FLOPs for
the backward pass of MobileNetV3. Depthwise convolutions are groups of one channel, so it matters for EfficientNets and MobileNets.

Both are counted without computing anything. Of bytes, every kernel of an eager pass reads its inputs and writes its outputs once, 4 bytes a
number. Fused kernels move less, kernels of several passes more: an estimate, good to a factor of about two. Of what one kernel touches, as
much as the last-level cache holds may lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

if TYPE_CHECKING:
    from caraml.workloads.base import BuildContext


def convolution_backward_flops(
    grad_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    _output_padding: Any,
    _groups: int,
    wanted: Sequence[bool],
    **_: Any,
) -> int:
    """Each wanted gradient, of the input and of the weights, costs what the forward pass costs.

    That is 2 FLOPs per multiply-add: every element of the weights (outputs, inputs / groups, height, width) is used once at each place of
    each image of the output, or of the input if transposed.
    """
    places = input_shape if transposed else grad_shape
    forward = 2 * grad_shape[0] * prod(places[2:]) * prod(weight_shape)
    return forward * (bool(wanted[0]) + bool(wanted[1]))


CORRECTIONS = {torch.ops.aten.convolution_backward: convolution_backward_flops}
"""For ``FlopCounterMode(custom_mapping=...)``."""

_FORMULAS = flop_registry | {operator: shape_wrapper(formula) for operator, formula in CORRECTIONS.items()}


class _Counter(TorchDispatchMode):
    """Adds up the formula of every operator that has one.

    Torch's ``FlopCounterMode`` attributes FLOPs to modules by hooks that a gradient inside a forward pass (a gradient penalty) breaks.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def count_flops(work: Callable[[], object]) -> float:
    """FLOPs of ``work``: 2 per multiply-add of matrix products, convolutions and attention; on the meta device nothing is computed."""
    with _Counter() as counter:
        work()
    return float(counter.total)


def forward_and_training_flops(forward: Callable[[], torch.Tensor], samples: int) -> tuple[float, float]:
    """FLOPs per sample of the forward pass alone, and of forward and backward; ``forward`` computes the scalar loss of so many samples, on
    the meta device."""
    with _Counter() as counter:
        loss, alone = forward(), counter.total
        loss.backward()
    return alone / samples, counter.total / samples


ADAMW, SGD_MOMENTUM = 28, 20
"""Bytes that a fused update moves per parameter: reads weight, gradient and states, writes weight and states, 4 bytes each."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the kernels of a pass move."""

    kernels: tuple[tuple[float, float, float], ...]
    """Of each: bytes that grow with the samples of a micro-batch, per sample; the others, as of weights; and how often it runs."""

    @property
    def per_sample(self) -> float:
        """Bytes that grow with the samples, of all kernels."""
        return sum(each * times for each, _, times in self.kernels)

    @property
    def besides(self) -> float:
        """The other bytes of a micro-batch."""
        return sum(rest * times for _, rest, times in self.kernels)

    def cached(self, samples: int, cache: float) -> float:
        """Bytes of one micro-batch that a cache of this size can serve at best: of each kernel no more than it holds."""
        return sum(min(each * samples + rest, cache) * times for each, rest, times in self.kernels)

    def times(self, factor: float) -> Traffic:
        """The same kernels, so many times as often."""
        return Traffic(tuple((each, rest, times * factor) for each, rest, times in self.kernels))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.kernels + other.kernels)

    def cached_share(self, micro_batch: int, accumulation: int, update: float, cache: float) -> float:
        """Largest share of a step's bytes that the cache can serve; ``update`` bytes are the optimizer's, in one kernel."""
        moved = accumulation * (micro_batch * self.per_sample + self.besides) + update
        return (accumulation * self.cached(micro_batch, cache) + min(update, cache)) / moved

    def facts(self, ctx: BuildContext[Any], update: float, items_per_sample: int = 1) -> dict[str, Any]:
        """What a task's facts say of a step's bytes; ``update`` of them are the optimizer's."""
        return {
            "traffic_per_item": self.per_sample / items_per_sample,
            "traffic_per_step": self.besides * ctx.accumulation + update,
            "cached_traffic_share": self.cached_share(ctx.micro_batch, ctx.accumulation, update, ctx.cache_bytes),
        }


class _KernelCounter(TorchDispatchMode):
    """Notes the sizes of inputs and outputs of every kernel. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten._unsafe_view):
            self.kernels.append(_bytes((args, kwargs)) + _bytes(out))
        return out


def _bytes(tensors: Any) -> int:
    found = {id(leaf): leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)}
    return sum(found.values())


class _FusedAttention(TorchFunctionMode):
    """Attention as one kernel, as devices have it; the meta device would write the matrix of all scores.

    Another operation of three inputs and one output of these sizes takes its place. What is added to the scores is left out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key, value = args[:3]
            if key.shape != query.shape:  # of one token, as of a class: each is read once, and the result has the query's shape
                key, value = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)
            if value.shape[-1] != query.shape[-1]:  # the result has the width of the values
                query, key = query.mean(-1, keepdim=True), key.mean(-1, keepdim=True)
            return torch.addcmul(query, key, value)
        return func(*args, **(kwargs or {}))


def traffic(model: torch.nn.Module, loss: Callable[[int], torch.Tensor]) -> Traffic:
    """What the kernels of ``loss(samples)`` and of the gradients of ``model``'s parameters move.

    ``loss`` computes on the meta device. Two sizes of the micro-batch tell what grows with it from what does not.
    """
    few, many = _counted(model, loss, 2), _counted(model, loss, 4)
    if len(few) != len(many):  # the first pass of a network may make tables that it keeps
        few = _counted(model, loss, 2)
    return Traffic(tuple(((more - less) / 2, 2.0 * less - more, 1.0) for less, more in zip(few, many, strict=True)))


def _counted(model: torch.nn.Module, loss: Callable[[int], torch.Tensor], samples: int) -> list[int]:
    counter = _KernelCounter()
    with counter, _FusedAttention():
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss(samples), trained, allow_unused=True)  # such as what is only added to scores of attention
    return counter.kernels
