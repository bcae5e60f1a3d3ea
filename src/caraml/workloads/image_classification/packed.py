"""Images packed into few files, each read by its number: one LMDB, or tar files in WebDataset's form; and how a folder is packed.

LMDB (Lightning Memory-Mapped Database): key ``__meta__`` holds JSON: ``{"format": 1, "classes": [...], "images": N}``. Key i, as 8 bytes
with the highest first, holds the class of image i, as 4 bytes with the lowest first, and after it the image's file.

Tar files are read in place: an index of where each image begins, and one positioned read per image. That keeps sampling exact: every image
once per epoch and freshly shuffled over all shards, which a stream through a shuffle buffer cannot give. Members that share the name up to
the first dot are one sample: ``0001.jpg`` with its class in ``0001.cls`` (a number or a name). Without ``.cls``, the class is the folder
that the image lies in.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import make_folder, making, replacing, replacing_by_name
from caraml.base.format import count
from caraml.base.limits import CLASSES, IMAGE, IMAGES, LINE, RECORD, counted, too_large
from caraml.data.staging import SQUASH_SUFFIXES
from caraml.data.store import prepared_once
from caraml.workloads.image_classification.store import SUFFIXES, FolderStore, ImageStore, number_classes

META = b"__meta__"
FORMAT = 1
_LABEL = struct.Struct("<i")
_KEY = struct.Struct(">q")
_PER_TRANSACTION = 1000
_DATA = "data.mdb"
_PACK = "caraml data pack FOLDER --out NAME.lmdb writes one from the image files"
_environments: dict[str, tuple[int, Any, Any]] = {}
"""Open databases by path: the process that opened it, the environment and its read transaction. LMDB allows one per process and path."""


class LmdbStore:
    """The images of an LMDB that :func:`write_lmdb` wrote."""

    def __init__(self, path: Path) -> None:
        """Open it and read the classes of all images. Raises ``InputError`` if it is not readable or has another content."""
        self.path = Path(path)
        images, self.classes = self._described()
        self.labels = self._labels(images)

    @classmethod
    def check(cls, path: Path) -> list[str]:
        """The classes of a database by its own words; the images are not looked at. Raises ``InputError`` if it is not one of images."""
        store = cls.__new__(cls)
        store.path = Path(path)
        return store._described()[1]

    def _described(self) -> tuple[int, list[str]]:
        """The number of images and the names of their classes, as the database says."""
        try:
            value = self._transaction().get(META)
            if value is not None and len(value) > RECORD:
                raise too_large(f"{self.path}: {META.decode()}", len(value), RECORD)
            meta = json.loads(counted(bytes(value), self.path, CLASSES)) if value is not None else {}
            images, classes = (meta.get("images"), meta.get("classes")) if isinstance(meta, dict) else (None, None)
            if not isinstance(images, int) or not isinstance(classes, list) or not images or meta.get("format") != FORMAT:
                expected = f"expected a key `{META.decode()}` of format {FORMAT}"
                raise InputError(f"{self.path}: an LMDB, but not one of images: {self._content()}; {expected}", _PACK)
            if (entries := _environments[str(self.path.absolute())][1].stat()["entries"]) > IMAGES:
                raise too_large(self.path, entries, IMAGES, "images")
        except (_lmdb().Error, OSError, ValueError, RecursionError) as error:
            raise self._unreadable(error) from error
        return images, classes

    def _unreadable(self, error: Exception) -> InputError:
        return InputError(f"{self.path}: not readable as an LMDB: {error}", "copy it again, or write it anew with `caraml data pack`")

    def _labels(self, images: int) -> npt.NDArray[np.int64]:
        try:
            with self._transaction().cursor() as cursor:
                labels = np.fromiter((_LABEL.unpack_from(value)[0] for key, value in cursor if key != META), dtype=np.int64)
        except (_lmdb().Error, OSError, struct.error) as error:
            raise self._unreadable(error) from error
        wrong = f"{len(labels)} images; expected {images}" if len(labels) != images else ""
        if not wrong and not 0 <= labels.min() <= labels.max() < len(self.classes):
            wrong = f"classes {labels.min()} to {labels.max()}; expected 0 to {len(self.classes) - 1}"
        if wrong:
            raise InputError(f"{self.path}: found {wrong}, as its `{META.decode()}` says", "copy it again, or pack the images anew")
        return labels

    def _content(self) -> str:
        """What a database of another layout has: its first keys and how its first value begins."""
        with self._transaction().cursor() as cursor:
            first = [(bytes(key), bytes(value[:16])) for (key, value), _ in zip(cursor, range(3), strict=False)]
        number = _environments[str(self.path.absolute())][1].stat()["entries"]
        keys = ", ".join(repr(key[:40])[1:] for key, _ in first)
        return f"found {count(number, 'key')}" + (f": {keys}; a value that begins with {first[0][1].hex(' ')}" if first else "")

    def _transaction(self) -> Any:
        """The read transaction of this process; LMDB forbids to carry one over a fork, so a loader's worker opens its own."""
        path = str(self.path.absolute())
        process, environment, transaction = _environments.get(path, (0, None, None))
        if process != os.getpid():
            if environment is not None:
                environment.close()
            if not self._file().is_file():
                found, hint = ("a folder without data.mdb, expected an LMDB", _PACK) if self.path.is_dir() else ("no such LMDB", None)
                raise InputError(f"{self.path}: {found}", hint)
            if not self._file().stat().st_size:
                raise InputError(f"{self.path}: found 0 bytes, expected an LMDB", "the copy is incomplete: copy it again")
            # No lock: nobody writes. No read-ahead: images are read in random order.
            environment = _lmdb().open(path, readonly=True, lock=False, readahead=False, meminit=False, subdir=self.path.is_dir())
            self._refuse_cut(environment)
            transaction = environment.begin(buffers=True)
            _environments[path] = (os.getpid(), environment, transaction)
        return transaction

    def _refuse_cut(self, environment: Any) -> None:
        """A file that was not copied to its end would kill the process that reads behind its end, without a word."""
        found = self._file().stat().st_size
        expected = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
        if found < expected:
            environment.close()
            raise InputError(f"{self.path}: found {found:,} bytes of an LMDB of {expected:,}", "the copy is incomplete: copy it again")

    def _file(self) -> Path:
        return self.path / _DATA if self.path.is_dir() else self.path

    def close(self) -> None:
        """Close the database in this process."""
        _, environment, _ = _environments.pop(str(self.path.absolute()), (0, None, None))
        if environment is not None:
            environment.close()

    def read(self, position: int) -> bytes:
        value = self._transaction().get(_KEY.pack(position))
        if value is None:
            raise OSError(f"image {position} is missing")
        if len(value) > IMAGE:
            raise too_large(self.name(position), len(value), IMAGE)
        return bytes(value[_LABEL.size :])

    def name(self, position: int) -> str:
        return f"{self.path}[{position}]"

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "store": "lmdb", "path": str(self.path), "bytes": self._file().stat().st_size}


def write_lmdb(store: ImageStore, path: Path) -> None:
    """Write all images of ``store`` to the new LMDB file ``path``; a half-written one is never left under that name."""
    lmdb = _lmdb()
    images = len(store.labels)
    with replacing_by_name(path) as inside:
        # The map's size is only reserved address space; the file grows as it is written.
        environment = lmdb.open(str(inside), subdir=False, map_size=1 << 42, lock=False, sync=False, writemap=False)
        with environment:
            for first in range(0, images, _PER_TRANSACTION):
                with environment.begin(write=True) as transaction:
                    for position in range(first, min(first + _PER_TRANSACTION, images)):
                        value = _LABEL.pack(store.labels[position]) + store.read(position)
                        transaction.put(_KEY.pack(position), value, append=True)
            with environment.begin(write=True) as transaction:
                transaction.put(META, json.dumps({"format": FORMAT, "classes": store.classes, "images": images}).encode())
            environment.sync(True)


def _lmdb() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise EnvironmentUnfitError("reading an LMDB needs the package lmdb", "pip install 'caraml[vision]'") from error
    return lmdb


_INDEX_VERSION = 1
_INDEX = "index.npz"
_DIGITS = 10
"""Digits from which on a class's name is no number."""
_MOST_OPEN = 256
"""Shards that one process keeps open, well below the usual limit of 1024 files."""


_Found = tuple[int, int, int, str, str]
"""An image: its shard, where it begins there, its bytes, the sample that it is of, and its folder's name."""


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
        return f"{self.shards[self._shard[position]]}@{self._offset[position]}"

    def describe(self) -> dict[str, Any]:
        return {"kind": "images", "store": "webdataset", "path": str(self.path), "bytes": self._bytes, "shards": len(self.shards)}


def _write_index(path: Path, shards: list[Path], folder: Path) -> None:
    images, given = list[_Found](), dict[str, str]()
    for number, shard in enumerate(shards):
        try:
            with tarfile.open(shard, "r:") as archive:
                for member in archive:
                    if member.isfile() and not member.issparse():  # what is left out of a file cannot be read by its position
                        _note(images, given, number, member, archive)
                    archive.members.clear()  # type: ignore[attr-defined]  # a million of them take gigabytes
        except (tarfile.TarError, OSError, UnicodeDecodeError) as error:
            what = f"{shard}: not readable as an uncompressed tar: {error}"
            raise InputError(what, "unpack a compressed one with data = 'archive'") from error
    found, offsets, sizes, keys, folders = zip(*images, strict=True) if images else ((),) * 5
    names = [given.get(key, name) for key, name in zip(keys, folders, strict=True)]
    without = [key for key, name in zip(keys, names, strict=True) if not name]
    if without:
        what = f"{path}: found {count(len(without), 'image')} without a class, first {without[0]!r}; expected CLASS/IMAGE, or a .cls beside"
        raise InputError(what)
    classes, labels = number_classes(names, path)
    # Numbers stay what they are, also where some class has no image here.
    if all(name.isdecimal() and len(name) < _DIGITS for name in classes):
        labels = np.array([int(name) for name in names], dtype=np.int64)
        if (highest := int(labels.max())) > CLASSES:
            raise too_large(path, highest, CLASSES, "as the number of a class")
        classes = [str(number) for number in range(highest + 1)]
    numbers, begins, lengths = (np.array(values, dtype=np.int64) for values in (found, offsets, sizes))
    with making(folder / _INDEX) as file:
        np.savez(file, labels=labels, classes=np.array(json.dumps(classes)), shard=numbers, offset=begins, size=lengths)


def _note(images: list[_Found], given: dict[str, str], shard: int, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
    """Note an image's place, or a class file's word."""
    path = PurePosixPath(member.name)
    key = f"{shard}:{path.parent / path.name.partition('.')[0]}"
    if path.name.endswith(".cls"):
        content = archive.extractfile(member)
        given[key] = content.read(LINE).decode().strip() if content is not None else ""
    elif path.name.lower().endswith(SUFFIXES):
        images.append((shard, member.offset_data, member.size, key, path.parent.name))


def write_shards(store: ImageStore, folder: Path, images_per_shard: int = 10_000) -> int:
    """Write ``folder/images-0000.tar`` and so on, each image as ``CLASS/NUMBER.jpg``; returns the number of shards. Raises ``InputError``
    if ``folder`` has shards already."""
    make_folder(folder)
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


def pack_images(root: Path, out: Path, images_per_shard: int = 10_000) -> tuple[int, int, int]:
    """Write the images of ``root`` to ``out``; what it becomes follows from the name. Returns images, files, and bytes.

    ``.lmdb``: an LMDB. ``.tar``, ``.zip``, ``.sqsh``: an archive with ``CLASS/IMAGE`` inside. No ending: a folder of tar shards. Raises
    ``InputError`` if ``root`` is no image folder, or ``out`` exists or has another ending, and ``EnvironmentUnfitError`` if the tool or
    package for the format is missing.
    """
    store = FolderStore(root)
    if out.exists():
        raise InputError(f"{out}: exists already; expected a free name")
    make_folder(out.parent)
    ending = out.suffix.lower()
    if ending == ".lmdb":
        write_lmdb(store, out)
    elif ending in (".tar", ".zip", *SQUASH_SUFFIXES):
        _write_archive(store, root, out, ending)
    elif not ending:
        write_shards(store, out, images_per_shard)
    else:
        raise InputError(f"{out}: found the ending {ending!r}; expected .lmdb, .tar, .zip, .sqsh, or none for tar shards")
    files = [out] if out.is_file() else list(out.iterdir())
    return len(store.labels), len(files), sum(path.stat().st_size for path in files)


def _member(store: FolderStore, root: Path, position: int) -> str:
    """``CLASS/IMAGE``; of an image in another folder than its class's, as TinyImageNet has them, with its number as name."""
    inside, label = Path(store.name(position)).relative_to(root), store.classes[store.labels[position]]
    return str(inside) if inside.parts[:-1] == (label,) else f"{label}/{position:08}{inside.suffix.lower()}"


def _write_archive(store: FolderStore, root: Path, out: Path, ending: str) -> None:
    members = [(store.name(position), _member(store, root, position)) for position in range(len(store.labels))]
    if ending == ".tar":
        with replacing(out) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name, member in members:
                tar.add(name, arcname=member, recursive=False)
    elif ending == ".zip":
        with replacing(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # JPEGs do not shrink any further
            for name, member in members:
                archive.write(name, member)
    else:
        tool = shutil.which("mksquashfs")
        if tool is None:
            raise EnvironmentUnfitError("writing SquashFS needs mksquashfs", "install squashfs-tools, or write a .tar")
        with replacing_by_name(out) as inside:
            command = [tool, str(root), str(inside), "-quiet", "-no-progress", "-noD"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 -- mksquashfs; no shell
            if done.returncode:
                raise EnvironmentUnfitError(f"mksquashfs failed: {' '.join(done.stderr.split())[-200:]}")
