"""Tasks with a step of their own do on two ranks what one process does on the same batches."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from caraml.engine.ranks import Ranks
from caraml.engine.step import OwnStep
from caraml.engine.steps import Batches
from caraml.metrics.model import Facts
from caraml.suite.model import Point
from caraml.workloads.base import Task
from caraml.workloads.weather.regime_clustering import MemoryBank, clustering_step

ROOT = Path(__file__).parents[2]
SAMPLES, BATCH, WIDTH, HEADS = 24, 8, 6, [3, 4]
STEPS = 2 * SAMPLES // BATCH
FACTS = Facts(item="sample", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="")


class Linear(torch.nn.Module):
    """A network without normalisation: each sample's features are its own, however the batch is divided."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.map = torch.nn.Linear(5, WIDTH)
        self.prototypes = torch.nn.ModuleList(torch.nn.Linear(WIDTH, count, bias=False) for count in HEADS)
        self.prototypes.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        features = F.normalize(self.map(x), dim=1)
        return features, [prototypes(features) for prototypes in self.prototypes]


def cluster(rank: int, world: int) -> dict[str, Any]:
    """Two epochs of clustering; what the bank, the centroids and the weights are afterwards."""
    values = torch.randn(SAMPLES, 2, 5, generator=torch.Generator().manual_seed(0))
    per_rank = BATCH // world

    def batches() -> Any:
        for start in itertools.count():
            places = (start * BATCH + torch.arange(rank, BATCH, world)) % SAMPLES
            yield [places, values[places, 0], values[places, 1]]

    network = Linear()
    optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.5)
    bank = MemoryBank(SAMPLES // world, SAMPLES, crops=2, heads=HEADS, width=WIDTH, device=torch.device("cpu"))
    task = Task(network, optimizer, batches(), lambda *_: torch.zeros(()), FACTS)
    settings: dict[str, Any] = {"network": network, "optimizer": optimizer, "bank": bank}
    task.own_step = lambda tools: clustering_step(tools, steps_per_epoch=SAMPLES // BATCH, seed=7, **settings)
    names = {"suite": "t", "benchmark": "t", "workload": "t", "params": {}, "system": "l", "device": "d", "software": "t"}
    point = Point(**names, device_class="cpu", devices=world, global_batch=BATCH, micro_batch=per_rank)
    step = OwnStep(task, Batches(task.batches), point, torch.device("cpu"))
    losses = [step().loss.item() for _ in range(STEPS)]  # type: ignore[union-attr]
    return {
        "losses": torch.tensor(losses),
        "labels": bank.labels,
        "positions": bank.positions,
        "features": bank.features,
        "centroids": [layer.weight.clone() for layer in network.prototypes],
        "weights": network.map.weight.detach().clone(),
    }


def main(folder: Path) -> None:
    """Of one of the ranks: leave what it has afterwards in the folder."""
    ranks = Ranks.from_environment(torch.device("cpu"))
    torch.save(cluster(ranks.rank, ranks.world), folder / f"{ranks.rank}.pt")
    ranks.leave()


def test_clusters_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "caraml.engine.start", "--devices=2", "tests.workloads.test_maelstrom_ranks", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    alone = cluster(0, 1)
    assert torch.equal(ranks[0]["labels"], ranks[1]["labels"]) and torch.equal(ranks[0]["labels"], alone["labels"])
    for ours, theirs, truth in zip(ranks[0]["centroids"], ranks[1]["centroids"], alone["centroids"], strict=True):
        assert torch.equal(ours, theirs) and torch.allclose(ours, truth, atol=1e-5)
    assert torch.allclose(ranks[0]["weights"], alone["weights"], atol=1e-5)
    assert ((ranks[0]["losses"] + ranks[1]["losses"]) / 2).tolist() == pytest.approx(alone["losses"].tolist(), rel=1e-4)
    banks = torch.cat([rank["features"] for rank in ranks], 1)[:, torch.cat([rank["positions"] for rank in ranks]).argsort()]
    assert torch.allclose(banks, alone["features"][:, alone["positions"].argsort()], atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
