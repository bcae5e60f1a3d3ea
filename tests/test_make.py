"""What `make` does where something is missing: one line that says what, and on with what is there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from caraml.launch.script import command_of
from tests.conftest import MakePoint
from tests.starts import sitecustomize

ROOT = Path(__file__).parents[1]
OLD = """#!/bin/sh
# A Python 3.10, as far as anybody looks: code that asks for its version is told so.
case "$*" in
  *version_info*) exit 1 ;;
  *sys.version*) echo 3.10.12 ;;
  *) exit 1 ;;
esac
"""
NEW = """#!/bin/sh
# Makes a virtual environment whose pip does what the file `pip` beside it says.
case "$*" in
  "-m venv "*)
    mkdir -p .venv/bin
    echo '#!/bin/sh' >.venv/bin/python
    echo 'case "$*" in
      "-m pip --version") test ! -e {folder}/broken ;;
      *"-m ensurepip"*) exec {folder}/ensurepip ;;
      *"-m pip"*) exec {folder}/pip ;;
      *import*torch*) test -e {folder}/packages ;;
    esac' >>.venv/bin/python
    chmod +x .venv/bin/python ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make` reads, and commands of which none is a real Python."""
    for name in ("Makefile", ".ci/venv", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    commands = tmp_path / "commands"
    commands.mkdir()
    for name in ("bash", "cat", "dirname", "grep", "head", "make", "mkdir", "chmod", "rm", "sed", "sh", "test", "touch", "tr", "env"):
        (commands / name).symlink_to(shutil.which(name) or name)
    program(tmp_path, "pip", "#!/bin/sh\nexit 0\n")
    return tmp_path


def program(checkout: Path, name: str, text: str) -> None:
    path = checkout / "commands" / name if name.startswith("python") else checkout / name
    path.write_text(text.replace("{folder}", str(checkout)))
    path.chmod(0o755)


def make(checkout: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code of `make installed`, and the lines it said."""
    environment = {"PATH": str(checkout / "commands"), "HOME": os.environ["HOME"]}
    done = subprocess.run(["make", "installed", *words], cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    return done.returncode, [line for line in lines if not re.match(r"make: (\*\*\*|Enter|Leav)", line)]


def test_a_whole_environment_is_made_once_and_nothing_is_said(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    assert make(checkout) == (0, [])
    program(checkout, "pip", "#!/bin/sh\necho asked again >&2; exit 1\n")
    assert make(checkout) == (0, []), "nothing has changed: pip is not asked"
    later = (checkout / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(checkout / "pyproject.toml", (later, later))
    (checkout / "packages").touch()
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "used as it is" in lines[0]


def test_an_old_python_is_named_and_a_newer_one_used(checkout: Path) -> None:
    program(checkout, "python3", OLD)
    code, lines = make(checkout)
    assert code == 2 and lines == [
        "make: CARAML needs Python 3.11 or newer, python3 is 3.10.12; install one, or name it: make PYTHON=/path/to/python3.12"
    ]
    program(checkout, "python3.12", NEW)
    assert make(checkout) == (0, ["make: python3 is 3.10.12 and CARAML needs 3.11 or newer: python3.12 is used"])
    assert make(checkout) == (0, []), "what is there is used, whatever python3 is"


def test_an_environment_that_is_half_made_is_made_anew(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    (checkout / ".venv" / ".installed").touch()
    later = (checkout / "pyproject.toml").stat().st_mtime + 10
    os.utime(checkout / ".venv" / ".installed", (later, later))
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "made anew" in lines[0]
    assert (checkout / ".venv" / ".installed").exists() and make(checkout) == (0, [])


def test_an_environment_of_an_old_python_is_called_one_and_made_anew(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (python := checkout / ".venv" / "bin" / "python").write_text(OLD)
    python.chmod(0o755)
    assert make(checkout) == (0, ["make: the Python of .venv is 3.10.12 and CARAML needs 3.11 or newer: made anew"])
    assert make(checkout) == (0, [])


@pytest.mark.parametrize("copied", [False, True])
def test_an_environment_of_another_folder_becomes_that_of_this_one(checkout: Path, copied: bool) -> None:
    """The tests of a copy would be those of the folder that it was copied from."""
    program(checkout, "python3", NEW)
    assert make(checkout) == (0, [])
    there = checkout / "another [place] of R&D"
    if copied:
        (there / ".venv").mkdir(parents=True)
    files = {"pyvenv.cfg": "command = /usr/bin/python3 -m venv {}/.venv\n", "bin/mypy": "#!{}/.venv/bin/python\n"}
    files["lib/python3.11/site-packages/_editable_impl_caraml.pth"] = "{}/src"
    for name, text in files.items():
        (checkout / ".venv" / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / ".venv" / name).write_text(text.format(there))
    assert make(checkout) == (0, [f"make: .venv was made in {there}: its commands are made those of this folder"])
    assert {name: (checkout / ".venv" / name).read_text() for name in files} == {
        name: text.format(checkout) for name, text in files.items()
    }
    assert make(checkout) == (0, [])


def test_a_link_to_an_environment_that_is_gone_is_made_anew(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    (checkout / ".venv").symlink_to("/no/such/folder")
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "made anew" in lines[0], lines
    assert (checkout / ".venv" / ".installed").exists() and not (checkout / ".venv").is_symlink()


def test_a_pip_that_was_cut_off_is_mended_and_packages_that_are_there_stay(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    assert make(checkout) == (0, [])
    (checkout / ".venv" / ".installed").unlink()
    (kept := checkout / ".venv" / "kept").touch()
    (checkout / "broken").touch()
    program(checkout, "ensurepip", "#!/bin/sh\nrm {folder}/broken\n")
    assert make(checkout) == (0, []) and kept.exists(), "pip brings itself again, also without a network"
    (checkout / ".venv" / ".installed").unlink()
    (checkout / "broken").touch()
    (checkout / "packages").touch()
    program(checkout, "ensurepip", "#!/bin/sh\nexit 1\n")
    program(checkout, "pip", "#!/bin/sh\necho 'No module named pip' >&2; exit 1\n")
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "used as it is" in lines[0] and kept.exists()
    (checkout / "packages").unlink()
    code, lines = make(checkout)
    assert code == 2 and "made anew" in lines[0] and not kept.exists()


def test_an_empty_environment_is_said_to_be_one(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    (checkout / ".venv").mkdir()
    assert make(checkout) == (0, ["make: .venv has no Python, as after an installation that was cut off: made anew"])


def test_an_environment_that_stays_is_said_to_stay(checkout: Path) -> None:
    """Not even root may remove the folder that something is mounted on; a remover that fails stands for that."""
    program(checkout, "python3", NEW)
    (checkout / ".venv").mkdir()
    (checkout / "commands" / "rm").unlink()
    program(checkout, "rm", "#!/bin/sh\nexit 1\n")
    (checkout / "rm").rename(checkout / "commands" / "rm")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 2 and ".venv may not be removed" in lines[1], lines


def test_a_python_that_is_there_and_does_not_start_is_not_called_missing(checkout: Path) -> None:
    program(checkout, "python3", "#!/bin/sh\necho 'pyenv: version 3.11 is not installed' >&2; exit 127\n")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "python3 is there but does not start" in lines[0], lines


def test_packages_that_exclude_each_other_are_named_and_no_network_is_asked_for(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    (checkout / "said").write_text(
        "ERROR: Cannot install rich==15.0 because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n    The user requested rich==15.0\n    The user requested (constraint) rich==14.3\n\nTo fix this\n"
    )
    program(checkout, "pip", "#!/bin/sh\ncat {folder}/said >&2; exit 1\n")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "network" not in lines[0], lines
    assert "; The user requested rich==15.0; The user requested (constraint) rich==14.3): see constraints.txt" in lines[0]


def test_a_folder_that_may_not_be_written_to_is_said_to_be_one(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    assert make(checkout) == (0, [])
    (checkout / ".venv" / ".installed").unlink()
    (checkout / ".venv" / "pip.log").mkdir()  # nobody can write to it as to a file, not even root
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "may not be written to" in lines[0]
    (checkout / "packages").touch()
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "used as it is" in lines[0]


def test_without_a_network_what_is_there_is_used(checkout: Path) -> None:
    program(checkout, "python3", NEW)
    program(checkout, "pip", "#!/bin/sh\necho 'ERROR: No matching distribution found for torch' >&2; exit 1\n")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "No matching distribution found for torch" in lines[0] and "network" in lines[0]
    retry = (
        "WARNING: Retrying (Retry(total=0, read=None)) after connection broken by 'NewConnectionError('<c>: Failed: [Errno 111] Refused')'"
    )
    program(checkout, "pip", f"#!/bin/sh\necho \"{retry}\" >&2; echo 'ERROR: ResolutionImpossible' >&2; exit 1\n")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "(no package index answers: [Errno 111] Refused)" in lines[0], lines
    (checkout / "packages").touch()
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1 and "used as it is" in lines[0], lines
    code, lines = make(checkout)
    assert code == 0 and len(lines) == 1, "and it is tried again next time"


def test_a_python_that_makes_no_environment_says_what_to_install(checkout: Path) -> None:
    program(checkout, "python3", "#!/bin/sh\ncase \"$*\" in *venv*) echo 'ensurepip is not available'; exit 1 ;; esac\n")
    code, lines = make(checkout)
    assert code == 2 and len(lines) == 1 and "ensurepip is not available" in lines[0] and "python3-venv" in lines[0]
    assert not (checkout / ".venv").exists()


def test_what_is_committed_is_checked_by_the_linters_of_make() -> None:
    """The hooks run the very programs that `make` runs, so that their versions are the pinned ones."""
    hooks = set(re.findall(r"^\s+entry: (.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), flags=re.MULTILINE))
    shown = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert hooks == {line for line in shown.splitlines() if line.startswith(".venv/bin/")}


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
def test_a_start_from_the_fork_server_is_the_start_of_a_user(tmp_path: Path) -> None:
    """Exit codes, streams, folder, signals and variables: as without it."""
    words = [sys.executable, "-m", "tests.starts.told", "a b", "7"]
    # The last two would have to be there when the server starts; it is for the tests, which do without.
    apart = ("FORK_SERVER", "PYTHONSAFEPATH", "PYTHONIOENCODING")
    real = {name: value for name, value in os.environ.items() if name not in apart}
    told = [
        subprocess.run(words, cwd=ROOT, env={**env, "TOLD": "x"}, input="in\n", capture_output=True, text=True, check=False)
        for env in (real, {**real, "FORK_SERVER": os.environ["FORK_SERVER"]})
    ]
    assert told[0].returncode == told[1].returncode == 7
    assert told[0].stdout.replace("forked: False", "forked: True") == told[1].stdout and told[0].stderr == told[1].stderr
    assert "forked: True" in told[1].stdout, "or it proves nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
@pytest.mark.parametrize(("name", "forked"), [("helper.py", True), ("torch", False)])
def test_other_places_to_import_from_are_no_matter_unless_they_hide_what_is_loaded(tmp_path: Path, name: str, forked: bool) -> None:
    """Ranks that import the tests have the checkout among their places; a stand-in for a library must be imported, not what was loaded."""
    (tmp_path / name).touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), os.environ["PYTHONPATH"]])}
    words = [sys.executable, "-P", "-m", "tests.starts.told", "a", "0"]
    told = subprocess.run(words, env=environment, input="in\n", capture_output=True, text=True, check=False)
    assert told.returncode == 0 and f"forked: {forked}" in told.stdout, told


def running_in(folder: Path, parent: int) -> int:
    """The one child of a process that has this folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent and (process / "cwd").resolve() == folder:
                found.append(int(process.name))
    (child,) = found
    return child


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is for Linux")
def test_the_fork_server_outlives_who_is_killed_when_its_program_ends(tmp_path: Path) -> None:
    """It learns of both at once, where it was busy meanwhile: here with somebody who has asked for half of a program."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])}
    words = [sys.executable, "-P", "-m", "tests.starts.told", "a", "0"]
    unbuffered = {**environment, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, cwd=tmp_path, env=unbuffered, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        assert killed.stdin is not None and killed.stdout is not None
        assert killed.stdout.readline() == b"forked: True\n"
        with socket.socket(socket.AF_UNIX) as half:
            half.connect(os.environ["FORK_SERVER"])
            half.sendall(b"{")
            server, _, _ = struct.unpack("3i", half.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            program = running_in(tmp_path.resolve(), server)
            killed.stdin.close()
            deadline = time.monotonic() + 300
            while "State:\tZ" not in Path(f"/proc/{program}/status").read_text():  # over, and the server has not heard of it
                assert time.monotonic() < deadline
                time.sleep(0.02)
            killed.kill()
            killed.wait()
    told = subprocess.run(words, env=environment, input="in\n", capture_output=True, text=True, check=False)
    assert told.returncode == 0 and "forked: True" in told.stdout, told


@pytest.mark.parametrize("devices", [1, 2])
def test_the_fork_server_knows_what_starts_points(
    devices: int, tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", command_of(make_point(devices=devices), tmp_path))
    assert sitecustomize.program() is not None, "every worker of every test would load torch anew"
