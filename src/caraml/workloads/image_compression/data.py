"""28 x 28 images of digits: MNIST's idx files where they are given, else digits that are drawn here."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from caraml.base.errors import InputError
from caraml.base.files import making
from caraml.base.limits import DIGITS, too_large
from caraml.base.packed import unpacking
from caraml.data.store import prepared_once

SIDE = 28
DRAWN = 60_000
"""Images of a drawn epoch, as many as MNIST's training set has."""
_VERSION = 1
_IMAGES_MAGIC = 2051
_DTYPE = np.uint8
_PARTS = {False: "train-images-idx3-ubyte", True: "t10k-images-idx3-ubyte"}


class Digits(torch.utils.data.Dataset[torch.Tensor]):
    """Grey images as uint8 (1, 28, 28), from an array (N, 28, 28)."""

    def __init__(self, images: npt.NDArray[np.uint8], origin: dict[str, Any]) -> None:
        self._images, self._origin = images, origin

    def __len__(self) -> int:
        """The number of images."""
        return len(self._images)

    def __getitem__(self, position: int) -> torch.Tensor:
        """Image ``position``."""
        return torch.from_numpy(np.array(self._images[position])).unsqueeze(0)

    def __getitems__(self, positions: Sequence[int]) -> torch.Tensor:
        """A batch (B, 1, 28, 28), cut out of the array at once."""
        return torch.from_numpy(self._images[np.asarray(positions)]).unsqueeze(1)

    @staticmethod
    def collate(batch: Any) -> Any:
        """Batches are whole already."""
        return batch

    def describe(self) -> dict[str, Any]:
        """The provenance of a record."""
        return {"kind": "digits", "items": len(self), "bytes": self._images.nbytes, **self._origin}


def mnist(folder: Path, held_out: bool = False) -> Digits:
    """The images of MNIST's idx file in ``folder``, compressed or not.

    Raises:
        InputError: if there is no such file, or it is not one of 28 x 28 images.
    """
    name = _PARTS[held_out]
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    if path is None:
        raise InputError(f"{folder}: found neither {name} nor {name}.gz", "leave `folder` out to use drawn digits")
    try:
        with unpacking(path) as file:
            data = bytearray()  # piece by piece, so that it is in memory once
            while len(data) <= DIGITS and (piece := file.read(1 << 20)):
                data += piece
        if len(data) > DIGITS:
            raise too_large(path, len(data), DIGITS)
        magic, count, height, width = struct.unpack_from(">4i", data)
    except struct.error as error:
        raise InputError(f"{path}: not readable as an idx file: {error}") from error
    size = len(data) - 16
    if (magic, height, width) != (_IMAGES_MAGIC, SIDE, SIDE) or size != count * SIDE * SIDE:
        expected = f"magic {_IMAGES_MAGIC}, N x {SIDE} x {SIDE} images"
        raise InputError(f"{path}: found magic {magic}, {count} x {height} x {width} and {size} bytes; expected {expected}")
    return Digits(np.frombuffer(data, _DTYPE, offset=16).reshape(count, SIDE, SIDE), {"path": str(path)})


def drawn_digits(images: int = DRAWN, held_out: bool = False) -> Digits:
    """Digits of the font that comes with Pillow, each moved, turned and scaled at random; drawn on first use, found again later."""
    import PIL

    seed = 1 if held_out else 0
    key = {"kind": "digits", "version": _VERSION, "images": images, "seed": seed, "pillow": PIL.__version__, "numpy": np.__version__}
    folder = prepared_once(key, lambda folder: _write(folder / "images.npy", _draw(images, seed)))
    return Digits(np.load(folder / "images.npy", mmap_mode="r"), {"path": str(folder), "drawn": True})


def _write(path: Path, images: npt.NDArray[np.uint8]) -> None:
    with making(path) as file:
        np.save(file, images)


def _draw(images: int, seed: int) -> npt.NDArray[np.uint8]:
    from PIL import Image, ImageDraw, ImageFont

    large = 4 * SIDE
    glyphs = []
    for digit in range(10):
        glyph = Image.new("L", (large, large))
        ImageDraw.Draw(glyph).text((large // 2, large // 2), str(digit), fill=255, font=ImageFont.load_default(96), anchor="mm")
        glyphs.append(glyph)
    rng = np.random.default_rng(seed)
    out = np.empty((images, SIDE, SIDE), dtype=_DTYPE)
    for number in range(images):
        angle, zoom = rng.normal(0, 0.15), rng.uniform(3.2, 4.6)
        right, down = rng.uniform(-2.5, 2.5, 2)
        cos, sin, half = zoom * math.cos(angle), zoom * math.sin(angle), SIDE / 2
        # Where a pixel of the small image lies in the large one: turned about the centre, `zoom` large pixels apart.
        x, y = half + right, half + down
        affine = (cos, -sin, large / 2 - cos * x + sin * y, sin, cos, large / 2 - sin * x - cos * y)
        out[number] = np.asarray(glyphs[number % 10].transform((SIDE, SIDE), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR))
    return out[rng.permutation(images)]
