"""CPUs, memory and limits, read from trees that stand for real machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from fake_machine import Tree, processors
from fake_nvml import FakeNvml

from caraml.base.errors import InputError
from caraml.system import host
from caraml.system.environment import environment

EPYC = "processor : 0\nmodel name\t: AMD EPYC 7742 64-Core Processor\nflags\t\t: fpu avx2 amx_bf16\ncpu MHz : 2250.0\n"


def test_two_sockets_with_two_threads_per_core(tree: Tree) -> None:
    root = tree({"proc/cpuinfo": EPYC, **processors(sockets=2, cores=4, smt=2)})
    cpu = host.cpu(root)
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads, cpu.numa_nodes) == ("AMD EPYC 7742 64-Core", 2, 8, 16, 2)
    assert cpu.isa == ("avx2", "amx_bf16")
    assert cpu.usable_threads == 16


def test_grace_has_no_model_name_and_gpu_memory_as_numa_nodes(tree: Tree) -> None:
    info = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve2 bf16\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n"
    files = {"proc/cpuinfo": info, **processors(sockets=1, cores=72), "sys/devices/system/node/node1/cpulist": "\n"}
    for thread in range(72):
        files[f"sys/devices/system/cpu/cpu{thread}/topology/physical_package_id"] = "-1\n"
    cpu = host.cpu(tree(files))
    assert (cpu.model, cpu.cores, cpu.numa_nodes) == ("Arm Neoverse-V2", 72, 1)
    assert cpu.isa == ("asimd", "bf16", "sve2")


def test_offline_cpus_do_not_count(tree: Tree) -> None:
    root = tree({"proc/cpuinfo": EPYC, **processors(1, 4), "sys/devices/system/cpu/cpu3/online": "0\n"})
    assert host.cpu(root).threads == 3


def test_without_sys_cpuinfo_alone_tells(tree: Tree) -> None:
    blocks = [
        f"processor : {i}\nmodel name : Intel(R) Xeon(R) CPU E5 @ 2.30GHz\nphysical id : {i // 2}\ncore id : {i % 2}" for i in range(4)
    ]
    cpu = host.cpu(tree({"proc/cpuinfo": "\n\n".join(blocks)}))
    assert (cpu.model, cpu.sockets, cpu.cores, cpu.threads, cpu.numa_nodes) == ("Intel Xeon E5", 2, 4, 4, None)


def test_an_empty_tree_and_odd_characters_survive(tree: Tree) -> None:
    root = tree({})
    cpu = host.cpu(root)
    assert cpu.model.startswith("unknown")
    assert (cpu.cores, cpu.usable_threads, host.memory_bytes(root)) == (None, None, None)
    root = tree({"proc/cpuinfo": b"model name : \xff\x00Chip\x1b \xc3\xa9\nCPU part : junk\n", "proc/meminfo": b"MemTotal: \xff kB"})
    assert host.cpu(root).model == "\N{REPLACEMENT CHARACTER}Chip é"
    assert host.memory_bytes(root) is None


def test_cgroup_v2_limits_cores_and_memory_at_any_level(tree: Tree) -> None:
    root = tree(
        {
            "proc/cpuinfo": EPYC,
            **processors(1, 8),
            "proc/meminfo": "MemTotal:       1000000 kB\n",
            "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
            "sys/fs/cgroup/slurm/job_1/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/slurm/job_1/step_0/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slurm/memory.max": "512000000\n",
            "sys/fs/cgroup/slurm/job_1/memory.max": "max\n",
        }
    )
    assert host.cgroup_cpus(root) == 2.5
    assert host.cpu(root).usable_threads == 3
    assert host.memory_bytes(root) == 512_000_000


def test_cgroup_in_a_container_has_the_limits_at_the_mount(tree: Tree) -> None:
    root = tree({"proc/self/cgroup": "0::/../../not/here\n", "sys/fs/cgroup/cpu.max": "100000 100000\n", "proc/cpuinfo": EPYC})
    assert host.usable_threads(8, root) == 1
    root = tree({"proc/self/cgroup": "0::/\n"})
    assert host.usable_threads(8, root) == 1


def test_cgroup_v1(tree: Tree) -> None:
    root = tree(
        {
            "proc/meminfo": "MemTotal: 1000000 kB\n",
            "proc/self/cgroup": "4:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
        }
    )
    assert host.cgroup_cpus(root) == 1.5
    assert host.memory_bytes(root) == 1_024_000_000


def test_memory_of_coherent_gpus_is_not_the_host_s(tree: Tree, nvml: Callable[..., FakeNvml]) -> None:
    """As on GH200: nodes 1 and 2 are the GPUs', node 3 is memory of the host behind CXL, node 4 that of a GPU which is not yet started."""
    nvml(fails="Driver Not Loaded")
    gib = 2**20  # in kB, as the kernel writes

    def node(number: int, total: int, free: int, files: int, cpus: str = "") -> dict[str, str | bytes]:
        known = {"MemTotal": total, "MemFree": free, "Active": 1, "Active(file)": files, "Inactive(file)": files}
        lines = "".join(f"Node {number} {key}:    {value * gib} kB\n" for key, value in known.items())
        return {f"sys/devices/system/node/node{number}/meminfo": lines, f"sys/devices/system/node/node{number}/cpulist": f"{cpus}\n"}

    def gpu(address: str, node: int, status: str) -> dict[str, str | bytes]:
        return {f"proc/driver/nvidia/gpus/{address}/numa_status": f"Node:      {node}\nStatus:    {status}\nAddress:   400000000000\n"}

    files: dict[str, str | bytes] = {"proc/meminfo": f"MemTotal: {800 * gib} kB\nMemAvailable: {700 * gib} kB\n"}
    files |= node(0, 480, 400, 10, "0-71") | node(1, 96, 80, 1) | node(2, 96, 90, 0) | node(3, 128, 100, 5)
    host_only = tree(files)
    assert (host.memory_bytes(host_only), host.free_memory(host_only)) == (800 * 2**30, 700 * 2**30)
    files |= gpu("0009:01:00.0", 1, "online") | gpu("0019:01:00.0", 2, "online") | gpu("0029:01:00.0", 4, "offline")
    files |= gpu("0039:01:00.0", -1, "disabled") | gpu("0049:01:00.0", 0, "online")  # a node with CPUs is none of a GPU
    root = tree(files)
    assert host.memory_bytes(root) == (800 - 2 * 96) * 2**30
    assert host.free_memory(root) == host.available_memory(root) == (700 - 80 - 2 - 90) * 2**30
    assert environment(root)["cpu"]["memory_available_bytes"] == host.free_memory(root)


def test_this_machine() -> None:
    cpu = host.cpu()
    assert cpu.usable_threads is not None
    assert cpu.threads is not None
    assert 1 <= cpu.usable_threads <= cpu.threads
    assert (host.memory_bytes() or 0) > 10**8


def caches(cpus: dict[int, list[tuple[int, str, str]]]) -> dict[str, str]:
    """Files of each CPU's caches: level, size and who shares it."""
    files = {}
    for cpu, levels in cpus.items():
        for index, (level, size, shared) in enumerate(levels):
            folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{folder}/level": f"{level}\n", f"{folder}/size": f"{size}\n", f"{folder}/shared_cpu_list": f"{shared}\n"}
    return files


def test_the_last_level_cache_is_that_of_our_cpus(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of four CPUs with 32 MiB each; two of the first and all of the second are ours."""
    levels = {cpu: [(1, "32K", f"{cpu}"), (2, "1024K", f"{cpu}"), (3, "32768K", "0-3" if cpu < 4 else "4-7")] for cpu in range(8)}
    monkeypatch.setattr(host, "mask", lambda: frozenset({0, 1, 4, 5, 6, 7}))
    assert host.cache_bytes(tree(caches(levels))) == (16 + 32) * 2**20


def test_without_a_third_level_the_second_is_the_last(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "mask", lambda: frozenset({0, 1}))
    assert host.cache_bytes(tree(caches({cpu: [(1, "64K", f"{cpu}"), (2, "512K", f"{cpu}")] for cpu in range(2)}))) == 2**20


def test_a_machine_that_does_not_tell_of_its_caches(tree: Tree) -> None:
    assert host.cache_bytes(tree({"proc/cpuinfo": EPYC})) is None


def test_cpus_at_work_are_those_asked_for(tree: Tree) -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    line = "cpu{} {} 100 50 99999 7 20 20 10 9 9\n"  # user nice system idle iowait irq softirq steal, and guests, whom user and nice have
    root = tree({"proc/stat": "cpu 1 2 3 4 5 6 7\n" + line.format(0, 300) + line.format(1, 800) + line.format(10, 5) + "intr 5\n"})
    assert host.busy_seconds(frozenset({0, 1}), root) == pytest.approx((500 + 1000) / ticks), "stolen time, too"
    assert host.busy_seconds(frozenset({10}), root) == pytest.approx(205 / ticks)
    assert host.busy_seconds(root=root) == pytest.approx((1 + 2 + 3 + 6 + 7) / ticks)
    assert host.busy_seconds(frozenset({0}), tree({"proc/cpuinfo": EPYC}) / "nowhere") is None


def test_free_memory_is_the_least_that_host_and_groups_leave(tree: Tree) -> None:
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n",
        "proc/self/cgroup": "0::/slurm/job_1\n",
        "sys/fs/cgroup/slurm/job_1/memory.max": "max\n",
        "sys/fs/cgroup/slurm/memory.max": "1000000000\n",
        "sys/fs/cgroup/slurm/memory.current": "900000000\n",
        "sys/fs/cgroup/slurm/memory.stat": "anon 600000000\nactive_file 100000000\ninactive_file 200000000\n",
    }
    assert host.free_memory(tree({})) is None
    assert host.free_memory(tree(files)) == 400_000_000  # the cache of files gives way
    assert host.free_memory(tree({**files, "sys/fs/cgroup/slurm/memory.max": "max\n"})) == 4_096_000_000


def test_the_cache_of_files_gives_way_in_groups_below_as_well(tree: Tree) -> None:
    """Version 1 under Slurm: the job has the limit, its tasks have the files; the usage is of all of them."""
    files = {
        "proc/meminfo": "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\n",
        "proc/self/cgroup": "4:memory:/slurm/job_1/step_0/task_0\n",
        "sys/fs/cgroup/memory/slurm/job_1/memory.limit_in_bytes": "1000000000\n",
        "sys/fs/cgroup/memory/slurm/job_1/memory.usage_in_bytes": "990000000\n",
        "sys/fs/cgroup/memory/slurm/job_1/memory.stat": "active_file 0\ntotal_active_file 300000000\ntotal_inactive_file 500000000\n",
    }
    assert host.free_memory(tree(files)) == 810_000_000


@pytest.mark.processes
@pytest.mark.parametrize(("asked", "fails"), [("1", True), ("off", False)])
def test_an_allocation_beyond_the_limit_fails(asked: str, fails: bool) -> None:
    """Bytes of zeros are never touched: they take an address range, which counts, and no memory."""
    code = "from caraml.system.host import limit_memory\nprint(limit_memory(1))\nheld = bytes(1 << 30)\n"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, host.MEMORY: asked}, capture_output=True, text=True, check=False)
    assert ("MemoryError" in done.stderr) == fails and done.stdout.strip() == (str(2**30) if fails else "None")


PROBED_THEN_TRAINED = """
from caraml.engine.device import CpuDevice
def peak_of(blocks):
    held = [b"x" * 2**20 for _ in range(blocks)]
    return CpuDevice().peak_memory() / 2**20
probed = peak_of(400)
CpuDevice().forget_peak_memory()
print(probed, CpuDevice().peak_memory() / 2**20, peak_of(100))
"""


@pytest.mark.processes
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel does not forget")
@pytest.mark.parametrize("settings", [{}, {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 * 2**30)}])
def test_what_was_needed_before_is_no_peak_of_what_follows(settings: dict[str, str], real_start: None) -> None:
    """Also where freed blocks are kept, as in workers: arrays of the probes are no memory of the model."""
    done = subprocess.run([sys.executable, "-c", PROBED_THEN_TRAINED], env={**os.environ, **settings}, capture_output=True, check=True)
    probed, rest, trained = map(float, done.stdout.split())
    assert rest < probed - 380 and rest + 90 < trained < probed - 280


@pytest.mark.parametrize("asked", ["two", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_number_is_told(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(host.MEMORY, asked)
    with pytest.raises(InputError, match="expected a number of GiB above 0, or off"):
        host.limit_memory(1)


def test_processes_of_a_node_share_what_is_free(monkeypatch: pytest.MonkeyPatch, tree: Tree) -> None:
    taken: list[tuple[int, int]] = []
    monkeypatch.delenv(host.MEMORY, raising=False)
    monkeypatch.setattr("resource.setrlimit", lambda _, limits: taken.append(limits))
    monkeypatch.setattr("resource.getrlimit", lambda _: (-1, -1))
    root = tree({"proc/meminfo": "MemAvailable: 1000000 kB\n", "proc/self/status": "VmData:   500000 kB\n"})
    assert host.limit_memory(4, root) == 512_000_000 + int(1_024_000_000 * (1 - host.SPARED)) // 4 == taken[0][0]
