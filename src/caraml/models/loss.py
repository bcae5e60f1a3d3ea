"""Cross-entropy of a linear head whose logits are never held at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 2**29
"""Largest fp32 logits held at a time. A chunk this size still fills a GPU; 64 x 1024 tokens x 50304 words at once would be 13 GB."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the slopes of each chunk while its logits exist, so that nothing is recomputed: the FLOPs are those of the plain head.

    Slopes are kept without the 1/N of the mean, and scaled in the backward pass in float32: in fp16, 1/N of a probability is nothing.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  -- torch calls it by position; (N, C), (V, C), (N,) -> ()
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype
    ) -> Tensor:
        x, w = hidden.to(dtype), weight.to(dtype)
        slope_hidden = torch.empty_like(x)
        slope_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, x.shape[0], rows):
            chunk = slice(start, start + rows)
            h, y = x[chunk], targets[chunk, None]
            slope, normaliser = _exponentials(h, w, y, total)
            slope /= normaliser
            slope = slope.scatter_add_(1, y, torch.full_like(y, -1, dtype=slope.dtype)).to(dtype)
            slope_hidden[chunk] = slope @ w  # (rows, C)
            slope_weight += slope.t() @ h  # (V, C)
        ctx.save_for_backward(slope_hidden, slope_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        slope_hidden, slope_weight = ctx.saved_tensors
        factor = grad_outputs[0].float() / slope_hidden.shape[0]
        hidden_dtype, weight_dtype = ctx.dtypes
        return (slope_hidden.float() * factor).to(hidden_dtype), (slope_weight * factor).to(weight_dtype), None, None, None


def _exponentials(hidden: Tensor, weight: Tensor, targets: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials of a chunk's logits (rows, V) and their sums (rows, 1); the chunk's losses are added to ``total``."""
    logits = (hidden @ weight.t()).float()
    logits -= logits.amax(dim=-1, keepdim=True)  # softmax in the logits' memory; logsumexp would make a copy of them
    total -= logits.gather(1, targets).sum()
    exponentials = logits.exp_()
    normaliser = exponentials.sum(dim=-1, keepdim=True)
    total += normaliser.log().sum()
    return exponentials, normaliser


def _loss_alone(x: Tensor, w: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The loss where nobody asks for gradients: a third of the products."""
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        _exponentials(x[chunk], w, targets[chunk, None], total)
    return total / x.shape[0]


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``targets``, a chunk of rows at a time.

    Shapes: ``hidden`` (N, C), ``weight`` (V, C), ``targets`` (N,) int64; returns a float32 scalar. Under autocast the products run in
    autocast's type; softmax and sums are float32 always. Without gradient mode only the loss is computed. Torch's own chunked loss
    needs a newer release than this package asks for, and leaves compiled graphs.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        if not wanted:
            return _loss_alone(hidden.to(dtype), weight.to(dtype), targets, rows)
        return _LinearCrossEntropy.apply(hidden, weight, targets, rows, dtype)
