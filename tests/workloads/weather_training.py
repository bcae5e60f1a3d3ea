"""Trains a workload in this process, step by step, as the worker would."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caraml.engine.step import Step, make_step
from caraml.suite.model import Point
from caraml.workloads.base import Task
from caraml.workloads.weather import prepare_weather
from tests.tasks import built


@dataclass
class Trained:
    """A task after some steps."""

    task: Task
    step: Step
    losses: list[float]

    def validation_loss(self, *, batch_statistics: bool = False) -> float:
        """Mean loss over the held-out batches; with the batches' own statistics where running ones need thousands of steps to settle."""
        assert self.task.validation is not None
        self.task.model.train(batch_statistics)
        with torch.no_grad():
            losses = [self.task.loss(self.task.model, batch).item() for batch in self.task.validation()]
        return sum(losses) / len(losses)


def train(name: str, folder: Path | None, params: dict[str, Any], *, steps: int, batch: int, mode: str = "train") -> Trained:
    """Build and run; without a folder the data are random. Tiny look-alike files are written into ``folder`` if it is new.

    They are read in this process: what loader processes do is tested with the loader.
    """
    if folder is not None and not folder.exists():
        prepare_weather(name, folder)
    data = {"folder": str(folder), "workers": 0} if folder is not None else {"data": "synthetic-device"}
    task = built(name, {**data, **params}, batch)
    names = {"suite": "t", "benchmark": "t", "workload": name, "params": {}, "system": "local", "device": "cpu", "software": "t"}
    point = Point(**names, device_class="cpu", mode=mode, global_batch=batch, micro_batch=batch)
    step = make_step(task, point, torch.device("cpu"))
    losses = []
    for _ in range(steps):
        outcome = step()
        losses += [] if outcome.loss is None else [outcome.loss.item()]
    task.close()
    return Trained(task, step, losses)
