"""What a machine is and how it is used, in one typed object: the same for the machine we run on and for a file of the catalogue; and what
its devices could do at best, by their data sheets (:func:`with_sheet`): dense FLOP/s by dtype, and bytes/s of their memory.

Dense means: without the 2:4 structured sparsity that doubles the figures on the front page of most data sheets, and that no ordinary
training step can use. A device that is not in ``catalog/peaks.toml`` under exactly its own name has no peak here: a neighbouring
device's figure would make a wrong MFU look right.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_serializer, model_validator

from caraml.base.errors import nearest
from caraml.base.toml import FrozenModel, read_toml
from caraml.system.variables import concealed, shown

CATALOG = Path(__file__).parent / "catalog"

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ContainerRuntime = Literal["apptainer", "singularity", "podman", "charliecloud", "bubblewrap", "none"]

_SETTING = re.compile(r"(?:^|\s)(?:--export|--env|--set-env|-e)(?:=|\s+|(?<=-e))(\S+)")
_SETTING_OF_TWO = re.compile(r"(?:^|\s)--setenv\s+(\S+)")
"""How schedulers and runtimes of containers are told variables: ``NAME=VALUE``, several with commas between, or two words."""


def _without_values(key: str, options: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for an option that gives a variable a value which may be a secret: everybody sees command lines."""
    text = " ".join(options)
    named = [part.partition("=")[0] for given in _SETTING.findall(text) for part in given.split(",") if "=" in part]
    for name in (*named, *_SETTING_OF_TWO.findall(text)):
        if not shown(name):
            raise ValueError(f"{key} without the value of {name}: other users see it there, but not under software.variables")


class Scheduler(FrozenModel):
    """What a Slurm job of this machine needs to say. Values may hold no line break."""

    kind: Literal["slurm"] = Field("slurm", description="the only scheduler that CARAML speaks to")
    partition: str | None = Field(None, description="`sbatch --partition`")
    account: str | None = Field(None, description="`sbatch --account`")
    qos: str | None = Field(None, description="`sbatch --qos`")
    constraint: str | None = Field(None, description="`sbatch --constraint`")
    reservation: str | None = Field(None, description="`sbatch --reservation`")
    gpus: Literal["gres", "gpus-per-node", "none"] = Field("gres", description="how GPUs are asked for")
    gres: str = Field("gpu", description="name of the generic resource, with type if the site wants one: `gpu:a100`")
    exclusive: bool = Field(True, description="no other job on the nodes")
    cpus_per_device: Count | None = Field(None, description="CPUs to ask for with each device; a job that is not exclusive needs them")
    requeue: bool = Field(False, description="put a job back into the queue that lost a node, or was cut off before it had a result")
    max_minutes: Count | None = Field(None, description="longest wall time of the partition")
    max_nodes: Count | None = Field(None, description="most nodes of a job")
    max_devices: Count | None = Field(None, description="most devices of a job, on all its nodes")
    signal_seconds: Count = Field(60, description="how long before the time limit the point is warned")
    cpu_bind: str | None = Field(None, description="value of `srun --cpu-bind`, e.g. `none`, `cores`, `mask_cpu:0xff,...`")
    extra: tuple[str, ...] = Field((), description="further `#SBATCH` lines, e.g. `--hint=nomultithread`")
    srun_extra: tuple[str, ...] = Field((), description="further options of `srun`, e.g. `--mpi=pmi2`")

    @model_validator(mode="after")
    def _open(self) -> Scheduler:
        _without_values("extra", self.extra)
        _without_values("srun_extra", self.srun_extra)
        return self


class Network(FrozenModel):
    """How processes of several nodes find each other."""

    interface: str | None = Field(None, description="network interface for gloo and NCCL, e.g. `ib0`")
    address_suffix: str = Field("", description="appended to a node's host name, before its domain, for its fast network, e.g. `i` at JSC")
    port: int = Field(29500, ge=1024, le=64535, description="of no effect: ranks meet at a port that the kernel picks")


class Container(FrozenModel):
    """The image that points run in."""

    runtime: ContainerRuntime = Field("none", description="program that starts the container")
    image: str | None = Field(None, description="file, folder or name of the image, as the runtime takes it")
    binds: tuple[str, ...] = Field((), description="`HOST:CONTAINER[:ro]`")
    extra: tuple[str, ...] = Field((), description="further options of the runtime")
    python: str = Field("python3", description="interpreter in the image that has CARAML")

    @model_validator(mode="after")
    def _open(self) -> Container:
        _without_values("extra", self.extra)
        return self


class Software(FrozenModel):
    """What is loaded before a point runs."""

    modules: tuple[str, ...] = Field((), description="environment modules, loaded in this order")
    venv: str | None = Field(None, description="virtual environment to activate")
    python: str | None = Field(
        None, description="interpreter that has CARAML; default: `python3` of `venv`, else the one that runs `caraml`"
    )
    variables: dict[str, str] = Field(
        {}, description="environment variables; `$NAME` is the caller's, and only values of known settings (`OMP_*`, `NCCL_*`) are shown"
    )
    setup: tuple[str, ...] = Field((), description="shell lines that run once per campaign, before the first point")

    @field_serializer("variables")
    def _names(self, variables: dict[str, str]) -> dict[str, str]:
        """Nothing that is written or printed has the values."""
        return variables | dict.fromkeys(concealed(variables), "hidden")


class Site(FrozenModel):
    """How points run on this machine."""

    scheduler: Scheduler | None = Field(None, description="the batch system; without it, points run on this node")
    network: Network = Field(Network(), description="how nodes find each other")
    container: Container = Field(Container(), description="the image that points run in")
    software: Software = Field(Software(), description="what is loaded before a point runs")


DType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8"]
"""Number formats that peaks are given for; ``tf32`` is fp32 data multiplied on tensor cores with a 10 bit mantissa."""
DeviceKind = Literal["cpu", "cuda", "rocm", "mps", "xpu", "hpu", "npu", "mtia", "ipu", "fpga", "other"]
"""``other`` is an accelerator that torch drives by a plug-in of its own name; torch drives no ``ipu`` and no ``fpga``."""
DeviceClass = Literal["cpu", "gpu"]
LinkScope = Literal["device-device", "cpu-device", "cpu-cpu", "node-node"]
CpuList = Annotated[str, Field(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$")]
"""Logical CPUs as Linux lists them: ``0-15,128-143``."""


class Figure(FrozenModel):
    """A number that somebody published or measured, never without its unit and its source."""

    value: float = Field(gt=0, allow_inf_nan=False, description="the number")
    unit: str = Field(description="its unit: `FLOP/s` of a peak, `B/s` of a bandwidth")
    source: str = Field(min_length=1, description="document, and the row of it where that is not obvious")


class DeviceModel(FrozenModel):
    """One compute device as the framework counts them: a GPU, a GCD of a dual-die package, a MIG instance, or all CPUs of a node."""

    model: str = Field(description="name as the driver reports it, e.g. `NVIDIA H200`")
    kind: DeviceKind = Field(description="what drives it")
    index: int = Field(0, ge=0, description="the driver's number (NVML: order of PCI addresses)")
    uuid: str | None = Field(None, description="the driver's identifier of this one device")
    pci_bus_id: str | None = Field(None, description="PCI address")
    memory_bytes: int | None = Field(None, ge=0, description="memory of the device")
    tdp_w: float | None = Field(None, gt=0, description="default power limit [W]")
    power_limit_w: float | None = Field(None, gt=0, description="power limit in force now [W]")
    compute_capability: str | None = Field(None, description="`9.0` on NVIDIA, `gfx942` on AMD")
    multiprocessors: int | None = Field(None, ge=1, description="streaming multiprocessors or compute units")


SINCE: dict[DType, tuple[tuple[int, int], tuple[str, ...]]] = {
    "tf32": ((8, 0), ("gfx94",)),
    "bf16": ((8, 0), ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")),
    "fp8": ((8, 9), ("gfx94", "gfx95", "gfx12")),
}
"""From which compute capability of NVIDIA's GPUs on, and in which of AMD's, there are units for products in a format."""


def lacking(capability: str) -> tuple[DType, ...]:
    """Formats that a GPU of NVIDIA (``9.0``) or AMD (``gfx942``) has no units for, and others of theirs have."""
    amd, (major, _, minor) = capability.startswith("gfx"), capability.partition(".")
    since = {dtype: capability.startswith(names) if amd else (int(major), int(minor)) >= first for dtype, (first, names) in SINCE.items()}
    return tuple(dtype for dtype, has in since.items() if not has)


UNITS: dict[DType, tuple[str, ...]] = {"bf16": ("avx512_bf16", "amx_bf16", "bf16"), "fp16": ("avx512_fp16", "amx_fp16", "asimdhp")}
"""Instructions, as Linux names them, of which a CPU has at least one if it multiplies numbers of such a format itself."""


class Cpu(FrozenModel):
    """The host processors of one node."""

    model: str = Field(description="name as `/proc/cpuinfo` has it")
    sockets: Count | None = Field(None, description="processor packages of the node")
    cores: Count | None = Field(None, description="physical cores of the node")
    threads: Count | None = Field(None, description="logical CPUs of the node")
    usable_threads: Count | None = Field(None, description="logical CPUs that this process may use: affinity and cgroup quota")
    numa_nodes: Count | None = Field(None, description="NUMA nodes that have CPUs")
    numa_cpus: tuple[CpuList, ...] = Field((), description="logical CPUs of NUMA node 0, 1, ...")
    isa: tuple[str, ...] = Field((), description="vector and matrix extensions that decide the speed of training")

    @property
    def emulates(self) -> tuple[DType, ...]:
        """Formats of 16 bits that this CPU has no instructions for; none where its instructions are not known."""
        return tuple(dtype for dtype, units in UNITS.items() if self.isa and not set(units) & set(self.isa))


class Link(FrozenModel):
    """What joins devices, CPUs or nodes. The bandwidth is in one direction: data sheets often print the sum of both."""

    scope: LinkScope = Field(description="what it joins")
    name: str = Field(description="e.g. `NVLink 3`, `PCIe 4.0 x16`, `InfiniBand HDR`")
    per: Literal["device", "package", "pair", "node"] = Field(
        description="what the bandwidth is for: each device, each two that it joins, ..."
    )
    bandwidth_bytes_per_s: float | None = Field(None, gt=0, description="in one direction, of all the links that `per` has")
    latency_s: float | None = Field(None, gt=0, description="of a small message, one way [s]")
    topology: str | None = Field(None, description="what joins what, e.g. `all to all`, `GPU 0 and 1`")
    source: str = Field(min_length=1, description="where all of this comes from")


class Affinity(FrozenModel):
    """Which part of the host each device of a node is attached to, by device. The first of the three that is given counts."""

    cpus: tuple[CpuList, ...] = Field((), description="logical CPUs next to each device")
    numa_nodes: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="NUMA node of each device")
    sockets: tuple[Annotated[int, Field(ge=0)], ...] = Field((), description="socket of each device")


class System(FrozenModel):
    """One machine: nodes of one kind, what is in a node, and what the data sheets promise per device."""

    name: str = Field(description="by which suites and verbs ask for the machine")
    aliases: tuple[str, ...] = Field((), description="further names")
    title: str = Field(description="what it is, in a few words")
    hostname: str | None = Field(None, description="host name, of a machine that was detected")
    nodes: Count | None = Field(None, description="number of nodes")
    devices_per_node: Count = Field(description="accelerators of one node, as torch counts them; 1 for a CPU")
    devices: tuple[DeviceModel, ...] = Field(min_length=1, description="the devices of one node")
    cpu: Cpu = Field(description="the processors of one node")
    memory_bytes: int | None = Field(None, ge=1, description="host memory of one node that may be used: cgroup limit included")
    ssd_bytes: int | None = Field(None, ge=0, description="solid-state storage of one node, on which data can be staged; 0: it has none")
    driver: str | None = Field(None, description="version of the accelerators' driver")
    os: str | None = Field(None, description="operating system")
    kernel: str | None = Field(None, description="version of the kernel")
    peak: dict[DType, Figure] | None = Field(None, description="dense FLOP/s of one device by dtype")
    memory_bandwidth: Figure | None = Field(None, description="bytes/s of one device's memory")
    links: tuple[Link, ...] = Field((), description="inside a node and between nodes")
    affinity: Affinity | None = Field(None, description="which CPUs each device is attached to")
    container: str | None = Field(None, description="container image or runtime")
    site: Site = Field(Site(), description="scheduler, network, container, software environment")
    notes: tuple[str, ...] = Field((), description="what else is worth knowing")
    sources: dict[str, str] = Field({}, description="where plain figures come from, by key; `devices` covers `devices.tdp_w`")
    missing: dict[str, str] = Field({}, description="why a figure is absent, by key")

    @property
    def device_class(self) -> DeviceClass:
        """What suites distinguish: ``cpu`` or ``gpu`` (any accelerator)."""
        return "cpu" if self.devices[0].kind == "cpu" else "gpu"

    @property
    def lacks(self) -> tuple[DType, ...] | None:
        """Formats that other GPUs of NVIDIA or AMD multiply matrices in and these do not, by their compute capability or else their data
        sheet; ``None`` where neither is known, and of other devices. Peaks of a user's own need not name every format."""
        device = self.devices[0]
        if device.kind not in ("cuda", "rocm"):
            return None
        if re.fullmatch(r"\d+\.\d+|gfx\w+", device.compute_capability or ""):
            return lacking(str(device.compute_capability))
        sheet = data_sheet(device.model)
        return None if isinstance(sheet, str) else tuple(dtype for dtype in SINCE if dtype not in sheet.flops_per_s)

    @property
    def identity(self) -> str:
        """Compute devices of one node in a few words, e.g. ``NVIDIA H200 x4`` or ``AMD EPYC 7742, 128 threads``."""
        if self.device_class != "cpu":
            models = [device.model for device in self.devices]
            return " + ".join(f"{model} x{models.count(model)}" for model in sorted(set(models)))
        threads = self.cpu.usable_threads or self.cpu.threads
        return f"{self.cpu.model}, {threads} thread{'' if threads == 1 else 's'}" if threads else self.cpu.model


class PeakEntry(FrozenModel):
    """One device of ``peaks.toml``."""

    model: str = Field(description="what people call it")
    names: tuple[str, ...] = Field((), description="what NVML, torch or the kernel report")
    per: Literal["gpu", "gcd", "stack", "hpu", "package", "ipu"] = Field("gpu", description="what the figures are for")
    source: str = Field(min_length=1)
    multiprocessors: Count | None = Field(
        None, description="what torch counts on a whole one: multiprocessors, compute units, vector engines"
    )
    tdp_w: Positive | None = Field(None, description="maximum board power [W]")
    memory_bandwidth_bytes_per_s: Positive
    flops_per_s: dict[DType, Positive] = Field(description="dense FLOP/s; absent: the device has no hardware for that dtype")
    notes: str | None = None


class _Peaks(FrozenModel):
    device: tuple[PeakEntry, ...]

    @model_validator(mode="after")
    def _names_differ(self) -> _Peaks:
        names = [name for entry in self.device for name in {_normal(entry.model), *map(_normal, entry.names)}]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"every name once; twice: {', '.join(twice)}")
        return self


def is_slice(model: str) -> bool:
    """Whether a name is that of a part of a GPU: a MIG instance, or a partition of an AMD Instinct."""
    return re.search(r" MIG | [DTQC]PX$", model) is not None


def data_sheet(model: str) -> PeakEntry | str:
    """The data sheet of the device that reports the name ``model``, or a sentence that says why there is none."""
    known = _by_name()
    found = known.get(_normal(model))
    if found:
        return found
    if is_slice(model):
        return f"{model!r} is a slice of a GPU; data sheets give peaks for whole GPUs only"
    guess = nearest(_normal(model), known)
    closest = f" (the closest known name is {known[guess].model!r}, another device)" if guess else ""
    return f"no data sheet for {model!r} in the catalogue{closest}"


def same_model(one: str, other: str) -> bool:
    """Whether two names are those of one device: but for vendor and punctuation, or by one data sheet, as the board's and torch's."""
    names, known = (_normal(one), _normal(other)), _by_name()
    return names[0] == names[1] or (names[0] in known and known[names[0]] is known.get(names[1]))


def sheet_of(device: DeviceModel) -> PeakEntry | str:
    """As :func:`data_sheet`, of a device that is whole: where torch tells its multiprocessors, they are those of the data sheet.

    Partitions of AMD's GPUs as torch names them, both stacks of an Intel GPU as one, and a share under MPS have the whole one's name.
    """
    found, units = data_sheet(device.model), device.multiprocessors
    if isinstance(found, str) or found.multiprocessors is None or units in (None, found.multiprocessors):
        return found
    told = f"torch counts {units} multiprocessors on {device.model!r}, {found.multiprocessors} are in the data sheet"
    return f"{told}: {'a part of it' if units < found.multiprocessors else 'several as one'}, or another version"


def data_sheets() -> tuple[PeakEntry, ...]:
    """Every device with a data sheet."""
    return read_toml(CATALOG / "peaks.toml").validate(_Peaks).device


def with_sheet(system: System) -> System:
    """The system with the figures of its device's data sheet where it has none of its own, or why there are none."""
    sheet, missing = sheet_of(system.devices[0]), dict(system.missing)
    peak, memory = system.peak, system.memory_bandwidth
    if isinstance(sheet, str):
        absent = [key for key, value in (("peak", peak), ("memory_bandwidth", memory)) if value is None]
        missing |= {key: sheet for key in absent if key not in missing}
    else:
        peak = {dtype: _figure(sheet, value, "FLOP/s") for dtype, value in sheet.flops_per_s.items()} | (peak or {})
        memory = memory or _figure(sheet, sheet.memory_bandwidth_bytes_per_s, "B/s")
    return system.model_copy(update={"peak": peak, "memory_bandwidth": memory, "missing": missing})


def _figure(found: PeakEntry, value: float, unit: str) -> Figure:
    per = found.per if found.per in ("package", "stack") else found.per.upper()
    return Figure(value=value, unit=unit, source=f"{found.source} (dense, per {per})")


@cache
def _by_name() -> dict[str, PeakEntry]:
    return {_normal(name): found for found in data_sheets() for name in (found.model, *found.names)}


def _normal(name: str) -> str:
    """Names differ between driver versions in the vendor's word and in punctuation, and in nothing else that may be ignored."""
    words = re.sub(r"[\s_-]+", " ", name.casefold()).split()
    return " ".join(word for word in words if word not in ("nvidia", "amd"))
