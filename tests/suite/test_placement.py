"""Placements: what they are called, what they refuse and what they propose, and that points without one keep their keys."""

from __future__ import annotations

from typing import Any

import pytest

from caraml.base.toml import parse_toml
from caraml.suite.expand import PlannedPoint, expand
from caraml.suite.load import Suite, SuiteFile, load_suite
from caraml.suite.model import Placement
from caraml.suite.placement import Machine, ModelShape, misfit
from caraml.workloads import params_of
from tests.conftest import MakePoint

SHAPE = ModelShape(layers=8, heads=6, vocabulary=640, sequence_length=64, tied_head=False)


def machine(nodes: int = 1, devices: int = 8) -> Machine:
    return Machine("m", "test device", "gpu", "test", nodes=nodes, devices_per_node=devices)


def plan(lines: str, nodes: int = 1, devices: int = 8) -> list[PlannedPoint]:
    text = f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\ndevices = "all"\n{lines}\n'
    document = parse_toml(text, "s.toml")
    return expand(SuiteFile(document.validate(Suite), document), machine(nodes, devices), params_of).points


def test_the_key_of_a_point_without_placement_is_what_it_was(make_point: MakePoint) -> None:
    """Records of earlier runs are found by this key: whatever placement learns, points that do without it must not change theirs."""
    assert make_point().key == make_point(placement=Placement(schedule="1f1b")).key
    content = make_point().model_dump(mode="json")
    assert make_point().key == make_point(**{**content, "placement": {}}).key
    keys = {
        make_point(devices=4, global_batch=16, placement=placement).key for placement in (Placement(), Placement(tp=2), Placement(pp=2))
    }
    assert len(keys) == 3


def test_what_has_no_effect_makes_no_other_point() -> None:
    points = plan('global_batch = 16\ntp = [1, 2]\nsp = true\nschedule = "gpipe"')
    assert [planned.point.placement for planned in points] == [Placement(), Placement(tp=2, sp=True)]


def test_dp_is_what_is_left_over_and_the_accumulation_follows() -> None:
    (planned,) = plan("global_batch = 64\nmicro_batch = 2\ntp = 2\npp = 2\nparams = { tied_head = false }")
    point = planned.point
    assert planned.skip is None and (point.world, point.dp, point.accumulation) == (8, 2, 16)
    assert point.label == "n b64 1x8 dp2 tp2 pp2 1f1b fp32"


def test_accumulation_fixed_is_weak_scaling_and_world_fills_nodes() -> None:
    points = plan("world = [4, 8, 16, 32]\naccumulation = 3\nmicro_batch = 2\ntp = 2", nodes=4)
    assert [(p.point.nodes, p.point.devices, p.point.dp, p.point.global_batch) for p in points] == [
        (1, 4, 2, 12),
        (1, 8, 4, 24),
        (2, 8, 8, 48),
        (4, 8, 16, 96),
    ]
    assert {planned.point.accumulation for planned in points} == {3}


def test_world_is_the_number_of_devices_on_nodes_of_any_size() -> None:
    points = plan("world = [2, 3, 4, 8, 9, 7]\naccumulation = 1", nodes=8, devices=3)
    assert [(p.point.world, p.point.nodes, p.point.devices) for p in points] == [
        (2, 1, 2),
        (3, 1, 3),
        (4, 2, 2),
        (8, 4, 2),
        (9, 3, 3),
        (7, 7, 1),
    ]


def test_fsdp_all_is_every_copy() -> None:
    (planned,) = plan('global_batch = 16\ntp = 2\nfsdp = "all"')
    assert planned.point.placement.fsdp == 4 and planned.point.placement.label(planned.point.dp) == "fsdp4 tp2"
    (planned,) = plan("global_batch = 16\nfsdp = 4")
    assert planned.point.placement.label(planned.point.dp) == "dp2 fsdp4"


def test_devices_that_divide_sequences_work_for_one_copy_and_share_its_parameters() -> None:
    (planned,) = plan('global_batch = 16\ntp = 2\ncp = 2\nfsdp = "all"')
    point = planned.point
    assert planned.skip is None and (point.dp, point.holders, point.placement.fsdp, point.accumulation) == (2, 4, 4, 1)
    assert point.placement.label(point.dp) == "dp2 fsdp4 cp2 tp2"
    (planned,) = plan("global_batch = 16\ncp = 4\nfsdp = 2")
    assert planned.point.placement.label(planned.point.dp) == "dp2 fsdp2 cp4"
    (planned,) = plan("global_batch = 16\ncp = 8\ndistributed_optimizer = true")
    assert planned.point.placement.label(1) == "cp8 distributed-optimizer", "one copy, but eight devices with its parameters"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("cp = 8\nparams = { sequence_length = 1032 }", "2 x cp = 16 does not divide the sequence length (1032)"),
        (
            "cp = 2\ntp = 4\nsp = true\nparams = { sequence_length = 1020, heads = 12 }",
            "tp = 4 does not divide the sequence length (510 of each device)",
        ),
        ('cp = 2\nparams = { backend = "megatron" }', "sp and cp need params.backend = 'torch'"),
        ('cp = 2\nattention = "cudnn"', "takes whole sequences only"),
        ('cp = 2\nmode = "inference"', "whole copies only"),
    ],
)
def test_sequences_that_cannot_be_divided_are_refused(lines: str, reason: str) -> None:
    (planned,) = plan(f"global_batch = 16\n{lines}")
    assert planned.skip is not None and reason in planned.skip


def test_where_speaks_of_placements() -> None:
    points = plan('global_batch = 64\ntp = [1, 2, 4]\npp = [1, 2]\nparams = { tied_head = false }\nwhere = ["tp * pp == 4", "dp == 2"]')
    assert [(p.point.placement.tp, p.point.placement.pp) for p in points] == [(2, 2), (4, 1)]


@pytest.mark.parametrize(
    ("placement", "values", "reason", "proposal"),
    [
        ({"tp": 4}, {}, "tp = 4 does not divide the heads (6)", "tp = 2"),
        ({"tp": 3}, {}, "does not divide 8 devices", "tp = 2"),
        ({"pp": 3}, {}, "does not divide 8 devices", "pp = 4"),
        ({"pp": 8, "schedule": "interleaved"}, {}, "16 pipeline stages for 8 layers", "pp = 4"),
        ({"fsdp": 3}, {}, "fsdp = 3 does not divide dp = 8", "fsdp = 4"),
        ({"tp": 2}, {"global_batch": 6, "micro_batch": 1}, "not divisible by micro-batch x dp = 1 x 4 = 4", "dp = 2"),
        ({"pp": 8}, {"global_batch": 4, "micro_batch": 1}, "at least pp = 8 micro-batches per step, found 4", "pp = 8, schedule"),
        ({"pp": 2, "schedule": "interleaved"}, {"global_batch": 20, "micro_batch": 1}, "2 equal rounds", 'schedule = "1f1b"'),
        ({"fsdp": 2, "distributed_optimizer": True}, {}, "exclude each other", "fsdp = 2"),
        ({"cp": 3}, {}, "tp x cp x pp = 1 x 3 x 1 = 3 does not divide 8 devices", "cp = 4"),
        ({"cp": 4, "fsdp": 3}, {}, "fsdp = 3 does not divide dp x cp = 8", "cp = 4, fsdp = 4"),
        ({"cp": 2, "tp": 4}, {}, "tp = 4 does not divide the heads (6)", "tp = 2, cp = 2"),
    ],
)
def test_each_refusal_names_the_nearest_that_fits(
    make_point: MakePoint, placement: dict[str, Any], values: dict[str, Any], reason: str, proposal: str
) -> None:
    point = make_point(devices=8, placement=Placement(**placement), **{"global_batch": 64, "micro_batch": 1, **values})
    found = misfit(point, SHAPE)
    assert found is not None and reason in found and "nearest that fits" in found
    assert proposal in found.split("nearest that fits")[1], found


def test_refusals_without_a_way_out_say_so(make_point: MakePoint) -> None:
    point = make_point(devices=7, placement=Placement(tp=7), global_batch=8, micro_batch=1, mode="inference")
    assert "whole copies only" in (misfit(point, SHAPE) or "")
    whole = misfit(make_point(devices=2, placement=Placement(tp=2)), None)
    assert whole is not None and "'fake' is trained in whole copies only" in whole and "dp = 2" in whole


def test_a_tied_head_and_a_pipeline_exclude_each_other() -> None:
    (planned,) = plan("global_batch = 64\nmicro_batch = 2\npp = 2")
    assert planned.skip is not None and "tied_head = false" in planned.skip


def test_many_devices_are_refused_in_good_time(make_point: MakePoint) -> None:
    point = make_point(nodes=512, devices=8, placement=Placement(tp=5), global_batch=8192, micro_batch=1)
    assert "nearest that fits" in (misfit(point, SHAPE) or "")


def test_recomputation_is_not_compiled() -> None:
    (planned,) = plan('global_batch = 8\ncompile = "default"\nparams = { recompute = "full" }')
    assert planned.skip is not None and 'compile = "off"' in planned.skip


def test_batch_and_devices_have_one_source() -> None:
    with pytest.raises(Exception, match="global_batch or accumulation, not both"):
        plan("global_batch = 64\naccumulation = 2")
    with pytest.raises(Exception, match="world or nodes, not both"):
        plan("global_batch = 64\nworld = 8\nnodes = 1")


def test_epicure_s_scaling_meets_where_the_guide_says() -> None:
    """Weak and strong have the same batch at 32 devices of the small model and 1024 of the large one."""
    batches: dict[str, dict[int, int]] = {}
    for name in ("llm-weak", "llm-strong"):
        for planned in expand(load_suite(name), machine(nodes=512), params_of).points:
            assert planned.skip is None, planned.skip
            batches.setdefault(planned.point.benchmark, {})[planned.point.world] = planned.point.global_batch
    weak, strong = batches["gpt-857M weak"], batches["gpt-857M strong"]
    assert weak[32] == strong[32] == 512 and weak[256] == 8 * strong[256]
    weak, strong = batches["gpt-175B weak"], batches["gpt-175B strong"]
    assert min(weak) == 128 and weak[1024] == strong[1024] == 1536 and weak[128] == 192


@pytest.mark.parametrize("workload", ["regime_clustering", "downscaling_gan"])
def test_a_step_of_its_own_takes_the_whole_batch(workload: str) -> None:
    """Else the point is planned and queued, and fails while it is built."""
    keys = f'workload = "{workload}"\nglobal_batch = 16\nmicro_batch = [8, 16]\ncompile = "off"\n'
    document = parse_toml(f'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\n{keys}', "s.toml")
    first, second = expand(SuiteFile(document.validate(Suite), document), machine(), params_of).points
    assert second.skip is None and first.skip == f"{workload} makes its own step over the whole batch: expected micro_batch = 16"
