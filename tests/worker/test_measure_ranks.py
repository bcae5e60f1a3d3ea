"""Loops of one's own on ranks that part: they end apart, fail, hang, or leave without each other."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import caraml
from caraml.base.errors import InputError
from caraml.engine.ranks import LooseRanks
from caraml.results.store import Store
from caraml.worker import measure as own_loop
from tests.worker.loops import QUICK, only

LATE, GONE = "Timed out waiting 60000ms for send operation to complete", "Connection closed by peer"


class Pair(LooseRanks):
    """Rank 0 of two, of which the other leaves its loop after ``ends`` steps, or is never heard of again then."""

    def __init__(self, ends: int, silent: str = "", alone: bool = False) -> None:
        super().__init__(0, 2, None)
        self.ends_at, self.silent, self.alone, kept = ends, silent, alone, dict[str, Any]()
        add = lambda key, more: kept.__setitem__(key, kept.get(key, 0) + more) or kept[key]  # noqa: E731
        self._store = SimpleNamespace(set=kept.__setitem__, get=kept.get, check=lambda keys: keys[0] in kept, add=add)

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def _exchange(self, mine: list[int], patience: float | None) -> list[list[int]]:
        if self.silent and self.steps >= self.ends_at and (mine[2] or self.alone):
            raise RuntimeError(self.silent)
        return [mine, [0, min(self.steps, self.ends_at), int(self.steps > self.ends_at or mine[2])]]


@pytest.mark.parametrize(
    ("ranks", "steps", "words"),
    [
        (Pair(12), 1000, r"rank 1 ended after 12 steps, rank 0 going on after \d+ steps"),
        (Pair(19), 20, "rank 0 ended after 20 steps, rank 1 ended after 19 steps|rank 1 ended after 19 steps, rank 0 ended after 20 steps"),
        (Pair(20, LATE), 20, "rank 0 ended after 20 steps, rank 1 not ended 60 s later"),
        (
            Pair(1, LATE, alone=True),
            20,
            r"rank 0 going on after 1 step, rank 1 not at its next step \d+ s later(.|\n)*longer CARAML_H",
        ),
        (Pair(20), 20, None),
    ],
    ids=["goes on", "one more", "hangs", "m.step on one alone", "together"],
)
def test_ranks_whose_loops_end_apart_are_told_where(
    ranks: Pair, steps: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some wait in one collective then, and some in another, or in one of the loop's own: for half an hour, as gloo does by default."""
    left: list[Any] = []
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    monkeypatch.setattr(ranks, "leave", lambda: left.append(ranks))
    policy = QUICK.model_copy(update={"min_seconds": 300.0, "max_seconds": 300.0})
    with (
        pytest.raises(InputError, match=words) if words else nullcontext(),
        caraml.measure("apart", out=tmp_path, policy=policy) as m,
    ):
        for _ in range(steps):
            time.sleep(0.001)
            m.step(1)
    record = only(tmp_path)
    if words is None:
        assert record.status == "ok" and left == [ranks], "its group has files and threads"
        return
    assert record.status == "failed" and re.search(words, record.reason or "") and record.files["steps"]


@pytest.mark.parametrize("comes", ["not", "late", "to a disk of its own"])
def test_a_rank_that_does_not_leave_its_loop_holds_no_other_for_long(
    comes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may hang in a collective of its own, for as long as that lasts. What was measured is known, and the program goes on as without."""
    ranks = Pair(1, LATE if comes == "not" else GONE)
    left: list[Any] = []
    if comes != "not":
        ranks._store.set(f"{ranks._key}/parted", "")
    if "disk" in comes:
        monkeypatch.setattr(ranks, "telling", lambda: nullcontext(False))
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    monkeypatch.setattr(ranks, "leave", lambda: left.append(ranks))
    monkeypatch.setattr(ranks, "_longest", lambda: 60.0)
    exchange, asked = ranks._exchange, []
    monkeypatch.setattr(ranks, "_exchange", lambda mine, patience: asked.append(patience) or exchange([*mine[:2], 0], patience))
    with caraml.measure("hangs", out=tmp_path, policy=QUICK) as m:
        ranks.ends_at = 10**6
        while m.step(1):
            time.sleep(0.005)
        monkeypatch.setattr(ranks, "_exchange", lambda *_: exchange([0, ranks.steps, 1], 60.0))
        ranks.ends_at = 0
    assert m.record == only(tmp_path) and m.record.status == "ok" and left == [ranks] and ranks._parted()
    assert "rank 0 leaves the block of 'hangs' without others" in capsys.readouterr().err
    assert m.record.phases[-1].name == "measure" and {*asked} == {60.0}


def test_the_first_of_several_ranks_that_fail_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others fail of that it is gone, which says nothing."""
    ranks = Pair(12, GONE, alone=True)
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    for _ in range(2):  # again, where it could not
        with ranks.telling() as first:
            assert first
    ranks = Pair(12, GONE, alone=True)
    ranks._store = SimpleNamespace(add=lambda *_: 2, wait=lambda *_: None)
    with pytest.raises(RuntimeError, match="Connection closed"), caraml.measure("second", out=tmp_path, policy=QUICK) as m:
        while m.step(1):
            time.sleep(0.001)
    assert not Store(tmp_path).records()


def test_a_rank_records_where_rank_0_and_the_store_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say then which rank is to: the one that makes the attempt."""

    def gone(*_: Any) -> None:
        raise RuntimeError("Broken pipe")

    loops: list[own_loop.OwnLoop] = []
    for rank in range(2):
        ranks = Pair(12, GONE, alone=True)
        ranks.rank = rank
        ranks._store = SimpleNamespace(add=gone, wait=gone, set=gone, check=gone)
        monkeypatch.setattr(own_loop, "ranks_in_use", lambda ranks=ranks: ranks)
        with pytest.raises(RuntimeError, match="Connection closed"), caraml.measure("survivor", out=tmp_path, policy=QUICK) as m:
            m._records._next_attempt = 1  # as if both were ranks of one loop
            loops.append(m)
            while m.step(1):
                time.sleep(0.001)
    assert only(tmp_path).attempt == 1 and "Connection closed" in (only(tmp_path).reason or "")
    assert loops[0].record == only(tmp_path) and loops[1].record is None


def test_the_group_of_a_loop_is_gone_after_it() -> None:
    """Each has files and threads: a few hundred loops in a process would be too many."""
    files = Path("/proc/self/fd")
    gc.collect()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = len([*files.iterdir()])
        ranks = LooseRanks(0, 1, dist.new_group(backend="gloo"))
        assert ranks.agree(7) == 7 and len([*files.iterdir()]) > before
        ranks.leave()
        assert len([*files.iterdir()]) <= before
    finally:
        dist.destroy_process_group()


def test_a_loop_may_destroy_its_groups_before_the_block_ends() -> None:
    """As programs do at the end of their training. Nor does it matter where they have torch make tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ranks = LooseRanks(0, 1, dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()
    with torch.device("meta"):
        ranks.ends(60.0)
    with ranks.telling() as first:
        assert first
    assert ranks.gather(7) == [7]
    ranks.leave()


APART = """
import sys, torch, torch.distributed as dist, caraml
dist.init_process_group("gloo")
with caraml.measure("apart", out=sys.argv[1], policy=caraml.Policy(min_seconds=60, max_seconds=60, idle_seconds=0)) as m:
    for _ in range(30 - 10 * dist.get_rank()):
        dist.all_reduce(torch.ones(1))
        m.step(1)
"""


def test_a_rank_that_waits_for_one_that_left_is_not_waited_for_long(tmp_path: Path) -> None:
    """As in DDP: the longer loop waits for the gradients of the shorter one, which waits for its end."""
    script, start = tmp_path / "apart.py", [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script.write_text(APART)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CARAML_HANG_SECONDS": "0.5"}
    done = subprocess.run([*start, str(script), str(tmp_path / "out")], env=environment, capture_output=True, timeout=300, check=False)
    reason = only(tmp_path / "out").reason or ""
    assert done.returncode and re.search("rank 1: .*rank 1 ended after 20 steps, rank 0 not ended .* s later", reason), reason


def test_no_other_process_says_into_which_folder_a_record_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any process of the machine can write into the store of torchrun: one named a folder, and its record was replaced."""
    ranks, theirs = Pair(10**6), tmp_path / "theirs" / "99"
    theirs.mkdir(parents=True)
    (theirs / "record.json").write_text("theirs")
    monkeypatch.setattr(own_loop, "ranks_in_use", lambda: ranks)
    monkeypatch.setattr(ranks, "leave", lambda: None)
    for said in (str(theirs), "99", "x"):
        ranks._store.set(f"{ranks._key}/kept", said.encode())
        with caraml.measure("mine", out=tmp_path / "mine", policy=QUICK) as m:
            while m.step(1):
                time.sleep(0.005)
        assert m.record is not None and m.record.status == "ok"
    assert (theirs / "record.json").read_text() == "theirs" and only(tmp_path / "mine").attempt == 3
