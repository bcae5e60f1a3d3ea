"""Systems for people: the table of figures and sources, and a detected machine as a file that is accepted again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machine import Tree, numa_host, pci
from fake_nvml import FakeGpu, FakeNvml
from typer.testing import CliRunner

from caraml import __version__
from caraml.cli import app
from caraml.report.tables import as_toml, system_rows
from caraml.system.catalogue import list_systems, load_system
from caraml.system.detect import detect
from caraml.system.model import Affinity


def caraml(*arguments: str | Path, config: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "XDG_CONFIG_HOME": str(config)}
    return subprocess.run(
        [sys.executable, "-m", "caraml", *map(str, arguments)], capture_output=True, text=True, env=environment, check=False
    )


def reread(text: str, folder: Path) -> Path:
    path = folder / "detected.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_detected_gpu_node_becomes_a_file_that_is_accepted(tree: Tree, nvml: Callable[..., FakeNvml], tmp_path: Path) -> None:
    files = numa_host(sockets=2, nodes=1, cores=4) | pci("0000:01:00.0", 1, "4-7") | pci("0000:41:00.0", 0, "0-3")
    files |= {"proc/meminfo": "MemTotal: 1000000 kB\n", "proc/cpuinfo": "processor : 0\nmodel name : Chip 9000\n"}
    nvml(
        FakeGpu("NVIDIA H200", memory=141 * 10**9, uuid="GPU-a", bus="00000000:01:00.0", tdp_mw=700_000),
        FakeGpu("NVIDIA H200", memory=141 * 10**9, uuid="GPU-b", bus="00000000:41:00.0", tdp_mw=700_000, limit_mw=300_000),
    )
    found = detect(tree(files))
    text = as_toml(found)
    again = load_system(reread(text, tmp_path))
    assert again.identity == found.identity == "NVIDIA H200 x2"
    assert [device.index for device in again.devices] == [0, 1]
    assert (again.devices[1].tdp_w, again.devices[1].power_limit_w, again.devices[1].uuid) == (700.0, None, None)
    assert again.affinity == found.affinity == Affinity(cpus=("4-7", "0-3"), numa_nodes=(1, 0))
    assert (again.cpu.model, again.cpu.cores, again.cpu.numa_cpus) == ("Chip 9000", 8, ("0-3", "4-7"))
    assert again.memory_bytes == 1_024_000_000 and again.peak == found.peak
    assert again.cpu.usable_threads is None, "true for this job only"
    source = text.partition("\n")[0].removeprefix("# ")
    assert re.fullmatch(rf"detected by caraml {re.escape(__version__)} on \d{{4}}-\d\d-\d\d", source), "the day may have changed meanwhile"
    assert set(again.sources) == {"nodes", "devices_per_node", "devices", "cpu", "memory_bytes", "affinity"}
    assert set(again.sources.values()) == {source}


def test_gpus_that_differ_stay_apart(tree: Tree, nvml: Callable[..., FakeNvml], tmp_path: Path) -> None:
    nvml(FakeGpu("NVIDIA H200"), FakeGpu("NVIDIA L4", memory=24 * 10**9))
    again = load_system(reread(as_toml(detect(tree(numa_host(1, 1, 2)))), tmp_path))
    assert again.identity == "NVIDIA H200 x1 + NVIDIA L4 x1"
    assert "affinity" in again.missing and "affinity" not in again.sources


@pytest.mark.parametrize("name", ["local", "", "###", None])
def test_a_file_gets_a_name_that_is_allowed(name: str | None, tree: Tree, tmp_path: Path) -> None:
    found = detect(tree(numa_host(1, 1, 2))).model_copy(update={"hostname": name})
    assert load_system(reread(as_toml(found), tmp_path)).name == "my-machine"
    named = found.model_copy(update={"hostname": "Node_17.cluster.example.org"})
    assert load_system(reread(as_toml(named), tmp_path)).name == "node-17"


@pytest.mark.parametrize("system", list_systems(), ids=lambda system: system.name)
def test_every_figure_is_shown_with_its_source(system: object) -> None:
    shown = system_rows(system)  # type: ignore[arg-type]
    for row in shown:
        assert row.source, row
        assert row.value != "None", row
    names = [row.name for row in shown]
    assert {"devices_per_node", "cpu"} <= set(names)
    assert [row.name for row in shown if row.value is None] == list(system.missing)  # type: ignore[attr-defined]


def test_show_gives_values_in_the_units_of_the_source(tmp_path: Path) -> None:
    table = caraml("system", "show", "juwels booster", config=tmp_path).stdout
    assert table.startswith("juwels-booster (JUWELS Booster): JUWELS Booster at JSC\n")
    for cell in ("936", "4 x NVIDIA A100-SXM4-40GB", "512 GB", "NUMA nodes 3, 1, 7, 5", "312 TFLOP/s", "300 GB/s per direction", "400 W"):
        assert cell in table, cell
    assert "POP Centre of Excellence" in table and "booster" in table and "missing" in table
    assert "512 GiB" in caraml("system", "show", "lumi", config=tmp_path).stdout
    assert json.loads(caraml("system", "show", "LUMI", "--json", config=tmp_path).stdout)["nodes"] == 2978


def test_show_local_and_an_unknown_name(tmp_path: Path) -> None:
    assert caraml("system", "show", "local", config=tmp_path).stdout.startswith("local: ")
    done = caraml("system", "show", "juwles-booster", config=tmp_path)
    assert done.returncode == 2 and "did you mean 'juwels-booster'?" in done.stderr


def test_detect_prints_toml_that_validate_accepts(tmp_path: Path) -> None:
    done = caraml("system", "detect", config=tmp_path)
    assert tomllib.loads(done.stdout)["devices_per_node"] >= 1
    checked = caraml("system", "validate", reread(done.stdout, tmp_path), config=tmp_path)
    assert checked.returncode == 0 and "detected.toml: describes " in checked.stdout
    assert json.loads(caraml("system", "detect", "--json", config=tmp_path).stdout)["name"] == "local"


def test_validate_lists_every_fault_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('name = "jedi"\nnodes = "many"\n[scheduler]\npartition = "x"\n')
    done = caraml("system", "validate", tmp_path / "bad.toml", config=tmp_path)
    assert done.returncode == 2
    assert 'bad.toml:2: nodes: found "many", expected an integer' in done.stderr
    assert "bad.toml:3: scheduler: " in done.stderr


def test_validate_says_what_a_file_is_laid_over(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('extends = "jedi"\n[site.scheduler]\naccount = "me"\n')
    done = caraml("system", "validate", tmp_path / "ours.toml", config=tmp_path)
    assert "ours.toml: describes jedi, " in done.stdout and "jedi.toml" in done.stdout


def test_systems_beside_the_suites_here_are_listed_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "systems").mkdir()
    (tmp_path / "systems" / "m.toml").write_text('name = "ours"\nextends = "jedi"\ntitle = "Our corner of JEDI"\n')
    monkeypatch.chdir(tmp_path)
    for words in (["list", "systems"], ["system", "show", "ours"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and "Our corner of JEDI" in done.output, done.output


def test_the_list_stays_readable(tmp_path: Path) -> None:
    folder = tmp_path / "caraml" / "systems"
    folder.mkdir(parents=True)
    (folder / "m.toml").write_text('name = "ours"\nextends = "jedi"\ntitle = "Our corner of JEDI"\n')
    text = caraml("list", "systems", config=tmp_path).stdout
    lines = text.splitlines()
    assert len(lines) == len(list_systems()) + 3, "one line each at this width, a heading, local, and ours"
    assert any(line.startswith("local ") for line in lines)
    assert any(line.startswith("ours") and line.rstrip().endswith("Our corner of JEDI") for line in lines)
    assert all(system.name in text for system in list_systems())
