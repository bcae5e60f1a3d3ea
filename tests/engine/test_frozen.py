"""Frozen weights: the forward pass computes what it did, with less work in every step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from caraml.engine.precision import freeze
from caraml.engine.step import make_step
from caraml.suite.model import Knobs, Precision
from tests.conftest import MakePoint
from tests.tasks import built

CPU = torch.device("cpu")
GPT = {"preset": "4M", "width": 32, "layers": 2, "heads": 2, "sequence_length": 16, "vocab_size": 128, "data": "synthetic-device"}
BERT = {"preset": "tiny", "tokens": 16, "data": "synthetic-device"}
RESNET = {"model": "resnet10t", "image_size": 32, "classes": 4, "data": "synthetic-device"}
ATMOSPHERE = {"preset": "tiny", "data": "synthetic-device"}
CASES = [("gpt", GPT), ("question_answering", BERT), ("image_classification", RESNET), ("atmorep", ATMOSPHERE)]


def predictions(workload: str, params: dict[str, Any], precision: Precision, frozen: bool, make_point: MakePoint) -> list[torch.Tensor]:
    """What three steps of mode `inference` predict, after a few of training have moved running statistics."""
    task, found = built(workload, params, 2), list[torch.Tensor]()
    point = make_point(workload=workload, global_batch=2, micro_batch=2, precision=precision, knobs=Knobs(frozen_weights=frozen))
    train = make_step(task, point.model_copy(update={"precision": "fp32"}), CPU)
    for _ in range(3):
        train()
    predict = task.predict or task.loss
    task.predict = lambda net, batch: found.extend(leaf.clone() for leaf in tree_leaves(predict(net, batch)))
    step = make_step(task, point.model_copy(update={"mode": "inference"}), CPU)
    for _ in range(3):
        step()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("workload", "params"), CASES)
def test_frozen_weights_predict_the_same(workload: str, params: dict[str, Any], precision: Precision, make_point: MakePoint) -> None:
    """To the bit where weights are only cast; where batch normalisation is folded, as rounding allows."""
    plain, frozen = (predictions(workload, params, precision, way, make_point) for way in (False, True))
    for one, other in zip(plain, frozen, strict=True):
        if workload == "image_classification":
            allowed = 1e-5 if precision == "fp32" else 3e-2
            assert float((one - other).norm() / one.norm()) < allowed
        else:
            assert torch.equal(one, other)


class Network(nn.Module):
    """Convolutions before normalisation of which some may be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.seen, self.twice = (nn.Conv2d(3, 3, 1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
        self.unlike = nn.BatchNorm2d(3, track_running_stats=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> (N, 3, H, W)."""
        x = self.norms[0](self.alone(x))
        between = self.seen(x)
        x = self.norms[1](between) + between
        return self.unlike(self.norms[2](self.twice(self.twice(x))))


def test_a_norm_is_folded_where_nothing_else_sees_its_convolution() -> None:
    torch.manual_seed(0)
    model = Network()
    for _ in range(3):
        model(torch.randn(4, 3, 5, 5) * 3 + 1)
    model.eval()
    images = torch.randn(4, 3, 5, 5)
    truth = model(images).detach()
    frozen, told = freeze(copy.deepcopy(model), "fp32")
    assert told == {"folded": 1, "weights": "float32"}
    assert torch.allclose(frozen(images), truth, atol=1e-5)
    assert sum(isinstance(module, nn.BatchNorm2d) for module in frozen.modules()) == 3


def test_a_network_that_cannot_be_traced_runs_as_it_is() -> None:
    class Choosing(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model, images = Choosing().eval(), torch.ones(1, 3, 2, 2)
    truth = model(images).detach()
    frozen, told = freeze(model, "fp32")
    assert told["folded"] == 0 and "control flow" in told["why_none_folded"]
    assert torch.equal(frozen(images), truth)


def test_weights_of_derived_classes_are_not_cast() -> None:
    """They may be computed with before the product, in float32."""

    class Standardised(nn.Linear):
        pass

    model, told = freeze(nn.Sequential(nn.Linear(2, 2), Standardised(2, 2), nn.LayerNorm(2)), "bf16")
    assert told["weights"] == "bfloat16"
    assert [parameter.dtype for parameter in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 4
