"""What this machine can measure and reach, what stands in the way, and the command that would change it: the machine and its software, its
limits, the power sensors, and what other packages add."""

from __future__ import annotations

import getpass
import importlib
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from caraml.base.errors import CaramlError, EnvironmentUnfitError, in_a_line
from caraml.base.files import cache_home, data_home, home, nearest_folder, writable
from caraml.base.format import count, human, percent
from caraml.base.plugins import Plugin
from caraml.launch.container import PROGRAMS
from caraml.power.sampler import available_sources
from caraml.power.source import POWER_SOURCES, SourceEntry, how_often, source_plugins
from caraml.results.claim import launcher_plugins
from caraml.system import families, host, nvml
from caraml.system.detect import detect
from caraml.system.environment import environment
from caraml.system.families.family import AUTOLOAD, CUDA, HIP, TorchBuild, amd_gpus
from caraml.system.model import UNITS, DType, System, data_sheet, is_slice, sheet_of
from caraml.workloads import workload_of, workload_plugins

if TYPE_CHECKING:
    from caraml.system.limits import Look

Status = Literal["ok", "warn", "missing"]
REPORT_VERSION = 1
"""Version of the layout of `caraml doctor --json`; docs/reference/doctor.md describes it."""
_OF_ONE_MACHINE = ("hostname", "uuid", "pci_bus_id", "slurm")
"""Keys that tell one machine, or one job, from others of its kind."""
LIBRARIES = {
    "timm": "image models",
    "duckdb": "queries over results",
    "vl-convert-python": "figures of the report as PDF and PNG",
}
"""What is not imported before it is needed, by the name of its distribution."""
_GB = 1e9


@dataclass(frozen=True)
class Check:
    """One finding. ``fix`` is a command or an action; it is there whenever ``status`` is not ``ok`` and something helps."""

    name: str
    status: Status
    found: str
    fix: str | None = None


def checks(output: Path) -> list[Check]:
    """Every finding, in the order in which they are worth reading. ``output`` is where results will be written; it need not exist."""
    return [*machine_checks(output), *limit_checks(), *power_checks(available_sources()), *plugin_checks()]


def machine_checks(output: Path) -> list[Check]:
    """The machine and its software. Imports torch, so it takes seconds."""
    torch, torch_check = _torch()
    system, state = detect(), environment()
    return [
        Check("Python", "ok", f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"),
        torch_check,
        *_devices(torch, system),
        _peak(system),
        _cores(torch),
        *_formats(system),
        _governor(state),
        _memory(state),
        _busy(state, system),
        *gpu_processes(),
        _timer(),
        _disk(output),
        _kept("cache", cache_home(), "export XDG_CACHE_HOME=$TMPDIR"),
        _kept("prepared data", data_home(), "export CARAML_DATA=FOLDER, with a folder of yours"),
        *(_library(name, why) for name, why in LIBRARIES.items()),
        _tools("container runtime", tuple(PROGRAMS.values())),
        _tools("Slurm", ("sbatch", "srun", "squeue")),
    ]


def _torch() -> tuple[Any, Check]:
    """The torch module, or ``None``, and what there is to say about it."""
    try:
        torch: Any = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return None, Check("torch", "missing", f"cannot be imported: {error}", f"{sys.executable} -m pip install torch")
    except RuntimeError as error:  # as torch says that a plug-in of it failed
        return None, Check("torch", "missing", f"cannot be imported: {in_a_line(error)}", f"repair that plug-in, or export {AUTOLOAD}=0")
    return torch, Check("torch", "ok", f"{torch.__version__}, built for {_built_for(torch)}, {count(torch.get_num_threads(), 'thread')}")


def _built_for(torch: Any) -> str:
    version = torch.version
    return TorchBuild(str(torch.__version__), version.cuda, version.hip, version.xpu).built_for


def _gpus(torch: Any, root: Path = Path("/")) -> Check:
    """Whether the driver and torch see the same GPUs, and if not, why not."""
    with nvml.session() as nv:
        driver_sees = 0 if isinstance(nv, str) else len(nv.units())
        slices = not isinstance(nv, str) and len(nv.gpus()) < driver_sees
        reason = nv if isinstance(nv, str) else nv.missing.get("devices", "")
    amd = amd_gpus(root)
    amds = bool(not driver_sees and amd.loaded) or bool(torch is not None and torch.version.hip)
    driver_sees = len(amd.devices) if amds else driver_sees
    family, name, tool, runtime = (HIP, "AMD", "rocm-smi", "ROCm") if amds else (CUDA, "NVIDIA", "nvidia-smi", "CUDA")
    torch_sees = torch.cuda.device_count() if torch is not None and torch.cuda.is_available() else 0
    masks = [variable for variable in family.variables if variable in os.environ]
    found = f"the {name} driver shows {driver_sees}, torch {torch_sees}"
    if driver_sees == torch_sees == 0:
        fix = "on a machine with an NVIDIA GPU: install its driver, then `nvidia-smi`"
        return Check("GPU", "ok", f"none, CPUs will be measured ({reason})" if reason else "none, CPUs will be measured", fix)
    if driver_sees == torch_sees:
        return Check("GPU", "ok", found)
    if torch is not None and not (torch.version.cuda or torch.version.hip):
        return Check("GPU", "missing", f"{found}: this torch is built for {_built_for(torch)}", family.fix)
    if slices and torch_sees and not masks:
        return Check("GPU", "ok", f"{found}: CUDA shows a process one MIG instance")
    if masks:
        told = ", ".join(f"{variable}={os.environ[variable]!r}" for variable in masks)
        why, fix = told, f"unset {' '.join(masks)}, to use all of them"
    elif not driver_sees and amds:
        why, fix = "no power limits and PCI addresses", "show /sys and /dev/kfd in this container"
    elif not driver_sees:
        why, fix = f"no power or clocks without NVML ({reason})", f"{sys.executable} -m pip install nvidia-ml-py"
    else:
        fix = f"compare `{tool}` with the line of torch above"
        return Check("GPU", "missing", f"{found}: the driver may be older than torch's {runtime}", fix)
    return Check("GPU", "warn", f"{found}: {why}", fix)


def _devices(torch: Any, system: System) -> list[Check]:
    gpus, others = _gpus(torch), _accelerators(system)
    return others if others and gpus.found.startswith("none") else [gpus, *others]


def _accelerators(system: System, root: Path = Path("/")) -> list[Check]:
    """What other accelerators there are, and what keeps them from being measured; no check where drivers show none."""
    found = []
    unfit = families.refusal(root)
    if unfit is not None:
        found.append(Check("accelerator", "missing", unfit.args[0], unfit.hint))
    if system.device_class == "gpu" and system.devices[0].kind not in ("cuda", "rocm"):
        found.append(Check("accelerator", "ok", f"{system.identity}, by torch's backend for {system.devices[0].kind}"))
    for family in families.FAMILIES:
        shown, name = family.by_driver(root), f"driver of {family.title}"
        if shown.closed and not shown.devices:
            files = ", ".join(shown.closed[:4])
            fix = "have the scheduler or the container give them to this process, or ask for the group that owns them"
            found.append(Check(name, "warn", f"{len(shown.closed)} cannot be opened: {files}", fix))
        elif shown.loaded and not shown.devices:
            found.append(Check(name, "warn", f"{shown.loaded} is there, and no device", "dmesg, for what the driver says of its devices"))
        elif shown.devices and family.kind != system.devices[0].kind and unfit is None and not families.forced():
            found.append(Check(name, "warn", f"{shown.devices[0].model} is not measured: {families.why_not(family)}", family.fix))
    return found


def _peak(system: System) -> Check:
    model = system.devices[0].model
    entry = sheet_of(system.devices[0])
    if isinstance(entry, str):
        known = system.device_class == "cpu" or is_slice(model) or not isinstance(data_sheet(model), str)
        fix = None if known else "caraml system detect > my.toml, add [peak.bf16] with its source, caraml run SUITE --system my.toml"
        return Check("peak by data sheet", "warn", f"{entry}; MFU is against the measured peak only", fix)
    figures = ", ".join(f"{dtype} {value / 1e12:g}" for dtype, value in entry.flops_per_s.items())
    return Check("peak by data sheet", "ok", f"{model}: {figures} TFLOP/s dense")


def _cores(torch: Any) -> Check:
    """A quota limits time, not the CPUs that torch counts: with more threads than that it is stopped in mid-step."""
    cpu, quota = host.cpu(), host.cgroup_cpus()
    found = f"{cpu.usable_threads} of {cpu.threads} logical CPUs usable" + (f", cgroup quota {quota:g}" if quota else "")
    started = torch.get_num_threads() if torch is not None else cpu.usable_threads
    if quota and started and started > quota:
        return Check("CPU cores", "warn", f"{found}: less than torch's {started} threads", f"export OMP_NUM_THREADS={max(1, int(quota))}")
    return Check("CPU cores", "ok", found)


def _formats(system: System) -> list[Check]:
    """Which formats of 16 bits the CPU computes with, where CPUs are measured."""
    if system.device_class != "cpu" or not system.cpu.isa:
        return []
    own = {dtype: [name for name in units if name in system.cpu.isa] for dtype, units in UNITS.items()}
    found = [f"{dtype} by {', '.join(names)}" if names else f"{dtype} only emulated" for dtype, names in own.items()]
    if not all(own.values()):
        found.append("what is emulated is not measured unless a point says emulated = true")
    return [Check("CPU formats", "ok", "; ".join(found))]


def _governor(state: dict[str, Any]) -> Check:
    governor = state["cpu"]["governor"]
    if governor is None:
        return Check("CPU governor", "warn", "not shown here (virtual machine or container): clocks may vary unseen")
    if governor == "performance":
        return Check("CPU governor", "ok", governor)
    return Check("CPU governor", "warn", f"{governor}: clocks follow the load", "sudo cpupower frequency-set -g performance")


def _memory(state: dict[str, Any]) -> Check:
    limit, available = host.memory_bytes(), state["cpu"]["memory_available_bytes"]
    if limit is None or available is None:
        return Check("memory", "warn", "size not known")
    found = f"{min(available, limit) / _GB:.1f} GB free of {limit / _GB:.1f} GB"
    if min(available, limit) < 4 * _GB:
        return Check("memory", "warn", f"{found}; ResNet-50 with batch 32 needs about 4 GB", "close other programs or take a smaller batch")
    return Check("memory", "ok", found)


def _busy(state: dict[str, Any], system: System) -> Check:
    load, threads = state["cpu"]["load_1min"], system.cpu.usable_threads
    if load is None or not threads:
        return Check("other load on the CPUs", "warn", "load average not known")
    found = f"load average {load:.2f} on {threads} logical CPUs"
    if load > 0.25 * threads:
        return Check("other load on the CPUs", "warn", f"{found}: others are computing", "top -o %CPU, and wait until it is quiet")
    return Check("other load on the CPUs", "ok", found)


def gpu_processes() -> list[Check]:
    """Who else computes on the GPUs; no check where there are none."""
    with nvml.session() as nv:
        if isinstance(nv, str):
            return []
        gpus = nv.gpus()
        answers = [nv.ask(f"processes[{i}]", "nvmlDeviceGetComputeRunningProcesses", handle) for i, handle in gpus]
    if not gpus:
        return []
    others = [(i, p.pid) for (i, _), found in zip(gpus, answers, strict=True) for p in found or () if p.pid != os.getpid()]
    if others:
        listed = ", ".join(f"process {pid} on GPU {i}" for i, pid in others[:5])
        return [Check("other load on the GPUs", "warn", f"{len(others)}: {listed}", "nvidia-smi, and wait until they end")]
    if None in answers:
        return [Check("other load on the GPUs", "warn", next(iter(nv.missing.values()), "NVML does not tell"))]
    return [Check("other load on the GPUs", "ok", "none")]


def _timer() -> Check:
    """The step that two reads of the clock can tell apart; a step of training takes 10,000 times as long."""
    info = time.get_clock_info("perf_counter")
    steps = []
    for _ in range(200):
        first = second = time.perf_counter()
        while second == first:
            second = time.perf_counter()
        steps.append(second - first)
    resolution_s = sorted(steps)[len(steps) // 2]
    found = f"{info.implementation}: steps of {resolution_s * 1e9:.0f} ns, {'monotonic' if info.monotonic else 'not monotonic'}"
    if resolution_s > 10e-6 or not info.monotonic:
        return Check("clock", "warn", f"{found}: too coarse for short steps", "cat /sys/devices/system/clocksource/*/current_clocksource")
    return Check("clock", "ok", found)


def _disk(output: Path) -> Check:
    folder = nearest_folder(output)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", "warn", f"{folder}: {error.strerror}")
    if not writable(folder):
        return Check("disk", "missing", f"{folder} cannot be written to", "caraml run SUITE --out FOLDER, with a folder of yours")
    found = f"{free / _GB:.1f} GB free for {output}"
    return Check("disk", "ok" if free > 2 * _GB else "warn", found, None if free > 2 * _GB else f"du -sh {folder}/* and make room")


def _kept(name: str, folder: Path, fix: str) -> Check:
    """A folder of what is kept for later runs."""
    if writable(nearest_folder(folder)):
        return Check(name, "ok", str(folder))
    return Check(name, "missing", f"{folder} cannot be written to", fix)


def _library(name: str, why: str) -> Check:
    try:
        return Check(name, "ok", f"{metadata.version(name)} ({why})")
    except metadata.PackageNotFoundError:
        return Check(name, "missing", f"not installed ({why})", f"{sys.executable} -m pip install {name}")


def _tools(name: str, commands: tuple[str, ...]) -> Check:
    """Tools of clusters; a machine without them lacks nothing for local runs."""
    found = [command for command in commands if shutil.which(command)]
    return Check(name, "ok", ", ".join(found) if found else f"none of {', '.join(commands)} on PATH; local runs need none")


def limit_checks() -> list[Check]:
    """What one device reaches, by arithmetic and by library: measured now in short, or searched for in seconds where nothing is kept."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError):
        return []  # the system's checks say why
    from caraml.engine.device import accelerator_type, gpu_lacks
    from caraml.system.limits import looks

    kind = accelerator_type() if families.forced() != "cpu" else None
    on_gpu, device = kind is not None, torch.device(f"{kind}:0" if kind else "cpu")
    known = families.family_of(kind).arithmetic if kind else families.PLAIN
    wanted: tuple[DType, ...] = ("fp32", "tf32", "bf16", "fp16")
    plain = kind == "cuda" and gpu_lacks("tf32", device) is not None  # torch computes in fp32 there
    dtypes = [dtype for dtype in wanted if dtype in known and not (plain and dtype == "tf32")]
    found = [_limit(f"limit: {dtype}", looks(["arithmetic"], device, dtype)["arithmetic"], "FLOP/s") for dtype in dtypes]
    streams = looks(["memory"] if on_gpu else ["memory", "cache"], device)
    return found + [_limit(f"limit: {kind}", one, "B/s") for kind, one in streams.items()]


def _limit(name: str, found: Look | str, unit: str) -> Check:
    if isinstance(found, str):
        return Check(name, "warn", found)
    best, now = found.best, found.now
    others = [f"{kernel} {human(rate, unit)}" for kernel, rate in list(best.by_library.items())[1:]]
    near = "" if best.low is None or best.high is None else f" ± {percent((best.high - best.low) / 2 / best.rate, 2)}"
    text = f"{human(best.rate, unit)}{near}, {best.library} {best.kernel}, {best.size}"
    text += f"; {human(best.sustained, unit)} without a pause" if best.sustained and best.sustained < best.rate else ""
    text += "".join(f"; {other}" for other in others)
    if now is not best:
        text += f"; kept since {best.measured_at[:10]}, now {human(now.rate, unit)}"
    if found.disturbed is None:
        return Check(name, "ok", text)
    return Check(name, "warn", f"{text}; disturbed: {found.disturbed}", "wait until the machine is quiet, then `caraml doctor` again")


def power_checks(sources: list[dict[str, Any]]) -> list[Check]:
    """One finding per sensor that exists, readable or not, and one that names the kinds that do not."""
    found = [_sensor(source) for source in sources if source["found"] or source["asked"]]
    absent = [source["name"] for source in sources if not source["found"] and source["auto"] and not source["asked"]]
    if not any(source["readable"] and source["auto"] for source in sources):
        asked, others = [s["name"] for s in sources if s["asked"]], [s["name"] for s in sources if s["readable"]]
        what = f"none that {POWER_SOURCES} names can be read here" if asked else "none that is read by default is here"
        meters = "a node's meter can be read too: `caraml power sources` lists every kind with what it needs"
        fix = f"to read what answers: {POWER_SOURCES}={','.join(others)}" if others else meters
        found.append(Check("power sensor", "warn", f"{what}: energy will be null", fix))
    if absent:
        found.append(Check("other sensors", "ok", f"not on this machine: {', '.join(absent)}"))
    return found


def _sensor(source: dict[str, Any]) -> Check:
    name = f"power: {source['name']}"
    if not source["readable"]:
        return Check(name, "warn", source["reason"], source["fix"])
    shown = [channel for channel in source["channels"] if channel["kind"] != "apparent_va"]  # it has the name of its power
    told = [f"{c['label']} ({c['boundary']} {c['kind']}, {how_often(c['measured_period_s'], c['declared_period_s'])})" for c in shown]
    return Check(name, "ok", "; ".join(told))


def plugin_checks() -> list[Check]:
    """One finding per plug-in: that it can be used, or why not."""
    from caraml.launch.launchers import PlugInLauncher

    def a_launcher(plugin: Plugin) -> str:
        PlugInLauncher(plugin)
        return "a launcher"

    groups: tuple[tuple[Mapping[str, Plugin], Callable[[Plugin], str]], ...] = (
        (workload_plugins(), lambda plugin: workload_of(plugin).title),
        (source_plugins(), lambda plugin: plugin.load(SourceEntry).title),
        (launcher_plugins(), a_launcher),
    )
    checked = []
    for plugin, title in ((plugin, title) for group, title in groups for plugin in group.values()):
        name = f"plug-in: {plugin.name} ({plugin.package})"
        try:
            checked.append(Check(name, "ok", title(plugin)))
        except CaramlError as error:
            checked.append(Check(name, "warn", error.args[0], error.hint))
    return checked


def report(found: Sequence[Check], names: bool = False) -> dict[str, Any]:
    """The findings with the machine and the software, for JSON; without ``names``, nothing that tells whose machine it is."""
    machine = {"system": detect().model_dump(mode="json"), "environment": environment()}
    told = {"report_version": REPORT_VERSION, "checks": [asdict(check) for check in found], **machine}
    if names:
        return told
    host_name = socket.gethostname()
    hidden = dict.fromkeys({host_name, host_name.partition(".")[0]} - {"localhost", ""}, "HOST")
    with suppress(EnvironmentUnfitError):
        hidden = {str(home()): "~", **hidden}
    with suppress(OSError, KeyError):  # a user without a name
        hidden[getpass.getuser()] = "USER"
    hidden.pop("root", None)
    return without_names(told, hidden)


def without_names(value: Any, hidden: Mapping[str, str]) -> Any:
    """``value`` without the keys of one machine, and with other words for the ``hidden`` ones."""
    if isinstance(value, dict):
        return {name: without_names(one, hidden) for name, one in value.items() if name not in _OF_ONE_MACHINE}
    if isinstance(value, list):
        return [without_names(one, hidden) for one in value]
    if isinstance(value, str):
        for word in sorted(hidden, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", hidden[word], value)
    return value
