"""The same GPT built by Megatron-Core, the library that CARAML's and EPICURE's language benchmarks used, for a second opinion.

Its local layer specification, without TransformerEngine. Attention alone is replaced, by torch's ``scaled_dot_product_attention``: the
library's own unfused one holds the whole T x T square and needs a GPU. Whole copies only; the engine trains them as it trains ours.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from caraml.base.errors import EnvironmentUnfitError
from caraml.workloads.gpt.model import GPTConfig

EXTRA = "pip install 'caraml[megatron]'"


class MegatronGPT(nn.Module):
    """Megatron's ``GPTModel`` behind the call of our own: tokens and targets, both (B, T), give the mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.inner = _build(config).to(torch.get_default_device())

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self.inner(tokens, positions, None, labels=targets).mean()


def _build(config: GPTConfig) -> nn.Module:
    try:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig
    except ModuleNotFoundError as error:
        raise EnvironmentUnfitError(f"params.backend = 'megatron' needs Megatron-Core, and {error.name} is missing", EXTRA) from error
    on_gpu = torch.get_default_device().type == "cuda"
    if config.positions == "rotary" and not on_gpu:
        raise EnvironmentUnfitError("Megatron-Core's rotary positions need a GPU", "params.positions = 'learned', or backend = 'torch'")
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # it has nobody to talk to
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=0, world_size=1, store=dist.HashStore())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    specification = get_gpt_layer_local_spec()
    specification.submodules.self_attention.submodules.core_attention = _core_attention()
    settings = TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        activation_func=functools.partial(F.gelu, approximate="tanh"),
        add_bias_linear=config.bias,
        use_cpu_initialization=True,  # the other way needs the library's own random states, and starts otherwise on every device
        hidden_dropout=0.0,
        attention_dropout=0.0,
        persist_layer_norm=False,  # a kernel of apex
        recompute_granularity="full" if config.recompute == "full" else None,
        recompute_method="uniform" if config.recompute == "full" else None,
        recompute_num_layers=1 if config.recompute == "full" else None,
    )
    return GPTModel(
        config=settings,
        transformer_layer_spec=specification,
        vocab_size=config.vocab_size,
        max_sequence_length=config.sequence_length,
        position_embedding_type="rope" if config.positions == "rotary" else "learned_absolute",
        share_embeddings_and_output_weights=config.tied_head,
    )


def _core_attention() -> type[nn.Module]:
    """Causal attention over (T, B, H, D), as Megatron's layers call it."""

    class CoreAttention(nn.Module):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__()

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
            q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # (B, H, T, D)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return out.permute(2, 0, 1, 3).flatten(2)  # (T, B, C)

    return CoreAttention
