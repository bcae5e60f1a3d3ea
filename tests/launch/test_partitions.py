"""CPU and FPGA partitions of the catalogue: what is planned on them, and what their jobs ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base.toml import parse_toml
from caraml.campaign.machine import machine_of
from caraml.cli import app
from caraml.suite.expand import PlannedPoint, expand
from caraml.suite.load import load_suite, suite_of
from caraml.system.catalogue import list_systems, load_system
from caraml.workloads import params_of

CPUS = [system.name for system in list_systems() if system.device_class == "cpu"]


def printed(folder: Path, system: str, *options: str) -> str:
    """What `caraml plan` says of suite `quick`, and its scripts, for jobs that somebody submits on that machine."""
    argv = ["plan", "quick", "--system", system, "--launcher", "print", "--scripts", "--out", str(folder / "results"), *options]
    result = CliRunner().invoke(app, argv, env={"COLUMNS": "2000"})
    assert result.exit_code == 0, result.output
    return re.sub(r" \\\n +", " ", result.stdout)


def points(system: str, lines: str) -> list[PlannedPoint]:
    head = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "gpt"\nparams = { preset = "4M" }\n'
    return expand(suite_of(parse_toml(head + lines, "s.toml")), machine_of(load_system(system)), params_of).points


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_partition_s_jobs_have_whole_nodes_and_no_gpus(tmp_path: Path, name: str) -> None:
    text, scheduler = printed(tmp_path, name), load_system(name).site.scheduler
    assert "2 points: 2 to run" in text and "gpt b8 fp32" in text
    assert not re.search("gres|--gpus|CUDA|HIP|NCCL", text)
    if scheduler is None:
        assert f"export OMP_NUM_THREADS={load_system(name).cpu.cores}\n" in text
        return
    assert scheduler.partition is None or f"\n#SBATCH --partition={scheduler.partition}\n" in text
    for line in ("--nodes=1", "--ntasks-per-node=1", "--exclusive"):
        assert f"\n#SBATCH {line}\n" in text, line
    assert "--cpus-per-task=" not in "".join(line for line in text.splitlines() if line.startswith("#SBATCH"))
    assert "\nexport OMP_NUM_THREADS=$((cpus > 1 ? cpus / 1 : 1))\n" in text
    (srun, *_) = (line.split() for line in text.splitlines() if line.startswith("srun "))
    assert {"--nodes=1", "--ntasks=1", '--cpus-per-task="$cpus"'} <= set(srun)


def test_a_cpu_node_is_one_device_unless_processes_are_asked_for() -> None:
    """Scaling over nodes has a process on each; a number of devices divides a node's cores, up to a process for each of them."""
    (one,) = points("lumi-c", 'devices = "all"\nglobal_batch = 8')
    (many,) = points("lumi-c", "world = 16\nglobal_batch = 16")
    (by_numa_node,) = points("lumi-c", "nodes = 2\ndevices = 8\nglobal_batch = 16")
    assert [(p.skip, p.point.nodes, p.point.devices) for p in (one, many, by_numa_node)] == [(None, 1, 1), (None, 16, 1), (None, 2, 8)]
    (too_many,) = points("lumi-c", "devices = 129\nglobal_batch = 129")
    assert too_many.skip == "needs 129 devices per node, lumi-c has 128 cores"
    (too_many,) = points("lumi", "devices = 9\nglobal_batch = 9")
    assert too_many.skip == "needs 9 devices per node, lumi has 8"


def test_processes_of_a_cpu_node_share_its_cores(tmp_path: Path) -> None:
    text = printed(tmp_path, "lumi-c", "--only", "gpt", "--set", "devices=8", "--set", "nodes=2", "--set", "global_batch=16")
    assert "\nexport OMP_NUM_THREADS=$((cpus > 8 ? cpus / 8 : 1))\n" in text
    assert "-m caraml.engine.start --nodes=2 --devices=8 caraml.worker" in text
    assert "\nsrun --nodes=2 --ntasks=2 --ntasks-per-node=1 " in text


def test_a_shared_job_asks_for_every_cpu_of_a_node_whose_threads_no_source_gives(tmp_path: Path) -> None:
    (tmp_path / "shared.toml").write_text('name = "shared"\nextends = "karolina-cpu"\n[site.scheduler]\nexclusive = false\n')
    assert "\n#SBATCH --cpus-per-task=128\n" in printed(tmp_path, str(tmp_path / "shared.toml"))


@pytest.mark.parametrize(("name", "precision", "runs"), [("lumi-c", "bf16", False), ("leonardo-dcgp", "bf16", True)])
def test_a_format_that_a_partition_s_processors_emulate_is_not_planned(name: str, precision: str, runs: bool) -> None:
    (planned,) = points(name, f'precision = "{precision}"\nglobal_batch = 8')
    assert planned.skip is None if runs else "only emulates bf16" in (planned.skip or "")


@pytest.mark.parametrize(
    ("name", "asks", "reason"),
    [
        ("lumi-c", "nodes = 513", "needs 513 nodes, a job on lumi-c may have 512"),
        ("lumi-c", "nodes = 512", None),
        ("lumi-largemem", "nodes = 2", "needs 2 nodes, a job on lumi-largemem may have 1"),
        ("lumi-d", 'devices = "all"', "needs 8 devices, a job on lumi-d may have 1"),
        ("lumi-d", "nodes = 2", "needs 2 devices, a job on lumi-d may have 1"),
        ("lumi-d", "devices = 1", None),
        ("lumi", "nodes = 1025", "needs 1025 nodes, a job on lumi may have 1024"),
    ],
)
def test_what_a_partition_gives_no_job_is_not_planned(name: str, asks: str, reason: str | None) -> None:
    (planned,) = points(name, f"accumulation = 1\n{asks}")
    assert planned.skip == reason


def test_a_limit_of_jobs_is_none_of_the_node_that_one_is_on() -> None:
    inside = machine_of(load_system("lumi-d"), "local")
    assert (inside.job_nodes, inside.job_devices, inside.devices_per_node) == (None, None, 8)


def test_discoverer_s_partitions_are_known(tmp_path: Path) -> None:
    assert "\n#SBATCH --partition=cn\n" in printed(tmp_path, "discoverer-cpu")
    text = printed(tmp_path, "discoverer-plus")
    assert "\n#SBATCH --partition=common\n" in text and "\n#SBATCH --gres=gpu:1\n" in text


@pytest.mark.parametrize(("name", "reason"), [("meluxina-fpga", "torch drives no FPGA"), ("bow-pod16", "torch drives no IPU")])
def test_training_is_refused_where_torch_drives_nothing(tmp_path: Path, name: str, reason: str) -> None:
    text = printed(tmp_path, name)
    assert "2 points: 2 skipped" in text and text.count(reason) == 2 and "#SBATCH" not in text


def test_programs_run_on_an_fpga_node_which_is_asked_for_without_a_generic_resource() -> None:
    lines = 'name = "s"\ntitle = "S"\n[[benchmark]]\nname = "n"\nworkload = "command"\nparams = { argv = ["./design"], item = "sample" }\n'
    (planned,) = expand(suite_of(parse_toml(lines, "s.toml")), machine_of(load_system("meluxina-fpga")), params_of).points
    scheduler = load_system("meluxina-fpga").site.scheduler
    assert planned.skip is None and scheduler is not None and (scheduler.partition, scheduler.gpus) == ("fpga", "none")


def test_the_published_ipu_points_are_also_those_of_a_bow_pod() -> None:
    planned = expand(load_suite("caraml-ipu"), machine_of(load_system("bow-pod16")), params_of).points
    assert planned and all(one.skip is None for one in planned)
