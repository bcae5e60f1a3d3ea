"""Points that ask for it give the same bits every time, and their records carry a fingerprint of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from caraml.launch.script import environment_of
from caraml.suite.model import Policy
from caraml.workloads.image_classification import Params as ImageParams
from tests.conftest import MakePoint
from tests.workloads.test_training import gpt, losses, run

BRIEF = Policy(target=0.5, min_seconds=0, max_seconds=60, min_steps=8, max_steps=8, warm_up_max_seconds=0.1, idle_seconds=0)


@pytest.mark.processes
def test_equal_points_have_bit_equal_losses_and_fingerprints(tmp_path: Path, make_point: MakePoint) -> None:
    point = gpt(make_point, deterministic=True, measure=BRIEF)
    first, second = run(tmp_path, point, threads=2), run(tmp_path, point, threads=2)
    ours, others = losses(tmp_path, first), losses(tmp_path, second)
    common = min(len(ours), len(others))
    assert common >= 9 and [loss.hex() for loss in ours[:common]] == [loss.hex() for loss in others[:common]]
    assert first.fingerprint is not None and first.fingerprint == second.fingerprint
    assert (first.fingerprint.step, first.fingerprint.losses) == (4, [ours[3].hex()])
    other = run(tmp_path, gpt(make_point, deterministic=True, seed=1, measure=BRIEF))
    assert other.fingerprint is not None and other.fingerprint.losses != first.fingerprint.losses


@pytest.mark.processes
def test_every_rank_has_its_own_fingerprint(tmp_path: Path, make_point: MakePoint) -> None:
    record = run(tmp_path, gpt(make_point, deterministic=True, devices=2, micro_batch=8, measure=BRIEF))
    assert record.fingerprint is not None
    a, b = record.fingerprint.losses
    assert float.fromhex(a) != float.fromhex(b) and float.fromhex(a) == pytest.approx(float.fromhex(b), rel=0.2)


@pytest.mark.processes
def test_images_through_the_loader_are_bit_equal(tmp_path: Path, make_point: MakePoint) -> None:
    params = ImageParams.model_validate({"model": "resnet18", "data": "synthetic", "image_size": 64}).model_dump(mode="json")
    point = make_point(workload="image_classification", params=params, deterministic=True, measure=BRIEF)
    assert run(tmp_path, point).fingerprint == run(tmp_path, point).fingerprint is not None


def test_determinism_is_part_of_the_key_and_of_the_environment(make_point: MakePoint) -> None:
    plain, strict = make_point(device_class="gpu"), make_point(device_class="gpu", deterministic=True)
    assert plain.key != strict.key and "deterministic" in strict.label
    assert environment_of(strict, 4)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment_of(plain, 4)
