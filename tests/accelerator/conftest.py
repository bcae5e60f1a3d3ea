"""The emulated accelerator: built once, and a fork server whose processes have it as torch's plug-in."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from caraml.base.files import intruder
from caraml.system.families.family import installed_torch
from tests.conftest import STARTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")
Inside = Callable[..., str]
"""Runs a function of ``tests.accelerator.inside`` in a process that has the accelerator; settings of the device by name. Its output."""


def _kept_in() -> Path:
    """A folder of this user for what takes long to build; a new one where others could write into it."""
    try:
        folder = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "caraml-tests"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, KeyError):  # also of a user whom no list has, as containers may
        return Path(tempfile.mkdtemp(prefix="caraml-"))
    return folder if intruder(folder) is None and os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="caraml-"))


@pytest.fixture(scope="session")
def library() -> Path:
    """The accelerator's library for the torch that is installed: half a minute of a compiler, once."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ missing: nothing is tested on the emulated accelerator; as root: apt-get install g++")
    build, sources = installed_torch(), sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    assert build is not None
    told = hashlib.sha256(b"".join([build.version.encode(), sys.version.encode(), *(path.read_bytes() for path in sources)])).hexdigest()
    spec = find_spec("torch")
    assert spec is not None and spec.origin
    kept, torch = _kept_in(), Path(spec.origin).parent
    library = kept / f"emulated-{build.version}-{told[:16]}.so"
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(f".{os.getpid()}")
            libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
            command = [compiler, *FLAGS, f"-I{torch / 'include'}", str(HERE / "kernels.cpp"), "-o", str(part), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert not done.returncode, done.stderr[-4000:]
            part.replace(library)
    return library


@pytest.fixture(scope="session")
def surroundings(library: Path) -> Iterator[dict[str, str]]:
    """Variables for what is started: torch there has the accelerator, and is loaded already."""
    with tempfile.TemporaryDirectory(prefix="caraml-", dir="/tmp") as folder:  # a socket's path must be short
        places = [str(STARTS), str(HERE / "plugin"), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {**os.environ, "EMULATED_LIBRARY": str(library), "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}
        variables |= {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "CARAML_BIND": "off",
            "FORK_SERVER": f"{folder}/socket",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-P", str(STARTS / "server.py"), variables["FORK_SERVER"]]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables) as server:
            yield variables
            server.kill()


@pytest.fixture
def inside(surroundings: dict[str, str]) -> Inside:
    """Runs a function on the accelerator."""

    def run(name: str, **settings: float) -> str:
        variables = surroundings | {f"EMULATED_{key.upper()}": str(value) for key, value in settings.items()}
        command = [sys.executable, "-m", "tests.accelerator.inside", name]
        done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300, check=False)
        assert not done.returncode, done.stdout + done.stderr[-6000:]
        return done.stdout

    return run
