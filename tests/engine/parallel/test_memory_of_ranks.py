"""The memory plan of divided models against every allocation of torch on the rank, where most of it is not the layers' activations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from caraml.engine.memory import _Rank
from caraml.suite.model import Placement
from caraml.workloads.gpt import Params
from caraml.workloads.gpt.training import config_of
from tests.engine.parallel.test_parity import ROOT
from tests.engine.parallel.training import point_of

BF16 = {"precision": "bf16"}
HALF = {**BF16, "knobs": {"half_residual": True}}


def job(name: str, world: int, rank: int, placement: dict[str, Any], point: dict[str, Any], **params: Any) -> dict[str, Any]:
    """With a vocabulary large enough that its part shows."""
    sizes = {"width": 128, "layers": 6, "heads": 8, "sequence_length": 64, "vocab_size": 4096}
    return {"name": name, "world": world, "rank": rank, "placement": placement, "point": point, "params": {**sizes, **params}}


OPTIMIZER = {"distributed_optimizer": True}
GPIPE = {"pp": 2, "schedule": "gpipe"}
ROOMY = {"layers": 4, "width": 128, "sequence_length": 128, "vocab_size": 2048}
PLACED: list[dict[str, Any]] = [
    {"fsdp": 2},
    {"cp": 2},
    {"cp": 2, "fsdp": 2},
    {"tp": 2},
    {"tp": 2, "sp": True},
    {"pp": 2},
    {"pp": 2, "schedule": "interleaved"},
]
JOBS = [
    *(job(f"{placement}", 2, 0, placement, {"micro_batch": 4, "global_batch": 16}, **ROOMY) for placement in PLACED),
    job("copies", 2, 0, {}, {"micro_batch": 4, "global_batch": 16}, **ROOMY),
    job("each shard's ends wait", 4, 0, {"fsdp": 4}, {**BF16, "micro_batch": 2, "global_batch": 24}),
    job("copies of shards", 4, 0, {"fsdp": 2}, {**HALF, "micro_batch": 2, "global_batch": 24}, tied_head=True, recompute="selective"),
    job("copies of shards, two passes", 4, 0, {"fsdp": 2}, {**HALF, "micro_batch": 4, "global_batch": 32}, width=192, vocab_size=1024),
    job("ends that come again", 4, 0, {"fsdp": 2, "pp": 2}, {"micro_batch": 1}, width=160, layers=4, sequence_length=256, vocab_size=8000),
    job("ends that are summed at once", 2, 0, OPTIMIZER, {"micro_batch": 1}, layers=2, vocab_size=16000),
    job("weights in 16 bits", 8, 0, OPTIMIZER, {**BF16, "micro_batch": 4, "global_batch": 32}, width=192, vocab_size=512),
    job("shards that are dropped", 8, 0, OPTIMIZER, {**BF16, "micro_batch": 1}, width=256, layers=8, vocab_size=512, recompute="full"),
    job("losses of gpipe", 8, 4, {**GPIPE, **OPTIMIZER}, {**BF16, "global_batch": 32}, recompute="full"),
    job("first of gpipe", 8, 0, {**GPIPE, **OPTIMIZER}, {**BF16, "global_batch": 32}, recompute="full"),
    job("losses of gpipe with copies", 4, 2, GPIPE, {"micro_batch": 4, "global_batch": 64}, recompute="full"),
    job("autocast's copies", 4, 2, {"pp": 2}, {**HALF, "global_batch": 16}, width=256, recompute="full", vocab_size=1024),
    job("embedding of parts", 16, 0, {"tp": 4, "sp": True, "pp": 2, **OPTIMIZER}, {**HALF, "global_batch": 16}, width=256),
    job("embedding of parts and shards", 8, 0, {"tp": 2, "sp": True, "pp": 2, "fsdp": 2}, {"micro_batch": 1, "global_batch": 16}),
    job("loss of parts, interleaved", 8, 4, {"tp": 4, "sp": True, "pp": 2, "schedule": "interleaved"}, {"global_batch": 8}),
    job("loss of parts", 4, 0, {"tp": 4}, {"micro_batch": 4, "global_batch": 8}, tied_head=True, recompute="selective"),
    job("scores", 1, 0, {}, {**BF16, "micro_batch": 4, "knobs": {"attention": "math"}}, sequence_length=256, vocab_size=512),
]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    path = tmp_path_factory.mktemp("ranks") / "jobs.json"
    path.write_text(json.dumps(JOBS))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "tests.engine.parallel.alone", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    return {str(name): int(peak) for name, peak in json.loads((path.parent / "peaks.json").read_text()).items()}


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job["name"]))
def test_the_plan_of_a_rank_is_what_torch_allocated_there(peaks: dict[str, int], job: dict[str, Any]) -> None:
    placement = Placement(**job["placement"])
    point = point_of(job, placement, job["world"])
    plan = _Rank(point, config_of(Params.model_validate(point.params), point.knobs), job["rank"] // (job["world"] // placement.pp)).plan()
    assert plan.peak == pytest.approx(peaks[job["name"]], rel=0.1), plan.gib()
