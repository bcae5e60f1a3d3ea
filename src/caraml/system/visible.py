"""Which GPUs this process may use: the driver's list, narrowed by the variables that CUDA and ROCm obey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caraml.system.model import DeviceModel

CUDA = ("CUDA_VISIBLE_DEVICES",)
ROCM = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def visible(devices: Sequence[DeviceModel], variables: Sequence[str], environ: Mapping[str, str]) -> list[DeviceModel]:
    """The devices that the first of ``variables`` that is set lets through, in its order; all of them if none is set.

    Entries are numbers or (starts of) UUIDs. As in CUDA, the first entry that names no device ends the list, so that ``-1`` and the
    empty string hide every device. Numbers count in PCI order, which is CUDA's too where all GPUs are alike.
    """
    wanted = next((environ[name] for name in variables if name in environ), None)
    if wanted is None:
        return list(devices)
    chosen: list[DeviceModel] = []
    for entry in (part.strip() for part in wanted.split(",")):
        device = _named(entry, devices)
        if device is None:
            break
        chosen.append(device)
    return chosen


def _named(entry: str, devices: Sequence[DeviceModel]) -> DeviceModel | None:
    if entry.isdigit():
        return devices[int(entry)] if int(entry) < len(devices) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    return next((device for device in devices if device.uuid and device.uuid.startswith(entry)), None)
