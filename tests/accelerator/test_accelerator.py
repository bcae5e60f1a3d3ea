"""The emulated accelerator: that it is as a device is, the engine on it by a clock that moves only when somebody waits, whole campaigns, in
which every placement trains as on a CPU and a device that is lost takes nothing with it, and what the verbs say of it.

One file, as each process that runs tests on it loads torch anew for a fork server with the accelerator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from caraml.results.record import Record
from caraml.results.rows import read_table
from caraml.results.store import Store
from tests.accelerator.conftest import ROOT, Inside

GPT = """
workload = "gpt"
global_batch = 8
micro_batch = 2
params = { preset = "4M", width = 32, layers = 4, heads = 2, sequence_length = 32, vocab_size = 128, data = "synthetic", tied_head = false }
"""
RESNET = """
workload = "image_classification"
global_batch = 8
params = { model = "resnet18", data = "synthetic", image_size = 32, classes = 10, learning_rate = 0.01 }
"""
MEASURE = """
measure = { target = 0.5, min_seconds = 0, max_seconds = 200, min_steps = 6, max_steps = 6, idle_seconds = 0, warm_up_max_seconds = 0.1 }
"""
ENDLESS = """
measure = { min_seconds = 600, max_seconds = 900, idle_seconds = 0, warm_up_max_seconds = 0.5, timeout_seconds = 1200 }
"""
POINTS = {
    "one": GPT,
    "ddp": GPT + "devices = 2\n",
    "fsdp": GPT + "devices = 2\nfsdp = 2\n",
    "tp": GPT + "devices = 2\ntp = 2\n",
    "pp": GPT + "devices = 2\npp = 2\n",
    "interleaved": GPT + 'devices = 2\npp = 2\nschedule = "interleaved"\n',
    "resnet": RESNET,
    "half": RESNET + 'precision = "bf16"\n',
}


def campaign(
    folder: Path, points: Sequence[str], variables: dict[str, str], meanwhile: Callable[[], None] | None = None
) -> dict[str, Record]:
    """Run some of the points; their records by name. ``meanwhile`` is called while they run."""
    folder.mkdir()
    texts = {name: POINTS[name] + MEASURE for name in POINTS} | {
        "lost": GPT + ENDLESS,
        "traced": GPT + "profile = true\n" + MEASURE,
        "graphs": RESNET + 'compile = "reduce-overhead"\n' + MEASURE,
    }
    benchmarks = [f'[[benchmark]]\nname = "{name}"\n{texts[name]}' for name in points]
    (folder / "suite.toml").write_text('name = "emulated"\ntitle = "emulated"\n' + "\n".join(benchmarks))
    command = [sys.executable, "-m", "caraml", "run", "suite.toml", "--no-report"]
    with subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            if meanwhile:
                meanwhile()
            said, _ = run.communicate(timeout=600)
        finally:
            run.kill()
    records = {record.point.benchmark: record for record in Store(folder / "caraml-results").records()}
    assert set(records) == set(points), said
    return records


def until_the_window_was_looked_at(folder: Path) -> None:
    """Wait for a look into the window of the only point: its steps have been read from the device."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        texts = [file.read_text() for file in folder.glob("caraml-results/points/*/1/progress.jsonl")]
        if any('"phase":"measure"' in line and '"relative"' in line for text in texts for line in text.splitlines()):
            return
        time.sleep(0.05)
    raise AssertionError("no look into a window")


def losses(folder: Path, record: Record) -> list[float]:
    """Mean over the ranks that have one, of the first steps."""
    steps = read_table(Store(folder / "caraml-results").folder(record) / record.files["steps"])
    rows = [(step, loss) for step, loss in zip(steps["step"], steps["loss"], strict=True) if loss is not None]
    return [sum(own) / len(own) for at in range(7) if (own := [loss for step, loss in rows if step == at])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, surroundings: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Records and losses by point, on the accelerator and on the CPU."""
    root = tmp_path_factory.mktemp("worker")
    fast = surroundings | {"EMULATED_SLOWNESS": "0.5"}
    there = campaign(root / "there", list(POINTS), fast)
    here = campaign(root / "here", ["one", "resnet"], fast | {"CARAML_DEVICE": "cpu"})
    return {
        name: {"record": record, "losses": losses(root / place, record)}
        for place, records in (("there", there), ("here", {f"{name} here": record for name, record in here.items()}))
        for name, record in records.items()
    }


@pytest.mark.parametrize("name", POINTS)
def test_a_point_trains_as_on_a_cpu(trained: dict[str, dict[str, Any]], name: str) -> None:
    record = trained[name]["record"]
    assert record.status == "ok", record.reason
    assert not [one.reason for one in record.metrics.values() if "checkpoint" in (one.reason or "")], "written by all ranks"
    assert record.point.device_class == "gpu" and record.point.device == "Emulated Accelerator x2"
    assert {device["kind"] for device in record.system["devices"]} == {"other"}
    truth = trained["resnet here" if POINTS[name].startswith(RESNET) else "one here"]["losses"]
    near, steps = (2e-2, 2) if name == "half" else (1e-5, 7)
    assert trained[name]["losses"][:steps] == pytest.approx(truth[:steps], rel=near) and len(truth) == 7
    assert record.metrics["peak_memory"].value < record.metrics["peak_host_memory"].value
    assert json.dumps(record.environment)


def test_steps_are_traced_where_the_profiler_sees_no_kernels(tmp_path: Path, surroundings: dict[str, str]) -> None:
    record = campaign(tmp_path / "run", ["traced"], surroundings | {"EMULATED_SLOWNESS": "0.5"})["traced"]
    assert record.status == "ok" and record.profile is not None and record.profile.reason is None
    assert record.profile.of == "operators" and record.profile.steps == 3 and record.profile.micro_batches == 12
    assert len(record.profile.costliest) == 10 and "memory" not in record.files and "trace" in record.files


def test_graphs_that_the_device_lacks_are_refused(tmp_path: Path, surroundings: dict[str, str]) -> None:
    record = campaign(tmp_path / "run", ["graphs"], surroundings)["graphs"]
    assert record.status != "ok" and record.metrics == {}
    assert record.reason is not None and "replays CUDA graphs; emulated devices have none" in record.reason


def test_a_device_that_is_lost_in_the_window_takes_nothing_that_was_measured(tmp_path: Path, surroundings: dict[str, str]) -> None:
    gone = tmp_path / "gone"
    variables = surroundings | {"EMULATED_LOST_WITH": str(gone), "EMULATED_SLOWNESS": "0.5", "CARAML_POWER": "fake"}

    def lose() -> None:
        until_the_window_was_looked_at(tmp_path / "run")
        gone.touch()

    record = campaign(tmp_path / "run", ["lost"], variables, lose)["lost"]
    assert record.status == "failed" and record.metrics == {}
    assert record.reason is not None and "emulated device lost" in record.reason and record.reason.endswith("(in phase measure)")
    steps, power = (
        read_table(Store(tmp_path / "run" / "caraml-results").folder(record) / record.files[name]) for name in ("steps", "power")
    )
    assert steps["phase"][0] == "first" and steps["phase"].count("measure") >= 2 and all(seconds > 0 for seconds in steps["seconds"])
    assert steps["step"] == list(range(len(steps["step"]))) and len(next(iter(power.values()))) > 0


@pytest.mark.parametrize(
    "name",
    [
        "training_gives_the_cpu_s_numbers",
        "random_numbers_are_the_device_s_own",
        "kernels_take_time_behind_the_host_s_back",
        "a_full_queue_holds_the_host_up",
        "memory_of_another_stream_raises_unless_it_was_waited_for",
        "memory_is_not_given_out_while_another_stream_uses_it",
        "memory_is_counted_and_limited",
        "pinned_copies_do_not_wait",
        "a_lost_device_says_so_ever_after",
    ],
)
def test_the_emulation(inside: Inside, name: str) -> None:
    inside(name)


def test_several_devices(inside: Inside) -> None:
    inside("devices_are_several", devices=3)


@pytest.mark.parametrize(
    "name",
    [
        "a_window_is_exactly_its_steps",
        "events_are_asked_and_not_waited_for",
        "the_clock_of_its_events_is_held_against_the_host_s",
        "events_without_times_are_replaced_by_waiting",
        "copies_ahead_overlap_and_are_waited_for",
        "a_device_loses_to_its_input_what_it_has_no_work_for",
        "micro_batches_together_are_the_whole_batch",
        "each_process_has_its_device",
        "more_processes_than_devices_are_refused",
        "another_device_than_the_one_asked_for_is_refused",
        "a_probe_leaves_the_device_as_it_was",
        "a_full_device_is_called_full",
        "a_precision_that_the_device_lacks_is_refused",
        "the_bench_for_accelerators_finds_this_one_right",
        "a_loop_of_one_s_own_is_measured_on_the_device",
    ],
)
def test_the_engine(inside: Inside, name: str) -> None:
    inside(name)


def test_a_plan_names_the_accelerator(surroundings: dict[str, str], tmp_path: Path) -> None:
    def said(*words: str) -> str:
        command = [sys.executable, "-m", "caraml", *words]
        return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=True).stdout

    system = json.loads(said("system", "detect", "--json"))
    assert [(device["model"], device["kind"], device["memory_bytes"]) for device in system["devices"]] == [
        ("Emulated Accelerator", "other", 4_000_000_000)
    ] * 2
    assert "gpt b64 bf16" in said("plan", "quick", "--out", str(tmp_path / "out")), "the suite's sizes for accelerators"


def test_a_plug_in_that_does_not_import_is_told_before_anything_runs(tmp_path: Path, real_start: None) -> None:
    plugin = tmp_path / "plugin" / "acme-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[torch.backends]\nacme = acme_torch:load\n")
    (plugin.parent / "acme_torch.py").write_text("raise ImportError('libacme.so.3: cannot open shared object file')\n")
    places = os.pathsep.join(filter(None, [str(plugin.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "caraml", "plan", "quick", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "cannot be imported with its plug-in acme_torch" in said and "libacme.so.3" in said
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said and "Traceback" not in said
