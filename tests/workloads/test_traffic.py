"""Bytes moved, counted against networks small enough to count by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from caraml.workloads.flops import Traffic, traffic
from caraml.workloads.gpt.model import GPT, GPTConfig
from caraml.workloads.gpt.training import network_traffic

SMALL = GPTConfig(vocab_size=128, sequence_length=32, width=32, layers=2, heads=2)


def test_a_linear_layer_moves_what_its_products_read_and_write() -> None:
    with torch.device("meta"):
        layer = nn.Linear(8, 16, bias=False)
    moved = traffic(layer, lambda samples: layer(torch.empty(samples, 8, device="meta")).sum())
    each, every = moved.per_sample, moved.besides
    weight, given, result = 4 * 8 * 16, 4 * 8, 4 * 16
    # Forward: product (given + weight + result), sum (result). Backward: the weight's gradient (given + result + weight).
    assert every == 2 * weight + 4 + 4 + 4  # ... and the loss, its gradient and that gradient's start: one number each
    assert each == given + given + result + result + given + result  # the input is first written


def test_views_move_nothing_and_attention_is_one_kernel() -> None:
    with torch.device("meta"):
        scale = nn.Linear(1, 1, bias=False)

    def loss(samples: int) -> torch.Tensor:
        q = torch.empty(samples, 2, 1024, 8, device="meta") * scale.weight
        return nn.functional.scaled_dot_product_attention(q, q.view_as(q), q.transpose(2, 3).transpose(2, 3), is_causal=True).sum()

    assert traffic(scale, loss).per_sample < 40 * 4 * 2 * 1024 * 8, "a matrix of scores alone would be 128 times one operand"


class Biased(nn.Module):
    """Adds to the scores of attention by a table that is made in the first pass, of a parameter, as BEiT's and ConViT's are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.biases = nn.Linear(1, 1, bias=False), nn.Parameter(torch.empty(1))
        self.fixed = nn.Parameter(torch.empty(1), requires_grad=False)
        self.places: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is None:
            self.places = torch.ones(16, 16, device=x.device) * 2
        x = x * self.scale.weight
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.places * self.biases)


def test_what_is_added_to_scores_stops_no_count() -> None:
    with torch.device("meta"):
        network = Biased()
    moved = traffic(network, lambda samples: network(torch.empty(samples, 2, 16, 8, device="meta")).sum())
    assert moved.per_sample > 4 * 4 * 2 * 16 * 8 and moved.besides > 2 * 4 * 16 * 16


def test_attention_of_one_query_reads_keys_and_values_once() -> None:
    """As of a class in CaiT and XCiT: its result has the size of the query, and its gradients those of what they belong to."""
    with torch.device("meta"):
        scale = nn.Linear(1, 1, bias=False)

    def loss(samples: int) -> torch.Tensor:
        every = torch.empty(samples, 2, 1024, 8, device="meta") * scale.weight
        out = nn.functional.scaled_dot_product_attention(every[:, :, :1], every, every)
        assert out.shape == (samples, 2, 1, 8)
        return out.sum()

    assert traffic(scale, loss).per_sample < 40 * 4 * 2 * 1024 * 8


def test_values_of_attention_may_be_wider_than_its_queries() -> None:
    """As in Inception Transformers: their memory traffic ended with an error of torch."""
    with torch.device("meta"):
        scale = nn.Linear(1, 1, bias=False)

    def loss(samples: int) -> torch.Tensor:
        every = torch.empty(samples, 2, 1024, 8, device="meta") * scale.weight
        out = nn.functional.scaled_dot_product_attention(every[..., :4], every[..., :4], every)
        assert out.shape == every.shape
        return out.sum()

    assert traffic(scale, loss).per_sample < 40 * 4 * 2 * 1024 * 8


def test_a_cache_serves_of_each_kernel_no_more_than_it_holds() -> None:
    """Two kernels, of 10 bytes per sample and 100 besides, and of 1 byte per sample: at 10 samples 200 and 10 bytes."""
    moved = Traffic(((10.0, 100.0, 1.0), (1.0, 0.0, 1.0)))
    assert (moved.per_sample, moved.besides) == (11, 100)
    assert moved.cached(10, 1000) == 210 and moved.cached(10, 50) == 60 and moved.cached(10, 0) == 0
    # Two micro-batches, and an update of 300 bytes of which 50 lie in the cache.
    assert moved.cached_share(10, 2, 300.0, 50) == pytest.approx((2 * 60 + 50) / (2 * 210 + 300))
    assert moved.cached_share(10, 2, 300.0, 1e9) == 1


def test_a_network_of_many_equal_layers_is_counted_by_two_of_them() -> None:
    layers = [network_traffic(dataclasses.replace(SMALL, layers=count)) for count in (2, 5)]
    whole = traffic_of_all_layers(dataclasses.replace(SMALL, layers=5))
    for value in (lambda t: t.per_sample, lambda t: t.besides, lambda t: t.cached(3, 20_000)):
        assert value(layers[1]) == pytest.approx(value(whole)) and value(layers[0]) < value(layers[1])


def traffic_of_all_layers(config: GPTConfig) -> Traffic:
    with torch.device("meta"):
        model = GPT(config)
    model.loss = lambda head, hidden, targets: nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
    return traffic(model, lambda samples: model(*[torch.empty(samples, config.sequence_length, dtype=torch.long, device="meta")] * 2))
