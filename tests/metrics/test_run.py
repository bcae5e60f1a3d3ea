"""Metrics of a whole run against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from caraml.engine.matmul import BatchedProducts, Products
from caraml.engine.replacement import Masks
from caraml.metrics.model import METRICS, Epoch, Facts, Measured, Phase, Window, unit_of
from caraml.metrics.run import TRAINING_PHASES, run_metrics, whole_run
from caraml.power.model import BoundaryEnergy, ChannelEnergy, WindowEnergy
from tests.report.record_factory import make_point

PHASES = [
    Phase(name="start", start=0, end=3),
    Phase(name="build", start=3, end=4),
    Phase(name="data", start=4, end=9),
    Phase(name="build", start=9, end=10),
    Phase(name="first_step", start=10, end=14),
    Phase(name="warm_up", start=14, end=20),
    Phase(name="measure", start=20, end=40),
    Phase(name="save_model", start=41, end=43),
]


def run(**changes: object) -> Measured:
    facts = Facts(item="x", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="", samples_per_epoch=16)
    values = {
        "point": make_point(global_batch=8),
        "facts": facts,
        "window": Window(start=20, end=23, steps=2, samples=16, items=16, first_step=4),
        "steps": [4.0, 1.0, 2.0, 1.0, 1.5, 1.5],
        "data_wait": 1.0,
        "first_step_time": 4.0,
        "time_to_first_step": 14.0,
        "runtime": 50.0,
        "phases": PHASES,
        "whole_data_wait": 6.0,
        "validation_loss": 0.5,
        "no_validation": "none",
        "host_memory": 7,
    }
    return Measured(**{**values, **changes})  # type: ignore[arg-type]


def test_runtime_splits_into_loading_training_and_rest() -> None:
    found = {name: metric.value for name, metric in run_metrics(run(), None).items()}
    assert (found["runtime"], found["training_time"], found["saving_time"]) == (50, 30, 2)
    assert found["loading_time"] == 5 + 6
    assert found["loading_share"] == pytest.approx(11 / 50) and found["training_share"] == pytest.approx(24 / 50)
    assert found["loading_share"] + found["training_share"] + found["rest_share"] == pytest.approx(1)  # type: ignore[operator]
    assert found["loss_validation"] == 0.5


def test_what_chooses_kernels_is_part_of_the_first_step_and_of_the_training() -> None:
    """As it is of the time of the first step and of the first epoch, so that epochs are never longer than the training."""
    parts = [("first_step", 10, 11), ("matmul", 11, 14), ("first_step", 14, 14)]
    inside = [phase for phase in PHASES if phase.name != "first_step"] + [Phase(name=name, start=a, end=b) for name, a, b in parts]
    found = {name: metric.value for name, metric in run_metrics(run(phases=inside), None).items()}
    assert found["training_time"] == 30
    assert {one.name or one.knob for one in (Products, BatchedProducts, Masks)} <= {*TRAINING_PHASES}


def test_epochs_are_whole_and_begin_with_the_first_step() -> None:
    found = {name: metric.value for name, metric in run_metrics(run(), None).items()}
    assert (found["epoch_time_first"], found["epoch_time_min"], found["epoch_time_max"]) == (5, 3, 5)
    assert found["epoch_time_mean"] == pytest.approx(11 / 3)


def test_an_epoch_that_was_cut_short_is_no_whole_one_and_moves_no_other() -> None:
    """Two steps an epoch: of the second there was one, 9 s long, before the batch system's warning, and then the fourth began."""
    rows = [Epoch(1, 5.0, 5.0, [4.0, 1.0], True, None, None), Epoch(2, 9.0, 9.0, [9.0], False, None, None)]
    rows += [Epoch(4, 3.0, 3.0, [1.0, 2.0], False, None, None)]
    found = run_metrics(run(steps=[4.0, 1.0, 9.0, 1.0, 2.0], epochs=rows), None)
    assert [found[f"epoch_time_{name}"].value for name in ("first", "min", "max", "mean")] == [5, 3, 5, 4]
    alone = run_metrics(run(steps=[9.0, 9.0], epochs=[rows[1], rows[1]]), None)["epoch_time_mean"]
    assert "the run had 1 of the 2 steps of an epoch" in (alone.reason or "")


def test_the_mean_epoch_has_student_s_interval() -> None:
    """Of 5, 3 and 3 s: a spread of 1.155 s, and 4.303 for two degrees of freedom."""
    mean = run_metrics(run(), None)["epoch_time_mean"]
    assert mean.low is not None and mean.high == pytest.approx(11 / 3 + 4.3027 * 1.1547 / 3**0.5, rel=1e-4)
    assert mean.low == pytest.approx(11 / 3 - 4.3027 * 1.1547 / 3**0.5, rel=1e-4)


def test_a_run_shorter_than_an_epoch_says_that_it_is_projected() -> None:
    found = run_metrics(run(steps=[4.0]), None)
    assert found["epoch_time_mean"].value == 2 * 1.5 and "projected" in (found["epoch_time_mean"].reason or "")
    assert found["epoch_time_max"].value is None and "1 of the 2 steps" in (found["epoch_time_max"].reason or "")


def test_powers_and_energies_stand_side_by_side() -> None:
    channels = [
        ChannelEnergy(id=str(i), label="", source="", boundary="device", hardware="", peak_w=watts)
        for i, watts in enumerate((300.0, 250.0))
    ]
    boundaries = {
        "device": BoundaryEnergy(energy_j=100, mean_w=20, peak_w=550, valid=True),
        "node_dc": BoundaryEnergy(energy_j=400, valid=True),
    }
    energy = WindowEnergy(name="w", start=0, end=5, channels=channels, boundaries=boundaries)
    found = run_metrics(run(), energy)
    assert found["max_device_power"].value == 300 and found["max_aggregate_power"].value == 550 and found["aggregate_power"].value == 20
    assert found["device_energy"].value == 100 and (found["node_energy"].value, found["node_energy"].scope) == (400, "node_dc")
    without = run_metrics(run(), None)
    assert without["node_energy"].value is None and without["node_energy"].reason
    assert "watts only" in (found["power_factor"].reason or "") and found["node_mean_apparent_power"].value is None
    boundaries["node_ac"] = BoundaryEnergy(energy_j=400, mean_w=80, mean_va=100, bound_va=3, peak_va=120, valid=True)
    found = run_metrics(run(), energy)
    names = ("node_mean_apparent_power", "node_max_apparent_power", "power_factor")
    assert [found[name].value for name in names] == [100, 120, 0.8] and [found[name].unit for name in names] == ["VA", "VA", "1"]
    apparent = found["node_apparent_energy"]
    assert (apparent.value, apparent.bound, apparent.unit) == (pytest.approx(5 / 36), pytest.approx(5 / 36 * 0.03), "VAh")
    assert found["power_factor"].bound is None, "that of the power is not known"
    boundaries["node_ac"].bound_j = 10  # 2 W of 80 W, and 3 VA of 100 VA
    assert run_metrics(run(), energy)["power_factor"].bound == pytest.approx(82 / 97 - 0.8)
    boundaries["node_ac"].mean_va = 79.5
    factor = run_metrics(run(), energy)["power_factor"]
    assert factor.value == pytest.approx(80 / 79.5) and factor.reason is None, "above 1 by less than its bound"
    boundaries["node_ac"].mean_va = 50
    assert "contradict" in (run_metrics(run(), energy)["power_factor"].reason or "")
    boundaries["node_ac"] = replace(boundaries["node_ac"], mean_va=100, valid=False, reason="flags: suspended")
    assert {run_metrics(run(), energy)[name].reason for name in (*names, "node_apparent_energy")} == {"not valid: flags: suspended"}


def test_every_run_metric_is_defined_with_its_unit() -> None:
    for name, metric in run_metrics(run(validation_loss=None), None).items():
        assert name in METRICS and metric.unit == unit_of(name)
        assert metric.value is not None or metric.reason


def test_action_is_the_energy_of_the_node_times_the_time_of_the_run() -> None:
    boundaries = {
        "device": BoundaryEnergy(energy_j=3_000, bound_j=30, valid=True),
        "node_ac": BoundaryEnergy(energy_j=8_000, bound_j=400, valid=True),
    }
    found = whole_run(WindowEnergy(name="run", start=5, end=25, boundaries=boundaries))
    assert (found["run_time"].value, found["run_energy"].value, found["run_node_energy"].value) == (20, 3_000, 8_000)
    action = found["action"]
    assert (action.value, action.bound, action.scope) == (160_000, 8_000, "node_ac")
    for name, metric in found.items():
        assert metric.unit == unit_of(name), name


def test_what_is_done_aside_is_no_part_of_a_run() -> None:
    def energy(start: float, joules: float) -> WindowEnergy:
        return WindowEnergy("run", start, 25, boundaries={"node_ac": BoundaryEnergy(energy_j=joules, bound_j=joules / 20, valid=True)})

    found = whole_run(energy(5, 8_000), energy(21, 1_000))
    assert (found["run_time"].value, found["run_node_energy"].value, found["action"].value) == (16, 7_000, 112_000)
    assert found["run_node_energy"].bound == 400


def test_without_a_sensor_of_the_node_there_is_no_action() -> None:
    device = {"device": BoundaryEnergy(energy_j=3_000, bound_j=30, valid=True)}
    found = whole_run(WindowEnergy(name="run", start=5, end=25, boundaries=device))
    assert found["run_energy"].value == 3_000 and found["action"].value is None and found["action"].reason
    assert all(metric.value is None and metric.reason for metric in whole_run(None).values())


def test_powers_of_an_energy_that_is_not_valid_are_in_doubt_as_it_is() -> None:
    """A sensor beyond any limit had the highest power of a device without a word; the mean of all had no bound in any record."""
    device = BoundaryEnergy(energy_j=100, bound_j=10, mean_w=20, peak_w=9e4, reason="flags: beyond_limit")
    channel = ChannelEnergy(id="0", label="", source="", boundary="device", hardware="", peak_w=9e4, flags=["beyond_limit"])
    found = run_metrics(run(), WindowEnergy(name="w", start=0, end=5, channels=[channel], boundaries={"device": device}))
    for name in ("max_device_power", "max_aggregate_power", "aggregate_power", "device_energy"):
        assert found[name].reason == "not valid: flags: beyond_limit", name
    assert (found["aggregate_power"].value, found["aggregate_power"].bound) == (20, 2)


def test_one_node_s_peak_is_not_that_of_all() -> None:
    """Two nodes, of which the sensors of one went silent: the largest peak that is known is a lower end at best."""
    channels = [ChannelEnergy(id="a/0", label="", source="", boundary="device", hardware="", peak_w=300.0)]
    boundaries = {"device": BoundaryEnergy(partial_j=100.0, reason="b: the sensor went silent")}
    found = run_metrics(run(), WindowEnergy(name="w", start=0, end=5, channels=channels, boundaries=boundaries))
    for name in ("max_device_power", "max_aggregate_power", "aggregate_power", "device_energy"):
        assert found[name].value is None and "b: the sensor went silent" in (found[name].reason or ""), name
