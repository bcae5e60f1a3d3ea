"""Where encoded images lie: a folder of files, one LMDB, tar files. Each reads any image by its number, in any order, from any process.

Everything that can be wrong with a whole store is found when it is opened, before a loader worker starts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import replacing, replacing_by_name
from caraml.base.limits import IMAGE, files_below, read_bytes, read_json, read_text
from caraml.data.growing import MARKS, refuse_unfinished
from caraml.data.staging import SQUASH_SUFFIXES
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


@dataclass(frozen=True)
class Packed:
    """What was written: number of images and of files, and bytes."""

    images: int
    files: int
    bytes: int


def pack_images(root: Path, out: Path, images_per_shard: int = 10_000) -> Packed:
    """Write the images of ``root`` to ``out``; what it becomes follows from the name.

    ``.lmdb``: an LMDB. ``.tar``, ``.zip``, ``.sqsh``: an archive with ``CLASS/IMAGE`` inside. No ending: a folder of tar shards.

    Raises:
        InputError: if ``root`` is no image folder, or ``out`` exists or has another ending.
        EnvironmentUnfitError: if the tool or package for the format is missing.
    """
    store = FolderStore(root)
    if out.exists():
        raise InputError(f"{out}: exists already; expected a free name")
    out.parent.mkdir(parents=True, exist_ok=True)
    ending = out.suffix.lower()
    if ending == ".lmdb":
        from caraml.workloads.image_classification.lmdb_store import write_lmdb

        write_lmdb(store, out)
    elif ending in (".tar", ".zip", *SQUASH_SUFFIXES):
        _write_archive(store, root, out, ending)
    elif not ending:
        from caraml.workloads.image_classification.tar_store import write_shards

        write_shards(store, out, images_per_shard)
    else:
        raise InputError(f"{out}: found the ending {ending!r}; expected .lmdb, .tar, .zip, .sqsh, or none for tar shards")
    files = [out] if out.is_file() else list(out.iterdir())
    return Packed(len(store.labels), len(files), sum(path.stat().st_size for path in files))


def _write_archive(store: FolderStore, root: Path, out: Path, ending: str) -> None:
    names = [store.name(position) for position in range(len(store.labels))]
    if ending == ".tar":
        with replacing(out) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name in names:
                tar.add(name, arcname=Path(name).relative_to(root), recursive=False)
    elif ending == ".zip":
        with replacing(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # JPEGs do not shrink any further
            for name in names:
                archive.write(name, Path(name).relative_to(root))
    else:
        tool = shutil.which("mksquashfs")
        if tool is None:
            raise EnvironmentUnfitError("writing SquashFS needs mksquashfs", "install squashfs-tools, or write a .tar")
        with replacing_by_name(out) as inside:
            command = [tool, str(root), str(inside), "-quiet", "-no-progress", "-noD"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- mksquashfs; no shell
            if done.returncode:
                raise EnvironmentUnfitError(f"mksquashfs failed: {' '.join(done.stderr.split())[-200:]}")
