"""Bytes moved, counted against networks small enough to count by hand."""

from __future__ import annotations

import torch
from torch import nn

from caraml.models.traffic import traffic


def test_a_linear_layer_moves_what_its_products_read_and_write() -> None:
    with torch.device("meta"):
        layer = nn.Linear(8, 16, bias=False)
    each, every = traffic(layer, lambda samples: layer(torch.empty(samples, 8, device="meta")).sum())
    weight, given, result = 4 * 8 * 16, 4 * 8, 4 * 16
    # Forward: product (given + weight + result), sum (result). Backward: the weight's gradient (given + result + weight).
    assert every == 2 * weight + 4 + 4 + 4  # ... and the loss, its gradient and that gradient's start: one number each
    assert each == given + given + result + result + given + result  # the input is first written


def test_views_move_nothing_and_attention_is_one_kernel() -> None:
    with torch.device("meta"):
        scale = nn.Linear(1, 1, bias=False)

    def loss(samples: int) -> torch.Tensor:
        q = torch.empty(samples, 2, 1024, 8, device="meta") * scale.weight
        return nn.functional.scaled_dot_product_attention(q, q.view_as(q), q.transpose(2, 3).transpose(2, 3), is_causal=True).sum()

    each, _ = traffic(scale, loss)
    assert each < 40 * 4 * 2 * 1024 * 8, "a matrix of scores alone would be 128 times one operand"
