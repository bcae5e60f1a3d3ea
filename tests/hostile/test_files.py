"""Damaged files of every kind that CARAML reads: an error that names the file, or a result; never anything else."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pytest
import zstandard
from hypothesis import given

from caraml.analysis.table import query, rows
from caraml.base.errors import CaramlError
from caraml.base.limits import database, reading, table
from caraml.campaign.machine import machine_of
from caraml.metrics.model import Metric
from caraml.power.merge import merge_folder
from caraml.power.sources.csvfile import CsvSource
from caraml.report.page import write_report
from caraml.report.terminal import record_view, results_table
from caraml.results.archive import pack, unpack
from caraml.results.jube import read_table as read_jube
from caraml.results.record import Record
from caraml.results.status import ProgressReader
from caraml.results.store import RECORD, Store, read_record, write_record
from caraml.suite.expand import expand
from caraml.suite.load import CATALOG as SUITES
from caraml.suite.load import load_suite
from caraml.suite.model import Point
from caraml.system.catalogue import load_system
from caraml.system.detect import detect
from caraml.system.model import CATALOG as SYSTEMS
from caraml.workloads import params_of
from caraml.workloads.gpt.documents import read_documents
from caraml.workloads.gpt.text import PreparedText, prepare_text
from caraml.workloads.gpt.tokens import corpus_file
from caraml.workloads.pretrained import load_tokenizer
from caraml.workloads.question_answering.data import generate_squad, read_squad
from tests.conftest import MakePoint
from tests.hostile.damage import FUZZ, Edit, damaged, edits, refuses_damage
from tests.stores import remember_suite


@dataclass(frozen=True)
class Kind:
    """A kind of file: a whole one, and whoever reads it."""

    content: bytes
    name: str
    read: Callable[[Path], Any]


def exhaust(iterator: Iterator[Any]) -> int:
    return sum(1 for _ in iterator)


def read_suite(path: Path) -> None:
    expand(load_suite(str(path)), machine_of(detect()), params_of)


def read_power(path: Path) -> None:
    source = CsvSource(path)
    try:
        source.open()
        source.read()
    finally:
        source.close()


def read_raw(path: Path) -> None:
    with database() as connection, reading(connection, path):
        connection.execute(f"SELECT * FROM {table(connection, path)}", [str(path)]).fetchall()


DOCUMENTS = b'{"text": "one"}\n{"text": "two \\u00e9"}\n' * 20
KINDS: dict[str, Kind] = {
    "suite": Kind((SUITES / "maelstrom.toml").read_bytes(), "suite.toml", read_suite),
    "system": Kind((SYSTEMS / "jedi.toml").read_bytes(), "machine.toml", load_system),
    "documents": Kind(DOCUMENTS, "a.jsonl", lambda path: exhaust(read_documents(path))),
    "gzip": Kind(gzip.compress(DOCUMENTS), "a.jsonl.gz", lambda path: exhaust(read_documents(path))),
    "xz": Kind(lzma.compress(DOCUMENTS), "a.jsonl.xz", lambda path: exhaust(read_documents(path))),
    "zstd": Kind(zstandard.compress(DOCUMENTS), "a.jsonl.zst", lambda path: exhaust(read_documents(path))),
    "power csv": Kind(b"time,power_w\n" + b"".join(b"%d,%d\n" % (1700000000 + t, 300 + t) for t in range(20)), "pdu.csv", read_power),
    "squad": Kind(json.dumps(generate_squad(2, 0)).encode(), "squad.json", read_squad),
    "jube table": Kind(b"tasks,time[s]\n1,2.5\n2,1.5\n", "result.csv", lambda path: read_jube(path, path.parent / "imported", "jube")),
    "raw csv": Kind(b"step,rank,seconds\n" + b"1,0,0.5\n" * 20, "steps.csv", read_raw),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_damaged_files(tmp_path: Path, kind: str) -> None:
    sort = KINDS[kind]
    path = tmp_path / sort.name

    def look(error: CaramlError) -> None:
        assert sort.name in str(error) or "machine" not in kind, "the error names the file"

    refuses_damage(path, sort.content, sort.read, look)


@pytest.mark.slow
def test_damaged_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    duckdb.sql(f"copy (select 'word ' || i as text from range(200) t(i)) to '{path}'")
    assert exhaust(read_documents(path)) == 200
    content = path.read_bytes()
    for read in (lambda path: exhaust(read_documents(path)), read_raw):
        refuses_damage(path, content, read)


@pytest.mark.parametrize("part", [".bin", ".idx", ".json"])
def test_damaged_corpora(tmp_path: Path, part: str) -> None:
    from caraml.workloads.gpt.tokens import IndexedTokens

    source = tmp_path / "a.txt"
    source.write_text("to be or not to be " * 50)
    prefix = tmp_path / "corpus"
    prepare_text([source], prefix, vocab_size=300)
    path = corpus_file(prefix, part)
    refuses_damage(path, path.read_bytes(), lambda _: (PreparedText.read(prefix), IndexedTokens(prefix)[0]), named=prefix)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "merges.txt"])
def test_damaged_tokenizers(tmp_path: Path, name: str) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    source = tmp_path / "a.txt"
    source.write_text("to be or not to be " * 50)
    prepared = prepare_text([source], whole / "corpus", vocab_size=300)
    model = json.loads(prepared.tokenizer.read_text())["model"]
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    files = {"vocab.json": json.dumps(model["vocab"]), "merges.txt": "\n".join(" ".join(pair) for pair in model["merges"])}
    if name == "tokenizer.json":
        files = {name: prepared.tokenizer.read_text()}
    for file, text in files.items():
        (folder / file).write_text(text)
    refuses_damage(folder / name, (folder / name).read_bytes(), lambda _: load_tokenizer(folder), named=folder)


@pytest.fixture
def store(tmp_path: Path, make_point: MakePoint) -> Store:
    """A store with one record and its raw file."""
    store = Store(tmp_path / "results")
    folder = store.new_attempt(make_point())
    rate = Metric(value=5.0, unit="item/s", low=4.9, high=5.1, n=30)
    point = Point.model_validate_json((folder / "point.json").read_text())
    write_record(folder, Record(key=point.key, attempt=1, point=point, status="ok", started_at="x", metrics={"throughput": rate}))
    return store


def test_damaged_records(tmp_path: Path, store: Store) -> None:
    record = store.records()[0]
    path = store.folder(record) / RECORD
    content = path.read_bytes()

    @FUZZ
    @given(edits)
    def check(changes: list[Edit]) -> None:
        path.write_bytes(damaged(content, changes))
        try:
            found = read_record(path)
        except CaramlError as error:
            assert str(path) in str(error)
            return
        # What passes as a record must go through everything that shows records.
        rows([found])
        results_table([found])
        record_view(found, "x")
        try:
            write_report(store, [found], tmp_path / "page.html", "t")
        except CaramlError:
            return

    check()


def test_damaged_stores(tmp_path: Path, store: Store) -> None:
    remember_suite(store, "test", [record.key for record in store.records()])
    listing = tmp_path / "results" / "suites" / "test.json"
    refuses_damage(listing, listing.read_bytes(), lambda _: Store(tmp_path / "results").records("test"))


def test_damaged_progress(tmp_path: Path) -> None:
    content = b'{"t": 1.0, "phase": "measure", "steps": 3}\n' * 10

    def look(error: CaramlError) -> None:
        raise error  # what is damaged of it is passed over

    refuses_damage(tmp_path / "progress.jsonl", content, lambda _: ProgressReader(tmp_path).latest(), look)


@pytest.mark.processes
def test_damaged_energy_results(tmp_path: Path) -> None:
    from caraml.power.__main__ import main

    assert main(["--methods", "fake:constant", "--out", str(tmp_path), "--", "true"]) == 0
    (path,) = tmp_path.glob("energy*.json")
    refuses_damage(path, path.read_bytes(), lambda _: merge_folder(tmp_path))


def test_damaged_archives(tmp_path: Path, store: Store) -> None:
    remember_suite(store, "test", [record.key for record in store.records()])
    path = tmp_path / "test.zip"
    pack(tmp_path / "results", "test", path)
    content = path.read_bytes()
    assert unpack(path, tmp_path / "whole")

    @FUZZ
    @given(edits)
    def check(changes: list[Edit]) -> None:
        path.write_bytes(damaged(content, changes))
        try:
            unpack(path, tmp_path / "read")
        except CaramlError as error:
            assert str(path) in str(error)

    check()
    assert {entry.name for entry in tmp_path.iterdir()} <= {"results", "test.zip", "whole", "read"}, "nothing lands elsewhere"


def test_queries_cannot_leave_the_sandbox(store: Store, tmp_path: Path) -> None:
    for statement in (
        "select * from read_text('/etc/passwd')",
        f"copy records to '{tmp_path}/owned.csv'",
        f"attach '{tmp_path}/owned.db'",
        "install httpfs",
        "set enable_external_access = true",
        "select getenv('HOME')",
        "pragma database_list",
    ):
        try:
            _, lines = query(store, statement)
        except CaramlError:
            continue
        assert not any("root:" in str(cell) or "/" in str(cell) for line in lines for cell in line), statement
    assert not list(tmp_path.glob("owned*"))
