"""The index lists what the files say, whatever it remembers."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from caraml.metrics.model import Metric
from caraml.results.record import Record, Status
from caraml.results.rows import COLUMNS, FILE
from caraml.results.store import Store, write_record
from caraml.suite.model import Point
from tests.conftest import MakePoint


def measured(store: Store, point: Point, value: float, status: Status = "ok") -> Path:
    folder = store.new_attempt(point)
    metrics = {"throughput": Metric(value=value, unit="x"), "mine": Metric(value=2 * value, unit="y")}
    write_record(folder, Record(key=point.key, attempt=int(folder.name), point=point, status=status, started_at="x", metrics=metrics))
    return folder


def age(root: Path) -> None:
    """Make every folder old enough for the index to trust its time."""
    past = time.time() - 100
    for path in (root / "points").rglob("*"):
        os.utime(path, (past, past))


def test_rows_are_those_of_the_records_and_are_kept(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    points = [make_point(global_batch=size) for size in (4, 8)]
    for point in points:
        measured(store, point, point.global_batch)
    age(tmp_path)
    first = Store(tmp_path).rows()
    assert sorted((row["global_batch"], row["throughput"], row["own_metrics"]) for row in first) == [
        (4, 4.0, '{"mine":8.0}'),
        (8, 8.0, '{"mine":16.0}'),
    ]
    assert set(first[0]) <= set(COLUMNS)
    fresh = Store(tmp_path)
    monkeypatch.setattr(fresh.index, "_read", lambda path: pytest.fail("a record was read though nothing changed"))
    assert fresh.rows() == first


@pytest.mark.parametrize("old", [True, False])
def test_a_new_attempt_a_change_and_a_removal_are_seen(tmp_path: Path, make_point: MakePoint, old: bool) -> None:
    store, point = Store(tmp_path), make_point()
    folder = measured(store, point, 1.0)
    if old:
        age(tmp_path)
    assert [row["throughput"] for row in Store(tmp_path).rows()] == [1.0]
    measured(store, point, 2.0)
    assert [row["throughput"] for row in Store(tmp_path).rows()] == [2.0]
    store.new_attempt(point)  # under way: the point's result is still the second
    assert [row["attempt"] for row in Store(tmp_path).rows()] == [2]
    write_record(folder.parent / "3", Record(key=point.key, attempt=3, point=point, status="oom", started_at="x"))
    assert [row["status"] for row in Store(tmp_path).rows()] == ["oom"]
    for path in sorted(folder.parent.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.parent.rmdir()
    assert Store(tmp_path).rows() == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"caraml_index":0}\n', b'{"caraml_index":1}\n[1]\n', b"\xff\n\xfe"])
def test_a_damaged_index_is_made_anew(tmp_path: Path, make_point: MakePoint, content: bytes) -> None:
    measured(Store(tmp_path), make_point(), 1.0)
    Store(tmp_path).rows()
    (tmp_path / FILE).write_bytes(content)
    assert [row["throughput"] for row in Store(tmp_path).rows()] == [1.0]


@pytest.mark.parametrize("row", [None, [], "x", {}, {"label": "x"}, "lists"], ids=str)
def test_rows_that_are_none_are_read_from_the_records(row: object, tmp_path: Path, make_point: MakePoint) -> None:
    measured(Store(tmp_path), make_point(), 1.0)
    age(tmp_path)
    expected = Store(tmp_path).rows()
    head, first, *rest = (tmp_path / FILE).read_bytes().splitlines()
    name, attempt, stamp, _, known = json.loads(first)
    false = {key: [] for key in known} if row == "lists" else row
    (tmp_path / FILE).write_bytes(b"\n".join([head, json.dumps([name, attempt, stamp, True, false]).encode(), *rest]))
    assert Store(tmp_path).rows() == expected


def test_a_record_that_cannot_be_read_is_invalid_until_it_can(tmp_path: Path, make_point: MakePoint) -> None:
    """It stopped every verb. No row of it is kept: a CARAML that is installed later may read it, and its file stays as it is."""
    folder = measured(Store(tmp_path), make_point(), 1.0)
    path = folder / "record.json"
    whole = path.read_bytes()
    path.write_text('{"schema_version": 99}')
    age(tmp_path)
    for _ in range(2):
        (row,) = Store(tmp_path).rows()
        assert (row["status"], row["label"]) == ("invalid", make_point().label)
        assert str(row["reason"]).startswith(f"cannot be read: points/{folder.parent.name}/1/record.json: schema version 99")
        assert path.read_text() == '{"schema_version": 99}' and b"cannot be read" not in (tmp_path / FILE).read_bytes()
    stamp = path.stat()
    path.write_bytes(whole)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert [row["status"] for row in Store(tmp_path).rows()] == ["ok"]


def test_a_record_that_cannot_be_read_is_looked_at_once(tmp_path: Path, make_point: MakePoint) -> None:
    """Each listing of a verb read it again, and it may have megabytes."""
    folder = measured(Store(tmp_path), make_point(), 1.0)
    (folder / "record.json").write_text("{")
    store, seen = Store(tmp_path), list[Path]()
    read = store.index._read

    def look(path: Path) -> Record:
        seen.append(path)
        return read(path)

    store.index._read = look
    assert store.rows() == store.rows() and len(seen) == 1
    write_record(folder, Record(key=make_point().key, attempt=1, point=make_point(), status="oom", started_at="x"))
    assert [row["status"] for row in store.rows()] == ["oom"]


def test_what_is_no_folder_of_a_point_hides_none(tmp_path: Path, make_point: MakePoint) -> None:
    """A link to nothing hid all results, and a file, or a name that is no text, ended every verb."""
    folder = measured(Store(tmp_path), make_point(), 1.0)
    points = tmp_path / "points"
    (points / "gone-1").symlink_to("nowhere")
    (points / "loop-1").symlink_to("loop-1")
    (points / "notes-1").write_text("")
    for name in (b"gpt-\xff", b"gpt-", b"-1", b"a\n-1", b".x-1"):
        damaged = points / os.fsdecode(name) / "1"
        damaged.mkdir(parents=True)
        (damaged / "record.json").write_text("{")
    assert [row["status"] for row in Store(tmp_path).rows()] == [record.status for record in Store(tmp_path).records()] == ["ok"]
    assert folder.parent.name in Store(tmp_path).names().values()


@pytest.mark.parametrize("closed", ["attempt", "point"])
def test_what_is_closed_is_invalid_and_hides_nothing(
    closed: str, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended every verb; and where only its newest attempt was closed, the index had the one before it."""
    store, points = Store(tmp_path), [make_point(global_batch=size) for size in (4, 8)]
    folders = [measured(store, point, 1.0) for point in (points[0], points[1], points[1])]
    Store(tmp_path).rows()
    place = str(folders[-1] if closed == "attempt" else folders[-1].parent)

    def refusing(usual: Any, itself: bool) -> Any:
        def look(path: Any, *rest: Any, **options: Any) -> Any:
            inside = str(path).startswith(f"{place}/") or (itself and str(path) == place)
            if inside and not isinstance(path, int):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return usual(path, *rest, **options)

        return look

    for name, itself in (("stat", False), ("lstat", False), ("open", False), ("scandir", True)):
        monkeypatch.setattr(os, name, refusing(getattr(os, name), itself))
    number = 2 if closed == "attempt" else 1
    store = Store(tmp_path)
    rows, records = store.rows(), store.records()
    assert sorted((row["attempt"], row["status"]) for row in rows) == sorted((one.attempt, one.status) for one in records)
    assert [row.get("reason") for row in rows].count(None) == 1
    reason = f"cannot be read: points/{folders[-1].parent.name}/{number}/record.json: Permission denied; next step: have its owner open it"
    assert [one.attempt for one in records if str(one.reason).startswith(reason)] == [number]


def test_a_store_that_cannot_be_written_is_read(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(Store(tmp_path), make_point(), 1.0)

    usual = os.open

    def full(path: str, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return usual(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", full)
    assert [row["throughput"] for row in Store(tmp_path).rows()] == [1.0]
    assert not (tmp_path / FILE).exists()
