"""Which family of accelerators is measured: of those that drivers show, the one that torch drives or that the user asks for.

Nothing here imports torch, except :func:`torch_s_devices` where only torch knows whether there is a device, and side streams.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caraml.base.errors import EnvironmentUnfitError, in_a_line, nearest
from caraml.system import host
from caraml.system.families.family import (
    AUTOLOAD,
    CUDA,
    FAMILIES,
    HIP,
    INTEGRATED,
    OTHER,
    PLAIN,
    Family,
    Shown,
    TorchBuild,
    installed_torch,
)
from caraml.system.model import DeviceModel

if TYPE_CHECKING:
    import torch

__all__ = ["FAMILIES", "OVERRIDE", "PLAIN", "Family", "Shown", "driven", "family_of"]
__all__ += ["forced", "measured", "pins", "refusal", "side_stream", "told_apart", "torch_s_devices", "why_not"]

OVERRIDE = "CARAML_DEVICE"
"""Environment variable: what to measure, by torch's name for it. ``cpu`` makes a machine with GPUs measure its CPUs."""
_CPU = f"or measure the CPUs: export {OVERRIDE}=cpu"


def forced() -> str:
    """What ``CARAML_DEVICE`` asks for; empty if nothing."""
    return os.environ.get(OVERRIDE, "").strip().lower()


def family_of(torch_type: str) -> Family:
    """The family of torch's devices of this type: of ``cuda`` the one that torch is built for."""
    if torch_type == "cuda":
        build = installed_torch()
        return HIP if build is not None and build.hip else CUDA
    return next((family for family in FAMILIES if family.torch_type == torch_type), OTHER)


def driven(family: Family) -> bool:
    """Whether the installed torch drives the family."""
    build = installed_torch()
    return build is not None and family.driven(build)


def measured(root: Path) -> Family | None:
    """The family whose devices a point runs on: of those that drivers show, the one that is asked for or that torch drives, else the
    first. ``None`` where no driver shows any."""
    shown = [family for family, _ in _shown(root)]
    asked = [family for family in shown if family.torch_type == forced()]
    return next(iter([*asked, *filter(driven, shown), *shown]), None)


def _shown(root: Path) -> list[tuple[Family, Shown]]:
    """The families whose drivers show devices that this process may open."""
    return [(family, shown) for family, shown in ((each, each.by_driver(root)) for each in FAMILIES) if shown.devices]


def closed(root: Path) -> str | None:
    """In words, device files of accelerators that torch drives and of which this process may open none; ``None`` where one opens, where
    there are none, or where CPUs were asked for."""
    if forced() or any(driven(family) for family, _ in _shown(root)):
        return None
    found = ((family.title, family.by_driver(root).closed) for family in FAMILIES if driven(family))
    return next((f"{title}: {', '.join(files[:4])} cannot be opened" for title, files in found if files), None)


def told_apart(torch_type: str, count: int, root: Path) -> list[str] | None:
    """PCI addresses of all ``count`` devices of a family, by which its sensors are told from those of other accelerators in the machine.
    ``None`` where drivers show no others; empty where its own driver does not tell the addresses of so many."""
    shown = {family: [device for device in of.devices if device.model not in INTEGRATED] for family, of in _shown(root)}
    if not any(devices for family, devices in shown.items() if family.torch_type != torch_type):
        return None
    own = [device.pci_bus_id for family, devices in shown.items() if family.torch_type == torch_type for device in devices]
    return [address for address in own if address] if len(own) == count and all(own) else []


def torch_s_devices(root: Path) -> list[DeviceModel]:
    """Devices of families that torch alone can name; torch is imported only where it may see one. Raises ``EnvironmentUnfitError`` where
    it cannot be, because of a plug-in of it."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        build = installed_torch()
        if build is None or not (build.plugins or any(driven(family) for family, _ in _shown(root))):
            return []
        torch = _imported(build)
    device_type = _torch_s_choice(torch)
    if device_type in ("", "cuda") or forced() not in ("", device_type):  # torch counts and times only devices of its own choice
        return []
    return list(_by_torch(torch, device_type))


def _torch_s_choice(torch: Any) -> str:
    return getattr(torch.accelerator.current_accelerator(check_available=True), "type", "")


def _imported(build: TorchBuild) -> Any:
    """Torch, asked for once only: what it has registered before a plug-in failed stands in the way of a second import."""
    found = _import(build)
    if isinstance(found, EnvironmentUnfitError):
        raise found
    return found


@cache
def _import(build: TorchBuild) -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError, RuntimeError) as error:
        cause = f": {in_a_line(error.__cause__)}" if isinstance(error.__cause__, Exception) else ""
        found = f"torch {build.version} cannot be imported with its plug-in {', '.join(build.plugins)}: {in_a_line(error)}{cause}"
        return EnvironmentUnfitError(found, f"repair or remove the plug-in, or keep torch from loading it: export {AUTOLOAD}=0")


def _by_torch(torch: Any, device_type: str) -> Iterator[DeviceModel]:
    module, family = torch.get_device_module(device_type), family_of(device_type)
    numbers = _numbers(family)
    for index in range(module.device_count()):
        told = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
        named = getattr(told, "name", None) or (module.get_device_name(index) if hasattr(module, "get_device_name") else None)
        uuid, units = getattr(told, "uuid", None), getattr(told, "max_compute_units", None)
        named = f"{host.cpu().model} GPU" if device_type == "mps" else named
        yield DeviceModel(
            model=str(named or f"{family.title} ({device_type})"),
            kind=family.kind,
            index=numbers[index] if index < len(numbers) else index,
            uuid=str(uuid) if uuid is not None else None,
            memory_bytes=getattr(told, "total_memory", None) or _memory(torch, module, index),
            multiprocessors=units or None,
        )


def _numbers(family: Family) -> list[int]:
    """The driver's numbers of the devices that a variable leaves to this process, in order; none where it does not give plain numbers."""
    masks = (os.environ[name] for name in family.variables if name in os.environ)
    words = next(masks, "").split(",")
    return [int(word) for word in words] if all(word.strip().isdigit() for word in words) else []


def _memory(torch: Any, module: Any, index: int) -> int | None:
    """Bytes of a device whose properties do not tell; ``None`` where nobody does."""
    if hasattr(module, "recommended_max_memory"):  # Apple: what the GPU may take of the machine's memory
        return int(module.recommended_max_memory())
    try:
        return int(torch.accelerator.get_memory_info(index)[1])
    except (RuntimeError, AttributeError):
        return None


def refusal(root: Path = Path("/")) -> EnvironmentUnfitError | None:
    """Why nothing should be measured here: torch does not drive the accelerator, two families are there to choose from, or there is not
    what ``CARAML_DEVICE`` asks for. ``None`` if all is well, or for graphics inside a processor."""
    if forced():
        return None if forced() == "cpu" else _unmet(root, forced())
    build, shown = installed_torch(), _shown(root)
    able = [family for family, _ in shown if driven(family)]
    if len(able) > 1:
        found = " and ".join(f"{_told(root, family)} ({family.torch_type})" for family in able)
        choice = " or ".join(f"{OVERRIDE}={family.torch_type}" for family in able)
        return EnvironmentUnfitError(f"found two families of accelerators: {found}", f"say which to measure: export {choice}")
    if not able:
        for family, devices in shown:
            if any(device.model not in INTEGRATED for device in devices.devices):
                installed = f"torch {build.version}, built for {build.built_for}," if build is not None else "an absent torch"
                what = f"found {_told(root, family)}: {installed} cannot drive it, and its CPUs would be measured instead"
                return EnvironmentUnfitError(what, f"{family.fix}; {_CPU}")
    try:
        torch_s_devices(root)
    except EnvironmentUnfitError as error:
        return error
    return None


def _unmet(root: Path, wanted: str) -> EnvironmentUnfitError | None:
    """Why there are no such devices as ``CARAML_DEVICE`` asks for; torch is asked only where no driver of NVIDIA's or AMD's shows one."""
    build, asked = installed_torch(), [family for family in FAMILIES if family.torch_type == wanted]
    if build is None or not (any(map(driven, asked)) if asked else build.plugins):
        names = ["cpu", *dict.fromkeys(family.torch_type for family in FAMILIES if family.torch_type)]
        kind = next((family.torch_type for family in FAMILIES if family.kind == wanted), None)
        guess = kind or (nearest(wanted, names) if len(wanted) > 3 else None)  # names of three letters all resemble each other
        installed = f"torch {build.version}, built for {build.built_for}," if build is not None else "an absent torch"
        expected = "" if asked else f"; expected {', '.join(names)}, or what a plug-in of torch calls its devices"
        what = f"{OVERRIDE}: found {wanted!r}, which {installed} cannot drive{expected}"
        return EnvironmentUnfitError(what, f"did you mean {guess!r}?" if guess and not asked else f"{(asked or [OTHER])[0].fix}; {_CPU}")
    if wanted == "cuda" and any(family in asked for family, _ in _shown(root)):
        return None
    try:
        torch: Any = sys.modules.get("torch") or _imported(build)
    except EnvironmentUnfitError as error:
        return error
    found = _torch_s_choice(torch)
    if found == wanted or (wanted == "cuda" and torch.cuda.is_available()):
        return None
    sees = f"but torch's accelerator is {found!r}" if found else "and torch sees none"
    more = f"; {AUTOLOAD}=0 keeps torch from loading plug-ins" if build.plugins else ""
    return EnvironmentUnfitError(f"{OVERRIDE}: found {wanted!r}, {sees}", f"unset {OVERRIDE}, {_CPU}{more}")


def why_not(family: Family) -> str:
    """Why devices that a driver shows are not what is measured."""
    build = installed_torch()
    if build is None:
        return "torch is not installed"
    return "other devices are" if driven(family) else f"torch {build.version}, built for {build.built_for}, cannot drive it"


def _told(root: Path, family: Family) -> str:
    devices = family.by_driver(root).devices
    return f"{devices[0].model} x{len(devices)}"


class SideStream:
    """A stream beside the one on which a model runs: copies on it overlap with the model's work, which takes over what they bring."""

    def __init__(self, device: torch.device) -> None:
        import torch

        cuda = device.type == "cuda"  # beside a plug-in, CUDA is not torch's current accelerator
        self._device, self._of_the_model = device, (torch.cuda if cuda else torch.accelerator).current_stream
        side: Any = torch.cuda.Stream(device) if cuda else torch.Stream(device)
        self._side = side
        self.launching: Callable[[], AbstractContextManager[None]] = lambda: torch.cuda.stream(side) if cuda else side
        """What is launched inside runs on this stream."""

    def join(self) -> None:
        """The model's stream waits for all that was launched here."""
        self._of_the_model(self._device).wait_stream(self._side)

    def lend(self, tensor: torch.Tensor) -> None:
        """The model uses a tensor of this stream: its memory is not given out again, say to the next copy, before the model has done."""
        tensor.record_stream(self._of_the_model(self._device))


def side_stream(device: torch.device) -> SideStream | None:
    """A stream of its own on a device; ``None`` where copies do not overlap with work: on CPUs, and on devices of one stream."""
    return SideStream(device) if pins(device) else None


def pins(device: torch.device) -> bool:
    """Whether page-locked memory makes copies to the device overlap with its work."""
    return device.type != "cpu" and family_of(device.type).streams
