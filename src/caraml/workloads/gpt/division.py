"""How a GPT is divided among devices: which layers a stage has, and what tensor parallelism does to each.

The scheme is Megatron's (Shoeybi et al. 2019, Korthikanti et al. 2022) in the words of torch's ``parallelize_module``: the first matrix of
a pair is divided by columns, the second by rows; heads, the MLP's inner width and the vocabulary are what is shared. With sequence
parallelism, norms and residual sums run on a part of the sequence.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel

from caraml.suite.placement import layers_of_stage
from caraml.workloads.base import Attend
from caraml.workloads.gpt.model import GPT, Block, GPTConfig


def stage_on_meta(config: GPTConfig, stage: int, stages: int) -> GPT:
    """Stage ``stage`` of ``stages``, without memory."""
    with torch.device("meta"):
        return GPT(config, layers_of_stage(config.layers, stage, stages))


def named_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The layers of a stage."""
    assert isinstance(model, GPT)
    return {f"blocks.{name}": block for name, block in model.blocks.items()}


def complete(model: torch.nn.Module) -> None:
    """Tie the head again and fill the rotary tables."""
    assert isinstance(model, GPT)
    model.complete()


def share_sequence(model: torch.nn.Module, places: torch.Tensor, attend: Attend) -> None:
    """Have a stage work on the tokens at ``places`` of every sequence, with an attention that knows of the others."""
    assert isinstance(model, GPT)
    model.places = places
    for block in model.blocks.values():
        assert isinstance(block, Block)
        block.attention.attend = attend


def tensor_plan(model: torch.nn.Module, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Style of every module of a stage that tensor parallelism touches."""
    assert isinstance(model, GPT)
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
