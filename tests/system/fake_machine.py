"""The files of /sys that machines of a given shape show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Tree = Callable[[dict[str, str | bytes]], Path]
"""Writes files and gives the folder that stands for ``/``."""


def processors(sockets: int, cores: int, smt: int = 1) -> dict[str, str | bytes]:
    """The /sys files of a host: ``cores`` per socket, each with ``smt`` threads, numbered as Linux does (second threads last)."""
    files: dict[str, str | bytes] = {}
    total = sockets * cores
    for thread in range(total * smt):
        core = thread % total
        folder = f"sys/devices/system/cpu/cpu{thread}"
        files[f"{folder}/topology/physical_package_id"] = f"{core // cores}\n"
        files[f"{folder}/topology/core_id"] = f"{core % cores}\n"
        files[f"{folder}/topology/thread_siblings_list"] = ",".join(str(core + total * i) for i in range(smt)) + "\n"
        files[f"{folder}/cpufreq/scaling_governor"] = "performance\n"
        files[f"{folder}/cpufreq/scaling_cur_freq"] = "2250000\n"
    for node in range(sockets):
        files[f"sys/devices/system/node/node{node}/cpulist"] = f"{node * cores}-{(node + 1) * cores - 1}\n"
    return files


def numa_host(sockets: int, nodes: int, cores: int, smt: int = 1) -> dict[str, str | bytes]:
    """Like ``processors``, with ``nodes`` NUMA nodes in each socket and ``cores`` cores in each node."""
    files = processors(sockets, nodes * cores, smt)
    total = sockets * nodes * cores
    for node in range(sockets * nodes):
        files[f"sys/devices/system/node/node{node}/cpulist"] = numa_list(node, cores, total, smt) + "\n"
    return files


def numa_list(node: int, cores: int, total: int, smt: int = 1) -> str:
    """The CPUs of a NUMA node: ``cores`` in a row, and their second threads behind the ``total`` first ones."""
    return ",".join(f"{node * cores + total * i}-{(node + 1) * cores - 1 + total * i}" for i in range(smt))


def pci(bus: str, node: int, cpus: str) -> dict[str, str | bytes]:
    """The files of a PCI device that tell where it is attached; ``bus`` as the kernel writes it."""
    folder = f"sys/bus/pci/devices/{bus}"
    return {f"{folder}/numa_node": f"{node}\n", f"{folder}/local_cpulist": f"{cpus}\n"}


def mi300a(domains: int, mode: str = "SPX", parts: int = 1) -> dict[str, str | bytes]:
    """A node of MI300A, one in each PCI domain, as amdgpu and the compute driver show it: no name, no memory of its own."""
    files: dict[str, str | bytes] = {"dev/kfd": "", "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 48\nsimd_count 0\n"}
    for domain in range(domains):
        folder = f"sys/class/drm/card{domain * parts}/device"
        files |= {f"{folder}/vendor": "0x1002\n", f"{folder}/device": "0x74a0\n", f"{folder}/mem_info_vram_total": "0\n"}
        files |= {f"{folder}/uevent": f"DRIVER=amdgpu\nPCI_SLOT_NAME=000{domain}:01:00.0\n", f"{folder}/unique_id": f"a{domain}\n"}
        files |= {f"{folder}/current_compute_partition": f"{mode}\n", f"{folder}/hwmon/hwmon3/power1_cap": "550000000\n"}
        files[f"{folder}/drm/renderD{128 + domain * parts}/dev"] = ""
        for part in range(parts):
            number = domain * parts + part
            node, place = f"sys/class/kfd/kfd/topology/nodes/{number + 1}", part << 28 | 0x0100
            own = f"simd_count 912\nlocation_id {place}\ndomain {domain}\ndrm_render_minor {128 + number}\nunique_id {4096 + number}\n"
            files |= {f"{node}/properties": own, f"{node}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {2**37 // parts}\n"}
            files[f"dev/dri/renderD{128 + number}"] = ""
    return files
