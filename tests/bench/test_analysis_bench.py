"""The benches of the statistics start as their commands say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["nights", "speed"])
def test_it_finds_what_it_shares_with_the_tests(name: str, tmp_path: Path) -> None:
    """Started from anywhere, with nothing but the package: the checkout was not on the path."""
    command = [sys.executable, str(ROOT / "bench" / "analysis" / f"{name}.py"), "--help"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
