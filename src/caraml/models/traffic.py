"""How many bytes a network's forward and backward pass move between memory and arithmetic, counted without computing anything.

Every kernel of an eager pass reads its inputs and writes its outputs once, 4 bytes a number. Fused kernels and caches move less, kernels of
several passes more: an estimate, good to a factor of about two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ADAMW, SGD_MOMENTUM = 28, 20
"""Bytes that a fused update moves per parameter: reads weight, gradient and states, writes weight and states, 4 bytes each."""


class _Traffic(TorchDispatchMode):
    """Adds up the sizes of inputs and outputs of every kernel. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten._unsafe_view):
            self.total += _bytes((args, kwargs)) + _bytes(out)
        return out


def _bytes(tensors: Any) -> int:
    found = {id(leaf): leaf.numel() * leaf.element_size() for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)}
    return sum(found.values())


class _FusedAttention(TorchFunctionMode):
    """Attention as one kernel, as devices have it; the meta device would write the matrix of all scores.

    Another operation of three inputs and one output of these sizes takes its place.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return torch.addcmul(*args[:3])
        return func(*args, **(kwargs or {}))


def traffic(model: torch.nn.Module, loss: Callable[[int], torch.Tensor]) -> tuple[float, float]:
    """Bytes per sample and bytes per micro-batch of ``loss(samples)`` and the gradients of ``model``'s parameters.

    ``loss`` computes on the meta device. Two sizes of the micro-batch tell what grows with it from what does not, the weights.
    """
    few, many = _counted(model, loss, 2), _counted(model, loss, 4)
    each = (many - few) / 2
    return each, few - 2 * each


def _counted(model: torch.nn.Module, loss: Callable[[int], torch.Tensor], samples: int) -> int:
    counter = _Traffic()
    with counter, _FusedAttention():
        torch.autograd.grad(loss(samples), list(model.parameters()))
    return counter.total
