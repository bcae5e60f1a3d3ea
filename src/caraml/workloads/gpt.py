"""GPT training: the next token of text, as in CARAML's LLM benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from caraml.results.record import Facts
from caraml.workloads.base import BuildContext, Task, Workload
from caraml.workloads.source import open_source

if TYPE_CHECKING:
    from caraml.data.loader import MapDataset
    from caraml.models.gpt import GPTConfig

PRESETS: dict[str, dict[str, Any]] = {
    "4M": {"width": 256, "layers": 4, "heads": 4, "sequence_length": 256, "vocab_size": 4096},
    "30M": {"width": 384, "layers": 6, "heads": 6, "sequence_length": 512, "vocab_size": 50257},
    "117M": {"width": 768, "layers": 12, "heads": 12, "sequence_length": 1024, "vocab_size": 50257},
    "800M": {"width": 2048, "layers": 16, "heads": 8, "sequence_length": 2048, "vocab_size": 50257, "positions": "rotary"},
    "800M-16heads": {"width": 2048, "layers": 16, "heads": 16, "sequence_length": 2048, "vocab_size": 50257, "positions": "rotary"},
}
"""Named sizes. 117M and 800M are CARAML's; 800M's heads are 256 wide, the slow corner of attention kernels, hence a variant with 128."""

LARGEST_TRAINED_VOCABULARY = 4096
"""Words of the tokenizer that is trained on the default corpus; four megabytes of text support no more."""


class Params(BaseModel):
    """Parameters of the `gpt` workload. A preset gives the sizes; each can be replaced."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: Literal["4M", "30M", "117M", "800M", "800M-16heads"] = "117M"
    width: int = Field(ge=8)
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    sequence_length: int = Field(ge=2)
    vocab_size: int = Field(ge=2, description="the tokenizer's; the embedding is padded to a multiple of 64")
    positions: Literal["learned", "rotary"] = "learned"
    tied_head: bool = True
    data: Literal["text", "synthetic", "synthetic-device"] = Field(
        "text", description="real text, random tokens made on the host by the loader, or random tokens already on the device"
    )
    corpus: str | None = Field(None, description="prefix of a .bin/.idx pair; without it, the Python standard library's sources")
    learning_rate: float = Field(6e-4, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip_norm: float = Field(1.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        sizes = PRESETS.get(values.get("preset", "117M"), PRESETS["117M"])
        return {**sizes, **values}

    @model_validator(mode="after")
    def _heads_divide(self) -> Params:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(f"rotary positions need an even head width, found {self.width // self.heads}")
        return self


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, AdamW (fused), and the stream of ``(tokens, targets)``, each (micro-batch, T) int64."""
    import torch

    from caraml.models.gpt import GPT, flops_per_token, parameter_count

    params, config = ctx.params, _config(ctx.params)
    with ctx.phase("data"):
        source = open_source(_dataset(params, ctx.seed), ctx, workers=None, resident=params.data == "synthetic-device")
    torch.manual_seed(ctx.seed)
    with torch.device(ctx.device):
        model = GPT(config)
    optimizer = torch.optim.AdamW(_groups(model, params), lr=params.learning_rate, betas=(0.9, 0.95), fused=True)
    facts = Facts(
        item="token",
        items_per_sample=params.sequence_length,
        parameters=parameter_count(config),
        flops_per_item=flops_per_token(config),
        flops_formula="6 * (12 * layers * width^2 + vocabulary * width) + 12 * layers * width * sequence length; "
        "forward and backward, head once, attention not discounted for its causal mask",
        bytes_per_sample=8 * (params.sequence_length + 1),
        forward_flops_per_item=flops_per_token(config) / 3,
        samples_per_epoch=source.samples,
        data=source.description,
    )
    batches = ((batch[:, :-1], batch[:, 1:]) for batch in source.batches)
    return Task(
        model=model,
        optimizer=optimizer,
        batches=batches,
        loss=lambda net, batch: net(*batch),
        facts=facts,
        clip_norm=params.clip_norm,
        close=source.close,
    )


def _dataset(params: Params, seed: int) -> MapDataset:
    from caraml.data.synthetic import synthetic_tokens
    from caraml.data.text import default_text_corpus
    from caraml.data.tokens import IndexedTokens, TokenSamples

    if params.data != "text":
        return synthetic_tokens(params.vocab_size, params.sequence_length, seed=seed)
    prefix = Path(params.corpus) if params.corpus else default_text_corpus(min(params.vocab_size, LARGEST_TRAINED_VOCABULARY)).prefix
    return TokenSamples(IndexedTokens(prefix), params.sequence_length, params.vocab_size)


def _config(params: Params) -> GPTConfig:
    from caraml.models.gpt import GPTConfig, padded_vocabulary

    return GPTConfig(
        vocab_size=padded_vocabulary(params.vocab_size),
        sequence_length=params.sequence_length,
        width=params.width,
        layers=params.layers,
        heads=params.heads,
        positions=params.positions,
        tied_head=params.tied_head,
    )


def _groups(model: Any, params: Params) -> list[dict[str, Any]]:
    """Weight decay on matrices only, not on biases and norms, as GPT training has it since GPT-3."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() >= 2], "weight_decay": params.weight_decay},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "weight_decay": 0.0},
    ]


WORKLOAD = Workload(title="GPT, next-token prediction", params=Params, build=build)
