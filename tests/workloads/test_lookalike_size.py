"""Look-alike data of any size: as large as asked, ended and gone on with, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import h5py
import numpy as np
import pytest

from caraml.base.errors import CaramlError
from caraml.workloads.downscaling_gan.data import DownscalingSamples
from caraml.workloads.weather.lookalikes import grow_weather

SIZE = 0.11
COMMAND = [sys.executable, "-m", "caraml", "data", "prepare", "weather", "ap5", "--size", "tiny", "--gigabytes", str(SIZE), "--out", "set"]


def writers(parent: int) -> list[int]:
    """Processes of the group of ``parent`` that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(group) == parent and state != "Z":
                found.append(int(entry.name))
    return found


def test_a_set_is_as_large_as_asked_and_goes_on_after_a_kill(tmp_path: Path, real_start: None) -> None:
    del real_start
    process = subprocess.Popen(COMMAND, cwd=tmp_path, start_new_session=True)
    while len(list((tmp_path / "set").glob("*.nc"))) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while writers(process.pid):  # ended by the kernel, since nobody waits for them
        time.sleep(0.05)
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("*.nc")}
    assert 5 <= len(begun) < 50
    (tmp_path / "set" / ".x.nc.0123456789abcdef.tmp").mkdir()
    done = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "set").glob("*.nc"))
    total = sum(path.stat().st_size for path in files)
    assert abs(total - SIZE * 1e9) < 0.01 * SIZE * 1e9 and len(files) >= 50
    kept = sum(path.stat().st_mtime_ns == begun[path] for path in begun)
    assert kept >= len(begun) - 2, "only what was being written may be written anew"
    assert not list((tmp_path / "set").glob(".*.tmp"))
    with h5py.File(files[7]) as one, h5py.File(files[30]) as other:
        assert not np.array_equal(one["t_2m_tar"][...], other["t_2m_tar"][...])
    assert len(DownscalingSamples(tmp_path / "set")) == 24 * (len(files) - 1)
    again = subprocess.run(COMMAND, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.stdout == done.stdout and not again.stderr


@pytest.mark.parametrize(
    ("application", "gigabytes", "size", "words"),
    [
        ("ap7", 1.0, "tiny", "did you mean 'ap"),
        ("ap2", 1.0, "tiny", "all of its texts are read into memory"),
        ("ap4", 1.0, "tiny", "a set of it is a fixed number of files"),
        ("ap5", 1.0, "large", "unknown size 'large'"),
        ("ap5", 0.001, "tiny", "which is 0 files of .* expected 50 or more.*--gigabytes 0.11 or more"),
        ("ap5", float("nan"), "tiny", "found nan, expected a number"),
        ("ap5", 1e9, "tiny", "GB free on its disk, expected the 1,000,000,000.0 GB"),
    ],
)
def test_a_set_that_cannot_be_is_refused_and_leaves_nothing(
    application: str, gigabytes: float, size: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CaramlError, match=f"(?s){words}"):
        grow_weather(application, tmp_path / "set", gigabytes, size)
    assert not list(tmp_path.iterdir())


def test_what_is_there_counts_and_other_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(CaramlError, match="found files; expected a new or empty folder, or what the same command began"):
        grow_weather("ap5", tmp_path, SIZE, "tiny")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, int(SIZE * 1e9) - 1))
    with pytest.raises(CaramlError, match=r"0\.1 GB free on its disk, expected the 0\.1 GB"):
        grow_weather("ap5", tmp_path / "set", SIZE, "tiny")
