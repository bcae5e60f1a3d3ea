"""What detection and sensors share, without pydantic and torch: reading the small files of /proc and /sys, where whatever is wrong with
one, the answer is ``None``, not an exception; and which accelerators are this process's, by the variables that CUDA, ROCm and schedulers
obey."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

ROOT = Path("/")
"""Where proc, sys and dev are, unless a test has them elsewhere."""


def read(path: Path) -> str | None:
    """The text of a small file, stripped, undecodable bytes and control characters replaced; ``None`` if it cannot be read."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError):
        return None
    return clean(raw.decode("utf-8", "replace"))


APUS = {"0x74a0": "MI300A"}
"""AMD's accelerators with processor cores in their package: PCI number and name. Power and its limits are those of the package, their
memory is the host's: amdgpu shows 0 bytes of their own, or none, and no name (Linux, amdgpu: gmc_v9_0.c, amdgpu_fru_eeprom.c)."""


def partition_of(device: Path) -> str:
    """The mode in which an AMD GPU is divided into several devices (``DPX``, ``TPX``, ``QPX``, ``CPX``); empty for a whole one."""
    mode = read(device / "current_compute_partition") or ""
    return mode if re.fullmatch(r"[DTQC]PX", mode) else ""


def rocm_devices(nodes: Path) -> dict[str, list[dict[str, int]]]:
    """What AMD's compute driver says of the devices that ROCm counts, in its order, by PCI address without the function: one of a whole
    GPU, several of one that is divided. ``nodes`` is its folder below /sys/class/kfd; of devices that are not this job's it tells nothing.

    ``memory_bytes`` is added to its ``properties``: on a package with processor cores, what the GPU may take of the host's memory.
    """
    found: dict[str, list[dict[str, int]]] = {}
    for node in listing(nodes, "[0-9]*"):
        told = _numbers(node / "properties")
        if told.get("simd_count"):
            place = told.get("location_id", 0)  # bus, device and function; the highest bits count the devices of one GPU
            address = f"{told.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}"
            banks = (_numbers(bank / "properties").get("size_in_bytes", 0) for bank in listing(node / "mem_banks", "[0-9]*"))
            found.setdefault(address, []).append({**told, "memory_bytes": sum(banks)})
    return found


def _numbers(path: Path) -> dict[str, int]:
    """Lines ``name number`` of a small file."""
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", read(path) or "", re.MULTILINE)}


def is_processor_graphics(hwmon: Path) -> bool:
    """Whether amdgpu's sensors are those of a processor's graphics: their power, and a limit if they have one, is the whole processor's.

    Only these have the voltage of the northbridge (Linux, drivers/gpu/drm/amd/pm/amdgpu_pm.c), and of these only Van Gogh has limits.
    """
    return read(hwmon / "in1_label") == "vddnb" and read(hwmon.parents[1] / "device") not in APUS


def clean(text: str) -> str:
    """Text from firmware or a driver without NULs and control characters (line ends and tabs stay), stripped."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text).strip()


def opens(node: Path) -> bool:
    """Whether this process may use a device file."""
    return os.access(node, os.R_OK | os.W_OK)


def read_int(path: Path) -> int | None:
    """The integer in a small file; ``None`` if there is none."""
    text = read(path)
    try:
        return int(text) if text else None
    except ValueError:
        return None


def listing(folder: Path, pattern: str) -> list[Path]:
    """What in ``folder`` matches ``pattern``, by number where the names end in one (``cpu2`` before ``cpu10``)."""
    try:
        found = list(folder.glob(pattern))
    except OSError:
        return []
    return sorted(found, key=lambda path: (re.sub(r"\d+$", "", path.name), int((re.findall(r"\d+$", path.name) or ["0"])[0])))


def fields(text: str | None) -> dict[str, str]:
    """``key : value`` lines as a dictionary; the first of equal keys counts."""
    found: dict[str, str] = {}
    for line in (text or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip(), value.strip())
    return found


def kib(path: Path, key: str) -> int | None:
    """The bytes of a line ``key: N kB``; ``None`` if there is no such line."""
    found = re.match(r"(\d+) kB", fields(read(path)).get(key, ""))
    return int(found[1]) * 1024 if found else None


def cpu_numbers(text: str | None) -> frozenset[int]:
    """The CPUs of a list as Linux writes it, e.g. ``0-3,8``; none for text that is no such list."""
    found: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpu_list(cpus: Iterable[int]) -> str:
    """CPUs as Linux writes them: ``{0, 1, 2, 3, 8}`` is ``0-3,8``."""
    ordered = sorted(cpus)
    starts = [cpu for before, cpu in pairwise([-2, *ordered]) if cpu != before + 1]
    ends = [cpu for cpu, after in pairwise([*ordered, -2]) if after != cpu + 1]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.([0-7]))?", re.IGNORECASE)
"""Domain, bus, device and function: ``00000000:65:00.0`` (NVML), ``0000:65:00.0`` (sysfs, amdsmi), ``65:00.0``."""


def names_device(word: str, *names: str) -> bool:
    """Whether ``word`` is one of a device's names, or the same PCI address in another spelling; one without a function is that of all."""
    if word.lower() in (name.lower() for name in names):
        return True
    asked = _PCI.fullmatch(word)
    if asked is None:
        return False
    domain, bus, slot, function = asked.groups()
    return any(
        (int(found[1] or "0", 16), found[2].lower(), found[3].lower()) == (int(domain or "0", 16), bus.lower(), slot.lower())
        and (function is None or found[4] in (None, function))
        for found in filter(None, map(_PCI.fullmatch, names))
    )


# -- which accelerators are this process's ---------------------------------------------------------------------------------------------

Masks: TypeAlias = tuple[tuple[str, ...], ...]
"""Variables, layer by layer: of a layer the first that is set counts, and a layer sees what the one before it let through."""

CUDA: Masks = (("CUDA_VISIBLE_DEVICES",),)
ROCM: Masks = (("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"))
"""ROCm's runtime narrows first; HIP counts what is left, and takes CUDA's variable where its own is not set."""
GAUDI: Masks = (("HABANA_VISIBLE_DEVICES",),)
ASCEND: Masks = (("ASCEND_RT_VISIBLE_DEVICES",),)
UNTOLD = {"intel": ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"), "gaudi": ("HABANA_VISIBLE_MODULES",)}
"""Variables that hide devices by numbers which sensors do not have: of tiles or cards as another variable says, or of modules."""


def let_through(devices: Sequence[Iterable[str]], masks: Masks, environ: Mapping[str, str] = os.environ) -> list[int]:
    """The places of the devices that the environment lets through, in its order; all where no variable is set.

    A mask lists numbers, PCI addresses and (beginnings of) UUIDs. As in the runtimes, it ends at the first entry that names no device, so
    that ``-1`` and the empty string hide all, and numbers count in the library's order, which is the runtime's where all are alike.
    ``devices`` are the names that each has besides its number.
    """
    left = list(range(len(devices)))
    for variables in masks:
        mask = next((environ[name] for name in variables if name in environ), None)
        if mask is None or (variables in GAUDI and mask.strip().lower() == "all"):  # as Gaudi's containers set it
            continue
        names = {place: (str(number), *devices[place]) for number, place in enumerate(left)}
        chosen: dict[int, None] = {}
        for word in mask.split(","):
            place = named(word.strip(), names)
            if place is None:
                break
            chosen[place] = None
        left = list(chosen)
    return left


def named(word: str, devices: Mapping[int, Sequence[str]]) -> int | None:
    """The device that ``word`` names: exactly, by PCI address in any spelling, or as the beginning of one UUID only."""
    low = word.lower()
    for place, names in devices.items():
        if names_device(word, *names):
            return place
    if low.startswith(("gpu-", "mig-")) and len(low) > 4:
        found = [place for place, names in devices.items() if any(name.lower().startswith(low) for name in names)]
        return found[0] if len(found) == 1 else None
    return None
