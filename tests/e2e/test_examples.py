"""The templates of ``examples/`` that the pages about extending CARAML show: each is used as it is written."""

from __future__ import annotations

import ast
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tokenize
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from caraml.campaign import runner
from caraml.cli import app
from caraml.launch import launchers
from caraml.results.store import Store
from tests.debian import install
from tests.e2e.conftest import ROOT, Installation, pip

EXAMPLES = ROOT / "examples"
COUNTING = """
name = "counting"
title = "Counting"
[[benchmark]]
name = "count"
workload = "command"
params = { argv = ["seq", "{n}"], energy = false, n = [10, 1000], item = "number", items = "{n}" }
[[benchmark]]
name = "after"
workload = "command"
needs = "count"
params = { argv = ["true"], energy = false }
"""
QSUB = """#!/bin/sh
echo "$@" >>asked
for script; do :; done
bash "$script" & echo $!.server
"""
QSTAT = """#!/bin/sh
for job; do :; done
if kill -0 "${job%%.*}" 2>/dev/null; then echo "    job_state = R"; else exit 153; fi
"""


def example(name: str) -> ModuleType:
    """A script of ``examples/`` as a module; its ``main`` is not run."""
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def plugged(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The environment with the template packages in it."""
    folder = tmp_path_factory.mktemp("plug-ins")
    projects = [str(shutil.copytree(EXAMPLES / name, folder / name)) for name in ("workload", "power_source", "launcher")]
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), *projects)
    installation.install(*folder.glob("*.whl"))
    return installation


@pytest.mark.parametrize(
    ("file", "most"),
    [("workload/caraml_curves.py", 60), ("power_source/caraml_ina.py", 40), ("launcher/caraml_pbs.py", 50), ("metric.py", 25)],
)
def test_a_template_is_small(file: str, most: int) -> None:
    """Lines that hold code: no blank ones, comments and docstrings."""
    text = (EXAMPLES / file).read_text(encoding="utf-8")
    said = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in silent]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    assert len(lines - {line for node in said for line in range(node.lineno, (node.end_lineno or 0) + 1)}) <= most


@pytest.fixture(scope="module")
def curves(plugged: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the suite of the workload's template has run."""
    folder = tmp_path_factory.mktemp("curves")
    shutil.copy(EXAMPLES / "workload" / "curves.toml", folder)
    plugged.run("caraml", "run", "curves.toml", cwd=folder)
    return folder


def test_the_workload_trains_is_listed_and_named_in_the_record(plugged: Installation, curves: Path) -> None:
    assert "tells rising curves from falling ones (caraml-curves 0.1.0)" in plugged.run("caraml", "list", "workloads", cwd=curves)
    (record,) = Store(curves / "caraml-results").records("curves")
    assert record.status == "ok"
    assert record.point.software.endswith(", caraml-curves 0.1.0")
    assert record.environment["versions"]["caraml-curves"] == "0.1.0"  # type: ignore[index, call-overload]
    assert record.item == "curve" and record.metrics["throughput"].unit == "curve/s"
    assert (record.value("told_right") or 0) > 0.6 and record.definitions["told_right"].source == "caraml-curves 0.1.0"
    assert (record.value("loss_last") or 1) < (record.value("loss_first") or 0) and record.value("loss_validation") is not None
    assert record.facts is not None and record.facts.flops_per_item == pytest.approx(2 * 2 * (128 * 32 + 2 * 32) + 2 * 2 * 32)
    assert "curve/s" in plugged.run("caraml", "results", cwd=curves)


def test_the_power_source_measures_and_tells_why_it_cannot(plugged: Installation, tmp_path: Path) -> None:
    shown = tmp_path / "hwmon"
    shown.mkdir()
    for number, (address, microwatts) in enumerate({"1-0040": 7_500_000, "1-0041": 2_500_000}.items()):  # as the kernel has them
        chip = tmp_path / "devices" / address / "hwmon" / f"hwmon{number}"
        chip.mkdir(parents=True)
        (chip / "device").symlink_to(chip.parents[1])
        (chip / "name").write_text("ina226\n")
        (chip / "power1_input").write_text(f"{microwatts}\n")
        (shown / chip.name).symlink_to(chip)
    plugged.run("caraml", "power", "--methods", f"ina:{shown}", "--out", "energy", "--interval", "0.02", "--", "sleep", "0.5", cwd=tmp_path)
    energy = json.loads((tmp_path / "energy" / "energy.json").read_text(encoding="utf-8"))["energy"]
    assert {channel["id"]: channel["mean_w"] for channel in energy["channels"]} == pytest.approx({"ina:1-0040": 7.5, "ina:1-0041": 2.5})
    assert energy["boundaries"]["node_dc"]["energy_j"] == pytest.approx(10 * (energy["end"] - energy["start"]), rel=0.01)
    listed = plugged.run("caraml", "power", "sources", cwd=tmp_path)
    assert "INA power monitors of a board" in listed and "no INA power monitor below /sys/class/hwmon" in listed


def test_the_system_is_valid(installation: Installation, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "system.toml", tmp_path)
    assert "describes mine" in installation.run("caraml", "system", "validate", "system.toml", cwd=tmp_path)


@pytest.mark.processes
def test_the_launcher_runs_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("qsub", QSUB), ("qstat", QSTAT)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "counting.toml").write_text(COUNTING)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_SCHEDULER_POLL_SECONDS", 0.1)
    entry = {"name": "pbs", "package": "caraml-pbs 0.1.0", "point": SimpleNamespace(value="caraml_pbs:PbsLauncher")}
    pbs = SimpleNamespace(load=lambda kind: example("launcher/caraml_pbs").PbsLauncher, **entry)
    monkeypatch.setattr(launchers, "launcher_plugins", lambda: {"pbs": pbs})
    done = CliRunner().invoke(app, ["run", "counting.toml", "--launcher", "pbs", "--no-report"])
    assert done.exit_code == 0, done.output
    store = Store(tmp_path / "caraml-results")
    assert [record.status for record in store.records("counting")] == ["ok", "ok", "ok"]
    assert [listing.launcher for listing in store.campaigns()] == ["pbs"]
    handles = [file.read_text(encoding="utf-8") for file in store.root.glob("points/*/1/handle*")]
    assert len(handles) == 3 and all("pbs:" in handle for handle in handles)
    *first, last = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert not any("depend" in line for line in first) and re.search(r" -W depend=afterok:\d+\.server:\d+\.server ", last)


@pytest.mark.processes
def test_the_launcher_tells_a_job_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qstat").write_text("#!/bin/sh\n. ./answer\n")
    (tmp_path / "qstat").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    handle = f"pbs:12.server:{tmp_path}"
    for answer, state, words in (("exit 153", "lost", "12.server"), ("echo no server >&2; exit 1", "running", "no server")):
        (tmp_path / "answer").write_text(answer)
        found = example("launcher/caraml_pbs").PbsLauncher().poll([handle])[handle]
        assert found.state == state and words in (found.reason or "")


def test_the_launcher_is_found_when_its_package_is_installed(plugged: Installation, tmp_path: Path) -> None:
    (tmp_path / "counting.toml").write_text(COUNTING)
    assert "launcher pbs" in plugged.run("caraml", "plan", "counting.toml", "--launcher", "pbs", cwd=tmp_path)


def test_the_metric_is_right_and_printed_for_every_point(curves: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metric = example("metric")
    assert metric.step_spread(np.linspace(0.9, 1.1, 201)) == pytest.approx(0.18)
    low, high = metric.bootstrap(np.linspace(0.9, 1.1, 201))
    assert 0.1 < low < 0.18 < high < 0.2
    metric.main([str(curves / "caraml-results")])
    assert re.findall(r"^curves b(\d+) fp32: [\d.]+ % \([\d.]+ to [\d.]+ %\)", capsys.readouterr().out, flags=re.MULTILINE) == ["64"]


@pytest.mark.processes
@pytest.mark.parametrize("name", ["mpi", "tensorflow"])
def test_programs_of_others_are_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = install(("openmpi-bin",), ("mpirun",)) if name == "mpi" else None
    if name == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        missing = "the program of examples/programs for TensorFlow: tensorflow is not installed"
    if missing is not None:
        pytest.skip(missing)
    shutil.copytree(EXAMPLES / "programs", tmp_path / "programs")
    monkeypatch.chdir(tmp_path / "programs")
    for variable in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"):
        monkeypatch.setenv(variable, "1")
    small = {"python": sys.executable, "steps": 40} if name == "mpi" else {"python": sys.executable, "steps": 2, "image_size": 32}
    settings = [word for key, value in small.items() for word in ("--set", f"params.{key}={value}")]
    done = CliRunner().invoke(app, ["run", "programs.toml", "--only", name, *settings, "--no-report"])
    records = Store(Path("caraml-results")).records("programs")
    assert done.exit_code == 0 and [record.status for record in records] == ["ok", "ok"], done.output
    for record in records:
        assert record.window is not None and record.window.items == small["steps"] * record.point.global_batch  # type: ignore[operator]
        assert record.value("throughput") == pytest.approx(record.window.items / record.window.seconds)
    assert [record.point.world for record in records] == ([1, 2] if name == "mpi" else [1, 1])


def test_programs_take_the_arguments_of_their_suite() -> None:
    """Also those whose packages are not here."""
    text = (EXAMPLES / "programs" / "programs.toml").read_text(encoding="utf-8")
    for benchmark in tomllib.loads(text)["benchmark"]:
        words = [re.sub(r"{\w+}", "7", word) for word in benchmark["params"]["argv"]]
        (program,) = [word for word in words if word.endswith(".py")]
        asked = example(f"programs/{program.removesuffix('.py')}").parse(words[words.index(program) + 1 :])
        assert (asked.batch, asked.steps) == (7, 7) and getattr(asked, "horovod", False) == (words[0] == "horovodrun")
