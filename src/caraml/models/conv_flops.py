"""FLOPs of a convolution's backward pass, for grouped convolutions too.

Torch's own formula takes the gradient of the weights of a grouped convolution for that of an ungrouped one: 35 times too many FLOPs for
the backward pass of MobileNetV3. Depthwise convolutions are groups of one channel, so it matters for EfficientNets and MobileNets.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch


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
