"""A workload in a package of its own: a small network that tells rising curves from falling ones. Copy it, rename it, replace it."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from caraml.metrics.model import Metric, StatedMetric
from caraml.workloads.base import BuildContext, Quality, Task, Workload

POINTS = 128
RIGHT = StatedMetric(unit="1", better="higher", definition="Share of held-out curves that are told right")


class Params(BaseModel):
    """The keys of `params` in a suite. Torch is not imported up here, so that a suite can be checked without it."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # a misspelt key is an error

    width: int = Field(64, ge=1, description="hidden units")
    samples: int = Field(4096, ge=1, description="curves in an epoch")
    workers: int | None = Field(None, ge=0, description="loader processes; chosen by device and cores if absent")
    learning_rate: float = Field(1e-3, gt=0, description="of Adam")


class Curves:
    """A data set: a length, samples by position that depend on nothing but the position, and where they come from."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, position: int) -> tuple[np.ndarray[Any, Any], int]:
        rng = np.random.default_rng([self.seed, position])
        rising = position % 2
        curve = np.linspace(-1, 1, POINTS) * (1 if rising else -1) + rng.normal(0, 1, POINTS)
        return curve.astype(np.float32), rising

    def describe(self) -> dict[str, Any]:
        return {"kind": "synthetic", "of": "curves", "items": self.samples, "seed": self.seed}


def build(ctx: BuildContext[Params]) -> Task:
    """Everything that training needs on this rank. CARAML does the rest: loop, precision, DDP, window, energy, record."""
    import torch
    from torch.nn import functional as F

    from caraml.workloads.base import counted_facts, open_source
    from caraml.workloads.flops import forward_and_training_flops

    params = ctx.params
    with ctx.phase("data"):
        source = open_source(Curves(params.samples, seed=0), ctx, workers=params.workers, resident=False)
    held_out = torch.utils.data.DataLoader(Curves(512, seed=1), batch_size=64)  # type: ignore[arg-type, var-annotated]

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(POINTS, params.width), torch.nn.ReLU(), torch.nn.Linear(params.width, 2))

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        curves, rising = batch
        return F.cross_entropy(net(curves), rising)

    torch.manual_seed(ctx.seed)
    model = network().to(ctx.device)
    with torch.device("meta"):  # FLOPs are counted on shapes; nothing is computed
        twin, shapes = network(), (torch.empty(2, POINTS), torch.zeros(2, dtype=torch.long))
        flops = forward_and_training_flops(lambda: loss(twin, shapes), 2)
    facts = counted_facts("curve", model, source, flops, bytes_per_sample=4 * POINTS)
    optimizer = torch.optim.Adam(model.parameters(), lr=params.learning_rate, fused=ctx.fused)

    def validation() -> Any:
        return ([part.to(ctx.device) for part in batch] for batch in held_out)

    def judged(most: int | None) -> dict[str, Metric]:
        right = torch.cat([model(curves).argmax(1) == rising for curves, rising in islice(validation(), most)])
        return {"told_right": Metric(value=right.double().mean().item(), unit=RIGHT.unit, n=len(right))}

    quality = Quality(("told_right",), judged, {"told_right": RIGHT})
    return Task(model, optimizer, source.batches, loss, facts, validation=validation, quality=quality, close=source.close)


WORKLOAD = Workload(title="tells rising curves from falling ones", params=Params, build=build)
