"""Megatron-Core's GPT against ours with the same weights, as far as it goes without a GPU, and what is said where it does not go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.toml import parse_toml
from caraml.cli import app
from caraml.suite.expand import expand
from caraml.suite.load import Suite, SuiteFile
from caraml.suite.model import Knobs, Placement, Point
from caraml.suite.placement import Machine, misfit, why_skipped
from caraml.workloads import params_of
from caraml.workloads.base import BuildContext
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.megatron_core import MegatronGPT
from caraml.workloads.gpt.model import GPT, GPTConfig
from caraml.workloads.gpt.training import build
from tests.conftest import MakePoint
from tests.engine.parallel.test_parity import DEEP, HALF, TOLERANCE, Results, difference, run
from tests.engine.parallel.test_worker_placement import SHORT
from tests.engine.parallel.test_worker_placement import run as run_point

SMALL = GPTConfig(vocab_size=128, sequence_length=32, width=48, layers=2, heads=4)
CPU = torch.device("cpu")
SUITE = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nglobal_batch = 4\n'


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves neither a process group behind nor the variables that are set for it."""
    core = pytest.importorskip("megatron.core")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "")  # is removed again in the end
        monkeypatch.delenv(name)
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
    1: [
        {"name": "ours", "params": {}},
        {"name": "whole"},
        {"name": "whole tied", "params": {"tied_head": True}},
        {"name": "deep", "params": {**DEEP, "backend": "torch"}},
    ],
    2: [
        {"name": "tp2", "placement": {"tp": 2}},
        {"name": "tp2 tied", "placement": {"tp": 2}, "params": {"tied_head": True}},
        {"name": "pp2", "placement": {"pp": 2}},
        {"name": "deep pp2 interleaved", "placement": {"pp": 2, "schedule": "interleaved"}, "params": DEEP},
    ],
    4: [
        {"name": "dp2 x tp2", "placement": {"tp": 2}},
        {"name": "dp2 x pp2", "placement": {"pp": 2}},
        {"name": "tp2 x pp2", "placement": {"tp": 2, "pp": 2}},
    ],
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
        truth = "whole tied" if "tied" in name else "deep" if "deep" in name else "ours"
        assert difference(found, results[truth]["losses"]) < TOLERANCE, name
        assert found["losses"][-1] < 0.95 * found["losses"][0], name
    assert all(0.5 * held < part < 0.52 * held for part in results["tp2"]["held"]), "norms, positions and some biases are not divided"


@pytest.mark.parametrize(
    ("params", "values", "words"),
    [
        ({"positions": "rotary"}, {}, "needs a GPU for rotary positions: expected params.positions = 'learned'"),
        ({"recompute": "full"}, {}, "needs a GPU to recompute: expected params.recompute = 'off'"),
        ({}, {"precision": "bf16", "knobs": Knobs(emulated=True)}, "computes in fp32 only on CPUs: expected precision = 'fp32'"),
        ({}, {"knobs": Knobs(half_residual=True), "device_class": "gpu"}, "keeps hidden states in fp32: expected half_residual = false"),
        ({"save_to": "kept"}, {"devices": 2, "placement": Placement(tp=2)}, "whole copies only: leave out params.save_to, or tp and pp"),
        (
            {"start_from": "kept"},
            {"devices": 2, "placement": Placement(pp=2)},
            "copies only: leave out params.start_from, or tp and pp",
        ),
    ],
)
def test_what_the_library_cannot_do_is_skipped(params: dict[str, Any], values: dict[str, Any], words: str, make_point: MakePoint) -> None:
    """Parameters of parts and stages have the same names on several devices: of a checkpoint, one would be kept."""
    machine = Machine(name="m", device="d", device_class="cpu", software="s", nodes=1, devices_per_node=2)
    for backend in ("megatron", "torch"):
        given = Params.model_validate({"preset": "4M", "tied_head": False, "backend": backend, **params})
        point = make_point(workload="gpt", **{"global_batch": 8, "micro_batch": 2, **values})
        found = why_skipped(point, machine, given)
        assert found is None if backend == "torch" else words in (found or "") and "params.backend = 'torch'" in (found or ""), found


@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
@pytest.mark.parametrize("asked", [{"tp": 2, "sp": True}, {"cp": 2}, {"fsdp": 2}, {"distributed_optimizer": True}])
def test_what_is_said_to_be_refused_everywhere_is(asked: dict[str, Any], device_class: str, make_point: MakePoint) -> None:
    machine = Machine(name="m", device="d", device_class=device_class, software="s", nodes=1, devices_per_node=2)  # type: ignore[arg-type]
    for backend in ("megatron", "torch"):
        given = Params.model_validate({"preset": "4M", "tied_head": False, "backend": backend})
        values = {"devices": 2, "global_batch": 8, "micro_batch": 2, "device_class": device_class}
        found = why_skipped(make_point(workload="gpt", params=given.model_dump(), placement=Placement(**asked), **values), machine, given)
        assert found is None if backend == "torch" else "params.backend = 'torch'" in (found or ""), found


def test_a_suite_without_a_memory_plan_says_whose_network_has_one(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SUITE + 'params.backend = "megatron"')
    said = CliRunner().invoke(app, ["memory", str(tmp_path / "s.toml"), "--system", "JEDI"])
    assert "no point of workload 'gpt', backend 'torch'" in str(said.exception)


def test_the_version_of_the_library_decides_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"megatron-core": "0.16.1"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name])

    def planned() -> list[Point]:
        document = parse_toml(SUITE + 'params.backend = ["torch", "megatron"]', "s.toml")
        machine = Machine(name="m", device="d", device_class="cpu", software="torch 2", nodes=1, devices_per_node=1)
        return [one.point for one in expand(SuiteFile(document.validate(Suite), document), machine, params_of).points]

    ours, theirs = planned()
    assert (ours.software, theirs.software) == ("torch 2", "torch 2, megatron-core 0.16.1")
    versions["megatron-core"] = "0.17.0"
    assert planned()[0].key == ours.key and planned()[1].key != theirs.key


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("recompute", ["off", "full"])
def test_facts_are_those_of_the_librarys_network(recompute: Literal["off", "full"]) -> None:
    """It recomputes whole layers, where torch stops early; and its loss holds all logits, where ours goes through them in parts."""
    params = Params.model_validate({"preset": "4M", "layers": 2, "backend": "megatron", "data": "synthetic-device", "recompute": recompute})
    task = build(BuildContext(params, CPU, 0, 1, 1, 2, 0, lambda _: nullcontext(), accumulation=2))
    C, L, T, V = params.width, params.layers, params.sequence_length, params.vocab_size
    forward = 24 * C**2 + 4 * C * T
    assert task.facts.flops_per_item == 3 * (L * forward + 2 * C * V)
    assert task.facts.hardware_flops_per_item == (4 if recompute == "full" else 3) * L * forward + 6 * C * V
    assert task.facts.parameters == sum(parameter.numel() for parameter in task.model.parameters())
    assert task.facts.traffic_per_item is None and task.facts.traffic_per_step is None


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
    assert record.environment["versions"]["megatron-core"] == metadata.version("megatron-core")
    for name in ("saving_time", "loss_validation"):
        assert record.value(name) is None and "neither validated nor saved" in (record.metrics[name].reason or "")


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
