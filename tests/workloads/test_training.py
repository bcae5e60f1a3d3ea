"""Real training through the real worker: loss falls, ranks agree with one process, energy is that of the window."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from caraml.base.format import JOULES_PER_WATT_HOUR
from caraml.results.finish import LOG
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Knobs, Point, Policy
from caraml.workloads.gpt import Params as GptParams
from caraml.workloads.image_classification import Params as ImageParams
from caraml.workloads.image_classification.training import flops_per_image
from tests.conftest import MakePoint
from tests.stores import write_script

SHORT = Policy(target=0.5, min_seconds=1, max_seconds=200, min_steps=30, max_steps=30, idle_seconds=0.3, warm_up_max_seconds=0.1)
TINY_GPT = {"width": 64, "layers": 2, "heads": 2, "sequence_length": 64, "vocab_size": 512, "learning_rate": 3e-3}


def run(root: Path, point: Point, threads: int = 1) -> Record:
    """Train in a process of its own; threads of so small models would mostly wait for each other."""
    folder = Store(root).new_attempt(point)
    done = subprocess.run([str(write_script(point, folder, threads=threads))], timeout=300, check=False)
    assert done.returncode == 0, (folder / "worker.log").read_text()
    return read_record(folder / RECORD)


def losses(root: Path, record: Record) -> list[float]:
    steps = read_table(Store(root).folder(record) / record.files["steps"])
    return [loss for loss, rank in zip(steps["loss"], steps["rank"], strict=True) if rank == 0]


def gpt(make_point: MakePoint, **values: Any) -> Point:
    params = GptParams.model_validate({"preset": "4M", **TINY_GPT, **values.pop("params", {})}).model_dump(mode="json")
    return make_point(**{"workload": "gpt", "params": params, "global_batch": 16, "micro_batch": 16, "measure": SHORT, **values})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, make_point: MakePoint) -> tuple[Path, Record]:
    """One process in fp32, and the store that it is in: what every other way to train is compared with."""
    root = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARAML_PROBE_SECONDS", "0.1")
        return root, run(root, gpt(make_point))


def test_gpt_learns_text(alone: tuple[Path, Record]) -> None:
    _, record = alone
    first, last = record.value("loss_first"), record.value("loss_last")
    assert first == pytest.approx(math.log(512), rel=0.05), "a fresh model knows nothing: the loss is that of a uniform guess"
    assert last is not None and last < first - 0.5
    assert record.facts is not None and record.facts.data["kind"] == "text" and record.facts.item == "token"
    assert record.window is not None and record.window.items == 30 * 16 * 64
    names = {phase.name for phase in record.phases}
    assert names >= {"start", "build", "data", "first_step", "warm_up", "measure"} and names & {"probe", "full_probe"}
    limits = record.peak_measured, record.bandwidth_measured
    assert all(limit is not None and limit.value and limit.kernel and limit.shape and limit.measured_at for limit in limits)
    assert record.value("mfu_measured") and record.value("share_of_limit"), "on any CPU"
    told: Any = record.environment["matmul"]
    assert told["asked"] == "auto" and told["why"] and told["library"], "on any CPU, too"


def test_a_network_learns_images(tmp_path: Path, make_point: MakePoint) -> None:
    params = ImageParams(model="test_resnet", image_size=64, classes=16, learning_rate=0.05).model_dump(mode="json")
    record = run(tmp_path, make_point(workload="image_classification", params=params, global_batch=16, micro_batch=16, measure=SHORT))
    first, last = record.value("loss_first"), record.value("loss_last")
    assert first is not None and last is not None and last < 0.9 * first
    assert record.facts is not None and record.facts.data["kind"] == "images" and record.facts.item == "image"
    assert (record.value("data_wait_share") or 0) > 0
    unknown = record.peak_measured, record.bandwidth_measured, record.metrics["share_of_limit"]
    assert all(limit is not None and limit.value is None and "CARAML_PROBE_SECONDS is 0" in (limit.reason or "") for limit in unknown), (
        "no test asks for limits that is not about them"
    )


def test_two_ranks_train_as_one_does(tmp_path: Path, make_point: MakePoint, alone: tuple[Path, Record]) -> None:
    both = run(tmp_path, gpt(make_point, devices=2, micro_batch=8))
    accumulated = run(tmp_path, gpt(make_point, micro_batch=4))
    truth = losses(*alone)[:8]
    assert losses(tmp_path, accumulated)[:8] == pytest.approx(truth, rel=2e-3)
    steps = read_table(Store(tmp_path).folder(both) / both.files["steps"])
    count = len(truth)
    pairs = [[loss for loss, step in zip(steps["loss"], steps["step"], strict=True) if step == index] for index in range(count)]
    assert [sum(pair) / 2 for pair in pairs] == pytest.approx(truth, rel=2e-3)
    assert both.window is not None and both.window.items == 30 * 16 * 64, "the global batch is that of both ranks together"
    assert "broadcast_buffers" not in (Store(tmp_path).folder(both) / LOG).read_text(), "a name that this torch will drop"
    calls = [sum(one["calls"] for one in record.environment["matmul"]["products"]) for record in (alone[1], both)]  # type: ignore[call-overload,index,union-attr]
    assert calls[1] == 2 * calls[0] > 0, "what to multiply with is the choice of both ranks"


def test_energy_is_that_of_the_window(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_POWER", "fake:constant")
    record = run(
        tmp_path, gpt(make_point, measure=Policy(min_seconds=3, max_seconds=3, idle_seconds=1, target=0.2, warm_up_max_seconds=0.5))
    )
    assert record.window is not None and record.energy is not None
    joules, per_item = record.metrics["energy"], record.metrics["energy_per_item"]
    truth = 300 * record.window.seconds
    assert joules.value is not None and joules.bound is not None and abs(joules.value - truth) <= joules.bound < 0.05 * truth
    assert per_item.value == pytest.approx(truth / record.window.items, rel=0.05)
    assert record.value("items_per_watt_hour") == pytest.approx(record.window.items / (truth / JOULES_PER_WATT_HOUR), rel=0.05)
    assert (record.energy.start, record.energy.end) == (pytest.approx(record.window.start), pytest.approx(record.window.end))
    assert record.value("idle_power") == pytest.approx(300, rel=0.05) and "fake" in record.energy.flags
    readings = read_table(Store(tmp_path).folder(record) / record.files["power"])
    assert min(readings["t_before"]) < record.window.start < record.window.end < max(readings["t_after"])


@pytest.mark.parametrize("mode", ["compute", "data"])
def test_modes_tell_input_from_arithmetic(tmp_path: Path, make_point: MakePoint, mode: str) -> None:
    """By the step in the middle: other work on the machine falls into some of them."""
    record = run(tmp_path, gpt(make_point, mode=mode))
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])
    inside = [index for index, phase in enumerate(steps["phase"]) if phase == "measure"]
    share = median(steps["data_wait"][index] / steps["seconds"][index] for index in inside)
    assert record.metrics["data_wait_share"].value is not None
    if mode == "compute":
        assert share < 0.02
    else:
        assert share > 0.5 and record.metrics["loss_last"].value is None and record.value("achieved_flops_per_device") is None


def test_resnet50_flops_are_the_published_ones() -> None:
    assert flops_per_image(ImageParams())[1] == pytest.approx(24.3e9, rel=0.01)
    assert flops_per_image(ImageParams(image_size=448))[1] == pytest.approx(4 * 24.3e9, rel=0.01)


def test_what_images_share_is_not_counted_for_each() -> None:
    """The network's products for relative positions."""
    params = ImageParams(model="swinv2_cr_tiny_224")
    assert flops_per_image(params, 2)[1] < 0.99 * flops_per_image(params, 1)[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains_alike(tmp_path: Path, make_point: MakePoint, alone: tuple[Path, Record], precision: str) -> None:
    knobs = Knobs(emulated=True)  # on any CPU
    record = run(
        tmp_path, gpt(make_point, precision=precision, knobs=knobs, measure=SHORT.model_copy(update={"min_steps": 6, "max_steps": 6}))
    )
    # The loss scaler of fp16 may skip its first update, so its losses may lag a step behind.
    assert losses(tmp_path, record)[:5] == pytest.approx(losses(*alone)[:5], rel=5e-2)


def test_an_unknown_network_gets_the_nearest_name(tmp_path: Path, make_point: MakePoint) -> None:
    params = ImageParams(model="resnet5O", data="synthetic").model_dump(mode="json")
    point = make_point(workload="image_classification", params=params)
    folder = Store(tmp_path).new_attempt(point)
    assert subprocess.run([str(write_script(point, folder, threads=1))], timeout=300, check=False).returncode == 1
    assert "resnet50" in (read_record(folder / RECORD).reason or "")
