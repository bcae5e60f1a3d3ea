"""Look-alike data of any size: as large as asked, ended and gone on with, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest
from typer.testing import CliRunner

from caraml.base.errors import CaramlError
from caraml.base.processes import Lock
from caraml.cli import app
from caraml.data.store import only_writer, refuse_unfinished
from caraml.workloads.gpt.text import grow_text
from caraml.workloads.gpt.tokens import IndexedTokens, TokenSamples
from caraml.workloads.image_classification.store import FolderStore, grow_image_folder
from caraml.workloads.weather import ensemble_postprocessing as ensemble
from caraml.workloads.weather import grow_weather
from caraml.workloads.weather.downscaling_gan import DownscalingSamples

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
    process = subprocess.Popen(["nice", "-n", "19", *COMMAND], cwd=tmp_path, start_new_session=True)  # it lets this process look
    while len(list((tmp_path / "set").glob("*.nc"))) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGSTOP)  # what follows may take its time
    assert 5 <= len(list((tmp_path / "set").glob("*.nc"))) < 50
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    os.killpg(process.pid, signal.SIGCONT)  # the writers are dead by now; what else there is ends by itself
    while writers(process.pid):  # ended by the kernel, since nobody waits for them
        time.sleep(0.05)
    begun = {path: path.stat().st_mtime_ns for path in (tmp_path / "set").glob("*.nc")}
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
        ("ap4", 0.1, "small", "which is 1 part of 120,602,880 bytes; expected 50 or more.*--gigabytes 6.04 or more, or less with"),
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
    with pytest.raises(CaramlError, match="found files; expected a new or empty folder, or what the same command began") as refused:
        grow_weather("ap5", tmp_path, SIZE, "tiny")
    assert refused.value.hint == "give another --out"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, int(SIZE * 1e9) - 1))
    with pytest.raises(CaramlError, match=r"0\.1 GB free on its disk, expected the 0\.1 GB"):
        grow_weather("ap5", tmp_path / "set", SIZE, "tiny")


def finished(kind: str, out: Path) -> Path:
    """A small set of images or text, or the same call again, and its folder of marks."""
    if kind == "images":
        grow_image_folder(out, 0.02, classes=4)
        return out / ".lookalike"
    grow_text([Path(__file__)], out, 0.01, None, 300, "text")
    return out.with_name(f".{out.name}.lookalike")


def contents(out: Path) -> dict[Path, str]:
    files = [path for path in [*out.rglob("*"), *out.parent.glob(f"{out.name}.*")] if path.is_file() and ".lookalike" not in str(path)]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def opened(kind: str, out: Path) -> int:
    return len(FolderStore(out).labels) if kind == "images" else len(TokenSamples(IndexedTokens(out), 64, 300))


@pytest.mark.parametrize("kind", ["images", "text"])
def test_images_and_text_of_any_size_go_on_and_are_refused_until_they_are_whole(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "set"
    marks = finished(kind, out)
    whole = contents(out)
    wanted = 0.02e9 if kind == "images" else 0.01e9
    sizes = [int((marks / str(number)).read_text()) for number in range(len(list(marks.glob("[0-9]*"))))]
    assert len(sizes) > 1 and abs(sum(sizes) - wanted) <= max(sizes) / 2
    assert sum(path.stat().st_size for path in whole if path.suffix in (".jpg", ".bin")) == sum(sizes)
    samples = opened(kind, out)
    assert samples == (64 * len(sizes) if kind == "images" else (sum(sizes) // 2 - 1) // 64)

    for name in ("done", "1"):  # as where a writer was killed
        (marks / name).unlink()
    damaged = out.with_name("set.bin")
    if kind == "images":
        damaged = out / "class_0" / "00000020.jpg"
        (out / "class_3" / f"{samples // 4 + 5:08}.jpg").write_bytes(b"half")
    with damaged.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.truncate()
    with pytest.raises(CaramlError) as refused:
        opened(kind, out)
    words = shlex.split(str(refused.value.hint).partition("go on with it: ")[2])
    assert "look-alike data set that is not whole" in str(refused.value) and words[:4] == ["caraml", "data", "prepare", kind]
    assert words[-2:] == ["--out", str(out)] and "--gigabytes" in words

    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert contents(out) == whole and opened(kind, out) == samples


def test_a_set_of_weather_that_is_not_whole_is_refused_with_its_command(tmp_path: Path) -> None:
    marks = tmp_path / ".lookalike"
    marks.mkdir()
    (tmp_path / "downscaling_tier2_train_000.nc").touch()
    plan = {"application": "ap5", "gigabytes": 0.11, "size": "tiny", "seed": 3, "version": 1}
    (marks / "plan.json").write_text(json.dumps(plan))
    (marks / "0").write_text("2000000")
    with pytest.raises(CaramlError) as refused:
        DownscalingSamples(tmp_path)
    wanted = f"caraml data prepare weather ap5 --gigabytes 0.11 --size tiny --seed 3 --out {tmp_path}"
    assert wanted in str(refused.value.hint) and "found 1 part of" in str(refused.value)
    for number in range(1, 55):  # of an earlier version, which had no last mark, and noted the size of the first file only
        (marks / str(number)).touch()
    refuse_unfinished(marks, tmp_path)


def test_a_set_of_so_many_files_grows_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AP4 has five files of all times: processes write times of their own into them."""
    monkeypatch.setattr("caraml.data.store.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(2))
    monkeypatch.setitem(ensemble._SIZES, "tiny", (20, 9, 14))
    out, marks, size = tmp_path / "set", tmp_path / "set" / ".lookalike", 60.3 * ensemble.part_bytes("tiny") / 1e9
    files, written = grow_weather("ap4", out, size, "tiny")
    assert files == 5 and 0.99 * size < written / 1e9 < 1.01 * size + 5e-5, "the headers are a few kilobytes"
    whole, samples = contents(out), ensemble.EnsembleSamples(out)
    assert len(samples) == 216 and len(ensemble.EnsembleSamples(out, "validation")) == 24
    fields = np.stack([sample[0].numpy() for sample in samples])  # type: ignore[attr-defined]
    assert fields.mean() == pytest.approx(0, abs=0.05) and fields.std() == pytest.approx(1, abs=0.05), "normalised over all times"
    assert len({field.tobytes() for field in fields}) == 216, "each time is another"
    assert samples.describe()["bytes"] == written  # closes them
    for name in ("done", "7", "59"):  # as where writers were killed
        (marks / name).unlink()
    with h5py.File(out / "ENS10_pl_mean.nc", "r+") as file:
        file["U"][28:32] = 0.0
        file["V"][-1] = 0.0
    with pytest.raises(CaramlError, match="look-alike data set that is not whole") as refused:
        ensemble.EnsembleSamples(out)
    assert f"caraml data prepare weather ap4 --gigabytes {size:g}" in str(refused.value.hint)
    grow_weather("ap4", out, size, "tiny")
    assert contents(out) == whole
    (out / "ERA5_z500.nc").unlink()
    grow_weather("ap4", out, size, "tiny")
    assert contents(out) == whole, "all of it anew, as one of the files was gone"


def test_a_given_corpus_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(b"mine")
    with pytest.raises(CaramlError, match=r"set\.bin: found files; expected a free name"):
        grow_text([], tmp_path / "set", 0.01, None, 300, "text")
    assert (tmp_path / "set.bin").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["text", "--out", "t"], "inputs: found none, expected files or folders"),
        (["text", "x.txt", "--out", "t", "--gigabytes", "1", "--tokens", "3"], "--gigabytes: found --documents or --tokens beside it"),
        (["images", "--out", "t", "--gigabytes", "1e9"], "GB free on its disk"),
    ],
)
def test_sizes_that_say_nothing_are_refused(words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["data", "prepare", *words])
    assert isinstance(done.exception, CaramlError) and why in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["weather", "ap5", "--size", "tiny"], ["images"], ["text"]])
def test_a_second_writer_of_a_set_is_refused(words: list[str], tmp_path: Path) -> None:
    """It removed what the first was writing, and both could end with a trace."""
    lock = Lock(tmp_path / ".set.lock", private=False)
    assert lock.take()
    done = CliRunner().invoke(app, ["data", "prepare", *words, "--gigabytes", "0", "--out", str(tmp_path / "set")])
    assert isinstance(done.exception, CaramlError) and "set: another process is writing it" in str(done.exception)
    lock.close(remove=True)
    with only_writer(tmp_path / "set"), pytest.raises(CaramlError, match="another process"), only_writer(tmp_path / "set"):
        pass
    assert not list(tmp_path.iterdir())
