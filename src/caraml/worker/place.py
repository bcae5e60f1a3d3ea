"""What is told of a training loop of a user's own, and where it runs: on which device, on which of the ranks that it has started, among
which nodes, and where its results go."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import make_folder, writable
from caraml.base.limits import COUNT, NAME
from caraml.base.processes import node_key
from caraml.base.toml import shown
from caraml.engine.device import AcceleratorDevice, CpuDevice, CudaDevice, Device, accelerator_type, gpus, sensors_of
from caraml.engine.ranks import LooseRanks, Ranks
from caraml.suite.model import COUNTED, OF_EPOCHS, Policy, Stated
from caraml.system import families

RESULTS = "CARAML_RESULTS"
"""Environment variable: folder of the results, instead of `caraml-results` below the current one; `--out` goes before it."""

_MOST_FLOPS = 1e30


class Told(BaseModel):
    """What the arguments of ``measure`` may be."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=NAME)
    item: str = Field(min_length=1, max_length=NAME)
    params: dict[str, JsonValue] | None
    precision: Stated | None
    flops_per_item: float | None = Field(gt=0, lt=_MOST_FLOPS)
    parameters: int | None = Field(gt=0, le=COUNT)

    @field_validator("params")
    @classmethod
    def _tell_loops_apart(cls, params: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        """A record has no NaN: it would be read as null, and so would another."""
        for key, what in (("name", "the name of the loop"), (COUNTED, "the argument item")):
            if key in (params or {}):
                raise ValueError(f"another key than {key!r}, which has {what}")
        try:
            json.dumps(params, allow_nan=False)
        except ValueError:
            raise ValueError("finite numbers") from None
        return params


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is among the nodes."""

    nodes: int
    leads: bool
    """Whether it is the first of its node, which reads the sensors."""
    gpus: list[str] | None
    """Addresses of the GPUs on which the loops of its node compute; ``None`` if torch uses none so far, ``[]`` where CPUs are asked for."""
    family: list[int]
    """Processes that, with their descendants, are the loop's on this node; empty if they cannot see each other."""


def place_of(ranks: Ranks) -> RankPlace:
    """Collective. A launcher may show every rank its own GPU alone, so that none knows those of its node by itself."""
    device = device_in_use()
    mine = gpus([device.torch_device.index]) if isinstance(device, CudaDevice) else []
    everyone = ranks.gather([node_key(), mine, *_process(ranks.world)])
    keys = [key for key, *_ in everyone]
    counts = {key: keys.count(key) for key in keys}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on {key.partition(':')[0]}" for key, count in counts.items())
        raise InputError(f"found nodes with different numbers of ranks: {found}; expected as many on each")
    used = [address for key, addresses, *_ in everyone if key == node_key() for address in addresses]
    here = [(process, space) for key, _, process, space in everyone if key == node_key()]
    family = sorted({process for process, _ in here}) if len({space for _, space in here}) == 1 else []
    unused: list[str] | None = [] if families.forced() == "cpu" else None  # else the loop, or another framework, may use them
    accelerator = isinstance(device, AcceleratorDevice)
    sensors = sensors_of(device.torch_device, counts[node_key()]) if accelerator else list(dict.fromkeys(used)) or unused
    return RankPlace(len(counts), keys.index(node_key()) == ranks.rank, sensors, family)


def _process(world: int) -> tuple[int, str]:
    """This rank's process, of several ranks what it was started by (one for all of a node, or a shell or a container's runtime for each),
    and what its number counts in: processes in containers may not see each other."""
    parent = os.getppid() if world > 1 else 0
    try:
        space = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 -- no path
    except OSError:
        space = ""
    return parent if parent > 1 else os.getpid(), space


def device_in_use() -> Device:
    """The accelerator that this process uses, if it uses one, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return CudaDevice(torch.cuda.current_device())
    kind = accelerator_type()
    if kind in (None, "cuda"):
        return CpuDevice()
    device = AcceleratorDevice(kind, torch.accelerator.current_device_index())
    holds = getattr(torch.get_device_module(kind), "current_allocated_memory", device.peak_memory)  # Apple's keeps no peak
    return device if holds() else CpuDevice()


def ranks_in_use() -> Ranks:
    """The loop's own ranks; they agree over a gloo group of the hosts, which puts no work into a device's queue."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return LooseRanks(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"{os.environ['WORLD_SIZE']} ranks run this loop, and they cannot agree on a window",
            "call torch.distributed.init_process_group() before caraml.measure",
        )
    return Ranks()


def results_folder(given: str | Path | None, ranks: Ranks) -> Path:
    """Where results go, made where it is missing. Collective: an error before the training, not after it."""
    out = Path(given if given is not None else os.environ.get(RESULTS) or "caraml-results")
    trouble = None
    if ranks.rank == 0:
        try:
            make_folder(out / "points")
            if not writable(out / "points"):
                trouble = "it may not be written to"
        except OSError as error:
            trouble = error.strerror or str(error)
        except InputError as error:  # raised here, it would leave the other ranks waiting
            trouble = error.line
    out = out.absolute()  # the loop may go to another folder
    trouble = ranks.gather(trouble)[0]
    if trouble is not None:
        raise EnvironmentUnfitError(f"{out}: no results can be written there: {trouble}", f"out=FOLDER, or export {RESULTS}=FOLDER")
    return out


def policy_of(policy: Policy | None) -> Policy:
    """The policy that was told, or the usual one. Raises ``InputError`` for what is none, or one of epochs."""
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise InputError(f"caraml.measure: policy: found {shown(policy)}", "policy=caraml.Policy(target=0.02)")
    epochs = [key for key in OF_EPOCHS if getattr(policy, key) is not None]
    if epochs:
        raise InputError(
            f"caraml.Policy: {', '.join(epochs)}: only for trainings of CARAML's own, which know what an epoch is", "leave it out"
        )
    return policy
