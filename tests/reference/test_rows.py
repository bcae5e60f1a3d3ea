"""The published rows: typed, in our units, true to what was printed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from spans import span_of
from vocabulary import PUBLISHED, unit_fits

from caraml.base.errors import InputError
from caraml.metrics.model import METRICS
from caraml.reference import FIELDS, SOURCES, load, parse, paths, select
from caraml.workloads import WORKLOADS
from caraml.workloads.weather import radiation_emulation, temperature_postprocessing

OTHER_WORKLOADS = {"image_compression", "question_answering", ""}


def test_every_row_speaks_our_vocabulary() -> None:
    rows = load()
    assert {row.source for row in rows} == set(SOURCES)
    for row in rows:
        assert unit_fits(row.metric, row.unit), row
        assert row.workload in WORKLOADS or row.workload in OTHER_WORKLOADS, row
        assert row.mode in ("train", "compute", "data", "inference", ""), row
        assert row.printed and row.printed == row.printed.strip(), row
        assert "\n" not in row.note
    assert {row.metric for row in rows} - METRICS.keys() == PUBLISHED.keys()


def test_units_of_wrong_or_unknown_metrics_do_not_fit() -> None:
    assert unit_fits("throughput", "image/s") and unit_fits("items_per_watt_hour", "sample/Wh")
    assert not unit_fits("throughput", "image/Wh")
    assert not unit_fits("device_energy", "Wh")
    with pytest.raises(InputError, match="unknown metric 'trougput'"):
        unit_fits("trougput", "1")


def test_values_are_the_printed_digits_in_our_unit() -> None:
    factors = {"Wh": 3600, "MJs": 1e6, "GB": 1e9, "MB/s": 1e6, "s": 1, "W": 1, "images/s": 1, "%": 0.01}
    binary = {"temperature_postprocessing": {"GB": 2**30, "GB/s": 2**30}, "radiation_emulation": {"MB": 2**20}}
    compared = 0
    for row in load():
        if row.printed_unit in factors and row.value is not None and row.metric != "node_apparent_energy":
            printed = float(row.printed.replace(",", "").replace(" ", ""))
            of_data = row.metric in ("input_bandwidth", "dataset_size", "validation_size", "effective_batch_bytes")
            meant = (factors | binary.get(row.workload, {})) if of_data else factors
            assert row.value == pytest.approx(printed * meant[row.printed_unit], rel=1e-12), row
            assert span_of(row).low <= row.value <= span_of(row).high
            compared += 1
    assert compared > 2500


@pytest.mark.parametrize(
    ("table", "run", "metric", "value", "note"),
    [
        ("18", 4, "runtime", 11991.1, "1199.11"),
        ("21", 9, "training_time", 16429.56, "1429.56"),
        ("27", 1, "input_bandwidth", 374.41 * 2**20, "MB/s, of 2^20 bytes"),
        ("28", 2, "epoch_time_min", 9.15, "point in front"),
        ("28", 5, "input_bandwidth", 48.76 * 2**20, "swapped"),
        ("27", 6, "device_energy", 18.97 * 3600, "half of the data"),
        ("28", 5, "training_time", 179.98, "half of the data"),
        ("6", 1, "input_bandwidth", 2.64 * 2**30, "2^30"),
        ("20", 9, "runtime_per_batch", 0.3, "0.03"),
        ("9", 1, "runtime_per_batch", 0.05, "the runtime over the batches of all devices"),
        ("35", 1, "runtime", 3550.2, "caption says AP1"),
        ("35", 1, "device_energy", 396.67 * 3600, "of all 4 devices of the node"),
        ("36", 1, "aggregate_power", 358.71, "of all 4 devices of the node"),
        ("37", 9, "max_aggregate_power", 1189.0, "of all 8 devices of the node"),
        ("42", 3, "device_energy", 361.52 * 3600, "of one device"),
        ("42", 1, "epoch_time_mean", 0.00184, "not ms"),
        ("44", 1, "node_energy", 1041.18 * 3600, "printed as GPU energy"),
    ],
)
def test_printing_errors_are_kept_and_annotated(table: str, run: int, metric: str, value: float, note: str) -> None:
    (row,) = [row for row in select(source="maelstrom", table=table, metric=metric) if row.run == run]
    assert row.value == pytest.approx(value, rel=1e-12)
    assert note in row.note


def test_data_of_runs_without_input_are_the_bytes_that_our_workloads_count() -> None:
    """What the report calls MB and GB there are 2^20 and 2^30 bytes."""
    (batch,) = [row for row in select(source="maelstrom", table="27", metric="effective_batch_bytes") if row.run == 1]
    assert batch.value == pytest.approx(512 * radiation_emulation.INPUT_BYTES, rel=0.0006)
    (data,) = [row for row in load() if row.parameters.get("name") == "non-io-data" and row.workload == "temperature_postprocessing"]
    assert data.value == pytest.approx(8192 * 4 * temperature_postprocessing.FIELDS * 256**2, rel=0.0001)
    whole, runs = radiation_emulation.SAMPLES_WITHOUT_FILES * radiation_emulation.INPUT_BYTES, 0
    for table in ("27", "28", "30", "31"):
        rates = {row.run: row for row in select(source="maelstrom", table=table, metric="input_bandwidth")}
        for epoch in select(source="maelstrom", table=table, metric="epoch_time_min"):
            share = 0.51 if "half of the data" in epoch.note else 1
            assert epoch.value and rates[epoch.run].value
            assert (rates[epoch.run].value or 0) * epoch.value == pytest.approx(share * whole, rel=0.03), epoch
            runs += 1
    assert runs == 42


def test_sequences_of_the_ipu_are_not_called_tokens() -> None:
    rows = select(source="caraml", table="IPU NLP", metric="throughput")
    assert [row.unit for row in rows] == ["sample/s"] * 9
    assert all("printed as tokens" in row.note for row in rows)


def test_runs_keep_their_jobs_nodes_and_flags() -> None:
    (row,) = [row for row in select(source="maelstrom", table="12", metric="device_energy") if row.run == 4]
    assert (row.devices, row.nodes, row.parameters["job"], row.parameters["node"]) == (2, 1, 12618738, "jrc0255")
    modes = Counter(row.mode for row in select(source="maelstrom", table="17", metric="runtime"))
    assert modes == {"train": 6, "data": 3}


def test_what_was_not_measured_has_no_value() -> None:
    rows = [row for row in load() if row.value is None]
    assert {(row.table, row.metric) for row in rows} == {(f"Table {n}", m) for n in (38, 39) for m in ("loss_last", "loss_validation")}
    with pytest.raises(ValueError, match="has no value"):
        _ = span_of(rows[0])


def test_a_run_has_every_metric_once() -> None:
    seen = Counter(
        (row.source, row.table, row.run, row.metric, str(row.parameters.get("method")), row.parameters.get("epoch"))
        for row in load()
        if row.run
    )
    assert [key for key, count in seen.items() if count > 1] == []


def test_select_filters_and_names_the_nearest() -> None:
    rows = select(source="pearc", metric="throughput", table="3")
    assert len(rows) == 12 and {row.system for row in rows} == {"ipu-pod16"}
    assert select(rows, table="Table 3") == rows
    assert len(select()) == len(load())
    with pytest.raises(InputError, match="did you mean 'jureca-a100'"):
        select(system="jureca-a10")


def test_a_wrong_cell_is_named_with_its_line() -> None:
    path = Path(paths()[0])
    head, first, *_ = path.read_text(encoding="utf-8").splitlines()
    assert parse(f"{head}\n{first}\n", "x.csv")[0].source == "caraml"
    with pytest.raises(InputError, match=r"x\.csv, line 2: .*'many'"):
        parse(f"{head}\n{first.replace(',4,1,gpt', ',many,1,gpt')}\n", "x.csv")
    with pytest.raises(InputError, match="expected the columns"):
        parse("a,b\n1,2\n", "x.csv")
    assert head.split(",") == list(FIELDS)
