"""What input costs: the engine's account of it against the truth of a simulation, the time of the same work with batches that cost nothing.

Simulated are hosts that launch, devices with a queue and a stream for copies, loaders that work ahead until their own queue is full, and
gradients that are exchanged at the end of a step, for which every device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraml.engine.device import StepTimer
from caraml.engine.steps import Batches, RankSummary, StepRow, StepTable
from caraml.metrics.model import Facts, Measured, Peak
from caraml.suite.model import Placement
from caraml.verify import KnownDevice, VirtualClock
from caraml.worker.together import Known, together
from tests.conftest import MakePoint

WORK = 0.1
"""Of a batch [s]."""
LAUNCH = 2e-4
"""What it takes to launch it [s]."""
BATCHES, QUEUE = 400, 8
FACTS = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known")
Times = NDArray[np.float64]
Kernels = Sequence[tuple[float, float]]
"""What it takes to launch each, and to compute it [s]."""


class Rank:
    """A host, its device, and batches that take so long to make, and then to copy."""

    def __init__(self, made: Times, copying: float) -> None:
        self.clock = VirtualClock(1000.0)
        self.device = KnownDevice(self.clock, queue=np.inf)
        self.batches, self.timer = Batches(self._copied_ahead(made.tolist(), copying), self.device), StepTimer(self.device)
        self.host_waits = 0.0

    def _copied_ahead(self, made: list[float], copying: float) -> Iterator[int]:
        ready, taken, copied = self.clock.time, list[float](), 0.0
        for index, seconds in enumerate(made):
            ready = max(ready, taken[-QUEUE] if index >= QUEUE else 0.0) + seconds
            self.clock.wait_until(ready)
            taken.append(self.clock.time)
            before, copied = copied, max(copied, self.clock.time) + copying
            if index:  # the batch before this one is used, as soon as it has been copied
                self.device.free_at = max(self.device.free_at, before)
                yield index - 1

    def launch(self, kernels: Kernels) -> None:
        for self.device.launch_cost, seconds in kernels:
            self.device.launch(seconds)

    def end_step(self) -> None:
        outcome = self.batches.outcome(None)
        self.host_waits += outcome.data_wait
        self.timer.step_ended(outcome.data_wait, outcome.takes)
        self.clock.wait_until(self.clock.time + 2e-5)

    def summary(self) -> RankSummary:
        self.device.synchronize()
        seconds = self.timer.finished()
        rows = [StepRow("first", 0.0, 0.0, 0.0), *(StepRow("measure", 0.0, *both) for both in zip(seconds, self.timer.lost, strict=True))]
        return RankSummary(1000.0, 1000.0 + sum(seconds), StepTable(rows), [], 0.0, 0.0, 0, clock="one")


def simulated(
    made: Times,
    make_point: MakePoint,
    work: Callable[[int, int], Kernels] = lambda rank, batch: [(LAUNCH, WORK)],
    *,
    accumulation: int = 1,
    copying: float = 0.0,
    **point: Any,
) -> tuple[Measured, float]:
    """Ranks whose batches take ``made[rank, batch]`` to make; what their records say, and the largest share of a host's waits."""
    ranks = [Rank(one, copying) for one in made]
    for step in range(made.shape[1] // accumulation - 1):
        for batch in range(step * accumulation, (step + 1) * accumulation):
            for number, rank in enumerate(ranks):
                rank.batches.take()
                rank.launch(work(number, batch))
            if point.get("mode") != "inference" and (point.get("placement") or batch % accumulation == accumulation - 1):
                together_at = max(rank.device.free_at for rank in ranks)
                for rank in ranks:
                    rank.device.free_at = together_at
        for rank in ranks:
            rank.end_step()
        if not step % 5:  # a look: everybody waits for rank 0's host, but for those that go at their own pace
            now = ranks[0].clock.time + 1e-3
            for rank in ranks if point.get("mode") != "inference" else ():
                rank.clock.wait_until(now)
    size = {"devices": len(ranks), "global_batch": len(ranks) * accumulation, "micro_batch": 1, "device_class": "gpu"}
    peak = Peak(value=None, dtype="fp32", reason="none")
    meetings = accumulation if point.get("placement") else 1
    known = Known(Path(), make_point(**size, **point), FACTS, 0.0, "", peak, runtime=1.0, meetings=meetings)
    run = together([rank.summary() for rank in ranks], known)
    return run, max(rank.host_waits for rank in ranks) / run.window.seconds


def stalls(ranks: int, seconds: float, every: int) -> Times:
    """Quick loaders, each of which stalls for so long in every so-manieth batch, at other times than others do."""
    made = np.full((ranks, BATCHES), 0.02)
    for one, start in zip(made, np.random.default_rng(3).integers(every, size=ranks), strict=True):
        one[start::every] = seconds
    return made


def even(ranks: int, seconds: float) -> Times:
    return np.full((ranks, BATCHES), seconds)


def random(ranks: int, mean: float) -> Times:
    return np.random.default_rng(1).gamma(2, mean / 2, (ranks, BATCHES))


def pieces(launching: float) -> Callable[[int, int], Kernels]:
    return lambda rank, batch: [(launching / 20, WORK / 20)] * 20


CASES: dict[str, tuple[Times, dict[str, Any]]] = {
    "quick": (even(1, 0.02), {}),
    "2 % slower than the device": (even(1, 0.102), {}),
    "stalls": (stalls(1, 6.0, 100), {}),
    "eight at a time": (np.tile([0.82] + [0.0] * 7, (4, BATCHES // 8)), {}),
    "32 that are 1 % slower": (even(32, 0.101)[:, :100], {}),
    "32 that stall at other times": (stalls(32, 6.0, 100)[:, :100], {}),
    "8 at random": (random(8, 0.1), {}),
    "8 that launch slowly, at random": (random(8, 0.1), {"work": pieces(0.9 * WORK)}),
    "4 that wait for launches, and stall": (stalls(4, 3.0, 50), {"work": pieces(1.1 * WORK)}),
    "4 that wait for launches": (even(4, 0.02), {"work": pieces(1.5 * WORK)}),
    "small steps that wait for launches": (even(1, 2e-3), {"work": lambda rank, batch: [(2e-5, 1e-5)] * 50}),
    "copies that take longer than the work": (even(4, 0.02), {"copying": 0.13}),
    "4 micro-batches, at random": (random(8, 0.1), {"accumulation": 4}),
    "4 micro-batches, stalls": (stalls(8, 4.0, 50), {"accumulation": 4}),
    "each by itself": (stalls(4, 3.0, 50) * np.array([[1.0], [1.0], [2.0], [3.0]]), {"mode": "inference"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_input_costs_is_what_would_be_saved_without(case: str, make_point: MakePoint) -> None:
    made, values = CASES[case]
    run, host = simulated(made, make_point, **values)
    without, _ = simulated(np.zeros_like(made), make_point, **{**values, "copying": 0.0})
    truth = 1 - without.window.seconds / run.window.seconds
    assert run.data_wait is not None
    told = run.data_wait / run.window.seconds
    assert abs(told - truth) <= 0.006, f"{told:.2%} is told, {truth:.2%} was lost; the host waited for {host:.1%}"


def test_waiting_for_launches_is_not_told_so_an_accelerator_lost_at_least_what_is_told(make_point: MakePoint) -> None:
    """Numbers of the manual: steps of 100 ms begin with 50 ms of the host, which it would have made ahead."""
    made, work = even(1, 0.12), lambda rank, batch: [(0.05, 0.001), *[(1e-4, 0.099 / 20)] * 20]
    run, _ = simulated(made, make_point, work)
    without, _ = simulated(np.zeros_like(made), make_point, work)
    assert run.data_wait is not None
    told, truth = run.data_wait / run.window.seconds, 1 - without.window.seconds / run.window.seconds
    assert (round(told, 3), round(truth, 2)) == (0.005, 0.17)


def test_of_ranks_that_meet_after_every_batch_the_bounds_are_told_where_they_are_apart(make_point: MakePoint) -> None:
    """As in FSDP with several micro-batches: a step loses more than the rank that loses most, if others lose at other times."""
    made = random(4, 0.1)
    sharded: dict[str, Any] = {"accumulation": 4, "placement": Placement(fsdp=4)}
    run, _ = simulated(made, make_point, **sharded)
    without, _ = simulated(np.zeros_like(made), make_point, **sharded)
    assert run.data_wait is None
    least, most = (float(word) for word in run.no_wait.removesuffix(" % of the time").split("input cost ")[1].split(" to "))
    assert least < 100 * (1 - without.window.seconds / run.window.seconds) < most
    assert without.data_wait is not None and without.data_wait < 0.01 * without.window.seconds


def test_a_stage_of_a_pipeline_may_wait_for_what_it_would_have_waited_for_anyway(make_point: MakePoint) -> None:
    point = make_point(devices=2, global_batch=2, micro_batch=1, placement=Placement(pp=2))
    known = Known(Path(), point, FACTS, 0.0, "", Peak(value=None, dtype="fp32", reason="none"), runtime=1.0)
    for wait, told in ((0.2, None), (0.005, 0.05)):
        rows = [[StepRow("measure" if step else "first", 0.0, 1.0, of_rank) for step in range(11)] for of_rank in (0.0, wait)]
        run = together([RankSummary(0.0, 10.0, StepTable(one), [], 1.0, 1.0, 0, clock="one") for one in rows], known)
        assert run.data_wait == (told if told is None else pytest.approx(told))
        assert (
            told is not None or run.no_wait == "the stages of a pipeline begin a step one after the other: input cost 0 to 20 % of the time"
        )
