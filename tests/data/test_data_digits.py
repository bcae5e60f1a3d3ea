"""Drawn digits look like MNIST's, idx files are read, others are named."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from caraml.base.errors import InputError
from caraml.data.loader import stream
from caraml.workloads.image_compression.training import _draw, drawn_digits, mnist


def test_drawn_digits_are_white_on_black_inside_the_image_and_all_different() -> None:
    images = _draw(200, seed=0)
    assert images.shape == (200, 28, 28) and images.dtype == np.uint8
    assert 0.05 < (images > 127).mean() < 0.3 and images.max() > 200
    border = np.concatenate([images[:, 0].ravel(), images[:, -1].ravel(), images[:, :, 0].ravel(), images[:, :, -1].ravel()])
    assert border.mean() < 10
    assert len({image.tobytes() for image in images}) == 200
    assert np.array_equal(images, _draw(200, seed=0)) and not np.array_equal(images, _draw(200, seed=1))


@pytest.mark.processes
def test_drawn_once_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path))
    digits, again, unseen = drawn_digits(64), drawn_digits(64), drawn_digits(64, held_out=True)
    assert torch.equal(digits[5], again[5]) and not torch.equal(digits[5], unseen[5])
    assert len(list(tmp_path.glob("digits-*"))) == 2
    for workers in (0, 1):
        with stream(digits, 16, workers=workers) as batches:
            batch = torch.cat([next(batches) for _ in range(4)])
        assert (batch.dtype, batch.shape) == (torch.uint8, (64, 1, 28, 28))
        assert batch.sum() == sum(int(digits[position].sum()) for position in range(64)), "each image once"


def idx(count: int, side: int = 28, magic: int = 2051) -> bytes:
    pixels = np.arange(count * side * side, dtype=np.uint32).astype(np.uint8)
    return struct.pack(">4i", magic, count, side, side) + pixels.tobytes()


def test_mnist_s_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(7))
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(3)))
    train, test = mnist(tmp_path), mnist(tmp_path, held_out=True)
    assert (len(train), len(test)) == (7, 3) and train[1][0, 0, 0] == 784 % 256
    assert train.describe()["path"].endswith("train-images-idx3-ubyte")


@pytest.mark.parametrize("content", [b"short", idx(3)[:-1], idx(3, side=32), idx(3, magic=2049)], ids=["short", "cut", "size", "labels"])
def test_other_files_are_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found neither"):
        mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(InputError, match="train-images-idx3-ubyte: "):
        mnist(tmp_path)
