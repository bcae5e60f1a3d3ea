"""From what a user names (a folder, an LMDB, tar shards, an archive, nothing) to samples, staged on this node if asked for."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from caraml.data.image_generator import default_image_folder
from caraml.data.image_store import FolderStore, ImageStore
from caraml.data.staging import Staged, stage
from caraml.errors import InputError

Form = Literal["images", "lmdb", "webdataset", "archive"]
"""``images``: ROOT/CLASS/IMAGE. ``lmdb``: one database. ``webdataset``: tar files read in place. ``archive``: unpacked before use."""


@dataclass(frozen=True)
class OpenStore:
    """A store, and how it was brought to this node if it was."""

    store: ImageStore
    staged: Staged | None


def open_store(form: Form, path: Path | None, stage_to: Path | None, staging: AbstractContextManager[None]) -> OpenStore:
    """Open the images at ``path``, on storage of this node if ``stage_to`` names a folder there.

    Args:
        form: what ``path`` is.
        path: ``None`` for the small drawn set, which is an image folder.
        stage_to: a folder on this node, or ``None`` to read where the data lies.
        staging: surrounds the copying, so that it can be timed.

    Raises:
        InputError: for anything that is wrong with the data as a whole.
    """
    if path is None:
        if form != "images":
            raise InputError(f"path: found none; data = {form!r} needs one", "caraml data pack writes one from an image folder")
        path = default_image_folder()
    if form == "archive" and stage_to is None:
        raise InputError("stage: found none; data = 'archive' needs a folder to unpack to", "for example stage = '/dev/shm'")
    staged = None
    if stage_to is not None:
        with staging:
            staged = stage(path, stage_to, unpack=form == "archive")
        path = staged.path
    return OpenStore(_store(form, path), staged)


def _store(form: Form, path: Path) -> ImageStore:
    if form == "lmdb":
        from caraml.data.lmdb_store import LmdbStore

        return LmdbStore(path)
    if form == "webdataset":
        from caraml.data.tar_store import TarStore

        return TarStore(path)
    return FolderStore(_below_wrappers(path) if form == "archive" else path)


def _below_wrappers(folder: Path) -> Path:
    """An archive often holds one folder that holds everything: go down as long as there is one folder with nothing but folders in it."""
    while len(inside := list(folder.iterdir())) == 1 and inside[0].is_dir() and all(path.is_dir() for path in inside[0].iterdir()):
        folder = inside[0]
    return folder
