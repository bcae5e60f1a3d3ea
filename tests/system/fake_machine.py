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
