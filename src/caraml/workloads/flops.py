"""FLOPs of any piece of torch work, by torch's own formulas.

Torch's own formula takes the gradient of the weights of a grouped convolution for that of an ungrouped one: 35 times too many FLOPs for
the backward pass of MobileNetV3. Depthwise convolutions are groups of one channel, so it matters for EfficientNets and MobileNets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper


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
    counter = _Counter()
    with counter:
        work()
    return float(counter.total)


def forward_and_training_flops(forward: Callable[[], torch.Tensor], samples: int) -> tuple[float, float]:
    """FLOPs per sample of the forward pass alone, and of forward and backward.

    Args:
        forward: computes the scalar loss of ``samples`` samples, on the meta device.
        samples: how many it takes at once.
    """
    with torch.no_grad():
        alone = count_flops(forward)
    return alone / samples, count_flops(lambda: forward().backward()) / samples
