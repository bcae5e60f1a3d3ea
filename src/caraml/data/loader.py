"""From a data set to batches on the device: shuffled and divided among ranks, loaded by workers, copied ahead of use.

Synthetic samples cost nothing to read, made on the host or kept on the device. On the host they are made one by one in the loader's
workers and travel as real ones do, so that everything but reading and decoding is paid for; this is how CARAML's synthetic runs work.
On the device a few batches are made once and used in turn, so that nothing but the model is measured.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Sampler, default_collate

from caraml.base.errors import InputError
from caraml.base.format import count
from caraml.system.affinity import usable_cpus
from caraml.system.families import SideStream, side_stream

Batch = Any
"""A tensor, or lists, tuples and dictionaries of tensors: what torch's default collation makes of samples."""
_MOST_WORKERS = 16
"""More than feed the fastest device: a worker brings several hundred images per second."""
_START = "fork" if sys.platform == "linux" else None
"""How workers begin: those that are forked share what the data set holds, and torch is told of their death. From 3.14 on Python's own
choice is another one."""
_REPORT_OF_A_DEATH = 2.0
"""Seconds that the kernel has to report a worker's death, also on a busy machine."""


class MapDataset(Protocol):
    """A data set of known length whose samples are read by position."""

    def __len__(self) -> int:
        """The number of samples in an epoch."""

    def __getitem__(self, position: int, /) -> Any:
        """One sample."""


def default_workers(device_type: str, processes_on_node: int = 1) -> int:
    """The number of loader workers of each process that shares this node's cores: for an accelerator one core less than it may use, at most
    16.

    For training on the CPU itself it is 0 where a process has up to two cores: there a worker would take a core from the
    model's arithmetic, whose threads all wait for the slowest. With more cores, one worker loads ahead.
    """
    cores = usable_cpus(processes_on_node)
    if device_type == "cpu":
        return 0 if cores <= 2 else 1
    return min(cores - 1, _MOST_WORKERS)


@dataclass(eq=False)
class EndlessBatches(Sampler[list[int]]):
    """The positions of this rank's batches, epoch after epoch without a seam; see :func:`stream` for arguments and errors.

    Every epoch is a new permutation of all samples, drawn from ``(seed, epoch)``, the same on all ranks; rank r takes
    elements r, r + world_size, ... of it. So an epoch gives each sample to one rank, once, apart from those that are too
    few for one more on every rank (they vary with the permutation).
    """

    samples: int
    batch_size: int
    _: KW_ONLY
    seed: int
    rank: int
    world_size: int
    drop_last: bool
    batches_per_step: int = 1
    counting: bool = False
    """Positions count on over the epochs: ``epoch * samples + position``, so that a sample can know its epoch."""
    in_order: bool = False
    """Every epoch is all samples in their order. Each rank in turn takes a batch of neighbours, as Megatron-LM's sampler has it."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size or self.batch_size < 1:
            raise ValueError(f"rank {self.rank} of {self.world_size}, batch size {self.batch_size}")
        self.samples_per_rank = self.samples // self.world_size
        self.unit = self.batch_size * self.batches_per_step if self.drop_last else self.batch_size
        if self.samples_per_rank < (self.unit if self.drop_last or self.in_order else 1):
            least = f"{self.unit * self.world_size} for batches of {self.unit} on {count(self.world_size, 'rank')}"
            raise InputError(f"found {count(self.samples, 'sample')}; expected at least {least}", "use a smaller batch or more data")

    def epoch(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The positions of this rank in epoch ``number``, in order."""
        if self.in_order:
            whole = self.samples // (self.batch_size * self.world_size)
            order = np.arange(whole * self.batch_size * self.world_size).reshape(whole, self.world_size, self.batch_size)
            return order[:, self.rank].ravel()
        order = np.random.default_rng([self.seed, number]).permutation(self.samples)
        return order[: self.samples_per_rank * self.world_size][self.rank :: self.world_size]

    def __iter__(self) -> Iterator[list[int]]:
        left = np.empty(0, np.int64)
        number = 0
        while True:
            order = np.append(left, self.epoch(number) + (number * self.samples if self.counting else 0))
            full = len(order) - len(order) % self.unit
            for start in range(0, full, self.batch_size):
                yield order[start : start + self.batch_size].tolist()
            left = order[:0] if self.drop_last else order[full:].copy()
            number += 1


class Stream(Iterator[Batch], AbstractContextManager["Stream", None]):
    """The endless batches of one rank, as :func:`stream` builds them; ``next`` waits for the loader.

    Close it, or use it as a context manager, to end its workers. They also end by themselves when this process dies.
    """

    def __init__(self, dataset: MapDataset, batches: EndlessBatches, *, workers: int, pin_memory: bool) -> None:
        self.workers = workers
        seed = int(np.random.SeedSequence([batches.seed, batches.rank]).generate_state(1)[0])
        loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]  # any map-style data set will do; torch asks for its own base class
            batch_sampler=batches,
            num_workers=workers,
            multiprocessing_context=_START if workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=getattr(dataset, "collate", None),
        )
        self._received: Callable[[Any], Batch] = getattr(dataset, "received", lambda batch: batch)
        self._random_state = torch.Generator().manual_seed(seed).get_state()
        # Without workers, nothing is read before the first batch is asked for.
        self._batches: Iterator[Batch] | None = iter(loader)

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        if self.workers:
            return self._received(self._from_workers(self._batches))
        # Crops and flips draw from this process's generator: it gets a state of its own for the time, as a worker has.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random_state)
            batch = next(self._batches)
            self._random_state = torch.get_rng_state()
        return self._received(batch)

    @staticmethod
    def _from_workers(batches: Iterator[Batch]) -> Batch:
        try:
            return next(batches)
        except (ConnectionError, EOFError):
            # A worker that dies closes its end before the kernel reports its death. Torch's handler of that signal raises what
            # names the worker and its end; it does so in here, which a bare "connection reset" would otherwise be faster than.
            time.sleep(_REPORT_OF_A_DEATH)
            raise

    def close(self) -> None:
        """End the workers and wait for them. A closed stream is at its end."""
        batches, self._batches = self._batches, None
        # Torch has no public way to say this. Dropping the iterator would end the workers too, but only once nothing
        # refers to it, and the traceback of an error that came out of a worker does.
        if batches is not None and self.workers:
            batches._shutdown_workers()  # type: ignore[attr-defined]

    def __exit__(self, *_: object) -> None:
        self.close()


def stream(
    dataset: MapDataset,
    batch_size: int,
    *,
    workers: int,
    pin_memory: bool = False,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    drop_last: bool = True,
    batches_per_step: int = 1,
) -> Stream:
    """Endless batches of ``dataset`` for one rank, across epochs: workers stay, and no epoch ends in a pause.

    Args:
        dataset: samples by position. Four optional attributes are honoured: ``counts_epochs``, if true, asks for positions that count
            on over the epochs; ``in_order``, if true, for positions that are not shuffled, a batch for each rank in turn; ``collate`` makes
            a batch of samples in the worker; ``received`` takes it over in this process.
        batch_size: samples in each batch of this rank; every batch is full.
        workers: loader processes; 0 loads in the calling one. See :func:`default_workers`.
        pin_memory: page-locked batches, for copies to an accelerator that overlap with its work.
        seed: of the order of samples and of their random crops; the same seed and workers give the same batches.
        rank: of this process, from 0 to ``world_size - 1``; seed and data set have to be the same on all ranks.
        world_size: number of ranks.
        drop_last: leave out what does not fill a batch at the end of an epoch; else it begins the next epoch's first batch.
        batches_per_step: of an optimizer step that accumulates; with ``drop_last`` no step reaches over the end of an epoch.

    Returns:
        An iterator of collated batches on the host; an image batch is ``[uint8 (B, 3, H, W), int64 (B,)]``, a batch of tokens
        int64 (B, T + 1).

    Raises:
        InputError: if an epoch has no full batch for every rank, or, without ``drop_last``, no sample.
    """
    try:
        batches = EndlessBatches(
            len(dataset),
            batch_size,
            seed=seed,
            rank=rank,
            world_size=world_size,
            drop_last=drop_last,
            batches_per_step=batches_per_step,
            counting=getattr(dataset, "counts_epochs", False),
            in_order=getattr(dataset, "in_order", False),
        )
    except InputError as error:
        facts: dict[str, Any] = getattr(dataset, "describe", dict)()
        where = facts.get("path") or facts.get("of")
        raise InputError(f"{where}: {error.args[0]}", error.hint) if where else error from None
    return Stream(dataset, batches, workers=workers, pin_memory=pin_memory)


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches on ``device``; on an accelerator with several streams the next one is copied while the current one is used.

    The copies overlap with the model's work only if ``batches`` are in pinned memory.
    """
    if device.type == "cpu":
        return batches
    side = side_stream(device)
    if side is not None:
        return _Prefetcher(batches, device, side)
    return (tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), batch) for batch in batches)


class _Prefetcher(Iterator[Batch]):
    """Copies one batch ahead on a stream beside the one on which the model runs."""

    def __init__(self, batches: Iterator[Batch], device: torch.device, side: SideStream) -> None:
        self._batches = batches
        self._device = device
        self._side = side
        self._ahead: Batch | None = None
        self._started = False

    def _copy_ahead(self) -> None:
        batch = next(self._batches, None)
        with self._side.launching():
            self._ahead = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._device, non_blocking=True), batch)

    def __next__(self) -> Batch:
        if not self._started:
            self._started = True
            self._copy_ahead()
        batch = self._ahead
        if batch is None:
            raise StopIteration
        self._side.join()
        tree_map_only(torch.Tensor, self._side.lend, batch)
        self._copy_ahead()
        return batch


class InOrder:
    """The samples of a data set gone through once, in order, in batches of which the last may be smaller, as validation does."""

    def __init__(self, samples: MapDataset, batch_size: int, device: torch.device) -> None:
        self._samples, self._batch_size, self._device = samples, batch_size, device

    def __iter__(self) -> Iterator[Batch]:
        return self.share(0, 1)

    def share(self, rank: int, world: int) -> Iterator[Batch]:
        """Every ``world``-th batch from ``rank`` on; the others are not read."""
        size, end = self._batch_size, len(self._samples)
        for start in range(rank * size, end, world * size):
            batch = default_collate([self._samples[position] for position in range(start, min(start + size, end))])
            yield next(to_device(iter([batch]), self._device))


class Synthetic(torch.utils.data.Dataset[Any]):
    """Samples that are a function of the seed and their position: there is nothing to learn but how they are drawn."""

    def __init__(self, of: str, draw: Callable[[np.random.Generator], Any], samples: int, seed: int, **facts: int) -> None:
        """``draw`` makes a sample; ``facts`` tell its shape."""
        self.samples, self.seed = samples, seed
        self._draw, self._facts = draw, {"kind": "synthetic", "of": of, "path": None, "items": samples, "bytes": 0, **facts, "seed": seed}

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, position: int) -> Any:
        return self._draw(np.random.default_rng([self.seed, position]))

    def describe(self) -> dict[str, Any]:
        """The provenance of a record: kind, samples and their shape; no bytes, because none are read."""
        return dict(self._facts)


def device_batches(dataset: MapDataset, batch_size: int, device: torch.device, *, count: int = 4, rank: int = 0) -> Iterator[Batch]:
    """``count`` different batches of ``dataset``, made once, kept on ``device`` and used in turn without end.

    Works for real data sets too. Each rank has batches of its own; a data set shorter than a batch is gone through again.
    """
    with stream(dataset, batch_size, workers=0, seed=rank, drop_last=False) as batches:
        return itertools.cycle(list(to_device(iter(list(itertools.islice(batches, count))), device)))
