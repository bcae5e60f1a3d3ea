"""Imported tables in one results folder: whose rows are which, which are known, and what of a row is its work."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from caraml.analysis.compare import compare
from caraml.analysis.grouping import same_work
from caraml.analysis.history import history
from caraml.analysis.scaling import scaling
from caraml.base.errors import InputError
from caraml.cli import app
from caraml.reference import sides
from caraml.results import jube_row
from caraml.results.archive import Done, pack, unpack
from caraml.results.jube import read_table
from caraml.results.jube_row import energy_of_nodes
from caraml.results.selector import last_two, select
from caraml.results.store import Store, write_record


def add(root: Path, name: str, *lines: str, time: int = 1_700_000_000, results: Sequence[str] = (), parameters: Sequence[str] = ()) -> Done:
    """Import ``name``.csv of these lines into ``root``/out."""
    table = root / f"{name}.csv"
    root.mkdir(exist_ok=True)
    table.write_text("".join(f"{line}\n" for line in lines))
    os.utime(table, (time, time))
    return read_table(table, root / "out", None, results=results, parameters=parameters)


def rates(root: Path, suite: str) -> list[float | None]:
    return [record.value("throughput") for record in Store(root / "out").records(suite)]


def test_an_archive_has_the_rows_of_a_table(tmp_path: Path) -> None:
    add(tmp_path, "t", "devices,gbs,Tokens/s", "1,16,100", "2,32,190")
    assert pack(tmp_path / "out", "t", tmp_path / "t.zip").records == 2
    assert unpack(tmp_path / "t.zip", tmp_path / "new").records == 2 and len(Store(tmp_path / "new").records("t")) == 2


def test_whether_data_is_parallel_is_other_work_and_how_many_copies_there_are_is_not(tmp_path: Path) -> None:
    add(tmp_path, "t", "devices,gbs,fully_sharded_data_parallel,data_parallel_size,Tokens/s", "4,16,on,4,100", "4,16,off,4,190")
    assert [record.point.params for record in Store(tmp_path / "out").records("t")] == [
        {"fully_sharded_data_parallel": "on"},
        {"fully_sharded_data_parallel": "off"},
    ]


def test_a_name_that_no_file_has_is_no_energy(tmp_path: Path) -> None:
    add(tmp_path, "t", "devices,gbs,EnergyFile,Tokens/s", "4,16,a\0b.csv,100")
    (record,) = Store(tmp_path / "out").records("t")
    assert record.value("throughput") == 100 and record.value("run_energy") is None


# -- several tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["A100", ""])
def test_a_suite_keeps_the_rows_of_its_own_table(tmp_path: Path, system: str) -> None:
    """Rows of equal setting had one key, so that each table hid the numbers of those before it."""
    for name, (small, large) in {"jan": (100, 200), "feb": (90, 180)}.items():
        assert add(tmp_path, name, "system,devices,gbs,Tokens/s", f"{system},4,64,{small}", f"{system},4,128,{large}").records == 2
    assert rates(tmp_path, "jan") == [100, 200] and rates(tmp_path, "feb") == [90, 180]
    assert add(tmp_path, "jan", "system,devices,gbs,Tokens/s", f"{system},4,64,100", f"{system},4,128,200").known == 2
    assert rates(tmp_path, "jan") == [100, 200] and {record.attempt for record in Store(tmp_path / "out").records()} == {1}
    labels = [record.point.label for record in Store(tmp_path / "out").records("feb")]
    assert labels == ["feb b64 1x4", "feb b128 1x4"]


def test_tables_of_one_system_are_compared_and_are_one_history(tmp_path: Path) -> None:
    for time, (name, rate) in enumerate({"jan": 100, "feb": 90}.items(), start=1_700_000_000):
        add(tmp_path, name, "system,devices,gbs,Tokens/s", f"A100,4,64,{rate}", time=time)
    (pair,) = compare(*sides("jan", "feb", tmp_path / "out")).pairs
    assert pair is not None
    (series,) = history(select(None, tmp_path / "out").every_attempt())
    assert [one.value for one in series.values] == [100, 90]


def test_rows_of_one_table_have_no_order_in_time(tmp_path: Path) -> None:
    """A table in the order of its rates had a change for the better in its middle, at one time."""
    for time, (name, rates) in enumerate({"jan": (100, 101, 200, 201), "feb": (300, 302, 400, 401, 900)}.items(), start=1_700_000_000):
        add(tmp_path, name, "system,gbs,Tokens/s", *(f"A100,64,{rate}" for rate in rates for _ in range(6)), time=time)
    (jan,) = history(Store(tmp_path / "out").records("jan"))
    assert jan.changes == () and jan.note == "all results are of one time"
    (both,) = history(select(None, tmp_path / "out").every_attempt())
    assert both.changes == () and both.note == "2 of the 5 rounds of repeats that a change needs"


def test_tokens_and_images_are_different_work_as_are_systems_that_nobody_named(tmp_path: Path) -> None:
    """Their mean was taken, as of repeats."""
    add(tmp_path, "llm-juwels", "devices,gbs,Tokens/s", "4,64,100000")
    add(tmp_path, "resnet-lumi", "devices,gbs,Images/s", "4,64,2500")
    add(tmp_path, "llm-lumi", "devices,gbs,Tokens/s", "4,64,70000")
    add(tmp_path, "both-a", "system,gbs,Tokens/s", "A100,64,1")
    add(tmp_path, "both-b", "system,gbs,Images/s", "A100,64,2")
    assert rates(tmp_path, "llm-juwels") == [100000] and rates(tmp_path, "resnet-lumi") == [2500]
    assert len(same_work(Store(tmp_path / "out").records())) == len(history(select(None, tmp_path / "out").every_attempt())) == 5
    (difference,) = compare(*sides("both-a", "both-b", tmp_path / "out")).differences
    assert (difference.name, difference.a, difference.b) == ("workload", "imported_token", "imported_image")


# -- the same table again ---------------------------------------------------------------------------------------------------


def test_rows_in_another_order_are_known(tmp_path: Path) -> None:
    """Repeats were counted by their position: with one row more and another order, all were imported again."""
    add(tmp_path, "t", "system,devices,gbs,Tokens/s", "A100,4,64,100", "A100,4,64,101", "A100,4,128,120")
    done = add(tmp_path, "t", "system,devices,gbs,Tokens/s", "A100,4,128,120", "A100,4,64,101", "A100,4,64,100", "A100,4,64,102")
    assert (done.records, done.known) == (1, 3) and rates(tmp_path, "t") == [120, 101, 100, 102]
    assert len(Store(tmp_path / "out").records()) == 4


def test_a_table_with_newer_numbers_is_the_next_round_of_its_suite(tmp_path: Path) -> None:
    """It had one round, and `compare` advised to run what CARAML never ran."""
    add(tmp_path, "t", "system,devices,gbs,Tokens/s", "A100,4,64,100", "A100,4,128,120")
    with pytest.raises(InputError, match="no two rounds") as error:
        last_two("t", tmp_path / "out")
    assert error.value.hint == "caraml import TABLE --suite t adds a table of newer results"
    done = add(tmp_path, "t", "system,devices,gbs,Tokens/s", "A100,4,64,90", "A100,4,128,120")
    assert (done.records, done.known) == (1, 1) and rates(tmp_path, "t") == [90, 120]
    before, last = ([record.value("throughput") for record in side.records] for side in sides("t", None, tmp_path / "out"))
    assert before == [100, 120] and last == [90, 120]


def test_rows_of_an_earlier_version_are_not_mixed_with_others(tmp_path: Path) -> None:
    """0.1.0 wrote no digest of a row: nobody knows which rows of a table are there already."""
    lines = ("devices,gbs,Tokens/s", "4,64,100")
    add(tmp_path, "t", *lines)
    store = Store(tmp_path / "out")
    (record,) = store.records("t")
    environment = {name: value for name, value in record.environment.items() if name != "row"}
    write_record(store.folder(record), record.model_copy(update={"environment": environment}))
    with pytest.raises(InputError, match="suite 't' has rows that an earlier version imported, which may be the same") as refused:
        add(tmp_path, "t", *lines)
    assert refused.value.hint == "caraml import TABLE --suite with another name"
    assert rates(tmp_path, "t") == [100] and add(tmp_path, "u", *lines).records == 1, "they are read, and are no other suite's"


def test_a_row_without_its_file_of_energy_is_known_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was imported again, and neither the file's energy nor that of the column was left."""
    read: list[Path] = []
    monkeypatch.setattr(jube_row, "energy_of_nodes", lambda path: read.append(path) or energy_of_nodes(path))
    lines = ("devices,gbs,Energy/Device(Wh),EnergyFile,Tokens/s", "4,64,2.5,e.csv,100", "4,64,2.6,e.csv,101")
    (tmp_path / "e.csv").write_text("rank,pynvml:0\n0,11\n")
    assert add(tmp_path, "t", *lines).records == 2 and len(read) == 1, "it was read for each row"
    (tmp_path / "e.csv").unlink()
    assert add(tmp_path, "t", *lines).known == 2
    store = Store(tmp_path / "out")
    assert [one.value("run_energy") for one in store.records("t")] == [11 * 3600, 11 * 3600] and len(store.rounds("t")) == 1
    assert store.records("t")[0].value("run_energy_by_energy_per_device") == 4 * 2.5 * 3600
    add(tmp_path, "u", *lines)
    assert [one.value("run_energy") for one in store.records("u")] == [4 * 2.5 * 3600, 4 * 2.6 * 3600], "it was not known"
    (tmp_path / "e.csv").write_text("rank,pynvml:0\n0,12\n")
    assert add(tmp_path, "t", *lines).records == 2, "the file has other numbers"


def test_a_table_in_another_order_is_no_other_round(tmp_path: Path) -> None:
    add(tmp_path, "t", "gbs,Tokens/s", "64,100", "128,190")
    add(tmp_path, "t", "gbs,Tokens/s", "128,190", "64,100")
    assert rates(tmp_path, "t") == [190, 100] and len(Store(tmp_path / "out").rounds("t")) == 1


def test_a_damaged_record_does_not_stop_an_import(tmp_path: Path) -> None:
    add(tmp_path, "t", "gbs,Tokens/s", "64,100")
    next((tmp_path / "out" / "points").glob("*/1/record.json")).write_text("{")
    assert add(tmp_path, "u", "gbs,Tokens/s", "64,100").records == 1
    assert add(tmp_path, "t", "gbs,Tokens/s", "64,100").records == 1 and rates(tmp_path, "t") == [100]


# -- what a column is -------------------------------------------------------------------------------------------------------

OWN_FORM = (
    "JobID,System,Runtime(min),ModelSize,Nodes,Devices,GlobalBatchSize,TensorParallel,DataParallel,Iterations,Tokens/second,EnergyFile",
    "77,MI250,10,800M,1,8,32,1,8,750,88620.76,GPT.77.energy",
    "78,MI250,10,800M,1,4,32,1,4,450,53945.35,GPT.78.energy",
    "79,MI250,10,800M,1,4,32,1,4,451,54045.35,",
)


def test_what_tells_runs_apart_is_no_part_of_their_work(tmp_path: Path) -> None:
    """In CARAML's own tables each row was work of its own: without repeats, scaling or advice."""
    add(tmp_path, "t", *OWN_FORM)
    records = Store(tmp_path / "out").records("t")
    assert [[one.point.repeat for one in work] for work in same_work(records)] == [[0], [0, 1]]
    assert all(one.point.params == {"Runtime(min)": "10", "ModelSize": "800M", "TensorParallel": "1"} for one in records)
    assert records[1].environment["bookkeeping"] == {"JobID": "78", "DataParallel": "4", "Iterations": "450"}
    (family,) = scaling(records)
    assert family.kind == "strong" and [size.world for size in family.curves[0].sizes] == [4, 8]


@pytest.mark.parametrize(("seconds", "unit"), [("0.98", "sample/s"), ("31.52", "token/s"), ("", "token/s")])
def test_tokens_that_an_iteration_makes_as_many_of_as_its_batch_are_sequences(tmp_path: Path, seconds: str, unit: str) -> None:
    """The first row of CARAML's IPU table, as its script writes it: 64 / 0.98 s; of 32 tokens each they would take 31.52 s."""
    add(tmp_path, "t", "System,Devices,GlobalBatchSize,Time/Iteration(s),Tokens/second", f"GC200,4,64,{seconds},64.99")
    (record,) = Store(tmp_path / "out").records("t")
    assert (record.metrics["throughput"].value, record.metrics["throughput"].unit) == (64.99, unit)
    assert record.facts is not None and f"{record.facts.item}/s" == unit


@pytest.mark.parametrize(
    ("title", "cells", "work"),
    [
        ("", ["0", "1"], False),  # the index of pandas
        ("", ["ddp", "fsdp"], True),
        ("hostname", ["jwb12", "jwb0345"], False),
        ("hostname", ["gpu-a100", "gpu-v100"], True),
        ("jube_wp_id", ["0", "1"], False),
        ("slurm_job_id", ["7", "8"], False),
        ("Log", ["a.log", "b.log"], False),
        ("GPUs", ["1", "2"], False),
        ("world_size", ["1", "2"], False),
        ("batch_per_gpu", ["64", "32"], False),
        ("tasks", ["3", "1"], True),
        ("model_id", ["0", "1"], True),
        ("data_file", ["a", "b"], True),
    ],
)
def test_columns_that_follow_or_count_runs_do_not_split_a_family(tmp_path: Path, title: str, cells: list[str], work: bool) -> None:
    add(tmp_path, "t", f"{title},system,devices,gbs,Tokens/s", f"{cells[0]},A100,1,64,100", f"{cells[1]},A100,2,64,190")
    assert len(scaling(Store(tmp_path / "out").records("t"))) == (0 if work else 1)


def test_without_devices_what_would_follow_from_them_is_work(tmp_path: Path) -> None:
    add(tmp_path, "t", "gbs,DataParallel,Tokens/s", "64,1,100", "64,2,190")
    assert [one.point.params for one in Store(tmp_path / "out").records("t")] == [{"DataParallel": "1"}, {"DataParallel": "2"}]


def test_a_column_of_results_is_one_in_every_row(tmp_path: Path) -> None:
    """A blank or `nan` among losses was a parameter, and its row other work."""
    rows = ("A,64,100,2.5,41,BF16", "A,64,,,,bf16", "A,64,102,nan,inf,bf16", "A,64,9,x,4,")
    add(tmp_path, "t", "system,gbs,Tokens/s,Loss,MFU(%),precision", *rows)
    records = Store(tmp_path / "out").records("t")
    assert [len(work) for work in same_work(records)] == [3, 1] and all(one.point.params == {} for one in records)
    assert [one.status for one in records] == ["ok", "failed", "ok", "ok"]
    blank, nan = records[1].metrics["loss"], records[2].metrics["loss"]
    assert (blank.value, blank.reason, nan.value, nan.reason) == (None, "the table's cell is blank", None, "the table has 'nan' here")
    assert (records[2].metrics["mfu"].unit, records[2].value("mfu"), records[0].value("mfu")) == ("1", None, pytest.approx(0.41))
    assert [one.point.precision for one in records] == ["bf16", "bf16", "bf16", "not stated"]


@pytest.mark.parametrize(
    ("title", "cells", "results"),
    [
        ("layers", "12 24", {}),
        ("lr", "1e-3 1e-4", {}),
        ("commit", "abc123 1234567", {}),
        ("loss_scale", "1024 2048", {}),
        ("ModelSize(M)", "117 345", {}),
        ("max_seconds", "30 60", {}),
        ("ValLoss", "2.5 nan", {"valloss": "?"}),
        ("TFLOPs/GPU_max", "88 90", {"tflops_per_gpu_max": "?"}),
        ("epoch_time", "8 9", {"epoch_time_in_table": "?"}),
        ("layers[1]", "8 9", {}),
        *(
            (name, "8 16", {})
            for name in ("grad_acc", "z_loss", "gpu_memory_utilization", "max_power", "mean_pool", "warmup_time", "duration")
        ),
        *((name, "8 16", {name: "?"}) for name in ("power_draw", "wall_time", "gpu_util", "mem_used")),
        *((f"{name}_{unit}", "8 16", {name: unit}) for name, unit in (("step_time", "ms"), ("latency", "ms"), ("board_energy", "kWh"))),
        *((name, "8 16", {name: "TFLOP/s"}) for name in ("tflops", "mean_tflops")),
        ("peak_memory_gb", "8 16", {"peak_memory": "B"}),
        *((name, "8 16", {}) for name in ("bucket_mb", "model_b")),
        ("tokens_s", "8.5 16", {}),
        ("run_time_s", "8 16", {"run_time": "s"}),
        *((name, "8 16", {name: "?"}) for name in ("energy_consumed", "gpu_hours", "time_to_train", "val_loss_epoch_3", "ms_per_step")),
        ("duration", "8.1 16.2", {"duration": "?"}),
        *((f"{name}(s)", "8 16", {name: "s"}) for name in ("wall_time", "time_per_sequence", "duration")),
        ("Time/batch(ms)", "8 16", {"time_per_batch": "ms"}),
        ("Energy/GPUs(Wh)", "8 16", {"energy_per_gpus": "Wh"}),
        ("my figure[1]", "8 9", {}),
        *((name, "8 16", {}) for name in ("dropout(%)", "bucket(MB)", "delay(ms)", "tokens(B)")),
        *((name, "8.1 16", {"forward": unit}) for name, unit in (("forward(ms)", "ms"), ("Forward[s]", "s"))),
        *((f"x({unit})", "8 16", {"x": unit}) for unit in ("kW", "J", "GB/s", "TFLOP/s", "us/token")),
        *(
            (f"{name}(GB)", "8 9", {name: "GB"})
            for name in ("checkpoint_size", "checkpoint_file_size", "resident_set_size", "peak_memory_size", "memory_used", "bytes_written")
        ),
        *(
            (name, "8 9", {name: "?"})
            for name in ("checkpoint_size", "memory_peak", "peak_gpu_memory", "max_rss", "bytes_read", "vram_used")
        ),
        *((f"{name}(GB)", "8 9", {}) for name in ("vram_size", "memory_size", "bucket_size", "dataset_size", "file_size", "memory_limit")),
        *((name, "8 9", {}) for name in ("used_batch_size", "shard_size", "output_size", "tflops_peak", "max_memory")),
        ("file_size(GB)", "8.1 9", {"file_size": "GB"}),
        ("accuracy", "76.1% 76.3%", {"accuracy": "?"}),
        ("elapsed", "00:01:10 00:01:12", {"elapsed": "?"}),
        ("model(size)", "7B 13B", {}),
        *((name, "7 13", {}) for name in ("Model(B)", "gpu_clock(MHz)", "TDP[W]", "target_loss", "tokens_per_iter", "log_interval(s)")),
        ("avg_clock(MHz)", "8 9", {"avg_clock": "MHz"}),
        ("my_share(%)", "41% 42%", {"my_share": "%"}),
    ],
)
def test_a_column_is_a_result_if_its_name_or_its_unit_says_so(tmp_path: Path, title: str, cells: str, results: dict[str, str]) -> None:
    """A cell that looks like a number, or any unit, made a result of a column of settings, and repeats of rows that differ in it."""
    add(tmp_path, "t", f"system,gbs,Tokens/s,{title}", *(f"A100,64,100,{cell}" for cell in cells.split()))
    records = Store(tmp_path / "out").records("t")
    found = {name: metric.unit for name, metric in records[0].metrics.items() if name != "throughput"}
    assert found == results and [one.point.params for one in records] == [{} if results else {title: cell} for cell in cells.split()]


@pytest.mark.parametrize(
    ("titles", "cells", "devices", "params"),
    [
        ("node,gpus", "1,4", 4, {"node": "1"}),
        ("nodes,num_gpus", "1,4", 4, {}),
        ("nodes,gpus", "2,4", None, {"gpus": "4"}),  # of each node, or of both
        ("devices,GPUs", "8,4", 8, {"GPUs": "4"}),
        ("gpus", '"0,1"', None, {"gpus": "0,1"}),
    ],
)
def test_gpus_are_devices_where_they_can_be_nothing_else(
    tmp_path: Path, titles: str, cells: str, devices: int | None, params: dict[str, str]
) -> None:
    """A table of four GPUs was one of one device, without a word."""
    done = add(tmp_path, "t", f"{titles},mbs,tflops,energy_Wh,Tokens/s", f"{cells},8,120.5,20.1,14000", f"{cells},8,121.5,20.1,n/a")
    record, other = Store(tmp_path / "out").records("t")
    assert record.point.params == params | {"mbs": "8"} and ("assumed" in done.columns) == (devices is None)
    assert (record.point.devices, "devices" in record.unstated) == (devices or 1, devices is None)
    several = "one device of each node, as no column Devices says how many of all nodes (gpus may be those of each)"
    assert (done.columns.get("assumed") == [several]) == (cells == "2,4")
    assert (record.value("energy"), record.metrics["tflops"].unit) == (pytest.approx(20.1 * 3600), "TFLOP/s")
    assert record.value("throughput_per_device") == (devices and 14000 / devices)
    assert other.status == "ok" and "throughput_per_device" not in other.metrics


def test_a_last_letter_is_a_unit_only_where_it_can_mean_nothing_else(tmp_path: Path) -> None:
    """Two widths of images were watts, so that their rows were repeats of one work."""
    done = add(tmp_path, "t", "gbs,img_w,node_j,power_W,energy_J,Tokens/s", "16,224,1,310.5,80.5,14000", "16,448,2,311.5,81.5,14100")
    assert done.columns["parameters"] == ["img_w", "node_j"]
    assert done.columns["results"] == ["power_W = power [W]", "energy_J = energy [J]", "Tokens/s = throughput [token/s]"]
    assert len({record.key for record in Store(tmp_path / "out").records("t")}) == 2
    assert {record.point.repeat for record in Store(tmp_path / "out").records("t")} == {0}


def test_the_table_of_results_says_why_an_imported_rate_or_energy_is_missing(tmp_path: Path) -> None:
    """It had a dash, while the record had the energy of the run, and the reasons."""
    add(tmp_path, "t", "devices,gbs,Energy/Device(Wh),tflops,Tokens/s", "4,64,5.025,120.5,n/a")
    shown = CliRunner().invoke(app, ["results", "t", "--out", str(tmp_path / "out")]).stdout
    assert "– [2]" in shown and "– [3]" in shown and "[2] throughput: the table has 'n/a' here" in shown
    assert "[3] energy per item: the table has an energy (run_energy), and not how many items it was for" in shown


def test_a_row_without_a_result_says_which_columns_are_none(tmp_path: Path) -> None:
    add(tmp_path, "t", "nodes,copy,note", "1,100.5,x")
    (record,) = Store(tmp_path / "out").records("t")
    assert record.reason == "imported from t.csv: no number in its row (copy is a parameter by its name)"


def test_a_batch_of_tokens_is_no_batch_of_samples(tmp_path: Path) -> None:
    add(tmp_path, "t", "devices(GPUs),GlobalBatchSize(tokens),gbs[samples],Tokens/s", "4,65536,64,100")
    (record,) = Store(tmp_path / "out").records("t")
    assert (record.point.devices, record.point.global_batch, record.point.params) == (4, 64, {"GlobalBatchSize(tokens)": "65536"})


@pytest.mark.parametrize(
    ("titles", "cells", "words"),
    [
        ("gbs;GlobalBatchSize", "64;128", "'gbs' and 'GlobalBatchSize' mean the same, found '64' and '128'"),
        ("Tokens/s;Tokens/second", "64;65", "mean the same"),
        ("System;system", "A100;H100", "mean the same"),
        ("Energy(Wh);energy(J)", "1.39;5023", "mean the same"),
        ("Energy/Device(Wh);Energy/Device(J)", "[1.0,2.0];[3600,1]", "mean the same"),
        ("gbs;GlobalBatchSize", "1000000000;1000000001", "mean the same"),
        ("TFLOPs/GPU;achieved_flops_per_device(FLOP/s)", "100;9e13", "mean the same"),
        ("precision;Precision", "fp32;bf16", "mean the same"),
        ("precision;Precision", "fp32;32.32", ""),
        ("Energy(Wh);energy(J)", "1.39;5003", ""),
        ("Step_time_mean(ms);Step_time_mean(s)", "20.4;0.02", ""),
        ("Tokens/s;Tokens/second", "31207.2;31207", ""),
        ("Tokens/s;Tokens/second", "0e999999999;0", ""),
        ("Energy(Wh);energy(J)", "1;3600", ""),
        ("nodes;Nodes;Energy_net(J)", "1;1.0;-5", ""),
    ],
)
def test_what_cannot_be_is_refused_with_row_and_columns(tmp_path: Path, titles: str, cells: str, words: str) -> None:
    """Of two columns the last counted; cells that differ by the rounding of the coarser one are the same."""
    rows = (f"{titles};note", f"{';' * cells.count(';')};x", f"{cells};y")
    with pytest.raises(InputError, match=re.escape(words)) if words else nullcontext() as error:
        add(tmp_path, "t", *rows)
    assert not words or "t.csv: row 2 below the header" in str(error)


@pytest.mark.parametrize(
    ("title", "cell", "name"),
    [
        ("TFLOPs/GPU", "-5", "achieved_flops_per_device"),
        ("Energy/Device(Wh)", "[1,-2]", "run_energy"),
        ("Energy(Wh)", "-1", "energy"),
        ("step_time_mean", "-5", "step_time_mean_in_table"),
        ("mfu", "-1", "mfu_in_table"),
        ("EnergyFile", "e.csv", "run_energy"),
    ],
)
def test_what_is_never_below_zero_is_unknown_there(tmp_path: Path, title: str, cell: str, name: str) -> None:
    """Less than no time or energy was imported; -1 stands in tables for what is not known, beside numbers that are."""
    (tmp_path / "e.csv").write_text("pynvml:0\n-1\n")
    add(tmp_path, "t", f"devices;{title};Tokens/s", f"2;{cell};100")
    (record,) = Store(tmp_path / "out").records("t")
    found = record.metrics[name]
    assert found.value is None and "-" in (found.reason or "") and record.value("throughput") == 100
    add(tmp_path, "u", "psnr(dB);energy_net(J);Tokens/s", "-1;-5;100")
    assert Store(tmp_path / "out").records("u")[0].value("energy_net") == -5


@pytest.mark.parametrize("titles", ["Energy/Device(Wh),Energy_counter/Device(Wh)", "Energy_counter/Device(Wh),Energy/Device(Wh)"])
def test_what_jpwr_and_a_counter_say_stands_side_by_side(tmp_path: Path, titles: str) -> None:
    """The second one was lost, or stood for the first in a repeat: a mean of two meters."""
    jpwr_first = titles.startswith("Energy/")
    rows = ("2,3,4,100", "2,,4,100") if jpwr_first else ("2,4,3,100", "2,4,,100")
    add(tmp_path, "t", f"devices,{titles},Tokens/s", *rows)
    both, counter = Store(tmp_path / "out").records("t")
    assert (both.value("run_energy"), both.value("run_energy_by_energy_counter_per_device")) == (6 * 3600, 8 * 3600)
    assert (counter.value("run_energy"), counter.value("run_energy_by_energy_counter_per_device")) == (None, 8 * 3600)
    add(tmp_path, "u", "devices,Energy_counter/Device(Wh),Tokens/s", "2,4,100")
    assert Store(tmp_path / "out").records("u")[0].value("run_energy") == 8 * 3600, "no other meter in the table"


def test_a_column_of_batches_does_not_follow_from_devices_nor_one_of_ranks_from_batches(tmp_path: Path) -> None:
    add(tmp_path, "t", "system,devices,gbs,micro_batch,ranks,batch,Tokens/s", "A100,4,8,2,2,4,100", "A100,8,32,4,4,8,190")
    first = Store(tmp_path / "out").records("t")[0]
    assert first.environment["bookkeeping"] == {"micro_batch": "2"} and first.point.params == {"ranks": "2", "batch": "4"}


def test_each_row_has_the_rate_of_what_it_counts(tmp_path: Path) -> None:
    """All had the first column's, which is blank where something else is counted."""
    add(tmp_path, "t", "system,gbs,Tokens/second,Images/second", "A100,64,100,", "A100,64,,200", "A100,64,,", "A100,64,3,4")
    tokens, images, failed, both = Store(tmp_path / "out").records("t")
    assert [(one.value("throughput"), one.item) for one in (tokens, images, both)] == [(100, "token"), (200, "image"), (3, "token")]
    assert (failed.status, failed.item) == ("failed", "item") and both.value("images_per_second") == 4
    assert "none of Tokens/second, Images/second" in str(failed.metrics["throughput"].reason), "it was one of tokens"
    assert images.metrics["throughput"].unit == "image/s" and set(images.metrics) == {"throughput"}
    assert [len(work) for work in same_work([tokens, images, failed, both])] == [2, 1, 1]


@pytest.mark.parametrize(
    ("titles", "name", "value", "unit"),
    [
        ("devices,Tokens/second", "throughput", 125, "token/s"),
        ("devices,Images/second[img/s]", "throughput", 125, "image/s"),
        ("devices,Tokens/second (tok/s)", "throughput", 125, "token/s"),
        ("devices,Tokens / second", "throughput", 125, "token/s"),
        ("Tokens/s,Mean power / kW", "mean_power", 125_000, "W"),
        ("Tokens/s,Tokens / J", "tokens_per_j", 125, "?"),
        ("devices,Tokens/second(img/s)", "tokens_per_second", 125, "img/s"),
        ("devices,Tokens/second(ktokens/s)", "tokens_per_second", 125, "ktokens/s"),
        ("devices,Tokens/second(per GPU)", "tokens_per_second", 125, "per GPU"),
        ("devices,Tokens/second/GPU", "tokens_per_second_per_gpu", 125, "?"),
        ("devices,TFLOPs/GPU(TFLOP/s)", "achieved_flops_per_device", 125e12, "FLOP/s"),
        ("devices,TFLOPs/GPU(GFLOPs)", "tflops_per_gpu", 125, "GFLOPs"),
        ("Tokens/s,energy_per_item(J/token)", "energy_per_item", 125, "J/token"),
        ("Tokens/s,energy_per_item(Wh/tokens)", "energy_per_item", 450_000, "J/token"),
        ("Tokens/s,items_per_watt_hour(token/Wh)", "items_per_watt_hour", 125, "token/Wh"),
        ("Tokens/s,energy_per_item(J/image)", "energy_per_item_in_table", 125, "J/image"),
        ("Tokens/s,energy_per_item(J)", "energy_per_item_in_table", 125, "J"),
        ("Tokens/s,mean_power(W/token)", "mean_power_in_table", 125, "W/token"),
    ],
)
def test_a_column_is_caraml_s_metric_in_its_own_unit_alone(tmp_path: Path, titles: str, name: str, value: float, unit: str) -> None:
    """Thousands of tokens were taken for tokens, and one device's rate for that of all."""
    add(tmp_path, "t", f"system,{titles}", "A100,8,125")
    (record,) = Store(tmp_path / "out").records("t")
    rate = {"throughput": (8, "token/s")} if titles.startswith("Tokens/s,") else {}
    rate |= {"throughput_per_device": (value / 8, unit)} if name == "throughput" else {}
    assert {key: (metric.value, metric.unit) for key, metric in record.metrics.items()} == {name: (value, unit)} | rate


def test_weak_scaling_is_found_and_what_is_not_stated_is_said(tmp_path: Path) -> None:
    """The micro-batch, which no table says, was the global batch; and a batch of 1 was shown where none is stated."""
    add(tmp_path, "t", "system,devices,gbs,Tokens/s", "A100,1,16,100", "A100,2,32,195", "A100,4,64,380")
    records = Store(tmp_path / "out").records("t")
    assert [family.kind for family in scaling(records)] == ["weak"] and all("micro_batch" in one.unstated for one in records)
    add(tmp_path, "u", "system,nodes,Tokens/s", "A100,2,100")
    (record,) = Store(tmp_path / "out").records("u")
    assert {"devices", "global_batch", "micro_batch"} <= set(record.unstated) and record.point.label == "u 2x1"


@pytest.mark.parametrize("cell", ["1234,5", '"1,234.5"', "12 345", "1.234,5", "1'234"])
def test_a_number_with_a_comma_is_not_read_and_the_reason_is_told(tmp_path: Path, cell: str) -> None:
    """`no number in its row` hid it."""
    add(tmp_path, "t", "devices;gbs;Tokens/s;Loss", f"4;64;{cell};2,1")
    (record,) = Store(tmp_path / "out").records("t")
    text, rule = cell.strip('"'), "numbers are read with a decimal point and without separators"
    shown = ", ".join(f"{title} is {number!r}" for title, number in (("Tokens/s", text), ("Loss", "2,1")))
    assert record.status == "failed" and record.reason == f"imported from t.csv: no number in its row ({shown}; {rule})"
    assert record.metrics["throughput"].reason == f"the table has {text!r} here, and {rule}" and record.value("loss") is None


@pytest.mark.parametrize(("cells", "told"), [("1.234;2,1", "2,1"), ("1.234;1.234,5", "1.234,5"), ("1.234;1.234.567", "1.234.567")])
def test_a_point_that_may_separate_thousands_is_refused(tmp_path: Path, cells: str, told: str) -> None:
    """`1.234` beside `2,1` was read as a rate a thousand times too small."""
    with pytest.raises(InputError, match=rf"'Tokens/s' has '1.234', which may be a thousand times as much, as 'Loss' has '{told}'"):
        add(tmp_path, "t", "gpu_ids;devices;Tokens/s;Loss", f"0,1;4;{cells}")
    with pytest.raises(InputError, match=r"'Tokens/s' has '1.234', .* as 'lr' has '0,0003'"):
        add(tmp_path, "t", "lr;devices;Tokens/s", "0,0003;4;1.234")
    assert add(tmp_path, "u", "gpu_ids;devices;Tokens/s;Loss", "0,1;4;1,234;2.125").records == 1


def test_tables_of_utf_16_are_read_and_of_others_the_next_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("gbs\tTokens/s\tGröße\n64\t100\t1\n", encoding="utf-16")
    assert read_table(tmp_path / "t.csv", tmp_path / "out", None).records == 1 and rates(tmp_path, "t") == [100]
    (tmp_path / "t.csv").write_text("gbs,Größe\n64,1\n", encoding="latin-1")
    with pytest.raises(InputError, match="not a table of text") as refused:
        read_table(tmp_path / "t.csv", tmp_path / "out", None)
    assert refused.value.hint == "save it as UTF-8"


def test_what_no_table_says_is_shown_as_not_stated_and_what_it_says_as_its_own(tmp_path: Path) -> None:
    """`show` had a compilation, knobs, a seed and a policy; a row without a rate had none of its numbers in the table of results."""
    add(tmp_path, "t", "system,gbs,peak_memory(GiB),copy", "A100,64,30,5")
    shown = CliRunner().invoke(app, ["show", "t", "--out", str(tmp_path / "out")]).stdout
    for name in ("compile", "knobs", "placement", "deterministic", "seed", "mode"):
        assert re.search(rf"\n{name} +not stated *\n", shown), name
    assert re.search(r"\nall of it +not stated *\n", shown) and "source: the table t.csv" in " ".join(shown.split())
    assert re.search(r"t b64 .* 30\.0 *\n", CliRunner().invoke(app, ["results", "t", "--out", str(tmp_path / "out")]).stdout)
    (row,) = Store(tmp_path / "out").rows()
    assert "compile" in row and row["compile"] is None and row["seed"] is None


# -- what the user says ------------------------------------------------------------------------------------------------------


def test_what_columns_were_taken_for_is_told_and_the_user_may_say_otherwise(tmp_path: Path) -> None:
    lines = (
        "JobID,System,gbs,Tokens/s,copy,bucket(MB),Iterations,Images/s,Loss,empty",
        "7,A100,64,100,8.5,3,750,,nan,",
        "8,A100,64,101,8.6,3,751,,,",
    )
    done = add(tmp_path, "t", *lines)
    assert done.columns == {
        "results": ["Tokens/s = throughput [token/s]"],
        "settings": ["System", "gbs"],
        "parameters": ["copy", "bucket(MB) (if it was measured: --result)"],
        "bookkeeping": ["JobID", "Iterations"],
        "left out": ["Images/s (blank)", "Loss (the table has 'nan' here)", "empty (blank)"],
        "assumed": ["one device, as no column Devices says how many"],
    }
    with pytest.raises(InputError, match="suite 't' has rows imported with other columns") as refused:
        add(tmp_path, "t", *lines, results=["copy"])
    assert refused.value.hint == "caraml import TABLE, or --suite with another name"
    asked = add(tmp_path, "u", *lines, results=["copy", "Iterations"], parameters=["Tokens/s"]).columns
    assert asked["results"] == ["copy = copy [?]", "Iterations = iterations [?]"] and asked["parameters"][0] == "Tokens/s"
    records = Store(tmp_path / "out").records("u")
    assert [one.value("copy") for one in records] == [8.5, 8.6] and [one.point.params["Tokens/s"] for one in records] == ["100", "101"]
    assert add(tmp_path, "u", *lines, results=["copy", "Iterations"], parameters=["Tokens/s"]).known == 2
    with pytest.raises(InputError, match="suite 'u' has rows"):  # newer numbers: what is a parameter would be averaged
        add(tmp_path, "u", lines[0], "9,A100,64,102,9.5,3,750,,,", results=["copy", "Iterations"])
    with pytest.raises(InputError, match="suite 'u' has rows") as refused:
        add(tmp_path, "u", *lines)
    assert refused.value.hint == "caraml import TABLE --result copy --result Iterations --parameter Tokens/s, or --suite with another name"


@pytest.mark.parametrize(
    ("wishes", "told"),
    [
        ({"results": ["Copy_rate"]}, r"(?s)unknown column of t.csv: 'Copy_rate'.*did you mean 'copy_rate'"),
        ({"results": ["note"]}, "no cell of 'note' is a number, as of a result: found 'x'"),
        ({"results": ["copy_rate"], "parameters": ["copy_rate"]}, "asked for as result and as parameter: copy_rate"),
        ({"parameters": ["gbs"]}, "'gbs' says the global_batch of a run, and is neither a result nor a parameter"),
        ({"results": ["System"]}, "'System' says the system of a run"),
    ],
)
def test_what_columns_cannot_be_is_refused(tmp_path: Path, wishes: dict[str, list[str]], told: str) -> None:
    with pytest.raises(InputError, match=told):
        add(tmp_path, "t", "System,gbs,copy_rate,note", "A100,64,1,x", **wishes)


def test_cells_that_are_no_number_are_told_with_the_reason_and_the_mean_says_of_how_many_runs_it_is(tmp_path: Path) -> None:
    """The mean of half of the runs stood there as that of all, and an energy without devices was said by another column."""
    done = add(
        tmp_path, "t", "gbs,Energy/Device(Wh),EnergyFile,Tokens/s,Loss", *(f'64,1,x.csv,"{rate}",2' for rate in ("90", "1,010", "96"))
    )
    rate, loss = done.columns["results"]
    assert rate.startswith("Tokens/s = throughput [token/s] (1 of 3 not known: the table has '1,010' here") and loss == "Loss = loss [?]"
    energy, file = done.columns["left out"]
    assert energy == "Energy/Device(Wh) (the table gives one device's and not how many there were)" and "not beside the table" in file
    shown = " ".join(CliRunner().invoke(app, ["results", "t", "--out", str(tmp_path / "out")]).stdout.split())
    assert "[2]" in shown and "[2] throughput: mean of 2 of 3 runs" in shown


def test_a_dry_run_tells_and_adds_nothing(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("gbs,Tokens/s,copy\n64,100,8\n")
    asked = ["import", str(table), "--out", str(tmp_path / "out"), "--parameter", "Tokens/s", "--result", "copy"]
    told = CliRunner().invoke(app, [*asked, "--dry-run"]).stdout
    assert (
        told == "results: copy = copy [?]\nsettings: gbs\nparameters: Tokens/s\nassumed: one device, as no column Devices says how many\n"
        f"{tmp_path / 'out'}: 1 record would be added, 0 known already\n"
    )
    assert not (tmp_path / "out").exists()
    assert "1 record added, 0 known" in CliRunner().invoke(app, asked).stdout
    (tmp_path / "t.zip").touch()
    refused = CliRunner().invoke(app, ["import", str(tmp_path / "t.zip"), "--dry-run"]).exception
    assert "are of a table of results" in str(refused)
