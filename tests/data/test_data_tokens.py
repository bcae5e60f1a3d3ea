"""The indexed format, byte by byte, from friends and from strangers; and the samples cut from it."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from caraml.base.errors import InputError
from caraml.workloads.gpt.tokens import DTYPE_CODES, IndexedTokens, IndexedTokensWriter, TokenSamples, read_index, token_dtype

OSCAR = Path(__file__).parents[3] / "shared" / "data" / "oscar_text_document.idx"


def write(prefix: Path, documents: list[list[int]], vocab_size: int = 1000) -> IndexedTokens:
    with IndexedTokensWriter.at(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(document)
    return IndexedTokens(prefix)


def index_bytes(
    lengths: list[int],
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    pointers: list[int] | None = None,
    boundaries: list[int] | None = None,
    sequences: int | None = None,
    boundary_count: int | None = None,
) -> bytes:
    """The format written out by hand, so that the reader is not judged by our own writer."""
    width = DTYPE_CODES.get(code, np.dtype("u2")).itemsize
    starts = [sum(lengths[:i]) * width for i in range(len(lengths))] if pointers is None else pointers
    marks = list(range(len(lengths) + 1)) if boundaries is None else boundaries
    header = magic + struct.pack(
        "<QBQQ",
        version,
        code,
        len(lengths) if sequences is None else sequences,
        len(marks) if boundary_count is None else boundary_count,
    )
    return header + struct.pack(f"<{len(lengths)}i{len(starts)}q{len(marks)}q", *lengths, *starts, *marks)


@pytest.mark.skipif(not OSCAR.exists(), reason="CARAML's own index is not beside this repository")
def test_the_index_of_the_oscar_sample_reads_as_published() -> None:
    index = read_index(OSCAR)
    assert (index.document_count, index.token_count, index.dtype) == (790, 2_340_256, np.dtype("<u2"))
    assert int(index.lengths.min()) == 1025
    assert int(index.pointers[-1]) + 2 * int(index.lengths[-1]) == 2 * 2_340_256


def test_writing_gives_the_bytes_of_the_format(tmp_path: Path) -> None:
    corpus = write(tmp_path / "a.b", [[1, 2, 3], [999], [5, 6]])
    assert (tmp_path / "a.b.idx").read_bytes() == index_bytes([3, 1, 2])
    assert (tmp_path / "a.b.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 999, 5, 6)
    assert [corpus[i].tolist() for i in range(len(corpus))] == [[1, 2, 3], [999], [5, 6]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


@pytest.mark.skipif(not OSCAR.exists(), reason="CARAML's own index is not beside this repository")
def test_an_index_written_for_the_same_lengths_equals_megatrons_byte_for_byte(tmp_path: Path) -> None:
    with IndexedTokensWriter.at(tmp_path / "oscar", 50257) as writer:
        for length in read_index(OSCAR).lengths:
            writer.add(np.zeros(length, np.int64))
    assert (tmp_path / "oscar.idx").read_bytes() == OSCAR.read_bytes()


@pytest.mark.parametrize(("vocab_size", "dtype"), [(50257, "<u2"), (65_499, "<u2"), (65_500, "<i4"), (250_000, "<i4")])
def test_two_bytes_are_used_where_they_suffice(vocab_size: int, dtype: str, tmp_path: Path) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)
    corpus = write(tmp_path / "x", [[0, vocab_size - 1]], vocab_size)
    assert corpus.stream.tolist() == [0, vocab_size - 1]
    assert corpus.describe()["bytes"] == 2 * np.dtype(dtype).itemsize


@pytest.mark.parametrize("code", DTYPE_CODES)
def test_every_integer_type_is_read_and_floats_are_no_tokens(code: int, tmp_path: Path) -> None:
    dtype = DTYPE_CODES[code]
    (tmp_path / "t.idx").write_bytes(index_bytes([2, 1], code=code))
    (tmp_path / "t.bin").write_bytes(np.array([7, 8, 9], dtype).tobytes())
    if dtype.kind == "f":
        with pytest.raises(InputError, match="token type"):
            IndexedTokens(tmp_path / "t")
    else:
        assert IndexedTokens(tmp_path / "t")[1].tolist() == [9]


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (b"", "header"),
        (b"MMIDIDX\x00\x00" + b"\x01" * 8, "header"),
        (index_bytes([3], magic=b"PK\x03\x04abcde"), "magic"),
        (index_bytes([3], version=2), "version"),
        (index_bytes([3], code=0), "token type code"),
        (index_bytes([3], code=9), "token type code"),
        (index_bytes([3], sequences=2**64 - 1), "file size"),
        (index_bytes([3], boundary_count=2**63), "file size"),
        (index_bytes([3], boundaries=[]), "number of document boundaries"),
        (index_bytes([3]) + b"\x00", "file size"),
        (index_bytes([3])[:-1], "file size"),
        (index_bytes([3, -1, 4]), "sequence length"),
        (index_bytes([3, 4], pointers=[0, 8]), "pointer of sequence 1: found 8; expected 6"),
        (index_bytes([3, 4], pointers=[0, -6]), "pointer of sequence 1"),
        (index_bytes([3, 4], boundaries=[1, 2]), "first document boundary"),
        (index_bytes([3, 4], boundaries=[0, 1]), "last document boundary"),
        (index_bytes([3, 4], boundaries=[0, 2, 1, 2]), "document boundaries"),
    ],
)
def test_a_damaged_or_hostile_index_is_told_by_its_field_and_costs_no_memory(content: bytes, field: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.idx"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=field) as caught:
            read_index(path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200) | st.binary(max_size=120).map(lambda tail: b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + tail))
@example(index_bytes([]))
def test_any_bytes_are_an_index_or_an_input_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "any.idx"
    path.write_bytes(content)
    try:
        index = read_index(path)
    except InputError:
        return
    assert len(content) == 34 + 12 * len(index.lengths) + 8 * len(index.documents)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 999), max_size=20), max_size=10))
def test_what_is_written_is_read(tmp_path: Path, documents: list[list[int]]) -> None:
    corpus = write(tmp_path / "round", documents)
    assert [corpus[i].tolist() for i in range(len(corpus))] == documents
    assert corpus.index.document_count == len(documents)


def test_a_token_file_that_does_not_fit_its_index_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    (tmp_path / "x.bin").write_bytes(b"12345")
    with pytest.raises(InputError, match="found 5; expected 6 bytes"):
        IndexedTokens(tmp_path / "x")
    (tmp_path / "x.bin").unlink()
    with pytest.raises(InputError, match="cannot be read"):
        IndexedTokens(tmp_path / "x")


def test_a_failed_writer_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    with pytest.raises(ValueError, match="expected 0 to 999"):
        write(tmp_path / "x", [[1, 1000]])
    assert IndexedTokens(tmp_path / "x").stream.tolist() == [1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_samples_are_neighbours_that_share_one_token(tmp_path: Path) -> None:
    corpus = write(tmp_path / "x", [list(range(10)), list(range(10, 22))])
    samples = TokenSamples(corpus, 4)
    assert len(samples) == 5
    assert samples[0].tolist() == [0, 1, 2, 3, 4]
    assert samples[2].tolist() == [8, 9, 10, 11, 12]  # across a document's end
    assert samples[4].tolist() == [16, 17, 18, 19, 20]
    assert samples[0].dtype == torch.int64
    predicted = [token for i in range(5) for token in samples[i][1:].tolist()]
    assert predicted == list(range(1, 21))
    with pytest.raises(IndexError):
        samples[5]


def test_samples_travel_to_a_worker_as_a_path(tmp_path: Path) -> None:
    samples = TokenSamples(write(tmp_path / "x", [list(range(1000)) * 50]), 100)
    data = pickle.dumps(samples)
    assert len(data) < 1000
    assert torch.equal(pickle.loads(data)[7], samples[7])


def test_a_sample_outside_the_models_vocabulary_and_a_short_corpus_are_input_errors(tmp_path: Path) -> None:
    corpus = write(tmp_path / "x", [[1, 2, 700, 4, 5]])
    assert len(TokenSamples(corpus, 4, vocab_size=701)[0]) == 5
    with pytest.raises(InputError, match="token 700; expected ids from 0 to 511"):
        TokenSamples(corpus, 4, vocab_size=512)[0]
    with pytest.raises(InputError, match="found 5 tokens; expected at least 6"):
        TokenSamples(corpus, 5)
