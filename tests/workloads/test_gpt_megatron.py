"""Megatron-Core's GPT against ours with the same weights, as far as it goes without a GPU, and what is said where it does not go."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.suite.model import Placement
from caraml.suite.placement import misfit
from caraml.workloads.base import BuildContext
from caraml.workloads.gpt import Params, build
from caraml.workloads.gpt.megatron_core import MegatronGPT
from caraml.workloads.gpt.model import GPT, GPTConfig
from tests.conftest import MakePoint
from tests.engine.parallel.test_parity import HALF, TOLERANCE, Results, difference, run
from tests.engine.parallel.test_worker_placement import SHORT
from tests.engine.parallel.test_worker_placement import run as run_point

SMALL = GPTConfig(vocab_size=128, sequence_length=32, width=48, layers=2, heads=4)
CPU = torch.device("cpu")


@pytest.fixture
def megatron() -> Iterator[None]:
    """Leaves no process group behind."""
    core = pytest.importorskip("megatron.core")
    yield
    core.parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("megatron")
def test_same_start_same_loss_same_gradients() -> None:
    torch.manual_seed(5)
    ours, other = GPT(SMALL), MegatronGPT(SMALL, CPU, seed=5)
    parameters = {other.our_name(name): parameter for name, parameter in other.inner.named_parameters()}
    pairs = dict(ours.named_parameters())
    assert pairs.keys() == parameters.keys() and all(torch.equal(parameters[name], parameter) for name, parameter in pairs.items())
    tokens = torch.randint(128, (3, 33))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, other)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for name, parameter in pairs.items():
        found, truth = parameters[name].grad, parameter.grad
        assert found is not None and truth is not None and torch.allclose(found, truth, atol=1e-5), name


PLACED: dict[int, list[dict[str, Any]]] = {
    1: [{"name": "ours", "params": {}}, {"name": "whole"}, {"name": "whole tied", "params": {"tied_head": True}}],
    2: [
        {"name": "tp2", "placement": {"tp": 2}},
        {"name": "tp2 tied", "placement": {"tp": 2}, "params": {"tied_head": True}},
        {"name": "pp2", "placement": {"pp": 2}},
        {"name": "pp2 interleaved", "placement": {"pp": 2, "schedule": "interleaved"}},
    ],
    4: [{"name": "dp2 x tp2", "placement": {"tp": 2}}, {"name": "tp2 x pp2", "placement": {"tp": 2, "pp": 2}}],
}


@pytest.mark.slow
@pytest.mark.processes
def test_every_placement_trains_as_ours_does(tmp_path: Path) -> None:
    """Gradients are clipped in every step, by the norm of all parts together."""
    pytest.importorskip("megatron.core")
    results: Results = {}
    for world, jobs in PLACED.items():
        given = [{"steps": HALF, **job, "params": {"backend": "megatron", **job.get("params", {})}} for job in jobs]
        given[0]["params"] = jobs[0].get("params", given[0]["params"])
        results |= run(tmp_path, world, given)
    held = results["ours"]["held"][0]
    for name, found in results.items():
        truth = "ours" if "tied" not in name else "whole tied"
        assert difference(found, results[truth]["losses"]) < TOLERANCE, name
        assert found["losses"][-1] < 0.95 * found["losses"][0], name
    assert all(0.5 * held < part < 0.52 * held for part in results["tp2"]["held"]), "norms, positions and some biases are not divided"


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("asked", [{"positions": "rotary"}, {"recompute": "full"}], ids=str)
def test_what_needs_a_gpu_is_said(asked: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentUnfitError, match="a GPU"):
        MegatronGPT(dataclasses.replace(SMALL, **asked), CPU, seed=0)


@pytest.mark.usefixtures("megatron")
def test_cpus_compute_in_fp32() -> None:
    model, tokens = MegatronGPT(SMALL, CPU, seed=0), torch.zeros(1, 4, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(EnvironmentUnfitError, match="fp32 only"):
        model(tokens, tokens)


def test_without_the_library_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(EnvironmentUnfitError, match=r"caraml\[megatron\]"):
        MegatronGPT(SMALL, CPU, seed=0)


@pytest.mark.slow
@pytest.mark.processes
def test_a_record_of_parts_says_that_they_are_not_saved(tmp_path: Path, make_point: MakePoint) -> None:
    pytest.importorskip("megatron.core")
    values: dict[str, Any] = {"workload": "gpt", "devices": 2, "placement": Placement(tp=2), "global_batch": 4, "micro_batch": 2}
    params = {"preset": "4M", "width": 32, "layers": 2, "heads": 2, "sequence_length": 32, "vocab_size": 128, "data": "synthetic-device"}
    params = Params.model_validate({**params, "backend": "megatron"}).model_dump(mode="json")
    record = run_point(tmp_path, make_point(params=params, measure=SHORT, **values))
    assert record.status == "ok" and record.value("throughput"), record.reason
    assert record.value("saving_time") is None and "put together" in (record.metrics["saving_time"].reason or "")


@pytest.mark.parametrize("placement", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_checkpoint_of_parts_or_stages_is_refused(placement: dict[str, Any]) -> None:
    """Their parameters have the same names on several devices: one would be kept."""
    params = Params.model_validate(
        {"preset": "4M", "backend": "megatron", "data": "synthetic-device", "save_to": "kept", "tied_head": False}
    )
    tp = placement.get("tp", 1)
    context = BuildContext(params, CPU, 0, 1, 1, 2, 0, lambda _: nullcontext(), divided=True, tp=tp, global_batch=4)
    with pytest.raises(InputError, match="whole copies"):
        build(context)


@pytest.mark.parametrize(
    ("placement", "nearest"),
    [
        ({"fsdp": 2}, "dp = 2"),
        ({"distributed_optimizer": True}, "dp = 2, distributed_optimizer = false"),
        ({"tp": 2, "sp": True}, "dp = 1, tp = 2, sp = false"),
    ],
    ids=str,
)
def test_what_only_our_own_can_is_said(placement: dict[str, Any], nearest: str, make_point: MakePoint) -> None:
    params = Params.model_validate({"preset": "4M", "backend": "megatron"})
    point = make_point(workload="gpt", devices=2, placement=Placement.of(placement), global_batch=8, micro_batch=2)
    found = misfit(point, params.model_shape()) or ""
    assert "params.backend = 'torch'" in found and found.endswith(f"nearest that fits: {nearest}")


def test_layers_are_recomputed_whole_or_not_at_all() -> None:
    with pytest.raises(ValueError, match="'off' or 'full'"):
        Params.model_validate({"preset": "4M", "backend": "megatron", "recompute": "selective"})
