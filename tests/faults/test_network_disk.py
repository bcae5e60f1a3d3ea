"""A network file system that shows a rename of another host late."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from caraml.campaign import attempt
from caraml.campaign.runner import run_campaign
from caraml.launch import JobState
from caraml.results.record import Record
from caraml.results.store import Store, write_record
from caraml.suite.model import Point
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
