"""Small data files that ask for much: each is refused, by a line that names it and the limit, or read within the limits."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import pytest
import zstandard

from caraml.base import limits
from caraml.data.staging import stage
from caraml.workloads.gpt.documents import read_documents
from caraml.workloads.gpt.text import PreparedText, prepare_text
from caraml.workloads.image_classification.decode import central_crop, decode_crop
from caraml.workloads.image_classification.images import ImageSamples
from caraml.workloads.image_classification.packed import LmdbStore, TarStore
from caraml.workloads.image_classification.store import FolderStore
from caraml.workloads.image_compression.training import mnist
from caraml.workloads.pretrained import load_tokenizer
from caraml.workloads.question_answering.data import read_squad
from tests.security.taken import taken

FAR = "unpacks to more than 67,108,864 bytes, the most that are read of a file of its size"


def exhaust(items: Iterable[Any]) -> int:
    return sum(1 for _ in items)


# -- compressed text -------------------------------------------------------------------------------------------------------


def wide_xz() -> bytes:
    """An xz file whose header says that it needs 1 GiB to be unpacked."""
    content = bytearray(lzma.compress(b"text" * 100))
    header = 4 * (content[12] + 1)
    content[16] = 36  # dictionary of 2 << (36 / 2 + 11)
    content[8 + header : 12 + header] = zlib.crc32(content[12 : 8 + header]).to_bytes(4, "little")
    return bytes(content)


WIDE_ZSTD = bytes.fromhex("28b52ffd 00 a0 230300 61")
"""A zstd frame of a hundred letters with a window of 1 GiB."""
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda content: gzip.compress(content, 1),
    "xz": lambda content: lzma.compress(content, preset=0),
    "zst": zstandard.compress,
    "bz2": bz2.compress,
}


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_text_that_unpacks_too_far_is_refused(ending: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.{ending}"
    path.write_bytes(PACK[ending]((b" " * 999 + b"\n") * (limits.UNPACKED // 1000 + 1)))
    assert path.stat().st_size < 1 << 20
    taken(lambda: exhaust(read_documents(path))).refused(path.name, FAR)


@pytest.mark.parametrize(("ending", "content"), [("xz", wide_xz()), ("zst", WIDE_ZSTD)])
def test_what_needs_much_memory_to_unpack_is_refused(ending: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt.{ending}"
    path.write_bytes(content)
    taken(lambda: exhaust(read_documents(path))).refused(path.name, "cannot be read or unpacked: .*([Mm]emory|too much)")


@pytest.mark.parametrize("ending", PACK)
def test_several_streams_in_one_file_are_all_read(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.txt.{ending}"
    path.write_bytes(PACK[ending]("één\n".encode()) + PACK[ending](b"two\n"))
    assert list(read_documents(path)) == ["één\ntwo\n"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "' + b"x" * limits.DOCUMENT, "found more than 16,777,216 bytes in it"),
        (b'{"text": "", "x": [' + b"[]," * 4_000_000 + b"[]]}", "values, at most 500,000 are read"),
        (b'{"text": ' + b"9" * 100_000 + b"}", "found no JSON"),
    ],
    ids=["long", "values", "digits"],
)
def test_lines_that_ask_for_much_are_refused(line: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n' + line)
    taken(lambda: exhaust(read_documents(tmp_path / "a.jsonl"))).refused("a.jsonl, line 2", words)


def test_lines_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b"\n" * (limits.UNPACKED // 12), preset=0))
    taken(lambda: exhaust(read_documents(tmp_path / "a.jsonl.xz"))).refused("a.jsonl.xz", "found 4,194,305 lines, at most 4,194,304")


def test_a_large_plain_text_is_several_documents_of_whole_lines(tmp_path: Path) -> None:
    line, path = "wörd " * 20 + "\n", tmp_path / "a.txt"
    text = line * (3 * limits.DOCUMENT // len(line.encode()))
    path.write_text(text)
    documents = list(read_documents(path))
    assert len(documents) == 2 and all(document.endswith("\n") for document in documents)
    same = "".join(documents) == text
    assert same
    path.write_text("x€" * limits.DOCUMENT)
    found = taken(lambda: exhaust(read_documents(path)))
    found.within_limits()
    assert found.refusal is None


# -- Parquet ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query",
    ["SELECT repeat('x', 4_000_000) AS text FROM range(300)", f"SELECT '' AS text FROM range({limits.UNPACKED // 16 + 1})"],
    ids=["long words", "empty rows"],
)
def test_a_parquet_corpus_that_unpacks_too_far_is_refused(query: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    duckdb.sql(f"COPY ({query}) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    assert path.stat().st_size < (1 << 19)
    taken(lambda: exhaust(read_documents(path))).refused("a.parquet", FAR)


def test_long_texts_of_a_parquet_corpus_come_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    random = Random(0)
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE texts (text VARCHAR)")
        connection.executemany("INSERT INTO texts VALUES (?)", [[f"{number} {random.randbytes(2_000_000).hex()}"] for number in range(20)])
        connection.execute(f"COPY texts TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    found = taken(lambda: exhaust(read_documents(path)))
    found.within_limits()
    assert found.refusal is None and [text.partition(" ")[0] for text in read_documents(path)] == [str(i) for i in range(20)]


# -- archives of data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["tar.gz", "tar.xz", "tgz", "zip"])
def test_archives_of_data_that_unpack_too_far_are_refused(ending: str, tmp_path: Path) -> None:
    zeros, path = tmp_path / "zeros", tmp_path / f"data.{ending}"
    with zeros.open("wb") as file:
        file.truncate(limits.UNPACKED + 1)
    if ending == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.write(zeros, "a/zeros.jpg")
    else:
        with tarfile.open(path, f"w:{ending[-2:]}") as archive:
            archive.add(zeros, "a/zeros.jpg")
    to = tmp_path / "to"
    taken(lambda: stage(path, to, unpack=True)).refused(path.name, FAR)
    assert not list(to.rglob("*.jpg")), "nothing is left"


# -- tokenizers ------------------------------------------------------------------------------------------------------------

MODEL = {"type": "BPE", "vocab": {"<|endoftext|>": 0, "a": 1, "aa": 2}, "merges": ["a a"]}
PARTS = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
TOKENIZER = {"version": "1.0", "added_tokens": [], **PARTS, "model": MODEL}


def replace(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def tokenize(folder: Path, tokenizer: dict[str, Any], text: str = "a" * 40 + "b\n") -> Callable[[], object]:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "a.txt").write_text(text)
    return lambda: prepare_text([folder / "a.txt"], folder / "out", tokenizer=folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: {"normalizer": replace("x" * 1_000_000)}, "found 1,000,000 times the length .* at most 16"),
        (lambda: {"normalizer": {"type": "Sequence", "normalizers": [replace("aa")] * 30}}, "found 1,073,741,824 times the length"),
        (lambda: {"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}}, "found 1,000,001 times the length"),
        (
            lambda: {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
            "retry-limit",
        ),
        (lambda: {"x": [0] * limits.TOKENIZER_VALUES}, "values, at most 1,600,000 are read"),
        (lambda: {"model": {**MODEL, "merges": [[]] * limits.TOKENIZER_VALUES}}, "at most 1,600,000 are read"),
        (lambda: {"x": " " * limits.TOKENIZER}, "bytes, at most 50,331,648 are read"),
        (
            lambda: {"model": {**MODEL, "vocab": {**MODEL["vocab"], **{f"x{n}": n for n in range(limits.VOCABULARY)}}}},
            "1,000,003 tokens, at most",
        ),
    ],
    ids=["long", "doubling", "before", "expression", "values", "merges", "bytes", "tokens"],
)
def test_tokenizers_that_ask_for_much_are_refused(change: Callable[[], dict[str, Any]], words: str, tmp_path: Path) -> None:
    taken(tokenize(tmp_path, {**TOKENIZER, **change()})).refused("tokenizer.json", words)


def test_a_tokenizer_s_lengths_are_not_ours(tmp_path: Path) -> None:
    padding = {"strategy": {"Fixed": 300_000_000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    found = taken(tokenize(tmp_path, {**TOKENIZER, "padding": {**padding, "pad_token": "a"}, "truncation": cut}))
    found.within_limits()
    assert PreparedText.read(tmp_path / "out").tokens == 21


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vocab.json", b"[" * 1_000_000, "cannot be read as JSON"),
        ("vocab.json", b"[" * 2_000_000, "arrays, at most 1,600,000"),
        ("merges.txt", b"a a\n" * (limits.TOKENIZER_VALUES + 1), "found 1,600,001 merges"),
        ("merges.txt", b"\n" * (limits.TOKENIZER + 1), "bytes, at most 50,331,648 are read"),
    ],
)
def test_vocabularies_and_merges_that_ask_for_much_are_refused(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(MODEL["vocab"]))
    (tmp_path / "merges.txt").write_text("a a\n")
    (tmp_path / name).write_bytes(content)
    taken(lambda: load_tokenizer(tmp_path)).refused(name, words)


# -- questions and digits --------------------------------------------------------------------------------------------------


def asked(text: str, questions: int) -> bytes:
    question = {"question": "x", "answers": []}
    return json.dumps({"data": [{"paragraphs": [{"context": text, "qas": [question] * questions}]}]}).encode()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json.gz", lambda: gzip.compress(b" " * (limits.UNPACKED + 1)), "at most 67,108,864 are read|unpacks to more"),
        ("a.json", lambda: b"[" * 1_000_000, "not readable as JSON"),
        ("a.json", lambda: b"[" + b"[[]]," * 10_000_000 + b"0]", "at most 2,000,000 are read"),
        ("a.json", lambda: b'{"data": ' + b"9" * 10_000 + b"}", "not readable as JSON"),
        ("a.json", lambda: asked("x" * 1_000_000, 257), "found 257,000,000 characters of text, .* at most 256,000,000"),
    ],
    ids=["gzip", "deep", "values", "digits", "one text"],
)
def test_questions_that_ask_for_much_are_refused(name: str, content: Callable[[], bytes], words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content())
    taken(lambda: read_squad(tmp_path / name)).refused(name, words)


def test_digits_that_unpack_too_far_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(limits.UNPACKED + 1), 1))
    taken(lambda: mnist(tmp_path)).refused(path.name, FAR)
    (tmp_path / path.stem).write_bytes(b"")
    with (tmp_path / path.stem).open("wb") as file:
        file.truncate(limits.DIGITS + 1)
    taken(lambda: mnist(tmp_path)).refused(path.stem, "at most 268,435,456 are read")


# -- images ----------------------------------------------------------------------------------------------------------------


def png(width: int, height: int, mode: str = "L") -> bytes:
    """A PNG of zeros whose header says so; the pixels are there only where they are few."""
    from PIL import Image

    content = io.BytesIO()
    few = width * height <= limits.PIXELS_OTHER
    Image.new(mode, (width, height) if few else (8, 8)).save(content, "PNG", compress_level=1)
    header = b"IHDR" + struct.pack(">II", width, height) + content.getvalue()[24:29]
    return content.getvalue()[:12] + header + struct.pack(">I", zlib.crc32(header)) + content.getvalue()[33:]


def jpeg(width: int, height: int) -> bytes:
    import numpy as np
    import simplejpeg

    content = simplejpeg.encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    at = content.index(b"\xff\xc0") + 5
    return bytes(content[:at] + struct.pack(">HH", height, width) + content[at + 4 :])


def encoded(form: str) -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (64, 64)).save(content, form)
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (png(100_000, 100_000), "more pixels than the 25,000,000 that are read"),
        (png(5001, 5000), "found 5001 x 5000 pixels, at most 25,000,000 are read"),
        (jpeg(8001, 8000), "found 8001 x 8000 pixels, at most 64,000,000 are read"),
        *((encoded(form), "no image of a known format") for form in ("EPS", "GIF", "PDF", "ICNS", "SGI", "TGA")),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(id) (r) file", "no image of a known format"),
    ],
    ids=["huge png", "large png", "large jpeg", "eps", "gif", "pdf", "icns", "sgi", "tga", "postscript"],
)
def test_images_that_ask_for_much_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "a.png").write_bytes(content)
    taken(lambda: ImageSamples(FolderStore(tmp_path), 32)[0]).refused("a.png", words)


@pytest.mark.parametrize("mode", ["RGBA", "P", "RGB"])
def test_the_largest_image_that_is_read_stays_within_the_limits(mode: str) -> None:
    content = png(5000, 5000, mode)
    found = taken(lambda: decode_crop(content, central_crop, 32))
    found.within_limits()
    assert found.refusal is None


def test_a_file_without_end_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    with (tmp_path / "class" / "a.jpg").open("wb") as file:
        file.truncate(1 << 40)
    taken(lambda: ImageSamples(FolderStore(tmp_path), 32)[0]).refused("a.jpg", "bytes, at most 67,108,864 are read")
    head = tarfile.TarInfo("class/a.jpg")
    head.size = 1 << 40
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(head.tobuf(tarfile.GNU_FORMAT))
        file.truncate((1 << 40) + 10_240)
    taken(lambda: TarStore(tmp_path / "a.tar").read(0)).refused("a.tar", "bytes, at most 67,108,864 are read")


def test_an_animation_gives_its_first_picture() -> None:
    from PIL import Image

    content = io.BytesIO()
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "blue")]
    frames[0].save(content, "PNG", save_all=True, append_images=frames[1:])
    assert decode_crop(content.getvalue(), central_crop, 8)[:, 4, 4].tolist() == [255, 0, 0]


# -- LMDB and tar of images ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        (b"[" * 100_000, "not readable as an LMDB"),
        (b'{"format": 1, "classes": [' + b"[]," * 4_000_000 + b'[]], "images": 1}', "at most 1,000,000 are read"),
        (b'{"format": 1, "classes": 3, "images": 1}', "not one of images"),
        (b" " * (limits.RECORD + 1), "at most 16,777,216 are read"),
    ],
    ids=["deep", "values", "a number", "large"],
)
def test_lmdb_whose_description_asks_for_much_is_refused(meta: bytes, words: str, tmp_path: Path) -> None:
    import lmdb

    with lmdb.open(str(tmp_path / "a.lmdb"), subdir=False, map_size=1 << 28) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"__meta__", meta)
    taken(lambda: LmdbStore(tmp_path / "a.lmdb")).refused("a.lmdb", words)


def test_a_tar_of_classes_without_end_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("0.jpg", b"x"), ("0.cls", b"999999999")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    taken(lambda: TarStore(tmp_path / "a.tar")).refused("a.tar", "found 999,999,999 as the number of a class, at most 1,000,000")


# -- HDF5 ------------------------------------------------------------------------------------------------------------------


def with_scale(file: Any, shape: tuple[int, ...], **how: Any) -> None:
    for name in ("x", "n"):
        del file[name]
    scale = file.create_dataset("n", (shape[0],), "f4", chunks=True)
    scale.make_scale("n")
    file.create_dataset("x", shape, "f4", **how).dims[0].attach_scale(scale)


def virtual(file: Any, other: Path) -> None:
    import h5py

    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(other), "x", (4,))
    scale = file["n"]
    del file["x"]
    file.create_virtual_dataset("x", layout).dims[0].attach_scale(scale)


def linked(file: Any, other: Path) -> None:
    import h5py

    del file["x"]
    file["there"] = h5py.ExternalLink(str(other), "/x")
    file["x"] = h5py.SoftLink("/there")


def of_kind(kind: Any) -> Callable[[Any, Path], None]:
    def change(file: Any, _: Path) -> None:
        scale = file["n"]
        del file["x"]
        file.create_dataset("x", (4,), kind).dims[0].attach_scale(scale)

    return change


def references(file: Any, other: Path) -> None:
    import h5py

    of_kind(h5py.ref_dtype)(file, other)
    file["x"][:] = [file["n"].ref] * 4


def foreign_filter(file: Any, _: Path) -> None:
    """Written under the number of a filter that h5py has, which is then another's in the file."""
    with_scale(file, (4,), chunks=(4,), compression="lzf")


HDF: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "link": (linked, "'there' is a link to another file"),
    "storage": (lambda file, other: with_scale(file, (4,), external=[(str(other), 0, 16)]), "lie in another file"),
    "virtual": (virtual, "lie in another file"),
    "shape": (lambda file, _: with_scale(file, (400_000_000,), chunks=(1 << 20,), compression=1), "bytes to be read at once"),
    "chunk": (
        lambda file, _: with_scale(file, (400_000_000,), chunks=(100_000_000,), compression=1),
        "bytes in a chunk, at most 134,217,728",
    ),
    "filter": (foreign_filter, "filter 32099, which is no part of HDF5"),
    "references": (references, "found values of type object, expected numbers"),
    "records": (of_kind([("a", "f4"), ("b", "S9")]), "found values of type .*, expected numbers"),
    "names": (lambda file, _: [file.__setitem__(f"y{n}", file["n"]) for n in range(limits.LINKS)] and None, "names, at most 10,000"),
}


@pytest.mark.parametrize("name", HDF)
def test_hdf5_that_asks_for_much_is_refused(name: str, tmp_path: Path) -> None:
    import h5netcdf
    import h5py

    from caraml.workloads.weather.netcdf import Layout, NetcdfFiles

    change, words = HDF[name]
    for path in (tmp_path / "a.nc", tmp_path / "other.nc"):
        with h5netcdf.File(path, "w") as made:
            made.dimensions = {"n": 4}
            made.create_variable("x", ("n",), "f4", data=[1, 2, 3, 4])
    with h5py.File(tmp_path / "a.nc", "a") as file:
        change(file, tmp_path / "other.nc")
    if name == "filter":
        content = (tmp_path / "a.nc").read_bytes()
        assert content.count(b"\x00\x7d") == 1
        (tmp_path / "a.nc").write_bytes(content.replace(b"\x00\x7d", struct.pack("<H", 32099)))
    taken(lambda: NetcdfFiles([tmp_path / "a.nc"], Layout({"x": ("n",)}, {})).read(0, "x")).refused("a.nc", words)
