"""Notices a rank that no longer moves, names it, and ends the point: the others would wait for it as long as the batch system lets them.

Every rank leaves a sign of life in the group's key-value store: how often its watchdog has looked, how many micro-batches its steps have
taken, and whether it waits for one or goes through held-out ones. No collective is involved, so a rank that hangs in one is seen too.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from caraml.base.format import some
from caraml.engine.ranks import Ranks
from caraml.system.variables import PATIENCE, seconds_asked

T = TypeVar("T")

DEFAULT_PATIENCE = 300.0
SILENCE = 0.4
"""Share of the patience after which a process that leaves no sign of life at all is given up: it was stopped, or its node is gone."""
_LATE = 2.0
"""Multiple of the patience after which a rank that never left a sign is given up: ranks need not be ready to train at the same time."""
_LONG_STEPS = 20
"""A point whose steps are long gets at least this many of the longest gap between batches."""
VALIDATION = "validation batch"
"""Place of a rank that goes through held-out batches, before their number."""
_WARM = 3
"""Micro-batches after which steps are expected to follow each other: before, kernels are compiled, which may take long."""


@dataclass
class Sign:
    """What a rank says of itself."""

    looks: int = 0
    batches: int = 0
    place: str = "build"

    def text(self) -> str:
        """As it stands in the store."""
        return f"{self.looks} {self.batches} {self.place}"

    @classmethod
    def parse(cls, text: str) -> Sign:
        looks, batches, place = text.split(maxsplit=2)
        return cls(int(looks), int(batches), place)


class HangVerdict:
    """What the signs of all ranks say over time: policy without processes, so that it can be tested by itself."""

    def __init__(self, world: int, patience: float, start: float = 0.0, *, all_ranks: bool = True) -> None:
        """Who does not see ``all_ranks`` cannot tell which of them holds the others up, only whether one is silent."""
        self._patience, self._all_ranks = patience, all_ranks
        self._last: list[tuple[Sign | None, float, float]] = [(None, start, start)] * world
        self._longest = 0.0

    def hears(self, signs: list[Sign | None], now: float) -> str | None:
        """Take in the newest sign of every rank (``None``: not one yet); in words what hangs, or ``None``."""
        for rank, sign in enumerate(signs):
            before, seen, moved = self._last[rank]
            if sign is None:
                continue
            if before is None:
                self._last[rank] = (sign, now, now)
                continue
            if sign.looks != before.looks:
                seen = now
            if (sign.batches, sign.place) != (before.batches, before.place):
                if sign.batches > _WARM:
                    self._longest = max(self._longest, now - moved)
                moved = now
            self._last[rank] = (sign, seen, moved)
        return self._silent(now) or (self._stuck(now) if self._all_ranks else None)

    def _silent(self, now: float) -> str | None:
        for has_joined, limit in ((True, self._patience * SILENCE), (False, self._patience * _LATE)):
            quiet = [rank for rank, (sign, seen, _) in enumerate(self._last) if (sign is not None) == has_joined and now - seen > limit]
            if quiet:
                return f"{_named(quiet)} left no sign of life for {limit:.3g} s"
        return None

    def _stuck(self, now: float) -> str | None:
        known = [(rank, sign, moved) for rank, (sign, _, moved) in enumerate(self._last) if sign is not None]
        limit = max(self._patience, _LONG_STEPS * self._longest)
        if len(known) < len(self._last) or any(sign.batches <= _WARM or now - moved <= limit for _, sign, moved in known):
            return None
        fewest = min(sign.batches for _, sign, _ in known)
        behind = [(rank, sign.place) for rank, sign, _ in known if sign.batches == fewest]
        waiting = [rank for rank, place in behind if place == "data"]
        judging = {rank: place for rank, place in behind if place.startswith(VALIDATION)}
        late = waiting or list(judging) or [rank for rank, _ in behind]
        place = f"in {judging[late[0]]}" if judging and not waiting else f"in the step after micro-batch {fewest}"
        where = "waiting for input" if waiting else place
        everyone = "" if len(late) < len(known) or len(known) == 1 else "; no rank stands out"
        return f"no step for {limit:.3g} s: {_named(late)} {where}{everyone}"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some([*map(str, ranks)], 8)}"


class Watchdog:
    """Watches from a thread of its own; rank 0 watches all, every other rank rank 0."""

    def __init__(self, ranks: Ranks, give_up: Callable[[str], None]) -> None:
        """``give_up`` is told what hangs; after it has returned, the process ends."""
        self._patience = seconds_asked(PATIENCE, DEFAULT_PATIENCE)
        self._ranks, self._give_up, self._sign = ranks, give_up, Sign()
        self._watched = list(range(ranks.world)) if ranks.rank == 0 else [0]
        self._store: Any = ranks.own_store()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Leave a first sign and start to watch."""
        if self._patience > 0:
            self._signs()  # before any step: a rank that is stopped right after it has joined is missed, too
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def watch(self, batches: Iterator[T]) -> Iterator[T]:
        """The same batches, with a note of where this rank is."""
        while True:
            self._sign.place = "data"
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._sign.batches += 1
            self._sign.place = "step"
            yield batch

    def watch_validation(self, batches: Iterable[T]) -> Iterator[T]:
        """The same held-out batches. They are not counted with those trained on, of which every rank has the same number."""
        for index, batch in enumerate(batches):
            self._sign.place = f"{VALIDATION} {index}"
            yield batch
        self._sign.place = "step"

    def _run(self) -> None:
        verdict = HangVerdict(len(self._watched), self._patience, all_ranks=self._ranks.rank == 0)
        pause, last, passed = min(self._patience * SILENCE / 8, 10.0), time.monotonic(), 0.0
        while not self._over.wait(pause):
            before, last = last, time.monotonic()
            passed += min(last - before, 2 * pause)  # while this process is stopped, as Slurm suspends jobs, no other has to move
            self._sign.looks += 1
            hanging = verdict.hears(self._signs(), passed)
            if hanging is not None and not self._over.is_set():
                self._end(hanging)

    def _signs(self) -> list[Sign | None]:
        if self._store is None:
            return [replace(self._sign)]  # as it is now: the verdict compares it with what it was
        self._store.set(_key(self._ranks.rank), self._sign.text())
        keys = [_key(rank) for rank in self._watched]
        there = [key for key in keys if self._store.check([key])]
        found = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [Sign.parse(found[key].decode()) if key in found else None for key in keys]

    def _end(self, hanging: str) -> None:
        try:
            faulthandler.dump_traceback(file=sys.stderr)
            self._give_up(hanging)
        finally:  # also on a full disk
            os._exit(1)  # the main thread may hang in a library that no exception reaches


def _key(rank: int) -> str:
    return f"caraml/alive/{rank}"
