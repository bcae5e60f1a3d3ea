"""Accelerators of every family, by fakes of what their drivers show: which is measured, and what is said of one that torch cannot drive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from fake_machine import Tree
from fake_nvml import FakeGpu, FakeNvml, fake_torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.system import families
from caraml.system.detect import detect
from caraml.system.families import family
from caraml.system.families.family import TorchBuild

CPU_ONLY = TorchBuild("2.13.0+cpu")
Installed = Callable[..., None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Installed:
    """Makes the installed torch one that is built for something."""

    def install(**built: object) -> None:
        build = TorchBuild("2.13.0", **built)  # type: ignore[arg-type]
        monkeypatch.setattr(families, "installed_torch", lambda: build)

    return install


def intel(card: int, bus: str, device: str = "0x0bd5", render: bool = True) -> dict[str, str | bytes]:
    folder = f"sys/class/drm/card{card}/device"
    files: dict[str, str | bytes] = {
        f"{folder}/vendor": "0x8086\n",
        f"{folder}/device": f"{device}\n",
        f"{folder}/uevent": f"DRIVER=xe\nPCI_SLOT_NAME={bus}\n",
        f"{folder}/drm/renderD{128 + card}/dev": "226:128\n",
        "sys/module/xe/version": "1.2.3\n",
    }
    return files | ({f"dev/dri/renderD{128 + card}": ""} if render else {})


def gaudi(count: int) -> dict[str, str | bytes]:
    files: dict[str, str | bytes] = {"sys/module/habanalabs/version": "1.22"}
    for index in range(count):
        folder = f"sys/class/accel/accel{index}/device"
        files |= {f"{folder}/vendor": "0x1da3\n", f"{folder}/device": "0x1020\n", f"dev/accel/accel{index}": ""}
    return files


NVIDIA = "Model: NVIDIA A100\nGPU UUID: GPU-0\nDevice Minor: 0\n"
AMD = "sys/class/drm/card0/device"
SHOWN: dict[str, tuple[dict[str, str | bytes], str, str]] = {
    "cuda": ({"proc/driver/nvidia/gpus/0000:01:00.0/information": NVIDIA, "dev/nvidia0": ""}, "NVIDIA A100 x1", "whl/cu130"),
    "rocm": (
        {"dev/kfd": "", f"{AMD}/vendor": "0x1002", f"{AMD}/product_name": "MI300X", f"{AMD}/mem_info_vram_total": "1"},
        "MI300X x1",
        "whl/rocm",
    ),
    "xpu": (intel(0, "0000:4d:00.0") | intel(1, "0000:3a:00.0"), "Intel GPU 0x0bd5 x2", "whl/xpu"),
    "hpu": (gaudi(8), "Intel Gaudi 0x1020 x8", "habana-torch-plugin"),
    "npu": ({"dev/davinci0": "", "dev/davinci1": "", "dev/davinci_manager": ""}, "Huawei Ascend x2", "torch-npu"),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_device_that_torch_cannot_drive_is_not_measured_as_a_cpu(tree: Tree, installed: Installed, kind: str) -> None:
    files, found, fix = SHOWN[kind]
    root = tree(files)
    installed()
    error = families.refusal(root)
    assert isinstance(error, EnvironmentUnfitError) and error.hint is not None
    assert error.args[0] == f"found {found}: torch 2.13.0, built for CPUs only, cannot drive it, and its CPUs would be measured instead"
    assert fix in error.hint and error.hint.endswith("or measure the CPUs: export CARAML_DEVICE=cpu")
    assert detect(root).missing["devices"] == error.args[0]


@pytest.mark.parametrize(
    ("kind", "built"), [("xpu", {"xpu": "20250101"}), ("hpu", {"plugins": ("habana_frameworks",)}), ("npu", {"plugins": ("torch_npu",)})]
)
def test_one_that_torch_drives_is_what_torch_says(
    tree: Tree, nvml: Callable[..., FakeNvml], installed: Installed, monkeypatch: pytest.MonkeyPatch, *, kind: str, built: dict[str, object]
) -> None:
    nvml(fails="Driver Not Loaded")
    installed(**built)
    monkeypatch.setitem(sys.modules, "torch", with_accelerator(kind, "Name by torch", count=2))
    root = tree(SHOWN[kind][0])
    system = detect(root)
    assert (system.identity, system.device_class, system.devices[1].kind) == ("Name by torch x2", "gpu", kind)
    assert system.driver == {"hpu": "1.22", "xpu": "1.2.3", "npu": None}[kind]
    assert (system.devices[1].index, system.devices[1].memory_bytes) == (1, 2**36)
    assert "devices" not in system.missing


def with_accelerator(kind: str, name: str, count: int, **told: object) -> SimpleNamespace:
    """A torch with one accelerator; without ``total_memory`` in what it tells, the allocator knows the size."""
    torch = fake_torch()
    properties = SimpleNamespace(**{"name": name, **told})
    module = SimpleNamespace(device_count=lambda: count, get_device_properties=lambda index: properties)
    torch.accelerator = SimpleNamespace(
        current_accelerator=lambda check_available=False: SimpleNamespace(type=kind), get_memory_info=lambda index: (0, 2**36)
    )
    torch.get_device_module = lambda device: module
    return torch


def test_a_plug_in_that_nobody_knows_is_measured_under_its_own_name(
    tree: Tree, nvml: Callable[..., FakeNvml], installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(fails="Driver Not Loaded")
    installed(plugins=("acme_torch",))
    monkeypatch.setitem(sys.modules, "torch", with_accelerator("acme", "Acme One", 4, total_memory=2**30, uuid="5a"))
    device = detect(tree({})).devices[3]
    assert (device.model, device.kind, device.memory_bytes, device.uuid) == ("Acme One", "other", 2**30, "5a")


def test_graphics_inside_a_processor_do_not_stop_anybody(tree: Tree, installed: Installed) -> None:
    installed()
    assert families.refusal(tree(intel(0, "0000:00:02.0", "0x9a49"))) is None


def test_a_device_file_that_may_not_be_opened_is_not_a_device(tree: Tree, installed: Installed) -> None:
    installed()
    root = tree(intel(0, "0000:4d:00.0", render=False))
    assert families.refusal(root) is None
    shown = families.family_of("xpu").by_driver(root)
    assert (shown.devices, shown.closed, shown.loaded) == ((), ("/dev/dri/renderD128",), "/sys/module/xe")


def test_two_families_have_to_be_chosen_from(
    tree: Tree, nvml: Callable[..., FakeNvml], installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(FakeGpu("NVIDIA A100", uuid="GPU-0"))
    information = "Model: NVIDIA A100\nGPU UUID: GPU-0\nDevice Minor: 0\n"
    root = tree({**gaudi(2), "proc/driver/nvidia/gpus/0000:01:00.0/information": information, "dev/nvidia0": ""})
    installed(cuda="13.0", plugins=("habana_frameworks",))
    error = families.refusal(root)
    assert error is not None
    assert error.args[0] == "found two families of accelerators: NVIDIA A100 x1 (cuda) and Intel Gaudi 0x1020 x2 (hpu)"
    assert error.hint == "say which to measure: export CARAML_DEVICE=cuda or CARAML_DEVICE=hpu"
    monkeypatch.setitem(sys.modules, "torch", with_accelerator("hpu", "Gaudi", 2))
    for asked, kind in (("hpu", "hpu"), ("cuda", "cuda"), ("cpu", "cpu")):
        monkeypatch.setenv("CARAML_DEVICE", asked)
        assert families.refusal(root) is None and detect(root).devices[0].kind == kind


@pytest.mark.parametrize(
    ("asked", "built", "said", "fix"),
    [
        (
            "cdua",
            {},
            "found 'cdua', which torch 2.13.0, built for CPUs only, cannot drive; expected cpu, cuda, xpu, hpu",
            "did you mean 'cuda'?",
        ),
        (
            "rocm",
            {"hip": "7.0"},
            "found 'rocm', which torch 2.13.0, built for ROCm 7.0, cannot drive; expected cpu, cuda",
            "did you mean 'cuda'?",
        ),
        ("gpu", {}, "expected cpu, cuda, xpu", "or measure the CPUs: export CARAML_DEVICE=cpu"),
        ("xpu", {}, "found 'xpu', which torch 2.13.0, built for CPUs only, cannot drive", "whl/xpu"),
        ("xpu", {"xpu": "2025"}, "found 'xpu', but torch's accelerator is 'hpu'", "unset CARAML_DEVICE"),
        ("cuda", {"cuda": "13.0"}, "found 'cuda', but torch's accelerator is 'hpu'", "unset CARAML_DEVICE"),
        ("acme", {"plugins": ("habana_frameworks",)}, "found 'acme', but torch's accelerator is 'hpu'", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"),
    ],
)
def test_a_device_that_is_asked_for_and_not_there_is_refused(
    tree: Tree,
    nvml: Callable[..., FakeNvml],
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: str,
    built: dict[str, object],
    said: str,
    fix: str,
) -> None:
    nvml(fails="Driver Not Loaded")
    installed(**built)
    monkeypatch.setenv("CARAML_DEVICE", asked)
    monkeypatch.setitem(sys.modules, "torch", with_accelerator("hpu", "Gaudi", 2))
    error, system = families.refusal(tree({})), detect(tree({}))
    assert error is not None and error.hint is not None
    assert error.args[0].startswith("CARAML_DEVICE: ") and said in error.args[0] and fix in error.hint
    assert system.missing["devices"] == error.args[0] and system.devices[0].kind == "cpu"


def test_sensors_of_a_family_are_told_from_those_of_others_in_the_machine(tree: Tree) -> None:
    cards, other = intel(0, "0000:4d:00.0") | intel(1, "0000:3a:00.0"), SHOWN["cuda"][0]
    inside = intel(2, "0000:00:02.0", "0x9a49")
    assert families.told_apart("xpu", 2, tree(cards | inside)) is None, "the environment's: there are no others"
    assert families.told_apart("xpu", 2, tree(cards | inside | other)) == ["0000:4d:00.0", "0000:3a:00.0"]
    assert families.told_apart("xpu", 1, tree(cards | other)) == [], "one of two is hidden, and nobody tells which"
    assert families.told_apart("hpu", 8, tree(gaudi(8) | other)) == [], "without addresses"
    assert families.told_apart("acme", 1, tree(other)) == []


def test_the_torch_decides_between_two_that_drivers_show(tree: Tree, installed: Installed) -> None:
    information = "Model: NVIDIA A100\nGPU UUID: GPU-0\nDevice Minor: 0\n"
    root = tree({**intel(0, "0000:4d:00.0"), "proc/driver/nvidia/gpus/0000:01:00.0/information": information, "dev/nvidia0": ""})
    for built, kind in (({"cuda": "13.0"}, "cuda"), ({"xpu": "20250101"}, "xpu")):
        installed(**built)
        found = families.measured(root)
        assert found is not None and found.kind == kind and families.refusal(root) is None


def test_a_plug_in_that_does_not_import_is_named(tree: Tree, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(plugins=("acme_torch",))
    monkeypatch.delitem(sys.modules, "torch")

    def fails(name: str) -> None:
        raise RuntimeError("Failed to load the backend extension: acme") from ImportError("libacme.so.3: no such file")

    monkeypatch.setattr(families.importlib, "import_module", fails)
    families._import.cache_clear()
    error = families.refusal(tree({}))
    families._import.cache_clear()
    assert error is not None and error.hint is not None
    assert "plug-in acme_torch" in error.args[0] and "libacme.so.3: no such file" in error.args[0]
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in error.hint


def test_the_build_of_torch_is_read_without_importing_it(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    family.installed_torch.cache_clear()
    build = family.installed_torch()
    family.installed_torch.cache_clear()
    import torch

    assert build is not None and (build.version, build.cuda, build.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)


def test_every_family_says_what_to_install() -> None:
    kinds = [each.kind for each in families.FAMILIES]
    assert len(set(kinds)) == len(kinds) and all(each.fix and each.title for each in families.FAMILIES)
    assert families.family_of("cuda").kind in ("cuda", "rocm") and families.family_of("acme").kind == "other"


@pytest.mark.parametrize(
    ("kind", "variable", "mask", "indices"),
    [
        ("xpu", "ZE_AFFINITY_MASK", "3,1", [3, 1]),
        ("xpu", "ZE_AFFINITY_MASK", "0.0,0.1", [0, 1]),  # tiles, which torch counts from 0
        ("hpu", "HABANA_VISIBLE_MODULES", "6,7", [6, 7]),
        ("npu", "ASCEND_RT_VISIBLE_DEVICES", "2,5", [2, 5]),
        ("xpu", "HABANA_VISIBLE_MODULES", "6,7", [0, 1]),
    ],
)
def test_devices_keep_the_driver_s_numbers_behind_a_mask(
    monkeypatch: pytest.MonkeyPatch, tree: Tree, *, kind: str, variable: str, mask: str, indices: list[int]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", with_accelerator(kind, "Card", 2))
    monkeypatch.setenv(variable, mask)
    assert [device.index for device in families.torch_s_devices(tree({}))] == indices


HIP = "".join(f"{ord(letter):02x}" for letter in "1a2b3c4d5e6f7a8b")


@pytest.mark.parametrize(
    ("driver", "by_torch"),
    [
        (("GPU-0a", "GPU-0b"), ("0b", "0a")),
        (("MIG-0a", "MIG-0b"), ("0b", "0a")),
    ],
)
def test_a_device_of_the_driver_is_found_among_torch_s_by_its_uuid(
    tree: Tree, nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch, driver: tuple[str, str], by_torch: tuple[str, str]
) -> None:
    if driver[0].startswith("MIG"):
        nvml(FakeGpu("A100", uuid="GPU-1", instances=[FakeGpu("A100 MIG 1g.5gb", uuid=uuid) for uuid in driver]))
    else:
        nvml(*(FakeGpu("A100", uuid=uuid) for uuid in driver))
    monkeypatch.setitem(sys.modules, "torch", fake_torch("x", "x", uuids=by_torch))
    assert [(device.uuid, device.multiprocessors) for device in detect(tree({})).devices] == [(driver[1], 108), (driver[0], 109)]


def test_gpus_are_chosen_by_uuid_in_the_order_of_the_variable(
    tree: Tree, nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(*(FakeGpu("A100", uuid=f"GPU-{letter}0") for letter in "abc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,GPU-a0")
    monkeypatch.setitem(sys.modules, "torch", fake_torch("x", "x", uuids=("c0", "a0")))
    assert [(device.uuid, device.multiprocessors) for device in detect(tree({})).devices] == [("GPU-c0", 108), ("GPU-a0", 109)]


def test_amd_s_uuid_has_one_spelling(tree: Tree, nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's number, and the same by torch, which prints its characters as bytes: so cards are told apart, whatever their order."""
    other = "".join(f"{ord(letter):02x}" for letter in "ffff3c4d5e6f7a8b")
    monkeypatch.setitem(sys.modules, "torch", fake_torch("MI250X", "MI250X", uuids=(other, HIP), cuda=None, hip="7.0"))
    nvml(fails="Driver Not Loaded")
    assert [device.uuid for device in detect(tree({})).devices] == ["GPU-ffff3c4d5e6f7a8b", "GPU-1a2b3c4d5e6f7a8b"]
    files: dict[str, str | bytes] = {"dev/kfd": ""}
    for card, uuid in ((0, "1a2b3c4d5e6f7a8b"), (1, "ffff3c4d5e6f7a8b")):
        folder = f"sys/class/drm/card{card}/device"
        files |= {f"{folder}/vendor": "0x1002\n", f"{folder}/mem_info_vram_total": "1000", f"{folder}/unique_id": f"{uuid}\n"}
        files |= {f"{folder}/uevent": f"PCI_SLOT_NAME=0000:0{card}:00.0\n"}
    assert [(device.pci_bus_id, device.uuid, device.multiprocessors) for device in detect(tree(files)).devices] == [
        ("0000:01:00.0", "ffff3c4d5e6f7a8b", 108),
        ("0000:00:00.0", "1a2b3c4d5e6f7a8b", 109),
    ]


def test_a_gpu_without_nvml_is_found_before_anybody_has_loaded_torch(
    tree: Tree, nvml: Callable[..., FakeNvml], installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml(fails="NVML Shared Library Not Found")
    installed(cuda="13.0")
    root = tree({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: NVIDIA A100\nDevice Minor: 0\n", "dev/nvidia0": ""})
    torch = fake_torch("NVIDIA A100")

    def load(build: TorchBuild) -> SimpleNamespace:
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(families, "_import", load)
    found = [detect(root) for _ in range(2)]
    assert [(system.device_class, system.identity) for system in found] == [("gpu", "NVIDIA A100 x1")] * 2
    assert "devices" not in found[0].missing


@pytest.mark.parametrize(
    ("board", "torch_s", "model", "peak"),
    [
        ("AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", "AMD Instinct MI250X", "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2", 191.5e12),
        ("MI300X-O", "AMD Instinct MI210", "AMD Instinct MI210", 181e12),
        ("MI300X-O", "AMD Radeon Graphics", "MI300X-O", None),
        ("AMD Instinct MI210", "AMD Radeon Graphics", "AMD Instinct MI210", 181e12),
    ],
)
def test_the_name_on_an_amd_board_is_not_always_that_of_a_data_sheet(
    *, tree: Tree, nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch, board: str, torch_s: str, model: str, peak: float | None
) -> None:
    """On LUMI's nodes amdgpu names the maker's board, and points had no MFU by data sheet; torch names the GPU."""
    nvml(fails="Driver Not Loaded")
    torch = fake_torch(torch_s, uuids=("0",), cuda=None, hip="7.0")
    torch.cuda.get_device_properties(0).multi_processor_count = 110 if torch_s == "AMD Instinct MI250X" else 104
    folder = "sys/class/drm/card0/device"
    files: dict[str, str | bytes] = {"dev/kfd": "", f"{folder}/vendor": "0x1002\n", f"{folder}/mem_info_vram_total": "1000"}
    root = tree(files | {f"{folder}/product_name": f"{board}\n", f"{folder}/uevent": "PCI_SLOT_NAME=0000:00:00.0\n"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    system = detect(root)
    assert (system.devices[0].model, None if system.peak is None else system.peak["bf16"].value) == (model, peak)
