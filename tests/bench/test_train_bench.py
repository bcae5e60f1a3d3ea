"""The side-by-side bench: turns are interleaved, ratios are of the same round, and a program is held after its steps."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "train"))
    import turns as module

    yield module
    for name in ("turns", "gate", "spec"):
        sys.modules.pop(name, None)


def test_a_ratio_is_taken_within_rounds(turns) -> None:  # type: ignore[no-untyped-def]
    """A machine that gets ten times slower in half of the rounds does not disturb it."""
    slow = [2.0, 20.0, 2.0, 20.0, 2.0, 20.0, 2.0]
    found = turns.ratio(slow, [value / 2 for value in slow])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.slow
def test_the_interval_covers_the_median(turns) -> None:  # type: ignore[no-untyped-def]
    rng, covered = random.Random(1), 0
    for _ in range(100):
        found = turns.median([rng.gauss(5.0, 1.0) for _ in range(15)], rng)
        covered += found.low <= 5.0 <= found.high
    assert 88 <= covered <= 100


def test_every_program_gets_its_turn_in_every_round(turns) -> None:  # type: ignore[no-untyped-def]
    order: list[str] = []

    def program(name: str) -> SimpleNamespace:
        def turn(steps: int):  # type: ignore[no-untyped-def]
            order.append(name)
            return turns.Turn(0.1, 0.1)

        return SimpleNamespace(name=name, turn=turn)

    found = turns.take_turns([program("a"), program("b"), program("c")], rounds=6, seconds=0.1)
    rounds = [order[start : start + 3] for start in range(3, len(order), 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds) and len(rounds) == 7
    assert len({tuple(each) for each in rounds}) > 1, "the order is drawn anew"
    assert [len(values) for values in found.values()] == [6, 6, 6]


@pytest.mark.processes
def test_the_step_of_caraml_is_held_and_counted(turns, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from gate import PIPES
    from spec import Spec

    params = {"preset": "4M", "width": 16, "layers": 1, "heads": 2, "sequence_length": 16, "vocab_size": 64, "data": "synthetic"}
    spec = Spec("caraml", "gpt", params, 2)
    command = [str(ROOT / "bench/train/contestants.py"), spec.to_json()]
    program = turns.Program("x", command, {"OMP_NUM_THREADS": "1"}, tmp_path / "log", PIPES)
    try:
        assert program.started() is None
        turn = program.turn(5)
        assert 0 < turn.cpu < 5 and turn.wall > 0 and turn.memory > 50 * 2**20
    finally:
        program.end()


@pytest.mark.processes
def test_a_program_that_does_not_train_says_why(turns, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from gate import PIPES

    program = turns.Program("x", ["-c", "raise SystemExit('no such model')"], {}, tmp_path / "log", PIPES)
    assert program.started() == "no such model"
    program.end()
