"""What the tests of the data room share."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import caraml
from caraml.workloads.image_classification.store import generate_image_folder

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start_python(tmp_path: Path) -> Run:
    """Starts ``python -c code`` with this caraml importable and the data folder inside the test's own."""

    def start(code: str, **environment: str) -> subprocess.Popen[str]:
        source = str(Path(caraml.__file__).parents[1])
        return subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": source, "CARAML_DATA": str(tmp_path / "data"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run_python(start_python: Run) -> Callable[..., str]:
    """Runs ``python -c code`` to its end, which has to be a good one, and returns what it printed."""

    def run(code: str, **environment: str) -> str:
        process = start_python(code, **environment)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return out

    return run


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A generated folder of 4 classes with 50 images each, how many these are, and their bytes."""
    root = tmp_path_factory.mktemp("images") / "folder"
    return root, *generate_image_folder(root, classes=4, images_per_class=50, seed=1)
