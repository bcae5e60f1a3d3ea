"""Writing an image folder in the form that a file system likes better: one LMDB, tar shards, or one archive."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from caraml.base.files import replacing, replacing_by_name
from caraml.data.image_store import FolderStore
from caraml.data.staging import SQUASH_SUFFIXES
from caraml.errors import EnvironmentUnfitError, InputError


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
        from caraml.data.lmdb_store import write_lmdb

        write_lmdb(store, out)
    elif ending in (".tar", ".zip", *SQUASH_SUFFIXES):
        _write_archive(store, root, out, ending)
    elif not ending:
        from caraml.data.tar_store import write_shards

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
