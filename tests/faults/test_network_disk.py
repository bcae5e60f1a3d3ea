"""A network file system that shows late what another host has made."""

from __future__ import annotations

import errno
import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from caraml.base import files
from caraml.base.files import names_now, there
from caraml.campaign import attempt
from caraml.campaign.runner import run_campaign
from caraml.launch import JobState
from caraml.results.claim import holder, myself, take_over
from caraml.results.finish import finish
from caraml.results.journal import block, tables
from caraml.results.record import Record
from caraml.results.store import JOURNAL, RECORD, Store, attempts, read_record, write_record
from caraml.suite.model import Point
from tests.conftest import MakePoint
from tests.late_disk import LateDisk
from tests.test_campaign import FakeLauncher, campaign, statuses


@dataclass
class LateLauncher(FakeLauncher):
    """Jobs end well at once; their records appear a second later."""

    def state(self, folder: Path) -> JobState:
        point = Point.model_validate_json((folder / "point.json").read_text())
        record = Record(key=point.key, attempt=int(folder.name), point=point, status="ok", started_at="x")
        threading.Timer(1.0, write_record, (folder, record)).start()
        return JobState("ended", 0)


def test_a_record_that_shows_up_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_VISIBLE_SECONDS", 300.0)  # however late it is on a busy machine
    run, _ = campaign(tmp_path, LateLauncher({}))
    assert statuses(run_campaign(run)) == ["skipped", "ok", "skipped", "ok"]
    assert statuses(Store(tmp_path).records("s")) == ["skipped", "ok", "skipped", "ok"]


def seen_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_result_that_is_not_shown_yet_is_not_replaced_by_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_point: MakePoint
) -> None:
    """Of a job that had ended well the campaign, after ten seconds, wrote that its worker had left no result, over the result."""
    point = make_point()
    folder, disk = Store(tmp_path).new_attempt(point), LateDisk(tmp_path, monkeypatch)
    assert not (folder / RECORD).exists() and RECORD not in seen_in(folder)
    with disk.elsewhere():
        write_record(folder, Record(key=point.key, attempt=1, point=point, status="ok", started_at="x"))
    assert not (folder / RECORD).exists() and RECORD not in seen_in(folder), "the disk is as late as it is to be"
    attempt.wait_until_visible(folder)
    finish(folder, 0)
    assert read_record(folder / RECORD).status == "ok" and (folder / RECORD).exists()
    assert seen_in(folder) == ["point.json", RECORD]


def test_what_is_not_there_stays_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is listed late, and removed meanwhile; a folder that cannot be listed is told."""
    disk = LateDisk(tmp_path, monkeypatch)
    assert not there(tmp_path / "gone") and not there(tmp_path / "no folder" / "gone") and names_now(tmp_path) == []
    with disk.elsewhere():
        (tmp_path / "gone").touch()
    monkeypatch.setattr("caraml.base.files.names_now", lambda folder: ["gone"])
    with disk.elsewhere():
        (tmp_path / "gone").unlink()
    assert not there(tmp_path / "gone") and not [*tmp_path.iterdir()]

    def away(folder: str) -> list[str]:
        raise OSError(errno.EIO, "the disk is away", folder)

    monkeypatch.setattr("caraml.base.files.names_now", away)
    with pytest.raises(OSError, match="the disk is away"):
        there(tmp_path / "gone")


def test_a_record_that_comes_while_it_is_asked_for_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of its name was made to ask for it, and removed: where the name was free just then, or a disk makes files anew that are
    there, whatever had the name by then."""
    record = tmp_path / RECORD
    monkeypatch.setattr(files, "names_now", lambda folder: [RECORD])

    def then_it_comes(do: Callable[..., Any], *names: Any, **options: Any) -> Any:
        try:
            return do(*names, **options)
        finally:
            if str(record) in map(str, names):
                record.write_text("whole")

    with monkeypatch.context() as patch:
        for name in ("link", "open"):
            patch.setattr(os, name, partial(then_it_comes, getattr(os, name)))
        assert there(record) and record.read_text() == "whole" and seen_in(tmp_path) == [RECORD]
    record.unlink()
    (tmp_path / "link").symlink_to(tmp_path)
    assert not there(tmp_path / "link" / RECORD) and seen_in(tmp_path) == ["link"], "no second name of a link"


@pytest.mark.parametrize("why", ["owned", "open_new"], ids=["a folder of somebody else", "a full disk"])
def test_a_record_is_shown_where_nothing_can_be_made(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, disk = tmp_path / RECORD, LateDisk(tmp_path, monkeypatch)
    assert not record.exists() and seen_in(tmp_path) == []
    with disk.elsewhere():
        record.touch()

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    monkeypatch.setattr(files, why, {"owned": lambda folder: False, "open_new": full}[why])
    assert not record.exists() and there(record) and record.exists()


def test_attempts_of_several_hosts_that_do_not_see_each_other_s_have_numbers_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_point: MakePoint
) -> None:
    """sshfs says EPERM where a folder is there already: it ended the campaign."""
    store, point, disk = Store(tmp_path), make_point(), LateDisk(tmp_path, monkeypatch)
    (store.points / point.folder_name).mkdir(parents=True)
    assert attempts(store.points / point.folder_name) == []
    with disk.elsewhere():
        theirs = [store.new_attempt(point) for _ in range(2)]
    ours = [store.claim_attempt(point, point.folder_name, 1), store.new_attempt(point)]
    assert [path and path.name for path in (*theirs, *ours)] == ["1", "2", None, "3"]


def test_what_a_worker_on_another_host_put_away_is_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_point: MakePoint
) -> None:
    """And stays where the disk does not answer just then."""
    folder, disk = Store(tmp_path).new_attempt(make_point()), LateDisk(tmp_path, monkeypatch)
    assert seen_in(folder) == ["point.json"]
    with disk.elsewhere():
        (folder / JOURNAL).write_bytes(block({"start": array("d", [1.0]), "seconds": array("d", [0.5])}, table="steps"))

    def away(folder: Path) -> list[str]:
        raise OSError(errno.EIO, "the disk is away", str(folder))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="the disk is away"):
        patch.setattr("caraml.results.journal.names_now", away)
        tables(folder)
    finish(folder, -9)
    assert "steps" in read_record(folder / RECORD).files and JOURNAL not in names_now(folder)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_hard_links_one_of_several_still_takes_an_attempt_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on exFAT, in some containers' folders, and where sshfs is told so: it ended the campaign. Nobody reads a part of a claim."""

    def link(source: str, target: str) -> None:
        raise OSError(number, os.strerror(number), source, None, target)

    write_new, written = files.write_new, list[str]()
    monkeypatch.setattr(files, "write_new", lambda path, *rest, **mode: (written.append(Path(path).name), write_new(path, *rest, **mode)))
    monkeypatch.setattr(os, "link", link)
    assert [take_over(tmp_path, 1, myself()) for _ in range(2)] == [True, False]
    assert seen_in(tmp_path) == ["claim.2"] and holder(tmp_path) == (2, myself()) and "claim.2" not in written
