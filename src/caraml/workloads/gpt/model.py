"""A decoder-only GPT in one file.

Radford et al. 2019 (pre-LayerNorm, GELU MLP of four times the width, learned positions) with, on request, the rotary positions of Su et al.
2021 that CARAML's 800M model uses. Attention is torch's ``scaled_dot_product_attention``; the loss never holds all logits at once.

A model may hold a range of the layers only (a pipeline's stage); its parameters then have the names and the starting values that they
have in the whole model. No layer knows how many devices share it: widths are taken from the tensors that come.

Letters in shapes: B batch, T tokens, C width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from caraml.workloads.base import Attend

CHUNK_BYTES = 2**29
"""Largest fp32 logits held at a time. A chunk this size still fills a GPU; 64 x 1024 tokens x 50304 words at once would be 13 GB."""
COMPILED_CHUNK_BYTES = 2**31
"""The same of an accelerator's compiled loss, which has none of them in fp32 in memory, but a kernel of its own for each chunk, and all
chunks' products for the weight's slopes until it adds them."""
CACHED_BYTES = 2**21
"""fp32 logits per thread of a CPU that are taken through all passes of the softmax at once."""
TILE = 128
"""Rows that the matrix units of a GPU multiply at a time."""


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the slopes of each chunk while its logits exist, so that nothing is recomputed: the FLOPs are those of the plain head.

    Slopes are kept without the 1/N of the mean, and scaled in the backward pass in float32: in fp16, 1/N of a probability is nothing.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  -- torch calls it by position; (N, C), (V, C), (N,) -> ()
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int, at_a_time: int, dtype: torch.dtype
    ) -> Tensor:
        x, w = hidden.to(dtype), weight.to(dtype)
        slope_hidden = torch.empty_like(x)
        slope_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, x.shape[0], rows):
            chunk = slice(start, start + rows)
            h = x[chunk]
            slope = _slopes(h, w, targets[chunk, None], total, at_a_time)
            slope_hidden[chunk] = slope @ w  # (rows, C)
            product = slope.t() @ h  # (V, C)
            slope_weight = product.float() if slope_weight is None else slope_weight.add_(product)
        ctx.save_for_backward(slope_hidden, slope_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        slope_hidden, slope_weight = ctx.saved_tensors
        factor = grad_outputs[0].float() / slope_hidden.shape[0]
        hidden_dtype, weight_dtype = ctx.dtypes
        return (slope_hidden.float() * factor).to(hidden_dtype), (slope_weight * factor).to(weight_dtype), None, None, None, None


def _slopes(hidden: Tensor, weight: Tensor, targets: Tensor, total: Tensor, at_a_time: int, *, slopes: bool = True) -> Tensor:
    """Slopes of a chunk's losses by its logits (rows, V), probabilities less the target's one; the losses are added to ``total``. Without
    ``slopes``, only that is done.

    They take the logits' memory, some rows at a time: a CPU's cache then holds those until all passes over them are done. Compiled, all
    passes become one kernel that reads the logits and writes the slopes; for that the target is found by comparing. A scattered one would
    force slopes in float32 to memory, and gathered scores all chunks' logits: the compiler adds up all losses in the end.
    """
    logits = hidden @ weight.t()
    if torch.compiler.is_compiling():
        scores = logits.float()
        highest = scores.amax(dim=-1, keepdim=True)
        normaliser = (scores - highest).exp().sum(dim=-1, keepdim=True)
        chosen = torch.arange(logits.shape[1], device=logits.device) == targets  # (rows, V)
        total += (normaliser.log() + highest - torch.where(chosen, scores, 0.0).sum(dim=-1, keepdim=True)).sum()
        return ((scores - highest).exp() / normaliser - chosen.float()).to(logits.dtype)
    for part, y in zip(logits.split(at_a_time), targets.split(at_a_time), strict=True):
        scores = part.float()
        scores -= scores.amax(dim=-1, keepdim=True)
        total -= scores.gather(1, y).sum()
        normaliser = scores.exp_().sum(dim=-1, keepdim=True)
        total += normaliser.log().sum()
        if not slopes:
            continue
        scores /= normaliser
        scores.scatter_add_(1, y, torch.full_like(y, -1, dtype=scores.dtype))
        if scores is not part:
            part.copy_(scores)
    return logits


def _loss_alone(x: Tensor, w: Tensor, targets: Tensor, rows: int, at_a_time: int) -> Tensor:
    """The loss where nobody asks for gradients: a third of the products."""
    total = torch.zeros((), dtype=torch.float32, device=x.device)
    for start in range(0, x.shape[0], rows):
        chunk = slice(start, start + rows)
        _slopes(x[chunk], w, targets[chunk, None], total, at_a_time, slopes=False)
    return total / x.shape[0]


def rows_of_chunk(count: int, most: int) -> int:
    """Rows of a chunk: a multiple of ``TILE`` where ``most`` allows it, and if possible such that chunks are equal: one kernel does all."""
    if count <= most:
        return max(1, count)
    even = range(most - most % TILE, most // 2, -TILE)
    return next((rows for rows in even if count % rows == 0), max(even, default=max(1, most)))


def chunk_bytes_of(kind: str, compiled: bool) -> int:
    """Bytes that a chunk's logits would have in float32 on a device of this ``kind``, a name of torch's."""
    return COMPILED_CHUNK_BYTES if compiled and kind != "cpu" else CHUNK_BYTES


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int | None = None, cached_bytes: int | None = None
) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T`` against ``targets``, a chunk of rows at a time.

    Shapes: ``hidden`` (N, C), ``weight`` (V, C), ``targets`` (N,) int64; returns a float32 scalar. Under autocast the products run in
    autocast's type; softmax and sums are float32 always. Without gradient mode only the loss is computed. In float32 a chunk's logits would
    have ``chunk_bytes``, or what :func:`chunk_bytes_of` says. Of them ``cached_bytes`` go through the softmax at a time: if not given, what
    fits into the cache of a CPU, and the chunk on an accelerator. Torch's own chunked loss needs a newer release than this package asks
    for, and leaves compiled graphs.
    """
    kind, compiling = hidden.device.type, torch.compiler.is_compiling()
    chunk_bytes = chunk_bytes or chunk_bytes_of(kind, compiling)
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    row_bytes = 4 * weight.shape[0]
    rows = rows_of_chunk(hidden.shape[0], chunk_bytes // row_bytes)
    if cached_bytes is None:
        in_parts = kind == "cpu" and not compiling
        cached_bytes = CACHED_BYTES * torch.get_num_threads() if in_parts else chunk_bytes
    at_a_time = max(1, cached_bytes // row_bytes)
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    with torch.autocast(kind, enabled=False):
        if not wanted:
            return _loss_alone(hidden.to(dtype), weight.to(dtype), targets, rows, at_a_time)
        return _LinearCrossEntropy.apply(hidden, weight, targets, rows, at_a_time, dtype)


Recompute = Literal["off", "selective", "full"]
"""What is computed again in the backward pass instead of being kept: nothing; what lies between matrix products and attention (norms,
GELU, sums: next to no FLOPs); or whole layers."""

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.linear.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._efficient_attention_forward.default,  # of sequences that devices divide
    _aten._scaled_dot_product_cudnn_attention.default,
}
"""Operators whose results selective recomputation keeps."""
INITIAL_STD = 0.02


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
    recompute: Recompute = "off"
    half_residual: bool = False
    """Whether hidden states between the layers have autocast's type instead of float32."""


def parameter_count(config: GPTConfig) -> int:
    """Trainable parameters in closed form; a tied head counts once."""
    C, L = config.width, config.layers
    norm = 2 * C
    block = 2 * norm + 12 * C * C + (3 + 1 + 4 + 1) * C
    embeddings = config.vocab_size * C * (1 if config.tied_head else 2)
    positions = config.sequence_length * C if config.positions == "learned" else 0
    return embeddings + positions + L * block + norm


def flops_per_token(config: GPTConfig, *, causal: bool = False) -> float:
    """Training FLOPs per token, forward and backward: ``6 * P + 12 * L * C * T``.

    P counts the weights of matrix products: ``12 * L * C^2`` in the blocks and ``V * C`` in the head (once, tied or not); embedding
    look-ups cost nothing. The second term is attention's two products over the whole T x T square, so that the figure compares with the
    published ones: it is ``72 L C^2 (1 + T / 6C + V / 12LC)``, equation 3 of Narayanan et al. 2021 ("Efficient large-scale language
    model training on GPU clusters using Megatron-LM") without its recomputed forward pass. ``causal`` counts only what a causal mask
    leaves: a token sees (T + 1) / 2 tokens on average.
    """
    seen = (config.sequence_length + 1) / 2 if causal else config.sequence_length
    matmul_parameters = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    return 6.0 * matmul_parameters + 12.0 * config.layers * config.width * seen


def hardware_flops_per_token(config: GPTConfig, *, stops_early: bool = True) -> float:
    """What the device really does per token: :func:`flops_per_token`, and under full recomputation the layers' forward pass once more.

    That is ``24 C^2 + 4 C T`` per layer, in all equation 3 of Narayanan et al. 2021, ``96 L C^2 (1 + T / 6C + V / 16LC)``. Torch
    ``stops_early``, where nothing more is needed, which spares the MLP's second product. Selective recomputation repeats no matrix product.
    """
    again = (16.0 if stops_early else 24.0) * config.width**2 + 4.0 * config.width * config.sequence_length
    return flops_per_token(config) + (config.layers * again if config.recompute == "full" else 0.0)


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


def initial_value(config: GPTConfig, seed: int, name: str, shape: Sequence[int], device: torch.device) -> Tensor:
    """What a parameter starts from. It depends on seed and name only, so that every division of the model starts alike.

    Normal weights of 0.02; the layers that write into the residual stream are scaled by 1/sqrt(2 L), as GPT-2 does; biases 0, norms 1.
    """
    if name.endswith("bias"):
        return torch.zeros(*shape, device=device)
    if "norm" in name:
        return torch.ones(*shape, device=device)
    inward = name.endswith(("attention.out.weight", "mlp_down.weight"))
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(device).manual_seed(number)
    std = INITIAL_STD / math.sqrt(2 * config.layers) if inward else INITIAL_STD
    return torch.empty(*shape, device=device).normal_(std=std, generator=generator)


def _keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of whole sequences: each (B, H, T, D) -> (B, H, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.attend: Attend = causal_attention

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        qkv = self.qkv(x)  # (B, T, 3C), head by head: whoever holds some of the rows holds whole heads
        B, T, _ = qkv.shape
        q, k, v = qkv.view(B, T, -1, 3, self.head_width).permute(3, 0, 2, 1, 4)  # each (B, H, T, D)
        if rotary is not None:
            cos, sin = rotary[0][:T], rotary[1][:T]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = self.attend(q, k, v)  # (B, H, T, D)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Norm(nn.LayerNorm):
    """Layer normalisation by weights in float32, also where FSDP has gathered them in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        return F.layer_norm(x, self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C = config.width
        self.norm_attention = Norm(C)
        self.attention = Attention(config)
        self.norm_mlp = Norm(C)
        self.mlp_up = nn.Linear(C, 4 * C)
        self.mlp_down = nn.Linear(4 * C, C)
        self._recompute = config.recompute

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        if self._recompute == "off":
            return self._layer(x, rotary)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a layer is random
        if self._recompute == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(self._layer, x, rotary, **options)

    def _layer(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm_attention(x), rotary)
        return x + self.mlp_down(F.gelu(self.mlp_up(self.norm_mlp(x)), approximate="tanh"))


Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]
"""Mean cross-entropy from the head, the hidden states (B, T, C) and the targets (B, T)."""


def chunked_loss(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """The loss of a head that one device holds, some rows of logits at a time."""
    return linear_cross_entropy(hidden.flatten(0, 1), head.weight, targets.flatten())


class GPT(nn.Module):
    """The network, or a range of its layers: the embedding belongs to the first, final norm and head to the last.

    ``forward`` gives the loss, or the hidden states where the range does not reach the end.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig, layers: range | None = None) -> None:
        super().__init__()
        self.config = config
        layers = range(config.layers) if layers is None else layers
        first, last, C = layers.start == 0, layers.stop == config.layers, config.width
        self.embedding = nn.Embedding(config.vocab_size, C) if first else None
        self.positions = nn.Embedding(config.sequence_length, C) if first and config.positions == "learned" else None
        self.blocks = nn.ModuleDict({str(layer): Block(config) for layer in layers})
        self.norm = Norm(C) if last else None
        self.head = nn.Linear(C, config.vocab_size, bias=False) if last else None
        self.loss: Loss = chunked_loss
        self.places: Tensor | None = None
        """Which tokens of each sequence the inputs are, int64; ``None``: all."""
        if config.positions == "rotary":
            self.register_buffer("cos", torch.empty(config.sequence_length, C // config.heads), persistent=False)
            self.register_buffer("sin", torch.empty(config.sequence_length, C // config.heads), persistent=False)
        self.complete()
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.data.copy_(initial_value(config, torch.initial_seed(), name, parameter.shape, parameter.device))

    def complete(self) -> None:
        """Make the head the embedding's transpose where it is, and fill the rotary tables: what moving a model to a device undoes."""
        if self.config.tied_head and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight
        if self.config.positions == "rotary":
            for table, values in zip((self.cos, self.sin), rotary_table(*self.cos.shape), strict=True):
                table.copy_(values)

    def named_layers(self) -> dict[str, nn.Module]:
        return {f"blocks.{name}": block for name, block in self.blocks.items()}

    def share_sequence(self, places: Tensor, attend: Attend) -> None:
        """Work on the tokens at ``places`` of every sequence, with an attention that knows of the others."""
        self.places = places
        for block in self.blocks.values():
            assert isinstance(block, Block)
            block.attention.attend = attend

    def hidden(self, x: Tensor) -> Tensor:
        """States behind the last layer held: tokens (B, T) int64, or states (B, T, C) of the layer before -> (B, T, C)."""
        rotary = None
        if self.embedding is not None:
            x = self.embedding(x)  # (B, T, C)
            if self.positions is not None:
                x = x + self.positions(torch.arange(x.shape[1], device=x.device) if self.places is None else self.places)
            half = self.config.half_residual and torch.is_autocast_enabled(x.device.type)
            x = x.to(torch.get_autocast_dtype(x.device.type) if half else torch.float32)  # weights that FSDP gathers in 16 bits come so
        if self.config.positions == "rotary":
            rotary = (self.cos, self.sin) if self.places is None else (self.cos[self.places], self.sin[self.places])
        for block in self.blocks.values():
            x = block(x, rotary)
        return x if self.norm is None else self.norm(x)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats: tokens (B, T) and targets (B, T), both int64 -> scalar. Without the last layer, hidden states."""
        x = self.hidden(x)
        if self.head is None or targets is None:
            return x
        return self.loss(self.head, x, targets)
