"""Stages that make a receive buffer when they need it: the same numbers to the bit as torch's own, in memory that does not grow."""

from __future__ import annotations

from typing import Any

import pytest

from caraml.engine import memory
from caraml.engine.parallel import step
from caraml.engine.parallel.step import is_lean
from caraml.suite.model import Placement
from tests.engine.parallel.test_parity import Results, run
from tests.engine.parallel.training import point_of

SIZES = {"width": 128, "sequence_length": 32, "vocab_size": 128}
STATE = 4 * 2 * 32 * 128
"""Bytes of the hidden states of a micro-batch of two samples."""
HALF = {"precision": "bf16", "knobs": {"half_residual": True}}
CASES: dict[int, list[dict[str, Any]]] = {
    2: [
        {"name": f"{schedule} {label}", "placement": {"pp": 2, "schedule": schedule}, **values}
        for schedule in ("1f1b", "interleaved")
        for label, values in {
            "fp32": {},
            "full": {"params": {"recompute": "full"}},
            "bf16": {"point": HALF},
        }.items()
    ]
    + [{"name": "gpipe fp32", "placement": {"pp": 2, "schedule": "gpipe"}}],
    4: [
        {"name": "1f1b of four", "placement": {"pp": 4}},
        {"name": "interleaved of four", "placement": {"pp": 4, "schedule": "interleaved"}},
        {"name": "1f1b, two copies", "placement": {"pp": 2}},
        {"name": "interleaved, two shards", "placement": {"pp": 2, "fsdp": 2, "schedule": "interleaved"}},
        {"name": "interleaved, tp", "placement": {"pp": 2, "tp": 2, "sp": True, "schedule": "interleaved"}},
    ],
}
ALL = [(world, case) for world, cases in CASES.items() for case in cases]
GROWING = [(world, case) for world, case in ALL if world == case["placement"]["pp"]]


def job(world: int, case: dict[str, Any], count: int, torch_buffers: bool) -> dict[str, Any]:
    placement = Placement(**case["placement"])
    copies = world // placement.model_parallel
    params = {**SIZES, "layers": placement.stages, **case.get("params", {})}
    point = {"micro_batch": 2, "global_batch": 2 * copies * count, **case.get("point", {})}
    name = f"{case['name']} {count} {torch_buffers}"
    return {
        **case,
        "name": name,
        "params": params,
        "point": point,
        "steps": 2,
        "live": (world, case) in GROWING,
        "torch_buffers": torch_buffers,
    }


def counts(world: int, case: dict[str, Any]) -> tuple[int, ...]:
    """Micro-batches of a step of two rounds of the interleaved schedule, and of a longer one where memory is looked at.

    Where copies, shards or parts of a layer are exchanged it is not: threads of gloo hold some buffers for longer when the machine is busy.
    """
    placement = case["placement"]
    few = (4 if placement.get("schedule") == "gpipe" else 2) * placement["pp"]
    return (few, few + 4) if world == placement["pp"] else (few,)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder, found = tmp_path_factory.mktemp("pipeline"), {}
    for world, cases in CASES.items():
        jobs = [job(world, case, count, own) for case in cases for count in counts(world, case) for own in (False, True)]
        found |= run(folder, world, jobs)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("world", "case"), ALL, ids=lambda value: value["name"] if isinstance(value, dict) else None)
def test_losses_and_weights_are_those_of_torch_s_own_buffers_to_the_bit(results: Results, world: int, case: dict[str, Any]) -> None:
    for count in counts(world, case):
        lean, own = (results[job(world, case, count, torch_buffers)["name"]] for torch_buffers in (False, True))
        assert lean["losses"] == own["losses"] and lean["losses"][0] != lean["losses"][1]
        assert lean["digests"] == own["digests"] and len(set(lean["digests"])) > 1


@pytest.mark.processes
@pytest.mark.parametrize(("world", "case"), GROWING, ids=lambda value: value["name"] if isinstance(value, dict) else None)
def test_memory_does_not_grow_with_the_micro_batches(results: Results, world: int, case: dict[str, Any]) -> None:
    """But by the tokens that a rank holds and those that the test draws, where torch's own stages have a buffer or more for each.

    Two rounds of the interleaved schedule have one state less on its way than later ones.
    """
    few, many = counts(world, case)
    lean, own = ([results[job(world, case, n, buffers)["name"]]["peaks"] for n in (few, many)] for buffers in (False, True))
    placement, more = Placement(**case["placement"]), many - few
    state = STATE // (2 if "point" in case else 1)
    tokens = 8 * 2 * (32 + 1) * more * 2 + 1024  # and some scalars
    assert tokens < more * state / 4
    for shorter, longer in zip(*own, strict=True):
        assert longer - shorter >= more * state
    spare = 1 if placement.schedule == "interleaved" else 0
    if placement.schedule != "gpipe":
        for shorter, longer in zip(*lean, strict=True):
            assert longer - shorter <= tokens + state * spare, (shorter, longer)
        assert all(ours < theirs for ours, theirs in zip(lean[1], own[1], strict=True))
    for count, peaks, theirs in zip((few, many), lean, own, strict=True):
        plan = memory.memory_plan(point_of(job(world, case, count, False), placement, world))
        assert plan.peak == pytest.approx(max(peaks), rel=0.1), plan.gib()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "_ATTRIBUTES", {"renamed"})
            plan = memory.memory_plan(point_of(job(world, case, count, True), placement, world))
        assert plan.peak == pytest.approx(max(theirs), rel=0.1), plan.gib()


def test_a_torch_that_changed_its_stage_gets_its_own_and_the_plan_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_lean(), "torch's stage is made otherwise: see caraml.engine.parallel.step"

    def peaks() -> list[int]:
        cases = [{"name": "p", "placement": {"pp": 4, "schedule": schedule}} for schedule in ("1f1b", "interleaved")]
        return [
            memory.memory_plan(point_of(job(4, case, count, False), Placement(**case["placement"]), 4)).peak
            for case in cases
            for count in (100, 200)
        ]

    plain, interleaved = peaks()[:2], peaks()[2:]
    tokens = 8 * 2 * 32 * 100
    assert plain[1] - plain[0] in (0, tokens) and interleaved[1] - interleaved[0] in (0, tokens)
    monkeypatch.setattr(step, "_ATTRIBUTES", {"args_recv_info", "renamed"})
    assert not is_lean()
    plain, interleaved = peaks()[:2], peaks()[2:]
    assert plain[1] - plain[0] == 2 * STATE * 100, "a stage in the middle receives states and gradients"
    assert interleaved[1] - interleaved[0] == 8 * STATE * 100, "two such stages, which also keep what they send"
    monkeypatch.undo()
    monkeypatch.setattr(step, "_METHODS", ["get_fwd_recv_ops", "renamed"])
    assert not is_lean()
