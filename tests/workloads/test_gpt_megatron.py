"""Megatron-Core's GPT against ours with the same weights, as far as it goes without a GPU, and what is said where it does not go."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from caraml.base.errors import EnvironmentUnfitError
from caraml.suite.model import Placement
from caraml.suite.placement import misfit
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.megatron_core import MegatronGPT
from caraml.workloads.gpt.model import GPT, GPTConfig
from tests.conftest import MakePoint

SMALL = GPTConfig(vocab_size=128, sequence_length=32, width=48, layers=2, heads=4)
NAMES = {
    "norm_attention": "input_layernorm",
    "attention.qkv": "self_attention.linear_qkv",
    "attention.out": "self_attention.linear_proj",
    "norm_mlp": "pre_mlp_layernorm",
    "mlp_up": "mlp.linear_fc1",
    "mlp_down": "mlp.linear_fc2",
}


@pytest.fixture
def megatron() -> Iterator[None]:
    """Leaves no process group behind."""
    core = pytest.importorskip("megatron.core")
    yield
    core.parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def theirs(name: str) -> str:
    """Megatron's name of one of our parameters."""
    ends = {"embedding.weight": "embedding.word_embeddings.weight", "positions.weight": "embedding.position_embeddings.weight"}
    if name in ends:
        return f"inner.{ends[name]}"
    if name.startswith("norm."):
        return f"inner.decoder.final_layernorm.{name[5:]}"
    layer, module = name.removeprefix("blocks.").split(".", 1)
    module, kind = module.rsplit(".", 1)
    return f"inner.decoder.layers.{layer}.{NAMES[module]}.{kind}"


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
def test_same_weights_same_loss_same_gradients() -> None:
    torch.manual_seed(0)
    ours, other = GPT(SMALL), MegatronGPT(SMALL)
    parameters = dict(other.named_parameters())
    pairs = {theirs(name): parameter for name, parameter in ours.named_parameters()}
    assert pairs.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameters[name].copy_(parameter)
    tokens = torch.randint(128, (3, 33))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, other)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for name, parameter in pairs.items():
        found, truth = parameters[name].grad, parameter.grad
        assert found is not None and truth is not None and torch.allclose(found, truth, atol=1e-5), name


@pytest.mark.usefixtures("megatron")
def test_rotary_positions_need_a_gpu() -> None:
    with pytest.raises(EnvironmentUnfitError, match="need a GPU"):
        MegatronGPT(GPTConfig(128, 32, 48, 2, 4, positions="rotary"))


def test_without_the_library_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(EnvironmentUnfitError, match=r"caraml\[megatron\]"):
        MegatronGPT(SMALL)


def test_whole_copies_only(make_point: MakePoint) -> None:
    params = Params.model_validate({"preset": "4M", "backend": "megatron"})
    assert "whole copies only" in (misfit(make_point(workload="gpt", devices=2, placement=Placement(tp=2)), params.model_shape()) or "")
    with pytest.raises(ValueError, match="'off' or 'full'"):
        Params.model_validate({"preset": "4M", "backend": "megatron", "recompute": "selective"})
