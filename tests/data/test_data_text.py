"""From text in every packing to the same tokens, and the faults that text can have."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import duckdb
import numpy as np
import pytest
import zstandard

from caraml.base.errors import InputError
from caraml.workloads.gpt.documents import read_documents, text_files
from caraml.workloads.gpt.text import END_OF_TEXT, PreparedText, default_text_corpus, prepare_text, standard_library_sources
from caraml.workloads.gpt.tokens import IndexedTokens
from caraml.workloads.pretrained import load_tokenizer

GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2-tokenizer"
TEXTS = [f"Document {i}: the quick brown fox, {'über ' * (i % 7)}\n  and 𝄞 line two.\r\n" for i in range(40)]


def decode(prepared: PreparedText) -> list[str]:
    """The documents of a corpus as text again, each without its end-of-text token."""
    corpus = IndexedTokens(prepared.prefix)
    tokenizer = load_tokenizer(prepared.tokenizer)
    documents = [corpus[i].tolist() for i in range(len(corpus))]
    assert all(ids[-1] == prepared.end_of_text and prepared.end_of_text not in ids[:-1] for ids in documents)
    return [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in documents]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents in every packing."""
    root = tmp_path_factory.mktemp("packed")
    lines = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()
    for suffix, compress in ((".xz", lzma.compress), (".gz", gzip.compress), (".bz2", bz2.compress), ("", bytes)):
        (root / f"oscar.jsonl{suffix}").write_bytes(compress(lines))
    (root / "oscar.jsonl.zst").write_bytes(zstandard.compress(lines[:999]) + zstandard.compress(lines[999:]))
    with duckdb.connect() as connection:
        source = (root / "oscar.jsonl").as_posix()
        target = (root / "oscar.parquet").as_posix()
        connection.execute(f"COPY (SELECT id, text FROM read_json('{source}') ORDER BY id) TO '{target}'")
    folder = root / "folder"
    (folder / "deep").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (folder / "deep" / f"{i:03}.txt").write_bytes(text.encode())
    (folder / ".hidden.txt").write_text("not this")
    (folder / "picture.png").write_bytes(b"\x89PNG\x00")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    "name", ["oscar.jsonl", "oscar.jsonl.xz", "oscar.jsonl.gz", "oscar.jsonl.bz2", "oscar.jsonl.zst", "oscar.parquet", "folder"]
)
def test_every_packing_holds_the_same_documents(name: str, packed: dict[str, Path]) -> None:
    assert [text for path in text_files([packed[name]]) for text in read_documents(path)] == TEXTS


def test_tokens_of_a_trained_vocabulary_spell_the_documents(packed: dict[str, Path], tmp_path: Path) -> None:
    prepared = prepare_text([packed["oscar.jsonl.xz"]], tmp_path / "out" / "oscar.v1", vocab_size=300)
    assert decode(prepared) == TEXTS
    assert (prepared.documents, prepared.vocab_size) == (40, 300)
    assert prepared.tokens == IndexedTokens(prepared.prefix).index.token_count
    again = prepare_text([packed["folder"]], tmp_path / "again", vocab_size=300)
    facts, same = prepared.provenance, again.provenance
    assert facts["sha256"] == same["sha256"]
    assert facts["tokenizer_sha256"] == same["tokenizer_sha256"]
    assert same["files"] == 40
    assert facts["text_bytes"] == sum(len(text.encode()) for text in TEXTS)
    assert facts["bytes"] == (tmp_path / "out" / "oscar.v1.bin").stat().st_size
    json.dumps(facts)


@pytest.mark.skipif(not GPT2.is_dir(), reason="GPT-2's vocabulary is not beside this repository")
def test_gpt2_ids_are_those_that_everyone_gets(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello world, the end.")
    prepared = prepare_text([tmp_path / "a.txt"], tmp_path / "gpt2", tokenizer=GPT2)
    assert IndexedTokens(prepared.prefix).stream.tolist() == [15496, 995, 11, 262, 886, 13, 50256]
    assert prepared.vocab_size == 50257
    reused = prepare_text([tmp_path / "a.txt"], tmp_path / "reused", tokenizer=prepared.tokenizer)
    assert reused.provenance["sha256"] == prepared.provenance["sha256"]


def test_a_document_cannot_spell_its_own_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"one{END_OF_TEXT}two"}) + '\n\n{"text": ""}\n{"text": "\\ud800 half"}\n')
    prepared = prepare_text([tmp_path / "a.jsonl"], tmp_path / "out", vocab_size=300)
    assert decode(prepared) == [f"one{END_OF_TEXT}two", "\ufffd half"]


def test_preparing_anew_replaces_and_failing_keeps_what_was_there(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.jsonl"
    good.write_text("good text " * 100)
    bad.write_text('{"text": "fine"}\n{"txt": "not fine"}\n')
    first = prepare_text([good], tmp_path / "out", vocab_size=300)
    with pytest.raises(InputError, match=r"bad.jsonl, line 2: found the keys txt; expected 'text'\n.*'txt'"):
        prepare_text([good, bad], tmp_path / "out", vocab_size=300)
    assert PreparedText.read(tmp_path / "out") == first
    good.write_text("other text " * 100)
    assert decode(prepare_text([good], tmp_path / "out", vocab_size=300)) == ["other text " * 100]
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{not json}\n", "line 1: found no JSON"),
        ("a.jsonl", b"[1, 2]\n", "line 1: found list"),
        ("a.jsonl", b'{"text": 5}\n', "line 1, key 'text': found int"),
        ("a.jsonl", b"[" * 100_000, "line 1: found no JSON"),
        ("a.txt", b"caf\xe9", "found byte 0xe9; expected UTF-8"),
        ("a.jsonl.xz", b"no xz at all", "cannot be read or unpacked"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "x"}\n')[:-9], "cannot be read or unpacked"),
        ("a.jsonl.gz", b"no gzip", "cannot be read or unpacked"),
        ("a.jsonl.gz", gzip.compress(bytes(5000), mtime=0)[:-12], "cannot be read or unpacked"),
        ("a.jsonl.zst", b"no zstd!", "cannot be read or unpacked"),
        ("a.parquet", b"PAR1 nonsense PAR1", "bytes of contents table"),
        ("a.parquet", b"PAR1" + bytes(8) + b"\x08\0\0\0PAR1", "not a table that can be read"),
    ],
)
def test_damaged_text_is_told_by_file_and_line(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        list(read_documents(path))
    assert str(path) in str(caught.value)


def test_a_parquet_without_the_column_names_those_it_has(packed: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"found the keys id, text; expected 'txt'\n.*'text'"):
        list(read_documents(packed["oscar.parquet"], "txt"))
    with pytest.raises(InputError, match="column 'id': found BIGINT; expected text"):
        list(read_documents(packed["oscar.parquet"], "id"))


def test_inputs_that_are_missing_or_empty_are_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        text_files([tmp_path / "gone"])
    with pytest.raises(InputError, match="found no text file"):
        text_files([tmp_path])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match="found no text in 1 file"):
        prepare_text([tmp_path / "empty.txt"], tmp_path / "out", vocab_size=300)
    with pytest.raises(InputError, match="vocabulary size: found 10; expected at least 257"):
        prepare_text([tmp_path / "empty.txt"], tmp_path / "out", vocab_size=10)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "found no tokenizer"),
        ({"tokenizer.json": "{"}, "not a tokenizer: EOF while parsing"),
        ({"tokenizer.json": "{}"}, "not a tokenizer: Model missing"),
        ({"vocab.json": '{"a": "b"}', "merges.txt": ""}, "id of 'a'"),
        ({"vocab.json": '{"a": 4294967296}', "merges.txt": ""}, "id of 'a'"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "#version: 0.2\na b"}, "line 2: found 'a b'"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "found no end-of-text token"),
        ({"gpt2-vocab.json": '{"a": 0}', "gpt2-merges.txt": ""}, "found no end-of-text token"),  # as in CARAML's repository
    ],
)
def test_a_damaged_tokenizer_is_told(files: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "tok").mkdir()
    for name, content in files.items():
        (tmp_path / "tok" / name).write_text(content)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match=message):
        prepare_text([tmp_path / "a.txt"], tmp_path / "out", tokenizer=tmp_path / "tok")


def test_the_facts_of_a_corpus_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        PreparedText.read(tmp_path / "none")
    (tmp_path / "x.json").write_text('{"schema": 99}')
    with pytest.raises(InputError, match="schema: found 99; expected 1"):
        PreparedText.read(tmp_path / "x")
    (tmp_path / "x.json").write_text('{"schema": 1, "documents": "many"}')
    with pytest.raises(InputError, match="documents: found 'many'"):
        PreparedText.read(tmp_path / "x")


@pytest.mark.slow
def test_the_default_corpus_is_this_pythons_library_and_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARAML_DATA", str(tmp_path))
    sources = standard_library_sources(4_000_000)
    assert sources == sorted(sources)
    assert 3_500_000 < sum(path.stat().st_size for path in sources) <= 4_000_000
    prepared = default_text_corpus(4096)
    assert prepared.vocab_size == 4096
    assert 500_000 < prepared.tokens < 2_000_000
    assert prepared.provenance["files"] == len(sources)
    written = prepared.prefix.with_name("corpus.bin").stat().st_mtime_ns
    assert default_text_corpus(4096) == prepared
    assert prepared.prefix.with_name("corpus.bin").stat().st_mtime_ns == written


def test_a_place_where_nothing_can_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("some words")
    with pytest.raises(InputError, match=r"words\.txt: data cannot be written here"):
        prepare_text([tmp_path / "words.txt"], tmp_path / "words.txt" / "corpus")


def test_a_corpus_has_the_first_documents_and_no_more_tokens_than_asked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {number} of many"}) + "\n" for number in range(3000)))
    every = prepare_text([tmp_path / "a.jsonl"], tmp_path / "every", vocab_size=300)
    reader, tokenizer = IndexedTokens(tmp_path / "every"), every.tokenizer
    first = prepare_text([tmp_path / "a.jsonl"], tmp_path / "first", tokenizer=tokenizer, most_documents=790)
    ends = np.cumsum([len(reader[number]) for number in range(3000)])
    assert (first.documents, first.tokens, first.provenance["most_documents"]) == (790, ends[789], 790)
    for most in (int(ends[99]), int(ends[99]) + 1, int(ends[99]) - 1):
        part = prepare_text([tmp_path / "a.jsonl"], tmp_path / "part", tokenizer=tokenizer, most_tokens=most)
        count = 99 if most < ends[99] else 100
        assert (part.documents, part.tokens) == (count, ends[count - 1])
        assert part.provenance["text_bytes"] == sum(len(f"document {number} of many") for number in range(count))
    assert np.array_equal(IndexedTokens(tmp_path / "part")[98], reader[98])
    with pytest.raises(InputError, match="--tokens: found 3, the first document has more"):
        prepare_text([tmp_path / "a.jsonl"], tmp_path / "none", tokenizer=tokenizer, most_tokens=3)
    assert not list(tmp_path.glob("none.*"))
