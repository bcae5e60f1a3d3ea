"""Cross-entropy of a linear head whose logits are never held at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 2**29
"""Largest fp32 logits held at a time. A chunk this size still fills a GPU; 64 x 1024 tokens x 50304 words at once would be 13 GB."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients of each chunk while its logits exist, so that nothing is recomputed: the FLOPs are those of the plain head."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:  # (N, C), (V, C), (N,) -> ()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, start + rows)
            h, y = hidden[chunk], targets[chunk, None]
            logits = (h @ weight.t()).float()  # (rows, V)
            total += (logits.logsumexp(dim=-1, keepdim=True) - logits.gather(1, y)).sum()
            slope = logits.softmax(dim=-1)
            slope.scatter_add_(1, y, torch.full_like(y, -1, dtype=slope.dtype))
            slope = (slope / hidden.shape[0]).to(h.dtype)
            grad_hidden[chunk] = slope @ weight  # (rows, C)
            grad_weight += slope.t() @ h  # (V, C)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (grad_output,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_output.to(grad_hidden.dtype), grad_weight * grad_output.to(grad_weight.dtype), None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``targets``, a chunk of rows at a time.

    Shapes: ``hidden`` (N, C), ``weight`` (V, C), ``targets`` (N,) int64; returns a float32 scalar. Under autocast the products run in
    autocast's type and the softmax in float32. Torch's own chunked loss needs a newer release than this package asks for, and leaves
    compiled graphs.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    rows = max(1, chunk_bytes // (4 * weight.shape[0]))
    with torch.autocast(kind, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, targets, rows)
