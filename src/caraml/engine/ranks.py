"""The processes of one point: who is who, and how they agree.

Everything here goes through a gloo group of the hosts, also on GPUs, so that agreeing never puts work into a device's queue. Ranks tell
each other numbers, text and plain structures of them; nothing that one sends makes another run code.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import itertools
import json
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from caraml.base.errors import InputError
from caraml.base.format import count, some
from caraml.engine.device import collectives
from caraml.engine.meeting import AGREEMENT_TIMEOUT, know_each_other, store_of
from caraml.system.variables import PATIENCE

_BYTES = "bytes in base 64"


class PlainUnpickler(pickle.Unpickler):
    """What torch makes of objects that it sends between ranks on its own account: numbers, text and their containers, and nothing that
    could be called. Checkpoints need more, for as long as they are written or read."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which is no plain data")


class Ranks:
    """This process among the point's processes. One process alone needs no group."""

    def __init__(self, rank: int = 0, world: int = 1, hosts: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world, self.hosts = rank, world, hosts
        """``hosts`` is the group whose messages are in the hosts' memory, on every kind of device; ``None`` for a process that is alone."""
        self.steps = 0
        """Of a loop that CARAML does not run: how many have ended on this rank."""
        self.patience = 0.0
        """Seconds that ranks of such loops, which go on, wait for one that does not come, at least; 0: for gloo's time limit."""

    @classmethod
    def from_environment(cls, device: torch.device, longest: float = 0.0) -> Ranks:
        """Join the processes that ``caraml.engine.start`` has started, or stand alone. The model's tensors will be on ``device``.

        ``longest``: seconds for which the others wait at least where a rank works alone, as in staging or in validation after the window.
        Raises ``InputError`` where something else has started them, and ``EnvironmentUnfitError`` where another user has got between them,
        or torch has no collectives for the device.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        dist.distributed_c10d._unpickler = PlainUnpickler
        rank, timeout = int(os.environ["RANK"]), max(AGREEMENT_TIMEOUT, timedelta(seconds=longest))
        dist.init_process_group(collectives(device), store=store_of(rank, world), rank=rank, world_size=world, timeout=timeout)
        ranks = cls(rank, world, dist.new_group(backend="gloo", timeout=timeout))
        ranks.know_each_other()
        return ranks

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank."""
        if self.world == 1:
            return int(value)
        shared = torch.tensor([value], dtype=torch.int64, device="cpu")
        dist.broadcast(shared, src=0, group=self.hosts)
        return int(shared.item())

    def agree_later(self, value: int) -> Callable[[], int]:
        """Asks, of several ranks, for rank 0's value, which takes no time; what waits until all have asked. A broadcast would not: it goes
        from rank to rank, each of which would be one question ahead of the next."""
        assert self.hosts is not None
        shared = torch.tensor([0 if self.rank else value], dtype=torch.int64, device="cpu")
        work = self.hosts.allreduce([shared])  # the sum

        def found() -> int:
            work.wait()
            return int(shared.item())

        return found

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank. For small results after a measurement, not inside one.

        A value is what JSON has, with bytes in it; tuples arrive as lists, and the keys of dictionaries as text.
        """
        if self.world == 1:
            return [value]
        mine = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device="cpu"), group=self.hosts)
        longest = max(int(size.item()) for size in sizes)
        parts = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in sizes]
        dist.all_gather(parts, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=self.hosts)
        return [_unpacked(bytes(part[: int(size.item())].numpy())) for part, size in zip(parts, sizes, strict=True)]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over all ranks of numbers in the host's memory."""
        if self.world > 1:
            dist.all_reduce(values, group=self.hosts)
        return values / self.world

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.hosts)

    def ends(self, patience: float) -> None:
        """This rank's loop has ended. Where ranks may leave it apart, wait for the others to leave it, too, for ``patience`` seconds."""

    def leave_together(self) -> bool:
        """Whether all ranks have left their loops, which were measured to their end, once they have."""
        return True

    @contextlib.contextmanager
    def telling(self) -> Iterator[bool | None]:
        """Whether this rank is the one to record, inside the block, what failed; ``None`` where nobody knows any more."""
        yield self.rank == 0

    def keep(self, attempt: int) -> None:
        """Tell the others of which attempt this rank has written a record that is not the last word."""

    def kept(self) -> int | None:
        """Of which attempt a rank has written such a record."""
        return None

    def know_each_other(self) -> None:
        """See that nobody else has taken a connection between the ranks."""
        if self.world > 1:
            know_each_other()

    def own_store(self) -> Any:
        """A connection of its own to the group's key-value store, for another thread; ``None`` for a process that is alone."""
        return None if self.world == 1 else dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


_LONG_STEPS, _LONGEST = 10, 1800.0
"""Steps whose time ranks wait for one that does not come, at least, and seconds, gloo's own limit, at most."""
_loops = itertools.count()
_TELLING_SECONDS = 10.0


class LooseRanks(Ranks):
    """Ranks of a loop that CARAML does not run, each of which may leave it when it likes. Whatever they agree on, all see where each of
    them is: those that went on would wait in one collective, and those that ended in another, until the group's time limit."""

    def __init__(self, rank: int, world: int, hosts: dist.ProcessGroup | None) -> None:
        super().__init__(rank, world, hosts)
        self._key, self._began = f"caraml/loop/{next(_loops)}", time.monotonic()
        self._asked = 0
        """As which of the ranks this one asked whether it is to tell; one that asks again, since it could not, is the same."""
        # kept: a loop may end with destroy_process_group(), after which there is no default group to ask for it
        self._store: Any = None if hosts is None else dist.distributed_c10d._get_default_store()

    def agree(self, value: int) -> int:
        """Rank 0's value, on every rank. Raises ``InputError``, on every rank, where one has left the loop or is at another step, and where
        one does not come for longer than all steps so far have taken."""
        return self._meet(value, patience=self._longest())

    def _longest(self) -> float | None:
        """Seconds to wait for a rank while loops go on."""
        so_far = time.monotonic() - self._began
        longest = max(self.patience, so_far, _LONG_STEPS * so_far / max(self.steps, 1))
        return min(longest, _LONGEST) if self.patience else None

    def ends(self, patience: float) -> None:
        """Wait for the others' end, which has to be at the same step. Raises ``InputError`` where it is not, or has not come in time."""
        with contextlib.suppress(RuntimeError):  # only an error's words miss it
            self._store.set(f"{self._key}/{self.rank}", str(self.steps))
        self._meet(0, ended=True, patience=patience or None)

    def leave_together(self) -> bool:
        """Wait for the others as long as for one at its next step. False where one does not come, and where others left without this."""
        try:
            if not self._parted():
                self._meet(0, ended=True, patience=self._longest())
                return True
        except InputError:  # it hangs, maybe in a collective of its own, and all that was measured is known
            with contextlib.suppress(RuntimeError):
                self._store.set(f"{self._key}/parted", "")
        except RuntimeError:
            if not self._parted():
                raise
        return False

    def _parted(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return bool(self._store.check([f"{self._key}/parted"]))
        return False

    @contextlib.contextmanager
    def telling(self) -> Iterator[bool | None]:
        """The first rank that asks is the one: it failed first, and the others of that. They wait until it has told, for a while: where
        one ends, launchers end the others. ``None`` without a store, as where the node of rank 0 is gone."""
        number, told = 0, f"{self._key}/told"
        with contextlib.suppress(RuntimeError):  # rank 0 had the store, and is gone
            number = self._asked = self._asked or self._store.add(f"{self._key}/failed", 1)
            if number > 1:
                self._store.wait([told], timedelta(seconds=_TELLING_SECONDS))
        yield number == 1 if number else None
        if number == 1:
            with contextlib.suppress(RuntimeError):
                self._store.set(told, "")

    def keep(self, attempt: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{self._key}/kept", str(attempt))

    def kept(self) -> int | None:
        """A number, and no path: torchrun's store takes what any process of the machine says."""
        with contextlib.suppress(RuntimeError, ValueError):
            if self._store.check([key := f"{self._key}/kept"]):
                return int(self._store.get(key))
        return None

    def leave(self) -> None:
        """Give up the loop's own group, which no other loop needs: each holds files and threads."""
        group, self.hosts, self._store = self.hosts, None, None  # as long as anything refers to it, it keeps them
        if group is not None:
            with contextlib.suppress(ValueError):  # the loop has destroyed all groups
                dist.destroy_process_group(group)

    def _meet(self, value: int, *, ended: bool = False, patience: float | None = None) -> int:
        try:
            found = self._exchange([int(value), self.steps, int(ended)], patience)
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise
            raise _apart([self._seen(rank, ended, patience) for rank in range(self.world)], waited=patience is not None) from error
        places = [f"{'ended' if over else 'going on'} after {count(steps, 'step')}" for _, steps, over in found]
        if len({*places}) > 1:
            raise _apart(places)
        return found[0][0]

    def _seen(self, rank: int, ended: bool, patience: float | None) -> str:
        """Where a rank is that others have waited for, as far as it has said so."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([key := f"{self._key}/{rank}"]):
                return f"ended after {count(int(self._store.get(key)), 'step')}"
        if rank == self.rank and not ended:
            return f"going on after {count(self.steps, 'step')}"
        return "waited for in vain" if patience is None else f"not {'ended' if ended else 'at its next step'} {patience:.0f} s later"

    def _exchange(self, mine: list[int], patience: float | None) -> list[list[int]]:
        """Every rank's numbers, on every rank. Raises ``RuntimeError`` where a rank is gone, or has not come in time."""
        options = dist.distributed_c10d.AllgatherOptions()
        if patience is not None:
            options.timeout = timedelta(seconds=patience)
        given = torch.tensor(mine, dtype=torch.int64, device="cpu")  # whatever torch.set_default_device says
        rows = [torch.empty_like(given) for _ in range(self.world)]
        assert self.hosts is not None
        self.hosts.allgather([rows], [given], options).wait()
        return [row.tolist() for row in rows]


def _apart(places: list[str], *, waited: bool = False) -> InputError:
    """The error of ranks of which each is in a place, in words; ``waited``: some have not come in time."""
    order = sorted(dict.fromkeys(places), key=lambda place: not place.startswith("ended"))
    at = {place: [str(rank) for rank, one in enumerate(places) if one == place] for place in order}
    found = ", ".join(f"{'ranks' if len(ranks) > 1 else 'rank'} {some(ranks, 8)} {place}" for place, ranks in at.items())
    hint = "call m.step() on all ranks, and leave where it is false or the shortest input ends; do what one rank does alone after the block"
    hint += f", or export a longer {PATIENCE}" if waited else ""
    return InputError(f"the ranks' loops have to end at the same step: found {found}", hint)


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


def _packed(value: Any) -> bytes:
    def text_of(part: Any) -> dict[str, str]:
        if isinstance(part, bytes):
            return {_BYTES: base64.b64encode(part).decode("ascii")}
        raise TypeError(f"ranks tell each other numbers, text, bytes, lists and dictionaries, but found {type(part).__name__}")

    return json.dumps(value, default=text_of, separators=(",", ":")).encode()


def _unpacked(packed: bytes) -> Any:
    return json.loads(packed, object_hook=lambda part: base64.b64decode(part[_BYTES]) if part.keys() == {_BYTES} else part)
