"""AtmoRep-style training: a transformer over temperature and wind fills in masked tokens."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from caraml.workloads.base import BuildContext, Task, Workload, counted_facts
from caraml.workloads.weather import WeatherParams, check_files, open_input

if TYPE_CHECKING:
    import torch

SAMPLES_WITHOUT_FILES = 100_000
"""Samples in an epoch of random data; AtmoRep's own number is a parameter of its runs, not of the data."""


class Params(WeatherParams):
    """Parameters of the `atmorep` workload."""

    preset: Literal["384M", "tiny"] = Field("384M", description="the public three-field setting of 2024, or one for CPUs")
    learning_rate: float = Field(1e-5, gt=0, description="of the optimizer")
    weight_decay: float = Field(0.025, ge=0, description="of the optimizer")


def build(ctx: BuildContext[Params]) -> Task:
    """Build the network, AdamW, and the stream of ``{field: {tokens (B, N, P), facts (B, N, 8), masked (B, M), truth (B, M, P)}}``."""
    import torch

    from caraml.data.loader import Synthetic
    from caraml.workloads.atmorep.data import AtmosphereSamples, synthetic_atmosphere
    from caraml.workloads.atmorep.model import PRESETS, AtmoRep

    params, config = ctx.params, PRESETS[ctx.params.preset]
    tokens = {name: field.tokens for name, field in config.fields.items()}
    sizes = {name: field.size for name, field in config.fields.items()}
    made = partial(synthetic_atmosphere, tokens=tokens, sizes=sizes, levels=config.levels)
    with ctx.phase("data"):
        given = open_input(
            ctx,
            "atmorep",
            lambda folder, split: AtmosphereSamples(folder, tokens, sizes, config.levels, split),
            lambda: Synthetic("atmorep", made, SAMPLES_WITHOUT_FILES, ctx.seed),
        )
    torch.manual_seed(ctx.seed)
    with torch.device(ctx.device):
        model = AtmoRep(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=params.learning_rate, weight_decay=params.weight_decay, fused=ctx.fused)
    values = sum(field.values * field.tokens[0] * field.tokens[1] * field.tokens[2] for field in config.fields.values())
    facts = counted_facts("sample", model, given, _flops(params), bytes_per_sample=4 * config.levels * values)
    return given.task(model, optimizer, masked_loss, facts, predict=_predict)


def _predict(net: Any, batch: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return net(*({name: field[key] for name, field in batch.items()} for key in ("tokens", "facts", "masked")))


def masked_loss(net: Any, batch: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
    """The ensemble's loss on the masked tokens, the mean over fields."""
    import torch

    from caraml.workloads.atmorep.model import ensemble_loss

    predicted = _predict(net, batch)
    return torch.stack([ensemble_loss(predicted[name], field["truth"]) for name, field in batch.items()]).mean()


def _flops(params: Params) -> tuple[float, float]:
    """FLOPs of one sample with a quarter of its tokens masked: forward, and forward with backward; no activation recomputed."""
    import math

    import torch

    from caraml.workloads.atmorep.model import PRESETS, TOKEN_FACTS, AtmoRep
    from caraml.workloads.flops import forward_and_training_flops

    config = PRESETS[params.preset]
    with torch.device("meta"):
        model, batch = AtmoRep(config), {}
        for name, field in config.fields.items():
            count, masked = config.levels * math.prod(field.tokens), config.levels * (math.prod(field.tokens) // 4)
            batch[name] = {
                "tokens": torch.empty(1, count, field.values),
                "facts": torch.empty(1, count, TOKEN_FACTS),
                "masked": torch.zeros(1, masked, dtype=torch.int64),
                "truth": torch.empty(1, masked, field.values),
            }
        return forward_and_training_flops(lambda: masked_loss(model, batch), 1)


WORKLOAD = Workload(
    title="AtmoRep-style multi-field transformer", params=Params, build=build, packages=("h5netcdf", "h5py"), check=check_files
)
