"""Images in one LMDB (Lightning Memory-Mapped Database): one file to copy, one to open, no directory look-ups.

Key ``__meta__`` holds JSON: ``{"format": 1, "classes": [...], "images": N}``. Key i, as 8 bytes with the highest first, holds the class of
image i, as 4 bytes with the lowest first, and after it the image's file.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import replacing_by_name
from caraml.base.limits import CLASSES, IMAGE, IMAGES, RECORD, counted, too_large
from caraml.workloads.image_classification.store import ImageStore

META = b"__meta__"
FORMAT = 1
_LABEL = struct.Struct("<i")
_KEY = struct.Struct(">q")
_PER_TRANSACTION = 1000
_DATA = "data.mdb"
_environments: dict[str, tuple[int, Any, Any]] = {}
"""Open databases by path: the process that opened it, the environment and its read transaction. LMDB allows one per process and path."""


class LmdbStore:
    """The images of an LMDB that :func:`write_lmdb` wrote."""

    def __init__(self, path: Path) -> None:
        """Open it and read the classes of all images. Raises ``InputError`` if it is not readable or has another content."""
        self.path = Path(path)
        meta = self._meta()
        self.classes: list[str] = meta["classes"]
        self.labels = np.frombuffer(meta["labels"], dtype=np.int64)

    def _meta(self) -> dict[str, Any]:
        lmdb = _lmdb()
        try:
            value = self._transaction().get(META)
            if value is not None and len(value) > RECORD:
                raise too_large(f"{self.path}: {META.decode()}", len(value), RECORD)
            meta = json.loads(counted(bytes(value), self.path, CLASSES)) if value is not None else {}
            images, classes = (meta.get("images"), meta.get("classes")) if isinstance(meta, dict) else (None, None)
            if not isinstance(images, int) or not isinstance(classes, list) or not images or meta.get("format") != FORMAT:
                raise InputError(
                    f"{self.path}: an LMDB, but not one of images: {self._content()}; expected a key `{META.decode()}` of format {FORMAT}",
                    "caraml data pack FOLDER --out NAME.lmdb writes one from the image files",
                )
            if (entries := _environments[str(self.path.absolute())][1].stat()["entries"]) > IMAGES:
                raise too_large(self.path, entries, IMAGES, "images")
            with self._transaction().cursor() as cursor:
                labels = np.fromiter((_LABEL.unpack_from(value)[0] for key, value in cursor if key != META), dtype=np.int64)
        except (lmdb.Error, OSError, ValueError, RecursionError, struct.error) as error:
            raise InputError(
                f"{self.path}: not readable as an LMDB: {error}", "copy it again, or write it anew with `caraml data pack`"
            ) from error
        if len(labels) != images or not 0 <= labels.min() <= labels.max() < len(classes):
            raise InputError(f"{self.path}: found {len(labels)} images; expected {images} of classes below {len(classes)}")
        return {"classes": classes, "labels": labels.tobytes()}

    def _content(self) -> str:
        """What a database of another layout has: its first keys and how its first value begins."""
        with self._transaction().cursor() as cursor:
            first = [(bytes(key), bytes(value[:16])) for (key, value), _ in zip(cursor, range(3), strict=False)]
        count = _environments[str(self.path.absolute())][1].stat()["entries"]
        keys = ", ".join(repr(key[:40])[1:] for key, _ in first)
        return f"found {count:,} entries, keys {keys or 'none'}" + (f", a value that begins with {first[0][1].hex(' ')}" if first else "")

    def _transaction(self) -> Any:
        """The read transaction of this process; LMDB forbids to carry one over a fork, so a loader's worker opens its own."""
        path = str(self.path.absolute())
        process, environment, transaction = _environments.get(path, (0, None, None))
        if process != os.getpid():
            if environment is not None:
                environment.close()
            if not self._file().is_file():
                raise InputError(f"{self.path}: no such LMDB")
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
        """The file of image ``position``."""
        value = self._transaction().get(_KEY.pack(position))
        if value is None:
            raise OSError(f"image {position} is missing")
        if len(value) > IMAGE:
            raise too_large(self.name(position), len(value), IMAGE)
        return bytes(value[_LABEL.size :])

    def name(self, position: int) -> str:
        """The database and the image's number in it."""
        return f"{self.path}[{position}]"

    def describe(self) -> dict[str, Any]:
        """Kind, path, bytes."""
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
