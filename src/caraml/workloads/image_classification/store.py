"""Where encoded images lie: a folder of files, one LMDB, tar files. Each reads any image by its number, in any order, from any process.

Everything that can be wrong with a whole store is found when it is opened, before a loader worker starts.

A small folder of JPEGs, ``<root>/<class>/<name>.jpg``, that costs a loader what ImageNet costs it can be made without ImageNet. What
decoding, cropping and reading cost depends on the pixels and bytes of a file, so both follow ImageNet's: mean 482 x 415 pixels (challenge
page of ILSVRC 2014), most from Flickr with a longer side of 500 (500 x 375 the most frequent), a tail to several times that, and 115 kB a
file (``ILSVRC2012_img_train.tar``: 147,897,477,120 bytes for 1,281,167 files). What the images show depends on their class, so that a
network learns them within a few steps.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from caraml.base.errors import InputError
from caraml.base.files import making, write_file, write_new
from caraml.base.limits import IMAGE, files_below, read_bytes, read_json, read_text
from caraml.data.store import MARKS, Tell, begin, build_folder, finish, grow, prepared_once, refuse_unfinished

if TYPE_CHECKING:
    from PIL import Image

FACTS_FILE = "images.json"
"""Written beside the class folders of a generated image folder; says how it was generated."""
_GENERATOR_VERSION = 1
"""Part of the key of prepared folders: to be raised whenever the same arguments would give other images."""
_COMMON_SIZES = ((500, 375, 0.42), (375, 500, 0.14), (500, 333, 0.12), (333, 500, 0.05))
"""Width, height and share of the frequent sizes; the rest is spread by :func:`_draw_size`."""
_RARE_SHAPES = ((1.0, 0.75, 0.5), (1.0, 1.0, 0.2), (0.75, 1.0, 0.3))
"""Width and height relative to the longer side, and share, among the remaining sizes."""
_RARE_LONGER_SIDE = (481.0, 0.5, 75.0, 2000.0)
"""Median, spread (sigma of the logarithm), smallest and largest longer side of the remaining sizes, in pixels."""
_QUALITIES = (82, 97)
_TEXTURE = (12.0, 34.0)
"""Range of the texture's standard deviation, in grey levels of 255: chosen so that files come out at 115 kB on average."""
_TEXTURE_SIDE = 1024
_THREADS = 8
_BLOCK = 64
"""Images that one process writes before it notes that they are done: about 7 MB."""
_BEYOND = 64
"""Blocks after the last in which images may lie that an ended run began: more than are written at the same time."""


def generate_image_folder(root: Path, classes: int, images_per_class: int, seed: int = 0) -> tuple[int, int]:
    """Write ``classes * images_per_class`` JPEGs to the new folder ``root``, whole or not at all; the images and their bytes.

    The same arguments give the same pixels on every machine with the same Pillow and NumPy. Raises ``InputError`` if ``root`` holds
    something already, or a count is below 1.
    """
    if classes < 1 or images_per_class < 1:
        raise InputError(f"found {classes} classes of {images_per_class} images; expected at least 1 of each")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise InputError(f"{root}: exists already; expected a new or empty folder", "remove it or choose another name")
    build_folder(root, lambda folder: _write_images(folder, classes, images_per_class, seed))
    facts = json.loads((root / FACTS_FILE).read_text(encoding="utf-8"))
    return facts["images"], facts["bytes"]


def grow_image_folder(root: Path, gigabytes: float, classes: int, seed: int = 0, tell: Tell = lambda done, of: None) -> tuple[int, int]:
    """Write an image folder of ``gigabytes`` (1e9 bytes), several blocks of images at a time; the same call goes on after an end.

    Returns the images and their bytes. Raises as :func:`~caraml.data.store.begin`.
    """
    marks = root / MARKS
    plan = {"kind": "images", "gigabytes": gigabytes, "classes": classes, "seed": seed, "version": _GENERATOR_VERSION}
    begin(root, marks, plan)
    for left in root.glob("class_*/.*.tmp"):  # by a writer that was killed
        left.unlink(missing_ok=True)
    sizes = grow(marks, gigabytes, partial(_write_block, root, classes, seed), tell, alike=False)
    for image in range(_BLOCK * len(sizes), _BLOCK * (len(sizes) + _BEYOND)):  # of blocks begun before an end, and not needed after it
        _image_path(root, image, classes).unlink(missing_ok=True)
    facts = {"classes": classes, "images": _BLOCK * len(sizes), "bytes": sum(sizes), "seed": seed}
    write_file(root / FACTS_FILE, json.dumps(facts, indent=2) + "\n")
    finish(marks)
    return _BLOCK * len(sizes), sum(sizes)


def _write_block(root: Path, classes: int, seed: int, number: int) -> int:
    """Write the images of one block, which are those of all classes in turn; their bytes."""
    texture = _texture(seed)
    return sum(_write_image(root, classes, seed, texture, image)[2] for image in range(_BLOCK * number, _BLOCK * (number + 1)))


def _image_path(root: Path, image: int, classes: int) -> Path:
    index, label = divmod(image, classes)
    return root / f"class_{label:0{len(str(classes - 1))}}" / f"{index:08}.jpg"


def default_image_folder(held_out: bool = False) -> Path:
    """The folder that needs no input: 8 classes of 64 images, about 58 MB. Generated on first use, found again later.

    ``held_out``: 16 other images of each of the classes, to validate with.
    """
    import PIL

    classes, images_per_class, seed = (8, 16, 1) if held_out else (8, 64, 0)
    key = {
        "kind": "images",
        "generator": _GENERATOR_VERSION,
        "classes": classes,
        "images_per_class": images_per_class,
        "seed": seed,
        "pillow": PIL.__version__,
        "numpy": np.__version__,
    }
    return prepared_once(key, lambda folder: _write_images(folder, classes, images_per_class, seed))


def _write_images(folder: Path, classes: int, images_per_class: int, seed: int) -> None:
    write = partial(_write_image, folder, classes, seed, _texture(seed))
    # Pillow and NumPy release the interpreter's lock in their long loops, so threads are enough.
    with ThreadPoolExecutor(_THREADS) as pool:
        widths, heights, sizes = zip(*pool.map(write, range(classes * images_per_class)), strict=True)
    facts: dict[str, Any] = {
        "classes": classes,
        "images": len(sizes),
        "bytes": sum(sizes),
        "mean_width": sum(widths) / len(widths),
        "mean_height": sum(heights) / len(heights),
        "seed": seed,
    }
    write_new(folder / FACTS_FILE, json.dumps(facts, indent=2) + "\n")


def _texture(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((_TEXTURE_SIDE, _TEXTURE_SIDE), dtype=np.float32)


def _write_image(root: Path, classes: int, seed: int, texture: npt.NDArray[np.float32], number: int) -> tuple[int, int, int]:
    """Write an image by its number, which goes through all classes in turn; its width and height in pixels, and its bytes."""
    index, label = divmod(number, classes)
    path = _image_path(root, number, classes)
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # of a block that was not all written
    rng = np.random.default_rng((seed, label, index))
    image = _draw_image(rng, label, classes, texture)
    with making(path) as file:
        image.save(file, "JPEG", quality=int(rng.integers(*_QUALITIES)))
    return image.width, image.height, path.stat().st_size


def _draw_size(rng: np.random.Generator) -> tuple[int, int]:
    share = rng.random()
    for width, height, part in _COMMON_SIZES:
        if share < part:
            return width, height
        share -= part
    median, spread, smallest, largest = _RARE_LONGER_SIDE
    longer = float(np.clip(median * math.exp(spread * rng.standard_normal()), smallest, largest))
    shapes = np.array(_RARE_SHAPES)
    across, down, _ = shapes[rng.choice(len(shapes), p=shapes[:, 2])]
    return round(longer * across), round(longer * down)


def _draw_image(rng: np.random.Generator, label: int, classes: int, texture: npt.NDArray[np.float32]) -> Image.Image:
    """One image of class ``label``: its colour gradient, its kind of figure a few times, texture over all of it."""
    from PIL import Image, ImageDraw

    width, height = _draw_size(rng)
    near, far = _colour(label / classes, rng), _colour(label / classes + 0.1, rng)
    ramp = np.linspace(0, 1, 8)[:, None] if label % 2 else np.linspace(0, 1, 8)[None, :]
    coarse = near + np.broadcast_to(ramp, (8, 8))[..., None] * (far - near) + rng.normal(0, 12, (8, 8, 1))
    image = Image.fromarray(np.clip(coarse, 0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(2, 5))):
        radius = float(rng.uniform(0.12, 0.3)) * min(width, height)
        x, y = float(rng.uniform(0, width)), float(rng.uniform(0, height))
        fill = tuple(int(level) for level in np.clip(_colour(label / classes + 0.4, rng), 0, 255))
        sides = label % 5 + 2
        if sides == 2:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        else:
            pen.regular_polygon((x, y, radius), sides, rotation=float(rng.uniform(0, 360)), fill=fill)
    return _with_texture(image, rng, texture)


def _colour(hue: float, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """The RGB levels (3,) of a hue in turns of the colour circle, a little off so that no two images are alike."""
    phases = 2 * math.pi * (hue + np.array([0, 1, 2]) / 3)
    return 128 + 80 * np.cos(phases) + rng.normal(0, 10, 3)


def _with_texture(image: Image.Image, rng: np.random.Generator, texture: npt.NDArray[np.float32]) -> Image.Image:
    from PIL import Image

    width, height = image.size
    rows = (int(rng.integers(_TEXTURE_SIDE)) + np.arange(height)) % _TEXTURE_SIDE
    columns = (int(rng.integers(_TEXTURE_SIDE)) + np.arange(width)) % _TEXTURE_SIDE
    strength = float(rng.uniform(*_TEXTURE))
    grain = (texture[np.ix_(rows, columns)] * strength).astype(np.int16)
    levels = np.asarray(image).astype(np.int16) + grain[..., None]
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8))


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""Endings, in lower case, of names that are taken for images."""
_SIZED_EXACTLY = 1000
"""Files whose sizes are asked for; of more, as many at even distances. Asking for a million takes minutes on a parallel file system."""
_ANNOTATIONS = "val_annotations.txt"
_HINT = "expected ROOT/CLASS/IMAGE; `caraml data prepare images` writes one"


class ImageStore(Protocol):
    """Encoded images with their classes."""

    classes: list[str]
    labels: npt.NDArray[np.int64]
    """The class of each image, as a position in ``classes``."""

    def read(self, position: int) -> bytes:
        """The file of image ``position``. Raises ``OSError`` if it cannot be read, ``InputError`` if it is too large."""

    def name(self, position: int) -> str:
        """Where a person finds image ``position``."""

    def describe(self) -> dict[str, Any]:
        """Kind, path, bytes, for the record."""


def described(store: ImageStore, size: int, passes: int, decoder: str) -> dict[str, Any]:
    """The provenance of samples of a store, for the record: ``size`` is theirs in pixels."""
    counts = {"items": len(store.labels), "classes": len(store.classes)}
    return {**store.describe(), **counts, "size": size, "passes": passes, "decoder": decoder}


class FolderStore:
    """``ROOT/CLASS/IMAGE``: one folder per class, searched to the bottom; files with other endings than :data:`SUFFIXES` are not images.

    Or ``ROOT/images/IMAGE`` with the classes in ``ROOT/val_annotations.txt``, as TinyImageNet's held-out images are.
    """

    def __init__(self, root: Path) -> None:
        """List the images, sorted by name. Raises ``InputError`` if there is no such folder, no class in it, or a class without images."""
        self.root = Path(root)
        self.classes, annotated = self.check(self.root)
        if annotated is not None:
            self._paths, self.labels = annotated
            return
        seen: set[tuple[int, int]] = set()
        below = (files_below(os.path.join(root, name), seen) for name in self.classes)  # noqa: PTH118  # a million Path objects are slow
        found = [sorted(path for path in paths if path.lower().endswith(SUFFIXES)) for paths in below]
        empty = [name for name, paths in zip(self.classes, found, strict=True) if not paths]
        if empty:
            names = ", ".join(empty[:5]) + (" ..." if len(empty) > 5 else "")
            without = f"class {names} has" if len(empty) == 1 else f"classes {names} have"
            expected = f"expected files ending in {', '.join(SUFFIXES)}"
            raise InputError(f"{root}: {without} no image; {expected}", "remove the empty folders, or finish copying the data")
        self._paths = [path for paths in found for path in paths]
        self.labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found])

    @staticmethod
    def check(root: Path) -> tuple[list[str], tuple[list[str], npt.NDArray[np.int64]] | None]:
        """The classes, and paths and classes of the images where a file lists them; else images are not looked for. Raises ``InputError``
        if there is no such folder, or no class in it."""
        refuse_unfinished(root / MARKS, root)
        try:
            classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        except OSError as error:
            raise InputError(f"{root}: no image folder ({error.strerror or error})", _HINT) from error
        if (annotated := root / _ANNOTATIONS).is_file():
            paths, names = _annotated(annotated)
            classes, labels = number_classes(names, annotated)
            return classes, (paths, labels)
        if {"train", "val"} <= {*classes} and any(entry.is_dir() for entry in os.scandir(root / "train")):
            raise InputError(f"{root}: found train and val, the two parts of a set, expected the classes of one", f"{root / 'train'}")
        if not classes:
            raise InputError(f"{root}: no image folder (found no folder of a class in it)", _HINT)
        return classes, None

    def read(self, position: int) -> bytes:
        return read_bytes(self._paths[position], IMAGE)

    def name(self, position: int) -> str:
        return self._paths[position]

    def describe(self) -> dict[str, Any]:
        """Kind, path, bytes and how they were found, and how a generated folder was made."""
        facts = self.root / FACTS_FILE
        chosen = self._paths[:: max(1, len(self._paths) // _SIZED_EXACTLY)]
        mean = sum(os.stat(path).st_size for path in chosen) / len(chosen)  # noqa: PTH116
        return {
            "kind": "images",
            "path": str(self.root),
            "bytes": round(mean * len(self._paths)),
            "bytes_from": "all files" if len(chosen) == len(self._paths) else f"the mean of {len(chosen)} files",
            "generated": json.loads(read_json(facts)) if facts.is_file() else None,
        }


def _annotated(path: Path) -> tuple[list[str], list[str]]:
    """Images and their classes by a file with a line for each: name, class, and more that is not needed, with tabs between. Raises
    ``InputError`` for a line without both, or with a name that leaves the folder."""
    paths, names = [], []
    for number, line in enumerate(read_text(path, IMAGE).splitlines(), 1):
        name, tab, rest = line.partition("\t")
        if not tab or "/" in name or name in {"", ".."}:
            raise InputError(f"{path}:{number}: found {line[:60]!r}, expected IMAGE, a tab and CLASS", "copy the file again")
        paths.append(str(path.parent / "images" / name))
        names.append(rest.partition("\t")[0])
    return paths, names


def refuse_classes(classes: list[str], where: Path | None, known: int, trained: list[str] | None) -> None:
    """Raise ``InputError`` for more classes than the ``known`` ones of a network, and for others than those of its training images."""
    if len(classes) > known:
        raise InputError(f"classes: found {known}; the data at {where} has {len(classes)}")
    if trained is not None and classes != trained:
        raise InputError(f"validation: the classes at {where} are not those of the training images")


def number_classes(names: Sequence[str], source: Path) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Sorted class names, and each image's class as a position among them. Raises ``InputError`` if there is no image at all."""
    if not names:
        raise InputError(f"{source}: no image in it", "`caraml data pack` writes one that has some")
    classes = sorted(Counter(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.array([numbers[name] for name in names], dtype=np.int64)
