"""What trains a GPT: batches, network, AdamW, what a step moves, and how the model is divided."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from caraml.data.loader import MapDataset
from caraml.metrics.model import Facts
from caraml.suite.model import Knobs
from caraml.suite.placement import layers_of_stage
from caraml.workloads.base import BuildContext, Division, Task, given_path, open_source
from caraml.workloads.flops import ADAMW, Traffic, traffic
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.model import GPT, GPTConfig, flops_per_token, hardware_flops_per_token, initial_value, parameter_count
from caraml.workloads.gpt.text import default_text_corpus
from caraml.workloads.gpt.tokens import IndexedTokens, TokenSamples, synthetic_tokens

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

LARGEST_TRAINED_VOCABULARY = 4096
"""Words of the tokenizer that is trained on the default corpus; four megabytes of text support no more."""


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, AdamW, and the stream of ``(tokens, targets)``, each (micro-batch, T) int64."""
    params, config = ctx.params, config_of(ctx.params, ctx.knobs)
    with ctx.phase("data"):
        source = open_source(_dataset(params, ctx.seed), ctx, workers=None, resident=params.data == "synthetic-device")
    torch.manual_seed(ctx.seed)
    with torch.device("meta" if ctx.divided else ctx.device):
        model: torch.nn.Module = GPT(config) if params.backend == "torch" or ctx.divided else _megatron(config, ctx)
    facts = Facts(
        item="token",
        **_traffic_facts(config, ctx),
        items_per_sample=params.sequence_length,
        parameters=parameter_count(config),
        flops_per_item=flops_per_token(config),
        flops_formula="6 * (12 * layers * width^2 + vocabulary * width) + 12 * layers * width * sequence length; "
        "forward and backward, head once, attention not discounted for its causal mask",
        bytes_per_sample=8 * (params.sequence_length + 1),
        forward_flops_per_item=flops_per_token(config) / 3,
        causal_flops_per_item=flops_per_token(config, causal=True),
        hardware_flops_per_item=hardware_flops_per_token(config, stops_early=params.backend == "torch"),
        samples_per_epoch=source.samples,
        data=source.description,
    )
    batches = ((batch[:, :-1], batch[:, 1:]) for batch in source.batches)
    return Task(
        model=model,
        optimizer=_optimizer([list(model.parameters())], params, None if ctx.divided else ctx.fused),
        batches=batches,
        loss=lambda net, batch: net(*batch),
        facts=facts,
        clip_norm=params.clip_norm,
        attention=(params.heads, params.sequence_length, params.width // params.heads),
        division=_division(config, params, ctx) if params.backend == "torch" else _megatron_division(config, params, ctx),
        rate=params.rate if params.warm_up_steps or params.decay_steps else None,
        start_from=params.start_from,
        save_to=params.save_to,
        close=source.close,
    )


def _megatron(config: GPTConfig, ctx: BuildContext[Params], layers: range | None = None) -> torch.nn.Module:
    from caraml.workloads.gpt.megatron_core import MegatronGPT

    return MegatronGPT(config, ctx.device, ctx.seed, layers, ctx.tp)


def _megatron_division(config: GPTConfig, params: Params, ctx: BuildContext[Params]) -> Division:
    from caraml.workloads.gpt.megatron_core import named_layers

    return dataclasses.replace(
        _division(config, params, ctx),
        stage=lambda index, count: _megatron(config, ctx, layers_of_stage(config.layers, index, count)),
        layers=named_layers,
        tensor_plan=None,
        complete=lambda stage: None,
        share_sequence=None,
    )


def _division(config: GPTConfig, params: Params, ctx: BuildContext[Params]) -> Division:
    return Division(
        stage=lambda index, count: stage_on_meta(config, index, count),
        layers=GPT.named_layers,
        tensor_plan=tensor_plan,
        complete=GPT.complete,
        initial_value=lambda name, shape, device: initial_value(config, ctx.seed, name, shape, device),
        optimizer=lambda lists: _optimizer(lists, params, ctx.fused),
        hidden=(config.sequence_length, config.width),
        share_sequence=GPT.share_sequence,
    )


def stage_on_meta(config: GPTConfig, stage: int, stages: int) -> GPT:
    """Stage ``stage`` of ``stages``, without memory."""
    with torch.device("meta"):
        return GPT(config, layers_of_stage(config.layers, stage, stages))


def tensor_plan(model: GPT, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Style of every module of a stage that tensor parallelism touches.

    The scheme is Megatron's (Shoeybi et al. 2019, Korthikanti et al. 2022) in the words of torch's ``parallelize_module``: the first matrix
    of a pair is divided by columns, the second by rows; heads, the MLP's inner width and the vocabulary are what is shared. With sequence
    parallelism, norms and residual sums run on a part of the sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

    outer = Shard(1) if sequence_parallel else Replicate()  # of hidden states between the pairs of matrices: (B, T, C)
    plan: dict[str, ParallelStyle] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    for index, name in enumerate(model.blocks):
        block = f"blocks.{name}"
        if sequence_parallel:
            if index == 0 and model.embedding is not None:  # tokens come whole; from here on everyone has a part of the sequence
                plan[block] = PrepareModuleInput(
                    input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None), use_local_output=True
                )
            plan |= {f"{block}.{norm}": SequenceParallel(use_local_output=True) for norm in ("norm_attention", "norm_mlp")}
        plan |= {f"{block}.{inward}": ColwiseParallel(input_layouts=outer) for inward in ("attention.qkv", "mlp_up")}
        plan |= {f"{block}.{outward}": RowwiseParallel(output_layouts=outer) for outward in ("attention.out", "mlp_down")}
    if sequence_parallel:
        plan["norm"] = SequenceParallel(use_local_output=True)
    plan["head"] = ColwiseParallel(input_layouts=outer, output_layouts=Shard(-1), use_local_output=False)
    held = dict(model.named_modules())
    return {name: style for name, style in plan.items() if held.get(name) is not None}


def _dataset(params: Params, seed: int) -> MapDataset:
    if params.data != "text":
        return synthetic_tokens(params.vocab_size, params.sequence_length, seed=seed)
    prefix = given_path(params.corpus) if params.corpus else default_text_corpus(min(params.vocab_size, LARGEST_TRAINED_VOCABULARY)).prefix
    if params.order == "megatron":
        from caraml.workloads.gpt.megatron_core import MegatronSamples

        further: dict[str, Any] = {"seed": seed, "split": params.order_split, "run_samples": params.order_samples}
        return MegatronSamples(IndexedTokens(prefix), params.sequence_length, params.vocab_size, **further)
    return TokenSamples(IndexedTokens(prefix), params.sequence_length, params.vocab_size)


def _traffic_facts(config: GPTConfig, ctx: BuildContext[Params]) -> dict[str, float]:
    """What a step moves; nothing where it is not estimated: what recomputation moves again, what a division sends instead, and what other
    networks than ours move."""
    if config.recompute != "off" or ctx.divided or ctx.params.backend != "torch":
        return {}
    return network_traffic(config).facts(ctx, ADAMW * parameter_count(config), config.sequence_length)


def network_traffic(config: GPTConfig) -> Traffic:
    """What forward and backward pass move. Counted for one and for two layers: every further one moves what the second does."""

    def of(layers: int) -> Traffic:
        with torch.device("meta"):
            model = GPT(dataclasses.replace(config, layers=layers, half_residual=False))  # there is no autocast there
        model.loss = lambda head, hidden, targets: F.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        return traffic(model, lambda samples: model(*[torch.empty(samples, config.sequence_length, dtype=torch.long, device="meta")] * 2))

    further = config.layers - 1
    return of(1).times(1 - further) + of(2).times(further)


def config_of(params: Params, knobs: Knobs | None = None) -> GPTConfig:
    """The network's sizes."""
    return GPTConfig(
        vocab_size=params.model_shape().vocabulary,
        sequence_length=params.sequence_length,
        width=params.width,
        layers=params.layers,
        heads=params.heads,
        positions=params.positions,
        tied_head=params.tied_head,
        recompute=params.recompute,
        half_residual=knobs is not None and knobs.half_residual,
    )


def _optimizer(lists: list[list[torch.nn.Parameter]], params: Params, fused: bool | None) -> torch.optim.Optimizer:
    """AdamW. Weight decay on matrices only, not on biases and norms, as GPT training has it since GPT-3."""
    groups = []
    for members in lists:
        for matrices, decay in ((True, params.weight_decay), (False, 0.0)):
            own = [parameter for parameter in members if (parameter.dim() >= 2) == matrices]
            groups += [{"params": own, "weight_decay": decay}] if own else []  # torch takes up no checkpoint with an empty group
    return torch.optim.AdamW(groups, lr=params.learning_rate, betas=(0.9, 0.95), fused=fused)
