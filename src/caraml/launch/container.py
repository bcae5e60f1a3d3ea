"""Running a command inside an image, whichever runtime a machine has."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from caraml.base.errors import EnvironmentUnfitError, InputError, unknown_name
from caraml.system.model import Container, ContainerRuntime

Gpus = Literal["cuda", "rocm"]

PROGRAMS: dict[ContainerRuntime, str] = {
    "apptainer": "apptainer",
    "singularity": "singularity",
    "podman": "podman",
    "charliecloud": "ch-run",
    "bubblewrap": "bwrap",
}


@dataclass(frozen=True)
class _Words:
    """How a runtime is told what to do: words that come first, then GPUs, folders to show and the folder to be in."""

    first: str
    bind: str
    workdir: str
    gpus: Mapping[Gpus, str]
    last: tuple[str, ...] = ()


_APPTAINER = _Words("exec", "--bind=", "--pwd=", {"cuda": "--nv", "rocm": "--rocm"})
_WORDS: dict[ContainerRuntime, _Words] = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    # In a container with numbers of its own, the first process does not end by a signal for which it has no handler: a point that is to end
    # would run on beside the next.
    "podman": _Words(
        "run --rm --network=host --ipc=host --pid=host --security-opt=label=disable --entrypoint= --env=CARAML_* --env=SLURM_* "
        "--env=SLURMD_* --env=CUDA_VISIBLE_DEVICES --env=ROCR_VISIBLE_DEVICES --env=HIP_VISIBLE_DEVICES",
        "--volume=",
        "--workdir=",
        {"cuda": "--device=nvidia.com/gpu=all", "rocm": "--device=/dev/kfd --device=/dev/dri --group-add=keep-groups"},
    ),
    "charliecloud": _Words("--env-no-expand", "--bind=", "--cd=", {}, ("--",)),  # libraries of GPUs are in the image already (ch-fromhost)
}


def wrap(
    argv: Sequence[str],
    runtime: ContainerRuntime,
    image: str,
    *,
    binds: Sequence[str] = (),
    workdir: str,
    gpus: Gpus | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The command line that runs ``argv`` inside ``image``.

    ``binds`` are ``HOST``, ``HOST:CONTAINER`` or ``HOST:CONTAINER:ro``. Apptainer, Charliecloud and Bubblewrap pass the caller's variables
    on; Podman passes CARAML's, Slurm's and the choice of GPUs. Raises ``InputError`` for something that the runtime cannot do.
    """
    shown = [bind if ":" in bind else f"{bind}:{bind}" for bind in binds]
    if runtime == "bubblewrap":
        return [*_bubblewrap(image, shown), "--chdir", workdir, *extra, *argv]
    writable = [bind for bind in shown if runtime == "charliecloud" and bind.endswith(":ro")]
    if writable:
        raise InputError(f"container.binds: found {writable[0]!r}, but charliecloud cannot bind read-only", "leave out :ro")
    words = _WORDS[runtime]
    start = [PROGRAMS[runtime], *words.first.split(), *(words.gpus.get(gpus, "").split() if gpus else [])]
    return [*start, *(f"{words.bind}{bind}" for bind in shown), f"{words.workdir}{workdir}", *extra, image, *words.last, *argv]


def _bubblewrap(image: str, binds: Sequence[str]) -> list[str]:
    argv = ["bwrap", "--ro-bind", image, "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--ro-bind-try", "/sys", "/sys"]
    argv += ["--bind", "/tmp", "/tmp", "--ro-bind-try", "/etc/hosts", "/etc/hosts", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]  # noqa: S108 -- shows the host's folder inside the container
    for bind in binds:
        host, place, *mode = bind.split(":")
        argv += ["--ro-bind" if mode == ["ro"] else "--bind", host, place]
    return argv


def image_of(container: Container, *, away: bool = False) -> str | None:
    """The image as a script has to name it: files by their full path, but as they were given where it will run ``away`` from here; ``None``
    without container. Raises ``InputError`` for a runtime without an image."""
    image, runtime = container.image, container.runtime
    if runtime == "none":
        return None
    if image is None:
        raise InputError(f"container.runtime is {runtime!r} and container.image is not given", "name the image, or set runtime = 'none'")
    return str(Path(image).expanduser().absolute()) if _is_file(container) and not away else image


def check(container: Container) -> None:
    """Raise ``InputError`` for an image that is not given or not there. A runtime that is missing here is no fault: compute nodes may have
    it."""
    image = image_of(container)
    if image is not None and _is_file(container) and not Path(image).exists():
        raise InputError(
            f"container.image: no file {image}",
            "`caraml container build` or `caraml container pull` makes one; docs/containers.md shows how",
        )


def _is_file(container: Container) -> bool:
    """Podman names images in its own store; elsewhere a name with a scheme is fetched by the runtime."""
    return container.runtime != "podman" and "://" not in (container.image or "")


@cache
def digest(runtime: ContainerRuntime, image: str) -> str | None:
    """What names an image for ever: SHA-256 of its file, or the digest that Podman keeps; ``None`` for a folder and a remote image."""
    path = Path(image)
    if runtime == "podman":
        return _podman_digest(image)
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _podman_digest(image: str) -> str | None:
    try:
        argv = ["podman", "image", "inspect", "--format={{.Digest}}", image]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)  # noqa: S603 -- podman, to name an image of the system's description; no shell
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def runtime_called(name: str) -> ContainerRuntime:
    """The runtime of that name. Raises ``InputError`` where there is none."""
    for runtime in PROGRAMS:
        if runtime == name:
            return runtime
    raise unknown_name("container runtime", name, PROGRAMS)


def build_command(runtime: ContainerRuntime, definition: Path, out: Path) -> list[str]:
    """The command that builds an image file from an Apptainer definition file. Raises ``InputError`` where the definition is not there, or
    the runtime does not read definition files."""
    if runtime not in ("apptainer", "singularity"):
        raise InputError(
            f"{runtime} does not read definition files", "build with apptainer, or `caraml container pull` the image if a registry has it"
        )
    if not definition.is_file():
        raise InputError(f"no definition file {definition}", "containers/ in CARAML's repository has cuda.def, rocm.def and cpu.def")
    return [_program(runtime), "build", str(out), str(definition)]


def pull_command(runtime: ContainerRuntime, image: str, out: Path | None) -> list[str]:
    """The command that fetches an image, e.g. ``docker://IMAGE`` into a file, or ``IMAGE`` into the runtime's own store. Raises
    ``InputError`` where a file is needed and not named, or the runtime fetches nothing, and ``EnvironmentUnfitError`` where the runtime is
    not installed."""
    if runtime in ("apptainer", "singularity"):
        if out is None:
            raise InputError(f"{runtime} pulls into a file", "name it: caraml container pull IMAGE FILE.sif")
        return [_program(runtime), "pull", str(out), image]
    if runtime == "podman":
        return [_program(runtime), "pull", image]
    if runtime == "charliecloud":
        return [_program(runtime, "ch-image"), "pull", image]
    raise InputError(f"{runtime} fetches no images", "unpack a root file system into a folder and name it in container.image")


def _program(runtime: ContainerRuntime, program: str | None = None) -> str:
    name = program or PROGRAMS[runtime]
    if shutil.which(name) is None:
        raise EnvironmentUnfitError(f"{name} is not installed here", f"load or install {runtime}, or choose another with --runtime")
    return name
