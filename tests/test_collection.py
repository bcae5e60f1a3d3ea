"""Every process that collects the tests collects the same ones: two at once would otherwise refuse to share them."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import COLLECTED, LONGEST, left_alone, open_above, pytest_terminal_summary

ROOT = Path(__file__).parents[1]
COLLECT = """
import sys, time
later, now = float(sys.argv.pop(1)), time.time
time.time = lambda: now() + later
time.sleep(3 if later else 0)  # other clocks, such as datetime's, have gone on by seconds as well
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def collect(folder: Path, later: float, **environment: str) -> list[str]:
    """Ids of all tests, collected from ``folder`` by a clock that is ``later`` seconds ahead."""
    options = ["--collect-only", "-p", "no:cacheprovider", "-p", "no:terminalreporter", "-p", f"{__name__}", str(ROOT / "tests")]
    command = [sys.executable, "-c", COLLECT, str(later), "-c", str(ROOT / "pyproject.toml"), *options]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [ast.literal_eval(line) for line in done.stdout.splitlines()]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print every id: as a plug-in of the processes that :func:`collect` starts."""
    sys.stdout.write("".join(f"{name!a}\n" for name in session.config.stash[COLLECTED]))


def test_the_tests_are_the_same_for_everyone_at_any_time(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    other = {"PYTHONHASHSEED": "77", "LC_ALL": "C", "TZ": "Asia/Tokyo", "COLUMNS": "40", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    elsewhere = collect(tmp_path, 86_400.0 * 200, **other, CARAML_RESULTS="/no/such", XDG_CONFIG_HOME="/no")
    here = request.config.stash[COLLECTED]
    if request.config.args != ["tests"]:  # not all were collected
        here = collect(ROOT, 0.0, PYTHONHASHSEED="1")
    assert len(here) > 1000 and elsewhere == here


def test_files_that_begin_first_are_there() -> None:
    assert not [name for name in LONGEST if not (ROOT / "tests" / name).is_file()]


def test_temporary_files_may_lie_where_a_group_may_write(tmp_path: Path) -> None:
    """As on the scratch of a cluster, in two folders of which one is in the other; a sticky one is nobody's."""
    places = [tmp_path / "scratch", tmp_path / "scratch" / "project", tmp_path / "scratch" / "project" / "sticky"]
    for place, mode in zip(places, (0o777, 0o777, 0o1777), strict=True):
        place.mkdir()
        place.chmod(mode)
    (own := places[-1] / "own").mkdir(mode=0o700)
    assert sorted(open_above(own)) == [str(place) for place in places[:2]] and open_above(tmp_path) == []


def test_what_is_skipped_is_told_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    def told(line: str, **_: Any) -> None:
        sys.stdout.write(f"{line}\n")

    reports = [SimpleNamespace(longrepr=("a.py", 1, f"Skipped: {reason}")) for reason in ("no GPU", "no GPU", "no root")]
    pytest_terminal_summary(SimpleNamespace(stats={"skipped": reports}, write_line=told))
    assert capsys.readouterr().out.splitlines() == ["NOT TESTED: no GPU (2 tests)", "NOT TESTED: no root (1 test)"]


@pytest.mark.parametrize("what", ["variable", "folder", "handler", "umask", "thread"])
def test_a_test_that_leaves_something_behind_fails(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left")
    here, umask, handler = Path.cwd(), os.umask(0o022), signal.getsignal(signal.SIGUSR1)
    changes = {
        "variable": lambda: monkeypatch.setenv("LEFT", "1"),
        "folder": lambda: os.chdir(tmp_path),
        "handler": lambda: signal.signal(signal.SIGUSR1, lambda *_: None),
        "umask": lambda: os.umask(0o077),
        "thread": thread.start,
    }
    try:
        with left_alone("nothing"):
            pass
        told = r"this test changed what others find: .*(LEFT|folder|SIGUSR1|umask|left)"
        with pytest.raises(pytest.fail.Exception, match=told), left_alone("this test"):
            changes[what]()
    finally:
        end.set()
        if what == "thread":
            thread.join()
        os.chdir(here)
        os.umask(umask)
        signal.signal(signal.SIGUSR1, handler)
