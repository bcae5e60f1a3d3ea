"""Megatron-Core, the library that CARAML's and EPICURE's language benchmarks used, for a second opinion: the same GPT built by it, and a
corpus's samples in the order of its own data set.

The network has its local layer specification, without TransformerEngine, and its own tensor parallelism. Attention alone is replaced, by
torch's ``scaled_dot_product_attention``: the library's own unfused one holds the whole T x T square and needs a GPU. The engine trains
copies and pipelines of it as it trains ours, from the same starting values. Its sequence parallelism and its pipeline schedules allocate on
GPUs only.

Megatron-LM shuffles the documents of all epochs that a run needs, cuts what they are together into samples, and shuffles those. So the
order depends on the seed, the sequence length, the part of the corpus that is trained on, and how often the run goes through that.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.workloads.gpt.model import GPTConfig, causal_attention, initial_value
from caraml.workloads.gpt.tokens import IndexedTokens, TokenSamples

_NAMES = {
    "embedding.word_embeddings": "embedding",
    "embedding.position_embeddings": "positions",
    "decoder.final_layernorm": "norm",
    "output_layer": "head",
    "input_layernorm": "norm_attention",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "norm_mlp",
    "mlp.linear_fc1": "mlp_up",
    "mlp.linear_fc2": "mlp_down",
}
"""Megatron's names of modules, within a layer or outside of them, and ours."""


class MegatronGPT(nn.Module):
    """Megatron's ``GPTModel``, or a range of its layers, behind the call of our own.

    Tokens (B, T) or the states (B, T, C) of the layer before, and targets (B, T), give the mean loss; without the last layer, states.
    """

    def __init__(self, config: GPTConfig, device: torch.device, seed: int, layers: range | None = None, tp: int = 1) -> None:
        super().__init__()
        self.layers = range(config.layers) if layers is None else layers
        self.first, self.last = self.layers.start == 0, self.layers.stop == config.layers
        self.inner = self._build(config, device, tp).to(device)
        for name, parameter in self.inner.named_parameters():
            self._start(config, seed, name, parameter, tp)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean cross-entropy in nats, or hidden states."""
        positions = None
        if self.first:
            positions = torch.arange(x.shape[1], device=x.device).expand_as(x)
        else:
            self.inner.set_input_tensor(x.transpose(0, 1))  # Megatron's are (T, B, C)
        out = self.inner(x if self.first else None, positions, None, labels=targets)
        return out.mean() if self.last else out.transpose(0, 1).contiguous()

    def our_name(self, name: str) -> str:
        """Our name of a parameter of ``inner``."""
        module, kind = name.rsplit(".", 1)
        if module.startswith("decoder.layers."):
            layer, module = module.removeprefix("decoder.layers.").split(".", 1)
            return f"blocks.{self.layers[int(layer)]}.{_NAMES[module]}.{kind}"
        return f"{_NAMES[module]}.{kind}"

    def _start(self, config: GPTConfig, seed: int, name: str, parameter: nn.Parameter, tp: int) -> None:
        """Every device draws the whole value and takes its part: Megatron's layout of heads is ours."""
        axis = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = [size * (tp if number == axis else 1) for number, size in enumerate(parameter.shape)]
        whole = initial_value(config, seed, self.our_name(name), shape, parameter.device)
        with torch.no_grad():
            parameter.copy_(whole if axis < 0 else whole.chunk(tp, axis)[dist.get_rank() % tp])

    def _build(self, config: GPTConfig, device: torch.device, tp: int) -> Any:
        try:
            from megatron.core import parallel_state
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.transformer.transformer_config import TransformerConfig
        except ModuleNotFoundError as error:
            raise _missing("backend", error) from error
        on_gpu = device.type == "cuda"
        if not dist.is_initialized():
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"  # it has nobody to talk to
            dist.init_process_group("nccl" if on_gpu else "gloo", rank=0, world_size=1, store=dist.HashStore())
        if parallel_state.model_parallel_is_initialized() and parallel_state.get_tensor_model_parallel_world_size() != tp:
            parallel_state.destroy_model_parallel()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tp, 1)  # the innermost axis of the grid, as in ours; a stage is a model of its own
        specification = get_gpt_layer_local_spec()
        specification.submodules.self_attention.submodules.core_attention = _core_attention()
        settings = TransformerConfig(
            num_layers=len(self.layers),
            hidden_size=config.width,
            num_attention_heads=config.heads,
            tensor_model_parallel_size=tp,
            activation_func=functools.partial(F.gelu, approximate="tanh"),
            use_cpu_initialization=True,  # the other way needs the library's own random states; it also tells which parameters are parts
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
            pre_process=self.first,
            post_process=self.last,
            position_embedding_type="rope" if config.positions == "rotary" else "learned_absolute",
            share_embeddings_and_output_weights=config.tied_head,
        )


def named_layers(stage: nn.Module) -> dict[str, nn.Module]:
    assert isinstance(stage, MegatronGPT)
    return {f"inner.decoder.layers.{index}": layer for index, layer in enumerate(stage.inner.decoder.layers)}


def _core_attention() -> type[nn.Module]:
    """Causal attention over (T, B, H, D), as Megatron's layers call it."""

    class CoreAttention(nn.Module):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__()

        def forward(self, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
            q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))  # (B, H, T, D)
            out = causal_attention(q, k, v)
            return out.permute(2, 0, 1, 3).flatten(2)  # (T, B, C)

    return CoreAttention


_NO_CACHE = ""
"""As the folder of the library's caches: every rank builds its index itself, and nothing is written; ``None`` is one beside the corpus."""


class MegatronSamples(TokenSamples):
    """A map-style data set whose sample i is Megatron's i-th; the loader must not shuffle it again. There are more than
    ``samples_per_epoch``, those of one pass over the part of the corpus that is trained on, if a run needs several passes."""

    in_order = True

    def __init__(
        self, corpus: IndexedTokens, sequence_length: int, vocab_size: int, *, seed: int, split: str, run_samples: int | None = None
    ) -> None:
        """Build the index, the same on every rank, of Megatron-LM's ``--seed`` and ``--split``, of whose parts the first is taken; the
        corpus's sequences are its documents. ``run_samples``: that the other run asks for; ``None`` for at most one epoch. Raises
        ``InputError`` if the part of the corpus is shorter than one sample, and ``EnvironmentUnfitError`` without Megatron-Core."""
        super().__init__(corpus, sequence_length, vocab_size)
        try:
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split
        except ModuleNotFoundError as error:
            raise _missing("order", error) from error
        logging.getLogger(GPTDataset.__module__).setLevel(logging.ERROR)  # it warns that it writes no cache
        path = str(corpus.prefix)
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([path], None),
            split=split,
            path_to_cache=_NO_CACHE,
            tokenizer=SimpleNamespace(eod=None, vocab_size=None, unique_identifiers={}),  # only masks, which we have none of, ask it
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        first, last = (round(share * float(len(corpus))) for share in config.split_matrix[0])
        tokens = int(corpus.index.lengths[first:last].sum(dtype=np.int64))
        if tokens <= sequence_length:
            found = f"{path}: found {tokens} tokens in the first part of order_split {split!r}; expected at least {sequence_length + 1}"
            raise InputError(found, "prepare more text, shorten the sequence, or use params.order_split = '100,0,0'")
        self.samples_per_epoch = (tokens - 1) // sequence_length
        self._dataset = GPTDataset(IndexedDataset(path), path, np.arange(first, last, dtype=np.int32), run_samples, Split.train, config)
        self._count = len(self._dataset)
        own = {"split": split, "split_documents": last - first, "split_tokens": tokens}
        self._facts = own | {"order": f"megatron-core {metadata.version('megatron-core')}"}

    def _ids(self, position: int) -> npt.NDArray[np.int64]:
        sample = self._dataset[position]
        return np.append(sample["tokens"].numpy(), sample["labels"][-1].numpy())

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self._facts}


def _missing(parameter: str, error: ModuleNotFoundError) -> EnvironmentUnfitError:
    said = f"params.{parameter} = 'megatron' needs Megatron-Core, and {error.name} is missing"
    return EnvironmentUnfitError(said, "pip install 'caraml[megatron]'")
