"""FLOPs by torch's formulas, and by ours where torch's are wrong."""

from __future__ import annotations

import pytest
import torch

from caraml.workloads.flops import forward_and_training_flops


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_a_convolution_trains_for_three_times_its_forward_pass(groups: int) -> None:
    """Each gradient costs what the forward pass does: 2 FLOPs per weight and place of the output."""
    with torch.device("meta"):
        layer = torch.nn.Conv2d(64, 64, 3, padding=1, groups=groups)
        images = torch.empty(2, 64, 16, 16, requires_grad=True)
    forward, training = forward_and_training_flops(lambda: layer(images).sum(), 2)
    assert forward == 2 * 64 * (64 // groups) * 9 * 16 * 16
    assert training == 3 * forward
