"""The window's edges on several ranks: what one rank reads there moves no rate, and how far apart the ranks were is known."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from caraml.engine import instruments
from caraml.engine.epochs import EpochLoop
from caraml.engine.instruments import NodeSummary, quiet_baseline
from caraml.engine.loop import Hooks, MeasuringLoop
from caraml.engine.ranks import Ranks
from caraml.engine.steps import RankSummary, StepOutcome, StepRow, StepTable
from caraml.metrics.model import Facts, Measured, Peak
from caraml.metrics.run import run_metrics
from caraml.metrics.window import derive
from caraml.power.model import WindowEnergy
from caraml.suite.model import OWN_LOOP, Policy
from caraml.system.model import Cpu, DeviceModel, System, with_sheet
from caraml.worker import record
from caraml.worker.together import Known, together
from tests.conftest import MakePoint
from tests.engine.together import LATENCY, Meeting, ThreadRanks

STEP = 0.02
POLICY = Policy(min_seconds=1, max_seconds=3, max_steps=100, min_steps=100, idle_seconds=0)
EPOCHS = Policy(epochs=3, count_epoch=2)


def measured(edge_seconds: float, make_point: MakePoint, policy: Policy = POLICY, apart: float = 0.0) -> Measured:
    """Two ranks that train together; reading the sensors takes rank 0 so long at either edge."""

    def work(ranks: ThreadRanks) -> RankSummary:
        def edge() -> None:
            if ranks.rank == 0:
                ranks.clock.wait_until(ranks.clock.time + edge_seconds)

        def step() -> StepOutcome:
            ranks.barrier()  # gradients are exchanged in every step
            ranks.device.launch(STEP)
            return StepOutcome(torch.tensor(1.0), 0.0)

        def validate() -> tuple[float, float]:
            ranks.device.launch(5 * STEP)
            ranks.barrier()
            return 1.0, 0.5

        hooks = Hooks(edge=edge)
        if policy.epochs is None:
            found = MeasuringLoop(ranks.device, ranks, policy, hooks).run(step)
        else:
            found = EpochLoop(ranks.device, ranks, policy, hooks, steps=50, validate=validate).run(step)
        if apart:
            found.clock = f"node {ranks.rank}"
        return RankSummary.from_data(found.to_data())

    point = make_point(devices=2, global_batch=8, measure=policy)
    facts = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known")
    probed = Peak(value=None, dtype="fp32", reason="not probed")
    known = Known(Path(), point, facts, origin=0.0, started_at="", runtime=60.0, phases=[], probed=probed)
    return together(Meeting(2, apart).run(work), known)


def rate(run: Measured) -> float:
    return run.window.items / run.window.seconds


def test_a_slow_edge_on_one_rank_moves_no_rate(make_point: MakePoint) -> None:
    quick, slow = measured(0.0, make_point), measured(0.2, make_point)
    assert quick.window.steps == slow.window.steps == 100
    assert rate(slow) == pytest.approx(rate(quick), rel=1e-3)
    assert list(slow.window_steps) == pytest.approx(list(quick.window_steps), abs=2 * LATENCY), "no step waited for the sensors either"


def test_a_slow_edge_moves_no_time_of_an_epoch(make_point: MakePoint) -> None:
    quick, slow = measured(0.0, make_point, EPOCHS), measured(0.2, make_point, EPOCHS)
    assert rate(slow) == pytest.approx(rate(quick), rel=1e-3)
    for before, after in zip(quick.epochs, slow.epochs, strict=True):
        assert (after.whole, after.training) == pytest.approx((before.whole, before.training), rel=1e-3)
    assert quick.epochs[1].whole - quick.epochs[1].training == pytest.approx(5 * STEP, abs=10 * LATENCY)


@pytest.mark.parametrize("edge_seconds", [0.0, 0.2])
def test_how_far_apart_the_ranks_were_is_known(edge_seconds: float, make_point: MakePoint) -> None:
    window = measured(edge_seconds, make_point).window
    assert window.opened_within is not None and window.opened_within <= LATENCY
    assert window.closed_within is not None and window.closed_within <= 2 * LATENCY


@pytest.mark.parametrize("edge_seconds", [0.0, 0.2])
def test_between_nodes_it_is_bounded_by_a_barrier_whatever_their_clocks_say(edge_seconds: float, make_point: MakePoint) -> None:
    window = measured(edge_seconds, make_point, apart=3600.0).window
    assert window.opened_within == pytest.approx(LATENCY, rel=1e-3)
    assert window.closed_within is not None and LATENCY * 0.99 <= window.closed_within <= 3 * LATENCY


def test_a_rank_that_ends_late_is_seen_where_the_window_closes(make_point: MakePoint) -> None:
    """Ranks that do not meet in a step, as in inference: the slower one ends later, and that is the window's length."""

    def work(ranks: ThreadRanks) -> RankSummary:
        def step() -> StepOutcome:
            ranks.device.launch(STEP * (1 + 0.1 * ranks.rank))
            return StepOutcome(None, 0.0)

        return MeasuringLoop(ranks.device, ranks, POLICY, Hooks()).run(step)

    quick, slow = Meeting(2).run(work)
    late = slow.end - quick.end
    assert late > 0.01
    waited = quick.waits[1]
    assert waited is not None and waited == pytest.approx(late + LATENCY)


OPEN = Policy(min_seconds=20, max_seconds=20, warm_up_max_seconds=1, idle_seconds=0)


def free_ranks(work_of: Callable[[int, int], float], *, free: bool = True, warned: float = 1e9) -> list[RankSummary]:
    """Two ranks measured that do not meet; ``work_of`` says how long a step takes on a rank [STEP]. Both are ``warned`` [s]."""

    def work(ranks: ThreadRanks) -> RankSummary:
        number = itertools.count()

        def step() -> StepOutcome:
            ranks.clock.wait_until(ranks.clock.now() + STEP * work_of(ranks.rank, next(number)))
            return StepOutcome(None, 0.0)

        hooks = Hooks(hurry=lambda: ranks.clock.now() > warned)
        return MeasuringLoop(ranks.device, ranks, OPEN, hooks, paces=2 if free else 1).run(step)

    found = Meeting(2).run(work)
    assert len(found[0].window_rows) == len(found[1].window_rows) > 100
    return found


def test_looks_do_not_slow_ranks_that_do_not_meet() -> None:
    """Two ranks whose steps are longer and shorter in turn: waiting for each other at looks would add up what each is late."""
    took = {}
    for free in (True, False):
        found = free_ranks(lambda rank, step: 1.5 if step // 10 % 2 == rank else 0.5, free=free)
        took[free] = max(rank.end - rank.begin for rank in found) / len(found[0].window_rows)
    assert took[True] == pytest.approx(STEP, rel=0.02) and took[False] > 1.05 * STEP


def test_free_ranks_are_never_far_apart() -> None:
    """The one that is quicker waits for the other, so that both measure the same steps; and the slower one's time counts."""
    quick, slow = free_ranks(lambda rank, step: 1 + rank)
    assert slow.end - slow.begin == pytest.approx(2 * STEP * len(slow.window_rows), rel=0.01)
    assert quick.end - quick.begin > 0.9 * (slow.end - slow.begin)


def test_free_ranks_that_are_warned_end_at_the_same_step() -> None:
    """By rank 0's decision, which the others have a look later."""
    found = free_ranks(lambda rank, step: 1 + rank, warned=1010.0)
    assert [rank.flags for rank in found] == [["truncated"]] * 2 and all(10 < rank.end - 1000 < 14 for rank in found)


def test_no_rank_knows_a_decision_before_all_have_asked_for_it() -> None:
    """Not only those to which it tells it: of eight ranks that go at their own pace, the slowest of which took 14 s, half ended after 6."""
    store, world = distributed.HashStore(), 4

    def one_of(rank: int) -> Ranks:
        return Ranks(rank, world, distributed.ProcessGroupGloo(store, rank, world, timedelta(seconds=60)))

    with ThreadPoolExecutor(world) as pool:
        ranks = list(pool.map(one_of, range(world)))
        early = [pool.submit(one.agree_later(7 - one.rank)) for one in ranks[:-1]]
        assert not wait(early, timeout=0.2).done, "the last has not asked yet"
        assert [ranks[-1].agree_later(0)(), *(found.result() for found in early)] == [7] * world


def test_nothing_begins_before_every_idle_power_is_measured() -> None:
    """A rank without sensors must not start its probe beside the rank that measures the machine at rest."""
    begun, seen = threading.Event(), []

    class Slow:
        def measure_idle(self, seconds: float) -> None:
            seen.append(begun.wait(seconds))

    def work(ranks: Ranks) -> None:
        quiet_baseline(ranks, Slow() if ranks.rank == 0 else None, 0.3)  # type: ignore[arg-type]
        begun.set()

    Meeting(2).run(work)
    assert seen == [False]


def test_the_idle_baseline_waits_until_loaders_have_filled_their_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a window whose loop goes on, workers still read ahead: two cores for two seconds here."""
    used, began = [0.0, 2.0, 2.0, 4.0, 4.0, 4.01], []

    class Sensors:
        channels = ("one",)

        def __init__(self, devices: object) -> None: ...
        def start(self) -> None: ...
        def mark(self) -> float:
            began.append(len(used))
            return float(len(began))

        def energy(self, name: str, begin: float, end: float) -> WindowEnergy:
            return WindowEnergy(name, begin, end)

    monkeypatch.setattr(instruments, "Meter", Sensors)
    monkeypatch.setattr(instruments, "cpu_time", lambda family: instruments.CpuTime(100.0, used.pop(0)))
    monkeypatch.setattr(instruments, "_SETTLING", 1.0)
    monkeypatch.setattr(instruments, "time", SimpleNamespace(sleep=lambda seconds: None))
    read = instruments.Instruments([])
    read.measure_idle(5.0)
    assert began == [6, 6], "before the work nothing is waited for"
    read.measure_idle(5.0)
    assert began[2:] == [0, 0]


def test_what_others_took_is_a_share_of_the_time_between_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is longer than the window of a loop of somebody's own that validates before it ends: ten times, here."""
    now = [1000.0]
    everyone = lambda family: instruments.CpuTime(0.5 * now[0] * (os.cpu_count() or 1), 0.0)  # noqa: E731
    monkeypatch.setattr(instruments, "cpu_time", everyone)
    monkeypatch.setattr(instruments, "throttled", lambda gpus: {"GPU-1": {"power": 0.1 * now[0]}})
    monkeypatch.setattr(instruments, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(instruments, "environment", dict)
    read = instruments.Instruments([])
    read._gpus = ["one"]
    read.edge()
    now[0] += 100.0
    read.edge()
    read.meter.stop()
    found = read.summary(1000.0, 1010.0)
    assert found.other_cpu_share == pytest.approx(0.5) and found.throttled == {"GPU-1": {"power": pytest.approx(0.1)}}


@pytest.mark.parametrize(
    "values", [{"mode": "data"}, {"mode": "inference"}, {"workload": OWN_LOOP}], ids=lambda values: next(iter(values.values()))
)
def test_where_ranks_do_not_meet_a_step_takes_no_longer_than_on_the_slowest(make_point: MakePoint, values: dict[str, str]) -> None:
    """Loaders that bring four batches at a time, each rank's at another step: the slowest of every step would take 4 s instead of 1."""
    point = make_point(devices=4, global_batch=4, micro_batch=1, **values)
    facts = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known", samples_per_epoch=80)
    ranks = []
    for rank in range(4):
        rows, at = StepTable(), 0.0
        for step in range(81):
            seconds = (3.7 if step % 4 == rank else 0.1) * (1 + 0.001 * rank)
            rows.append(StepRow("first" if not step else "warm_up" if step < 21 else "measure", at, seconds, seconds))
            at += seconds
        ranks.append(RankSummary(at - sum(rows.of_phase("measure").seconds), at, rows, [], 0.1, 0.1, 0, clock="one"))
    unknown = Peak(value=None, dtype="fp32", reason="not probed")
    run = together(ranks, Known(Path(), point, facts, origin=0.0, started_at="", runtime=99.0, probed=unknown))
    metrics = derive(run, None, None, unknown, unknown) | run_metrics(run, None)
    assert sum(run.window_steps) == pytest.approx(run.window.seconds)
    assert metrics["step_time_median"].value == pytest.approx(0.1, rel=0.01)
    assert metrics["epoch_time_mean"].value == pytest.approx(20, rel=0.01)


def test_who_waits_for_a_rank_that_works_alone_waits_as_long_as_the_point_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node may have to stage its data when the others have theirs, and rank 0 alone validates after a window."""
    asked: list[float] = []
    monkeypatch.setattr(distributed, "init_process_group", lambda *_, timeout, **__: asked.append(timeout.total_seconds()))
    monkeypatch.setattr(distributed, "new_group", lambda *_, timeout, **__: asked.append(timeout.total_seconds()))
    monkeypatch.setattr("caraml.engine.ranks.store_of", lambda *_: None)
    monkeypatch.setattr(Ranks, "know_each_other", lambda _: None)
    monkeypatch.setattr(distributed.distributed_c10d, "_unpickler", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for longest in (7200.0, 1.0):
        Ranks.from_environment(torch.device("cpu"), longest)
    assert asked == [7200.0, 7200.0, 600.0, 600.0]


def test_a_node_s_peak_is_that_of_the_devices_that_a_point_uses_of_it(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of an A100 and a smaller card beside it, on each of which the point uses the A100 alone."""
    cards = tuple(DeviceModel(model=model, kind="cuda") for model in ("NVIDIA A100-SXM4-40GB", "NVIDIA L4"))
    system = System(name="x", title="", devices_per_node=2, devices=cards, cpu=Cpu(model="c"))
    monkeypatch.setattr(record, "detect", lambda: with_sheet(system))
    monkeypatch.setattr(record, "environment", dict)  # asks git
    rows = StepTable([StepRow("first" if not step else "measure", float(step), 1.0, 0.0) for step in range(9)])
    ranks = [RankSummary(1.0, 9.0, rows, [1.0] * 9, 1.0, 1.0, 0, clock=f"node {rank}") for rank in range(2)]
    facts = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=1e12, flops_formula="known")
    point = make_point(nodes=2, devices=1, global_batch=2, micro_batch=1, precision="bf16", device_class="gpu")
    known = Known(tmp_path / "1", point, facts, 0.0, "", Peak(value=None, dtype="bf16", reason="not probed"), runtime=99.0)
    found = record.make_record(ranks, known, table=False)
    assert found.peak_datasheet is not None and found.peak_datasheet.value == 312e12
    assert found.value("mfu") == pytest.approx(1e12 / 312e12)
    for elsewhere, peak in (("NVIDIA A100-SXM4-40GB x4", 312e12), ("NVIDIA H200 x4", None)):
        for rank, device in zip(ranks, ("NVIDIA A100-SXM4-40GB x1 + NVIDIA L4 x1", elsewhere), strict=True):
            rank.node = replace(NodeSummary.unread("no sensor"), device=device)
        mixed = record.make_record(ranks, known, table=False)
        assert mixed.peak_datasheet is not None and mixed.peak_datasheet.value == peak and "mixed_nodes" in mixed.flags
    assert mixed.metrics["mfu"].reason == "the nodes differ: NVIDIA A100-SXM4-40GB here, NVIDIA H200 x4 elsewhere"


def test_a_run_ends_on_every_node_when_it_has_ended_on_all() -> None:
    """Rank 0 validates and saves for 50 s while the other node waits: as much of its energy is the run's, and not its mean power on."""

    def work(ranks: ThreadRanks) -> dict[str, tuple[float, float]]:
        asked: dict[str, tuple[float, float]] = {}

        def summary(begin: float, end: float, spans: dict[str, tuple[float, float]], busy: bool) -> NodeSummary:
            asked.update(spans)
            return NodeSummary.unread("none")

        sensors: Any = SimpleNamespace(summary=summary, meter=SimpleNamespace(stop=lambda: None))
        mine, began = RankSummary(1.0, 9.0, StepTable(), [], 1.0, 1.0, 0), ranks.clock.time
        record.gathered(ranks, mine, sensors, (began, began + (10.0 if ranks.rank else 60.0)), (began, began + 2.0 - ranks.rank))
        return {name: (begin - began, end - began) for name, (begin, end) in asked.items()}

    assert Meeting(2, apart=3600.0).run(work) == [{"run": (0.0, 60.0), "aside": (0.0, 2.0)}] * 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [({}, 80.0), ({"device_class": "gpu"}, 80.0), ({"mode": "data"}, 20.0)],
    ids=["in step", "accelerators", "each by itself"],
)
def test_ranks_wait_for_each_other_s_input(make_point: MakePoint, values: dict[str, Any], expected: float) -> None:
    """Each of four ranks waits for 1 s in every fourth step, all at other steps: in training all wait in each."""
    facts = Facts(item="thing", items_per_sample=1, parameters=1, flops_per_item=None, flops_formula="known")
    ranks = []
    for rank in range(4):
        waits = [0.25, *(float(step % 4 == rank) for step in range(4, 84))]
        rows = StepTable(StepRow("measure" if step else "first", 2.0 * step, 2.0, wait) for step, wait in enumerate(waits))
        ranks.append(RankSummary(2.0, 162.0, rows, [], 2.0, 2.0, 0, clock="one"))
    point = make_point(devices=4, global_batch=4, micro_batch=1, **values)
    known = Known(Path(), point, facts, 0.0, "", Peak(value=None, dtype="fp32", reason="not probed"), runtime=162.0)
    run = together(ranks, known)
    assert (run.data_wait, run.whole_data_wait) == (expected, expected + 0.25)
