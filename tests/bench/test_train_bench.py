"""The side-by-side bench: turns are interleaved, ratios are of the same round, and a program is held after its steps."""

from __future__ import annotations

import argparse
import math
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
    for name in ("turns", "gate", "spec", "compare", "contestants"):
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


def test_a_program_that_ends_takes_no_turn_of_others_with_it(turns) -> None:  # type: ignore[no-untyped-def]
    """An hour of a machine is not lost with one peer: who ends is left out and named, and each round that has ended is kept."""
    taken: list[str] = []

    def program(name: str, last: int = 1000) -> SimpleNamespace:
        def turn(steps: int):  # type: ignore[no-untyped-def]
            taken.append(name)
            if taken.count(name) > last:
                raise RuntimeError(f"{name} ended with exit code 1")
            return turns.Turn(0.1, 0.1)

        return SimpleNamespace(name=name, turn=turn)

    failed: list[str] = []
    kept: list[dict[str, int]] = []
    rounds = lambda now: kept.append({name: len(own) for name, own in now.items()})  # noqa: E731
    found = turns.take_turns([program("a"), program("b", 3)], rounds=5, seconds=0.1, failed=failed, after_round=rounds)
    assert {name: len(own) for name, own in found.items()} == {"a": 5} and failed == ["b ended with exit code 1"]
    assert kept == [{"a": 1, "b": 1}, *({"a": count} for count in range(2, 6))]
    with pytest.raises(RuntimeError, match="b ended"):
        turns.take_turns([program("a"), program("b", 0)], rounds=5, seconds=0.1)


def test_no_round_begins_that_would_not_end_in_time(turns, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Nor is one that hangs at the end waited for longer than whoever asked waits for the table."""
    now, limits = [0.0], list[float]()

    def turn(steps: int, limit: float):  # type: ignore[no-untyped-def]
        now[0] += 2.0
        limits.append(limit)
        return turns.Turn(0.1, 0.1)

    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    programs = [SimpleNamespace(name=name, turn=turn) for name in "abc"]
    found = turns.take_turns(programs, rounds=9, seconds=2.0, until=25.0)  # the calibration and two rounds of 6 s, one of them not kept
    assert [len(own) for own in found.values()] == [2, 2, 2] and now[0] <= 25.0
    assert limits[0] == 25.0 + turns.LATE + 2.0 and limits[-1] == (25.0 - (now[0] - 2.0)) + turns.LATE + 2.0


def test_a_round_that_cannot_be_written_whole_leaves_those_before(turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Who waits for the table ends the comparison at any moment: it has the rounds from the file then."""
    import compare

    def ended(descriptor: int) -> None:
        raise KeyboardInterrupt

    kept, file = [dict[str, object]()], tmp_path / "kept.json"
    compare._keep(kept, 0.0, file, {"CARAML": [turns.Turn(0.1, 0.1)]}, [])
    before = file.read_text()
    monkeypatch.setattr("os.fsync", ended)
    with pytest.raises(KeyboardInterrupt):
        compare._keep(kept, 0.0, file, {"CARAML": [turns.Turn(0.1, 0.1)] * 2}, [])
    assert file.read_text() == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_contestants_run_alike_but_for_what_they_are(turns, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """As many threads for each, tokens from the host for each GPT; CARAML's other ways only where they are asked for and can run."""
    import compare

    def of(work: str, compiled: str = "compiled", rounds: int = 5, variants: bool = True, only: object = None):  # type: ignore[no-untyped-def]
        given = {"nanogpt": "n", "timm": None, "torchvision": None, "optimum": None, "only": only, "bf16": False, "knobs": False}
        given |= {"device": device, "precision": "bf16", "inference": False, "compile": compiled, "rounds": rounds, "variants": variants}
        return compare.contestants(compare.WORKS[work], argparse.Namespace(**given), 3, tmp_path)[0]

    gpt = of("gpt2-1024")
    ours = {name for name in gpt if name.startswith("CARAML")}
    assert ours == {
        *("CARAML compiled", "CARAML attention=flash", "CARAML attention=efficient", "CARAML half_residual", "CARAML eager"),
    }
    assert {spec.environment["OMP_NUM_THREADS"] for spec in gpt.values()} == {"3"} and "nanoGPT compiled" in gpt
    assert {gpt[name].params["data"] for name in ours} == {"synthetic"} and not gpt["CARAML eager"].compile
    assert {name for name in of("gpt2-1024", "eager") if name.startswith("CARAML")} == ours - {"CARAML compiled", "CARAML eager"} | {
        "CARAML"
    }
    small = of("gpt2-small-step")
    assert compare.point_of(small["CARAML reduce-overhead"]).compile == "reduce-overhead"
    point = compare.point_of(small["CARAML eager, step_graph"])
    assert (point.compile, point.knobs.step_graph) == ("off", "on")
    assert {name for name in of("gpt2-small-step", rounds=0) if name.startswith("CARAML")} == {"CARAML compiled", "CARAML reduce-overhead"}
    assert all(name.startswith("CARAML") for rounds in (0, 5) for name in of("gpt2-small-step", rounds=rounds, only=["CARAML"]))
    assert "CARAML half_residual" not in of("gpt2-1024", variants=False)


def test_programs_that_are_held_have_their_time_from_when_it_is_told(turns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """However long they stood still before; who is not ready is not waited for until no turn is left."""
    import compare

    now, waited, ended = [0.0], dict[str, float](), list[str]()

    class Held:
        def __init__(self, name: str, *_: object) -> None:
            self.name = name

        def started(self, seconds: float) -> str | None:
            waited[self.name] = seconds
            now[0] += seconds if self.name == "CARAML eager" else 0.0
            return "not ready in time" if self.name == "CARAML eager" else None

        def end(self) -> None:
            ended.append(self.name)

        dismiss = kill = lambda self: None

    def told() -> str:
        now[0] += 1000.0
        return "60\n"

    def take(programs: list[Held], rounds: int, seconds: float, *, until: float, failed: list[str], after_round: object):  # type: ignore[no-untyped-def]
        assert until == 1060.0 and until - now[0] == 30.0 and len(programs) == 4 and rounds == 5
        return {program.name: [turns.Turn(1.0, 1.0)] for program in programs}

    monkeypatch.setattr(compare, "Program", Held)
    monkeypatch.setattr(compare, "take_turns", take)
    monkeypatch.setattr(compare.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(compare.sys, "stdin", SimpleNamespace(readline=told))
    given = {"nanogpt": None, "optimum": None, "only": ["CARAML"], "bf16": False, "knobs": False, "device": "cuda", "precision": "bf16"}
    given |= {"inference": False, "compile": "compiled", "rounds": 5, "variants": True, "hold": True, "limit": math.inf, "seconds": 1.0}
    found, missing = compare.compare(compare.WORKS["gpt2-1024"], argparse.Namespace(**given), 1, tmp_path, lambda *_: None)
    assert len(found) == 4 and missing[-1] == "CARAML eager: not ready in time"
    assert waited["CARAML compiled"] == 30.0 and set(ended) == set(waited)
    monkeypatch.setattr(compare.sys, "stdin", SimpleNamespace(readline=lambda: ""))
    assert compare.compare(compare.WORKS["gpt2-1024"], argparse.Namespace(**given), 1, tmp_path, lambda *_: None)[0] == {}


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
def test_a_program_that_is_silent_is_given_up(turns, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from gate import PIPES

    program = turns.Program("x", ["-c", "import time; time.sleep(300)"], {}, tmp_path / "log", PIPES)
    try:
        assert program.started(0.01) == "not ready in time"
        with pytest.raises(RuntimeError, match="x had not done 5 steps after 0 s"):
            program.turn(5, 0.01)
    finally:
        program.end()


@pytest.mark.processes
def test_a_program_that_does_not_train_says_why(turns, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    from gate import PIPES

    program = turns.Program("x", ["-c", "raise SystemExit('no such model')"], {}, tmp_path / "log", PIPES)
    assert program.started() == "no such model"
    program.end()
    code = "print('Traceback'); raise MemoryError('of the GPU\\n\\nSet THIS for more')"
    program = turns.Program("x", ["-c", code], {}, tmp_path / "log", PIPES)
    assert program.started() == "MemoryError: of the GPU", "torch says more after an error"
    program.end()


def test_a_peer_trains_on_one_gpu_of_several(turns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Its library would take them all, with as many samples for each of them as CARAML has for its one."""
    trained: list[int] = []

    class Arguments:
        _n_gpu = 4

        def __init__(self, **given: object) -> None:
            assert given["per_device_train_batch_size"] == 16

        @property
        def n_gpu(self) -> int:
            return self._n_gpu

    class Trainer:
        def __init__(self, model: object, arguments: Arguments, train_dataset: object) -> None:
            self.arguments = arguments

        def train(self) -> None:
            trained.append(self.arguments.n_gpu)

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(Trainer=Trainer, TrainingArguments=Arguments))
    import contestants
    from spec import Spec

    monkeypatch.setattr(contestants, "_gpt2", lambda params: None)
    params = {"vocab_size": 8, "sequence_length": 4}
    contestants.trainer(Spec("trainer", "gpt", params, 16, scratch=str(tmp_path), device="cuda"))
    assert trained == [1]
