"""What a rank has measured so far: put away while it measures, so that what kills it outright does not take it along."""

from __future__ import annotations

import errno
import threading
from array import array
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from caraml.engine.epochs import EpochLoop
from caraml.engine.loop import Hooks, MeasuringLoop
from caraml.engine.ranks import Ranks
from caraml.engine.steps import StepOutcome, StepTable
from caraml.power.model import Channel, Reading
from caraml.power.store import ReadingStore
from caraml.results.finish import Failure, finish, note_failure
from caraml.results.journal import block, tables, told
from caraml.results.rows import read_table
from caraml.results.store import JOURNAL, RECORD, Store, read_record
from caraml.suite.model import Policy
from caraml.verify import KnownDevice, VirtualClock
from caraml.worker import so_far
from caraml.worker.record import PhaseLog
from caraml.worker.so_far import SoFar
from tests.conftest import MakePoint

POLICY = Policy(min_seconds=4, max_seconds=4, idle_seconds=0, warm_up_max_seconds=1)
EPOCHS = Policy(epochs=3, idle_seconds=0)


def loop_of(policy: Policy, look: Any) -> tuple[MeasuringLoop, Any]:
    """A loop with steps of 50 to 80 ms on a device of known speed, that calls ``look`` with itself, and its step."""
    device, steps = KnownDevice(VirtualClock(1000.0), 0.001, queue=1.0), iter(range(10_000))
    hooks = Hooks(progress=lambda progress: look(loop), meanwhile=lambda: look(loop))

    def step() -> StepOutcome:
        device.launch(0.05 + 0.01 * (next(steps) % 4))
        return StepOutcome(None, 0.002)

    by_epochs = policy.epochs is not None
    loop = EpochLoop(device, Ranks(), policy, hooks, steps=40, validate=lambda: (1.0, 0.5)) if by_epochs else None
    loop = loop or MeasuringLoop(device, Ranks(), policy, hooks)
    return loop, step


@pytest.mark.parametrize("policy", [POLICY, EPOCHS], ids=["window", "epochs"])
def test_what_is_new_at_each_look_is_all_that_was_measured(policy: Policy) -> None:
    """Each step once, in the phase in which it ends up, where it began; also of the epoch that goes on."""
    found, looks = StepTable(), list[int]()

    def look(loop: MeasuringLoop) -> None:
        new = loop.so_far(len(found))
        looks.append(len(new))
        for row in new:
            found.append(row)

    loop, step = loop_of(policy, look)
    measured = list(loop.run(step).rows)
    assert [(row.phase, row.seconds, row.data_wait) for row in found] == [(row.phase, row.seconds, row.data_wait) for row in measured][
        : len(found)
    ]
    assert [row.start for row in found] == pytest.approx([row.start for row in measured[: len(found)]])
    assert len(looks) > 5 and len(found) > 0.8 * len(measured)


def away(folder: Path) -> SoFar:
    return SoFar(lambda: folder, 0, PhaseLog(1000.0, print), "then")


def test_tables_are_made_of_what_was_put_away(tmp_path: Path) -> None:
    store, here = ReadingStore(), away(tmp_path)
    store.register([Channel("gpu0", "fake", "power_instant", "device", "GPU", "gpu0", "gpu")])
    instruments: Any = SimpleNamespace(meter=SimpleNamespace(store=store))
    store.add([Reading("gpu0", 1001.0, 1001.5, 200.0), Reading("gpu0", 1002.0, 1002.5, None, "gone")])
    loop, step = loop_of(POLICY, lambda loop: None)
    with loop:
        for seen in (50, 30):
            for _ in range(seen):
                loop.step_ended(step())
            if seen == 50:
                here._write(loop.so_far(), instruments)
                store.add([Reading("gpu0", 1003.0, 1003.5, 300.0)])
        here.rest(loop, instruments)
    expected = list(loop.so_far())
    assert tables(tmp_path) == {"steps": "steps.parquet", "power": "power.parquet"}
    steps, power = (read_table(tmp_path / f"{name}.parquet") for name in ("steps", "power"))
    assert steps["step"] == [*range(len(expected))] and {*steps["rank"]} == {0} and {*steps["loss"]} == {None}
    assert steps["phase"] == [row.phase for row in expected] and steps["seconds"] == [row.seconds for row in expected]
    assert steps["start"] == [row.start - 1000.0 for row in expected]
    assert (power["t_before"], power["t_after"]) == ([1.0, 2.0, 3.0], [1.5, 2.0, 3.5])
    assert power["value"] == [200.0, None, 300.0] and {*power["channel"], *power["kind"]} == {"gpu0", "power_instant"}
    assert told(tmp_path)["started_at"] == "then"


def test_of_a_file_that_was_cut_off_what_is_whole_counts(tmp_path: Path) -> None:
    first, second = (block({"start": array("d", [at, at + 1])}, table="steps") for at in (0.0, 2.0))
    whole_length = len(first) + len(second)
    for length in (0, 1, len(first) - 1, len(first), len(first) + 1, whole_length - 9, whole_length - 1, whole_length):
        (tmp_path / JOURNAL).write_bytes((first + second)[:length])
        whole = (length >= len(first)) + (length == whole_length)
        starts = read_table(tmp_path / found["steps"])["start"] if (found := tables(tmp_path)) else []
        assert starts == [0.0, 1.0, 2.0, 3.0][: 2 * whole]
        (tmp_path / "steps.parquet").unlink(missing_ok=True)


def test_a_block_of_which_a_part_never_reached_the_disk_does_not_count(tmp_path: Path) -> None:
    """As where a node is lost: the size is known there, and zeros are read."""
    first, second = (block({"start": array("d", [at, at + 1])}, table="steps") for at in (0.0, 2.0))
    (tmp_path / JOURNAL).write_bytes(first + second[:-8] + bytes(8))
    assert read_table(tmp_path / tables(tmp_path)["steps"])["start"] == [0.0, 1.0]


def test_a_disk_that_does_not_answer_holds_up_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it did not take is written once it does, with what came meanwhile."""
    monkeypatch.setattr(so_far, "_EVERY", 0.0)
    monkeypatch.setattr(so_far, "_SHARE", 0.0)
    monkeypatch.setattr(so_far, "_WAIT", 60.0)
    begun, answers, tries = threading.Event(), threading.Event(), list[int]()

    def place() -> Path:
        tries.append(len(tries))
        begun.set()
        assert answers.wait(60)
        if len(tries) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return tmp_path

    here = SoFar(place, 0, PhaseLog(1000.0, print), "then")
    loop, step = loop_of(POLICY, lambda loop: here.look(loop, None))
    loop.run(step)
    assert begun.wait(60) and tries == [0], "one at a time, and the loop has ended"
    answers.set()
    here.rest(loop, None)
    assert len(tries) == 2 and tables(tmp_path) == {"steps": "steps.parquet"}
    assert read_table(tmp_path / "steps.parquet")["step"] == [*range(len(loop.so_far()))]


def test_it_is_seldom_that_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a day 800 times, and never is more than two minutes of it lost."""
    now, written = [0.0], list[float]()
    monkeypatch.setattr(so_far, "time", SimpleNamespace(monotonic=lambda: now[0]))
    thread = lambda **_: SimpleNamespace(start=lambda: written.append(now[0]))  # noqa: E731
    monkeypatch.setattr(so_far, "threading", SimpleNamespace(Lock=threading.Lock, Thread=thread))
    here, loop = away(tmp_path), SimpleNamespace(so_far=lambda first: StepTable())
    while now[0] < 86_400:
        here.look(loop, None)  # type: ignore[arg-type]
        if written and written[-1] == now[0]:
            here._idle.release()
        now[0] += 0.5
    gaps = [after - before for before, after in pairwise(written)]
    assert min(gaps) >= 2 and max(gaps) <= 120.5 and len(written) < 1000
    assert all(gap <= 2.5 or gap <= 0.02 * at + 0.5 for gap, at in zip(gaps, written, strict=False))


def test_a_disk_is_not_filled_by_very_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there stays right, and one that is asked to end puts away the rest."""
    monkeypatch.setattr(so_far, "_EVERY", 0.0)
    monkeypatch.setattr(so_far, "_SHARE", 0.0)
    monkeypatch.setattr(so_far, "_LARGEST", 100)
    thread = lambda target, args, **_: SimpleNamespace(start=lambda: target(*args))  # noqa: E731
    monkeypatch.setattr(so_far, "threading", SimpleNamespace(Lock=threading.Lock, Thread=thread))
    here, sizes = away(tmp_path), list[int]()

    def look(loop: MeasuringLoop) -> None:
        here.look(loop, None)
        sizes.append((tmp_path / JOURNAL).stat().st_size)

    loop, step = loop_of(POLICY, look)
    loop.run(step)
    assert len(sizes) > 5 and sizes[1] == sizes[-1]
    here.rest(loop, None)
    assert tables(tmp_path) == {"steps": "steps.parquet"}
    assert read_table(tmp_path / "steps.parquet")["step"] == [*range(len(loop.so_far()))]


def test_of_a_long_window_no_more_is_lost_than_of_a_short_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks of the loop are a twentieth of its steps apart: of three hours nine minutes."""
    clock, written = VirtualClock(1000.0), list[float]()
    monkeypatch.setattr(so_far, "time", SimpleNamespace(monotonic=clock.now))
    thread = lambda **_: SimpleNamespace(start=lambda: written.append(clock.now()))  # noqa: E731
    monkeypatch.setattr(so_far, "threading", SimpleNamespace(Lock=threading.Lock, Thread=thread))
    here, device = away(tmp_path), KnownDevice(clock, 0.001, queue=1.0)

    def meanwhile() -> None:
        before = len(written)
        here.look(loop, None)
        if len(written) > before:
            here._idle.release()

    def step() -> StepOutcome:
        device.launch(10.0)
        return StepOutcome(None, 0.0)

    long = Policy(min_seconds=10_800, max_seconds=10_800, idle_seconds=0, warm_up_max_seconds=100)
    loop = MeasuringLoop(device, Ranks(), long, Hooks(meanwhile=meanwhile))
    loop.run(step)
    assert clock.now() > 11_800 and max(after - before for before, after in pairwise([*written, clock.now()])) <= 130


@pytest.mark.parametrize("content", [None, b'{"rows": 0, "columns": {}, "checksum": 0}\n', b"[" * 9999, block(phases=[1], whole=False)])
def test_a_file_of_that_name_which_is_something_else_costs_no_record(tmp_path: Path, make_point: MakePoint, content: bytes | None) -> None:
    folder = Store(tmp_path).new_attempt(make_point())
    (folder / JOURNAL).mkdir() if content is None else (folder / JOURNAL).write_bytes(content)
    finish(folder, 137)
    assert "SIGKILL" in (read_record(folder / RECORD).reason or "")


def test_of_what_a_full_disk_cut_off_it_is_not_said_that_it_is_kept(tmp_path: Path, make_point: MakePoint) -> None:
    """The first block had said that all is there before the others were."""
    folder, clock = Store(tmp_path).new_attempt(make_point()), iter([1098.0, 1099.0, 1100.0])
    log = PhaseLog(1000.0, print, clock.__next__)
    here = SoFar(lambda: folder, 0, log, "then")
    loop, step = loop_of(POLICY, lambda loop: None)
    loop.run(step)
    with log.phase("measure"):
        here._write(StepTable(), None)
        here.rest(loop, None)
    content = (folder / JOURNAL).read_bytes()
    (folder / JOURNAL).write_bytes(content[: len(content) // 2])
    finish(folder, 137)
    assert (read_record(folder / RECORD).reason or "").endswith("what was measured until 98.0 s is kept")


def test_until_when_steps_are_kept_is_the_word_of_the_rank_that_kept_them(tmp_path: Path, make_point: MakePoint) -> None:
    """Another rank has waited for it for a while."""
    folder = Store(tmp_path).new_attempt(make_point())
    measure, waited = ({"name": "measure", "start": 1.0, "end": end} for end in (98.0, 220.0))
    (folder / JOURNAL).write_bytes(block(started_at="then", phases=[measure], whole=False))
    note_failure(folder, Failure.model_validate({"status": "failed", "reason": "silence", "rank": 1, "started_at": "", "phases": [waited]}))
    finish(folder, 1)
    assert read_record(folder / RECORD).reason == "silence; what was measured until 98.0 s is kept"


def test_tables_for_which_there_is_no_room_stay_as_they_were_put_away(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Store(tmp_path).new_attempt(make_point())
    away(folder).rest(loop_of(POLICY, None)[0], None)
    (folder / JOURNAL).write_bytes((folder / JOURNAL).read_bytes() + block({"start": array("d", [1.0])}, table="steps"))

    def full(*_: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder))

    monkeypatch.setattr("caraml.results.journal.write_table", full)
    finish(folder, 137)
    assert read_record(folder / RECORD).files == {} and (folder / JOURNAL).exists()
    assert "No space left on device" in capfd.readouterr().err
    finish(folder, 137)  # by the campaign, after the end of the script
    assert (folder / JOURNAL).exists()
