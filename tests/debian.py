"""Programs that tests need and pip cannot bring: from Debian's packages, where this machine lets us."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

_WHY_NOT: list[str] = []
"""Reasons for which something was not tested; the end of the run shows them."""


@cache
def install(packages: Sequence[str], programs: Sequence[str]) -> str | None:
    """Get ``packages`` if one of ``programs`` is missing. Says why that is not possible, or ``None``."""
    missing = [name for name in programs if shutil.which(name) is None]
    if not missing:
        return None
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        return noted(f"{', '.join(missing)} missing; as root: apt-get install {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return noted(f"apt-get install {' '.join(packages)} failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    missing = [name for name in programs if shutil.which(name) is None]
    return noted(f"installed, and still missing: {', '.join(missing)}") if missing else None


def noted(reason: str) -> str:
    """Remember a reason for the end of the run."""
    _WHY_NOT.append(reason)
    return reason


def not_tested() -> list[str]:
    """Why something was not tested."""
    return list(dict.fromkeys(_WHY_NOT))
