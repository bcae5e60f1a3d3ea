"""Where encoded images lie: a folder of files, one LMDB, tar files. Each reads any image by its number, in any order, from any process.

Everything that can be wrong with a whole store is found when it is opened, before a loader worker starts.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from caraml.base.errors import InputError
from caraml.base.limits import IMAGE, files_below, read_bytes, read_json, read_text
from caraml.data.store import MARKS, refuse_unfinished
from caraml.workloads.image_classification.generator import FACTS_FILE

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
        ...

    def name(self, position: int) -> str:
        """Where a person finds image ``position``."""
        ...

    def describe(self) -> dict[str, Any]:
        """Kind, path, bytes, for the record."""
        ...


class FolderStore:
    """``ROOT/CLASS/IMAGE``: one folder per class, searched to the bottom; files with other endings than :data:`SUFFIXES` are not images.

    Or ``ROOT/images/IMAGE`` with the classes in ``ROOT/val_annotations.txt``, as TinyImageNet's held-out images are.
    """

    def __init__(self, root: Path) -> None:
        """List the images, sorted by name. Raises ``InputError`` if there is no such folder, no class in it, or a class without images."""
        self.root = Path(root)
        refuse_unfinished(self.root / MARKS, self.root)
        try:
            self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        except OSError as error:
            raise InputError(f"{root}: no image folder ({error.strerror or error})", _HINT) from error
        if (annotated := self.root / _ANNOTATIONS).is_file():
            self._paths, names = _annotated(annotated)
            self.classes, self.labels = number_classes(names, annotated)
            return
        if not self.classes:
            raise InputError(f"{root}: no image folder (found no folder of a class in it)", _HINT)
        seen: set[tuple[int, int]] = set()
        below = (files_below(os.path.join(root, name), seen) for name in self.classes)  # noqa: PTH118  # a million Path objects are slow
        found = [sorted(path for path in paths if path.lower().endswith(SUFFIXES)) for paths in below]
        empty = [name for name, paths in zip(self.classes, found, strict=True) if not paths]
        if empty:
            raise InputError(
                f"{root}: {'class' if len(empty) == 1 else 'classes'} {', '.join(empty[:5])}{' ...' if len(empty) > 5 else ''} "
                f"{'has' if len(empty) == 1 else 'have'} no image; expected files ending in {', '.join(SUFFIXES)}",
                "remove the empty folders, or finish copying the data",
            )
        self._paths = [path for paths in found for path in paths]
        self.labels = np.repeat(np.arange(len(found)), [len(paths) for paths in found])

    def read(self, position: int) -> bytes:
        """The file of image ``position``."""
        return read_bytes(self._paths[position], IMAGE)

    def name(self, position: int) -> str:
        """Its path."""
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
    """Images and their classes by a file with a line for each: name, class, and more that is not needed, with tabs between.

    Raises:
        InputError: a line without both, or with a name that leaves the folder.
    """
    paths, names = [], []
    for number, line in enumerate(read_text(path, IMAGE).splitlines(), 1):
        name, tab, rest = line.partition("\t")
        if not tab or "/" in name or name in {"", ".."}:
            raise InputError(f"{path}:{number}: found {line[:60]!r}, expected IMAGE, a tab and CLASS", "copy the file again")
        paths.append(str(path.parent / "images" / name))
        names.append(rest.partition("\t")[0])
    return paths, names


def number_classes(names: Sequence[str], source: Path) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Sorted class names, and each image's class as a position among them. Raises ``InputError`` if there is no image at all."""
    if not names:
        raise InputError(f"{source}: no image in it", "`caraml data pack` writes one that has some")
    classes = sorted(Counter(names))
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.array([numbers[name] for name in names], dtype=np.int64)
