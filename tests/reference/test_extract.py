"""The committed files are what the extraction reads from the sources, where these are at hand; and the extraction notices changes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caraml.reference import paths

ROOT = Path(__file__).parents[2]
TEXTS = ROOT.parent / "shared" / "sources"
SCRIPT = ROOT / "bench" / "reference" / "extract.py"

pytestmark = pytest.mark.skipif(not TEXTS.is_dir(), reason="the sources' texts are not part of the repository")


def extract(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(folder), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_files_are_what_the_sources_say(tmp_path: Path) -> None:
    done = extract(TEXTS, tmp_path)
    assert done.returncode == 0, done.stderr
    for path in map(Path, paths()):
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("001_maelstrom_d3.7_hardware_benchmarking.txt", "61.11\t56.98", "61.12\t56.98", "Table 6: the device_energy add up to"),
        ("001_maelstrom_d3.7_hardware_benchmarking.txt", "9346645\t9346701", "9346645", "Table 6: rows of different length"),
        ("001_maelstrom_d3.7_hardware_benchmarking.txt", "approximately 25.5%", "approximately 26.5%", "no 25.5 within"),
        ("003_pearc22_accelerators.txt", "107,535\t11.8\n", "\n", "not enough values"),
        ("004_epicure_best_practice_ai.txt", "with 90% at 16 nodes", "with some at 16 nodes", "no 90 within"),
        ("000_caraml_slides_sc24.txt", "64\t64.99", "64\t63.99", "IPU NLP: the throughput add up to"),
    ],
)
def test_a_change_of_the_text_is_noticed(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    folder = tmp_path / "texts"
    shutil.copytree(TEXTS, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    text = (folder / name).read_text(encoding="utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new), encoding="utf-8")
    done = extract(folder, tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
