"""How the ranks of a point find each other, and see that nobody else has got between them."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import write_file
from caraml.engine.start import MEET, PEER, SECRET

AGREEMENT_TIMEOUT = timedelta(minutes=10)
_PROOF_BYTES = 32
_ADDRESS = "address"
_ADDRESS_OF_INTERFACE = 0x8915
"""Linux: the ioctl ``SIOCGIFADDR``."""
_LOOK_SECONDS = 0.1


def _meeting_place() -> Path:
    meet = os.environ.get(MEET)
    if meet is None:
        raise InputError(
            f"this is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, and there is no place where the ranks meet",
            "a script of this version has one: caraml retry, or python -m caraml.engine.start --devices N caraml.worker FOLDER",
        )
    return Path(meet)


def store_of(rank: int, world: int) -> dist.Store:
    """Where ranks find each other's addresses: on one node a file that only this user can open; on several, rank 0 listens."""
    meet = _meeting_place()
    if int(os.environ["LOCAL_WORLD_SIZE"]) == world:
        return dist.FileStore(str(meet / "store"), world)
    if rank == 0:
        host = _own_address(os.environ[PEER])
        listening = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096)
        port = listening.getsockname()[1]
        write_file(meet / _ADDRESS, json.dumps([host, port]))
        return dist.TCPStore(host, port, world, True, timeout=AGREEMENT_TIMEOUT, master_listen_fd=listening.detach())
    host, port = _address_of_rank_0(meet)
    _own_address(host)
    return dist.TCPStore(host, port, world, False, timeout=AGREEMENT_TIMEOUT)


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
    deadline = time.monotonic() + AGREEMENT_TIMEOUT.total_seconds()
    while _ADDRESS not in os.listdir(meet):  # noqa: PTH208 -- asks the server, which a look at the file alone may not
        if time.monotonic() > deadline:
            raise EnvironmentUnfitError(f"rank 0 has left no address in {meet} for {AGREEMENT_TIMEOUT}: is the folder on all nodes?")
        time.sleep(_LOOK_SECONDS)
    host, port = json.loads((meet / _ADDRESS).read_text(encoding="utf-8"))
    return host, port


def know_each_other() -> None:
    """See that the other end of every connection between the ranks is a process of the point. Gloo takes whoever comes first for the rank
    that it expects; here each proves to each, in every group, that it can read the secret in the folder where they met. Raises
    ``EnvironmentUnfitError`` where somebody else has taken a connection."""
    secret = (_meeting_place() / SECRET).read_bytes()
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == "gloo":
            _prove(group, secret)


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
        what = f"somebody else has taken the connection of rank {me} with rank {', '.join(strangers)}: nothing was measured"
        raise EnvironmentUnfitError(what, "look who else uses the machine; SECURITY.md says what another user can and cannot do")


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
