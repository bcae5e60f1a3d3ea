"""The same images from a folder, an LMDB, tar shards and an archive; staging; and what is said of broken or hostile ones."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caraml.base.errors import EnvironmentUnfitError, InputError
from caraml.data.loader import stream
from caraml.data.staging import stage, unstage
from caraml.workloads.image_classification import Params, parts_of
from caraml.workloads.image_classification.images import Form, ImageSamples, open_store
from caraml.workloads.image_classification.packed import LmdbStore, TarStore, pack_images, write_shards
from caraml.workloads.image_classification.store import FolderStore, ImageStore

squashfs = pytest.mark.skipif(shutil.which("mksquashfs") is None or shutil.which("unsquashfs") is None, reason="needs squashfs-tools")


@pytest.fixture(autouse=True)
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path / "data-home"))


def content(store: ImageStore) -> set[tuple[str, bytes]]:
    return {(store.classes[label], store.read(position)) for position, label in enumerate(store.labels.tolist())}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("set.lmdb", "lmdb"),
        ("shards", "webdataset"),
        ("set.tar", "webdataset"),
        ("set.tar", "archive"),
        ("set.zip", "archive"),
        pytest.param("set.sqsh", "archive", marks=squashfs),
    ],
)
def test_every_form_holds_the_same_images(name: str, form: Form, tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    images, files, _ = pack_images(image_folder[0], tmp_path / name, images_per_shard=30)
    assert (images, files) == (200, 7 if name == "shards" else 1)
    store, _ = open_store(form, tmp_path / name, tmp_path / "local" if form == "archive" else None, nullcontext())
    assert store.classes == FolderStore(image_folder[0]).classes
    assert content(store) == content(FolderStore(image_folder[0]))
    assert store.describe()["kind"] == "images" and store.describe()["bytes"] >= image_folder[2]
    with pytest.raises(InputError, match="exists already"):
        pack_images(image_folder[0], tmp_path / name)


@pytest.mark.parametrize("name", ["set.lmdb", "shards"])
def test_workers_read_stores_that_were_opened_before_they_were_forked(
    name: str, tmp_path: Path, image_folder: tuple[Path, int, int]
) -> None:
    pack_images(image_folder[0], tmp_path / name, images_per_shard=30)
    store = LmdbStore(tmp_path / name) if name == "set.lmdb" else TarStore(tmp_path / name)
    store.read(0)
    samples = ImageSamples(store, 32)
    with stream(samples, 8, workers=2) as parallel, stream(samples, 8, workers=0) as alone:
        for _ in range(5):
            assert torch.equal(next(parallel)[0], next(alone)[0])


def test_shards_with_class_files_are_webdatasets(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, label in enumerate((7, 3, 7)):
            for ending, data in ((".jpg", b"image %d" % number), (".cls", b"%d" % label), (".json", b"{}")):
                member = tarfile.TarInfo(f"{number:04}{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    store = TarStore(tmp_path / "a.tar")
    assert store.labels.tolist() == [7, 3, 7] and len(store.classes) == 8 and store.read(1) == b"image 1"
    assert store.name(1).startswith(str(tmp_path / "a.tar@"))


def test_the_index_of_shards_is_found_again_and_follows_their_change(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    write_shards(FolderStore(image_folder[0]), tmp_path / "shards", 100)
    TarStore(tmp_path / "shards")
    indices = list((tmp_path / "data-home").glob("tar-index-*"))
    TarStore(tmp_path / "shards")
    assert list((tmp_path / "data-home").glob("tar-index-*")) == indices and len(indices) == 1
    (tmp_path / "shards" / "images-0001.tar").unlink()
    assert len(TarStore(tmp_path / "shards").labels) == 100


def test_unreadable_databases_are_named_before_any_worker_starts(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    import lmdb

    with pytest.raises(InputError, match=r"a folder without data\.mdb, expected an LMDB") as refused:
        LmdbStore(image_folder[0])
    assert "caraml data pack FOLDER" in (refused.value.hint or "")
    with pytest.raises(InputError, match="no such LMDB"):
        LmdbStore(tmp_path / "gone.lmdb")
    (tmp_path / "text.lmdb").write_bytes(b"not a database " * 1000)
    with pytest.raises(InputError, match=r"text\.lmdb: not readable as an LMDB"):
        LmdbStore(tmp_path / "text.lmdb")
    with lmdb.open(str(tmp_path / "other.lmdb"), subdir=False) as other, other.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    with pytest.raises(InputError, match=r"not one of images: found 1 key: 'key'; a value that begins with 76 61 6c 75 65; expected"):
        LmdbStore(tmp_path / "other.lmdb")
    pack_images(image_folder[0], tmp_path / "cut.lmdb")
    with (tmp_path / "cut.lmdb").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(InputError, match="found 1,000,000 bytes of an LMDB of 20,"):
        LmdbStore(tmp_path / "cut.lmdb")
    (tmp_path / "nothing.lmdb").touch()
    with pytest.raises(InputError, match=r"nothing.lmdb: found 0 bytes, expected an LMDB"):
        LmdbStore(tmp_path / "nothing.lmdb")
    pack_images(image_folder[0], tmp_path / "whole.lmdb")
    with lmdb.open(str(tmp_path / "whole.lmdb"), subdir=False, map_size=1 << 30) as whole, whole.begin(write=True) as transaction:
        transaction.delete(b"\0" * 8)
    with pytest.raises(InputError, match="found 199 images; expected 200"):
        LmdbStore(tmp_path / "whole.lmdb")
    pack_images(image_folder[0], tmp_path / "wrong.lmdb")
    with lmdb.open(str(tmp_path / "wrong.lmdb"), subdir=False, map_size=1 << 30) as wrong, wrong.begin(write=True) as transaction:
        transaction.put(b"\0" * 8, (7).to_bytes(4, "little") + b"image")
    with pytest.raises(InputError, match=r"found classes 0 to 7; expected 0 to 3, as its `__meta__` says"):
        LmdbStore(tmp_path / "wrong.lmdb")


def test_tiny_imagenet_is_read_as_it_is_unpacked(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    root, given = tmp_path / "tiny-imagenet-200", FolderStore(image_folder[0])
    lines = []
    for position, label in enumerate(given.labels.tolist()):
        name = f"{given.classes[label]}_{position}.JPEG"
        part = root / "val" / "images" if position % 4 == 0 else root / "train" / given.classes[label] / "images"
        part.mkdir(parents=True, exist_ok=True)
        (part / name).write_bytes(given.read(position))
        (part.parent / "boxes.txt").touch()
        if position % 4 == 0:
            lines.append(f"{name}\t{given.classes[label]}\t0\t0\t63\t63\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("\n".join(given.classes))
    params = Params.model_validate({"data": str(root)})
    assert (params.data, params.path) == ("images", str(root))
    train, held_out = parts_of(str(root))
    assert held_out is not None and FolderStore(Path(train)).classes == FolderStore(Path(held_out)).classes == given.classes
    assert content(FolderStore(Path(train))) | content(FolderStore(Path(held_out))) == content(given)
    assert len(FolderStore(Path(held_out)).labels) == 50
    assert parts_of(str(root / "train")) == (str(root / "train"), None)
    forms: tuple[tuple[str, Form], ...] = (("a.lmdb", "lmdb"), ("a.tar", "webdataset"), ("b.zip", "archive"))
    for part, (name, form) in itertools.product((train, held_out), forms):  # packed, each image keeps its class
        packed = tmp_path / Path(part).name / name
        pack_images(Path(part), packed)
        store, _ = open_store(form, packed, tmp_path / "local", nullcontext())
        assert store.classes == given.classes and content(store) == content(FolderStore(Path(part)))
    (root / "val" / "val_annotations.txt").write_text(lines[0] + "../../etc\tn1\n")
    with pytest.raises(InputError, match=r"val_annotations\.txt:2: found '\.\./\.\./etc.*expected IMAGE, a tab and CLASS"):
        FolderStore(root / "val")


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ("/d/a.lmdb", "lmdb"),
        ("./a.tar", "archive"),
        ("a.lmdb", "lmdb"),
        ("a.zip", "archive"),
        ("/d/a.sqsh", "archive"),
        ("/d/set", "images"),
        ("/d/set.v2", "images"),
    ],
)
def test_the_form_of_a_path_follows_from_its_ending(given: str, form: str) -> None:
    params = Params.model_validate({"data": given})
    assert (params.data, params.path) == (form, given)
    with pytest.raises(ValueError, match="a form with `path`, or a path alone: path is '/other'"):
        Params.model_validate({"data": given, "path": "/other"})
    with pytest.raises(ValueError, match=r"'images', 'lmdb'.* or the path of a set with a / in it: \./lmbd for a folder"):
        Params.model_validate({"data": "lmbd"})


def test_the_two_parts_of_a_set_are_no_classes(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    """Packed together they were a set of two classes, the held-out images among those that are trained on."""
    for part in ("train", "val"):
        shutil.copytree(image_folder[0], tmp_path / "set" / part)
    with pytest.raises(InputError, match=r"found train and val, the two parts of a set") as refused:
        pack_images(tmp_path / "set", tmp_path / "set.lmdb")
    assert refused.value.hint == str(tmp_path / "set" / "train") and not (tmp_path / "set.lmdb").exists()
    assert pack_images(tmp_path / "set" / "train", tmp_path / "set.lmdb")[0] == image_folder[1]


def test_broken_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no tar file"):
        TarStore(tmp_path)
    (tmp_path / "bad.tar").write_bytes(b"no tar" * 500)
    with pytest.raises(InputError, match=r"bad\.tar: not readable"):
        TarStore(tmp_path)
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("image.jpg"))
    with pytest.raises(InputError, match="without a class, first '0:image'"):
        TarStore(tmp_path)


def test_a_shard_cut_short_is_a_damaged_image_and_not_a_crash(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    pack_images(image_folder[0], tmp_path / "set.tar")
    store = TarStore(tmp_path / "set.tar")
    with (tmp_path / "set.tar").open("r+b") as file:
        file.truncate(1_000_000)
    with pytest.raises(InputError, match=r"set\.tar@.*the shard ends after"):
        ImageSamples(store, 32)[199]


def test_staging_copies_once_and_says_what_it_took(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    local = tmp_path / "local"
    first, again = (stage(image_folder[0], local, unpack=False) for _ in range(2))
    assert (first.again, again.again) == (False, True)
    assert first.path == again.path and first.seconds == again.seconds > 0
    assert first.bytes > image_folder[2]  # images.json is copied too
    assert content(FolderStore(first.path)) == content(FolderStore(image_folder[0]))
    pack_images(image_folder[0], tmp_path / "set.lmdb")
    file = stage(tmp_path / "set.lmdb", local, unpack=False)
    assert file.path.read_bytes() == (tmp_path / "set.lmdb").read_bytes()
    assert len(unstage(local)) == 2 and not first.path.exists()
    for wrong in (tmp_path / "set.lmdb", tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"no (such )?folder"):
            unstage(wrong)


def test_a_folder_that_has_changed_further_in_is_staged_anew(tmp_path: Path) -> None:
    """An image that is put in place of a damaged one changes the time of its class's folder, and not that of the set's."""
    (tmp_path / "set" / "class").mkdir(parents=True)
    image = tmp_path / "set" / "class" / "0.jpg"
    image.write_bytes(b"damaged")
    for folder in (image.parent, image.parent.parent):
        os.utime(folder, (1e9, 1e9))
    before = stage(tmp_path / "set", tmp_path / "local", unpack=False)
    image.with_suffix(".new").write_bytes(b"mended.")
    image.with_suffix(".new").replace(image)
    os.utime(image.parent.parent, (1e9, 1e9))
    after = stage(tmp_path / "set", tmp_path / "local", unpack=False)
    assert not after.again and (after.path / "class" / "0.jpg").read_bytes() == b"mended." and before.path != after.path
    assert stage(tmp_path / "set", tmp_path / "local", unpack=False).again and len(unstage(tmp_path / "local")) == 2


def test_processes_of_a_node_stage_once(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: stage(image_folder[0], tmp_path / "local", unpack=False), range(4)))
    assert sorted(staged.again for staged in done) == [False, True, True, True] and len({staged.path for staged in done}) == 1


def hostile_tar(path: Path, name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> None:
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [("../outside.jpg", tarfile.REGTYPE, ""), ("/etc/outside.jpg", tarfile.REGTYPE, ""), ("a/link.jpg", tarfile.SYMTYPE, "/etc/passwd")],
)
def test_members_that_would_land_outside_are_refused(name: str, kind: bytes, target: str, tmp_path: Path) -> None:
    hostile_tar(tmp_path / "hostile.tar", name, kind, target)
    if name.startswith("/"):  # tarfile takes the leading slash away, so that it lands inside
        stage(tmp_path / "hostile.tar", tmp_path / "local", unpack=True)
        assert not Path(name).exists()
        return
    with pytest.raises(InputError, match="not unpacked"):
        stage(tmp_path / "hostile.tar", tmp_path / "local", unpack=True)
    assert not list(tmp_path.glob("**/outside.jpg")) and not list((tmp_path / "local").glob("caraml-*/[!.]*"))


def test_links_that_are_too_long_to_be_followed_lead_nowhere(tmp_path: Path) -> None:
    """Below names of more characters than a path may have, a filter that resolves links takes one that leads out for one that does not."""
    precious, part, path = tmp_path / "precious", "d" * 247, ""
    precious.write_text("mine")
    with tarfile.open(tmp_path / "hostile.tar", "w") as archive:

        def add(name: str, kind: bytes, target: str = "", content: bytes = b"") -> None:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, target, len(content)
            archive.addfile(member, io.BytesIO(content))

        short = "abcdefghijklmnop"
        for letter in short:
            add(f"{path}{part}", tarfile.DIRTYPE)
            add(f"{path}{letter}", tarfile.SYMTYPE, part)
            path += f"{part}/"
        far = f"{'/'.join(short)}/{'l' * 254}"
        add(far, tarfile.SYMTYPE, "../" * len(short))
        add("escape", tarfile.SYMTYPE, f"{far}{'/..' * 30}{precious}")
        add("0.jpg", tarfile.LNKTYPE, "escape")
        add("0.jpg", tarfile.REGTYPE, content=b"theirs")
    with pytest.raises(InputError, match="is a link or a device"):
        stage(tmp_path / "hostile.tar", tmp_path / "local", unpack=True)
    assert precious.read_text() == "mine"


def test_a_folder_of_images_is_left_by_no_link_twice(tmp_path: Path) -> None:
    """Two links to the folder around them would be followed 2 to the power of 40 times."""
    for name in ("a", "b"):
        (tmp_path / "set" / "c").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).symlink_to(".")
    for read in (FolderStore, lambda root: stage(root, tmp_path / "local", unpack=False)):
        with pytest.raises(InputError, match="for the second time"):
            read(tmp_path / "set")


def test_pipes_and_devices_are_no_data(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    shutil.copytree(image_folder[0], tmp_path / "set")
    inside = next(path for path in (tmp_path / "set").iterdir() if path.is_dir())
    os.mkfifo(inside / "pipe.jpg")
    (inside / "zero.jpg").symlink_to("/dev/zero")
    (inside / "more").symlink_to(image_folder[0] / inside.name)  # a folder of somewhere else is read as before
    staged = stage(tmp_path / "set", tmp_path / "local", unpack=False)
    twice = len(FolderStore(tmp_path / "set").labels)
    assert len(FolderStore(staged.path).labels) == twice == image_folder[1] + sum(1 for _ in (image_folder[0] / inside.name).iterdir())
    assert not list(staged.path.rglob("pipe.jpg")) and not list(staged.path.rglob("zero.jpg"))
    with pytest.raises(InputError, match="neither a plain file nor a folder"):
        stage(inside / "pipe.jpg", tmp_path / "local", unpack=False)


def test_a_zip_that_climbs_out_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "hostile.zip", "w") as archive:
        archive.writestr("../outside.jpg", b"x")
    with pytest.raises(InputError, match="would land outside"):
        stage(tmp_path / "hostile.zip", tmp_path / "local", unpack=True)


@squashfs
def test_a_squashfs_with_a_link_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree" / "c").mkdir(parents=True)
    (tmp_path / "tree" / "c" / "0.jpg").symlink_to("/etc/passwd")
    subprocess.run(["mksquashfs", str(tmp_path / "tree"), str(tmp_path / "hostile.sqsh"), "-quiet"], check=True, capture_output=True)
    with pytest.raises(InputError, match="a link out of the archive"):
        stage(tmp_path / "hostile.sqsh", tmp_path / "local", unpack=True)


@pytest.mark.parametrize("name", ["cut.tar.gz", "cut.zip", pytest.param("cut.sqsh", marks=squashfs)])
def test_damaged_archives_are_named_and_leave_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(np.random.default_rng(0).bytes(10_000))
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        stage(tmp_path / name, tmp_path / "local", unpack=True)
    assert not list((tmp_path / "local").glob("caraml-*/[!.]*"))


def test_what_cannot_be_staged_is_said_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(b"x" * 1000)
    with pytest.raises(InputError, match="no such file"):
        stage(tmp_path / "gone", tmp_path / "local", unpack=False)
    with pytest.raises(InputError, match="no archive"):
        stage(tmp_path / "a.bin", tmp_path / "local", unpack=True)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=999))
    with pytest.raises(EnvironmentUnfitError, match=r"999 bytes free; staging .* needs 1,000"):
        stage(tmp_path / "a.bin", tmp_path / "local", unpack=False)
    with pytest.raises(InputError, match="data = 'archive' needs a folder to unpack to"):
        open_store("archive", tmp_path / "a.tar", None, nullcontext())
    with pytest.raises(InputError, match="data = 'lmdb' needs one"):
        open_store("lmdb", None, None, nullcontext())


def test_a_folder_around_the_classes_of_an_archive_is_gone_through(tmp_path: Path, image_folder: tuple[Path, int, int]) -> None:
    with tarfile.open(tmp_path / "wrapped.tar.gz", "w:gz") as archive:
        for path in sorted(image_folder[0].glob("*/0000000[01].jpg")):
            archive.add(path, arcname=Path("train", "raw", path.relative_to(image_folder[0])))
    store, staged = open_store("archive", tmp_path / "wrapped.tar.gz", tmp_path / "local", nullcontext())
    assert len(store.labels) == 8 and len(store.classes) == 4
    assert staged is not None and staged.bytes > 0


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, 3000), value=st.integers(0, 255))
def test_a_byte_changed_in_a_shard_s_header_never_crashes(place: int, value: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARAML_DATA", folder)
        path = Path(folder) / "a.tar"
        with tarfile.open(path, "w") as archive:
            for number in range(3):
                member = tarfile.TarInfo(f"class/{number}.jpg")
                member.size = 100
                archive.addfile(member, io.BytesIO(bytes(100)))
        data = bytearray(path.read_bytes())
        data[place] = value
        path.write_bytes(data)
        try:
            store = TarStore(path)
            for position in range(len(store.labels)):
                store.read(position)
        except (InputError, OSError):
            pass  # the two answers that a caller is promised


def test_a_file_is_no_place_to_stage_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/caraml-[0-9]+: cannot stage data here: Not a directory"):
        stage(tmp_path / "file", tmp_path / "file", unpack=False)
