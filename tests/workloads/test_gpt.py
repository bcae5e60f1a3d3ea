"""The GPT workload's parameters, presets and learning rate; FLOPs against the published formula."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from caraml.suite.placement import layers_of_stage
from caraml.workloads.flops import count_flops
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.model import GPT, GPTConfig, flops_per_token, hardware_flops_per_token, parameter_count
from caraml.workloads.gpt.training import config_of, stage_on_meta


def params(**values: object) -> Params:
    return Params.model_validate(values)


@pytest.mark.parametrize(
    ("preset", "count", "published"),
    [
        ("117M", 124_475_904, 117e6),
        ("800M", 908_759_040, 800e6),
        ("857M", 857_323_008, 857e6),
        ("13B", 13_111_183_360, 13e9),
        ("175B", 175_222_972_416, 175e9),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, count: int, published: float) -> None:
    """117M and 800M are names: GPT-2's "117M" has 124M, CARAML's "800M" 805M in its layers and 909M with the embedding."""
    config = config_of(params(preset=preset))
    assert parameter_count(config) == count
    assert sum(p.numel() for p in stage_on_meta(config, 0, 1).parameters()) == count
    assert count == pytest.approx(published, rel=0.002 if preset in ("857M", "175B") else 0.14)


def test_stages_together_are_the_model() -> None:
    config = config_of(params(preset="4M", layers=7, tied_head=False))
    names = [name for stage in range(3) for name, _ in stage_on_meta(config, stage, 3).named_parameters()]
    assert sorted(names) == sorted(name for name, _ in stage_on_meta(config, 0, 1).named_parameters())
    assert [len(layers_of_stage(7, stage, 3)) for stage in range(3)] == [3, 2, 2]


def narayanan(config: GPTConfig, batch: int, *, recompute: bool) -> float:
    """Equation 3 of Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM": FLOPs of a
    batch of sequences. It counts the recomputed forward pass; without it, three passes of four remain of the layers."""
    B, s, l, h, V = batch, config.sequence_length, config.layers, config.width, config.vocab_size  # noqa: E741
    if recompute:
        return 96 * B * s * l * h**2 * (1 + s / (6 * h) + V / (16 * l * h))
    return 72 * B * s * l * h**2 * (1 + s / (6 * h) + V / (12 * l * h))


@pytest.mark.parametrize("preset", ["117M", "800M", "857M", "13B", "175B"])
def test_flops_are_megatron_s(preset: str) -> None:
    config = config_of(params(preset=preset))
    full, selective = (dataclasses.replace(config, recompute=how) for how in ("full", "selective"))
    tokens = 4 * config.sequence_length
    assert flops_per_token(config) * tokens == pytest.approx(narayanan(config, 4, recompute=False), rel=1e-12)
    spared = 8 * config.layers * config.width**2  # the MLP's second product, which torch does not repeat
    assert (hardware_flops_per_token(full) + spared) * tokens == pytest.approx(narayanan(config, 4, recompute=True), rel=1e-12)
    assert hardware_flops_per_token(config) == hardware_flops_per_token(selective) == flops_per_token(selective) == flops_per_token(config)
    attention = 12 * config.layers * config.width * config.sequence_length
    assert flops_per_token(config) - flops_per_token(config, causal=True) == pytest.approx(attention / 2, rel=1e-2)


@pytest.mark.parametrize("recompute", ["off", "selective", "full"])
def test_hardware_flops_are_what_is_computed(recompute: str) -> None:
    """Torch's own count of the operators that ran."""
    config = GPTConfig(256, 32, 64, 3, 4, recompute=recompute)  # type: ignore[arg-type]
    model, tokens = GPT(config), torch.zeros(2, 32, dtype=torch.int64)
    counted = count_flops(lambda: model(tokens, tokens).backward())
    passes = 4 if recompute == "full" else 3
    attention = 4 * passes * config.layers * config.width * config.sequence_length  # torch has no formula for its kernel of CPUs
    assert counted == (hardware_flops_per_token(config) - attention) * 64


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_no_number(recompute: str) -> None:
    losses, gradients = [], []
    for how in ("off", recompute):
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, 32, 64, 2, 4, positions="rotary", recompute=how))  # type: ignore[arg-type]
        tokens = torch.arange(66).reshape(2, 33)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert losses[0] == losses[1] and torch.equal(*gradients)


def test_starting_weights_follow_seed_and_name_only() -> None:
    config = GPTConfig(128, 16, 32, 4, 4, tied_head=False)
    torch.manual_seed(5)
    whole, part = GPT(config).state_dict(), GPT(config, range(2, 4)).state_dict()
    assert part and all(torch.equal(whole[name], value) for name, value in part.items())
    torch.manual_seed(6)
    assert not torch.equal(GPT(config).state_dict()["head.weight"], whole["head.weight"])
    assert whole["blocks.0.mlp_up.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert whole["blocks.0.mlp_down.weight"].std().item() == pytest.approx(0.02 / math.sqrt(8), rel=0.05)


def test_learning_rate_warms_up_and_follows_a_cosine() -> None:
    chosen = params(preset="4M", warm_up_steps=4, decay_steps=24)
    assert [chosen.rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert chosen.rate(4) == 1.0 and chosen.rate(14) == pytest.approx(0.55) and chosen.rate(24) == chosen.rate(1000) == pytest.approx(0.1)
    assert params(preset="4M").rate(1000) == 1.0
    with pytest.raises(ValueError, match="must be above warm_up_steps"):
        params(preset="4M", warm_up_steps=4, decay_steps=4)
