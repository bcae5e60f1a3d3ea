"""A transformer over several fields of the atmosphere, trained to fill in masked tokens by an ensemble of predictions.

After AtmoRep (Lessig et al., arXiv 2308.13280) with the settings of its public code of 2024 for temperature and wind: 383,556,480
parameters. B samples; per field N tokens (levels x time x latitude x longitude), each of P values and of width D.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

FIELDS = ("velocity_u", "velocity_v", "temperature")
TOKEN_FACTS = 8
"""What a token tells of its place: year, day, hour, level, latitude, longitude, level again as a share, resolution."""
_FACTS_WIDTH = 16
_TAILS = 16


@dataclass(frozen=True)
class FieldConfig:
    """Width of a field's tokens, how many there are per level along (time, latitude, longitude), and points per token along the same."""

    width: int
    tokens: tuple[int, int, int]
    size: tuple[int, int, int]

    @property
    def values(self) -> int:
        """Points in a token."""
        return math.prod(self.size)


@dataclass(frozen=True)
class AtmoRepConfig:
    """Sizes of the whole network."""

    fields: Mapping[str, FieldConfig]
    layers: int
    levels: int
    heads: int = 16
    coupling_heads: int = 1
    dropout: float = 0.05


_WIND_2024 = FieldConfig(1024, (12, 3, 6), (3, 18, 18))
_TINY = FieldConfig(64, (2, 2, 2), (3, 9, 9))
PRESETS = {
    "384M": AtmoRepConfig(
        {"velocity_u": _WIND_2024, "velocity_v": _WIND_2024, "temperature": FieldConfig(1024, (12, 2, 4), (3, 27, 27))}, layers=6, levels=5
    ),
    "tiny": AtmoRepConfig(
        {"velocity_u": _TINY, "velocity_v": _TINY, "temperature": FieldConfig(32, (2, 2, 2), (3, 9, 9))}, layers=2, levels=2, heads=4
    ),
}
"""Named sizes: the public one of 2024, and one that a CPU trains."""


class AtmoRep(nn.Module):
    """Tokens, their facts and places of masked ones to an ensemble of predictions for these.

    ``forward`` takes, per field, tokens (B, N, P) with the masked ones already disturbed, facts (B, N, 8) and masked places (B, M), and
    returns predictions (B, M, 16, P).
    """

    def __init__(self, config: AtmoRepConfig) -> None:
        super().__init__()
        self.config = config
        self.branches = nn.ModuleDict({name: FieldBranch(name, config) for name in config.fields})

    def forward(
        self, tokens: Mapping[str, torch.Tensor], facts: Mapping[str, torch.Tensor], masked: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Predictions for the masked tokens of each field."""
        branches = {name: cast(FieldBranch, branch) for name, branch in self.branches.items()}
        x = {name: branch.embedded(tokens[name], facts[name]) for name, branch in branches.items()}  # (B, N, D) each
        depths = []
        for layer in range(self.config.layers):
            # All fields move together, each from the state that all had before.
            x = {name: branch.encoder[layer](x[name], [x[other] for other in x if other != name]) for name, branch in branches.items()}
            depths.append(x)
        return {name: branch.decoded([state[name] for state in depths], masked[name]) for name, branch in branches.items()}


class FieldBranch(nn.Module):
    """What belongs to one field: the way in, its encoder and decoder blocks, and 16 ways out."""

    def __init__(self, name: str, config: AtmoRepConfig) -> None:
        super().__init__()
        field = config.fields[name]
        others = [other.width for key, other in config.fields.items() if key != name]
        self.embed = nn.Linear(field.values, field.width - _FACTS_WIDTH)
        self.facts = nn.Linear(TOKEN_FACTS, _FACTS_WIDTH)
        self.encoder = nn.ModuleList(EncoderBlock(field.width, others, config) for _ in range(config.layers))
        self.decoder = nn.ModuleList(DecoderBlock(field.width, config) for _ in range(config.layers))
        self.tails = nn.ModuleList(nn.Sequential(nn.LayerNorm(field.width), nn.Linear(field.width, field.values)) for _ in range(_TAILS))
        self.register_buffer("places", harmonics(config.levels * math.prod(field.tokens), field.width), persistent=False)

    def embedded(self, tokens: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """Tokens (B, N, P) and their facts (B, N, 8) as (B, N, D)."""
        return torch.cat([self.embed(tokens), self.facts(facts)], -1) + self.get_buffer("places")

    def decoded(self, depths: Sequence[torch.Tensor], masked: torch.Tensor) -> torch.Tensor:
        """From the encoder's states at every depth, (B, N, D), to predictions at the masked places (B, M): (B, M, 16, P)."""
        y = depths[-1]
        for block, state in zip(self.decoder, reversed(depths), strict=True):
            y = block(y, state)
        chosen = y.gather(1, masked.unsqueeze(-1).expand(-1, -1, y.shape[-1])).float()  # (B, M, D)
        with _full_precision(chosen.device):
            return torch.stack([tail(chosen) for tail in self.tails], 2)


class EncoderBlock(nn.Module):
    """Attention among a field's own tokens and, in extra heads, to those of every other field; then an MLP."""

    def __init__(self, width: int, others: Sequence[int], config: AtmoRepConfig) -> None:
        super().__init__()
        self.heads, self.coupling, self.head_width, self.dropout = (
            config.heads,
            config.coupling_heads,
            width // config.heads,
            config.dropout,
        )
        crossed = self.head_width * self.coupling
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_others = nn.ModuleList(nn.Linear(width, crossed, bias=False) for _ in others)
        self.kv_others = nn.ModuleList(nn.Linear(other, 2 * crossed, bias=False) for other in others)
        self.out = nn.Linear(width + crossed * len(others), width, bias=False)
        self.mlp = _mlp(width, config.dropout)

    def forward(self, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """(B, N, D) of this field, and the states (B, N', D') of the others."""
        normed = _norm(x)
        q, k, v = (_split(part, self.heads) for part in self.qkv(normed).chunk(3, -1))  # (B, heads, N, D / heads)
        seen = [_attend(_norm(q), _norm(k), v, self.dropout if self.training else 0.0)]
        for q_map, kv_map, other in zip(self.q_others, self.kv_others, others, strict=True):
            k, v = (_split(part, self.coupling) for part in kv_map(_norm(other)).chunk(2, -1))
            q = _split(q_map(normed), self.coupling)
            seen.append(_attend(_norm(q), _norm(k), v, self.dropout if self.training else 0.0))
        x = x + self.out(torch.cat(seen, -1))
        return x + self.mlp(_norm(x))


class DecoderBlock(nn.Module):
    """Half of the heads look at the decoder's own tokens, half at the encoder's of the mirrored depth; then an MLP."""

    def __init__(self, width: int, config: AtmoRepConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads // 2, config.dropout
        self.qkv = nn.Linear(width, 3 * width // 2, bias=False)
        self.q_encoder = nn.Linear(width, width // 2, bias=False)
        self.kv_encoder = nn.Linear(width, width, bias=False)
        self.norm_q, self.norm_k = (nn.LayerNorm(width // config.heads) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = _mlp(width, config.dropout)

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
        """Decoder state and encoder state, both (B, N, D)."""
        normed, dropout = _norm(x), self.dropout if self.training else 0.0
        q, k, v = (_split(part, self.heads) for part in self.qkv(normed).chunk(3, -1))
        own = _attend(self.norm_q(q), self.norm_k(k), v, dropout)  # (B, N, D / 2)
        k, v = (_split(part, self.heads) for part in self.kv_encoder(_norm(encoded)).chunk(2, -1))
        crossed = _attend(self.norm_q(_split(self.q_encoder(normed), self.heads)), self.norm_k(k), v, dropout)  # (B, N, D / 2)
        x = x + self.out(torch.cat([own, crossed], -1))
        return x + self.mlp(_norm(x))


def _full_precision(device: torch.device) -> AbstractContextManager[object]:
    """fp32 inside an autocast region; the meta device, on which FLOPs are counted, knows no autocast."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Layer norm without scale and shift."""
    return F.layer_norm(x, x.shape[-1:])


def _split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, N, heads * W) -> (B, heads, N, W)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    q, k = q.to(v.dtype), k.to(v.dtype)  # autocast normalises in fp32
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)  # (B, N, heads * W)


def _mlp(width: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width), nn.GELU())


def harmonics(count: int, width: int) -> torch.Tensor:
    """Sines and cosines of the token's number at falling frequencies (Vaswani et al., arXiv 1706.03762, section 3.5), (count, width)."""
    angle = torch.arange(count)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


def ensemble_loss(predicted: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Squared error of every member, and how well the ensemble's normal distribution covers the truth (arXiv 2308.13280, section 3.2).

    With mean m and standard deviation s over the members: ``mean((y - x)^2) + mean((exp(-((y - m) / s)^2 / 2) - 1)^2) + mean(sqrt(s))``.

    Args:
        predicted: (B, M, members, P).
        truth: (B, M, P).
    """
    mean, std = predicted.mean(2), predicted.std(2).clamp(min=1e-6)  # (B, M, P); a spread of 0 has no gradient
    squared = (predicted - truth.unsqueeze(2)).square().mean()
    covered = torch.exp(-0.5 * ((truth - mean) / std).square())
    return squared + (covered - 1).square().mean() + std.sqrt().mean()
