"""The host: CPUs, memory and the limits that a cgroup or an affinity mask puts on them; where its CPUs are (cores, sockets, NUMA nodes),
and which of them are next to each device. Reads /proc and /sys, needs no root rights."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from caraml.base.errors import InputError
from caraml.system import nvml
from caraml.system.files import ROOT, clean, cpu_list, cpu_numbers, fields, kib, listing, read, read_int
from caraml.system.model import Affinity, Cpu, DeviceModel

_ISA = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_fp16 amx_int8 asimd asimdhp bf16 i8mm sve sve2"

_ARM_PARTS = {
    (0x41, 0xD0C): "Arm Neoverse-N1",
    (0x41, 0xD40): "Arm Neoverse-V1",
    (0x41, 0xD49): "Arm Neoverse-N2",
    (0x41, 0xD4F): "Arm Neoverse-V2",
    (0x46, 0x001): "Fujitsu A64FX",
    (0xC0, 0xAC3): "Ampere-1",
}
"""Arm kernels give numbers instead of a name (implementer, part): Arm's MIDR_EL1 register, as listed in the Linux sources."""

_before_binding: frozenset[int] | None = None


def cpu(root: Path = ROOT) -> Cpu:
    """The processors of this host. ``root`` is where proc and sys are looked for."""
    if root == ROOT and platform.system() == "Darwin":
        return _mac_cpu()
    info = read(root / "proc/cpuinfo")
    folders = [path for path in listing(root / "sys/devices/system/cpu", "cpu[0-9]*") if read(path / "online") != "0"]
    threads = len(folders) or len(re.findall(r"^processor\s*:", info or "", re.MULTILINE)) or None
    n_sockets, n_cores = _topology(folders) if folders else _topology_of_cpuinfo(info or "")
    nodes = numa_cpus(root)
    known = fields(info)
    flags = (known.get("flags") or known.get("Features") or "").split()
    return Cpu(
        model=_cpu_model(known),
        sockets=n_sockets,
        cores=n_cores or threads,
        threads=threads,
        usable_threads=usable_threads(threads, root),
        numa_nodes=len(nodes) or None,
        numa_cpus=tuple(map(cpu_list, nodes.values())) if list(nodes) == list(range(len(nodes))) else (),
        isa=tuple(flag for flag in _ISA.split() if flag in flags),
    )


def usable_threads(threads: int | None, root: Path = ROOT) -> int | None:
    """Logical CPUs that the job may keep busy: the affinity mask and the cgroup's quota (rounded up), whichever is less."""
    limits = [float(threads)] if threads else []
    if root == ROOT and job_mask():
        limits.append(len(job_mask()))
    quota = cgroup_cpus(root)
    if quota is not None:
        limits.append(quota)
    return max(1, -int(-min(limits) // 1)) if limits else None


def cgroup_cpus(root: Path = ROOT) -> float | None:
    """CPUs that the cgroup's time quota amounts to (may be a fraction); ``None`` without a quota. Both cgroup versions."""
    quotas = []
    for folder in _cgroup_folders(root, ""):
        quota, _, period = (read(folder / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    for folder in _cgroup_folders(root, "cpu"):
        time, every = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        if time and every and time > 0:
            quotas.append(time / every)
    return min(quotas, default=None)


def cache_bytes(root: Path = ROOT) -> int | None:
    """Last-level cache of the CPUs that this process may run on: of a cache that others share, its part. ``None`` if nobody tells."""
    mine = mask()
    found = {}
    for number in mine:
        levels = listing(root / f"sys/devices/system/cpu/cpu{number}/cache", "index[0-9]*")
        last = max(levels, key=lambda level: read_int(level / "level") or 0, default=None)
        size = re.fullmatch(r"(\d+)K", read(last / "size") or "") if last is not None else None
        shared = cpu_numbers(read(last / "shared_cpu_list")) if last is not None else frozenset()
        if size is None or not shared:
            return None
        found[shared] = int(size[1]) * 1024 * len(shared & mine) // len(shared)
    return sum(found.values()) or None


def busy_seconds(cpus: frozenset[int] | None = None, root: Path = ROOT) -> float | None:
    """Seconds since boot that these CPUs, or all, were at work for any process, or for other guests of a virtual machine's host; ``None``
    where the kernel does not tell."""
    rows = [line.split() for line in (read(root / "proc/stat") or "").splitlines() if line.startswith("cpu")]
    chosen = [row for row in rows if (row[0] == "cpu" if cpus is None else row[0][3:].isdecimal() and int(row[0][3:]) in cpus)]
    busy = (1, 2, 3, 6, 7, 8)  # user, nice, system, irq, softirq, and stolen, which kernels before 2.6.11 do not count
    ticks = [sum(int(row[field]) for field in busy if field < len(row)) for row in chosen]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


_MEMORY_FILES = (("", "memory.max", "memory.current"), ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Of each version of cgroups: its controller, and the files of its limit and of what is used."""


def memory_bytes(root: Path = ROOT) -> int | None:
    """Memory that this process may use: the host's, or less where a cgroup says so. ``None`` if not even the host's is known."""
    if root == ROOT and platform.system() == "Darwin":
        return _mac_number("hw.memsize")
    total = kib(root / "proc/meminfo", "MemTotal")
    limits = [None if total is None else total - _of_gpus("MemTotal", root=root)]
    for controller, most, _ in _MEMORY_FILES:
        limits += [read_int(folder / most) for folder in _cgroup_folders(root, controller)]
    # A v1 group without a limit holds a number near 2^63, which the host's own size undercuts.
    return min((limit for limit in limits if limit and 0 < limit < 2**60), default=None)


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes of the host that processes may still take, by the kernel's estimate; ``None`` where it gives none."""
    available = kib(root / "proc/meminfo", "MemAvailable")
    return None if available is None else max(available - _of_gpus("MemFree", "Active(file)", "Inactive(file)", root=root), 0)


def _of_gpus(*keys: str, root: Path) -> int:
    """Bytes of these kinds that /proc/meminfo has of GPUs: beside a coherent link (Grace-Hopper) their memory is a NUMA node of the host.

    Other nodes without CPUs are the host's own (CXL), so the driver is asked which ones are GPUs'.
    """
    found = 0
    for status in listing(root / "proc/driver/nvidia/gpus", "*/numa_status"):
        told = fields(read(status))
        number, node = told.get("Node", ""), root / f"sys/devices/system/node/node{told.get('Node')}"
        if told.get("Status") == "online" and number.isdigit() and not cpu_numbers(read(node / "cpulist")):
            found += sum(kib(node / "meminfo", f"Node {number} {key}") or 0 for key in keys)
    return found


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes that processes here may still take: of the host, or less where a cgroup says so; ``None`` where the kernel does not tell."""
    available = available_memory(root)
    found = [] if available is None else [available]
    for controller, most, used in _MEMORY_FILES:
        for folder in _cgroup_folders(root, controller):
            limit, taken = read_int(folder / most), read_int(folder / used)
            if limit is not None and taken is not None and limit < 2**60:
                found.append(max(limit - taken + _cached(folder), 0))
    return min(found, default=None)


def _cached(folder: Path) -> int:
    """Bytes of a memory group, with the groups in it, that are the cache of files, which goes where others need its room."""
    stat = dict(line.split() for line in (read(folder / "memory.stat") or "").splitlines() if len(line.split()) == 2)
    # Of version 1 the plain numbers are the group's own, though its usage is that of all in it; version 2 has no others.
    return sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("active_file", "inactive_file"))


MEMORY = "CARAML_MEMORY_GIB"
"""Environment variable: most memory of a worker on a CPU; ``off`` for no limit."""
SPARED = 0.03
"""Share of the free memory that no worker takes."""


def memory_asked() -> float | None:
    """What :data:`MEMORY` says [bytes], infinite for no limit; ``None`` where it is not set. Raises ``InputError`` for anything else."""
    text = os.environ.get(MEMORY, "")
    if text in ("", "off"):
        return math.inf if text else None
    with suppress(ValueError):
        if 2**-30 <= (found := float(text)) < 2**33:
            return found * 2**30
    raise InputError(f"{MEMORY}: found {text!r}, expected a number of GiB above 0, or off", f"unset {MEMORY}")


def limit_memory(processes: int, root: Path = ROOT) -> int | None:
    """Have allocations of this process fail before memory is full, so that it ends with a reason; returns its limit in bytes.

    Otherwise the kernel ends a process of its choice, on a shared node perhaps another user's. Each of ``processes`` on this node may take
    an equal part of what is free now. Private memory that may be written counts, touched or not (``RLIMIT_DATA``; Linux 4.7 and later).
    ``None`` where no limit is wanted, or what is free is not known.
    """
    asked, free = memory_asked(), free_memory(root)
    if asked == math.inf or not (asked or free) or not sys.platform.startswith("linux"):
        return None
    taken = kib(root / "proc/self/status", "VmData") or 0
    limit = int(asked) if asked else taken + int((free or 0) * (1 - SPARED)) // processes
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    return limit


def peak_resident() -> int:
    """Highest resident set of this process [bytes]. ``ru_maxrss`` of Linux begins with that of the program that started it."""
    unit = 1 if sys.platform == "darwin" else 1024
    return kib(Path("/proc/self/status"), "VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak_resident() -> None:
    """Count the highest resident set from here on, without freed blocks that glibc keeps. Where it is not Linux, nothing happens."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def oom_kills(root: Path = ROOT) -> int | None:
    """Processes that the kernel has killed so far because this process's cgroup was out of memory; ``None`` where it does not tell."""
    for folder, name in (
        *((f, "memory.events") for f in _cgroup_folders(root, "")),
        *((f, "memory.oom_control") for f in _cgroup_folders(root, "memory")),
    ):
        for line in (read(folder / name) or "").splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill" and count.isdigit():
                return int(count)
    return None


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its ancestors, as mounted; ``controller`` is empty for version 2."""
    mount = root / "sys/fs/cgroup"
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(","):
            continue
        if controller:
            base = mount / names if (mount / names).is_dir() else mount / controller
        else:
            base = mount / "unified" if (mount / "unified").is_dir() else mount
        own = base / path.lstrip("/")
        yield own
        # Inside a container the path may be the host's and not exist here: the mount itself is then the group.
        yield from (parent for parent in own.parents if parent == base or base in parent.parents)


def _topology(folders: list[Path]) -> tuple[int | None, int | None]:
    """Sockets and physical cores by /sys; some kernels give -1 for "unknown" or nothing at all."""
    places = [(read_int(f / "topology/physical_package_id"), read_int(f / "topology/core_id")) for f in folders]
    known = {place for place in places if place[0] is not None and place[1] is not None}
    if not known:
        return None, None
    # Core numbers may start again in each die of a package, so sibling lists tell cores apart better where there are any.
    siblings = {text for f in folders if (text := read(f / "topology/thread_siblings_list"))}
    return len({place[0] for place in known}), len(siblings) or len(known)


def _topology_of_cpuinfo(info: str) -> tuple[int | None, int | None]:
    blocks = [fields(block) for block in info.split("\n\n")]
    places = {(b["physical id"], b.get("core id", "0")) for b in blocks if "physical id" in b}
    return (len({place[0] for place in places}) or None, len(places) or None)


def _cpu_model(known: dict[str, str]) -> str:
    name = known.get("model name") or known.get("cpu model") or known.get("Model")
    if name:
        name = re.sub(r"\((R|TM|tm|r)\)|\bCPU\b|\bProcessor\b|@.*$", " ", name)
        return re.sub(r"\s+", " ", name).strip() or "unknown CPU"
    try:
        part = (int(known.get("CPU implementer", "0"), 16), int(known.get("CPU part", "0"), 16))
    except ValueError:
        part = (0, 0)
    if part in _ARM_PARTS:
        return _ARM_PARTS[part]
    return f"Arm CPU {part[0]:#x}/{part[1]:#x}" if any(part) else f"unknown {platform.machine()} CPU"


def _mac_cpu() -> Cpu:
    threads = _mac_number("hw.logicalcpu")
    model = _sysctl("machdep.cpu.brand_string") or "unknown Apple CPU"
    return Cpu(model=model, sockets=1, cores=_mac_number("hw.physicalcpu"), threads=threads, usable_threads=threads)


def _mac_number(key: str) -> int | None:
    text = _sysctl(key)
    return int(text) if text.isdigit() else None


def _sysctl(key: str) -> str:
    """One value of macOS's ``sysctl``, empty if there is none."""
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", key], capture_output=True, timeout=5, check=False)  # noqa: S603 -- a constant path, with names of ours
    except (OSError, subprocess.SubprocessError):
        return ""
    return clean(done.stdout.decode("utf-8", "replace"))


@dataclass(frozen=True)
class Core:
    """A physical core: its hardware threads that may be used, its NUMA node, its socket."""

    cpus: tuple[int, ...]
    node: int
    socket: int


def mask() -> frozenset[int]:
    """The logical CPUs that the calling thread may run on; none on systems without affinity masks."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def job_mask() -> frozenset[int]:
    """The logical CPUs of the job: this process's mask, or what it was before the process bound itself to a part of it."""
    return mask() if _before_binding is None else _before_binding


def set_mask(cpus: Iterable[int]) -> None:
    """Bind this process, with every thread that it has: threads that run already, and those that they start, would keep the old mask.
    Raises ``OSError`` where the kernel refuses."""
    global _before_binding  # noqa: PLW0603 -- a property of the process, as the mask itself
    before, wanted = job_mask(), set(cpus)
    os.sched_setaffinity(0, wanted)
    _before_binding = before
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:  # it has ended meanwhile
            continue


def is_bound() -> bool:
    """Whether this process has bound itself."""
    return _before_binding is not None


def numa_cpus(root: Path = ROOT) -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node that has any."""
    nodes = listing(root / "sys/devices/system/node", "node[0-9]*")
    found = {int(node.name.removeprefix("node")): cpu_numbers(read(node / "cpulist")) for node in nodes}
    return {node: cpus for node, cpus in found.items() if cpus}


def cores(allowed: Iterable[int], root: Path = ROOT) -> list[Core]:
    """The physical cores among the CPUs ``allowed``, NUMA node by NUMA node. What /sys does not tell counts as one node, without SMT."""
    node_of = {cpu: node for node, cpus in numa_cpus(root).items() for cpu in cpus}
    usable = set(allowed)
    threads: dict[int, set[int]] = {}
    for cpu in usable:
        siblings = cpu_numbers(read(_cpu_folder(cpu, root) / "topology/thread_siblings_list")) | {cpu}
        threads[min(siblings)] = set(siblings) & usable
    found = [Core(tuple(sorted(cpus)), node_of.get(min(cpus), 0), socket(min(cpus), root)) for cpus in threads.values()]
    return sorted(found, key=lambda core: (core.node, core.cpus))


def socket(cpu: int, root: Path = ROOT) -> int:
    """The socket of a logical CPU; 0 where the kernel does not tell."""
    return max(read_int(_cpu_folder(cpu, root) / "topology/physical_package_id") or 0, 0)


def device_affinity(devices: Sequence[DeviceModel], root: Path = ROOT) -> Affinity | str:
    """The CPUs next to each GPU, by /sys or else by NVML; a sentence where neither tells for every one."""
    lists = [_by_sys(device, root) for device in devices]
    if not all(lists) and root == ROOT:
        lists = _by_nvml(devices)
    if not lists or not all(lists):
        return "neither /sys/bus/pci/devices nor NVML tells which CPUs are next to each device"
    nodes = [read_int(_pci(device, root) / "numa_node") for device in devices]
    known = tuple(node for node in nodes if node is not None and node >= 0)
    return Affinity(cpus=tuple(map(cpu_list, lists)), numa_nodes=known if len(known) == len(devices) else ())


def _cpu_folder(cpu: int, root: Path) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _pci(device: DeviceModel, root: Path) -> Path:
    """NVML writes the PCI domain with eight digits, the kernel with four, or five where it needs them."""
    domain, _, rest = (device.pci_bus_id or "").lower().partition(":")
    return root / "sys/bus/pci/devices" / f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def _by_sys(device: DeviceModel, root: Path) -> frozenset[int]:
    return cpu_numbers(read(_pci(device, root) / "local_cpulist")) if device.pci_bus_id else frozenset()


def _by_nvml(devices: Sequence[DeviceModel]) -> list[frozenset[int]]:
    words = (max((cpu for cpus in numa_cpus().values() for cpu in cpus), default=1023) // 64) + 1
    with nvml.session() as nv:
        if isinstance(nv, str):
            return []
        handles = dict(nv.gpus())
        masks = [nv.quietly("nvmlDeviceGetCpuAffinity", handles.get(device.index), words) for device in devices]
    return [frozenset(64 * i + bit for i, word in enumerate(mask or ()) for bit in range(64) if word >> bit & 1) for mask in masks]
