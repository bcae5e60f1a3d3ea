"""One language of names for all verbs: suites, variants, rounds, dates, tags, points, attempts, folders, files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import caraml
from caraml.base.errors import InputError
from caraml.cli import app
from caraml.metrics.model import Metric
from caraml.report.progress import listings
from caraml.results.archive import pack, unpack
from caraml.results.record import Record
from caraml.results.selector import last_two, select, to_retry
from caraml.results.store import Listing, Store, command_of, read_listing, write_record
from caraml.suite.model import Point
from tests.conftest import MakePoint


class Lab:
    """A results folder into which campaigns are written without running anything."""

    def __init__(self, root: Path, make_point: MakePoint) -> None:
        self.store, self._make = Store(root), make_point
        self._rate = 0.0

    def point(self, n: int, repeat: int = 0, **more: object) -> Point:
        return self._make(benchmark="gpt", global_batch=n, micro_batch=n, repeat=repeat, **more)

    def run(self, *points: Point, suite: str = "quick", again: bool = False, failing: int = 0, **listing: object) -> None:
        """A campaign; the rate of every new result is one more than that of the one before."""
        listed = [(one.key, one.label) for one in points]
        self.store.remember(Listing(name=suite, points=listed, **listing), anew=again)  # type: ignore[arg-type]
        for index, one in enumerate(points):
            known = self.store.latest(one.key)
            if again or known is None or known.status == "failed":
                self.attempt(one, failed=index >= len(points) - failing)

    def attempt(self, point: Point, failed: bool = False) -> None:
        folder, self._rate = self.store.new_attempt(point), self._rate + 1
        metrics = {} if failed else {"throughput": Metric(value=self._rate, unit="thing/s")}
        record = Record(
            key=point.key, attempt=int(folder.name), point=point, status="failed" if failed else "ok", started_at="x", metrics=metrics
        )
        write_record(folder, record)

    def rates(self, name: str | None) -> list[float | None]:
        return [record.value("throughput") for record in select(name, self.store.root).records()]


@pytest.fixture
def lab(tmp_path: Path, make_point: MakePoint) -> Lab:
    """quick@1 of two points, its variant @2 of one, @3 again."""
    lab = Lab(tmp_path / "mine", make_point)
    lab.run(lab.point(4), lab.point(8), title="Quick", asked_at="2026-11-20T10:00:00+01:00")
    lab.run(lab.point(16), settings=["global_batch=16"], asked_at="2026-11-21T10:00:00+01:00", tags=["wide"])
    lab.run(lab.point(4), lab.point(8), again=True, asked_at="2026-11-22T10:00:00+01:00", tags=["nightly"])
    return lab


def test_a_folder_that_is_not_there_is_told_with_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results" / "points").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    for out in (str(tmp_path / "resutls"), "~/resutls"):  # which no shell has replaced, as in --out=~/resutls
        for words in (["results"], ["results", "quick"], ["status"]):
            done = CliRunner().invoke(app, [*words, "--out", out])
            assert isinstance(done.exception, InputError) and done.exception.hint == f"did you mean --out {tmp_path}/results?"
    for verb in (["results"], ["data", "prepare", "images"], ["data", "pack", "folder"]):
        done = CliRunner().invoke(app, [*verb, "--out", "~nobody-of-this-name/x"])
        assert "nobody knows which folder ~nobody-of-this-name is" in str(done.exception)


def test_a_setting_makes_a_variant_beside_the_suite(lab: Lab) -> None:
    assert lab.rates("quick") == [4, 5, 3] and [record.value("throughput") for record in lab.store.records("quick")] == [4, 5, 3]
    assert lab.rates("quick+global_batch=16") == lab.rates("quick+global") == [3]
    assert [(one.campaign, one.round) for one in lab.store.current("quick")] == [("quick", 3), ("quick+global_batch=16", 2)]
    assert lab.store.suites() == ["quick"] and lab.store.current("quick")[0].settings == []


def test_rounds_by_number_date_and_tag(lab: Lab) -> None:
    assert lab.rates("quick@1") == lab.rates("quick@2026-11-20") == [1, 2]
    assert lab.rates("quick@2") == lab.rates("quick@wide") == lab.rates("wide") == [3]
    assert lab.rates("quick@3") == lab.rates("quick@2026-11") == lab.rates("nightly") == [4, 5]
    assert lab.rates("quick+global_batch=16@2") == [3]


def test_what_goes_on_is_the_same_round(lab: Lab) -> None:
    lab.run(lab.point(4), lab.point(8), asked_at="2026-11-23T10:00:00+01:00", tags=["more"], comment="later")
    newest = lab.store.current("quick")[0]
    assert (newest.round, newest.asked_at[:10], newest.tags, newest.comment) == (3, "2026-11-22", ["nightly", "more"], "later")
    lab.run(lab.point(4), lab.point(8), lab.point(32))  # the suite was edited: a round, with the results that there are
    assert lab.rates("quick@4") == [4, 5, 6] and lab.rates("quick@3") == [4, 5] and lab.rates("quick") == [4, 5, 6, 3]


def test_a_round_that_was_cut_short_takes_nothing_from_earlier_ones(lab: Lab) -> None:
    points = [lab.point(4), lab.point(8)]
    lab.store.remember(Listing(name="quick", points=[(one.key, one.label) for one in points]), anew=True)
    lab.attempt(points[0])
    assert lab.rates("quick@4") == [6] and lab.rates("quick") == [6, 5, 3]
    found = select("quick@4", lab.store.root)
    assert [one.attempt for one in found.points] == [3, 0]
    ((_, standings),) = listings(lab.store.root, "quick@4")
    assert [one.state for one in standings] == ["ok", "to do"]


def test_failed_points_that_are_tried_again_belong_to_their_round(tmp_path: Path, make_point: MakePoint) -> None:
    lab = Lab(tmp_path, make_point)
    for _ in range(2):
        lab.run(lab.point(4), lab.point(8), failing=1)
    assert lab.store.current("quick")[0].round == 1 and lab.rates("quick@1") == [1, None]
    assert [one.attempt for one in select("quick@1", tmp_path).points] == [1, 2]


def test_points_by_label_key_beginning_and_attempt(lab: Lab) -> None:
    lab.run(lab.point(64), lab.point(64, repeat=1), suite="other")
    key = lab.point(4).key
    assert lab.rates("gpt b64 fp32") == [6, 7] and lab.rates("gpt b64 fp32 #2") == [7]
    assert lab.rates(key) == lab.rates(key[:9]) == [4] and lab.rates(f"{key}/1") == [1]
    assert len(lab.rates("gpt")) == 5 and len(lab.rates(None)) == 5
    assert lab.rates(f"{lab.store.root}:quick@1") == [1, 2] and len(lab.rates(str(lab.store.root))) == 5
    file = lab.store.points / f"fake-{key}" / "1"
    assert lab.rates(str(file)) == lab.rates(str(file / "record.json")) == [1]
    assert lab.rates(str(file.parent)) == [4], "a point's folder: its newest attempt"
    assert [record.attempt for record in select(key, lab.store.root).every_attempt()] == [1, 2]
    assert len(select("quick", lab.store.root).every_attempt()) == 5 and len(select("quick@1", lab.store.root).every_attempt()) == 2


def test_of_a_suite_what_was_begun_is_tried_again_and_of_named_points_all(lab: Lab) -> None:
    begun, *rest = (lab.point(8, repeat) for repeat in range(3))
    lab.run(begun, *rest, lab.point(16))
    for one in (*rest, lab.point(16)):
        shutil.rmtree(lab.store.points / one.folder_name)

    def keys(name: str) -> list[str]:
        return [key for _, found in to_retry(lab.store.root, (name,), failed=False, oom=False) for key in found]

    assert keys("quick") == [begun.key]
    assert keys(begun.label.removesuffix(" #1")) == [begun.key, *(one.key for one in rest)]
    assert keys(rest[1].key) == [rest[1].key]


def test_two_suites_with_the_same_label(lab: Lab) -> None:
    lab.run(lab.point(4, params={"width": 7}), suite="twin")
    assert set(lab.rates("gpt b4 fp32")) == {6, 4}
    with pytest.raises(InputError, match="2 points are meant by 'gpt b4 fp32'") as caught:
        select("gpt b4 fp32", lab.store.root).only()
    assert all(word in str(caught.value) for word in (lab.point(4).key, "twin", "quick", "give one of the keys"))
    lab.run(lab.point(4, params={"width": 7}, system="jedi", device="GH200 x4"), suite="twin")
    with pytest.raises(InputError, match="  jedi: GH200 x4\n"):
        select("gpt b4 fp32", lab.store.root).only()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("quikc", "(suites: quick; variants: quick+global_batch=16; tags: nightly, wide; points: gpt b"),
        ("quikc", "did you mean 'quick'?"),
        ("quick@7", "has no round 7; it has 1 (2026-11-20 10:00), 2 (2026-11-21 10:00, wide, global_batch=16), 3 ("),
        ("quick@7", "did you mean quick@3?"),
        ("quick@nigthly", "did you mean quick@nightly?"),
        ("quick@2025-01-01", "has no round of 2025-01-01"),
        ("gpt b4 fp32/9", "has no attempt 9; it has 1, 2"),
        ("", "no folder"),
    ],
)
def test_what_does_not_exist_is_told_with_what_does(lab: Lab, name: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        select(name, lab.store.root)
    assert words in str(caught.value), caught.value


def test_the_last_two_rounds(lab: Lab) -> None:
    before, last = last_two("quick", lab.store.root)
    assert (before.name, last.name) == ("quick@1", "quick@3")
    assert [record.value("throughput") for record in before.records()] == [1, 2]
    with pytest.raises(InputError, match="no two rounds of the same points") as error:
        last_two("quick+global_batch=16", lab.store.root)
    assert str(error.value.hint).endswith(" --set global_batch=16 --again"), "without it, other points are measured"
    assert command_of("", "quick", "JEDI") == "caraml run quick --system JEDI"
    assert command_of("/my suites/s.toml", "s", "/m.toml", ["seed=1"]) == "caraml run '/my suites/s.toml' --system /m.toml --set seed=1"
    with pytest.raises(InputError, match="a comparison needs two"):
        last_two("quick@1", lab.store.root)


def test_archives_of_a_suite_and_of_a_round(lab: Lab, tmp_path: Path) -> None:
    pack(lab.store.root, "quick", tmp_path / "all.zip")
    pack(lab.store.root, "quick@1", tmp_path / "first.zip")
    unpack(tmp_path / "all.zip", tmp_path / "all")
    unpack(tmp_path / "first.zip", tmp_path / "first")
    there = Lab(tmp_path / "all", lab._make)
    assert there.rates("quick@1") == [1, 2] and there.rates("quick") == [4, 5, 3] and there.rates("nightly") == [4, 5]
    assert Lab(tmp_path / "first", lab._make).rates("quick") == [1, 2]
    unpack(tmp_path / "first.zip", tmp_path / "all")  # the campaigns of a suite that is there are not mixed with others
    assert there.rates("quick") == [4, 5, 3] and {read_listing(path).imported for path in (tmp_path / "all/suites").iterdir()} == {
        "all.zip"
    }
    with pytest.raises(InputError, match="is no campaign"):
        pack(lab.store.root, "gpt b4 fp32", tmp_path / "point.zip")


def test_results_in_python_by_name(lab: Lab) -> None:
    def rates(name: str | None, **more: bool) -> list[float | None]:
        return [result.value("throughput") for result in caraml.load(lab.store.root.parent, suite=name, **more)]

    assert rates("quick@1") == [1, 2] and rates("nightly") == [4, 5] and rates("quick", every_attempt=True) == [1, 4, 2, 5, 3]
    with pytest.raises(InputError, match="no results of 'quickk'"):
        rates("quickk")


def test_status_of_names(lab: Lab) -> None:
    assert [listing.campaign for listing, _ in listings(lab.store.root, None)] == ["quick", "quick+global_batch=16"]
    assert [len(points) for _, points in listings(lab.store.root, "nightly")] == [2]
    ((listing, points),) = listings(lab.store.root, "gpt b16")
    assert listing.round == 2 and [one.label for one in points] == ["gpt b16 fp32"]
