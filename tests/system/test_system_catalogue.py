"""Data sheets and systems by name: right figures, sources everywhere, and errors that help."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.base.toml import read_toml
from caraml.doctor import _peak
from caraml.reference import load
from caraml.report.tables import system_rows
from caraml.system import model as described
from caraml.system.catalogue import list_systems, load_system
from caraml.system.files import cpu_numbers
from caraml.system.model import Cpu, DeviceKind, DeviceModel, System
from caraml.worker.record import _datasheet


def peak(model: str, dtype: str) -> float | None:
    found = described.data_sheet(model)
    return None if isinstance(found, str) else found.flops_per_s.get(dtype)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("model", "dtype", "flops_per_s"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989.4e12),
        ("NVIDIA GH200 480GB", "tf32", 494.7e12),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("A100-SXM4-80GB", "tf32", 156e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("NVIDIA L40S", "fp16", 362.05e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("AMD Instinct MI250X", "fp16", 191.5e12),
        ("AMD Instinct MI300X", "bf16", 1307.4e12),
        ("AMD Instinct MI300A", "fp64", 122.6e12),
        ("AMD Instinct MI210", "bf16", 181e12),
        ("AMD Instinct MI355X OAM", "fp8", 5033.2e12),
        ("NVIDIA GB200", "bf16", 2.5e15),
        ("NVIDIA B300 SXM6 AC", "bf16", 2.25e15),
        ("NVIDIA B200", "tf32", 1.125e15),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA H20-3e", "fp8", 296e12),
        ("NVIDIA H800", "bf16", 989.4e12),
        ("NVIDIA H800 PCIe", "bf16", 756e12),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A800 80GB PCIe", "tf32", 156e12),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bf16", 480e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8e12),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", 438.9e12),
        ("AMD Instinct MI300X VF", "bf16", 1307.4e12),
        ("Intel(R) Data Center GPU Max 1550", "bf16", 416e12),
        ("Intel(R) Data Center GPU Max 1100", "fp16", 355.5e12),
        ("GAUDI2", "bf16", 432e12),
        ("GAUDI3", "bf16", 1678e12),
    ],
)
def test_figures_are_dense(model: str, dtype: str, flops_per_s: float) -> None:
    assert peak(model, dtype) == flops_per_s


@pytest.mark.parametrize(
    "model",
    [
        "NVIDIA H100",
        "NVIDIA H300",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "AMD Instinct MI300A CPX",
        "AMD Instinct MI300A Accelerator",
        "AMD Instinct MI250X / MI250",
        "NVIDIA RTX 5000 Ada Generation",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GB10",
        "NVIDIA RTX PRO 6000 Blackwell",
        "GAUDI",
        "AMD EPYC 7742",
        "",
    ],
)
def test_an_unknown_device_has_no_peak_but_a_reason(model: str) -> None:
    reason = described.data_sheet(model)
    assert isinstance(reason, str)
    assert repr(model) in reason
    assert peak(model, "bf16") is None


def test_a_dtype_that_the_hardware_lacks_has_no_peak() -> None:
    assert isinstance(described.data_sheet("Tesla V100-SXM2-16GB"), described.PeakEntry) and peak("Tesla V100-SXM2-16GB", "bf16") is None


def test_every_entry_is_plausible() -> None:
    """Ratios that hold by design of the hardware; a sparse or a per-package figure would break them."""
    for entry in described.data_sheets():
        f = entry.flops_per_s
        if entry.per == "hpu":  # engines of another design: bf16 is the fast format, fp16 has the rate of tf32
            continue
        if "bf16" in f:
            assert f["bf16"] == f["fp16"], entry.model
        if "fp8" in f:
            assert f["fp8"] / f["fp16"] == pytest.approx(2, rel=0.03), entry.model
        if "tf32" in f:
            assert f["fp16"] / f["tf32"] == pytest.approx(2, rel=0.03), entry.model
    by_model = {entry.model: entry for entry in described.data_sheets()}
    for model in ("AMD Instinct MI250X", "AMD Instinct MI250"):
        package = by_model[f"{model} (package of two GCDs)"]
        for dtype, value in by_model[model].flops_per_s.items():
            assert 2 * value == pytest.approx(package.flops_per_s[dtype])


def test_figures_name_their_source() -> None:
    peak = load_system("LUMI").peak
    assert peak is not None
    found = peak["bf16"]
    assert found.unit == "FLOP/s"
    assert found.source.endswith("(dense, per GCD)")


@pytest.mark.parametrize(
    ("model", "kind", "units", "said"),
    [
        ("AMD Instinct MI300X", "rocm", 304, None),
        ("AMD Instinct MI300X", "rocm", None, None),
        ("AMD Instinct MI300X", "rocm", 38, "304 are in the data sheet: a part of it"),
        ("AMD Instinct MI300X VF", "rocm", 38, "304 are in the data sheet: a part of it"),
        ("Intel(R) Data Center GPU Max 1550", "xpu", 512, None),
        ("Intel(R) Data Center GPU Max 1550", "xpu", 1024, "512 are in the data sheet: several as one"),
        ("Intel(R) Data Center GPU Max 1550", "xpu", 448, "512 are in the data sheet: a part of it"),
        ("NVIDIA A100-SXM4-40GB", "cuda", 54, "108 are in the data sheet: a part of it"),
        ("NVIDIA GB200", "cuda", 152, None),
    ],
)
def test_a_device_with_other_multiprocessors_than_its_name_has_no_peak(
    model: str, kind: DeviceKind, units: int | None, said: str | None
) -> None:
    """Partitions as torch alone shows them, both stacks of a card as one device, and a share under MPS have the whole one's name."""
    device = DeviceModel(model=model, kind=kind, multiprocessors=units)
    system = described.with_sheet(System(name="x", title="", devices_per_node=1, devices=(device,), cpu=Cpu(model="c")))
    found, check = _datasheet(system, "bf16", 1), _peak(system)
    if said is None:
        assert found.value == peak(model, "bf16") and check.status == "ok"
    else:
        expected = f"torch counts {units} multiprocessors on {model!r}, {said}, or another version"
        assert (found.value, found.reason, system.memory_bandwidth) == (None, expected, None)
        assert (check.status, check.fix) == ("warn", None) and check.found.startswith(expected)


@pytest.mark.parametrize(("devices", "expected"), [(1, 312e12), (2, None), (8, None)])
def test_devices_that_differ_have_no_common_peak(devices: int, expected: float | None) -> None:
    """CUDA counts the fastest first: its peak was that of the others as well."""
    first, second = (DeviceModel(model=model, kind="cuda") for model in ("NVIDIA A100-SXM4-40GB", "NVIDIA L4"))
    system = System(name="x", title="", devices_per_node=2, devices=(first, second), cpu=Cpu(model="c"))
    found = _datasheet(described.with_sheet(system), "bf16", devices)
    assert (found.value, found.reason) == (expected, None if expected else "the devices differ: NVIDIA A100-SXM4-40GB, NVIDIA L4")


def test_devices_of_two_names_are_the_same_by_one_data_sheet() -> None:
    """Boards of two makers, one of which the catalogue does not know, so that it has the name that torch gives."""
    board = "AMD INSTINCT MI200 (MCM) OAM LC MBA HPE C2"
    devices = tuple(DeviceModel(model=model, kind="rocm") for model in (board, "AMD Instinct MI250X"))
    system = described.with_sheet(System(name="x", title="", devices_per_node=2, devices=devices, cpu=Cpu(model="c")))
    for nodes, expected in ((["AMD Instinct MI250X x8", f"{board} x8"], 191.5e12), (["AMD Instinct MI210 x8"], None)):
        assert _datasheet(system, "bf16", 2, nodes).value == expected


def test_the_same_name_twice_is_refused(tmp_path: Path) -> None:
    one = '[[device]]\nmodel = "NVIDIA X1"\nsource = "s"\nmemory_bandwidth_bytes_per_s = 1e9\nflops_per_s = { fp32 = 1e12 }\n'
    (tmp_path / "p.toml").write_text(one + one.replace("NVIDIA X1", "x1"))
    with pytest.raises(InputError, match="twice: x1"):
        read_toml(tmp_path / "p.toml").validate(described._Peaks)


def test_systems_by_name_alias_and_path() -> None:
    assert load_system("A100").identity == "NVIDIA A100-SXM4-40GB x4"
    assert load_system("h100").name == "jureca-h100"
    assert load_system(described.CATALOG / "jedi.toml") == load_system("JEDI")
    jedi = load_system("JEDI")
    assert [device.index for device in jedi.devices] == [0, 1, 2, 3]
    assert jedi.devices[0].tdp_w == 680.0
    assert all(system.nodes or system.missing["nodes"] for system in list_systems())
    assert jedi.peak is not None
    assert jedi.peak["bf16"].value == 989.4e12
    assert load_system("local").name == "local"


TAGS = {
    "A100": ("jureca-a100", 192),
    "H100": ("jureca-h100", 1),
    "WAIH100": ("westai-h100", 16),
    "GH200": ("jureca-gh200", 1),
    "JEDI": ("jedi", 44),
    "MI250": ("jureca-mi250", 2),
    "GC200": ("jureca-ipu", 1),
}
"""CARAML's tags for the machines that it was tested on, and how many nodes its scripts say are available."""


@pytest.mark.parametrize(("tag", "name", "nodes"), [(tag, *of) for tag, of in TAGS.items()])
def test_the_tags_that_users_know(tag: str, name: str, nodes: int) -> None:
    """Without the number of nodes points of more than there are were planned, and jobs waited for them for ever."""
    assert (load_system(tag).name, load_system(tag).nodes) == (name, nodes)


CATALOGUE = [path for path in sorted(described.CATALOG.glob("*.toml")) if path.name != "peaks.toml"]


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_every_description_is_whole(path: Path) -> None:
    """What is not given has a reason, what is given is plausible, and the file is called as the machine."""
    system = load_system(path)
    assert system.name == path.stem and system.aliases
    figures = {
        "nodes": system.nodes,
        "memory_bytes": system.memory_bytes,
        "peak": system.peak,
        "memory_bandwidth": system.memory_bandwidth,
        "affinity": system.affinity,
        "links": system.links,
        "site": system.site.scheduler,
        "devices.memory_bytes": system.devices[0].memory_bytes,
        "devices.tdp_w": system.devices[0].tdp_w,
    }
    for key, value in figures.items():
        assert value or len(system.missing.get(key, "")) > 5, key
        assert not (value and key in system.missing and key != "links"), f"{key} is given and missing"
    if system.site.scheduler:
        assert len(system.sources["site"]) > 10
        assert system.site.scheduler.partition or "site.scheduler.partition" in system.missing
        assert system.site.scheduler.account is None, "an account is a user's"
    sources = json.dumps([system.sources, [link.source for link in system.links]])
    assert not re.search(r"(?i)\b(todo|unknown|guess|/work|/tmp)\b", sources)


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_every_description_is_plausible(path: Path) -> None:
    system = load_system(path)
    cpu, device = system.cpu, system.devices[0]
    assert (cpu.cores or 0) % (cpu.sockets or 1) == 0
    assert cpu.threads is None or cpu.cores is None or cpu.threads in (cpu.cores, 2 * cpu.cores)
    assert len(cpu.numa_cpus) in (0, cpu.numa_nodes)
    if device.kind == "cpu":
        assert (device.model, device.memory_bytes) == (cpu.model, system.memory_bytes) and system.devices_per_node == 1
        assert cpu.isa and cpu.cores, "whether 16 bit formats are emulated, and how many processes a node may have"
    else:
        assert device.memory_bytes is None or device.kind == "ipu" or 16e9 <= device.memory_bytes <= 160e9
    entry = described.data_sheet(device.model)
    if isinstance(entry, described.PeakEntry) and entry.tdp_w and device.tdp_w:
        assert device.tdp_w == entry.tdp_w
    for link in system.links:
        assert link.bandwidth_bytes_per_s is None or 10e9 <= link.bandwidth_bytes_per_s <= 500e9, link
    for cpus in system.affinity.cpus if system.affinity else ():
        assert cpu_numbers(cpus) <= set(range(cpu.threads or cpu.cores or 0))


def test_the_same_card_has_the_same_memory_on_every_machine() -> None:
    """40 GB of an A100 were 40 GiB on machines of some documents and 37.3 on those of others, where points that fit were left out."""
    sizes: dict[str, set[int]] = {}
    for system in list_systems():
        device, memory = system.devices[0], system.devices[0].memory_bytes
        if device.kind in ("cuda", "rocm") and memory:
            sizes.setdefault(re.sub(r"\W?(SXM4|PCIE)\W?", " ", device.model), set()).add(memory)
    assert sizes["NVIDIA A100 40GB"] | sizes["NVIDIA A100 40 GB"] == {40 * 2**30} and {len(found) for found in sizes.values()} == {1}
    names = {int(named[1]): found for name, found in sizes.items() if (named := re.search(r" (\d+) ?GB", name)) and "GH200" not in name}
    assert names and all(found == {gib * 2**30} for gib, found in names.items()), "HBM has GB of 2^30 bytes"


def test_both_directions_together_are_halved() -> None:
    """NVLink has 25 GB/s per link and direction up to its third generation and the fourth too: 6, 12 and 18 links of a device."""
    rates = {link.name: link.bandwidth_bytes_per_s for s in list_systems() for link in s.links if link.per == "device"}
    assert rates["NVLink 2"] == 6 * 25e9
    assert rates["NVLink 3"] == 12 * 25e9
    assert rates["NVLink 4"] == 18 * 25e9


def test_names_and_aliases_are_unique() -> None:
    names = [name.casefold() for system in list_systems() for name in (system.name, *system.aliases)]
    pairs = [(system.name.casefold(), system.aliases) for system in list_systems()]
    same = sum(name in [alias.casefold() for alias in aliases] for name, aliases in pairs)
    assert len(names) - same == len(set(names)), "an alias may repeat the name of its own system only"


def test_every_machine_of_the_sources_is_there() -> None:
    wanted = "A100 H100 MI250 GH200 GC200 JEDI WAIH100 juwels-booster juwels-cluster e4-a2 e4-gh200 LUMI Leonardo MN5 MeluXina Karolina"
    wanted += " Discoverer+ Vega Deucalion JUPITER grace-a100 grace-rtx6000 grace-t4 Expanse Lonestar6 HiPerGator IPU-POD16 IPU-POD64"
    assert len({load_system(name).name for name in wanted.split()}) == 28


PARTITIONS = """
LUMI-C          1888  2 128 256  25    avx2
LUMI-D CPU      8     2 128 4096 50    avx2
Leonardo DCGP   1536  2 112 512  12.5  amx_bf16
MN5 GPP         6192  2 112 256  12.5  amx_bf16
MN5 HBM         72    2 112 128  12.5  amx_bf16
MeluXina CPU    573   2 128 512  25    avx2
Karolina CPU    720   2 128 256  12.5  avx2
Discoverer CPU  1110  2 128 256  25    avx2
Vega CPU        768   2 128 256  12.5  avx2
Deucalion ARM   1632  1 48  32   12.5  sve
Deucalion x86   500   2 128 256  12.5  avx2
"""
"""CPU partitions of EPICURE's chapter 3: nodes of the kind described, sockets, cores, GiB, GB/s of the network, an extension."""


@pytest.mark.parametrize("line", PARTITIONS.strip().splitlines(), ids=lambda line: line[:16].strip())
def test_cpu_partitions_are_as_epicure_lists_them(line: str) -> None:
    system = load_system(line[:16].strip())
    nodes, sockets, cores, gib, rate, extension = line[16:].split()
    assert system.device_class == "cpu" and system.devices_per_node == 1
    assert (system.nodes, system.cpu.sockets, system.cpu.cores) == (int(nodes), int(sockets), int(cores))
    assert system.memory_bytes == int(gib) * 2**30
    (link,) = (link for link in system.links if link.scope == "node-node")
    assert link.bandwidth_bytes_per_s == float(rate) * 1e9 and link.source.startswith("EPICURE")
    assert extension in system.cpu.isa and ("bf16" in system.cpu.emulates) == (extension != "amx_bf16")
    assert system.peak is None and "clock" in system.missing["peak"]


def test_other_partitions_and_machines_that_the_sources_only_name() -> None:
    wanted = {"LUMI-D": "NVIDIA A40 x8", "MeluXina FPGA": "BittWare 520N-MX x2"}
    wanted |= {"BOW-POD16": "Graphcore Bow IPU x16", "Frontera": "NVIDIA A100-SXM4-40GB x8"}
    assert {name: load_system(name).identity for name in wanted} == wanted
    bow = load_system("BOW-POD16").peak
    assert bow is not None and bow["fp16"].value * 16 == pytest.approx(5.6e15, rel=0.01), "5.6 PFLOP/s in Graphcore's data sheet of the pod"


def test_an_unknown_system() -> None:
    with pytest.raises(InputError, match=r"(?s)unknown system 'jureca-a10'; known: .*did you mean 'jureca-a100'"):
        load_system("jureca-a10")


GOOD = """name = "mine"
title = "My machine"
devices_per_node = 2

[[devices]]
model = "NVIDIA H200"
kind = "cuda"

[cpu]
model = "Chip"

[sources]
devices = "nvidia-smi"
devices_per_node = "nvidia-smi"
cpu = "lscpu"
"""


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    system = load_system(str(tmp_path / "mine.toml"))
    assert (system.identity, system.memory_bytes) == ("NVIDIA H200 x2", None)


def test_faults_of_a_file_all_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("devices_per_node = 2", 'devices_per_nodes = "2"').replace('kind = "cuda"', 'kind = "cude"\ntdp_w = 0')
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(InputError) as caught:
        load_system(tmp_path / "mine.toml")
    lines = [line.replace(f"{tmp_path}/", "") for line in str(caught.value).splitlines()]
    assert lines[0] == "3 faults in mine.toml"
    assert lines[1].startswith('  mine.toml:3: devices_per_nodes: found "2", expected one of the keys name, aliases')
    assert lines[1].endswith("(did you mean 'devices_per_node'?)")
    assert lines[2].startswith("  mine.toml:7: devices[0].kind: found \"cude\", expected 'cpu', 'cuda'")
    assert lines[2].endswith("(did you mean 'cuda'?)")
    assert lines[3] == "  mine.toml:8: devices[0].tdp_w: found 0, expected greater than 0"


def test_figures_without_a_source_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(GOOD.replace('cpu = "lscpu"', 'cpus = "lscpu"'))
    with pytest.raises(InputError, match=r"(?s)2 faults.*sources.cpu: found nothing.*sources.cpus: .*did you mean 'cpu'"):
        load_system(tmp_path / "mine.toml")


def test_the_example_of_the_manual(tmp_path: Path) -> None:
    project = Path(__file__).parents[2]
    example = (project / "examples" / "system.toml").read_text(encoding="utf-8")
    own_peak, override = re.findall(r"```toml\n(.*?)```", (project / "docs" / "systems.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "mine.toml").write_text(example)
    assert load_system(tmp_path / "mine.toml").identity == "NVIDIA H200 x2"
    (tmp_path / "own.toml").write_text(
        example.replace("memory_bytes = 512", own_peak.partition("[")[0] + "memory_bytes = 512") + "[" + own_peak.partition("[")[2]
    )
    peak = load_system(tmp_path / "own.toml").peak
    assert peak is not None
    assert peak["bf16"].source.endswith("printed with sparsity")
    (tmp_path / "over.toml").write_text(override)
    site = load_system(tmp_path / "over.toml").site
    assert site.scheduler is not None
    assert (site.scheduler.account, site.scheduler.partition, site.software.modules) == ("my-project", "all", ("CUDA", "NCCL"))


@pytest.mark.parametrize("name", sorted({row.system for row in load() if row.system} - {"e4-amd"}))
def test_a_published_number_names_a_machine_of_the_catalogue(name: str) -> None:
    """But for Table 41 of the deliverable, headed *E4 AMD System*, which its text does not describe."""
    assert load_system(name).name == name or name == "deucalion", (
        "by the catalogue's own name; Deucalion's numbers are of both kinds of nodes"
    )


def test_storage_of_a_node_is_told_and_none_is_said() -> None:
    found = {name: load_system(name).ssd_bytes for name in ("LUMI", "Discoverer+", "MN5", "A100")}
    assert found == {"LUMI": 0, "Discoverer+": 8 * 3_840_000_000_000, "MN5": 480_000_000_000, "A100": None}
    shown = [row.value for name in ("LUMI", "MN5") for row in system_rows(load_system(name)) if row.name == "ssd_bytes"]
    assert shown == ["none", "480 GB"]


def test_machines_that_the_sources_used_several_nodes_of_have_a_scheduler() -> None:
    """Without one, points of several nodes are skipped: EPICURE's curves and MAELSTROM's Table 44 could not be run again by name."""
    epicure = ("LUMI", "Leonardo", "MN5", "MeluXina", "Karolina", "Vega", "Deucalion", "JUPITER")
    for name in (*epicure, "juwels-booster", "juwels-cluster", "e4-a2", "e4-gh200", "JEDI", "WAIH100", "A100"):
        assert load_system(name).site.scheduler is not None, name
