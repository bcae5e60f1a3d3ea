"""Where prepared data lives, and how it gets there exactly once and whole.

A prepared thing is a folder whose name is the hash of what it was made from. It is built under a temporary name beside
its final one, flushed to the disk and renamed, so a reader finds all of it or nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.base.files import DATA_VARIABLE, data_home, flush, write_new
from caraml.base.locks import alone

_PARTIAL = ".partial-"
_ABANDONED_AFTER = 24 * 3600.0
"""Seconds after which a half-built folder of another host counts as abandoned: its process cannot be asked from here."""


def prepared_once(key: Mapping[str, Any], build: Callable[[Path], object]) -> Path:
    """The folder that ``build`` filled for ``key``, built now if it does not exist yet.

    Args:
        key: everything that the content depends on, as JSON values; ``key["kind"]`` begins the folder's name.
        build: fills the empty folder that it is given. It may run in several processes at the same time, for the same
            key, on file systems without locks; one result wins and the others are thrown away.

    Returns:
        The finished folder, under :func:`~caraml.base.files.data_home`; it also holds ``key.json``.

    Raises:
        EnvironmentUnfitError: if the data folder cannot be written.
    """
    text = json.dumps(key, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    final = data_home() / f"{key.get('kind', 'data')}-{digest}"
    if final.is_dir():
        return final

    def build_with_key(folder: Path) -> None:
        build(folder)
        write_new(folder / "key.json", json.dumps(key, sort_keys=True, indent=2) + "\n")

    make_parent(final)
    # Only a saving: the rename decides. Where the lock cannot be had (some parallel file systems have none, or it is another user's), each
    # process builds for itself.
    with alone(final.parent / f".{final.name}.lock", private=False):
        if not final.is_dir():
            _remove_abandoned(final)
            build_folder(final, build_with_key)
    return final


def build_folder(final: Path, build: Callable[[Path], object]) -> None:
    """Fill a temporary sibling of ``final`` by ``build``, flush it to the disk and rename it to ``final``.

    If another process finishes ``final`` first, its result stays and this one is removed. If ``build`` raises, nothing
    is left; if the process is killed, a folder named ``.<name>.partial-...`` is left, which nobody reads.

    Raises:
        InputError: if ``final`` exists and is no folder.
    """
    if final.exists() and not final.is_dir():
        raise InputError(f"{final} is a file; expected a folder or a free name")
    make_parent(final)
    partial = final.parent / f".{final.name}{_PARTIAL}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    partial.mkdir(mode=0o755)
    try:
        build(partial)
        _flush_tree(partial)
        try:
            partial.rename(final)
        except OSError:
            if not (final.is_dir() and any(final.iterdir())):
                raise
        flush(final.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_parent(final: Path) -> None:
    """Make the folder of what will be written. Raises ``EnvironmentUnfitError`` where nothing can be written."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(final.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise EnvironmentUnfitError(
            f"{final.parent}: data cannot be written here: {error.strerror or error}",
            f"choose a folder that you can write; prepared data goes where {DATA_VARIABLE} says",
        ) from error


def _flush_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            flush(path)


def _remove_abandoned(final: Path) -> None:
    """Delete what killed builders of ``final`` left: those of this host whose process is gone, and very old ones."""
    start = f".{final.name}{_PARTIAL}"
    for folder in final.parent.glob(f"{start}*"):
        host, _, process = folder.name.removeprefix(start).rpartition("-")[0].rpartition("-")
        if host == socket.gethostname():
            abandoned = not Path("/proc", process).exists()
        else:
            try:
                abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_AFTER
            except FileNotFoundError:  # its builder has just finished
                continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)
