"""`caraml accept` and `check` as an administrator calls them: a tiny suite that really runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from caraml.base.errors import InputError
from caraml.campaign import runner
from caraml.cli import app
from caraml.worker.command_record import Ran, how_it_ran

pytestmark = pytest.mark.processes

SUITE = """name = "tiny"
title = "Tiny"
[[benchmark]]
name = "nap"
workload = "command"
repeats = 2
params = { argv = ["sh", "-c", "test ! -e broken && sleep 0.01"], energy = false }
"""


@pytest.fixture(scope="module", autouse=True)
def known_times() -> Iterator[None]:
    """Every program took 0.2 s to within a thousandth, however busy the machine is."""
    number = itertools.count()

    def told(folder: str) -> Ran | None:
        found = how_it_ran(folder)
        return found and replace(found, seconds=0.2 + 0.0002 * (next(number) % 3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "how_it_ran", told)
        yield


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, that was run and accepted."""
    folder = tmp_path_factory.mktemp("check")
    (folder / "tiny.toml").write_text(SUITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        assert caraml(folder, "run", folder / "tiny.toml", "--no-report").exit_code == 0
        done = caraml(folder, "accept", "tiny", "--as", "good")
    assert done.exit_code == 0 and "1 point, 2 runs each" in done.stdout and "tell little" in done.stdout
    return folder


def caraml(folder: Path, *arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, [*map(str, arguments), "--out", str(folder / "results")])


def check(folder: Path, *arguments: object) -> Result:
    return caraml(folder, "check", folder / "tiny.toml", "--baseline", "good", *arguments)


def refused(done: Result) -> str:
    """What the command line says before it exits with 2."""
    assert isinstance(done.exception, InputError) and done.exception.exit_code == 2
    return str(done.exception)


def test_a_night_is_judged_and_told_in_every_form(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
    assert "nothing was measured since" in refused(check(here, "--latest"))
    done = check(here, "--within", "50%", "--retries", 0, "--junit", here / "good.xml")
    assert done.exit_code == 0 and done.stdout.startswith("same: 1 point"), done.output
    assert ElementTree.parse(here / "good.xml").getroot()[0].get("failures") == "0"
    again = check(here, "--within", "50%", "--latest", "--json")
    content = json.loads(again.stdout)
    assert "nothing was run, and what is worse not measured again: results of 20" in content["notes"][-1]
    assert again.exit_code == content["exit_code"] == done.exit_code and len(content["points"][0]["keys"]) == 2


def test_a_point_that_fails_is_worse(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
    (here / "broken").touch()
    done = check(here, "--junit", here / "bad.xml")
    (here / "broken").unlink()
    assert done.exit_code == 4 and done.stdout.startswith("worse: 1 of 1 point: nap (no result: failed: program ended with exit status 1)")
    assert ElementTree.parse(here / "bad.xml").find("testsuite/testcase/failure") is not None


def test_the_file_for_programs_never_holds_an_earlier_night(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
    file = here / "night.xml"
    file.write_text("of the night before")
    refused(caraml(here, "check", here / "tiny.toml", "--baseline", "goood", "--junit", file))
    assert not file.exists()
    target, link = here / "precious", here / "link.xml"
    target.write_text("kept")
    link.symlink_to(target)
    for taken in (link, here, Path("/dev/null")):
        assert "expected a plain file or none" in refused(check(here, "--junit", taken))
    assert target.read_text() == "kept" and Path("/dev/null").exists()


def test_a_night_is_told_also_where_the_file_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
    folder = here / "gone"
    folder.mkdir()

    def vanish(*_: object) -> bytes:
        folder.rmdir()
        return b""

    monkeypatch.setattr("caraml.report.comparison.check_junit", vanish)
    done = check(here, "--within", "50%", "--retries", 0, "--junit", folder / "x.xml")
    assert isinstance(done.exception, FileNotFoundError)
    assert done.stdout.startswith("same: 1 point")


def test_a_reader_who_leaves_does_not_change_the_verdict(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("caraml.cli.check.say", gone)
    assert check(here, "--within", "50%", "--retries", 0, "--json").exit_code == 0


def test_wrong_input_says_what_is_wrong(here: Path) -> None:
    assert "did you mean 'good'" in refused(caraml(here, "check", here / "tiny.toml", "--baseline", "goood"))
    assert "lacks 1 of 1 points of the suite: nap" in refused(check(here, "--set", "params.argv=['true']"))
    assert "expected a percentage" in refused(check(here, "--within", "much"))
    assert "no such folder" in refused(check(here, "--junit", here / "no" / "x.xml"))
    assert "runs nothing" in refused(check(here, "--launcher", "print"))
    assert "did you mean 'tiny'" in refused(caraml(here, "accept", "tinny", "--as", "other"))
    assert "there is a baseline 'good' already" in refused(caraml(here, "accept", "tiny", "--as", "good"))
    assert "expected letters" in refused(caraml(here, "accept", "tiny", "--as", "../x"))
    file = here / "results" / "baselines" / "good.json"
    text = file.read_text()
    file.write_text(text.replace('"system": "local"', '"system": "elsewhere"'))
    assert "is of another machine: system: 'elsewhere' then, 'local' now" in refused(check(here))
    file.write_text(text)


def test_accept_says_which_repeats_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tiny.toml").write_text(SUITE.replace("test ! -e broken && sleep 0.01", "test {repeat} = 0 && sleep 0.01"))
    assert caraml(tmp_path, "run", tmp_path / "tiny.toml", "--no-report").exit_code == 1
    done = caraml(tmp_path, "accept", "tiny", "--as", "good")
    assert done.exit_code == 0 and "1 point, 1 run each" in done.stdout, done.output
    assert "nap: 1 of 2 runs have no result: failed: program ended with exit status 1" in done.stdout


def test_a_round_a_variant_or_a_tag_is_accepted_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tiny.toml").write_text(SUITE.replace("sleep 0.01", "sleep {s}").replace("energy", "s = 0.01, energy"))
    for more in ((), ("--set", "params.s=0.03"), ("--again", "--tag", "warm"), ("--again",)):
        assert caraml(tmp_path, "run", tmp_path / "tiny.toml", "--no-report", *more).exit_code == 0

    def accepted(campaign: str, *more: object) -> list[int]:
        done = caraml(tmp_path, "accept", campaign, "--as", "b", "--replace", *more)
        assert done.exit_code == 0, done.exception
        content = json.loads((tmp_path / "results" / "baselines" / "b.json").read_text())
        assert content["suite"] == "tiny"
        known = [record for path in (tmp_path / "results/points").glob("*/*/record.json") for record in [json.loads(path.read_text())]]
        attempts = {record["started_at"]: record["attempt"] for record in known}
        times = [run["time"] for point in content["points"] for run in next(iter(point["metrics"].values()))["runs"]]
        found = {datetime.fromisoformat(begin).astimezone(UTC): attempt for begin, attempt in attempts.items()}
        return sorted(found[datetime.fromisoformat(time)] for time in times)

    assert accepted("tiny") == [3, 3], "the suite as it is written, and not its variant"
    assert accepted("tiny@1") == [1, 1] and accepted("warm") == accepted("tiny@warm") == [2, 2]
    assert accepted("tiny@3", "--rounds", 5) == [1, 1, 2, 2], "no later ones than the round's own"
    assert accepted("tiny+params.s=0.03") == accepted("tiny@2") == [1, 1]
    done = caraml(tmp_path, "check", tmp_path / "tiny.toml", "--baseline", "b", "--set", "params.s=0.03", "--within", "50%")
    assert done.exit_code == 0, done.output
    assert "did you mean tiny@5?" in refused(caraml(tmp_path, "accept", "tiny@12", "--as", "c"))
    assert "stands for no campaign" in refused(caraml(tmp_path, "accept", "nap s=0.01", "--as", "c"))
    (tmp_path / "other.toml").write_text(SUITE.replace('"tiny"', '"other"'))
    assert caraml(tmp_path, "run", tmp_path / "other.toml", "--no-report", "--tag", "warm").exit_code == 0
    said = refused(caraml(tmp_path, "accept", "warm", "--as", "c"))
    assert "stands for 2 campaigns: other@1, tiny@3" in said
    assert "are the same runs" in refused(caraml(tmp_path, "compare", "tiny", "tiny"))
    assert "are the same runs" in refused(caraml(tmp_path, "compare", "tiny@warm", "tiny@3"))
