"""Which GPUs a machine has, by fakes of NVML and of /sys."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machine import Tree, mi300a, processors
from fake_nvml import FakeGpu, FakeNvml, fake_torch

from caraml.doctor import _accelerators
from caraml.system.detect import detect
from caraml.system.environment import container, environment, git_state, variables
from caraml.system.families import Shown
from caraml.system.families.family import TorchBuild, amd_gpus, nvidia_gpus

Install = Callable[..., FakeNvml]


def a100(index: int, **options: object) -> FakeGpu:
    return FakeGpu("NVIDIA A100-SXM4-40GB", memory=40 * 2**30, uuid=f"GPU-{index}", bus=f"00000000:0{index}:00.0", **options)  # type: ignore[arg-type]


def test_four_a100(tree: Tree, nvml: Install) -> None:
    fake = nvml(*(a100(i) for i in range(4)), driver="570.124")
    system = detect(tree(processors(2, 64)))
    assert (system.devices_per_node, system.driver, system.device_class, system.identity) == (
        4,
        "570.124",
        "gpu",
        "NVIDIA A100-SXM4-40GB x4",
    )
    gpu = system.devices[2]
    assert (gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.memory_bytes) == (2, "GPU-2", "00000000:02:00.0", 40 * 2**30)
    assert (gpu.tdp_w, gpu.power_limit_w, gpu.compute_capability) == (400.0, 400.0, "8.0")
    assert system.peak is not None
    assert (system.peak["bf16"].value, system.memory_bandwidth.value) == (312e12, 1555e9)  # type: ignore[union-attr]
    assert system.missing["devices.multiprocessors"] == "torch is not loaded in this process"
    assert fake.open == 0


def test_gh200_with_odd_bytes_in_its_name_and_a_lower_limit(tree: Tree, nvml: Install) -> None:
    nvml(FakeGpu("NVIDIA GH200 480GB\x00", tdp_mw=900_000, limit_mw=700_000, capability=(9, 0)))
    system = detect(tree({}))
    assert (system.devices[0].model, system.devices[0].tdp_w, system.devices[0].power_limit_w) == ("NVIDIA GH200 480GB", 900.0, 700.0)
    assert system.peak is not None
    assert system.peak["bf16"].value == 989.4e12


def test_mig_instances_take_the_place_of_their_gpu_and_have_no_peak(tree: Tree, nvml: Install) -> None:
    slices = [FakeGpu(f"NVIDIA A100-SXM4-40GB MIG {i}g.5gb", memory=5 * 2**30, uuid=f"MIG-{i}") for i in (1, 2)]
    nvml(a100(0, instances=slices), a100(1))
    system = detect(tree({}))
    assert [device.uuid for device in system.devices] == ["MIG-1", "MIG-2", "GPU-1"]
    assert system.peak is None
    assert "slice of a GPU" in system.missing["peak"]


def test_what_the_driver_refuses_is_none_with_the_reason(tree: Tree, nvml: Install) -> None:
    refused = ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetUUID", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMigMode")
    nvml(a100(0, refuses=refused))
    system = detect(tree({}))
    assert (system.devices[0].power_limit_w, system.devices[0].uuid) == (None, None)
    assert system.missing["devices[0].power_limit_w"] == "NVML: Insufficient Permissions"
    state = environment(tree({}))
    assert state["gpus"][0]["throttle"] is None
    assert state["missing"]["gpus[0].throttle"] == "NVML: Insufficient Permissions"


@pytest.mark.parametrize("reason", ["Insufficient Permissions", "NVML Shared Library Not Found", "Driver Not Loaded"])
def test_without_nvml_the_cpus_are_the_device(tree: Tree, nvml: Install, reason: str) -> None:
    nvml(fails=reason)
    root = tree({"proc/cpuinfo": "model name : Chip\n", **processors(1, 4)})
    system = detect(root)
    assert (system.device_class, system.devices[0].kind, system.identity) == ("cpu", "cpu", "Chip, 4 threads")
    assert system.missing["nvml"] == f"NVML: {reason}"


def test_without_the_python_package(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert detect(tree({})).missing["nvml"] == "the Python package nvidia-ml-py is not installed"


@pytest.mark.parametrize(
    ("value", "uuids"),
    [("2,0", ["GPU-2", "GPU-0"]), ("GPU-3", ["GPU-3"]), ("", []), ("-1", []), ("1,9,0", ["GPU-1"]), (" 1 , 2", ["GPU-1", "GPU-2"])],
)
def test_cuda_visible_devices_is_obeyed(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch, value: str, uuids: list[str]) -> None:
    nvml(*(a100(i) for i in range(4)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    system = detect(tree({}))
    assert [device.uuid for device in system.devices if device.kind == "cuda"] == uuids
    assert system.device_class == ("gpu" if uuids else "cpu")


def test_cpu_can_be_asked_for(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(a100(0))
    root = tree({"proc/cpuinfo": "model name : Chip\n"})
    assert detect(root).device_class == "gpu"
    monkeypatch.setenv("CARAML_DEVICE", "cpu")
    assert (detect(root).device_class, detect(root).identity) == ("cpu", "Chip")


def test_the_kernel_names_nvidia_gpus_without_nvml(tree: Tree, nvml: Install) -> None:
    fake = nvml(fails="must not be asked")
    files: dict[str, str | bytes] = {}
    for minor, bus in ((0, "0000:81:00.0"), (1, "0000:01:00.0"), (2, "0000:c1:00.0")):
        information = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{minor}\nBus Location: \t {bus}\nDevice Minor: \t {minor}\n"
        files[f"proc/driver/nvidia/gpus/{bus}/information"] = information
    files |= {"dev/nvidia0": "", "dev/nvidia1": ""}  # the third is not given to this container
    assert [device.model for device in nvidia_gpus(tree(files)).devices] == ["NVIDIA H200"] * 2
    assert fake.open == 0


def test_amd_gpus_by_sys(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(fails="Driver Not Loaded")
    files: dict[str, str | bytes] = {"dev/kfd": "", "sys/module/amdgpu/version": "6.8.5\n", "sys/class/drm/card0-DP-1/device": ""}
    for card, bus in ((1, "0000:d1:00.0"), (2, "0000:c1:00.0")):
        folder = f"sys/class/drm/card{card}/device"
        files |= {
            f"{folder}/vendor": "0x1002\n",
            f"{folder}/product_name": "AMD Instinct MI250X\n",
            f"{folder}/mem_info_vram_total": str(64 * 2**30),
            f"{folder}/uevent": f"DRIVER=amdgpu\nPCI_SLOT_NAME={bus}\n",
            f"{folder}/unique_id": f"id{card}\n",
            f"{folder}/hwmon/hwmon3/power1_cap": "500000000\n",
        }
    files |= {"sys/class/drm/card3/device/vendor": "0x1a03\n"}
    root = tree(files)
    system = detect(root)
    assert (system.identity, system.driver, system.devices[0].kind) == ("AMD Instinct MI250X x2", "6.8.5", "rocm")
    assert [device.uuid for device in system.devices] == ["id2", "id1"]
    assert system.devices[0].power_limit_w == 500.0
    assert system.peak is not None
    assert system.peak["bf16"].value == 191.5e12
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert detect(root).identity == "AMD Instinct MI250X x1"
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-id1")
    assert [device.uuid for device in detect(root).devices] == ["id1"], "as rocminfo writes it, not as the kernel"


@pytest.mark.parametrize(
    ("card", "expected", "source"),
    [
        ("0x163f vddnb", None, None),  # Van Gogh: the limit of the whole processor
        ("0x74a0 ", 550.0, "detected: of the package, processor cores included"),
        ("0x74a1 ", 550.0, None),
    ],
)
def test_the_limit_of_a_package_is_not_called_its_gpu_s(
    *, tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch, card: str, expected: float | None, source: str | None
) -> None:
    monkeypatch.setattr("caraml.system.families.installed_torch", lambda: TorchBuild("2.13.0", hip="7.0"))
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=None, hip="7.0"))
    number, label = card.split(" ")
    nvml(fails="Driver Not Loaded")
    folder = "sys/class/drm/card0/device"
    files: dict[str, str | bytes] = {"dev/kfd": "", f"{folder}/vendor": "0x1002\n", f"{folder}/device": f"{number}\n"}
    files |= {f"{folder}/mem_info_vram_total": str(2**30)} | ({f"{folder}/hwmon/hwmon3/in1_label": f"{label}\n"} if label else {})
    files |= {f"{folder}/hwmon/hwmon3/{name}": "550000000\n" for name in ("power1_cap", "power1_cap_default")}
    system = detect(tree(files))
    assert (system.devices[0].tdp_w, system.devices[0].power_limit_w) == (expected, expected)
    for key in ("devices.tdp_w", "devices.power_limit_w"):
        assert (system.sources.get(key), key in system.missing) == (source, expected is None)


def test_the_graphics_of_a_processor_count_where_torch_drives_them(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop whose torch is for CPUs was refused, and beside an Intel card that torch drives they were taken for the device."""
    nvml(fails="Driver Not Loaded")
    folder, other = "sys/class/drm/card0/device", "sys/class/drm/card1/device"
    files: dict[str, str | bytes] = {"dev/kfd": "", "proc/cpuinfo": "model name : AMD Ryzen 7\n", f"{folder}/vendor": "0x1002\n"}
    files |= {f"{folder}/device": "0x15bf\n", f"{folder}/mem_info_vram_total": str(2**29), f"{folder}/hwmon/hwmon3/in1_label": "vddnb\n"}
    root = tree(files)
    build = TorchBuild("2.13.0+cpu")
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=None))  # of which none sees a device
    monkeypatch.setattr("caraml.system.families.installed_torch", lambda: build)
    assert (detect(root).identity, detect(root).missing.get("devices")) == ("AMD Ryzen 7", None)
    said = [check.found for check in _accelerators(detect(root), root)]
    assert said == ["AMD integrated graphics is not measured: torch 2.13.0+cpu, built for CPUs only, cannot drive it"]
    build = TorchBuild("2.13.0", hip="7.0")
    assert detect(root).identity == "AMD integrated graphics x1"
    build = TorchBuild("2.13.0", xpu="2025")
    tree({f"{other}/vendor": "0x8086\n", f"{other}/drm/renderD129/dev": "", "dev/dri/renderD129": ""})
    assert {device.kind for device in detect(root).devices} == {"cpu"}


def test_a_second_die_without_a_limit_leaves_that_of_the_first_known(tree: Tree, nvml: Install) -> None:
    """As on LUMI: the limit of an MI250X is told by one of its dies."""
    nvml(fails="Driver Not Loaded")
    files: dict[str, str | bytes] = {"dev/kfd": ""}
    for card, limit in enumerate((560_000_000, 0)):
        folder = f"sys/class/drm/card{card}/device"
        files |= {f"{folder}/vendor": "0x1002\n", f"{folder}/device": "0x7408\n", f"{folder}/mem_info_vram_total": str(2**36)}
        files |= {f"{folder}/hwmon/hwmon3/{name}": f"{limit}\n" for name in ("power1_cap", "power1_cap_default")}
    system = detect(tree(files))
    assert [(device.tdp_w, device.power_limit_w) for device in system.devices] == [(560.0, 560.0), (None, None)]
    assert not [key for key in system.missing if key.endswith(("tdp_w", "power_limit_w"))]


def test_amd_gpus_of_others_are_not_counted(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a job has some of a node's cards, those alone open; ROCm numbers them from 0."""
    nvml(fails="Driver Not Loaded")
    files: dict[str, str | bytes] = {"dev/kfd": ""}
    for card in range(4):
        folder = f"sys/class/drm/card{card}/device"
        files |= {f"{folder}/vendor": "0x1002\n", f"{folder}/product_name": "MI300X\n", f"{folder}/mem_info_vram_total": "1000"}
        files |= {f"{folder}/uevent": f"PCI_SLOT_NAME=0000:0{card}:00.0\n", f"{folder}/drm/renderD{128 + card}/dev": "226:128\n"}
    ours: dict[str, str | bytes] = {"dev/dri/renderD129": "", "dev/dri/renderD131": ""}
    root = tree(files | ours)
    assert [device.pci_bus_id for device in detect(root).devices] == ["0000:01:00.0", "0000:03:00.0"]
    assert amd_gpus(root).closed == ("/dev/dri/renderD128", "/dev/dri/renderD130")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1")
    assert [device.pci_bus_id for device in detect(root).devices] == ["0000:03:00.0"] and detect(root).identity == "MI300X x1"
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    for name in ours:
        (root / name).unlink()
    assert detect(root).device_class == "cpu"
    monkeypatch.setattr("caraml.system.families.installed_torch", lambda: TorchBuild("2.13.0", hip="7.0"))
    files_named = ", ".join(f"/dev/dri/renderD{128 + card}" for card in range(4))
    assert detect(root).missing["devices"] == f"AMD GPU: {files_named} cannot be opened", "not silently its CPUs"
    monkeypatch.setenv("CARAML_DEVICE", "cpu")
    assert "devices" not in detect(root).missing, "asked for"
    monkeypatch.delenv("CARAML_DEVICE")
    said = [check.found for check in _accelerators(detect(root), root) if check.name == "driver of AMD GPU"]
    assert said == [f"4 cannot be opened: {', '.join(f'/dev/dri/renderD{128 + card}' for card in range(4))}"]
    monkeypatch.setattr("caraml.system.families.family.opens", lambda node: node.name != "kfd")
    assert amd_gpus(root) == Shown((), ("/dev/kfd",), "/dev/kfd"), "without it no card can be computed on"


def test_packages_with_processor_cores_have_no_memory_of_their_own(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI300A computes in the host's memory: amdgpu says 0 bytes, or nothing, and the compute driver how much of it the GPU may take."""
    nvml(fails="Driver Not Loaded")
    root = tree(mi300a(4))
    system = detect(root)
    assert (system.identity, {device.memory_bytes for device in system.devices}) == ("AMD Instinct MI300A x4", {2**37})
    assert [device.pci_bus_id for device in system.devices] == [f"000{domain}:01:00.0" for domain in range(4)]
    assert system.peak is not None and system.peak["bf16"].value == 980.6e12
    assert system.devices[0].power_limit_w == 550.0 and "devices.power_limit_w" in system.sources
    shutil.rmtree(root / "sys/class/kfd")
    for path in root.glob("sys/class/drm/*/device/mem_info_vram_total"):
        path.unlink()
    assert [device.memory_bytes for device in detect(root).devices] == [None] * 4
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text("model name : AMD Instinct MI300A Accelerator\n")
    monkeypatch.setenv("CARAML_DEVICE", "cpu")
    cpu = detect(root)
    assert (cpu.identity, cpu.peak, cpu.sources) == ("AMD Instinct MI300A Accelerator", None, {}), "its processor cores"


def test_partitions_of_an_amd_gpu_are_devices(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(fails="Driver Not Loaded")
    root = tree(mi300a(2, "CPX", 6))
    system = detect(root)
    assert system.identity == "AMD Instinct MI300A CPX x12"
    assert system.peak is None and "slice of a GPU" in system.missing["peak"], "the data sheet's figures are the whole GPU's"
    first = system.devices[0]
    assert (first.memory_bytes, first.power_limit_w, first.uuid) == (2**37 // 6, None, f"{4096:016x}")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "7")
    assert [(device.pci_bus_id, device.uuid) for device in detect(root).devices] == [("0001:01:00.0", f"{4103:016x}")]
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES")
    for number in range(12):
        if number != 9:
            (root / f"dev/dri/renderD{128 + number}").unlink()
    assert [device.uuid for device in detect(root).devices] == [f"{4105:016x}"], "the only one that is this job's"
    assert amd_gpus(root).closed == ("/dev/dri/renderD128",)
    monkeypatch.setitem(sys.modules, "torch", fake_torch("AMD Instinct MI300A", hip="7.0", cuda=None))
    assert (detect(root).identity, detect(root).peak) == ("AMD Instinct MI300A CPX x1", None), "torch calls it as the whole GPU"


def test_torch_completes_what_the_driver_tells(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(a100(0), a100(1))
    monkeypatch.setitem(sys.modules, "torch", fake_torch("x", "x", uuids=("1", "0")))
    system = detect(tree({}))
    assert [(device.uuid, device.multiprocessors) for device in system.devices] == [("GPU-1", 108), ("GPU-0", 109)], "in torch's order"
    monkeypatch.setitem(sys.modules, "torch", fake_torch("x", uuids=("another",)))
    assert "does not see" in detect(tree({})).missing["devices.multiprocessors"]


@pytest.mark.parametrize(("mask", "expected"), [(None, "NVIDIA A100-SXM4-40GB"), ("0", "NVIDIA A100-SXM4-40GB"), ("1", "NVIDIA T400")])
def test_the_gpu_that_torch_computes_on_is_the_first(
    tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch, mask: str | None, expected: str
) -> None:
    """CUDA counts the fastest GPU first, NVML by PCI addresses: the record of a small card had the name and peak of the other one."""
    nvml(FakeGpu("NVIDIA T400", uuid="GPU-0"), a100(1))
    seen = {None: ("1", "0"), "0": ("1",), "1": ("0",)}[mask]
    monkeypatch.setitem(sys.modules, "torch", fake_torch(*("x" for _ in seen), uuids=seen))
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    system = detect(tree({}))
    assert (len(system.devices), system.devices[0].model, system.peak is not None) == (len(seen), expected, expected != "NVIDIA T400")


def test_of_mig_instances_torch_sees_one(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [FakeGpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", uuid=f"MIG-{n}") for n in "abc"]
    nvml(FakeGpu("NVIDIA A100-SXM4-40GB", uuid="GPU-0", instances=slices), a100(1))
    for mask, expected in (("0", ["MIG-a"]), ("1", ["GPU-1"]), ("MIG-c", ["MIG-c"]), ("2", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
        assert [device.uuid for device in detect(tree({})).devices if device.kind == "cuda"] == expected, "numbers count GPUs"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setitem(sys.modules, "torch", fake_torch("x", uuids=("b",)))
    assert [device.uuid for device in detect(tree({})).devices] == ["MIG-b"]


def test_torch_alone(tree: Tree, nvml: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(fails="NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "torch", fake_torch("AMD Instinct MI250X", "AMD Instinct MI250X", hip="7.0", cuda=None))
    system = detect(tree({}))
    assert (system.identity, system.devices[1].compute_capability) == ("AMD Instinct MI250X x2", "gfx90a")
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert detect(tree({})).device_class == "cpu"


def test_state_of_a_gpu(tree: Tree, nvml: Install) -> None:
    nvml(a100(0, throttle=0x4 | 0x20))
    state = environment(tree({"proc/cpuinfo": "cpu MHz : 1000.0\n", **processors(1, 2)}))
    gpu = state["gpus"][0]
    assert gpu["throttle"] == ["sw_power_cap", "sw_thermal"]
    assert (gpu["sm_clock_mhz"], gpu["memory_clock_mhz"], gpu["temperature_c"], gpu["ecc"], gpu["mig"]) == (1410, 1215, 31, True, False)
    assert (gpu["pcie_generation"], gpu["pcie_width"], gpu["persistence_mode"], gpu["power_limit_w"]) == (4, 16, True, 400.0)
    assert (state["cpu"]["governor"], state["cpu"]["clock_mhz"]) == ("performance", 2250.0)
    assert state["versions"]["driver"] == "570.1"


def test_environment_of_this_machine_is_json_and_explains_every_none() -> None:
    state = environment()
    json.dumps(state, allow_nan=False)
    unknown = [f"versions.{key}" for key, value in state["versions"].items() if value is None and key not in ("driver", "libc")]
    unknown += [f"cpu.{key}" for key, value in state["cpu"].items() if value is None]
    assert set(unknown) <= set(state["missing"])
    assert state["git"] is not None or state["missing"]["git"]


def test_secrets_stay_out() -> None:
    given = {
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "8",
        "MALLOC_ARENA_MAX": "2",
        "NCCL_DEBUG": "INFO",
        "NCCL_AUTH_TOKEN": "x",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "AWS_SECRET_ACCESS_KEY": "x",
        "HOME": "/home/me",
        "SLURM_JWT": "x",
    }
    assert list(variables(given)) == ["CUDA_VISIBLE_DEVICES", "MALLOC_ARENA_MAX", "NCCL_DEBUG", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"]


def test_slurm_by_a_list(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_JWT", "secret")
    assert environment(tree({}))["slurm"] == {"SLURM_JOB_ID": "17"}


def test_containers(tree: Tree) -> None:
    root = tree({})
    assert container(root, {}) is None
    assert container(root, {"APPTAINER_CONTAINER": "/images/torch.sif"}) == {"runtime": "apptainer", "image": "/images/torch.sif"}
    assert container(tree({".dockerenv": ""}), {}) == {"runtime": "docker", "image": None}
    assert container(tree({"run/.containerenv": 'name="x"\nimage="quay.io/a:1"\n'}), {}) == {"runtime": "podman", "image": "quay.io/a:1"}


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == "not run from a git checkout"
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **who}).stdout.strip()

    git("init")
    assert str(git_state(tmp_path)).startswith("git: ")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "x")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; import caraml.system.model, caraml.system.catalogue; from caraml.system.detect import detect\n"
        "from caraml.system.environment import environment; detect(); environment(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
