"""FLOPs of any piece of torch work, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from caraml.models.conv_flops import CORRECTIONS

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
