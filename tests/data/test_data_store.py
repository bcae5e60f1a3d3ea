"""Prepared data exists whole or not at all, whoever builds it, however often, whatever kills them."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from caraml.base.errors import InputError
from caraml.base.files import data_home
from caraml.data.store import build_folder, prepared_once

BUILDER = """
import os, time
from pathlib import Path
from caraml.data.store import prepared_once

def build(folder):
    for name in "abc":
        time.sleep(0.1)
        (folder / name).write_text(str(os.getpid()))

print(os.getpid(), prepared_once({"kind": "test", "n": 1}, build))
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_the_data_folder_is_named_by_the_environment_or_lies_in_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_home() == home
    monkeypatch.delenv("CARAML_DATA")
    assert data_home() == Path.home() / ".cache" / "caraml" / "data"


def test_the_same_key_is_built_once_and_another_key_elsewhere(home: Path) -> None:
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "content").write_text("x")

    first = prepared_once({"kind": "test", "b": 2, "a": 1}, build)
    assert prepared_once({"a": 1, "kind": "test", "b": 2}, build) == first
    assert prepared_once({"a": 1, "kind": "test", "b": 3}, build) != first
    assert len(calls) == 2
    assert first.name.startswith("test-")
    assert sorted(path.name for path in first.iterdir()) == ["content", "key.json"]
    assert not list(home.glob(".*partial*"))


def test_a_builder_that_fails_leaves_nothing(home: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        prepared_once({"kind": "test"}, build)
    assert [path.name for path in home.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize("locks", [True, False])
def test_two_builders_at_once_end_with_one_whole_result(
    locks: bool, home: Path, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    without = "" if locks else "import fcntl\ndef refuse(*_): raise OSError('no locks here')\nfcntl.flock = refuse\n"
    processes = [start_python(without + BUILDER) for _ in range(2)]
    answers = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    pids, folders = zip(*(out.split(maxsplit=1) for out, _ in answers), strict=True)
    assert folders[0] == folders[1]
    writers = {Path(folders[0].strip(), name).read_text() for name in "abc"}
    assert len(writers) == 1
    assert writers <= set(pids)
    assert not list(home.glob(".*partial*"))


def test_what_a_killed_builder_leaves_is_ignored_and_cleaned(home: Path, start_python: Callable[..., subprocess.Popen[str]]) -> None:
    victim = start_python(BUILDER.replace("0.1", "30"))
    deadline = time.monotonic() + 300
    while not list(home.glob(".*partial*")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert len(list(home.glob(".*partial*"))) == 1
    folder = prepared_once({"kind": "test", "n": 1}, lambda folder: (folder / "a").write_text("good"))
    assert (folder / "a").read_text() == "good"
    assert not list(home.glob(".*partial*"))


def test_the_unfinished_work_of_living_and_distant_builders_is_left_alone(home: Path) -> None:
    name = prepared_once({"kind": "test"}, lambda folder: None).name
    (home / name / "key.json").unlink()
    (home / name).rmdir()
    living = home / f".{name}.partial-{socket.gethostname()}-1-0badcafe"
    distant = home / f".{name}.partial-another-host-1-0badcafe"
    for folder in (living, distant):
        folder.mkdir()
    prepared_once({"kind": "test"}, lambda folder: None)
    assert living.is_dir()
    assert distant.is_dir()


def test_a_folder_that_cannot_be_written_says_what_to_set(home: Path) -> None:
    home.write_text("a file in the way")
    with pytest.raises(InputError, match="CARAML_DATA"):
        prepared_once({"kind": "test"}, lambda folder: None)


def test_a_file_in_the_way_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(InputError, match="is a file"):
        build_folder(tmp_path / "taken", lambda folder: None)
