"""What CARAML knows of a family of accelerators, and how torch's build is read without importing it."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from caraml.system.files import listing, read
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
    values: dict[str, object] = {}
    try:
        lines = ast.parse(read(Path(spec.origin).parent / "version.py") or "").body
    except SyntaxError:
        lines = []
    for line in lines:
        targets = line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant):
            values |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    versions = {name: text if isinstance(text := values.get(name), str) else None for name in ("cuda", "hip", "xpu")}
    loads = os.environ.get(AUTOLOAD, "1") == "1"
    plugins = tuple(sorted(point.module for point in entry_points(group=GROUP))) if loads else ()
    return TorchBuild(str(values.get("__version__", "unknown")), **versions, plugins=plugins)


def pci_devices(root: Path, pattern: str, vendor: str, node: Callable[[Path], Path | None], *, unnamed: str, kind: DeviceKind) -> Shown:
    """PCI devices of a vendor below ``/sys/class``, ``pattern`` being their folders, and ``node`` the device file of each.

    The driver tells no names: ``unnamed`` with the PCI device's number stands for them.
    """
    devices, closed = list[DeviceModel](), list[str]()
    for folder in (path / "device" for path in listing(root / "sys/class", pattern)):
        if read(folder / "vendor") != vendor:
            continue
        file = node(folder)
        if file is None or not os.access(file, os.R_OK | os.W_OK):
            closed.append(f"/{file.relative_to(root)}" if file is not None else f"/{folder.relative_to(root)}")
            continue
        address = next((line[14:] for line in (read(folder / "uevent") or "").splitlines() if line.startswith("PCI_SLOT_NAME=")), None)
        number = read(folder / "device")
        devices.append(DeviceModel(model=f"{unnamed} {number}" if number else unnamed, kind=kind, index=len(devices), pci_bus_id=address))
    return Shown(tuple(devices), tuple(closed))


def no_driver(root: Path) -> Shown:
    """Of families that show themselves to torch alone."""
    return Shown()
