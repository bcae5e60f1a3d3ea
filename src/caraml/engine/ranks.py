"""The processes of one point: who is who, and how they agree.

Everything here goes through a gloo group of the hosts, also on GPUs, so that agreeing never puts work into a device's queue. Ranks tell
each other numbers, text and plain structures of them; nothing that one sends makes another run code.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import inspect
import json
import os
import pickle
import socket
import struct
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import write_file
from caraml.engine.device import collectives
from caraml.engine.start import MEET, PEER, SECRET

_AGREEMENT_TIMEOUT = timedelta(minutes=10)
_PROOF_BYTES = 32
_ADDRESS = "address"
_BYTES = "bytes in base 64"
_LOOK_SECONDS = 0.1


class PlainUnpickler(pickle.Unpickler):
    """What torch makes of objects that it sends between ranks on its own account: numbers, text and their containers, and nothing that
    could be called. Checkpoints need more, for as long as they are written or read."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which is no plain data")


class Ranks:
    """This process among the point's processes. One process alone needs no group."""

    def __init__(self, rank: int = 0, world: int = 1, local_rank: int = 0, hosts: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self.local_rank, self.hosts = rank, world, local_rank, hosts
        """``hosts`` is the group whose messages are in the hosts' memory, on every kind of device; ``None`` for a process that is alone."""

    @classmethod
    def from_environment(cls, device: torch.device) -> Ranks:
        """Join the processes that ``caraml.engine.start`` has started, or stand alone. The model's tensors will be on ``device``.

        Raises:
            InputError: something else has started them.
            EnvironmentUnfitError: another user has got between them, or torch has no collectives for the device.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        dist.distributed_c10d._unpickler = PlainUnpickler
        rank, timeout = int(os.environ["RANK"]), _AGREEMENT_TIMEOUT
        dist.init_process_group(collectives(device), store=_store(rank, world), rank=rank, world_size=world, timeout=timeout)
        ranks = cls(rank, world, int(os.environ.get("LOCAL_RANK", "0")), dist.new_group(backend="gloo", timeout=timeout))
        ranks.know_each_other()
        return ranks

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return int(value)
        shared = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self.hosts)
        return int(shared.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small results after a measurement, not inside one.

        A value is what JSON has, with bytes in it; tuples arrive as lists, and the keys of dictionaries as text.
        """
        if self.world == 1:
            return [value]
        mine = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self.hosts)
        longest = max(int(size.item()) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=self.hosts)
        return [_unpacked(bytes(part[: int(size.item())].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over all ranks of numbers in the host's memory."""
        if self.world > 1:
            dist.all_reduce(values, group=self.hosts)
        return values / self.world

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier(group=self.hosts)

    def know_each_other(self) -> None:
        """See that the other end of every connection between the ranks is a process of the point. Gloo takes whoever comes first for the
        rank that it expects; here each proves to each, in every group, that it can read the secret in the folder where they met.

        Raises:
            EnvironmentUnfitError: somebody else has taken a connection.
        """
        if self.world == 1:
            return
        secret = (_meeting_place() / SECRET).read_bytes()
        for group in list(dist.distributed_c10d._world.pg_map):
            if dist.get_backend(group) == "gloo":
                _prove(group, secret)

    def own_store(self) -> Any:
        """A connection of its own to the group's key-value store, for another thread; ``None`` for a process that is alone."""
        return None if self.world == 1 else dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def leave(self) -> None:
        """Leave the group."""
        if self.world > 1:
            dist.destroy_process_group()


def copies(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    """The model inside DDP over the ranks that have copies of it, all of them without a ``group``. Parameters must be plain tensors: those
    that tensor parallelism divides go through FSDP."""
    ids = None if device.type == "cpu" else [device.index]
    # Buffers are not sent with every forward pass: running statistics are averaged before anything is validated by them.
    name = "forward_sync_buffers"  # from torch 2.13 on, which warns of the name before
    own = {name if name in inspect.signature(DistributedDataParallel).parameters else "broadcast_buffers": False}
    return DistributedDataParallel(model, device_ids=ids, process_group=group, gradient_as_bucket_view=True, **own)  # type: ignore[arg-type]


def exchange_copies(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Keep DDP quiet in all micro-batches but the last."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()


def _meeting_place() -> Path:
    meet = os.environ.get(MEET)
    if meet is None:
        raise InputError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, and there is no place where the ranks meet",
            "a script of this version has one: caraml retry, or python -m caraml.engine.start --devices N caraml.worker FOLDER",
        )
    return Path(meet)


def _store(rank: int, world: int) -> dist.Store:
    """Where ranks find each other's addresses: on one node a file that only this user can open; on several, rank 0 listens."""
    meet = _meeting_place()
    if int(os.environ["LOCAL_WORLD_SIZE"]) == world:
        return dist.FileStore(str(meet / "store"), world)
    if rank == 0:
        host = _own_address(os.environ[PEER])
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
        port = listening.getsockname()[1]
        write_file(meet / _ADDRESS, json.dumps([host, port]))
        return dist.TCPStore(host, port, world, True, timeout=_AGREEMENT_TIMEOUT, master_listen_fd=listening.detach())
    host, port = _address_of_rank_0(meet)
    _own_address(host)
    return dist.TCPStore(host, port, world, False, timeout=_AGREEMENT_TIMEOUT)


def _own_address(towards: str) -> str:
    """This node's address on the network of the job: of the interface that the site names, or the one that leads to another node. Gloo is
    told to listen there and nowhere else."""
    addresses, named = interface_addresses(), os.environ.get("GLOO_SOCKET_IFNAME")
    if named in addresses:
        return addresses[named]
    family, kind, protocol, _, there = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(there)  # of a datagram socket: only looks up the way
        host = str(asking.getsockname()[0])
    for name in (name for name, address in addresses.items() if address == host):
        os.environ["GLOO_SOCKET_IFNAME"] = name
    return host


def _address_of_rank_0(meet: Path) -> tuple[str, int]:
    deadline = time.monotonic() + _AGREEMENT_TIMEOUT.total_seconds()
    while _ADDRESS not in os.listdir(meet):  # noqa: PTH208 -- asks the server, which a look at the file alone may not
        if time.monotonic() > deadline:
            raise EnvironmentUnfitError(f"rank 0 has left no address in {meet} for {_AGREEMENT_TIMEOUT}: is the folder on all nodes?")
        time.sleep(_LOOK_SECONDS)
    host, port = json.loads((meet / _ADDRESS).read_text(encoding="utf-8"))
    return host, port


def _prove(group: dist.ProcessGroup, secret: bytes) -> None:
    """Send every member of a group a proof that is for it alone, and look at those that come."""
    members, me = dist.get_process_group_ranks(group), dist.get_rank()

    def proof(sender: int, receiver: int) -> bytes:
        return hmac.digest(secret, f"{group.group_name} {sender} {receiver}".encode(), "sha256")

    sent = torch.frombuffer(bytearray(b"".join(proof(me, other) for other in members)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    try:
        dist.all_to_all_single(received, sent, group=group)
    except RuntimeError as error:
        raise EnvironmentUnfitError(f"the ranks cannot reach each other: {error}") from error
    found = bytes(received.numpy())
    strangers = [
        str(other)
        for index, other in enumerate(members)
        if not hmac.compare_digest(found[index * _PROOF_BYTES : (index + 1) * _PROOF_BYTES], proof(other, me))
    ]
    if strangers:
        raise EnvironmentUnfitError(
            f"somebody else has taken the connection of rank {me} with rank {', '.join(strangers)}: nothing was measured",
            "look who else uses the machine; SECURITY.md says what another user can and cannot do",
        )


def _packed(value: Any) -> bytes:
    def text_of(part: Any) -> dict[str, str]:
        if isinstance(part, bytes):
            return {_BYTES: base64.b64encode(part).decode("ascii")}
        raise TypeError(f"ranks tell each other numbers, text, bytes, lists and dictionaries, but found {type(part).__name__}")

    return json.dumps(value, default=text_of, separators=(",", ":")).encode()


def _unpacked(packed: bytes) -> Any:
    return json.loads(packed, object_hook=lambda part: base64.b64decode(part[_BYTES]) if part.keys() == {_BYTES} else part)


_ADDRESS_OF_INTERFACE = 0x8915
"""Linux: the ioctl ``SIOCGIFADDR``."""


def interface_addresses() -> dict[str, str]:
    """IPv4 address of every network interface that has one."""
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                answer = fcntl.ioctl(asking.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
