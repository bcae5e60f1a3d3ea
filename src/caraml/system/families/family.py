"""Families of accelerators: how their kernel drivers show them, which torch drives them, where they differ; and torch's build by its files.

No vendor's library is needed, and torch is not imported.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from caraml.system.files import APUS, ROCM, fields, is_processor_graphics, listing, opens, partition_of, read, read_int, rocm_devices
from caraml.system.model import DeviceKind, DeviceModel, DType

GROUP = "torch.backends"
"""Group of the entry points by which torch finds plug-ins for other accelerators."""
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Torch's variable: ``0`` keeps it from loading them."""
PLAIN: frozenset[DType] = frozenset({"fp64", "fp32", "fp16", "bf16"})


@dataclass(frozen=True)
class TorchBuild:
    """The torch that is installed, by its files. Versions are ``None`` where it is built without."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None
    plugins: tuple[str, ...] = ()
    """Modules that it loads on import, for accelerators that it does not know itself."""

    @property
    def built_for(self) -> str:
        """In words."""
        known = {"CUDA": self.cuda, "ROCm": self.hip, "XPU": self.xpu}
        words = next((f"{name} {version}" for name, version in known.items() if version), "CPUs only")
        return words + "".join(f", with plug-in {module}" for module in self.plugins)


@dataclass(frozen=True)
class Shown:
    """What a family's kernel driver shows."""

    devices: tuple[DeviceModel, ...] = ()
    """Those that this process may open."""
    closed: tuple[str, ...] = ()
    """Device files of the others."""
    loaded: str | None = None
    """Path by which the driver is known to be loaded; ``None`` if it is not."""


@dataclass(frozen=True)
class Family:
    """Accelerators of one kind."""

    kind: DeviceKind
    torch_type: str
    """As in ``torch.device(...)``; empty for plug-ins, which name themselves."""
    title: str
    fix: str
    """How to get a torch that drives them."""
    by_driver: Callable[[Path], Shown]
    driven: Callable[[TorchBuild], bool]
    """Whether that torch drives them."""
    variables: tuple[str, ...] = ()
    """Environment variables that hide devices from a process."""
    arithmetic: frozenset[DType] = PLAIN
    """Formats that torch computes in on them; with others a point is refused."""
    compiled: bool = False
    """Whether torch's compiler makes kernels for them out of the box, so that models are compiled unless a benchmark says otherwise."""
    streams: bool = True
    """Whether copies to the device can overlap with its work, from pinned memory and on a stream of their own."""


@cache
def installed_torch() -> TorchBuild | None:
    """The torch that ``import torch`` would find; ``None`` without one."""
    spec = find_spec("torch")
    if spec is None or not spec.origin:
        return None
    text = read(Path(spec.origin).parent / "version.py") or ""
    # Lines such as ``__version__ = '2.13.0'`` and ``cuda: Optional[str] = '13.0'``; what it is built without is None there.
    values = dict(re.findall(r"""^(\w+)(?:\s*:[^=\n]*)?\s*=\s*["']([^"'\n]*)["']""", text, re.MULTILINE))
    loads = os.environ.get(AUTOLOAD, "1") == "1"
    plugins = tuple(sorted(point.module for point in entry_points(group=GROUP))) if loads else ()
    return TorchBuild(values.get("__version__", "unknown"), values.get("cuda"), values.get("hip"), values.get("xpu"), plugins)


def _pci_address(folder: Path) -> str | None:
    """Of the device behind a folder of the kernel, from lines like ``PCI_SLOT_NAME=0000:c1:00.0``."""
    found = re.search(r"^PCI_SLOT_NAME=(.*)$", read(folder / "uevent") or "", re.MULTILINE)
    return found[1] if found else None


def _loaded(root: Path, *names: str) -> str | None:
    """The first of these files that is there, by which a driver is known to be loaded."""
    return next((f"/{name}" for name in names if (root / name).exists()), None)


def _pci_devices(root: Path, pattern: str, vendor: str, node: Callable[[Path], Path | None], unnamed: str, *, kind: DeviceKind) -> Shown:
    """PCI devices of a vendor below ``/sys/class``, ``pattern`` being their folders, and ``node`` the device file of each.

    The driver tells no names: ``unnamed`` with the PCI device's number stands for them.
    """
    devices, closed = list[DeviceModel](), list[str]()
    for folder in (path / "device" for path in listing(root / "sys/class", pattern)):
        if read(folder / "vendor") != vendor:
            continue
        file = node(folder)
        if file is None or not opens(file):
            closed.append(f"/{(folder if file is None else file).relative_to(root)}")
            continue
        number, address = read(folder / "device"), _pci_address(folder)
        devices.append(DeviceModel(model=f"{unnamed} {number}" if number else unnamed, kind=kind, index=len(devices), pci_bus_id=address))
    return Shown(tuple(devices), tuple(closed))


def nvidia_gpus(root: Path) -> Shown:
    """The GPUs that the NVIDIA kernel module lists."""
    devices, closed = [], []
    for path in listing(root / "proc/driver/nvidia/gpus", "*/information"):
        info = fields(read(path))
        node = root / f"dev/nvidia{info.get('Device Minor', '')}"
        if info.get("Model") and opens(node):
            bus = info.get("Bus Location")
            devices.append(DeviceModel(model=info["Model"], kind="cuda", uuid=info.get("GPU UUID"), pci_bus_id=bus))
        elif info.get("Model"):
            closed.append(f"/dev/{node.name}")
    loaded = "/proc/driver/nvidia/version" if read(root / "proc/driver/nvidia/version") is not None else None
    return Shown(tuple(sorted(devices, key=lambda device: device.pci_bus_id or "")), tuple(closed), loaded)


def amd_gpus(root: Path) -> Shown:
    """The AMD GPUs as ROCm counts them (on dual-die packages every die, of a divided GPU every partition) that amdgpu shows, in the order
    of PCI addresses; none without the driver's compute interface, because AMD graphics cannot be computed on without it."""
    loaded = _loaded(root, "dev/kfd")
    if loaded and not opens(root / "dev/kfd"):
        return Shown(closed=(loaded,), loaded=loaded)
    folders = [card / "device" for card in listing(root / "sys/class/drm", "card[0-9]*") if "-" not in card.name] if loaded else []
    amd = [folder for folder in folders if read(folder / "vendor") == "0x1002" and _computes(folder)]
    told = rocm_devices(root / "sys/class/kfd/kfd/topology/nodes")
    opened, closed = list[DeviceModel](), list[str]()
    for folder in sorted(amd, key=lambda folder: _pci_address(folder) or ""):
        parts = told.get((_pci_address(folder) or "").rpartition(".")[0]) or [{}]
        nodes = [root / "dev/dri" / path.name for path in listing(folder / "drm", "renderD[0-9]*")]
        if partition_of(folder) and "drm_render_minor" in parts[0]:
            nodes = [root / f"dev/dri/renderD{part['drm_render_minor']}" for part in parts]
            parts = [part for part, node in zip(parts, nodes, strict=True) if opens(node)]
        if nodes and not any(map(opens, nodes)):  # as where a job has some of the node's cards
            closed.append(f"/dev/dri/{nodes[0].name}")
        else:
            opened += [_amd_gpu(len(opened) + i, folder, part) for i, part in enumerate(parts if partition_of(folder) else parts[:1])]
    return Shown(tuple(opened), tuple(closed), loaded)


def _computes(folder: Path) -> bool:
    return bool(read_int(folder / "mem_info_vram_total")) or read(folder / "device") in APUS


def _amd_gpu(index: int, folder: Path, told: Mapping[str, int]) -> DeviceModel:
    """A card, or a partition of it, whose limits nobody tells; ``told`` is what the compute driver says of it."""
    hwmon, partition = next(iter(listing(folder / "hwmon", "hwmon[0-9]*")), folder / "hwmon"), partition_of(folder)
    caps = ("power1_cap", "power1_cap_default")
    cap_uw, default_uw = (None if partition or is_processor_graphics(hwmon) else read_int(hwmon / name) for name in caps)
    number, own = read(folder / "device") or "", 0 if partition else read_int(folder / "mem_info_vram_total") or 0
    unnamed = INTEGRATED[1] if is_processor_graphics(hwmon) else f"unknown AMD GPU {number}"
    name = read(folder / "product_name") or (f"AMD Instinct {APUS[number]}" if number in APUS else unnamed)
    return DeviceModel(
        model=f"{name} {partition}".strip(),
        kind="rocm",
        index=index,
        uuid=f"{told['unique_id']:016x}" if partition and told.get("unique_id") else read(folder / "unique_id"),
        pci_bus_id=_pci_address(folder) or None,
        memory_bytes=max(own, told.get("memory_bytes", 0)) or None,
        tdp_w=default_uw / 1e6 if default_uw else None,
        power_limit_w=cap_uw / 1e6 if cap_uw else None,
    )


def amd_driver(root: Path) -> str | None:
    """The version of the amdgpu module; ``None`` for the one that is part of the kernel."""
    return read(root / "sys/module/amdgpu/version")


INTEGRATED = ("Intel integrated graphics", "AMD integrated graphics")
"""What graphics inside of processors are called that have no name."""
_OF_THE_PROCESSOR = "0000:00:02.0"
"""PCI address of the graphics inside an Intel processor."""


def _intel_gpus(root: Path) -> Shown:
    def node(folder: Path) -> Path | None:
        return next((root / "dev/dri" / path.name for path in listing(folder / "drm", "renderD[0-9]*")), None)

    shown = _pci_devices(root, "drm/card[0-9]*", "0x8086", node, "Intel GPU", kind="xpu")
    named = (d.model_copy(update={"model": INTEGRATED[0]}) if d.pci_bus_id == _OF_THE_PROCESSOR else d for d in shown.devices)
    return replace(shown, devices=tuple(named), loaded=_loaded(root, "sys/module/xe", "sys/module/i915"))


def _gaudi(root: Path) -> Shown:
    shown = _pci_devices(root, "accel/accel[0-9]*", "0x1da3", lambda of: root / "dev/accel" / of.parent.name, "Intel Gaudi", kind="hpu")
    return replace(shown, loaded=_loaded(root, "sys/module/habanalabs"))


def _ascend(root: Path) -> Shown:
    """What the davinci driver shows: device files, and nothing of what stands behind them."""
    files = [path for path in listing(root / "dev", "davinci[0-9]*") if path.name[7:].isdigit()]
    devices = tuple(DeviceModel(model="Huawei Ascend", kind="npu", index=int(path.name[7:])) for path in files if opens(path))
    return Shown(devices, tuple(f"/dev/{path.name}" for path in files if not opens(path)), _loaded(root, "dev/davinci_manager"))


def _apple_gpu(root: Path) -> Shown:
    """Every Mac with a processor of Apple's own has one, whose memory is the processor's."""
    if root != Path("/") or (platform.system(), platform.machine()) != ("Darwin", "arm64"):
        return Shown()
    return Shown((DeviceModel(model="Apple GPU", kind="mps"),), loaded="/System/Library/Frameworks/Metal.framework")


CUDA = Family(
    kind="cuda",
    torch_type="cuda",
    title="NVIDIA GPU",
    fix="pip install torch --index-url https://download.pytorch.org/whl/cu130, or the index that https://pytorch.org names",
    by_driver=nvidia_gpus,
    driven=lambda build: build.cuda is not None,
    variables=("CUDA_VISIBLE_DEVICES",),
    arithmetic=PLAIN | {"tf32", "fp8"},
    compiled=True,
)
HIP = Family(  # torch calls the device ``cuda``
    kind="rocm",
    torch_type="cuda",
    title="AMD GPU",
    fix="pip install torch --index-url https://download.pytorch.org/whl/rocm7.0, or the index that https://pytorch.org names",
    by_driver=amd_gpus,
    driven=lambda build: build.hip is not None,
    variables=tuple(name for layer in ROCM for name in layer),
    arithmetic=PLAIN | {"tf32", "fp8"},
    compiled=True,
)
OTHER = Family(  # a renamed PrivateUse1 backend, whose name is the plug-in's own
    kind="other",
    torch_type="",
    title="accelerator of a plug-in",
    fix="install the vendor's plug-in for torch",
    by_driver=lambda root: Shown(),  # it shows itself to torch alone
    driven=lambda build: bool(build.plugins),
)
FAMILIES = (
    CUDA,
    HIP,
    Family(  # collectives by oneCCL as ``xccl``
        kind="xpu",
        torch_type="xpu",
        title="Intel GPU",
        fix="pip install torch --index-url https://download.pytorch.org/whl/xpu",
        by_driver=_intel_gpus,
        driven=lambda build: build.xpu is not None,
        variables=("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"),
        compiled=True,
    ),
    Family(  # collectives by HCCL
        kind="hpu",
        torch_type="hpu",
        title="Intel Gaudi",
        fix="install the torch of the Gaudi software with habana-torch-plugin (https://docs.habana.ai)",
        by_driver=_gaudi,
        driven=lambda build: any(module.startswith("habana_frameworks") for module in build.plugins),
        variables=("HABANA_VISIBLE_MODULES", "HABANA_VISIBLE_DEVICES"),
    ),
    Family(  # collectives by Huawei's HCCL
        kind="npu",
        torch_type="npu",
        title="Huawei Ascend",
        fix="pip install torch-npu, of the version of torch and of the CANN software",
        by_driver=_ascend,
        driven=lambda build: any(module.startswith("torch_npu") for module in build.plugins),
        variables=("ASCEND_RT_VISIBLE_DEVICES",),
        arithmetic=frozenset({"fp32", "fp16", "bf16"}),
    ),
    Family(
        kind="mps",
        torch_type="mps",
        title="Apple GPU",
        fix="install a torch built for macOS on arm64, in an arm64 Python of macOS 14 or later",
        by_driver=_apple_gpu,
        driven=lambda build: True,  # every build for these machines does
        arithmetic=frozenset({"fp32", "fp16", "bf16"}),
        streams=False,
    ),
    Family(  # no public driver shows them
        kind="mtia",
        torch_type="mtia",
        title="MTIA",
        fix="install the torch of the machine's vendor",
        by_driver=lambda root: Shown(),
        driven=lambda build: any("mtia" in module for module in build.plugins),
    ),
    OTHER,
)
