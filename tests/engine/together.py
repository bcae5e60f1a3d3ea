"""Ranks that are threads of this process, each with a device and a clock of its own: what they agree on moves their clocks together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from caraml.engine.ranks import Ranks
from caraml.verify import KnownDevice, VirtualClock

T = TypeVar("T")
LATENCY = 1e-4
"""What a barrier takes after the last rank has come [s]."""


class ThreadRanks(Ranks):
    """One of ``world`` ranks on virtual clocks; ``apart`` is by how much each clock is ahead of the one before [s]."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.world)
        self.meeting, self.asked = meeting, 0
        self.clock = VirtualClock(1000.0 + rank * meeting.apart)
        self.device = KnownDevice(self.clock, launch_cost=0.0005, queue=1.0)

    def agree(self, value: int) -> int:
        """Rank 0's value; nobody has it before rank 0 has sent it."""
        return int(self.meeting.exchange(self, int(value))[0])

    def agree_later(self, value: int) -> Callable[[], int]:
        """Ask, which takes no time; what waits until all have asked."""
        number, self.asked = self.asked, self.asked + 1
        self.meeting.ask(number, self, value)
        return lambda: self.meeting.answer(number, self)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value."""
        return self.meeting.exchange(self, value)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of everybody's numbers."""
        return torch.stack(self.meeting.exchange(self, values)).mean(0)

    def barrier(self) -> None:
        """Wait for the last."""
        self.meeting.exchange(self, None)


class Meeting:
    """Where the ranks meet."""

    def __init__(self, world: int, apart: float = 0.0) -> None:
        self.world, self.apart = world, apart
        self._slots: list[Any] = [None] * world
        self._times = [0.0] * world
        self._here, self._read = threading.Barrier(world), threading.Barrier(world)
        self._asked: dict[int, dict[int, tuple[int, float]]] = {}
        self._told = threading.Condition()

    def ask(self, number: int, ranks: ThreadRanks, value: int) -> None:
        """Leave a value and the time for the question of this number."""
        with self._told:
            self._asked.setdefault(number, {})[ranks.rank] = value, ranks.clock.time - ranks.rank * self.apart
            self._told.notify_all()

    def answer(self, number: int, ranks: ThreadRanks) -> int:
        """Rank 0's value, once all have left theirs; the clock moves to when the last did."""
        with self._told:
            assert self._told.wait_for(lambda: len(self._asked[number]) == self.world, 60)
            asked = self._asked[number]
        ranks.clock.wait_until(max(at for _, at in asked.values()) + LATENCY + ranks.rank * self.apart)
        return asked[0][0]

    def exchange(self, ranks: ThreadRanks, value: Any) -> list[Any]:
        """Leave a value, move every clock to the latest, take all values."""
        self._slots[ranks.rank], self._times[ranks.rank] = value, ranks.clock.time - ranks.rank * self.apart
        self._here.wait(300)
        values, latest = list(self._slots), max(self._times)
        self._read.wait(300)
        ranks.clock.wait_until(latest + LATENCY + ranks.rank * self.apart)
        return values

    def run(self, work: Callable[[ThreadRanks], T]) -> list[T]:
        """Do the work on every rank; the results in rank order."""

        def one(rank: int) -> T:
            try:
                return work(ThreadRanks(rank, self))
            except BaseException:
                self._here.abort()
                self._read.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            return list(pool.map(one, range(self.world)))
