"""Epoch metrics are sums and medians that can be done by hand."""

from __future__ import annotations

import pytest

from caraml.metrics.energy import nominal_epoch
from caraml.metrics.model import Epoch, Facts, Measured, Metric, Window
from caraml.metrics.run import INPUT_BOUND_SHARE, epoch_metrics, without_wait
from caraml.suite.model import Policy
from tests.report.record_factory import make_point

ENERGY = Metric(value=7200.0, unit="J", low=7000.0, high=7400.0, scope="device")
FIRST = Epoch(1, 30.0, 20.0, [11.0, 2.0, 3.0, 4.0], True, 0.9, 0.1)
SECOND = Epoch(2, 14.0, 10.0, [4.0, 2.0, 3.0, 1.0], True, 0.5, 0.6)
THIRD = Epoch(3, 15.0, 12.0, [5.0, 2.0, 2.5, 2.5], True, 0.4, 0.7)


def run(*rows: Epoch, policy: Policy | None = None, seconds: float = 10.0, flags: list[str] | None = None) -> Measured:
    """A run of these epochs, 8 items a step, of which the last but one counts unless the policy says otherwise."""
    point = make_point(global_batch=8, measure=policy or Policy(epochs=len(rows)))
    facts = Facts(item="image", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="")
    window = Window(start=1.0, end=1.0 + seconds, steps=4, samples=32, items=32, first_step=0)
    return Measured(point, facts, window, [1.0] * 4, 0.0, 1.0, 1.0, epochs=rows, epochs_seconds=59.0, flags=flags or [])


ALL = (FIRST, SECOND, THIRD)


def test_the_counted_epoch_gives_the_three_times() -> None:
    metrics = epoch_metrics(run(*ALL), ENERGY)
    assert metrics["epoch_time"].value == 14 and metrics["epoch_training_time"].value == 10 and metrics["epoch_validation_time"].value == 4
    assert metrics["batch_time_median"].value == 2.5, "of 2 and 3: the first and the last batch do not count"
    assert metrics["epoch_time"].reason == "epoch 2 of 3 counts" and metrics["accuracy_validation"].value == 0.7


def test_first_and_later_epochs_have_rates_of_their_own() -> None:
    metrics = epoch_metrics(run(*ALL), ENERGY)
    assert metrics["throughput_first_epoch"].value == 4 * 8 / 20
    assert metrics["throughput_later_epochs"].value == pytest.approx(2 * 4 * 8 / 22)
    alone = epoch_metrics(run(FIRST), ENERGY)
    assert alone["throughput_later_epochs"].value is None and alone["throughput_later_epochs"].reason


def test_what_is_not_known_has_a_reason() -> None:
    metrics = epoch_metrics(run(Epoch(1, 2.0, 2.0, [1.0, 1.0], True, None, None), seconds=2.0), ENERGY)
    for name in ("batch_time_median", "epoch_validation_time", "accuracy_validation"):
        assert metrics[name].value is None and metrics[name].reason, name


def test_time_and_energy_to_solution_are_those_of_all_epochs_or_missing() -> None:
    asked = epoch_metrics(run(*ALL), ENERGY)
    assert asked["time_to_solution"].value == 59 and asked["energy_to_solution"] == ENERGY
    assert asked["time_to_solution"].reason == "3 epochs, as many as were asked for"
    policy = Policy(epochs=3, until_loss=0.4)
    reached = epoch_metrics(run(*ALL, policy=policy, seconds=59.0), ENERGY)
    assert reached["time_to_solution"].reason is None
    assert reached["time_to_solution"].value == 59 and reached["energy_to_solution"] == ENERGY
    missed = epoch_metrics(run(*ALL, policy=policy, seconds=59.0, flags=["target_missed"]), ENERGY)
    for name in ("time_to_solution", "energy_to_solution"):
        assert missed[name].value is None and missed[name].reason == "not reached in 3 epochs: loss 0.4, accuracy 0.7"


def test_a_nominal_epoch_scales_energy_with_its_bounds() -> None:
    per_item = Metric(value=0.09, unit="J/image", low=0.08, high=0.1, scope="device")
    metrics = nominal_epoch(per_item, 1_000_000, world=4)
    assert metrics["energy_per_epoch"].value == pytest.approx(25) and metrics["energy_per_epoch"].high == pytest.approx(1e5 / 3600)
    assert metrics["energy_per_epoch_per_device"].value == pytest.approx(6.25)
    unknown = nominal_epoch(Metric(value=None, unit="J/image", reason="no sensor"), 10, 1)
    assert unknown["energy_per_epoch"].value is None and unknown["energy_per_epoch"].reason == "no sensor"


def test_a_run_says_what_bounds_it() -> None:
    rate, alone, several = Metric(value=100.0, unit="image/s"), make_point(devices=1), make_point(devices=2)

    def wait(value: float | None, why: str | None = None) -> Metric:
        return Metric(value=value, unit="1", reason=why)

    assert "compute-bound" in (without_wait(rate, wait(INPUT_BOUND_SHARE), alone).reason or "")
    bound = without_wait(rate, wait(0.5), alone)
    assert bound.value == 200 and (bound.reason or "").startswith("input-bound: 50 % of the window")
    assert "the most" not in (bound.reason or "")
    assert "the most" in (without_wait(rate, wait(0.5), several).reason or ""), "ranks wait for one another's work, too"
    gpu, gpus = (make_point(devices=devices, device_class="gpu") for devices in (1, 2))
    assert "bound: at least 0.5 % of" in (without_wait(rate, wait(0.005), gpu).reason or ""), "it may wait for launches besides"
    of_several = without_wait(rate, wait(0.5), gpus).reason or ""
    assert "bound: 50 % of" in of_several and "the most" not in of_several and "; more where devices then wait for launches" in of_several
    unknown = without_wait(rate, wait(None, "nobody told"), alone)
    assert (unknown.value, unknown.reason) == (None, "nobody told")
    assert without_wait(rate, wait(0.99), make_point(mode="data")).value is None, "loading alone computes nothing"


def test_an_epoch_that_was_cut_short_has_no_times_but_rates() -> None:
    cut = Epoch(3, 5.0, 5.0, [2.0, 1.0, 1.5], False, None, None)
    metrics = epoch_metrics(run(FIRST, SECOND, cut, policy=Policy(epochs=3, count_epoch=3)), ENERGY)
    for name in ("epoch_time", "epoch_training_time", "epoch_validation_time"):
        assert metrics[name].value is None and (metrics[name].reason or "").endswith("epoch 3 has 3 batches and no validation")
    assert metrics["accuracy_validation"].value is None and metrics["accuracy_validation"].reason == metrics["epoch_time"].reason
    assert metrics["time_to_solution"].value is None and metrics["energy_to_solution"].reason == metrics["epoch_time"].reason
    assert metrics["batch_time_median"].value == 1.0
    assert metrics["throughput_later_epochs"].value == pytest.approx(8 * (4 + 3) / (10.0 + 5.0))
