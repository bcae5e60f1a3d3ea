"""The memory plan of whole copies against what torch's allocator gave out, and what fits where."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from caraml.base.errors import InputError
from caraml.engine import memory, passes
from caraml.engine.memory import memory_plan, planned_of, smallest_that_fit
from caraml.engine.passes import LiveBytes, Passes, passes_of
from caraml.engine.ranks import Ranks
from caraml.suite.model import Placement, Point
from caraml.suite.placement import ModelShape
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.model import CHUNK_BYTES, COMPILED_CHUNK_BYTES
from caraml.workloads.gpt.training import config_of, stage_on_meta
from tests.conftest import MakePoint
from tests.engine.parallel.training import measured_peak, train

SMALL = {"preset": "4M", "width": 128, "sequence_length": 128, "vocab_size": 2048, "data": "synthetic-device"}


def gpt(make_point: MakePoint, params: dict[str, Any], **values: Any) -> Point:
    filled = Params.model_validate({"data": "synthetic-device", **params}).model_dump(mode="json")
    return make_point(**{"workload": "gpt", "params": filled, "micro_batch": 1, "global_batch": 1, **values})


def shape_of(point: Point) -> ModelShape:
    shape = Params.model_validate(point.params).model_shape()
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("params", "values"),
    [
        ({}, {}),
        ({"tied_head": True, "recompute": "full"}, {}),
        ({"recompute": "selective", "positions": "rotary"}, {"precision": "bf16"}),
    ],
)
@pytest.mark.slow
def test_one_process_against_the_allocator(params: dict[str, Any], values: dict[str, Any]) -> None:
    job = {"name": "m", "params": {**SMALL, **params}, "point": {"micro_batch": 4, "global_batch": 8, **values}, "steps": 2}
    with measured_peak() as peak:
        train(job, Ranks())
    from tests.engine.parallel.training import point_of

    plan = memory_plan(point_of(job, Placement(), 1))
    assert plan.peak == pytest.approx(peak(), rel=0.2), plan.gib()


def test_live_bytes_of_known_work() -> None:
    """x -> relu(x W): the product is kept for relu's gradient as its result; the backward pass makes two gradients of that size."""

    def build() -> Any:
        x, weight = torch.empty(100, 50, requires_grad=True), torch.empty(50, 200, requires_grad=True)
        return (lambda: torch.relu(x @ weight)), (x, weight)

    found, result = passes_of(build, None), 100 * 200 * 4
    assert found.kept == result and found.forward == 2 * result, "the product lives until relu has read it"
    assert found.backward >= found.kept + 2 * result and found.cached == 0


@pytest.mark.parametrize(("tp", "pp", "tied"), [(1, 1, True), (2, 1, True), (4, 2, False), (1, 4, False)])
def test_parameters_are_those_of_the_stages(make_point: MakePoint, tp: int, pp: int, tied: bool) -> None:
    """Against the modules themselves, with what tensor parallelism leaves whole counted from them too."""
    placement = Placement(tp=tp, pp=pp)
    point = gpt(make_point, {**SMALL, "tied_head": tied}, devices=tp * pp, placement=placement, global_batch=pp)
    config = config_of(Params.model_validate(point.params))
    found = []
    for stage in range(pp):
        model = stage_on_meta(config, stage, pp)
        shared = (
            "qkv.weight",
            "qkv.bias",
            "mlp_up.weight",
            "mlp_up.bias",
            "out.weight",
            "mlp_down.weight",
            "embedding.weight",
            "head.weight",
        )
        found.append(sum(p.numel() // (tp if name.endswith(shared) else 1) for name, p in model.named_parameters()))
    assert memory_plan(point).parameters / 4 in found


@pytest.mark.slow
def test_what_saves_memory_saves_it(make_point: MakePoint) -> None:
    def peak(params: dict[str, Any] | None = None, **values: Any) -> int:
        return memory_plan(
            gpt(make_point, {"preset": "800M", "tied_head": False, **(params or {})}, **{"devices": 4, "global_batch": 8, **values})
        ).peak

    whole = peak()
    assert peak(placement=Placement(fsdp=4)) < 0.5 * whole
    assert peak(placement=Placement(distributed_optimizer=True)) < whole
    assert peak(placement=Placement(tp=4)) < 0.35 * whole
    assert peak(placement=Placement(tp=4, sp=True)) < peak(placement=Placement(tp=4))
    selective, full = peak({"recompute": "selective"}, micro_batch=2), peak({"recompute": "full"}, micro_batch=2)
    assert full < selective < peak(micro_batch=2)
    gpipe = peak(placement=Placement(pp=4, schedule="gpipe"), micro_batch=1)
    assert peak(placement=Placement(pp=4), micro_batch=1) < gpipe


@pytest.mark.slow
def test_published_sizes_fit_where_they_were_trained(make_point: MakePoint) -> None:
    """175B needs more than 100 GPUs of 40 GB (EPICURE's guide, section 2.2); 800M fits one."""
    large = gpt(make_point, {"preset": "175B", "recompute": "full"}, precision="fp16")
    found = smallest_that_fit(large, shape_of(large), 40e9, 4)
    assert found and found[0].point.world == 128 and all(one.plan.peak <= 0.9 * 40e9 for one in found)
    small = gpt(make_point, {"preset": "800M"}, precision="bf16")
    (alone,) = smallest_that_fit(small, shape_of(small), 40e9, 4)
    assert alone.point.world == 1
    assert smallest_that_fit(small, shape_of(small), 1e6, 4) == []


def test_cp_is_proposed_for_long_sequences_where_nothing_else_fits(make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """On devices of which the planned memory is the part of a sequence that attention takes, in bytes."""
    tried: list[int] = []

    def taken(point: Point) -> SimpleNamespace:
        tried.append(point.placement.cp)
        return SimpleNamespace(peak=int(point.params["sequence_length"]) / point.placement.cp)

    monkeypatch.setattr(memory, "memory_plan", taken)
    long = gpt(make_point, {"preset": "4M", "sequence_length": 65_536}, micro_batch=1)
    shape = shape_of(long)
    found = smallest_that_fit(long, shape, 65_536 / 4 / 0.9, 4)
    assert found and {(one.point.world, one.point.placement.cp, one.point.dp) for one in found} == {(4, 4, 1)}
    assert {one.point.placement.fsdp for one in found} == {1, 4}, "the devices that share a sequence can share the parameters"
    tried.clear()
    assert smallest_that_fit(long, shape, 4096, 4) == [] and max(tried) == 16, "65,536 tokens are 16 parts of 4,096"
    assert {one.point.placement.cp for one in smallest_that_fit(long, shape, 1e9, 4)} == {1}


def test_the_loss_of_each_kind_of_device_is_planned_with_few_operators(make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that does not compile holds a chunk of bf16 logits in fp32 as well, one that compiles takes larger chunks; to plan a CPU's ten
    rows at a time would take seconds."""
    calls = [0]
    dispatch = LiveBytes.__torch_dispatch__

    def counted(*args: Any) -> Any:
        calls[0] += 1
        return dispatch(*args)

    monkeypatch.setattr(LiveBytes, "__torch_dispatch__", counted)
    plans = {}
    for device, compiled in (("cpu", "off"), ("gpu", "off"), ("gpu", "default")):
        point = gpt(
            make_point, {"preset": "117M"}, micro_batch=16, global_batch=16, precision="bf16", device_class=device, compile=compiled
        )
        plans[device, compiled] = memory_plan(point).logits
    assert CHUNK_BYTES / 2 < plans["gpu", "off"] - plans["cpu", "off"] < CHUNK_BYTES
    bf16 = (COMPILED_CHUNK_BYTES - CHUNK_BYTES) / 2
    assert 0.75 * bf16 < plans["gpu", "default"] - plans["cpu", "off"] < 2 * bf16 and 0 < calls[0] < 6000


@pytest.mark.parametrize("placement", [{"fsdp": 2}, {"cp": 2}])
def test_the_loss_of_a_divided_model_is_planned_as_it_is_not_compiled(placement: dict[str, int], make_point: MakePoint) -> None:
    """Only its layers are."""
    off, on = (
        gpt(
            make_point,
            {"preset": "117M"},
            placement=Placement.of(placement),
            devices=2,
            micro_batch=16,
            global_batch=64,
            precision="bf16",
            device_class="gpu",
            compile=compiled,
        )
        for compiled in ("off", "default")
    )
    assert memory_plan(on).logits == memory_plan(off).logits


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_large_batch_is_planned_as_fast_as_a_small_one_and_as_exactly(dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of the loss was counted: minutes for a batch of a thousand sequences, and no end for more."""
    config = config_of(Params.model_validate({**SMALL, "sequence_length": 32}))
    counted = list[int]()

    def loss_of(batch: int) -> Passes:
        passes._run.cache_clear()
        passes._passes_of_loss.cache_clear()
        found = passes._run(passes._Kind(config, dtype=dtype), batch, (1 << 20, 1 << 18))  # 128 rows a chunk
        counted.append(passes._passes_of_loss.cache_info().misses)
        return found.loss

    quick = loss_of(160), loss_of(320)
    assert counted == [2, 2]
    monkeypatch.setattr(passes, "FEW_CHUNKS", 1000)
    assert quick == (loss_of(160), loss_of(320))
    assert counted[2:] == [1, 1]
    monkeypatch.undo()
    assert loss_of(10**9).most > 10**6 * quick[0].most


def test_a_batch_too_small_for_its_devices_has_the_plan_of_the_smallest_that_is_not(make_point: MakePoint) -> None:
    small, fitting = (gpt(make_point, {"preset": "117M"}, devices=4, micro_batch=2, global_batch=batch) for batch in (2, 8))
    assert memory_plan(small) == memory_plan(fitting)


def test_another_workload_is_refused(make_point: MakePoint) -> None:
    with pytest.raises(InputError, match="planned for workload 'gpt'"):
        memory_plan(make_point())
    with pytest.raises(InputError, match="not for backend 'megatron'"):
        memory_plan(gpt(make_point, {"preset": "4M", "backend": "megatron"}))
    (planned,) = planned_of([make_point(), gpt(make_point, {"preset": "4M"})])
    assert planned.point.workload == "gpt" and planned.plan.peak > 0
    with pytest.raises(InputError, match="not for mode 'inference'"):
        memory_plan(gpt(make_point, {"preset": "117M"}, mode="inference"))


def test_forward_passes_alone_are_not_left_out_as_a_training_that_does_not_fit(make_point: MakePoint) -> None:
    """Of 800M parameters at batch 64 a training has 178 GiB by plan, and inference was skipped for it."""
    points = [gpt(make_point, {"preset": "117M"}, mode=mode) for mode in ("train", "compute", "inference", "data")]
    assert [one.point.mode for one in planned_of(points)] == ["train", "compute"]
