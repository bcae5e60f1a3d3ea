"""The GPU bench on a machine without a GPU: its checks can fail, its table is right, its suite expands, a bare worker runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from caraml.metrics.model import Metric
from caraml.results.record import Record
from caraml.results.store import RECORD, Store, read_record
from caraml.suite.expand import Machine, expand
from caraml.suite.load import load_suite
from caraml.suite.model import Measure
from caraml.workloads import params_of
from caraml.workloads.gpt import Params
from tests.conftest import MakePoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "bench" / "gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_every_check_holds_for_the_cpu_against_itself(gpu: ModuleType) -> None:
    checks = list(gpu.correctness(torch.device("cpu")))
    assert len(checks) >= 6 and all(check.holds for check in checks), checks


def test_a_wrong_device_is_found_out(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = gpu.gpt_losses(torch.device("cpu"), "fp32")
    assert gpu.largest_relative([loss * 1.001 for loss in truth], truth) > 1e-4
    assert not gpu.Check("x", float("nan"), 1.0).holds


def test_without_a_gpu_it_says_so() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu.py")], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3 and "no GPU" in done.stdout


def test_its_suite_runs_on_one_device() -> None:
    machine = Machine("local", "GPU x1", "gpu", "test", nodes=1, devices_per_node=1)
    points = expand(load_suite(str(ROOT / "bench" / "gpu.toml")), machine, params_of).points
    assert len(points) >= 8 and all(planned.skip is None for planned in points)


def test_the_table_shows_what_the_record_says(gpu: ModuleType, make_point: MakePoint, tmp_path: Path) -> None:
    metrics = {"throughput": Metric(value=1000.0, unit="token/s", low=990.0, high=1010.0), "mfu": Metric(value=0.42, unit="1")}
    point = make_point()
    record = Record(key=point.key, attempt=1, point=point, status="ok", flags=["busy_machine"], started_at="x", metrics=metrics)
    gpu.write(tmp_path, "T", [gpu.Check("claim", 0.5, 0.1)], [record], ["later"])
    text = (tmp_path / "gpu.md").read_text()
    assert "1,000 token/s ± 1.0 %" in text and "42.0 %" in text and "**no**" in text and "ok busy_machine" in text and "later" in text
    assert json.loads((tmp_path / "gpu.json").read_text())["records"][0]["metrics"]["throughput"]["value"] == 1000.0


def test_a_worker_needs_only_torch_numpy_and_pydantic(tmp_path: Path, make_point: MakePoint) -> None:
    """The other packages are blocked; the point must still be measured, with its raw numbers as CSV."""
    params = Params.model_validate({"preset": "4M", "width": 16, "layers": 1, "heads": 1, "vocab_size": 64, "data": "synthetic"})
    measure = Measure(target=0.5, min_seconds=0, min_steps=4, max_seconds=2, warm_up_max_seconds=1, idle_seconds=0)
    point = make_point(workload="gpt", params=params.model_dump(mode="json"), measure=measure)
    folder = Store(tmp_path).new_attempt(point)
    code = (
        "import importlib.util, sys\n"
        "blocked = {'duckdb', 'typer', 'jinja2', 'rich', 'tokenizers', 'zstandard', 'timm', 'torchvision', 'vl_convert', 'PIL'}\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in blocked: raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name in blocked else find(name, *rest)\n"
        "from pathlib import Path\n"
        "from caraml.worker import training\n"
        "training.main(Path(sys.argv[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = read_record(folder / RECORD)
    assert record.status == "ok" and record.files["steps"] == "steps.csv"
