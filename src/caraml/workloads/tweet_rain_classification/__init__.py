"""Does a tweet tell of rain? MAELSTROM's second application: DeBERTa-v3-small on short texts, from random weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from caraml.workloads.base import BuildContext, Task, Workload, counted_facts, given_path
from caraml.workloads.weather import WeatherParams, check_files, open_input

SAMPLES_WITHOUT_FILES = 148_000
"""Texts in an epoch of random data: as many as the report's training set has."""


class Params(WeatherParams):
    """Parameters of the `tweet_rain_classification` workload (`ap2`)."""

    preset: Literal["small", "tiny"] = Field("small", description="DeBERTa-v3-small, or a tiny network of its kind")
    weights: str | None = Field(
        None,
        description="folder of a trained DeBERTa-v3 of the preset's size, with tokenizer.json; random weights and hashed words if absent",
    )
    tokens: int = Field(64, ge=4, le=512, description="tokens per text; the report does not say how many")
    learning_rate: float = Field(3e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.01, ge=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, AdamW, and the stream of ``[tokens (B, T), labels (B,)]``, int64."""
    import torch
    from torch.nn import functional as F

    from caraml.workloads.tweet_rain_classification.data import TweetSamples, pieces_of, synthetic_tweet
    from caraml.workloads.tweet_rain_classification.model import VOCABULARY, TweetClassifier, check_config, trained
    from caraml.workloads.weather.samples import SyntheticSamples

    params = ctx.params
    pieces = None
    if params.weights is not None:
        check_config(given_path(params.weights), _sizes(params))
        pieces = pieces_of(given_path(params.weights), VOCABULARY)
    with ctx.phase("data"):
        given = open_input(
            ctx,
            "ap2",
            lambda folder, split: TweetSamples(folder, params.tokens, VOCABULARY, split, pieces),
            lambda: SyntheticSamples(
                "ap2", partial(synthetic_tweet, tokens=params.tokens, vocabulary=VOCABULARY), SAMPLES_WITHOUT_FILES, ctx.seed
            ),
        )
    torch.manual_seed(ctx.seed)
    model = TweetClassifier(_sizes(params))
    if params.weights is not None:
        trained(model, given_path(params.weights), _sizes(params))
    model = model.to(ctx.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=ctx.fused)
    facts = counted_facts("text", model, given, _flops(params), bytes_per_sample=8 * params.tokens)

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        tokens, labels = batch
        return F.cross_entropy(net(tokens).float(), labels)

    return given.task(model, optimizer, loss, facts, predict=lambda net, batch: net(batch[0]))


def _sizes(params: Params) -> dict[str, Any]:
    from caraml.workloads.tweet_rain_classification.model import SMALL, TINY

    return SMALL if params.preset == "small" else TINY


def _flops(params: Params) -> tuple[float, float]:
    """FLOPs of one text: forward, and forward with backward. Dropout and masks count nothing."""
    import torch

    from caraml.workloads.flops import forward_and_training_flops
    from caraml.workloads.tweet_rain_classification.model import TweetClassifier

    with torch.device("meta"):
        model = TweetClassifier(_sizes(params))
        tokens = torch.ones(2, params.tokens, dtype=torch.int64)
        return forward_and_training_flops(lambda: model(tokens).sum(), 2)


def check(params: Params, folder: Path) -> None:
    """See that the weights are a DeBERTa's of the preset's sizes, and that files are of tweets."""
    from caraml.workloads.tweet_rain_classification.model import check_config

    if params.weights is not None:
        check_config(folder / params.weights, _sizes(params))
    check_files(params, folder)


_PACKAGES = ("h5netcdf", "h5py", "transformers")
WORKLOAD = Workload(title="tweet rain classification, DeBERTa-v3-small", params=Params, build=build, packages=_PACKAGES, check=check)
