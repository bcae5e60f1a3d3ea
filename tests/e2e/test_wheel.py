"""The wheel is all that CARAML needs: it measures and writes its page where there is no checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Installation

TINY = """
name = "tiny"
title = "A tiny run from the wheel"

[[benchmark]]
name = "gpt"
workload = "gpt"
global_batch = 4
params = { preset = "4M", width = 32, layers = 1, heads = 1, sequence_length = 16, vocab_size = 64, data = "synthetic" }
measure = { target = 0.5, min_seconds = 0.2, max_seconds = 0.5, warm_up_max_seconds = 0.2, idle_seconds = 0 }
"""


@pytest.fixture(scope="module")
def place(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the installed CARAML has run the tiny suite."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "tiny.toml").write_text(TINY)
    assert "report: caraml-results/tiny.html" in installation.run("caraml", "run", "tiny.toml", cwd=folder)
    return folder


def test_everything_in_the_package_is_in_the_wheel(installation: Installation) -> None:
    package = ROOT / "src" / "caraml"
    there = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert installation.shipped() == there
    assert {"py.typed", "report/page.html.jinja", "suite/catalog/quick.toml", "system/catalog/peaks.toml"} <= there


def test_the_command_runs_from_the_wheel(installation: Installation, tmp_path: Path) -> None:
    where = installation.run("python", "-c", "import caraml; print(caraml.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installation.packages)
    assert "compare" in installation.run("caraml", "--help", cwd=tmp_path)
    suites = installation.run("caraml", "list", "suites", cwd=tmp_path)
    assert {line.split()[0] for line in suites.splitlines()} == {path.stem for path in (ROOT / "src/caraml/suite/catalog").glob("*.toml")}


def test_data_of_the_package_is_read_from_the_wheel(installation: Installation, tmp_path: Path) -> None:
    assert "JEDI" in installation.run("caraml", "system", "show", "jedi", cwd=tmp_path)
    assert "maelstrom" in installation.run("caraml", "references", cwd=tmp_path)


def test_a_suite_runs_from_the_wheel_and_writes_its_page(installation: Installation, place: Path) -> None:
    (file,) = place.glob("caraml-results/points/*/1/record.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    assert record["status"] == "ok" and record["metrics"]["throughput"]["value"] > 0
    assert record["environment"]["git"] is None, "the worker did not run from the wheel"
    page = (place / "caraml-results" / "tiny.html").read_text(encoding="utf-8")
    assert "A tiny run from the wheel" in page and "gpt b4 fp32" in page
    assert "gpt b4 fp32" in installation.run("caraml", "results", "tiny", "--csv", cwd=place)


def test_no_file_of_the_checkout_is_opened(installation: Installation, place: Path) -> None:
    assert (place / "caraml-results").exists()
    assert installation.opened_in_checkout() == []
    installation.run("python", "-c", f"open({str(ROOT / 'README.md')!r}).close()", cwd=place)
    assert installation.opened_in_checkout() == [str(ROOT / "README.md")], "the environment does not notice what is opened"
