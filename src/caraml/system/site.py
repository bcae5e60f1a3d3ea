"""How a machine is used: its scheduler, its software environment, its containers. Everything that differs between sites and is not a
figure stands here, in one place."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from caraml.system.variables import concealed, shown

Count = Annotated[int, Field(ge=1)]
ContainerRuntime = Literal["apptainer", "singularity", "podman", "charliecloud", "bubblewrap", "none"]

_SETTING = re.compile(r"(?:^|\s)(?:--export|--env|--set-env|-e)(?:=|\s+|(?<=-e))(\S+)")
_SETTING_OF_TWO = re.compile(r"(?:^|\s)--setenv\s+(\S+)")
"""How schedulers and runtimes of containers are told variables: ``NAME=VALUE``, several with commas between, or two words."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _without_values(key: str, options: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for an option that gives a variable a value which may be a secret: everybody sees command lines."""
    text = " ".join(options)
    named = [part.partition("=")[0] for given in _SETTING.findall(text) for part in given.split(",") if "=" in part]
    for name in (*named, *_SETTING_OF_TWO.findall(text)):
        if not shown(name):
            raise ValueError(f"{key} without the value of {name}: other users see it there, but not under software.variables")


class Scheduler(_Model):
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
    signal_seconds: Count = Field(60, description="how long before the time limit the point is warned")
    cpu_bind: str | None = Field(None, description="value of `srun --cpu-bind`, e.g. `none`, `cores`, `mask_cpu:0xff,...`")
    extra: tuple[str, ...] = Field((), description="further `#SBATCH` lines, e.g. `--hint=nomultithread`")
    srun_extra: tuple[str, ...] = Field((), description="further options of `srun`, e.g. `--mpi=pmi2`")

    @model_validator(mode="after")
    def _open(self) -> Scheduler:
        _without_values("extra", self.extra)
        _without_values("srun_extra", self.srun_extra)
        return self


class Network(_Model):
    """How processes of several nodes find each other."""

    interface: str | None = Field(None, description="network interface for gloo and NCCL, e.g. `ib0`")
    address_suffix: str = Field("", description="appended to a node's host name for its fast network, e.g. `i` at JSC")
    port: int = Field(29500, ge=1024, le=64535, description="of no effect: ranks meet at a port that the kernel picks")


class Container(_Model):
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


class Software(_Model):
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


class Site(_Model):
    """How points run on this machine."""

    scheduler: Scheduler | None = Field(None, description="the batch system; without it, points run on this node")
    network: Network = Field(Network(), description="how nodes find each other")
    container: Container = Field(Container(), description="the image that points run in")
    software: Software = Field(Software(), description="what is loaded before a point runs")
