"""GPT against transformers' GPT-2, closed forms, and the plain loss."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from caraml.workloads import make_torchvision_importable
from caraml.workloads.gpt import PRESETS, Params
from caraml.workloads.gpt.model import (
    GPT,
    GPTConfig,
    flops_per_token,
    linear_cross_entropy,
    parameter_count,
    rotary_table,
    rotate,
)

SMALL = GPTConfig(vocab_size=128, sequence_length=32, width=48, layers=2, heads=4)


def config_of(preset: str) -> GPTConfig:
    params = Params(preset=preset)  # type: ignore[call-arg,arg-type]  # the preset gives the sizes
    return GPTConfig(
        params.model_shape().vocabulary,
        params.sequence_length,
        params.width,
        params.layers,
        params.heads,
        params.positions,
        params.tied_head,
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"tied_head": False}, {"positions": "rotary"}, {"layers": 3, "width": 64, "heads": 2, "vocab_size": 192}],
)
def test_parameter_count_in_closed_form(change: dict[str, object]) -> None:
    config = dataclasses.replace(SMALL, **change)  # type: ignore[arg-type]
    assert parameter_count(config) == sum(parameter.numel() for parameter in GPT(config).parameters())


def test_published_sizes() -> None:
    assert config_of("117M").vocab_size == 50304
    assert parameter_count(config_of("117M")) == 124_475_904
    assert parameter_count(config_of("800M")) == pytest.approx(909e6, rel=2e-3)
    assert flops_per_token(config_of("117M")) == pytest.approx(0.855e9, rel=1e-3)
    assert flops_per_token(config_of("800M")) == pytest.approx(6.255e9, rel=2e-3)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_build_on_the_meta_device(preset: str) -> None:
    config = config_of(preset)
    with torch.device("meta"):
        model = GPT(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)


@pytest.mark.slow
def test_forward_equals_transformers_gpt2_with_the_same_weights() -> None:
    make_torchvision_importable()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=32, n_embd=48, n_layer=2, n_head=4)).eval()
    model = GPT(SMALL).eval()
    state, theirs = model.state_dict(), reference.transformer.state_dict()
    state["embedding.weight"] = state["head.weight"] = theirs["wte.weight"]
    state["positions.weight"] = theirs["wpe.weight"]
    state["norm.weight"], state["norm.bias"] = theirs["ln_f.weight"], theirs["ln_f.bias"]
    names = {"norm_attention": "ln_1", "norm_mlp": "ln_2", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj"}
    names |= {"mlp_up": "mlp.c_fc", "mlp_down": "mlp.c_proj"}
    for layer in range(2):
        for ours, other in names.items():
            weight, bias = theirs[f"h.{layer}.{other}.weight"], theirs[f"h.{layer}.{other}.bias"]
            weight = weight if weight.dim() == 1 else weight.t()  # theirs is (in, out)
            if ours == "attention.qkv":  # theirs: all queries, all keys, all values; ours: head by head
                weight, bias = (rows.unflatten(0, (3, 4, 12)).transpose(0, 1).flatten(0, 2) for rows in (weight, bias))
            state[f"blocks.{layer}.{ours}.weight"], state[f"blocks.{layer}.{ours}.bias"] = weight, bias
    model.load_state_dict(state)
    tokens = torch.randint(128, (3, 32))
    with torch.no_grad():
        expected = reference(tokens).logits
        assert (model.head(model.hidden(tokens)) - expected).abs().max() < 1e-4
        loss = F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert model(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(loss.item(), abs=1e-4)


def test_attention_never_looks_ahead() -> None:
    for positions in ("learned", "rotary"):
        model = GPT(dataclasses.replace(SMALL, positions=positions)).eval()  # type: ignore[arg-type]
        tokens = torch.randint(128, (1, 32))
        changed = tokens.clone()
        changed[0, 20:] = (changed[0, 20:] + 1) % 128
        before, after = model.hidden(tokens), model.hidden(changed)
        assert torch.allclose(before[:, :20], after[:, :20], atol=1e-5)
        assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_rotary_scores_depend_on_distance_only() -> None:
    cos, sin = rotary_table(16, 8)
    q, k = torch.randn(8), torch.randn(8)
    scores = rotate(q.expand(1, 1, 16, 8), cos, sin)[0, 0] @ rotate(k.expand(1, 1, 16, 8), cos, sin)[0, 0].t()
    assert torch.allclose(scores[3, 1], scores[9, 7], atol=1e-5) and torch.allclose(scores[5, 5], q @ k, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [4 * 40, 4 * 40 * 7, 2**20])
def test_chunked_loss_and_gradients_equal_the_plain_ones(chunk_bytes: int) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(23, 8, requires_grad=True), torch.randn(40, 8, requires_grad=True)
    targets = torch.randint(40, (23,))
    (F.cross_entropy(hidden @ weight.t(), targets) * 3).backward()
    expected = hidden.grad, weight.grad
    hidden.grad = weight.grad = None
    loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes)
    (loss * 3).backward()
    assert loss.item() == pytest.approx(F.cross_entropy(hidden @ weight.t(), targets).item(), rel=1e-5)
    for found, truth in zip((hidden.grad, weight.grad), expected, strict=True):
        assert found is not None and truth is not None and torch.allclose(found, truth, atol=1e-5)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets, chunk_bytes).item() == loss.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_full_of_rows_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(23, 8), torch.randn(40, 8, requires_grad=True), torch.randint(40, (23,))
    found = []
    for cached in (2**21, 0, 4 * 40 * 5 // torch.get_num_threads()):
        monkeypatch.setattr("caraml.workloads.gpt.model.CACHED_BYTES", cached)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, targets)
        found.append((loss.item(), torch.autograd.grad(loss, weight)[0]))
    for loss_of_parts, slope in found[1:]:
        assert loss_of_parts == pytest.approx(found[0][0], rel=1e-6) and torch.equal(slope, found[0][1])


@pytest.mark.slow
def test_chunked_loss_under_autocast_and_compile() -> None:
    torch.manual_seed(1)
    hidden, weight, targets = torch.randn(64, 32), torch.randn(96, 32, requires_grad=True), torch.randint(96, (64,))
    plain = F.cross_entropy(hidden @ weight.t(), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(plain.item(), rel=2e-2)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager")
    loss = compiled(hidden, weight, targets)
    loss.backward()
    found = weight.grad
    (truth,) = torch.autograd.grad(plain, weight)
    assert found is not None and torch.allclose(found, truth, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_gradients_survive_reduced_precision_and_many_tokens(dtype: torch.dtype) -> None:
    """1/N of a small probability is below fp16's smallest number; the loss scaler multiplies too late to save it."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(4096, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    targets = torch.randint(64, (4096,))
    truth = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), targets), (hidden, weight))
    with torch.autocast("cpu", dtype=dtype):
        loss = linear_cross_entropy(hidden, weight, targets, chunk_bytes=4 * 64 * 1000)
    found = torch.autograd.grad(loss * 65536, (hidden, weight))
    for scaled, exact in zip(found, truth, strict=True):
        assert scaled.dtype == torch.float32
        assert (scaled / 65536 - exact).norm() < 0.01 * exact.norm()


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="a width that 5 heads divide"):
        Params(preset="4M", heads=5)  # type: ignore[call-arg]
