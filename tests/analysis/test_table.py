"""Flat tables, SQL over them, and that the SQL reaches nothing else."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from record_factory import NO_SENSOR, broken_record, full_store, make_point, make_record, save

from caraml.analysis import table
from caraml.base.errors import InputError
from caraml.metrics.energy import ENERGY_METRICS
from caraml.metrics.model import METRICS, Metric
from caraml.results.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return full_store(tmp_path_factory.mktemp("store"))


def test_rows_hold_every_metric_with_its_interval() -> None:
    record = make_record(watts=100.0)
    (row,) = table.rows([record])
    assert set(row) == set(table.COLUMNS)
    for name, metric in record.metrics.items():
        assert (row[name], row[f"{name}_low"], row[f"{name}_high"]) == (metric.value, metric.low, metric.high)
    assert (row["key"], row["label"], row["device"], row["global_batch"], row["micro_batch"]) == (
        record.key,
        "gpt-mini b16 fp32",
        "Test CPU x1",
        16,
        4,
    )
    assert row["energy_scope"] == "device"


def test_rows_of_a_failed_point_and_of_a_machine_without_sensor() -> None:
    failed, silent = table.rows([broken_record(make_point(), "oom", "out of memory"), make_record()])
    assert (failed["status"], failed["reason"], failed["throughput"]) == ("oom", "out of memory", None)
    assert (silent["energy"], silent["energy_per_item"], silent["energy_reason"]) == (None, None, NO_SENSOR)
    assert set(failed) == set(silent)


def test_units_name_the_item_only_when_it_is_one() -> None:
    assert table.units({"token"})["throughput_low"] == "token/s"
    assert table.units({"token", "image"})["throughput"] == "item/s"
    ends = {f"{name}{end}" for name in METRICS for end in ("", "_low", "_high")}
    assert set(table.units({"token"})) == ends | {f"{name}_bound" for name in ENERGY_METRICS}


def test_own_metrics_have_columns_with_their_units(tmp_path: Path) -> None:
    """In each of their units, so that no column has two; ``label`` is also a column of every row."""
    each = [{"label": (1.5, "GB/s"), "loss": (2.5, "1")}, {"label": (1500.0, "MB/s")}]
    store = Store(tmp_path)
    for batch, own in zip((16, 32), each, strict=True):
        save(
            store,
            make_record(make_point(global_batch=batch), metrics={name: Metric(value=v, unit=unit) for name, (v, unit) in own.items()}),
        )
    columns, lines, units = table.flat_table(sorted(store.rows(), key=lambda row: str(row["label"])))
    read = list(csv.DictReader(io.StringIO(table.to_csv(columns, lines, units))))
    own_columns = ["own.label [GB/s]", "own.loss [1]", "own.label [MB/s]"]
    assert [[line[name] for name in own_columns] for line in read] == [["1.5", "2.5", ""], ["", "", "1500.0"]]
    told = json.loads(table.to_json(columns, lines, units))
    assert told["units"]["own.loss"] == "1" and told["units"]["own.label [MB/s]"] == "MB/s"
    assert [(row["own.label [GB/s]"], row["own.loss"]) for row in told["rows"]] == [(1.5, 2.5), (None, None)]
    _, found = table.query(store, "SELECT own_metrics->>'$.label', own_units->>'$.label' FROM records ORDER BY label")
    assert found == [("1.5", "GB/s"), ("1500.0", "MB/s")]
    damaged = [{**row, "own_metrics": text} for row, text in zip(store.rows(), ("[1]", "{"), strict=True)]
    assert table.flat_table(damaged)[0] == list(table.COLUMNS)


def test_query_gives_the_records_numbers(store: Store) -> None:
    columns, found = table.query(store, "SELECT key, throughput, throughput_low FROM records WHERE status = 'ok' ORDER BY throughput")
    assert columns == ["key", "throughput", "throughput_low"]
    expected = sorted((r.value("throughput"), r.key, r.metrics["throughput"].low) for r in store.records() if r.status == "ok")
    assert found == [(key, value, low) for value, key, low in expected]


def test_query_joins_the_raw_tables(store: Store) -> None:
    _, found = table.query(
        store, "SELECT r.device, max(s.rank), count(*) FROM steps s JOIN records r USING (key, attempt) GROUP BY 1 ORDER BY 1"
    )
    assert found == [("Test CPU x1", 0, 4 * 65 + 17), ("Test GPU x1", 1, 3 * 85 * 2)]
    _, found = table.query(store, "SELECT count(DISTINCT channel), count(DISTINCT key) FROM power")
    assert found == [(2, 3)]


def test_query_of_an_empty_store(tmp_path: Path) -> None:
    (tmp_path / "points").mkdir()
    assert table.query(Store(tmp_path), "SELECT count(*) FROM records, steps, power") == (["count_star()"], [(0,)])


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM glob('/etc/*')",
        "COPY records TO '{target}'",
        "COPY (SELECT 1) TO '{target}'",
        "EXPORT DATABASE '{target}'",
        "ATTACH '{target}'",
        "SET enable_external_access = true",
        "SELECT 1; COPY records TO '{target}'",
        "INSTALL httpfs",
        "DROP TABLE records",
        "",
    ],
)
def test_sql_cannot_leave_the_store(store: Store, tmp_path: Path, sql: str) -> None:
    target = tmp_path / "out"
    with pytest.raises(InputError):
        table.query(store, sql.format(target=target))
    assert not target.exists()


def test_sql_does_not_see_the_callers_variables(store: Store) -> None:
    rows = {"x": [1]}  # noqa: F841 - DuckDB would find it by its name
    with pytest.raises(InputError, match="rows"):
        table.query(store, "SELECT * FROM rows")


def test_a_wrong_query_is_told_the_tables(store: Store) -> None:
    with pytest.raises(InputError, match="throughputt") as caught:
        table.query(store, "SELECT throughputt FROM records")
    told = str(caught.value)
    assert "records, steps, power and reference" in told and 'results --sql "describe records"' in told
    assert len(told) < 600, "not the hundreds of columns that there are"
    columns, lines = table.query(store, "describe steps")
    assert columns[0] == "column_name" and [line[0] for line in lines[:2]] == ["key", "attempt"]


def test_a_record_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    (tmp_path / "secret.csv").write_text("step,rank,phase,start,seconds,data_wait,loss\n1,0,measure,0,1,0,1\n")
    record = save(store, make_record())
    hostile = record.model_copy(update={"files": {"steps": "../../../../secret.csv"}})
    (store.folder(record) / "record.json").write_text(hostile.model_dump_json())
    assert table.query(store, "SELECT count(*) FROM steps")[1] == [(0,)]


def test_a_broken_raw_file_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    record = save(store, make_record())
    (store.folder(record) / "steps.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"steps\.parquet"):
        table.query(store, "SELECT * FROM steps")
    assert table.query(store, "SELECT count(*) FROM records")[1] == [(1,)]


def test_csv_and_json_keep_numbers_and_units() -> None:
    record = make_record(watts=100.0)
    lines = [[row[name] for name in table.COLUMNS] for row in table.rows([record])]
    units = table.units({record.item})
    (row,) = csv.DictReader(io.StringIO(table.to_csv(table.COLUMNS, lines, units)))
    assert float(row["energy_per_item [J/token]"]) == record.value("energy_per_item")
    assert row["mfu [1]"] == ""
    content = json.loads(table.to_json(table.COLUMNS, lines, units))
    assert content["rows"][0]["throughput"] == record.value("throughput")
    assert content["units"]["throughput"] == "token/s"
    assert content["rows"][0]["mfu"] is None
