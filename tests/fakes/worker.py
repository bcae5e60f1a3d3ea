"""A worker on the fake device: real pipeline, known truth. Runs as ``python -m tests.fakes.worker FOLDER``, also under torchrun.

The point's seed chooses nothing; its parameters are of the workload below.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pydantic import BaseModel, ConfigDict

from caraml import worker
from caraml.results.record import Facts
from caraml.workloads.base import BuildContext, Task, Workload
from tests.fakes.device import FakeDevice

ITEMS_PER_SAMPLE = 7
FLOPS_PER_ITEM = 2e9


class Params(BaseModel):
    """What the fake does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_seconds: float = 0.05
    slow_rank_extra: float = 0.0
    """Extra seconds per step of the last rank."""
    warm_up_extra: float = 0.0
    """Extra seconds of the first step, halving with each step after it."""
    oom_at: int | None = None
    nan_at: int | None = None
    crash_at: int | None = None
    slope: float = 0.0
    """Seconds that each step is longer than the one before."""


def build(ctx: BuildContext[Params], device: FakeDevice) -> Task:
    """A linear model whose loss launches the fake's work."""
    params, model, counter = ctx.params, torch.nn.Linear(1, 1), itertools.count()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    extra = params.slow_rank_extra if ctx.rank == ctx.world - 1 else 0.0

    def loss(net: torch.nn.Module, batch: Any) -> torch.Tensor:
        step = next(counter)
        if step == params.oom_at:
            raise torch.OutOfMemoryError("tried to allocate 12.00 GiB")
        if step == params.crash_at:
            raise ValueError("the model is broken")
        device.launch(params.step_seconds + extra + params.warm_up_extra * 0.5**step + params.slope * step)
        value = net(batch).sum()
        return value * float("nan") if step == params.nan_at else value

    facts = Facts(
        item="thing",
        items_per_sample=ITEMS_PER_SAMPLE,
        parameters=2,
        flops_per_item=FLOPS_PER_ITEM,
        flops_formula="known",
        bytes_per_sample=11,
        data={"kind": "fake"},
    )
    return Task(model, optimizer, itertools.repeat(torch.ones(1, 1)), loss, facts)


def main(folder: Path) -> None:
    """Run the real worker with the fake device and workload in place."""
    device = FakeDevice()
    workload = Workload("fake", Params, lambda ctx: build(ctx, device))
    with (
        mock.patch.object(worker, "open_device", lambda *_: device),
        mock.patch.object(worker, "load_workload", lambda _: workload),
        mock.patch.object(worker, "PROBE_SECONDS", 0.05),
    ):
        worker.main(folder)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    main(Path(sys.argv[1]))
