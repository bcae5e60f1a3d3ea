"""CARAML as somebody installs it: the wheel, in an environment of its own, with nothing of this checkout in reach."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import PROBE_SECONDS

ROOT = Path(__file__).parents[2]

_WATCH = """
import os, sys

_log = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def _note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.fsdecode(arguments[0])
        if path.startswith({checkout!r}) and not path.startswith({libraries!r}):
            os.write(_log, path.encode() + b"\\n")

if "UNWATCHED" not in os.environ:
    sys.addaudithook(_note)
"""
"""Put into the environment's start-up: writes down every file of the checkout that a process of the environment opens."""


@dataclass(frozen=True)
class Installation:
    """An environment with CARAML's wheel in it. The packages that CARAML needs are those of the interpreter that runs the tests."""

    folder: Path
    wheel: Path

    @property
    def packages(self) -> Path:
        """The environment's own site-packages."""
        return next((self.folder / "lib").glob("python3*/site-packages"))

    def run(self, *words: object, cwd: Path, exit_code: int = 0) -> str:
        """Standard output and errors of a command of the environment, run outside of the checkout."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CARAML", "COV"))}
        environment |= {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.folder),
            "COLUMNS": "120",
            "CARAML_HERE": "1",
            "CARAML_PROBE_SECONDS": PROBE_SECONDS,
        }
        command = [str(self.folder / "bin" / str(words[0])), *map(str, words[1:])]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == exit_code, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def install(self, *projects: Path) -> None:
        """Install wheels, or projects in folders, without their requirements and without a network; what is not run is not compiled."""
        options = ("--no-compile", "--no-deps", "--no-index", "--no-build-isolation")
        pip("--python", str(self.folder / "bin" / "python"), "install", *options, *map(str, projects))

    def opened_in_checkout(self) -> list[str]:
        """Files of the checkout that processes of this environment have opened."""
        return sorted(set((self.folder / "opened").read_text(encoding="utf-8").splitlines()))

    def shipped(self) -> set[str]:
        """Files of the package in the wheel, relative to the package."""
        return {name.removeprefix("caraml/") for name in zipfile.ZipFile(self.wheel).namelist() if name.startswith("caraml/")}


def pip(*words: str) -> None:
    """Run pip, which must not need a network, and may read the checkout: it installs from there."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, env=os.environ | {"UNWATCHED": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def library_folders() -> Sequence[str]:
    """Where the interpreter that runs the tests keeps its packages. A ``.pth`` inside them (an editable installation) is not followed."""
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


@pytest.fixture(scope="session")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """CARAML's wheel, built from this checkout and installed."""
    folder = tmp_path_factory.mktemp("installed")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    made = Installation(folder / "environment", next(folder.glob("caraml-*.whl")))
    venv.create(made.folder, with_pip=False, symlinks=True)
    (made.packages / "libraries.pth").write_text("".join(f"{path}\n" for path in library_folders()))
    watch = _WATCH.format(log=str(made.folder / "opened"), checkout=f"{ROOT}{os.sep}", libraries=f"{ROOT / '.venv'}{os.sep}")
    made.install(made.wheel)
    (made.packages / "watch_checkout.py").write_text(watch)
    # Not as sitecustomize: Debian's Python has one of its own, which goes before.
    (made.packages / "watch_checkout.pth").write_text("import watch_checkout\n")
    return made
