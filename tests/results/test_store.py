"""Records exist whole or not at all; attempts never overwrite each other; what failed is a record too."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.base.files import write_file
from caraml.metrics.model import Metric
from caraml.results.finish import MEASURED, Failure, death, finish, note_failure, reason_of, skipped
from caraml.results.record import Record
from caraml.results.rows import read_table, write_table
from caraml.results.selector import select
from caraml.results.status import ProgressReader, ProgressWriter, standings
from caraml.results.store import RECORD, Listing, Store, read_record, write_record
from caraml.suite.model import Point
from tests.conftest import MakePoint
from tests.stores import remember_suite


def record_of(point: Point, attempt: int, rate: float = 1.0) -> Record:
    metrics = {"throughput": Metric(value=rate, unit="thing/s")}
    return Record(key=point.key, attempt=attempt, point=point, status="ok", started_at="2026-01-01T00:00:00+00:00", metrics=metrics)


def test_a_record_survives_the_round_trip(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path), make_point()
    folder = store.new_attempt(point)
    record = record_of(point, 1)
    write_record(folder, record)
    assert store.latest(point.key) == record
    assert store.folder(record) == folder
    assert Point.model_validate_json((folder / "point.json").read_text()) == point


def test_the_newest_whole_attempt_counts(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path), make_point()
    for rate in (1.0, 2.0):
        folder = store.new_attempt(point)
        write_record(folder, record_of(point, int(folder.name), rate))
    store.new_attempt(point)  # killed: no record
    found = store.latest(point.key)
    assert found is not None and found.attempt == 2 and found.value("throughput") == 2.0


def test_many_points_are_found_by_one_listing_and_a_new_one_by_another(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, points = Store(tmp_path), [make_point(seed=seed) for seed in range(12)]
    for point in points[:10]:
        write_record(store.new_attempt(point), record_of(point, 1))
    listings, names = [], Store.names
    monkeypatch.setattr(Store, "names", lambda self: listings.append(1) or names(self))
    assert all(len(store.newest(point.key, 5)) == 1 for point in points[:10])
    assert len(listings) == 1
    write_record(store.new_attempt(points[10]), record_of(points[10], 1))
    assert [record.key for record in store.newest(points[10].key, 5)] == [points[10].key]
    assert store.newest(points[11].key, 5) == [] and store.latest(points[11].key) is None


def test_attempts_are_numbers_not_words(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path), make_point()
    for _ in range(11):
        folder = store.new_attempt(point)
    write_record(folder, record_of(point, 11))
    assert folder.name == "11"
    latest = store.latest(point.key)
    assert latest is not None and latest.attempt == 11


def _attempts(root: Path, point: Point, count: int) -> None:
    for _ in range(count):
        Store(root).new_attempt(point)


def test_two_campaigns_never_share_an_attempt(tmp_path: Path, make_point: MakePoint) -> None:
    point, context = make_point(), multiprocessing.get_context("spawn")
    workers = [context.Process(target=_attempts, args=(tmp_path, point, 20)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    folders = list((tmp_path / "points" / f"fake-{point.key}").iterdir())
    assert len(folders) == 40 and sorted(int(folder.name) for folder in folders) == list(range(1, 41))


@pytest.mark.parametrize("fitting", [0, 1, 4096, 100_000])
def test_a_writer_killed_at_any_byte_leaves_whole_files_only(fitting: int, tmp_path: Path) -> None:
    """The kernel kills the writer at the first byte beyond the limit."""
    path = tmp_path / "x.json"
    write_file(path, "[1]")

    def write() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fitting, fitting))
        write_file(path, "[" + "1," * 200_000 + "1]")

    writer = multiprocessing.get_context("fork").Process(target=write)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGXFSZ
    assert path.read_text() == "[1]"


def test_tables_keep_types_and_gaps(tmp_path: Path) -> None:
    name = write_table(tmp_path, "steps", ("step", "phase", "loss"), iter([(0, "first", None), (1, "measure", 0.25)]))
    assert name == "steps.parquet"
    assert read_table(tmp_path / name) == {"step": [0, 1], "phase": ["first", "measure"], "loss": [None, 0.25]}


def test_tables_without_duckdb_are_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    name = write_table(tmp_path, "steps", ("step", "loss"), [(0, None), (1, 0.25)])
    assert name == "steps.csv" and (tmp_path / name).read_text().split() == ["step,loss", "0,", "1,0.25"]


def test_a_record_never_holds_nan() -> None:
    with pytest.raises(ValueError, match="finite"):
        Metric(value=float("nan"), unit="s")
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Metric(value=1.0, unit="s", bound=-1.0)


def test_bad_records_are_named(tmp_path: Path, make_point: MakePoint) -> None:
    path = tmp_path / RECORD
    for content in ("", "[]", "{}", "{", '{"schema_version": "x"}'):
        path.write_text(content)
        with pytest.raises(InputError, match=r"record\.json"):
            read_record(path)
    path.write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(InputError, match="schema version 99"):
        read_record(path)


def test_a_record_that_cannot_be_read_is_the_result_of_its_point(tmp_path: Path, make_point: MakePoint) -> None:
    store, point = Store(tmp_path), make_point(variant="of nights")
    for attempt in (1, 2):
        write_record(store.new_attempt(point), record_of(point, attempt))
    store.remember(Listing(name="s", points=[(point.key, point.label)]))
    path = store.points / point.folder_name / "2" / RECORD
    newer = {**json.loads(path.read_text()), "schema_version": 99, "more": 1}
    for content, words in (("{", "not a CARAML record"), (json.dumps(newer), "version 99"), (json.dumps({**newer, "point": 1}), "99")):
        path.write_text(content)
        for beside in (True, False):
            known = beside or '"variant"' in content
            (path.parent / "point.json").write_text(point.model_dump_json() if beside else "{")
            (found,) = store.records("s")
            assert found == store.latest(point.key) == store.newest(point.key, 1)[0] == select("s", tmp_path).records()[0]
            assert (found.key, found.attempt, found.status, found.unreadable) == (point.key, 2, "invalid", True)
            assert found.point.label == (point.label if known else f"fake key={point.key} b1")
            assert words in str(found.reason) and "; next step: " in str(found.reason)
            (one,) = standings(Store(tmp_path), store.current("s")[0])
            assert (one.state, one.label, one.reason) == ("invalid", point.label, found.reason)
    assert [record.status for record in store.newest(point.key, 9)] == ["invalid", "ok"], "the earlier one does not stand for it"
    path.unlink()
    path.mkdir()
    assert str(store.records("s")[0].reason).endswith(f": Is a directory; next step: caraml retry {point.key} measures its point again")


def test_the_reason_of_a_record_that_cannot_be_read_fits_it(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tables and loops have nothing that `retry` starts; fields that only a newer CARAML knows were no record at all."""
    store = Store(tmp_path)

    def reason(content: str, workload: str = "fake") -> str:
        point = make_point(workload=workload)
        folder = store.new_attempt(point)
        (folder / RECORD).write_text(content)
        os.utime(folder / RECORD, (1, 1 << 41))
        found = store.latest(point.key)
        assert found is not None and found.unreadable and found.started_at[:4] < "2400"
        return str(found.reason)

    def failing(number: int) -> Callable[..., bytes]:
        def read(*_: object) -> bytes:
            raise OSError(number, os.strerror(number))

        return read

    assert reason("{", "own_loop").endswith("; next step: run its loop again")
    assert reason("{", "imported_token").endswith("; next step: import its table again")
    monkeypatch.setattr("caraml.results.reading.__version__", "0.9.1")
    newer = reason(json.dumps({"environment": {"versions": {"caraml": "0.10.0"}}, "fields": "later"}))
    assert ": of CARAML 0.10.0, and this is 0.9.1: " in newer and "; next step: read it with the CARAML that wrote it" in newer
    assert reason(json.dumps({"energy": {"channels": [{"\ud800": 1}] * 2000}})).isprintable()
    monkeypatch.setattr("caraml.results.reading.read_json", failing(errno.ENXIO))
    assert ": No such device or address; next step: caraml retry" in reason("a socket")
    monkeypatch.setattr("caraml.results.reading.read_json", failing(errno.ESTALE))
    with pytest.raises(OSError, match="Stale"):
        reason("on a disk that is away")


def test_a_suite_lists_its_points_in_order(tmp_path: Path, make_point: MakePoint) -> None:
    store = Store(tmp_path)
    points = [make_point(global_batch=size) for size in (16, 4, 8)]
    for point in points[:2]:
        write_record(store.new_attempt(point), record_of(point, 1))
    remember_suite(store, "s", [point.key for point in points])
    assert [record.point.global_batch for record in store.records("s")] == [16, 4]
    with pytest.raises(InputError, match="caraml run other"):
        store.records("other")
    (tmp_path / "suites" / "t.json").symlink_to("gone.json")
    with pytest.raises(InputError, match=r"t\.json: not a list of a suite's points: .*\n  next step: run the suite again"):
        store.records("t")


def test_a_killed_worker_becomes_a_failed_record(tmp_path: Path, make_point: MakePoint) -> None:
    folder = Store(tmp_path).new_attempt(make_point())
    (folder / "worker.log").write_text("one\ntwo\nlast words\n")
    finish(folder, 137)
    record = read_record(folder / RECORD)
    assert record.status == "failed" and "SIGKILL" in (record.reason or "") and "last words" in (record.reason or "")


def test_an_attempt_whose_job_has_a_newer_caraml_is_finished_all_the_same(tmp_path: Path, make_point: MakePoint) -> None:
    """The runner, and every one after it, ended with what the worker had put away."""
    folder = Store(tmp_path).new_attempt(make_point())
    (folder / MEASURED).write_text('{"schema_version": 99}')
    finish(folder, 137)
    record, told = read_record(folder / RECORD), r"SIGKILL.*; cannot be read: points/.*/1/measured\.json: schema version 99"
    assert record.status == "failed" and re.search(told, record.reason or "")


def test_the_node_that_was_the_first_to_end_is_told(tmp_path: Path, make_point: MakePoint) -> None:
    """Not only that Slurm then ended those on the others."""
    folder = Store(tmp_path).new_attempt(make_point())
    lines = ["srun: error: sn2: task 1: Exited with exit code 1", "srun: launch/slurm: _step_signal: Terminating StepId=20.0"]
    lines += ["ModuleNotFoundError: No module named 'torch'", "", "slurmstepd-sn1: error: *** STEP 20.0 ON sn1 CANCELLED AT 2026 ***"]
    lines += ["srun: error: sn1: task 0: Terminated", "srun: Force Terminated StepId=20.0"]
    (folder / "worker.log").write_text("\n".join(lines))
    finish(folder, 143)
    expected = "task 1 on sn2: Exited with exit code 1, and Slurm ended the rest: ModuleNotFoundError: No module named 'torch'"
    assert read_record(folder / RECORD).reason == expected
    assert death(folder, 1).endswith(" | srun: Force Terminated StepId=20.0")
    (folder / "worker.log").write_text("\n".join(lines[-2:]))
    assert death(folder, 143).startswith("killed by SIGTERM: srun: error: sn1: task 0: Terminated")
    (folder / "worker.log").write_text("srun: error: sn1: task 0: Exited with exit code 143")
    assert death(folder, 143) == "killed by SIGTERM: srun: error: sn1: task 0: Exited with exit code 143", "of several ranks"


def test_the_first_failure_is_the_cause(tmp_path: Path, make_point: MakePoint) -> None:
    folder = Store(tmp_path).new_attempt(make_point())
    note_failure(folder, Failure(status="oom", reason="out of memory", rank=3, started_at="x"))
    note_failure(folder, Failure(status="failed", reason="a peer left", rank=0, started_at="x"))
    finish(folder, 1)
    record = read_record(folder / RECORD)
    assert (record.status, record.reason) == ("oom", "out of memory")


def test_the_first_failure_stays_where_another_node_does_not_see_it_yet(
    tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, whose clients know a folder as it was a while ago."""
    folder = Store(tmp_path).new_attempt(make_point())
    first, second = (Failure(status="failed", reason=reason, rank=0, started_at="x") for reason in ("the cause", "connection reset"))
    assert note_failure(folder, first)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        assert not note_failure(folder, second)
    finish(folder, 1)
    assert read_record(folder / RECORD).reason == "the cause"


def test_a_failure_is_kept_where_there_are_no_links(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Store(tmp_path).new_attempt(make_point())

    def link(*_: str) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert note_failure(folder, Failure(status="failed", reason="the cause", rank=0, started_at="x"))
    finish(folder, 1)
    assert read_record(folder / RECORD).reason == "the cause"


def test_finishing_never_replaces_a_result(tmp_path: Path, make_point: MakePoint) -> None:
    point = make_point()
    folder = Store(tmp_path).new_attempt(point)
    write_record(folder, record_of(point, 1))
    finish(folder, 1, "timeout", "late")
    assert read_record(folder / RECORD).status == "ok"


def test_skipped_points_are_records(tmp_path: Path, make_point: MakePoint) -> None:
    point = make_point()
    folder = Store(tmp_path).new_attempt(point)
    skipped(folder, point, "too many devices")
    assert read_record(folder / RECORD).reason == "too many devices"


def test_progress_is_read_line_by_line(tmp_path: Path) -> None:
    reader = ProgressReader(tmp_path)
    assert reader.latest() is None
    writer = ProgressWriter(tmp_path, time.monotonic())
    writer.write("build")
    writer.write("measure", steps=5, rate=2.0, item="token")
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('{"t": 3, "pha')  # a line that is being written
    line = reader.latest()
    assert line is not None and (line.phase, line.steps, line.rate, line.item) == ("measure", 5, 2.0, "token")
    assert reader.latest() is None
    with (tmp_path / "progress.jsonl").open("a") as file:
        file.write('se": "save"}\n')
    line = reader.latest()
    assert line is not None and line.phase == "save"


def test_no_phase_is_missed_between_two_looks(tmp_path: Path) -> None:
    reader, writer = ProgressReader(tmp_path), ProgressWriter(tmp_path, time.monotonic())
    for phase, steps in (("warm_up", 1), ("warm_up", 3), ("measure", 4), ("measure", 9), ("save", 9)):
        writer.write(phase, steps=steps)
    assert [(line.phase, line.steps) for line in reader.phases()] == [("warm_up", 3), ("measure", 9), ("save", 9)]
    assert reader.phases() == []


def test_writing_into_a_missing_folder_fails_loudly(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "no" / "x", "text")


def test_a_damaged_failure_stops_nobody_from_finishing_an_attempt(tmp_path: Path, make_point: MakePoint) -> None:
    folder = Store(tmp_path).new_attempt(make_point())
    (folder / "failure.json").write_text("{}")
    finish(folder, 1, "failed", "cancelled")
    assert read_record(folder / RECORD).reason == "cancelled"
    other = Store(tmp_path).new_attempt(make_point())
    (other / "point.json").write_text("{}")
    with pytest.raises(InputError, match=r"point\.json: not a point"):
        finish(other, 1)


def test_the_reason_of_a_failure_keeps_the_next_step() -> None:
    """The weights of another network are a long list, behind which it was cut off."""
    assert reason_of(InputError("found " + "x" * 500, "look here")).endswith("xxx; next step: look here")
    assert reason_of(InputError("found", "look " * 200)).startswith("found; next step: look look")
    assert reason_of(ValueError("y" * 500)) == ("ValueError: " + "y" * 500)[:400]
    for error in (InputError("x" * 500, "look here"), InputError("x" * 500, "z" * 500)):
        assert len(reason_of(error)) == 400
