"""How a machine is used: its scheduler, its software environment, its containers. Everything that differs between sites and is not a
figure stands here, in one place."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
ContainerRuntime = Literal["apptainer", "singularity", "podman", "charliecloud", "bubblewrap", "none"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scheduler(_Model):
    """What a Slurm job of this machine needs to say. Values may hold no line break."""

    kind: Literal["slurm"] = "slurm"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus: Literal["gres", "gpus-per-node", "none"] = Field("gres", description="how GPUs are asked for")
    gres: str = Field("gpu", description="name of the generic resource, with type if the site wants one: `gpu:a100`")
    exclusive: bool = True
    cpus_per_device: Count | None = Field(None, description="CPUs to ask for with each device; a job that is not exclusive needs them")
    requeue: bool = Field(False, description="put a job back into the queue that lost a node, or was cut off before it had a result")
    max_minutes: Count | None = Field(None, description="longest wall time of the partition")
    signal_seconds: Count = Field(60, description="how long before the time limit the point is warned")
    cpu_bind: str | None = Field(None, description="value of `srun --cpu-bind`, e.g. `none`, `cores`, `mask_cpu:0xff,...`")
    extra: tuple[str, ...] = Field((), description="further `#SBATCH` lines, e.g. `--hint=nomultithread`")
    srun_extra: tuple[str, ...] = Field((), description="further options of `srun`, e.g. `--mpi=pmi2`")


class Network(_Model):
    """How processes of several nodes find each other."""

    interface: str | None = Field(None, description="network interface for gloo and NCCL, e.g. `ib0`")
    address_suffix: str = Field("", description="appended to a node's host name for its fast network, e.g. `i` at JSC")
    port: int = Field(29500, ge=1024, le=64535, description="first of the 1000 ports from which a job takes the one of its rendezvous")


class Container(_Model):
    """The image that points run in."""

    runtime: ContainerRuntime = "none"
    image: str | None = None
    binds: tuple[str, ...] = Field((), description="`HOST:CONTAINER[:ro]`")
    extra: tuple[str, ...] = Field((), description="further options of the runtime")
    python: str = Field("python3", description="interpreter in the image that has CARAML")


class Software(_Model):
    """What is loaded before a point runs."""

    modules: tuple[str, ...] = Field((), description="environment modules, loaded in this order")
    venv: str | None = Field(None, description="virtual environment to activate")
    variables: dict[str, str] = Field({}, description="environment variables")
    setup: tuple[str, ...] = Field((), description="shell lines that run once per campaign, before the first point")


class Site(_Model):
    """How points run on this machine."""

    scheduler: Scheduler | None = None
    network: Network = Network()
    container: Container = Container()
    software: Software = Software()
