"""fp8 for the linear layers of a GPT: which layers, what is refused and why, and, where torchao is, its arithmetic emulated on a CPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.engine.precision import check_precision, compute_in_fp8
from caraml.engine.step import make_step
from caraml.suite.model import Precision, Stated
from caraml.workloads.base import Task
from tests.conftest import MakePoint
from tests.suite.test_knobs import GPT, plan
from tests.tasks import built

CPU = torch.device("cpu")


def network(micro_batch: int = 4, **params: Any) -> Task:
    return built("gpt", {**GPT, **params}, micro_batch, accumulation=4 // micro_batch)


def test_only_what_fp8_computes_is_planned() -> None:
    (cpu,), (gpu,) = plan('precision = "fp8"'), plan('precision = "fp8"', "gpu")
    assert cpu.skip == "fp8 is an arithmetic of GPUs" and gpu.skip is None and gpu.point.label == "n b8 fp8"
    for line in ("devices = 2\nfsdp = 2", "devices = 2\ntp = 2", 'params = { backend = "megatron" }'):
        (refused,) = plan(f'precision = "fp8"\n{line}', "gpu", devices=2)
        assert refused.skip is not None and "ask for bf16" in refused.skip, line


@pytest.mark.parametrize(
    ("gpu", "hip", "fit"),
    [
        ({"major": 9, "minor": 0}, None, True),
        ({"major": 8, "minor": 9}, None, True),
        ({"major": 8, "minor": 0}, None, False),
        ({"gcnArchName": "gfx942:sramecc+:xnack-"}, "7.0", True),
        ({"gcnArchName": "gfx90a", "major": 9, "minor": 0}, "7.0", False),
    ],
)
def test_a_gpu_without_units_or_a_machine_without_torchao_is_refused(
    monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], hip: str | None, fit: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="Test GPU", **gpu))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("caraml.engine.precision.find_spec", lambda name: None)
    device = torch.device("cuda", 0)
    why = "needs the package torchao" if fit else "Test GPU has no units for it"
    with pytest.raises(EnvironmentUnfitError, match=f"precision: found 'fp8', .*{why}"):
        check_precision("fp8", device)
    monkeypatch.setattr("caraml.engine.precision.find_spec", lambda name: object())
    with nullcontext() if fit else pytest.raises(EnvironmentUnfitError):
        check_precision("fp8", device)


@pytest.mark.parametrize(
    ("gpu", "hip", "lacking"),
    [
        ({"major": 10, "minor": 0}, None, set()),
        ({"major": 7, "minor": 0}, None, {"tf32", "bf16", "fp8"}),
        ({"major": 8, "minor": 6}, None, {"fp8"}),
        ({"gcnArchName": "gfx90a:sramecc+:xnack-", "major": 9, "minor": 0}, "7.0", {"tf32", "fp8"}),
        ({"gcnArchName": "gfx906", "major": 9, "minor": 0}, "7.0", {"tf32", "bf16", "fp8"}),
        ({"gcnArchName": "gfx950:sramecc+:xnack-", "major": 9, "minor": 5}, "7.0", {"tf32"}),
    ],
)
def test_what_a_gpu_has_no_units_for_is_refused_before_it_computes_something_else(
    monkeypatch: pytest.MonkeyPatch, gpu: dict[str, Any], hip: str | None, lacking: set[Precision]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="Test GPU", **gpu))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("caraml.engine.precision.find_spec", lambda name: object())
    device = torch.device("cuda", 0)
    for precision in get_args(Stated):
        with pytest.raises(EnvironmentUnfitError, match=f"'{precision}', but Test GPU") if precision in lacking else nullcontext():
            check_precision(precision, device)
    check_precision("bf16", device, emulated=True)


def test_the_layers_of_the_blocks_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the head, whose loss multiplies by itself, and no layer with sides that fp8 products do not take."""
    asked: dict[str, Any] = {}
    library = ModuleType("torchao.float8")
    library.Float8LinearConfig = lambda **options: options  # type: ignore[attr-defined]
    library.convert_to_float8_training = lambda model, **named: asked.update(named)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", library)
    for width, count in ((64, 8), (72, 0)):
        model = network(width=width).model
        compute_in_fp8(model, emulate=True)
        chosen = [name for name, module in model.named_modules() if asked["module_filter_fn"](module, name)]
        assert len(chosen) == count and all(name.startswith("blocks.") for name in chosen) and asked["config"] == {"emulate": True}


@pytest.mark.slow
def test_training_in_fp8_is_close_to_bf16(make_point: MakePoint) -> None:
    """Emulated, with and without accumulation: losses and parameters after a few steps, and the same parameters under the same names."""
    pytest.importorskip("torchao.float8", reason="torchao is not installed: pip install 'caraml[fp8]'")
    found: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for precision, micro_batch in (("bf16", 4), ("fp8", 4), ("bf16", 2), ("fp8", 2)):
        task = network(micro_batch)
        names = list(task.model.state_dict())
        if precision == "fp8":
            compute_in_fp8(task.model, emulate=True)
        assert list(task.model.state_dict()) == names
        step = make_step(task, make_point(workload="gpt", global_batch=4, micro_batch=micro_batch, precision=precision), CPU)
        losses = torch.stack([loss for _ in range(5) if (loss := step().loss) is not None])
        found[precision, micro_batch] = losses, torch.cat([parameter.detach().flatten() for parameter in task.model.parameters()])
    for micro_batch in (4, 2):  # which also give other batches
        (losses, weights), (own, own_weights) = found["bf16", micro_batch], found["fp8", micro_batch]
        assert losses[-1] < losses[0] and not torch.equal(own, losses) and torch.allclose(own, losses, rtol=2e-2)
        assert (own_weights - weights).norm() < 0.05 * weights.norm()
