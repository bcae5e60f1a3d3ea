"""Every mode of every workload computes the FLOPs that it declares: one step under torch's own counter against the task's facts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from caraml.engine.precision import set_attention
from caraml.engine.step import make_step
from caraml.engine.steps import samples_in
from caraml.suite.model import Mode
from caraml.workloads import WORKLOADS, load_workload
from caraml.workloads.base import BuildContext, Task
from caraml.workloads.flops import CORRECTIONS
from tests.conftest import MakePoint
from tests.tasks import built

BATCH = 6
"""Twice a micro-batch."""
GPT = {"width": 32, "layers": 2, "heads": 2, "sequence_length": 16, "vocab_size": 100}
RESIDENT = {"data": "synthetic-device"}
CASES: dict[str, dict[str, Any]] = {
    "gpt": {**RESIDENT, **GPT},
    "gpt rotary, own head": {**RESIDENT, **GPT, "positions": "rotary", "tied_head": False},
    "gpt computed again": {**RESIDENT, **GPT, "recompute": "full"},
    "gpt computed again in part": {**RESIDENT, **GPT, "recompute": "selective", "vocab_size": 129, "sequence_length": 37},
    "image_classification": {**RESIDENT, "model": "resnet10t", "image_size": 32, "classes": 10},
    "image_classification by attention": {**RESIDENT, "model": "test_vit", "image_size": 32, "classes": 10},
    "image_compression": {"data": "resident", "width": 4, "images": 16, "held_out": 16},
    "question_answering": {**RESIDENT, "preset": "tiny", "tokens": 32},
    "temperature_postprocessing": {**RESIDENT, "patch": 32},
    "tweet_rain_classification": {**RESIDENT, "preset": "tiny", "tokens": 8},
    "radiation_emulation": RESIDENT,
    "ensemble_postprocessing": {**RESIDENT, "rows": 16, "columns": 16},
    "downscaling_gan": {**RESIDENT, "rows": 16, "columns": 16},
    "regime_clustering": {**RESIDENT, "crop": 32, "prototypes": 4, "samples": 64},
    "atmorep": {**RESIDENT, "preset": "tiny"},
}


@pytest.fixture(scope="module", autouse=True)
def _attention_by_products() -> Iterator[None]:
    """Fused kernels compute the scores again in the backward pass, which no convention of MFU counts."""
    set_attention("math")
    yield
    set_attention("auto")


@cache
def of_case(case: str) -> Task:
    return built(case.split(maxsplit=1)[0], CASES[case], BATCH // 2)


def counted(step: Any) -> float:
    """FLOPs of one step by torch's counter, whose attribution to modules is left out: gradients inside a forward pass break it."""
    counter = FlopCounterMode(display=False, custom_mapping=CORRECTIONS)
    counter.mod_tracker = SimpleNamespace(parents={"Global"}, __enter__=lambda: None, __exit__=lambda *_: None)  # type: ignore[assignment]
    with counter:
        step()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_the_size_of_every_workload_s_batches_can_be_told(case: str) -> None:
    assert samples_in(next(of_case(case).batches)) == BATCH // 2


@pytest.mark.parametrize("mode", ["train", "compute", "data", "inference"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_a_step_computes_what_its_mode_declares(case: str, mode: Mode, make_point: MakePoint) -> None:
    task, name = of_case(case), case.split(maxsplit=1)[0]
    whole = task.own_step is not None and mode in ("train", "compute")  # no accumulation there
    samples = BATCH // 2 if whole else BATCH
    point = make_point(workload=name, mode=mode, global_batch=samples, micro_batch=BATCH // 2)
    step = make_step(task, point, torch.device("cpu"))
    step()  # the first may do what no other does, as filling a memory bank
    facts = task.facts.in_mode(mode, task.batches_per_step)
    each = facts.hardware_flops_per_item or facts.flops_per_item or 0.0
    assert counted(step) == pytest.approx(each * facts.items_per_sample * samples, rel=1e-6)
    assert (facts.flops_per_item is None) == (mode == "data")


def test_inputs_are_counted_as_often_as_a_mode_takes_them() -> None:
    """A step of the GAN takes six micro-batches, and is counted as one; to predict it takes one."""
    task = of_case("downscaling_gan")
    read = {mode: task.facts.in_mode(mode, task.batches_per_step).bytes_per_sample for mode in get_args(Mode)}
    one = next(task.batches)[0][0].nbytes
    assert read == {"train": 6 * one, "compute": 6 * one, "data": 6 * one, "inference": one}


def test_the_emulator_s_rate_grows_with_all_samples_of_an_update() -> None:
    workload = load_workload("radiation_emulation")
    params = workload.params.model_validate(RESIDENT)
    context = BuildContext(params, torch.device("cpu"), 0, 2, 1, 32, 0, lambda _: nullcontext(), accumulation=8)
    assert workload.build(context).optimizer.param_groups[0]["lr"] == pytest.approx(1e-4 * 2 * 8 * 32 / 256)


def test_no_workload_is_left_out() -> None:
    trained = {load_workload(name).title for name in WORKLOADS if name != "command"}
    assert {load_workload(case.split(maxsplit=1)[0]).title for case in CASES} == trained


def test_causal_flops_are_of_the_mode_too() -> None:
    facts = of_case("gpt").facts
    assert facts.causal_flops_per_item is not None
    assert facts.in_mode("inference").causal_flops_per_item == pytest.approx(facts.causal_flops_per_item / 3)
    assert facts.in_mode("data").causal_flops_per_item is None
