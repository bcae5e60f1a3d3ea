"""The applications through the real worker: on two ranks, in every mode, with the metrics of a whole run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Point, Policy
from caraml.workloads import load_workload
from caraml.workloads.weather import prepare_weather
from tests.conftest import MakePoint
from tests.stores import write_script

SHORT = Policy(target=0.5, min_seconds=0.5, max_seconds=20, min_steps=6, max_steps=6, idle_seconds=0, warm_up_max_seconds=0.1)


def run(root: Path, point: Point) -> tuple[Record, str]:
    folder = Store(root).new_attempt(point)
    subprocess.run([str(write_script(point, folder, threads=2))], timeout=300, check=False)
    return read_record(folder / RECORD), (folder / "worker.log").read_text()


def point(make_point: MakePoint, name: str, params: dict[str, Any], **values: Any) -> Point:
    checked = load_workload(name).params.model_validate(params).model_dump(mode="json")
    return make_point(**{"workload": name, "params": checked, "measure": SHORT, **values})


def test_a_whole_run_has_the_metrics_of_the_report(tmp_path: Path, make_point: MakePoint) -> None:
    prepare_weather("ap1", tmp_path / "ap1")
    record, log = run(
        tmp_path,
        point(make_point, "temperature_postprocessing", {"folder": str(tmp_path / "ap1"), "patch": 32}, global_batch=16, micro_batch=16),
    )
    assert record.status == "ok", log
    value = record.value
    assert value("loss_validation") is not None and (value("saving_time") or 0) > 0
    shares = [value(name) or 0 for name in ("loading_share", "training_share", "rest_share")]
    assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert record.facts is not None and record.facts.samples_per_epoch == 48
    steps = read_table(Store(tmp_path).folder(record) / record.files["steps"])["seconds"]
    epochs = [sum(steps[first : first + 48 // 16]) for first in range(0, len(steps) - 2, 48 // 16)]
    assert value("epoch_time_mean") == pytest.approx(sum(epochs) / len(epochs)) and value("epoch_time_first") == pytest.approx(epochs[0])
    assert (value("epoch_time_min") or 0) <= (value("epoch_time_mean") or 0) <= (value("epoch_time_max") or 0)
    assert (value("runtime") or 0) > (value("training_time") or 0) > 0
    assert record.metrics["node_energy"].value is not None or record.metrics["node_energy"].reason


def test_the_gan_trains_on_two_ranks(tmp_path: Path, make_point: MakePoint) -> None:
    prepare_weather("ap5", tmp_path / "ap5")
    params = {"folder": str(tmp_path / "ap5"), "learning_rate": 1e-3, "critic_learning_rate": 1e-4}
    measure = SHORT.model_copy(update={"min_steps": 4, "max_steps": 4})
    record, log = run(tmp_path, point(make_point, "downscaling_gan", params, devices=2, global_batch=4, micro_batch=2, measure=measure))
    assert record.status == "ok", log
    assert record.window is not None and record.window.samples == 4 * 4
    assert (record.value("loss_last") or 9) < (record.value("loss_first") or 0)


def test_inference_counts_forward_flops_only(tmp_path: Path, make_point: MakePoint) -> None:
    params = {"data": "synthetic", "rows": 37, "columns": 72}
    record, log = run(tmp_path, point(make_point, "ensemble_postprocessing", params, mode="inference"))
    assert record.status == "ok", log
    assert record.facts is not None and record.facts.flops_per_item == record.facts.forward_flops_per_item
    assert record.metrics["loss_last"].value is None and record.metrics["loss_validation"].value is None


def test_a_split_batch_is_refused_where_the_step_is_whole(tmp_path: Path, make_point: MakePoint) -> None:
    params = {"data": "synthetic", "rows": 16, "columns": 16}
    record, _ = run(tmp_path, point(make_point, "downscaling_gan", params, global_batch=4, micro_batch=2))
    assert record.status == "failed" and "expected global_batch / devices = 4" in (record.reason or "")
