"""Images inside tar files, WebDataset's form, read in place: an index of where each image begins, and one positioned read per image.

Reading by position keeps sampling exact: every image once per epoch and freshly shuffled over all shards, which a stream through a shuffle
buffer cannot give. Members that share the name up to the first dot are one sample: ``0001.jpg`` with its class in ``0001.cls`` (a number
or a name). Without ``.cls``, the class is the folder that the image lies in.
"""

from __future__ import annotations

import json
import os
import tarfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from caraml.base.errors import InputError
from caraml.base.files import making, replacing
from caraml.base.limits import CLASSES, IMAGE, LINE, too_large
from caraml.data.store import prepared_once
from caraml.workloads.image_classification.store import SUFFIXES, ImageStore, number_classes

_INDEX_VERSION = 1
_INDEX = "index.npz"
_DIGITS = 10
"""Digits from which on a class's name is no number."""
_MOST_OPEN = 256
"""Shards that one process keeps open, well below the usual limit of 1024 files."""


@dataclass
class _Found:
    """What one pass over the headers of all shards gives."""

    shard: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    key: list[str] = field(default_factory=list)
    folder: list[str] = field(default_factory=list)


class TarStore:
    """The images of one tar file, or of all ``*.tar`` in a folder."""

    def __init__(self, path: Path) -> None:
        """Index the shards, or find the index of an earlier time. Raises ``InputError`` for what is no tar, or has no classes."""
        self.path = Path(path)
        self.shards = sorted(self.path.glob("*.tar")) if self.path.is_dir() else [self.path]
        if not self.shards or not all(shard.is_file() for shard in self.shards):
            raise InputError(f"{path}: found no tar file; expected one, or a folder with NAME-0000.tar, NAME-0001.tar ...")
        stats = [shard.stat() for shard in self.shards]
        key = {
            "kind": "tar-index",
            "version": _INDEX_VERSION,
            "shards": [[str(shard.resolve()), stat.st_size, stat.st_mtime_ns] for shard, stat in zip(self.shards, stats, strict=True)],
        }
        with np.load(prepared_once(key, lambda folder: _write_index(self.path, self.shards, folder)) / _INDEX) as index:
            self._shard, self._offset, self._size, self.labels = (index[name] for name in ("shard", "offset", "size", "labels"))
            self.classes: list[str] = json.loads(str(index["classes"]))
        self._bytes = sum(stat.st_size for stat in stats)
        self._opened: tuple[int, dict[int, int]] = (0, {})

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": (0, {})}

    def read(self, position: int) -> bytes:
        """The file of image ``position``."""
        size = int(self._size[position])
        if size > IMAGE:
            raise too_large(self.name(position), size, IMAGE)
        data = os.pread(self._open(int(self._shard[position])), size, int(self._offset[position]))
        if len(data) != size:
            raise OSError(f"the shard ends after {len(data)} of {size} bytes")
        return data

    def _open(self, shard: int) -> int:
        """This process's descriptor of a shard; of many, the ones opened last."""
        if self._opened[0] != os.getpid():
            self._opened = (os.getpid(), {})
        descriptors = self._opened[1]
        if shard not in descriptors:
            if len(descriptors) >= _MOST_OPEN:
                os.close(descriptors.pop(next(iter(descriptors))))
            descriptors[shard] = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
        return descriptors[shard]

    def name(self, position: int) -> str:
        """The shard, and where in it the image begins."""
        return f"{self.shards[self._shard[position]]}@{self._offset[position]}"

    def describe(self) -> dict[str, Any]:
        """Kind, path, bytes, shards."""
        return {"kind": "images", "store": "webdataset", "path": str(self.path), "bytes": self._bytes, "shards": len(self.shards)}


def _write_index(path: Path, shards: list[Path], folder: Path) -> None:
    found, given = _Found(), dict[str, str]()
    for number, shard in enumerate(shards):
        try:
            with tarfile.open(shard, "r:") as archive:
                for member in archive:
                    if member.isfile() and not member.issparse():  # what is left out of a file cannot be read by its position
                        _note(found, given, number, member, archive)
                    archive.members.clear()  # type: ignore[attr-defined]  # a million of them take gigabytes
        except (tarfile.TarError, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{shard}: not readable as an uncompressed tar: {error}", "unpack a compressed one with data = 'archive'"
            ) from error
    names = [given.get(key, name) for key, name in zip(found.key, found.folder, strict=True)]
    without = [key for key, name in zip(found.key, names, strict=True) if not name]
    if without:
        raise InputError(
            f"{path}: {len(without):,} images have no class, first {without[0]!r}; expected CLASS/IMAGE or a .cls beside each image"
        )
    classes, labels = number_classes(names, path)
    if all(
        name.isdecimal() and len(name) < _DIGITS for name in classes
    ):  # numbers stay what they are, also where some class has no image here
        labels = np.array([int(name) for name in names], dtype=np.int64)
        if (highest := int(labels.max())) > CLASSES:
            raise too_large(path, highest, CLASSES, "as the number of a class")
        classes = [str(number) for number in range(highest + 1)]
    numbers, offsets, sizes = (np.array(values, dtype=np.int64) for values in (found.shard, found.offset, found.size))
    with making(folder / _INDEX) as file:
        np.savez(file, labels=labels, classes=np.array(json.dumps(classes)), shard=numbers, offset=offsets, size=sizes)


def _note(found: _Found, given: dict[str, str], shard: int, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    """Note an image's place, or a class file's word."""
    path = PurePosixPath(member.name)
    key = f"{shard}:{path.parent / path.name.partition('.')[0]}"
    if path.name.endswith(".cls"):
        content = archive.extractfile(member)
        given[key] = content.read(LINE).decode().strip() if content is not None else ""
    elif path.name.lower().endswith(SUFFIXES):
        found.shard.append(shard)
        found.offset.append(member.offset_data)
        found.size.append(member.size)
        found.key.append(key)
        found.folder.append(path.parent.name)


def write_shards(store: ImageStore, folder: Path, images_per_shard: int = 10_000) -> int:
    """Write ``folder/images-0000.tar`` and so on, each image as ``CLASS/NUMBER.jpg``; returns the number of shards.

    Raises:
        InputError: if ``folder`` has shards already.
    """
    import io

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.tar")):
        raise InputError(f"{folder}: has tar files already; expected a new folder")
    count = len(store.labels)
    order = np.random.default_rng(0).permutation(count)  # neighbours in a shard are of different classes
    for shard, first in enumerate(range(0, count, images_per_shard)):
        with (
            replacing(folder / f"images-{shard:04}.tar", sync="file") as file,
            tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            for position in order[first : first + images_per_shard].tolist():
                data = store.read(position)
                suffix = Path(store.name(position)).suffix.lower()
                ending = suffix if suffix in SUFFIXES else ".jpg"
                member = tarfile.TarInfo(f"{store.classes[store.labels[position]]}/{position:08}{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return -(-count // images_per_shard)
