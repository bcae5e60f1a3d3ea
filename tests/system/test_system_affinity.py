"""Which cores a process gets: near its device, whole cores, nobody else's, and only where the job may run."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_machine import Tree, numa_host, numa_list, pci
from fake_nvml import FakeGpu, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from caraml.base.errors import InputError
from caraml.system import affinity, catalogue, host
from caraml.system.affinity import SWITCH, neighbours, plan, switched_off
from caraml.system.catalogue import GIVEN, load_system
from caraml.system.detect import detect
from caraml.system.files import cpu_list, cpu_numbers
from caraml.system.host import Core, cores, device_affinity
from caraml.system.model import Affinity, Cpu, DeviceModel, System

BUSES = ["0000:03:00.0", "0000:44:00.0", "0000:84:00.0", "0000:C4:00.0"]


def machine(devices: int = 4, kind: str = "cuda", near: Affinity | None = None) -> System:
    """A node with as many devices, at the addresses of ``BUSES`` as NVML spells them."""
    tables = tuple(DeviceModel(model="X", kind=kind, index=i, pci_bus_id=f"0000{BUSES[i]}") for i in range(devices))
    return System(name="m", title="M", devices_per_node=devices, devices=tables, cpu=Cpu(model="C"), affinity=near)


def placed(processes: int, system: System, allowed: set[int], root: Path) -> list[str | None]:
    """The CPUs of every process as a list, and that no two share any."""
    planned, _ = plan(processes, system, allowed, root)
    found = [[cpu for core in cores for cpu in core.cpus] for cores in planned] if planned else [None] * processes
    for one, other in itertools.combinations([set(cpus) for cpus in found if cpus], 2):
        assert not one & other
    assert all(set(cpus) <= allowed for cpus in found if cpus)
    return [None if cpus is None else cpu_list(cpus) for cpus in found]


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), (None, set()), ("0-1,x,7-", {0, 1, 7})])
def test_cpu_lists_are_read(text: str | None, cpus: set[int]) -> None:
    assert cpu_numbers(text) == cpus


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists_are_written_so_that_they_can_be_read(cpus: set[int]) -> None:
    assert cpu_numbers(cpu_list(cpus)) == cpus


def test_threads_of_a_core_stay_together(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=2, smt=2))
    assert cores(range(8), root) == [Core((0, 4), 0, 0), Core((1, 5), 0, 0), Core((2, 6), 1, 1), Core((3, 7), 1, 1)]
    assert cores([1, 4, 5], root) == [Core((1, 5), 0, 0), Core((4,), 0, 0)]


def test_a_host_that_tells_nothing_is_one_node(tmp_path: Path) -> None:
    assert cores([2, 3], tmp_path) == [Core((2,), 0, 0), Core((3,), 0, 0)]


def test_cpu_processes_fill_numa_nodes(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=2, cores=4))
    cpu, every = machine(1, "cpu"), set(range(16))
    assert placed(4, cpu, every, root) == ["0-3", "4-7", "8-11", "12-15"]
    assert placed(2, cpu, every, root) == ["0-7", "8-15"]
    assert placed(8, cpu, every, root)[:2] == ["0-1", "2-3"]
    assert placed(3, cpu, every, root) == ["0-4", "5-9", "10-14"]


def test_blocks_do_not_cross_nodes_where_a_core_is_left_over(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=9))
    assert placed(4, machine(1, "cpu"), set(range(18)), root) == ["0-3", "4-7", "9-12", "13-16"]


def test_the_mask_is_respected_and_nobody_shares(tree: Tree) -> None:
    root = tree(numa_host(sockets=1, nodes=2, cores=4, smt=2))
    assert placed(2, machine(1, "cpu"), {0, 1, 4, 8, 9}, root) == ["0,8", "4"]
    assert placed(2, machine(1, "cpu"), {0, 1, 2, 3, 4}, root) == ["0-1", "2-3"], "one core of the other node is not worth half the block"
    assert placed(3, machine(1, "cpu"), {0, 1, 8}, root) == [None, None, None]
    assert plan(3, machine(1, "cpu"), {0, 1, 8}, root) == ([], "3 processes would share 2 cores")


def test_gpu_processes_run_beside_their_gpu(tree: Tree) -> None:
    """As on JUWELS Booster: eight nodes of six cores; the cores of nodes without a GPU go to the GPU of the same socket."""
    root = tree(numa_host(sockets=2, nodes=4, cores=6, smt=2))
    system = machine(near=Affinity(numa_nodes=(3, 1, 7, 5)))
    found = placed(4, system, set(range(96)), root)
    assert found == ["12-23,60-71", "0-11,48-59", "36-47,84-95", "24-35,72-83"]
    for rank, node in enumerate((3, 1, 7, 5)):
        assert cpu_numbers(numa_list(node, 6, 48, 2)) <= cpu_numbers(found[rank])


def test_gpus_of_one_node_divide_it(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=8))
    assert placed(4, machine(near=Affinity(sockets=(0, 0, 1, 1))), set(range(16)), root) == ["0-3", "4-7", "8-11", "12-15"]
    assert placed(3, machine(3, near=Affinity(sockets=(0, 1, 1))), set(range(16)), root) == ["0-7", "8-11", "12-15"]


def test_lumi_as_its_guide_binds_it(tree: Tree) -> None:
    """Local rank 0 on core 49 and so on: map_cpu of the LUMI user guide, with the first core of every L3 region taken by the system."""
    root = tree(numa_host(sockets=1, nodes=4, cores=16))
    allowed = {cpu for cpu in range(64) if cpu % 8}
    found = placed(8, load_system("lumi"), allowed, root)
    assert found == ["49-55", "57-63", "17-23", "25-31", "1-7", "9-15", "33-39", "41-47"]


def test_a_mask_beside_the_devices_falls_back_to_blocks(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=4))
    near = machine(2, near=Affinity(sockets=(0, 1)))
    assert placed(2, near, {0, 1, 2, 3}, root) == ["0-1", "2-3"]
    assert plan(2, near, {0, 1, 2, 3}, root)[1].startswith("contiguous blocks")


def test_neighbourhoods_that_cross_are_not_trusted(tree: Tree) -> None:
    root = tree(numa_host(sockets=1, nodes=1, cores=4))
    assert placed(2, machine(2, near=Affinity(cpus=("0-3", "2-3"))), {0, 1, 2, 3}, root) == ["0-1", "2-3"]


def test_without_a_description_sysfs_tells(tree: Tree) -> None:
    files = numa_host(sockets=2, nodes=1, cores=4)
    files |= pci(BUSES[0], 1, "4-7") | pci(BUSES[1], 0, "0-3")
    root = tree(files)
    assert device_affinity(machine(2).devices, root) == Affinity(cpus=("4-7", "0-3"), numa_nodes=(1, 0))
    assert placed(2, machine(2), set(range(8)), root) == ["4-7", "0-3"]
    assert plan(2, machine(2), set(range(8)), root)[1] == "next to each device, by /sys or NVML"


def test_a_kernel_that_knows_no_node_gives_lists_only(tree: Tree) -> None:
    root = tree(numa_host(sockets=1, nodes=1, cores=4) | pci(BUSES[0], -1, "0-3") | pci(BUSES[1], -1, "0-3"))
    assert device_affinity(machine(2).devices, root) == Affinity(cpus=("0-3", "0-3"))
    assert placed(2, machine(2), set(range(4)), root) == ["0-1", "2-3"]


def test_nobody_knows_where_the_devices_are(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=2) | pci(BUSES[0], 0, "0-1"))
    assert "neither" in str(device_affinity(machine(2).devices, root))


def test_a_long_pci_domain_is_not_another(tree: Tree) -> None:
    root = tree({**pci("0000:01:00.0", 0, "0-1"), **pci("10000:01:00.0", 1, "2-3")})
    gpus = [DeviceModel(model="x", kind="cuda", pci_bus_id=bus) for bus in ("00010000:01:00.0", "00000000:01:00.0")]
    assert device_affinity(gpus, root) == Affinity(cpus=("2-3", "0-1"), numa_nodes=(1, 0))
    assert placed(2, machine(2), set(range(4)), root) == ["0-1", "2-3"]


def test_nvml_tells_where_sysfs_does_not(nvml: Callable[..., FakeNvml], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(FakeGpu("A", affinity=[0b1100]), FakeGpu("B", affinity=[0, 0b1]))
    monkeypatch.setattr(host, "_by_sys", lambda device, root: frozenset())
    assert device_affinity(machine(2).devices) == Affinity(cpus=("2-3", "64"))


def test_numa_nodes_of_a_description_without_sysfs(tmp_path: Path) -> None:
    system = machine(2).model_copy(update={"cpu": Cpu(model="C", numa_cpus=("0-1", "2-3"))})
    assert neighbours(Affinity(numa_nodes=(1, 0)), system, tmp_path) == [{2, 3}, {0, 1}]


def test_more_processes_than_devices_are_cpu_processes(tree: Tree) -> None:
    root = tree(numa_host(sockets=2, nodes=1, cores=4))
    assert placed(4, machine(2, near=Affinity(sockets=(1, 0))), set(range(8)), root) == ["0-1", "2-3", "4-5", "6-7"]


def test_a_description_counts_where_all_its_devices_are_visible(tmp_path: Path) -> None:
    seen = machine(4, near=Affinity(cpus=("0", "1", "2", "3")))

    def found(name: str) -> System:
        (tmp_path / GIVEN).write_text(catalogue.given(load_system(name)))
        return catalogue.with_given(seen, tmp_path)

    assert found("juwels-booster").affinity == Affinity(numa_nodes=(3, 1, 7, 5))
    assert found("juwels-booster").sources["affinity"].startswith("POP Centre")
    assert found("lumi").affinity == seen.affinity, "8 devices described, 4 visible"
    assert found("jedi").affinity == seen.affinity, "nothing described"
    assert catalogue.with_given(seen, tmp_path / "elsewhere") is seen


needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(cores(os.sched_getaffinity(0))) < 2, reason="one core cannot be divided"
)


def bound(rank: int, processes: int, **environment: str) -> dict[str, object]:
    """What a real process did, and where the kernel let it run."""
    command = [sys.executable, "-m", "caraml.system.affinity", str(rank), str(processes)]
    environment = {**os.environ, SWITCH: "", "CARAML_DEVICE": "cpu", **environment}
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout))


@needs_two_cores
def test_real_processes_run_where_they_are_bound() -> None:
    masks = []
    for rank in range(2):
        done = bound(rank, 2)
        masks.append(cpu_numbers(str(done["cpus"])))
        assert done["bound"] and set(done["ran_on"]) <= masks[-1] and done["reason"] is None  # type: ignore[call-overload]
        assert masks[-1] <= os.sched_getaffinity(0)
    assert not masks[0] & masks[1]


def test_what_is_not_bound_says_why() -> None:
    mask = cpu_list(os.sched_getaffinity(0))
    assert bound(0, 2, **{SWITCH: "off"}) | {"ran_on": []} == {
        "bound": False,
        "cpus": mask,
        "numa_nodes": bound(0, 1)["numa_nodes"],
        "rule": None,
        "reason": "CARAML_BIND=off",
        "ran_on": [],
    }
    assert bound(0, 1)["reason"] == "one process alone may use every CPU of the job"
    assert "would share" in str(bound(0, 10_000)["reason"])


def test_a_word_that_the_switch_does_not_have_is_told() -> None:
    assert switched_off({SWITCH: " OFF"}) and not switched_off({SWITCH: "on"}) and not switched_off({})
    with pytest.raises(InputError, match=r"^CARAML_BIND: found '0', expected off, or on"):
        switched_off({SWITCH: "0"})


@needs_two_cores
def test_a_process_that_its_launcher_has_bound_stays_there() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = f"""
import json, os
from pathlib import Path
os.sched_setaffinity(0, {{{cpu}}})
from caraml.system import affinity
print(json.dumps(affinity.bind(0, 2, Path())))
"""
    environment = {name: value for name, value in os.environ.items() if name != affinity.SWITCH}
    done = json.loads(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout)
    assert done["reason"] == "the launcher has bound this process already"
    assert done["cpus"] == str(cpu)


def test_compact_and_spread_divide_the_node_differently(tree: Tree) -> None:
    here = cores(set(range(16)), tree(numa_host(sockets=2, nodes=2, cores=4)))

    def divided(wanted: str, processes: int) -> list[str]:
        return [cpu_list([cpu for core in one for cpu in core.cpus]) for one in affinity._by_rule(wanted, here, processes)[0]]

    assert divided("compact", 2) == ["0-7", "8-15"]
    assert divided("spread", 2) == ["0,2,4,6,8,10,12,14", "1,3,5,7,9,11,13,15"]
    assert divided("spread", 3) == ["0,3,6,9,12", "1,4,7,10,13", "2,5,8,11,14"]
    assert divided("compact", 17) == divided("spread", 17) == []


@needs_two_cores
@pytest.mark.parametrize(
    ("wanted", "binds", "processes"),
    [("compact", "close", 1), ("spread", "spread", 1), ("compact", "close", 2), ("spread", "spread", 2), ("none", "false", 2)],
)
def test_openmp_s_threads_are_where_the_point_wants_them(wanted: str, binds: str, processes: int) -> None:
    """As a worker does it: bound before torch is loaded, described after, with a team of threads that has computed."""
    code = f"""
import json, os
from pathlib import Path
from caraml.system import affinity
affinity.bind_early()
import torch
early = sorted(os.sched_getaffinity(0))
done = affinity.bind(0, {processes}, Path())
usable = affinity.usable_cpus({processes})
torch.set_num_threads(usable)
torch.randn(4_000_000).sin().sum()
print(json.dumps([early, done | affinity.as_found(), usable]))
"""
    places = {} if wanted == "none" else {"OMP_PLACES": "cores"}
    own = {affinity.WANTED: wanted, "OMP_PROC_BIND": binds, **places, "OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": str(processes)}
    environment = {name: value for name, value in os.environ.items() if name != affinity.SWITCH} | own
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    early, said, usable = json.loads(done.stdout)
    job = os.sched_getaffinity(0)
    if wanted == "none":
        assert said["reason"] == 'affinity = "none"' and set(said["threads"]) == {cpu_list(job)} == {said["found"]} and set(early) == job
        return
    mine = job if processes == 1 else cpu_numbers(said["cpus"])
    assert set(early) in [set(core.cpus) for core in cores(mine)], "OpenMP has bound the thread that loaded it to one core"
    assert said["found"] == cpu_list(mine), "and got it back, or every process that it starts would have one core"
    part = affinity._by_rule(wanted, cores(job), processes)[0][0]
    assert mine == {cpu for core in part for cpu in core.cpus} and usable == len(mine), "whole cores, and as many threads"
    assert said["bound"] == (processes > 1) and (said["rule"] or "").startswith(wanted if processes > 1 else "")
    if processes == 1:
        assert any(len(cpu_numbers(one)) < len(job) for one in said["threads"]), said["threads"]


@needs_two_cores
def test_threads_that_run_already_are_bound_too() -> None:
    code = """
import os, threading, json
from caraml.system import affinity
from caraml.system.detect import detect
from caraml.system.environment import environment
ready, go, masks = threading.Event(), threading.Event(), []
def work():
    ready.set(); go.wait(); masks.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=work); thread.start(); ready.wait()
before = affinity.usable_cpus(2)
done = affinity.bind(1, 2, detect()); go.set(); thread.join()
print(json.dumps([done["cpus"], masks[0], before, affinity.usable_cpus(2), detect().cpu.usable_threads]))
"""
    environment = {**os.environ, SWITCH: "", "CARAML_DEVICE": "cpu"}
    cpus, mask, before, after, of_the_job = json.loads(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout
    )
    assert cpus == cpu_list(mask)
    assert before == len(os.sched_getaffinity(0)) // 2
    assert of_the_job == detect().cpu.usable_threads, "the machine is the same as before"
    assert after == len(mask), "a bound process does not divide its own part again"
