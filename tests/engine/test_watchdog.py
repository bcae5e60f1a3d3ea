"""The watchdog's verdict: who hangs, and nobody accused who does not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from caraml.engine.afterwards import validate
from caraml.engine.ranks import Ranks
from caraml.engine.step import RESIDENT_BATCHES, make_step
from caraml.engine.watchdog import HangVerdict, Sign, Watchdog
from caraml.metrics.model import Facts
from caraml.suite.model import Mode
from caraml.system.variables import PATIENCE as PATIENCE_VARIABLE
from caraml.workloads.base import Task
from tests.conftest import MakePoint

PATIENCE = 100.0


def run(verdict: HangVerdict, seconds: int, signs: list[Sign], moving: set[int], alive: set[int], *, start: int = 0) -> str | None:
    """Ranks in ``moving`` fetch a batch a second, those in ``alive`` look around; the first verdict within ``seconds``."""
    for now in range(start, start + seconds):
        for rank, sign in enumerate(signs):
            sign.looks += rank in alive
            sign.batches += rank in moving
        found = verdict.hears([Sign(sign.looks, sign.batches, sign.place) for sign in signs], float(now))
        if found is not None:
            return found
    return None


def signs(places: list[str], batches: int = 0) -> list[Sign]:
    return [Sign(0, batches, place) for place in places]


def test_ranks_that_move_are_left_alone() -> None:
    assert run(HangVerdict(3, PATIENCE), 1000, signs(["step"] * 3), {0, 1, 2}, {0, 1, 2}) is None


def test_a_stopped_process_is_named_after_a_share_of_the_patience() -> None:
    verdict, ranks = HangVerdict(3, PATIENCE), signs(["step"] * 3)
    assert run(verdict, 20, ranks, {0, 1, 2}, {0, 1, 2}) is None
    assert run(verdict, 39, ranks, set(), {0, 2}, start=20) is None
    assert run(verdict, 10, ranks, set(), {0, 2}, start=59) == "rank 1 left no sign of life for 40 s"


def test_the_rank_whose_input_hangs_is_named() -> None:
    verdict, ranks = HangVerdict(3, PATIENCE), signs(["step"] * 3)
    run(verdict, 20, ranks, {0, 1, 2}, {0, 1, 2})
    ranks[2].place = "data"
    ranks[0].batches += 1  # the others have fetched the next batch and wait in the step
    ranks[1].batches += 1
    assert run(verdict, 120, ranks, set(), {0, 1, 2}, start=20) == "no step for 100 s: rank 2 waiting for input"


def test_a_rank_that_sees_rank_0_only_misses_it_but_never_blames_it_for_a_step() -> None:
    """Rank 0 waits in its step for a rank whose input hangs, and whoever watches rank 0 alone may be the first to look."""
    verdict, seen = HangVerdict(1, PATIENCE, all_ranks=False), signs(["step"])
    assert run(verdict, 20, seen, {0}, {0}) is None
    assert run(verdict, 1000, seen, set(), {0}, start=20) is None
    assert run(verdict, 60, seen, set(), set(), start=1020) == "rank 0 left no sign of life for 40 s"


def test_a_hang_that_nobody_stands_out_in_says_so() -> None:
    verdict, ranks = HangVerdict(2, PATIENCE), signs(["step"] * 2)
    run(verdict, 20, ranks, {0, 1}, {0, 1})
    assert (run(verdict, 120, ranks, set(), {0, 1}, start=20) or "").endswith(
        "ranks 0, 1 in the step after micro-batch 20; no rank stands out"
    )


def test_compiling_may_take_as_long_as_it_likes() -> None:
    assert run(HangVerdict(2, PATIENCE), 10_000, signs(["step"] * 2, batches=1), set(), {0, 1}) is None
    assert run(HangVerdict(2, PATIENCE), 10_000, signs(["build"] * 2), set(), {0, 1}) is None


def test_long_steps_get_twenty_of_them() -> None:
    verdict, (rank,) = HangVerdict(1, PATIENCE), signs(["step"])
    for step in range(10):  # 30 s each
        rank.batches += 1
        assert run(verdict, 30, [rank], set(), {0}, start=30 * step) is None
    assert run(verdict, 550, [rank], set(), {0}, start=300) is None
    assert run(
        verdict, 100, [rank], set(), {0}, start=850
    ) == "no step for 600 s: rank 0 in the step after micro-batch 10; no rank stands out".replace("; no rank stands out", "")


def test_a_rank_that_has_not_joined_is_waited_for_twice_as_long_and_then_named() -> None:
    verdict = HangVerdict(2, PATIENCE, start=50.0)
    said = {now: verdict.hears([Sign(now, now, "step"), None], float(now)) for now in range(50, 300)}
    assert all(said[now] is None for now in range(50, 251))
    assert said[251] == "rank 1 left no sign of life for 200 s"


def test_a_sign_is_left_before_the_first_step() -> None:
    store = dist.HashStore()
    ranks = Ranks(rank=1, world=2)
    ranks.own_store = lambda: store  # type: ignore[method-assign]
    with Watchdog(ranks, lambda _: None):
        assert store.check(["caraml/alive/1"])


def test_signs_survive_the_store() -> None:
    sign = Sign(3, 5, "waiting for data")
    assert Sign.parse(sign.text()) == sign


def test_a_process_alone_that_moves_is_left_alone_for_longer_than_its_patience(
    monkeypatch: pytest.MonkeyPatch, make_point: MakePoint
) -> None:
    """In mode `compute`, whose loader gives four batches and no more."""
    monkeypatch.setenv(PATIENCE_VARIABLE, f"{PATIENCE}")
    ends, seconds = list[str](), itertools.count()
    watchdog = Watchdog(Ranks(), ends.append)
    step = make_step(counting_task(RESIDENT_BATCHES), make_point(mode="compute"), CPU, watch=watchdog.watch)

    def looks_again(_: float) -> bool:
        step()
        return clock.now > 10 * PATIENCE

    clock = SimpleNamespace(now=0.0, monotonic=lambda: setattr(clock, "now", float(next(seconds))) or clock.now)
    monkeypatch.setattr("caraml.engine.watchdog.time", clock)
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=looks_again, is_set=lambda: False))
    monkeypatch.setattr(watchdog, "_end", ends.append)
    watchdog._run()
    assert ends == [] and clock.now > 10 * PATIENCE
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=lambda _: clock.now > 20 * PATIENCE, is_set=lambda: False))
    watchdog._run()
    assert ends and ends[0].startswith(f"no step for {PATIENCE:g} s"), "one that stands still is not"


def test_ranks_that_were_stopped_together_are_not_taken_for_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Slurm, which suspends jobs: when all go on, the watchdog of rank 0 may be the first that does."""
    monkeypatch.setenv(PATIENCE_VARIABLE, f"{PATIENCE}")
    ranks, store, ends, looks = Ranks(world=2), dist.HashStore(), list[str](), itertools.count()
    ranks.own_store = lambda: store  # type: ignore[method-assign]
    watchdog, clock = Watchdog(ranks, ends.append), SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now

    def looks_again(pause: float) -> bool:
        look = next(looks)
        stopped = look == 20
        clock.now += 10 * PATIENCE if stopped else pause
        if not stopped:
            watchdog._sign.batches, watchdog._sign.place = look, "step"
            store.set("caraml/alive/1", Sign(look, look, "step").text())
        return look > 40

    monkeypatch.setattr("caraml.engine.watchdog.time", clock)
    monkeypatch.setattr(watchdog, "_over", SimpleNamespace(wait=looks_again, is_set=lambda: False))
    monkeypatch.setattr(watchdog, "_end", ends.append)
    watchdog._run()
    assert ends == []


CPU = torch.device("cpu")


def counting_task(batches: int) -> Task:
    model = torch.nn.Linear(1, 1)
    facts = Facts(item="thing", items_per_sample=1, parameters=2, flops_per_item=None, flops_formula="none")
    return Task(model, torch.optim.SGD(model.parameters()), iter([torch.ones(4, 1)] * batches), lambda net, x: net(x).sum(), facts)


@pytest.mark.parametrize(("mode", "batches"), [("train", 40), ("compute", RESIDENT_BATCHES), ("data", 40), ("inference", 40)])
def test_every_micro_batch_of_a_step_counts_as_movement(mode: Mode, batches: int, make_point: MakePoint) -> None:
    watchdog = Watchdog(Ranks(), lambda _: None)
    step = make_step(counting_task(batches), make_point(mode=mode, micro_batch=2), CPU, watch=watchdog.watch)
    counts = []
    for _ in range(20):
        step()
        counts.append(watchdog._sign.batches)
    assert counts == list(range(2, 42, 2))


def test_a_validation_that_outlasts_the_patience_is_left_alone() -> None:
    """1000 held-out batches of 2 s each on two ranks, one of which has a batch fewer and waits: the trained ones stay as many."""
    dogs = [Watchdog(Ranks(), lambda _: None) for _ in range(2)]
    for dog in dogs:
        list(itertools.islice(dog.watch(itertools.repeat(0)), 10))
    judged = [dogs[0].watch_validation(range(1000)), dogs[1].watch_validation(range(999))]
    verdict, now = HangVerdict(2, PATIENCE), 0.0
    for _ in range(1001):
        for batches in judged:
            next(batches, None)
        for dog in dogs:
            dog._sign.looks += 1
        now += 2.0
        assert verdict.hears([replace(dog._sign) for dog in dogs], now) is None
    assert now > 10 * PATIENCE and [dog._sign.batches for dog in dogs] == [10, 10]


def test_a_rank_that_hangs_in_validation_is_named() -> None:
    verdict, ranks = HangVerdict(2, PATIENCE), signs(["step"] * 2)
    run(verdict, 20, ranks, {0, 1}, {0, 1})
    ranks[1].place = "validation batch 7"
    assert run(verdict, 120, ranks, set(), {0, 1}, start=20) == "no step for 100 s: rank 1 in validation batch 7"


def test_held_out_batches_are_watched(make_point: MakePoint) -> None:
    watchdog, places = Watchdog(Ranks(), lambda _: None), []
    task = counting_task(0)
    task.validation = lambda: iter([torch.ones(2, 1)] * 3)

    def loss(net: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        places.append(watchdog._sign.place)
        return net(batch).sum()

    task.loss = loss
    validate(task, "fp32", CPU, Ranks(), watchdog.watch_validation)
    assert places == [f"validation batch {index}" for index in range(3)] and watchdog._sign.place == "step"


def test_a_process_ends_also_where_it_cannot_be_told_why(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """As on a full disk: the others would wait for it for ever."""

    def full(hanging: str) -> None:
        raise OSError(hanging)

    ended: list[int] = []
    monkeypatch.setattr("caraml.engine.watchdog.os._exit", ended.append)
    monkeypatch.setattr("caraml.engine.watchdog.faulthandler.dump_traceback", lambda file: None)
    with pytest.raises(OSError, match="rank 1"):
        Watchdog(Ranks(), full)._end("rank 1")
    assert ended == [1]
