"""A decoder-only GPT in one file.

Radford et al. 2019 (pre-LayerNorm, GELU MLP of four times the width, learned positions) with, on request, the rotary positions of Su et al.
2021 that CARAML's 800M model uses. Attention is torch's ``scaled_dot_product_attention``; the loss never holds all logits at once.

Letters in shapes: B batch, T tokens, C width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caraml.models.loss import linear_cross_entropy


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocab_size: int
    """Rows of the embedding: the tokenizer's vocabulary, padded to a multiple of 64 so that matrix units run full tiles."""
    sequence_length: int
    width: int
    layers: int
    heads: int
    positions: Literal["learned", "rotary"] = "learned"
    tied_head: bool = True
    """Whether the output head is the embedding's transpose, as in GPT-2."""
    bias: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(f"rotary positions need an even head width, found {self.width // self.heads}")


def padded_vocabulary(size: int) -> int:
    """``size`` rounded up to a multiple of 64: 50257 -> 50304."""
    return math.ceil(size / 64) * 64


def parameter_count(config: GPTConfig) -> int:
    """Trainable parameters in closed form; a tied head counts once."""
    C, L = config.width, config.layers
    bias = int(config.bias)
    norm = C * (1 + bias)
    block = 2 * norm + 12 * C * C + bias * (3 + 1 + 4 + 1) * C
    embeddings = config.vocab_size * C * (1 if config.tied_head else 2)
    positions = config.sequence_length * C if config.positions == "learned" else 0
    return embeddings + positions + L * block + norm


def flops_per_token(config: GPTConfig) -> float:
    """Training FLOPs per token, forward and backward: ``6 * P + 12 * L * C * T``.

    P counts the weights of matrix products: ``12 * L * C^2`` in the blocks and ``V * C`` in the head (once, tied or not); embedding
    look-ups cost nothing. The second term is attention's two products over the whole T x T square: the causal half is *not* discounted, so
    that the figure compares with the published ones (Narayanan et al. 2021, without recomputation).
    """
    matmul_parameters = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    return 6.0 * matmul_parameters + 12.0 * config.layers * config.width * config.sequence_length


def rotary_table(sequence_length: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (T, D); halves rotate against each other."""
    frequencies = 10000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)  # (D/2,)
    angles = torch.arange(sequence_length, dtype=torch.float32)[:, None] * frequencies  # (T, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (T, D)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to queries or keys: (B, H, T, D) -> (B, H, T, D)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, bias = config.width, config.bias
        self.norm_attention = nn.LayerNorm(C, bias=bias)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(C, bias=bias)
        self.mlp_up = nn.Linear(C, 4 * C, bias=bias)
        self.mlp_down = nn.Linear(4 * C, C, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attention(self.norm_attention(x), rotary)
        return x + self.mlp_down(F.gelu(self.mlp_up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """The whole network. ``forward`` gives the loss; ``logits`` gives the words."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width) if config.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config.sequence_length, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Normal weights of 0.02; the layers that write into the residual stream are scaled by 1/sqrt(2 L), as GPT-2 does."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for linear in (module.attention.out, module.mlp_down):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * self.config.layers))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states: tokens (B, T) int64 -> (B, T, C)."""
        T = tokens.shape[1]
        x = self.embedding(tokens)  # (B, T, C)
        rotary = None
        if self.positions is not None:
            x = x + self.positions(torch.arange(T, device=tokens.device))
        else:
            rotary = (self.cos[:T], self.sin[:T])
        for block in self.blocks:
            x = block(x, rotary)
        return self.norm(x)

    def logits(self, tokens: Tensor) -> Tensor:
        """Scores of the next word: tokens (B, T) -> (B, T, V)."""
        return self.head(self.hidden(tokens))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats: tokens (B, T) and targets (B, T), both int64 -> scalar."""
        x = self.hidden(tokens)
        return linear_cross_entropy(x.flatten(0, 1), self.head.weight, targets.flatten())
