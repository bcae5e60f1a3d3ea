"""Every command and every program on the page about energy works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "energy.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SRUN = """#!/bin/sh
# stands in for Slurm: starts the command twice, as ranks 0 and 1
shift 2
SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=0 "$@" & first=$!
SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=1 "$@" & second=$!
wait $first && wait $second
"""


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with a program to measure, and the commands that the page uses."""
    (tmp_path / "bin").mkdir()
    commands = {
        "srun": SRUN,
        "caraml": f'#!/bin/sh\nexec {sys.executable} -m caraml "$@"\n',
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    }
    for name, text in commands.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "train.py").write_text("print('trained')\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return tmp_path, {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src")}


@pytest.mark.parametrize(("language", "text"), BLOCK.findall(PAGE.read_text()), ids=lambda value: value.splitlines()[0][:40])
def test_block_works(place: tuple[Path, dict[str, str]], language: str, text: str) -> None:
    folder, environment = place
    command = ["sh", "-e", "-c", text] if language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    if language == "python":
        assert re.fullmatch(r"\d+ ± \d+ J, net of idle -?\d+ J\n", done.stdout), done.stdout


def test_every_source_is_in_the_table_with_its_being_read_by_itself() -> None:
    from caraml.power.source import BUILT_IN

    rows = re.findall(r"^\| (`[^|]+) \|.*\| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    shown = {name: auto == "yes" for names, auto in rows for name in re.findall(r"`(\w+)", names)}
    assert shown == {entry.name: entry.auto for entry in BUILT_IN.values() if entry.name != "fake"}
