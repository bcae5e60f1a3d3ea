"""Results of other programs and of other people that ask for much: each is refused by one line, or read within the limits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

import caraml
from caraml.analysis.advise import advise
from caraml.base import limits
from caraml.base.errors import InputError
from caraml.metrics.model import Metric, Phase, Window
from caraml.power.merge import merge_folder
from caraml.power.model import WindowEnergy
from caraml.report.terminal import results_table
from caraml.results import rows
from caraml.results.jube import read_table
from caraml.results.record import Record
from caraml.results.store import Store, read_record, write_record
from tests.conftest import MakePoint
from tests.security.taken import Taken, taken

# -- result tables of JUBE -------------------------------------------------------------------------------------------------


def jube(folder: Path, text: str) -> Any:
    (folder / "result.csv").write_text(text)
    return taken(lambda: read_table(folder / "result.csv", folder / "results", None))


JUBE_BOMBS = {
    "rows": ("a,b\n" + "1,2\n" * 900_000, "more than 1,000 rows or 100,000 cells"),
    "cells": (",".join(f"c{n}" for n in range(900)) + "\n" + (",".join("1" * 900) + "\n") * 500, "more than 1,000 rows or 100,000 cells"),
    "columns": (",".join(f"c{n}" for n in range(100_000)) + "\n", "found 100,000 columns, at most 1,000"),
    "bytes": ("a,b\n" + "x" * limits.JUBE, "at most 4,194,304"),
    "a long cell": ('a,b\n"' + "x" * 2_000_000, "result.csv:2: not a table of text: field larger"),
    "a batch without end": ("nodes,gbs,time\n1,1e300,1\n", "row 1 below the header"),
    "a rate that no record can hold": ("gbs,Avg_TFLOPs/GPU\n1,1\n2,1e95\n", "row 2 below the header: not a CARAML record: found 1e.?107"),
    "a list": ("a,time\n1,[" + "[2,3]," * 500_000 + "\n", "row 1 below the header: found 1,000,"),
    "a title": (f"a,time({'x' * 10_001})\n1,2\n", "10,007 characters of a title, at most 200"),
    "a system": (f"system,time\n{'x' * 10_001},2\n", "10,001 characters of a name"),
}


@pytest.mark.parametrize("name", JUBE_BOMBS)
def test_tables_of_jube_that_ask_for_much_are_refused(name: str, tmp_path: Path) -> None:
    text, words = JUBE_BOMBS[name]
    jube(tmp_path, text).refused("result.csv", words)
    assert not (tmp_path / "results").exists(), "nothing of it is taken"


@pytest.mark.parametrize("cell", ["1e151", "123456e200", "-1e100", "1e-151", "5e-324"])
def test_what_an_import_writes_can_be_read(cell: str, tmp_path: Path) -> None:
    """A hash such as ``1e151`` was taken for a number that no reader takes, and no command read the folder again."""
    found = jube(tmp_path, f"system,devices,gbs,Tokens/s,run_hash\nA100,4,64,100,5\nA100,4,128,100,{cell}\n")
    assert found.refusal is None
    records = Store(tmp_path / "results").records("result")
    assert [record.value("throughput") for record in records] == [100, 100] and cell in records[1].model_dump_json()


LONG = {
    "blanks": "a" + " " * 100_000 + "b,time\nx,1\n",
    "brackets": "[" * 100_000 + ",time\nx,1\n",
    "a list": "a,time\n1,[" + "[2,3]," * 200_000 + "\n",
}


@pytest.mark.parametrize("name", LONG)
def test_a_long_cell_takes_no_longer_than_it_is(name: str, tmp_path: Path) -> None:
    found = jube(tmp_path, LONG[name])
    found.within_limits()
    assert (found.refusal is None) == (name == "a list"), "a title is refused"


@pytest.mark.slow
def test_the_largest_table_of_jube_is_read_within_the_limits(tmp_path: Path) -> None:
    half = limits.JUBE_ROWS // 2
    found = jube(tmp_path, "tasks,time[s]\n" + "".join(f"{max(n, half)},{n}.5\n" for n in range(limits.JUBE_ROWS)))
    found.within_limits()
    assert found.refusal is None and len(list((tmp_path / "results" / "points").iterdir())) == limits.JUBE_ROWS


# -- results of `caraml power` ---------------------------------------------------------------------------------------------


def energy(folder: Path, name: str = "energy.0.json", window: dict[str, Any] | None = None, **changes: Any) -> None:
    whole = {**WindowEnergy("command", 0.0, 1.0, node="n").to_dict(), **(window or {})}
    (folder / name).write_text(json.dumps({"rank": 0, "world_size": 1, "energy": whole, **changes}))


def test_more_bytes_of_energy_than_are_read_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "energy.json").open("wb") as file:
        file.truncate(8 << 30)
    taken(lambda: merge_folder(tmp_path)).refused("energy.json", "found 8,589,934,592 bytes, at most 16,777,216")


def test_results_that_are_too_much_together_are_refused(tmp_path: Path) -> None:
    for rank in range(7):
        energy(tmp_path, f"energy.{rank}.json", rank=rank, command=["x" * 15_000_000])
    taken(lambda: merge_folder(tmp_path)).refused("energy.6.json", "bytes with the results before it, at most 100,663,296")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 10**9}, "found the world_size 1000000000, expected a number of at most 100,000"),
        ({"world_size": "x"}, "found the world_size 'x'"),
        ({"rank": [1]}, "valid integer"),
        ({"window": {"start": "x"}}, "start"),
        ({"window": {"end": 1e300}}, "which nobody measured"),
        ({"window": {"end": math.inf}}, "which nobody measured"),
        ({"window": {"end": 0.0, "boundaries": {"device": {"energy_j": 1.0, "valid": True}}}}, "found a window of 0 s"),
        ({"window": {"channels": [{"energy_j": []}] * 49_000}}, "not a result of caraml power"),
        ({"window": {"flags": [1] * 400_000}}, "not a result of caraml power"),
        ({"x": [[]] * 2_000_000}, "at most 500,000"),
        ({"x": [{}] * 60_000}, "at most 50,000"),
    ],
    ids=["ranks", "no number", "a list", "a text", "far", "infinite", "no time", "faults", "flags", "arrays", "objects"],
)
def test_results_of_power_that_ask_for_much_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    energy(tmp_path, **changes)
    taken(lambda: merge_folder(tmp_path)).refused("energy.0.json", words)


@pytest.mark.slow
def test_very_many_ranks_are_merged_within_the_limits(tmp_path: Path) -> None:
    clock = {"reference": "n0", "start": {"offset_s": 0.0, "half_width_s": 1e-6, "at": 0.0}, "end": None}
    for rank in range(8_000):
        energy(tmp_path, f"energy.{rank}.json", {"node": f"n{rank % 4_000}"}, rank=rank, clock=clock)
    found = taken(lambda: merge_folder(tmp_path))
    found.within_limits()
    assert found.refusal is None


def test_a_killed_rank_takes_nothing_from_the_others(tmp_path: Path) -> None:
    energy(tmp_path, "energy.0.json", {"start": 0.0, "end": 0.0, "node": "a"}, world_size=2)
    known = {"boundaries": {"device": {"energy_j": 7.0, "valid": True}}, "node": "b"}
    energy(tmp_path, "energy.1.json", known, rank=1, world_size=2)
    assert merge_folder(tmp_path).boundaries["device"].partial_j == 7.0


# -- results as tables -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_database_of_results_keeps_to_its_memory(tmp_path: Path, make_point: MakePoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraml.base.limits.DATABASE", 128 << 20)  # a table of more than the limit itself takes long to make
    store = Store(tmp_path)
    point = make_point()
    folder = store.new_attempt(point)
    columns = ", ".join(f"random() AS {name}" for name in ("start", "seconds", "data_wait", "loss"))
    duckdb.sql(f"COPY (SELECT i AS step, 0 AS rank, 'measure' AS phase, {columns} FROM range(4_000_000) t(i)) TO '{folder}/steps.parquet'")
    write_record(folder, Record(key=point.key, attempt=1, point=point, status="ok", started_at="x", files={"steps": "steps.parquet"}))
    found = taken(lambda: caraml.load(tmp_path).sql("SELECT count(*) FROM steps"))
    found.within_limits()
    assert found.refusal is None and found.memory < 256 << 20, f"{found.memory >> 20} MiB"


PAGE_OF = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from caraml.report.page import write_report
from caraml.results.store import Store
from tests.security import taken

taken._BACKSTOP = 1 << 46  # what draws reserves addresses that it never uses
store = Store(Path(sys.argv[1]))
print(json.dumps(asdict(taken.taken(lambda: write_report(store, store.records(), Path(sys.argv[2]), "t")))))
"""


@pytest.mark.slow
def test_the_page_of_very_many_phases_is_written_within_the_limits(tmp_path: Path, make_point: MakePoint) -> None:
    """In a process of its own: what draws has threads, and a fork of a process that has drawn before waits for them for ever."""
    store, page = Store(tmp_path / "results"), tmp_path / "page.html"
    point = make_point()
    phases = [Phase(name=f"p{n}", start=n, end=n + 1 + n % 7) for n in range(limits.PHASES)]
    write_record(store.new_attempt(point), Record(key=point.key, attempt=1, point=point, status="ok", started_at="x", phases=phases))
    command = [sys.executable, "-c", PAGE_OF, str(store.root), str(page)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=True)
    found = Taken(**json.loads(done.stdout))
    found.within_limits()
    assert found.refusal is None and "only its 200 longest phases are shown" in page.read_text()


def test_a_table_that_verify_takes_into_lists_is_bounded(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT 0.5 AS seconds, 'x' AS phase FROM range(20000000)) TO '{tmp_path}/steps.parquet'")
    taken(lambda: rows.read_table(tmp_path / "steps.parquet")).refused("steps.parquet", "20,000,000 rows, at most 500,000")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": {"throughput": {"value": 1e308, "unit": "x"}}}, "which nobody measured"),
        ({"metrics": {"throughput": {"value": 1.0, "low": 5e-324, "unit": "x"}}}, "which nobody measured"),
        ({"phases": [{"name": "run", "start": 0.0, "end": -1e308}]}, "which nobody measured"),
        ({"energy": {"name": "measure", "start": 0.0, "end": 1.0, "channels": [{"peak_w": 1e300}]}}, "which nobody measured"),
        ({"metrics": {"throughput": {"value": 1.0, "unit": "x" * 10_001}}}, "10,001 characters of a name"),
        ({"point": {"benchmark": "x" * 3_000_000}}, "characters of a name"),
    ],
    ids=["large", "small", "a phase", "a channel", "unit", "label"],
)
def test_records_of_numbers_and_names_that_nothing_can_show_are_refused(
    changes: dict[str, Any], words: str, tmp_path: Path, make_point: MakePoint
) -> None:
    """As the numbers and names of records; three megabytes of a label took two gigabytes of a page, and minutes of a table."""
    point = make_point()
    content = json.loads(Record(key=point.key, attempt=1, point=point, status="ok", started_at="x").model_dump_json())
    content["point"] |= changes.get("point", {})
    (tmp_path / "record.json").write_text(json.dumps(content | {key: value for key, value in changes.items() if key != "point"}))
    taken(lambda: read_record(tmp_path / "record.json")).refused("record.json", words)


def test_a_window_of_nothing_and_a_rate_below_nothing_are_shown(tmp_path: Path, make_point: MakePoint) -> None:
    rate = {"throughput": Metric(value=-1.0, unit="x"), "node_energy": Metric(value=1.0, unit="J")}
    points = [make_point(global_batch=size) for size in (4, 8)]
    window = Window(start=0, end=1, first_step=0, steps=0, samples=0, items=0)
    records = [Record(key=p.key, attempt=1, point=p, status="ok", started_at="x", metrics=rate, window=window) for p in points]
    assert results_table(records) and advise(records) == []


@pytest.mark.parametrize("name", ["*", "?", "[b]"])
def test_a_raw_file_whose_name_stands_for_others_is_not_read(name: str, tmp_path: Path) -> None:
    """The others may be links to anything."""
    kept = tmp_path / rows.write_table(tmp_path, "a", ["step"], [[1]])
    kept.rename(tmp_path / f"{name}.parquet")
    assert name != "[b]" or rows.read_table(tmp_path / f"{name}.parquet") == {"step": [1]}, "nothing else has this name"
    (tmp_path / "b.parquet").symlink_to(tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match="stands for other files"):
        rows.read_table(tmp_path / f"{name}.parquet")
