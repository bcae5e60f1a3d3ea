"""The machine under a campaign: what expansion must know of it, and how to wait for its jobs."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib import metadata

from caraml import __version__
from caraml.suite.expand import Machine
from caraml.system.model import System
from caraml.units import GIB


def machine_of(system: System, launcher: str = "slurm") -> Machine:
    """What expansion must know of a system. Launcher ``local`` reaches the node that it is on, the others all that there are."""
    cpu = system.device_class == "cpu"
    memory = system.devices[0].memory_bytes
    return Machine(
        name=system.name,
        device=system.identity,
        device_class=system.device_class,
        software=f"caraml {__version__}, torch {metadata.version('torch')}",
        nodes=1 if launcher == "local" else system.nodes,
        # A CPU is one device; more processes on it are for trying out parallel training.
        devices_per_node=(system.cpu.usable_threads or 1) if cpu else system.devices_per_node,
        device_memory_gib=memory / GIB if memory else None,
    )


def wait_for(handles: Iterable[str], seconds: float) -> None:
    """Wait until a local job of these ends, but no longer than ``seconds``; where the kernel cannot tell, and for other jobs, just wait."""
    with ExitStack() as stack:
        poll, any_local = select.poll(), False
        for handle in handles:
            kind, _, rest = handle.partition(":")
            if kind == "local" and hasattr(os, "pidfd_open"):
                try:
                    descriptor = os.pidfd_open(int(rest.partition(":")[0]))
                except ProcessLookupError:
                    return
                stack.callback(os.close, descriptor)
                poll.register(descriptor, select.POLLIN)
                any_local = True
        if any_local:
            poll.poll(seconds * 1000)
        else:
            time.sleep(seconds)
