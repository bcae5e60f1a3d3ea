"""The GPU bench on a machine without a GPU: its checks can fail, its table is right, its suite expands, a bare worker runs."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from caraml.metrics.model import Metric
from caraml.power.model import WindowEnergy
from caraml.results.record import Record
from caraml.results.store import RECORD, read_record
from caraml.suite.expand import expand
from caraml.suite.load import load_suite
from caraml.suite.placement import Machine
from caraml.workloads import params_of
from tests.conftest import MakePoint

ROOT = Path(__file__).parents[2]


BLOCK = (
    "import importlib.util, sys\n"
    "blocked = {'duckdb', 'typer', 'jinja2', 'rich', 'tokenizers', 'zstandard', 'simplejpeg', 'tomli_w'}\n"
    "blocked |= {'timm', 'torchvision', 'vl_convert', 'PIL'}\n"
    "class Block:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in blocked: raise ModuleNotFoundError(f'No module named {name!r}')\n"
    "sys.meta_path.insert(0, Block())\n"
    "find = importlib.util.find_spec\n"
    "importlib.util.find_spec = lambda name, *rest: None if name in blocked else find(name, *rest)\n"
)
"""Of a process: hides packages that a bare machine may lack."""

pytestmark = pytest.mark.usefixtures("handlers_back")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The file as a module. It sets where its workers import from, which is for these tests only."""
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "bench" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gpu", module)
        patch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
        patch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        patch.setattr(sys, "path", list(sys.path))
        spec.loader.exec_module(module)
        yield module


def test_the_check_of_images_holds_for_the_cpu_against_itself(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others hold where the whole command runs, which has no timm."""
    monkeypatch.setattr(sys.modules["gpu_checks"], "gpt_losses", lambda device, precision, compiled=False: [1.0])
    monkeypatch.setattr(sys.modules["gpu_checks"], "head_deviation", lambda device: 0.0)
    *_, images = gpu.check(torch.device("cpu"))
    assert "ResNet" in images.claim and images.holds and images.deviation is not None, images


def test_a_check_that_cannot_be_made_says_why_and_the_others_are_made(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without timm; what is unknown does not hold, but neither is it wrong."""

    def absent(*_: object) -> list[float]:
        raise ModuleNotFoundError("No module named 'timm'")

    monkeypatch.setattr(sys.modules["gpu_checks"], "image_losses", absent)
    monkeypatch.setattr(sys.modules["gpu_checks"], "gpt_losses", lambda device, precision, compiled=False: [1.0])
    monkeypatch.setattr(sys.modules["gpu_checks"], "head_deviation", lambda device: 0.0)
    *others, images = gpu.check(torch.device("cpu"))
    assert all(check.holds for check in others)
    assert (images.deviation, images.holds, images.unknown) == (None, False, "ModuleNotFoundError: No module named 'timm'")
    assert "unknown: ModuleNotFoundError" in gpu.Found("T", [images]).markdown()


def test_a_part_that_crashes_or_takes_too_long_takes_nothing_with_it(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(gpu, "SHARED", dict.fromkeys(gpu.SHARED, "7"))

    def ran(code: str, hear: Callable[[str], None] = said.append) -> str | None:
        return cast("str | None", gpu.heard(gpu.begun(["-c", code]), 60, hear))

    assert ran("print('one', flush=True); raise SystemExit('no such device')") == "ended with 1: no such device"

    def hear(line: str) -> None:
        """However long it took to begin, the rest of its time is short."""
        said.append(line)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 60
        signal.setitimer(signal.ITIMER_REAL, 0.5)

    code = "import subprocess, time; subprocess.Popen(['sleep', '300']); print('two', flush=True); time.sleep(300)"
    assert ran(code, hear) == "not ready within 60 s"
    assert ran("import os; print(*(os.environ[name] for name in ('OMP_NUM_THREADS', 'TORCHINDUCTOR_COMPILE_THREADS')))") is None
    assert said == ["one", "no such device", "two", "3 7"], "who compiles beside others starts fewer processes, unless it is told"

    def late(line: str) -> None:
        """Its time is over while the table is written."""
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        gpu.Found("T").write(Path())

    monkeypatch.setattr(gpu, "write_file", lambda *_: time.sleep(60))
    assert ran("import time; print(flush=True); time.sleep(1)", late) == "not ready within 60 s", "no disk that is full"


def test_others_compile_while_the_device_is_checked(gpu: ModuleType, tmp_path: Path) -> None:
    """They are waited for if somebody asks; one that is not ready in time is ended."""
    told, ready, process = (tmp_path / name for name in ("told", "ready", "process"))
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(told)!r}).exists(): time.sleep(0.01)\nopen({str(ready)!r}, 'w')"
    with gpu.meanwhile([["-c", waits]], 60.0) as wait:
        told.touch()
        wait()
    assert ready.exists()
    hangs = f"import os, pathlib, time; pathlib.Path({str(process)!r}).write_text(str(os.getpid())); time.sleep(300)"
    with gpu.meanwhile([["-c", hangs]], 0.1) as wait:
        while not process.exists() or not process.read_text():
            time.sleep(0.01)
        wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)


def test_what_compiles_beside_the_checks_has_memory_and_a_context(
    gpu: ModuleType, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peers of the first turns are there already: the device must hold both."""
    asked: list[list[str]] = []
    waited: list[int] = []
    told: list[object] = []
    monkeypatch.setattr(gpu, "meanwhile", lambda commands, seconds: asked.extend(commands) or nullcontext(lambda: waited.append(1)))
    monkeypatch.setattr(gpu, "_checked", lambda kind, seconds, known: [])
    monkeypatch.setattr(gpu, "one_process_at_a_time", lambda: False)
    points = [SimpleNamespace(point=make_point(benchmark=name)) for name in ("gpt-800M", *gpu.STEPPED)]
    text = (ROOT / "bench" / "gpu.toml").read_text()
    assert all(f'name = "{name}"\n' in text for name in gpu.STEPPED)

    given = {"suite": "s.toml", "nanogpt": "n", "timm": None, "torchvision": None, "precision": "bf16", "batch": None}

    def commands(kind: str = "cuda", memory: float = 150e9) -> list[list[str]]:
        asked.clear()
        options = SimpleNamespace(device=kind, memory=memory, **given)
        gpu.correctness(options, points, ["resnet50-b128"], 60.0, told.append)
        return asked

    first, second, work = commands()
    assert [command[-2:] for command in (first, second)] == [["--first-step", "1"], ["--first-step", "2"]]
    assert work[1] == "resnet50-b128" and "--nanogpt=n" in work and work[work.index("--rounds") + 1] == "0"
    assert "--only" not in work
    assert commands("mps") == [] == commands(memory=80e9)
    for memory, name, ways in ((40e9, gpu.BESIDE[0], False), (85e9, gpu.BESIDE[0], True), (40e9, *gpu.ALONE, True)):
        assert ("--variants" in gpu.turns_of(name, SimpleNamespace(device="cuda", memory=memory, **given))) == ways
    monkeypatch.setattr(gpu, "_checked", lambda kind, seconds, known: [gpu.Check("x", 1.0, 0.1)])
    commands()
    assert len(waited) == 3, "nothing is timed on a device that is wrong"
    monkeypatch.undo()
    modes = SimpleNamespace(gpus=lambda: [(0, "a"), (1, "b")], quietly=lambda function, gpu: {"a": 0, "b": 3}[gpu])
    monkeypatch.setattr(gpu, "session", lambda: nullcontext(modes))
    assert gpu.one_process_at_a_time(), "a process that compiles would have the only context"


def test_a_clock_is_not_wrong_because_others_took_a_turn(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs that compile meanwhile do: nothing would be timed then. One that is wrong each time is."""
    module = sys.modules["gpu_checks"]
    clocks = [(claim, allowed, of) for claim, allowed, of in module.checks_of(torch.device("cuda")) if "clock" in claim or "times" in claim]
    for found, holds, asked in (((0.02, 0.002, 0.03), True, 2), ((0.02, 0.03, 0.02, 0.04, 0.05, 0.0), False, 5)):
        for name, (_, allowed, of) in zip(("clock_deviation", "interface_deviation"), clocks, strict=True):
            seen = list(found)
            monkeypatch.setattr(module, name, lambda device, seen=seen: seen.pop(0))
            assert gpu.Check("x", of(), allowed).holds == holds and len(found) - len(seen) == asked


def test_a_first_step_is_that_of_the_point(gpu: ModuleType, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(os, "nice", lambda by: 0)
    monkeypatch.setattr(gpu, "step_of", lambda point: lambda: taken.append(point.workload))
    gpu.first_step(make_point(), "cuda")
    assert taken == [make_point().workload]

    def full(point: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "step_of", full)
    gpu.first_step(make_point(), "cuda")


def test_parts_come_in_turns_and_each_leaves_its_table(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a program that ends in the midst of it, or of a time that is over, there is what was done before."""
    (tmp_path / "suite.toml").write_text(TINY_SUITE)
    monkeypatch.chdir(tmp_path)
    done: list[str] = []
    ended: list[str] = []
    clock = iter(range(0, 10000, 30))

    class Run:
        def __init__(self, campaign: object, work: deque[Any], total: int) -> None:
            self.point, self.total = work[0].planned.point, total

        def records(self) -> list[Record]:
            assert self.total == 2 and "because it ended before: " in next(tmp_path.glob("out/*/gpu.md")).read_text(), "by kill -9, say"
            done.append(self.point.benchmark)
            return [Record(key=self.point.key, attempt=1, point=self.point, status="ok", started_at="x", metrics={})]

    def beside(one: dict[str, Any], options: object, seconds: float, program: object) -> None:
        assert program == one["work"] and seconds <= gpu.BESIDE_SECONDS
        done.append(one["work"])
        one["failed"] = None

    def checked(deviation: float = 0.0) -> Callable[..., None]:
        return lambda options, points, works, seconds, known: done.append("checks") or known(gpu.Check("x", deviation, 1.0))

    monkeypatch.setattr(gpu, "CampaignRun", Run)
    monkeypatch.setattr(gpu, "compiles", lambda kind: True)
    monkeypatch.setattr(gpu, "correctness", checked())
    monkeypatch.setattr(gpu, "held", lambda work, options: done.append(f"held {work}") or work)
    monkeypatch.setattr(gpu, "beside", beside)
    monkeypatch.setattr(gpu, "end", ended.append)
    monkeypatch.setattr(gpu, "BEGAN", 0.0)
    monkeypatch.setattr(gpu, "BESIDE_MEMORY", 0.0)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--suite", "suite.toml", "--out", "out", "--minutes", "60"])
    assert gpu.main() == 0
    first, second, third = gpu.BESIDE
    assert done == [f"held {first}", "checks", first, "gpt", f"held {second}", second, "broken", f"held {third}", third] and not ended
    (folder,) = (tmp_path / "out").iterdir()
    assert "Left out" not in (folder / "gpu.md").read_text()

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "beside", lambda one, *rest: beside(one, *rest) if one["work"] == first else cut())
    with pytest.raises(KeyboardInterrupt):
        gpu.main()
    kept = json.loads((folder / "gpu.json").read_text())
    assert [(one["work"], one["failed"]) for one in kept["beside"]] == [(first, None), (second, "ended before it was done")]
    assert len(kept["records"]) == 1 and kept["left_out"][0] == f"{second} in turns" and len(kept["left_out"]) == 4 - 1
    assert "Left out, because it ended before: " in (folder / "gpu.md").read_text()
    monkeypatch.setattr(gpu, "correctness", checked(2.0))
    assert gpu.main() == 1 and ended == [first], "who waits is ended where nothing is timed"
    monkeypatch.setattr(gpu, "BESIDE_MEMORY", 1e15)
    assert gpu.main() == 1 and ended == [first], "on a small device nobody waits while it is checked"
    monkeypatch.setattr(gpu, "correctness", checked())
    monkeypatch.setattr(gpu, "beside", lambda one, *rest: beside(one, *rest) if one["work"] != second else 1 / 0)
    assert gpu.main() == 1, "one part that cannot be begun"
    kept = json.loads((folder / "gpu.json").read_text())
    assert kept["failed"] == [f"{second} in turns: ZeroDivisionError: division by zero"] and len(kept["records"]) == 2
    assert [one["work"] for one in kept["beside"]] == list(gpu.BESIDE) and not kept["left_out"]
    assert f"Not measured: {second} in turns: Zero" in (folder / "gpu.md").read_text()
    monkeypatch.setattr(gpu, "BEGAN", -3600.0)
    done.clear()
    assert gpu.main() == 0 and done == ["checks"] and "because the time was over: " in (folder / "gpu.md").read_text(), "loading it counts"


def test_rounds_of_a_comparison_that_is_ended_are_in_the_table(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From outside, or as it takes too long to end: its own table comes last."""
    options = argparse.Namespace(
        folder=tmp_path, device="cpu", precision="fp32", batch=None, memory=0, nanogpt=None, timm=None, torchvision=None
    )
    kept = tmp_path / "beside-gpt2.json"
    monkeypatch.setattr(gpu, "begun", lambda command, **pipes: command[command.index("--json") + 1])
    assert gpu.held("gpt2", options) == str(kept)
    turn = {"wall": 0.5, "cpu": 0.1, "memory": 1}
    rounds = {"CARAML": [turn] * 2, "a peer": [{**turn, "wall": 1.0}] * 2, "ended": []}

    def heard(program: object, seconds: float, hear: Callable[[str], None]) -> str:
        left_out = ["another: no path was given"]
        kept.write_text(json.dumps([{"batch": 4, "precision": "fp32", "turns": rounds, "left_out": left_out}]))
        if not seconds:
            raise KeyboardInterrupt
        return "not ready within 9 s"

    monkeypatch.setattr(gpu, "heard", heard)
    for seconds, why in ((0.0, "ended before it was done"), (9.0, "not ready within 9 s")):
        one = {"work": "gpt2", "table": [], "failed": "ended before it was done"}
        with pytest.raises(KeyboardInterrupt) if not seconds else nullcontext():
            gpu.beside(one, options, seconds, SimpleNamespace(stdin=io.StringIO()))
        first, _, *table = one["table"]
        assert first == "batch 4; fp32, 2 rounds" and "| a peer | 2 (2 to 2) | 1 (1 to 1) |" in table[3] and one["failed"] == why
        assert table[-1] == "left out: another: no path was given"
    kept.unlink()
    assert gpu._rounds(kept) == [], "it took no turns"


def test_where_nothing_can_be_kept_nothing_is_measured(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what can be kept no longer, as on a disk that is full by then, is shown. An earlier run's table and turns outlive one without a
    check, and are none of one with a check."""
    (tmp_path / "suite.toml").write_text(TINY_SUITE)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    begun: list[object] = []
    others = SimpleNamespace(name="other load on the GPUs", status="warn", found="1: process 4242 on GPU 0")
    monkeypatch.setattr(gpu, "gpu_processes", lambda: [others])
    monkeypatch.setattr(gpu, "correctness", lambda *rest: begun.append(rest))

    def ran(out: str, suite: str = "suite.toml") -> int:
        command = ["gpu.py", "--device", "cpu", "--suite", suite, "--out", out, "--beside", "--minutes", "0"]
        monkeypatch.setattr(sys, "argv", command)
        return cast("int", gpu.main())

    assert ran("file/out") == 2 and "--out FOLDER" in capsys.readouterr().out
    assert ran("out", "none.toml") == 2 and "none.toml" in capsys.readouterr().out and not begun
    monkeypatch.setattr(gpu, "correctness", lambda options, points, works, seconds, known: known(gpu.Check("x", 0.0, 1.0)))
    assert ran("out") == 0
    (folder,) = (tmp_path / "out").iterdir()
    earlier = (folder / "gpu.md").read_text()
    assert "other load on the GPUs: 1: process 4242 on GPU 0\n\n| claim |" in earlier, "by which every rate may be too low"
    turns = folder / "beside-gpt2.json"
    turns.touch()

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "correctness", ended)
    with pytest.raises(KeyboardInterrupt):
        ran("out")
    assert (folder / "gpu.md").read_text() == earlier and turns.exists()

    def checked_one(options: object, points: object, works: object, seconds: float, known: Callable[[object], None]) -> None:
        known(gpu.Check("first", 0.5, 1.0))
        ended()

    monkeypatch.setattr(gpu, "correctness", checked_one)
    with pytest.raises(KeyboardInterrupt):
        ran("out")
    assert "| first | 0.5 | 1 | yes |" in (folder / "gpu.md").read_text() and not turns.exists()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gpu, "correctness", lambda options, points, works, seconds, known: known(gpu.Check("x", 0.25, 1.0)))
    monkeypatch.setattr(gpu, "write_file", full)
    capsys.readouterr()
    assert ran("out") == 0
    shown = capsys.readouterr().out
    assert "not written: [Errno 28]" in shown and "| x | 0.25 | 1 | yes |" in shown


def test_points_end_with_the_time(gpu: ModuleType) -> None:
    machine = Machine("local", "GPU x1", "gpu", "test", nodes=1, devices_per_node=1, compiles=True)
    first = expand(load_suite(str(ROOT / "bench" / "gpu.toml")), machine, params_of).points[0]
    assert first.point.compile == "default" and first.point.measure.timeout_seconds == 480
    short = gpu.within(first, 100)
    assert (
        short.point.measure.timeout_seconds == 100 == gpu.within(first, 100.0001).point.measure.timeout_seconds
        and short.key == short.point.key != first.key
    )
    assert gpu.within(first, 1000).point == first.point


TINY_SUITE = """
name = "tiny"
title = "T"
[[benchmark]]
name = "gpt"
workload = "gpt"
global_batch = 4
params = { preset = "4M", width = 16, layers = 1, heads = 1, vocab_size = 64, data = "synthetic" }
measure = { target = 0.5, min_seconds = 0, min_steps = 4, max_steps = 8, max_seconds = 2, warm_up_max_seconds = 0.1, idle_seconds = 0 }
[[benchmark]]
name = "broken"
workload = "image_classification"
global_batch = 4
params = { model = "resnet10t", path = "/nowhere", image_size = 32 }
"""


def test_the_whole_command_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    """On the CPU in the GPU's place, without what the machine may lack, and from another folder: CARAML is not installed there."""
    (tmp_path / "suite.toml").write_text(TINY_SUITE)
    source = str(ROOT / "src")
    given = "os.environ['PYTHONPATH'].split(os.pathsep)"
    hide = f"import os\nsys.path[:] = [x for x in sys.path if x != {source!r} or x in {given}]\n"
    (tmp_path / "sitecustomize.py").write_text(BLOCK + hide)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path), "CARAML_HERE": "1"}
    command = [str(ROOT / "bench" / "gpu.py"), "--device", "cpu", "--precision", "fp32", "--suite", "suite.toml", "--out", "out"]
    command += ["--beside", "resnet50-b16", "--batch", "1", "--minutes", "20"]
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    (folder,) = (tmp_path / "out").iterdir()
    found = json.loads((folder / "gpu.json").read_text())
    assert [record["status"] for record in found["records"]] == ["ok", "failed"], done.stdout + done.stderr
    *others, _ = found["checks"]
    assert len(others) >= 5 and all(check["deviation"] <= check["allowed"] for check in others), others
    unknown = [check["claim"] for check in found["checks"] if check["deviation"] is None]
    assert unknown == ["ResNet-18, fp32: losses as on the CPU"] and done.returncode == 1
    (beside,) = found["beside"]
    assert "CARAML does not run" in beside["failed"] or "timm" in beside["failed"], beside
    assert "throughput" in found["records"][0]["metrics"] and (folder / "gpu.json").stat().st_size < 100_000
    assert "## resnet50-b16" in (folder / "gpu.md").read_text()
    # A worker needs only torch, numpy and pydantic: the point is measured, with its raw numbers as CSV.
    (measured,) = (tmp_path / "caraml-results").glob(f"points/gpt-*/1/{RECORD}")
    record = read_record(measured)
    assert record.status == "ok" and record.files["steps"] == "steps.csv"
    assert record.environment["attention"] == {"asked": "auto", "kernel": "flash"}


def test_a_wrong_device_is_found_out(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = sys.modules["gpu_checks"].gpt_losses(torch.device("cpu"), "fp32")
    assert sys.modules["gpu_checks"].largest_relative([loss * 1.001 for loss in truth], truth) > 1e-4
    assert not gpu.Check("x", float("nan"), 1.0).holds


def test_who_ends_it_ends_all_that_it_started(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points that compile would keep the GPU: each is a session of its own."""
    here = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    monkeypatch.setattr(gpu, "detect", lambda: signal.getsignal(signal.SIGTERM)(signal.SIGTERM, None))
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            gpu.main()
    finally:
        signal.signal(signal.SIGTERM, here)


def test_nothing_is_compiled_where_torch_does_not(gpu: ModuleType) -> None:
    claims = {kind: [claim for claim, _, _ in gpu.checks_of(torch.device(kind)) if "compiled" in claim] for kind in ("cuda", "xpu", "mps")}
    assert [len(claims[kind]) for kind in claims] == [3, 2, 0]
    assert [gpu.compiles(kind) for kind in ("cuda", "xpu", "mps", "cpu", "npu")] == [True, True, False, False, False]


def test_without_a_gpu_it_says_so(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu, "accelerator_type", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 3 and "no GPU" in capsys.readouterr().out


def test_its_suite_runs_on_one_device() -> None:
    machine = Machine("local", "GPU x1", "gpu", "test", nodes=1, devices_per_node=1)
    points = expand(load_suite(str(ROOT / "bench" / "gpu.toml")), machine, params_of).points
    assert len(points) >= 8 and all(planned.skip is None for planned in points)


def test_the_table_shows_what_the_record_says(gpu: ModuleType, make_point: MakePoint, tmp_path: Path) -> None:
    metrics = {"throughput": Metric(value=1000.0, unit="token/s", low=990.0, high=1010.0), "mfu": Metric(value=0.42, unit="1")}
    point = make_point()
    record = Record(key=point.key, attempt=1, point=point, status="ok", flags=["busy_machine"], started_at="x", metrics=metrics)
    record = record.model_copy(update={"energy": WindowEnergy("measure", 0.0, 1.0, node="login-7:42")})
    beside = {"work": "w", "how": "compiled", "table": ["| step of | x |"], "failed": "not ready within 3 s"}
    without = Record(key=point.key, attempt=1, point=point, status="failed", reason="no | compiler\nfound", started_at="x", metrics={})
    gpu.Found("T", [gpu.Check("claim", 0.5, 0.1)], [record, without], [beside], ["later"]).write(tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "1,000 token/s ± 1.0 %" in text and "42.0 %" in text and "**no**" in text and "ok busy_machine" in text and "later" in text
    assert "## w, all compiled" in text and "| step of | x |" in text and "not ready within 3 s" in text
    assert "| failed: no \\| compiler found |" in text
    kept, _ = json.loads((tmp_path / "gpu.json").read_text())["records"]
    assert kept["metrics"]["throughput"]["value"] == 1000.0
    assert kept["energy"]["end"] == 1.0 and "login-7" not in json.dumps(kept), "results may be shown to others"
