"""GPT training: the next token of text, as in CARAML's LLM benchmark. Its parameters; :mod:`caraml.workloads.gpt.training` has the rest."""

from __future__ import annotations

import math
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.toml import FrozenModel
from caraml.suite.model import Point
from caraml.suite.placement import ModelShape
from caraml.workloads.base import Workload, later

PRESETS: dict[str, dict[str, Any]] = {
    "4M": {"width": 256, "layers": 4, "heads": 4, "sequence_length": 256, "vocab_size": 4096},
    "30M": {"width": 384, "layers": 6, "heads": 6, "sequence_length": 512, "vocab_size": 50257},
    "117M": {"width": 768, "layers": 12, "heads": 12, "sequence_length": 1024, "vocab_size": 50257},
    "800M": {"width": 2048, "layers": 16, "heads": 8, "sequence_length": 2048, "vocab_size": 50257, "positions": "rotary"},
    "800M-16heads": {"width": 2048, "layers": 16, "heads": 16, "sequence_length": 2048, "vocab_size": 50257, "positions": "rotary"},
    "857M": {"width": 1152, "layers": 50, "heads": 18, "sequence_length": 2048, "vocab_size": 50257},
    "13B": {"width": 5120, "layers": 40, "heads": 32, "sequence_length": 2048, "vocab_size": 50257, "tied_head": False},
    "175B": {"width": 12288, "layers": 96, "heads": 96, "sequence_length": 2048, "vocab_size": 50257, "tied_head": False},
}
"""Named sizes. 117M, 800M, 13B and 175B are CARAML's; 800M's heads are 256 wide, the slow corner of attention kernels, hence a variant with
128. Of EPICURE's 857M model only the number of parameters is published: these sizes give it with GPT-3's architecture. 13B and 175B are
made for pipelines, whose first and last stage cannot hold the same weight, so their heads are not tied."""

LOWEST_RATE = 0.1
"""Share of the learning rate that a cosine ends at."""


class Params(FrozenModel):
    """Parameters of the `gpt` workload. A preset gives the sizes; each can be replaced."""

    preset: Literal["4M", "30M", "117M", "800M", "800M-16heads", "857M", "13B", "175B"] = Field(
        "117M", description="named sizes, each of which can be replaced by its own key"
    )
    width: int = Field(ge=8, description="width of the hidden states; a multiple of `heads`")
    layers: int = Field(ge=1, description="number of transformer blocks")
    heads: int = Field(ge=1, description="number of attention heads")
    sequence_length: int = Field(ge=2, description="tokens of a sample")
    vocab_size: int = Field(ge=2, description="the tokenizer's; the embedding is padded to a multiple of 64")
    positions: Literal["learned", "rotary"] = Field(
        "learned", description="how a token's place is told: a learned table, or rotary embedding"
    )
    tied_head: bool = Field(True, description="the head shares its weights with the embedding of the tokens")
    backend: Literal["torch", "megatron"] = Field(
        "torch", description="whose network: ours, or Megatron-Core's, which fsdp, sp and cp do not divide (needs caraml[megatron])"
    )
    data: Literal["text", "synthetic", "synthetic-device"] = Field(
        "text", description="real text, random tokens made on the host by the loader, or random tokens already on the device"
    )
    corpus: str | None = Field(None, description="prefix of a .bin/.idx pair; without it, the Python standard library's sources")
    order: Literal["caraml", "megatron"] = Field(
        "caraml", description="of a corpus's samples: ours, or that of Megatron-LM with the same seed (needs caraml[megatron])"
    )
    order_split: str = Field(
        "969,30,1",
        description="order megatron: Megatron-LM's `--split`, of whose parts the first is trained on; the default is Megatron-LM's",
    )
    order_samples: int | None = Field(
        None, ge=1, description="order megatron: `--train-iters` times `--global-batch-size` of the other run; absent: at most an epoch"
    )
    recompute: Literal["off", "selective", "full"] = Field(
        "off", description="what the backward pass computes again: nothing, all but matrix products and attention, or whole layers"
    )
    learning_rate: float = Field(6e-4, gt=0, description="highest value, which the warm-up ends at and the decay begins at")
    warm_up_steps: int = Field(0, ge=0, description="steps over which the learning rate rises to its full value")
    decay_steps: int | None = Field(
        None, ge=1, description="step at which a cosine has brought the learning rate to a tenth; absent: constant"
    )
    weight_decay: float = Field(0.1, ge=0, description="of AdamW, for matrices only")
    clip_norm: float = Field(1.0, gt=0, description="largest norm of all gradients together")
    start_from: str | None = Field(None, description="folder of a checkpoint to start from, taken at any placement")
    save_to: str | None = Field(None, description="folder for a checkpoint after the last step; mode train only")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        sizes = PRESETS.get(str(values.get("preset")), PRESETS["117M"])
        return {**sizes, **values}

    @field_validator("order_split", mode="before")
    @classmethod
    def _shares(cls, value: object) -> str:
        """One split has one spelling: it is part of the point's key."""
        split = re.sub(r"\s", "", str(value))
        if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}", split):
            raise ValueError("expected one to three shares such as 969,30,1")
        return split

    @model_validator(mode="after")
    def _heads_divide(self) -> Params:
        if self.width % self.heads:
            raise ValueError(f"a width that {self.heads} heads divide, not {self.width}")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(f"rotary positions need an even head width, found {self.width // self.heads}")
        if self.backend == "megatron" and self.recompute == "selective":
            raise ValueError("backend megatron recomputes whole layers or nothing: expected recompute 'off' or 'full'")
        if self.order == "megatron" and self.data != "text":
            raise ValueError(f"order megatron is of a corpus, found data {self.data!r}: expected data 'text', or order 'caraml'")
        if self.order == "caraml" and (self.order_split, self.order_samples) != ("969,30,1", None):
            raise ValueError("order_split and order_samples are of Megatron-LM's order: expected order = 'megatron' beside them")
        if not float(self.order_split.split(",")[0]):
            raise ValueError(f"order_split {self.order_split!r} leaves nothing to train on: expected a first part above 0")
        if self.decay_steps is not None and self.decay_steps <= self.warm_up_steps:
            raise ValueError(f"decay_steps ({self.decay_steps}) must be above warm_up_steps ({self.warm_up_steps})")
        return self

    @model_serializer(mode="wrap")
    def _without_an_order_of_ours(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The same work has the same key as before there was another order."""
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if self.order != "caraml" or not name.startswith("order")}

    @property
    def uncompiled(self) -> str | None:
        """Why the model cannot be compiled; ``None`` if it can."""
        return None if self.recompute == "off" else "torch's compiled layers cannot be recomputed, and params.recompute asks for that"

    @property
    def software(self) -> str | None:
        """What computes besides torch, with its version where it is installed."""
        if self.backend == "torch" and self.order == "caraml":
            return None
        try:
            return f"megatron-core {metadata.version('megatron-core')}"
        except metadata.PackageNotFoundError:
            return "megatron-core"

    @property
    def checkpoint_facts(self) -> dict[str, Any]:
        """What a checkpoint of the model must agree in with another run that takes it up."""
        names = ["backend", "width", "layers", "heads", "positions", "tied_head"]
        names += ["sequence_length"] if self.positions == "learned" else []
        return {name: getattr(self, name) for name in names} | {"padded vocabulary": self.model_shape().vocabulary}

    def unfit(self, point: Point) -> str | None:
        """Why Megatron-Core cannot do a point's work; ``None`` if it can, and for our own network."""
        if self.order == "megatron" and point.mode == "inference":
            return "order megatron is of training: expected mode = 'train' or 'data', or params.order = 'caraml'"
        if self.order == "megatron" and not 0 <= point.seed < 2**32:
            return f"order megatron draws from seeds of 32 bits: found {point.seed}, expected seed = 0 to 4294967295"
        if self.backend == "torch":
            return None
        on_cpu, kept = point.device_class == "cpu", [name for name in ("start_from", "save_to") if getattr(self, name)]
        refused = {
            "computes in fp32 only on CPUs: expected precision = 'fp32'": on_cpu and point.precision != "fp32",
            "needs a GPU for rotary positions: expected params.positions = 'learned'": on_cpu and self.positions == "rotary",
            "needs a GPU to recompute: expected params.recompute = 'off'": on_cpu and self.recompute != "off",
            "keeps hidden states in fp32: expected half_residual = false": point.knobs.half_residual,
            f"has checkpoints of whole copies only: leave out params.{' and params.'.join(kept)}, or tp and pp": (
                bool(kept) and point.placement.split
            ),
        }
        found = next((reason for reason, is_so in refused.items() if is_so), None)
        return found and f"Megatron-Core {found}, or take params.backend = 'torch'"

    def model_shape(self) -> ModelShape:
        """What a placement must know of the model."""
        padded = -(-self.vocab_size // 64) * 64
        return ModelShape(self.layers, self.heads, padded, self.sequence_length, self.tied_head, self.backend == "torch")

    def rate(self, step: int) -> float:
        """Factor of the learning rate at a step from 0: linear warm-up, then a cosine down to a tenth (Brown et al. 2020, appendix B)."""
        if step < self.warm_up_steps:
            return (step + 1) / self.warm_up_steps
        if self.decay_steps is None:
            return 1.0
        done = min((step - self.warm_up_steps) / (self.decay_steps - self.warm_up_steps), 1.0)
        return LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * done)) / 2


def check(params: Params, folder: Path) -> None:
    """See that Megatron-Core is there where it is asked for, and that the corpus is one whose tokens the model has."""
    from caraml.workloads.gpt.tokens import IndexedTokens, TokenSamples

    for name in ("backend", "order"):
        if getattr(params, name) == "megatron" and find_spec("megatron") is None:
            found = f"params.{name} = 'megatron' needs megatron-core, not installed here"
            raise EnvironmentUnfitError(found, "pip install 'caraml[megatron]'")
    if params.corpus is not None and params.data == "text":
        TokenSamples(IndexedTokens(folder / params.corpus), params.sequence_length, params.vocab_size)[0]


WORKLOAD = Workload(title="GPT, next-token prediction", params=Params, build=later(f"{__name__}.training", "build"), check=check)
