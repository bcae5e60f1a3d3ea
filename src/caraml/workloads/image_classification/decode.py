"""From an encoded image to the pixels of one crop, doing as little work as the crop allows.

The crop is chosen from the header, before anything is decoded. Where it is at least twice as large as the result, the JPEG is decoded at
a half, a quarter or an eighth of its size straight from its cosine transform. Decoding is libjpeg-turbo's and resizing torch's vectorised
filter on bytes, whose result is Pillow's antialiased bilinear one to a level; what libjpeg-turbo does not take (other formats, CMYK) goes
through Pillow.

Batches may also be made by NVIDIA DALI: JPEGs decoded, cropped and flipped on the GPU. It is an optional extra; the package is large and of
one vendor.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from caraml.base.errors import EnvironmentUnfitError
from caraml.base.limits import PIXELS, PIXELS_OTHER
from caraml.workloads.image_classification.store import FolderStore, described

AREA = (0.08, 1.0)
"""Smallest and largest share of an image's area that a random crop covers (Szegedy et al. 2015, "Going deeper with convolutions")."""
ASPECT = (3 / 4, 4 / 3)
"""Narrowest and widest shape of a random crop, width over height, before it is resized to a square."""
CENTRAL = 224 / 256
"""Share of the shorter side that a central crop takes: resizing to 256 pixels and cutting 224 out of the middle."""
_TRIES = 10
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "PPM")
"""What Pillow may decode, of the fifty formats that it knows: some of the others run programs."""
_REDUCTIONS = (8, 4, 2)


class Box(NamedTuple):
    """A part of an image in pixels."""

    left: int
    top: int
    width: int
    height: int


Choose = Callable[[int, int], Box]
"""Chooses the crop of an image by its width and height."""


class Damaged(ValueError):  # noqa: N818  # what it says of a file, not of the program
    """Bytes that are no image, or only the beginning of one."""


def random_crop(rng: random.Random) -> Choose:
    """The crop of random size and shape that image classification is trained with, as torchvision's ``RandomResizedCrop`` defines it.

    Area uniform in :data:`AREA`, logarithm of the shape uniform in :data:`ASPECT`, position uniform; after ten that do not fit, the
    largest central part of an allowed shape.
    """

    def choose(width: int, height: int) -> Box:
        for _ in range(_TRIES):
            area = width * height * rng.uniform(*AREA)
            aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
            across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < across <= width and 0 < down <= height:
                return Box(rng.randint(0, width - across), rng.randint(0, height - down), across, down)
        across = min(width, round(height * ASPECT[1]))
        down = min(height, round(width / ASPECT[0]))
        return Box((width - across) // 2, (height - down) // 2, across, down)

    return choose


def central_crop(width: int, height: int) -> Box:
    """The square in the middle that validation looks at."""
    side = max(1, round(CENTRAL * min(width, height)))
    return Box((width - side) // 2, (height - side) // 2, side, side)


def decode_crop(data: bytes, choose: Choose, size: int, *, reduced: bool = True) -> torch.Tensor:
    """The chosen part of an encoded image (a whole file: JPEG, PNG, BMP, WebP, TIFF, PPM or PGM), resized: uint8 (3, size, size), red,
    green, blue, the channels of a pixel side by side in memory.

    ``reduced``: decode at reduced size where the crop is at least twice as large as the result. Raises :class:`Damaged` for bytes that
    cannot be decoded to the end.
    """
    decoded = _decode_jpeg(data, choose, size, reduced) if data[:2] == b"\xff\xd8" else None
    pixels, box = decoded or _decode_any(data, choose, size, reduced)
    part = torch.from_numpy(pixels)[box.top : box.top + box.height, box.left : box.left + box.width]
    image = part.permute(2, 0, 1).unsqueeze(0)  # (1, 3, height, width), a view
    return torch.nn.functional.interpolate(image, (size, size), mode="bilinear", antialias=True)[0]


Decoded = tuple[npt.NDArray[np.uint8], Box]
"""Pixels (height, width, 3), and the crop on their scale."""


def _decode_jpeg(data: bytes, choose: Choose, size: int, reduced: bool) -> Decoded | None:
    """By libjpeg-turbo; ``None`` for what it does not turn into RGB, or complains of: Pillow has the last word on what is damaged."""
    import simplejpeg

    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in ("YCbCr", "Gray", "RGB"):
            return None
        _refuse_huge(width, height, PIXELS)
        box = choose(width, height)
        fit = _reduction(box, size) if reduced else 1
        least = (math.ceil(height / fit), math.ceil(width / fit)) if fit > 1 else (0, 0)
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], min_factor=fit)
    except Damaged:
        raise
    except ValueError:
        return None
    return pixels, _on_scale(box, pixels.shape[1] / width, pixels.shape[0] / height)


def _decode_any(data: bytes, choose: Choose, size: int, reduced: bool) -> Decoded:
    """By Pillow."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            width, height = image.size
            _refuse_huge(width, height, PIXELS_OTHER)
            box = choose(width, height)
            fit = _reduction(box, size) if reduced else 1
            if fit > 1:
                image.draft(image.mode, (width // fit, height // fit))
            pixels = np.array(image.convert("RGB") if image.mode != "RGB" else image)
    except Damaged:
        raise
    except Image.DecompressionBombError as error:
        raise Damaged(f"more pixels than the {PIXELS_OTHER:,} that are read") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # what Pillow raises for a damaged file
        unknown = isinstance(error, UnidentifiedImageError)
        raise Damaged("no image of a known format" if unknown else " ".join(str(error).split()) or type(error).__name__) from error
    return pixels, _on_scale(box, pixels.shape[1] / width, pixels.shape[0] / height)


def _refuse_huge(width: int, height: int, most: int) -> None:
    """A header of a few bytes must not make a worker ask for gigabytes."""
    if width * height > most:
        raise Damaged(f"found {width} x {height} pixels, at most {most:,} are read")


def _reduction(box: Box, size: int) -> int:
    """The largest of libjpeg's fast reductions that leaves at least ``size`` pixels of the crop on either side."""
    return next((factor for factor in _REDUCTIONS if min(box.width, box.height) >= factor * size), 1)


def _on_scale(box: Box, across: float, down: float) -> Box:
    """The same part of an image of another size."""
    left, top = round(box.left * across), round(box.top * down)
    right, bottom = round((box.left + box.width) * across), round((box.top + box.height) * down)
    return Box(left, top, max(1, right - left), max(1, bottom - top))


_AHEAD = 2


class DaliBatches(Iterator[list[torch.Tensor]]):
    """Endless batches ``[uint8 (B, 3, S, S), int64 (B,)]`` of one rank, made on its device."""

    def __init__(
        self,
        root: Path,
        size: int,
        batch_size: int,
        device: torch.device,
        *,
        threads: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        passes: int = 1,
    ) -> None:
        """Build the pipeline over ``root/CLASS/IMAGE``; on a CPU device it decodes there, which is for tests.

        An epoch has each image ``passes`` times. All are shuffled once, as they lie class by class, and every epoch anew by DALI's reader,
        among those that it holds at a time. Each rank reads its own shard, and an incomplete batch is left out. Raises
        ``EnvironmentUnfitError`` if DALI is not installed, and ``InputError`` if ``root`` is no image folder.
        """
        self.store = FolderStore(root)
        self._size, self._batch_size, self._device, self._passes = size, batch_size, device, passes
        try:
            from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
        except ImportError as error:
            found = "data = 'dali' needs NVIDIA DALI, which is not installed"
            raise EnvironmentUnfitError(found, "pip install nvidia-dali-cuda120 (or -cuda130), or use data = 'images'") from error
        pipeline = self._pipeline(threads, seed, rank, world)
        self._source = DALIGenericIterator(
            [pipeline], ["images", "labels"], reader_name="files", auto_reset=True, last_batch_policy=LastBatchPolicy.DROP
        )
        self._epoch = iter(self._source)

    def _pipeline(self, threads: int, seed: int, rank: int, world: int) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        on_gpu = self._device.type == "cuda"
        names = [self.store.name(position) for position in range(len(self.store.labels))]
        order = np.random.default_rng(seed).permutation(len(self)) % len(names)
        files = [names[position] for position in order]

        @pipeline_def(
            batch_size=self._batch_size,
            num_threads=max(1, threads),
            device_id=self._device.index if on_gpu else None,
            seed=seed,
            prefetch_queue_depth=_AHEAD,
        )
        def pipeline() -> tuple[Any, Any]:
            encoded, labels = fn.readers.file(
                name="files",
                files=files,
                labels=self.store.labels[order].tolist(),
                shard_id=rank,
                num_shards=world,
                random_shuffle=True,
                shuffle_after_epoch=False,
                initial_fill=min(len(files), 10_000),
                stick_to_shard=False,
            )
            images = fn.decoders.image_random_crop(
                encoded,
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                random_area=list(AREA),
                random_aspect_ratio=list(ASPECT),
            )
            images = fn.resize(images, size=(self._size, self._size), interp_type=types.INTERP_TRIANGULAR)
            mirrored = fn.random.coin_flip(probability=0.5)
            images = fn.crop_mirror_normalize(images, dtype=types.UINT8, output_layout="CHW", mirror=mirrored, mean=[0.0], std=[1.0])
            return images, labels.gpu() if on_gpu else labels

        return pipeline()

    def __len__(self) -> int:
        """Samples in an epoch, over all ranks."""
        return len(self.store.labels) * self._passes

    def __next__(self) -> list[torch.Tensor]:
        try:
            (batch,) = next(self._epoch)
        except StopIteration:
            self._epoch = iter(self._source)
            (batch,) = next(self._epoch)
        return [batch["images"], batch["labels"].squeeze(-1).long()]

    def describe(self) -> dict[str, Any]:
        from nvidia.dali import __version__

        return described(self.store, self._size, self._passes, f"nvidia-dali {__version__}")
