"""What the doctor finds, and that it names a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_machine import Tree, mi300a
from fake_nvml import FakeGpu, FakeNvml, fake_torch

from caraml import doctor
from caraml.base.files import data_home
from caraml.doctor import machine_checks
from caraml.system import families
from caraml.system.detect import detect
from caraml.system.families.family import TorchBuild

Install = Callable[..., FakeNvml]
H200 = FakeGpu("NVIDIA H200")
SLICED = FakeGpu("A100", instances=[FakeGpu("A100 MIG 3g.40gb", uuid=f"MIG-{n}") for n in "ab"])


@pytest.mark.parametrize(
    ("gpus", "torch", "hidden", "status", "words"),
    [
        ([H200], fake_torch("NVIDIA H200"), None, "ok", "shows 1, torch 1"),
        ([], fake_torch(), None, "ok", "CPUs will be measured"),
        ([H200], fake_torch(cuda=None), None, "missing", "built for CPUs only"),
        ([H200], fake_torch(cuda=None, xpu="20250301"), None, "missing", "built for XPU 20250301"),
        ([H200], fake_torch(), None, "missing", "older than torch's CUDA"),
        ([H200, H200], fake_torch("NVIDIA H200"), "0", "warn", "CUDA_VISIBLE_DEVICES='0'"),
        ([H200], fake_torch(cuda=None), "0", "missing", "built for CPUs only"),
        ([], fake_torch("NVIDIA H200"), None, "warn", "no power or clocks"),
        ([], fake_torch("AMD Instinct MI300A", cuda=None, hip="7.0"), None, "warn", "AMD driver shows 0, torch 1: no power limits"),
        ([SLICED], fake_torch("A100"), None, "ok", "shows 2, torch 1: CUDA shows a process one MIG instance"),
    ],
)
def test_driver_against_torch(
    *, nvml: Install, monkeypatch: pytest.MonkeyPatch, gpus: list[FakeGpu], torch: Any, hidden: str | None, status: str, words: str
) -> None:
    nvml(*gpus)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    check = doctor._gpus(torch)
    assert check.status == status
    assert words in check.found
    assert check.fix or status == "ok"


def test_the_amd_driver_against_torch(nvml: Install, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a job that Slurm gave one of four: it was told that its driver may be older than torch's CUDA."""
    nvml(fails="Driver Not Loaded")
    root = tree(mi300a(4))
    one = fake_torch("AMD Instinct MI300A", cuda=None, hip="7.0")
    check = doctor._gpus(one, root)
    assert (check.status, "older than torch's ROCm" in check.found, "rocm-smi" in (check.fix or "")) == ("missing", True, True)
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2")
    check = doctor._gpus(one, root)
    assert (check.status, check.found) == ("warn", "the AMD driver shows 4, torch 1: ROCR_VISIBLE_DEVICES='2'")
    assert "rocm" in (doctor._gpus(fake_torch(cuda=None), root).fix or ""), "a torch for CPUs"


def test_other_accelerators(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    build = TorchBuild("2.13.0+cpu")
    monkeypatch.setattr(families, "installed_torch", lambda: build)
    system, card = detect(tree({})), "sys/class/drm/card0/device"
    files: dict[str, str | bytes] = {
        "sys/module/habanalabs/version": "1",
        f"{card}/vendor": "0x8086",
        f"{card}/uevent": "PCI_SLOT_NAME=0000:00:02.0",
        f"{card}/drm/renderD128/dev": "",
    }
    closed, loaded = doctor._accelerators(system, tree(files))
    assert (closed.name, closed.status, closed.found) == ("driver of Intel GPU", "warn", "1 cannot be opened: /dev/dri/renderD128")
    assert (loaded.name, loaded.status, loaded.found) == ("driver of Intel Gaudi", "warn", "/sys/module/habanalabs is there, and no device")
    integrated, _ = doctor._accelerators(system, tree({**files, "dev/dri/renderD128": ""}))
    assert "Intel integrated graphics is not measured: torch 2.13.0+cpu, built for CPUs only" in integrated.found
    assert integrated.status == "warn" and "whl/xpu" in (integrated.fix or "")
    unfit, *_ = doctor._accelerators(system, tree({"dev/davinci0": ""}))
    assert unfit.status == "missing" and "cannot drive it" in unfit.found


def test_others_on_the_gpu(nvml: Install) -> None:
    nvml(FakeGpu("NVIDIA H200", processes=[os.getpid()]), FakeGpu("NVIDIA H200", processes=[4242]))
    assert [(check.status, check.found) for check in doctor.gpu_processes()] == [("warn", "1: process 4242 on GPU 1")]
    nvml(FakeGpu("NVIDIA H200", processes=[os.getpid()]))
    assert doctor.gpu_processes()[0].status == "ok"
    nvml(FakeGpu("NVIDIA H200", refuses=("nvmlDeviceGetComputeRunningProcesses",)))
    assert doctor.gpu_processes()[0].found == "NVML: Insufficient Permissions"
    nvml(fails="Driver Not Loaded")
    assert doctor.gpu_processes() == []


def test_more_threads_than_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.host, "cgroup_cpus", lambda root=None: 2.5)
    check = doctor._cores(SimpleNamespace(get_num_threads=lambda: 16))
    assert (check.status, check.fix) == ("warn", "export OMP_NUM_THREADS=2")
    assert doctor._cores(SimpleNamespace(get_num_threads=lambda: 2)).status == "ok"


@pytest.mark.processes
def test_doctor_names_a_fix_for_whatever_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path / "data"))
    found = machine_checks(tmp_path / "not" / "yet")
    assert {check.name: check.found for check in found}["prepared data"] == str(data_home()) == str(tmp_path / "data")
    names = [check.name for check in found]
    assert len(names) == len(set(names))
    assert {"torch", "GPU", "CPU cores", "clock", "disk", "timm", "Slurm"} <= set(names)
    assert all(check.fix for check in found if check.status == "missing")
    assert all(check.found for check in found)


def test_doctor_without_a_library_or_a_tool() -> None:
    check = doctor._library("no-such-package", "x")
    assert check.status == "missing" and check.fix is not None and check.fix.endswith("-m pip install no-such-package")
    assert "need none" in doctor._tools("t", ("no-such-command",)).found


def test_docker_is_no_runtime_that_points_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docker", "podman"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("caraml.system.environment.own_checkout", lambda: "not asked")  # it starts git
    assert {check.name: check.found for check in machine_checks(tmp_path)}["container runtime"] == "podman"


def test_the_formats_that_a_cpu_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*isa: str) -> list[str]:
        cpu = detect().cpu.model_copy(update={"isa": isa})
        return [check.found for check in doctor._formats(detect().model_copy(update={"cpu": cpu}))]

    monkeypatch.setenv("CARAML_DEVICE", "cpu")
    assert said("avx2", "avx512_bf16", "amx_bf16", "amx_fp16") == ["bf16 by avx512_bf16, amx_bf16; fp16 by amx_fp16"]
    (text,) = said("avx2")
    assert text.startswith("bf16 only emulated; fp16 only emulated") and "emulated = true" in text
    assert said() == [], "nothing is known"
