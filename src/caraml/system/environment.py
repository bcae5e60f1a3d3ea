"""In which state this machine and its software are (:func:`environment`): what a record keeps beside what the machine is. Survives whatever
is missing.

Nothing is read from the environment's variables but those on a list: the rest may hold secrets.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from caraml import __version__
from caraml.base.plugins import installed
from caraml.system import host, nvml
from caraml.system.families.family import amd_driver, amd_gpus
from caraml.system.files import ROOT, listing, read, read_int
from caraml.system.variables import has_account, shown

_PACKAGES = ("torch", "torchvision", "numpy", "timm", "triton", "pydantic", "nvidia-ml-py", "transformers", "torchao", "megatron-core")
_SLURM = (
    "JOB_ID JOB_NAME JOB_PARTITION CLUSTER_NAME JOB_NODELIST JOB_NUM_NODES NTASKS NTASKS_PER_NODE CPUS_PER_TASK CPU_BIND GPUS_ON_NODE"
    " JOB_GPUS ARRAY_JOB_ID ARRAY_TASK_ID RESTART_COUNT JOB_QOS"
)
"""Which of Slurm's variables, without their common beginning."""
_THROTTLE = "gpu_idle application_clocks sw_power_cap hw_slowdown sync_boost sw_thermal hw_thermal hw_power_brake display_clock"
"""NVML's clock event reasons, from the lowest bit on (nvml.h, nvmlClocksEventReasons)."""


def environment(root: Path = ROOT) -> dict[str, Any]:
    """Versions (those of plug-ins among them), clocks, throttling, container, Slurm job, git state and chosen variables, ready for JSON.

    Unknown values are ``None`` and named in ``missing`` with the reason. CUDA, cuDNN and NCCL versions are there once the process has
    loaded torch.
    """
    missing: dict[str, str] = {}
    gpus, driver = _gpu_states(root, missing)
    git = own_checkout()
    if isinstance(git, str):
        missing["git"] = git
    return {
        "versions": installed() | _versions(missing) | {"driver": driver},
        "gpus": gpus,
        "cpu": _cpu_state(root, missing),
        "git": None if isinstance(git, str) else git,
        "container": container(root, os.environ),
        "slurm": {name: os.environ[name] for word in _SLURM.split() if (name := f"SLURM_{word}") in os.environ} or None,
        "variables": variables(os.environ),
        "missing": missing,
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change speed or numbers and are safe to publish."""
    return {name: environ[name] for name in sorted(environ) if shown(name) and not has_account(environ[name])}


def container(root: Path, environ: Mapping[str, str]) -> dict[str, str | None] | None:
    """``runtime`` and, where it tells, ``image`` of the container around us; ``None`` outside of one.

    A point's script knows more than the container shows: it also gives the image's ``digest``.
    """
    told = {key: environ.get(f"CARAML_CONTAINER_{key.upper()}") for key in ("runtime", "image", "digest")}
    if told["runtime"]:
        return told
    for name in ("apptainer", "singularity"):
        image = environ.get(f"{name.upper()}_CONTAINER")
        if image or (root / f".{name}.d").exists():
            return {"runtime": name, "image": image or environ.get(f"{name.upper()}_NAME")}
    podman = read(root / "run/.containerenv")
    if podman is not None:
        line = re.search(r'^image="(.*)"$', podman, re.MULTILINE)
        return {"runtime": "podman", "image": line[1] if line else None}
    if (root / ".dockerenv").exists():
        return {"runtime": "docker", "image": None}
    runtime = environ.get("container")
    return {"runtime": runtime, "image": None} if runtime else None


@lru_cache(maxsize=1)
def own_checkout() -> dict[str, Any] | str:
    """As :func:`git_state`, of CARAML's own code as this process first found it: git may take long."""
    return git_state(Path(__file__).resolve().parents[3])


def git_state(folder: Path) -> dict[str, Any] | str:
    """``commit`` and ``dirty`` of the work tree at ``folder``, or a sentence that says why they are not known."""
    if not (folder / ".git").exists():
        return "not run from a git checkout"
    # Optional locks off: looking at the state must not write to somebody's checkout.
    ask = ["git", "--no-optional-locks", "-C", str(folder)]
    answers = []
    for question in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            done = subprocess.run([*ask, *question], capture_output=True, text=True, errors="replace", timeout=10, check=False)  # noqa: S603 -- git in CARAML's own checkout; no shell
        except (OSError, subprocess.SubprocessError) as error:
            return f"git: {error}"
        if done.returncode:
            return f"git: {(done.stderr.strip() or 'no message').splitlines()[0]}"
        answers.append(done.stdout.strip())
    return {"commit": answers[0], "dirty": bool(answers[1])}


def _versions(missing: dict[str, str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "caraml": __version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()) or None,
    }
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
            missing[f"versions.{name}"] = "not installed"
    torch: Any = sys.modules.get("torch")
    if torch is None:
        reason = "torch is not loaded in this process"
        libraries: dict[str, str | None] = dict.fromkeys(("cuda", "hip", "cudnn", "nccl"))
    else:
        reason = "this build of torch is without it"
        nccl = torch.cuda.nccl.version() if torch.cuda.is_available() and torch.distributed.is_nccl_available() else None
        cudnn = torch.backends.cudnn.version()
        libraries = {
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": str(cudnn) if cudnn else None,
            "nccl": ".".join(map(str, nccl)) if nccl else None,
        }
    missing.update({f"versions.{name}": reason for name, version in libraries.items() if version is None})
    return versions | libraries


def _gpu_states(root: Path, missing: dict[str, str]) -> tuple[list[dict[str, Any]], str | None]:
    """The state of every NVIDIA GPU, and the driver's version (AMD's where there is no NVIDIA)."""
    with nvml.session() as nv:
        if isinstance(nv, str):
            missing["gpus"] = nv + ("; the state of AMD GPUs is not read yet" if amd_gpus(root).loaded else "")
            return [], amd_driver(root)
        states = [_gpu_state(nv, index, handle) for index, handle in nv.gpus()]
        driver = nv.driver()
        missing.update({key.replace("devices", "gpus", 1): reason for key, reason in nv.missing.items()})
        return states, driver


def _gpu_state(nv: nvml.Nvml, index: int, handle: Any) -> dict[str, Any]:
    """Clocks [MHz], limits [W], temperature [°C], link, ECC and why the clock is held back."""

    def ask(name: str, function: str, *arguments: Any) -> Any:
        return nv.ask(f"devices[{index}].{name}", function, handle, *arguments)

    library, reasons = nv.library, ask("throttle", "nvmlDeviceGetCurrentClocksEventReasons")
    ecc, mig = ask("ecc", "nvmlDeviceGetEccMode"), nv.quietly("nvmlDeviceGetMigMode", handle)
    persistence = ask("persistence_mode", "nvmlDeviceGetPersistenceMode")
    limit_mw = ask("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit")
    return {
        "index": index,
        "uuid": ask("uuid", "nvmlDeviceGetUUID"),
        "sm_clock_mhz": ask("sm_clock_mhz", "nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM),
        "sm_clock_max_mhz": ask("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", library.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("memory_clock_mhz", "nvmlDeviceGetClockInfo", library.NVML_CLOCK_MEM),
        "throttle": None if reasons is None else [name for bit, name in enumerate(_THROTTLE.split()) if reasons >> bit & 1],
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": None if mig is None else bool(mig[0]),
        "pcie_generation": ask("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie_width": ask("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
        "persistence_mode": None if persistence is None else bool(persistence),
        "temperature_c": ask("temperature_c", "nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
        "power_limit_w": limit_mw / 1000 if limit_mw else None,
    }


def _cpu_state(root: Path, missing: dict[str, str]) -> dict[str, Any]:
    """Governor, mean clock [MHz], and load average over one minute."""
    folders = listing(root / "sys/devices/system/cpu", "cpu[0-9]*")
    governors = sorted({text for folder in folders if (text := read(folder / "cpufreq/scaling_governor"))})
    khz = [value for folder in folders if (value := read_int(folder / "cpufreq/scaling_cur_freq"))]
    listed = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", read(root / "proc/cpuinfo") or "", re.MULTILINE)
    mhz = [value / 1000 for value in khz] or [float(value) for value in listed]
    hugepages = re.search(r"\[(\w+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")  # ``always [madvise] never``
    state = {
        "governor": ",".join(governors) or None,
        "clock_mhz": round(fmean(mhz), 1) if mhz else None,
        "smt": read(root / "sys/devices/system/cpu/smt/control"),
        "transparent_hugepages": hugepages and hugepages[1],
        "load_1min": _load(root),
        "memory_available_bytes": host.available_memory(root),
    }
    missing.update({f"cpu.{key}": "not shown by /proc or /sys here" for key, value in state.items() if value is None})
    return state


def _load(root: Path) -> float | None:
    text = read(root / "proc/loadavg")
    if text is None:
        return os.getloadavg()[0] if root == ROOT and hasattr(os, "getloadavg") else None
    return float(match[0]) if (match := re.match(r"[\d.]+", text)) else None
