"""Damaged data files: the whole file's content, or one line that names the file; nothing else.

LMDB is a C library that trusts its pages, so every trial of it runs in a process of its own that is forked for it.
"""

from __future__ import annotations

import faulthandler
import io
import lzma
import os
import random
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from PIL import Image

from caraml.base.errors import CaramlError
from caraml.data.staging import stage
from caraml.workloads.image_classification.decode import Damaged, central_crop, decode_crop
from caraml.workloads.image_classification.packed import LmdbStore, TarStore, write_lmdb
from caraml.workloads.image_compression.training import mnist
from tests.hostile.damage import EXAMPLES, FUZZ, NASTY, Edit, damaged, edits, refuses_damage, verdict_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
NAMES = ("0/a.png", "0/b.png", "1/c.png")


def encoded(form: str, **how: Any) -> bytes:
    content = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(noise).save(content, form, **how)
    return content.getvalue()


FORMS = {
    "jpeg": encoded("JPEG"),
    "png": encoded("PNG"),
    "bmp": encoded("BMP"),
    "ppm": encoded("PPM"),
    "webp": encoded("WEBP"),
    "webp of several": encoded("WEBP", save_all=True, append_images=[Image.new("RGB", (24, 24), "red")]),
    "tiff": encoded("TIFF"),
    "tiff of several": encoded("TIFF", compression="tiff_lzw", save_all=True, append_images=[Image.new("RGB", (24, 24), "red")]),
}


def tar(mode: str = "w") -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:  # type: ignore[call-overload]
        for name in NAMES:
            member = tarfile.TarInfo(name)
            member.size = len(FORMS["png"])
            archive.addfile(member, io.BytesIO(FORMS["png"]))
    return content.getvalue()


def zipped() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            archive.writestr(name, FORMS["ppm"])
    return content.getvalue()


def read_tar(path: Path) -> None:
    store = TarStore(path)
    for position in range(len(store.labels)):
        try:
            store.read(position)
        except OSError as error:  # one image that is missing is told by who draws it, with its name
            assert "shard" in str(error)


def unpack(path: Path) -> None:
    stage(path, path.parent / "staged", unpack=True)


def read_digits(path: Path) -> None:
    mnist(path.parent)


@dataclass(frozen=True)
class Kind:
    """A kind of file: a whole one, and whoever reads it."""

    content: bytes
    name: str
    read: Callable[[Path], None]


IDX = b"\x00\x00\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (4, 28, 28)) + bytes(4 * 28 * 28)
KINDS = {
    "tar": Kind(tar(), "a.tar", read_tar),
    "tar to unpack": Kind(tar(), "b.tar", unpack),
    "tar.gz": Kind(tar("w:gz"), "a.tar.gz", unpack),
    "tar.xz": Kind(lzma.compress(tar()), "a.tar.xz", unpack),
    "zip": Kind(zipped(), "a.zip", unpack),
    "digits": Kind(IDX, "train-images-idx3-ubyte", read_digits),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_archives_of_data(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sort = KINDS[kind]
    path = tmp_path / sort.name
    if kind == "digits":
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(b"\x00\x00\x08\x01" + (4).to_bytes(4, "big") + bytes(4))

    def look(error: CaramlError) -> None:
        assert sort.name in str(error)
        assert "\n" not in str(error).partition("\n  next step:")[0]

    refuses_damage(path, sort.content, sort.read, look)
    assert not [file for file in tmp_path.parent.iterdir() if file.name in {"etc", "passwd"}], "nothing lands elsewhere"


@pytest.mark.parametrize("form", FORMS)
def test_damaged_images(form: str) -> None:
    whole = decode_crop(FORMS[form], central_crop, 16)

    @FUZZ
    @given(edits)
    def check(changes: list[Edit]) -> None:
        try:
            picture = decode_crop(damaged(FORMS[form], changes), central_crop, 16)
        except Damaged as error:
            assert "\n" not in str(error)
        else:
            assert picture.shape == whole.shape

    check()


# -- LMDB ------------------------------------------------------------------------------------------------------------------

TRIALS = int(os.environ.get(EXAMPLES, "40"))


def trial(path: Path, verdict: Any) -> None:
    faulthandler.disable()  # a crash is told by its verdict
    try:
        store = LmdbStore(path)
        for position in range(len(store.labels)):
            store.read(position)
        verdict.send("read")
    except CaramlError as error:
        verdict.send("told" if str(path) in str(error) else f"error without its file: {error}")
    except OSError as error:
        verdict.send("told" if "missing" in str(error) else f"OSError: {error}")
    except Exception as error:  # noqa: BLE001  -- whatever escapes is what this test looks for
        verdict.send(f"{type(error).__name__}: {error}")


@pytest.mark.processes
def test_damaged_lmdb(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar())
    path = tmp_path / "a.lmdb"
    write_lmdb(TarStore(tmp_path / "a.tar"), path)
    content, rng = path.read_bytes(), random.Random(TRIALS)
    verdicts: list[str] = []
    for _ in range(TRIALS):
        # What LMDB trusts stands at the beginning of each page: of which two are its own description.
        place = (rng.randrange(len(content) // 4096) * 4096 + rng.randrange(160)) / len(content)
        edit = Edit(
            rng.choice(["replace", "replace", "cut", "remove"]), place, rng.randrange(1, 64), rng.choice([*NASTY, rng.randbytes(4)])
        )
        path.write_bytes(damaged(content, [edit]))
        verdicts.append(verdict_of(trial, path))
    assert not [verdict for verdict in verdicts if verdict not in ("read", "told", "crashed")]
    assert verdicts.count("told") > 3
