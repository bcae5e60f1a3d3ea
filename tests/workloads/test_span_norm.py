"""Normalising over two ranks gives what one process gives on both ranks' images; over one, it changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from caraml.engine.ranks import Ranks
from caraml.workloads.image_classification.images import SpanBatchNorm, share_batch_norm

IMAGES = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)) * 3 + 1


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))


def train(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Weights and statistics after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = model.state_dict()
    return torch.cat([value.float().flatten() for name, value in values.items() if "num_batches" not in name])


def main(folder: Path) -> None:
    """What one of two ranks leaves for each span."""
    ranks = Ranks.from_environment(torch.device("cpu"))
    for span in (1, 2):
        model = share_batch_norm(network(), span, torch.device("cpu"))
        weights = train(DistributedDataParallel(model), IMAGES[ranks.rank * 4 : ranks.rank * 4 + 4])
        torch.save((weights, sum(isinstance(module, SpanBatchNorm) for module in model.modules())), folder / f"{span}-{ranks.rank}.pt")
    ranks.leave()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, left = Path(__file__).parents[2], tmp_path_factory.mktemp("span")
    command = [sys.executable, "-m", "caraml.engine.start", "--devices=2", "tests.workloads.test_span_norm", str(left)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, cwd=root, env=environment, timeout=300, check=True)
    return left


@pytest.mark.parametrize("span", [1, 2])
def test_two_ranks_normalise_as_one_process_does(folder: Path, span: int) -> None:
    alone = train(network(), IMAGES)
    (first, replaced), (second, _) = (torch.load(folder / f"{span}-{rank}.pt") for rank in range(2))
    assert replaced == (2 if span == 2 else 0)
    if span == 2:
        assert torch.allclose(first, alone, atol=1e-5) and torch.allclose(second, alone, atol=1e-5)
    else:
        assert not torch.allclose(first, alone, atol=1e-3), "each rank has statistics of its own"


def test_a_layer_with_an_activation_inside_keeps_it() -> None:
    from caraml.workloads import make_torchvision_importable

    make_torchvision_importable()
    from timm.layers import BatchNormAct2d

    layer = BatchNormAct2d(3).eval()
    layer.running_mean.uniform_(-1, 1)
    assert torch.allclose(SpanBatchNorm(layer, None).eval()(IMAGES), layer(IMAGES), atol=1e-6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
