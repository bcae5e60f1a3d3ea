"""`profile = true`: a trace of a few steps, and nothing that was measured changes by it or is lost with it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, supported_activities

from caraml.base.files import write_file
from caraml.engine import afterwards
from caraml.engine.afterwards import IN_A_PIPELINE, MEMORY, MICRO_BATCHES, STEPS, TRACE, Tracer
from caraml.engine.device import CpuDevice
from caraml.engine.steps import StepOutcome
from caraml.results.finish import MEASURED, finish
from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.model import Placement, Point, Policy
from caraml.workloads.gpt import Params
from tests.conftest import MakePoint
from tests.debian import compiler_missing
from tests.report.record_factory import make_record

ROOT = Path(__file__).parents[2]
FEW = Policy(target=0.5, min_seconds=0, max_seconds=200, min_steps=6, max_steps=6, idle_seconds=0, warm_up_max_seconds=0.1)
GPT = {"preset": "4M", "width": 32, "layers": 4, "heads": 2, "sequence_length": 32, "vocab_size": 128, "data": "synthetic-device"}


def run(root: Path, point: Point) -> tuple[Record, Path, int]:
    """The record, its folder, and the worker's exit status."""
    folder = Store(root).new_attempt(point)
    command = [sys.executable, "-m", "caraml.worker", str(folder)]
    if point.world > 1:
        command[2:2] = ["caraml.engine.start", f"--devices={point.world}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CARAML_POWER": "fake:constant"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        finish(folder, done.returncode)
    assert (folder / RECORD).exists(), done.stderr
    assert not (folder / MEASURED).exists()
    return read_record(folder / RECORD), folder, done.returncode


def test_what_is_measured_is_the_same_with_and_without_a_trace(tmp_path: Path, make_point: MakePoint) -> None:
    """On a device of known speed, whose clock nothing else moves: every step and every number of the window, to the last bit."""
    point = make_point(workload="known", measure=FEW)
    plain, _, _ = run(tmp_path, point)
    traced, folder, code = run(tmp_path, point.model_copy(update={"profile": True}))
    assert code == 0 and plain.key != traced.key and plain.profile is None
    assert traced.profile is not None and traced.profile.steps == STEPS and traced.profile.reason is None
    tables = [read_table(Store(tmp_path).folder(one) / one.files["steps"]) for one in (plain, traced)]
    assert tables[0]["seconds"] == tables[1]["seconds"] and tables[0]["phase"] == tables[1]["phase"]
    of_clock = ("throughput", "step_time_median", "step_time_mean", "peak_memory", "input_bandwidth", "mfu")
    assert [plain.metrics[name] for name in of_clock] == [traced.metrics[name] for name in of_clock]
    names = [phase.name for phase in traced.phases]
    assert names[-1] == "profile" and "profile" not in {phase.name for phase in plain.phases}
    (measure, profiled) = (next(phase for phase in traced.phases if phase.name == name) for name in ("measure", "profile"))
    runtime = traced.value("runtime")
    assert measure.end <= profiled.start and runtime is not None and runtime <= profiled.start, "no time of the run has it in it"
    assert (folder / traced.files["trace"]).stat().st_size < 1 << 20


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "alone": ({}, STEPS),
    "accumulation": ({"global_batch": 8}, 4 * STEPS),
    "long accumulation": ({"global_batch": 64}, MICRO_BATCHES),
    "two ranks": ({"global_batch": 4, "devices": 2}, STEPS),
    "compiled": ({"compile": "default"}, STEPS),
    "pipeline": ({"global_batch": 8, "devices": 2, "placement": Placement(pp=2)}, 4 * STEPS),
    "inference": ({"mode": "inference"}, STEPS),
}


def seconds_alone(events: list[dict[str, Any]]) -> Counter[str]:
    """By the intervals of a Chrome trace: the time in each operator without that of the operators within it on the same thread."""
    alone, within = Counter[str](), dict[int, list[tuple[str, float]]]()
    timed = (event for event in events if event.get("cat") in {"cpu_op", "user_annotation"})
    for event in sorted(timed, key=lambda event: (event["ts"], -event["dur"])):
        alone[event["name"]] += event["dur"] / 1e6
        if event["name"].startswith("gloo:"):  # begun on another thread, and beside what that one does next
            continue
        stack = within.setdefault(event["tid"], [])
        while stack and stack[-1][1] <= event["ts"] + 1e-4:
            stack.pop()
        if stack:
            alone[stack[-1][0]] -= event["dur"] / 1e6
        stack.append((event["name"], event["ts"] + event["dur"]))
    return alone


@pytest.mark.parametrize("case", CASES)
def test_every_way_to_train_is_traced(tmp_path: Path, make_point: MakePoint, case: str) -> None:
    values, micro_batches = CASES[case]
    if case == "compiled" and (missing := compiler_missing()):
        pytest.skip(missing)
    params = Params.model_validate({**GPT, "tied_head": False, **({"layers": 1} if case == "compiled" else {})}).model_dump(mode="json")
    point = make_point(workload="gpt", params=params, profile=True, measure=FEW, **{"global_batch": 2, "micro_batch": 2, **values})
    record, folder, code = run(tmp_path, point)
    assert code == 0 and record.status == "ok", record.reason
    found = record.profile
    assert found is not None and found.reason is None and found.of == "operators"
    assert found.micro_batches == micro_batches and found.seconds is not None and found.seconds > 0
    assert 0 < len(found.costliest) <= 10 and 0 < sum(one.share for one in found.costliest) <= 1.0001
    assert [one.seconds for one in found.costliest] == sorted((one.seconds for one in found.costliest), reverse=True)
    events = json.loads(gzip.decompress((folder / TRACE).read_bytes()))["traceEvents"]
    alone = seconds_alone(events)
    for one in found.costliest:
        assert one.seconds == pytest.approx(alone[one.name], rel=1e-3, abs=1e-5)
        assert one.share == pytest.approx(alone[one.name] / sum(alone.values()), rel=1e-3, abs=1e-4)
    assert found.costliest[-1].seconds >= sorted(alone.values(), reverse=True)[:10][-1] - 1e-5, "nothing that took longer is left out"
    assert any(name.startswith("gloo:") for name in alone) == (point.world > 1), "what ranks exchange is in the trace"
    passes = sum(event.get("name") == "aten::embedding" for event in events)
    if case not in ("compiled", "pipeline"):
        assert passes == 2 * micro_batches, "two tables, looked up once per traced micro-batch, and no step of the window among them"
    if case != "inference":
        assert any("AdamW" in event.get("name", "") for event in events) == (case != "long accumulation")
    profiled = next(phase for phase in record.phases if phase.name == "profile")
    energy, window, run_time = record.energy, record.window, record.value("run_time")
    assert energy is not None and window is not None and run_time is not None and window.end < profiled.start
    assert energy.duration_s == pytest.approx(window.seconds, abs=1e-3) and run_time <= profiled.start, "no energy has the trace in it"
    steps = read_table(folder / record.files["steps"])
    assert steps["phase"].count("measure") == 6 * point.world and steps["phase"][-1] == "measure", "no traced step is in the table"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_fails_under_the_profiler_loses_nothing(tmp_path: Path, make_point: MakePoint, ranks: int) -> None:
    point = make_point(workload="known", measure=FEW, devices=ranks, global_batch=4 * ranks)
    plain, folder, _ = run(tmp_path, point)
    steps = read_table(folder / plain.files["steps"])["rank"].count(0)
    broken = point.model_copy(update={"params": {"crash_at": steps + 2, "crash_on": ranks - 1}, "profile": True})
    record, folder, code = run(tmp_path, broken)
    assert code != 0 and record.status == "ok" and record.reason is None
    assert record.metrics["throughput"] == plain.metrics["throughput"]
    assert record.profile is not None and record.profile.reason is not None
    assert "the model is broken" in record.profile.reason and "phase profile" in record.profile.reason
    assert read_table(folder / record.files["steps"])["rank"].count(ranks - 1) == steps, "the table of all ranks is still there"


class Steps:
    """A step that takes ``accumulation`` batches."""

    def __init__(self, tracer: Tracer, accumulation: int) -> None:
        self.batches, self.accumulation, self.made = tracer.watch(map(torch.tensor, range(10_000))), accumulation, 0

    def __call__(self) -> StepOutcome:
        self.made += 1
        for _ in range(self.accumulation):
            next(self.batches)
            torch.ones(2, 2) @ torch.ones(2, 2)
        return StepOutcome(None, 0.0)


def test_ranks_that_are_not_traced_make_as_many_steps(tmp_path: Path, make_point: MakePoint) -> None:
    for accumulation in (1, 5, 16, 100):
        point, made = make_point(global_batch=4 * accumulation, profile=True), []
        for folder in (tmp_path, None):
            tracer = Tracer(point, CpuDevice(), folder)
            step = Steps(tracer, accumulation)
            found, files = tracer.run(step)
            made.append(step.made)
            assert bool(files) == bool(found.costliest) == (folder is not None)
        assert made[0] == made[1] == 1 + max(1, min(STEPS, MICRO_BATCHES // accumulation))


def test_a_long_step_is_traced_in_part(tmp_path: Path, make_point: MakePoint) -> None:
    tracer = Tracer(make_point(global_batch=400, profile=True), CpuDevice(), tmp_path)
    found, _ = tracer.run(Steps(tracer, 100))
    (product,) = (one for one in found.costliest if one.name == "aten::mm")
    assert (found.steps, found.micro_batches, product.calls) == (1, MICRO_BATCHES, MICRO_BATCHES)
    events = json.loads(gzip.decompress((tmp_path / TRACE).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::lift_fresh" for event in events) == MICRO_BATCHES, "nothing is read of what is not traced"


def test_a_worker_that_died_while_it_traced_has_its_record(tmp_path: Path, make_point: MakePoint) -> None:
    """Killed, timed out or cancelled: whatever the launcher says of it, the work was measured."""
    point = make_point(profile=True)
    folder = Store(tmp_path).new_attempt(point)
    measured = make_record(point, attempt=1)
    write_file(folder / MEASURED, measured.model_dump_json())
    finish(folder, 137, "timeout", "no result after 1800 s")
    record = read_record(folder / RECORD)
    assert record.status == "ok" and record.metrics == measured.metrics and not (folder / MEASURED).exists()
    assert record.profile is not None and record.profile.reason == "no result after 1800 s"


def test_a_pipeline_that_takes_too_many_at_once_is_not_traced(tmp_path: Path, make_point: MakePoint) -> None:
    point = make_point(devices=2, placement=Placement(pp=2), global_batch=4 * (IN_A_PIPELINE + 1), profile=True)
    tracer = Tracer(point, CpuDevice(), tmp_path)
    step = Steps(tracer, IN_A_PIPELINE + 1)
    found, files = tracer.run(step)
    assert (
        not step.made and not files and found.reason is not None and "33 micro-batches" in found.reason and "global_batch" in found.reason
    )


def test_a_trace_that_is_too_large_is_not_kept(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(afterwards, "MOST_BYTES", 100)
    tracer = Tracer(make_point(profile=True), CpuDevice(), tmp_path)
    found, files = tracer.run(Steps(tracer, 1))
    assert not files and not list(tmp_path.iterdir()) and found.costliest
    assert found.reason is not None and TRACE in found.reason and "at most 100 are kept" in found.reason


def test_on_a_gpu_kernels_are_told_and_memory_has_its_history(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's own time, without annotations and without the operators that launched it; a snapshot of the traced steps."""
    asked: list[dict[str, Any]] = []

    def row(key: str, device: DeviceType, seconds: float, annotation: bool = False) -> SimpleNamespace:
        times = {"self_device_time_total": seconds * 1e6, "self_cpu_time_total": 9e6}
        return SimpleNamespace(key=key, count=6, device_type=device, is_user_annotation=annotation, **times)

    class Profiler:
        def __init__(self, activities: set[ProfilerActivity]) -> None:
            assert activities == supported_activities()

        def prepare_trace(self) -> None: ...
        def start_trace(self) -> None:
            assert asked == [{"max_entries": 100_000, "stacks": "python"}]

        def stop_trace(self) -> None: ...
        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text("{}")

        def key_averages(self) -> list[SimpleNamespace]:
            gpu = DeviceType.CUDA
            return [row("gemm", gpu, 3.0), row("aten::mm", DeviceType.CPU, 3.0), row("n" * 500, gpu, 1.0), row("forward", gpu, 4.0, True)]

    def dump(path: str) -> None:
        Path(path).write_bytes(b"snapshot")

    memory = SimpleNamespace(_record_memory_history=lambda **values: asked.append(values), _dump_snapshot=dump)
    monkeypatch.setattr(afterwards, "profile", Profiler)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace(memory=memory))
    device: Any = SimpleNamespace(torch_device=SimpleNamespace(type="cuda"), synchronize=lambda: None)
    tracer = Tracer(make_point(profile=True), device, tmp_path)
    found, files = tracer.run(Steps(tracer, 1))
    assert found.of == "kernels" and [(one.name, one.seconds, one.share) for one in found.costliest] == [
        ("gemm", 3.0, 0.75),
        ("n" * 200, 1.0, 0.25),
    ]
    assert files == {"trace": TRACE, "memory": MEMORY} and gzip.decompress((tmp_path / MEMORY).read_bytes()) == b"snapshot"
    assert asked[-1] == {"enabled": None}


@pytest.mark.parametrize("seen", [True, False])
def test_a_collective_counts_whole_also_if_its_end_was_not_seen(tmp_path: Path, make_point: MakePoint, seen: bool) -> None:
    """Begun on one thread and ended on another; the profiler takes one that it has not seen end for work of the first."""
    times = {"count": 3, "device_type": DeviceType.CPU, "is_user_annotation": True}
    exchange = SimpleNamespace(key="gloo:all_reduce", is_async=seen, cpu_time_total=9e6, self_cpu_time_total=0.0 if seen else 5e6, **times)
    product = SimpleNamespace(key="aten::mm", is_async=False, cpu_time_total=3e6, self_cpu_time_total=1e6, **times)
    tracer: Any = Tracer(make_point(profile=True), CpuDevice(), tmp_path)
    found = tracer._told(SimpleNamespace(key_averages=lambda: [exchange, product]), 3, None)
    assert [(one.name, one.seconds, one.share) for one in found.costliest] == [("gloo:all_reduce", 9.0, 0.9), ("aten::mm", 1.0, 0.1)]
