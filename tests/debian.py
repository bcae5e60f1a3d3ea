"""Programs that tests need and pip cannot bring: from Debian's packages, where this machine lets us."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def install(packages: Sequence[str], programs: Sequence[str]) -> str | None:
    """Get ``packages`` if one of ``programs`` is missing. Says why that is not possible, or ``None``."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return None
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return f"{', '.join(missing)} missing; as root: apt-get install {' '.join(packages)}"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with _one_at_a_time():
        if all(map(shutil.which, programs)):
            return None
        for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"apt-get install {' '.join(packages)} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}"
    missing = [name for name in programs if shutil.which(name) is None]
    return f"installed, and still missing: {', '.join(missing)}" if missing else None


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Several processes run the tests, and apt refuses to run twice."""
    path = Path(tempfile.gettempdir(), "caraml-tests-apt.lock")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compiler_missing() -> str | None:
    """Why torch cannot compile for a CPU here, or ``None``: it writes C++ that includes Python's headers."""
    compiler, header = os.environ.get("CXX", "g++"), Path(sysconfig.get_path("include"), "Python.h")
    missing = [*([] if shutil.which(compiler) else [compiler]), *([] if header.exists() else [str(header)])]
    return f"compilation for a CPU: {', '.join(missing)} missing; as root: apt-get install g++ python3-dev" if missing else None
