"""What machine this is (:func:`detect`). Needs neither torch nor root rights, and survives whatever is missing.

Torch is imported only where it alone can name an accelerator that it drives (``caraml.system.families``). Where the process has loaded it
already, what else it knows is added: multiprocessors, and GPUs whose driver does not show them to us.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from caraml.base.errors import EnvironmentUnfitError
from caraml.system import families, host, nvml
from caraml.system.environment import container
from caraml.system.families.family import HIP, INTEGRATED, amd_driver, amd_gpus
from caraml.system.files import APUS, CUDA, ROCM, ROOT, Masks, let_through, read
from caraml.system.model import Affinity, DeviceKind, DeviceModel, System, data_sheet, is_slice, with_sheet


def detect(root: Path = ROOT) -> System:
    """This machine as a ``System`` called ``local``: its compute devices are the GPUs that may be used or, without any, its CPUs.

    ``root`` is where proc, sys and dev are looked for. What could not be found out is ``None``, with the reason in ``missing``.
    """
    missing: dict[str, str] = {}
    cpu, memory = host.cpu(root), host.memory_bytes(root)
    gpus, driver = ([], None) if families.forced() == "cpu" else _gpus(root, missing)
    devices = gpus or [DeviceModel(model=cpu.model, kind="cpu", memory_bytes=memory)]  # all CPUs of the node
    if not gpus:
        driver, missing["driver"] = None, "no GPU in use"
    unfit = families.refusal(root)
    if unfit is not None:
        missing["devices"] = unfit.args[0]
    elif not gpus and (closed := families.closed(root)):
        missing["devices"] = closed
    reasons = {
        "cpu.sockets": (cpu.sockets, "neither /sys/devices/system/cpu nor /proc/cpuinfo tells"),
        "cpu.numa_nodes": (cpu.numa_nodes, "no /sys/devices/system/node"),
        "cpu.usable_threads": (cpu.usable_threads, "neither /proc, /sys nor an affinity mask tells"),
        "memory_bytes": (memory, "no MemTotal in /proc/meminfo"),
    }
    missing |= {key: why for key, (value, why) in reasons.items() if value is None}
    kind = container(root, os.environ)
    near = host.device_affinity(devices, root) if gpus else "the CPUs compute themselves"
    if isinstance(near, str):
        missing["affinity"] = near
    system = System(
        name="local",
        title="",
        hostname=platform.node() or None,
        nodes=1,
        devices_per_node=len(devices),
        devices=tuple(devices),
        cpu=cpu,
        memory_bytes=memory,
        driver=driver,
        os=_os_name(root),
        kernel=f"{platform.system()} {platform.release()}",
        affinity=near if isinstance(near, Affinity) else None,
        container=kind and (kind["image"] or kind["runtime"]),
        missing=missing,
        sources=_of_packages(devices),
    )
    return with_sheet(system.model_copy(update={"title": system.identity}))


def _of_packages(devices: Sequence[DeviceModel]) -> dict[str, str]:
    """What to say of limits that are those of a package with processor cores."""
    apu = any(name in device.model for device in devices for name in APUS.values() if device.kind == "rocm")
    return dict.fromkeys(("devices.tdp_w", "devices.power_limit_w"), "detected: of the package, processor cores included") if apu else {}


def _visible(devices: Sequence[DeviceModel], masks: Masks) -> list[DeviceModel]:
    """The devices that the environment leaves to this process. ROCm's variables have ``GPU-`` before what amdgpu calls a GPU's number."""
    names = [[device.uuid, f"GPU-{device.uuid}"] if device.uuid else [] for device in devices]
    return [devices[place] for place in let_through(names, masks)]


def _numbered(units: Sequence[DeviceModel]) -> Sequence[DeviceModel]:
    """What numbers of CUDA's variable mean: GPUs, of which one that is partitioned stands for its first MIG instance."""
    firsts = {device.index: device for device in reversed(units)}
    numbers = re.match(r"\s*\d", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return [device for device in units if device is firsts[device.index]] if numbers else units


def _counts(root: Path, kind: DeviceKind) -> bool:
    """Whether NVIDIA's or AMD's devices may be what is measured: where NVIDIA's driver shows nothing, NVML may still."""
    family = families.measured(root)
    return families.forced() in ("", "cuda") and (family is None or family.kind == kind or not families.driven(family))


def _gpus(root: Path, missing: dict[str, str]) -> tuple[list[DeviceModel], str | None]:
    """The GPUs in use and their driver's version: NVIDIA's, else AMD's, else those that only torch sees."""
    with nvml.session() if _counts(root, "cuda") else nullcontext("not asked: other accelerators are measured") as nv:
        if isinstance(nv, str):
            missing["nvml"] = nv
        else:
            units = [_device(nv, index, handle) for index, handle in nv.units()]
            devices, driver = _in_torch_s_order(units) or _visible(_numbered(units), CUDA), nv.driver()
            missing.update(nv.missing)
            if devices:
                return _with_torch(devices, missing), driver
    # Graphics of a processor count where torch drives them.
    drives, shown_dies = families.driven(HIP), amd_gpus(root).devices if _counts(root, "rocm") else ()
    dies = [device for device in shown_dies if drives or device.model not in INTEGRATED]
    amd = _in_torch_s_order(dies) or _visible(dies, ROCM)
    if amd:
        missing["devices.compute_capability"] = "not shown by the amdgpu driver"
        limits = {"tdp_w": [device.tdp_w for device in amd], "power_limit_w": [device.power_limit_w for device in amd]}
        missing.update({f"devices.{key}": "amdgpu shows no limit of the GPU alone" for key, found in limits.items() if not any(found)})
        return _with_torch(amd, missing), amd_driver(root)
    others, family = _only_torch_sees(root), families.measured(root)
    loaded = family.by_driver(root).loaded if others and family is not None else None
    return others, read(root / loaded.lstrip("/") / "version") if loaded else None


def _device(nv: nvml.Nvml, index: int, handle: Any) -> DeviceModel:
    """One GPU or MIG instance; what NVML does not tell is ``None`` and named in ``missing``."""
    key = f"devices[{index}]"
    memory = nv.ask(f"{key}.memory_bytes", "nvmlDeviceGetMemoryInfo", handle)
    tdp_mw = nv.ask(f"{key}.tdp_w", "nvmlDeviceGetPowerManagementDefaultLimit", handle)
    limit_mw = nv.ask(f"{key}.power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle)
    capability = nv.ask(f"{key}.compute_capability", "nvmlDeviceGetCudaComputeCapability", handle)
    return DeviceModel(
        model=nv.ask(f"{key}.model", "nvmlDeviceGetName", handle) or "unknown NVIDIA GPU",
        kind="cuda",
        index=index,
        uuid=nv.ask(f"{key}.uuid", "nvmlDeviceGetUUID", handle),
        pci_bus_id=nv.pci_bus_id(handle, f"{key}.pci_bus_id"),
        memory_bytes=int(memory.total) if memory is not None else None,
        tdp_w=tdp_mw / 1000 if tdp_mw else None,
        power_limit_w=limit_mw / 1000 if limit_mw else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
    )


def _in_torch_s_order(devices: Sequence[DeviceModel]) -> list[DeviceModel]:
    """Those of the driver's devices that torch sees, in its order, where it is loaded and all of them are found by their UUIDs; else none.

    CUDA counts the fastest GPU first, and of several MIG instances it shows a process one: what its variable means is known by the result.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    by_uuid = {_plain(device.uuid): device for device in devices if device.uuid}
    found = [by_uuid.get(_plain(told.uuid)) for told in _torch_cuda(torch)]
    return [device for device in found if device is not None] if None not in found and len(by_uuid) == len(devices) else []


def _with_torch(devices: list[DeviceModel], missing: dict[str, str]) -> list[DeviceModel]:
    """The devices with what only torch tells, where it is loaded and sees as many."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        missing["devices.multiprocessors"] = "torch is not loaded in this process"
        return devices
    if not torch.cuda.is_available() or torch.cuda.device_count() != len(devices):
        missing["devices.multiprocessors"] = "torch does not see the GPUs that the driver shows; `caraml doctor` says why"
        return devices
    missing.pop("devices.compute_capability", None)
    told = _torch_cuda(torch)
    # Torch may number the GPUs in another order than the driver.
    by_uuid = {_plain(device.uuid): device for device in told}
    completed = []
    for device, other in zip(devices, told, strict=True):
        same = by_uuid.get(_plain(device.uuid), other)
        # amdgpu gives the name on the board, of which each maker has its own.
        unnamed = device.model.startswith("unknown") or device.model in INTEGRATED
        unlisted = device.kind == "rocm" and isinstance(data_sheet(device.model), str) and not isinstance(data_sheet(same.model), str)
        model = same.model if (unnamed or unlisted) and not is_slice(device.model) else device.model
        capability = device.compute_capability or same.compute_capability
        told_too = {"model": model, "compute_capability": capability, "multiprocessors": same.multiprocessors}
        completed.append(device.model_copy(update=told_too))
    return completed


def _plain(uuid: str | None) -> str | None:
    """A UUID without what says whose it is: torch names neither a GPU nor a slice of one, and amdgpu gives the bare number."""
    return None if uuid is None else uuid.lower().removeprefix("gpu-").removeprefix("mig-").removeprefix("0x")


def _uuid(told: object) -> str:
    """The UUID of a GPU by torch, which prints the sixteen characters that HIP gives as if they were bytes."""
    text = str(told)
    with suppress(ValueError):
        characters = bytes.fromhex(text.replace("-", "")).decode("ascii")
        text = characters if re.fullmatch(r"[0-9a-f]{16}", characters) else text
    slices = os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
    return f"{'MIG' if slices else 'GPU'}-{text}"


def _torch_cuda(torch: Any) -> list[DeviceModel]:
    """NVIDIA or AMD GPUs by torch alone: no power limits, no PCI addresses."""
    hip = bool(torch.version.hip)
    return [
        DeviceModel(
            model=p.name,
            kind="rocm" if hip else "cuda",
            index=i,
            uuid=_uuid(p.uuid) if hasattr(p, "uuid") else None,
            memory_bytes=p.total_memory,
            compute_capability=p.gcnArchName.partition(":")[0] if hip else f"{p.major}.{p.minor}",
            multiprocessors=p.multi_processor_count,
        )
        for i, p in enumerate(torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
    ]


def _only_torch_sees(root: Path) -> list[DeviceModel]:
    """Accelerators that no driver of ours shows: those of torch's other backends, and NVIDIA's where NVML is missing."""
    try:
        others = families.torch_s_devices(root)  # imports torch where it may see a device
    except EnvironmentUnfitError:  # told by `families.refusal`
        others = []
    torch: Any = sys.modules.get("torch")
    cuda = torch is not None and families.forced() in ("", "cuda") and torch.cuda.is_available()
    return _torch_cuda(torch) if cuda else others


def _os_name(root: Path) -> str | None:
    if root == ROOT and platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    text = read(root / "etc/os-release") or read(root / "usr/lib/os-release") or ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)"?$', text, re.MULTILINE)
    return match[1] if match else None
