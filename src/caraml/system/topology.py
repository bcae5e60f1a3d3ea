"""Where the CPUs of a host are (cores, sockets, NUMA nodes), and which of them are next to each device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from caraml.system import nvml
from caraml.system.files import ROOT, cpu_list, cpu_numbers, listing, read, read_int
from caraml.system.model import Affinity, DeviceModel, System

_before_binding: frozenset[int] | None = None


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
        siblings = cpu_numbers(read(_folder(cpu, root) / "topology/thread_siblings_list")) | {cpu}
        threads[min(siblings)] = set(siblings) & usable
    found = [Core(tuple(sorted(cpus)), node_of.get(min(cpus), 0), socket(min(cpus), root)) for cpus in threads.values()]
    return sorted(found, key=lambda core: (core.node, core.cpus))


def socket(cpu: int, root: Path = ROOT) -> int:
    """The socket of a logical CPU; 0 where the kernel does not tell."""
    return max(read_int(_folder(cpu, root) / "topology/physical_package_id") or 0, 0)


def neighbours(affinity: Affinity, system: System, root: Path = ROOT) -> list[frozenset[int]]:
    """The logical CPUs next to each device by a description: its CPUs, else those of its NUMA node, else those of its socket."""
    if affinity.cpus:
        return [cpu_numbers(text) for text in affinity.cpus]
    if affinity.numa_nodes:
        nodes = numa_cpus(root) or {node: cpu_numbers(text) for node, text in enumerate(system.cpu.numa_cpus)}
        return [nodes.get(node, frozenset()) for node in affinity.numa_nodes]
    present = [int(path.name.removeprefix("cpu")) for path in listing(root / "sys/devices/system/cpu", "cpu[0-9]*")]
    return [frozenset(cpu for cpu in present if socket(cpu, root) == wanted) for wanted in affinity.sockets]


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


def _folder(cpu: int, root: Path) -> Path:
    return root / f"sys/devices/system/cpu/cpu{cpu}"


def _pci(device: DeviceModel, root: Path) -> Path:
    """NVML writes the PCI domain with eight digits, the kernel with four."""
    domain, _, rest = (device.pci_bus_id or "").lower().partition(":")
    return root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"


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
