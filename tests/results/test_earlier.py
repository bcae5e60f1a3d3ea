"""Results of an earlier version are read as its own tables showed them.

``earlier.caraml.zip`` was measured and packed by CARAML 0.1.0 as first published: method version 1, records without many of today's fields.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.base.errors import InputError
from caraml.cli import app
from caraml.results.rows import read_table
from caraml.results.store import Store

ARCHIVE = Path(__file__).parent / "earlier.caraml.zip"
SHOWN = {
    "gpt b2 fp32": ("ok", 86.47, 3.66),
    "gpt b4 fp32": ("ok", 1420.0, 0.209),
    "images b2 fp32 compute": ("ok", 2.48, 132.0),
    "program n=1": ("ok", 536.0, 0.9335),
    "fails": ("failed", None, None),
}
"""Status, items per second and joules per item as 0.1.0's own table had them."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    assert "5 records added" in said("import", str(ARCHIVE))
    return Store(tmp_path / "caraml-results")


def said(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == code, done.output + str(done.exception)
    return done.output


def test_numbers_are_those_that_its_own_table_showed(store: Store) -> None:
    records = {record.point.label: record for record in store.records("archived")}
    assert list(records) == list(SHOWN)
    for label, (status, rate, energy) in SHOWN.items():
        record = records[label]
        assert (record.status, record.method_version) == (status, 1)
        for name, value in (("throughput", rate), ("energy_per_item", energy)):
            assert record.value(name) == (None if value is None else pytest.approx(value, rel=5e-3)), (label, name)


def test_raw_samples_are_read(store: Store) -> None:
    record = next(record for record in store.records("archived") if record.point.workload == "gpt")
    tables = {name: read_table(store.folder(record) / record.files[name]) for name in ("steps", "power")}
    assert all(len(next(iter(table.values()))) > 4 for table in tables.values())


def test_every_verb_takes_them(store: Store) -> None:
    rows = list(csv.DictReader(said("results", "archived", "--csv").splitlines()))
    assert [row["label"] for row in rows] == list(SHOWN)
    key = store.records("archived")[0].key
    assert "Energy" in said("show", key) and "5 points: 4 ok, 1 failed" in said("status", "archived", code=1)
    assert "b4" in said("advise", "archived") and "86.5" in said("history", "archived")
    page = Path(said("report", "archived").split()[-1])
    assert "images b2 fp32 compute" in page.read_text(encoding="utf-8")
    refused = CliRunner().invoke(app, ["accept", "archived", "--as", "earlier"]).exception
    assert isinstance(refused, InputError) and "another method" in str(refused), "today's runs are not held to numbers of another method"
